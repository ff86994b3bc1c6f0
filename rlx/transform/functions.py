"""`rlx.grad`, `value_and_grad`, `vjp`, `jvp` and what is made of them: derivatives of functions over graph values.

A function is called in the open graph, and the nodes that it adds there are differentiated. Called with arrays, where
no graph is open, the derivative is compiled by `rlx.jit` and run.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

from rlx.boundary import bounded
from rlx.errors import CompileError, DTypeError, OptionError, ShapeError
from rlx.ir.frames import Frame, current
from rlx.ir.graph import Graph, Node, Value
from rlx.ops.base import apply
from rlx.ops.elementwise import Identity
from rlx.ops.gradients.attach import cast, is_real, is_smooth, zeros
from rlx.ops.gradients.engine import open_frame, pull, push
from rlx.options import parse_bytes
from rlx.trace.control import opened, value_of
from rlx.trace.jit import jit
from rlx.trace.tree import differs_at, fill, leaves_of
from rlx.transform import attention as _attention  # noqa: F401 - the rule of attention
from rlx.transform import control as _control  # noqa: F401 - the rules of control flow
from rlx.transform import determinant as _determinant  # noqa: F401 - that of the determinant
from rlx.transform import recurrent as _recurrent  # noqa: F401 - those of recurrent layers
from rlx.transform.graphs import grad_of_graph, within
from rlx.transform.outside import compiled_once
from rlx.units import as_int, with_ints

__all__ = ["Argnums", "grad", "hvp", "jvp", "named", "positions", "transformed", "value_and_grad", "vjp"]

Argnums = int | Sequence[int]
Budget = int | str | None  # bytes


def transformed(
    what: str,
    function: Callable[..., Any],
    call: Callable[..., Any],
    key: tuple[Any, ...] | None = None,
    of: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """`call` under the signature of `function`: in an open graph as it is, on arrays compiled and run.

    With a `key`, which says all that `call` does to the function `of` (default: `function`), what was compiled serves
    later transformations of the same function too, as long as what that reads from outside is the same.
    """
    if not callable(function):
        raise OptionError(f"{what} takes a function, got {type(function).__name__}")
    compiled: list[Any] = []

    def within(*args: Any, **kwargs: Any) -> Any:
        with opened(what, [args, kwargs]):
            return call(*args, **kwargs)

    functools.update_wrapper(within, function)

    @functools.wraps(function)
    def outer(*args: Any, **kwargs: Any) -> Any:
        leaves = leaves_of([args, kwargs], "")
        if current() is not None or any(isinstance(leaf, Value) for _, leaf in leaves):
            return within(*args, **kwargs)
        if not compiled:
            compiled.append(jit(within) if key is None else compiled_once(of or function, key, lambda: jit(within)))
        return compiled[0](*args, **kwargs)

    return bounded(what, CompileError)(outer)


def named(frame: Frame, tree: Any, path: str) -> tuple[list[tuple[str, Value]], Any]:
    """The leaves of a tree as values of their own, told from what they equal, and the tree of these."""
    made = []
    for name, leaf in leaves_of(tree, path):
        value = value_of(frame, leaf, name)
        own: Value = apply(Identity(), value)
        own.weak = value.weak
        made.append((name, own))
    return made, fill(tree, [value for _, value in made])


def _check_smooth(what: str, leaves: Sequence[tuple[str, Value]]) -> None:
    for path, value in leaves:
        if not is_real(value):
            raise DTypeError(
                f"{what}: {path} is {value.type}, and only floats have derivatives: cast it to a float, or name the "
                "arguments to differentiate by argnums"
            )


def positions(what: str, argnums: Argnums, count: int) -> list[int]:
    """The positions as 0 <= n < count; `OptionError` for others, and for one that is named twice."""
    given = _key_of(argnums)
    given = given if isinstance(given, tuple) else (given,)
    for n in given:
        if type(n) is not int or not -count <= n < count:
            raise OptionError(f"{what}: argnums {argnums!r}: the call has {count} arguments by position")
    chosen = [n % count for n in given]
    if len(set(chosen)) < len(chosen):
        raise OptionError(f"{what}: argnums {argnums!r} names an argument twice: name each once")
    return chosen


# ---- reverse


def _traced(frame: Frame, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[Node]]:
    """What the function returns, and the nodes that it adds to the graph."""
    start = len(frame.graph.nodes)
    result = function(*args, **kwargs)
    return result, frame.graph.nodes[start:]


@overload
def value_and_grad(
    function: Graph, *, wrt: str | Sequence[str] | None = None, of: str | None = None, budget: Budget = None
) -> Graph: ...
@overload
def value_and_grad(
    function: Callable[..., Any], argnums: Argnums = 0, *, has_aux: bool = False, budget: Budget = None
) -> Callable[..., Any]: ...
@bounded("value_and_grad", CompileError)
def value_and_grad(
    function: Callable[..., Any] | Graph,
    argnums: Argnums = 0,
    *,
    has_aux: bool = False,
    budget: Budget = None,
    **of_graph: Any,
) -> Any:
    """A function that gives `(value, gradient)` of `function`, a scalar. (jax.value_and_grad) See `grad`."""
    if isinstance(function, Graph):
        return _of_graph("value_and_grad", function, argnums, has_aux, budget, of_graph)
    _refuse_graphs_keywords("value_and_grad", of_graph)
    return _value_and_grad("value_and_grad", function, argnums, has_aux, budget)


def _value_and_grad(
    what: str, function: Callable[..., Any], argnums: Argnums, has_aux: bool, budget: Budget
) -> Callable[..., Any]:
    _check_budget(what, budget)

    def call(*args: Any, **kwargs: Any) -> Any:
        frame = open_frame()
        chosen = positions(what, argnums, len(args))
        given, leaves = list(args), []
        for n in chosen:
            found, given[n] = named(frame, args[n], f"argument {n}")
            leaves.append(found)
            _check_smooth(what, found)
        result, nodes = _traced(frame, function, *given, **kwargs)
        result, aux = _with_aux(what, result) if has_aux else (result, None)
        y = _scalar(what, frame, result)
        flat = [value for found in leaves for _, value in found]
        pulled = pull(nodes, {y: _one(y)}, flat)
        made = iter(within(budget, [zeros(v) if ct is None else ct for v, ct in zip(flat, pulled, strict=True)]))
        grads = [fill(args[n], [next(made) for _ in own]) for n, own in zip(chosen, leaves, strict=True)]
        whole = tuple(grads) if as_int(argnums) is None else grads[0]
        return ((y, aux) if has_aux else y), whole

    return transformed(what, function, call, (what, repr(_key_of(argnums)), has_aux, budget))


def _of_graph(
    what: str, graph: Graph, argnums: Argnums, has_aux: bool, budget: Budget, keywords: dict[str, Any]
) -> Graph:
    for name, value, default in (("argnums", argnums, 0), ("has_aux", has_aux, False)):
        if value != default:
            raise OptionError(f"{what}: {name}={value!r} is for functions: of a graph choose by wrt= and of=")
    if unknown := keywords.keys() - {"wrt", "of"}:
        raise OptionError(f"{what}: unknown keyword {min(unknown)!r}: of a graph it takes wrt=, of= and budget=")
    return grad_of_graph(graph, keep=what == "value_and_grad", budget=budget, **keywords)


def _refuse_graphs_keywords(what: str, keywords: dict[str, Any]) -> None:
    if keywords:
        name = min(keywords)
        hint = "is for graphs: of a function choose by argnums=" if name in ("wrt", "of") else "is no keyword of it"
        raise OptionError(f"{what}: {name}={keywords[name]!r} {hint}")


def _check_budget(what: str, budget: Budget) -> None:
    if budget is not None:
        parse_bytes(budget, f"{what}: budget")


def _key_of(argnums: Argnums) -> Any:
    one = as_int(argnums)
    return with_ints(tuple(argnums)) if one is None and isinstance(argnums, Iterable) else one


def _one(y: Value) -> Value:
    return zeros(y) + 1


def _with_aux(what: str, result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise OptionError(f"{what}: with has_aux the function returns (value, aux), got {type(result).__name__}")
    return result


def _scalar(what: str, frame: Frame, result: Any) -> Value:
    leaves = leaves_of(result, "result")
    if len(leaves) != 1:
        raise ShapeError(f"{what}: the function returns {len(leaves)} arrays: return one scalar, or has_aux=True")
    y = value_of(frame, leaves[0][1], "result")
    if not is_real(y):
        raise DTypeError(f"{what}: the function returns {y.type}, and only floats have derivatives: return a float")
    if y.shape != ():
        raise ShapeError(
            f"{what}: the function returns {y.type}: a gradient is that of one float []; sum it, or use rlx.vjp with a "
            "cotangent of its shape, or rlx.jacrev"
        )
    return y


@overload
def grad(
    function: Graph, *, wrt: str | Sequence[str] | None = None, of: str | None = None, budget: Budget = None
) -> Graph: ...
@overload
def grad(
    function: Callable[..., Any], argnums: Argnums = 0, *, has_aux: bool = False, budget: Budget = None
) -> Callable[..., Any]: ...
@bounded("grad", CompileError)
def grad(
    function: Callable[..., Any] | Graph,
    argnums: Argnums = 0,
    *,
    has_aux: bool = False,
    budget: Budget = None,
    **of_graph: Any,
) -> Any:
    """The gradient of a function that returns a scalar, by the arguments at positions `argnums`. (jax.grad)

    The result is a function of the same arguments; it gives a tree like the argument (a tuple of them for several
    `argnums`), and with `has_aux`, for a function that returns (scalar, aux), the pair (gradient, aux). Arguments are
    trees of floats of 16 bits or more: `DTypeError` for others, `ShapeError` for a result that is no scalar,
    `UnsupportedOp` for nodes without a rule. Of a `Graph`: `grad(graph, wrt=[names], of=output)` is a graph with the
    outputs `grad_<name>`; `wrt` names inputs and params (by default all params that are floats), and `of` a scalar
    output (by default the only one).

    `budget` ("1GiB", or bytes) is the most that the planned arena of the program may take that the gradient becomes
    part of: activations and outputs, not weights and inputs. Instead of being kept for the backward pass, values are
    then computed again; results have the same bits. Compiling raises `MemoryDeficit`, which names the smallest arena
    that can be reached, `OptionError` for a device without a plan of ours, or a size without an upper bound.
    """
    if isinstance(function, Graph):
        return _of_graph("grad", function, argnums, has_aux, budget, of_graph)
    _refuse_graphs_keywords("grad", of_graph)
    both = _value_and_grad("grad", function, argnums, has_aux, budget)

    def call(*args: Any, **kwargs: Any) -> Any:
        value, found = both(*args, **kwargs)
        return (found, value[1]) if has_aux else found

    return transformed("grad", function, call, ("grad", repr(_key_of(argnums)), has_aux, budget))


@bounded("vjp", CompileError)
def vjp(function: Callable[..., Any], *primals: Any, has_aux: bool = False, budget: Budget = None) -> Any:
    """`(result, pullback)` of a call; `pullback(cotangent)` gives a tuple of cotangents of the primals. (jax.vjp)

    It works on graph values, in a function that is traced: `pullback` adds to the graph. The cotangent is a tree like
    the result. With `has_aux` the function returns (result, aux), and this (result, pullback, aux). `budget` is that
    of `grad`.
    """
    _check_budget("vjp", budget)
    with opened("vjp", [primals]) as frame:
        leaves, given = named(frame, primals, "primals")
        _check_smooth("vjp", leaves)
        result, nodes = _traced(frame, function, *given)
        result, aux = _with_aux("vjp", result) if has_aux else (result, None)
        outputs = [value_of(frame, leaf, path) for path, leaf in leaves_of(result, "result")]
        for (path, _), value in zip(leaves_of(result, "result"), outputs, strict=True):
            if value.dtype.kind == "c":
                raise DTypeError(f"vjp: {path} is {value.type}: return the real and imaginary parts of complex numbers")

    def pullback(cotangent: Any) -> tuple[Any, ...]:
        """The cotangents of the primals for this one of the result."""
        difference = differs_at(result, cotangent, "cotangent")
        if difference is not None:
            raise OptionError(f"vjp: {difference}: a cotangent is a tree like the result")
        with opened("vjp", [cotangent, outputs]) as frame:
            seeds: dict[Value, Value] = {}
            for value, (path, leaf) in zip(outputs, leaves_of(cotangent, "cotangent"), strict=True):
                ct = _alike("vjp", frame, path, leaf, value)
                if is_smooth(value):
                    seeds[value] = seeds[value] + ct if value in seeds else ct
            found = pull(nodes, seeds, [v for _, v in leaves])
            made = within(budget, [zeros(v) if ct is None else ct for (_, v), ct in zip(leaves, found, strict=True)])
        return fill(primals, made)  # type: ignore[no-any-return]

    result = fill(result, outputs)
    return (result, pullback, aux) if has_aux else (result, pullback)


def _alike(what: str, frame: Frame, path: str, leaf: Any, like: Value) -> Value:
    value = value_of(frame, leaf, path)
    if value.weak and value.shape == ():
        value = cast(value, like.dtype)
    if value.shape != like.shape or value.dtype is not like.dtype:
        raise ShapeError(f"{what}: {path} is {value.type}, expected {like.type}")
    return value


# ---- forward


@bounded("jvp", CompileError)
def jvp(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """`(result, tangent)` of `function(*primals)` along `tangents`, trees like the primals. (jax.jvp)

    On arrays it is compiled and run, once for a function, shapes, and what the function reads from outside: numbers,
    arrays, functions; a function that reads something else (a list, an object) is compiled in each call: use `rlx.jit`
    of a function with `jvp` inside. In a function that is traced it adds to the graph. Through `while_loop` as well.
    """
    return _jvp("jvp", function, function, primals, tangents)


def _jvp(
    what: str, of: Callable[..., Any], function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, Any]:
    """`jvp` of a function that is made of the function `of`, as `what` says."""
    if not isinstance(primals, tuple | list) or not isinstance(tangents, tuple | list):
        raise OptionError("jvp: primals and tangents are tuples, one entry for each argument")
    difference = differs_at(tuple(primals), tuple(tangents), "tangents")
    if difference is not None:
        raise OptionError(f"jvp: {difference}: tangents are trees like the primals")

    def call(primals: Any, tangents: Any) -> tuple[Any, Any]:
        frame = open_frame()
        leaves, given = named(frame, primals, "primals")
        _check_smooth("jvp", leaves)
        result, nodes = _traced(frame, function, *given)
        known = {
            v: _alike("jvp", frame, path, t, v)
            for (_, v), (path, t) in zip(leaves, leaves_of(tangents, "tangents"), strict=True)
        }
        push(nodes, known)
        outputs = [value_of(frame, leaf, path) for path, leaf in leaves_of(result, "result")]
        made = [known[v] if v in known else zeros(v) for v in outputs]
        return fill(result, outputs), fill(result, made)

    if not callable(function):
        raise OptionError(f"jvp takes a function, got {type(function).__name__}")
    call.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
    call.__wrapped__ = function  # type: ignore[attr-defined]  # whom a warning of many compilations is about
    found: tuple[Any, Any] = transformed("jvp", call, call, (what,), of)(tuple(primals), tuple(tangents))
    return found


@bounded("hvp", CompileError)
def hvp(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The product of the Hessian of a scalar function with `tangents`, by its first argument, without the Hessian.

    It costs about two gradients: the `jvp` of `grad`. The result is a tree like the first primal.
    """
    return _jvp("hvp", function, grad(function), primals, tangents)[1]
