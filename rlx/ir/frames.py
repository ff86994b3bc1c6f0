"""Frames: the graphs that Python functions are being traced into, and what they take of those around.

While a frame is open, ops add their nodes to its graph, whatever graph their inputs belong to: a value of a graph
around it becomes an input of this one (see `Frame.own`), one of a trace that has ended is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from rlx.errors import OptionError
from rlx.ir.dtype import DType, dtype_of
from rlx.ir.graph import Graph
from rlx.ir.value import OPEN, TensorType, Value

__all__ = ["Frame", "current", "frame_of"]

SMALL = (
    1 << 10
)  # bytes; constants up to it are repeated in the graphs that use them, larger ones are taken from outside

_ENDED: WeakSet[Graph] = WeakSet()  # graphs of traces that are over: no function adds to them


class Frame:
    """A graph being traced; as a context it is the innermost one. `outer` is the frame around it.

    With `kept`, the graph stays open to other additions afterwards (it is a graph that the user builds by hand).
    """

    def __init__(self, graph: Graph, outer: Frame | None = None, *, kept: bool = False) -> None:
        self.graph = graph
        self.outer = outer
        self.kept = kept
        self.captured: dict[Value, Value] = {}  # of the graph around -> the input that stands for it here
        self._arrays: dict[int, tuple[Any, Value]] = {}  # by id: the array, and the constant that was made of it
        self._token: Any = None

    def __enter__(self) -> Frame:
        self._token = OPEN.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        OPEN.reset(self._token)
        if not self.kept:
            _ENDED.add(self.graph)

    def encloses(self, graph: Graph) -> bool:
        """Whether this is the frame's graph or one around it."""
        return graph is self.graph or (self.outer is not None and self.outer.encloses(graph))

    def input(self, type: TensorType) -> Value:
        """A further input of the graph; as a region's, it needs no name that says anything."""
        value = Value(self.graph, type.decoded, "input", f"in{len(self.graph.inputs)}")
        self.graph.inputs.append(value)
        return value

    def own(self, value: Value) -> Value:
        """The value, which may belong to a graph around this one, as one of this graph. `OptionError` for others."""
        if value.graph is self.graph:
            return value
        if self.outer is None or not self.outer.encloses(value.graph):
            raise OptionError(leaked(value))
        value = self.outer.own(value)
        if value.data is not None and value.kind == "const" and value.data.nbytes <= SMALL:
            return self.array(value.data)
        if value not in self.captured:
            made = self.captured[value] = self.input(value.type)
            made.weak = value.weak
        return self.captured[value]

    def array(self, array: Any, dtype: DType | None = None) -> Value:
        """The array as a constant, one for all its uses; large ones are constants of the outermost graph."""
        kept = self._arrays.get(id(array)) if dtype is None else None
        if kept is not None and _equal(kept[1].data, array):
            return kept[1]
        if self.outer is not None and getattr(array, "nbytes", 0) > SMALL:
            return self.own(self.outer.array(array, dtype))
        made = self.graph.constant(array, dtype)
        if dtype is None and isinstance(array, np.ndarray):
            self._arrays[id(array)] = array, made
        return made


def _equal(data: Any, array: Any) -> bool:
    """Whether the array still holds what it held when it was read."""
    same: bool = data.shape == array.shape and data.tobytes() == np.asarray(array).tobytes()
    return same


def leaked(value: Value) -> str:
    """What to say of a value that outlived its trace."""
    return (
        f"{value!r} belongs to {value.graph.name!r}, a function or loop body whose trace is over: return what "
        "is needed later as a result, don't keep it in a list, an attribute or a global"
    )


def current() -> Frame | None:
    """The innermost open frame."""
    frame: Frame | None = OPEN.get()
    return frame


def frame_of(values: Sequence[Value], what: str) -> tuple[Graph, Frame | None]:
    """Where an op on these values goes: the graph, and its frame unless the graph is built by hand.

    Raises `OptionError` where no frame is open and there are no values to tell, and for values of ended traces.
    """
    frame = current()
    for value in values:
        if value.graph in _ENDED:
            raise OptionError(f"{what}: {leaked(value)}")
    if frame is not None and (not values or any(frame.encloses(v.graph) for v in values)):
        return frame.graph, frame
    if not values:
        raise OptionError(f"{what}: at least one input must be a graph value (or call it inside rlx.jit)")
    return values[0].graph, None


def weakest(values: Sequence[Value]) -> DType:
    """The element type that numbers take beside these values: that of the last which isn't a number itself."""
    strong = [v.dtype for v in values if not v.weak]
    return strong[-1] if strong else max((v.dtype for v in values), key=lambda d: ("buif".find(d.kind), d.bits))


def number_type(value: object) -> DType:
    """The type of a Python number while nothing says another: i64, f64, c128 or bool."""
    if isinstance(value, complex):
        return dtype_of("c128")
    return dtype_of("bool" if isinstance(value, bool) else "i64" if isinstance(value, int) else "f64")
