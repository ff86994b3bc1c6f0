"""A reader, linker and loader of relocatable ELF64 objects, as LLVM writes them for x86-64, position-independent.

All objects of one load lie in one mapping, so that 32-bit relative addresses always reach; calls to other code go
through a jump beside it. Code and constants are mapped without write permission. (System V ABI, AMD64, ch. 4)
Linked code can be stored: to load it is a copy, where reading and relocating objects takes 5 to 10 ms for a small net.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import struct
from collections.abc import Callable, Sequence

from rlx.errors import CompileError
from rlx.records import dataclass

__all__ = ["Code", "ElfImage", "ElfObject", "is_code", "is_elf", "link", "load", "read", "read_code"]

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
RELOCATION = struct.Struct("<QQq")
MACHINE_X86_64 = 62

SYMTAB, RELA, NOBITS, UNWIND = 2, 4, 8, 0x70000001
WRITE, ALLOC = 1, 2  # section flags

R_64, R_PC32, R_PLT32, R_GOTPCREL, R_PC64, R_GOTPCRELX, R_REX_GOTPCRELX = 1, 2, 4, 9, 24, 41, 42
THROUGH_TABLE = (R_GOTPCREL, R_GOTPCRELX, R_REX_GOTPCRELX)
JUMP = b"\xff\x25\x00\x00\x00\x00"  # jmp *0(%rip): to the address that follows
JUMP_BYTES = 16
CODE_MAGIC = b"rlxcode1"
PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int

    @property
    def loaded(self) -> bool:
        """Whether it takes memory; unwind tables are left out, as no generated code throws."""
        return bool(self.flags & ALLOC) and self.kind != UNWIND and self.name != ".eh_frame"


@dataclass(frozen=True)
class Symbol:
    name: str
    section: int  # 0: undefined
    local: bool  # not seen by other objects
    value: int


@dataclass(frozen=True)
class ElfObject:
    """The parts of an object that loading needs."""

    data: bytes
    machine: int
    sections: list[Section]
    symbols: list[Symbol]

    @property
    def undefined(self) -> set[str]:
        """Names of the symbols that other code must define."""
        return {symbol.name for symbol in self.symbols if symbol.section == 0 and symbol.name}


def is_elf(data: bytes) -> bool:
    return data[:4] == b"\x7fELF"


def read(data: bytes) -> ElfObject:
    """Parses an object. Raises CompileError when it is damaged."""
    try:
        header = HEADER.unpack_from(data)
        rows = [SECTION.unpack_from(data, header[6] + header[11] * i) for i in range(header[12])]
        names = rows[header[13]][4]
        sections = [Section(text(data, names + row[0]), row[1], row[2], row[4], row[5], *row[6:9]) for row in rows]
        symbols: list[Symbol] = []
        for section in sections:
            if section.kind == SYMTAB:
                strings = sections[section.link].offset
                rows_of = SYMBOL.iter_unpack(data[section.offset : section.offset + section.size])
                symbols = [Symbol(text(data, strings + row[0]), row[3], row[1] >> 4 == 0, row[4]) for row in rows_of]
        return ElfObject(data, header[2], sections, symbols)
    except (struct.error, IndexError, ValueError) as error:
        raise CompileError(f"a compiled object is damaged ({error}); delete the cached objects") from error


def text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


@dataclass(frozen=True)
class Code:
    """Linked objects, which only the address that they are loaded at is missing from. Offsets are into `image`."""

    image: bytes
    fixed: int  # bytes of code, constants and jumps, which come before all that is written to
    jumps: int  # offset of the jumps to other code, one for each of `imports`
    imports: tuple[str, ...]
    absolute: tuple[int, ...]  # offsets of 64-bit words to which the address is added
    symbols: dict[str, int]

    def to_bytes(self) -> bytes:
        """A form that `read_code` reads."""
        head = json.dumps([len(self.image), self.fixed, self.jumps, self.imports, self.absolute, self.symbols]).encode()
        return CODE_MAGIC + struct.pack("<I", len(head)) + head + self.image.rstrip(b"\0")


def is_code(data: bytes) -> bool:
    """Whether the bytes are linked code."""
    return data[: len(CODE_MAGIC)] == CODE_MAGIC


def read_code(data: bytes) -> Code:
    """The linked code of `Code.to_bytes`. Raises CompileError when it is damaged."""
    try:
        start = len(CODE_MAGIC) + 4
        (length,) = struct.unpack_from("<I", data, len(CODE_MAGIC))
        size, fixed, jumps, imports, absolute, symbols = json.loads(data[start : start + length])
        image = data[start + length :].ljust(size, b"\0")
        offsets = [fixed, jumps, jumps + JUMP_BYTES * len(imports), *symbols.values(), *(at + 8 for at in absolute)]
        if len(image) != size or not all(type(at) is int and 0 <= at <= size for at in offsets):
            raise ValueError("an offset lies outside")
        return Code(image, fixed, jumps, tuple(imports), tuple(absolute), symbols)
    except (struct.error, TypeError, ValueError, AttributeError) as error:
        raise CompileError(f"linked code is damaged ({error}); delete the file that it came from") from error


class ElfImage:
    """Loaded code: `symbols` are the addresses of what it defines; valid as long as the image lives."""

    def __init__(self, memory: mmap.mmap, symbols: dict[str, int]) -> None:
        self.memory = memory
        self.symbols = symbols


def link(objects: Sequence[ElfObject]) -> Code:
    """Puts x86-64 objects together.

    Raises CompileError for another machine, a relocation that LLVM does not emit for such code, or a symbol twice.
    """
    layout, jumps, size = place(objects)
    imports = sorted({name for obj in objects for name in obj.undefined if name != "_GLOBAL_OFFSET_TABLE_"})
    stubs = {name: jumps + JUMP_BYTES * i for i, name in enumerate(imports)}
    image = bytearray(size)
    for at in stubs.values():
        image[at : at + len(JUMP)] = JUMP
    absolute: list[int] = []
    defined: dict[str, int] = {}
    for obj, places in zip(objects, layout, strict=True):
        for index, at in places.items():
            section = obj.sections[index]
            if section.kind != NOBITS:
                image[at : at + section.size] = obj.data[section.offset : section.offset + section.size]
        absolute += relocate(image, obj, places, stubs)
        for symbol in obj.symbols:
            if not symbol.local and symbol.section in places:
                if symbol.name in defined:
                    raise CompileError(f"two loaded objects define {symbol.name!r}")
                defined[symbol.name] = places[symbol.section] + symbol.value
    fixed = jumps + round_up(JUMP_BYTES * len(stubs), PAGE)
    return Code(bytes(image), fixed, jumps, tuple(imports), tuple(absolute), defined)


def load(code: Code, resolve: Callable[[str], int]) -> ElfImage:
    """Loads linked code; `resolve` gives the address of an undefined symbol. Raises CompileError when it can't run."""
    memory = mmap.mmap(-1, len(code.image), prot=mmap.PROT_READ | mmap.PROT_WRITE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[:] = code.image
    for i, name in enumerate(code.imports):
        struct.pack_into("<Q", memory, code.jumps + JUMP_BYTES * i + len(JUMP), resolve(name))
    for at in code.absolute:
        (value,) = struct.unpack_from("<Q", memory, at)
        struct.pack_into("<Q", memory, at, (base + value) & (1 << 64) - 1)
    protect(base, code.fixed)
    return ElfImage(memory, {name: base + at for name, at in code.symbols.items()})


def place(objects: Sequence[ElfObject]) -> tuple[list[dict[int, int]], int, int]:
    """Returns the offset of each section by object, that of the jumps, and the bytes in all; writable data are last."""
    layout: list[dict[int, int]] = [{} for _ in objects]
    at = 0
    jumps = 0
    for writable in (0, WRITE):
        for obj, places in zip(objects, layout, strict=True):
            if obj.machine != MACHINE_X86_64:
                raise CompileError(
                    f"an object for ELF machine {obj.machine} can't be loaded, only {MACHINE_X86_64} (x86-64)"
                )
            for index, section in enumerate(obj.sections):
                if section.loaded and section.flags & WRITE == writable:
                    at = round_up(at, max(1, section.align))
                    places[index] = at
                    at += section.size
        if not writable:
            jumps = round_up(at, PAGE)
            at = jumps + round_up(JUMP_BYTES * sum(len(obj.undefined) for obj in objects), PAGE)
    return layout, jumps, max(PAGE, round_up(at, PAGE))


def relocate(image: bytearray, obj: ElfObject, places: dict[int, int], stubs: dict[str, int]) -> list[int]:
    """Writes the addresses that the sections of one object refer to; returns where absolute ones are."""
    absolute = []
    for section in obj.sections:
        if section.kind != RELA or section.info not in places:
            continue
        for offset, info, addend in RELOCATION.iter_unpack(obj.data[section.offset : section.offset + section.size]):
            kind, symbol = info & 0xFFFFFFFF, obj.symbols[info >> 32]
            at = places[section.info] + offset
            local = symbol.section in places
            if kind in THROUGH_TABLE and not local:
                target = stubs[symbol.name] + len(JUMP)  # the address within the jump serves as table entry
            elif kind in THROUGH_TABLE:
                raise CompileError(f"code reaches its own symbol {symbol.name!r} through a table; make that internal")
            elif local:
                target = places[symbol.section] + symbol.value
            else:
                target = stubs[symbol.name]
            value = target + addend
            if kind == R_64:
                struct.pack_into("<Q", image, at, value & (1 << 64) - 1)
                absolute.append(at)
            elif kind == R_PC64:
                struct.pack_into("<q", image, at, value - at)
            elif kind in (R_PC32, R_PLT32, *THROUGH_TABLE):
                struct.pack_into("<i", image, at, value - at)
            else:
                raise CompileError(f"the object has a relocation of unknown type {kind}")
    return absolute


def protect(base: int, size: int) -> None:
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    if size and mprotect(base, size, mmap.PROT_READ | mmap.PROT_EXEC):
        raise CompileError(
            f"the system does not let this process run generated code (mprotect: errno {ctypes.get_errno()}); "
            "allow executable memory for it or use another device"
        )


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
