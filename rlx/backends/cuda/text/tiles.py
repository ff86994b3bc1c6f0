"""Products on tiles: those of the operands in shared memory, that of the result in registers.

    for each step of the depth:  registers <- both operands (0 outside);  c += A * B of the step before, from shared
                                 memory;  shared memory <- registers
    C[rows][columns] <- c, in the memory of A and B
    for each element:  store the expression of the result, with C[row][column] as `Acc`

Without tensor cores each of 256 threads has a square of c. With them (`mma.sync`, 16 x 8 x 16, operands of 16 bits,
sums of f32) each warp has a box of c; words of shared memory hold two places of the depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rlx.backends.cuda.text.emitter import C_TYPES, Emitter, Scope, literal
from rlx.backends.cuda.text.form import COLUMN, ROW, K, Product
from rlx.backends.cuda.text.function import Extents, Text, Threads, function_text, store_line, volume
from rlx.backends.cuda.text.loops import Fixed
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Shape, Size, evaluate, numel, upper
from rlx.kernels.affine import Affine, linear_index
from rlx.kernels.expr import Cast, Expr, Load, Var, loads, substitute_vars
from rlx.kernels.loops.analysis import RESULT
from rlx.kernels.program import Store
from rlx.records import dataclass, replace

__all__ = ["tensor_text", "tile_text"]

PROCESSORS = 100  # blocks that a launch should have, so that all of a large device is at work


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a block's result, and of a warp's where tensor cores compute it; threads of a block.

    `step`: of the depth, of which operands are in shared memory; the less there is to do, the more is read at once.
    `groups` of so many threads each take steps in turn; their sums are added at the end, in order.
    """

    rows: int
    columns: int
    warp_rows: int
    warp_columns: int
    threads: int
    step: int
    groups: int = 1


BEYOND = 1024  # places after the last that a tile may reach
PART = 64  # rows of a result that shared memory holds at a time
PLAIN = (Tile(64, 64, 0, 0, 256, 32), Tile(32, 32, 0, 0, 256, 64, 2))
TENSOR = (Tile(128, 128, 64, 32, 256, 32), Tile(64, 64, 32, 32, 128, 64), Tile(32, 32, 16, 16, 128, 64, 4))


@dataclass(frozen=True, eq=False)
class Tiles:
    """How many blocks a launch has: one for each tile of the result."""

    batch: Shape
    m: Size
    n: Size
    tile: Tile

    def __call__(self, extents: Extents) -> int:
        rows = -(-max(evaluate(self.m, extents), 0) // self.tile.rows)
        columns = -(-max(evaluate(self.n, extents), 0) // self.tile.columns)
        return volume(self.batch, extents) * rows * columns


def chosen(product: Product, tiles: tuple[Tile, ...]) -> Tile:
    """The largest tile of which there are enough; by the upper bounds of sizes, as far as these are known."""
    batch, m, n = (upper(s) or 4096 for s in (numel([s for _, s in product.batch]), product.m, product.n))
    for tile in tiles:
        if batch * math.ceil(m / tile.rows) * math.ceil(n / tile.columns) >= PROCESSORS:
            return tile
    return tiles[-1]


# ---- operands


@dataclass(frozen=True, eq=False)
class Brought:
    """Statements that declare an operand's registers, fill them from step `k0` on, and store them."""

    declared: list[str]
    load: list[str]
    store: list[str]


@dataclass(frozen=True, eq=False)
class Side:
    """One operand: its name, its expression, the axis of the result that it runs along, and the texts of their sizes.

    `start`: where its tile starts along that axis; `lines`: places of the tile along it; `step`: steps of the depth of
    a tile; `size`, `depth`: how far the axis and the depth go.
    """

    name: str
    e: Expr
    along: Var
    start: str
    lines: int
    step: int
    size: str
    depth: str
    threads: int


def plain_side(emitter: Emitter, top: Scope, side: Side, kind: DType) -> Brought:
    """Elements one by one, or four that lie together; neighbours in memory go to neighbouring threads."""
    name, by_depth = side.name, runs_along(side.e, K)
    along = K if by_depth else side.along
    group = 4 if kind.name == "f32" and isinstance(side.e, Load) and in_fours(side, along) else 1
    steps, lines = (side.step // group, side.lines) if by_depth else (side.step, side.lines // group)
    count = side.lines * side.step // group // side.threads
    line, step = (f"e / {steps}", f"e % {steps}") if by_depth else (f"e % {lines}", f"e / {lines}")
    if group == 4:
        line, step = (line, f"({step}) * 4") if by_depth else (f"({line}) * 4", step)
    loop = each(side, count)
    load = [*loop, *places(emitter, side, line, step)]
    inside = f"{name}_at < {side.size} && {name}_k < {side.depth}"
    to = [f"{name}_r[{group} * j + {n}]" for n in range(group)]
    if group == 4:
        address, lines_before = four_address(emitter, top, side)
        load += [
            "float4 four = {0, 0, 0, 0};",
            f"if ({inside}) {{",
            *lines_before,
            f"four = *(const float4*)({address});",
            "}",
            *(f"{r} = four.{part};" for r, part in zip(to, "xyzw", strict=True)),
        ]
    else:
        element, text = element_of(emitter, top, side)
        load += [f"{to[0]} = {literal(0, kind)};", f"if ({inside}) {{", *element.lines, f"{to[0]} = {text};", "}"]
    targets = [(f"{step} + {n}", line) if by_depth else (step, f"{line} + {n}") for n in range(group)]
    store = [*loop, *(f"{name}_s[{s}][{at}] = {r};" for r, (s, at) in zip(to, targets, strict=True)), "}"]
    return Brought([f"{C_TYPES[kind.name]} {name}_r[{group * count}];"], [*load, "}"], store)


def place(emitter: Emitter, side: Side, line: str) -> str:
    """The statement that says which place along the result's axis an item is for."""
    return f"const {emitter.kind(side.along)} {side.name}_at = {side.start} + {line};"


def step_place(emitter: Emitter, side: Side, step: str) -> str:
    """The statement that says which place of the depth an item is for."""
    return f"const {emitter.kind(K)} {side.name}_k = k0 + {step};"


def places(emitter: Emitter, side: Side, line: str, step: str) -> tuple[str, str]:
    """Both."""
    return place(emitter, side, line), step_place(emitter, side, step)


def each(side: Side, count: int) -> list[str]:
    """The loop of a thread over its items of an operand, of which `e` is the number."""
    head = f"for (int j = 0; j < {count}; ++j) {{"
    return ["#pragma unroll", head, f"const int e = tid + {side.threads} * j;"]


def paired_side(emitter: Emitter, top: Scope, side: Side) -> Brought:
    """Two places of the depth as a word; where four elements lie together in memory, by one access each."""
    if runs_along(side.e, K):
        return quads_along_depth(emitter, top, side) if in_fours(side, K) else pairs(emitter, top, side, True)
    return quads_along_lines(emitter, top, side) if in_fours(side, side.along) else pairs(emitter, top, side, False)


def pairs(emitter: Emitter, top: Scope, side: Side, by_depth: bool) -> Brought:
    """Words of two elements that are computed one by one."""
    name, words = side.name, side.step // 2
    count = side.lines * words // side.threads
    line, word = (f"e / {words}", f"e % {words}") if by_depth else (f"e % {side.lines}", f"e / {side.lines}")
    element, text = element_of(emitter, top, side)
    load = [
        *each(side, count),
        place(emitter, side, line),
        f"{name}_r[j] = 0;",
        "#pragma unroll",
        "for (int h = 0; h < 2; ++h) {",
        step_place(emitter, side, f"{word} * 2 + h"),
        f"if ({name}_at < {side.size} && {name}_k < {side.depth}) {{",
        *element.lines,
        f"{name}_r[j] |= (u32){text} << (16 * h);",
        "}",
        "}",
        "}",
    ]
    store = [*each(side, count), f"{name}_s[{line}][{word}] = {name}_r[j];", "}"]
    return Brought([f"u32 {name}_r[{count}];"], load, store)


def quads_along_depth(emitter: Emitter, top: Scope, side: Side) -> Brought:
    """Four places of the depth by one access, as two words."""
    name, groups = side.name, side.step // 4
    count = side.lines * groups // side.threads
    address, before = four_address(emitter, top, side)
    read, (x, y, z, w) = four_read(side, address, "four")
    load = [
        *each(side, count),
        *places(emitter, side, f"e / {groups}", f"e % {groups} * 4"),
        f"{name}_r[2 * j] = {name}_r[2 * j + 1] = 0;",
        f"if ({name}_at < {side.size} && {name}_k < {side.depth}) {{",
        *before,
        read,
        f"{name}_r[2 * j] = {x} | {y} << 16;",
        f"{name}_r[2 * j + 1] = {z} | {w} << 16;",
        "}",
        "}",
    ]
    to = f"{name}_s[e / {groups}][e % {groups} * 2"
    store = [*each(side, count), *(f"{to} + {n}] = {name}_r[2 * j + {n}];" for n in range(2)), "}"]
    return Brought([f"u32 {name}_r[{2 * count}];"], load, store)


def quads_along_lines(emitter: Emitter, top: Scope, side: Side) -> Brought:
    """Four lines by one access, at two places of the depth: four words.

    Of 32 threads 8 have neighbouring words of the depth, in other banks, and 4 neighbouring lines of one memory row.
    """
    name, groups = side.name, side.lines // 4
    count = groups * side.step // 2 // side.threads
    address, before = four_address(emitter, top, side)
    load = [
        *each(side, count),
        f"const int line = (e / 32 % {groups // 4} * 4 + e / 8 % 4) * 4, word = e / {8 * groups} * 8 + e % 8;",
        place(emitter, side, "line"),
        "#pragma unroll",
        f"for (int i = 0; i < 4; ++i) {name}_r[4 * j + i] = 0;",
        "#pragma unroll",
        "for (int h = 0; h < 2; ++h) {",
        step_place(emitter, side, "word * 2 + h"),
        f"if ({name}_at < {side.size} && {name}_k < {side.depth}) {{",
        *before,
        four_read(side, address, "four")[0],
        *(f"{name}_r[4 * j + {n}] |= {x} << (16 * h);" for n, x in enumerate(four_read(side, address, "four")[1])),
        "}",
        "}",
        "}",
    ]
    store = [
        *each(side, count),
        f"const int line = (e / 32 % {groups // 4} * 4 + e / 8 % 4) * 4, word = e / {8 * groups} * 8 + e % 8;",
        "#pragma unroll",
        f"for (int i = 0; i < 4; ++i) {name}_s[line + i][word] = {name}_r[4 * j + i];",
        "}",
    ]
    return Brought([f"u32 {name}_r[{4 * count}];"], load, store)


def four_address(emitter: Emitter, top: Scope, side: Side) -> tuple[str, list[str]]:
    """The text of the address of an operand's element, and the statements that it needs."""
    load = plain_load(side.e)
    assert load is not None
    scope = Scope(top, {side.along: f"{side.name}_at", K: f"{side.name}_k"}, turns="true")
    index, _ = emitter.offset(linear_index(load.indices, load.source.shape), scope)
    return f"{emitter.pointer(load.source)} + {index}", scope.lines


def four_read(side: Side, address: str, name: str) -> tuple[str, list[str]]:
    """The statement that reads four elements, and the texts of them as bits of the type that is multiplied."""
    load, to = plain_load(side.e), side.e.dtype.name
    assert load is not None
    if load.dtype is side.e.dtype:
        parts = [f"({name}.x & 0xffff)", f"({name}.x >> 16)", f"({name}.y & 0xffff)", f"({name}.y >> 16)"]
        return f"const uint2 {name} = *(const uint2*)({address});", parts
    return f"const float4 {name} = *(const float4*)({address});", [f"(u32)to_{to}({name}.{part})" for part in "xyzw"]


def plain_load(e: Expr) -> Load | None:
    """The load that an operand is, but for a conversion from f32."""
    inner = e.value if isinstance(e, Cast) and e.value.dtype.name == "f32" else e
    return inner if isinstance(inner, Load) and inner.where is None else None


def in_fours(side: Side, along: Var) -> bool:
    """Whether four elements along an axis, from a multiple of four on, are aligned neighbours in memory."""
    load, size = plain_load(side.e), (side.depth if along is K else side.size).removesuffix("ll")
    if load is None or not size.isdigit() or int(size) % 4:
        return False
    form: Affine = linear_index(load.indices, load.source.shape)
    offset, bits = load.source.offset, load.source.dtype.bits
    others = [form.constant, *(c for term, c in form.coefs.items() if term != along)]
    whole = all(isinstance(c, int) and c % 4 == 0 for c in others) and form.coefs.get(along) == 1
    return whole and isinstance(offset, int) and offset % (bits // 2) == 0


def element_of(emitter: Emitter, top: Scope, side: Side) -> tuple[Scope, str]:
    """The statements of one element, in a scope that has its place and step, and the text of its value."""
    names = {side.along: f"{side.name}_at", K: f"{side.name}_k"}
    element = Scope(top, names, turns="true")
    return element, emitter.value(side.e, element)


def runs_along(e: Expr, name: Var) -> bool:
    """Whether neighbours along a variable are neighbours in memory, in what the expression loads first."""
    load = next(loads(e), None)
    return load is not None and linear_index(load.indices, load.source.shape).coefs.get(name) == 1


# ---- the two ways


def tile_text(store: Store, product: Product, acc: DType) -> Text:
    """A block of threads for each tile; every thread multiplies by itself."""
    tile, kind = chosen(product, PLAIN), C_TYPES[acc.name]
    if acc.bits == 64:
        tile = replace(tile, step=tile.step // 2)  # for the shared memory
    step = tile.step
    per, side = tile.rows // 16, tile.rows
    own = 2 * step * (side + 4)
    shared = [
        f"__shared__ __align__(16) {kind} shared[{tile.groups * max(side * (side + 1), own)}];",
        f"{kind} (*a_s)[{side + 4}] = ({kind} (*)[{side + 4}])(shared + team * {own});",
        f"{kind} (*b_s)[{side + 4}] = a_s + {step};",
        f"{kind} c[{per}][{per}];",
        "#pragma unroll",
        f"for (int i = 0; i < {per * per}; ++i) c[i / {per}][i % {per}] = {literal(0, acc)};",
    ]
    rows, columns = f"tid / 16 * {per}", f"tid % 16 * {per}"
    multiply = [
        "#pragma unroll",
        f"for (int kk = 0; kk < {step}; ++kk) {{",
        f"{kind} x[{per}], y[{per}];",
        "#pragma unroll",
        f"for (int i = 0; i < {per}; ++i) {{ x[i] = a_s[kk][{rows} + i]; y[i] = b_s[kk][{columns} + i]; }}",
        "#pragma unroll",
        f"for (int i = 0; i < {per * per}; ++i)",
        f"  c[i / {per}][i % {per}] = k_fma(x[i / {per}], y[i % {per}], c[i / {per}][i % {per}]);",
        "}",
    ]
    settle = [
        "#pragma unroll",
        f"for (int i = 0; i < {per * per}; ++i)",
        f"  c_s[{rows} + i / {per}][{columns} + i % {per}] = c[i / {per}][i % {per}];",
    ]
    return whole_text(
        store, product, tile, (acc, step), (shared, multiply, settle), lambda e, t, s: plain_side(e, t, s, acc)
    )


def tensor_text(store: Store, product: Product, narrow: DType) -> Text:
    """A block of warps for each tile; tensor cores multiply operands of 16 bits."""
    tile = chosen(product, TENSOR)
    step = tile.step
    pitch, high, wide = step // 2 + 4, tile.warp_rows // 16, tile.warp_columns // 8
    across = tile.columns // tile.warp_columns
    own = (tile.rows + tile.columns) * pitch
    words = tile.groups * max(own, min(tile.rows, PART) * (tile.columns + 1))
    shared = [
        f"__shared__ __align__(16) u32 shared[{words}];",
        f"u32 (*a_s)[{pitch}] = (u32 (*)[{pitch}])(shared + team * {own}), (*b_s)[{pitch}] = a_s + {tile.rows};",
        "const int lane = tid % 32, warp = tid / 32, g = lane / 4, t4 = lane % 4;",
        f"const int wm = warp / {across} * {tile.warp_rows}, wn = warp % {across} * {tile.warp_columns};",
        f"float c[{high}][{wide}][4];",
        "#pragma unroll",
        f"for (int i = 0; i < {high * wide * 4}; ++i) c[i / {4 * wide}][i / 4 % {wide}][i % 4] = 0;",
    ]
    multiply = [
        "#pragma unroll",
        f"for (int kk = 0; kk < {step // 2}; kk += 8) {{",
        f"u32 x[{high}][4], y[{wide}][2];",
        "#pragma unroll",
        f"for (int i = 0; i < {high * 4}; ++i)",
        "  x[i / 4][i % 4] = a_s[wm + i / 4 * 16 + i % 2 * 8 + g][kk + i / 2 % 2 * 4 + t4];",
        "#pragma unroll",
        f"for (int i = 0; i < {wide * 2}; ++i) y[i / 2][i % 2] = b_s[wn + i / 2 * 8 + g][kk + i % 2 * 4 + t4];",
        "#pragma unroll",
        f"for (int i = 0; i < {high * wide}; ++i)",
        f"  mma_{narrow.name}(c[i / {wide}][i % {wide}], x[i / {wide}], y[i % {wide}]);",
        "}",
    ]
    settle = [
        f"if (wm / {PART} == first / {PART})",
        "#pragma unroll",
        f"for (int i = 0; i < {high * wide * 4}; ++i)",
        f"  c_s[wm % {PART} + i / {4 * wide} * 16 + i / 2 % 2 * 8 + g]",
        f"     [wn + i / 4 % {wide} * 8 + t4 * 2 + i % 2] = c[i / {4 * wide}][i / 4 % {wide}][i % 4];",
    ]
    return whole_text(store, product, tile, (DTYPES["f32"], step), (shared, multiply, settle), paired_side)


def whole_text(
    store: Store,
    product: Product,
    tile: Tile,
    sums: tuple[DType, int],
    own: tuple[list[str], list[str], list[str]],
    bring: Callable[[Emitter, Scope, Side], Brought],
) -> Text:
    """The function around what one way declares, multiplies and settles; `sums`: their type, and the step."""
    (acc, step), (shared, multiply, settle), emitter = sums, own, Emitter()
    m, n, k = emitter.word(product.m), emitter.word(product.n), emitter.word(product.k)
    base = Scope(None, {})
    top = Scope(base, {v: v.name for v, _ in product.batch})
    apart = emitter.split("entry", [(v, v.name, size) for v, size in product.batch])
    for v, size in ((ROW, product.m), (COLUMN, product.n), (K, product.k)):
        emitter.ranges.bind(v, size, BEYOND)
    a = bring(emitter, top, Side("a", product.a, ROW, "m0", tile.rows, step, m, k, tile.threads))
    b = bring(emitter, top, Side("b", product.b, COLUMN, "n0", tile.columns, step, n, k, tile.threads))
    result = Scope(top, {ROW: "row", COLUMN: "column", next(iter(RESULT)): "total"}, turns="true")
    places = {v: e for v, e in product.places.items() if v != e}
    index = tuple(substitute_vars(i, places) for i in store.index)
    store_line(emitter, replace(store, expr=substitute_vars(store.expr, places), index=index), result)
    kind, part = C_TYPES[acc.name], min(tile.rows, PART)
    stride = tile.groups * step
    body = [
        f"const int tid = threadIdx.x % {tile.threads}, team = threadIdx.x / {tile.threads};",
        f"const i64 tiles_m = ({m} + {tile.rows - 1}) / {tile.rows};",
        f"const i64 tiles_n = ({n} + {tile.columns - 1}) / {tile.columns};",
        f"const i64 n0 = blockIdx.x % tiles_n * {tile.columns}, rest = blockIdx.x / tiles_n;",
        f"const i64 m0 = rest % tiles_m * {tile.rows}, entry = rest / tiles_m;",
        *base.lines,
        *apart,
        *top.lines,
        *shared,
        f"{kind} (*c_all)[{tile.columns + 1}] = ({kind} (*)[{tile.columns + 1}])shared;",
        f"{kind} (*c_s)[{tile.columns + 1}] = c_all + team * {part};",
        *a.declared,
        *b.declared,
        f"for (i64 start = 0; start < {k} + {stride}; start += {stride}) {{",  # one turn more than there are steps
        f"const i64 k0 = start + team * {step};",
        f"if (start < {k}) {{",
        *a.load,
        *b.load,
        "}",
        "if (start > 0) {",
        *multiply,
        "}",
        "__syncthreads();",
        *a.store,
        *b.store,
        "__syncthreads();",
        "}",
        "RLX_NEXT;",
        f"for (int first = 0; first < {tile.rows}; first += {part}) {{",
        *settle,
        "__syncthreads();",
        f"for (int at = threadIdx.x; at < {part * tile.columns}; at += {tile.groups * tile.threads}) {{",
        f"const {emitter.kind(ROW)} row = m0 + first + at / {tile.columns};",
        f"const {emitter.kind(COLUMN)} column = n0 + at % {tile.columns};",
        f"if (row < {m} && column < {n}) {{",
        f"{kind} total = c_all[at / {tile.columns}][at % {tile.columns}];",
        *(
            f"total = k_add(total, c_all[{g * part} + at / {tile.columns}][at % {tile.columns}]);"
            for g in range(1, tile.groups)
        ),
        *result.lines,
        "}",
        "}",
        "__syncthreads();",
        "}",
    ]
    batch = tuple(size for _, size in product.batch)
    threads = Threads(Tiles(batch, product.m, product.n, tile), Fixed(tile.groups * tile.threads))
    return function_text(emitter, body, threads, most=tile.groups * tile.threads, alone=True, overlaps=False)
