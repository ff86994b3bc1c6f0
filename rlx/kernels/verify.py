"""The verifier of programs: what must hold of memory spaces once kernels have their devices."""

from __future__ import annotations

from rlx.errors import CompileError
from rlx.kernels.program import Buffer, Kernel, Program

__all__ = ["verify_program"]


def verify_program(program: Program) -> None:
    """Raises `CompileError`, naming kernel and buffer, unless every kernel touches memory of its own device only.

    Only a kernel of kind "copy" may read or write another space, and it must be of one of the two devices.
    """
    for kernel in (*program.prepare, *program.run):
        touched = (*kernel.reads(), *kernel.writes())
        away = [b for b in touched if b.base.space != kernel.device]
        if not away:
            continue
        if kernel.kind != "copy":
            raise _fail(program, kernel, f"reads or writes {_of(away[0])}: copy it first, by a kernel of kind copy")
        if len(away) == len(touched):
            raise _fail(program, kernel, f"copies {_of(away[0])}, and nothing of its own memory")


def _of(buffer: Buffer) -> str:
    return f"{buffer.name!r} in the memory of {buffer.base.space or 'the device of the program'}"


def _fail(program: Program, kernel: Kernel, what: str) -> CompileError:
    where = kernel.device or "the device of the program"
    return CompileError(f"invalid program {program.name!r}: kernel {kernel.name!r} ({kernel.label}) on {where} {what}")
