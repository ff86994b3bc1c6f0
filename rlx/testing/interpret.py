"""Evaluates the scalar code of `Op.lower` with NumPy, strictly: an independent check of every op on small shapes.

Beyond giving the values, it fails (AssertionError) where a code generator may do anything: a load out of bounds,
operands of mixed types, arithmetic in 16-bit floats, an integer division that is not guarded, or pieces that do not
tile the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from rlx.errors import ExecutionError
from rlx.ir.casting import cast
from rlx.ir.dtype import DType, dtype_of
from rlx.ir.graph import Array, Graph, Node, TensorType, Value
from rlx.ir.shape import Shape, Size, evaluate
from rlx.kernels.expr import Acc, Apply, Cast, Check, Const, Expr, Load, Reduce, Select, SizeOf, Var
from rlx.kernels.lowering import (
    Anchor,
    Attention,
    Contract,
    Conv,
    Lowered,
    Piece,
    accumulator,
    lower_node,
    out_vars,
)
from rlx.ops.base import Op
from rlx.records import dataclass

__all__ = ["check_op", "interpret", "interpret_decomposed", "interpret_graph", "make_node"]

Env = dict[Var, Array]
COMPARISONS: dict[str, Any] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "isnan": np.isnan,
    "isinf": np.isinf,
}


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1 / (1 + e), e / (1 + e)))


def _erf(x: Array) -> Array:
    return np.asarray([math.erf(v) for v in x.ravel().tolist()], x.dtype).reshape(x.shape)


def _normal_cdf(x: Array) -> Array:
    return np.asarray([math.erfc(-v * math.sqrt(0.5)) / 2 for v in x.ravel().tolist()], x.dtype).reshape(x.shape)


FLOAT_ONLY: dict[str, Any] = {
    "div": np.true_divide,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "erf": _erf,
    "normal_cdf": _normal_cdf,
    "sigmoid": _sigmoid,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "trunc": np.trunc,
    "pow": np.power,
    "fmod": np.fmod,
}


def _truncated(a: Array, b: Array) -> Array:
    assert (b != 0).all(), "idiv by 0: use k.checked_divisor"
    if a.dtype.kind == "i":
        assert not ((b == -1) & (a == np.iinfo(a.dtype).min)).any(), "idiv overflows"
    return np.asarray((a - np.fmod(a, b)) // b)


def _remainder(a: Array, b: Array) -> Array:
    assert (b != 0).all(), "irem by 0: use k.checked_divisor"
    if a.dtype.kind == "i":
        assert not ((b == -1) & (a == np.iinfo(a.dtype).min)).any(), "irem overflows"
    return np.asarray(np.fmod(a, b))


def _floor_divided(fn: Any) -> Callable[[Array, Array], Array]:
    def apply(a: Array, b: Array) -> Array:
        assert (b > 0).all(), "floordiv and mod need a divisor > 0"
        return np.asarray(fn(a, b))

    return apply


def _shifted(fn: Any) -> Callable[[Array, Array], Array]:
    def apply(a: Array, b: Array) -> Array:
        assert ((b >= 0) & (b < 8 * a.dtype.itemsize)).all(), "shift by more than the width"
        return np.asarray(fn(a, b))

    return apply


INTEGER_ONLY: dict[str, Any] = {
    "idiv": _truncated,
    "irem": _remainder,
    "floordiv": _floor_divided(np.floor_divide),
    "mod": _floor_divided(np.mod),
    "shl": _shifted(np.left_shift),
    "shr": _shifted(np.right_shift),
}
NUMERIC: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
}
LOGIC: dict[str, Any] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}


@dataclass
class _Evaluator:
    """Evaluates expressions over a grid of loop indices: a value is an array with one axis for each loop."""

    arrays: Mapping[Value, Array]
    extents: Mapping[str, int]
    acc: Array | None = None

    def over(self, e: Expr, shape: Sequence[int], variables: Sequence[Var]) -> Array:
        """The expression at every point of a box; `variables` are its loop indices."""
        rank = len(shape)
        env = {v: _axis(n, d, rank) for d, (v, n) in enumerate(zip(variables, shape, strict=True))}
        if 0 in shape:
            return np.empty(shape, e.dtype.numpy)
        return np.array(np.broadcast_to(self.value(e, env, rank, {}), shape))

    def value(self, e: Expr, env: Env, rank: int, memo: dict[Expr, Array]) -> Array:
        if e not in memo:
            result = np.asarray(self._value(e, env, rank, memo))
            assert result.dtype == e.dtype.numpy, f"{e}: declared {e.dtype}, computed {result.dtype}"
            assert result.ndim == rank
            memo[e] = result
        return memo[e]

    def _value(self, e: Expr, env: Env, rank: int, memo: dict[Expr, Array]) -> Any:
        def sub(x: Expr) -> Array:
            return self.value(x, env, rank, memo)

        match e:
            case Const(value=value, dtype=dtype):
                return np.full((1,) * rank, value, dtype.numpy)
            case Var():
                assert e in env, f"{e.name} is not bound here"
                return env[e]
            case SizeOf(size=size):
                return np.full((1,) * rank, evaluate(size, self.extents), np.int64)
            case Acc():
                assert self.acc is not None, "Acc outside of an epilogue"
                return self.acc
            case Load():
                return self._load(e, [sub(i) for i in e.indices], None if e.where is None else sub(e.where), rank)
            case Apply(fn=fn, args=args, dtype=dtype):
                return _apply(fn, [sub(a) for a in args], dtype)
            case Select(cond=cond, a=a, b=b):
                assert cond.dtype.kind == "b", f"select by {cond.dtype}"
                assert a.dtype is b.dtype, f"select of {a.dtype}, {b.dtype}"
                return np.where(sub(cond), sub(a), sub(b))
            case Cast(value=x, dtype=dtype):
                return cast(sub(x), dtype)
            case Check(ok=ok, value=x, kind=kind, shown=shown):
                good = sub(ok)
                if not good.all():
                    bad = np.broadcast_to(sub(shown), np.broadcast_shapes(good.shape, sub(shown).shape))
                    first = bad[np.broadcast_to(~good, bad.shape)][0]
                    raise ExecutionError(f"{kind}: {first}")
                return sub(x)
            case Reduce():
                return self._reduce(e, env, rank)
        raise AssertionError(f"unknown expression {e}")

    def _load(self, e: Load, indices: list[Array], where: Array | None, rank: int) -> Array:
        source = self.arrays[e.source]
        assert source.dtype == e.dtype.numpy, f"{e.source!r} holds {source.dtype}, loaded as {e.dtype}"
        assert len(indices) == source.ndim
        shape = np.broadcast_shapes(*(i.shape for i in indices), *(() if where is None else (where.shape,)))
        inside: Any = True if where is None else where
        for axis, (i, n) in enumerate(zip(indices, source.shape, strict=True)):
            assert i.dtype == np.int64, f"index of axis {axis} is {i.dtype}"
            wrong = inside & ((i < 0) | (i >= n))
            assert not np.any(wrong), f"load of {e.source!r} out of bounds on axis {axis} (size {n})"
        if where is None:
            return np.asarray(source[tuple(indices)]) if indices else source.reshape((1,) * rank)
        if source.size == 0 or not where.any():
            return np.zeros(shape, source.dtype)
        safe = tuple(np.where(where, i, 0) for i in indices)
        return np.where(where, source[safe], np.zeros((), source.dtype))

    def _reduce(self, e: Reduce, env: Env, rank: int) -> Array:
        extents = [evaluate(n, self.extents) for n in e.extents]
        inner = rank + len(extents)
        axes = tuple(range(rank, inner))
        if 0 in extents:
            return _empty_reduction(e, rank)
        wider: Env = {v: a.reshape(a.shape + (1,) * len(extents)) for v, a in env.items()}
        for axis, v, n in zip(axes, e.vars, extents, strict=True):
            assert v not in wider, f"{v.name} is bound twice"
            wider[v] = _axis(n, axis, inner)
        body = self.value(e.body, wider, inner, {})
        body = np.broadcast_to(body, (*body.shape[:rank], *extents))
        if e.kind in ("argmax", "argmin"):
            return _arg(e, body)
        fn: Any = {
            "add": np.add,
            "mul": np.multiply,
            "max": np.maximum,
            "min": np.minimum,
            "and": np.logical_and,
            "or": np.logical_or,
        }[e.kind]
        _check_arithmetic(e.kind, [body])
        extra = {"dtype": body.dtype} if e.kind in ("add", "mul") else {}
        return np.asarray(fn.reduce(body, axis=axes, **extra))


def _axis(n: int, axis: int, rank: int) -> Array:
    return np.arange(n, dtype=np.int64).reshape([n if d == axis else 1 for d in range(rank)])


def _check_arithmetic(fn: str, args: Sequence[Array]) -> None:
    for a in args:
        narrow = dtype_of(a.dtype).is_float and dtype_of(a.dtype).bits < 32
        assert not narrow, f"{fn} on {a.dtype}: use k.widen before arithmetic"


def _apply(fn: str, args: list[Array], dtype: DType) -> Any:
    if fn == "bitcast":
        return np.ascontiguousarray(args[0]).view(dtype.numpy)
    assert len({a.dtype for a in args}) == 1, f"{fn} of {', '.join(str(a.dtype) for a in args)}"
    _check_arithmetic(fn, args)
    kind = args[0].dtype.kind
    if fn in COMPARISONS:
        return COMPARISONS[fn](*args)
    if fn in FLOAT_ONLY:
        assert kind == "f", f"{fn} of {args[0].dtype}"
        return FLOAT_ONLY[fn](*args)
    if fn in INTEGER_ONLY:
        assert kind in "iu", f"{fn} of {args[0].dtype}"
        return INTEGER_ONLY[fn](*args)
    if fn in NUMERIC:
        assert kind in "fiu", f"{fn} of {args[0].dtype}"
        return NUMERIC[fn](*args)
    assert fn in LOGIC, f"unknown scalar function {fn}"
    assert kind in "iub", f"{fn} of {args[0].dtype}"
    return LOGIC[fn](*args)


def _empty_reduction(e: Reduce, rank: int) -> Array:
    assert not e.kind.startswith("arg"), f"{e.kind} over no elements"
    kind, dtype = e.dtype.kind, e.dtype.numpy
    if e.kind in ("max", "min"):
        lowest: Any = -np.inf if kind == "f" else np.iinfo(dtype).min
        highest: Any = np.inf if kind == "f" else np.iinfo(dtype).max
        return np.full((1,) * rank, lowest if e.kind == "max" else highest, dtype)
    return np.full((1,) * rank, {"add": 0, "or": 0, "mul": 1, "and": 1}[e.kind], dtype)


def _arg(e: Reduce, body: Array) -> Array:
    _check_arithmetic(e.kind, [body])
    assert len(e.vars) == 1
    fn = np.argmax if e.kind == "argmax" else np.argmin
    if e.last:
        return np.asarray(body.shape[-1] - 1 - fn(body[..., ::-1], axis=-1), np.int64)
    return np.asarray(fn(body, axis=-1), np.int64)


def _sizes(shape: Sequence[Size], extents: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(evaluate(s, extents) for s in shape)


def _anchor_result(anchor: Anchor, out: tuple[int, ...], dtype: DType, run: _Evaluator) -> Array:
    """What `Acc` stands for, computed from the fields of the anchor alone."""

    def over(e: Expr, shape: Sequence[Size]) -> Array:
        made = run.over(e, _sizes(shape, run.extents), out_vars(len(shape)))
        return made.astype(accumulator(dtype_of(made.dtype)).numpy)

    match anchor:
        case Contract(k=depth):
            *batch, row, column = out_vars(len(out))
            n = evaluate(depth, run.extents)
            assert out[-2:] == _sizes((anchor.m, anchor.n), run.extents)
            a = run.over(anchor.a, (*out[:-1], n), (*batch, row, Var("k"))).astype(dtype.numpy)
            b = run.over(anchor.b, (*out[:-2], n, out[-1]), (*batch, Var("k"), column)).astype(dtype.numpy)
            if anchor.zero is not None:
                a = a - over(anchor.zero, ()).astype(dtype.numpy)
            return np.asarray(np.matmul(a, b))
        case Conv():
            x, w = over(anchor.x, anchor.x_shape), over(anchor.w, anchor.w_shape)
            if dtype.is_integer:  # of narrower operands
                x, w = x.astype(dtype.numpy), w.astype(dtype.numpy)
            if anchor.zero is not None:
                x = x - over(anchor.zero, ()).astype(dtype.numpy)
            return _conv(anchor, x, w, out, run.extents)
        case Attention():
            q, k, v = over(anchor.q, anchor.q_shape), over(anchor.k, anchor.k_shape), over(anchor.v, anchor.v_shape)
            keys = np.full(len(q), k.shape[2])
            if anchor.count is not None:
                keys = over(anchor.count, anchor.q_shape[:1])

            def score(products: Array) -> Array:
                if anchor.score is None:
                    return products
                run.acc = products
                return over(anchor.score, (*anchor.q_shape[:3], anchor.k_shape[2]))

            return _attention(anchor, q, k, v, score, keys)


def _conv(anchor: Conv, x: Array, w: Array, out: tuple[int, ...], extents: Mapping[str, int]) -> Array:
    result = np.zeros(out, x.dtype)
    pads = _sizes(anchor.pads, extents)
    per_group, outputs = w.shape[1], w.shape[0] // anchor.groups
    steps = list(zip(anchor.strides, anchor.dilations, pads[: len(out) - 2], strict=True))
    for o in range(w.shape[0]):
        channels = slice(o // outputs * per_group, (o // outputs + 1) * per_group)
        for place, tap in product(np.ndindex(out[2:]), np.ndindex(w.shape[2:])):
            at = tuple(i * s + t * d - p for i, t, (s, d, p) in zip(place, tap, steps, strict=True))
            if all(0 <= i < n for i, n in zip(at, x.shape[2:], strict=True)):
                result[(slice(None), o, *place)] += x[(slice(None), channels, *at)] @ w[(o, slice(None), *tap)]
    return result


def _attention(
    anchor: Attention, q: Array, k: Array, v: Array, score: Callable[[Array], Array], counts: Array
) -> Array:
    heads, rows = q.shape[1:3]
    source = np.arange(heads) * k.shape[1] // heads
    result = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    every = score(np.asarray(anchor.scale, q.dtype) * np.einsum("bhid,bhjd->bhij", q, k[:, source]))
    for b, keys in enumerate(counts.tolist()):
        scores = every[b, :, :, :keys]
        if anchor.causal:
            seen = np.arange(keys) <= np.arange(rows)[:, None] + keys - rows
            scores = np.where(seen, scores, -np.inf).astype(q.dtype)
        peak = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        e = np.exp(scores - peak)
        weights = e / e.sum(axis=-1, keepdims=True)
        if anchor.empty_row == "mended":
            weights = np.where(np.isnan(weights), 0, weights)
        made = np.einsum("hij,hje->hie", weights, v[b, source, :keys])
        result[b] = np.where(peak == -np.inf, 0, made) if anchor.empty_row == "zero" else made
    return result


def _assemble(pieces: Sequence[Piece], t: TensorType, run: _Evaluator, acc: Array | None) -> Array:
    out = _sizes(t.shape, run.extents)
    result, covered = np.zeros(out, t.dtype.numpy), np.zeros(out, np.int64)
    run.acc = acc
    for piece in pieces:
        shape, offset = _sizes(piece.extents, run.extents), _sizes(piece.offset, run.extents)
        assert all(p >= 0 and p + n <= size for p, n, size in zip(offset, shape, out, strict=True))
        assert piece.expr.dtype is t.dtype, f"a piece gives {piece.expr.dtype} for {t}"
        box = tuple(slice(p, p + n) for p, n in zip(offset, shape, strict=True))
        result[box] = run.over(piece.expr, shape, out_vars(len(out)))
        covered[box] += 1
    assert (covered == 1).all(), "the pieces do not cover the output exactly once"
    return result


def interpret(
    node: Node, arrays: Sequence[Array], extents: Mapping[str, int] | None = None, *, lowered: Lowered | None = None
) -> tuple[Array, ...]:
    """The outputs of one node from its inputs' arrays: its `lower` evaluated, or else its `decompose`, or `reference`.

    Where an anchor comes with a generic expression, both are computed and must agree. `extents`: the symbols' values.
    """
    extents = extents or {}
    lowered = lowered or lower_node(node)
    if lowered is None:
        assert isinstance(node.op, Op)
        if node.op.decompose is not None:
            return interpret_decomposed(node, arrays, extents)
        found = node.op.at(extents).reference(*arrays)
        return tuple(found) if isinstance(found, tuple) else (np.asarray(found),)
    run = _Evaluator(dict(zip(node.inputs, arrays, strict=True)), extents)
    with np.errstate(all="ignore"):
        if lowered.anchor is None:
            made = zip(lowered.outputs, node.outputs, strict=True)
            return tuple(_assemble(pieces, v.type, run, None) for pieces, v in made)
        ((pieces,), (out,)) = lowered.outputs, node.outputs
        acc = _anchor_result(lowered.anchor, _sizes(out.shape, extents), accumulator(out.dtype), run)
        result = _assemble(pieces, out.type, run, acc)
        if lowered.generic is not None:
            generic = run.over(lowered.generic, result.shape, out_vars(result.ndim))
            _assert_close(result, generic, "anchor against its generic expression", None)
        return (result,)


def interpret_graph(graph: Graph, arrays: Sequence[Array], extents: Mapping[str, int] | None = None) -> list[Array]:
    """The outputs of a graph of plain nodes from the arrays of its inputs, node by node."""
    known: dict[Value, Array] = dict(zip(graph.inputs, arrays, strict=True))
    known |= {v: v.data for v in (*graph.constants, *graph.params) if v.data is not None}
    for node in graph.nodes:
        known |= zip(node.outputs, interpret(node, [known[v] for v in node.inputs], extents), strict=True)
    return [known[o.value] for o in graph.outputs]


def interpret_decomposed(
    node: Node, arrays: Sequence[Array], extents: Mapping[str, int] | None = None
) -> tuple[Array, ...]:
    """The outputs of one node by way of its `decompose`, whose results must have the types that `infer` promised."""
    assert isinstance(node.op, Op)
    assert node.op.decompose is not None
    graph = Graph("decomposed")
    inputs = [graph.input(f"x{i}", v.shape, v.dtype) for i, v in enumerate(node.inputs)]
    results = node.op.decompose(graph, *inputs)
    for i, value in enumerate(results if isinstance(results, tuple) else (results,)):
        assert value.type == node.outputs[i].type, f"decomposes to {value.type}, expected {node.outputs[i].type}"
        graph.output(value, f"y{i}")
    return tuple(interpret_graph(graph, arrays, extents))


def make_node(op: Op, *shapes_and_dtypes: tuple[Shape, Any]) -> Node:
    """A node of a fresh graph whose inputs have these (shape, dtype)s."""
    graph = Graph(op.op_name)
    values = [graph.input(f"x{i}", shape, dtype) for i, (shape, dtype) in enumerate(shapes_and_dtypes)]
    graph.add(op, *values)
    return graph.nodes[0]


def check_op(
    op: Op,
    *arrays: Array,
    shapes: Sequence[Shape] | None = None,
    extents: Mapping[str, int] | None = None,
    rtol: float | None = None,
) -> tuple[Array, ...]:
    """Checks `infer`, `lower` and `decompose` of an op against its `reference` on these arrays; gives the reference's.

    `shapes` declares the inputs with symbolic sizes whose values are `extents`; without it they are static.
    """
    extents = extents or {}
    declared = shapes if shapes is not None else [a.shape for a in arrays]
    node = make_node(op, *((tuple(s), a.dtype) for s, a in zip(declared, arrays, strict=True)))
    with np.errstate(all="ignore"):
        found = op.at(extents).reference(*arrays)
    expected = tuple(found) if isinstance(found, tuple) else (found,)
    assert len(expected) == len(node.outputs)
    for value, array in zip(node.outputs, expected, strict=True):
        assert dtype_of(array.dtype) is value.dtype, f"reference gives {array.dtype}, infer {value.type}"
        assert np.shape(array) == _sizes(value.shape, extents), f"reference gives {array.shape}, infer {value.type}"
    if op.lower is not None:
        for got, want in zip(interpret(node, arrays, extents), expected, strict=True):
            _assert_close(got, np.asarray(want), f"{op.op_name}: lower against reference", rtol)
    if op.decompose is not None:
        for got, want in zip(interpret_decomposed(node, arrays, extents), expected, strict=True):
            _assert_close(got, np.asarray(want), f"{op.op_name}: decompose against reference", rtol)
    return tuple(np.asarray(a) for a in expected)


TOLERANCES = {"f64": 1e-12, "f32": 2e-5, "f16": 4e-3, "bf16": 3e-2, "f8e4m3": 0.2, "f8e5m2": 0.4, "f4e2m1": 0.8}


def _assert_close(got: Array, want: Array, what: str, rtol: float | None) -> None:
    dtype = dtype_of(want.dtype)
    assert dtype_of(got.dtype) is dtype, f"{what}: {got.dtype} and {want.dtype}"
    if dtype.is_float:
        tolerance = TOLERANCES[dtype.name] if rtol is None else rtol
        a, b = got.astype(np.float64), want.astype(np.float64)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=what)
    else:
        np.testing.assert_array_equal(got, want, err_msg=what)
