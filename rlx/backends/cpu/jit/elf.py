"""A reader and linker of relocatable ELF64 objects, as LLVM writes them for x86-64, position-independent.

Calls to other code go through a jump beside it. (System V ABI, AMD64, ch. 4)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from rlx.backends.cpu.jit.code import JUMP, JUMP_BYTES, PAGE, Code
from rlx.errors import CompileError
from rlx.records import dataclass

__all__ = ["ElfObject", "link", "read"]

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
RELOCATION = struct.Struct("<QQq")
MACHINE_X86_64 = 62

SYMTAB, RELA, NOBITS, UNWIND = 2, 4, 8, 0x70000001
WRITE, ALLOC = 1, 2  # section flags

R_64, R_PC32, R_PLT32, R_GOTPCREL, R_PC64, R_GOTPCRELX, R_REX_GOTPCRELX = 1, 2, 4, 9, 24, 41, 42
THROUGH_TABLE = (R_GOTPCREL, R_GOTPCRELX, R_REX_GOTPCRELX)


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


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
