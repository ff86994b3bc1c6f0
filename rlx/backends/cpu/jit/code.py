"""Linked machine code: how it is stored, and loaded into this process.

All of one load lies in one mapping, so that 32-bit relative addresses always reach; code and constants are mapped
without write permission. To load it is a copy, where reading and relocating objects takes 5 to 10 ms for a small net.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import struct
from collections.abc import Callable

from rlx.errors import CompileError
from rlx.records import dataclass

__all__ = ["JUMP", "JUMP_BYTES", "PAGE", "Code", "LoadedCode", "is_code", "load", "read_code"]

JUMP = b"\xff\x25\x00\x00\x00\x00"  # jmp *0(%rip): to the address that follows
JUMP_BYTES = 16
MAGIC = b"rlxcode1"
PAGE = mmap.PAGESIZE


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
        return MAGIC + struct.pack("<I", len(head)) + head + self.image.rstrip(b"\0")


def is_code(data: bytes) -> bool:
    """Whether the bytes are linked code."""
    return data[: len(MAGIC)] == MAGIC


def read_code(data: bytes) -> Code:
    """The linked code of `Code.to_bytes`. Raises CompileError when it is damaged."""
    try:
        start = len(MAGIC) + 4
        (length,) = struct.unpack_from("<I", data, len(MAGIC))
        size, fixed, jumps, imports, absolute, symbols = json.loads(data[start : start + length])
        image = data[start + length :].ljust(size, b"\0")
        offsets = [fixed, jumps, jumps + JUMP_BYTES * len(imports), *symbols.values(), *(at + 8 for at in absolute)]
        if len(image) != size or not all(type(at) is int and 0 <= at <= size for at in offsets):
            raise ValueError("an offset lies outside")
        return Code(image, fixed, jumps, tuple(imports), tuple(absolute), symbols)
    except (struct.error, TypeError, ValueError, AttributeError) as error:
        raise CompileError(f"linked code is damaged ({error}); delete the file that it came from") from error


class LoadedCode:
    """Loaded code: `symbols` are the addresses of what it defines; valid as long as the image lives."""

    def __init__(self, memory: mmap.mmap, symbols: dict[str, int]) -> None:
        self.memory = memory
        self.symbols = symbols


def load(code: Code, resolve: Callable[[str], int]) -> LoadedCode:
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
    return LoadedCode(memory, {name: base + at for name, at in code.symbols.items()})


def protect(base: int, size: int) -> None:
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    if size and mprotect(base, size, mmap.PROT_READ | mmap.PROT_EXEC):
        raise CompileError(
            f"the system does not let this process run generated code (mprotect: errno {ctypes.get_errno()}); "
            "allow executable memory for it or use another device"
        )
