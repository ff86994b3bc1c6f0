"""Attention on the CPU: a block of query rows at a time, its scores in the worker's scratch.

Keys and values are packed into the panels of the matrix product first, once for each batch and key head. For a few
query rows (decoding) that would cost more than it saves: these are computed from keys and values as they are, and may
copy those of a cache on the way (`decode_cache`). Biases and masks are evaluated where scores are: they never have
memory of their own. Where the number of keys is data, those beyond it are not read.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.epilogue import Epilogue, epilogue_of
from rlx.backends.cpu.gemm.panels.bf16 import BF16_PAIRS, rounded
from rlx.backends.cpu.gemm.panels.format import AS_SUMS
from rlx.backends.cpu.gemm.tile import tile_of
from rlx.backends.cpu.kernels.attention.decode import (
    Rows,
    block_rows,
    copy_rows,
    end_streams,
    paired_rows,
    row_groups,
    rows_times_rows,
    weighted_rows,
    widened_rows,
    zero_rows,
)
from rlx.backends.cpu.kernels.attention.old_rows import OldRows, OldRowsArguments, old_rows, old_words
from rlx.backends.cpu.kernels.attention.pack_kv import (
    count_words,
    counted,
    number_words,
    pack,
    pair_unit,
    row_words,
    rows_of,
)
from rlx.backends.cpu.kernels.attention.softmax import Seen, Softmax
from rlx.backends.cpu.kernels.attention.stored_rows import StoredRows, in_place
from rlx.backends.cpu.llvm.builder import Module, Typed, constant, vec
from rlx.backends.cpu.loops.emitter import PLACEHOLDER, Emitter, Scope, name_kernel
from rlx.backends.cpu.loops.looks import look_if
from rlx.backends.cpu.loops.nest import emit_nest
from rlx.backends.cpu.schedule.arguments import (
    Address,
    Argument,
    Arguments,
    ArgumentTable,
    KernelCode,
    Number,
    Part,
    Pointer,
    Scratch,
    ScratchStride,
    once,
    part,
)
from rlx.backends.cpu.schedule.attention import AttentionSchedule
from rlx.backends.cpu.schedule.matmul import K_BLOCK
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Expr, Load, transform
from rlx.kernels.loops.analysis import linear_load
from rlx.kernels.lowering import Attention, out_vars
from rlx.kernels.program import Kernel
from rlx.records import dataclass

__all__ = ["Way", "emit"]

F32 = DTYPES["f32"]
WIDTH = AttentionSchedule.WIDTH
INF = float("inf")
STEP = 32  # weights that are rounded at a time
MANY_KEYS = 1 << 14  # from which on a few rows take so long that it is looked whether the run goes on
I0, I1, I2, I3 = out_vars(4)


class AttentionArguments(Arguments):
    """The arguments of an attention kernel; strides are of (batch, head, row) each, in bytes, of `out` in elements."""

    q: Address
    q_b: Number
    q_h: Number
    q_l: Number
    k: Address
    k_b: Number
    k_h: Number
    k_l: Number
    v: Address
    v_b: Number
    v_h: Number
    v_l: Number
    out: Address
    out_b: Number
    out_h: Number
    out_l: Number
    k_panels: Address
    v_panels: Address
    heads: Number
    key_heads: Number
    rows: Number
    keys: Number
    depth: Number
    value_depth: Number
    row_chunk: Number
    score_stride: Number  # elements of a row of scores
    scratch: Address
    scratch_stride: Number  # bytes
    row_sums: Number  # where they start in scratch, in bytes
    results: Number  # where results start in scratch, in bytes, if they go there
    block: Address  # the routine
    count: Address  # where it is said how many keys there are, of those that there is room for; 0: all of them
    count_b: Number  # elements from batch entry to batch entry
    panels: Number  # where panels start in scratch, in bytes, if they are made there
    row_part: Number  # rows of a chunk that are computed at a time
    queries: Number  # where queries go in scratch as f32, in bytes, if they are not
    first: Address  # the position of the first query row; 0: that of the last key less the other rows
    first_b: Number
    sinks: Address
    sinks_h: Number  # elements from head to head, and from row to row
    sinks_l: Number
    depth_words: Number  # of a row of queries or keys, and of a column of values, as panels have them
    key_words: Number


@dataclass(frozen=True)
class Way:
    """How an attention kernel reads keys and values: where they lie, for `few` query rows or a cache, or from panels.

    `own_panels`: a chunk packs them for itself. `streaming`: copies of a cache's rows are stored past the processor's
    caches.
    """

    few: bool = False
    own_panels: bool = False
    streaming: bool = False


def emit(kernel: Kernel, way: Way, target: Target) -> list[KernelCode]:
    """The attention kernel; where it makes its keys and values, what it does not copy of these is stored before."""
    copied = [old.store for old in _old_rows(kernel) if old is not None]
    before = [emit_nest(store, target.lanes) for store in kernel.stores[1:] if store not in copied]
    return [*before, _emit_attention(kernel, way, target)]


def _old_rows(kernel: Kernel) -> tuple[OldRows | None, OldRows | None]:
    """Which first rows of keys and values the kernel copies."""
    anchor = kernel.anchor
    assert isinstance(anchor, Attention)
    if len(kernel.stores) == 1:
        return None, None
    pairs = ((anchor.k, anchor.k_shape), (anchor.v, anchor.v_shape))
    k, v = (old_rows(x, shape, kernel.stores[1:]) for x, shape in pairs)
    return k, v


def widens(anchor: Attention) -> bool:
    """Whether queries are not f32 in memory."""
    return anchor.q.dtype is not F32


def place_words(anchor: Attention) -> dict[str, Argument]:
    """Where the positions of first rows are, and the step from batch entry to batch entry."""
    return number_words(anchor.place, "first")


def sink_words(anchor: Attention) -> dict[str, Argument]:
    """Where the sinks are, and the steps from head to head and row to row."""
    if anchor.sinks is None:
        return dict.fromkeys(("sinks", "sinks_h", "sinks_l"), 0)
    assert isinstance(anchor.sinks, Load)
    index = linear_index(anchor.sinks.indices, anchor.sinks.source.shape)
    steps = {"sinks_h": index.coefs.get(I1, 0), "sinks_l": index.coefs.get(I2, 0)}
    return {"sinks": Pointer(anchor.sinks.source, 4 * index.constant), **steps}


# ---- the kernel


def _emit_attention(kernel: Kernel, way: Way, target: Target) -> KernelCode:
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Attention)
    out = linear_index(store.index, store.buffer.shape)
    epilogue = epilogue_of(store, [I2], [anchor.q_shape[2]], I3, anchor.v_shape[3], F32)
    whole = way.own_panels
    shapes = anchor.q_shape, anchor.k_shape[2], anchor.v_shape[3]
    ways = not epilogue.in_place, whole, anchor.causal
    unit = 0 if way.few else pair_unit(anchor, target)
    cut = once(AttentionSchedule(*shapes, *ways, target.rates, widens(anchor) or unit > 0, anchor.ring, unit))

    def panels(x: Expr) -> Argument:
        if way.few or whole:
            return 0
        assert isinstance(x, Load)
        return Pointer(x.source)

    words = AttentionArguments.given(
        **row_words("q", anchor.q),
        **row_words("k", in_place(anchor.k) if way.few or whole else None),
        **row_words("v", in_place(anchor.v) if way.few or whole else None),
        out=Pointer(store.buffer, store.buffer.dtype.itemsize * out.constant),
        out_b=out.coefs.get(I0, 0),
        out_h=out.coefs.get(I1, 0),
        out_l=out.coefs.get(I2, 0),
        k_panels=panels(anchor.k),
        v_panels=panels(anchor.v),
        heads=anchor.q_shape[1],
        key_heads=anchor.k_shape[1],
        rows=anchor.q_shape[2],
        keys=anchor.k_shape[2],
        depth=anchor.q_shape[3],
        value_depth=anchor.v_shape[3],
        row_chunk=part(cut, "rows"),
        score_stride=part(cut, "score_stride"),
        scratch=Scratch(),
        scratch_stride=ScratchStride(),
        row_sums=part(cut, "sums"),
        results=part(cut, "results"),
        block=0 if way.few else gemm.block_routine(tile_of(F32, target, format=BF16_PAIRS if unit else AS_SUMS)),
        **count_words(anchor),
        panels=part(cut, "panels"),
        row_part=part(cut, "part"),
        queries=part(cut, "queries"),
        **place_words(anchor),
        **sink_words(anchor),
        depth_words=AttentionSchedule.words(anchor.q_shape[3], unit),
        key_words=AttentionSchedule.words(anchor.k_shape[2], unit),
    )
    for old in _old_rows(kernel) if len(kernel.stores) > 1 else ():
        words += old_words(old)
    table = ArgumentTable(words)
    made = _Code(anchor, kernel, table, epilogue, way, target)
    made.emit()
    symbol, ir = name_kernel(Module([made.f]).text())
    scratch = part(cut, "scratch")
    return KernelCode(symbol, ir, tuple(table.words), Part(cut, "chunks"), tuple(made.emitter.sites), scratch)


class _Code:
    """Emits one block of query rows."""

    def __init__(
        self,
        anchor: Attention,
        kernel: Kernel,
        table: ArgumentTable,
        epilogue: Epilogue,
        way: Way,
        target: Target,
    ) -> None:
        self.anchor, self.way, self.target = anchor, way, target
        self.unit = 0 if way.few else pair_unit(anchor, target)
        self.copies = dict(zip("kv", _old_rows(kernel), strict=True))
        self.f = gemm.kernel_function(PLACEHOLDER)
        self.lanes = target.lanes
        self.vector = f"<{self.lanes} x float>"
        self.emitter = Emitter(self.f, table, self.lanes)
        self.epilogue = epilogue
        self.score = None if anchor.score is None else transform(anchor.score, linear_load)
        self.emitter.preload([self.score] if self.score else [], [])
        epilogue.prepare(self.emitter)

    def emit(self) -> None:
        f = self.f
        self.words = w = AttentionArguments.loaded(f)
        blocks = f.div(f.sub(f.add(w.rows, w.row_chunk), 1), w.row_chunk)
        rest, block = f.div("%chunk", blocks), f.rem("%chunk", blocks)
        b, h = f.div(rest, w.heads), f.rem(rest, w.heads)
        keys = counted(f, self.anchor, w.count, w.count_b, b, w.keys)
        key_head = f.div(f.mul(h, w.key_heads), w.heads)
        self.seen = Seen(f, self.anchor, keys, self.first_position(b, keys), w.keys)
        row0 = f.mul(block, w.row_chunk)
        row1 = f.min(f.add(row0, w.row_chunk), w.rows)
        scores = f.offset(w.scratch, f.mul("%worker", w.scratch_stride))
        sums = f.offset(scores, w.row_sums)
        self.long = f.cmp("ge", self.seen.keys, MANY_KEYS)
        alike = f.div(w.heads, w.key_heads)
        # which of how many shares of the old rows is copied: heads of the same keys, and blocks, have one each
        self.share = f.add(f.mul(f.rem(h, alike), blocks), block), f.mul(alike, blocks)
        at = b, h, key_head
        panels = self.panels_of(at, scores)
        scope = Scope(1, None, {I0: b, I1: h})
        softmax = Softmax(self.emitter, self.anchor, self.score, self.seen, (scores, w.score_stride), sums)
        softmax.share_by_rows(scope, row0)
        sinks = None if self.anchor.sinks is None else f.gep(w.sinks, f.mul(h, w.sinks_h), "float")

        def some_rows(first: str, _: list[str]) -> None:
            last = f.min(f.add(first, w.row_part), row1)
            self.some_rows(softmax, scope, at, panels, (first, last), sinks)

        f.loop(row0, row1, w.row_part, [], some_rows)
        if self.way.streaming:
            end_streams(f, self.target)
        f.ret()

    def first_position(self, b: str, keys: str) -> str:
        """The position of query row 0."""
        f, w = self.f, self.words
        if self.anchor.place is not None:
            return f.load("i64", f.gep(w.first, f.mul(b, w.first_b), "i64"))
        return f.sub(keys, w.rows if self.anchor.apart else 1)

    def panels_of(self, at: tuple[str, str, str], scratch: str) -> tuple[str, str]:
        """The panels of the keys and values of a head, where they are used."""
        f, w = self.f, self.words
        if self.way.few:
            return "", ""
        b, _, key_head = at
        sizes = (w.keys, w.depth_words), (w.value_depth, w.key_words)
        k_size, v_size = (f.mul(f.and_(f.add(n, WIDTH - 1), -WIDTH), m) for n, m in sizes)
        if self.way.own_panels:
            k_panels = f.offset(scratch, w.panels)
            v_panels = f.gep(k_panels, k_size, "float")
            stored = self.stored("k", b, key_head), self.stored("v", b, key_head)
            sizes_of = self.seen.keys, w.depth_words, w.value_depth, w.key_words
            pack(f, self.lanes, stored, (k_panels, v_panels), sizes_of, self.unit)
            return k_panels, v_panels
        matrix = f.add(f.mul(b, w.key_heads), key_head)
        k_panels = f.gep(w.k_panels, f.mul(matrix, k_size), "float")
        return k_panels, f.gep(w.v_panels, f.mul(matrix, v_size), "float")

    def stored(self, name: str, b: str, head: str) -> StoredRows:
        """The rows of queries, keys or values as they lie in memory."""
        return rows_of(self.f, self.words, name, b, head, in_place(getattr(self.anchor, name)))

    def some_rows(
        self,
        softmax: Softmax,
        scope: Scope,
        at: tuple[str, str, str],
        panels: tuple[str, str],
        rows: tuple[str, str],
        sinks: str | None,
    ) -> None:
        """The results of some query rows, whose scores are in scratch meanwhile."""
        f, w, seen = self.f, self.words, self.seen
        first, last = rows
        b, h, key_head = at
        count = f.sub(last, first)
        lines = self.queries(b, h, first, count)
        start, stop = seen.start(first), seen.stop(f.sub(last, 1))
        # zeros stand before and after what a row sees; sums over more than one block of keys take all of these, for
        # equal blocks
        summed = f.select(f.cmp("gt", seen.keys, K_BLOCK), seen.keys, stop) if self.anchor.causal else seen.keys
        from_block = f.and_(start, -K_BLOCK) if seen.has_start else 0
        scores = softmax.lines
        if not self.epilogue.in_place:
            result, step = f.offset(scores[0], w.results), f.and_(f.add(w.value_depth, 15), -16)
        else:
            out, step = self.results(b, h)
            result = f.gep(out, f.mul(first, step), "float")
        sizes = count, w.depth, w.value_depth
        groups = row_groups(self.anchor.q_shape[2], self.lanes)

        def few_scores() -> None:
            def times(k: StoredRows, here: str, end: str) -> None:
                to = f.gep(scores[0], here, "float"), scores[1]
                some = count, f.max(f.sub(end, here), 0), w.depth
                rows_times_rows(f, self.lanes, lines, k, to, some, groups)

            self.over_keys("k", (b, key_head), w.depth, (start, stop), times)

        def few_results() -> None:
            def weighted(v: StoredRows, here: str, end: str) -> None:
                weights = f.gep(scores[0], here, "float"), scores[1]
                some = count, f.max(f.sub(end, here), 0), w.value_depth
                weighted_rows(f, self.lanes, weights, v, (result, step), some, groups)

            zero_rows(f, self.lanes, (result, step), count, w.value_depth)
            self.over_keys("v", (b, key_head), w.value_depth, (start, stop), weighted)

        def many_scores() -> None:
            begin = f.and_(start, -WIDTH) if seen.has_start else 0
            to = f.gep(scores[0], begin, "float"), scores[1]
            keys, some = panels[0], stop
            if seen.has_start:
                keys, some = f.gep(keys, f.mul(begin, w.depth_words), "float"), f.max(f.sub(stop, begin), 0)
            self.by_panels(lines, keys, w.depth_words, to, (count, some, w.depth_words))

        def many_results() -> None:
            weights = f.gep(scores[0], from_block, "float"), scores[1]
            along = f.max(f.sub(summed, from_block), 0) if seen.has_start else summed
            before = from_block
            if self.unit:
                along = self.weights_in_pairs(weights, count, along)
                before = f.lshr(from_block, 1) if seen.has_start else 0
            values = f.gep(panels[1], f.mul(before, WIDTH) if seen.has_start else 0, "float")
            self.by_panels(weights, values, w.key_words, (result, step), (count, sizes[2], along))

        (few_scores if self.way.few else many_scores)()
        look_if(f, self.long)
        end = stop if self.way.few else f.and_(f.add(summed, STEP - 1), -STEP) if self.unit else summed
        softmax.emit(scope, rows, (from_block, end), sinks, w.sinks_l)
        look_if(f, self.long)
        (few_results if self.way.few else many_results)()
        self.finish(scope, rows, softmax.sums, result, step)

    def queries(self, b: str, h: str, first: str, count: str) -> Rows:
        """Some query rows as f32."""
        f, w = self.f, self.words
        rows = self.stored("q", b, h).from_row(f, first)
        if not widens(self.anchor):
            return rows.floats(f)
        scratch = f.offset(w.scratch, f.mul("%worker", w.scratch_stride))
        to = f.offset(scratch, w.queries), f.and_(f.add(w.depth_words, 15), -16)
        if self.unit:
            paired_rows(f, self.lanes, rows.in_pairs(), to, count, w.depth_words)
        else:
            widened_rows(f, self.lanes, rows, to, count, w.depth)
        return to

    def weights_in_pairs(self, weights: Rows, rows: str, along: str) -> str:
        """Rounds rows of weights to bf16, in the first halves of their places; the words of a row.

        Zeros stand after a row, up to whole steps.
        """
        f, v, unit = self.f, self.vector, self.unit

        def row(i: str, _: list[str]) -> None:
            line = f.gep(weights[0], f.mul(i, weights[1]), "float")

            def step(j: str, _: list[str]) -> None:
                p = f.gep(line, j, "float")
                low, high = f.load(v, p), f.load(v, f.gep(p, self.lanes, "float"))
                f.store(rounded(f, low, high), f.gep(line, f.lshr(j, 1), "float"))

            f.loop(0, along, STEP, [], step)

        f.loop(0, rows, 1, [], row)
        return f.and_(f.add(f.lshr(f.add(along, 1), 1), unit - 1), -unit)

    def results(self, b: str, h: str) -> Rows:
        """The rows of results, where sums can take their places."""
        f, w = self.f, self.words
        return f.gep(w.out, f.add(f.mul(b, w.out_b), f.mul(h, w.out_h)), "float"), w.out_l

    def by_panels(self, a: Rows, panels: str, height: str, to: Rows, sizes: tuple[str, str, str]) -> None:
        """Rows of products with panels of `height` rows each; `sizes`: rows, columns, rows that are multiplied."""
        f = self.f
        numbers: list[Typed] = [*sizes, ("i64", K_BLOCK)]
        f.call(self.words.block, [*a, panels, f.mul(height, WIDTH), *to, *numbers, "null"])

    def over_keys(
        self,
        role: str,
        at: tuple[str, str],
        columns: str,
        part: tuple[str | int, str],
        use: Callable[[StoredRows, str, str], None],
    ) -> None:
        """Uses the keys or values of the positions part[0] to part[1], block by block, and copies old rows on the way.

        `use` gets the block's rows, the first one's number, and the number after the last one's.
        """
        f = self.f
        rows, (start, stop) = self.stored(role, *at), part
        height = block_rows(f, columns)
        done = start
        if self.copies[role] is not None:
            done = f.max(start, self.old_part(role, rows.floats(f), at, (height, columns), part, use))
        # a single row uses each key once: there is nothing that a block would keep near
        height = f.select(f.cmp("eq", self.words.rows, 1), f.add(self.words.keys, 1), height)

        def block(here: str, _: list[str], rows: StoredRows, stop: str, moved: str) -> None:
            look_if(f, f.and_(self.long, f.cmp("ne", here, start, "i64"), "i1"))
            use(rows.from_row(f, f.sub(here, moved)), here, f.min(f.add(here, height), stop))

        if not self.anchor.ring:
            f.loop(done, stop, height, [], lambda i, a: block(i, a, rows, stop, "0"))
            return

        def turn(number: str, _: list[str]) -> None:
            one = f.cmp("eq", number, 0)
            moved = f.select(one, self.seen.moved, self.seen.turn, "i64")
            first = f.select(one, start, f.max(start, self.seen.turn), "i64")
            last = f.select(one, f.min(stop, self.seen.turn), stop, "i64")
            f.loop(first, last, height, [], lambda i, a: block(i, a, rows, last, moved))

        f.loop(0, 2, 1, [], turn)

    def old_part(
        self,
        role: str,
        target: Rows,
        at: tuple[str, str],
        block: tuple[str, str],
        seen: tuple[str | int, str],
        use: Callable[[StoredRows, str, str], None],
    ) -> str:
        """Copies a share of the old rows and uses those of seen[0] to seen[1], block by block.

        Returns the number after the last of these. `block` is the rows of one and their columns.
        """
        f, share = self.f, self.share
        first_word = len(AttentionArguments.names()) + "kv".index(role) * len(OldRowsArguments.names())
        w = OldRowsArguments.loaded(f, first=first_word)
        old = self.copies[role]
        assert old is not None
        source, count = rows_of(f, w, "rows", *at, old.source), w.count
        copied0, copied1 = (f.div(f.mul(count, n), share[1]) for n in (share[0], f.add(share[0], 1)))
        streams = None
        if self.way.streaming:
            bits = f.or_(f.cast("ptrtoint", target[0], "i64"), f.mul(target[1], 4))
            streams = f.cmp("eq", f.and_(bits, 63), 0)

        def some(first: str, _: list[str]) -> None:
            stop = f.min(f.add(first, block[0]), count)
            mine = f.max(first, copied0), f.min(stop, copied1)
            copy_rows(f, self.lanes, source.floats(f), target, mine, block, streams)
            here = f.max(first, seen[0])
            use(source.from_row(f, here), here, f.min(stop, seen[1]))

        f.loop(0, count, block[0], [], some)
        return f.min(count, seen[1])

    def finish(self, scope: Scope, rows: tuple[str, str], sums: str, result: str, step: str) -> None:
        """Divides each row by its sum and stores what the epilogue makes of it."""
        f = self.f
        row0, columns = rows[0], self.words.value_depth

        def divided(row: str) -> Callable[[str, int], str]:
            place = f.gep(sums, f.mul(f.sub(row, row0), 2), "float")
            factor = f.div(1.0, f.load("float", place), "float")
            empty = f.cmp("eq", f.load("float", f.gep(place, 1, "float")), -INF, "float")

            def by(value: str, w: int) -> str:
                ty = vec("float", w)
                value = f.mul(value, f.splat(factor, w), ty)
                if self.anchor.empty_row == "zero":
                    value = f.select(f.splat(empty, w, "i1"), constant(0.0, ty), value, ty)
                return value

            return by

        self.epilogue.block(self.emitter, rows, ("0", columns), result, step, scope, divided)
