"""Scalar expressions: how one element of a result is computed from elements of its sources.

Expressions are immutable and compared by structure. Loop indices are `Var`s; a `Load` names its source (a graph value
while fusing, a buffer in a kernel) and gives one index per axis. A `Reduce` binds its own loop variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Dim, Size
from rlx.records import cached_property, dataclass, field, names_of, replace

__all__ = [
    "Acc",
    "Apply",
    "Cast",
    "Check",
    "Const",
    "Expr",
    "Given",
    "Load",
    "Reduce",
    "Scalar",
    "Select",
    "SizeOf",
    "Var",
    "checks",
    "children",
    "conjuncts",
    "const",
    "guarded",
    "index",
    "loads",
    "rebuild",
    "size_expr",
    "substitute_vars",
    "walk",
]

I64 = DTYPES["i64"]
BOOL = DTYPES["bool"]
Number = int | float | bool | complex


class Expr:
    """Base of all scalar expressions; `dtype` is the element type of the result."""

    dtype: DType

    def __add__(self, other: ExprLike) -> Expr:
        return _add(self, _lift(other, self))

    def __radd__(self, other: ExprLike) -> Expr:
        return _add(_lift(other, self), self)

    def __sub__(self, other: ExprLike) -> Expr:
        return _sub(self, _lift(other, self))

    def __rsub__(self, other: ExprLike) -> Expr:
        return _sub(_lift(other, self), self)

    def __mul__(self, other: ExprLike) -> Expr:
        return _mul(self, _lift(other, self))

    def __rmul__(self, other: ExprLike) -> Expr:
        return _mul(_lift(other, self), self)

    def __truediv__(self, other: ExprLike) -> Expr:
        return Apply("div", (self, _lift(other, self)), self.dtype)

    def __rtruediv__(self, other: ExprLike) -> Expr:
        return Apply("div", (_lift(other, self), self), self.dtype)

    def __floordiv__(self, other: ExprLike) -> Expr:
        return _floordiv(self, _lift(other, self))

    def __mod__(self, other: ExprLike) -> Expr:
        return _mod(self, _lift(other, self))

    def __neg__(self) -> Expr:
        return Apply("neg", (self,), self.dtype)

    def __lt__(self, other: ExprLike) -> Expr:
        return Apply("lt", (self, _lift(other, self)), BOOL)

    def __le__(self, other: ExprLike) -> Expr:
        return Apply("le", (self, _lift(other, self)), BOOL)

    def __gt__(self, other: ExprLike) -> Expr:
        return Apply("gt", (self, _lift(other, self)), BOOL)

    def __ge__(self, other: ExprLike) -> Expr:
        return Apply("ge", (self, _lift(other, self)), BOOL)

    def __and__(self, other: ExprLike) -> Expr:
        return Apply("and", (self, _lift(other, self)), self.dtype)

    def __or__(self, other: ExprLike) -> Expr:
        return Apply("or", (self, _lift(other, self)), self.dtype)

    def __xor__(self, other: ExprLike) -> Expr:
        return Apply("xor", (self, _lift(other, self)), self.dtype)

    def __invert__(self) -> Expr:
        return Apply("not", (self,), self.dtype)


@dataclass(frozen=True, eq=False)
class _Hashed(Expr):
    """Structural equality, with the hash computed once.

    Expressions share large parts, and two that are built alike share them alike: those that were found equal get the
    same `_mark`, so that a part is compared once and not once for each way that leads to it (2^n ways, n levels up).
    """

    _mark: ClassVar[object | None] = None  # until it is found equal to another
    _hash: ClassVar[int]  # of each object, by `__post_init__`

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        own = self.__dict__
        return (type(self).__name__, *[own[name] for name in names_of(self)])

    def __post_init__(self) -> None:
        # Now, when those of the parts are known: deep trees need no recursion.
        self.__dict__["_hash"] = hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, name) for name in names_of(self))  # hashes differ between processes

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, _Hashed) or self._hash != other._hash:
            return False
        mark = self._mark
        if mark is not None and mark is other._mark:
            return True
        if self._key != other._key:
            return False
        self.__dict__["_mark"] = other.__dict__["_mark"] = mark or other._mark or object()
        return True


@dataclass(frozen=True, eq=False)
class Const(_Hashed):
    """A literal. NaN is equal to NaN here: the key is the text of the value."""

    value: Number
    dtype: DType

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return ("Const", repr(self.value), self.dtype)


class Given(Const):
    """A literal that is data of the graph, and so another one in another place: not one that an op is made of."""


@dataclass(frozen=True, eq=False)
class Scalar(_Hashed):
    """A number that the code does not know: that of this number among those of its kernel."""

    number: int
    dtype: DType


@dataclass(frozen=True, eq=False)
class Var(_Hashed):
    """A loop index (i64). Output loops are named i0, i1, ...; reduction loops r0, r1, ..."""

    name: str
    dtype: DType = field(default=I64)


@dataclass(frozen=True, eq=False)
class SizeOf(_Hashed):
    """A symbolic size as an i64 number. `folds`: arithmetic on it gives sizes again, and not code."""

    size: Dim
    dtype: DType = field(default=I64)
    folds: bool = True


@dataclass(frozen=True, eq=False)
class Load(_Hashed):
    """One element of `source` at `indices`; reads nothing and gives 0 where `where` (if any) is false."""

    source: Any
    indices: tuple[Expr, ...]
    dtype: DType
    where: Expr | None = None


@dataclass(frozen=True, eq=False)
class Apply(_Hashed):
    """A named scalar function: arithmetic, comparison (-> bool), logic, or a function of `rlx.kernels.functions`."""

    fn: str
    args: tuple[Expr, ...]
    dtype: DType


@dataclass(frozen=True, eq=False)
class Select(_Hashed):
    """`a` where `cond`, else `b`."""

    cond: Expr
    a: Expr
    b: Expr

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.a.dtype


@dataclass(frozen=True, eq=False)
class Cast(_Hashed):
    """A numeric conversion to `dtype`, by the rule of `rlx.ir.casting`."""

    value: Expr
    dtype: DType


@dataclass(frozen=True, eq=False)
class Reduce(_Hashed):
    """`kind` ("add" | "mul" | "max" | "min" | "and" | "or" | "argmax" | "argmin") of `body` over `vars` < `extents`.

    argmax and argmin give the first index (i64, of the single variable) at which the extremum is reached (`last`: the
    last one); NaN counts as the extremum, as in NumPy.
    """

    kind: str
    vars: tuple[Var, ...]
    extents: tuple[Size, ...]
    body: Expr
    dtype: DType
    last: bool = False


@dataclass(frozen=True, eq=False)
class Acc(_Hashed):
    """The result element of the kernel's anchor, in an epilogue."""

    dtype: DType


@dataclass(frozen=True, eq=False)
class Check(_Hashed):
    """`value`, after testing `ok`; if it is false the run stops with an error of that `kind` that shows `shown`.

    `kind` is "index" or "division". `value` must be safe to evaluate even when `ok` is false.
    """

    ok: Expr
    value: Expr
    kind: str
    shown: Expr

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.value.dtype


ExprLike = Expr | int | float | bool | Dim


def const(value: Number, dtype: DType) -> Const:
    """A literal of `dtype`."""
    if dtype.kind == "b":
        return Const(bool(value), dtype)
    if dtype.kind in "iu":
        return Const(int(value), dtype)  # type: ignore[arg-type]
    return Const(value if dtype.kind == "c" else float(value), dtype)  # type: ignore[arg-type]


def size_expr(size: Size) -> Expr:
    """A size as an i64 expression."""
    return SizeOf(size) if isinstance(size, Dim) else Const(int(size), I64)


def index(value: ExprLike) -> Expr:
    """An i64 index from an int, a size or an expression."""
    return value if isinstance(value, Expr) else size_expr(value)  # type: ignore[arg-type]


def _lift(value: ExprLike, like: Expr) -> Expr:
    if isinstance(value, Expr):
        return value
    if isinstance(value, Dim):
        return SizeOf(value)
    return const(value, like.dtype)


def as_size(e: Expr) -> Size | None:
    """The size that an index expression is when it holds no loop variable or load, else None."""
    if isinstance(e, Const) and isinstance(e.value, int) and e.dtype is I64:
        return e.value
    return e.size if isinstance(e, SizeOf) and e.folds else None


def _fold(a: Expr, b: Expr, fn: Callable[[Size, Size], Size]) -> Expr | None:
    x, y = as_size(a), as_size(b)
    return None if x is None or y is None else size_expr(fn(x, y))


def _add(a: Expr, b: Expr) -> Expr:
    if a.dtype is I64:
        if as_size(a) == 0:
            return b
        if as_size(b) == 0:
            return a
        folded = _fold(a, b, lambda x, y: x + y)
        if folded is not None:
            return folded
    return Apply("add", (a, b), a.dtype)


def _sub(a: Expr, b: Expr) -> Expr:
    if a.dtype is I64:
        if as_size(b) == 0:
            return a
        folded = _fold(a, b, lambda x, y: x - y)
        if folded is not None:
            return folded
    return Apply("sub", (a, b), a.dtype)


def _mul(a: Expr, b: Expr) -> Expr:
    if a.dtype is I64:
        for x, y in ((a, b), (b, a)):
            if as_size(x) == 0 and not checks(y):
                return x
            if as_size(x) == 1:
                return y
        folded = _fold(a, b, lambda x, y: x * y)
        if folded is not None:
            return folded
    return Apply("mul", (a, b), a.dtype)


def _floordiv(a: Expr, b: Expr) -> Expr:
    """Floor division of indices (b > 0)."""
    if as_size(b) == 1:
        return a
    folded = _fold(a, b, lambda x, y: x // y)
    return folded if folded is not None else Apply("floordiv", (a, b), a.dtype)


def _mod(a: Expr, b: Expr) -> Expr:
    if as_size(b) == 1 and not checks(a):
        return const(0, a.dtype)
    folded = _fold(a, b, lambda x, y: x % y)
    return folded if folded is not None else Apply("mod", (a, b), a.dtype)


def children(e: Expr) -> tuple[Expr, ...]:
    """The direct sub-expressions."""
    match e:
        case Load(indices=indices, where=where):
            return indices if where is None else (*indices, where)
        case Apply(args=args):
            return args
        case Select(cond=c, a=a, b=b):
            return (c, a, b)
        case Cast(value=v):
            return (v,)
        case Reduce(body=body):
            return (body,)
        case Check(ok=ok, value=v, shown=shown):
            return (ok, v, shown)
    return ()


def rebuild(e: Expr, kids: Sequence[Expr]) -> Expr:
    """The same expression over other sub-expressions (in the order of `children`); indices are simplified again."""
    match e:
        case Load(where=None):
            return replace(e, indices=tuple(kids))
        case Load():
            return replace(e, indices=tuple(kids[:-1]), where=kids[-1])
        case Apply(fn=fn, dtype=dtype):
            simple = {"add": _add, "sub": _sub, "mul": _mul, "floordiv": _floordiv, "mod": _mod}.get(fn)
            return simple(*kids) if simple and dtype is I64 else Apply(fn, tuple(kids), dtype)
        case Select():
            return Select(*kids)
        case Cast(dtype=dtype):
            return Cast(kids[0], dtype)
        case Reduce():
            return replace(e, body=kids[0])
        case Check(kind=kind):
            return Check(kids[0], kids[1], kind, kids[2])
    return e


def transform(e: Expr, fn: Callable[[Expr], Expr | None]) -> Expr:
    """Rewrites bottom-up, each distinct sub-expression once; `fn` returns a replacement or None to keep."""
    return _transformed(e, fn, {})


def _transformed(x: Expr, fn: Callable[[Expr], Expr | None], memo: dict[Expr, Expr]) -> Expr:
    done = memo.get(x)
    if done is None:
        kids = children(x)
        new = [_transformed(k, fn, memo) for k in kids]
        y = rebuild(x, new) if any(a is not b for a, b in zip(kids, new, strict=True)) else x
        done = fn(y)
        done = y if done is None else done
        memo[x] = done
    return done


def substitute_vars(e: Expr, values: dict[Var, Expr]) -> Expr:
    """The expression with loop variables replaced."""
    changed = {var: by for var, by in values.items() if by != var}
    return transform(e, lambda x: changed.get(x) if isinstance(x, Var) else None) if changed else e


def conjuncts(test: Expr | None) -> Iterator[Expr]:
    """The tests that all have to hold for a condition to hold; none for None."""
    if isinstance(test, Apply) and test.fn == "and":
        for part in test.args:
            yield from conjuncts(part)
    elif test is not None:
        yield test


def walk(e: Expr) -> tuple[Expr, ...]:
    """Every distinct sub-expression once, operands before users."""
    found: tuple[Expr, ...] | None = e.__dict__.get("_walk")
    if found is None:
        found = e.__dict__["_walk"] = tuple(_walk(e))
    return found


def _walk(e: Expr) -> Iterator[Expr]:
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(e, False)]
    while stack:
        x, ready = stack.pop()
        if ready:
            yield x
        elif x not in seen:
            seen.add(x)
            stack.append((x, True))
            stack.extend((k, False) for k in children(x))


def loads(e: Expr) -> Iterator[Load]:
    """Every distinct load in the expression."""
    return (x for x in walk(e) if isinstance(x, Load))


def checks(e: Expr) -> bool:
    """Whether a test in the expression may stop the run: then it is computed even where its value is known."""
    return any(isinstance(x, Check) for x in walk(e))


def guarded(expr: Expr, where: Expr) -> Expr:
    """The expression with every load and check made conditional on `where` as well."""

    def place(x: Expr) -> Expr | None:
        if isinstance(x, Load):
            return replace(x, where=where if x.where is None else x.where & where)
        return Check(x.ok | ~where, x.value, x.kind, x.shown) if isinstance(x, Check) else None

    return transform(expr, place)
