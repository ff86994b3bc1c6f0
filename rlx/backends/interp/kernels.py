"""Kernels as functions that read and write the memory of the device: what another code generator emits as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlx.backends.codegen.arguments import Argument, Extents, KernelCode, Part, Pointer, Product
from rlx.backends.codegen.kernel_facts import mentioned, tested_names
from rlx.backends.codegen.walked import sizes
from rlx.backends.interp.anchors import anchor_result
from rlx.backends.interp.memory import DEVICE_MEMORY, HOST, Range, memory_at
from rlx.errors import ExecutionError
from rlx.ir.graph import Array
from rlx.ir.shape import Dim, Shape
from rlx.kernels.expr import Acc, Expr, Reduce, Var, walk
from rlx.kernels.loops.analysis import free_vars
from rlx.kernels.loops.evaluate import Evaluator
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.kernels.text import kernel_text
from rlx.records import dataclass

__all__ = ["Function", "code_of"]

CHUNK = 1 << 21  # elements that NumPy computes at once at most, as far as a grid can be cut


class Tiles(NamedTuple):
    """A grid cut into boxes: the size of a box and the number of boxes along each axis."""

    box: tuple[int, ...]
    counts: tuple[int, ...]
    chunks: int


@dataclass(eq=False)
class Grid:
    """Launch geometry of a store: boxes of its grid, small enough for what each part of the expression is computed for.

    A part of `parts` is (the axes of the grid that it depends on, the sizes of the reductions that it lies in).
    """

    extents: Shape
    parts: tuple[tuple[tuple[int, ...], Shape], ...]

    def __call__(self, extents: Extents) -> Tiles:
        shape = sizes(self.extents, extents)
        box = [max(size, 1) for size in shape]
        for axes, reduced in self.parts:
            size = math.prod(sizes(reduced, extents))
            while size * math.prod(box[d] for d in axes) > CHUNK and any(box[d] > 1 for d in axes):
                cut = next(d for d in axes if box[d] > 1)
                box[cut] = -(-box[cut] // 2)
        counts = tuple(-(-size // step) for size, step in zip(shape, box, strict=True))
        return Tiles(tuple(box), counts, math.prod(counts))

    def chunk(self, number: int, extents: Extents) -> tuple[list[int], list[int]]:
        """Where a chunk starts, and its shape."""
        box, counts, _ = self(extents)
        start = [int(i) * step for i, step in zip(np.unravel_index(number, counts), box, strict=True)]
        shape = sizes(self.extents, extents)
        return start, [min(step, size - at) for step, size, at in zip(box, shape, start, strict=True)]


def grid_of(store: Store) -> Grid:
    """The grid of a store and the parts of its expression."""
    names = out_vars(len(store.extents))
    free: dict[Expr, frozenset[Var]] = {}
    reduces = [x for x in walk(store.expr) if isinstance(x, Reduce)]
    inner = {v: size for x in reduces for v, size in zip(x.vars, x.extents, strict=True)}
    found: list[tuple[tuple[int, ...], Shape]] = [(tuple(range(len(names))), ())]
    for x in reduces:
        used = free_vars(x.body, free) | frozenset(x.vars)
        axes = tuple(d for d, v in enumerate(names) if v in used)
        found.append((axes, tuple(size for v, size in inner.items() if v in used)))
    return Grid(store.extents, tuple(found))


class Function:
    """The code of a kernel: called with its words and the number of a chunk.

    Its words are the addresses of the buffers that it touches, and then the values of the symbols in its sizes.
    """

    def __init__(self, kernel: Kernel, store: Store) -> None:
        self.kernel, self.store = kernel, store
        own = Kernel(kernel.name, (store,), kernel.anchor)
        self.buffers = tuple(dict.fromkeys((*own.reads(), store.buffer)))
        self.symbols = tuple(sorted(mentioned(own)))
        self.grid = grid_of(store)
        self.text = kernel_text(own)
        self.crosses = any(buffer.base.space == HOST for buffer in self.buffers)  # as it brings an input

    def code(self, symbol: str) -> KernelCode:
        """What the table of phases knows of it."""
        words: tuple[Argument, ...] = (*map(Pointer, self.buffers), *(Dim(name, 0) for name in self.symbols))
        chunks = Product(()) if self.kernel.anchor is not None else Part(self.grid, "chunks")
        return KernelCode(symbol, self.text, words, chunks)

    def extents(self, words: Sequence[int]) -> dict[str, int]:
        """The sizes that its words tell."""
        return dict(zip(self.symbols, words[len(self.buffers) :], strict=True))

    def touches(self, words: Sequence[int]) -> list[Range]:
        """The bytes that it reads and writes."""
        extents = self.extents(words)
        pairs = zip(self.buffers, words, strict=False)
        return [(address, address + buffer.nbytes(extents)) for buffer, address in pairs]

    def __call__(self, words: Sequence[int], chunk: int) -> None:
        extents, store, anchor = self.extents(words), self.store, self.kernel.anchor
        arrays: dict[Buffer, Array] = {}
        for buffer, address in zip(self.buffers, words, strict=False):
            memory = memory_at(address) if self.crosses else DEVICE_MEMORY
            arrays[buffer] = memory.array(address, buffer.dtype, sizes(buffer.shape, extents))
        run = Evaluator(arrays, extents)
        try:
            if anchor is None:
                start, shape = self.grid.chunk(chunk, extents)
            else:
                start, shape = [0] * len(store.extents), [*sizes(store.extents, extents)]
                acc = next((x.dtype for x in walk(store.expr) if isinstance(x, Acc)), None)
                if acc is not None:
                    run.acc = anchor_result(anchor, tuple(shape), acc, run)
            names = out_vars(len(shape))
            made = run.over(store.expr, shape, names, start)
            at = tuple(run.over(i, shape, names, start) for i in store.index)
        except ExecutionError as error:
            raise ExecutionError(f"node {tested_names(self.kernel) or self.kernel.label}: {error}") from error
        arrays[store.buffer][at] = made


def code_of(kernel: Kernel) -> list[Function]:
    """The functions of a kernel: one for each store."""
    return [Function(kernel, store) for store in kernel.stores]
