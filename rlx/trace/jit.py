"""`rlx.jit`: a Python function over graph values, traced once for each set of shapes, types and static arguments."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Unpack, overload
from weakref import ReferenceType, WeakKeyDictionary, ref

from rlx.boundary import bounded, bounded_class, converted
from rlx.errors import CompileError, ExecutionError, OptionError
from rlx.forks import restart_in_child
from rlx.ir.frames import Frame, current
from rlx.ir.graph import Array, Graph, Value
from rlx.ir.shape import Dim
from rlx.options import DeviceOptions
from rlx.records import dataclass
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import Session
from rlx.trace.arguments import Arguments, Leaf
from rlx.trace.control import value_of
from rlx.trace.reasons import Trace, reason_for, statics
from rlx.trace.tree import fill, leaves_of, map_tree, ordered
from rlx.units import int_or_same

__all__ = ["Trace", "Traced", "jit"]

_LOG = logging.getLogger("rlx")
_LARGE = 1 << 20  # bytes; closed-over arrays above it become params, which are not printed or folded
_TRACES = 64  # kept for each function, compiled and as history
_SEEN = 4096  # signatures of traces that are remembered
_CLONES = 32  # of one trace, for threads that call it at once; more wait
_OFTEN = 8  # traces of one function, or calls of jit on one, after which a warning says so; then at each doubling
_JITTED: WeakKeyDictionary[types.CodeType, int] = WeakKeyDictionary()


@dataclass(eq=False)
class _Made:
    """A trace compiled: what a call of its signature runs."""

    trace: Trace
    pack: Callable[[list[Array]], Any]  # the outputs of a run -> the result of the call
    models: list[CompiledGraph]  # the model and its clones

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """No thread is using any of them: at first, and in a forked child."""
        self.idle: SimpleQueue[CompiledGraph] = SimpleQueue()
        for model in self.models:
            self.idle.put(model)

    def run(self, arrays: list[Array]) -> Any:
        """Runs on a model that no other thread is using: a clone where there is none, up to a number of them."""
        try:
            model, wanted = self.idle.get_nowait(), False
        except Empty:
            model, wanted = self.idle.get(), True
        try:
            if wanted and len(self.models) < _CLONES and "clone" in model.capabilities:
                clone = model.clone()
                self.models.append(clone)
                self.idle.put(clone)
            return self.pack(model.run(arrays))
        finally:
            self.idle.put(model)


@bounded_class(CompileError, but=("__call__",))
class Traced:
    """A function made by `rlx.jit`: called with arrays it compiles, runs and returns what `CompiledGraph.run` does."""

    __name__: str

    def __init__(
        self,
        function: Callable[..., Any],
        static: Sequence[str | int],
        dims: Mapping[str, Any],
        options: DeviceOptions,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._arguments = Arguments(function, static, dims)
        self.__name__ = self._arguments.name
        self._session = Session(**options)
        self._made: OrderedDict[Any, _Made] = OrderedDict()
        self._seen: OrderedDict[int, None] = OrderedDict()  # hashes of the keys of traces
        self._history: deque[Trace] = deque(maxlen=_TRACES)
        self._count = 0  # traces so far
        self._large: list[ReferenceType[Array]] = []  # closed-over arrays that became params: traces share them
        self._restart()
        restart_in_child(self._restart)

    def _restart(self) -> None:
        """No other thread traces or runs it: at first, and in a forked child."""
        self._lock = threading.RLock()
        for made in self._made.values():
            made.restart()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result for these arguments, in the shape of tree that it returns.

        In a function that is being traced it is traced along as if it were written there.
        """
        if current() is not None:
            return self._function(*args, **kwargs)
        try:
            arrays, key = self._arguments.read(args, kwargs)
            made = self._made.get(key)
            if made is None:
                made = self._make(key, self._arguments.bind(args, kwargs))
            return made.run(arrays)
        except Exception as error:
            if (clear := converted(error, f"jit {self.__name__}", ExecutionError)) is not None:
                raise clear from error
            raise

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<jit {self.__name__}: {len(self._made)} traces>"

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The traces that calls have made, in order, each with its reason: the last 64."""
        return tuple(self._history)

    def explain(self) -> str:
        """The traces as text: what each was made for, why, and how long it took."""
        lines = [f"{self.__name__}: traced {'once' if self._count == 1 else f'{self._count} times'}"]
        first = self._count - len(self._history)
        lines += [f"{i}  {trace}" for i, trace in enumerate(self._history, first)]
        return "\n".join(lines)

    def lower(self, *args: Any, **kwargs: Any) -> Graph:
        """The graph that a call with these arguments would run; a `TensorType` may stand for an array."""
        return self._trace(self._arguments.bind(args, kwargs), kept=True)[0]

    def compile(self, *args: Any, **kwargs: Any) -> CompiledGraph:
        """A compiled graph for arguments like these: its inputs are named after them, and it can be saved."""
        return self._session.compile(self.lower(*args, **kwargs))

    # ---- traces

    def _make(self, key: Any, bound: dict[str, Any]) -> _Made:
        with self._lock:
            if key in self._made:
                return self._made[key]
            start = time.perf_counter()
            given = self._arguments.leaves(bound)
            fixed = statics(self._arguments, bound)
            reason = reason_for(self._history, given, fixed, again=hash(key) in self._seen)
            _LOG.info("jit: tracing %s: %s", self.__name__, reason)
            graph, result = self._trace(bound)
            model = self._session.compile(graph)
            trace = Trace(reason, tuple(given), fixed, graph, time.perf_counter() - start)
            made = _Made(trace, _packer(result), [model])
            self._history.append(trace)
            self._count += 1
            self._seen[hash(key)] = None
            self._made[key] = made
            while len(self._made) > _TRACES:
                self._made.popitem(last=False)
            while len(self._seen) > _SEEN:
                self._seen.popitem(last=False)
            self._warn(self._count, reason)
            return made

    def _warn(self, count: int, reason: str) -> None:
        if count >= _OFTEN and count & (count - 1) == 0:
            _LOG.warning(
                "jit: %s has been traced %d times, lately because %s; dims= makes axes dynamic, so that one trace "
                "serves all sizes; a static argument that often changes is better an array (explain() lists traces)",
                self.__name__,
                count,
                reason,
            )

    def _trace(self, bound: dict[str, Any], *, kept: bool = False) -> tuple[Graph, Any]:
        """The graph, and the tree of results where a graph value stands for an output."""
        graph = Graph(self.__name__)
        frame = Frame(graph, kept=kept)
        inputs = iter([_input(graph, leaf) for leaf in self._arguments.leaves(bound)])
        values = {
            name: value if name in self._arguments.static else map_tree(lambda path, leaf: next(inputs), value, name)
            for name, value in bound.items()
        }
        call = inspect.BoundArguments(self._arguments.signature, OrderedDict(values))
        with frame:
            result = self._function(*call.args, **call.kwargs)
            result = map_tree(lambda path, leaf: _result(frame, path, leaf), result, "result")
        outputs = [leaf for _, leaf in leaves_of(result, "") if isinstance(leaf, Value)]
        for i, value in enumerate(outputs):
            graph.output(value, f"output{i}")
        if not outputs:
            raise OptionError(f"jit: {self.__name__} returns no graph value, so there is nothing to compile")
        self._large_to_params(graph)
        return graph, result

    def _large_to_params(self, graph: Graph) -> None:
        """Closed-over arrays above a size become params with that data, one array for equal ones of all traces."""
        for const in [c for c in graph.constants if c.data is not None and c.data.nbytes > _LARGE]:
            graph.constants.remove(const)
            const.kind, const.name = "param", f"closure{len(graph.params)}"
            graph.params.append(const)
            known = [a for a in (r() for r in self._large) if a is not None]
            same = next((a for a in known if _same(a, const.data)), None)
            if same is None:
                assert const.data is not None
                known.append(const.data)
            else:
                const.data = same
            self._large = [ref(a) for a in known]


def _same(a: Array, b: Array | None) -> bool:
    return b is not None and a.shape == b.shape and a.dtype == b.dtype and a.data.cast("B") == b.data.cast("B")


def _input(graph: Graph, leaf: Leaf) -> Value:
    value = graph.input(leaf.path, leaf.type.shape, leaf.type.dtype)
    value.weak = leaf.number
    return value


def _result(frame: Frame, path: str, leaf: Any) -> Any:
    """A leaf of the result: sizes of the run become values, what is no value is returned as it is."""
    return value_of(frame, leaf, path) if isinstance(leaf, Value | Dim) else leaf


def _packer(result: Any) -> Callable[[list[Array]], Any]:
    """The function from outputs of a run to the result of the call."""
    if isinstance(result, Value):
        return lambda got: got[0]
    if type(result) is tuple and all(isinstance(leaf, Value) for leaf in result):
        return tuple
    if type(result) is list and all(isinstance(leaf, Value) for leaf in result):
        return list
    build = _builder(result)
    return lambda got: build(iter(got))


def _builder(tree: Any) -> Callable[[Iterator[Array]], Any]:
    """The function from the outputs that are left to a part of the result."""
    if isinstance(tree, Value):
        return next
    if type(tree) is dict:
        parts = [(key, _builder(tree[key])) for key in ordered(tree)]
        if ordered(tree) == list(tree):
            return lambda outputs: {key: build(outputs) for key, build in parts}

        def build_dict(outputs: Iterator[Array]) -> Any:
            made = {key: build(outputs) for key, build in parts}
            return {key: made[key] for key in tree}

        return build_dict
    if type(tree) is tuple or type(tree) is list:
        kind, items = type(tree), [_builder(value) for value in tree]
        return lambda outputs: kind([build(outputs) for build in items])
    places = [leaf for _, leaf in leaves_of(tree, "")]

    def build(outputs: Iterator[Array]) -> Any:
        return fill(tree, [next(outputs) if isinstance(leaf, Value) else leaf for leaf in places])

    return build


def _count(function: Callable[..., Any]) -> None:
    """Warns where jit is called again and again on one function, each time to trace and compile it anew."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return
    count = _JITTED[code] = _JITTED.get(code, 0) + 1
    if count >= _OFTEN and count & (count - 1) == 0:
        _LOG.warning(
            "jit: rlx.jit has been called %d times on %s (%s:%d): each result traces and compiles anew; keep one, "
            "outside the loop",
            count,
            code.co_name,
            code.co_filename,
            code.co_firstlineno,
        )


@overload
def jit(
    function: Callable[..., Any],
    *,
    static: str | int | Sequence[str | int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    dims: Mapping[str, Any] | None = None,
    **options: Unpack[DeviceOptions],
) -> Traced: ...
@overload
def jit(
    function: None = None,
    *,
    static: str | int | Sequence[str | int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    dims: Mapping[str, Any] | None = None,
    **options: Unpack[DeviceOptions],
) -> Callable[[Callable[..., Any]], Traced]: ...
@bounded("jit", CompileError)
def jit(
    function: Callable[..., Any] | None = None,
    *,
    static: str | int | Sequence[str | int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    dims: Mapping[str, Any] | None = None,
    **options: Unpack[DeviceOptions],
) -> Any:
    """Compiles `function` by tracing it, once for each set of shapes, element types and values of `static` arguments.

    Any callable will do: a method, a `functools.partial`, one of NumPy's ufuncs. Arguments and results are trees (dict,
    list, tuple, dataclass, None) of arrays. What the function reads from outside, and the default of a parameter that a
    call leaves out, is taken as it is when traced; later changes aren't seen. `static` takes names or positions, as
    `static_argnames` and `static_argnums` do; arguments whose default is a string are static too. `dims` makes axes
    dynamic, so that one trace serves all their sizes: by argument (or leaf, "params.w") a name, a Dim, a pair (lowest,
    highest) or None for each axis, as in {"x": ("batch", None)}, or {axis: size}; and bounds for names:
    {"batch": (1, 64)}. `options` are those of `rlx.compile`. Without a function it is a decorator.
    """
    if function is None:
        return functools.partial(
            jit, static=static, static_argnums=static_argnums, static_argnames=static_argnames, dims=dims, **options
        )
    if not callable(function):
        raise OptionError(f"jit takes a function, got {type(function).__name__}")
    _count(function)
    chosen: list[str | int] = []
    for given in (static, static_argnums, static_argnames):
        given = int_or_same(given)
        if not isinstance(given, str | int | Sequence) or isinstance(given, bytes):
            raise OptionError(f"jit: static arguments are names or positions, got {given!r:.40}")
        chosen += [given] if isinstance(given, str | int) else list(given)
    if not isinstance(dims, Mapping | None):
        raise OptionError(f"jit: dims={dims!r:.40}: expected a mapping of arguments or names")
    return Traced(function, chosen, dims or {}, options)
