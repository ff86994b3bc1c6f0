"""Expressions as code: values by the scope that they are computed in, vector loads, stores, and checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from hashlib import sha256

import numpy as np

from rlx.backends.codegen.scalars import f32_bits
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, constant, element, size_of, suffix, vec, width
from rlx.backends.cpu.loops import reductions
from rlx.backends.cpu.schedule.arguments import Argument, ArgumentTable, Literal, Pointer
from rlx.ir.casting import cast, ends
from rlx.ir.dtype import DType
from rlx.ir.shape import Size
from rlx.kernels.affine import Affine, affine
from rlx.kernels.expr import (
    Acc,
    Apply,
    Cast,
    Check,
    Const,
    Expr,
    Load,
    Reduce,
    Scalar,
    Select,
    SizeOf,
    Var,
    as_size,
    children,
    conjuncts,
    walk,
)
from rlx.kernels.loops import printer
from rlx.kernels.loops.printer import Printer
from rlx.kernels.program import Buffer
from rlx.records import dataclass, field

__all__ = ["ARGS", "PLACEHOLDER", "Emitter", "Scope", "Value", "name_kernel", "report"]

STATUS = {"index": 1, "division": 2, "guard": 3}
ARGS = [("ptr", "words"), ("i64", "chunk"), ("ptr", "ctx"), ("i64", "worker")]
PLACEHOLDER = "rlx_kernel"

Value = tuple[str, int]  # SSA text and the number of lanes: 1 for what is the same in all lanes


def name_kernel(text: str) -> tuple[str, str]:
    """Names a kernel by its text, so that equal kernels are one: (symbol, IR)."""
    symbol = "k_" + sha256(text.encode()).hexdigest()[:20]
    return symbol, text.replace(PLACEHOLDER, symbol)


def report(f: Function, code: int, value: str) -> None:
    """Sets the run's status and the value shown with it, unless another error came first."""
    _, first = f.cmpxchg("%ctx", 0, code)
    f.if_(first, lambda: f.store(value, f.gep("%ctx", 1, "i64"), ty="i64"))


def _within(e: Expr, target: DType) -> bool:
    """Whether it is an f32 between limits that are values of a smaller integer type (or NaN)."""
    if e.dtype.name != "f32" or target.kind not in "iu" or target.bits > 16:
        return False
    low, high = ends(target)
    match e:
        case Apply(fn="max", args=(Apply(fn="min", args=(_, Const(value=top))), Const(value=bottom))):
            pass
        case Apply(fn="min", args=(Apply(fn="max", args=(_, Const(value=bottom))), Const(value=top))):
            pass
        case _:
            return False
    return all(not isinstance(end, complex) and low <= end <= high for end in (bottom, top))


def lane_pattern(index: Affine, moving: set[Expr], vec: Var | None, w: int) -> tuple[int, list[int]] | None:
    """How far the lanes of an index lie from the first where that is a multiple of a period: (period, distances).

    For i, i // k and i % k of the lanes' variable i, such as of elements that are repeated, or exchanged in pairs.
    None for other indices, and where one vector does not hold all of the elements.
    """
    period, offsets = 1, [0] * w
    for term in moving:
        coef = index.coefs[term]
        match term:
            case Var() if term == vec:
                k, lanes = 1, list(range(w))
            case Apply(fn="floordiv" | "mod" as fn, args=(Var() as i, by)) if i == vec:
                size = as_size(by)
                if not isinstance(size, int) or size < 1 or w % size:
                    return None
                k, lanes = size, [lane // size if fn == "floordiv" else lane % size for lane in range(w)]
            case _:
                return None
        if not isinstance(coef, int):
            return None
        period = max(period, k)
        offsets = [o + coef * lane for o, lane in zip(offsets, lanes, strict=True)]
    whole = period & (period - 1) == 0 and max(offsets) - min(offsets) < w
    return (period, offsets) if whole else None


@dataclass
class Scope(printer.Scope):
    """A place in the loops: also how many lanes are computed there, and the variable that runs over them."""

    width: int
    vec: Var | None
    vars: dict[Var, str]
    parent: Scope | None = None
    cache: dict[object, Value] = field(default_factory=dict)
    added: dict[object, frozenset[Expr]] = field(default_factory=dict)

    def inner(self, vars: dict[Var, str], width: int | None = None, vec: Var | None = None) -> Scope:
        """A scope inside this one, with more variables."""
        w = self.width if width is None else width
        return Scope(w, vec if width is not None else self.vec, {**self.vars, **vars}, self)


class Emitter(Printer[Value, Scope]):
    """Emits expressions into a function; shared by loop nests and by the epilogues of anchors."""

    def __init__(self, f: Function, table: ArgumentTable, lanes: int) -> None:
        super().__init__()
        self.f = f
        f.vector_bytes = 4 * lanes
        self.table = table
        self.lanes = lanes  # f32 elements in a vector register
        self.sites: list[str] = []
        self.numbers: dict[int, str] = {}  # values of `Scalar`s
        self.kept: dict[Reduce, tuple[Expr, Load]] = {}  # part of a body that is stored while the reduction runs
        self.one_load = False  # whether an element is made of one other, as that of a copy
        self.acc: Callable[[Scope], Value] | None = None  # how an epilogue gets the anchor's result

    # -- the language

    def load_argument(self, argument: Buffer | Size) -> str:
        word = Pointer(argument) if isinstance(argument, Buffer) else argument
        return self.f.in_entry(lambda: self.table.load(self.f, word))

    def number(self, number: int, ty: str) -> str:
        """The value of a word that has the bits of a float, loaded at the entry."""
        if number not in self.numbers:
            self.numbers[number] = self.float_of(Literal(number), ty)
        return self.numbers[number]

    def float_word(self, value: float) -> str:
        """The value of a word that has the bits of this f32: code does not know the number."""
        return self.float_of(f32_bits(value), "float")

    def float_of(self, word: Argument, ty: str) -> str:
        return self.f.in_entry(lambda: self.f.load(ty, self.f.gep("%words", self.table.slot(word), "i64"), align=8))

    def add(self, a: str, b: str) -> str:
        return self.f.add(a, b, "i64")

    def multiply(self, a: str, b: str) -> str:
        return self.f.mul(a, b, "i64")

    def element(self, pointer: str, index: str, dtype: DType) -> str:
        return self.f.gep(pointer, index, convert.memory_type(dtype))

    def single(self, e: Expr, scope: Scope) -> str:
        return self.value(e, scope)[0]

    def kept_address(self, text: str) -> Value:
        return text, 1

    def address_text(self, value: Value) -> str:
        return value[0]

    def varies(self, term: Expr, scope: Scope) -> bool:
        lane = scope.vec if scope.width > 1 else None
        return lane in self.depends(term)

    # -- expressions

    def lanes_of(self, e: Expr, scope: Scope) -> str:
        """The value spread over the scope's lanes."""
        return self.spread(self.value(e, scope), e.dtype, scope.width)

    def spread(self, value: Value, dtype: DType, w: int) -> str:
        text, have = value
        if have == w:
            return text
        ty = convert.llvm_type(dtype)
        if text.startswith("%"):
            return self.f.splat(text, w, ty)
        lanes = f"<{', '.join([f'{ty} {text}'] * w)}>"  # a constant stays one, of which it is known that it is no NaN
        self.f.types[lanes] = vec(ty, w)
        return lanes

    def compute(self, e: Expr, scope: Scope) -> Value:
        match e:
            case Const(value=v, dtype=dtype):
                assert not isinstance(v, complex)
                return convert.literal(v, dtype), 1
            case Scalar(number=number, dtype=dtype):
                return self.number(number, convert.llvm_type(dtype)), 1
            case Var():
                if (e is not scope.vec and e != scope.vec) or scope.width == 1:
                    return scope.vars[e], 1
                base = self.f.splat(scope.vars[e], scope.width, "i64")
                return self.f.add(base, self.f.iota(scope.width), vec("i64", scope.width)), scope.width
            case SizeOf(size=size):
                return self.size(size), 1
            case Acc():
                assert self.acc is not None
                return self.acc(scope)
            case Load():
                return self._load(e, scope)
            case Reduce():
                return reductions.emit(self, e, scope)
            case Check():
                return self._check(e, scope)
        operands = [self.value(c, scope) for c in children(e)]
        w = max(lanes for _, lanes in operands)
        texts = [self.spread(v, c.dtype, w) for v, c in zip(operands, children(e), strict=True)]
        match e:
            case Apply(fn="bitcast", args=(a,), dtype=dtype):
                stored, made = (vec(convert.memory_type(d), w) for d in (a.dtype, dtype))  # a bool is a byte
                raw = self.f.cast("bitcast", convert.to_memory(self.f, texts[0], a.dtype, w), made, stored)
                return convert.from_memory(self.f, raw, dtype, w), w
            case Apply(fn=fn, args=args):
                return convert.apply(self.f, fn, texts, args[0].dtype, w), w
            case Select(a=a):
                return self.f.select(texts[0], texts[1], texts[2], vec(convert.llvm_type(a.dtype), w)), w
            case Cast(value=Const(value=v, dtype=own), dtype=dtype):
                return convert.literal(cast(np.asarray(v, own.numpy), dtype).item(), dtype), 1
            case Cast(value=source, dtype=dtype) if _within(source, dtype):
                return convert.convert_within(self.f, texts[0], dtype, w), w
            case Cast(value=source, dtype=dtype):
                return convert.convert(self.f, texts[0], source.dtype, dtype, w), w
        raise AssertionError(f"no code for {type(e).__name__}")

    # -- loads

    def _load(self, e: Load, scope: Scope) -> Value:
        index = affine(e.indices[0])
        varying = scope.vec if scope.width > 1 else None
        where = None if e.where is None else self.value(e.where, scope)
        moving = {t for t in index.coefs if varying is not None and varying in self.depends(t)}
        ty = convert.memory_type(e.dtype)
        if not moving and (where is None or where[1] == 1):
            address = self._address(e, index, scope)
            raw = self.f.load(ty, address) if where is None else self.f.masked_load(ty, address, where[0])
            return convert.from_memory(self.f, raw, e.dtype, 1), 1
        w = scope.width
        vty = vec(ty, w)
        mask = None if where is None else self.f.splat(where[0], w, "i1") if where[1] == 1 else where[0]
        if not moving:
            assert mask is not None
            any_lane = self._any(mask, w)
            one = self.f.masked_load(ty, self._address(e, index, scope), any_lane)
            raw = self.f.select(mask, self.f.splat(one, w, ty), constant(convert.zero(ty), vty), vty)
        elif varying is not None and moving == {varying}:
            address = self._address(e, index, scope)
            if where is not None and (where[1] == 1 or self.one_load):
                address = self._near(e, address, where, scope)
            raw = self._walked(address, index.coefs[varying], mask, vty)
        else:
            raw = self._moved(e, index, moving, mask, scope, vty)
        return convert.from_memory(self.f, raw, e.dtype, w), w

    def _near(self, e: Load, address: str, where: Value, scope: Scope) -> str:
        """The address, or the start of the source where a test that is the same in all lanes does not hold.

        Far from the source, in pages that are not mapped, a masked load of no lane takes hundreds of cycles. (Where
        lanes differ, some are loaded, and the others are near them. For windows with several loads, which reach beyond
        an image a little only, the choice costs more than it saves.)
        """
        found = [where] if where[1] == 1 else [self.value(test, scope) for test in conjuncts(e.where)]
        tests = [text for text, lanes in found if lanes == 1]
        if not tests:
            return address
        all_hold = reduce(lambda a, b: self.f.and_(a, b, "i1"), tests)
        return self.f.select(all_hold, address, self.word(e.source), "ptr")

    def _walked(self, address: str, stride: Size, mask: str | None, vty: str) -> str:
        """Lanes a fixed stride apart. Masks are nearly always all true (they are paddings), so that case is fast."""
        if mask is None:
            return self._strided(address, stride, vty)
        if stride == 1 and size_of(vty) >= 4:
            return self.f.masked_load(vty, address, mask)

        def few() -> list[str]:
            w = width(vty)
            steps = self.f.mul(self.f.iota(w), self.f.splat(self.size(stride), w, "i64"), vec("i64", w))
            return [self._masked_gather(address, steps, mask, vty)]

        return self.f.if_(self._all(mask, width(vty)), lambda: [self._strided(address, stride, vty)], few)[0]

    def _strided(self, address: str, stride: Size, vty: str) -> str:
        f, w, ty = self.f, width(vty), element(vty)
        if stride == 1:
            return f.load(vty, address)
        if stride == 2:  # two loads that end with the last lane's element
            low, high = f.load(vty, address), f.load(vty, f.gep(address, w - 1, ty))
            return f.shuffle(low, high, [2 * j if 2 * j < w else 2 * j + 1 for j in range(w)])
        step, total, raw = self.size(stride), "0", "poison"
        for lane in range(w):
            raw = f.insert(raw, f.load(ty, f.gep(address, total, ty) if lane else address), lane, vty)
            total = step if lane == 0 else f.add(total, step, "i64")
        return raw

    def _masked_gather(self, base: str, indices: str, mask: str, vty: str) -> str:
        """Elements at base + indices where the mask holds, 0 elsewhere; other lanes touch no memory."""
        f, w = self.f, width(vty)
        pointers = f.op(f"getelementptr {element(vty)}, ptr {base}, {vec('i64', w)} {indices}", vec("ptr", w))
        name = f"llvm.masked.gather.{suffix(vty)}.v{w}p0"
        f.declare(name, vty, [vec("ptr", w), "i32", vec("i1", w), vty])
        zero = constant(convert.zero(element(vty)), vty)
        lanes = f"{vec('ptr', w)} {pointers}, i32 {size_of(vty)}, {vec('i1', w)} {mask}, {vty} {zero}"
        return f.op(f"call {vty} @{name}({lanes})", vty)

    def _moved(self, e: Load, index: Affine, moving: set[Expr], mask: str | None, scope: Scope, vty: str) -> str:
        """Lanes at any indices: one load where they follow a pattern or turn out to be next to each other, or a gather.

        What either way computes is not for others: they may come the other way.
        """
        f, w, ty = self.f, scope.width, convert.memory_type(e.dtype)

        def one_by_one() -> list[str]:
            return [self._gather(e, index, moving, mask, scope.inner({}), vty)]

        if any(isinstance(x, Load) for t in moving for x in walk(t)):
            return self._gather(e, index, moving, mask, scope, vty)
        found = lane_pattern(index, moving, scope.vec, w)
        if found is not None and scope.vec is not None:
            period, offsets = found
            fits = f.cmp("eq", f.and_(scope.vars[scope.vec], period - 1, "i64"), 0, "i64")
            at_once = lambda: [self._shuffled(e, index, moving, offsets, scope.inner({}))]  # noqa: E731
        else:
            pointer, places = self._places(e, index, moving, scope)
            first, ity = f.extract(places, 0), vec("i64", w)
            fits = self._all(f.cmp("eq", places, f.add(f.splat(first, w, "i64"), f.iota(w), ity), ity), w)
            at_once = lambda: [f.load(vty, f.gep(pointer, first, ty))]  # noqa: E731
        return f.if_(fits if mask is None else f.and_(fits, self._all(mask, w), "i1"), at_once, one_by_one)[0]

    def _shuffled(self, e: Load, index: Affine, moving: set[Expr], offsets: list[int], scope: Scope) -> str:
        """Lanes that lie `offsets` from the first one, whose number is a multiple of every divisor in the index."""
        f, ty = self.f, convert.memory_type(e.dtype)
        assert scope.vec is not None
        place = self.sum(Affine(index.constant, {t: c for t, c in index.coefs.items() if t not in moving}), scope)
        for term in moving:
            by = as_size(term.args[1]) if isinstance(term, Apply) else 1
            assert isinstance(by, int)
            if not isinstance(term, Apply) or term.fn == "floordiv":  # the rest of such a number is 0
                whole = f.lshr(scope.vars[scope.vec], by.bit_length() - 1, "i64")
                place = f.add(place, f.mul(whole, self.size(index.coefs[term]), "i64"), "i64")
        low, high = min(offsets), max(offsets)
        some = f.load(vec(ty, high - low + 1), f.gep(self.word(e.source), f.add(place, low, "i64"), ty))
        return f.shuffle(some, None, [o - low for o in offsets]) if high > low else f.splat(some, scope.width, ty)

    def _places(self, e: Load, index: Affine, moving: set[Expr], scope: Scope) -> tuple[str, str]:
        """The address that the indices of lanes count from, and these."""
        w, ity = scope.width, vec("i64", scope.width)
        fixed = Affine(index.constant, {t: c for t, c in index.coefs.items() if t not in moving})
        total: str | None = None
        for term in index.coefs:
            if term in moving:
                part = self.lanes_of(term, scope)
                coef = index.coefs[term]
                part = part if coef == 1 else self.f.mul(part, self.f.splat(self.size(coef), w, "i64"), ity)
                total = part if total is None else self.f.add(total, part, ity)
        assert total is not None
        return self.f.gep(self.word(e.source), self.sum(fixed, scope), convert.memory_type(e.dtype)), total

    def _gather(self, e: Load, index: Affine, moving: set[Expr], mask: str | None, scope: Scope, vty: str) -> str:
        pointer, total = self._places(e, index, moving, scope)
        ty = convert.memory_type(e.dtype)
        if mask is None:
            return self.f.gather(ty, pointer, total)
        return self._masked_gather(pointer, total, mask, vty)

    def _all(self, mask: str, w: int) -> str:
        bits = self.f.cast("bitcast", mask, f"i{w}", vec("i1", w))
        return self.f.cmp("eq", bits, -1, f"i{w}")

    def _any(self, mask: str, w: int) -> str:
        bits = self.f.cast("bitcast", mask, f"i{w}", vec("i1", w))
        return self.f.cmp("ne", bits, 0, f"i{w}")

    def store(self, destination: Load, text: str, scope: Scope) -> None:
        """Stores a value of the scope's lanes at the destination's index."""
        f, w = self.f, scope.width
        index = affine(destination.indices[0])
        ty = convert.memory_type(destination.dtype)
        step = index.coefs.get(scope.vec, 0) if scope.vec is not None and w > 1 else 1
        address = self._address(destination, index, scope)
        if w == 1 or step == 1:
            f.store(text, address, ty=vec(ty, w))
            return
        stride, offset = self.size(step), "0"
        for lane in range(w):
            f.store(f.extract(text, lane), f.gep(address, offset, ty) if lane else address, ty=ty)
            offset = stride if lane == 0 else f.add(offset, stride, "i64")

    # -- checks

    def _check(self, e: Check, scope: Scope) -> Value:
        ok = self.value(e.ok, scope)
        shown = self.value(e.shown, scope)
        f, w = self.f, ok[1]
        code = STATUS[e.kind] | len(self.sites) << 8
        self.sites.append(e.kind)

        def failed() -> None:
            if shown[1] == 1:
                report(f, code, shown[0])
                return
            bad = f.cast("bitcast", f.xor(ok[0], 1, vec("i1", w)), f"i{w}", vec("i1", w))
            f.declare(f"llvm.cttz.i{w}", f"i{w}", [f"i{w}", "i1"])
            lane = f.op(f"call i{w} @llvm.cttz.i{w}(i{w} {bad}, i1 true)", f"i{w}")
            report(f, code, f.op(f"extractelement {vec('i64', w)} {shown[0]}, i{w} {lane}", "i64"))

        if w == 1:
            f.if_(f.xor(ok[0], 1, "i1"), failed)
        else:
            bits = f.cast("bitcast", ok[0], f"i{w}", vec("i1", w))
            f.if_(f.cmp("ne", bits, -1, f"i{w}"), failed)
        return self.value(e.value, scope)
