"""What applies the rules: tangents pushed forward along nodes, cotangents pulled back along them.

Both read nodes that are there already and add theirs to the innermost open frame. A part of a function may have a rule
of its own (`Group`: `custom_vjp`, `checkpoint`), which then counts as one node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from rlx.errors import UnsupportedNode, UnsupportedOp
from rlx.ir.frames import Frame, current
from rlx.ir.graph import BACKWARD, Graph, Node, Value
from rlx.ops.base import Op, apply
from rlx.ops.complex import FromPairs, Pairs
from rlx.ops.gradients.attach import added, cast, is_smooth, reshaped, zeros
from rlx.ops.gradients.complex import PARTS, is_complex, joined, part, part_types
from rlx.records import dataclass

__all__ = [
    "CONTROL",
    "GROUPS",
    "Group",
    "dependent",
    "has_rule",
    "open_frame",
    "pull",
    "push",
    "replay",
    "taken_out",
    "transposed",
    "units",
]

Tangents = Sequence[Value | None]


@dataclass(eq=False)
class Group:
    """Nodes that have one rule together.

    `vjp(group, inputs, outputs, cotangents)` and `jvp(group, inputs, outputs, tangents)` take and give one value (or
    None) for each input and output. A copy of the nodes has the same rule over its own values.
    """

    nodes: Sequence[Node]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    name: str
    vjp: Callable[[Group, Sequence[Value], Sequence[Value], Tangents], Tangents] | None = None
    jvp: Callable[[Group, Sequence[Value], Sequence[Value], Tangents], Tangents] | None = None

    @property
    def label(self) -> str:
        """How messages name it."""
        return self.name


Unit = Node | Group
GROUPS: WeakKeyDictionary[Graph, list[Group]] = WeakKeyDictionary()  # of graphs being traced, inner ones first
CONTROL: dict[type, Any] = {}  # ops with regions: an object with jvp(node, tangents), vjp(node, cotangents, wanted)


def open_frame() -> Frame:
    """The innermost open frame, which rules add to."""
    frame = current()
    assert frame is not None, "gradients are written down in an open frame"
    return frame


def units(nodes: Sequence[Node], but: Group | None = None) -> list[Unit]:
    """The nodes, with the outermost groups among them as one each, in the place of their last node; not `but`."""
    groups = GROUPS.get(nodes[0].outputs[0].graph, []) if nodes else []
    there = {id(node) for node in nodes}
    taken: dict[int, Group] = {}
    for group in reversed(groups):
        own = [id(node) for node in group.nodes]
        if group is not but and own and there.issuperset(own) and own[-1] not in taken:
            taken.update(dict.fromkeys(own, group))
    ends = {id(group.nodes[-1]): group for group in taken.values()}
    made: list[Unit] = []
    for node in nodes:
        if id(node) not in taken:
            made.append(node)
        elif id(node) in ends:
            made.append(ends[id(node)])
    return made


def _never(node: Node) -> bool:
    return False


def dependent(nodes: Sequence[Node], roots: Iterable[Value], also: Callable[[Node], bool] = _never) -> list[Node]:
    """The nodes that depend on the roots, or on nodes that are `also` meant."""
    found, values = [], set(roots)
    for node in nodes:
        if any(v in values for v in node.inputs) or also(node):
            values.update(node.outputs)
            found.append(node)
    return found


def taken_out(graph: Graph, start: int, roots: Iterable[Value], also: Callable[[Node], bool] = _never) -> list[Node]:
    """Takes the nodes from `start` on that are `dependent` out of the graph, and gives them."""
    found = dependent(graph.nodes[start:], roots, also)
    gone = {id(node) for node in found}
    graph.nodes[start:] = [node for node in graph.nodes[start:] if id(node) not in gone]
    return found


def replay(
    nodes: Sequence[Node],
    values: dict[Value, Value],
    but: Group | None = None,
    kept: Mapping[Value, Value] | None = None,
) -> list[Node]:
    """Adds copies of the nodes to the open frame, over what `values` says of their inputs; it learns their outputs.

    Groups among them are copied too, but one. Nodes whose outputs are `kept` are not added: their copies, in the list
    that this gives, have the values that are kept.
    """
    frame, kept = open_frame(), kept or {}
    copies: dict[int, Node] = {}
    for node in nodes:
        inputs = [frame.own(values.get(v, v)) for v in node.inputs]
        if all(v in kept for v in node.outputs):
            there = tuple(frame.own(kept[v]) for v in node.outputs)
            copies[id(node)] = Node(node.op, tuple(inputs), there, node.provenance, node.regions)
        else:
            frame.graph.add(node.op, *inputs, provenance=node.provenance, regions=node.regions)
            copies[id(node)] = frame.graph.nodes[-1]
        values.update(zip(node.outputs, copies[id(node)].outputs, strict=True))
    for group in GROUPS.get(nodes[0].outputs[0].graph, []) if nodes else []:
        if group is not but and group.nodes and all(id(node) in copies for node in group.nodes):
            taken = tuple(values.get(v, v) for v in group.inputs)
            outputs = tuple(values[v] for v in group.outputs)
            again = Group([copies[id(n)] for n in group.nodes], taken, outputs, group.name)
            again.vjp, again.jvp = group.vjp, group.jvp
            GROUPS.setdefault(frame.graph, []).append(again)
    return list(copies.values())


# ---- which nodes have rules


def has_rule(unit: Unit, backward: bool) -> bool:
    """Whether a node can be differentiated, as far as it says itself."""
    if isinstance(unit, Group):
        return (unit.vjp if backward else unit.jvp) is not None
    op: Any = unit.op
    if type(op) in CONTROL:
        return hasattr(CONTROL[type(op)], "vjp") or not backward
    return any((op.jvp, op.formula, op.decompose, op.linear, backward and op.vjp))


def _refuse(missing: Sequence[tuple[Unit, str]]) -> None:
    if missing:
        lines = "".join(f"\n  {unit.label}: {why}" for unit, why in missing)
        nodes = [UnsupportedNode(u.label, u.label if isinstance(u, Group) else u.op.op_name, why) for u, why in missing]
        count = f"{len(missing)} nodes have" if len(missing) > 1 else "1 node has"
        raise UnsupportedOp(
            f"{count} no gradient:{lines}\nrlx.stop_gradient holds them constant, rlx.custom_vjp gives a function a "
            "rule of its own, and an op may have one (`jvp`, see docs/gradients.md)",
            nodes,
        )


def _why(unit: Unit, backward: bool) -> str:
    if not isinstance(unit, Group) and type(unit.op) in CONTROL:
        return "how often it runs is not known before; rlx.scan and rlx.fori_loop with a known count have a gradient"
    if isinstance(unit, Group):
        return f"it has a rule for {'forward' if backward else 'reverse'} mode only"
    return "its op has no rule"


# ---- backward


def pull(nodes: Sequence[Node], seeds: dict[Value, Value], wanted: Sequence[Value]) -> list[Value | None]:
    """The cotangents of `wanted`, given those of some results of the nodes; None where nothing depends on one."""
    work = units(nodes)
    active, needed = set(wanted), set(seeds)
    for unit in work:
        if any(v in active for v in unit.inputs):
            active.update(v for v in unit.outputs if is_smooth(v))
    chosen = []
    for unit in reversed(work):
        flags = [v in active and is_smooth(v) for v in unit.inputs]
        if any(flags) and any(v in needed for v in unit.outputs):
            needed.update(v for v, flag in zip(unit.inputs, flags, strict=True) if flag)
            chosen.append((unit, flags))
    missing = [(unit, _why(unit, True)) for unit, _ in reversed(chosen) if not has_rule(unit, True)]
    _refuse(missing)
    found = dict(seeds)
    graph, after = open_frame().graph, set(seeds.values())
    for unit, flags in chosen:
        given = [found.get(v) for v in unit.outputs]
        if any(ct is not None for ct in given):
            start = len(graph.nodes)
            _add_up(found, unit.inputs, _vjp(unit, given, flags), flags)
            _say_backward(graph.nodes[start:], unit, after)
    return [found.get(v) for v in wanted]


def _say_backward(nodes: Sequence[Node], unit: Unit, after: set[Value]) -> None:
    """Names the source of nodes that depend on the cotangents `after`, which learns their outputs."""
    if isinstance(unit, Group):
        source = unit.name
    else:
        source = unit.provenance[0] if unit.provenance else unit.op.op_name
    for node in nodes:
        if any(v in after for v in node.inputs):
            after.update(node.outputs)
            node.provenance = node.provenance or (f"{BACKWARD}{source}",)


def _add_up(found: dict[Value, Value], inputs: Sequence[Value], more: Tangents, flags: Sequence[bool]) -> None:
    for value, ct, flag in zip(inputs, more, flags, strict=True):
        if ct is not None and flag:
            ct = cast(reshaped(ct, value.shape), value.dtype)
            found[value] = added(found[value], ct) if value in found else ct


def _vjp(unit: Unit, cotangents: Tangents, flags: Sequence[bool]) -> Tangents:
    frame = open_frame()
    inputs, outputs = [frame.own(v) for v in unit.inputs], [frame.own(v) for v in unit.outputs]
    if isinstance(unit, Group):
        assert unit.vjp is not None
        return unit.vjp(unit, inputs, outputs, cotangents)
    if type(unit.op) in CONTROL:
        return CONTROL[type(unit.op)].vjp(unit, cotangents, flags)  # type: ignore[no-any-return]
    if _is_by_parts(unit.op, (*inputs, *outputs)):
        halves = [_vjp_of(unit, part(p, inputs), part(p, outputs), part(p, cotangents), flags) for p in PARTS]
        return joined(halves, inputs)
    return _vjp_of(unit, inputs, outputs, cotangents, flags)


def _is_by_parts(op: Any, values: Sequence[Value]) -> bool:
    """Whether an op moves complex numbers, so that its rule is that of their parts."""
    own = op.linear not in ("", "zero") or op.vjp is not None or op.jvp is not None
    return own and not isinstance(op, Pairs | FromPairs) and any(map(is_complex, values))


def _vjp_of(unit: Node, inputs: Any, outputs: Any, cotangents: Tangents, flags: Sequence[bool]) -> Tangents:
    op: Any = unit.op
    frame = open_frame()
    if op.linear == "zero":
        return [None] * len(inputs)
    if op.vjp is not None:
        return list(op.vjp(inputs, outputs, _without_gaps(cotangents, outputs)))
    if op.linear:
        return _transposes(op, inputs, cotangents, flags)
    start = len(frame.graph.nodes)
    if op.jvp is not None:
        places = [
            Value(frame.graph, v.type.decoded, "input", "") if f else None for v, f in zip(inputs, flags, strict=True)
        ]
        made = _tuple(op.jvp(inputs, outputs, places))
        if made[0] is NotImplemented:
            _refuse([(unit, "its op has no rule for these attributes")])
        return transposed(start, made, cotangents, places)
    made = _written_out(op, frame, inputs)
    seeds = _seeds(made, cotangents)
    distinct = list(dict.fromkeys(inputs))
    pulled = dict(zip(distinct, pull(frame.graph.nodes[start:], seeds, distinct), strict=True))
    return [pulled.pop(v, None) for v in inputs]


def _without_gaps(cotangents: Tangents, outputs: Sequence[Value]) -> Tangents:
    return [zeros(v) if ct is None and is_smooth(v) else ct for v, ct in zip(outputs, cotangents, strict=True)]


def _tuple(made: Any) -> tuple[Any, ...]:
    return tuple(made) if isinstance(made, tuple | list) else (made,)


def _written_out(op: Any, frame: Frame, inputs: Sequence[Value]) -> tuple[Value, ...]:
    """The results of an op by its formula or decomposition."""
    made = _tuple(op.formula(*inputs) if op.formula is not None else op.decompose(frame.graph, *inputs))
    if made[0] is NotImplemented:
        _refuse([(Group((), (), (), op.op_name), "its op has no rule for these attributes")])
    return made


def _seeds(made: Sequence[Value | None], cotangents: Tangents) -> dict[Value, Value]:
    seeds: dict[Value, Value] = {}
    for value, ct in zip(made, cotangents, strict=True):
        if value is not None and ct is not None:
            ct = cast(reshaped(ct, value.shape), value.dtype)
            seeds[value] = seeds[value] + ct if value in seeds else ct
    return seeds


def transposed(
    start: int, made: Sequence[Value | None], cotangents: Tangents, places: Sequence[Value | None]
) -> list[Value | None]:
    """The cotangents of `places`, of which the nodes from `start` on are a linear function; these are taken out."""
    graph = open_frame().graph
    roots = [v for v in places if v is not None]
    nodes = taken_out(graph, start, roots)
    found = _seeds(made, cotangents)
    linear = {v for node in nodes for v in node.outputs} | set(roots)
    for node in reversed(nodes):
        given = [found.get(v) for v in node.outputs]
        if all(ct is None for ct in given):
            continue
        flags = [v in linear for v in node.inputs]
        _add_up(found, node.inputs, _transposed_node(node, given, flags), flags)
    return [None if v is None else found.get(v) for v in places]


def _transposed_node(node: Node, cotangents: Tangents, flags: Sequence[bool]) -> Tangents:
    op: Any = node.op
    if op.transpose is not None and _is_by_parts(op, (*node.inputs, *node.outputs)):
        own = part_types(node.inputs, flags)
        halves = [_transposes(op, own, part(p, cotangents), flags) for p in PARTS]
        return joined(halves, node.inputs)
    if op.transpose is not None:
        return _transposes(op, node.inputs, cotangents, flags)
    frame = open_frame()
    start = len(frame.graph.nodes)
    places = [Value(frame.graph, v.type, "input", "") if f else None for v, f in zip(node.inputs, flags, strict=True)]
    inputs = [v if p is None else p for v, p in zip(node.inputs, places, strict=True)]
    if op.formula is None and op.decompose is None:
        _refuse([(node, "its op has no transpose")])
    return transposed(start, _written_out(op, frame, inputs), cotangents, places)


def _transposes(op: Any, inputs: Sequence[Value], cotangents: Tangents, flags: Sequence[bool]) -> Tangents:
    return [op.transpose(inputs, cotangents, i) if flag else None for i, flag in enumerate(flags)]


# ---- forward


def push(nodes: Sequence[Node], tangents: dict[Value, Value], but: Group | None = None) -> None:
    """Adds to `tangents` those of the results of the nodes."""
    work = units(nodes, but)
    active = set(tangents)
    missing = []
    for unit in work:
        if any(v in active for v in unit.inputs):
            smooth = [v for v in unit.outputs if is_smooth(v)]
            if smooth and not has_rule(unit, False):
                missing.append((unit, _why(unit, False)))
            active.update(smooth)
    _refuse(missing)
    for unit in work:
        given = [tangents.get(v) for v in unit.inputs]
        if all(t is None for t in given) or not any(is_smooth(v) for v in unit.outputs):
            continue
        for value, t in zip(unit.outputs, _jvp(unit, given), strict=True):
            if t is not None and is_smooth(value):
                tangents[value] = cast(reshaped(t, value.shape), value.dtype)


def _jvp(unit: Unit, tangents: Tangents) -> Tangents:
    frame = open_frame()
    inputs, outputs = [frame.own(v) for v in unit.inputs], [frame.own(v) for v in unit.outputs]
    if isinstance(unit, Group):
        assert unit.jvp is not None
        return unit.jvp(unit, inputs, outputs, tangents)
    if type(unit.op) in CONTROL:
        return CONTROL[type(unit.op)].jvp(unit, tangents)  # type: ignore[no-any-return]
    if _is_by_parts(unit.op, (*inputs, *outputs)):
        halves = [_jvp_of(unit, part(p, inputs), part(p, outputs), part(p, tangents)) for p in PARTS]
        return joined(halves, outputs)
    return _jvp_of(unit, inputs, outputs, tangents)


def _jvp_of(unit: Node, inputs: Any, outputs: Any, tangents: Tangents) -> Tangents:
    op: Any = unit.op
    frame = open_frame()
    if op.linear == "zero":
        return [None] * len(outputs)
    if op.jvp is not None:
        made = _tuple(op.jvp(inputs, outputs, tangents))
        if made[0] is NotImplemented:
            _refuse([(unit, "its op has no rule for these attributes")])
        return made
    if op.linear:
        return _linear_jvp(op, inputs, tangents)
    start = len(frame.graph.nodes)
    made = _written_out(op, frame, inputs)
    inner = {v: t for v, t in zip(inputs, tangents, strict=True) if t is not None}
    push(frame.graph.nodes[start:], inner)
    return [inner.get(v) for v in made]


def _linear_jvp(op: Op, inputs: Sequence[Value], tangents: Tangents) -> Tangents:
    if op.linear == "joint":
        filled = [
            v if not is_smooth(v) else zeros(v) if t is None else t for v, t in zip(inputs, tangents, strict=True)
        ]
        return _tuple(apply(op, *filled))
    total: list[Any] = []
    for i, t in enumerate(tangents):
        if t is not None:
            made = _tuple(apply(op, *inputs[:i], t, *inputs[i + 1 :]))
            total = [a + b for a, b in zip(total, made, strict=True)] if total else list(made)
    return total
