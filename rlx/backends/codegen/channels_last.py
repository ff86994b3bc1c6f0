"""Channels last: the images between convolutions are stored as [N, *spatial, C] instead of [N, C, *spatial].

Kernels name elements by one index an axis, so a buffer changes its layout by having its axes, and the indices of all
that read or write it, in another order. It is done for the whole program: what a convolution reads or writes, and what
is computed from or into such images channel by channel. Inputs, outputs, states and what is seen through a view that
joins channels with pixels keep their layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rlx.ir.shape import Shape, Size, numel
from rlx.kernels.accesses import with_anchor_expressions
from rlx.kernels.affine import affine
from rlx.kernels.expr import Expr, Load, Var, loads, substitute_vars, transform
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.records import dataclass, replace

__all__ = ["Choice", "channels_last"]

T = TypeVar("T")

SHORT = 8  # pixels of a row that are fewer than a vector holds


@dataclass(frozen=True, eq=False)
class Choice:
    """What a device wants: `is_product` says of a convolution that it is as good with planes, `has_planes` that its
    image should stay in planes; `weights`: those that `prepare` makes have their channels last too."""

    is_product: Callable[[Kernel], bool] = lambda kernel: False
    has_planes: Callable[[Conv], bool] = lambda anchor: False
    weights: bool = False


def channels_last(program: Program, choice: Choice) -> None:
    """Changes the layout of images in place of the program's kernels."""
    kernels = [*program.prepare, *program.run]
    if not any(isinstance(k.anchor, Conv) for k in kernels):
        return
    chosen = _chosen(kernels, _fit(program), choice)
    if not chosen:
        return
    made: dict[Buffer, _Turned] = {}
    for b in dict.fromkeys(program.touched()):
        if b.base in chosen:
            root = made.setdefault(b.base, _turned(b.base, None))
            if b is not b.base:
                made[b] = _turned(b, root.buffer)
    program.prepare = [_rewritten(k, made) for k in program.prepare]
    program.run = [_rewritten(k, made) for k in program.run]


def _fit(program: Program) -> set[Buffer]:
    """The buffers that may change their layout."""
    found: dict[Buffer, bool] = {}
    for b in program.touched():
        root = b.base
        whole = root.kind == "arena" and len(root.shape) > 2 and any(s != 1 for s in root.shape[2:])
        kept = whole and b.offset == 0 and b.dtype is root.dtype and _order(b, root) is not None
        found[root] = found.get(root, True) and kept and whole
    fixed = [b for _, b in program.outputs] + list(program.updates.values())
    for k in (*program.prepare, *program.run):
        fixed += [*k.operands, *k.results]
    for b in fixed:
        found[b.base] = False
    return {b for b, fits in found.items() if fits}


def _chosen(kernels: Sequence[Kernel], fit: set[Buffer], choice: Choice) -> set[Buffer]:
    """Those next to convolutions, and those that are computed channel by channel next to chosen ones.

    A convolution that is a product where planes are is such a computation itself.
    """
    chosen: set[Buffer] = set()
    links = [(a.base, b.base) for k in kernels for store in k.stores for a, b in _links(store)]
    for k in kernels:
        if isinstance(k.anchor, Conv):
            made, read = k.stores[0].buffer.base, [x.source.base for x in loads(k.anchor.x)]
            if choice.is_product(k):  # it is as good with planes, if both are
                links += [(made, b) for b in read]
                continue
            chosen.update(b for b in (made, *([] if choice.has_planes(k.anchor) else read)) if b in fit)
    grown = True
    while grown:
        new = {b for link in links if any(x in chosen for x in link) for b in link if b in fit} - chosen
        chosen |= new
        grown = bool(new)
    return chosen | _weights(kernels, chosen) if choice.weights else chosen


def _weights(kernels: Sequence[Kernel], chosen: set[Buffer]) -> set[Buffer]:
    """Prepared weights that only convolutions of chosen images read, as they are."""
    found: dict[Buffer, bool] = {}
    for k in kernels:
        own = k.anchor.w if isinstance(k.anchor, Conv) and isinstance(k.anchor.w, Load) else None
        images = {x.source.base for x in loads(k.anchor.x)} if isinstance(k.anchor, Conv) else set()
        for e in k.expressions():
            for x in loads(e):
                root = x.source.base
                fits = x is own and x.source is root and root.kind == "prepared" and bool(images & chosen)
                found[root] = found.get(root, True) and fits and len(root.shape) > 2
        for b in (*k.operands, *k.results):
            found[b.base] = False
    return {b for b, fits in found.items() if fits}


def _links(store: Store) -> Iterator[tuple[Buffer, Buffer]]:
    """What is written, with each image read whose channels are its channels and whose pixels are its pixels."""
    if len(store.index) < 3:
        return
    axes = [_lone_var(i) for i in store.index]
    for load in loads(store.expr):
        viewed = load.source.shape[1:2] == (1,) != load.source.base.shape[1:2]  # its channels are another axis
        if len(load.indices) == len(store.index) and not viewed:
            read = [affine(i).coefs for i in load.indices]
            if axes[1] in read[1] and any(v is not None and v in c for v, c in zip(axes[2:], read[2:], strict=True)):
                yield store.buffer, load.source


def _lone_var(e: Expr) -> Expr | None:
    coefs = affine(e).coefs
    return next(iter(coefs)) if len(coefs) == 1 else None


def _order(b: Buffer, root: Buffer) -> tuple[int, ...] | None:
    """The axes of a buffer or view with those of the channels at the end; None where it joins them with others."""
    ends: list[int] = []
    at = 0
    for size in (root.shape[0], root.shape[1]):
        while at < len(b.shape) and numel(b.shape[(ends or [0])[-1] : at]) != size:
            at += 1
        ends.append(at)
    first, last = ends
    if numel(b.shape[first:last]) != root.shape[1] or numel(b.shape[last:]) != numel(root.shape[2:]):
        return None
    return (*range(first), *range(last, len(b.shape)), *range(first, last))


@dataclass(frozen=True)
class _Turned:
    """A buffer with channels last, and the order that its axes were put in."""

    buffer: Buffer
    order: tuple[int, ...]

    def last(self, items: Sequence[T]) -> tuple[T, ...]:
        return tuple(items[d] for d in self.order)


def _turned(b: Buffer, root: Buffer | None) -> _Turned:
    order = (*range(1, len(b.shape)), 0) if b.kind == "prepared" and b.shape[1] == 1 else _order(b, b.base)
    assert order is not None
    shape = tuple(b.shape[d] for d in order)
    return _Turned(replace(b, shape=shape, root=root), order)


def _rewritten(kernel: Kernel, made: dict[Buffer, _Turned]) -> Kernel:
    """The kernel on the new buffers."""
    if not any(b in made for b in (*kernel.reads(), *kernel.writes())):
        return kernel

    def turn(x: Expr) -> Expr | None:
        if isinstance(x, Load) and x.source in made:
            turned = made[x.source]
            return replace(x, source=turned.buffer, indices=turned.last(x.indices))
        return None

    def new(e: Expr) -> Expr:
        return transform(e, turn)

    stores = tuple(_store(s, made, new, reorder=kernel.anchor is None) for s in kernel.stores)
    anchor = None if kernel.anchor is None else with_anchor_expressions(kernel.anchor, new)
    return replace(kernel, stores=stores, anchor=anchor)


def _store(store: Store, made: dict[Buffer, _Turned], new: Callable[[Expr], Expr], *, reorder: bool) -> Store:
    index = tuple(new(i) for i in store.index)
    expr = new(store.expr)
    buffer, names = store.buffer, out_vars(len(store.extents))
    channel: Var | None = None
    if buffer in made:
        turned = made[buffer]
        buffer, index = turned.buffer, turned.last(index)
        channel = next((t for t in affine(index[-1]).coefs if isinstance(t, Var)), None)
    elif len(names) > 2 and expr is not store.expr and _is_short(store.extents[-1]):
        channel = names[1]  # too few pixels for a vector: it runs along the channels, whose results are far apart
    if not reorder or channel is None or channel not in names:
        return Store(buffer, store.extents, index, expr)
    order = [v for v in names if v != channel] + [channel]
    renamed: dict[Var, Expr] = dict(zip(order, names, strict=True))
    extents: Shape = tuple(store.extents[names.index(v)] for v in order)
    return Store(buffer, extents, tuple(substitute_vars(i, renamed) for i in index), substitute_vars(expr, renamed))


def _is_short(size: Size) -> bool:
    return isinstance(size, int) and size < SHORT
