"""`rlx.jit`: a Python function over graph values, traced once for each set of shapes, types and static arguments."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.errors import OptionError
from rlx.ir.graph import Array, Graph, Value
from rlx.records import dataclass
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import Session
from rlx.trace.tree import map_tree

__all__ = ["Traced", "jit"]

_LOG = logging.getLogger("rlx")
_LARGE = 1 << 20  # bytes; closed-over arrays above it become params, which are not printed or folded
_TRACES = 64  # kept for each function


@dataclass(frozen=True, eq=False)
class _Trace:
    graph: Graph
    result: Any  # the tree of results; a graph value stands for an output


class Traced:
    """A function made by `rlx.jit`: called with arrays it compiles, runs and returns NumPy arrays."""

    def __init__(self, function: Callable[..., Any], static: Sequence[str], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._signature = inspect.signature(function)
        unknown = [name for name in static if name not in self._signature.parameters]
        if unknown:
            raise OptionError(f"jit: {self.__name__} has no argument {unknown[0]!r} to be static")
        self._static = frozenset(static)
        self._options = options
        self._made: OrderedDict[Any, tuple[_Trace, CompiledGraph]] = OrderedDict()
        self._lock = threading.RLock()

    __name__: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result for these arguments, in the shape of tree that it returns."""
        bound, arrays, key = self._read(args, kwargs)
        with self._lock:
            if key not in self._made:
                reason = "the first call" if not self._made else "new shapes, types or static arguments"
                _LOG.info("jit: tracing %s: %s: %s", self.__name__, reason, key)
                trace = self._trace(bound)
                self._made[key] = trace, Session(**self._options).compile(trace.graph)
                while len(self._made) > _TRACES:
                    self._made.popitem(last=False)
            self._made.move_to_end(key)
            trace, model = self._made[key]
            got = iter(model.run(arrays))
        return map_tree(lambda path, leaf: next(got) if isinstance(leaf, Value) else leaf, trace.result, "")

    def lower(self, *args: Any, **kwargs: Any) -> Graph:
        """The graph that a call with these arguments would run."""
        return self._trace(self._read(args, kwargs)[0]).graph

    def compile(self, *args: Any, **kwargs: Any) -> CompiledGraph:
        """A compiled graph for arguments like these."""
        return Session(**self._options).compile(self.lower(*args, **kwargs))

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Array], Any]:
        given = self._signature.bind(*args, **kwargs)
        given.apply_defaults()
        arrays: dict[str, Array] = {}
        key: list[Any] = []

        def leaf(path: str, value: Any) -> Array:
            array = np.asarray(value)
            if array.dtype == object:
                raise OptionError(f"jit: {path} is a {type(value).__name__}: expected arrays, or name it in static=")
            if isinstance(value, float):
                array = array.astype(np.float32)
            if path in arrays:
                raise OptionError(f"jit: two leaves of the arguments are both named {path!r}: rename a key")
            arrays[path] = array
            key.append((path, array.shape, str(array.dtype)))
            return array

        bound: dict[str, Any] = {}
        for name, value in given.arguments.items():
            if name in self._static:
                try:
                    hash(value)
                except TypeError:
                    raise OptionError(f"jit: the static argument {name}={value!r} can't be hashed") from None
                key.append((name, type(value), value))
                bound[name] = value
            else:
                bound[name] = map_tree(leaf, value, name)
                key.append(repr(map_tree(lambda path, value: 0, value, name)))
        return bound, arrays, tuple(key)

    def _trace(self, bound: dict[str, Any]) -> _Trace:
        graph = Graph(self.__name__)
        values = {
            name: value
            if name in self._static
            else map_tree(lambda path, a: graph.input(path, a.shape, a.dtype), value, name)
            for name, value in bound.items()
        }
        call = inspect.BoundArguments(self._signature, OrderedDict(values))
        result = self._function(*call.args, **call.kwargs)
        count = 0

        def leaf(path: str, value: Any) -> Any:
            nonlocal count
            if isinstance(value, Value):
                graph.output(value, f"output{count}")
                count += 1
            return value

        map_tree(leaf, result, "")
        if not count:
            raise OptionError(f"jit: {self.__name__} returns no graph value, so there is nothing to compile")
        _large_to_params(graph)
        return _Trace(graph, result)


def _large_to_params(graph: Graph) -> None:
    """Closed-over arrays above a size become params with that data."""
    for const in [c for c in graph.constants if c.data is not None and c.data.nbytes > _LARGE]:
        graph.constants.remove(const)
        const.kind, const.name = "param", f"closure{len(graph.params)}"
        graph.params.append(const)


def jit(function: Callable[..., Any], *, static: Sequence[str] = (), **options: Any) -> Traced:
    """Compiles `function` by tracing it, once for each set of shapes, element types and values of `static` arguments.

    Arguments and results are trees (dict, list, tuple, dataclass, None) of arrays. What the function reads from outside
    is taken as it is when traced; later changes aren't seen. `options` are those of `rlx.compile`.
    """
    return Traced(function, (static,) if isinstance(static, str) else static, options)
