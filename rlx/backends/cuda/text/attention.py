"""Attention as one kernel: a block has some query rows of one head, and walks its keys in tiles.

    for each tile of keys:  S = q k^T;  s = the score of each, -inf where a key is not seen
                            peak' = max(peak, s);  p = exp(s - peak')
                            sum = sum * exp(peak - peak') + the sum of p;  y = y * exp(peak - peak') + p v
    y / sum  -> the expression of the result

Operands of 16 bits are multiplied by tensor cores (`mma.sync`, a warp for 16 rows; p is rounded to 16 bits, its sum is
not); those of f32 by threads, each with two rows. (FlashAttention-2, Dao 2023)
"""

from __future__ import annotations

from collections.abc import Mapping

from rlx.backends.cuda.text.emitter import Emitter, Scope
from rlx.backends.cuda.text.form import COLUMN, ROW, K, Target
from rlx.backends.cuda.text.function import Extents, Text, Threads, function_text, store_line, volume
from rlx.backends.cuda.text.loops import Fixed
from rlx.backends.cuda.text.tiles import Brought, Side, in_fours, paired_side
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Shape, Size, evaluate, numel, upper
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Cast, Expr, Load, Var, loads, substitute_vars
from rlx.kernels.loops.analysis import RESULT
from rlx.kernels.lowering import Attention, out_vars
from rlx.kernels.program import Store
from rlx.records import dataclass

__all__ = ["attention_text", "is_suited"]

DEEPEST = 128  # elements of a head
FEW_ROWS = 4  # of queries, up to which a decomposition spreads the keys over more blocks
KEYS = 64  # keys of a tile
ROWS = 32  # query rows of a block where threads multiply
BEYOND = 1024  # places after the last that a tile may reach
HEAD = Var("head_of_keys")
LOG2E = "0x1.715476p+0f"


def is_suited(anchor: Attention) -> bool:
    """Whether there is a kernel for it; else it is computed as its decomposition."""
    types = {e.dtype.name for e in (anchor.q, anchor.k, anchor.v)}
    deep = (anchor.q_shape[3], anchor.v_shape[3])
    encoded = any(x.source.type.encoding is not None for e in (anchor.k, anchor.v) for x in loads(e))
    rows = upper(anchor.q_shape[2])
    return (
        types <= {"f32", "f16", "bf16"}
        and all(isinstance(d, int) and 0 < d <= DEEPEST for d in deep)
        and anchor.place is None
        and anchor.sinks is None
        and not anchor.ring
        and not encoded
        and (rows is None or rows > FEW_ROWS)
    )


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """How many blocks a launch has: one for some rows of a head."""

    entries: Shape
    rows: Size
    each: int

    def __call__(self, extents: Extents) -> int:
        return volume(self.entries, extents) * -(-max(evaluate(self.rows, extents), 0) // self.each)


def attention_text(store: Store, anchor: Attention, narrow: DType | None, target: Target) -> Text:
    """The function of attention with what follows it; `narrow`: the type that tensor cores multiply."""
    return (Plain(store, anchor, DTYPES["f32"]) if narrow is None else Tensor(store, anchor, narrow, target)).text()


class Printer:
    """What both ways share: the walk over keys, which of them are seen, and the result."""

    rows = ROWS
    threads = 256
    keys = KEYS

    def __init__(self, store: Store, anchor: Attention, to: DType) -> None:
        self.store, self.anchor, self.to = store, anchor, to
        self.emitter = Emitter()
        self.b, self.h, self.i, self.j = out_vars(4)
        self.base = Scope(None, {})
        self.top = Scope(self.base, {self.b: "entry", self.h: "head", HEAD: "head_of_keys"})
        emitter, (batch, heads, rows, _) = self.emitter, anchor.q_shape
        places = (
            (self.b, batch),
            (self.h, heads),
            (HEAD, anchor.k_shape[1]),
            (self.i, rows),
            (self.j, anchor.k_shape[2]),
        )
        for v, size in places:
            emitter.ranges.bind(v, size, BEYOND if v in (self.i, self.j) else 0)
        for v, size in ((ROW, rows), (COLUMN, anchor.k_shape[2]), (K, anchor.k_shape[2])):
            emitter.ranges.bind(v, size, BEYOND)
        emitter.ranges.bind(K, DEEPEST, BEYOND)
        emitter.ranges.bind(COLUMN, DEEPEST, BEYOND)
        self.lq, self.lk = emitter.word(rows), emitter.word(anchor.k_shape[2])
        assert isinstance(anchor.q_shape[3], int)
        assert isinstance(anchor.v_shape[3], int)
        self.depth, self.width = anchor.q_shape[3], anchor.v_shape[3]
        self.deep, self.wide = (-(-n // 16) * 16 for n in (self.depth, self.width))

    def operand(self, e: Expr, places: Mapping[Var, Expr]) -> Expr:
        made = substitute_vars(e, dict(places))
        return made if made.dtype is self.to else Cast(made, self.to)

    def operands(self) -> tuple[Expr, Expr, Expr]:
        """q over ROW and K, k over COLUMN (keys) and K, v over K (keys) and COLUMN."""
        a = self.anchor
        return (
            self.operand(a.q, {self.i: ROW, self.j: K}),
            self.operand(a.k, {self.h: HEAD, self.i: COLUMN, self.j: K}),
            self.operand(a.v, {self.h: HEAD, self.i: K, self.j: COLUMN}),
        )

    def begin(self) -> list[str]:
        """Which head and rows a block has, and which keys it walks."""
        anchor, emitter = self.anchor, self.emitter
        heads, key_heads = emitter.word(anchor.q_shape[1]), emitter.word(anchor.k_shape[1])
        count = self.lk if anchor.count is None else emitter.wide(anchor.count, self.top)[0]
        lines = [
            f"const int tid = threadIdx.x, tiles = (int)(({self.lq} + {self.rows - 1}) / {self.rows});",
            f"const int m0 = (int)(blockIdx.x % tiles) * {self.rows};",
            f"const int entry = (int)(blockIdx.x / tiles / {heads}), head = (int)(blockIdx.x / tiles % {heads});",
            f"const int head_of_keys = (int)(head * {key_heads} / {heads});",
            *self.base.lines,
            *self.top.lines,
            f"const int keys = (int)({count}), before = keys - (int){self.lq};",  # row i is at position i + before
        ]
        start, end = "0", "keys"
        if anchor.causal:
            end = f"min_of(keys, m0 + {self.rows} + before)"
        if anchor.window is not None:
            start = f"max_of(m0 + before - {anchor.window - 1}, 0) / {self.keys} * {self.keys}"
        return [*lines, f"const int start = {start}, end = {end};"]

    def score(self) -> tuple[list[str], str]:
        """Statements that make a score of the product `total` at `row` and `key`, and the test that a key is seen."""
        anchor = self.anchor
        test = [f"row < {self.lq}", "key < keys"]
        if anchor.causal:
            test.append("key <= row + before")
        if anchor.window is not None:
            test.append(f"key > row + before - {anchor.window}")
        lines: list[str] = []
        value = "total"
        if anchor.score is not None:
            scope = Scope(self.top, {self.i: "row", self.j: "key", next(iter(RESULT)): "total"}, turns="true")
            text = self.emitter.value(anchor.score, scope)
            lines, value = scope.lines, text
        return [*lines, f"made = {value};"], " && ".join(test)

    def scored(self, product: str, row: str, key: str, to: str) -> list[str]:
        """Statements that make a score, in the base-2 logarithm."""
        lines, test = self.score()
        return [
            f"const {self.emitter.kind(self.i)} row = {row};",
            f"const {self.emitter.kind(self.j)} key = {key};",
            "float made = -RLX_INF32;",
            f"if ({test}) {{",
            f"const float total = {product} * {float(self.anchor.scale).hex()}f;",
            *lines,
            "}",
            f"{to} = made * {LOG2E};",
        ]

    def result(self) -> list[str]:
        """Statements that store the element `value` of `row` and `column`, of which `sum` and `peak` are known."""
        names = out_vars(4)
        scope = Scope(self.top, {names[2]: "row", names[3]: "column", next(iter(RESULT)): "total"}, turns="true")
        store_line(self.emitter, self.store, scope)
        zero = {"nan": "keys == 0", "zero": "peak == -RLX_INF32", "mended": "!(sum > 0)"}[self.anchor.empty_row]
        return [
            f"if (row < {self.lq} && column < {self.width}) {{",
            f"const float total = {zero} || keys == 0 ? 0.0f : value / sum;",
            *scope.lines,
            "}",
        ]

    def finished(self, body: list[str]) -> Text:
        batch, heads, rows, _ = self.anchor.q_shape
        threads = Threads(RowBlocks((batch, heads), rows, self.rows), Fixed(self.threads))
        return function_text(
            self.emitter, body, threads, most=self.threads, alone=True, overlaps=isinstance(self, Tensor)
        )


class Tensor(Printer):
    """Tensor cores: each warp has 16 query rows and a part of the keys of each tile; parts are joined at the end.

    Where there are few blocks, four warps share the keys of 16 rows: `shares` is their number.
    """

    def __init__(self, store: Store, anchor: Attention, to: DType, target: Target) -> None:
        super().__init__(store, anchor, to)
        entries, rows = upper(numel(anchor.q_shape[:2])) or 64, upper(anchor.q_shape[2]) or 4096
        few = entries * -(-rows // 64) < target.processors
        self.shares = (4 if max(self.deep, self.wide) <= 64 else 2) if few else 1
        self.own = 32 if few else 64  # keys of a warp's part
        self.keys = self.own * self.shares
        self.rows = 64 // self.shares
        self.threads = 128

    def side(self, name: str, e: Expr, along: Var, start: str, lines: int, step: int, size: str, depth: str) -> Brought:
        return paired_side(self.emitter, self.top, Side(name, e, along, start, lines, step, size, depth, self.threads))

    def text(self) -> Text:
        q, k, v = self.operands()
        deep, wide, keys, shares = self.deep, self.wide, self.keys, self.shares
        lines = next(n for n in (self.rows, 32, 64) if n * deep % (4 * self.threads) == 0)  # each thread has as many
        own = self.side("q", q, ROW, "m0", lines, deep, self.lq, str(self.depth))
        key = self.side("k", k, COLUMN, "key0", keys, deep, "keys", str(self.depth))
        value = self.side("v", v, COLUMN, "0", wide, keys, str(self.width), "keys")
        result = self.result()
        begin = self.begin()
        pitch, pitch_v = deep // 2 + 4, keys // 2 + 4
        words = max(keys * pitch + wide * pitch_v, shares * self.rows * (wide + 4))
        body = [
            *begin,
            f"__shared__ __align__(16) u32 shared[{words}];",
            f"__shared__ float peak_s[{shares}][{self.rows}], sum_s[{shares}][{self.rows}];",
            f"u32 (*k_s)[{pitch}] = (u32 (*)[{pitch}])shared, (*q_s)[{pitch}] = k_s;",
            f"u32 (*v_s)[{pitch_v}] = (u32 (*)[{pitch_v}])(shared + {keys * pitch});",
            f"const int lane = tid % 32, warp = tid / {32 * shares}, share = tid / 32 % {shares};",
            "const int g = lane / 4, t4 = lane % 4;",
            f"u32 q[{deep // 16}][4];",
            f"float y[{wide // 8}][4];",
            "float peaks[2] = {-RLX_INF32, -RLX_INF32}, sums[2] = {0, 0};",
            "#pragma unroll",
            f"for (int i = 0; i < {wide // 2}; ++i) y[i / 4][i % 4] = 0;",
            *key.declared,
            *value.declared,
            *self.bring(key, value, "start"),
            "{",
            "const int k0 = 0;",
            *own.declared,
            *own.load,
            *own.store,
            "}",
            "__syncthreads();",
            "#pragma unroll",
            f"for (int i = 0; i < {deep // 4}; ++i)",
            "  q[i / 4][i % 4] = q_s[warp * 16 + i % 2 * 8 + g][i / 4 * 8 + i / 2 % 2 * 4 + t4];",
            "__syncthreads();",
            f"for (int at = start; at < end; at += {keys}) {{",
            *key.store,
            *value.store,
            "__syncthreads();",
            f"if (at + {keys} < end) {{",
            *self.bring(key, value, f"at + {keys}"),
            "}",
            *self.tile(),
            "__syncthreads();",
            "}",
            "RLX_NEXT;",
            *self.joined(),
            f"for (int e = tid; e < {self.rows * wide}; e += {self.threads}) {{",
            f"const int line = e / {wide}, column = e % {wide};",
            f"const {self.emitter.kind(self.i)} row = m0 + line;",
            *self.totals(),
            *result,
            "}",
        ]
        return self.finished(body)

    def joined(self) -> list[str]:
        """Parts of the result, their peaks and sums, to shared memory."""
        pitch = self.wide + 4
        return [
            f"float (*y_s)[{self.rows}][{pitch}] = (float (*)[{self.rows}][{pitch}])shared;",
            "#pragma unroll",
            "for (int h = 0; h < 2; ++h) {",
            "float part = sums[h];",
            "part = part + from_lane(part, 1);",
            "part = part + from_lane(part, 2);",
            "const int line = warp * 16 + g + h * 8;",
            "if (t4 == 0) { peak_s[share][line] = peaks[h]; sum_s[share][line] = part; }",
            "#pragma unroll",
            f"for (int i = 0; i < {self.wide // 4}; ++i)",
            "  y_s[share][line][i / 2 * 8 + t4 * 2 + i % 2] = y[i / 2][2 * h + i % 2];",
            "}",
            "__syncthreads();",
        ]

    def totals(self) -> list[str]:
        """The `value`, `sum` and `peak` of an element, of all parts."""
        if self.shares == 1:
            return ["const float value = y_s[0][line][column], sum = sum_s[0][line], peak = peak_s[0][line];"]
        return [
            "float peak = peak_s[0][line], value = 0, sum = 0;",
            "#pragma unroll",
            f"for (int s = 1; s < {self.shares}; ++s) peak = k_max(peak, peak_s[s][line]);",
            "const float base = peak == -RLX_INF32 ? 0.0f : peak;",
            "#pragma unroll",
            f"for (int s = 0; s < {self.shares}; ++s) {{",
            "const float less = exp2f(peak_s[s][line] - base);",
            "value += y_s[s][line][column] * less;",
            "sum += sum_s[s][line] * less;",
            "}",
        ]

    @staticmethod
    def bring(key: Brought, value: Brought, at: str) -> list[str]:
        """Keys and values of a tile into registers."""
        return ["{", f"const int key0 = {at}, k0 = 0;", *key.load, "}", "{", f"const int k0 = {at};", *value.load, "}"]

    def tile(self) -> list[str]:
        """Scores of a warp's part of a tile of keys, and their part of the result."""
        deep, wide, keys, name = self.deep, self.wide, self.own, self.to.name
        return [
            f"const int first = share * {keys};",
            f"float s[{keys // 8}][4];",
            "#pragma unroll",
            f"for (int j = 0; j < {keys // 8}; ++j) {{",
            "s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0;",
            "#pragma unroll",
            f"for (int kk = 0; kk < {deep // 16}; ++kk) {{",
            "u32 w[2] = {k_s[first + j * 8 + g][kk * 8 + t4], k_s[first + j * 8 + g][kk * 8 + 4 + t4]};",
            f"mma_{name}(s[j], q[kk], w);",
            "}",
            "}",
            "#pragma unroll",
            f"for (int i = 0; i < {keys // 2}; ++i) {{",
            *self.scored(
                "s[i / 4][i % 4]",
                "m0 + warp * 16 + g + i / 2 % 2 * 8",
                "at + first + i / 4 * 8 + t4 * 2 + i % 2",
                "s[i / 4][i % 4]",
            ),
            "}",
            "#pragma unroll",
            "for (int h = 0; h < 2; ++h) {",
            "float most = peaks[h];",
            "#pragma unroll",
            f"for (int i = 0; i < {keys // 4}; ++i) most = k_max(most, s[i / 2][2 * h + i % 2]);",
            "most = k_max(most, from_lane(most, 1));",
            "most = k_max(most, from_lane(most, 2));",
            "const float base = most == -RLX_INF32 ? 0.0f : most, less = exp2f(peaks[h] - base);",
            "peaks[h] = most;",
            "sums[h] *= less;",
            "#pragma unroll",
            f"for (int i = 0; i < {keys // 4}; ++i) {{",
            "const float p = exp2f(s[i / 2][2 * h + i % 2] - base);",
            "s[i / 2][2 * h + i % 2] = p;",
            "sums[h] += p;",
            "}",
            "#pragma unroll",
            f"for (int i = 0; i < {wide // 4}; ++i) y[i / 2][2 * h + i % 2] *= less;",
            "}",
            "#pragma unroll",
            f"for (int kk = 0; kk < {keys // 16}; ++kk) {{",
            "u32 p[4];",
            "#pragma unroll",
            "for (int i = 0; i < 4; ++i) {",
            "const float* pair = s[2 * kk + i / 2] + i % 2 * 2;",
            f"p[i] = (u32)to_{name}(pair[0]) | (u32)to_{name}(pair[1]) << 16;",
            "}",
            "#pragma unroll",
            f"for (int j = 0; j < {wide // 8}; ++j) {{",
            "const int word = first / 2 + kk * 8 + t4;",
            "u32 w[2] = {v_s[j * 8 + g][word], v_s[j * 8 + g][word + 4]};",
            f"mma_{name}(y[j], p, w);",
            "}",
            "}",
        ]


class Plain(Printer):
    """Threads that multiply f32: sixteen have two rows, each every sixteenth key, then every sixteenth four columns."""

    def __init__(self, store: Store, anchor: Attention, to: DType) -> None:
        super().__init__(store, anchor, to)
        self.keys = 64 if max(self.deep, self.wide) <= 64 else 32

    def copy(self, name: str, e: Expr, lines: tuple[Var, str, int, str], columns: tuple[Var, int, int]) -> list[str]:
        """Statements that bring a tile into `name`_s; lines: (variable, start, how many, end); columns: (variable,
        how many, of which so many are there)."""
        (line, start, count, end), (column, width, there) = lines, columns
        side = Side(name, e, column, "0", width, count, str(there), end, self.threads)
        inside = f"{name}_line < {end} && {name}_column < {there}"
        four = e.dtype.name == "f32" and isinstance(e, Load) and in_fours(side, column)
        step = 4 if four else 1
        head = [
            f"for (int e = tid; e < {count * width // step}; e += {self.threads}) {{",
            f"const int {name}_line = {start} + e / {width // step}, {name}_column = e % {width // step} * {step};",
        ]
        to = f"{name}_s[e / {width // step}][{name}_column]"
        scope = Scope(self.top, {line: f"{name}_line", column: f"{name}_column"}, turns="true")
        if four:
            assert isinstance(e, Load)
            index, _ = self.emitter.offset(linear_index(e.indices, e.source.shape), scope)
            return [
                *head,
                "float4 four = {0, 0, 0, 0};",
                f"if ({inside}) {{",
                *scope.lines,
                f"four = *(const float4*)({self.emitter.pointer(e.source)} + {index});",
                "}",
                f"*(float4*)&{to} = four;",
                "}",
            ]
        text = self.emitter.value(e, scope)
        return [*head, f"{to} = 0;", f"if ({inside}) {{", *scope.lines, f"{to} = {text};", "}", "}"]

    def text(self) -> Text:
        q, k, v = self.operands()
        deep, wide, keys, rows = self.deep, self.wide, self.keys, self.rows
        quads = -(-wide // 64)  # groups of four columns that a thread has
        result = self.result()
        begin = self.begin()
        pitch = max(deep, wide) + 4
        body = [
            *begin,
            f"__shared__ __align__(16) float q_s[{rows}][{deep + 4}], k_s[{keys}][{pitch}], p_s[{rows}][{keys + 4}];",
            f"float (*v_s)[{pitch}] = k_s;",
            "const int r0 = tid / 16 * 2, own = tid % 16;",
            f"float y[2][{4 * quads}], peaks[2] = {{-RLX_INF32, -RLX_INF32}}, sums[2] = {{0, 0}};",
            "#pragma unroll",
            f"for (int i = 0; i < {8 * quads}; ++i) y[i / {4 * quads}][i % {4 * quads}] = 0;",
            *self.copy("q", q, (ROW, "m0", rows, self.lq), (K, deep, self.depth)),
            f"for (int at = start; at < end; at += {keys}) {{",
            "__syncthreads();",
            *self.copy("k", k, (COLUMN, "at", keys, "keys"), (K, deep, self.depth)),
            "__syncthreads();",
            *self.scores(),
            "__syncthreads();",
            *self.copy("v", v, (K, "at", keys, "keys"), (COLUMN, wide, self.width)),
            "__syncthreads();",
            f"for (int j = 0; j < {keys}; ++j) {{",
            "const float p[2] = {p_s[r0][j], p_s[r0 + 1][j]};",
            "#pragma unroll",
            f"for (int c = 0; c < {quads}; ++c) {{",
            "const int column = own * 4 + c * 64;",
            f"if (column < {wide}) {{",
            "const float4 w = *(const float4*)&v_s[j][column];",
            "#pragma unroll",
            "for (int h = 0; h < 2; ++h) {",
            "y[h][4 * c] = k_fma(p[h], w.x, y[h][4 * c]);",
            "y[h][4 * c + 1] = k_fma(p[h], w.y, y[h][4 * c + 1]);",
            "y[h][4 * c + 2] = k_fma(p[h], w.z, y[h][4 * c + 2]);",
            "y[h][4 * c + 3] = k_fma(p[h], w.w, y[h][4 * c + 3]);",
            "}",
            "}",
            "}",
            "}",
            "}",
            "RLX_NEXT;",
            "#pragma unroll",
            f"for (int i = 0; i < {8 * quads}; ++i) {{",
            f"const {self.emitter.kind(self.i)} row = m0 + r0 + i / {4 * quads};",
            f"const int column = own * 4 + i % {4 * quads} / 4 * 64 + i % 4;",
            f"const float value = y[i / {4 * quads}][i % {4 * quads}], sum = sums[i / {4 * quads}];",
            f"const float peak = peaks[i / {4 * quads}];",
            *result,
            "}",
        ]
        return self.finished(body)

    def scores(self) -> list[str]:
        """Scores of a tile of keys to `p_s`, as their exponentials."""
        each = self.keys // 16
        return [
            f"float s[2][{each}];",
            "#pragma unroll",
            f"for (int i = 0; i < {2 * each}; ++i) s[i / {each}][i % {each}] = 0;",
            f"for (int d = 0; d < {self.deep}; d += 4) {{",
            "const float4 x[2] = {*(const float4*)&q_s[r0][d], *(const float4*)&q_s[r0 + 1][d]};",
            "#pragma unroll",
            f"for (int j = 0; j < {each}; ++j) {{",
            "const float4 w = *(const float4*)&k_s[own + 16 * j][d];",
            "#pragma unroll",
            "for (int h = 0; h < 2; ++h) {",
            "s[h][j] = k_fma(x[h].x, w.x, s[h][j]);",
            "s[h][j] = k_fma(x[h].y, w.y, s[h][j]);",
            "s[h][j] = k_fma(x[h].z, w.z, s[h][j]);",
            "s[h][j] = k_fma(x[h].w, w.w, s[h][j]);",
            "}",
            "}",
            "}",
            "#pragma unroll",
            f"for (int i = 0; i < {2 * each}; ++i) {{",
            *self.scored(
                f"s[i / {each}][i % {each}]",
                f"m0 + r0 + i / {each}",
                f"at + own + 16 * (i % {each})",
                f"s[i / {each}][i % {each}]",
            ),
            "}",
            "#pragma unroll",
            "for (int h = 0; h < 2; ++h) {",
            "float most = peaks[h], part = 0;",
            "#pragma unroll",
            f"for (int j = 0; j < {each}; ++j) most = k_max(most, s[h][j]);",
            "for (int mask = 8; mask; mask >>= 1) most = k_max(most, from_lane(most, mask));",
            "const float base = most == -RLX_INF32 ? 0.0f : most, less = exp2f(peaks[h] - base);",
            "peaks[h] = most;",
            "#pragma unroll",
            f"for (int j = 0; j < {each}; ++j) {{",
            "const float p = exp2f(s[h][j] - base);",
            "p_s[r0 + h][own + 16 * j] = p;",
            "part += p;",
            "}",
            "for (int mask = 8; mask; mask >>= 1) part += from_lane(part, mask);",
            "sums[h] = sums[h] * less + part;",
            "#pragma unroll",
            f"for (int i = 0; i < {4 * -(-self.wide // 64)}; ++i) y[h][i] *= less;",
            "}",
        ]
