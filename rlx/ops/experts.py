"""Mixtures of experts: products whose matrix is chosen row by row, and the layer that is made of them."""

from __future__ import annotations

from typing import Any, Literal, cast, get_args

import numpy as np

from rlx.boundary import bounded
from rlx.errors import CompileError, DTypeError, OptionError, ShapeError
from rlx.ir.casting import rounded_q8
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import min_size, numel, same, unify
from rlx.ops.base import (
    OPS,
    Op,
    Work,
    check_activations,
    check_kind,
    check_same_dtype,
    functional,
    register,
    tensor_bytes,
    widened,
)
from rlx.ops.contract import MatMul
from rlx.ops.index import Gather, check_indices, check_not_empty, wrapped_indices
from rlx.ops.layout import Squeeze, Transpose, Unsqueeze

__all__ = ["Activation", "GroupedMatMul", "combine", "moe", "route", "run_experts"]


@register
class GroupedMatMul(Op):
    """Each row times the matrix of its expert: out[i.., :] = x[i.., :] @ w[experts[i..]]. (jax.lax.ragged_dot)

    x [..., K] or [..., 1, K], w [E, K, N] (`transposed`: [E, N, K]), experts [...] of i32 or i64 -> [..., N]; f16 and
    bf16 accumulate in f32. A number of an expert may be negative, as an index; one outside stops the run with
    `ExecutionError`. `activations` "q8": as in `matmul`, of x.
    """

    op_name = "grouped_matmul"
    transposed: bool = False
    activations: str = ""

    def infer(self, x: TensorType, w: TensorType, experts: TensorType) -> TensorType:
        check_kind(self, x, "f")
        check_same_dtype(self, x, w)
        check_activations(self, self.activations, x, known=("q8",))
        check_indices(experts, self.op_name)
        if w.rank != 3:
            raise ShapeError(f"grouped_matmul: expected weights of rank 3, one matrix an expert, got {w}")
        if experts.rank == 0 or x.rank != experts.rank + 1:
            raise ShapeError(f"grouped_matmul: expected one row of x for each number in experts, got {x} and {experts}")
        check_not_empty(w.shape[0], numel(experts.shape), f"grouped_matmul: {w} has no expert to choose")
        depth, columns = w.shape[:0:-1] if self.transposed else w.shape[1:]
        unify(x.shape[-1], depth, f"grouped_matmul of {x} and {w}: the contracted axes")
        for d, (rows, count) in enumerate(zip(x.shape[:-1], experts.shape, strict=True)):
            if d < experts.rank - 1 or same(rows, 1) is not True:
                unify(rows, count, f"grouped_matmul: axis {d} of {x} and of the experts {experts}")
        return TensorType((*experts.shape, columns), x.dtype)

    def work(self, *x: TensorType) -> Work:
        (out,) = self.infer_types(x)
        rows, touched = numel(x[2].shape), TensorType(x[1].shape[1:], x[1].dtype)
        read = tensor_bytes(x[0]) + tensor_bytes(x[2]) + min_size(rows, x[1].shape[0]) * tensor_bytes(touched)
        return Work(numel(out.shape) * x[0].shape[-1] * 2, read, tensor_bytes(out))

    def reference(self, x: Array, w: Array, experts: Array) -> Array:
        chosen = wrapped_indices(experts, w.shape[0], self.op_name)
        rows, matrices = widened(rounded_q8(x) if self.activations else x), widened(w)
        rows = np.broadcast_to(rows, (*experts.shape, rows.shape[-1]))
        if self.transposed:
            matrices = matrices.swapaxes(1, 2)
        out = np.zeros((*experts.shape, matrices.shape[2]), matrices.dtype)
        for expert in np.unique(chosen):
            out[chosen == expert] = rows[chosen == expert] @ matrices[expert]
        return out.astype(x.dtype)

    def decompose(self, g: Graph, x: Value, w: Value, experts: Value) -> Value:
        rank = experts.type.rank
        (chosen,) = g.add(Gather(0), w, experts)
        if self.transposed:
            (chosen,) = g.add(Transpose((*range(rank), rank + 1, rank)), chosen)
        (rows,) = g.add(Unsqueeze((rank,)), x)
        (product,) = g.add(MatMul(self.activations), rows, chosen)
        return g.add(Squeeze((rank,)), product)[0]


Activation = Literal["silu", "gelu", "relu", "identity"]


def _call(op: str, *inputs: Any, **attributes: Any) -> Any:
    return functional(OPS[op])(*inputs, **attributes)


@bounded("moe", CompileError)
def moe(
    x: Value,
    router: Any,
    gate: Any,
    up: Any,
    down: Any,
    *,
    top_k: int,
    normalize: bool = True,
    activation: Activation = "silu",
    transposed: bool = False,
    name: str = "moe",
) -> Value:
    """A mixture-of-experts layer: each token goes to the `top_k` experts that the router gives most weight.

    x [..., hidden], router [hidden, experts], gate and up [experts, hidden, intermediate], down [experts, intermediate,
    hidden] (`transposed`: the last two axes of these three the other way round) -> [..., hidden]. An expert computes
    (activation(x @ gate) * (x @ up)) @ down, without `up` (None) activation(x @ gate) @ down. The weights are a softmax
    over all experts, made to sum up to 1 over the chosen ones with `normalize`. `name` names the layer, for
    `take_routing` and `take_expert_stats`. (Shazeer et al. 2017; Mixtral, Qwen-MoE)
    """
    weights, experts = route(_call("matmul", x, router), top_k, normalize=normalize, name=name)
    return combine(run_experts(x, experts, gate, up, down, activation=activation, transposed=transposed), weights)


def route(logits: Value, top_k: int, *, normalize: bool = True, name: str = "moe") -> tuple[Value, Value]:
    """The weights and numbers (i64) of the `top_k` experts of each token, best first; logits [..., experts].

    Raises `OptionError` where there are no `top_k` experts, `DTypeError` for logits that are not floats.
    """
    count = logits.shape[-1]
    if not isinstance(top_k, int) or top_k < 1 or (isinstance(count, int) and top_k > count):
        raise OptionError(f"moe: top_k={top_k!r}: expected a number from 1 to the {count} experts")
    if not logits.dtype.is_float:
        raise DTypeError(f"moe: expected floating-point logits of the router, got {logits.type}")
    scores = logits if normalize else _call("softmax", logits)
    best, numbers = _call("top_k", scores, k=top_k)
    numbers.node.provenance = (name,)  # which passes keep
    # normalised, it is the softmax over the chosen ones alone
    return (_call("softmax", best) if normalize else best), numbers


def run_experts(
    x: Value,
    experts: Value,
    gate: Any,
    up: Any,
    down: Any,
    *,
    activation: Activation = "silu",
    transposed: bool = False,
) -> Value:
    """What the chosen experts give for each token: x [..., hidden], experts [..., k] -> [..., k, hidden]."""
    if activation not in get_args(Activation):
        raise OptionError(f"moe: activation={activation!r}: expected one of {', '.join(get_args(Activation))}")
    rows = _call("unsqueeze", x, axes=(-2,))
    hidden = _call(activation, _call("grouped_matmul", rows, gate, experts, transposed=transposed))
    if up is not None:
        hidden = _call("mul", hidden, _call("grouped_matmul", rows, up, experts, transposed=transposed))
    return cast(Value, _call("grouped_matmul", hidden, down, experts, transposed=transposed))


def combine(parts: Value, weights: Value) -> Value:
    """The weighted sum over the experts of each token: parts [..., k, hidden], weights [..., k] -> [..., hidden]."""
    scaled = _call("mul", parts, _call("unsqueeze", weights, axes=(-1,)))
    return cast(Value, _call("reduce_sum", scaled, axes=(-2,), keepdims=False))
