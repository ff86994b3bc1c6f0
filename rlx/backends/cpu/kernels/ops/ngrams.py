"""Counts of n-grams: from each item down a tree, whose children of a node are found by halving."""

from __future__ import annotations

from rlx.backends.cpu.kernels.frame import Frame
from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.backends.cpu.target import Target
from rlx.ir.graph import Node
from rlx.kernels.program import Kernel
from rlx.ops.strings import NgramCounts

__all__ = ["accepts", "emit"]


def accepts(node: Node) -> bool:
    """All of them."""
    return isinstance(node.op, NgramCounts)


def emit(kernel: Kernel, target: Target) -> list[KernelCode]:
    """A chunk has some of the rows. What tables say is kept within their sizes."""
    assert kernel.special is not None
    op = kernel.special.op
    assert isinstance(op, NgramCounts)
    return [_Code(op, kernel).code()]


class _Code:
    def __init__(self, op: NgramCounts, kernel: Kernel) -> None:
        self.frame, self.op = Frame(), op
        x, *tables = kernel.operands
        (out,) = kernel.results
        self.x, self.out = self.frame.pointer(x), self.frame.pointer(out)
        self.first, self.items, self.feature = (self.frame.pointer(t) for t in tables)
        self.edges = self.frame.size(tables[1].shape[0])
        self.length = x.shape[-1]
        self.count = x.shape[0] if len(x.shape) == 2 else 1

    def code(self) -> KernelCode:
        frame, f, op = self.frame, self.frame.f, self.op
        steps = 8 * (op.skips + 1) * max(op.longest, 1)
        start, stop = frame.rows(self.count, self.length * steps + op.features // 16 + 1)
        length = frame.size(self.length)

        def row(r: str, _: list[str]) -> None:
            source = f.gep(self.x, f.mul(r, length, "i64"), "i64")
            counts = f.gep(self.out, f.mul(r, op.features, "i64"), "float")
            frame.clear(counts, 4 * op.features)

            def apart(step: str, _: list[str]) -> None:
                frame.loop(0, length, [], lambda begin, _: self.descend(source, counts, length, begin, step))

            f.loop(1, op.skips + 2, 1, [], apart)

        f.loop(start, stop, 1, [], row)
        return frame.finish()

    def descend(self, source: str, counts: str, length: str, begin: str, step: str) -> None:
        """Counts the n-grams that begin at an item, as far as there are any."""
        frame, f, op = self.frame, self.frame.f, self.op

        def onward(carried: list[str]) -> str:
            n, at, node = carried
            more = f.and_(f.cmp("lt", n, op.longest, "i64"), f.cmp("lt", at, length, "i64"), "i1")
            return f.and_(more, f.cmp("ge", node, 0, "i64"), "i1")

        def item(carried: list[str]) -> list[str]:
            n, at, node = carried
            node = self.child(node, frame.element(source, at, "i64"))
            n = f.add(n, 1, "i64")
            one_or_near = f.or_(f.cmp("gt", n, 1, "i64"), f.cmp("eq", step, 1, "i64"), "i1")
            counted = f.and_(f.cmp("ge", n, op.shortest, "i64"), one_or_near, "i1")
            feature = frame.element(self.feature, f.max(node, 0, "i64"), "i64")
            some = f.and_(f.cmp("ge", node, 0, "i64"), f.cmp("ge", feature, 0, "i64"), "i1")

            def count() -> None:
                inside = f.cmp("lt", feature, op.features, "i64")
                frame.fail_unless(inside, "index", feature)

                def add() -> None:
                    place = f.gep(counts, feature, "float")
                    f.store(f.add(f.load("float", place), 1.0, "float"), place)

                f.if_(inside, add)

            f.if_(f.and_(counted, some, "i1"), count)
            return [n, f.add(at, step, "i64"), node]

        f.while_([("i64", "0"), ("i64", begin), ("i64", "0")], onward, item)

    def child(self, node: str, item: str) -> str:
        """The node that an item leads to, or -1."""
        frame, f = self.frame, self.frame.f
        low = self.within(frame.element(self.first, node, "i64"))
        high = self.within(frame.element(self.first, f.add(node, 1, "i64"), "i64"))

        none = [("i64", "-1")]

        def halve(carried: list[str]) -> list[str]:
            middle = f.lshr(f.add(carried[0], carried[1], "i64"), 1, "i64")
            before = f.cmp("lt", frame.element(self.items, middle, "i64"), item, "i64")
            after = f.add(middle, 1, "i64")
            return [f.select(before, after, carried[0], "i64"), f.select(before, carried[1], middle, "i64")]

        def search() -> list[tuple[str, str]]:
            """Different numbers from 0 on lie no further from the first than they are large, mostly just there."""
            last = f.sub(high, 1, "i64")
            guess = f.add(low, f.min(item, f.sub(last, low, "i64"), "i64"), "i64")

            def closer() -> list[tuple[str, str]]:
                def apart(carried: list[str]) -> str:
                    return f.cmp("lt", carried[0], carried[1], "i64")

                at, _ = f.while_([("i64", low), ("i64", guess)], apart, halve)
                return [("i64", self.edge_of(at, item))]

            there = f.cmp("eq", frame.element(self.items, guess, "i64"), item, "i64")
            return [("i64", f.if_(there, lambda: [("i64", f.add(guess, 1, "i64"))], closer)[0])]

        def some() -> list[tuple[str, str]]:
            largest = frame.element(self.items, f.sub(high, 1, "i64"), "i64")
            fits = f.and_(f.cmp("ge", item, 0, "i64"), f.cmp("le", item, largest, "i64"), "i1")
            return [("i64", f.if_(fits, search, lambda: none)[0])]

        return f.if_(f.cmp("lt", low, high, "i64"), some, lambda: none)[0]

    def edge_of(self, at: str, item: str) -> str:
        """The node behind an edge that has the item, or -1."""
        f = self.frame.f
        same = f.cmp("eq", self.frame.element(self.items, at, "i64"), item, "i64")
        return f.select(same, f.add(at, 1, "i64"), -1, "i64")

    def within(self, edge: str) -> str:
        f = self.frame.f
        return f.min(f.max(edge, 0, "i64"), self.edges, "i64")
