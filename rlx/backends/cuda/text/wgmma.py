"""Products of 16-bit operands on Hopper: the copy engine brings tiles, groups of four warps multiply them (wgmma).

    one warp (or group):  for each step of the depth:  wait for an empty stage;  start the copies of both operands
    the other groups:     for each step of the depth:  wait for a full stage;  c += A * B
                          C[rows][columns] <- c in shared memory;  for each element: store the expression of the result

Where there are few tiles the blocks of a cluster share the depth, and each adds up rows of all parts in order. Where
there are many, two groups have tiles of their own in turn, so that one stores while the other multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.text.emitter import C_TYPES, Emitter, Scope
from rlx.backends.cuda.text.form import COLUMN, ROW, K, Product, Target
from rlx.backends.cuda.text.function import (
    Extents,
    PartStore,
    Special,
    Text,
    Threads,
    function_text,
    store_line,
    targets,
    volume,
)
from rlx.backends.cuda.text.loops import Fixed
from rlx.backends.cuda.text.maps import LINE, Operand, WindowOperand, operand
from rlx.ir.dtype import DType
from rlx.ir.shape import Shape, Size, evaluate, numel, same, upper
from rlx.kernels.affine import Affine, linear_index
from rlx.kernels.analysis import PRICES
from rlx.kernels.expr import Apply, Expr, Var, size_expr, substitute_vars, walk
from rlx.kernels.loops.analysis import RESULT
from rlx.kernels.program import Buffer, Store
from rlx.records import dataclass, replace

__all__ = ["wgmma_text"]

SHARED = 227 * 1024  # bytes that a block can have
MOST_STAGES = 16
BEYOND = 1024  # places after the last that a tile may reach
PAD = 8  # floats between lines of a result in shared memory: the lines of eight threads then lie in other banks
PIECE = 64  # columns of a tile that are stored at a time where two groups take turns


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a tile, and the stages of shared memory that its operands go through.

    `split`: blocks that share its depth; `turns`: two groups of threads have tiles of their own, each block some.
    """

    rows: int
    columns: int
    stages: int
    split: int = 1
    turns: bool = False

    @property
    def groups(self) -> int:
        """Groups that multiply."""
        return 2 if self.turns else self.rows // 64

    @property
    def held(self) -> int:
        """Blocks of 64 rows that each of them has."""
        return self.rows // 64 if self.turns else 1

    @property
    def threads(self) -> int:
        return 128 * self.groups + (128 if self.turns else 32)

    @property
    def stage(self) -> int:
        """Bytes of a stage."""
        return (self.rows + self.columns) * 128

    @property
    def width(self) -> int:
        """Columns of the part of a result that is in shared memory."""
        return PIECE if self.turns else self.columns

    @property
    def staged(self) -> int:
        """Bytes of that part, of one group."""
        return 64 * (self.width + PAD) * 4

    @property
    def shared(self) -> int:
        own = self.groups * self.staged
        return (
            (self.stages * self.stage + own if self.turns else max(self.stages * self.stage, own))
            + 16 * MOST_STAGES
            + 32
        )

    def at(self, depth: int, tiles: int, processors: int) -> Tile:
        """The same with as many stages as are of use: all of the depth, as far as blocks do not share a processor."""
        steps = -(-depth // (LINE * self.split))
        own = self.groups * self.staged if self.turns else 0
        room = (SHARED - 2048 - own) // self.stage
        alone = self.turns or tiles * self.split <= processors
        stages = min(room, steps, MOST_STAGES) if alone else min(room, self.stages)
        return replace(self, stages=max(stages, 2))

    def nanoseconds(self, tiles: int, depth: int, processors: int) -> float:
        """About how long a launch takes: see `chosen`."""
        steps = -(-depth // (LINE * self.split))
        blocks = tiles * self.split
        waves = -(-blocks // processors)
        together = 1 if self.turns else max(min(SHARED // self.shared, waves), 1)
        multiplied = waves * steps * self.rows * self.columns / 56
        arriving = -(-waves // together) * steps * max(700 / self.stages, 109)
        read = blocks * steps * self.stage / 12000
        stored = 14 * self.held * self.columns / 2 * (1 if self.turns else -(-waves // together)) / self.split
        again = 0 if self.turns else 600 * (waves - 1)
        cluster = 0 if self.split == 1 else 1000 if blocks <= processors else 5000
        return 1600 + max(multiplied, arriving, read) + stored + again + cluster


TILES = (
    *(Tile(64, 64, 6, split) for split in (1, 2, 4, 8)),
    *(Tile(128, 64, 4, split) for split in (1, 2, 4)),
    *(Tile(128, 128, 3, split) for split in (1, 2, 4)),
    Tile(128, 192, 5),
    Tile(128, 256, 4),
    Tile(128, 128, 5, turns=True),
)


@dataclass(frozen=True, eq=False)
class TileBlocks:
    """How many blocks a launch has."""

    batch: Shape
    m: Size
    n: Size
    tile: Tile
    processors: int

    def __call__(self, extents: Extents) -> int:
        rows = -(-max(evaluate(self.m, extents), 0) // self.tile.rows)
        columns = -(-max(evaluate(self.n, extents), 0) // self.tile.columns)
        tiles = volume(self.batch, extents) * rows * columns
        return min(tiles, self.processors) if self.tile.turns else tiles * self.tile.split


def chosen(product: Product, processors: int) -> Tile:
    """The tile that takes the shortest time, about, at the upper bounds of sizes, as far as these are known.

    A launch takes 1,600 ns; a processor multiplies 3,600 pairs in one, a step takes 109 or more, and what is read
    arrives after 700; the second level of memory gives 12 KB in one, a thread stores an element in 14; a cluster takes
    1,000. Fitted to an H200 (benchmarks/cuda.py products --tiles).
    """
    batch, m, n, k = (upper(s) or 4096 for s in (numel([s for _, s in product.batch]), product.m, product.n, product.k))

    def fitted(tile: Tile) -> tuple[float, Tile]:
        tiles = batch * -(-m // tile.rows) * -(-n // tile.columns)
        made = tile.at(k, tiles, processors)
        return made.nanoseconds(tiles, k, processors), made

    return min(map(fitted, TILES), key=lambda pair: pair[0])[1]


def wgmma_text(stores: Sequence[Store], product: Product, dtype: DType, target: Target) -> Text | None:
    """The function, None where an operand is not in memory as it is multiplied; `stores` has all, or a `PartStore` for
    some columns each."""
    names = [v for v, _ in product.batch]
    a: Operand | WindowOperand | None = operand(product.a, ROW, names)
    if a is None and product.window is not None:
        a = WindowOperand(product.window)
    sides = a, operand(product.b, COLUMN, names)
    if not target.hopper or sides[0] is None or sides[1] is None or {s.dtype for s in sides if s} != {dtype.name}:
        return None
    if isinstance(sides[0], Operand):
        product = folded(product, sides[0], sides[1])
    return Printer(stores, product, (sides[0], sides[1]), dtype, target).text()


def folded(product: Product, a: Operand, b: Operand) -> Product:
    """The same with batch axes as rows, where B has no such axis and A lies as if they were rows."""
    batch, m, places = list(product.batch), product.m, dict(product.places)
    while batch:
        v, size = batch[-1]
        if v in b.apart or a.by_lines or same(a.apart.get(v, 0), m * a.pitch) is not True:
            break
        batch.pop()
        inner = dict.fromkeys((ROW,), ROW % size_expr(m))
        places = {name: substitute_vars(e, {**inner, v: ROW // size_expr(m)}) for name, e in places.items()}
        m = m * size
    return replace(product, batch=tuple(batch), m=m, places=places)


class Printer:
    """Prints one product."""

    def __init__(
        self,
        stores: Sequence[Store],
        product: Product,
        sides: tuple[Operand | WindowOperand, Operand],
        dtype: DType,
        target: Target,
    ) -> None:
        self.stores, self.product, self.dtype, self.target = stores, product, dtype, target
        self.a, self.b = sides
        self.tile = chosen(product, target.processors)
        self.emitter = Emitter()
        self.batch = [v for v, _ in product.batch]
        self.m, self.n, self.k = (self.emitter.word(s) for s in (product.m, product.n, product.k))
        self.base = Scope(None, {})
        self.top = Scope(self.base, {v: v.name for v in self.batch})

    def text(self) -> Text:
        emitter, tile, product = self.emitter, self.tile, self.product
        apart = emitter.split("entry", [(v, v.name, size) for v, size in product.batch])
        for v, size in ((ROW, product.m), (COLUMN, product.n), (K, product.k)):
            emitter.ranges.bind(v, size, BEYOND)
        maps = (
            self.a.form(emitter, product.m, product.k, tile.rows, product.batch),
            self.b.form(emitter, product.n, product.k, tile.columns, product.batch),
        )
        element = self.elements()
        where = [*self.place(), *apart, *self.top.lines]
        body = [*self.begin(), *self.base.lines]
        body += self.in_turns(where, element) if tile.turns else self.at_once(where, element)
        batch = tuple(size for _, size in product.batch)
        threads = Threads(TileBlocks(batch, product.m, product.n, tile, self.target.processors), Fixed(tile.threads))
        special = Special(maps, tile.shared, tile.split, self.helpers())
        return function_text(emitter, body, threads, most=tile.threads, alone=True, special=special)

    # ---- parts of the function

    def begin(self) -> list[str]:
        """Places in shared memory, and barriers: `full` of a stage for the copies, `empty` for the warps."""
        t = self.tile
        staged = t.stages * t.stage
        bars = max(staged, 0 if t.turns else t.groups * t.staged) + (t.groups * t.staged if t.turns else 0)
        count = 4 * (1 if t.turns else t.groups)
        return [
            "u8* const memory = dynamic_shared();",
            f"const u32 a_at = shared_address(memory), b_at = a_at + {t.stages * t.rows * 128};",
            f"const u32 full = a_at + {bars}, empty = full + {8 * t.stages}, turn = empty + {8 * t.stages};",
            "if (threadIdx.x == 0) {",
            f"for (int s = 0; s < {t.stages}; ++s) {{ bar_init(full + 8 * s, 1); bar_init(empty + 8 * s, {count}); }}",
            *(["bar_init(turn, 4);", "bar_init(turn + 8, 4);"] if t.turns else []),
            "bars_ready();",
            "map_soon(&map0);",
            "map_soon(&map1);",
            "}",
            "cluster_sync();" if t.split > 1 else "__syncthreads();",
            "const int team = from_first(threadIdx.x / 128), tid = threadIdx.x % 128;",
            "const int lane = tid % 32, warp = tid / 32;",
            f"const int tiles_m = (int)(({self.m} + {t.rows - 1}) / {t.rows});",
            f"const int tiles_n = (int)(({self.n} + {t.columns - 1}) / {t.columns});",
            f"const int steps = (int)(({self.k} + {LINE - 1}) / {LINE});",
        ]

    def place(self) -> list[str]:
        """The tile of a number; eight rows of tiles are walked together, so that B is read while it is near."""
        t = self.tile
        return [
            "const int entry = number / (tiles_m * tiles_n), of_entry = number - entry * (tiles_m * tiles_n);",
            "const int band = of_entry / (8 * tiles_n) * 8, high = tiles_m - band < 8 ? tiles_m - band : 8;",
            f"const int m0 = (band + (of_entry - band * tiles_n) % high) * {t.rows};",
            f"const int n0 = (of_entry - band * tiles_n) / high * {t.columns};",
            *self.a.prepared(),
        ]

    def copies(self, step: str, which: str = "ab") -> list[str]:
        """The copies of a step into stage `s`."""
        t, made = self.tile, []
        if "a" in which:
            to = f"a_at + s * {t.rows * 128}"
            made += self.a.copies("map0", to, "m0", step, t.rows, self.batch)
        if "b" in which:
            to = f"b_at + s * {t.columns * 128}"
            made += self.b.copies("map1", to, "n0", step, t.columns, self.batch)
        return made

    def multiply(self, first: str, last: str) -> list[str]:
        """The loop of a group over steps of the depth, from stage `s` of parity `ph` on."""
        t, a, b = self.tile, int(self.a.by_lines), int(self.b.by_lines)
        call = f"wgmma_{self.dtype.name}<{a}, {b}>"
        return [
            "int before = 0;",
            f"for (int k = {first}; k < {last}; ++k) {{",
            "bar_wait(full + 8 * s, ph);",
            f"const u64 x = product_operand<{a}>(a_at + s * {t.rows * 128} + {'0' if t.turns else 'team * 8192'});",
            f"const u64 y = product_operand<{b}>(b_at + s * {t.columns * 128});",
            "products_begin();",
            "#pragma unroll",
            f"for (int i = 0; i < {4 * t.held}; ++i)",
            f"  {call}(c[i % {t.held}], x + i / {t.held} * product_step<{a}>() + i % {t.held} * 512,",
            f"    y + i / {t.held} * product_step<{b}>());",
            "products_commit();",
            f"if (k > {first}) {{",
            "products_wait<1>();",
            "if (lane == 0) bar_arrive(empty + 8 * before);",
            "}",
            "before = s;",
            f"if (++s == {t.stages}) {{ s = 0; ph ^= 1; }}",
            "}",
        ]

    def declared(self) -> list[str]:
        return [f"float c[{self.tile.held}][{self.tile.columns // 2}];"]

    def emptied(self) -> list[str]:
        t = self.tile
        return [
            "#pragma unroll",
            f"for (int i = 0; i < {t.held * t.columns // 2}; ++i) c[i / {t.columns // 2}][i % {t.columns // 2}] = 0;",
        ]

    def done(self) -> list[str]:
        """Waits for the products."""
        return [f"products_done(c[{i}]);" for i in range(self.tile.held)]

    def settle(self, block: str, first: int) -> list[str]:
        """Columns of a group's sums to shared memory, from column `first` of block `block` on."""
        t = self.tile
        return [
            "#pragma unroll",
            f"for (int j = 0; j < {t.width // 4}; ++j) {{",
            f"const int at = {first // 2} + j / 2 * 4 + j % 2 * 2;",
            f"*(float2*)(c_s + (warp * 16 + lane / 4 + j % 2 * 8) * {t.width + PAD} + j / 2 * 8 + lane % 4 * 2) =",
            f"  make_float2(c[{block}][at], c[{block}][at + 1]);",
            "}",
        ]

    def at_once(self, where: Sequence[str], element: Sequence[str]) -> list[str]:
        """A block for a tile, or for a part of its depth."""
        t = self.tile
        split = t.split > 1
        early = self.b.buffer.is_fixed
        body = [
            f"const int part = {'(int)cluster_rank()' if split else '0'}, number = blockIdx.x / {t.split};",
            f"const int first = steps * part / {t.split}, last = steps * (part + 1) / {t.split};",
            *where,
            f"float* const c_s = (float*)memory + team * {t.staged // 4};",
            "int s = 0, ph = 0;",
            f"if (team == {t.groups}) {{",
            "if (lane == 0) {",
        ]
        if early:  # what no kernel writes is read before the kernel before is done
            body += [
                f"const int ahead = last - first < {t.stages} ? last - first : {t.stages};",
                "for (; s < ahead; ++s) {",
                "const u32 bar = full + 8 * s;",
                f"bar_expect(bar, {t.stage});",
                *self.copies("first + s", "b"),
                "}",
                "s = 0;",
            ]
        body += [
            "RLX_WAIT;",
            "for (int k = first; k < last; ++k) {",
            *self.next_stage(early=early),
            "}",
            "}",
            "} else {",
            *self.declared(),
            *self.emptied(),
            *self.multiply("first", "last"),
            *self.done(),
            "RLX_NEXT;",
            f"sync_threads(1, {128 * t.groups});",  # nobody reads operands any more
            *self.settle("0", 0),
            *([] if split else ["RLX_WAIT;", "sync_threads(2 + team, 128);", *self.share(element)]),
            "}",
        ]
        if split:
            body += ["cluster_sync();", f"if (team < {t.groups}) {{", "RLX_WAIT;", *self.share(element), "}"]
            body += ["cluster_sync();"]
        return body

    def next_stage(self, *, early: bool = False) -> list[str]:
        """Has the operands of step k copied to stage s once its readers are done; with `early` some of B are there."""
        t = self.tile
        copied = ["bar_wait(empty + 8 * s, ph ^ 1);", f"bar_expect(bar, {t.stage});", *self.copies("k")]
        if early:
            copied = [f"if (k - first < ahead) {{ {' '.join(self.copies('k', 'a'))} }} else {{", *copied, "}"]
        return ["const u32 bar = full + 8 * s;", *copied, f"if (++s == {t.stages}) {{ s = 0; ph ^= 1; }}"]

    def share(self, element: Sequence[str], block: str = "0", first: str = "0") -> list[str]:
        """The loop over four elements at a time of what lies in shared memory, by the threads of a group."""
        t = self.tile
        own, wide = 64 // t.split, t.width // 4
        line = f"at / {wide}" + (f" + part * {own}" if t.split > 1 else "")
        rows = f"{block} * 64" if t.turns else "team * 64"
        return [
            f"#pragma unroll {2 if any(is_costly(s.expr) for s in self.stores) else 4}",
            f"for (int at = tid; at < {own * wide}; at += 128) {{",
            f"const int line = {line}, c0 = at % {wide} * 4;",
            f"const {self.emitter.kind(ROW)} row = m0 + {rows} + line;",
            f"const {self.emitter.kind(COLUMN)} at0 = n0 + {first} + c0;",
            f"if (row < {self.m} && at0 < {self.n}) {{",
            *self.sums(f"c_s + line * {t.width + PAD} + c0"),
            *element,
            "}",
            "}",
        ]

    def sums(self, at: str) -> list[str]:
        if self.tile.split == 1:
            return [f"const float4 four = *(const float4*)({at});"]
        return [
            f"float4 four = remote_four({at}, 0);",
            "#pragma unroll",
            f"for (int r = 1; r < {self.tile.split}; ++r) {{",
            f"const float4 more = remote_four({at}, r);",
            "four.x += more.x; four.y += more.y; four.z += more.z; four.w += more.w;",
            "}",
        ]

    def in_turns(self, where: Sequence[str], element: Sequence[str]) -> list[str]:
        """Blocks that stay, of which two groups have every other tile: one stores while the other multiplies."""
        t = self.tile
        size = " * ".join(self.emitter.word(s) for _, s in self.product.batch) or "1"
        head = f"const int tiles = (int)(tiles_m * tiles_n * ({size}));"
        pieces: list[str] = []
        for block in range(t.held):
            for first in range(0, t.columns, PIECE):
                pieces += ["sync_threads(1 + team, 128);", *self.settle(str(block), first)]
                pieces += ["sync_threads(1 + team, 128);", *self.share(element, str(block), str(first))]
        return [
            head,
            f"float* const c_s = (float*)(memory + {t.stages * t.stage}) + team * {t.staged // 4};",
            f"if (team == {t.groups}) {{",
            "registers_less<40>();",
            "if (threadIdx.x % 128 == 0) {",
            "RLX_WAIT;",
            "int s = 0, ph = 0;",
            "for (int number = blockIdx.x; number < tiles; number += gridDim.x) {",
            *where,
            "for (int k = 0; k < steps; ++k) {",
            *self.next_stage(),
            "}",
            "}",
            "}",
            "} else {",
            "registers_more<232>();",
            "RLX_WAIT;",
            *self.declared(),
            "int turns = team ^ 1;",  # the parity of this team's next turn: nobody runs a lap ahead of its barriers
            "int done = team * steps;",  # steps of tiles before
            "for (int number = blockIdx.x + team * gridDim.x; number < tiles; number += 2 * gridDim.x) {",
            *where,
            f"int s = done % {t.stages}, ph = done / {t.stages} & 1;",
            "bar_wait(turn + 8 * team, turns & 1);",
            "turns ^= 1;",
            *self.emptied(),
            *self.multiply("0", "steps"),
            "if (lane == 0) bar_arrive(turn + 8 * (team ^ 1));",
            *self.done(),
            "if (lane == 0 && steps > 0) bar_arrive(empty + 8 * before);",
            *pieces,
            "done += 2 * steps;",
            "}",
            "RLX_NEXT;",
            "}",
        ]

    # ---- elements

    def elements(self) -> list[str]:
        """Statements that store four neighbouring columns of a row, from column `at0` on."""
        if not isinstance(self.stores[0], PartStore):
            return ["const auto column0 = at0;", *self.four(self.stores[0], self.product.n)]
        made: list[str] = []
        for store in self.stores:
            assert isinstance(store, PartStore)
            size = store.extents[-1]
            made += [
                f"if (at0 >= {store.first} && at0 < {store.first} + {self.emitter.word(size)}) {{",
                f"const {self.emitter.kind(COLUMN)} column0 = at0 - {store.first};",
                *self.four(store, size),
                "}",
            ]
        return made

    def four(self, store: Store, size: Size) -> list[str]:
        """The same of a store whose columns start at `column0`, by one access where they are aligned."""
        emitter, product = self.emitter, self.product
        places = {v: e for v, e in product.places.items() if v != e}
        store = replace(
            store,
            expr=substitute_vars(store.expr, places),
            index=tuple(substitute_vars(i, places) for i in store.index),
        )
        row = Scope(self.top, {ROW: "row"}, turns="true")
        column = Scope(row, {COLUMN: "column", next(iter(RESULT)): "total"}, turns="true")
        form = linear_index(store.index, store.buffer.shape)
        ends = not isinstance(size, int) or size % 4 != 0
        head = [
            "const float totals[4] = {four.x, four.y, four.z, four.w};",
            "#pragma unroll",
            "for (int j = 0; j < 4; ++j) {",
            f"const {emitter.kind(COLUMN)} column = column0 + j;",
            *([f"if (column < {emitter.word(size)}) {{"] if ends else []),
            "const float total = totals[j];",
        ]
        tail = ["}"] * (2 if ends else 1)
        if ends or not all(in_fours(form, b) for b, _ in targets(store)):
            store_line(emitter, store, column)
            return [*row.lines, *head, *column.lines, *tail]
        texts = [(b, emitter.value(e, column)) for b, e in targets(store)]
        made = [f"{C_TYPES[b.dtype.name]} out{n}[4];" for n, (b, _) in enumerate(texts)]
        kept = [f"out{n}[j] = {text};" for n, (_, text) in enumerate(texts)]
        start = Scope(row, {COLUMN: "column0"})
        index, _ = emitter.offset(form, start)
        wide = [f"store_four({emitter.pointer(b)} + {index}, out{n});" for n, (b, _) in enumerate(texts)]
        return [*row.lines, *made, *head, *column.lines, *kept, *tail, *start.lines, *wide]

    def helpers(self) -> str:
        """The instructions of these tiles."""
        n = self.tile.columns // 2
        a, b = int(self.a.by_lines), int(self.b.by_lines)
        registers = ", ".join(f"%{i}" for i in range(n))
        sums = ", ".join(f'"+f"(d[{i}])' for i in range(n))
        name = self.dtype.name
        return f"""#ifndef RLX_HOST
template <> RLX_DEVICE void wgmma_{name}<{a}, {b}, {n}>(float (&d)[{n}], u64 a, u64 b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{2 * n}k16.f32.{name}.{name} "
    "{{{registers}}}, %{n}, %{n + 1}, 1, 1, 1, {a}, {b};"
    : {sums} : "l"(a), "l"(b));
}}
template <> RLX_DEVICE void products_done<{n}>(float (&d)[{n}]) {{
  asm volatile("wgmma.wait_group.sync.aligned 0;" : {sums} :: "memory");
}}
#endif
"""


def is_costly(e: Expr) -> bool:
    """Whether an element takes a function of many instructions."""
    return any(isinstance(x, Apply) and PRICES.get(x.fn, 0) > 4 for x in walk(e))


def in_fours(form: Affine, buffer: Buffer) -> bool:
    """Whether four neighbouring columns, from a multiple of four on, are aligned neighbours in memory."""
    if buffer.dtype.bits not in (16, 32) or buffer.base.kind == "state" or form.coefs.get(COLUMN) != 1:
        return False
    others = {term: c for term, c in form.coefs.items() if term != COLUMN}
    apart = all(isinstance(c, int) and c % 4 == 0 and _without_column(term) for term, c in others.items())
    whole = isinstance(form.constant, int) and form.constant % 4 == 0
    return apart and whole and isinstance(buffer.offset, int) and buffer.offset % (buffer.dtype.bits // 2) == 0


def _without_column(term: Expr) -> bool:
    return not any(isinstance(x, Var) and x == COLUMN for x in walk(term))
