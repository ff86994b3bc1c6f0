"""Products of a few rows: as fast as their second operand is read.

    B [K, N]: a thread has neighbouring columns, 16 bytes of a row of B, and every 64th row: threads share the depth
    B [N, K]: a warp has four columns, each of its threads 16 bytes of each of these at a time

The parts of a sum are added in an order that does not depend on the run.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlx.backends.cuda.text.emitter import Emitter, Scope, converted
from rlx.backends.cuda.text.form import COLUMN, ROW, K, Product
from rlx.backends.cuda.text.function import Extents, Text, Threads, function_text, store_line, volume
from rlx.backends.cuda.text.loops import Fixed
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import Shape, Size, evaluate, exact_div
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import I64, Cast, Load, Var, const, substitute_vars
from rlx.kernels.loops.analysis import RESULT
from rlx.kernels.program import Buffer, Store
from rlx.records import dataclass, replace

__all__ = ["thin_text"]

THREADS = 256
LANES = 4  # threads beside each other along the columns of B [K, N]: 64 bytes
EACH = 4  # columns of a warp of B [N, K]
AHEAD = 4  # accesses that a thread has under way
LEAST = 1 << 16  # elements of B from which on this pays
F32 = DTYPES["f32"]


@dataclass(frozen=True, eq=False)
class ColumnBlocks:
    """How many blocks a launch has: one for so many columns."""

    batch: Shape
    n: Size
    columns: int

    def __call__(self, extents: Extents) -> int:
        return volume(self.batch, extents) * -(-max(evaluate(self.n, extents), 0) // self.columns)


def thin_text(store: Store, product: Product) -> Text | None:
    """The function of a product of f32 sums, None where B does not lie for it; its rows are a number."""
    load = product.b.value if isinstance(product.b, Cast) else product.b
    if not isinstance(load, Load) or load.where is not None or load.dtype.name not in ("f32", "f16", "bf16"):
        return None
    buffer = load.source
    assert isinstance(buffer, Buffer)
    form = linear_index(load.indices, buffer.shape)
    width = 128 // load.dtype.bits
    along = next((v for v in (K, COLUMN) if form.coefs.get(v) == 1), None)
    others = [form.constant, *(c for v, c in form.coefs.items() if v != along)]
    inner = product.k if along == K else product.n
    if (
        along is None
        or any(exact_div(d, width) is None for d in (*others, inner))
        or exact_div(buffer.offset, 16) is None
    ):
        return None
    if not all(isinstance(v, Var) for v in form.coefs) or not isinstance(product.m, int) or _few(product):
        return None
    return Printer(store, product, load, along).text()


def _few(product: Product) -> bool:
    sizes = product.n, product.k
    return all(isinstance(s, int) for s in sizes) and sizes[0] * sizes[1] < LEAST


class Printer:
    """Prints one product; `m` rows are summed by each thread."""

    def __init__(self, store: Store, product: Product, load: Load, along: Var) -> None:
        self.store, self.product, self.load = store, product, load
        assert isinstance(product.m, int)
        self.rows, self.by_depth = product.m, along == K
        self.width = 128 // load.dtype.bits  # elements of an access
        self.emitter = Emitter()
        for v, size in ((ROW, product.m), (COLUMN, product.n), (K, product.k)):
            self.emitter.ranges.bind(v, size, 4096)
        self.n, self.k = self.emitter.word(product.n), self.emitter.word(product.k)
        self.base = Scope(None, {})
        self.top = Scope(self.base, {v: v.name for v, _ in product.batch})
        self.columns = THREADS // 32 * EACH if self.by_depth else LANES * self.width

    def text(self) -> Text:
        emitter, product = self.emitter, self.product
        apart = emitter.split("entry", [(v, v.name, size) for v, size in product.batch])
        own = self.depth_first() if self.by_depth else self.columns_first()
        body = [
            "RLX_NEXT;",
            f"const i64 blocks_n = ({self.n} + {self.columns - 1}) / {self.columns};",
            f"const i64 n0 = blockIdx.x % blocks_n * {self.columns}, entry = blockIdx.x / blocks_n;",
            "const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;",
            *self.base.lines,
            *apart,
            *self.top.lines,
            *own,
        ]
        batch = tuple(size for _, size in product.batch)
        threads = Threads(ColumnBlocks(batch, product.n, self.columns), Fixed(THREADS))
        return function_text(emitter, body, threads, most=THREADS, alone=True)

    # ---- operands

    def factor(self, names: Mapping[Var, str]) -> tuple[list[str], list[str]]:
        """Statements that compute the elements of A at a place of the depth, and their texts, one for each row."""
        lines: list[str] = []
        texts = []
        for row in range(self.rows):
            e = substitute_vars(self.product.a, {ROW: const(row, I64)})
            scope = Scope(self.top, dict(names), turns="true")
            text = converted(self.emitter.value(e, scope), e.dtype, F32)
            lines += scope.lines
            texts.append(text)
        return lines, texts

    def address(self, names: Mapping[Var, str]) -> tuple[list[str], str]:
        scope = Scope(self.top, dict(names), turns="true")
        index, _ = self.emitter.offset(linear_index(self.load.indices, self.load.source.shape), scope)
        return scope.lines, f"{self.emitter.pointer(self.load.source)} + {index}"

    def element(self, word: str, i: int) -> str:
        """An element of an access, as it is multiplied: rounded to the type of the product."""
        name = self.load.dtype.name
        if name == "f32":
            text = f"bits<float>({word}.{'xyzw'[i]})"
        else:
            text = f"{name}_to_f32((u16)({word}.{'xyzw'[i // 2]} >> {i % 2 * 16}))"
        to = self.product.b.dtype
        return text if to.name in (name, "f32") else converted(converted(text, F32, to), to, F32)

    def result(self) -> list[str]:
        """Statements that store `total` of `row` and `column`."""
        places = {v: e for v, e in self.product.places.items() if v != e}
        scope = Scope(self.top, {ROW: "row", COLUMN: "column", next(iter(RESULT)): "total"}, turns="true")
        index = tuple(substitute_vars(i, places) for i in self.store.index)
        store_line(self.emitter, replace(self.store, expr=substitute_vars(self.store.expr, places), index=index), scope)
        return scope.lines

    # ---- the two ways

    def columns_first(self) -> list[str]:
        """Threads of B [K, N]."""
        width, slices, rows = self.width, THREADS // LANES, self.rows
        lines, texts = self.factor({K: "k"})
        before, address = self.address({K: "k", COLUMN: "column"})
        depth = self.emitter.kind(K)
        step = [
            *lines,
            *(
                f"sum[{r}][{i}] = k_fma({texts[r]}, {self.element('four[j]', i)}, sum[{r}][{i}]);"
                for r in range(rows)
                for i in range(width)
            ),
        ]
        return [
            f"const int own = tid % {LANES}, slice = tid / {LANES};",
            f"const {self.emitter.kind(COLUMN)} column = n0 + own * {width};",
            f"float sum[{rows}][{width}];",
            "#pragma unroll",
            f"for (int i = 0; i < {rows * width}; ++i) sum[i / {width}][i % {width}] = 0;",
            f"if (column < {self.n}) {{",
            f"for ({depth} first = slice; first < {self.k}; first += {AHEAD * slices}) {{",
            f"uint4 four[{AHEAD}];",
            "#pragma unroll",
            f"for (int j = 0; j < {AHEAD}; ++j) {{",
            f"const {depth} k = first + j * {slices};",
            "four[j] = make_uint4(0, 0, 0, 0);",
            f"if (k < {self.k}) {{",
            *before,
            f"four[j] = *(const uint4*)({address});",
            "}",
            "}",
            "#pragma unroll",
            f"for (int j = 0; j < {AHEAD}; ++j) {{",
            f"const {depth} k = first + j * {slices};",
            f"if (k < {self.k}) {{",
            *step,
            "}",
            "}",
            "}",
            "}",
            *self.joined(),
        ]

    def joined(self) -> list[str]:
        """The sums of threads that share columns: those of a warp, then of all warps."""
        width, rows = self.width, self.rows
        return [
            "#pragma unroll",
            f"for (int i = 0; i < {rows * width}; ++i)",
            f"  for (int m = {LANES}; m < 32; m *= 2)",
            f"    sum[i / {width}][i % {width}] += from_lane(sum[i / {width}][i % {width}], m);",
            f"__shared__ float part[{THREADS // 32}][{rows}][{LANES * width}];",
            f"if (lane < {LANES})",
            "#pragma unroll",
            f"  for (int i = 0; i < {rows * width}; ++i)",
            f"    part[warp][i / {width}][own * {width} + i % {width}] = sum[i / {width}][i % {width}];",
            "__syncthreads();",
            f"for (int e = tid; e < {rows * LANES * width}; e += {THREADS}) {{",
            f"const {self.emitter.kind(ROW)} row = e / {LANES * width};",
            f"const {self.emitter.kind(COLUMN)} column = n0 + e % {LANES * width};",
            "float total = 0;",
            "#pragma unroll",
            f"for (int p = 0; p < {THREADS // 32}; ++p) total += part[p][e / {LANES * width}][e % {LANES * width}];",
            f"if (column < {self.n}) {{",
            *self.result(),
            "}",
            "}",
        ]

    def depth_first(self) -> list[str]:
        """Warps of B [N, K]."""
        width, rows = self.width, self.rows
        lines, texts = self.factor({K: "k"})
        before, address = self.address({K: "k0", COLUMN: "column"})
        depth = self.emitter.kind(K)
        step = [
            f"sum[{r}][j] = k_fma(x[{r}][{i}], {self.element('four[j]', i)}, sum[{r}][j]);"
            for i in range(width)
            for r in range(rows)
        ]
        return [
            f"const {self.emitter.kind(COLUMN)} first = n0 + warp * {EACH};",
            f"float sum[{rows}][{EACH}];",
            "#pragma unroll",
            f"for (int i = 0; i < {rows * EACH}; ++i) sum[i / {EACH}][i % {EACH}] = 0;",
            "#pragma unroll 2",
            f"for ({depth} k0 = lane * {width}; k0 < {self.k}; k0 += {32 * width}) {{",
            f"uint4 four[{EACH}];",
            "#pragma unroll",
            f"for (int j = 0; j < {EACH}; ++j) {{",
            f"const {self.emitter.kind(COLUMN)} column = first + j < {self.n} ? first + j : {self.n} - 1;",
            *before,
            f"four[j] = *(const uint4*)({address});",
            "}",
            f"float x[{rows}][{width}];",
            "#pragma unroll",
            f"for (int i = 0; i < {width}; ++i) {{",
            f"const {depth} k = k0 + i;",
            *lines,
            *(f"x[{r}][i] = {text};" for r, text in enumerate(texts)),
            "}",
            "#pragma unroll",
            f"for (int j = 0; j < {EACH}; ++j) {{",
            *step,
            "}",
            "}",
            "#pragma unroll",
            f"for (int i = 0; i < {rows * EACH}; ++i)",
            "  for (int m = 1; m < 32; m *= 2)",
            f"    sum[i / {EACH}][i % {EACH}] += from_lane(sum[i / {EACH}][i % {EACH}], m);",
            f"if (lane < {EACH} && first + lane < {self.n}) {{",
            f"const {self.emitter.kind(COLUMN)} column = first + lane;",
            "#pragma unroll",
            f"for (int r = 0; r < {rows}; ++r) {{",
            f"const {self.emitter.kind(ROW)} row = r;",
            "float total = 0;",
            "#pragma unroll",
            f"for (int j = 0; j < {EACH}; ++j) total = lane == j ? sum[r][j] : total;",
            *self.result(),
            "}",
            "}",
        ]
