"""The k best elements of each row: by insertion for small k, else by sorting those that may be among them.

They are gathered, at most 2k, and when there are so many, the k best stay, and only what is better is gathered then.

Elements become unsigned integers in the order of the result (the best is the smallest; equal numbers are equal, all
NaNs are one), so that one code serves all types and both directions. Ties keep the order of places.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.kernels.frame import Frame
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import size_of, vec
from rlx.backends.cpu.loops.looks import look_if, looking_loop
from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Node
from rlx.ir.shape import min_size, size_product
from rlx.kernels.program import Buffer, Kernel
from rlx.ops.select import TopK
from rlx.records import dataclass

__all__ = ["COUNTS", "RadixSort", "Sorted", "accepts", "emit", "sort_key"]

FEW = 32  # elements that insertion is used for
SHORT = 256  # elements that are sorted by comparing all pairs
LOOKS = 1 << 16  # elements between looks whether the run goes on
VECTOR = 16  # elements of a vector at most
COUNTS = 8 * 256  # bytes of what the radix sort counts in
F32 = DTYPES["f32"]


def accepts(node: Node) -> bool:
    """Every type of number that the CPU computes with."""
    dtype = node.inputs[0].dtype
    return dtype.name in convert.LLVM and dtype.kind in "fiu"


def key_type(dtype: DType) -> str:
    """The unsigned integer that elements are compared as."""
    return "i64" if dtype.bits == 64 else "i32"


def sort_key(frame: Frame, text: str, dtype: DType, largest: bool, w: int = 1) -> str:
    """Unsigned integers that order elements, in w lanes; NaN is the largest number, 0 and -0 are equal."""
    f, bits = frame.f, int(key_type(dtype)[1:])
    ty = vec(key_type(dtype), w)
    if dtype.is_float:
        if dtype.bits < 32:
            text, dtype = convert.convert(f, text, dtype, F32, w), F32
        real = vec(convert.llvm_type(dtype), w)
        raw = f.cast("bitcast", text, ty, real)
        raw = f.select(f.cmp("eq", text, 0.0, real), 0, raw, ty)
        flip = f.or_(f.ashr(raw, bits - 1, ty), 1 << (bits - 1), ty)
        key = f.select(f.cmp("uno", text, text, real), -1, f.xor(raw, flip, ty), ty)
    else:
        own = vec(convert.llvm_type(dtype), w)
        key = text if own == ty else f.cast("sext" if dtype.kind == "i" else "zext", text, ty, own)
        key = f.xor(key, 1 << (bits - 1), ty) if dtype.kind == "i" else key
    return f.xor(key, -1, ty) if largest else key


def emit(kernel: Kernel, target: Target) -> list[KernelCode]:
    """One chunk takes some of the rows."""
    assert kernel.special is not None
    op = kernel.special.op
    assert isinstance(op, TopK)
    (x,), (values, places) = kernel.operands, kernel.results
    return [_Code(op, x, values, places, target).code()]


@dataclass
class Sorted:
    """Where keys, and the places that they come from, lie in scratch."""

    keys: str
    places: str


class RadixSort:
    """A stable sort of keys and their places, byte by byte from the last."""

    def __init__(self, frame: Frame, key: str) -> None:
        self.frame, self.key, self.key_bytes = frame, key, int(key[1:]) // 8

    def add_to(self, counts: str, at: str, amount: int) -> str:
        """Raises a count; returns what it was."""
        f = self.frame.f
        cell = f.gep(counts, at, "i64")
        old = f.load("i64", cell)
        f.store(f.add(old, amount, "i64"), cell)
        return old

    def run(self, counts: str, n: str, first: Sorted, second: Sorted) -> tuple[Sorted, Sorted]:
        """Sorts the n > 0 of `first`: where they lie then, and the other area. A byte that all share is passed over."""
        frame, f = self.frame, self.frame.f
        one = frame.element(first.keys, 0, self.key)

        def differs(j: str, carried: list[str]) -> list[str]:
            return [f.or_(carried[0], f.xor(frame.element(first.keys, j, self.key), one, self.key), self.key)]

        (varying,) = frame.loop(0, n, [(self.key, "0")], differs)

        def byte(key: str, shift: str) -> str:
            part = f.and_(f.lshr(key, shift, self.key), 255, self.key)
            return part if self.key == "i64" else f.cast("zext", part, "i64", self.key)

        def turn(number: str, carried: list[str]) -> list[str]:
            keys, places, other_keys, other_places = carried
            bit = f.shl(number, 3, "i64")
            shift = bit if self.key == "i64" else f.cast("trunc", bit, self.key, "i64")

            def tally(j: str, _: list[str]) -> None:
                self.add_to(counts, byte(frame.element(keys, j, self.key), shift), 1)

            def move() -> list[tuple[str, str]]:
                self.frame.clear(counts, COUNTS)
                frame.loop(0, n, [], tally)

                def start(c: str, total: list[str]) -> list[str]:
                    cell = f.gep(counts, c, "i64")
                    size = f.load("i64", cell)
                    f.store(total[0], cell)
                    return [f.add(total[0], size, "i64")]

                f.loop(0, 256, 1, [("i64", "0")], start)

                def place(j: str, _: list[str]) -> None:
                    key = frame.element(keys, j, self.key)
                    to = self.add_to(counts, byte(key, shift), 1)
                    frame.put(key, other_keys, to, self.key)
                    frame.put(frame.element(places, j, "i32"), other_places, to, "i32")

                frame.loop(0, n, [], place)
                return [("ptr", t) for t in (other_keys, other_places, keys, places)]

            some = f.cmp("ne", byte(varying, shift), 0, "i64")
            return f.if_(some, move, lambda: [("ptr", t) for t in carried])

        areas = [("ptr", t) for t in (first.keys, first.places, second.keys, second.places)]
        keys, places, other_keys, other_places = f.loop(0, self.key_bytes, 1, areas, turn)
        return Sorted(keys, places), Sorted(other_keys, other_places)


class _Code:
    def __init__(self, op: TopK, x: Buffer, values: Buffer, places: Buffer, target: Target) -> None:
        self.frame = Frame()
        self.op, self.x, self.values, self.places = op, x, values, places
        axis = op.axis % len(x.shape)
        self.length, self.inner = x.shape[axis], size_product(x.shape[axis + 1 :])
        self.count = size_product(x.shape[:axis]) * self.inner
        self.key = key_type(x.dtype)
        self.key_bytes = int(self.key[1:]) // 8
        self.lanes = target.vector_bytes // self.key_bytes
        self.sort = RadixSort(self.frame, self.key)

    def code(self) -> KernelCode:
        frame, f = self.frame, self.frame.f
        n, k = frame.size(self.length), frame.size(self.op.k)
        start, stop = frame.rows(self.count * min_size(self.op.k, 1), 4 * self.length + 1)
        spare = 4 * VECTOR
        areas = [COUNTS, *([4 * (SHORT + VECTOR)] * 2), *([self.key_bytes * (self.length + spare)] * 3)]
        areas += [4 * (self.length + spare)] * 2
        scratch, at = [], frame.scratch(sum(areas[1:], start=areas[0]))
        for size in areas:
            scratch.append(at)
            at = f.offset(at, frame.size(size))
        self.tallies, self.order, self.ranks, keys = scratch[:4]
        first, second = Sorted(scratch[4], scratch[6]), Sorted(scratch[5], scratch[7])
        inner = frame.size(self.inner)
        small = None if not isinstance(self.op.k, int) else self.op.k <= FEW

        def row(r: str, _: list[str]) -> None:
            outer, at = f.binary("udiv", r, inner, "i64"), f.binary("urem", r, inner, "i64")
            source = f.add(f.mul(f.mul(outer, n, "i64"), inner, "i64"), at, "i64")
            target = f.add(f.mul(f.mul(outer, k, "i64"), inner, "i64"), at, "i64")
            self.make_keys(keys, n, source, inner)

            def few() -> list[tuple[str, str]]:
                self.insert_all(keys, n, k, first)
                return [("ptr", first.places)]

            def many() -> list[tuple[str, str]]:
                return [("ptr", self.select(keys, n, k, first, second))]

            match small:
                case True:
                    best = few()[0][1]
                case False:
                    best = many()[0][1]
                case None:
                    best = f.if_(f.cmp("le", k, FEW, "i64"), few, many)[0]
            self.write(best, k, source, target, inner)

        f.loop(start, stop, 1, [], row)
        return frame.finish()

    def make_keys(self, keys: str, n: str, source: str, step: str) -> None:
        frame, f = self.frame, self.frame.f
        x, ty, dtype = frame.pointer(self.x), convert.memory_type(self.x.dtype), self.x.dtype

        def element(j: str, _: list[str]) -> None:
            at = f.add(source, f.mul(j, step, "i64"), "i64")
            frame.put(sort_key(frame, frame.element(x, at, ty), dtype, self.op.largest), keys, j, self.key)

        def several(j: str, _: list[str]) -> None:
            some = f.load(vec(ty, self.lanes), f.gep(x, f.add(source, j, "i64"), ty), align=size_of(ty))
            key = sort_key(frame, some, dtype, self.op.largest, self.lanes)
            f.store(key, f.gep(keys, j, self.key), align=self.key_bytes)

        begin = "0"
        if self.inner == 1:
            begin = f.sub(n, f.rem(n, self.lanes, "i64"), "i64")
            looking_loop(f, 0, begin, self.lanes, [], several)
        frame.loop(begin, n, [], element)

    def insert(self, best: Sorted, end: str, key: str, place: str) -> None:
        """Puts a key among those before `end`, which are in order, after its equals; the one at `end` is lost."""
        frame, f = self.frame, self.frame.f

        def greater(carried: list[str]) -> str:
            before = f.max(f.sub(carried[0], 1, "i64"), 0, "i64")
            return f.and_(
                f.cmp("gt", carried[0], 0, "i64"),
                f.cmp("ugt", frame.element(best.keys, before, self.key), key, self.key),
            )

        def move(carried: list[str]) -> list[str]:
            before = f.sub(carried[0], 1, "i64")
            frame.put(frame.element(best.keys, before, self.key), best.keys, carried[0], self.key)
            frame.put(frame.element(best.places, before, "i32"), best.places, carried[0], "i32")
            return [before]

        (at,) = f.while_([("i64", end)], greater, move)
        frame.put(key, best.keys, at, self.key)
        frame.put(f.cast("trunc", place, "i32", "i64"), best.places, at, "i32")

    def insert_all(self, keys: str, n: str, k: str, best: Sorted) -> None:
        """Keeps the k best so far in order; vectors of elements that are no better than the last are passed over."""
        frame, f = self.frame, self.frame.f
        lanes = self.lanes
        last = f.sub(k, 1, "i64")

        def first(j: str, _: list[str]) -> None:
            self.insert(best, j, frame.element(keys, j, self.key), j)

        f.loop(0, k, 1, [], first)

        def one(j: str, _: list[str]) -> None:
            key = frame.element(keys, j, self.key)
            better = f.cmp("ult", key, frame.element(best.keys, last, self.key), self.key)
            f.if_(better, lambda: self.insert(best, last, key, j))

        def several(j: str, _: list[str]) -> None:
            some = f.load(vec(self.key, lanes), f.gep(keys, j, self.key), align=self.key_bytes)
            limit = f.splat(frame.element(best.keys, last, self.key), lanes, self.key)
            better = f.cast("bitcast", f.cmp("ult", some, limit), f"i{lanes}", vec("i1", lanes))
            f.if_(f.cmp("ne", better, 0, f"i{lanes}"), lambda: f.loop(j, f.add(j, lanes, "i64"), 1, [], one))

        rest = f.sub(n, k, "i64")
        whole = f.sub(n, f.rem(rest, lanes, "i64"), "i64")
        looking_loop(f, k, whole, lanes, [], several)
        f.loop(whole, n, 1, [], one)

    def select(self, keys: str, n: str, k: str, first: Sorted, second: Sorted) -> str:
        """Gathers and sorts in rounds, as the module says; returns where the places of the best lie."""
        f = self.frame.f
        room = f.max(f.mul(k, 2, "i64"), SHORT, "i64")

        def round_(carried: list[str]) -> list[str]:
            begin, count, limit = carried[:3]
            here, there = Sorted(*carried[3:5]), Sorted(*carried[5:])
            begin, count = self.gather(keys, n, begin, count, room, limit, here)

            def ranked() -> list[tuple[str, str]]:
                self.rank(here, count, k, there)
                return [("ptr", p) for p in (there.keys, there.places, here.keys, here.places)]

            def radix() -> list[tuple[str, str]]:
                made, other = self.sort.run(self.tallies, count, here, there)
                return [("ptr", p) for p in (made.keys, made.places, other.keys, other.places)]

            best = f.if_(f.cmp("le", count, SHORT, "i64"), ranked, radix)
            worst = self.frame.element(best[0], f.sub(k, 1, "i64"), self.key)
            begin = f.select(f.cmp("eq", worst, 0, self.key), n, begin, "i64")  # nothing is better than that
            return [begin, k, f.sub(worst, 1, self.key), *best]

        areas = [("ptr", p) for p in (first.keys, first.places, second.keys, second.places)]
        start = [("i64", "0"), ("i64", "0"), (self.key, "-1"), *areas]
        return f.while_(start, lambda carried: f.cmp("lt", carried[0], n, "i64"), round_)[4]

    def gather(self, keys: str, n: str, begin: str, count: str, room: str, limit: str, into: Sorted) -> tuple[str, str]:
        """Appends the keys up to a limit and their places until there are `room`: (where it ended, how many there are).

        Vectors without any are passed over; the last elements of a row are taken one by one, whatever room there is.
        """
        frame, f, lanes = self.frame, self.frame.f, self.lanes
        limits = f.splat(limit, lanes, self.key)

        def one(j: str, carried: list[str]) -> list[str]:
            key = frame.element(keys, j, self.key)
            frame.put(key, into.keys, carried[0], self.key)  # kept only where the count goes on
            frame.put(f.cast("trunc", j, "i32", "i64"), into.places, carried[0], "i32")
            return [f.add(carried[0], f.cast("zext", f.cmp("ule", key, limit, self.key), "i64", "i1"), "i64")]

        def more(carried: list[str]) -> str:
            fits = f.cmp("le", f.add(carried[0], lanes, "i64"), n, "i64")
            return f.and_(fits, f.cmp("lt", carried[1], room, "i64"), "i1")

        def several(carried: list[str]) -> list[str]:
            at, have = carried
            look_if(f, f.cmp("eq", f.and_(at, LOOKS - 1, "i64"), 0, "i64"))
            some = f.load(vec(self.key, lanes), f.gep(keys, at, self.key), align=self.key_bytes)
            within = f.cast("bitcast", f.cmp("ule", some, limits), f"i{lanes}", vec("i1", lanes))
            stop = f.add(at, lanes, "i64")

            def all_of_them() -> list[tuple[str, str]]:
                f.store(some, f.gep(into.keys, have, self.key), align=self.key_bytes)
                places = f.add(f.splat(f.cast("trunc", at, "i32", "i64"), lanes, "i32"), f.iota(lanes, "i32"))
                f.store(places, f.gep(into.places, have, "i32"), align=4)
                return [("i64", f.add(have, lanes, "i64"))]

            def found() -> list[tuple[str, str]]:
                whole = f.cmp("eq", within, -1, f"i{lanes}")
                return [("i64", f.if_(whole, all_of_them, lambda: f.loop(at, stop, 1, [("i64", have)], one))[0])]

            return [stop, *f.if_(f.cmp("ne", within, 0, f"i{lanes}"), found, lambda: [("i64", have)])]

        begin, count = f.while_([("i64", begin), ("i64", count)], more, several)
        end = f.select(f.cmp("gt", f.add(begin, lanes, "i64"), n, "i64"), n, begin, "i64")
        return end, f.loop(begin, end, 1, [("i64", count)], one)[0]

    def rank(self, keys: Sorted, n: str, k: str, into: Sorted) -> None:
        """Counts for each of n <= `SHORT` keys those that come before it, and puts the k first in order."""
        frame, f, lanes = self.frame, self.frame.f, self.lanes
        ty = vec(self.key, lanes)

        def block(i: str, _: list[str]) -> None:
            own = f.load(ty, f.gep(keys.keys, i, self.key), align=self.key_bytes)  # what lies behind has no rank
            end = f.add(i, lanes, "i64")

            def counted(before: Callable[[str, str], str]) -> Callable[[str, list[str]], list[str]]:
                def turn(j: str, carried: list[str]) -> list[str]:
                    key = f.splat(frame.element(keys.keys, j, self.key), lanes, self.key)
                    return [f.add(carried[0], f.cast("zext", before(j, key), ty, vec("i1", lanes)), ty)]

                return turn

            def beside(j: str, key: str) -> str:
                later = f.cmp("gt", f.iota(lanes, "i64"), f.splat(f.sub(j, i, "i64"), lanes, "i64"))
                return f.or_(f.cmp("ult", key, own, ty), f.and_(f.cmp("ule", key, own, ty), later))

            before: list[tuple[str, str, Callable[[str, str], str]]] = [
                ("0", i, lambda j, key: f.cmp("ule", key, own, ty)),
                (i, f.min(end, n, "i64"), beside),
                (end, n, lambda j, key: f.cmp("ult", key, own, ty)),
            ]
            total = f.value(0, ty)
            for start, stop, test in before:
                (total,) = f.loop(start, stop, 1, [(ty, total)], counted(test))
            f.store(f.cast("trunc", total, "i32"), f.gep(self.ranks, i, "i32"), align=4)

        f.loop(0, n, lanes, [], block)

        def put(j: str, _: list[str]) -> None:
            at = f.cast("zext", frame.element(self.ranks, j, "i32"), "i64", "i32")
            frame.put(f.cast("trunc", j, "i32", "i64"), self.order, at, "i32")

        f.loop(0, n, 1, [], put)

        def move(j: str, _: list[str]) -> None:
            from_ = f.cast("zext", frame.element(self.order, j, "i32"), "i64", "i32")
            frame.put(frame.element(keys.keys, from_, self.key), into.keys, j, self.key)
            frame.put(frame.element(keys.places, from_, "i32"), into.places, j, "i32")

        f.loop(0, k, 1, [], move)

    def write(self, best: str, k: str, source: str, target: str, step: str) -> None:
        """The chosen elements and their places."""
        frame, f = self.frame, self.frame.f
        x, values, places = (frame.pointer(b) for b in (self.x, self.values, self.places))
        ty = convert.memory_type(self.x.dtype)

        def element(j: str, _: list[str]) -> None:
            place = f.cast("zext", frame.element(best, j, "i32"), "i64", "i32")
            to = f.add(target, f.mul(j, step, "i64"), "i64")
            frame.put(frame.element(x, f.add(source, f.mul(place, step, "i64"), "i64"), ty), values, to, ty)
            frame.put(place, places, to, "i64")

        frame.loop(0, k, [], element)
