"""Buckets: one graph compiled for several ranges of its dims, over one set of weights.

A size belongs to the rung of the ladder that holds it. On a device whose compiled graphs take any size, a rung is a
compile for its range: nothing is padded. On a device that makes a function for every size (`Backend.specialises`),
inputs are padded with zeros to the top of the rung and outputs cut, along those dims for which the lowerings prove that
no result depends on added entries (`rlx.kernels.independence`); along others every size is a rung of its own.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from math import prod
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np

from rlx.backends import choose_backend
from rlx.backends.base import by_position, spec_of
from rlx.boundary import bounded_class
from rlx.cost.kept import ceilings_of
from rlx.cost.lowered import lower
from rlx.cost.model import CALLS, predict_lowered
from rlx.errors import BusyError, ClosedError, ExecutionError, NameNotFound, OptionError, RlxError, ShapeError, no_such
from rlx.forks import restart_in_child
from rlx.ir.extents import bind_extents, of_parts
from rlx.ir.graph import Array, Graph, refuse_masked
from rlx.ir.shape import Dim, Size, evaluate
from rlx.kernels.independence import mixing
from rlx.options import CompileOptions, Options, parse_bytes
from rlx.passes import run_passes
from rlx.passes.dims import apply_dims, with_dims
from rlx.runtime.arrays import on_device, padded, to_array
from rlx.runtime.choice import usual_extents
from rlx.runtime.compiled import CompiledGraph, Results
from rlx.runtime.session import ARTIFACT, TEXT, Session, Source, import_graph, kind_of
from rlx.runtime.weights import WeightRegistry
from rlx.units import with_ints

__all__ = ["Buckets", "CompileEvent"]

Range = tuple[int, int]
Key = tuple[Range, ...]  # a range for each dim of the ladder
Ladder = Mapping[str, str | Iterable[int | Range]]

POLICIES = ("auto", "buckets", "dynamic")
GAIN = 1.05  # by what buckets must be predicted to be faster than one compile
SAMPLES = 8  # rungs that the prediction looks at
LARGEST_LADDER = 4096  # rungs


@dataclass(frozen=True)
class CompileEvent:
    """One compile: the range of each dim, why ("warmup", "first run at n=7", ...), its seconds and bytes.

    `kind` is "range" (for any size of the range), "padded" (for the top of it), "exact" or "dynamic" (for all sizes).
    `bytes` is what it takes besides the weights.
    """

    ranges: dict[str, Range]
    kind: str
    reason: str
    seconds: float
    bytes: int

    def __str__(self) -> str:
        return f"{self.kind} compile at {_text(self.ranges)}: {self.reason} ({self.seconds:.3f} s, {self.bytes:,} B)"


@bounded_class(ExecutionError)
class Buckets:
    """A graph or model file compiled for the rungs of a ladder, as runs need them; it runs like a `CompiledGraph`.

    `ladder` gives for each dim "pow2" (powers of two up to its upper bound), the tops of its ranges ([16, 64, 256]), or
    the ranges ([(1, 16), (17, 256)]). `limit` (bytes, or "1GiB") bounds what all rungs take besides the weights: those
    used least recently go first. `policy`: "buckets", "dynamic" (one compile for all sizes), or "auto", which takes
    what the cost model predicts to be faster, with a share of the compiles; `reason` says why. `on_compile` is called
    with each `CompileEvent`; `events` has all of them. Weights are held once, in `registry`. Further keywords are those
    of `rlx.compile`. Raises `OptionError` for a ladder that does not fit the graph, and for a graph with states.
    """

    def __init__(
        self,
        source: Source,
        ladder: Ladder,
        *,
        policy: str = "auto",
        limit: int | str | None = None,
        on_compile: Callable[[CompileEvent], None] | None = None,
        registry: WeightRegistry | None = None,
        **options: Unpack[Options],
    ) -> None:
        if not isinstance(policy, str) or policy not in POLICIES:
            raise OptionError(f"policy={policy!r}: expected one of {', '.join(map(repr, POLICIES))}")
        chosen = CompileOptions().with_options(options)
        self._backend = choose_backend(chosen.device)
        graph = _graph_of(source, chosen)
        if graph.states:
            raise OptionError(f"buckets: graph {graph.name!r} has states, which only one compile can hold: rlx.compile")
        graph = _undivided(graph, ladder)
        self.ladder = {name: _ranges(graph, name, steps) for name, steps in ladder.items()}
        if not self.ladder or prod(map(len, self.ladder.values())) > LARGEST_LADDER:
            raise OptionError(f"buckets: the ladder has no rung, or more than {LARGEST_LADDER}")
        self._whole = tuple((ranges[0][0], ranges[-1][1]) for ranges in self.ladder.values())
        self._graph = apply_dims(graph, dict(zip(self.ladder, self._whole, strict=True)))
        self.device = self._backend.name
        self.registry = WeightRegistry() if registry is None else registry
        if "packing" in self._backend.honours:
            options.setdefault("packing", "shared")
        options |= {"device": self.device, "dims": None, "cache": False}
        self._session = Session(registry=self.registry, **options)
        self.limit = None if limit is None else parse_bytes(limit)
        self.inputs = tuple(spec_of(v) for v in self._graph.inputs)
        self.outputs = tuple(spec_of(o.value, o.name) for o in self._graph.outputs)
        self.events: list[CompileEvent] = []
        self._on_compile = on_compile
        self._live: OrderedDict[Key, int] = OrderedDict()  # what each compile takes, by last use
        self._models: dict[Key, CompiledGraph] = {}
        self._shared: CompiledGraph | None = None  # of a device that makes a function for every size
        self._gone: set[Key] = set()
        self._given: dict[str, tuple[Any, bool]] = {}  # params that were set, for compiles to come
        self._restart()
        restart_in_child(self._restart)
        self._closed = False
        self._mixing = self._obstacles() if self._backend.specialises else {}
        self.policy, self.reason = (policy, "named by the caller") if policy != "auto" else self._decided()

    def _restart(self) -> None:
        """No other thread compiles or runs: at first, and in a forked child."""
        self._lock = threading.RLock()
        self._running: Counter[Key] = Counter()  # which are not dropped
        self._changed = threading.Condition(self._lock)  # no rung runs any more, or nobody sets params
        self._setting = 0  # threads that set params, or wait for it: no run begins meanwhile
        self._setter = 0  # the thread that sets them, whose `on_compile` may run

    def __repr__(self) -> str:
        rungs = ", ".join(f"{name} in {len(ranges)} rungs" for name, ranges in self.ladder.items())
        return f"<Buckets of {self._graph.name!r} on {self.device!r}: {rungs}, {self.policy}, {len(self._live)} live>"

    # ---- what is decided

    def _obstacles(self) -> dict[str, str | None]:
        """For each dim why inputs can't be padded along it, None where they can."""
        made = run_passes(self._graph)
        return {name: mixing(made, name) for name in self.ladder}

    def _pads(self, dim: str) -> bool:
        return self._backend.specialises and self._mixing[dim] is None

    def _decided(self) -> tuple[str, str]:
        try:
            one, many = self._price(False), self._price(True)
        except RlxError as error:
            return "dynamic", f"a run has no price: {error}"
        best = "buckets" if many * GAIN < one else "dynamic"
        return best, f"a run is predicted to take {1e6 * many:.3g} us in buckets, {1e6 * one:.3g} us otherwise"

    def _price(self, buckets: bool) -> float:
        """Seconds of a run with its share of the compiles: the mean over the middles of some rungs."""
        ceilings = ceilings_of(self.device, self._session.options.threads, measure=False)
        rungs = list(product(*self.ladder.values()))
        sample = rungs[:: -(-len(rungs) // SAMPLES)]
        whole = lower(self._graph, self._backend, self._session.options)
        total = 0.0
        for key in sample:
            ranges = dict(zip(self.ladder, key, strict=True))
            own = buckets and not self._backend.specialises
            made = lower(apply_dims(self._graph, ranges), self._backend, self._session.options) if own else whole
            tops = {
                name: hi if buckets and self._pads(name) else (lo + hi + 1) // 2 for name, (lo, hi) in ranges.items()
            }
            at = {name: n for name, n in tops.items() if name in made.graph.dims()}
            predicted = predict_lowered(made, ceilings, usual_extents(made.graph, at), expected_calls=CALLS)
            total += predicted.seconds + predicted.compile * self._compiles(buckets) / CALLS
        return total / len(sample)

    def _compiles(self, buckets: bool) -> int:
        """How many compiles serve all sizes."""
        if not self._backend.specialises:
            return prod(map(len, self.ladder.values())) if buckets else 1
        return prod(
            len(ranges) if buckets and self._pads(name) else sum(hi - lo + 1 for lo, hi in ranges)
            for name, ranges in self.ladder.items()
        )

    # ---- compiles

    def warmup(self, sizes: Iterable[Mapping[str, int]] | None = None) -> list[CompileEvent]:
        """Compiles ahead of time, with one run on zeros: for these sizes of the dims, or for every rung.

        Gives the events of the compiles that this took. Raises `OptionError` where every size is a rung of its own and
        none are given, `ExecutionError` for a size that no rung holds.
        """
        if sizes is None:
            exact = next((n for n in self.ladder if self._backend.specialises and not self._pads(n)), None)
            if exact is not None:
                raise OptionError(
                    f"warmup: {self.device!r} needs exact sizes of {exact!r} ({self._why(exact)}): name them"
                )
            tops = (
                {n: hi for n, (_, hi) in zip(self.ladder, key, strict=True)} for key in product(*self.ladder.values())
            )
            sizes = tops
        before = len(self.events)
        for at in sizes:
            missing = [name for name in self.ladder if name not in at]
            if missing:
                raise NameNotFound(f"warmup: the size of {missing[0]!r} is missing in {dict(at)}")
            with self._lock:
                self._model(self._key(at), at, "warmup")
        return self.events[before:]

    def _why(self, dim: str) -> str:
        return self._mixing.get(dim) or "padding is exact"

    def _key(self, extents: Mapping[str, int]) -> Key:
        """The rung for these extents."""
        found: list[Range] = []
        for name, ranges in self.ladder.items():
            n = extents[name]
            rung = next(((lo, hi) for lo, hi in ranges if lo <= n <= hi), None)
            if rung is None:
                raise ExecutionError(f"buckets: no rung of {name!r} holds {n}; there are {_spans(ranges)}")
            ranged = not self._backend.specialises or (self.policy == "buckets" and self._pads(name))
            found.append(rung if ranged else (n, n))
        return self._whole if self.policy == "dynamic" and not self._backend.specialises else tuple(found)

    def _model(self, key: Key, extents: Mapping[str, int], reason: str = "") -> CompiledGraph:
        """The compiled graph of a rung, made where there is none; the lock is held."""
        if self._closed:
            raise ClosedError("these buckets were closed")
        if key in self._live:
            self._live.move_to_end(key)
            return self._models[key]
        if not reason:
            at = ", ".join(f"{name}={extents[name]}" for name in self.ladder)
            reason = f"{'it was dropped before' if key in self._gone else 'first run'} at {at}"
        start = time.perf_counter()
        ranges = dict(zip(self.ladder, key, strict=True))
        model, size = self._compiled(ranges)
        self._models[key] = model
        try:
            self._admit(key, size)
            self._warm(model, ranges)
        except BaseException:
            self._drop(key)
            raise
        seconds = time.perf_counter() - start
        event = CompileEvent(ranges, self._kind(ranges), reason, seconds, size)
        self.events.append(event)
        if self._on_compile is not None:
            self._on_compile(event)
        return model

    def _kind(self, ranges: Mapping[str, Range]) -> str:
        if self._backend.specialises:
            padded = any(lo != hi for lo, hi in ranges.values())
            return "padded" if padded else "exact"
        return "dynamic" if tuple(ranges.values()) == self._whole else "range"

    def _compiled(self, ranges: dict[str, Range]) -> tuple[CompiledGraph, int]:
        """A compiled graph for the ranges, and the bytes that it takes besides the weights."""
        if self._backend.specialises:
            if self._shared is None:
                self._shared = self._session.compile(self._graph)
                self._shared._executable.keep_functions(LARGEST_LADDER)
                self._give(self._shared)
            tops = usual_extents(self._graph, {name: hi for name, (_, hi) in ranges.items()})
            return self._shared, _all_values(self._shared.compilation.legal, tops)
        model = self._session.compile(apply_dims(self._graph, ranges))
        self._give(model)
        figures = {} if model.memory is None else model.memory.figures()
        arena = 0 if model.needs is None else model.needs.arena or 0
        return model, arena + figures.get("code_bytes", 0) + figures.get("workspace_bytes", 0)

    def _give(self, model: CompiledGraph) -> None:
        for name, (array, convert) in self._given.items():
            model.set_param(name, array, convert=convert)

    def _admit(self, key: Key, size: int) -> None:
        """Makes room within the limit by dropping what was used least recently."""
        for old in list(self._live):
            if self.limit is None or self.nbytes + size <= self.limit:
                break
            if not self._running[old]:
                self._drop(old)
                self._gone.add(old)
        self._live[key] = size

    def _drop(self, key: Key) -> None:
        del self._live[key]
        model = self._models.pop(key)
        if model is self._shared:
            model._executable.forget_function({n: hi for n, (_, hi) in zip(self.ladder, key, strict=True)})
        else:
            model.close()

    def _warm(self, model: CompiledGraph, ranges: Mapping[str, Range]) -> None:
        """One run on zeros: packs weights, and compiles where the first run does."""
        if model._unset:
            return
        at = usual_extents(self._graph, {name: hi for name, (_, hi) in ranges.items()})
        zeros = [np.zeros([evaluate(s, at) for s in spec.shape], spec.dtype.numpy) for spec in self.inputs]
        with suppress(ExecutionError):  # zeros may be no data for this graph
            model.run(zeros)

    # ---- runs

    @contextmanager
    def _held(self, key: Key, extents: Mapping[str, int]) -> Iterator[CompiledGraph]:
        """The compiled graph of a rung, which is not dropped meanwhile."""
        with self._lock:
            while self._setting and self._setter != threading.get_ident():
                self._changed.wait()
            model = self._model(key, extents)
            self._running[key] += 1
        try:
            yield model
        finally:
            with self._lock:
                self._running[key] -= 1
                self._changed.notify_all()

    def run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        *more: Any,
        outputs: Sequence[str | int] | None = None,
        out: Mapping[str, Any] | Sequence[Any] | None = None,
    ) -> list[Any]:
        """Runs once, on the rung for the inputs' shapes; arguments and results as of `CompiledGraph.run`.

        Raises `ExecutionError` for a size that no rung holds.
        """
        if more:
            from rlx.runtime.misuse import one_set_of_inputs

            raise one_set_of_inputs(more)
        given = by_position(self.inputs, inputs, "input")
        space = self._backend.space
        adopt = None if space is None else space.local
        arrays = [to_array(s, a, f"input {s.name!r}", adopt) for s, a in zip(self.inputs, given, strict=True)]
        extents = bind_extents(self._graph, {s.name: a.shape for s, a in zip(self.inputs, arrays, strict=True)})
        for name in self.ladder:
            if name not in extents:
                raise ShapeError(f"buckets: the dim {name!r} can't be read off the inputs' shapes")
        key = self._key(extents)
        tops = {name: hi for name, (_, hi) in zip(self.ladder, key, strict=True)}
        with self._held(key, extents) as model:
            if not self._backend.specialises or all(extents[name] == n for name, n in tops.items()):
                return model.run(arrays, outputs=outputs, out=out)
            return self._run_padded(model, arrays, extents, {**extents, **tops}, outputs, out)

    def _run_padded(
        self,
        model: CompiledGraph,
        arrays: Sequence[Array],
        extents: Mapping[str, int],
        tops: Mapping[str, int],
        outputs: Sequence[str | int] | None,
        out: Mapping[str, Any] | Sequence[Any] | None,
    ) -> list[Any]:
        """A run at the tops of the rungs, on inputs with zeros added, whose outputs are cut."""
        own: list[Any] = [None] * len(self.outputs) if out is None else model._by_output(out)
        targets = model._targets(own)
        wanted = list(range(len(self.outputs))) if outputs is None else model._positions(outputs)
        shapes = {n: tuple(evaluate(s, extents) for s in spec.shape) for n, spec in enumerate(self.outputs)}
        for n, target in enumerate(targets):
            if target is not None and target.shape != shapes[n]:
                raise ShapeError(
                    f"out for {self.outputs[n].name!r}: this run needs shape {shapes[n]}, got {target.shape}"
                )
        wide = [tuple(evaluate(s, tops) for s in spec.shape) for spec in self.inputs]
        ready = [padded(array, shape) for array, shape in zip(arrays, wide, strict=True)]
        asked = list(dict.fromkeys([*wanted, *(n for n, target in enumerate(targets) if target is not None)]))
        made = dict(zip(asked, model.run(ready, outputs=asked), strict=True))
        results = {n: array[tuple(map(slice, shapes[n]))] for n, array in made.items()}
        for n, target in enumerate(targets):
            if target is not None:
                target[...] = np.asarray(results[n])
        made = {n: np.ascontiguousarray(a) if isinstance(a, np.ndarray) else a for n, a in results.items()}
        return [made[n] if own[n] is None else own[n] for n in wanted]

    def __call__(self, *args: Any, **named: Any) -> Results:
        """Runs with inputs by position, as one mapping, or by keyword; the outputs by name."""
        given = args[0] if len(args) == 1 and isinstance(args[0], Mapping) and not named else None
        if given is None and args and named:
            raise OptionError("inputs are given by position or by name, not both")
        made = self.run(given if given is not None else named or list(args))
        return Results([spec.name for spec in self.outputs], made)

    # ---- weights

    def set_param(self, name: str, array: Any, *, convert: bool = False) -> None:
        """Sets one param on every rung, compiled or to come. Raises as `CompiledGraph.set_param`."""
        self.set_params({name: array}, convert=convert)

    def set_params(self, arrays: Mapping[str, Any], *, convert: bool = False) -> None:
        """Sets params by name on every rung, or on none where one can't take them; the values are copied.

        With busy="wait" it waits until no rung runs; runs that come meanwhile wait for it.
        """
        with self._idle():
            if not self._live:
                self._model(self._key(self._first()), self._first(), "params were set")
            copies = {name: _copied(name, array) for name, array in arrays.items()}
            models = list(dict.fromkeys(self._models.values()))
            try:
                for model in models:
                    model.set_params(copies, convert=convert)
            except BaseException:
                if model is not models[0]:  # some have the new values: all are compiled again, with the old ones
                    for key in list(self._live):
                        self._drop(key)
                raise
            self._given |= {name: (array, convert) for name, array in copies.items()}

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """No rung runs in the block, so that each may be dropped. Raises `BusyError` unless it may wait for that."""
        with self._lock:
            if self._session.options.busy == "error" and any(self._running.values()):
                raise BusyError("set_params: a rung is running in another thread: wait for it, or give busy='wait'")
            self._setting += 1
            try:
                while any(self._running.values()):
                    self._changed.wait()
                outer, self._setter = self._setter, threading.get_ident()
                try:
                    yield
                finally:
                    self._setter = outer  # this thread, where an `on_compile` sets params too
            finally:
                self._setting -= 1
                self._changed.notify_all()

    def _first(self) -> dict[str, int]:
        return {name: ranges[0][1] for name, ranges in self.ladder.items()}

    # ---- what is there

    @property
    def live(self) -> list[dict[str, Range]]:
        """The ranges that are compiled now, the one used least recently first."""
        return [dict(zip(self.ladder, key, strict=True)) for key in self._live]

    @property
    def nbytes(self) -> int:
        """Bytes of all that is compiled now, without the weights; those are `registry.nbytes`."""
        return sum(self._live.values())

    def explain(self) -> str:
        """The policy, how sizes become rungs, and every compile with its reason."""
        lines = [f"policy   {self.policy}: {self.reason}"]
        for name, ranges in self.ladder.items():
            how = "no padding: each rung takes any of its sizes"
            if self._backend.specialises:
                how = f"padded to the top: {self._why(name)}" if self._pads(name) else f"exact sizes: {self._why(name)}"
            lines.append(f"dim      {name}: {_spans(ranges)}; {how}")
        room = "" if self.limit is None else f" of {self.limit:,} B"
        lines.append(
            f"memory   {self.nbytes:,} B{room} in {len(self._live)} compiles, weights {self.registry.nbytes:,} B"
        )
        return "\n".join([*lines, *(f"event    {event}" for event in self.events)])

    def close(self) -> None:
        """Gives all memory back; runs then raise `ClosedError`."""
        with self._lock:
            self._closed = True
            for model in dict.fromkeys([*self._models.values(), *([self._shared] if self._shared else [])]):
                model.close()
            self._live.clear()
            self._models.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _graph_of(source: Source, options: CompileOptions) -> Graph:
    if isinstance(source, Graph):
        return apply_dims(source, options.dims)
    path, kind = kind_of(source)
    if kind == ARTIFACT:
        raise OptionError(f"buckets: {path} is compiled already; give the model file or graph")
    graph = import_graph(path, kind, options.dims)
    return apply_dims(graph, options.dims) if kind == TEXT else graph


def _copied(name: str, value: Any) -> Any:
    """A value for a param that no later change of it reaches; numbers of Python stay such, which have no type yet."""
    refuse_masked(f"param {name!r}", value)
    plain = isinstance(value, list | tuple | int | float) or on_device(value)
    return copy.deepcopy(value) if plain else np.array(value)


def _undivided(graph: Graph, names: Iterable[str]) -> Graph:
    """The graph with all parts of these dims as one, as a rung is a range of one size."""
    known = graph.dims()
    values: dict[str, Size] = {}
    for name in names:
        whole = known.get(name)
        if whole is not None:
            parts = {part: known[part] for part in of_parts({name: None}, known)}
            tops = [part.hi for part in parts.values() if part.hi is not None]
            lo, hi = max(part.lo for part in parts.values()), min(tops, default=None)
            if hi is not None and lo > hi:
                bounds = ", ".join(f"{n!r} in {p.lo}..{'' if p.hi is None else p.hi}" for n, p in parts.items())
                raise OptionError(f"buckets: a rung of {name!r} is a range of one size, but dims= leaves {bounds}")
            dim = Dim(whole.name, lo, hi, math.lcm(*(part.multiple for part in parts.values())))
            values |= dict.fromkeys(parts, dim)
    return with_dims(graph, values) if values else graph


def _ranges(graph: Graph, name: str, steps: str | Iterable[int | Range]) -> list[Range]:
    """The ranges of a dim, ascending and apart, within its bounds."""
    symbol = graph.dims().get(name)
    if symbol is None:
        raise no_such("dim", name, graph.dims(), call="buckets")
    if isinstance(steps, str):
        if steps != "pow2" or symbol.hi is None:
            raise OptionError(f"buckets: ladder {steps!r} of {name!r}: expected 'pow2' for a dim with an upper bound")
        steps = [2**i for i in range(symbol.hi.bit_length()) if symbol.lo <= 2**i < symbol.hi] + [symbol.hi]
    if not isinstance(steps, Iterable) or not np.iterable(steps):
        raise OptionError(f"buckets: ladder {steps!r:.40} of {name!r}: expected 'pow2' or a list of sizes or ranges")
    found: list[Range] = []
    for step in steps:
        after = found[-1][1] + 1 if found else symbol.lo
        lo, hi = with_ints(step if isinstance(step, tuple) and len(step) == 2 else (after, step))
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (lo, hi))
        if not whole or not after <= lo <= hi or (symbol.hi is not None and hi > symbol.hi):
            top = "" if symbol.hi is None else symbol.hi
            raise OptionError(f"buckets: rung {step!r} of {name!r}: expected ascending sizes within {symbol.lo}..{top}")
        if -(-lo // symbol.multiple) * symbol.multiple > hi or hi % symbol.multiple:
            raise OptionError(f"buckets: rung {step!r} of {name!r}: its top must be a multiple of {symbol.multiple}")
        found.append((lo, hi))
    return found


def _all_values(graph: Graph, extents: Mapping[str, int]) -> int:
    """Bytes of everything that a function makes, the most that a library may hold."""
    values = [v for node in graph.nodes for v in node.outputs]
    try:
        return sum(v.dtype.nbytes(prod(evaluate(s, extents) for s in v.shape)) for v in values)
    except (KeyError, RlxError):  # a size that data decide
        return 0


def _spans(ranges: Sequence[Range]) -> str:
    return ", ".join(str(lo) if lo == hi else f"{lo}..{hi}" for lo, hi in ranges)


def _text(ranges: Mapping[str, Range]) -> str:
    return ", ".join(f"{name}={_spans([span])}" for name, span in ranges.items())
