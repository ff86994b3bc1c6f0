"""Attention: reference against an f64 formula and ONNX; the anchor and the decomposition against the reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from rlx.errors import DTypeError, ExecutionError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ir.shape import Dim
from rlx.ops.attention import Attention
from rlx.testing.interpret import check_op, make_node

RNG = np.random.default_rng(7)


def operands(
    batch: int = 2, heads: int = 4, key_heads: int = 4, rows: int = 3, keys: int = 5, depth: int = 7, out: int = 6,
    dtype: Any = np.float32,
) -> list[np.ndarray]:  # fmt: skip
    shapes = [(batch, heads, rows, depth), (batch, key_heads, keys, depth), (batch, key_heads, keys, out)]
    return [RNG.standard_normal(s).astype(dtype) for s in shapes]


def by_loops(q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray | None, scale: float, causal: bool) -> Any:
    """One query at a time, in f64."""
    batch, heads, rows, _ = q.shape
    key_heads, keys = k.shape[1:3]
    y = np.zeros((batch, heads, rows, v.shape[3]))
    for b, h, i in np.ndindex(batch, heads, rows):
        seen = range(min(keys, max(0, i + keys - rows + 1))) if causal else range(keys)
        own = h * key_heads // heads
        scores = [scale * float(q[b, h, i].astype(float) @ k[b, own, j]) for j in seen]
        if bias is not None:
            wide = np.broadcast_to(bias, (batch, heads, rows, keys))
            scores = [s + float(wide[b, h, i, j]) for s, j in zip(scores, seen, strict=True)]
        if not scores or max(scores) == -np.inf:
            y[b, h, i] = np.nan
            continue
        weights = np.exp(np.array(scores) - max(scores))
        y[b, h, i] = weights / weights.sum() @ v[b, own, : len(scores)].astype(float)
    return y


@pytest.mark.parametrize("heads, key_heads", [(4, 4), (4, 2), (6, 1), (1, 1)])
@pytest.mark.parametrize("rows, keys", [(3, 5), (1, 7), (5, 5), (5, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(heads: int, key_heads: int, rows: int, keys: int, causal: bool) -> None:
    """Grouped heads, decode and prefill shapes, and more queries than keys (the first see nothing)."""
    q, k, v = operands(heads=heads, key_heads=key_heads, rows=rows, keys=keys)
    (y,) = check_op(Attention(0.3, causal), q, k, v)
    np.testing.assert_allclose(y, by_loops(q, k, v, None, 0.3, causal), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (5,), (3, 1), (1, 1, 3, 5), (2, 4, 1, 5), (2, 1, 3, 5)])
def test_bias_broadcasts(shape: tuple[int, ...]) -> None:
    q, k, v = operands()
    bias = RNG.standard_normal(shape).astype(np.float32)
    (y,) = check_op(Attention(), q, k, v, bias)
    np.testing.assert_allclose(y, by_loops(q, k, v, bias, 7**-0.5, False), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_masked_rows(causal: bool) -> None:
    """A row of -inf gives NaN or, on request, zeros; other rows are not touched by it."""
    q, k, v = operands()
    bias = np.zeros((3, 5), np.float32)
    bias[1] = -np.inf
    bias[2, 0] = -np.inf
    (nan,) = check_op(Attention(causal=causal), q, k, v, bias)
    (zero,) = check_op(Attention(causal=causal, empty_row="zero"), q, k, v, bias)
    assert np.isnan(nan[:, :, 1]).all()
    assert (zero[:, :, 1] == 0).all()
    np.testing.assert_array_equal(np.delete(nan, 1, 2), np.delete(zero, 1, 2))


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_attention_types(dtype: Any) -> None:
    """16-bit floats compute in f32; the bias may be of another float type."""
    q, k, v = operands(key_heads=2, dtype=dtype)
    check_op(Attention(causal=True), q, k, v, RNG.standard_normal((3, 5)).astype(np.float32))


def test_attention_against_onnx() -> None:
    """The causal mask of ONNX starts at the first key; it is the same where there are as many queries as keys."""
    q, k, v = operands(key_heads=2, rows=5, keys=5)
    bias = RNG.standard_normal((5, 5)).astype(np.float32)
    names = ["q", "k", "v", "m"]
    arrays = dict(zip(names, (q, k, v, bias), strict=True))
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in arrays.items()]
    node = helper.make_node("Attention", names, ["y"], is_causal=1)
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", onnx.defs.onnx_opset_version())])
    expected = ReferenceEvaluator(model).run(None, arrays)[0]
    (y,) = check_op(Attention(causal=True), q, k, v, bias)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows, keys", [(0, 4), (0, 0), (3, 0)])
@pytest.mark.parametrize("empty_row", ["nan", "zero", "mended"])
def test_no_queries_or_no_keys(rows: int, keys: int, empty_row: str) -> None:
    """Without keys the sums are empty."""
    q, k, v = operands(rows=rows, keys=keys)
    (y,) = check_op(Attention(empty_row=empty_row), q, k, v)
    assert (y == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_symbolic_attention(causal: bool) -> None:
    b, n, m = Dim("b", 1, 4), Dim("n", 1, 16), Dim("m", 1, 16)
    shapes = [(b, 4, n, 7), (b, 2, m, 7), (b, 2, m, 6), (b, 1, n, m)]
    bias = RNG.standard_normal((2, 1, 3, 5)).astype(np.float32)
    arrays = [*operands(key_heads=2), bias]
    check_op(Attention(causal=causal), *arrays, shapes=shapes, extents={"b": 2, "n": 3, "m": 5})


def test_attention_errors() -> None:
    def node(op: Attention, q: Any, k: Any, v: Any, *bias: Any, dtype: str = "f32") -> None:
        make_node(op, *((s, dtype) for s in (q, k, v, *bias)))

    good = ((2, 4, 3, 7), (2, 2, 5, 7), (2, 2, 5, 6))
    with pytest.raises(DTypeError, match="attention"):
        node(Attention(), *good, dtype="i32")
    with pytest.raises(ShapeError, match="rank 4"):
        node(Attention(), (2, 3, 7), (2, 5, 7), (2, 5, 6))
    with pytest.raises(ShapeError, match="no multiple"):
        node(Attention(), (2, 3, 3, 7), *good[1:])
    with pytest.raises(ShapeError, match="depth"):
        node(Attention(), (2, 4, 3, 8), *good[1:])
    with pytest.raises(ShapeError, match="keys"):
        node(Attention(), *good[:2], (2, 2, 4, 6))
    with pytest.raises(ShapeError, match="bias"):
        node(Attention(), *good, (3, 3, 5))
    with pytest.raises(OptionError, match="empty_row"):
        node(Attention(empty_row="one"), *good)
    d = Dim("d", 1, 8)
    with pytest.raises(ShapeError, match="scale"):
        node(Attention(), (2, 4, 3, d), (2, 2, 5, d), (2, 2, 5, 6))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [4, 0, np.array([5, 2], np.int32)], ids=str)
def test_the_count_of_keys_stands_for_their_number(count: Any, causal: bool) -> None:
    """Reference, anchor and decomposition; NaN beyond the count is not computed with."""
    q, k, v = operands()
    bias = RNG.standard_normal((3, 5)).astype(np.float32)
    counts = np.broadcast_to(count, 2)
    for b, n in enumerate(counts):
        k[b, :, n:], v[b, :, n:] = np.nan, np.nan
    op = Attention(0.3, causal, "zero", True)
    (y,) = check_op(op, q, k, v, bias, np.asarray(count))
    for b, n in enumerate(counts):
        entry = slice(b, b + 1)
        if n:
            want = by_loops(q[entry], k[entry, :, :n], v[entry, :, :n], bias[:, :n], 0.3, causal)
            np.testing.assert_allclose(y[entry], np.nan_to_num(want), rtol=1e-4, atol=1e-5)
        else:
            assert not y[entry].any()


def test_counts_that_do_not_fit_are_refused() -> None:
    q, k, v = operands()
    op = Attention(counted=True)
    types = [TensorType(x.shape, DTYPES["f32"]) for x in (q, k, v)]
    for count, error in ((TensorType((2,), DTYPES["f32"]), DTypeError), (TensorType((3,), DTYPES["i64"]), ShapeError)):
        with pytest.raises(error, match="attention"):
            op.infer(*types, count)
    with pytest.raises(ShapeError, match="the count of keys"):
        op.infer(*types)
    for bad in (-1, 6):
        with pytest.raises(ExecutionError, match=r"not within 0\.\.5"):
            op.reference(q, k, v, np.asarray(bad))


def by_softmax(arrays: dict[str, np.ndarray], op: Attention, scale: float = 1.0) -> Any:
    """What an exporter writes: a product, the steps, a softmax, weights whose NaN are replaced, a product."""
    scores = arrays["q"] @ arrays["k"].swapaxes(2, 3) * np.float32(scale)
    rest = [a for n, a in arrays.items() if n not in "qkv"]
    with np.errstate(invalid="ignore", over="ignore"):
        for step in op.steps:
            if step == "where":
                mask, other = rest.pop(0), rest.pop(0)
                scores = np.where(mask, scores, other)
            else:
                scores = scores + rest.pop(0) if step == "add" else scores * rest.pop(0)
        e = np.exp((scores - scores.max(3, keepdims=True)).astype(np.float64))
        weights = e / e.sum(3, keepdims=True)
        if op.empty_row == "mended":
            weights = np.where(np.isnan(weights), 0, weights)
        return weights @ arrays["v"]


STEPS = [("add",), ("mul",), ("where",), ("add", "mul"), ("where", "add"), ("where", "where")]
STEPS += [("add", "where", "mul", "add")]


def step_operands(steps: tuple[str, ...], rows: int, keys: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Operands of several shapes, with rows that are all masked, and fills above and below the scores."""
    rng = np.random.default_rng(seed)
    shapes = [(2, 1, 1, keys), (rows, keys), (4, 1, 1), (2, 4, rows, keys), ()]
    found: dict[str, np.ndarray] = {}
    for number, step in enumerate(steps):
        shape = shapes[rng.integers(len(shapes))]
        if step == "where":
            found[f"m{number}"] = rng.random(shapes[rng.integers(len(shapes) - 1)]) < 0.6
            found[f"x{number}"] = np.float32(rng.choice([-np.inf, -1e4, np.finfo(np.float32).min, -3, 0.5])) + (
                np.zeros(shape, np.float32)
            )
        else:
            found[f"x{number}"] = rng.standard_normal(shape).astype(np.float32)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("empty_row", ["nan", "mended"])
@pytest.mark.parametrize("steps", STEPS, ids="-".join)
def test_steps(steps: tuple[str, ...], empty_row: str, seed: int) -> None:
    """Reference, anchor and decomposition, in order and as written."""
    q, k, v = operands()
    more = step_operands(steps, 3, 5, seed)
    op = Attention(0.3, steps=steps, empty_row=empty_row)
    (y,) = check_op(op, q, k, v, *more.values())
    want = by_softmax({"q": q, "k": k, "v": v, **more}, op, 0.3)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("empty_row", ["nan", "zero", "mended"])
def test_rows_with_nan_and_infinities(empty_row: str) -> None:
    """Only "mended" takes NaN scores for a row without keys; "zero" does not hide them."""
    q, k, v = operands(rows=5)
    q[0, 0, 1], q[0, 0, 2] = np.nan, np.inf
    bias = np.zeros((5, 5), np.float32)
    bias[3], bias[4, :3] = -np.inf, np.nan
    bias[4, 3:] = -np.inf
    (y,) = check_op(Attention(empty_row=empty_row), q, k, v, bias)
    nan = np.isnan(y).all(-1)
    assert (nan == np.isnan(y).any(-1)).all()
    want = np.zeros((2, 4, 5), bool)
    if empty_row != "mended":
        want[0, 0, 1:3], want[..., 3], want[..., 4] = True, empty_row == "nan", True
    np.testing.assert_array_equal(nan, want)
    if empty_row == "mended":
        v[1, 2, 0, 3] = np.inf
        (y,) = check_op(Attention(empty_row=empty_row), q, k, v, bias)
        assert np.isnan(y[1, 2, 3:, 3]).all(), "zero weights times inf"
        assert not np.isnan(np.delete(y, 3, 3)).any()


def test_steps_that_are_not_there_are_refused() -> None:
    q, k, v = operands()
    types = [TensorType(x.shape, DTYPES["f32"]) for x in (q, k, v)]
    number, mask = TensorType((), DTYPES["f32"]), TensorType((3, 5), DTYPES["bool"])
    with pytest.raises(OptionError, match="a step is one of add, mul, where"):
        Attention(steps=("div",)).infer(*types, number)
    for steps, given in (("add", ()), ("add", (number, number)), ("where", (mask,))):
        with pytest.raises(ShapeError, match=f"those of {steps}; got {3 + len(given)} inputs"):
            Attention(steps=(steps,)).infer(*types, *given)
    with pytest.raises(DTypeError, match="mask"):
        Attention(steps=("where",)).infer(*types, number, number)
    with pytest.raises(DTypeError, match="mul"):
        Attention(steps=("mul",)).infer(*types, mask)
    with pytest.raises(ShapeError, match="mask"):
        Attention(steps=("where",)).infer(*types, TensorType((4, 5), DTYPES["bool"]), number)


# ---- caches: narrow keys and values, windows, positions, rings, sinks, soft caps


def seen_by(i: int, keys: int, room: int, first: int, causal: bool, window: int | None, ring: bool) -> list[int]:
    """The places of the keys that query row i sees, position by position."""
    found = []
    for j in range(keys):
        here = j >= keys - room if ring else j < room
        if here and (not causal or j <= first + i) and (window is None or j > first + i - window):
            found.append(j % room)
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_positions_rings_and_sinks(causal: bool, window: int | None, ring: bool, sinks: bool) -> None:
    """Each row against a softmax over the keys that its rule names, one by one."""
    q, k, v = operands(heads=4, key_heads=2, rows=3, keys=5)
    counts = np.array([4, 13 if ring else 5], np.int32)
    for firsts in (None, np.array([2, 9], np.int64), np.array(1, np.int64)):
        more = [RNG.standard_normal(4).astype(np.float32)] * sinks
        more += [counts] if firsts is None else [firsts, counts]
        op = Attention(0.3, causal, "zero", True, (), window, sinks, firsts is not None, ring)
        (y,) = check_op(op, q, k, v, *more)
        for b, h, i in np.ndindex(2, 4, 3):
            first = int(counts[b]) - 3 if firsts is None else int(np.broadcast_to(firsts, 2)[b])
            places = seen_by(i, int(counts[b]), 5, first, causal, window, ring)
            scores = 0.3 * (k[b, h // 2, places].astype(float) @ q[b, h, i].astype(float))
            weights = np.exp(scores)
            total = weights.sum() + (np.exp(float(more[0][h])) if sinks else 0.0)
            want = weights @ v[b, h // 2, places].astype(float) / total if places else np.zeros(6)
            np.testing.assert_allclose(y[b, h, i], want, rtol=1e-4, atol=1e-5)


def test_a_soft_cap_is_a_step_among_others() -> None:
    q, k, v = operands()
    cap, bias = np.float32(0.7), RNG.standard_normal((3, 5)).astype(np.float32)
    (y,) = check_op(Attention(steps=("softcap", "add")), q, k, v, cap, bias)
    scores = 7**-0.5 * np.einsum("bhid,bhjd->bhij", q.astype(float), k.astype(float))
    scores = 0.7 * np.tanh(scores / 0.7) + bias
    weights = np.exp(scores) / np.exp(scores).sum(3, keepdims=True)
    np.testing.assert_allclose(y, weights @ v.astype(float), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("query", [np.float32, np.float16, np.float64])
def test_keys_and_values_may_be_narrower_than_queries(dtype: Any, query: Any) -> None:
    """The result is that of the same numbers as wide as the queries."""
    q, k, v = operands(key_heads=2, dtype=dtype)
    q = q.astype(query)
    (y,) = check_op(Attention(causal=True), q, k, v)
    wide = np.float64 if query is np.float64 else np.float32
    (same,) = check_op(Attention(causal=True), q.astype(wide), k.astype(wide), v.astype(wide))
    assert y.dtype == query
    np.testing.assert_array_equal(y, same.astype(query))


def test_errors_of_caches() -> None:
    def node(op: Attention, *more: tuple[Any, str], q: str = "f32", k: str = "f32") -> None:
        shapes: list[tuple[Any, str]] = [((2, 4, 3, 7), q), ((2, 2, 5, 7), k), ((2, 2, 5, 6), k)]
        make_node(op, *shapes, *more)

    with pytest.raises(DTypeError, match="wider than q"):
        node(Attention(), k="f64")
    with pytest.raises(OptionError, match="window"):
        node(Attention(window=0))
    with pytest.raises(OptionError, match="counted=True"):
        node(Attention(ring=True))
    with pytest.raises(ShapeError, match="one for each head"):
        node(Attention(sinks=True), ((4, 1), "f32"))
    with pytest.raises(ShapeError, match="the sinks, the position"):
        node(Attention(sinks=True, placed=True), ((4,), "f32"))
    with pytest.raises(ShapeError, match="position of the first row"):
        node(Attention(placed=True), ((3,), "i64"))
    with pytest.raises(ShapeError, match="does not broadcast"):
        node(Attention(ring=True, counted=True, steps=("add",)), ((3, 5), "f32"), ((), "i64"))
