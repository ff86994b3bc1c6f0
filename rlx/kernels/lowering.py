"""What an op's `lower` is given: constructors of scalar expressions and anchors.

    def lower(self, k, x):                       # ReLU
        return k.map(lambda *i: k.max(x(*i), 0))

An operand is called with one index per axis and gives the element there; `k.out` are the node's output types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.casting import NARROWED, cast, rounded_q8_element
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Node, TensorType, Value
from rlx.ir.shape import Shape, Size
from rlx.kernels.expr import (
    BOOL,
    I64,
    Acc,
    Apply,
    Cast,
    Check,
    Const,
    Expr,
    ExprLike,
    Given,
    Load,
    Reduce,
    Select,
    Var,
    _lift,
    checks,
    const,
    index,
    size_expr,
    walk,
)
from rlx.records import dataclass

__all__ = [
    "Anchor",
    "Attention",
    "Contract",
    "Conv",
    "Lowered",
    "Lowering",
    "Operand",
    "Piece",
    "Written",
    "lower_in_place",
    "lower_node",
    "out_vars",
]


def out_vars(rank: int) -> tuple[Var, ...]:
    """The loop variables of an output of that rank: i0, i1, ..."""
    return tuple(Var(f"i{d}") for d in range(rank))


@dataclass(frozen=True)
class Operand:
    """An input of the node being lowered; call it with indices to get an element (0 where `where` is false)."""

    value: Value

    @property
    def type(self) -> TensorType:
        return self.value.type

    @property
    def shape(self) -> Shape:
        return self.value.shape

    @property
    def rank(self) -> int:
        return len(self.value.shape)

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    def __call__(self, *indices: ExprLike, where: Expr | None = None) -> Expr:
        assert len(indices) == self.rank, f"{len(indices)} indices for a tensor of rank {self.rank}"
        at, data = tuple(index(i) for i in indices), self.value.data if self.value.kind == "const" else None
        if data is not None and data.size == 1 and where is None and not any(checks(i) for i in at):
            made = const(data.item(), self.dtype)
            return Given(made.value, made.dtype)
        return Load(self.value, at, self.dtype, where)

    def broadcast(self, *indices: Expr) -> Expr:
        """The element for indices of a shape that this operand is broadcast to (NumPy rules)."""
        own = indices[len(indices) - self.rank :]
        return self(*(0 if size == 1 else i for size, i in zip(self.shape, own, strict=True)))


@dataclass(frozen=True)
class Piece:
    """A box of an output: elements offset + (i0, i1, ...), i < extents, are given by `expr` over the out vars."""

    expr: Expr
    extents: Shape
    offset: Shape


@dataclass(frozen=True)
class Contract:
    """C[b..., m, n] = sum over k of (a - zero) * b. `a` and `b` are over the out vars (batch..., m, n) and Var("k").

    `activations` "q8": a is rounded to whole numbers of 8 bits in blocks along k first (`rlx.ir.casting`). "bf16" and
    "f16": both operands were f32, which a and b round to this type; what is below 2^-126 may count as zero.
    """

    m: Size
    n: Size
    k: Size
    a: Expr
    b: Expr
    zero: Expr | None = None  # one number; none: 0
    activations: str = ""


@dataclass(frozen=True)
class Conv:
    """A convolution of x [N, C, *spatial] with w [O, C/groups, *kernel]; pads are (begin..., end...) as in ONNX."""

    x: Expr  # Load of the input at out vars standing for (n, c, *spatial)
    w: Expr  # Load of the weight at out vars standing for (o, c, *kernel)
    x_shape: Shape
    w_shape: Shape
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[Size, ...]
    groups: int
    exact: bool = False  # operands are whole numbers whose sums must stay exact: no transform that rounds
    zero: Expr | None = None  # one number that is taken off every element of x, before zeros are padded
    activations: str = ""  # "bf16" or "f16": as of `Contract`


@dataclass(frozen=True)
class Attention:
    """softmax(score) v with q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv]; see `rlx.ops.attention`.

    Query head h reads key head h * Hkv // H. `q`, `k`, `v` are over out vars standing for their four axes; `score` is
    over (b, h, i, j) as i0..i3 and `Acc`, which is scale * q k^T, or None for `Acc` itself. `causal`: key j is seen by
    query i only when j <= i + Lk - Lq. `empty_row` says what a row gives that sees no key: "nan", "zero", or "mended",
    as every row whose weights are NaN then has weights of zero. `count` (i64, over b as i0) is how many keys there are,
    of the Lk that there is room for; it stands for Lk above. `place` (i64, over i0) is the position of query row 0 and
    stands for Lk - Lq above; with `apart` 0 all rows have it. `window`: key j is seen only when j > position - window.
    `sinks` (over h as i1) is a score more of each head, without a value. `ring`: key j is at j modulo Lk.
    """

    q: Expr
    k: Expr
    v: Expr
    score: Expr | None
    q_shape: Shape
    k_shape: Shape
    v_shape: Shape
    scale: float
    causal: bool
    empty_row: str
    count: Expr | None = None
    place: Expr | None = None
    sinks: Expr | None = None
    window: int | None = None
    ring: bool = False
    apart: int = 1
    activations: str = ""  # "bf16" or "f16": q, k and v were rounded to that type; the weights of v may be, too


Anchor = Contract | Conv | Attention


@dataclass(frozen=True)
class Written:
    """The elements of a result that differ from its first operand: `expr` at `index`, over a box of out vars."""

    extents: Shape
    index: tuple[Expr, ...]
    expr: Expr


@dataclass(frozen=True)
class Lowered:
    """A node as scalar code: for each output its pieces (one that covers it all, as a rule).

    With an `anchor` there is one output and its piece's expr is the epilogue over `Acc`; `generic` is the same element
    as a plain expression (None: the backend must claim the node, else it is decomposed).
    """

    outputs: tuple[tuple[Piece, ...], ...]
    anchor: Anchor | None = None
    generic: Expr | None = None

    def dtypes(self) -> set[DType]:
        """The types of everything that the code reads and computes (of an anchor's operands: what they load)."""
        found = [piece.expr for pieces in self.outputs for piece in pieces]
        if self.generic is not None:
            found.append(self.generic)
        if self.anchor is not None:
            found.extend(x for x in vars(self.anchor).values() if isinstance(x, Expr))
        return {x.dtype for e in found for x in walk(e)}


class Lowering:
    """The context of one node's lowering."""

    byte = DTYPES["u8"]

    def __init__(self, out: tuple[TensorType, ...], fresh: Iterator[int] | None = None) -> None:
        self.out = out
        self._fresh = count() if fresh is None else fresh  # numbers reduction variables

    # ---- results

    def map(self, *fns: Callable[..., Expr]) -> Lowered:
        """One function of the output indices for each output."""
        assert len(fns) == len(self.out)
        return Lowered(tuple((self._whole(fn, t),) for fn, t in zip(fns, self.out, strict=True)))

    def _whole(self, fn: Callable[..., Expr], t: TensorType) -> Piece:
        return Piece(self.cast(fn(*out_vars(t.rank)), t.dtype), t.shape, (0,) * t.rank)

    def pieces(self, boxes: Sequence[tuple[Sequence[Size], Sequence[Size], Callable[..., Expr]]]) -> Lowered:
        """The single output as disjoint boxes that cover it: (offset, extents, function of indices within the box)."""
        rank = self.out[0].rank
        made = (Piece(fn(*out_vars(rank)), tuple(extents), tuple(offset)) for offset, extents, fn in boxes)
        return Lowered((tuple(made),))

    def written(self, extents: Shape, index: Callable[..., Sequence[Expr]], value: Callable[..., Expr]) -> Written:
        """What `lower_in_place` gives: the box that is written, where each of its elements goes, and what it is."""
        vars = out_vars(len(extents))
        return Written(tuple(extents), tuple(index(*vars)), value(*vars))

    def contract(
        self, m: Size, n: Size, k: Size, a: Callable[..., Expr], b: Callable[..., Expr], activations: str = ""
    ) -> Lowered:
        """Matrix product: a(*batch, m, k) and b(*batch, k, n) over the output [*batch, m, n]."""
        (t,) = self.out
        *batch, row, column = out_vars(t.rank)
        depth = Var("k")

        def element(x: Callable[..., Expr], *at: Expr) -> Expr:
            return self.narrow(x(*batch, *at), activations)

        anchor = Contract(m, n, k, element(a, row, depth), element(b, depth, column), None, activations)
        sums = accumulator(t.dtype)

        def left(r: Expr) -> Expr:
            return self.cast(element(a, row, r), sums)

        def product(r: Expr) -> Expr:
            x = rounded_q8_element(self, left, k, r) if activations == "q8" else left(r)
            return x * self.cast(element(b, r, column), sums)

        return self._anchored(anchor, self.reduce("add", (k,), product), None)

    def byte_contract(
        self, m: Size, n: Size, k: Size, a: Callable[..., Expr], b: Callable[..., Expr], zero: Operand | None
    ) -> Lowered:
        """The product of a - zero, a of 8 bits, with b in i32; for backends that have a kernel for it."""
        *batch, row, column = out_vars(self.out[0].rank)
        depth = Var("k")
        shift = None if zero is None else zero(*[0] * zero.rank)
        anchor = Contract(m, n, k, a(*batch, row, depth), b(*batch, depth, column), shift)
        return self._anchored(anchor, None, None)

    def conv(
        self,
        x: Operand,
        w: Operand,
        bias: Operand | None,
        *,
        strides: tuple[int, ...],
        dilations: tuple[int, ...],
        pads: tuple[Size, ...],
        groups: int,
        exact: bool = False,
        activations: str = "",
    ) -> Lowered:
        """Convolution with the output [N, O, *spatial]; `bias` is [O]. With `exact` nothing may round whole numbers."""
        if self.out[0].shape[1] == 0:  # kernels of convolutions take one output channel for granted
            return self.map(lambda *at: self.const(0, self.out[0].dtype))
        n, o, *space = out_vars(self.out[0].rank)
        rank = len(space)
        per_group = w.shape[1]
        out_per_group = w.shape[0] // groups

        def product(c: Expr, *taps: Expr) -> Expr:
            at = [i * s + t * d - p for i, s, t, d, p in zip(space, strides, taps, dilations, pads[:rank], strict=True)]
            inside = self.all(
                *(
                    test
                    for i, size, padded in zip(at, x.shape[2:], _padded(pads), strict=True)
                    if padded
                    for test in (i >= 0, i < size)
                )
            )
            channel = c if groups == 1 else o // out_per_group * per_group + c
            pair = (x(n, channel, *at, where=inside), w(o, c, *taps))
            left, right = (self.widen(self.narrow(e, activations)) for e in pair)
            return left * right

        generic = self.reduce("add", (per_group, *w.shape[2:]), product)
        ox, ow = out_vars(x.rank), out_vars(w.rank)
        image, weight = (self.narrow(e, activations) for e in (x(*ox), w(*ow)))
        shapes = x.shape, w.shape
        anchor = Conv(image, weight, *shapes, strides, dilations, pads, groups, exact, activations=activations)
        return self._anchored(anchor, generic, None if bias is None else bias(o))

    def byte_conv(
        self,
        x: Operand,
        w: Operand,
        zero: Operand | None,
        *,
        strides: tuple[int, ...],
        dilations: tuple[int, ...],
        pads: tuple[Size, ...],
        groups: int,
    ) -> Lowered:
        """Convolution of x - zero with w in i32, x of 8 bits; for backends that have a kernel for it."""
        if self.out[0].shape[1] == 0:
            return self.map(lambda *at: self.const(0, self.out[0].dtype))
        ox, ow = out_vars(x.rank), out_vars(w.rank)
        shift = None if zero is None else zero(*[0] * zero.rank)
        anchor = Conv(x(*ox), w(*ow), x.shape, w.shape, strides, dilations, pads, groups, True, shift)
        return self._anchored(anchor, None, None)

    def attention(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        score: Callable[..., Expr] | None,
        *,
        scale: float,
        causal: bool,
        empty_row: str,
        count: Callable[..., Expr] | None = None,
        window: int | None = None,
        sinks: Callable[..., Expr] | None = None,
        place: Callable[..., Expr] | None = None,
        ring: bool = False,
        activations: str = "",
    ) -> Lowered:
        """Attention; `score(s, b, h, i, j)` is made of a scaled product s, `count(b)` keys are there.

        `sinks(h)` and `place(b)` are fields of the anchor.
        """
        i = out_vars(4)
        rows, keys, values = (self.narrow(x(*i), activations) for x in (q, k, v))
        loads = (rows, keys, values, score(Acc(accumulator(q.dtype)), *i) if score else None)
        many, first = (None if fn is None else fn(i[0]) for fn in (count, place))
        sink = None if sinks is None else sinks(i[1])
        shapes = q.shape, k.shape, v.shape
        anchor = Attention(
            *loads, *shapes, scale, causal, empty_row, many, first, sink, window, ring, activations=activations
        )
        return self._anchored(anchor, None, None)

    def _anchored(self, anchor: Anchor, generic: Expr | None, addend: Expr | None) -> Lowered:
        (t,) = self.out
        dtype = accumulator(t.dtype)

        def finish(value: Expr) -> Expr:
            return self.cast(value if addend is None else value + self.cast(addend, dtype), t.dtype)

        piece = Piece(finish(Acc(dtype)), t.shape, (0,) * t.rank)
        return Lowered(((piece,),), anchor, None if generic is None else finish(generic))

    # ---- expressions

    def const(self, value: int | float | bool, dtype: DType | str) -> Expr:
        return const(value, DTYPES[dtype] if isinstance(dtype, str) else dtype)

    def size(self, size: Size) -> Expr:
        """A size as an i64 number."""
        return size_expr(size)

    def cast(self, x: Expr, dtype: DType | str) -> Expr:
        target = DTYPES[dtype] if isinstance(dtype, str) else dtype
        if x.dtype is target:
            return x
        if isinstance(x, Const) and not isinstance(x.value, complex):
            made = const(cast(np.asarray(x.value, x.dtype.numpy), target).item(), target)
            return Given(made.value, made.dtype) if isinstance(x, Given) else made
        return Cast(x, target)

    def narrow(self, x: Expr, activations: str) -> Expr:
        """The element in the type that it is rounded to before it is multiplied."""
        return self.cast(x, activations) if activations in NARROWED else x

    def widen(self, x: Expr) -> Expr:
        """The element in the type that arithmetic on it accumulates in (f16, bf16 -> f32; others as they are)."""
        return self.cast(x, accumulator(x.dtype))

    def bitcast(self, x: Expr, dtype: DType) -> Expr:
        """The same bits as another type of the same width."""
        return Apply("bitcast", (x,), dtype)

    def select(self, cond: Expr, a: ExprLike, b: ExprLike) -> Expr:
        first = a if isinstance(a, Expr) else None
        like = first if first is not None else b
        assert isinstance(like, Expr)
        return Select(cond, _lift(a, like), _lift(b, like))

    def call(self, fn: str, *args: ExprLike, dtype: DType | None = None) -> Expr:
        """A scalar function of `rlx.kernels.functions` on operands of one type; `dtype` where the result's differs."""
        like = next(a for a in args if isinstance(a, Expr))
        return Apply(fn, tuple(_lift(a, like) for a in args), dtype or like.dtype)

    def max(self, a: ExprLike, b: ExprLike) -> Expr:
        """The larger; NaN if either is."""
        return self.call("max", a, b)

    def min(self, a: ExprLike, b: ExprLike) -> Expr:
        """The smaller; NaN if either is."""
        return self.call("min", a, b)

    def equal(self, a: Expr, b: ExprLike) -> Expr:
        return self.call("eq", a, b, dtype=BOOL)

    def all(self, *tests: Expr) -> Expr | None:
        """The conjunction, or None for no tests (as `where` takes it)."""
        total: Expr | None = None
        for test in tests:
            total = test if total is None else total & test
        return total

    def reduce(
        self,
        kind: str,
        extents: Sequence[Size],
        body: Callable[..., Expr],
        *,
        last: bool = False,
    ) -> Expr:
        """`kind` over the box of `extents`; `body` gets one index per extent. An empty "add", "mul", "and", "or" gives
        its neutral element; argmax and argmin give the i64 index of the single extent."""
        names = tuple(Var(f"r{next(self._fresh)}") for _ in extents)
        value = body(*names)
        dtype = I64 if kind in ("argmax", "argmin") else value.dtype
        return Reduce(kind, names, tuple(extents), value, dtype, last)

    def checked_index(self, i: Expr, size: Size) -> Expr:
        """An index into an axis of `size` that may be negative (from the end); outside it the run stops with an error.

        The value is safe to use as an index even when the check fails, as long as size > 0.
        """
        extent = size_expr(size)
        i = self.cast(i, I64)
        wrapped = self.select(i < 0, i + extent, i)
        ok = (wrapped >= 0) & (wrapped < extent)
        return Check(ok, self.select(ok, wrapped, 0), "index", i)

    def checked_start(self, start: Expr, size: Size, count: Size) -> Expr:
        """Where `count` rows begin in an axis of `size`; where they lie outside it the run stops with an error."""
        start = self.cast(start, I64)
        ok = (start >= 0) & (start <= size_expr(size - count))
        return Check(ok, self.select(ok, start, 0), "index", start)

    def checked_divisor(self, d: Expr) -> Expr:
        """An integer divisor; if it is 0 the run stops with an error (and 1 stands in for it)."""
        ok = self.call("ne", d, 0, dtype=BOOL)
        return Check(ok, self.select(ok, d, 1), "division", self.cast(d, I64))


def accumulator(dtype: DType) -> DType:
    """The type that sums of `dtype` are kept in on the way."""
    return DTYPES["f32"] if dtype.is_float and dtype.bits < 32 else dtype


def _padded(pads: tuple[Size, ...]) -> list[bool]:
    rank = len(pads) // 2
    return [pads[d] != 0 or pads[d + rank] != 0 for d in range(rank)]


def lower_node(node: Node, fresh: Iterator[int] | None = None) -> Lowered | None:
    """The node as scalar code, or None when its op has no `lower` (then it decomposes or is a host call).

    `fresh` numbers the reduction variables: expressions that are to be combined must draw from one iterator.
    """
    lower = getattr(node.op, "lower", None)
    if lower is None:
        return None
    result = lower(Lowering(tuple(v.type for v in node.outputs), fresh), *(Operand(v) for v in node.inputs))
    if not isinstance(result, Lowered):
        raise ShapeError(f"{node.label}: `lower` must return what k.map, k.pieces, k.contract ... return")
    return result


def lower_in_place(node: Node, fresh: Iterator[int] | None = None) -> Written | None:
    """What the node writes where its first operand is in its result's place; None where that is not a part of it."""
    lower = getattr(node.op, "lower_in_place", None)
    if lower is None:
        return None
    made = lower(Lowering(tuple(v.type for v in node.outputs), fresh), *(Operand(v) for v in node.inputs))
    assert isinstance(made, Written)
    return made
