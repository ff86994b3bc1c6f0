"""Tree ensembles: the tables packed into one row a node, and walks of eight rows (or eight trees) side by side.

A packed node holds an upper limit, a feature and the addresses of two nodes: the second is next where the feature is
above the limit. A leaf leads to itself, so that a step needs no branch; every fourth step asks whether all have
arrived. The weights of a row are added in the order of the trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu.kernels.frame import Frame
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.backends.cpu.schedule.base import CHUNK
from rlx.backends.cpu.strategy import Setting, Step
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Node
from rlx.ir.shape import Size, ceildiv, upper
from rlx.kernels.program import Buffer, Kernel
from rlx.ops.ml import MODES, TreeEnsemble
from rlx.records import dataclass

__all__ = ["accepts", "emit", "layout"]

SIDE = 8  # walks at a time
STEPS = 4  # between two questions whether all are at leaves
MOST_NODES = 1 << 27  # their addresses have 32 bits
HEAD = 64  # bytes before the nodes: the words below
PLAIN, HIGHEST, SINGLE = 0, 1, 2  # which comparison serves all; the highest feature; whether leaves have one weight
LE, LT, GE, GT, EQ, NE = (MODES.index(name) for name in ("le", "lt", "ge", "gt", "eq", "ne"))
TABLES = ("feature", "threshold", "mode", "yes", "no", "missing", "roots", "first", "target", "weight")
U8 = DTYPES["u8"]


def accepts(node: Node) -> bool:
    """f32 and f64, up to 2**27 nodes."""
    nodes = upper(node.inputs[1].shape[0])
    return node.inputs[0].dtype.name in ("f32", "f64") and nodes is not None and nodes <= MOST_NODES


@dataclass(frozen=True)
class _Layout:
    """Where things lie in the packed buffer, in bytes: a head, nodes, lower limits, and the addresses of roots."""

    dtype: DType
    nodes: Size
    trees: Size

    @property
    def real(self) -> int:
        return self.dtype.itemsize

    @property
    def width(self) -> int:
        """Bytes of a node: its limit, feature and two ways."""
        return 16 if self.real == 4 else 24

    @property
    def lows(self) -> Size:
        return HEAD + self.nodes * self.width

    @property
    def roots(self) -> Size:
        return self.lows + self.nodes * self.real

    @property
    def total(self) -> Size:
        return self.roots + self.trees * 4


def layout(kernel: Kernel, setting: Setting) -> list[Kernel]:
    """The packing first, in `prepare` where the tables are constants."""
    assert kernel.special is not None
    x, *tables = kernel.operands
    named = dict(zip(TABLES, tables, strict=True))
    made = _Layout(x.dtype, named["feature"].shape[0], named["roots"].shape[0])
    static = isinstance(made.total, int) and all(b.is_fixed for b in tables)
    packed = Buffer(f"{kernel.results[0].name}.trees", "prepared" if static else "arena", (made.total,), U8)
    node, nodes = kernel.special, kernel.nodes
    pack = Kernel("pack trees", special=node, operands=tuple(tables), results=(packed,), nodes=nodes, strategy=PACK)
    walk = Kernel(kernel.name, special=node, operands=(x, *tables, packed), results=kernel.results, nodes=nodes)
    return [pack, walk]


def emit(kernel: Kernel, target: Target) -> list[KernelCode]:
    """The walks."""
    return [_Walk(_op(kernel), kernel).code()]


def _emit_pack(kernel: Kernel, target: Target) -> KernelCode:
    return _Pack(_op(kernel), kernel).code()


def _op(kernel: Kernel) -> TreeEnsemble:
    assert kernel.special is not None
    assert isinstance(kernel.special.op, TreeEnsemble)
    return kernel.special.op


PACK = Step("tree_ensemble.pack", _emit_pack)


class _Pack:
    """Checks every table, so that walks need not."""

    def __init__(self, op: TreeEnsemble, kernel: Kernel) -> None:
        self.frame, self.op = Frame(), op
        tables = dict(zip(TABLES, kernel.operands, strict=True))
        self.at = _Layout(tables["threshold"].dtype, tables["feature"].shape[0], tables["roots"].shape[0])
        self.pointers = {name: self.frame.pointer(buffer) for name, buffer in tables.items()}
        self.packed = self.frame.pointer(kernel.results[0])
        self.weights = self.frame.size(tables["weight"].shape[0])
        self.nodes = self.frame.size(self.at.nodes)
        self.real = convert.llvm_type(self.at.dtype)

    def table(self, name: str, n: str, ty: str = "i32") -> str:
        """An entry; integers as i64."""
        text = self.frame.element(self.pointers[name], n, ty)
        return text if ty == self.real else self.frame.f.cast("sext" if ty == "i32" else "zext", text, "i64", ty)

    def checked(self, value: str, below: str) -> str:
        """`value` if 0 <= value < below, else 0 and an error."""
        ok = self.frame.f.cmp("ult", value, below, "i64")
        self.frame.fail_unless(ok, "index", value)
        return self.frame.f.select(ok, value, 0, "i64")

    def code(self) -> KernelCode:
        frame, f = self.frame, self.frame.f
        rows, lows = f.offset(self.packed, HEAD), f.offset(self.packed, frame.size(self.at.lows))
        single = "true" if self.op.targets == 1 else "false"
        start = [("i64", "0"), ("i64", "-1"), ("i1", single)]

        def node(n: str, carried: list[str]) -> list[str]:
            kind, highest, single = carried
            mode = self.checked(self.table("mode", n, "i8"), str(len(MODES)))
            row = f.offset(rows, f.mul(n, self.at.width, "i64"))
            inner = f.cmp("ne", mode, 0, "i64")
            made = f.if_(inner, lambda: self.inner(n, mode, row, lows), lambda: self.leaf(n, row, lows))
            return [
                f.max(kind, made[0], "i64"),
                f.max(highest, made[1], "i64"),
                f.and_(single, made[2], "i1"),
            ]

        kind, highest, single = f.loop(0, self.nodes, 1, start, node)
        self.targets()
        roots = f.offset(self.packed, frame.size(self.at.roots))

        def root(t: str, _: list[str]) -> None:
            self.put_address(self.checked(self.table("roots", t), self.nodes), roots, t)

        f.loop(0, frame.size(self.at.trees), 1, [], root)
        for number, value in ((PLAIN, kind), (HIGHEST, highest), (SINGLE, f.cast("zext", single, "i64", "i1"))):
            frame.put(value, self.packed, number, "i64")
        return frame.finish()

    def targets(self) -> None:
        f = self.frame.f

        def target(w: str, _: list[str]) -> None:
            self.checked(self.table("target", w), str(self.op.targets))

        f.loop(0, self.weights, 1, [], target)

    def put_address(self, node: str, base: str, index: str | int) -> None:
        f = self.frame.f
        self.frame.put(f.cast("trunc", f.mul(node, self.at.width, "i64"), "i32", "i64"), base, index, "i32")

    def put_node(self, row: str, limit: str, feature: str, ways: tuple[str, str]) -> None:
        rest = self.frame.f.offset(row, self.at.real)
        self.frame.f.store(limit, row, ty=self.real)
        self.frame.put(feature, rest, 0, "i32")
        for number, way in enumerate(ways):
            self.put_address(way, rest, 1 + number)

    def leaf(self, n: str, row: str, lows: str) -> list[tuple[str, str]]:
        """A leaf's only weight lies in place of its limit."""
        frame, f = self.frame, self.frame.f
        start, end = self.table("first", n), self.table("first", f.add(n, 1, "i64"))
        fine = f.and_(f.cmp("ule", start, end, "i64"), f.cmp("ule", end, self.weights, "i64"), "i1")
        frame.fail_unless(fine, "index", end)
        one = f.and_(fine, f.cmp("eq", f.sub(end, start, "i64"), 1, "i64"), "i1")
        zero = (self.real, f.value(0.0, self.real))
        weight = f.if_(one, lambda: [(self.real, self.table("weight", start, self.real))], lambda: [zero])[0]
        self.put_node(row, weight, "0", (n, n))
        frame.put(float("-inf"), lows, n, self.real)
        return [("i64", "0"), ("i64", "-1"), ("i1", one)]

    def inner(self, n: str, mode: str, row: str, lows: str) -> list[tuple[str, str]]:
        """Any test as lower <= feature <= upper; the bit above a feature says that NaN counts as within."""
        frame, f = self.frame, self.frame.f
        limit = self.table("threshold", n, self.real)
        missing = f.cmp("ne", self.table("missing", n, "i8"), 0, "i64")
        yes, no = (self.checked(self.table(name, n), self.nodes) for name in ("yes", "no"))
        feature = self.checked(self.table("feature", n), str(2**31 - 1))
        lt, ge, gt, eq, ne = (f.cmp("eq", mode, kind, "i64") for kind in (LT, GE, GT, EQ, NE))
        nothing = f.cmp("uno", limit, limit, self.real)  # then all tests but "ne" fail
        same = f.or_(eq, ne, "i1")
        turned = f.or_(f.or_(ge, gt, "i1"), ne, "i1")
        within, beyond = f.select(turned, no, yes, "i64"), f.select(turned, yes, no, "i64")
        within = f.select(nothing, yes, within, "i64")
        beyond = f.select(nothing, f.select(ne, yes, no, "i64"), beyond, "i64")
        goes_yes = f.or_(missing, ne, "i1")
        flag = f.xor(goes_yes, f.and_(turned, f.not_(nothing), "i1"), "i1")
        below = f.select(f.or_(lt, ge, "i1"), self.previous(limit), limit, self.real)
        number = f.cast("trunc", feature, "i32", "i64")
        number = f.or_(number, f.shl(f.cast("zext", flag, "i32", "i1"), 31, "i32"), "i32")
        self.put_node(row, below, number, (within, beyond))
        frame.put(f.select(same, limit, f.value(float("-inf"), self.real), self.real), lows, n, self.real)
        kind = f.select(same, 2, f.cast("zext", flag, "i64", "i1"), "i64")
        return [("i64", kind), ("i64", feature), ("i1", "true")]

    def previous(self, x: str) -> str:
        """The next lower number; NaN below -inf."""
        f, bits = self.frame.f, 8 * self.at.real
        ty = f"i{bits}"
        raw = f.cast("bitcast", x, ty, self.real)
        step = f.select(f.cmp("lt", raw, 0, ty), f.add(raw, 1, ty), f.sub(raw, 1, ty), ty)
        step = f.select(f.cmp("eq", x, 0.0, self.real), -(2 ** (bits - 1)) + 1, step, ty)
        step = f.select(f.cmp("uno", x, x, self.real), raw, step, ty)
        return f.cast("bitcast", step, self.real, ty)


class _Walk:
    def __init__(self, op: TreeEnsemble, kernel: Kernel) -> None:
        self.frame, self.op = Frame(), op
        x, *operands, packed = kernel.operands
        self.count, self.features = x.shape
        tables = dict(zip(TABLES, operands, strict=True))
        self.at = _Layout(x.dtype, tables["feature"].shape[0], tables["roots"].shape[0])
        self.real = convert.llvm_type(x.dtype)
        self.dtype = x.dtype
        self.x, self.packed, self.out = (self.frame.pointer(b) for b in (x, packed, kernel.results[0]))
        self.first, self.target, self.weight = (
            self.frame.pointer(tables[name]) for name in ("first", "target", "weight")
        )
        self.picks = op.aggregate in ("min", "max")

    def code(self) -> KernelCode:
        frame, f, op = self.frame, self.frame.f, self.op
        depth = max(op.depth, 1)
        cost = 4 * (self.at.trees * depth) + 1
        start, stop = frame.rows(ceildiv(self.count, SIDE), cost)
        first, last = f.mul(start, SIDE, "i64"), f.min(f.mul(stop, SIDE, "i64"), frame.size(self.count), "i64")
        self.nodes = f.offset(self.packed, HEAD)
        self.lows = f.offset(self.packed, frame.size(self.at.lows))
        self.roots = f.offset(self.packed, frame.size(self.at.roots))
        self.kind, highest, single = (frame.element(self.packed, n, "i64") for n in (PLAIN, HIGHEST, SINGLE))
        # a byte for each score of a chunk, whatever its rows: that of the most
        self.seen = frame.scratch((CHUNK // cost + 1) * (SIDE * op.targets)) if self.picks else ""
        trees = frame.size(self.at.trees)

        def work() -> None:
            whole = f.sub(last, f.rem(f.sub(last, first, "i64"), SIDE, "i64"), "i64")
            self.clear(first, last)
            alone = f.cmp("ne", single, 0, "i64")

            def tree(t: str, _: list[str]) -> None:
                root = self.root(t)

                def block(row: str, _: list[str]) -> None:
                    rows = [f.add(row, lane, "i64") if lane else row for lane in range(SIDE)]
                    ends = self.walk([self.row(r) for r in rows], [root] * SIDE)
                    for r, end in zip(rows, ends, strict=True):
                        self.add(f.sub(r, first, "i64"), r, end, alone)

                f.loop(first, whole, SIDE, [], block)

            f.loop(0, trees, 1, [], tree)
            f.loop(whole, last, 1, [], lambda row, _: self.rest(row, first, trees, alone))
            if op.aggregate == "average":
                self.average(first, last, trees)

        highest = f.max(highest, 0, "i64") if op.depth else highest  # leaves look at feature 0 on the way
        fits = f.cmp("lt", highest, frame.size(self.features), "i64")
        f.if_(fits, work, lambda: frame.fail("index", highest))
        return frame.finish(optimize=False)

    # ---- walks

    def root(self, t: str) -> str:
        return self.frame.f.cast("zext", self.frame.element(self.roots, t, "i32"), "i64", "i32")

    def row(self, r: str) -> str:
        f = self.frame.f
        return f.gep(self.x, f.mul(r, self.frame.size(self.features), "i64"), self.real)

    def walk(self, rows: Sequence[str], starts: Sequence[str]) -> list[str]:
        """Where walks of rows from those nodes end: as offsets of leaves."""
        f = self.frame.f
        few, turns = self.op.depth % STEPS, self.op.depth // STEPS

        def variant(kind: int) -> Callable[[], list[tuple[str, str]]]:
            def steps() -> list[tuple[str, str]]:
                at = list(starts)
                for _ in range(few):
                    at = self.step(kind, rows, at)

                def onward(carried: list[str]) -> str:
                    return f.and_(f.cmp("lt", carried[0], turns, "i64"), f.cmp("ne", carried[1], 0, "i64"), "i1")

                def turn(carried: list[str]) -> list[str]:
                    at = carried[2:]
                    for _ in range(STEPS):
                        before, at = at, self.step(kind, rows, at)
                    moved = "0"
                    for a, b in zip(before, at, strict=True):
                        moved = f.or_(moved, f.xor(a, b, "i64"), "i64")
                    return [f.add(carried[0], 1, "i64"), moved, *at]

                if turns:
                    first = [("i64", "0"), ("i64", "1"), *(("i64", a) for a in at)]
                    at = f.while_(first, onward, turn)[2:]
                return [("i64", a) for a in at]

            return steps

        if self.op.depth == 0:
            return list(starts)
        plain = f.cmp("eq", self.kind, 0, "i64")
        flagged = f.cmp("eq", self.kind, 1, "i64")

        def others() -> list[tuple[str, str]]:
            return [("i64", a) for a in f.if_(flagged, variant(1), variant(2))]

        return f.if_(plain, variant(0), others)

    def step(self, kind: int, rows: Sequence[str], at: Sequence[str]) -> list[str]:
        """One step of each walk. Kind 0 looks at upper limits, 1 also at where NaN goes, 2 also at lower limits."""
        f, frame = self.frame.f, self.frame
        made = []
        for row, offset in zip(rows, at, strict=True):
            node = f.offset(self.nodes, offset)
            rest = f.offset(node, self.at.real)
            limit, packed = f.load(self.real, node), f.load("i32", rest)
            feature = f.cast("zext", f.and_(packed, 2**31 - 1, "i32") if kind else packed, "i64", "i32")
            value = frame.element(row, feature, self.real)
            beyond = f.cmp("ugt", value, limit, self.real)
            if kind == 2:
                low = frame.element(self.lows, f.binary("udiv", offset, self.at.width, "i64"), self.real)
                beyond = f.or_(beyond, f.cmp("ult", value, low, self.real), "i1")
            if kind:
                excused = f.and_(f.cmp("uno", value, value, self.real), f.cmp("lt", packed, 0, "i32"), "i1")
                beyond = f.and_(beyond, f.not_(excused), "i1")
            way = f.gep(f.offset(rest, 4), f.cast("zext", beyond, "i64", "i1"), "i32")
            made.append(f.cast("zext", f.load("i32", way), "i64", "i32"))
        return made

    def rest(self, row: str, first: str, trees: str, alone: str) -> None:
        """A row that is left over: several trees at a time."""
        f = self.frame.f
        source, local = self.row(row), f.sub(row, first, "i64")

        def block(t: str, _: list[str]) -> None:
            numbers = [f.add(t, lane, "i64") if lane else t for lane in range(SIDE)]
            last = f.sub(trees, 1, "i64")
            ends = self.walk([source] * SIDE, [self.root(f.min(n, last, "i64")) for n in numbers])

            def each(number: str, end: str) -> None:
                f.if_(f.cmp("lt", number, trees, "i64"), lambda: self.add(local, row, end, alone))

            if self.picks:
                for number, end in zip(numbers, ends, strict=True):
                    each(number, end)
                return

            def together() -> None:
                total = f.load(self.real, self.score(row, "0"))
                for number, end in zip(numbers, ends, strict=True):
                    more = f.add(total, f.load(self.real, f.offset(self.nodes, end)), self.real)
                    total = f.select(f.cmp("lt", number, trees, "i64"), more, total, self.real)
                f.store(total, self.score(row, "0"), ty=self.real)

            def apart() -> None:
                for number, end in zip(numbers, ends, strict=True):
                    each(number, end)

            f.if_(alone, together, apart)

        f.loop(0, trees, SIDE, [], block)

    # ---- scores

    def score(self, row: str, target: str) -> str:
        f = self.frame.f
        return f.gep(self.out, f.add(f.mul(row, self.op.targets, "i64"), target, "i64"), self.real)

    def clear(self, first: str, last: str) -> None:
        f, frame, targets = self.frame.f, self.frame, self.op.targets
        start, stop = f.mul(first, targets, "i64"), f.mul(last, targets, "i64")
        f.loop(start, stop, 1, [], lambda i, _: frame.put(0.0, self.out, i, self.real))
        if self.picks:
            f.loop(0, f.sub(stop, start, "i64"), 1, [], lambda i, _: frame.put(0, self.seen, i, "i8"))

    def add(self, local: str, row: str, leaf: str, alone: str) -> None:
        """The weights of a leaf, to the scores of a row."""
        f, frame = self.frame.f, self.frame

        def several() -> None:
            number = f.binary("udiv", leaf, self.at.width, "i64")
            start, end = (
                f.cast("sext", frame.element(self.first, n, "i32"), "i64", "i32")
                for n in (number, f.add(number, 1, "i64"))
            )

            def one(w: str, _: list[str]) -> None:
                target = f.cast("sext", frame.element(self.target, w, "i32"), "i64", "i32")
                self.combine(local, row, target, frame.element(self.weight, w, self.real))

            f.loop(start, end, 1, [], one)

        def single() -> None:
            self.combine(local, row, "0", f.load(self.real, f.offset(self.nodes, leaf)))

        f.if_(alone, single, several)

    def combine(self, local: str, row: str, target: str, weight: str) -> None:
        f = self.frame.f
        cell = self.score(row, target)
        old = f.load(self.real, cell)
        if not self.picks:
            f.store(f.add(old, weight, self.real), cell, ty=self.real)
            return
        mark = f.offset(self.seen, f.add(f.mul(local, self.op.targets, "i64"), target, "i64"))
        known = f.cmp("ne", f.load("i8", mark), 0, "i8")
        best = convert.apply(f, self.op.aggregate, [old, weight], self.dtype, 1)
        f.store(f.select(known, best, weight, self.real), cell, ty=self.real)
        f.store(1, mark, ty="i8")

    def average(self, first: str, last: str, trees: str) -> None:
        f, targets = self.frame.f, self.op.targets
        count = f.cast("sitofp", trees, self.real, "i64")

        def one(i: str, _: list[str]) -> None:
            cell = f.gep(self.out, i, self.real)
            f.store(f.div(f.load(self.real, cell), count, self.real), cell, ty=self.real)

        def all_() -> None:
            f.loop(f.mul(first, targets, "i64"), f.mul(last, targets, "i64"), 1, [], one)

        f.if_(f.cmp("gt", trees, 0, "i64"), all_)
