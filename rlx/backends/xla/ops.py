"""What jax has functions for: the scalar functions, and the ops that are more than scalar code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rlx.backends.library.arrays import Arrays, Native, table
from rlx.ir.graph import Node
from rlx.kernels.lowering import accumulator

__all__ = ["functions", "native", "refusal"]


def functions(jax: Any) -> dict[str, Callable[..., Any]]:
    """The scalar functions of expressions."""
    jnp, lax = jax.numpy, jax.lax
    return table(
        jnp,
        erf=lax.erf,
        floordiv=jnp.floor_divide,
        fmod=lambda a, b: lax.rem(*jnp.broadcast_arrays(a, b)),
        idiv=lambda a, b: lax.div(*jnp.broadcast_arrays(a, b)),
        irem=lambda a, b: lax.rem(*jnp.broadcast_arrays(a, b)),
        mod=jnp.remainder,
        normal_cdf=lambda x: (1 + lax.erf(x * math.sqrt(0.5))) * 0.5,
        sigmoid=lax.logistic,
        sign=jnp.sign,
        trunc=jnp.trunc,
        xor=lambda a, b: a ^ b,
        **{"not": jnp.invert},
    )


def refusal(jax: Any, node: Node) -> str | None:
    """Why an op of `native` can't be run as it is."""
    if node.op.attributes().get("reduction") == "none" and jax.default_backend() != "cpu":
        return "which of several updates of an element wins is not defined there"
    return None


def native(jax: Any) -> dict[str, Native]:
    """Functions (library, node, check, *arrays) of ops."""
    jnp, lax = jax.numpy, jax.lax

    def cumulative(fn: Callable[..., Any], first: int) -> Native:
        def run(lib: Arrays, node: Node, check: Any, x: Any) -> Any:
            op: Any = node.op
            axis = op.axis % x.ndim
            y = fn(lib.cast(x, accumulator(node.inputs[0].dtype)), axis=axis, reverse=op.reverse)
            if op.exclusive:
                n = y.shape[axis]
                start, end = (1, n) if op.reverse else (0, n - 1)
                edge = jnp.full_like(lax.slice_in_dim(y, 0, 1, axis=axis), first)
                kept = lax.slice_in_dim(y, start, end, axis=axis)
                y = jnp.concatenate([kept, edge] if op.reverse else [edge, kept], axis=axis)
            return lib.cast(y, node.outputs[0].dtype)

        return run

    def top_k(lib: Arrays, node: Node, check: Any, x: Any) -> tuple[Any, Any]:
        op: Any = node.op
        axis = op.axis % x.ndim
        if op.largest:  # the last of the stable ascending order of the mirror image: of equals the first comes first
            order = jnp.argsort(jnp.flip(x, axis), axis=axis, stable=True)
            places = x.shape[axis] - 1 - jnp.flip(order, axis)
        else:
            places = jnp.argsort(x, axis=axis, stable=True)
        places = lax.slice_in_dim(places, 0, int(op.k), axis=axis)
        return jnp.take_along_axis(x, places, axis=axis), places.astype("int64")

    def scattered(x: Any, at: tuple[Any, ...], updates: Any, reduction: str) -> Any:
        method = {"none": "set", "mul": "multiply"}.get(reduction, reduction)
        return getattr(x.at[at], method)(updates, mode="clip")

    def positions(check: Any, indices: Any, size: int) -> Any:
        i = indices.astype("int64")
        wrapped = jnp.where(i < 0, i + size, i)
        ok = (wrapped >= 0) & (wrapped < size)
        check(ok, i, "index")
        return jnp.where(ok, wrapped, 0)

    def scatter_elements(lib: Arrays, node: Node, check: Any, x: Any, indices: Any, updates: Any) -> Any:
        op: Any = node.op
        axis, wide = op.axis % x.ndim, accumulator(node.inputs[0].dtype)
        at = list(jnp.indices(indices.shape, sparse=True))
        at[axis] = positions(check, indices, x.shape[axis])
        return lib.cast(
            scattered(lib.cast(x, wide), tuple(at), lib.cast(updates, wide), op.reduction), node.inputs[0].dtype
        )

    def scatter_nd(lib: Arrays, node: Node, check: Any, x: Any, indices: Any, updates: Any) -> Any:
        op: Any = node.op
        wide = accumulator(node.inputs[0].dtype)
        at = tuple(positions(check, indices[..., d], x.shape[d]) for d in range(indices.shape[-1]))
        y = scattered(lib.cast(x, wide), at, lib.cast(updates, wide), op.reduction)
        return lib.cast(y, node.inputs[0].dtype)

    return {
        "cum_prod": cumulative(lax.cumprod, 1),
        "cum_sum": cumulative(lax.cumsum, 0),
        "scatter_elements": scatter_elements,
        "scatter_nd": scatter_nd,
        "top_k": top_k,
    }
