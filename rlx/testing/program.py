"""Runs a program of kernels with NumPy in real memory, buffer by buffer: a check of fusion and planning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx.backends.interp.anchors import anchor_result
from rlx.ir.dtype import pack
from rlx.ir.graph import Array, Node
from rlx.ir.shape import Shape, evaluate
from rlx.kernels.expr import Acc, walk
from rlx.kernels.loops.evaluate import Evaluator
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.ops.base import Op
from rlx.plan.arena import MemoryPlan
from rlx.records import dataclass, field

__all__ = ["run_program"]

POISON = 0xA5  # what memory holds before it is written


def run_program(
    program: Program,
    inputs: Mapping[str, Array],
    extents: Mapping[str, int] | None = None,
    *,
    params: Mapping[str, Array] | None = None,
    states: Mapping[str, Array] | None = None,
    plan: MemoryPlan | None = None,
) -> dict[str, Array]:
    """The outputs by name (and the updates, by the names of their states) after `prepare` and `run`.

    Encoded params are given as stored bytes. With a `plan`, arena buffers lie at its offsets in one arena and every
    element is stored before the next one is computed, first to last or last to first in turn: what overlaps by mistake
    shows. Fails (AssertionError) where a kernel reads what is not written, writes what is not its own, or stores an
    element not exactly once.
    """
    memory = _Memory(dict(extents or {}), plan)
    given: dict[str, Array] = {**(params or {}), **(states or {}), **inputs}
    for buffer in (*program.inputs, *program.params, *program.states):
        memory.place(buffer, given[buffer.name])
    for buffer in program.constants:
        assert buffer.data is not None
        memory.place(buffer, buffer.data)
    for entry, kernels in (("prepared", program.prepare), ("arena", program.run)):
        for kernel in kernels:
            memory.run(kernel, entry)
    for name, buffer in program.outputs:
        assert buffer.base in memory.written, f"output {name} is never written"
    named = [*program.outputs, *program.updates.items()]
    return {name: memory.array(buffer).copy() for name, buffer in named}


@dataclass
class _Memory:
    extents: dict[str, int]
    plan: MemoryPlan | None
    roots: dict[Buffer, Array] = field(default_factory=dict)  # stored bytes (u8)
    written: set[Buffer] = field(default_factory=set)
    arena: Array | None = None
    backwards: bool = False

    def __post_init__(self) -> None:
        if self.plan is not None:
            self.arena = np.full(self.plan.arena, POISON, np.uint8)

    def place(self, buffer: Buffer, array: Array) -> None:
        array = pack(array) if buffer.is_packed else array
        self.roots[buffer] = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
        self.written.add(buffer)

    def array(self, buffer: Buffer) -> Array:
        """The elements of a buffer (stored bytes if it is encoded) as a view of memory."""
        base = buffer.base
        if base not in self.roots:
            self.roots[base] = self.allocate(base)
        if buffer.encoding is not None:
            return self.roots[base]
        shape = self.sizes(buffer.shape)
        width = buffer.dtype.numpy.itemsize
        start = evaluate(buffer.offset, self.extents) if buffer.root is not None else 0
        stop = start + width * int(np.prod(shape, dtype=np.int64))
        assert 0 <= start <= stop <= self.roots[base].size, f"{buffer!r} lies outside of {base!r}"
        return self.roots[base][start:stop].view(buffer.dtype.numpy).reshape(shape)

    def allocate(self, base: Buffer) -> Array:
        size = base.nbytes(self.extents)
        if base.kind != "arena" or self.plan is None or self.arena is None:
            return np.full(size, POISON, np.uint8)
        start = self.plan.offsets[base]
        assert start + size <= self.arena.size, f"{base!r} lies outside of the arena"
        return self.arena[start : start + size]

    def sizes(self, shape: Shape) -> tuple[int, ...]:
        return tuple(evaluate(s, self.extents) for s in shape)

    def run(self, kernel: Kernel, entry: str) -> None:
        for buffer in kernel.reads():
            assert buffer.base in self.written, f"{kernel.name} reads {buffer!r}, which is not written"
            assert entry == "arena" or buffer.base.kind in ("param", "const", "prepared"), f"prepare reads {buffer!r}"
        for buffer in kernel.writes():
            if buffer.base.kind == "state" and entry == "arena":
                continue
            buffer = buffer.base if buffer.base.dtype.bits < 8 else buffer  # of which the bytes are written
            assert buffer.kind == entry, f"{kernel.name} writes {buffer!r} ({buffer.kind})"
            assert buffer.root is None
            assert buffer not in self.written, f"{buffer!r} is written twice"
        with np.errstate(all="ignore"):
            node = kernel.host or kernel.special
            if node is not None:
                self.whole(kernel, node)
            else:
                self.stores(kernel)
        self.written.update(b.base if b.base.dtype.bits < 8 else b for b in kernel.writes())

    def whole(self, kernel: Kernel, node: Node) -> None:
        """A host call, or a device's own kernel for a node."""
        op = node.op
        assert isinstance(op, Op)
        found = op.at(self.extents).reference(*(self.array(b).copy() for b in kernel.operands))
        results = found if isinstance(found, tuple) else (found,)
        for buffer, result in zip(kernel.results, results, strict=True):
            self.array(buffer)[...] = result

    def stores(self, kernel: Kernel) -> None:
        covered = {b: np.zeros(self.sizes(b.shape), np.int64) for b in kernel.writes()}
        arrays: Any = {b: self.array(b) for b in kernel.reads()}
        for store in kernel.stores:
            shape = self.sizes(store.extents)
            evaluator = Evaluator(arrays, self.extents)
            assert store.expr.dtype is store.buffer.dtype, f"{kernel.name}: {store.expr.dtype} in {store.buffer!r}"
            if kernel.anchor is not None:
                acc = next(x for x in walk(store.expr) if isinstance(x, Acc))
                evaluator.acc = anchor_result(kernel.anchor, shape, acc.dtype, evaluator)
                # An anchor stores sums before its epilogue reads.
                self.array(store.buffer).reshape(-1).view(np.uint8)[...] = POISON
            if self.plan is not None:
                self.store_each(store, shape, evaluator, covered[store.buffer])
                continue
            at = self.index(store, evaluator, shape)
            self.array(store.buffer)[at] = evaluator.over(store.expr, shape, out_vars(len(shape)))
            np.add.at(covered[store.buffer], at, 1)
        for buffer, times in covered.items():
            if buffer.base.kind == "state":  # it may be a part that is written
                assert (times <= 1).all(), f"{kernel.name} stores an element of {buffer!r} twice"
                continue
            assert (times == 1).all(), f"{kernel.name} does not store each element of {buffer!r} exactly once"

    def index(self, store: Store, evaluator: Evaluator, shape: tuple[int, ...]) -> tuple[Array, ...]:
        return tuple(evaluator.over(i, shape, out_vars(len(shape))) for i in store.index)

    def store_each(self, store: Store, shape: tuple[int, ...], evaluator: Evaluator, covered: Array) -> None:
        """Element by element, as a code generator does it, so that a store is seen by every later load."""
        rank = len(shape)
        target, acc = self.array(store.buffer), evaluator.acc
        points = list(np.ndindex(shape))
        self.backwards = not self.backwards
        for point in reversed(points) if self.backwards else points:
            env = {v: np.full((1,) * rank, i, np.int64) for v, i in zip(out_vars(rank), point, strict=True)}
            evaluator.acc = None if acc is None else acc[point].reshape((1,) * rank)

            at = tuple(int(evaluator.value(i, env, rank, {}).reshape(())) for i in store.index)
            target[at] = evaluator.value(store.expr, env, rank, {}).reshape(())
            covered[at] += 1
