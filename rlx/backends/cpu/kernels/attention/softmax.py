"""The scores of some query rows of attention, in scratch: which keys a row sees, and the weights that they get.

A row of scores has one for each position, from a number on that is a multiple of `ALIGNED`: which lanes the powers of a
row are added up in depends on positions alone, never on the rows that are computed with it.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.llvm import math as vmath
from rlx.backends.cpu.llvm.builder import Function, Typed, constant, vec
from rlx.backends.cpu.loops.emitter import Emitter, Scope
from rlx.backends.cpu.schedule.attention import AttentionSchedule
from rlx.ir.dtype import DTYPES
from rlx.kernels.expr import BOOL, Acc, Expr, Load, Select, children, const, walk
from rlx.kernels.lowering import Attention, out_vars

__all__ = ["Seen", "Softmax"]

F32 = DTYPES["f32"]
INF = float("inf")
AT_ONCE = 4  # vectors of scores whose powers are computed side by side
I0, I1, I2, I3 = out_vars(4)


class Seen:
    """Which keys each query row sees: those of the positions `start(row)` to `stop(row)`.

    In a ring, positions are numbered from a multiple of `ALIGNED` below the oldest key. Key j of those is at place
    j - `moved` up to the position `turn`, and from there on at j - `turn`.
    """

    moved = turn = ""

    def __init__(self, f: Function, anchor: Attention, keys: str, first: str, room: str) -> None:
        """`keys`: how many there are, `first`: the position of row 0, `room`: places for keys."""
        self.f, self.anchor = f, anchor
        self.keys, self.first = keys, first
        self.oldest: str | int = 0
        if anchor.ring:
            oldest = f.max(f.sub(keys, room), 0)
            base = f.and_(oldest, -AttentionSchedule.ALIGNED)
            place = f.rem(oldest, f.max(room, 1))
            self.keys, self.first, self.oldest = (f.sub(n, base) for n in (keys, first, oldest))
            self.moved = f.sub(self.oldest, place)
            self.turn = f.add(self.moved, room)

    def position(self, row: str) -> str:
        return self.f.add(self.first, row) if self.anchor.apart else self.first

    def stop(self, row: str) -> str:
        f = self.f
        if not self.anchor.causal:
            return self.keys
        return f.max(f.min(f.add(self.position(row), 1), self.keys), 0)

    def start(self, row: str) -> str | int:
        """The first key that a row sees, at most its last."""
        f = self.f
        if self.anchor.window is None:
            return f.min(self.oldest, self.stop(row)) if self.anchor.ring else 0
        within = f.sub(self.position(row), self.anchor.window - 1)
        return f.min(f.max(within, self.oldest), self.stop(row))

    @property
    def has_start(self) -> bool:
        """Whether keys before the first are seen by no row."""
        return self.anchor.window is not None or self.anchor.ring


class Softmax:
    """Emits what makes weights of the scores of some rows.

    `lines`: the address of the first row of scores and elements from row to row. `sums`: where the sum and the largest
    score of each row are kept; before that there is room for a row, of what all rows have of the score.
    """

    def __init__(
        self, emitter: Emitter, anchor: Attention, score: Expr | None, seen: Seen, lines: tuple[str, str], sums: str
    ) -> None:
        self.emitter, self.f, self.lanes = emitter, emitter.f, emitter.lanes
        self.vector = f"<{self.lanes} x float>"
        self.anchor, self.score, self.seen = anchor, score, seen
        self.lines, self.sums = lines, sums
        self.shared: tuple[Expr, str] | None = None
        self.scale = emitter.float_word(anchor.scale)  # each width of heads has its own

    # ---- what all rows have

    def share_by_rows(self, scope: Scope, row0: str) -> None:
        """What all rows have of the score (a bias, or where a mask is true) is computed once. A bool is 1 or 0 there.

        `row0` is the first of the rows.
        """
        f = self.f
        if self.score is None:
            return
        self.emitter.hoist(self.score, frozenset((I2, I3)), scope)
        part = self.shared_part(self.score)
        if part is None:
            return
        line = f.gep(self.sums, f.neg(self.lines[1]), "float")
        start = f.and_(self.seen.start(row0), -self.lanes) if self.seen.has_start else 0
        self.fill(scope, part, line, start, self.seen.keys)
        self.shared = part, line

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

    def fill(self, scope: Scope, part: Expr, line: str, start: str | int, keys: str) -> None:
        """Stores this part of the score for each key."""
        f, lanes = self.f, self.lanes
        part = part if part.dtype is F32 else Select(part, const(1.0, F32), const(0.0, F32))

        def put(j: str, w: int) -> None:
            here = scope.inner({I3: j}, w, I3 if w > 1 else None)
            f.store(self.emitter.lanes_of(part, here), f.gep(line, j, "float"), ty=vec("float", w))

        whole = f.and_(keys, -lanes)
        f.loop(start, whole, lanes, [], lambda j, _: put(j, lanes))
        f.loop(f.max(start, whole), keys, 1, [], lambda j, _: put(j, 1))

    # ---- rows

    def emit(
        self, scope: Scope, rows: tuple[str, str], zeros: tuple[str | int, str], sinks: str | None, sinks_step: str
    ) -> None:
        """Scores become exp(score - largest of the row); the sum and the largest of each row are kept.

        `zeros`: positions between which zeros stand where a row sees no key. `sinks`: where that of row 0 is.
        """
        f = self.f

        def sink(i: str) -> str | None:
            return None if sinks is None else f.load("float", f.gep(sinks, f.mul(i, sinks_step), "float"))

        # two turns over the rows: in each of them no row waits for what another one ends with
        f.loop(*rows, 1, [], lambda i, _: self.largest(scope, i, rows[0], sink(i)))
        f.loop(*rows, 1, [], lambda i, _: self.powers(i, rows[0], zeros, sink(i)))

    def places(self, i: str, row0: str) -> tuple[str, str, str | int, str]:
        """The row of scores, where its sum and largest go, and the keys that it sees."""
        f = self.f
        at = f.sub(i, row0)
        line, place = f.gep(self.lines[0], f.mul(at, self.lines[1]), "float"), f.gep(self.sums, f.mul(at, 2), "float")
        return line, place, self.seen.start(i), self.seen.stop(i)

    def whole(self, start: str | int, stop: str) -> tuple[str | int, str]:
        """The positions around those that powers are computed at: whole vectors."""
        f, lanes = self.f, self.lanes
        first = f.and_(start, -AttentionSchedule.ALIGNED) if self.seen.has_start else start
        return first, f.and_(f.add(stop, lanes - 1), -lanes)

    def largest(self, scope: Scope, i: str, row0: str, sink: str | None) -> None:
        """The scores of a row, -inf around those of the keys that it sees, and the largest of them."""
        f, lanes, vector = self.f, self.lanes, self.vector
        line, place, start, stop = self.places(i, row0)
        inside = scope.inner({I2: i})
        if self.score is not None:
            self.emitter.hoist(self.score, frozenset((I3,)), inside)
        first, end = self.whole(start, stop)

        def one(j: str, a: list[str]) -> list[str]:
            return [f.max(self.scaled(inside, line, j, 1), a[0], "float")]

        def several(j: str, a: list[str]) -> list[str]:
            return [f.max(self.scaled(inside, line, j, lanes), a[0], vector)]

        def nothing(j: str, _: list[str]) -> None:
            f.store(-INF, f.gep(line, j, "float"), ty="float")

        top: Typed = ("float", -INF)
        begin: str | int = start
        if self.seen.has_start:
            f.loop(first, start, 1, [], nothing)
            begin = f.min(f.and_(f.add(start, lanes - 1), -lanes), stop)
            top = ("float", f.loop(start, begin, 1, [top], one)[0])
        whole = f.max(f.and_(stop, -lanes), begin) if self.seen.has_start else f.and_(stop, -lanes)
        tops = f.loop(begin, whole, lanes, [(vector, constant(-INF, vector))], several)
        last = f.loop(whole, stop, 1, [top], one)
        f.loop(stop, end, 1, [], nothing)
        found = f.max(f.reduce(tops[0], f.max), last[0], "float")
        if sink is not None:
            found = f.max(found, sink, "float")
        if self.anchor.empty_row == "zero":
            lowest = f.cmp("eq", found, -INF, "float")
            (found,) = f.if_(
                lowest, lambda: [("float", self.unless_nan(line, start, stop))], lambda: [("float", found)]
            )
        f.store(found, f.gep(place, 1, "float"))

    def scaled(self, inside: Scope, line: str, j: str, w: int) -> str:
        """The scores of `w` keys from the products, which they replace."""
        f, emitter = self.f, self.emitter
        p, ty = f.gep(line, j, "float"), vec("float", w)
        value = f.mul(f.load(ty, p), f.splat(self.scale, w, "float"), ty)
        if self.score is not None:
            here = inside.inner({I3: j}, w, I3 if w > 1 else None)
            if self.shared is not None:
                part, at = self.shared
                found = f.load(ty, f.gep(at, j, "float"))
                here.cache[part] = (f.cmp("ne", found, 0.0, ty) if part.dtype is BOOL else found), w
            emitter.acc = lambda _: (value, w)
            value = emitter.lanes_of(self.score, here)
        f.store(value, p)
        return value

    def unless_nan(self, line: str, start: str | int, stop: str) -> str:
        """-inf, which the largest of scores of NaN and -inf is too, or NaN where one of them is."""
        f = self.f

        def worst(j: str, found: list[str]) -> list[str]:
            score = f.load("float", f.gep(line, j, "float"))
            return [f.select(f.cmp("ne", score, score, "float"), score, found[0], "float")]

        return f.loop(start, stop, 1, [("float", -INF)], worst)[0]

    def powers(self, i: str, row0: str, zeros: tuple[str | int, str], sink: str | None) -> None:
        """The powers of a row's scores and their sum."""
        f, lanes, vector = self.f, self.lanes, self.vector
        line, place, start, stop = self.places(i, row0)
        top = f.load("float", f.gep(place, 1, "float"))
        first, end = self.whole(start, stop)
        none = f.cmp("ge", start, stop)
        first = f.select(none, end, first, "i64") if self.seen.has_start else first

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

        whole = f.max(f.and_(end, -AT_ONCE * lanes), first) if self.seen.has_start else f.and_(end, -AT_ONCE * lanes)
        added = f.loop(first, whole, AT_ONCE * lanes, [(vector, constant(0.0, vector))], power(AT_ONCE))
        added = f.loop(whole, end, lanes, [(vector, added[0])], power(1))
        total = f.reduce(added[0], f.add)
        if sink is not None:
            weight = vmath.exp_below(f, f.splat(f.sub(sink, top, "float"), lanes), lanes)
            total = f.add(total, f.extract(weight, 0), "float")
        if self.anchor.empty_row == "mended":

            def mend() -> list[Typed]:
                f.loop(first, end, lanes, [], lambda j, _: f.store(0.0, f.gep(line, j, "float"), ty=vector))
                return [("float", constant(1.0, "float"))]

            (total,) = f.if_(f.cmp("ne", total, total, "float"), mend, lambda: [("float", total)])
        f.store(f.select(f.cmp("le", self.seen.keys, 0), 1.0, total, "float"), place)  # no keys: sums are 0

        def zero(j: str, _: list[str]) -> None:
            f.store(0.0, f.gep(line, j, "float"), ty=vector)

        if self.seen.has_start:
            f.loop(zeros[0], first, lanes, [], zero)
        f.loop(end, zeros[1], lanes, [], zero)
