"""Distinct elements by a stable radix sort, distinct rows by a merge sort that compares them element by element.

Both sort the numbers of rows, so that of equal ones the first comes first. Then each row is compared with the one
before it in order.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.kernels.frame import Frame
from rlx.backends.cpu.kernels.ops.topk import COUNTS, RadixSort, Sorted, key_type, sort_key
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Node
from rlx.kernels.program import Kernel
from rlx.ops.places import UniquePlaces

__all__ = ["accepts", "emit"]

EACH = 3 * 4  # bytes that a row takes besides what is sorted: its first, how many, and its number by first appearance


def accepts(node: Node) -> bool:
    """Numbers and flags that the CPU computes with."""
    dtype = node.inputs[0].dtype
    return dtype.name in convert.LLVM and dtype.kind in "fiub"


def emit(kernel: Kernel, target: Target) -> list[KernelCode]:
    """One chunk."""
    assert kernel.special is not None
    op = kernel.special.op
    assert isinstance(op, UniquePlaces)
    return [_Code(op, kernel).code()]


class _Code:
    def __init__(self, op: UniquePlaces, kernel: Kernel) -> None:
        self.frame, self.op = Frame(), op
        (x,) = kernel.operands
        self.first, self.which, self.counts, self.found = (self.frame.pointer(b) for b in kernel.results)
        self.rows, self.width = x.shape
        self.x, self.memory = self.frame.pointer(x), convert.memory_type(x.dtype)
        self.dtype = DTYPES["u8"] if x.dtype.kind == "b" else x.dtype  # a flag is a byte of 0 or 1
        self.key = key_type(self.dtype)
        self.has_nan = x.dtype.is_float and op.nans == "apart"
        self.n = self.frame.size(self.rows)

    def code(self) -> KernelCode:
        frame, f = self.frame, self.frame.f
        size = int(self.key[1:]) // 8
        scratch = frame.scratch(COUNTS + self.rows * (2 * (size + 4) + EACH))
        areas, at = [], f.offset(scratch, COUNTS)
        for each in (size, size, 4, 4, 4, 4, 4):
            areas.append(at)
            at = f.offset(at, f.mul(self.n, each, "i64"))
        first, second = Sorted(areas[0], areas[2]), Sorted(areas[1], areas[3])
        self.begins, self.sizes, self.numbers = areas[4:] if not self.op.sorted else (self.first, self.counts, "")
        if self.width == 1 and not self.has_nan:
            self.make_keys(first)
            some = f.cmp("gt", self.n, 0, "i64")

            def radix() -> list[tuple[str, str]]:
                order, _ = RadixSort(frame, self.key).run(scratch, self.n, first, second)
                return [("ptr", order.keys), ("ptr", order.places)]

            keys, places = f.if_(some, radix, lambda: [("ptr", first.keys), ("ptr", first.places)])
            count = self.group(places, lambda j, before: self.unequal_keys(keys, j, before))
        else:
            places = self.merge_sort(first.places, second.places)
            count = self.group(places, lambda j, before: self.unequal_rows(places, j, before))
        frame.put(count, self.found, 0, "i64")
        if not self.op.sorted:
            self.renumber()

        def clear(j: str, _: list[str]) -> None:
            """Beyond the distinct rows there are zeros."""
            for each in (self.first, self.counts):
                frame.put(0, each, j, "i64")

        frame.loop(count, self.n, [], clear)
        return frame.finish()

    # ---- the order

    def key_of(self, index: str) -> str:
        """The key of an element."""
        return sort_key(self.frame, self.frame.element(self.x, index, self.memory), self.dtype, False)

    def make_keys(self, into: Sorted) -> None:
        frame, f = self.frame, self.frame.f

        def element(j: str, _: list[str]) -> None:
            frame.put(self.key_of(j), into.keys, j, self.key)
            frame.put(f.cast("trunc", j, "i32", "i64"), into.places, j, "i32")

        frame.loop(0, self.n, [], element)

    def place(self, places: str, j: str) -> str:
        return self.frame.f.cast("zext", self.frame.element(places, j, "i32"), "i64", "i32")

    def common(self, a: str, b: str, nan_ends: bool) -> tuple[str, str, str]:
        """How many elements rows a and b have in common at their beginnings, and the addresses of the rows."""
        f, width = self.frame.f, self.frame.size(self.width)
        starts = [f.mul(row, width, "i64") for row in (a, b)]

        def same(carried: list[str]) -> str:
            def compare() -> list[tuple[str, str]]:
                one, other = (self.key_of(f.add(start, carried[0], "i64")) for start in starts)
                equal = f.cmp("eq", one, other, self.key)
                if nan_ends and self.has_nan:
                    equal = f.and_(equal, f.cmp("ne", one, -1, self.key), "i1")
                return [("i1", equal)]

            within = f.cmp("lt", carried[0], width, "i64")
            return f.if_(within, compare, lambda: [("i1", "false")])[0]

        (count,) = f.while_([("i64", "0")], same, lambda carried: [f.add(carried[0], 1, "i64")])
        return count, starts[0], starts[1]

    def less(self, a: str, b: str) -> str:
        """Whether row a comes before row b."""
        f = self.frame.f
        at, one, other = self.common(a, b, False)

        def compare() -> list[tuple[str, str]]:
            first, second = (self.key_of(f.add(start, at, "i64")) for start in (one, other))
            return [("i1", f.cmp("ult", first, second, self.key))]

        differ = f.cmp("lt", at, self.frame.size(self.width), "i64")
        return f.if_(differ, compare, lambda: [("i1", "false")])[0]

    def merge_sort(self, from_: str, to: str) -> str:
        """The numbers of the rows in order: runs of 1, 2, 4, ... are merged; returns where they lie."""
        frame, f, n = self.frame, self.frame.f, self.n
        frame.loop(0, n, [], lambda j, _: frame.put(f.cast("trunc", j, "i32", "i64"), from_, j, "i32"))

        def merge(source: str, target: str, low: str, middle: str, high: str) -> None:
            def next_(k: str, carried: list[str]) -> list[str]:
                left, right = carried

                def both() -> list[tuple[str, str]]:
                    return [("i1", self.less(self.place(source, right), self.place(source, left)))]

                more_left, more_right = (f.cmp("lt", at, end, "i64") for at, end in ((left, middle), (right, high)))
                two = f.and_(more_left, more_right, "i1")
                (take,) = f.if_(two, both, lambda: [("i1", more_right)])
                chosen = f.select(take, right, left, "i64")
                frame.put(frame.element(source, chosen, "i32"), target, k, "i32")
                step = f.cast("zext", take, "i64", "i1")
                return [f.add(left, f.sub(1, step, "i64"), "i64"), f.add(right, step, "i64")]

            frame.loop(low, high, [("i64", low), ("i64", middle)], next_)

        def turn(carried: list[str]) -> list[str]:
            run, source, target = carried
            double = f.shl(run, 1, "i64")

            def pair(low: str, _: list[str]) -> None:
                middle, high = (f.min(f.add(low, size, "i64"), n, "i64") for size in (run, double))
                merge(source, target, low, middle, high)

            f.loop(0, n, double, [], pair)
            return [double, target, source]

        start = [("i64", "1"), ("ptr", from_), ("ptr", to)]
        return f.while_(start, lambda carried: f.cmp("lt", carried[0], n, "i64"), turn)[1]

    # ---- what is equal

    def unequal_keys(self, keys: str, j: str, before: str) -> str:
        one, other = (self.frame.element(keys, at, self.key) for at in (j, before))
        return self.frame.f.cmp("ne", one, other, self.key)

    def unequal_rows(self, places: str, j: str, before: str) -> str:
        count, _, _ = self.common(self.place(places, j), self.place(places, before), True)
        return self.frame.f.cmp("lt", count, self.frame.size(self.width), "i64")

    def group(self, places: str, unequal: Callable[[str, str], str]) -> str:
        """Numbers the rows in their order; returns how many are distinct."""
        frame, f = self.frame, self.frame.f
        kind = "i64" if self.op.sorted else "i32"

        def narrow(value: str) -> str:
            return value if kind == "i64" else f.cast("trunc", value, kind, "i64")

        def row(j: str, carried: list[str]) -> list[str]:
            number, start, first = carried
            begins = f.cmp("eq", j, 0, "i64")
            before = f.max(f.sub(j, 1, "i64"), 0, "i64")
            new = f.if_(begins, lambda: [("i1", "true")], lambda: [("i1", unequal(j, before))])[0]
            place = self.place(places, j)
            number = f.add(number, f.cast("zext", new, "i64", "i1"), "i64")
            start, first = f.select(new, j, start, "i64"), f.select(new, place, first, "i64")
            frame.put(number, self.which, place, "i64")
            frame.put(narrow(first), self.begins, number, kind)  # again for each row of the group: no branch
            frame.put(narrow(f.add(f.sub(j, start, "i64"), 1, "i64")), self.sizes, number, kind)
            return [number, start, first]

        number, _, _ = frame.loop(0, self.n, [("i64", "-1"), ("i64", "0"), ("i64", "0")], row)
        return f.add(number, 1, "i64")

    def renumber(self) -> None:
        """Numbers in the order of first appearance."""
        frame, f = self.frame, self.frame.f

        def row(j: str, carried: list[str]) -> list[str]:
            old = frame.element(self.which, j, "i64")
            appears = f.cmp("eq", self.place(self.begins, old), j, "i64")

            def put() -> None:
                frame.put(f.cast("trunc", carried[0], "i32", "i64"), self.numbers, old, "i32")
                frame.put(j, self.first, carried[0], "i64")
                frame.put(self.place(self.sizes, old), self.counts, carried[0], "i64")

            f.if_(appears, put)
            frame.put(self.place(self.numbers, old), self.which, j, "i64")
            return [f.add(carried[0], f.cast("zext", appears, "i64", "i1"), "i64")]

        frame.loop(0, self.n, [("i64", "0")], row)
