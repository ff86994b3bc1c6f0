"""Packs each weight once: where several kernels of `prepare` do the same with the same weights, only the first stays.

Two kernels do the same if their keys are equal. A key has the kernel's loops, expressions and layouts, and the buffers
that it reads: params, constants (the passes have merged equal ones), or what an earlier kernel of `prepare` makes. The
results of a kernel that is left out are replaced everywhere by those of the first one with its key.

Two kinds of kernels always stay: those that write only a part of a buffer, and those that pack experts, because of each
layer other experts may be in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rlx.ir.literal import format_attribute
from rlx.ir.shape import Dim, Size, Symbol, symbols
from rlx.kernels.accesses import with_anchor_expressions
from rlx.kernels.expr import Expr, Load, SizeOf, loads, transform, walk
from rlx.kernels.program import Buffer, Kernel, Program, Store, loop_spans
from rlx.ops.experts import GroupedMatMul
from rlx.records import names_of, replace

__all__ = [
    "Replaced",
    "alike",
    "before_loops",
    "is_fixed",
    "is_static",
    "kept_leaves",
    "make_once",
    "make_once_in_run",
    "origins",
]


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


def kept_leaves(program: Program) -> set[Buffer]:
    """The params and constants that stay after packing: runs read them, or a packed buffer comes from several params.

    Those must be there when one of the others is set again.
    """
    kept = {b.base for kernel in program.run for b in kernel.reads() if b.base.kind in ("param", "const")}
    kept |= {b.base for _, b in program.outputs if b.base.kind in ("param", "const")}
    for _, own in origins(program):
        if len(own) > 1:
            kept |= own
    return kept


def origins(program: Program) -> Iterator[tuple[Kernel, set[Buffer]]]:
    """Each kernel of `prepare` with the params that it reads, or that what it reads was made of."""
    sources: dict[Buffer, set[Buffer]] = {}
    for kernel in program.prepare:
        own: set[Buffer] = set()
        for b in kernel.reads():
            own |= {b.base} if b.base.kind == "param" else sources.get(b.base, set())
        for b in kernel.writes():
            sources.setdefault(b.base, set()).update(own)
        yield kernel, own


def before_loops(program: Program, chosen: Callable[[Kernel], bool]) -> None:
    """Moves the chosen kernels out of loops that change nothing of what they read: they run once before them.

    They must be free of effects: where a loop has no round, or a branch in it is not taken, they run for nothing.
    """
    for first, last in loop_spans(program.run):
        body = program.run[first : last + 1]
        mark = body[0].mark
        assert mark is not None
        written = {b.base for kernel in body for b in kernel.writes()}
        writers = Counter(b.base for kernel in program.run for b in kernel.writes())
        moved: list[Kernel] = []
        for kernel in body:
            fixed = written.isdisjoint(b.base for b in kernel.reads())
            alone = all(b.root is None and writers[b] == 1 for b in kernel.writes())
            if fixed and alone and chosen(kernel) and not _changes_by(kernel, mark.flow.round):
                moved.append(kernel)
                written.difference_update(kernel.writes())
        kept = [kernel for kernel in body if kernel not in moved]
        program.run[first : last + 1] = [*moved, *kept]


def _changes_by(kernel: Kernel, round_: Symbol | None) -> bool:
    """Whether a size or an offset of a kernel depends on the number of the round."""
    sizes: list[Size] = [size for b in (*kernel.reads(), *kernel.writes()) for size in (*b.shape, b.offset)]
    sizes += [size for store in kernel.stores for size in store.extents]
    for e in kernel.expressions():
        sizes += [x.size for x in walk(e) if isinstance(x, SizeOf)]
    return any(s is round_ or s == round_ for size in sizes if isinstance(size, Dim) for s in symbols(size))


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


class Replaced:
    """Puts other buffers in the place of some, in kernels, expressions and views."""

    def __init__(self, same: Mapping[Buffer, Buffer]) -> None:
        self.same = same
        self.views: dict[Buffer, Buffer] = {}

    def buffer(self, b: Buffer) -> Buffer:
        """What stands for a buffer or a view."""
        if b.base not in self.same:
            return b
        if b.root is None:
            return self.same[b]
        if b not in self.views:
            self.views[b] = replace(b, root=self.same[b.root])
        return self.views[b]

    def kernel(self, kernel: Kernel, written: bool = False) -> Kernel:
        """The kernel, reading other buffers; `written`: it writes others, too."""
        if not written and not any(b.base in self.same for b in kernel.reads()):
            return kernel
        anchor = kernel.anchor
        if anchor is not None:
            anchor = with_anchor_expressions(anchor, self.expr)
        target = self.buffer if written else lambda b: b
        stores = tuple(
            Store(target(s.buffer), s.extents, tuple(map(self.expr, s.index)), self.expr(s.expr)) for s in kernel.stores
        )
        operands = tuple(map(self.buffer, kernel.operands))
        mark = kernel.mark
        if mark is not None and mark.test is not None:
            mark = replace(mark, test=self.buffer(mark.test))
        results = tuple(map(target, kernel.results))
        before = None if kernel.before is None else self.kernel(kernel.before)
        return replace(
            kernel, anchor=anchor, stores=stores, operands=operands, results=results, mark=mark, before=before
        )

    def expr(self, e: Expr) -> Expr:
        """The expression with other sources of its loads."""

        def new(x: Expr) -> Expr | None:
            if isinstance(x, Load) and x.source.base in self.same:
                return replace(x, source=self.buffer(x.source))
            return None

        return transform(e, new)
