"""Loop nests: map, row, reduce and copy kernels as explicit vector code.

A store of a kernel becomes one function. Outer loops run over rows; the loop over the last axis runs in vectors of the
host's width with a scalar tail. Each sub-expression is computed in the outermost loop that it depends on, so the
reductions of a softmax or a layer norm run once a row. A reduction whose elements lie side by side runs in vectors
along its own loop instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import prod

from rlx.backends.cpu import scalar
from rlx.backends.cpu.builder import Function, Module, constant, element, size_of, suffix, vec, width
from rlx.backends.cpu.words import Computed, Extents, KernelCode, Pointer, WordTable
from rlx.ir.dtype import DType
from rlx.ir.shape import Shape, Size, evaluate, size_product
from rlx.kernels.affine import Affine, affine, linear_index
from rlx.kernels.expr import (
    I64,
    Acc,
    Apply,
    Cast,
    Check,
    Const,
    Expr,
    Load,
    Reduce,
    Select,
    SizeOf,
    Var,
    children,
    const,
    size_expr,
    substitute_vars,
    transform,
    walk,
)
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Buffer, Store

__all__ = ["CHUNK_COST", "Emitter", "Scope", "emit_nest", "flatten", "name_kernel"]

CHUNK_COST = 100_000  # scalar operations that one chunk should hold at least: some tens of microseconds
SHORT = 16  # elements below which a reduction is not worth vectors of its own
UNROLL = 4  # independent accumulators of a vector reduction
RESULT = frozenset((Var("acc"),))  # what an anchor's result depends on: it is never computed ahead
STATUS = {"index": 1, "division": 2}
ARGS = [("ptr", "words"), ("i64", "chunk"), ("ptr", "ctx"), ("i64", "worker")]
PLACEHOLDER = "rlx_kernel"
WEIGHT = {"exp": 8, "tanh": 10, "erf": 10, "sigmoid": 10, "log": 10, "sin": 16, "cos": 16, "pow": 40, "div": 3}

Value = tuple[str, int]  # SSA text and the number of lanes: 1 for what is the same in all lanes


def name_kernel(text: str) -> tuple[str, str]:
    """Names a kernel by its text, so that equal kernels are one: (symbol, IR)."""
    symbol = "k_" + sha256(text.encode()).hexdigest()[:20]
    return symbol, text.replace(PLACEHOLDER, symbol)


# ---- analysis


def flatten(store: Store) -> tuple[Shape, Expr, Expr]:
    """The loop extents, the linear store index and the expression, with loads at one linear index each."""

    expr = transform(store.expr, linear_load)
    target = _as_expr(linear_index(store.index, store.buffer.shape))
    return store.extents, target, expr


def linear_load(x: Expr) -> Expr | None:
    """A load at one linear index (loads of encoded buffers already index stored bytes)."""
    if not isinstance(x, Load) or x.source.encoding is not None:
        return None
    return replace(x, indices=(_as_expr(linear_index(x.indices, x.source.shape)),))


def _as_expr(a: Affine) -> Expr:
    total: Expr = size_expr(a.constant)
    for term in sorted(a.coefs, key=_term_order):
        total = total + term * size_expr(a.coefs[term])
    return total


def _term_order(term: Expr) -> tuple[bool, str]:
    return (not isinstance(term, Var), term.name if isinstance(term, Var) else "")


def free_vars(e: Expr, memo: dict[Expr, frozenset[Var]]) -> frozenset[Var]:
    """Loop variables that the expression depends on."""
    found = memo.get(e)
    if found is None:
        if isinstance(e, Var):
            found = frozenset((e,))
        elif isinstance(e, Acc):
            found = RESULT
        else:
            found = frozenset().union(*(free_vars(c, memo) for c in children(e)))
            if isinstance(e, Reduce):
                found -= frozenset(e.vars)
        memo[e] = found
    return found


def _linear_forms(exprs: Sequence[Expr], target: Expr) -> list[Affine]:
    return [affine(target)] + [affine(x.indices[0]) for e in exprs for x in walk(e) if isinstance(x, Load)]


def _vars_outside_indices(exprs: Sequence[Expr]) -> set[Var]:
    """Variables used other than linearly in an index: they can't be merged with a neighbour."""
    found: set[Var] = set()
    seen: set[Expr] = set()
    stack = list(exprs)
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        if isinstance(x, Var):
            found.add(x)
        elif isinstance(x, Load):
            stack.extend(t for t in affine(x.indices[0]).coefs if not isinstance(t, Var))
            if x.where is not None:
                stack.append(x.where)
        else:
            stack.extend(children(x))
    return found


def merge_loops(
    names: list[Var], sizes: list[Size], exprs: list[Expr], target: Expr
) -> tuple[list[Var], list[Size], list[Expr], Expr]:
    """Drops loops of one turn and merges neighbours that every index walks through as one."""
    gone = {v: const(0, I64) for v, s in zip(names, sizes, strict=True) if s == 1}
    if gone:
        exprs, target = [substitute_vars(e, dict(gone)) for e in exprs], substitute_vars(target, dict(gone))
        pairs = [(v, s) for v, s in zip(names, sizes, strict=True) if v not in gone]
        names, sizes = [v for v, _ in pairs], [s for _, s in pairs]
    d = 0
    while d + 1 < len(names):
        outer, inner, size = names[d], names[d + 1], sizes[d + 1]
        forms = _linear_forms(exprs, target)
        fixed = _vars_outside_indices([*exprs, *(t for a in forms[:1] for t in a.coefs if not isinstance(t, Var))])
        joined = all(a.coefs.get(outer, 0) == a.coefs.get(inner, 0) * size for a in forms)
        if joined and outer not in fixed and inner not in fixed:
            exprs = [substitute_vars(e, {outer: const(0, I64)}) for e in exprs]
            target = substitute_vars(target, {outer: const(0, I64)})
            sizes[d + 1] = sizes[d] * size
            del names[d], sizes[d]
            d = max(d - 1, 0)
        else:
            d += 1
    return names, sizes, exprs, target


def _merge_reduces(expr: Expr) -> Expr:
    """Merges the loops of each reduction in the same way."""

    def visit(x: Expr) -> Expr | None:
        if not isinstance(x, Reduce) or x.kind.startswith("arg"):
            return None
        names, sizes, (body,), _ = merge_loops(list(x.vars), list(x.extents), [x.body], const(0, I64))
        return replace(x, vars=tuple(names), extents=tuple(sizes), body=body)

    return transform(expr, visit)


def _weight(expr: Expr) -> Size:
    """Rough cost of one element in scalar operations."""
    total: Size = 1
    for x in walk(expr):
        match x:
            case Apply(fn=fn):
                total = total + WEIGHT.get(fn, 1)
            case Reduce(extents=extents, body=body):
                total = total + size_product(extents) * max(sum(1 for _ in walk(body)) // 4, 1)
            case Load():
                total = total + 1
    return total


# ---- emission


@dataclass
class Scope:
    """A place in the loops: the variables visible there, the one that runs over lanes, and what is already computed."""

    width: int
    vec: Var | None
    vars: dict[Var, str]
    parent: Scope | None = None
    cache: dict[object, Value] = field(default_factory=dict)
    added: dict[object, frozenset[Expr]] = field(default_factory=dict)  # terms that a cached address contains

    def find(self, key: object) -> Value | None:
        """A value computed here or further out."""
        scope: Scope | None = self
        while scope is not None:
            if key in scope.cache:
                return scope.cache[key]
            scope = scope.parent
        return None

    def inner(self, vars: dict[Var, str], width: int | None = None, vec: Var | None = None) -> Scope:
        """A scope inside this one, with more variables."""
        w = self.width if width is None else width
        return Scope(w, vec if width is not None else self.vec, {**self.vars, **vars}, self)


class Emitter:
    """Emits expressions into a function; shared by loop nests and by the epilogues of anchors."""

    def __init__(self, f: Function, table: WordTable, lanes: int) -> None:
        self.f = f
        self.table = table
        self.lanes = lanes  # f32 elements in a vector register
        self.free: dict[Expr, frozenset[Var]] = {}
        self.sites: list[str] = []
        self.loaded: dict[object, str] = {}
        self.acc: Callable[[Scope], Value] | None = None  # how an epilogue gets the anchor's result

    # -- words

    def word(self, word: Buffer | Size) -> str:
        """A pointer or size word; all are loaded at the function's entry by `preload`."""
        if isinstance(word, int):
            return str(word)
        return self.loaded[word]

    def preload(self, exprs: Sequence[Expr], sizes: Sequence[Size]) -> None:
        """Loads every word that the expressions and sizes need."""
        for e in exprs:
            for x in walk(e):
                if isinstance(x, Load):
                    self._need(x.source)
                    self._need_affine(affine(x.indices[0]))
                elif isinstance(x, SizeOf):
                    self._need(x.size)
                elif isinstance(x, Reduce):
                    for s in x.extents:
                        self._need(s)
        for s in sizes:
            self._need(s)

    def _need_affine(self, a: Affine) -> None:
        self._need(a.constant)
        for coef in a.coefs.values():
            self._need(coef)

    def _need(self, word: Buffer | Size) -> None:
        """Static strides and extents other than tiny ones are words too, so that kernels can be shared."""
        key: object = word
        if (isinstance(word, int) and abs(word) <= 1) or key in self.loaded:
            return
        start = len(self.f.lines)
        self.loaded[key] = self.table.load(self.f, Pointer(word) if isinstance(word, Buffer) else word)
        self.f.slots.extend(self.f.lines[start:])  # in the entry block, wherever this is needed first
        del self.f.lines[start:]

    def size(self, size: Size) -> str:
        return self.loaded.get(size, str(size)) if isinstance(size, int) else self.loaded[size]

    # -- expressions

    def depends(self, e: Expr) -> frozenset[Var]:
        return free_vars(e, self.free)

    def hoist(self, e: Expr, inner: frozenset[Var], scope: Scope) -> None:
        """Computes, in `scope`, every largest part of `e` that does not depend on the inner variables."""
        if isinstance(e, Const | Var | SizeOf):
            return
        if not (self.depends(e) & (inner | RESULT)):
            self.value(e, scope)
            return
        if isinstance(e, Load):
            index = affine(e.indices[0])
            self._base(e, index, inner, scope)
            for term in index.coefs:
                self.hoist(term, inner, scope)
            if e.where is not None:
                self.hoist(e.where, inner, scope)
            return
        bound = inner | frozenset(e.vars) if isinstance(e, Reduce) else inner
        for child in children(e):
            self.hoist(child, bound, scope)

    def _base(self, e: Load, index: Affine, inner: frozenset[Var], scope: Scope) -> None:
        """The address of the part of the index that does not depend on the inner variables."""
        lane = scope.vec if scope.width > 1 else None
        fixed = {
            t: c
            for t, c in index.coefs.items()
            if not (self.depends(t) & inner) and (isinstance(t, Var) or lane not in self.depends(t))
        }
        key = ("base", e.source, e.indices[0])
        if scope.find(key) is None or any(self.depends(t) for t in fixed):
            address = self._offset(e.source, Affine(index.constant, fixed), scope)
            scope.cache[key] = (address, 1)
            scope.added[key] = frozenset(fixed)

    def _offset(self, source: Buffer, index: Affine, scope: Scope) -> str:
        total = self._sum(index, scope)
        pointer = self.word(source)
        return pointer if total == "0" else self.f.gep(pointer, total, scalar.memory_type(source.dtype))

    def _sum(self, index: Affine, scope: Scope) -> str:
        """An i64 of the linear form; every term must be the same in all lanes."""
        total = self.size(index.constant)
        for term, coef in index.coefs.items():
            text = scope.vars[term] if isinstance(term, Var) else self.value(term, scope)[0]
            part = text if coef == 1 else self.f.mul(text, self.size(coef), "i64")
            total = part if total == "0" else self.f.add(total, part, "i64")
        return total

    def value(self, e: Expr, scope: Scope) -> Value:
        """The value of an expression in a scope: its text, and 1 lane where it is the same in all."""
        found = scope.find(e)
        if found is None:
            found = self._compute(e, scope)
            scope.cache[e] = found
        return found

    def lanes_of(self, e: Expr, scope: Scope) -> str:
        """The value spread over the scope's lanes."""
        return self.spread(self.value(e, scope), e.dtype, scope.width)

    def spread(self, value: Value, dtype: DType, w: int) -> str:
        text, have = value
        return text if have == w else self.f.splat(text, w, scalar.llvm_type(dtype))

    def _compute(self, e: Expr, scope: Scope) -> Value:
        match e:
            case Const(value=v, dtype=dtype):
                assert not isinstance(v, complex)
                return scalar.literal(v, dtype), 1
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
                return self._reduce(e, scope)
            case Check():
                return self._check(e, scope)
        operands = [self.value(c, scope) for c in children(e)]
        w = max(lanes for _, lanes in operands)
        texts = [self.spread(v, c.dtype, w) for v, c in zip(operands, children(e), strict=True)]
        match e:
            case Apply(fn="bitcast", args=(a,), dtype=dtype):
                bits = vec(scalar.llvm_type(a.dtype), w)
                return self.f.cast("bitcast", texts[0], vec(scalar.llvm_type(dtype), w), bits), w
            case Apply(fn=fn, args=args):
                return scalar.apply(self.f, fn, texts, args[0].dtype, w), w
            case Select(a=a):
                return self.f.select(texts[0], texts[1], texts[2], vec(scalar.llvm_type(a.dtype), w)), w
            case Cast(value=source, dtype=dtype):
                return scalar.convert(self.f, texts[0], source.dtype, dtype, w), w
        raise AssertionError(f"no code for {type(e).__name__}")

    # -- loads

    def _load(self, e: Load, scope: Scope) -> Value:
        index = affine(e.indices[0])
        varying = scope.vec if scope.width > 1 else None
        where = None if e.where is None else self.value(e.where, scope)
        moving = {t for t in index.coefs if varying is not None and varying in self.depends(t)}
        ty = scalar.memory_type(e.dtype)
        if not moving and (where is None or where[1] == 1):
            address = self._address(e, index, scope)
            raw = self.f.load(ty, address) if where is None else self.f.masked_load(ty, address, where[0])
            return scalar.from_memory(self.f, raw, e.dtype, 1), 1
        w = scope.width
        vty = vec(ty, w)
        mask = None if where is None else self.f.splat(where[0], w, "i1") if where[1] == 1 else where[0]
        if not moving:
            assert mask is not None
            any_lane = self._any(mask, w)
            one = self.f.masked_load(ty, self._address(e, index, scope), any_lane)
            raw = self.f.select(mask, self.f.splat(one, w, ty), constant(_zero(ty), vty), vty)
        elif varying is not None and moving == {varying}:
            raw = self._walked(self._address(e, index, scope), index.coefs[varying], mask, vty)
        else:
            raw = self._gather(e, index, moving, mask, scope, vty)
        return scalar.from_memory(self.f, raw, e.dtype, w), w

    def _address(self, e: Load, index: Affine, scope: Scope) -> str:
        """The address of the element (of lane 0), starting from what an outer scope has already added up."""
        key = ("base", e.source, e.indices[0])
        at: Scope | None = scope
        while at is not None and key not in at.added:
            at = at.parent
        if at is None:
            return self._offset(e.source, index, scope)
        done = at.added[key]
        rest = Affine(0, {t: c for t, c in index.coefs.items() if t not in done})
        total = self._sum(rest, scope)
        base = at.cache[key][0]
        return base if total == "0" else self.f.gep(base, total, scalar.memory_type(e.source.dtype))

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
        zero = constant(_zero(element(vty)), vty)
        lanes = f"{vec('ptr', w)} {pointers}, i32 {size_of(vty)}, {vec('i1', w)} {mask}, {vty} {zero}"
        return f.op(f"call {vty} @{name}({lanes})", vty)

    def _gather(self, e: Load, index: Affine, moving: set[Expr], mask: str | None, scope: Scope, vty: str) -> str:
        w, ity = scope.width, vec("i64", scope.width)
        fixed = Affine(index.constant, {t: c for t, c in index.coefs.items() if t not in moving})
        total = self.f.splat(self._sum(fixed, scope), w, "i64")
        for term in index.coefs:
            if term in moving:
                part = self.lanes_of(term, scope)
                coef = index.coefs[term]
                part = part if coef == 1 else self.f.mul(part, self.f.splat(self.size(coef), w, "i64"), ity)
                total = self.f.add(total, part, ity)
        ty = scalar.memory_type(e.dtype)
        pointer = self.word(e.source)
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
        ty = scalar.memory_type(destination.dtype)
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

        def report(text: str) -> None:
            _, first = f.cmpxchg("%ctx", 0, code)
            f.if_(first, lambda: f.store(text, f.gep("%ctx", 1, "i64"), ty="i64"))

        def failed() -> None:
            if shown[1] == 1:
                report(shown[0])
                return
            bad = f.cast("bitcast", f.xor(ok[0], 1, vec("i1", w)), f"i{w}", vec("i1", w))
            f.declare(f"llvm.cttz.i{w}", f"i{w}", [f"i{w}", "i1"])
            lane = f.op(f"call i{w} @llvm.cttz.i{w}(i{w} {bad}, i1 true)", f"i{w}")
            report(f.op(f"extractelement {vec('i64', w)} {shown[0]}, i{w} {lane}", "i64"))

        if w == 1:
            f.if_(f.xor(ok[0], 1, "i1"), failed)
        else:
            bits = f.cast("bitcast", ok[0], f"i{w}", vec("i1", w))
            f.if_(f.cmp("ne", bits, -1, f"i{w}"), failed)
        return self.value(e.value, scope)

    # -- reductions

    def _reduce(self, e: Reduce, scope: Scope) -> Value:
        if e.kind.startswith("arg"):
            return self._reduce_arg(e, scope)
        per_lane = scope.width > 1 and scope.vec in self.depends(e)
        if per_lane:
            return self._reduce_loop(e, scope, scope.width), scope.width
        outside = scope if scope.width == 1 else scope.inner({}, 1, None)
        if e.vars and self._side_by_side(e):
            return self._reduce_row(e, outside), 1
        return self._reduce_loop(e, outside, 1), 1

    def _side_by_side(self, e: Reduce) -> bool:
        """Whether the loads of the body are next to each other (or the same) along the last reduction variable."""
        last = e.vars[-1]
        steps = []
        for x in walk(e.body):
            if isinstance(x, Load):
                form = affine(x.indices[0])
                opaque = any(last in self.depends(t) for t in form.coefs if not isinstance(t, Var))
                steps.append(2 if opaque else form.coefs.get(last, 0))
        return e.body.dtype.bits >= 8 and all(s in (0, 1) for s in steps) and any(s == 1 for s in steps)

    def _neutral(self, e: Reduce) -> int | float:
        match e.kind:
            case "add" | "or":
                return 0
            case "mul":
                return 1
            case "and":
                return 1 if e.dtype.kind == "b" else -1
        return scalar.extreme(e.kind, e.dtype)

    def _combine(self, kind: str, a: str, b: str, dtype: DType, w: int) -> str:
        return scalar.apply(self.f, kind, [a, b], dtype, w)

    def _start(self, e: Reduce, w: int) -> tuple[str, str]:
        ty = vec(scalar.llvm_type(e.dtype), w)
        neutral = self._neutral(e)
        return ty, constant(float(neutral) if e.dtype.is_float else int(neutral), ty)

    def _reduce_loop(self, e: Reduce, scope: Scope, w: int) -> str:
        """Loops over the reduction with an accumulator a lane of the scope."""
        ty, start = self._start(e, w)
        small = [s for s in e.extents if isinstance(s, int)]
        if len(small) == len(e.extents) and prod(small) <= 16:
            return self._unrolled(e, scope, w, start, [int(s) for s in small])
        self.hoist(e.body, frozenset(e.vars), scope)

        def nest(depth: int, at: Scope, acc: str) -> str:
            if depth == len(e.vars):
                return self._combine(e.kind, acc, self.spread(self.value(e.body, at), e.dtype, w), e.dtype, w)
            var = e.vars[depth]

            def turn(i: str, carried: list[str]) -> list[str]:
                inside = at.inner({var: i})
                if depth + 1 < len(e.vars):
                    self.hoist(e.body, frozenset(e.vars[depth + 1 :]), inside)
                return [nest(depth + 1, inside, carried[0])]

            return self.f.loop(0, self.size(e.extents[depth]), 1, [(ty, acc)], turn)[0]

        return nest(0, scope, start)

    def _unrolled(self, e: Reduce, scope: Scope, w: int, acc: str, extents: list[int]) -> str:
        for point in range(prod(extents)):
            at, rest = {}, point
            for var, n in zip(reversed(e.vars), reversed(extents), strict=True):
                at[var] = const(rest % n, I64)
                rest //= n
            body = substitute_vars(e.body, dict(at))
            self.preload([body], [])
            acc = self._combine(e.kind, acc, self.spread(self.value(body, scope), e.dtype, w), e.dtype, w)
        return acc

    def _reduce_row(self, e: Reduce, scope: Scope) -> str:
        """Vectors along the last reduction variable; `UNROLL` accumulators, then a scalar tail."""
        f, w, last = self.f, self.lanes, e.vars[-1]
        ty, start = self._start(e, w)
        sty, sstart = self._start(e, 1)
        self.hoist(e.body, frozenset(e.vars), scope)
        n = self.size(e.extents[-1])
        block = w * UNROLL
        whole = f.sub(n, f.rem(n, block, "i64"), "i64")
        single = f.sub(n, f.rem(n, w, "i64"), "i64")

        def run(at: Scope, accs: list[str]) -> list[str]:
            def step(i: str, carried: list[str]) -> list[str]:
                out = []
                for u, acc in enumerate(carried):
                    inside = at.inner({last: f.add(i, u * w, "i64") if u else i}, w, last)
                    body = self.spread(self.value(e.body, inside), e.dtype, w)
                    out.append(self._combine(e.kind, acc, body, e.dtype, w))
                return out

            vectors, tail = accs[:-1], accs[-1]
            vectors = f.loop(0, whole, block, [(ty, a) for a in vectors], step)
            vectors[:1] = f.loop(whole, single, w, [(ty, vectors[0])], step)

            def one(i: str, carried: list[str]) -> list[str]:
                inside = at.inner({last: i}, 1, None)
                return [self._combine(e.kind, carried[0], self.value(e.body, inside)[0], e.dtype, 1)]

            return [*vectors, *f.loop(single, n, 1, [(sty, tail)], one)]

        def nest(depth: int, at: Scope, accs: list[str]) -> list[str]:
            if depth == len(e.vars) - 1:
                return run(at, accs)

            def turn(i: str, carried: list[str]) -> list[str]:
                inside = at.inner({e.vars[depth]: i})
                self.hoist(e.body, frozenset(e.vars[depth + 1 :]), inside)
                return nest(depth + 1, inside, carried)

            typed = [(ty, a) for a in accs[:-1]] + [(sty, accs[-1])]
            return f.loop(0, self.size(e.extents[depth]), 1, typed, turn)

        *vectors, tail = nest(0, scope, [start] * UNROLL + [sstart])
        while len(vectors) > 1:
            half = len(vectors) // 2
            pairs = zip(vectors[:half], vectors[half:], strict=True)
            vectors = [self._combine(e.kind, a, b, e.dtype, w) for a, b in pairs]
        lanes = vectors[0]
        width = w
        while width > 1:
            width //= 2
            low = f.shuffle(lanes, None, list(range(width))) if width > 1 else f.extract(lanes, 0)
            high = f.shuffle(lanes, None, list(range(width, 2 * width))) if width > 1 else f.extract(lanes, 1)
            lanes = self._combine(e.kind, low, high, e.dtype, width)
        return self._combine(e.kind, lanes, tail, e.dtype, 1)

    def _reduce_arg(self, e: Reduce, scope: Scope) -> Value:
        """Index of the extremum; a NaN wins, and of equals the first (or `last`) does."""
        f, body = self.f, e.body
        w = scope.width if scope.width > 1 and scope.vec in self.depends(e) else 1
        at = scope if w > 1 or scope.width == 1 else scope.inner({}, 1, None)
        ty, ity = vec(scalar.llvm_type(body.dtype), w), vec("i64", w)
        self.hoist(body, frozenset(e.vars), at)
        better = {"argmax": "ge" if e.last else "gt", "argmin": "le" if e.last else "lt"}[e.kind]
        unsigned = body.dtype.kind in "ub"
        first = constant(_zero(scalar.llvm_type(body.dtype)), ty)

        def turn(i: str, carried: list[str]) -> list[str]:
            best, where = carried
            x = self.spread(self.value(body, at.inner({e.vars[0]: i})), body.dtype, w)
            take = f.cmp("u" + better if unsigned else better, x, best, ty)
            if body.dtype.is_float:
                nan = f.cmp("uno", x, x, ty)
                had = f.cmp("uno", best, best, ty)
                keep = constant(0, vec("i1", w)) if e.last else had
                take = f.or_(take, f.and_(nan, f.xor(keep, 1, vec("i1", w)), vec("i1", w)), vec("i1", w))
            start = f.cmp("eq", i, 0, "i64")
            take = f.or_(take, f.splat(start, w, "i1"), vec("i1", w))
            return [f.select(take, x, best, ty), f.select(take, f.splat(i, w, "i64"), where, ity)]

        result = f.loop(0, self.size(e.extents[0]), 1, [(ty, first), (ity, constant(0, ity))], turn)
        return result[1], w


def _zero(ty: str) -> int | float:
    return 0.0 if ty in ("float", "double", "half") else 0


def _rename_reduces(expr: Expr) -> Expr:
    """Reduction variables numbered in order, so that equal kernels have equal text."""
    names: dict[Var, Expr] = {}
    for x in walk(expr):
        if isinstance(x, Reduce):
            for v in x.vars:
                names.setdefault(v, Var(f"r{len(names)}"))

    def visit(x: Expr) -> Expr | None:
        if isinstance(x, Var):
            return names.get(x)
        if isinstance(x, Reduce):
            return replace(x, vars=tuple(names.get(v, v) for v in x.vars))  # type: ignore[misc]
        return None

    return transform(expr, visit)


def _is_short(x: Reduce) -> bool:
    """Whether vectors along the reduction would be mostly tail, as in the window of a pool."""
    return not x.extents or (isinstance(x.extents[-1], int) and x.extents[-1] < SHORT)


def _lanes_last(emitter: Emitter, expr: Expr, target: Expr, last: Var) -> bool:
    """Whether vectors should run along the last output axis rather than along the reductions inside."""
    good = bad = 0
    for x in walk(expr):
        if not isinstance(x, Reduce) or last not in emitter.depends(x) or _is_short(x):
            continue
        for load in walk(x.body):
            if isinstance(load, Load):
                form = affine(load.indices[0])
                step, along = form.coefs.get(last, 0), form.coefs.get(x.vars[-1], 0) if x.vars else 0
                good += step in (0, 1)
                bad += step not in (0, 1) and along == 1
    return bad == 0 or good > bad


def emit_nest(store: Store, lanes: int) -> KernelCode:
    """The code of one store of a loop-nest kernel. `lanes`: f32 elements in a vector register."""
    extents, target, expr = flatten(store)
    names = list(out_vars(len(extents)))
    names, sizes, (expr,), target = merge_loops(names, list(extents), [expr], target)
    expr = _rename_reduces(_merge_reduces(expr))
    f = Function(PLACEHOLDER, ARGS)
    table = WordTable()
    emitter = Emitter(f, table, lanes)
    by_lanes = bool(names) and _lanes_last(emitter, expr, target, names[-1])
    outer = names[:-1] if by_lanes else names
    outer_sizes = sizes[: len(outer)]
    last, last_size = (names[-1], sizes[-1]) if by_lanes else (None, 1)
    hoisted = last is not None and any(isinstance(x, Reduce) and last not in emitter.depends(x) for x in walk(expr))
    grid = _Grid(tuple(outer_sizes), last_size, _weight(expr), hoisted)

    destination = Load(store.buffer, (target,), store.buffer.dtype)
    emitter.preload([expr, destination], sizes)
    words = [table.load(f, Computed(fn)) for fn in (grid.rows, grid.row_chunk, grid.columns, grid.column_chunk)]
    rows, row_chunk, columns, column_chunk = words
    column_chunks = table.load(f, Computed(grid.column_chunks))
    at_row = f.binary("udiv", "%chunk", column_chunks, "i64")
    at_column = f.binary("urem", "%chunk", column_chunks, "i64")
    row0 = f.mul(at_row, row_chunk, "i64")
    row1 = f.min(f.add(row0, row_chunk, "i64"), rows, "i64")
    column0 = f.mul(at_column, column_chunk, "i64")
    column1 = f.min(f.add(column0, column_chunk, "i64"), columns, "i64")

    top = Scope(1, None, {})
    emitter.hoist(expr, frozenset(names), top)

    def put(scope: Scope) -> None:
        value = emitter.lanes_of(expr, scope)
        w = scope.width
        text = scalar.to_memory(f, value, store.buffer.dtype, w)
        emitter.store(destination, text, scope)

    def row(indices: list[str]) -> None:
        scope = top.inner(dict(zip(outer, indices, strict=True)))
        if last is None:
            put(scope)
            return
        inner = frozenset((last,))
        emitter.hoist(expr, inner, scope)
        emitter.hoist(destination, inner, scope)
        vectors = f.sub(column1, f.rem(f.sub(column1, column0, "i64"), lanes, "i64"), "i64")
        f.loop(column0, vectors, lanes, [], lambda i, _: put(scope.inner({last: i}, lanes, last)))
        f.loop(vectors, column1, 1, [], lambda i, _: put(scope.inner({last: i}, 1, None)))

    _row_loop(f, emitter, outer_sizes, row0, row1, row)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    return KernelCode(symbol, ir, tuple(table.words), grid.chunks, tuple(emitter.sites))


def _row_loop(
    f: Function, emitter: Emitter, sizes: Sequence[Size], start: str, stop: str, row: Callable[[list[str]], None]
) -> None:
    """Runs `row` for each row number in [start, stop) with the indices of the outer loops (an odometer)."""
    if len(sizes) <= 1:
        f.loop(start, stop, 1, [], lambda i, _: row([i] if sizes else []))
        return
    first: list[str] = []
    rest = start
    for size in reversed(sizes[1:]):
        text = emitter.size(size)
        first.insert(0, f.binary("urem", rest, text, "i64"))
        rest = f.binary("udiv", rest, text, "i64")
    first.insert(0, rest)

    def turn(_: str, indices: list[str]) -> list[str]:
        row(indices)
        after = list(indices)
        carry = "1"
        for d in range(len(sizes) - 1, 0, -1):
            bumped = f.add(indices[d], carry, "i64")
            wrapped = f.cmp("eq", bumped, emitter.size(sizes[d]), "i64")
            after[d] = f.select(wrapped, 0, bumped, "i64")
            carry = f.cast("zext", wrapped, "i64", "i1")
        after[0] = f.add(indices[0], carry, "i64")
        return after

    f.loop(start, stop, 1, [("i64", i) for i in first], turn)


@dataclass(frozen=True)
class _Grid:
    """How the work of a nest is cut into chunks: a function of extents only, never of the thread count."""

    outer: tuple[Size, ...]
    last: Size
    weight: Size
    whole_rows: bool  # a row is not split, because its reductions are shared by all its elements

    def rows(self, extents: Extents) -> int:
        return evaluate(size_product(self.outer), extents)

    def columns(self, extents: Extents) -> int:
        return evaluate(self.last, extents)

    def column_chunk(self, extents: Extents) -> int:
        """Columns of a chunk, a multiple of 64 unless it is the whole row."""
        columns = max(self.columns(extents), 1)
        if self.whole_rows:
            return columns
        wanted = -(-CHUNK_COST // max(evaluate(self.weight, extents), 1))
        return columns if columns < 2 * wanted else -(-wanted // 64) * 64

    def column_chunks(self, extents: Extents) -> int:
        return max(-(-self.columns(extents) // self.column_chunk(extents)), 1)

    def row_chunk(self, extents: Extents) -> int:
        a_row = max(self.column_chunk(extents) * evaluate(self.weight, extents), 1)
        return max(CHUNK_COST // a_row, 1)

    def chunks(self, extents: Extents) -> int:
        rows = self.rows(extents)
        if rows == 0 or self.columns(extents) == 0:
            return 0
        return -(-rows // self.row_chunk(extents)) * self.column_chunks(extents)
