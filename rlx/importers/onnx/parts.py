"""Sizes of inputs that a file gives one name and that its graph never needs to be equal: each a dim of its own.

Names of sizes are hints in ONNX. A name that stands at several places (an axis of an input each) is first as many dims,
its parts, and the model is imported as a trial. What the trial finds equal is put together, and the next trial follows,
until nothing new is found. Two parts are equal where

- a node needs an equality that holds if the two are one dim and isn't known otherwise (in a branch or a loop's body
  too, as if that always ran), or
- this follows, by adding up multiples, from equalities that nodes need: `P0 + s = T`, `P1 + s = T` give `P0 = P1`, or
- data choose elements along one of them (as positions in a mask), since these may count along the other: such a name
  isn't divided.

Any import is right whatever is put together: what was not proved equal is checked when a run starts. So that parting
costs nothing else, parts are kept only where the graph is, but for their names, that of the undivided names, or these
contradict each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction

from rlx.errors import RlxError
from rlx.importers.onnx.model import ValueInfo
from rlx.ir.fingerprint import equal_with
from rlx.ir.graph import Graph, Node
from rlx.ir.shape import Atom, Dim, Guard, Shape, Size, Symbol, substitute, symbols
from rlx.ops.base import Op

__all__ = ["Parts", "parted"]

TRIALS = 8  # of one file; a file that needs more keeps its names undivided
MOST_PLACES = 512  # of all names; a file that has more keeps its names undivided too

Place = tuple[str, int]  # input, axis
Row = dict[tuple[Atom, ...], Fraction]  # a sum of products that is 0


class _Together(Exception):
    """Nothing is apart any more: the rest of the trial tells nothing."""


class Parts:
    """The places of each name that stands at several, and which of them are equal so far."""

    def __init__(self, inputs: Sequence[ValueInfo], shapes: Mapping[str, Shape], kept: Collection[str]) -> None:
        said = {info.name: info.shape or () for info in inputs}
        self._whole = shapes
        self._dims: dict[str, Symbol] = {}  # of the names that are parted
        found: dict[str, list[Place]] = {}
        for name, shape in shapes.items():
            for axis, (size, known) in enumerate(zip(shape, said[name], strict=False)):
                symbol = size.symbol if isinstance(size, Dim) else None
                if symbol is not None and symbol.name == known and known not in kept:
                    found.setdefault(known, []).append((name, axis))
                    self._dims[known] = symbol
        self.places = {name: places for name, places in found.items() if len(places) > 1}
        self._first = {place: place for places in self.places.values() for place in places}
        self.start()

    def start(self) -> None:
        """A new trial: nothing is known but what is put together."""
        self.found = False
        self.names = self._names()  # of the dim at each place
        self._parts = {part: place for place, part in self.names.items() if self._first[place] == place}
        self._undivided: dict[str, Size] = {
            part: _dim(self._dims[name], name)
            for name, places in self.places.items()
            for part in dict.fromkeys(self.names[p] for p in places)
        }
        self._rows: dict[tuple[Atom, ...], Row] = {}  # by the term that each row takes out

    def _names(self) -> dict[Place, str]:
        """The first part keeps the name; another is "name (input)", "name (input.axis)" if the input has it twice."""
        taken = {s.name for shape in self._whole.values() for size in shape for s in symbols(size)}
        names: dict[Place, str] = {}
        for name, places in self.places.items():
            for place in places:
                if self._first[place] != place:
                    names[place] = names[self._first[place]]
                elif place == places[0]:
                    names[place] = name
                else:
                    twice = sum(1 for p in places if p[0] == place[0]) > 1
                    part = f"{name} ({place[0]}.{place[1]})" if twice else f"{name} ({place[0]})"
                    while part in taken:
                        part += "'"
                    taken.add(part)
                    names[place] = part
        return names

    @property
    def apart(self) -> bool:
        """Whether a name has several parts."""
        return any(len({self._first[p] for p in places}) > 1 for places in self.places.values())

    @property
    def undivided(self) -> Mapping[str, Size]:
        """The undivided dim of each part."""
        return self._undivided

    def shapes(self, given: Mapping[str, Size] | None = None) -> dict[str, Shape]:
        """The shapes of the inputs, with a dim for each part, or the size that is given for it."""
        sizes = {
            self.names[place]: _dim(self._dims[name], self.names[place])
            for name, places in self.places.items()
            for place in places
        } | dict(given or {})
        return {
            name: tuple(sizes[self.names[name, d]] if (name, d) in self.names else s for d, s in enumerate(shape))
            for name, shape in self._whole.items()
        }

    # ---- what a trial tells

    def learn(self, guards: Iterable[Guard], nodes: Iterable[Node]) -> None:
        """Puts together what these equalities and nodes need to be one. Raises `_Together` once nothing is apart."""
        for node in nodes:
            self._look_up(node)
        new = False
        for guard in guards:
            difference = guard.lhs - guard.rhs
            used = {s.name for s in symbols(difference)} & self._parts.keys()
            if not used or not isinstance(difference, Dim):
                continue
            if substitute(difference, self._undivided) == 0:
                self._join([self._parts[part] for part in used])
            else:
                row = self._rest({mono: Fraction(coef) for mono, coef in difference.terms})
                if row:
                    out = next(iter(row))
                    self._rows[out] = {mono: coef / row[out] for mono, coef in row.items()}
                    new = True
        if new:
            self._compare()
        if self.found and not self.apart:
            raise _Together

    def learn_all(self, graph: Graph) -> None:
        """Learns from a graph and its regions all that they tell."""
        for node in graph.nodes:
            for region in node.regions:
                self.learn_all(region)
        self.learn(graph.guards, graph.nodes)

    def _look_up(self, node: Node) -> None:
        """Puts together the names of a value in which data choose places."""
        at = node.op.places if isinstance(node.op, Op) else None
        if at is not None and node.inputs[at].kind != "const":
            used = {s.name for size in node.inputs[0].shape for s in symbols(size)} & self._parts.keys()
            for part in used:
                self._join(next(places for places in self.places.values() if self._parts[part] in places))

    def _rest(self, row: Row) -> Row:
        """What is left of a sum once the rows that are known to be 0 are taken off: one form for equal sums."""
        while (out := next((mono for mono in row if mono in self._rows), None)) is not None:
            by = row[out]
            for mono, coef in self._rows[out].items():
                row[mono] = row.get(mono, Fraction(0)) - by * coef
                if not row[mono]:
                    del row[mono]
        return row

    def _compare(self) -> None:
        """Joins the parts of a name that are equal by the rows."""
        for name, places in self.places.items():
            by_form: dict[frozenset[tuple[tuple[Atom, ...], Fraction]], list[Place]] = {}
            for place in dict.fromkeys(self._first[p] for p in places):
                ((alone, _),) = _dim(self._dims[name], self.names[place]).terms
                form = frozenset(self._rest({alone: Fraction(1)}).items())
                by_form.setdefault(form, []).append(place)
            for equal in by_form.values():
                self._join(equal)

    def _join(self, places: Iterable[Place]) -> None:
        """Puts places together, each with those of its own name."""
        for all_places in self.places.values():
            firsts = {self._first[p] for p in places} & {*all_places}
            if len(firsts) < 2:
                continue
            least = min(firsts, key=all_places.index)
            for place in all_places:
                if self._first[place] in firsts:
                    self._first[place] = least
            self.found = True


def parted(
    inputs: Sequence[ValueInfo],
    shapes: Mapping[str, Shape],
    kept: Collection[str],
    trial: Callable[[Mapping[str, Shape], Parts | None], Graph | None],
) -> Parts | None:
    """The parts that names of sizes have, those in `kept` aside; None where every name is one dim.

    `trial` imports the model with the given shapes, lets the parts `learn` as it goes, and gives None where the graph
    isn't complete.
    """
    parts = Parts(inputs, shapes, kept)
    if sum(map(len, parts.places.values())) > MOST_PLACES:
        return None
    for _ in range(TRIALS):
        if not parts.apart:
            return None
        try:
            graph = trial(parts.shapes(), parts)
            if graph is None:
                return None
            parts.learn_all(graph)
        except (_Together, RlxError):  # the import of the undivided names tells what is wrong
            return None
        if not parts.found:
            break
        parts.start()
    else:
        return None
    try:
        whole = trial(shapes, None)
    except RlxError:
        whole = None
    return parts if whole is None or equal_with(graph, whole, parts.undivided) else None


def _dim(like: Symbol, name: str) -> Dim:
    return Dim(name, like.lo, like.hi, like.multiple)
