"""Packs each weight once: where several kernels of `prepare` do the same with the same weights, only the first stays.

Two kernels do the same if their keys are equal. A key has the kernel's loops, expressions and layouts, and the buffers
that it reads: params, constants (the passes have merged equal ones), or what an earlier kernel of `prepare` makes. The
results of a kernel that is left out are replaced everywhere by those of the first one with its key.

Two kinds of kernels always stay: those that write only a part of a buffer, and those that pack experts, because of each
layer other experts may be in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlx.ir.literal import format_attribute
from rlx.ir.shape import Size
from rlx.kernels.expr import Expr, Load, SizeOf, loads, transform, walk
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.kernels.replaced import Replaced
from rlx.ops.experts import GroupedMatMul
from rlx.records import names_of, replace

__all__ = ["alike", "is_fixed", "is_static", "make_once", "make_once_in_run"]


def is_fixed(e: Expr) -> bool:
    """Whether `prepare` can compute it: no run changes what it reads, and no size of a run is in it."""
    return all(x.source.is_fixed for x in loads(e)) and not any(isinstance(x, SizeOf) for x in walk(e))


def is_static(e: Expr, shape: Iterable[Size]) -> bool:
    """Whether `prepare` can make a tensor of that shape of it."""
    return is_fixed(e) and all(isinstance(size, int) for size in shape)


Key = tuple[Any, ...]


def alike(program: Program, same: Mapping[Buffer, Buffer]) -> tuple[dict[Buffer, Buffer], list[Kernel]]:
    """What removed kernels would write -> what is read instead, and the kernels that stay; `same` is known already."""
    writers = Counter(b.base for kernel in program.prepare for b in kernel.writes())
    found = dict(same)
    first: dict[Key, Kernel] = {}
    kept: list[Kernel] = []
    for kernel in program.prepare:
        made = kernel.writes()
        alone = all(b.root is None and writers[b] == 1 for b in made)
        if not alone or kernel.host is not None or _is_of_experts(kernel):
            kept.append(kernel)
            continue
        earlier = first.setdefault(_key(kernel, found), kernel)
        if earlier is kernel:
            kept.append(kernel)
        else:
            found |= dict(zip(made, earlier.writes(), strict=True))
    return found, kept


def make_once(program: Program) -> None:
    """Removes every kernel of `prepare` that does what an earlier one does, and reads that one's results instead."""
    same, kept = alike(program, {})
    if same:
        program.prepare = kept
        _replace(program, same)


def make_once_in_run(program: Program, chosen: Callable[[Kernel], bool]) -> None:
    """The same for the chosen kernels of a run, between two that change what they read.

    Branches and loops are bounds too: what lies beyond one may not have run.
    """
    same: dict[Buffer, Buffer] = {}
    first: dict[Key, Kernel] = {}
    kept: list[Kernel] = []
    for kernel in program.run:
        written = {b.base for b in kernel.writes()}
        if kernel.mark is not None:
            first = {}
        elif chosen(kernel):
            earlier = first.setdefault(_key(kernel, same), kernel)
            if earlier is not kernel:
                same |= dict(zip(kernel.writes(), earlier.writes(), strict=True))
                continue
        elif written:
            first = {key: k for key, k in first.items() if written.isdisjoint(b.base for b in k.reads())}
        kept.append(kernel)
    if same:
        program.run = kept
        _replace(program, same)


def _replace(program: Program, same: dict[Buffer, Buffer]) -> None:
    """Has all kernels read other buffers in the place of some."""
    to = Replaced(same)
    program.prepare = [to.kernel(kernel) for kernel in program.prepare]
    program.run = [to.kernel(kernel) for kernel in program.run]
    program.outputs = [(name, to.buffer(b)) for name, b in program.outputs]
    program.updates = {name: to.buffer(b) for name, b in program.updates.items()}


def _is_of_experts(kernel: Kernel) -> bool:
    """Whether the kernel packs experts."""
    return kernel.special is not None and isinstance(kernel.special.op, GroupedMatMul)


def _key(kernel: Kernel, same: Mapping[Buffer, Buffer]) -> Key:
    """Everything that decides what a kernel computes; the buffers that it writes itself stand there as numbers."""
    own = {b: number for number, b in enumerate(kernel.writes())}

    def name(b: Buffer) -> Key:
        root = b.base
        form = b.shape, b.dtype, None if b.encoding is None else b.encoding.name
        return own[root] if root in own else same.get(root, root), b.offset, *form

    def named(e: Expr) -> Expr:
        return transform(e, lambda x: replace(x, source=name(x.source)) if isinstance(x, Load) else None)

    node, anchor = kernel.special, kernel.anchor
    op: Key = ()
    if node is not None:
        attributes = ((key, format_attribute(value)) for key, value in node.op.attributes().items())
        op = node.op.op_name, *attributes, *(v.type for v in (*node.inputs, *node.outputs))
    parts = () if anchor is None else tuple(getattr(anchor, field) for field in names_of(anchor))
    return (
        type(anchor).__name__,
        tuple(named(part) if isinstance(part, Expr) else part for part in parts),
        tuple((name(s.buffer), s.extents, tuple(map(named, s.index)), named(s.expr)) for s in kernel.stores),
        op,
        tuple(map(name, kernel.operands)),
        tuple(map(name, kernel.results)),
        kernel.strategy,
    )
