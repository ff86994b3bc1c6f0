"""Loop nests: a thread for each element, or a block of threads for each row of a store whose reductions they share."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.text.emitter import BLOCK, SLICES, Emitter, Scope, is_few
from rlx.backends.cuda.text.function import Extents, Text, Threads, TwinStore, function_text, store_line, volume
from rlx.ir.shape import Shape, Size, numel, upper
from rlx.kernels.affine import affine
from rlx.kernels.expr import I64, Expr, Load, Reduce, Var, const, substitute_vars, walk
from rlx.kernels.loops.analysis import flatten, free_vars, merge_loops, merge_reduces, rename_reduces
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Store
from rlx.records import dataclass, replace

__all__ = ["store_text"]

THREADS = 256  # threads of a block where each has elements of its own
FEW_ELEMENTS = 1 << 17  # that leave a device idle where each has one thread
MOST_BLOCKS = 1 << 20  # threads take further elements beyond


def store_text(store: Store) -> Text:
    """The function of a store without an anchor."""
    store = replace(store, expr=rename_reduces(store.expr))
    rows = shared_rows(store)
    return thread_text(store) if rows is None else row_text(store, rows)


# ---- a thread for each element


@dataclass(frozen=True, eq=False)
class Elements:
    """How many blocks a launch of a thread for each element has."""

    shape: Shape
    each: int

    def __call__(self, extents: Extents) -> int:
        return min(-(-volume(self.shape, extents) // self.each), MOST_BLOCKS)


@dataclass(frozen=True, eq=False)
class Fixed:
    """A number that is the same at any extents."""

    number: int

    def __call__(self, extents: Extents) -> int:
        return self.number


def thread_text(store: Store) -> Text:
    """Each thread computes elements by itself."""
    extents, target, expr = flatten(store)
    names, sizes, (expr,), target = merge_loops(
        list(out_vars(len(extents))), list(extents), [merge_reduces(expr)], target
    )
    whole = (numel(store.buffer.shape),)
    merged = replace(
        store, buffer=store.buffer.view(whole, store.buffer.dtype), extents=tuple(sizes), index=(target,), expr=expr
    )
    if isinstance(merged, TwinStore):
        merged = replace(merged, twins=tuple(b.view(whole, b.dtype) for b in merged.twins))
    emitter = Emitter()
    sliced = wants_slices(expr, sizes)
    scope = Scope(Scope(None, {}), {v: v.name for v in names}, sharing=SLICES if sliced else None)
    apart = emitter.split("t", [(v, v.name, size) for v, size in zip(names, sizes, strict=True)])
    store_line(emitter, merged, scope)
    total = " * ".join(map(emitter.word, sizes)) or "1ll"
    assert scope.parent is not None
    if sliced:  # threads beyond the last element share its reductions, and store nothing
        *lines, last = scope.lines
        body = [
            *scope.parent.lines,
            f"for (i64 first = (i64)blockIdx.x * 32; first < {total}; first += (i64)gridDim.x * 32) {{",
            f"const i64 own = first + threadIdx.x % 32, t = own < {total} ? own : {total} - 1;",
            *apart,
            *lines,
            f"if (threadIdx.x < 32 && own < {total}) {last}",
            "}",
        ]
        return function_text(
            emitter, ["RLX_NEXT;", *body], Threads(Elements(tuple(sizes), 32), Fixed(THREADS)), most=THREADS
        )
    step = "(i64)gridDim.x * blockDim.x"
    head = f"for (i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x; t < {total}; t += {step}) {{"
    body = [*scope.parent.lines, head, *apart, *scope.lines, "}"]
    return function_text(
        emitter, ["RLX_NEXT;", *body], Threads(Elements(tuple(sizes), THREADS), Fixed(THREADS)), most=THREADS
    )


def wants_slices(expr: Expr, sizes: Sequence[Size]) -> bool:
    """Whether there are too few elements for a thread each, and long reductions that eight threads can share."""
    most = upper(numel(sizes))
    return (
        most is not None
        and most <= FEW_ELEMENTS
        and any(isinstance(x, Reduce) and not is_few(x.extents) for x in walk(expr))
    )


# ---- a block for each row


@dataclass(frozen=True, eq=False)
class Rows:
    """How many blocks a launch of a block for each row has, one at a time or more."""

    shape: Shape
    inner: Shape

    def __call__(self, extents: Extents) -> int:
        return min(volume(self.shape, extents), MOST_BLOCKS) if volume(self.inner, extents) else 0


@dataclass(frozen=True, eq=False)
class RowThreads:
    """Threads of a block: by the elements that they share, so that sums do not depend on the number of rows."""

    shapes: tuple[Shape, ...]

    def __call__(self, extents: Extents) -> int:
        most = max(volume(shape, extents) for shape in self.shapes)
        return next((n for n, up_to in ((32, 128), (128, 512), (256, 8192)) if most <= up_to), 512)


def shared_rows(store: Store) -> frozenset[Var] | None:
    """The axes of which a block has one place each, None where a thread for each element does as well."""
    names = out_vars(len(store.extents))
    free: dict[Expr, frozenset[Var]] = {}
    outer: frozenset[Var] = frozenset()
    found: list[Reduce] = []
    for x in walk(store.expr):
        if isinstance(x, Reduce) and free_vars(x, free) <= frozenset(names) and not is_few(x.extents):
            found.append(x)
            outer |= free_vars(x, free)
    if not found:
        return None
    inner = [size for v, size in zip(names, store.extents, strict=True) if v not in outer]
    if not is_few(tuple(inner)) or any(_runs_along(x) for x in found):
        return outer
    return None


def _runs_along(x: Reduce) -> bool:
    """Whether neighbours along the last axis that is reduced are neighbours in memory."""
    last = x.vars[-1]
    forms = [affine(load.indices[-1]) for load in walk(x.body) if isinstance(load, Load) and load.indices]
    return any(form.coefs.get(last) == 1 for form in forms)


def row_text(store: Store, outer: frozenset[Var]) -> Text:
    """A block for each place of the outer axes; its threads share the reductions, then the elements."""
    names = out_vars(len(store.extents))
    single = {v: const(0, I64) for v, size in zip(names, store.extents, strict=True) if size == 1}
    expr = substitute_vars(store.expr, dict(single))
    at = tuple(substitute_vars(i, dict(single)) for i in store.index)
    loops = [(v, size) for v, size in zip(names, store.extents, strict=True) if v not in single]
    rows = [(v, size) for v, size in loops if v in outer]
    inner = [(v, size) for v, size in loops if v not in outer]
    emitter = Emitter()
    own = RowThreads((*(x.extents for x in walk(expr) if isinstance(x, Reduce)), tuple(s for _, s in inner)))
    fixed = all(isinstance(s, int) for shape in own.shapes for s in shape)
    sharing = BLOCK._replace(threads=str(own({}))) if fixed else BLOCK
    row = Scope(Scope(None, {}), {v: v.name for v, _ in rows}, sharing=sharing)
    element = Scope(row, {v: v.name for v, _ in inner})
    apart = [emitter.split(flat, [(v, v.name, s) for v, s in part]) for flat, part in (("row", rows), ("t", inner))]
    store_line(emitter, replace(store, index=at, expr=expr), element)
    row_sizes, inner_sizes = [emitter.word(s) for _, s in rows], [emitter.word(s) for _, s in inner]
    assert row.parent is not None
    body = [
        *row.parent.lines,
        f"for (i64 row = blockIdx.x; row < {' * '.join(row_sizes) or '1ll'}; row += gridDim.x) {{",
        *apart[0],
        *row.lines,
        *(["#pragma unroll 8"] if fixed else []),
        f"for (i64 t = threadIdx.x; t < {' * '.join(inner_sizes) or '1ll'}; t += {sharing.threads}) {{",
        *apart[1],
        *element.lines,
        "}",
        "}",
    ]
    sizes = tuple(s for _, s in rows), tuple(s for _, s in inner)
    threads = Threads(Rows(*sizes), own)
    return function_text(emitter, ["RLX_NEXT;", *body], threads, most=512)
