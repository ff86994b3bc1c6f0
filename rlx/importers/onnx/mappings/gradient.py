"""ONNX's Gradient: derivatives of one tensor of the graph by others, written out when the model is read."""

from __future__ import annotations

from rlx.importers.onnx.mapping import TRAINING, Mapped, NodeContext, onnx_op
from rlx.ir.frames import Frame
from rlx.ir.graph import Node, Value


@onnx_op("Gradient", domain=TRAINING)
def _gradient(ctx: NodeContext) -> tuple[Mapped, ...]:
    """The cotangents of `xs`, for 1 of each element of y, at the values that the node's inputs have.

    Where these are the named tensors themselves, the nodes that made y are differentiated; else copies of them.
    """
    from rlx.ops.base import apply  # what differentiates is only loaded where it is asked for
    from rlx.ops.elementwise import Identity
    from rlx.ops.gradients.attach import is_smooth, zeros
    from rlx.ops.gradients.engine import pull
    from rlx.transform import functions as _rules  # noqa: F401

    xs, names, y = _named(ctx)
    sources, given = [ctx.tensors.value(name) for name in names], [ctx.value(i) for i in range(len(names))]
    for name, source, value in zip(names, sources, given, strict=True):
        if source.type != value.type:
            ctx.fail(f"{name!r} is {source.type}, what it is to be differentiated at {value.type}")
    for name, source in zip(names[: len(xs)], sources, strict=False):
        if not is_smooth(source):
            ctx.fail(f"xs names {name!r}, which is {source.type}: only floats have a gradient")
        if ctx.tensors.known(name) is not None:
            ctx.fail(f"xs names {name!r}, a number that is a part of the model: make it an input")
    if not is_smooth(y):
        ctx.fail(f"y names a tensor that is {y.type}: only floats have a gradient")
    with Frame(ctx.graph, kept=True):
        nodes = list(ctx.graph.nodes)
        same = all(v is source for v, source in zip(given, sources, strict=True))
        if not same or len(set(sources)) < len(sources):
            given = [apply(Identity(), v) for v in given]
            y, nodes = _again(nodes, dict(zip(sources, given, strict=True)), y)
        found = pull(nodes, {y: zeros(y) + 1}, given[: len(xs)])
        return tuple(zeros(v) if ct is None else ct for v, ct in zip(given, found, strict=False))


def _named(ctx: NodeContext) -> tuple[tuple[str, ...], tuple[str, ...], Value]:
    """The names to differentiate by, these and those of the other inputs, and the tensor to differentiate."""
    xs, y = ctx.texts("xs"), ctx.tensors.value(ctx.text("y"))
    names = (*xs, *ctx.texts("zs", ()))
    if not xs or len(ctx.node.inputs) != len(names) or not all(map(ctx.has, range(len(names)))):
        ctx.fail(f"{len(ctx.node.inputs)} inputs for the {len(names)} tensors that xs and zs name")
    if len(ctx.node.outputs) > len(xs):
        ctx.fail(f"{len(ctx.node.outputs)} outputs for the {len(xs)} tensors that xs names")
    return xs, names, y


def _again(nodes: list[Node], values: dict[Value, Value], y: Value) -> tuple[Value, list[Node]]:
    """y computed from other values, and the nodes that this takes: copies of those between them."""
    from rlx.ops.gradients.engine import open_frame, replay

    changed, needed = set(values), {y}
    for node in nodes:
        if any(v in changed for v in node.inputs):
            changed.update(v for v in node.outputs if v not in values)
    between = []
    for node in reversed(nodes):
        if any(v in needed and v in changed and v not in values for v in node.outputs):
            between.append(node)
            needed.update(node.inputs)
    graph = open_frame().graph
    start = len(graph.nodes)
    replay(between[::-1], values)
    return values.get(y, y), graph.nodes[start:]
