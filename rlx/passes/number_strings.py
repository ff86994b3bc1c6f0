"""Strings become their numbers, before any other pass or device sees the graph.

What moves strings or asks whether they are equal does so with their numbers, since equal strings, and no others, have
one number; what looks for them among constants reads a table. What reads or makes strings becomes a `string_step`,
which the host carries out; it is given the key of the run's dictionary, a last input of the graph. Constants have the
numbers that `constant_strings` gives them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlx.ir.graph import Array, Graph, Node, TensorType, Value
from rlx.ir.strings import Texts
from rlx.ops.base import Op
from rlx.ops.elementwise import Minimum
from rlx.ops.index import Gather
from rlx.ops.strings import FindKeys, StringStep, numbered
from rlx.passes.rewrite import copy_leaves, finish

__all__ = ["constant_strings", "has_strings", "number_strings"]

KEY = TensorType((), "i64")


def has_strings(graph: Graph) -> bool:
    """Whether any value of it is made of strings."""
    return any(v.dtype.kind == "s" for v in graph.values()) or any(
        has_strings(region) for node in graph.nodes for region in node.regions
    )


def constant_strings(graph: Graph) -> Texts:
    """The strings of the constants, those of regions too, in their order."""
    return Texts([text for array in _string_constants(graph) for text in array.reshape(-1).tolist()])


def _string_constants(graph: Graph) -> Iterator[Array]:
    for const in graph.constants:
        if const.dtype.kind == "s" and const.data is not None:
            yield const.data
    for node in graph.nodes:
        for region in node.regions:
            yield from _string_constants(region)


def number_strings(graph: Graph) -> Graph:
    """The graph on numbers; itself where there are no strings."""
    return _numbered(graph, constant_strings(graph), keyed=True) if has_strings(graph) else graph


def _numbered(graph: Graph, texts: Texts, keyed: bool) -> Graph:
    """`keyed`: the graph gets the key of the dictionary as a last input."""
    new, values = copy_leaves(graph, numbered)
    for const in graph.constants:
        if const.dtype.kind == "s" and const.data is not None:
            values[const].data = texts.encode(const.data)
    key = new.input(_free_name(graph), KEY.shape, KEY.dtype) if keyed else None
    for node in graph.nodes:
        outputs = _placed(new, node, [values[v] for v in node.inputs], texts, key)
        for old, made in zip(node.outputs, outputs, strict=True):
            made.name = old.name
            values[old] = made
    return finish(graph, new, values)


def _placed(new: Graph, node: Node, inputs: list[Value], texts: Texts, key: Value | None) -> tuple[Value, ...]:
    op = node.op
    assert isinstance(op, Op)
    if _is_step(node):
        assert key is not None
        flags = tuple(v.dtype.kind == "s" for v in node.inputs)
        count = getattr(op, "count", 0)
        step = StringStep(op.op_name, tuple(op.attributes().items()), flags, count)
        return new.add(step, key, *inputs, provenance=node.provenance)
    if isinstance(op, FindKeys) and node.inputs[0].dtype.kind == "s" and inputs[1].data is not None:
        return (_by_table(new, inputs[0], inputs[1], texts, node.provenance),)
    needs_key = any(map(_has_steps, node.regions))
    regions = [_numbered(region, texts, needs_key) for region in node.regions]
    if needs_key:
        assert key is not None
        inputs.append(key)
    return new.add(op, *inputs, provenance=node.provenance, regions=regions)


def _by_table(new: Graph, x: Value, keys: Value, texts: Texts, provenance: tuple[str, ...]) -> Value:
    """Where strings are among constant keys, by a table of all constants of the graph; no other string is a key."""
    count = len(texts.texts)
    places = FindKeys().reference(np.arange(count + 1, dtype=np.int32), np.asarray(keys.data))
    (at,) = new.add(Minimum(), x, new.constant(np.array(count, np.int32)), provenance=provenance)
    return new.add(Gather(0), new.constant(places), at, provenance=provenance)[0]


def _is_step(node: Node) -> bool:
    op = node.op
    has_text = any(v.dtype.kind == "s" for v in (*node.inputs, *node.outputs))
    return has_text and isinstance(op, Op) and op.strings == "read"


def _has_steps(graph: Graph) -> bool:
    return any(_is_step(node) or any(map(_has_steps, node.regions)) for node in graph.nodes)


def _free_name(graph: Graph) -> str:
    taken = {v.name for v in (*graph.inputs, *graph.params, *graph.states)}
    name = "dictionary"
    while name in taken:
        name += "'"
    return name
