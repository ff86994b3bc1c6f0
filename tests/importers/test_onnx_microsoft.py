"""Ops of com.microsoft against onnxruntime, which defines them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from targets import pretend

import rlx
from rlx.backends.reference import run_graph
from rlx.importers.onnx import load
from rlx.ir.verify import verify

Arrays = Sequence[np.ndarray | None]
RNG = np.random.default_rng(0)


def f32(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


def u8(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape).astype(np.uint8)


def i32(*shape: int) -> np.ndarray:
    return RNG.integers(-900, 900, shape).astype(np.int32)


def i8(*shape: int) -> np.ndarray:
    """Within 7 bits: onnxruntime saturates sums of two products of wider ones on some CPUs."""
    return RNG.integers(-63, 64, shape).astype(np.int8)


def ones(row: Sequence[Sequence[int]]) -> np.ndarray:
    return np.array(row, np.int32)


@dataclass
class Case:
    """One node: inputs (those numbered `known` as initializers), which outputs, attributes."""

    op: str
    inputs: Arrays
    outputs: Sequence[int] = (0,)
    known: Sequence[int] = ()
    tolerance: float = 2e-5
    domain: str = "com.microsoft"
    attributes: dict[str, Any] = field(default_factory=dict)

    def model(self) -> tuple[bytes, dict[str, np.ndarray]]:
        names = ["" if a is None else f"x{i}" for i, a in enumerate(self.inputs)]
        given = {n: np.asarray(a) for n, a in zip(names, self.inputs, strict=True) if a is not None}
        inits = [numpy_helper.from_array(given[f"x{i}"], f"x{i}") for i in self.known if f"x{i}" in given]
        feed = {n: a for n, a in given.items() if int(n[1:]) not in self.known}
        infos = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feed.items()
        ]
        made = [f"y{i}" if i in self.outputs else "" for i in range(max(self.outputs) + 1)]
        node = helper.make_node(self.op, names, made, domain=self.domain, **self.attributes)
        outputs = [helper.make_empty_tensor_value_info(n) for n in made if n]
        graph = helper.make_graph([node], "g", infos, outputs, inits)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        source: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
        return source, feed


def case(op: str, *inputs: np.ndarray | float | None, **attributes: Any) -> Case:
    options = {k: attributes.pop(k) for k in ("outputs", "known", "tolerance", "domain") if k in attributes}
    arrays = [a if a is None else np.asarray(a) for a in inputs]
    return Case(op, arrays, attributes=attributes, **options)


def experts(activation: str, *, rank: int = 2, fusion: int = 0, gated: bool = False, **attributes: Any) -> Case:
    """5 experts of 8 features and 6 inner ones."""
    inner = 12 if fusion else 6
    inputs = [f32(7, 8) if rank == 2 else f32(1, 7, 8), f32(7, 5), f32(5, inner, 8), f32(5, inner)]
    inputs += [f32(5, 8, 6), f32(5, 8), *([f32(5, 6, 8), f32(5, 6)] if gated else [])]
    return case("MoE", *inputs, k=2, activation_type=activation, swiglu_fusion=fusion, **attributes)


B, S, H, D = 2, 3, 2, 4
W = H * D
S1 = np.float32
IDS = RNG.integers(0, 9, (2, 5)).astype(np.int32)
MASK = ones([[1, 1, 0], [1, 1, 1]])


def bits4(n: int, k: int, block: int, zeros: np.ndarray | None = None, **attributes: Any) -> Case:
    blocks = -(-k // block)
    inputs = [f32(2, 3, k), u8(n, blocks, block // 2), f32(n * blocks), zeros]
    made = dict(N=n, K=k, bits=4, block_size=block, known=(1, 2, 3), tolerance=1e-4, **attributes)
    return case("MatMulNBits", *inputs, **made)


def lstm(direction: str) -> Case:
    d, hidden = 2 if direction == "bidirectional" else 1, 4
    scale, zero = np.full(d, 0.01, np.float32), np.zeros(d, np.int8)
    weights = i8(d, 6, 4 * hidden), i8(d, hidden, 4 * hidden), f32(d, 8 * hidden, scale=0.2)
    states = f32(d, 1, hidden, scale=0.3), f32(d, 1, hidden)
    inputs = [f32(5, 1, 6), *weights, None, *states, None, scale, zero, scale, zero]
    options = {"outputs": (0, 1, 2), "known": (1, 2, 3, 8, 9, 10, 11), "tolerance": 1e-4}
    return case("DynamicQuantizeLSTM", *inputs, hidden_size=hidden, direction=direction, **options)


def group_query(new: int, past: int, total: int, ends: Sequence[int], **attributes: Any) -> Case:
    """4 query heads of 16 share 2; `rotary` adds its tables, `packed` puts q, k and v into one input."""
    batch, depth = len(ends), 16
    q, k, v = f32(batch, new, 4 * depth), f32(batch, new, 2 * depth), f32(batch, new, 2 * depth)
    given: list[Any] = [np.concatenate([q, k, v], 2), None, None] if attributes.pop("packed", False) else [q, k, v]
    given += [
        f32(batch, 2, past, depth),
        f32(batch, 2, past, depth),
        np.array(ends, np.int32),
        np.array(total, np.int32),
    ]
    sink = attributes.pop("sink", None)
    if attributes.pop("rotary", False):
        angles = RNG.random((32, depth // 2)).astype(np.float32)
        given += [np.cos(angles), np.sin(angles)]
        attributes["do_rotary"] = 1
    if sink is not None:
        given += [None] * (11 - len(given)) + [sink]
    options = {"outputs": (0, 1, 2), "known": (6,)}
    return case("GroupQueryAttention", *given, num_heads=4, kv_num_heads=2, **options, **attributes)


QUANT = (S1(0.1), np.uint8(3))
CASES = {
    "fused_gemm": case("FusedGemm", f32(4, 3), f32(5, 3), f32(5), transB=1, activation="Relu", alpha=0.5, beta=2.0),
    "fused_gemm_leaky": case("FusedGemm", f32(4, 3), f32(3, 5), activation="LeakyRelu", activation_alpha=0.2),
    "fused_gemm_hard": case(
        "FusedGemm",
        f32(3, 4),
        f32(3, 5),
        f32(5),
        transA=1,
        activation="HardSigmoid",
        activation_alpha=0.3,
        activation_beta=0.4,
    ),
    "cdist": case("CDist", f32(4, 6), f32(3, 6), metric="euclidean"),
    "cdist squared": case("CDist", f32(4, 6).astype(np.float64), f32(3, 6).astype(np.float64), metric="sqeuclidean"),
    "fused_matmul_batch_behind": case("FusedMatMul", f32(4, 2, 3), f32(2, 3, 5), transBatchA=1, alpha=0.5),
    "fused_matmul_batches_behind": case(
        "FusedMatMul", f32(4, 2, 3), f32(5, 2, 3), transBatchA=1, transBatchB=1, transB=1
    ),
    "q_gemm": case(
        "QGemm", u8(3, 4), *QUANT, u8(5, 4), S1(0.2), np.uint8(9), i32(5), S1(40.0), np.uint8(5), transB=1, tolerance=1
    ),
    "q_gemm_columns": case(
        "QGemm",
        u8(4, 3),
        *QUANT,
        i8(4, 5),
        f32(5) ** 2,
        np.zeros(5, np.int8),
        None,
        S1(9.0),
        np.uint8(5),
        transA=1,
        tolerance=1,
    ),
    "q_gemm_to_float": case("QGemm", u8(3, 4), *QUANT, u8(4, 5), S1(0.2), np.uint8(9), i32(5), alpha=0.5),
    "fused_matmul": case("FusedMatMul", f32(2, 4, 3), f32(2, 4, 5), transA=1, alpha=0.5),
    "gelu": case("Gelu", f32(3, 4)),
    "fast_gelu": case("FastGelu", f32(3, 4), f32(4), tolerance=1e-4),
    "bias_gelu": case("BiasGelu", f32(3, 4), f32(4)),
    "quick_gelu": case("QuickGelu", f32(3, 4), alpha=1.5),
    "skip": case("SkipLayerNormalization", *[f32(2, 3, 8)] * 2, f32(8), f32(8), f32(8), outputs=(0, 3), epsilon=1e-5),
    "skip_simple": case("SkipSimplifiedLayerNormalization", *[f32(2, 3, 8)] * 2, f32(8), f32(8), outputs=(0, 3)),
    "simple": case("SimplifiedLayerNormalization", f32(2, 3, 8), f32(8), domain="", epsilon=1e-5),
    "embed": case(
        "EmbedLayerNormalization",
        *(IDS, IDS % 2, f32(10, 8), f32(16, 8), f32(2, 8), f32(8), f32(8)),
        ones([[1, 1, 1, 0, 0], [1] * 5]),
        outputs=(0, 1),
    ),
    "embed_plain": case(
        "EmbedLayerNormalization", IDS, None, f32(10, 8), f32(16, 8), None, f32(8), f32(8), outputs=(0, 1)
    ),
    "nbits": bits4(6, 40, 16),
    "nbits_zeros": bits4(6, 40, 16, u8(6 * 2)),
    "nbits_float_zeros": bits4(6, 40, 16, f32(18)),
    "dynamic": case("DynamicQuantizeMatMul", f32(3, 8), i8(8, 5), S1(0.02), np.int8(3), f32(5), known=(1, 2, 3, 4)),
    "dynamic_columns": case("DynamicQuantizeMatMul", f32(3, 8), u8(8, 5), abs(f32(5)), u8(5), known=(1, 2, 3)),
    "to_float": case("MatMulIntegerToFloat", u8(3, 8), i8(8, 5), S1(0.1), S1(0.2), np.uint8(7), np.int8(2), f32(5)),
    "q_add": case("QLinearAdd", u8(3, 4), *QUANT, u8(3, 4), S1(0.2), np.uint8(9), S1(0.3), np.uint8(5), tolerance=1),
    "q_mul": case("QLinearMul", u8(3, 4), *QUANT, u8(3, 4), S1(0.2), np.uint8(9), S1(5), np.uint8(5), tolerance=1),
    "q_sigmoid": case(
        "QLinearSigmoid", u8(3, 4), S1(0.05), np.uint8(120), S1(1 / 256), np.uint8(0), known=range(1, 5), tolerance=1
    ),
    "q_pool": case("QLinearGlobalAveragePool", u8(1, 3, 4, 4), *QUANT, *QUANT, known=range(1, 5), tolerance=1),
    "q_concat": case(
        "QLinearConcat", *QUANT, u8(2, 3), *QUANT, u8(2, 4), S1(0.2), np.uint8(9), axis=1, known=(0, 1, 3, 4, 6, 7)
    ),
    "q_leaky": case(
        "QLinearLeakyRelu",
        u8(3, 4),
        S1(0.05),
        np.uint8(120),
        S1(0.04),
        np.uint8(90),
        known=range(1, 5),
        alpha=0.2,
        tolerance=1,
    ),
    "q_average": case(
        "QLinearAveragePool",
        u8(1, 3, 5, 6),
        *QUANT,
        S1(0.11),
        np.uint8(9),
        known=range(1, 5),
        kernel_shape=[2, 3],
        strides=[2, 1],
        pads=[1, 0, 0, 1],
        tolerance=1,
    ),
    "q_softmax": case(
        "QLinearSoftmax", u8(3, 4), *QUANT, S1(1 / 256), np.uint8(0), known=range(1, 5), opset=13, axis=-1, tolerance=1
    ),
    "transpose_matmul": case("TransposeMatMul", f32(2, 4, 3), f32(2, 4, 5), transA=1, alpha=0.5),
    "quantize": case("QuantizeLinear", f32(3, 4), S1(0.1), np.uint8(3), domain="com.microsoft"),
    "dequantize": case("DequantizeLinear", u8(3, 4), S1(0.1), np.uint8(3), domain="com.microsoft"),
    "conv": case("FusedConv", f32(1, 3, 6, 6), f32(4, 3, 3, 3), f32(4), activation="Relu", known=(1, 2)),
    "lstm": lstm("forward"),
    "lstm_both": lstm("bidirectional"),
    "attention": case("Attention", f32(B, S, W), f32(W, 3 * W), f32(3 * W), MASK, num_heads=H, unidirectional=1),
    "attention_lengths": case("Attention", f32(B, S, W), f32(W, 3 * W), f32(3 * W), ones([2, 3]), num_heads=H),
    "attention_past": case(
        "Attention",
        *(f32(B, S, W), f32(W, 3 * W), f32(3 * W), None, f32(2, B, H, 5, D)),
        outputs=(0, 1),
        num_heads=H,
        unidirectional=1,
    ),
    "q_attention": case(
        "QAttention",
        *(u8(B, S, W), i8(W, 3 * W), f32(3 * W), S1(0.02), S1(0.02), MASK, np.uint8(7), np.int8(1)),
        num_heads=H,
        known=(1,),
        tolerance=1e-4,
    ),
    "heads": case("MultiHeadAttention", f32(B, S, W), f32(B, 5, W), f32(B, 5, W), f32(3 * W), num_heads=H),
    "heads_mask": case(
        "MultiHeadAttention",
        *(f32(B, S, W), f32(B, S, W), f32(B, S, W), None, MASK, f32(1, H, S, S)),
        num_heads=H,
    ),
    "heads_past": case(
        "MultiHeadAttention",
        *(*[f32(B, S, W)] * 3, None, None, None, f32(B, H, 4, D), f32(B, H, 4, D)),
        outputs=(0, 1, 2),
        num_heads=H,
    ),
    "group_prompt": group_query(5, 0, 5, [4, 4], rotary=True),
    "group_padded_prompt": group_query(5, 0, 5, [4, 1, 2], rotary=True),
    "group_decode": group_query(1, 6, 7, [6, 6], rotary=True, packed=True),
    "group_ragged": group_query(1, 6, 7, [4, 6]),
    "group_chunk": group_query(3, 6, 9, [8]),
    "group_window": group_query(1, 9, 10, [9, 9], local_window_size=3, softcap=2.0),
    "group_smooth": group_query(5, 0, 5, [4, 2], smooth_softmax=1),
    "group_sink": group_query(1, 6, 7, [6, 4], sink=np.array([0.5, -1, 3, 0], np.float32), rotary=True),
    "group_sink_prompt": group_query(4, 0, 4, [3, 3], sink=np.array([0.5, -1, 3, 0], np.float32), softcap=2.0),
    "group_buffer": group_query(1, 10, 7, [6, 6]),
    "experts": experts("relu"),
    "experts_silu": experts("silu", rank=3, normalize_routing_weights=1),
    "experts_gelu": experts("gelu", normalize_routing_weights=1, tolerance=1e-4),
    "experts_identity": experts("identity"),
    "experts_swiglu": experts("swiglu", fusion=1, normalize_routing_weights=1),
    "experts_swiglu_limits": experts(
        "swiglu", fusion=1, swiglu_limit=0.5, activation_alpha=1.7, activation_beta=1.0, rank=3
    ),
    "rotary": case("RotaryEmbedding", f32(2, 3, 16), RNG.integers(0, 8, (2, 3)), f32(8, 4), f32(8, 4)),
    "rotary_from": case("RotaryEmbedding", f32(2, 2, 3, 8), np.array([2]), f32(8, 4), f32(8, 4), interleaved=1),
}


@pytest.mark.parametrize("name", CASES)
def test_what_onnxruntime_gives(name: str) -> None:
    """Shapes, dtypes and values; integers within one quantum where the intermediate is f32."""
    source, feed = CASES[name].model()
    graph = load(source)
    verify(graph)
    peer = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, feed)
    for got, want in zip(run_graph(graph, feed).values(), peer, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        scale = 1 if want.dtype.kind in "iu" else max(1.0, float(np.abs(want).max()))
        assert float(np.abs(got.astype(np.float64) - want).max()) <= CASES[name].tolerance * scale


def test_ops_that_onnxruntime_lacks_on_processors() -> None:
    """By their definitions."""

    def result(op: str, *inputs: Any, **attributes: Any) -> np.ndarray:
        source, feed = case(op, *inputs, **attributes).model()
        return next(iter(run_graph(load(source), feed).values()))

    x, w, b = f32(1, 6, 5, 3), f32(4, 3, 3, 3), f32(4)
    plain = result("FusedConv", x.transpose(0, 3, 1, 2).copy(), w, b, pads=[1, 1, 1, 1], known=(1, 2))
    rows = result("NhwcConv", x, w.transpose(0, 2, 3, 1).copy(), b, pads=[1, 1, 1, 1], known=(1, 2))
    np.testing.assert_allclose(rows.transpose(0, 3, 1, 2), plain, rtol=1e-5, atol=1e-6)
    x, b = f32(2, 3, 4, 5), f32(2, 1, 4, 5)
    e = np.exp(x + b)
    made = result("BiasSoftmax", x, b, axis=3, is_inner_broadcast=0)
    np.testing.assert_allclose(made, e / e.sum(3, keepdims=True), rtol=1e-5)
    x, b = f32(2, 3, 8), f32(8)
    left, right = np.split(x + b, 2, axis=2)
    gelu = right * 0.5 * (1 + np.vectorize(math.erf)(right / math.sqrt(2)))
    np.testing.assert_allclose(result("BiasSplitGelu", x, b), left * gelu, rtol=1e-4, atol=1e-6)
    x = u8(3, 4, 5)
    scales = S1(0.1), np.uint8(3), S1(0.09), np.uint8(9)
    made = result("QLinearReduceMean", x, *scales, known=range(1, 5), axes=[1], keepdims=1)
    want = np.rint(((x.astype(np.float64) - 3) * 0.1).mean(1, keepdims=True) / 0.09) + 9
    assert np.abs(made.astype(np.float64) - want.clip(0, 255)).max() <= 1


def test_the_layouts_of_swiglu_are_one_function() -> None:
    """onnxruntime runs only the first of them on processors."""
    turns = experts("swiglu", fusion=1)
    x, logits, w, bias, *rest = [np.asarray(a) for a in turns.inputs if a is not None]
    gate, up, of_gate, of_up = w[:, ::2], w[:, 1::2], bias[:, ::2], bias[:, 1::2]
    halves = [x, logits, np.concatenate([gate, up], 1), np.concatenate([of_gate, of_up], 1), *rest]
    made = [
        case("MoE", *inputs, k=2, activation_type="swiglu", swiglu_fusion=fusion)
        for inputs, fusion in ((turns.inputs, 1), (halves, 2), ([x, logits, gate, of_gate, *rest, up, of_up], 0))
    ]
    results = [next(iter(run_graph(load(source), feed).values())) for source, feed in (c.model() for c in made)]
    assert all(np.allclose(result, results[0], rtol=1e-5, atol=1e-6) for result in results)


def rounded_lstm(
    x: np.ndarray, w: dict[str, np.ndarray], functions: Sequence[Callable[[np.ndarray], np.ndarray]]
) -> np.ndarray:
    """A DynamicQuantizeLSTM step by step as ONNX Runtime rounds it: all states [T, D, B, H]."""
    f32, hidden = np.float32, w["r"].shape[1]

    def quantised(a: np.ndarray) -> tuple[np.ndarray, np.float32]:
        low, high = min(f32(0), a.min()), max(f32(0), a.max())
        step = f32(1) if low == high else (high - low) / f32(255)
        zero = np.rint(np.clip(-low / step, 0, 255))
        return np.clip(np.rint(a / step) + zero, 0, 255) - zero, step

    def gates_of(a: np.ndarray, name: str, d: int) -> np.ndarray:
        q, step = quantised(a)
        weights = w[name][d].astype(np.float64) - w[f"{name}_zero"][d].astype(np.float64)
        return (q.astype(np.float64) @ weights).astype(f32) * (step * w[f"{name}_scale"][d])

    out = np.zeros((*x.shape[:2], w["r"].shape[0], hidden), f32).swapaxes(1, 2)
    for d in range(out.shape[1]):
        bias = w["bias"][d][: 4 * hidden] + w["bias"][d][4 * hidden :]
        inputs = gates_of(x.reshape(-1, x.shape[2]), "w", d).reshape(*x.shape[:2], -1)
        h = cell = np.zeros((x.shape[1], hidden), f32)
        for t in reversed(range(len(x))) if d else range(len(x)):
            i, o, f, c = np.split(inputs[t] + gates_of(h, "r", d) + bias, 4, axis=1)
            cell = functions[0](f) * cell + functions[0](i) * functions[1](c)
            h = functions[0](o) * functions[2](cell)
            out[t, d] = h
    return out


def quantised_lstm(rng: np.random.Generator, columns: bool, lengths: bool, **options: Any) -> tuple[bytes, Any]:
    """A bidirectional DynamicQuantizeLSTM of 70 units, and its weights; with `lengths` it has them and states."""
    size, hidden, d = 20, 70, 2
    shape = (d, 4 * hidden) if columns else (d,)
    sizes = {"w": size, "r": hidden}
    w = {name: rng.integers(-127, 128, (d, n, 4 * hidden)).astype(np.int8) for name, n in sizes.items()}
    w |= {f"{name}_scale": rng.uniform(1e-3, 3e-3, shape).astype(np.float32) for name in "wr"}
    w |= {
        f"{name}_zero": np.zeros(shape, np.int8) if columns else rng.integers(-9, 9, d).astype(np.int8) for name in "wr"
    }
    w["bias"] = rng.standard_normal((d, 8 * hidden)).astype(np.float32)
    more = ["lengths", "h", "c"] if lengths else ["", "", ""]
    names = ["x", "w", "r", "bias", *more, "", "w_scale", "w_zero", "r_scale", "r_zero"]
    outputs = ["y", "y_h", "y_c"] if lengths else ["y"]
    options |= {"hidden_size": hidden, "direction": "bidirectional"}
    node = helper.make_node("DynamicQuantizeLSTM", names, outputs, domain="com.microsoft", **options)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["t", "b", size])]
    if lengths:
        inputs.append(helper.make_tensor_value_info("lengths", TensorProto.INT32, ["b"]))
        inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, [d, "b", hidden]) for name in "hc"]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph([node], "g", inputs, made, [numpy_helper.from_array(a, name) for name, a in w.items()])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString(), w


EXACT = {  # functions that are the same in every implementation
    "activations": ["HardSigmoid", "Affine", "Affine"] * 2,
    "activation_alpha": [0.25, 1.0, 1.0] * 2,
    "activation_beta": [0.5, 0.0, 0.0] * 2,
}


def by_onnxruntime(content: bytes, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """With 8-bit products that don't saturate."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.x64quantprecision", "1")
    return list(onnxruntime.InferenceSession(content, options).run(None, feed))


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("usual", [False, True])
def test_a_quantised_lstm_rounds_where_onnxruntime_does(usual: bool, columns: bool) -> None:
    """Bit for bit: against ONNX Runtime with functions that are exact, and with rightly rounded sigmoid and tanh."""
    rng = np.random.default_rng(3)
    content, w = quantised_lstm(rng, columns, False, **({} if usual else EXACT))
    x = rng.standard_normal((9, 3, 20)).astype(np.float32)
    got = rlx.compile(load(content), device="cpu", threads=2).run({"x": x})[0]
    if usual:
        wide = [lambda v: 1 / (1 + np.exp(-v)), np.tanh, np.tanh]
        rounded = [lambda v, f=f: f(v.astype(np.float64)).astype(np.float32) for f in wide]
        want = rounded_lstm(x, w, rounded)
    else:
        (want,) = by_onnxruntime(content, {"x": x})
    assert np.isfinite(want).all()
    assert np.abs(want).max() > 0.1
    assert np.array_equal(got, want)


@pytest.mark.parametrize("lengths", [(9, 4, 6), (5, 0, 7), (3, 3, 8), (0, 0, 0)])
def test_sequences_of_a_quantised_lstm_end_as_in_onnxruntime(lengths: tuple[int, ...]) -> None:
    """Ranges are those of what is read; a sequence is read backward from its own end; one of no steps gives 0."""
    rng = np.random.default_rng(4)
    content, _ = quantised_lstm(rng, False, True, **EXACT)
    x = rng.standard_normal((9, 3, 20)).astype(np.float32)
    x[max(lengths) :] *= 50  # beyond every end
    states = {name: 3 * rng.standard_normal((2, 3, 70)).astype(np.float32) for name in "hc"}
    feed = {"x": x, "lengths": np.array(lengths, np.int32), **states}
    graph = load(content)
    want = by_onnxruntime(content, feed)
    for got in (rlx.compile(graph, device="cpu", threads=2).run(feed), list(run_graph(graph, feed).values())):
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.needs("avx2")
@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("precision", ["f32", "q8"])
def test_weights_of_four_bits_stay_so(precision: str, zeroed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels take 21 bytes for 32 numbers, with scale and zero point; results are those of the decoded weights."""
    pretend(monkeypatch, tiles=False, float_tiles=False)
    n, k = 48, 96
    source, feed = bits4(n, k, 32, u8(n * 2) if zeroed else None).model()
    graph = load(source)
    model = rlx.compile(graph, device="cpu", precision=precision, cache=False)
    assert f"matmul.{'q8' if precision == 'q8' else 'panels'}+u4_zero_scaled" in model.explain("kernels")
    zeros = n * 3 * (1 + zeroed)  # unpacked, of the file; and the constant of those without
    assert n * k * 21 // 32 <= model.needs.prepared <= n * k * 21 // 32 + zeros
    want = rlx.compile(graph, device="reference", precision=precision).run(feed)
    np.testing.assert_allclose(model.run(feed)[0], want[0], rtol=1e-4, atol=1e-4)
