"""Operands of products with a precision of 16 bits are stored in it, by who makes them: products then read half the
bytes, as the copy engine needs them, and round nothing themselves.

Rounding is the product's first step (design, section 7), so the results are the same bits. What only products read is
stored in 16 bits alone; what others read too is stored twice, by one kernel. Weights are rounded by `prepare`, and
inputs by a kernel of their own where a product is large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.backends.cuda.text.products import multiplied_as, operands
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Size, exact_div, numel, upper
from rlx.kernels.expr import Acc, Cast, Load, const, loads, walk
from rlx.kernels.lowering import Attention, Contract, Conv, out_vars
from rlx.kernels.prepared import is_static
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.records import replace

__all__ = ["store_narrow"]

NONE = const(0.0, DTYPES["f32"])  # in the place of an operand
LARGE = 1 << 24  # pairs that a product multiplies, from which on an input is rounded before


def store_narrow(program: Program, precision: str) -> None:
    """Changes the kernels of a program in place, for a precision of 16 bits."""
    if precision not in ("bf16", "f16"):
        return
    to = DTYPES[precision]
    for kernel in program.run:
        weights_ahead(kernel, program, to)
    found = Found(program, to)
    roots = [root for root in found.narrow if found.may(root)]
    made: dict[Buffer, Buffer] = {}
    for root in roots:
        made[root] = replace(root, name=f"{root.name}.{precision}", kind="arena", dtype=to, data=None)
        if root.is_fixed:
            made[root].kind = "prepared"
    for root in roots:
        if root.is_fixed or root.kind == "input":
            whole = Kernel(f"{root.name}.{precision}", (rounding(root, made[root]),))
            (program.prepare.append(whole) if root.is_fixed else program.run.insert(0, whole))
    only = {root for root in roots if root.kind == "arena" and root not in found.others}
    program.run = [rewritten(kernel, made, only, to) for kernel in program.run]


class Found:
    """What products of a program multiply in 16 bits, and who else reads it."""

    def __init__(self, program: Program, to: DType) -> None:
        self.to = to
        self.narrow: dict[Buffer, bool] = {}  # f32 that products read -> whether one of them is large
        self.others: set[Buffer] = set()  # what is read otherwise, too
        self.wide: set[Buffer] = set()  # what can't be stored twice
        kept = [b for _, b in program.outputs] + list(program.updates.values()) + list(program.copied.values())
        self.others.update(b.base for b in kept)
        for kernel in (*program.prepare, *program.run):
            self.take(kernel)
        for b in program.touched():
            half = exact_div(b.offset, 2)
            if b.dtype.name != "f32" or half is None:
                self.wide.add(b.base)

    def take(self, kernel: Kernel) -> None:
        own = narrow_operands(kernel, self.to)
        large = pairs(kernel) >= LARGE
        for e in own.values():
            root = e.source.base
            self.narrow[root] = self.narrow.get(root, False) or large
        rest = with_operands(kernel, dict.fromkeys(own, NONE))
        self.others.update(x.source.base for e in rest.expressions() for x in loads(e))
        self.others.update(b.base for b in kernel.operands)
        self.wide.update(b.base for b in kernel.results)
        if kernel.mark is not None and kernel.mark.test is not None:
            self.others.add(kernel.mark.test.base)

    def may(self, root: Buffer) -> bool:
        """Whether it can be stored in 16 bits as well."""
        if root in self.wide or root.encoding is not None or root.space:
            return False
        if root.kind == "input":
            return self.narrow[root]
        return root.kind == "arena" or (root.is_fixed and all(isinstance(s, int) for s in root.shape))


def weights_ahead(kernel: Kernel, program: Program, to: DType) -> None:
    """Weights of a convolution that are computed from what no run changes are made by `prepare`."""
    anchor = kernel.anchor
    if not isinstance(anchor, Conv) or isinstance(anchor.w, Load) or not is_static(anchor.w, anchor.w_shape):
        return
    if multiplied_as(anchor, DTYPES["f32"], to.name) is not to or kernel.stores[0].buffer.dtype.bits > 32:
        return
    made = Buffer(f"{kernel.name}.{to.name}", "prepared", anchor.w_shape, to)
    at = out_vars(len(anchor.w_shape))
    program.prepare.append(Kernel(made.name, (Store(made, anchor.w_shape, at, Cast(anchor.w, to)),)))
    kernel.anchor = replace(anchor, w=Load(made, at, to))


def narrow_operands(kernel: Kernel, to: DType) -> dict[str, Load]:
    """The operands of an anchor that are f32 in memory and multiplied in 16 bits, by the names of its fields."""
    acc = next((x.dtype for s in kernel.stores for x in walk(s.expr) if isinstance(x, Acc)), None)
    if kernel.anchor is None or acc is None or multiplied_as(kernel.anchor, acc, to.name) is not to:
        return {}
    return {
        name: e
        for name, e in operands(kernel.anchor).items()
        if isinstance(e, Load) and e.dtype.name == "f32" and isinstance(e.source, Buffer)
    }


def with_operands(kernel: Kernel, changed: Mapping[str, Any]) -> Kernel:
    """The kernel with other operands of its anchor, by the names of its fields."""
    return replace(kernel, anchor=replace(kernel.anchor, **changed)) if kernel.anchor and changed else kernel


def pairs(kernel: Kernel) -> int:
    """How many pairs of numbers a kernel multiplies, about."""
    sizes: Sequence[Size] = kernel.stores[0].extents if kernel.stores else ()
    match kernel.anchor:
        case Contract(k=k):
            sizes = (*sizes, k)
        case Conv(w_shape=w_shape):
            sizes = (*sizes, *w_shape[1:])
        case Attention(k_shape=k_shape):
            sizes = (*sizes, k_shape[2])
    return upper(numel(sizes)) or LARGE


def rounding(root: Buffer, to: Buffer) -> Store:
    """The store that makes a rounded copy."""
    at = out_vars(len(root.shape))
    return Store(to, root.shape, at, Cast(Load(root, at, root.dtype), to.dtype))


def view_of(b: Buffer, root: Buffer) -> Buffer:
    """The same part of a buffer of half as many bytes."""
    half = exact_div(b.offset, 2)
    assert half is not None
    return root if b.root is None else replace(b, kind=root.kind, dtype=root.dtype, root=root, offset=half)


def rewritten(kernel: Kernel, made: Mapping[Buffer, Buffer], only: set[Buffer], to: DType) -> Kernel:
    """The kernel with what it makes and multiplies in 16 bits."""
    stores: list[Store] = []
    for store in kernel.stores:
        root = store.buffer.base
        if root not in made or store.buffer.base.kind != "arena":
            stores.append(store)
            continue
        narrow = Store(view_of(store.buffer, made[root]), store.extents, store.index, Cast(store.expr, to))
        stores += [narrow] if root in only else [store, narrow]
    changed = {
        name: replace(e, source=view_of(e.source, made[e.source.base]), dtype=to)
        for name, e in narrow_operands(kernel, to).items()
        if e.source.base in made
    }
    return with_operands(replace(kernel, stores=tuple(stores)), changed)
