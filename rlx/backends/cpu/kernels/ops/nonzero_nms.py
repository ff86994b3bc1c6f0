"""Finding places: elements that are not 0, and boxes that overlap no better one."""

from __future__ import annotations

from rlx.backends.cpu.kernels.frame import Frame
from rlx.backends.cpu.kernels.ops.topk import COUNTS, RadixSort, Sorted, sort_key
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import vec
from rlx.backends.cpu.loops.looks import look_if
from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Node
from rlx.ir.shape import size_product
from rlx.kernels.program import Kernel
from rlx.ops.places import NonMaxPlaces

__all__ = ["accepts_any", "accepts_boxes", "emit_non_max", "emit_non_zero"]

F32 = DTYPES["f32"]
BOXES = 64  # candidates between looks whether the run goes on
SIDES = 5  # what is kept of a chosen box: its corners and its area


def accepts_any(node: Node) -> bool:
    """Every type that the CPU computes with."""
    return node.inputs[0].dtype.name in convert.LLVM


def accepts_boxes(node: Node) -> bool:
    """f32, as in ONNX."""
    real = [v.dtype for v in node.inputs[:2]] + [v.dtype for v in node.inputs[3:]]
    return all(d is F32 for d in real) and all(v.dtype is DTYPES["i64"] for v in node.inputs[2:3])


def emit_non_zero(kernel: Kernel, target: Target) -> list[KernelCode]:
    """One pass over the elements in order."""
    (x,), (places, found) = kernel.operands, kernel.results
    frame = Frame()
    f, ty = frame.f, convert.memory_type(x.dtype)
    source, result, total = frame.pointer(x), frame.pointer(places), frame.product(x.shape)
    sizes = [frame.size(s) for s in x.shape[1:]]

    def element(n: str, carried: list[str]) -> list[str]:
        value = convert.from_memory(f, frame.element(source, n, ty), x.dtype, 1)
        some = convert.convert(f, value, x.dtype, DTYPES["bool"], 1)

        def put() -> None:
            rest = n
            for d in reversed(range(max(len(x.shape), 1))):
                at = rest
                if d:
                    at, rest = f.binary("urem", rest, sizes[d - 1], "i64"), f.binary("udiv", rest, sizes[d - 1], "i64")
                frame.put(at, result, f.add(f.mul(total, d, "i64"), carried[0], "i64"), "i64")

        f.if_(some, put)
        return [f.add(carried[0], f.cast("zext", some, "i64", "i1"), "i64")]

    (count,) = frame.loop(0, total, [("i64", "0")], element)
    frame.put(count, frame.pointer(found), 0, "i64")
    return [frame.finish()]


def emit_non_max(kernel: Kernel, target: Target) -> list[KernelCode]:
    """Class by class: the candidates in order of score, each against those that were taken before."""
    assert kernel.special is not None
    op = kernel.special.op
    assert isinstance(op, NonMaxPlaces)
    return [_NonMax(op, kernel, target.lanes).code()]


class _NonMax:
    def __init__(self, op: NonMaxPlaces, kernel: Kernel, lanes: int) -> None:
        self.frame, self.op = Frame(), op
        boxes, scores, *given = kernel.operands
        _, self.classes, self.size = scores.shape
        self.boxes, self.scores, *self.given = (self.frame.pointer(b) for b in (boxes, scores, *given))
        self.places, self.found = (self.frame.pointer(b) for b in kernel.results)
        self.count = size_product(scores.shape[:2])
        self.sort = RadixSort(self.frame, "i32")
        self.lanes = lanes

    def code(self) -> KernelCode:
        frame, f = self.frame, self.frame.f
        n = frame.size(self.size)
        counts = frame.scratch(COUNTS + (self.size + self.lanes) * (4 * (4 + SIDES)))
        room = f.add(n, self.lanes, "i64")
        areas = [f.offset(counts, f.add(COUNTS, f.mul(room, 4 * i, "i64"), "i64")) for i in range(4 + SIDES)]
        first, second, self.taken = Sorted(areas[0], areas[1]), Sorted(areas[2], areas[3]), areas[4:]
        limit = frame.element(self.given[0], 0, "i64") if self.given else "0"
        self.overlap = frame.element(self.given[1], 0, "float") if len(self.given) > 1 else f.value(0.0, "float")
        least = frame.element(self.given[2], 0, "float") if len(self.given) > 2 else f.value(float("-inf"), "float")
        if len(self.given) > 1:
            inside = f.and_(f.cmp("ge", self.overlap, 0.0, "float"), f.cmp("le", self.overlap, 1.0, "float"), "i1")
            frame.fail_unless(inside, "guard", "0")

        def row(r: str, carried: list[str]) -> list[str]:
            scores = f.gep(self.scores, f.mul(r, n, "i64"), "float")
            batch = f.binary("udiv", r, frame.size(self.classes), "i64")
            boxes = f.gep(self.boxes, f.mul(f.mul(batch, n, "i64"), 4, "i64"), "float")

            def candidate(i: str, carried: list[str]) -> list[str]:
                score = frame.element(scores, i, "float")
                frame.put(sort_key(frame, score, F32, True), first.keys, carried[0], "i32")
                frame.put(f.cast("trunc", i, "i32", "i64"), first.places, carried[0], "i32")
                good = f.cmp("gt", score, least, "float")
                return [f.add(carried[0], f.cast("zext", good, "i64", "i1"), "i64")]

            (count,) = frame.loop(0, n, [("i64", "0")], candidate)
            some = f.cmp("gt", count, 0, "i64")

            def sorted_() -> list[tuple[str, str]]:
                return [("ptr", self.sort.run(counts, count, first, second)[0].places)]

            (order,) = f.if_(some, sorted_, lambda: [("ptr", first.places)])
            return self.choose(r, batch, boxes, order, count, limit, carried[0])

        (total,) = f.loop(0, frame.size(self.count), 1, [("i64", "0")], row)
        frame.put(total, self.found, 0, "i64")
        return frame.finish()

    def choose(self, row: str, batch: str, boxes: str, order: str, count: str, limit: str, total: str) -> list[str]:
        frame, f = self.frame, self.frame.f
        number = f.binary("urem", row, frame.size(self.classes), "i64")

        def more(carried: list[str]) -> str:
            return f.and_(f.cmp("lt", carried[0], count, "i64"), f.cmp("lt", carried[1], limit, "i64"), "i1")

        def next_(carried: list[str]) -> list[str]:
            due = f.cmp("eq", f.and_(carried[0], BOXES - 1, "i64"), BOXES - 1, "i64")
            look_if(f, due)
            place = f.cast("zext", frame.element(order, carried[0], "i32"), "i64", "i32")
            box = self.corners(f.gep(boxes, f.mul(place, 4, "i64"), "float"))
            free = f.not_(self.overlaps(box, carried[1]))

            def take() -> None:
                for area, side in zip(self.taken, box, strict=True):
                    frame.put(side, area, carried[1], "float")
                to = f.gep(self.places, f.mul(f.add(total, carried[1], "i64"), 3, "i64"), "i64")
                for i, value in enumerate((batch, number, place)):
                    frame.put(value, to, i, "i64")

            f.if_(free, take)
            return [f.add(carried[0], 1, "i64"), f.add(carried[1], f.cast("zext", free, "i64", "i1"), "i64")]

        _, taken = f.while_([("i64", "0"), ("i64", "0")], more, next_)
        return [f.add(total, taken, "i64")]

    def corners(self, box: str) -> list[str]:
        """(low y, low x, high y, high x) of a box, and its area."""
        frame, f = self.frame, self.frame.f
        a, b, c, d = (frame.element(box, i, "float") for i in range(4))
        if self.op.center:
            (x, y), (w, h) = (a, b), (f.mul(c, 0.5), f.mul(d, 0.5))
            sides = [f.sub(y, h), f.sub(x, w), f.add(y, h), f.add(x, w)]
        else:
            low = [convert.apply(f, "min", [p, q], F32, 1) for p, q in ((a, c), (b, d))]
            sides = low + [convert.apply(f, "max", [p, q], F32, 1) for p, q in ((a, c), (b, d))]
        return [*sides, f.mul(f.sub(sides[2], sides[0]), f.sub(sides[3], sides[1]))]

    def overlaps(self, box: list[str], taken: str) -> str:
        """Whether more than the threshold of the union with a box taken before is common to both.

        Several at a time. A side that is NaN makes the area NaN, and so no overlap.
        """
        f, w = self.frame.f, self.lanes
        ty = vec("float", w)
        zero = f.value(0.0, ty)
        sides = [f.splat(side, w, "float") for side in box]
        limit = f.splat(self.overlap, w, "float")

        def clear(carried: list[str]) -> str:
            return f.and_(f.cmp("lt", carried[0], taken, "i64"), f.not_(carried[1]), "i1")

        def some(carried: list[str]) -> list[str]:
            other = [f.load(ty, f.gep(area, carried[0], "float")) for area in self.taken]
            height, width = (
                f.sub(f.min(sides[d + 2], other[d + 2], ty), f.max(sides[d], other[d], ty), ty) for d in range(2)
            )
            both = f.and_(f.cmp("gt", height, zero, ty), f.cmp("gt", width, zero, ty))
            common = f.select(both, f.mul(height, width, ty), zero, ty)
            union = f.sub(f.add(other[4], sides[4], ty), common, ty)
            over = f.and_(f.cmp("gt", common, f.mul(limit, union, ty), ty), f.cmp("gt", common, zero, ty))
            over = f.and_(over, f.mask_below(f.sub(taken, carried[0], "i64"), w))
            bits = f.cast("bitcast", over, f"i{w}", vec("i1", w))
            return [f.add(carried[0], w, "i64"), f.cmp("ne", bits, 0, f"i{w}")]

        return f.while_([("i64", "0"), ("i1", "false")], clear, some)[1]
