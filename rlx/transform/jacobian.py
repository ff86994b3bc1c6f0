"""`rlx.jacfwd`, `jacrev` and `hessian`: whole matrices of derivatives, a column or a row for each element at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.boundary import bounded
from rlx.errors import CompileError
from rlx.ir.graph import Value
from rlx.ir.shape import numel
from rlx.ops.base import apply
from rlx.ops.gradients.attach import cast, reshaped, zeros
from rlx.ops.gradients.engine import open_frame
from rlx.ops.layout import Iota
from rlx.trace.control import value_of
from rlx.trace.tree import fill, leaves_of
from rlx.transform.batching import vmap
from rlx.transform.functions import Argnums, jvp, positions, transformed, vjp
from rlx.units import as_int

__all__ = ["hessian", "jacfwd", "jacrev"]


def _basis(like: Value) -> Value:
    """[n, *shape]: for each of the n elements a tensor with 1 there and 0 elsewhere."""
    from rlx.ops import equal

    count = numel(like.shape)
    numbers = apply(Iota(count))
    rows = equal(reshaped(numbers, (count, 1)), reshaped(numbers, (1, count)))
    return reshaped(cast(rows, like.dtype), (count, *like.shape))


def _chosen(what: str, function: Callable[..., Any], argnums: Argnums, args: Any, kwargs: Any) -> Any:
    """The function of the chosen arguments alone, these, and the leaves of each."""
    frame = open_frame()
    places = positions(what, argnums, len(args))

    def of_chosen(*chosen: Any) -> Any:
        given = list(args)
        for n, value in zip(places, chosen, strict=True):
            given[n] = value
        return function(*given, **kwargs)

    values = [fill(args[n], [value_of(frame, v, p) for p, v in leaves_of(args[n], f"argument {n}")]) for n in places]
    return of_chosen, values


def _put_together(result: Any, values: Any, single: bool, block: Callable[[int, int, int], Value]) -> Any:
    """A tree like the result, of trees like the arguments, of blocks (number of result, of argument, of leaf)."""

    def of_result(k: int) -> Any:
        found = [fill(v, [block(k, n, i) for i in range(len(leaves_of(v, "")))]) for n, v in enumerate(values)]
        return found[0] if single else tuple(found)

    count = len(leaves_of(result, ""))
    made = [of_result(k) for k in range(count)]
    if isinstance(result, Value):
        return made[0]
    return fill(result, made)


@bounded("jacrev", CompileError)
def jacrev(function: Callable[..., Any], argnums: Argnums = 0) -> Callable[..., Any]:
    """The Jacobian of a function by its arguments at `argnums`, row by row backwards: [*result, *argument].

    (jax.jacrev) Best where the result has fewer elements than the argument.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        of_chosen, values = _chosen("jacrev", function, argnums, args, kwargs)
        result, pullback = vjp(of_chosen, *values)
        outputs = [v for _, v in leaves_of(result, "")]
        rows = []
        for k in range(len(outputs)):

            def one(ct: Value, k: int = k) -> Any:
                return pullback(fill(result, [ct if i == k else zeros(v) for i, v in enumerate(outputs)]))

            rows.append([[v for _, v in leaves_of(part, "")] for part in vmap(one)(_basis(outputs[k]))])

        def block(k: int, n: int, i: int) -> Value:
            row: Value = rows[k][n][i]
            return reshaped(row, (*outputs[k].shape, *row.shape[1:]))

        return _put_together(result, values, as_int(argnums) is not None, block)

    return transformed("jacrev", function, call)


@bounded("jacfwd", CompileError)
def jacfwd(function: Callable[..., Any], argnums: Argnums = 0) -> Callable[..., Any]:
    """The Jacobian of a function by its arguments at `argnums`, column by column forwards: [*result, *argument].

    Best where the argument has fewer elements than the result. (jax.jacfwd)
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        of_chosen, values = _chosen("jacfwd", function, argnums, args, kwargs)
        leaves = [[v for _, v in leaves_of(value, "")] for value in values]
        columns: dict[tuple[int, int], list[Value]] = {}
        result: Any = None
        for n, own in enumerate(leaves):
            for i, leaf in enumerate(own):

                def one(t: Value, n: int = n, i: int = i) -> Any:
                    nonlocal result
                    given = [
                        [t if (a, b) == (n, i) else zeros(v) for b, v in enumerate(vs)] for a, vs in enumerate(leaves)
                    ]
                    tangents = tuple(fill(value, ts) for value, ts in zip(values, given, strict=True))
                    result, made = jvp(of_chosen, tuple(values), tangents)
                    return made

                made = vmap(one, out_axes=-1)(_basis(leaf))
                columns[n, i] = [v for _, v in leaves_of(made, "")]

        def block(k: int, n: int, i: int) -> Value:
            column = columns[n, i][k]
            return reshaped(column, (*column.shape[:-1], *leaves[n][i].shape))

        return _put_together(result, values, as_int(argnums) is not None, block)

    return transformed("jacfwd", function, call)


@bounded("hessian", CompileError)
def hessian(function: Callable[..., Any], argnums: Argnums = 0) -> Callable[..., Any]:
    """The second derivatives of a scalar function, forwards over backwards: [*argument, *argument]. (jax.hessian)

    `rlx.hvp` multiplies by it without making it.
    """
    return jacfwd(jacrev(function, argnums), argnums)
