"""What a kernel reads, and which operands its results may be written over: told from its expressions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, TypeVar

from rlx.ir.graph import Node
from rlx.ir.shape import Shape
from rlx.kernels.affine import Affine, linear_index
from rlx.kernels.expr import Expr, Load, Reduce, loads, walk
from rlx.kernels.lowering import Anchor, out_vars
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import names_of, replace

__all__ = [
    "anchor_expressions",
    "expressions",
    "in_place_operands",
    "looked_up",
    "loop_kind",
    "may_overwrite",
    "read_whole",
    "reads",
    "with_anchor_expressions",
]

T = TypeVar("T")


def kept(fn: Callable[[Kernel], T]) -> Callable[[Kernel], T]:
    """`fn`, whose result is kept as long as the kernel stays as it is: each of its phases asks."""
    name = f"_{fn.__name__}"

    @functools.wraps(fn)
    def asked(kernel: Kernel) -> T:
        parts = (kernel.stores, kernel.anchor, kernel.operands, kernel.before, kernel.mark)
        found: tuple[tuple[object, ...], T] | None = kernel.__dict__.get(name)
        if found is None or not all(map(is_, found[0], parts)):
            found = kernel.__dict__[name] = parts, fn(kernel)
        return found[1]

    return asked


@kept
def loop_kind(kernel: Kernel) -> str:
    """The kind of a loop nest: row, reduce, map or copy."""
    exprs = [s.expr for s in kernel.stores]
    reduces = [x for e in exprs for x in walk(e) if isinstance(x, Reduce)]
    if reduces:
        return "row" if len(reduces) > 1 or any(type(e) is not Reduce for e in exprs) else "reduce"
    plain = all(type(e).__name__ == "Load" for e in exprs)
    return "copy" if plain else "map"


def expressions(kernel: Kernel) -> Iterator[Expr]:
    """Every expression of the kernel: operands of the anchor, stores and their indices; those of `before` too."""
    if kernel.before is not None:
        yield from expressions(kernel.before)
    if kernel.anchor is not None:
        yield from anchor_expressions(kernel.anchor)
    for store in kernel.stores:
        yield store.expr
        yield from store.index


def anchor_expressions(anchor: Anchor) -> Iterator[Expr]:
    """Every expression among the fields of an anchor."""
    return (e for e in (getattr(anchor, name) for name in names_of(anchor)) if isinstance(e, Expr))


def with_anchor_expressions(anchor: Anchor, fn: Callable[[Expr], Expr]) -> Anchor:
    """The anchor with `fn` of each of these."""
    fields = ((name, getattr(anchor, name)) for name in names_of(anchor))
    new: dict[str, Any] = {name: fn(e) for name, e in fields if isinstance(e, Expr)}
    return replace(anchor, **new)


@kept
def reads(kernel: Kernel) -> tuple[Buffer, ...]:
    """The buffers read, each once."""
    found = dict.fromkeys(load.source for e in kernel.expressions() for load in loads(e))
    for made in () if kernel.before is None else kernel.before.writes():
        del found[made]
    if kernel.anchor is not None:  # what further stores make is there before the anchor reads it
        own = {store.buffer for store in kernel.stores[1:]}
        found = {b: None for b in found if b.base not in own}
    test = None if kernel.mark is None else kernel.mark.test
    others = kernel.operands if test is None else (test,)
    return tuple(found) + tuple(b for b in dict.fromkeys(others) if b not in found)


@kept
def looked_up(kernel: Kernel) -> tuple[Buffer, ...]:
    """The buffers of which a loop nest reads only what indices in memory name, as rows of a table."""
    found: dict[Buffer, bool] = {}
    for load in (load for e in kernel.expressions() for load in loads(e)):
        named = kernel.anchor is None and any(True for at in load.indices for _ in loads(at))
        found[load.source.base] = found.get(load.source.base, True) and named
    return tuple(b for b, named in found.items() if named)


@kept
def read_whole(kernel: Kernel) -> frozenset[Buffer]:
    """The buffers it reads, but tables of which it reads rows that indices in memory name, also in an anchor."""
    every = [load for e in kernel.expressions() for load in loads(e)]
    rows = {load for load in every if any(True for at in load.indices for _ in loads(at))}
    other = {load.source.base for load in every if load not in rows} | {b.base for b in kernel.operands}
    return frozenset({b.base for b in kernel.reads()} - ({load.source.base for load in rows} - other))


def in_place_operands(kernel: Kernel) -> tuple[Buffer, ...]:
    """The buffers whose memory the single result may take over: each element is read once, where it is written.

    Loop nests only: an anchor stores sums before its epilogue reads. Elements are written once they are read.
    """
    if kernel.special is not None:
        return _overwritten(kernel, kernel.special)
    if kernel.host is not None or kernel.anchor is not None or len(kernel.stores) != 1:
        return ()
    (store,) = kernel.stores
    target = store.buffer
    if target.root is not None:
        return ()
    at = _element(store.index, store)
    found: dict[Buffer, bool] = {}
    for load in (load for e in (store.expr, *store.index) for load in loads(e)):
        found[load.source.base] = found.get(load.source.base, True) and _same_place(load, store, at)
    for load in (load for e in _repeated(store) for load in loads(e)):
        found[load.source.base] = False
    same = (b for b, fits in found.items() if fits and b.kind == "arena" and b.space == target.space)
    return tuple(b for b in same if b is not target)


def _overwritten(kernel: Kernel, node: Node) -> tuple[Buffer, ...]:
    """The operand that the op may write its result over, unless it is read through another one as well."""
    number = getattr(node.op, "overwrites", None)
    if number is None:
        return ()
    bases = [b.base for b in kernel.operands]
    base = bases[number]
    alone = base.kind == "arena" and bases.count(base) == 1 and kernel.operands[number].offset == 0
    return (base,) if alone else ()


def may_overwrite(kernel: Kernel, root: Buffer) -> bool:
    """Whether the kernel, where its results lie in the memory of `root`, reads that only as it writes it."""
    if kernel.host is not None:
        return not kernel.host.regions  # its operands are copied first
    if kernel.special is not None and root in {b.base for b in kernel.operands}:
        number = getattr(kernel.special.op, "overwrites", None)
        others = [b.base for n, b in enumerate(kernel.operands) if n != number]
        return number is not None and root not in others and kernel.operands[number].offset == 0
    if kernel.anchor is not None or len(kernel.writes()) != 1:
        return all(b.base is not root for b in kernel.reads())
    for store in kernel.stores:
        at = _element(store.index, store)
        read = [load for e in (store.expr, *store.index) for load in loads(e) if load.source.base is root]
        repeated = (load for e in _repeated(store) for load in loads(e))
        if not all(_same_place(load, store, at) for load in read) or any(x.source.base is root for x in repeated):
            return False
    return True


def _element(indices: Sequence[Expr], store: Store, shape: Shape | None = None) -> Affine:
    """The element that indices name, without the loops of the store that take one turn."""
    single = {v for v, size in zip(out_vars(len(store.extents)), store.extents, strict=True) if size == 1}
    found = linear_index(indices, store.buffer.shape if shape is None else shape)
    return Affine(found.constant, {t: c for t, c in found.coefs.items() if t not in single})


def _same_place(load: Load, store: Store, at: Affine) -> bool:
    """Whether the load reads exactly the bytes that the store at element `at` writes."""
    source, target = load.source, store.buffer
    return bool(
        load.where is None
        and source.offset == 0
        and source.dtype.bits == target.dtype.bits
        and target.dtype.bits % 8 == 0
        and at.is_linear
        and _element(load.indices, store, source.shape) == at
    )


def _repeated(store: Store) -> Iterator[Expr]:
    """What is read more than once, or not at the moment of the store: reduction bodies and indices."""
    for x in walk(store.expr):
        if isinstance(x, Reduce):
            yield x.body
        elif isinstance(x, Load):
            yield from x.indices
    yield from store.index
