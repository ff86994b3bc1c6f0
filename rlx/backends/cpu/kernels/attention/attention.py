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
from rlx.backends.cpu.gemm.tile import tile_of
from rlx.backends.cpu.kernels.attention.decode import (
    Rows,
    block_rows,
    copy_rows,
    end_streams,
    rows_times_rows,
    weighted_rows,
)
from rlx.backends.cpu.kernels.attention.old_rows import OldRows, OldRowsArguments, in_place, old_rows, old_words
from rlx.backends.cpu.kernels.attention.pack_kv import (
    count_words,
    counted,
    pack_columns,
    pack_rows,
    row_words,
    rows_of,
)
from rlx.backends.cpu.llvm import math as vmath
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
from rlx.kernels.expr import (
    BOOL,
    Acc,
    Expr,
    Load,
    Select,
    children,
    const,
    transform,
    walk,
)
from rlx.kernels.loops.analysis import linear_load
from rlx.kernels.lowering import Attention, out_vars
from rlx.kernels.program import Kernel
from rlx.records import dataclass

__all__ = ["Way", "emit"]

F32 = DTYPES["f32"]
WIDTH = AttentionSchedule.WIDTH
INF = float("inf")
MANY_KEYS = 1 << 14  # from which on a few rows take so long that it is looked whether the run goes on
AT_ONCE = 4  # vectors of scores whose powers are computed side by side
I0, I1, I2, I3 = out_vars(4)


class AttentionArguments(Arguments):
    """The arguments of an attention kernel; strides are in elements, of (batch, head, row) each."""

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


@dataclass(frozen=True)
class Way:
    """How an attention kernel reads keys and values: where they lie, for `few` query rows, or from panels.

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
    k, v = (old_rows(in_place(x), shape, kernel.stores[1:]) for x, shape in pairs)
    return k, v


# ---- the kernel


def _emit_attention(kernel: Kernel, way: Way, target: Target) -> KernelCode:
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Attention)
    out = linear_index(store.index, store.buffer.shape)
    epilogue = epilogue_of(store, [I2], [anchor.q_shape[2]], I3, anchor.v_shape[3], F32)
    whole = way.own_panels

    sizes = (anchor.q_shape, anchor.k_shape[2], anchor.v_shape[3])
    cut = once(AttentionSchedule(*sizes, not epilogue.in_place, whole, anchor.causal, target.rates))

    def panels(x: Expr) -> Argument:
        assert isinstance(x, Load)
        return 0 if way.few or whole else Pointer(x.source)

    words = AttentionArguments.given(
        **row_words("q", anchor.q),
        **row_words("k", anchor.k if way.few or whole else None),
        **row_words("v", anchor.v if way.few or whole else None),
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
        block=0 if way.few else gemm.block_routine(tile_of(F32, target)),
        **count_words(anchor),
        panels=part(cut, "panels"),
        row_part=part(cut, "part"),
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
        w = AttentionArguments.loaded(f)
        heads, key_heads, rows, room, take = w.heads, w.key_heads, w.rows, w.keys, w.row_chunk
        blocks = f.div(f.sub(f.add(rows, take), 1), take)
        rest, block = f.div("%chunk", blocks), f.rem("%chunk", blocks)
        b, h = f.div(rest, heads), f.rem(rest, heads)
        keys = counted(f, self.anchor, w.count, w.count_b, b, room)
        key_head = f.div(f.mul(h, key_heads), heads)
        row0 = f.mul(block, take)
        row1 = f.min(f.add(row0, take), rows)
        scores = f.offset(w.scratch, f.mul("%worker", w.scratch_stride))
        sums = f.offset(scores, w.row_sums)
        stride, depth, value_depth = w.score_stride, w.depth, w.value_depth
        heights = [block_rows(f, columns) if self.way.few else "" for columns in (depth, value_depth)]
        seen = f.sub(keys, rows)  # keys that row 0 sees, less one, if causal
        self.long = long = f.cmp("ge", keys, MANY_KEYS)

        def whole_for_one(height: str) -> str:
            """A single row uses each key once: there is nothing that a block would keep near."""
            return f.select(f.cmp("eq", rows, 1), f.add(room, 1), height)

        def share() -> tuple[str, str]:
            """Which of how many shares of the old rows is copied: heads of the same keys, and blocks, have one each."""
            alike = f.div(heads, key_heads)
            return f.add(f.mul(f.rem(h, alike), blocks), block), f.mul(alike, blocks)

        q, q_step = rows_of(f, w, "q", b, h)
        out, out_step = ("", "") if not self.epilogue.in_place else rows_of(f, w, "out", b, h)
        matrix = f.add(f.mul(b, key_heads), key_head)
        k_size, v_size = (
            f.mul(f.and_(f.add(n, WIDTH - 1), -WIDTH), m) for n, m in ((room, depth), (value_depth, room))
        )
        if self.way.own_panels:
            k_panels = f.offset(scores, w.panels)
            v_panels = f.gep(k_panels, k_size, "float")
            k, k_step = rows_of(f, w, "k", b, key_head)
            v, v_step = rows_of(f, w, "v", b, key_head)
            pack_columns(f, self.lanes, k, k_step, k_panels, keys, depth)
            pack_rows(f, self.lanes, v, v_step, v_panels, keys, value_depth, room)
        else:
            k_panels = f.gep(w.k_panels, f.mul(matrix, k_size), "float")
            v_panels = f.gep(w.v_panels, f.mul(matrix, v_size), "float")
        scope = Scope(1, None, {I0: b, I1: h})
        shared = self.shared_by_rows(scope, sums, stride, keys)

        def some_rows(first: str, _: list[str]) -> None:
            last = f.min(f.add(first, w.row_part), row1)
            count = f.sub(last, first)
            limit = f.max(f.min(f.add(last, seen), keys), 0) if self.anchor.causal else keys
            # zeros stand after a row's last key; sums over more than one block of keys take them all, for equal blocks
            summed = f.select(f.cmp("gt", keys, K_BLOCK), keys, limit) if self.anchor.causal else keys
            lines = f.gep(q, f.mul(first, q_step), "float")
            if not self.epilogue.in_place:
                result, step = f.offset(scores, w.results), f.and_(f.add(value_depth, 15), -16)
            else:
                result, step = f.gep(out, f.mul(first, out_step), "float"), out_step

            def few_scores() -> None:
                def times(k: Rows, first: str, stop: str) -> None:
                    to, keys = (f.gep(scores, first, "float"), stride), f.max(f.sub(stop, first), 0)
                    rows_times_rows(f, self.lanes, (lines, q_step), k, to, count, keys, depth)

                k, done = rows_of(f, w, "k", b, key_head), "0"
                if self.copies["k"] is not None:
                    done = self.old_part("k", k, (b, key_head), share(), (heights[0], depth), limit, times)
                self.in_blocks(k, done, limit, whole_for_one(heights[0]), times)

            def few_results() -> None:
                def weighted(v: Rows, first: str, stop: str) -> None:
                    weights, keys = (f.gep(scores, first, "float"), stride), f.max(f.sub(stop, first), 0)
                    to, more = (result, step), f.cmp("gt", first, 0, "i64")
                    weighted_rows(f, self.lanes, weights, v, to, count, keys, value_depth, more)

                v, done = rows_of(f, w, "v", b, key_head), "0"
                if self.copies["v"] is not None:
                    done = self.old_part("v", v, (b, key_head), share(), (heights[1], value_depth), summed, weighted)
                # at least once: without keys, sums are 0
                self.in_blocks(
                    v, done, f.max(summed, f.add(done, 1, "i64")), whole_for_one(heights[1]), weighted, summed
                )

            def by_panels(a: Rows, panels: str, height: str, to: Rows, columns: str, along: str) -> None:
                """Rows of products with panels of `height` rows each, of which the first `along` are multiplied."""
                sizes: list[Typed] = [count, columns, along, ("i64", K_BLOCK)]
                size = f.mul(height, WIDTH)
                f.call(w.block, [*a, panels, size, *to, *sizes, "null"])

            def many_scores() -> None:
                by_panels((lines, q_step), k_panels, depth, (scores, stride), limit, depth)

            def many_results() -> None:
                by_panels((scores, stride), v_panels, room, (result, step), value_depth, summed)

            (few_scores if self.way.few else many_scores)()
            look_if(f, long)
            self.softmax(scope, first, last, scores, stride, sums, (keys, seen, summed), shared)
            look_if(f, long)
            (few_results if self.way.few else many_results)()
            self.finish(scope, first, last, sums, result, step, value_depth)

        f.loop(row0, row1, w.row_part, [], some_rows)
        if self.way.streaming:
            end_streams(f, self.target)
        f.ret()

    def old_part(
        self,
        role: str,
        target: Rows,
        at: tuple[str, str],
        share: tuple[str, str],
        block: tuple[str, str],
        seen: str,
        use: Callable[[Rows, str, str], None],
    ) -> str:
        """Copies a share of the old rows and uses those below `seen`, block by block; returns how many that are.

        `use` gets the block's rows, the first one's number, and the number after the last one's. `block` is the rows of
        one and their columns.
        """
        f = self.f
        first_word = len(AttentionArguments.names()) + "kv".index(role) * len(OldRowsArguments.names())
        w = OldRowsArguments.loaded(f, first=first_word)
        source, count = rows_of(f, w, "rows", *at), w.count
        copied0, copied1 = (f.div(f.mul(count, n), share[1]) for n in (share[0], f.add(share[0], 1)))
        streams = None
        if self.way.streaming:
            bits = f.or_(f.cast("ptrtoint", target[0], "i64"), f.mul(target[1], 4))
            streams = f.cmp("eq", f.and_(bits, 63), 0)

        def some(first: str, _: list[str]) -> None:
            stop = f.min(f.add(first, block[0]), count)
            copy_rows(f, self.lanes, source, target, (f.max(first, copied0), f.min(stop, copied1)), block, streams)
            use((f.gep(source[0], f.mul(first, source[1]), "float"), source[1]), first, f.min(stop, seen))

        f.loop(0, count, block[0], [], some)
        return f.min(count, seen)

    def in_blocks(
        self, rows: Rows, first: str, stop: str, height: str, use: Callable[[Rows, str, str], None], last: str = ""
    ) -> None:
        """Uses keys or values from the first up to `stop`, block by block; those after `last` do not count."""
        f = self.f

        def block(at: str, _: list[str]) -> None:
            look_if(f, f.and_(self.long, f.cmp("ne", at, first, "i64"), "i1"))
            use((f.gep(rows[0], f.mul(at, rows[1]), "float"), rows[1]), at, f.min(f.add(at, height), last or stop))

        f.loop(first, stop, height, [], block)

    def shared_by_rows(self, scope: Scope, sums: str, stride: str, keys: str) -> tuple[Expr, str] | None:
        """What all rows have of the score (a bias, or where a mask is true) is computed once, in the row before the
        sums: the expression, and that row's address. A bool is 1 or 0 there.
        """
        f = self.f
        if self.score is None:
            return None
        self.emitter.hoist(self.score, frozenset((I2, I3)), scope)
        part = self.shared_part(self.score)
        if part is None:
            return None
        line = f.gep(sums, f.neg(stride), "float")
        self.fill(scope, part, line, keys)
        return part, line

    def shared_part(self, score: Expr) -> Expr | None:
        """A computed part of the score, f32 or bool, that depends on the key but on neither row nor product."""
        rest, seen = [score], set()
        while rest:
            e = rest.pop()
            own = self.emitter.depends(e)
            if e in seen or isinstance(e, Load) or I3 not in own:
                continue
            seen.add(e)
            if e.dtype in (F32, BOOL) and I2 not in own and not any(isinstance(x, Acc) for x in walk(e)):
                return e
            rest.extend(reversed(tuple(children(e))))
        return None

    def softmax(
        self,
        scope: Scope,
        row0: str,
        row1: str,
        scores: str,
        stride: str,
        sums: str,
        sizes: tuple[str, str, str],
        shared: tuple[Expr, str] | None,
    ) -> None:
        """Scores become exp(score - largest of the row); the sum and the largest of each row are kept."""
        f, lanes, vector, emitter = self.f, self.lanes, self.vector, self.emitter
        keys, seen, summed = sizes

        def places(i: str) -> tuple[str, str, str]:
            """The row of scores, where its sum and largest go, and the keys that it sees."""
            at = f.sub(i, row0)
            n = f.max(f.min(f.add(f.add(i, 1), seen), keys), 0) if self.anchor.causal else keys
            return f.gep(scores, f.mul(at, stride), "float"), f.gep(sums, f.mul(at, 2), "float"), n

        def padded(n: str) -> str:
            return f.and_(f.add(n, lanes - 1), -lanes)

        def largest(i: str, _: list[str]) -> None:
            line, place, n = places(i)
            inside = scope.inner({I2: i})
            if self.score is not None:
                emitter.hoist(self.score, frozenset((I3,)), inside)

            def scaled(j: str, w: int) -> str:
                p = f.gep(line, j, "float")
                ty = vector if w > 1 else "float"
                value = f.mul(f.load(ty, p), self.anchor.scale, ty)
                if self.score is not None:
                    here = inside.inner({I3: j}, w, I3 if w > 1 else None)
                    if shared is not None:
                        part, at = shared
                        found = f.load(ty, f.gep(at, j, "float"))
                        here.cache[part] = (f.cmp("ne", found, 0.0, ty) if part.dtype is BOOL else found), w
                    emitter.acc = lambda _: (value, w)
                    value = emitter.lanes_of(self.score, here)
                f.store(value, p)
                return value

            whole = f.and_(n, -lanes)
            low = constant(-INF, vector)
            tops = f.loop(0, whole, lanes, [(vector, low)], lambda j, a: [f.max(scaled(j, lanes), a[0], vector)])
            last = f.loop(whole, n, 1, [("float", -INF)], lambda j, a: [f.max(scaled(j, 1), a[0], "float")])
            f.loop(n, padded(n), 1, [], lambda j, _: f.store(-INF, f.gep(line, j, "float"), ty="float"))
            top = f.max(f.reduce(tops[0], f.max), last[0], "float")
            if self.anchor.empty_row == "zero":
                lowest = f.cmp("eq", top, -INF, "float")
                (top,) = f.if_(lowest, lambda: [("float", unless_nan(line, n))], lambda: [("float", top)])
            f.store(top, f.gep(place, 1, "float"))

        def unless_nan(line: str, n: str) -> str:
            """-inf, which the largest of scores of NaN and -inf is too, or NaN where one of them is."""

            def worst(j: str, found: list[str]) -> list[str]:
                score = f.load("float", f.gep(line, j, "float"))
                return [f.select(f.cmp("ne", score, score, "float"), score, found[0], "float")]

            return f.loop(0, n, 1, [("float", -INF)], worst)[0]

        def powers(i: str, _: list[str]) -> None:
            line, place, n = places(i)
            top = f.load("float", f.gep(place, 1, "float"))

            def power(count: int) -> Callable[[str, list[str]], list[str]]:
                """So many vectors at once, whose chains of operations would else wait for one another."""

                def body(j: str, a: list[str]) -> list[str]:
                    p, w = f.gep(line, j, "float"), count * lanes
                    value = vmath.exp_below(f, f.sub(f.load(vec("float", w), p), f.splat(top, w)), w)
                    f.store(value, p)
                    total = a[0]
                    for q in range(0, w, lanes):
                        total = f.add(total, f.shuffle(value, None, list(range(q, q + lanes))) if w > lanes else value)
                    return [total]

                return body

            end = padded(n)
            whole = f.and_(end, -AT_ONCE * lanes)
            added = f.loop(0, whole, AT_ONCE * lanes, [(vector, constant(0.0, vector))], power(AT_ONCE))
            added = f.loop(whole, end, lanes, [(vector, added[0])], power(1))
            total = f.reduce(added[0], f.add)
            if self.anchor.empty_row == "mended":

                def mend() -> list[Typed]:
                    f.loop(0, end, lanes, [], lambda j, _: f.store(0.0, f.gep(line, j, "float"), ty=vector))
                    return [("float", constant(1.0, "float"))]

                (total,) = f.if_(f.cmp("ne", total, total, "float"), mend, lambda: [("float", total)])
            f.store(f.select(f.cmp("eq", keys, 0, "i64"), 1.0, total, "float"), place)  # no keys: sums are 0
            f.loop(end, summed, lanes, [], lambda j, _: f.store(0.0, f.gep(line, j, "float"), ty=vector))

        # two turns over the rows: in each of them no row waits for what another one ends with
        f.loop(row0, row1, 1, [], largest)
        f.loop(row0, row1, 1, [], powers)

    def fill(self, scope: Scope, part: Expr, line: str, keys: str) -> None:
        """Stores this part of the score for each key."""
        f, lanes = self.f, self.lanes
        part = part if part.dtype is F32 else Select(part, const(1.0, F32), const(0.0, F32))

        def put(j: str, w: int) -> None:
            here = scope.inner({I3: j}, w, I3 if w > 1 else None)
            f.store(self.emitter.lanes_of(part, here), f.gep(line, j, "float"), ty=vec("float", w))

        whole = f.and_(keys, -lanes)
        f.loop(0, whole, lanes, [], lambda j, _: put(j, lanes))
        f.loop(whole, keys, 1, [], lambda j, _: put(j, 1))

    def finish(self, scope: Scope, row0: str, row1: str, sums: str, result: str, step: str, columns: str) -> None:
        """Divides each row by its sum and stores what the epilogue makes of it."""
        f = self.f

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

        self.epilogue.block(self.emitter, (row0, row1), ("0", columns), result, step, scope, divided)
