"""The k best elements of each row: by insertion for small k, else by a histogram, a selection and a radix sort.

Elements become unsigned integers in the order of the result (the best is the smallest; equal numbers are equal, all
NaNs are one), so that one code serves all types and both directions. Ties keep the order of places.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.frame import Frame
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import vec
from rlx.backends.cpu.loops.looks import looking_loop
from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Node
from rlx.ir.shape import min_size, size_product
from rlx.kernels.program import Buffer, Kernel
from rlx.ops.select import TopK
from rlx.records import dataclass

__all__ = ["DIGIT", "RadixSort", "Sorted", "accepts", "emit", "sort_key"]

FEW = 32  # elements that insertion is used for
DIGIT = 11  # bits that the selection looks at
F32 = DTYPES["f32"]


def accepts(node: Node) -> bool:
    """Every type of number that the CPU computes with."""
    dtype = node.inputs[0].dtype
    return dtype.name in convert.LLVM and dtype.kind in "fiu"


def key_type(dtype: DType) -> str:
    """The unsigned integer that elements are compared as."""
    return "i64" if dtype.bits == 64 else "i32"


def sort_key(frame: Frame, text: str, dtype: DType, largest: bool) -> str:
    """An unsigned integer that orders elements; NaN is the largest number, 0 and -0 are equal."""
    f, ty = frame.f, key_type(dtype)
    bits = int(ty[1:])
    if dtype.is_float:
        if dtype.bits < 32:
            text, dtype = convert.convert(f, text, dtype, F32, 1), F32
        real = convert.llvm_type(dtype)
        raw = f.cast("bitcast", text, ty, real)
        raw = f.select(f.cmp("eq", text, 0.0, real), 0, raw, ty)
        flip = f.or_(f.ashr(raw, bits - 1, ty), 1 << (bits - 1), ty)
        key = f.select(f.cmp("uno", text, text, real), -1, f.xor(raw, flip, ty), ty)
    else:
        own = convert.llvm_type(dtype)
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

    def clear(self, counts: str, size: int) -> None:
        f = self.frame.f
        f.declare("llvm.memset.p0.i64", "void", ["ptr", "i8", "i64", "i1"])
        f.do(f"call void @llvm.memset.p0.i64(ptr {counts}, i8 0, i64 {8 * size}, i1 false)")

    def add_to(self, counts: str, at: str, amount: int) -> str:
        """Raises a count; returns what it was."""
        f = self.frame.f
        cell = f.gep(counts, at, "i64")
        old = f.load("i64", cell)
        f.store(f.add(old, amount, "i64"), cell)
        return old

    def run(self, counts: str, n: str, first: Sorted, second: Sorted) -> str:
        """Sorts the n > 0 of `first`; returns where their places lie. A byte that all share is passed over."""
        frame, f = self.frame, self.frame.f

        def byte(key: str, shift: str) -> str:
            part = f.and_(f.lshr(key, shift, self.key), 255, self.key)
            return part if self.key == "i64" else f.cast("zext", part, "i64", self.key)

        def turn(number: str, carried: list[str]) -> list[str]:
            keys, places, other_keys, other_places = carried
            bit = f.shl(number, 3, "i64")
            shift = bit if self.key == "i64" else f.cast("trunc", bit, self.key, "i64")
            self.clear(counts, 256)

            def tally(j: str, _: list[str]) -> None:
                self.add_to(counts, byte(frame.element(keys, j, self.key), shift), 1)

            frame.loop(0, n, [], tally)
            same = f.cmp("eq", frame.element(counts, byte(frame.element(keys, 0, self.key), shift), "i64"), n, "i64")

            def move() -> list[tuple[str, str]]:
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

            return f.if_(same, lambda: [("ptr", t) for t in carried], move)

        areas = [("ptr", t) for t in (first.keys, first.places, second.keys, second.places)]
        return f.loop(0, self.key_bytes, 1, areas, turn)[1]


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
        scratch = frame.scratch((8 << DIGIT) + self.length * (3 * self.key_bytes + 8))
        inner = frame.size(self.inner)
        area = f.mul(n, self.key_bytes, "i64")
        keys = f.offset(scratch, 8 << DIGIT)
        first = Sorted(f.offset(keys, area), f.offset(keys, f.mul(area, 3, "i64")))
        second = Sorted(f.offset(first.keys, area), f.offset(first.places, f.mul(n, 4, "i64")))
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
                return [("ptr", self.select(scratch, keys, n, k, first, second))]

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

        frame.loop(0, n, [], element)

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

    def select(self, counts: str, keys: str, n: str, k: str, first: Sorted, second: Sorted) -> str:
        """Sorts those that may be among the k best; returns where their places lie."""
        frame, f = self.frame, self.frame.f
        shift = int(self.key[1:]) - DIGIT
        self.sort.clear(counts, 1 << DIGIT)

        def digit(key: str) -> str:
            top = f.lshr(key, shift, self.key)
            return top if self.key == "i64" else f.cast("zext", top, "i64", self.key)

        def tally(j: str, _: list[str]) -> None:
            self.sort.add_to(counts, digit(frame.element(keys, j, self.key)), 1)

        frame.loop(0, n, [], tally)

        def short(carried: list[str]) -> str:
            return f.cmp("lt", carried[1], k, "i64")

        def onward(carried: list[str]) -> list[str]:
            return [f.add(carried[0], 1, "i64"), f.add(carried[1], frame.element(counts, carried[0], "i64"), "i64")]

        limit, _ = f.while_([("i64", "0"), ("i64", "0")], short, onward)

        def take(j: str, carried: list[str]) -> list[str]:
            key = frame.element(keys, j, self.key)
            frame.put(key, first.keys, carried[0], self.key)  # kept only where the count goes on
            frame.put(f.cast("trunc", j, "i32", "i64"), first.places, carried[0], "i32")
            return [f.add(carried[0], f.cast("zext", f.cmp("ult", digit(key), limit, "i64"), "i64", "i1"), "i64")]

        (taken,) = frame.loop(0, n, [("i64", "0")], take)
        return self.sort.run(counts, taken, first, second)

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
