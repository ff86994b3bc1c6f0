"""The frame of a kernel written for one op: its function, its words, its errors, and what it is called with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu.llvm.builder import Function, Module, Operand, Typed
from rlx.backends.cpu.loops.emitter import ARGS, PLACEHOLDER, STATUS, name_kernel, report
from rlx.backends.cpu.loops.looks import TURNS, looking_loop
from rlx.backends.cpu.schedule.arguments import (
    Argument,
    ArgumentTable,
    Computed,
    Extents,
    KernelCode,
    Part,
    Pointer,
    Product,
    Scratch,
    ScratchStride,
    once,
    part,
)
from rlx.backends.cpu.schedule.base import LineParts, RowParts, RowSchedule
from rlx.ir.dtype import DType
from rlx.ir.shape import Size, size_product
from rlx.kernels.program import Buffer

__all__ = ["Frame", "bits_type"]


def bits_type(dtype: DType) -> str:
    """The LLVM integer type that holds an element as it is in memory, of any type."""
    return f"i{8 * dtype.numpy.itemsize}"


class Frame:
    """One function under construction, with the numbers and addresses that it gets.

    `size` and `pointer` give SSA values loaded at the entry. Work is `rows(count, cost)`: the function is called for
    chunks of `count` rows that take `cost` steps each, whatever the number of threads.
    """

    def __init__(self) -> None:
        self.f = Function(PLACEHOLDER, ARGS)
        self.table = ArgumentTable()
        self.loaded: dict[object, str] = {}
        self.sites: list[str] = []
        self.scratch_bytes: Size | Computed = 0
        self.chunks: Callable[[Extents], int] = Product(())

    def word(self, word: Argument) -> str:
        """A word of the kernel, loaded in the entry block."""
        if word not in self.loaded:
            self.loaded[word] = self.f.in_entry(lambda: self.table.load(self.f, word))
        return self.loaded[word]

    def size(self, size: Size) -> str:
        """A size as an i64."""
        return str(size) if isinstance(size, int) and abs(size) <= 1 else self.word(size)

    def product(self, sizes: Sequence[Size]) -> str:
        """The product of sizes as an i64."""
        return self.size(size_product(tuple(sizes)))

    def pointer(self, buffer: Buffer) -> str:
        """The address of a buffer's first element."""
        return self.word(Pointer(buffer))

    def rows(self, count: Size, cost: Size) -> tuple[str, str]:
        """The first row of this call's chunk and the row after its last."""
        return self.rows_of(once(RowSchedule(count, cost)), count)

    def rows_of(self, cut: Callable[[Extents], RowParts | LineParts], count: Size | Computed) -> tuple[str, str]:
        """The same for rows that are cut in another way."""
        self.chunks = Part(cut, "chunks")
        step = self.word(part(cut, "step"))
        start = self.f.mul("%chunk", step, "i64")
        return start, self.f.min(self.f.add(start, step, "i64"), self.word(count), "i64")

    def scratch(self, size: Size | Computed) -> str:
        """The address of this worker's working memory, of `size` bytes."""
        self.scratch_bytes = size
        own = self.f.mul("%worker", self.word(ScratchStride()), "i64")
        return self.f.offset(self.word(Scratch()), own)

    def fail(self, kind: str, value: str) -> None:
        """Stops the run with an error of that kind, showing an i64; the function goes on."""
        report(self.f, STATUS[kind] | len(self.sites) << 8, value)
        self.sites.append(kind)

    def fail_unless(self, ok: str, kind: str, value: str) -> None:
        """Like `fail`, where the test does not hold."""
        self.f.if_(self.f.xor(ok, 1, "i1"), lambda: self.fail(kind, value))

    def axis_index(self, raw: str, size: str) -> str:
        """An i64 index that may be negative, made safe: -1 after an error where it is outside 0 <= i < size."""
        f = self.f
        at = f.select(f.cmp("lt", raw, 0, "i64"), f.add(raw, size, "i64"), raw, "i64")
        ok = f.cmp("ult", at, size, "i64")
        self.fail_unless(ok, "index", raw)
        return f.select(ok, at, -1, "i64")

    def loop(
        self,
        start: Operand,
        stop: Operand,
        carried: Sequence[Typed],
        body: Callable[[str, list[str]], Sequence[Operand] | None],
        turns: int = TURNS,
    ) -> list[str]:
        """A loop by 1 that may be long: after so many turns it looks whether the run goes on."""
        return looking_loop(self.f, start, stop, 1, carried, body, turns)

    def element(self, base: str, index: Operand, ty: str) -> str:
        """Loads element `index` of type `ty`."""
        return self.f.load(ty, self.f.gep(base, index, ty))

    def clear(self, p: str, count: Operand) -> None:
        """Sets `count` bytes from p on to 0."""
        self.f.declare("llvm.memset.p0.i64", "void", ["ptr", "i8", "i64", "i1"])
        self.f.do(f"call void @llvm.memset.p0.i64(ptr {p}, i8 0, i64 {count}, i1 false)")

    def put(self, value: Operand, base: str, index: Operand, ty: str) -> None:
        """Stores element `index` of type `ty`."""
        self.f.store(value, self.f.gep(base, index, ty), ty=ty)

    def finish(self, *, optimize: bool = True) -> KernelCode:
        """The kernel."""
        self.f.ret()
        symbol, ir = name_kernel(Module([self.f]).text())
        return KernelCode(
            symbol,
            ir,
            tuple(self.table.words),
            self.chunks,
            tuple(self.sites),
            self.scratch_bytes,
            optimize,
        )
