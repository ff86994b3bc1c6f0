"""Encoded experts as panels of blocks: what products by groups of rows read where blocks lie along the depth.

A panel has the blocks of 16 columns, as `gemm.panels.block_formats` says, and takes what the encoding takes. They are
decoded in registers, or two panels at a time to scratch, as in other products with such weights. How a row is computed
does not depend on the rows of its group: no more of them are decoded for than fit into registers.
"""

from __future__ import annotations

import functools

from rlx.backends.cpu.gemm.panels.blocks import ENCODED, EncodedBlocks, has_code
from rlx.backends.cpu.gemm.tile import transpose
from rlx.backends.cpu.llvm.builder import Function, Module
from rlx.backends.cpu.loops.emitter import PLACEHOLDER, name_kernel
from rlx.backends.cpu.schedule.arguments import Routine
from rlx.backends.cpu.schedule.matmul import WIDTH
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import Encoding
from rlx.ir.graph import Node
from rlx.ir.shape import Size, ceildiv
from rlx.ops.experts import GroupedMatMul

__all__ = ["blocks_routine", "format_of", "panels_shape"]

F64 = DTYPES["f64"]


def format_of(node: Node, target: Target) -> EncodedBlocks | None:
    """The format of the panels of a product's weights; None where they are not encoded, or decoded before."""
    encoding, op = node.inputs[1].type.encoding, node.op
    assert isinstance(op, GroupedMatMul)
    if encoding is None or not op.transposed or node.inputs[0].dtype is F64 or not has_code(target):
        return None
    return next((found for found in ENCODED if found.encoding is encoding and node.inputs[1].shape[2] != 0), None)


def panels_shape(encoding: Encoding, experts: Size, depth: Size, columns: Size) -> tuple[Size, ...]:
    """Of the panels of all experts, in bytes."""
    assert isinstance(depth, int)
    return experts, ceildiv(columns, WIDTH), depth // encoding.block, encoding.block_bytes, WIDTH


@functools.cache
def blocks_routine(encoding: Encoding, target: Target) -> Routine:
    """Makes panels of the blocks of a matrix [n, k]: as `grouped_matmul.fetch_routine`, whose arguments it has."""
    names = ("k", "n", "row", "column", "count", "start")
    f = Function(PLACEHOLDER, [("ptr", "b"), ("ptr", "out"), *(("i64", name) for name in names)])
    size, steps = encoding.block_bytes, encoding.block
    blocks = f.div("%k", steps)
    line = f.mul(blocks, size)  # bytes of a row of the matrix, which is a column of panels
    first = f.offset("%b", f.mul(f.div("%start", steps), size))

    def panel(p: str, _: list[str]) -> None:
        source = f.offset(first, f.mul(f.mul(p, WIDTH), line))
        to = f.offset("%out", f.mul(f.mul(p, line), WIDTH))
        left = f.min(f.sub("%n", f.mul(p, WIDTH)), WIDTH)

        def whole(block: str, _: list[str]) -> None:
            own, out = f.offset(source, f.mul(block, size)), f.offset(to, f.mul(block, size * WIDTH))
            lines = [f.offset(own, f.mul(line, j)) for j in range(WIDTH)]
            for at in dict.fromkeys([*range(0, size - WIDTH + 1, WIDTH), size - WIDTH]):
                rows = [f.load(f"<{WIDTH} x i8>", f.offset(p, at)) for p in lines]
                for q, value in enumerate(transpose(f, rows)):
                    f.store(value, f.offset(out, (at + q) * WIDTH))

        def part(number: str, _: list[str]) -> None:
            """The bytes of that number in all rows."""
            out = f.offset(to, f.mul(number, WIDTH))

            def byte(j: str, _: list[str]) -> None:
                f.store(f.load("i8", f.offset(source, f.add(f.mul(line, j), number))), f.offset(out, j))

            f.loop(0, left, 1, [], byte)
            f.loop(left, WIDTH, 1, [], lambda j, _: f.store(0, f.offset(out, j), ty="i8"))

        def by_bytes() -> None:
            f.loop(0, line, 1, [], part)

        def by_vectors() -> None:
            f.loop(0, blocks, 1, [], whole)

        if size < WIDTH:
            by_bytes()
        else:
            f.if_(f.cmp("eq", left, WIDTH), by_vectors, by_bytes)

    f.loop(0, "%count", 1, [], panel)
    f.ret()
    return Routine(*name_kernel(Module([f]).text()))
