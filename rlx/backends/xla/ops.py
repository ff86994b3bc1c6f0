"""What jax has functions for: the scalar functions, and the ops that are more than scalar code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.backends.library.arrays import Native, table
from rlx.ir.graph import Node

__all__ = ["functions", "native", "refusal"]


def functions(jax: Any) -> dict[str, Callable[..., Any]]:
    """The scalar functions of expressions."""
    jnp, lax = jax.numpy, jax.lax

    def div(a: Any, b: Any) -> Any:
        """XLA would multiply with the reciprocal of a constant, or of what it broadcasts: that rounds twice."""
        return jnp.divide(a, lax.optimization_barrier(b))

    return table(
        jnp,
        div=div,
        erf=lax.erf,
        floordiv=jnp.floor_divide,
        idiv=lambda a, b: lax.div(*jnp.broadcast_arrays(a, b)),
        irem=lambda a, b: lax.rem(*jnp.broadcast_arrays(a, b)),
        mod=jnp.remainder,
        sigmoid=lax.logistic,
        sign=jnp.sign,
        trunc=jnp.trunc,
        xor=lambda a, b: a ^ b,
        **{"not": jnp.invert},
    )


def refusal(jax: Any, node: Node) -> str | None:
    """Why an op of `native` can't be run as it is."""
    reduction = getattr(node.op, "reduction", "")
    if reduction == "none" and jax.default_backend() != "cpu":
        return "which of several updates of an element wins is not defined"
    return None


def native(jax: Any) -> dict[str, Native]:
    """Functions (library, node, check, *arrays) of ops."""
    return {}
