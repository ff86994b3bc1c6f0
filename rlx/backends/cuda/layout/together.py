"""Products of the same rows with several weights, such as the queries, keys and values of a layer, are one product with
the weights side by side: one launch where each would have too few blocks to fill the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rlx.backends.cuda.text.form import K
from rlx.backends.cuda.text.function import PartStore
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Load, index, loads
from rlx.kernels.lowering import Contract, out_vars
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.records import replace

__all__ = ["join_products"]

UNIT = 8  # columns that parts are multiples of


def join_products(program: Program) -> None:
    """Joins products of a program in place; their weights are of 16 bits and made by `prepare`."""
    used = Counter(b.base for kernel in (*program.run, *program.prepare) for b in kernel.reads())
    used.update(b.base for _, b in program.outputs)
    makers = {s.buffer: kernel for kernel in program.prepare for s in kernel.stores if len(kernel.stores) == 1}
    for group in groups_of(program.run, [k for k in program.run if is_part(k) and own_weights(k, used, makers)]):
        if len(group) > 1:
            joined = join(program, group, [makers[weights(k)] for k in group])
            program.run[program.run.index(group[0])] = joined
            for kernel in group[1:]:
                program.run.remove(kernel)


def own_weights(kernel: Kernel, used: Mapping[Buffer, int], makers: Mapping[Buffer, Kernel]) -> bool:
    """Whether nothing else reads the weights, and a kernel of `prepare` makes them alone."""
    return used[weights(kernel)] == 1 and weights(kernel) in makers


def groups_of(run: Sequence[Kernel], parts: Sequence[Kernel]) -> list[list[Kernel]]:
    """The products of the same rows that may be computed where the first of a group is.

    Between it and each of them there is no branch or loop, nothing writes the rows, and nothing touches its result.
    """
    found: list[list[Kernel]] = []
    open_: dict[object, tuple[int, list[Kernel]]] = {}  # with the number of the first
    touched: dict[Buffer, tuple[int, list[Kernel]]] = {}  # by memory: the last kernel that did, and its group
    written: dict[Buffer, int] = {}
    wanted = set(map(id, parts))
    for number, kernel in enumerate(run):
        group: list[Kernel] = []
        if kernel.mark is not None:
            open_ = {}
        elif id(kernel) in wanted:
            anchor, (store,) = kernel.anchor, kernel.stores
            assert isinstance(anchor, Contract)
            key = anchor.a, anchor.m, anchor.k, store.extents[:-1]
            first, group = open_.get(key, (number, group))
            last, by = touched.get(store.buffer.base, (-1, group))
            changed = any(written.get(x.source.base, -1) > first for x in loads(anchor.a))
            if not group or changed or (last > first and by is not group):
                group = []
                open_[key] = number, group
                found.append(group)
            group.append(kernel)
        written.update((b.base, number) for b in kernel.writes())
        touched.update((b.base, (number, group)) for b in (*kernel.reads(), *kernel.writes()))
    return found


def weights(kernel: Kernel) -> Buffer:
    """The second operand of a product that may be a part of one."""
    assert isinstance(kernel.anchor, Contract)
    assert isinstance(kernel.anchor.b, Load)
    source: Buffer = kernel.anchor.b.source
    return source


def is_part(kernel: Kernel) -> bool:
    """Whether a kernel is a product with weights [K, N], and what follows reads only what no run changes."""
    anchor = kernel.anchor
    if not isinstance(anchor, Contract) or len(kernel.stores) != 1 or not isinstance(anchor.b, Load):
        return False
    (store,), b = kernel.stores, anchor.b
    source, n = b.source, anchor.n
    if source.root is not None or source.kind != "prepared" or source.dtype.bits != 16 or not isinstance(n, int):
        return False
    whole = source.shape == (anchor.k, n) and b.where is None
    along = linear_index(b.indices, source.shape).coefs == {K: n, out_vars(len(store.extents))[-1]: 1}
    fixed = all(x.source.is_fixed for e in (store.expr, *store.index) for x in loads(e))
    return whole and along and fixed and n % UNIT == 0 and store.buffer.base.kind == "arena"


def join(program: Program, group: Sequence[Kernel], makers: Sequence[Kernel]) -> Kernel:
    """One kernel for all of a group; their weights are made into one buffer."""
    anchors = [k.anchor for k in group if isinstance(k.anchor, Contract)]
    total = sum(a.n for a in anchors if isinstance(a.n, int))
    old = weights(group[0])
    both = Buffer(f"{old.name}+{len(group) - 1}", "prepared", (anchors[0].k, total), old.dtype)
    first, parts = 0, []
    for kernel, anchor, maker in zip(group, anchors, makers, strict=True):
        (made,), (store,) = maker.stores, kernel.stores
        i, j = made.index
        moved = Store(both, made.extents, (i, j + index(first)), made.expr)
        program.prepare[program.prepare.index(maker)] = replace(maker, stores=(moved,))
        parts.append(PartStore(store.buffer, store.extents, store.index, store.expr, first))
        assert isinstance(anchor.n, int)
        first += anchor.n
    b = anchors[0].b
    assert isinstance(b, Load)
    nodes = tuple(dict.fromkeys(n for kernel in group for n in kernel.nodes))
    anchor = replace(anchors[0], n=total, b=replace(b, source=both))
    return replace(group[0], stores=tuple(parts), anchor=anchor, nodes=nodes)
