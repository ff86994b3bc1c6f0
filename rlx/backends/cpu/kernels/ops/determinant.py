"""Determinants: each matrix is brought into triangular form, with the largest pivots, and its diagonal multiplied."""

from __future__ import annotations

from rlx.backends.cpu.kernels.frame import Frame
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.backends.cpu.target import Target
from rlx.ir.graph import Node
from rlx.ir.shape import size_product
from rlx.kernels.lowering import accumulator
from rlx.kernels.program import Kernel

__all__ = ["accepts", "emit"]

ROWS = 64  # that are cleared between looks whether the run goes on


def accepts(node: Node) -> bool:
    """Floats that the CPU computes with."""
    dtype = node.inputs[0].dtype
    return dtype.name in convert.LLVM and dtype.is_float


def emit(kernel: Kernel, target: Target) -> list[KernelCode]:
    """A row is a matrix."""
    frame = Frame()
    f, (x,), (out,) = frame.f, kernel.operands, kernel.results
    size, wide = x.shape[-1], accumulator(x.dtype)
    real, memory = convert.llvm_type(wide), convert.memory_type(x.dtype)
    start, stop = frame.rows(size_product(x.shape[:-2]), size * size * size + 1)
    work = frame.scratch(size * size * wide.itemsize)
    n, source, result = frame.size(size), frame.pointer(x), frame.pointer(out)
    area = f.mul(n, n, "i64")

    def at(row: str, column: str) -> str:
        return f.gep(work, f.add(f.mul(row, n, "i64"), column, "i64"), real)

    def magnitude(row: str, column: str) -> str:
        return f.intrinsic("fabs", f.load(real, at(row, column)), ty=real)

    def matrix(m: str, _: list[str]) -> None:
        base = f.mul(m, area, "i64")

        def copy(i: str, _: list[str]) -> None:
            element = frame.element(source, f.add(base, i, "i64"), memory)
            frame.put(convert.convert(f, element, x.dtype, wide, 1), work, i, real)

        frame.loop(0, area, [], copy)
        (value,) = f.loop(0, n, 1, [(real, f.value(1.0, real))], column)
        frame.put(convert.convert(f, value, wide, x.dtype, 1), result, m, memory)

    def column(k: str, carried: list[str]) -> list[str]:
        """Swaps the largest element of column k up, and clears it below."""

        def larger(i: str, best: list[str]) -> list[str]:
            size = magnitude(i, k)
            more = f.cmp("gt", size, best[1], real)
            return [f.select(more, i, best[0], "i64"), f.select(more, size, best[1], real)]

        below = f.add(k, 1, "i64")
        pivot, _ = f.loop(below, n, 1, [("i64", k), (real, magnitude(k, k))], larger)

        def swap(j: str, _: list[str]) -> None:
            a, b = at(k, j), at(pivot, j)
            first, second = f.load(real, a), f.load(real, b)
            f.store(second, a)
            f.store(first, b)

        moved = f.cmp("ne", pivot, k, "i64")
        f.if_(moved, lambda: f.loop(k, n, 1, [], swap) and None)
        head = f.load(real, at(k, k))

        def clear(i: str, _: list[str]) -> None:
            factor = f.div(f.load(real, at(i, k)), head, real)
            negative = f.neg(factor)

            def one(j: str, _: list[str]) -> None:
                cell = at(i, j)
                f.store(f.fma(negative, f.load(real, at(k, j)), f.load(real, cell), ty=real), cell)

            f.loop(below, n, 1, [], one)

        f.if_(f.cmp("une", head, 0.0, real), lambda: frame.loop(below, n, [], clear, ROWS) and None)
        product = f.mul(carried[0], head, real)
        return [f.select(moved, f.neg(product), product, real)]

    f.loop(start, stop, 1, [], matrix)
    return [frame.finish()]
