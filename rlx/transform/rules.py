"""Functions with rules of their own: `rlx.custom_vjp`, `custom_jvp`, and `checkpoint`, which computes again."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from rlx.boundary import bounded, bounded_class
from rlx.errors import CompileError, OptionError
from rlx.ir.frames import Frame
from rlx.ir.graph import Value
from rlx.ops.base import apply
from rlx.ops.elementwise import Identity
from rlx.ops.gradients.attach import is_smooth, zeros
from rlx.ops.gradients.engine import GROUPS, Group, open_frame, pull, push, replay, transposed
from rlx.ops.misc import Again
from rlx.trace.control import value_of
from rlx.trace.tree import differs_at, fill, leaves_of
from rlx.transform.functions import named, transformed

Values = Sequence[Value]
Tangents = Sequence[Value | None]

__all__ = ["checkpoint", "custom_jvp", "custom_vjp"]


def _grouped(frame: Frame, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Group, Any]:
    """Calls the function; its nodes as a group whose inputs and outputs are values of its own, and the result."""
    leaves, (given, named_ones) = named(frame, (args, kwargs), "argument")
    start = len(frame.graph.nodes)
    result = function(*given, **named_ones)
    outputs = []
    for path, leaf in leaves_of(result, "result"):
        value = value_of(frame, leaf, path)
        made: Value = apply(Identity(), value)
        made.weak = value.weak
        outputs.append(made)
    name = getattr(function, "__name__", "function")
    group = Group(frame.graph.nodes[start:], tuple(v for _, v in leaves), tuple(outputs), name)
    GROUPS.setdefault(frame.graph, []).append(group)
    return group, fill(result, outputs)


def _leaves(what: str, tree: Any, like: Any, values: Sequence[Value]) -> list[Value | None]:
    """The leaves of what a rule returns, a tree like `like`; None stands for a zero."""
    if isinstance(like, tuple) and isinstance(tree, tuple) and len(tree) == len(like):
        found: list[Value | None] = []
        for part, expected in zip(tree, like, strict=True):
            count = len(leaves_of(expected, ""))
            found += [None] * count if part is None else _checked(what, part, expected)
        return [None if v is None or not is_smooth(to) else v for v, to in zip(found, values, strict=True)]
    return list(_checked(what, tree, like))


def _checked(what: str, tree: Any, like: Any) -> list[Value]:
    difference = differs_at(like, tree, "the rule's result")
    if difference is not None:
        raise OptionError(f"{what}: {difference}: expected a tree like it")
    frame = open_frame()
    return [value_of(frame, leaf, path) for path, leaf in leaves_of(tree, "the rule's result")]


class _Custom(ABC):
    """Base of functions with a rule; called outside of a trace they are compiled and run."""

    what = ""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self._called = transformed(self.what, function, self._call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(*args, **kwargs)

    @abstractmethod
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """The function in an open graph, as a group with its rule."""


@bounded_class(CompileError)
class custom_vjp(_Custom):
    """A function whose gradient is given: `f = rlx.custom_vjp(f); f.defvjp(forward, backward)`. (jax.custom_vjp)

    `forward(*args)` returns (result, kept), `backward(kept, cotangent)` a tuple of cotangents of the arguments, None
    for zeros. Keyword arguments and what the function reads of those around it are constants. Forward mode has no rule.
    """

    what = "custom_vjp"

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Sets the two halves of the rule."""
        self.forward, self.backward = forward, backward

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "forward"):
            raise OptionError(f"custom_vjp: {self.function.__name__} has no rule yet: call defvjp(forward, backward)")
        group, result = _grouped(open_frame(), self.function, args, kwargs)

        def rule(group: Group, inputs: Values, outputs: Values, cotangents: Tangents) -> Tangents:
            given, named_ones = fill((args, kwargs), inputs)
            made = self.forward(*given, **named_ones)
            if not isinstance(made, tuple) or len(made) != 2:
                raise OptionError(f"custom_vjp: forward of {group.name} must return (result, kept)")
            cts = [zeros(v) if ct is None else ct for v, ct in zip(outputs, cotangents, strict=True)]
            found = _leaves("custom_vjp", self.backward(made[1], fill(result, cts)), given, inputs)
            return [*found, *[None] * (len(inputs) - len(found))]

        group.vjp = rule
        return result


@bounded_class(CompileError)
class custom_jvp(_Custom):
    """A function whose derivative is given: `f = rlx.custom_jvp(f); f.defjvp(rule)`. (jax.custom_jvp)

    `rule(primals, tangents)` returns (result, tangent), linear in the tangents; both modes use it.
    """

    what = "custom_jvp"

    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the rule (a decorator too)."""
        self.rule = rule
        return rule

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "rule"):
            raise OptionError(f"custom_jvp: {self.function.__name__} has no rule yet: call defjvp(rule)")
        group, result = _grouped(open_frame(), self.function, args, kwargs)

        def forward(group: Group, inputs: Values, outputs: Values, tangents: Tangents) -> Tangents:
            ts = [zeros(v) if t is None else t for v, t in zip(inputs, tangents, strict=True)]
            given, named_ones = fill((args, kwargs), inputs)
            made = self.rule(given, fill((args, kwargs), ts)[0], **named_ones)
            if not isinstance(made, tuple) or len(made) != 2:
                raise OptionError(f"custom_jvp: the rule of {group.name} must return (result, tangent)")
            return list(_checked("custom_jvp", made[1], result))

        group.jvp, group.vjp = forward, _backward
        return result


def _backward(group: Group, inputs: Values, outputs: Values, cotangents: Tangents) -> Tangents:
    """The transpose of a group's forward rule."""
    graph = open_frame().graph
    places = [Value(graph, v.type, "input", "") if is_smooth(v) else None for v in inputs]
    start = len(graph.nodes)
    assert group.jvp is not None
    return transposed(start, group.jvp(group, inputs, outputs, places), cotangents, places)


PRODUCTS = frozenset(("attention", "conv", "conv_transpose", "einsum", "gemm", "grouped_matmul", "matmul"))
Policy = Callable[[str], bool]


@bounded("checkpoint", CompileError)
def checkpoint(function: Callable[..., Any], *, policy: str | Policy = "nothing") -> Callable[..., Any]:
    """The function, of which little but the arguments is kept for the gradient: it is computed again. (jax.checkpoint)

    Memory of values between then is needed only while that part of the gradient is computed. `policy` says of which
    ops the results are kept: of "nothing", of "products" (matrix products, convolutions, attention), or of those for
    whose name, such as "exp", a function gives True.
    """
    kept = _policy(policy)

    def again(group: Group, inputs: Values, outputs: Values, cotangents: Tangents) -> Tangents:
        return _again(group, inputs, outputs, cotangents, kept)

    def call(*args: Any, **kwargs: Any) -> Any:
        frame = open_frame()
        group, result = _grouped(frame, function, args, kwargs)
        group.inputs, group.vjp, group.jvp = tuple(_outside(group)), again, _along
        more = (v for node in group.nodes if kept(node.op.op_name) for v in node.outputs)
        group.outputs = tuple(dict.fromkeys((*group.outputs, *more)))
        return result

    return transformed("checkpoint", function, call)


def _policy(policy: str | Policy) -> Policy:
    if policy == "nothing":
        return lambda name: False
    if policy == "products":
        return PRODUCTS.__contains__
    if callable(policy):
        return policy
    raise OptionError(
        f"checkpoint: policy={policy!r}: expected 'nothing', 'products', or a function that is given the name of an op"
    )


def _again(group: Group, inputs: Values, outputs: Values, cotangents: Tangents, kept: Policy) -> Tangents:
    """Computes the group anew but for the results that are kept, and its gradient with what that gives."""
    graph = open_frame().graph
    there = {
        value: graph.add(Again(), own)[0]
        for value, own in zip(group.outputs, outputs, strict=True)
        if value.node is not None and kept(value.node.op.op_name)
    }
    held = [graph.add(Again(), v)[0] for v in inputs]
    values = dict(zip(group.inputs, held, strict=True))
    nodes = replay(group.nodes, values, group, there)
    seeds: dict[Value, Value] = {}
    for value, ct in zip(group.outputs, cotangents, strict=True):
        if ct is not None:
            own = values[value]
            seeds[own] = seeds[own] + ct if own in seeds else ct
    return pull(nodes, seeds, held)


def _along(group: Group, inputs: Values, outputs: Values, tangents: Tangents) -> Tangents:
    known = {v: t for v, t in zip(group.inputs, tangents, strict=True) if t is not None}
    push(group.nodes, known, group)
    return [known.get(v) for v in group.outputs]


def _outside(group: Group) -> list[Value]:
    """What the nodes of a group read of values that they don't make, constants aside."""
    made = {v for node in group.nodes for v in node.outputs}
    return [v for v in dict.fromkeys(v for n in group.nodes for v in n.inputs) if v not in made and v.kind != "const"]
