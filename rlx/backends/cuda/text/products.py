"""Products and convolutions: tiles of the result in registers, tiles of the operands in shared memory.

A block of 256 threads makes 64 x 64 elements, each thread 4 x 4, from operands of 16 steps of the depth at a time:

    for each 16 of k:   A[16][64], B[16][64] <- operand expressions    (0 outside)
                        c[4][4] += A[k][4 rows] * B[k][4 columns]
    C[64][64] <- c, in the memory of A and B
    for each element:   store the expression of the result, with C[row][column] as `Acc`

A convolution is the product of its weights [O, C * taps] with windows of x [C * taps, N * places].
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.text.emitter import C_TYPES, Emitter, Scope, literal, split
from rlx.backends.cuda.text.function import Extents, Text, Threads, function_text, store_line, volume
from rlx.backends.cuda.text.loops import Fixed, store_text
from rlx.ir.dtype import DType
from rlx.ir.shape import Shape, Size, evaluate, numel, upper
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import (
    Acc,
    Apply,
    Cast,
    Expr,
    Load,
    Reduce,
    Select,
    Var,
    const,
    guarded,
    loads,
    size_expr,
    substitute_vars,
    transform,
    walk,
)
from rlx.kernels.loops.analysis import RESULT
from rlx.kernels.lowering import Contract, Conv, out_vars
from rlx.kernels.program import Store
from rlx.records import dataclass, replace

__all__ = ["product_text"]

TILE, DEPTH, THREADS = 64, 16, 256
THIN = 4  # rows up to which a product is a loop nest: each element the sum of a row and a column
ROW, COLUMN, K = Var("row"), Var("column"), Var("k")


@dataclass(frozen=True, eq=False)
class Product:
    """C[batch, m, n] = sum over k of a * b, over the variables of `batch`, ROW, COLUMN and K; `places` says what index
    of the store each of its variables is, `batch` has the names and sizes of the batch axes."""

    batch: tuple[tuple[Var, Size], ...]
    m: Size
    n: Size
    k: Size
    a: Expr
    b: Expr
    places: dict[Var, Expr]


def product_text(store: Store, anchor: Contract | Conv) -> Text:
    """The function of a product or convolution with what follows it."""
    acc = next((x.dtype for x in walk(store.expr) if isinstance(x, Acc)), None)
    if acc is None:
        return store_text(store)
    rows = anchor.m if isinstance(anchor, Contract) else store.extents[1] // anchor.groups
    most = upper(rows)
    if most is not None and most <= THIN:
        return store_text(sums(store, anchor, acc))
    make = contraction(store, anchor, acc) if isinstance(anchor, Contract) else windows(store, anchor, acc)
    return tile_text(store, make, acc)


def contraction(store: Store, anchor: Contract, acc: DType) -> Product:
    """A matrix product over the variables of tiles."""
    names = out_vars(len(store.extents))
    *batch, row, column = names
    at = {row: ROW, column: COLUMN}
    a, b = (_cast(substitute_vars(x, dict(at)), acc) for x in (anchor.a, anchor.b))
    if anchor.zero is not None:
        a = Apply("sub", (a, _cast(anchor.zero, acc)), acc)
    pairs = tuple((v, size) for v, size in zip(batch, store.extents, strict=False))
    return Product(pairs, anchor.m, anchor.n, anchor.k, a, b, {v: at.get(v, v) for v in names})


def windows(store: Store, anchor: Conv, acc: DType) -> Product:
    """A convolution as a product for each group: rows are channels of the result, columns its places."""
    n, o, *space = out_vars(len(store.extents))
    per_group, taps = anchor.w_shape[1], anchor.w_shape[2:]
    out_per_group = store.extents[1] // anchor.groups
    group = Var("g")
    image, *place = apart(COLUMN, (store.extents[0], *store.extents[2:]))
    channel, *tap = apart(K, (per_group, *taps))
    wide = group * size_expr(out_per_group) + ROW if anchor.groups > 1 else ROW
    x, w = factors(anchor, acc, image, (group, wide), (channel, *tap), place)
    flat = anchor.w
    if isinstance(flat, Load) and flat.indices == out_vars(len(flat.indices)) and flat.where is None:
        view = flat.source.view((anchor.w_shape[0], numel((per_group, *taps))), flat.dtype)
        w = _cast(Load(view, (wide, K), flat.dtype), acc)
    places = {n: image, o: wide, **dict(zip(space, place, strict=True))}
    columns, depth = numel((store.extents[0], *store.extents[2:])), numel((per_group, *taps))
    return Product(((group, anchor.groups),), out_per_group, columns, depth, w, x, places)


def factors(
    anchor: Conv,
    acc: DType,
    image: Expr,
    channels: tuple[Expr, Expr],
    inner: Sequence[Expr],
    place: Sequence[Expr],
) -> tuple[Expr, Expr]:
    """What is multiplied: the element of x, 0 outside of it, and of w. `channels`: the group, and that of the result;
    `inner`: the channel within the group, and the tap."""
    rank, (group, wide), (channel, *tap) = len(place), channels, inner
    at = [
        i * s + t * d - size_expr(p)
        for i, s, t, d, p in zip(place, anchor.strides, tap, anchor.dilations, anchor.pads[:rank], strict=True)
    ]
    inside: Expr | None = None
    for i, size, low, high in zip(at, anchor.x_shape[2:], anchor.pads[:rank], anchor.pads[rank:], strict=True):
        if low != 0 or high != 0:
            test = (i >= 0) & (i < size_expr(size))
            inside = test if inside is None else inside & test
    source = group * size_expr(anchor.w_shape[1]) + channel if anchor.groups > 1 else channel
    names = out_vars(rank + 2)
    x = _cast(substitute_vars(anchor.x, dict(zip(names, (image, source, *at), strict=True))), acc)
    if anchor.zero is not None:
        x = Apply("sub", (x, _cast(anchor.zero, acc)), acc)
    if inside is not None:
        x = Select(inside, guarded(x, inside), const(0, acc))
    return x, _cast(substitute_vars(anchor.w, dict(zip(names, (wide, channel, *tap), strict=True))), acc)


def apart(flat: Expr, shape: Shape) -> list[Expr]:
    """The indices of a row-major number in a box."""
    made: list[Expr] = []
    for d in range(len(shape) - 1, 0, -1):
        size = size_expr(shape[d])
        made.append(flat % size)
        flat = flat // size
    return [flat, *reversed(made)]


def _cast(e: Expr, to: DType) -> Expr:
    return e if e.dtype is to else Cast(e, to)


def sums(store: Store, anchor: Contract | Conv, acc: DType) -> Store:
    """The same as a loop nest whose elements are sums of products."""
    if isinstance(anchor, Contract):
        product = contraction(store, anchor, acc)
        back: dict[Var, Expr] = {to: v for v, to in product.places.items() if isinstance(to, Var)}
        extents: Shape = (product.k,)
        names: tuple[Var, ...] = (K,)
        a, b = substitute_vars(product.a, back), substitute_vars(product.b, back)
    else:
        image, wide, *place = out_vars(len(store.extents))
        extents = anchor.w_shape[1:]
        names = tuple(Var(f"r{d}") for d in range(len(extents)))
        group = wide // size_expr(store.extents[1] // anchor.groups)
        a, b = factors(anchor, acc, image, (group, wide), names, place)
    total = Reduce("add", names, extents, Apply("mul", (a, b), acc), acc)
    return replace(store, expr=transform(store.expr, lambda x: total if isinstance(x, Acc) else None))


# ---- tiles


@dataclass(frozen=True, eq=False)
class Tiles:
    """How many blocks a launch has: one for each tile of the result."""

    batch: Shape
    m: Size
    n: Size

    def __call__(self, extents: Extents) -> int:
        rows, columns = (-(-max(evaluate(size, extents), 0) // TILE) for size in (self.m, self.n))
        return volume(self.batch, extents) * rows * columns


def tile_text(store: Store, product: Product, acc: DType) -> Text:
    """A block of threads for each tile."""
    emitter = Emitter()
    m, n, k, kind = emitter.word(product.m), emitter.word(product.n), emitter.word(product.k), C_TYPES[acc.name]
    base = Scope(None, {})
    top = Scope(base, {v: v.name for v, _ in product.batch})
    load_a, fixed_a = operand(emitter, top, product.a, ROW, ("a", "m0", m, k, kind), acc)
    load_b, fixed_b = operand(emitter, top, product.b, COLUMN, ("b", "n0", n, k, kind), acc)
    names = {ROW: "row", COLUMN: "column", next(iter(RESULT)): f"c_s[at / {TILE}][at % {TILE}]"}
    result = Scope(top, names, turns="true")
    places = {v: e for v, e in product.places.items() if v != e}
    moved = replace(
        store,
        expr=substitute_vars(store.expr, places),
        index=tuple(substitute_vars(i, places) for i in store.index),
    )
    store_line(emitter, moved, result)
    body = [
        f"__shared__ {kind} shared[{TILE * (TILE + 1)}];",
        f"{kind} (*a_s)[{TILE + 4}] = ({kind} (*)[{TILE + 4}])shared, (*b_s)[{TILE + 4}] = a_s + {DEPTH};",
        f"{kind} (*c_s)[{TILE + 1}] = ({kind} (*)[{TILE + 1}])shared;",
        "const int tid = threadIdx.x;",
        f"const i64 tiles_m = ({m} + {TILE - 1}) / {TILE}, tiles_n = ({n} + {TILE - 1}) / {TILE};",
        "const i64 n0 = blockIdx.x % tiles_n * 64, rest = blockIdx.x / tiles_n;".replace("64", str(TILE)),
        f"const i64 m0 = rest % tiles_m * {TILE}, entry = rest / tiles_m;",
        *base.lines,
        *(split("entry", [v.name for v, _ in product.batch], [emitter.word(s) for _, s in product.batch])
          if product.batch else []),
        *top.lines,
        f"{kind} c[4][4];",
        "#pragma unroll",
        f"for (int i = 0; i < 16; ++i) c[i / 4][i % 4] = {literal(0, acc)};",
        *fixed_a,
        *fixed_b,
        f"for (i64 k0 = 0; k0 < {k}; k0 += {DEPTH}) {{",
        *load_a,
        *load_b,
        "__syncthreads();",
        "#pragma unroll",
        f"for (int kk = 0; kk < {DEPTH}; ++kk) {{",
        f"{kind} x[4], y[4];",
        "#pragma unroll",
        "for (int i = 0; i < 4; ++i) { x[i] = a_s[kk][tid / 16 * 4 + i]; y[i] = b_s[kk][tid % 16 * 4 + i]; }",
        "#pragma unroll",
        "for (int i = 0; i < 16; ++i) c[i / 4][i % 4] = k_fma(x[i / 4], y[i % 4], c[i / 4][i % 4]);",
        "}",
        "__syncthreads();",
        "}",
        "#pragma unroll",
        "for (int i = 0; i < 16; ++i) c_s[tid / 16 * 4 + i / 4][tid % 16 * 4 + i % 4] = c[i / 4][i % 4];",
        "__syncthreads();",
        f"for (int at = tid; at < {TILE * TILE}; at += {THREADS}) {{",
        f"const i64 row = m0 + at / {TILE}, column = n0 + at % {TILE};",
        f"if (row < {m} && column < {n}) {{",
        *result.lines,
        "}",
        "}",
    ]  # fmt: skip
    batch = tuple(size for _, size in product.batch)
    threads = Threads(Tiles(batch, product.m, product.n), Fixed(THREADS))
    return function_text(emitter, body, threads, most=THREADS, alone=True)


def operand(
    emitter: Emitter, top: Scope, e: Expr, along: Var, names: tuple[str, str, str, str, str], acc: DType
) -> tuple[list[str], list[str]]:
    """The statements that bring 16 steps of an operand into shared memory, and those before the loop over the depth.

    `names`: of the operand, of where its tile starts, of the sizes along it and of the depth, and of its type.
    """
    name, start, size, depth, kind = names
    if runs_along(e, K):  # neighbours in memory are steps of the depth: 16 threads read them
        line = Scope(top, {along: f"{name}_at"})
        outside, inside = [], [f"const i64 {name}_at = {start} + tid / {DEPTH} + {THREADS // DEPTH} * j;"]
        step, to = f"k0 + tid % {DEPTH}", f"[tid % {DEPTH}][tid / {DEPTH} + {THREADS // DEPTH} * j]"
    else:
        line = Scope(top, {along: f"{name}_at"})
        outside, inside = [f"const i64 {name}_at = {start} + tid % {TILE};"], []
        step, to = f"k0 + tid / {TILE} + {THREADS // TILE} * j", f"[tid / {TILE} + {THREADS // TILE} * j][tid % {TILE}]"
    element = Scope(line, {K: f"{name}_k"}, turns="true")
    text = emitter.value(e, element)
    (inside or outside).extend(line.lines)
    return [
        "#pragma unroll",
        f"for (int j = 0; j < {TILE * DEPTH // THREADS}; ++j) {{",
        *inside,
        f"const i64 {name}_k = {step};",
        f"{kind} value = {literal(0, acc)};",
        f"if ({name}_at < {size} && {name}_k < {depth}) {{",
        *element.lines,
        f"value = {text};",
        "}",
        f"{name}_s{to} = value;",
        "}",
    ], outside


def runs_along(e: Expr, name: Var) -> bool:
    """Whether neighbours along a variable are neighbours in memory, in what the expression loads first."""
    load = next(loads(e), None)
    return load is not None and linear_index(load.indices, load.source.shape).coefs.get(name) == 1
