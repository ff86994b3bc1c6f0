"""CompiledGraph: what a user holds after compiling."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arithmetic import usual_arithmetic
from rlx.backends.base import Executable, Joins, TensorSpec, by_position, spec_of
from rlx.boundary import bounded_class, converted
from rlx.errors import ExecutionError, NameNotFound, OptionError, ShapeError, no_such
from rlx.ir.extents import UnequalSizes, check_extent
from rlx.ir.graph import Array, Value, refuse_masked
from rlx.ir.shape import symbols
from rlx.options import CompileOptions
from rlx.records import replace
from rlx.runtime.arrays import Views, row_of, share_memory, snapshot, to_array, to_target, with_kept
from rlx.runtime.experts import ExpertControl
from rlx.runtime.memory import Lifetime, ModelMemory
from rlx.runtime.report.shown import Shown

if TYPE_CHECKING:
    from rlx.compiler import Compilation
    from rlx.ir.mapped import FileIdentity
    from rlx.kernels.program import Buffer
    from rlx.plan.arena import MemoryPlan
    from rlx.plan.budget import Needs
    from rlx.plan.places import Places
    from rlx.runtime.adapters import Adapters
    from rlx.runtime.choice import Decision
    from rlx.runtime.replay import Recorder
    from rlx.runtime.restore import StoredCompilation
    from rlx.runtime.states import States

__all__ = ["CompiledGraph", "Results", "compiled_graph"]

KEPT_CHOICES = 256  # values of `outputs` whose positions are kept


class Results(Mapping[str, Any]):
    """The outputs of a call by name, in order; an int selects by position."""

    def __init__(self, names: Sequence[str], arrays: Sequence[Any]) -> None:
        self._arrays = dict(zip(names, arrays, strict=True))

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, int) and -len(self) <= key < len(self):
            return list(self._arrays.values())[key]
        if not isinstance(key, str) or key not in self._arrays:
            raise no_such("output", key, self._arrays)
        return self._arrays[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{n!r}: {_shown(a)}" for n, a in self._arrays.items()) + "}"


def _shown(result: Any) -> str:
    """A result's type; of a list those of its items."""
    if isinstance(result, list):
        return f"[{', '.join(map(_shown, result))}]"
    return "None" if result is None else f"{result.dtype}{list(result.shape)}"


@bounded_class(ExecutionError, but=("run", "run_views"))
class CompiledGraph(Lifetime, ExpertControl, Shown):
    """A compiled model: set its params, then run it.

    `run_slots(*arrays)` is the fastest call: inputs by position; it gives the same as `run_views`. One compiled graph
    runs in one thread at a time (else `BusyError`, or it waits: `busy=`); `clone()` makes more over the same weights
    and code.
    """

    run_slots: Callable[..., Any]
    decide: Callable[[], Decision] | None = None  # set by the session
    _at_shapes: Callable[[Mapping[str, tuple[int, ...]]], CompiledGraph] | None = (
        None  # for these inputs; set by it too
    )
    # the file that it was loaded from and the options, where they say all; set by the session
    _origin: tuple[str, FileIdentity, CompileOptions] | None = None

    def __init__(
        self,
        compilation: Compilation | StoredCompilation,
        device: str,
        options: CompileOptions,
        memory: ModelMemory | None = None,
    ) -> None:
        self._compilation = compilation
        self._decision: Decision | None = None
        self._shown: tuple[MemoryPlan, MemoryPlan] | None = None  # the executable's plan, and as users see it
        self._places: Places | None = None
        self.memory = memory
        self._options = options
        self._device = device
        graph = compilation.leaves
        self.inputs = tuple(spec_of(v) for v in graph.inputs)
        self.params = tuple(spec_of(v) for v in graph.params)
        self._declared = tuple(spec_of(v) for v in graph.states)
        self.outputs = tuple(spec_of(o.value, o.name) for o in graph.outputs)
        self._names = tuple(spec.name for spec in self.outputs)
        self._name_set = frozenset(self._names)
        self._asked: dict[tuple[Any, ...], tuple[int, ...]] = {}  # positions by what `outputs` was
        self._unset = {v.name for v in graph.params if v.data is None}
        self._changed: set[str] = set()  # params that were set
        self._param_types = {v.name: v.type for v in graph.params}
        self._attach(compilation.executable)

    @property
    def precision(self) -> str:
        """What products with weights are computed in: the option `precision`."""
        return self._options.precision

    def _attach(self, executable: Executable[Any]) -> None:
        self._executable = executable
        self._runs = 0
        self.__dict__.pop("_own_queue", None)
        executable.waits = self._options.busy == "wait"
        executable.admit = self._admit
        executable.wrap = lambda results: Views(results, self._names)
        executable.instead = self._slots_instead
        executable.settle = self._settle
        if self.memory is not None:
            executable.reserve = self.memory.reserve
            self.memory.planned(None if executable.plan is None else executable.plan.at)
        self.run_slots = self._run_slots_debug if self._options.debug else executable.slots

    def _settle(self, extents: Mapping[str, int]) -> None:
        """Told by the executable of the first run of a binding."""
        if self.memory is not None:
            self.memory.settle(extents)
        if self._writer is not None:
            self._writer.begin.set()

    @property
    def _result_names(self) -> Sequence[str]:
        """The names of what `run` returns."""
        return self._names

    def _tensors(self, inputs: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
        """The arrays of a run as `outputs` has them, also where `run` gives lists of them."""
        return CompiledGraph.run(self, inputs)

    def _named_tensors(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The same by name."""
        return dict(zip(self._names, self._tensors(inputs), strict=True))

    def _grouped(self, tensors: Sequence[Any]) -> list[Any]:
        """What `run` returns of them."""
        return list(tensors)

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(map(str, specs)) for specs in (self.inputs, self.outputs))
        return f"<CompiledGraph on {self.device!r}: {inputs or 'no inputs'} -> {outputs or 'no outputs'}>"

    @property
    def device(self) -> str:
        """The name of the device that it was compiled for."""
        return self._device

    @property
    def capabilities(self) -> frozenset[str]:
        """The optional calls that this device supports."""
        return self._executable.capabilities

    @property
    def states(self) -> States:
        """What lives between runs, by name."""
        made: States | None = self.__dict__.get("_own_states")
        if made is None:
            from rlx.runtime.states import States

            made = self.__dict__.setdefault("_own_states", States(self, self._declared))  # threads get the same one
        return made

    @property
    def adapters(self) -> Adapters:
        """The adapters by name, with their scales."""
        made: Adapters | None = self.__dict__.get("_own_adapters")
        if made is None:
            from rlx.runtime.adapters import Adapters

            made = self.__dict__.setdefault("_own_adapters", Adapters(self))
        return made

    # ---- params

    def set_param(self, name: str, array: Any, *, convert: bool = False) -> dict[str, str]:
        """Sets one parameter; when this returns, the caller may change or free the array. See `set_params`."""
        if not isinstance(name, str):
            raise OptionError(f"set_param takes the name of a param, got {name!r}")
        return self.set_params({name: array}, convert=convert)

    @usual_arithmetic()
    def set_params(self, arrays: Mapping[str, Any], *, convert: bool = False) -> dict[str, str]:
        """Sets parameters by name, of the declared type; an encoded one takes its blocks as bytes (u8).

        Clones keep theirs. With `convert`, elements are widened or encoded as they must be, never narrowed; the result
        says what was done to which. Raises `NameNotFound`, `DTypeError` or `ShapeError`, and then changes nothing.
        """
        if not isinstance(arrays, Mapping):
            raise OptionError(f"set_params takes a mapping of names to arrays, got {type(arrays).__name__}")
        specs = {spec.name: spec for spec in self.params}
        ready, notes = {}, {}
        for name, array in arrays.items():
            if name not in specs:
                raise no_such("param", name, specs)
            if convert:
                from rlx.runtime.convert import convert as converted

                encoding = getattr(array, "encoding", None)  # of a weight of a registry
                array, notes[name] = converted(array, self._param_types[name], f"param {name!r}", encoding)
            ready[name] = self._param(specs[name], array)
        self._executable.set_params(ready)
        self._unset.difference_update(ready)
        self._changed.update(ready)
        return {name: note for name, note in notes.items() if note}

    def _param(self, spec: TensorSpec, array: Any) -> Any:
        stored = self._param_types[spec.name]
        if stored.encoding is None:
            return to_array(spec, array, f"param {spec.name!r}", self._executable.adopt)
        refuse_masked(f"param {spec.name!r}", array)
        raw = np.asarray(array)
        if raw.dtype != np.uint8 or raw.nbytes != spec.bytes:
            raise ShapeError(
                f"param {spec.name!r}: {stored} is stored in {spec.bytes} bytes (u8); convert=True encodes floats"
            )
        return raw.reshape(-1)

    def set_adapter(self, name: str | None, scale: float = 1.0, *, only: bool = False) -> None:
        """Sets the scale of an adapter that `adapters.put` brought, 0 for off; takes effect with the next run.

        `only` sets all others to 0; the name None all. Raises `NameNotFound`, and `OptionError` for a graph without
        room for adapters, which `rlx.lora` makes.
        """
        self.adapters.set(name, scale, only=only)

    def _admit(self, arrays: Sequence[Any]) -> list[Any]:
        """Checks a call's inputs; the native entry comes here when something is not as in the last call."""
        if self._unset:
            names = ", ".join(map(repr, sorted(self._unset)))
            raise NameNotFound(f"params have no value yet: {names}; give them to set_params")
        if len(arrays) != len(self.inputs):
            arrays = with_kept(self.inputs, arrays, self._executable.bound_inputs)
        if len(arrays) != len(self.inputs):
            names = ", ".join(spec.name for spec in self.inputs)
            raise ShapeError(f"expected {len(self.inputs)} inputs ({names}), got {len(arrays)}")
        adopt = self._executable.adopt
        return [to_array(spec, a, f"input {spec.name!r}", adopt) for spec, a in zip(self.inputs, arrays, strict=True)]

    def _given(self, inputs: Any) -> Sequence[Any]:
        """The inputs of a call by position, with those that are bound and left out."""
        kept = self._executable.bound_inputs
        return by_position(self.inputs, with_kept(self.inputs, inputs, kept) if kept else inputs, "input")

    def _snapshot(self, inputs: Any) -> dict[str, Any]:
        """Checked copies of the inputs of a call, by name; those that are kept and left out are left out here too."""
        kept = self._executable.bound_inputs
        given = by_position(self.inputs, with_kept(self.inputs, inputs, kept) if kept else inputs, "input")
        admitted = zip(self.inputs, given, self._admit(given), strict=True)
        taken = {spec.name: array for spec, a, array in admitted if a is not kept.get(spec.name, self)}
        self._queue.admit(sum(array.nbytes for array in taken.values()))
        return {name: snapshot(array) for name, array in taken.items()}

    # ---- runs

    def run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        *more: Any,
        outputs: Sequence[str | int] | None = None,
        out: Mapping[str, Any] | Sequence[Any] | None = None,
    ) -> list[Any]:
        """Runs once and returns fresh arrays in output order: NumPy's, or each an `rlx.Array` on a device.

        `outputs` names those wanted (or gives their positions): they come in that order, and what only others need is
        not computed; updates of states are always made, so `[]` runs for these alone. `out` gives arrays to write into,
        by name or position, NumPy's or any that DLPack shows as writable memory of the host; they are returned in place
        of fresh ones. Raises the error classes of `rlx.errors` for inputs that do not fit or `more`, and
        `ExecutionError`; after that, states may be updated in part.
        """
        if more:
            from rlx.runtime.misuse import one_set_of_inputs

            raise one_set_of_inputs(more)
        try:
            wanted = None if outputs is None else self._asked_for(outputs)
            own = None if out is None else self._by_output(out)
            if not self._executable.bound_inputs:
                made = self._executable.run_fresh(by_position(self.inputs, inputs, "input"), wanted, own)
                if made is not None:
                    return made
            return self._run(inputs, wanted, own)
        except Exception as error:  # noqa: BLE001  # which `_instead` raises
            exact = self._instead(inputs, error, "run")
        return exact.run(inputs, outputs=outputs, out=out)

    def _run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        asked: tuple[int, ...] | None,
        own: list[Any] | None,
    ) -> list[Any]:
        """By the general way: outputs by their numbers (None: all), and what `out` gives for each."""
        given = self._admit(self._given(inputs))
        wanted = range(len(self.outputs)) if asked is None else asked
        targets = self._targets([None] * len(self.outputs) if own is None else own)
        self._runs += 1
        made = self._executable.run(given, targets, wanted)
        return made if own is None else [a if own[n] is None else own[n] for n, a in zip(wanted, made, strict=True)]

    def __call__(self, *args: Any, **named: Any) -> Results:
        """Runs with inputs by position, as one mapping, or by keyword; the outputs by name."""
        if not args or (len(args) == 1 and isinstance(args[0], Mapping) and not named):
            return Results(self._result_names, self.run(args[0] if args else named))
        inputs = dict(zip((spec.name for spec in self.inputs), args, strict=False))
        if len(args) > len(self.inputs):
            raise ShapeError(f"expected at most {len(self.inputs)} inputs, got {len(args)}")
        for name in named:
            if name in inputs:
                raise OptionError(f"input {name!r} is given by position and by name")
        return Results(self._result_names, self.run({**inputs, **named}))

    def run_views(self, inputs: Mapping[str, Any] | Sequence[Any]) -> Views:
        """Runs once and returns read-only views of the outputs in the arena, valid until the next run."""
        try:
            return self.run_slots(*self._given(inputs))  # type: ignore[no-any-return]
        except Exception as error:
            if (clear := converted(error, "run_views", ExecutionError)) is not None:
                raise clear from error
            raise

    def _slots_instead(self, arrays: tuple[Any, ...], error: UnequalSizes) -> Any:
        return self._instead(arrays, error, "run_slots").run_slots(*arrays)

    def _instead(self, inputs: Any, error: Exception, what: str) -> CompiledGraph:
        """The graph for just these sizes, where one is 1 that this one took for another; else the error is raised."""
        if self._at_shapes is not None and isinstance(error, UnequalSizes) and 1 in error.sizes:
            from rlx.runtime.specialised import exact_for

            if (made := exact_for(self, self._at_shapes, inputs, error)) is not None:
                return made
        if (clear := converted(error, what, ExecutionError)) is not None:
            raise clear from error
        raise error

    def _run_slots_debug(self, *arrays: Any) -> Views:
        """As `run_slots`, with views that know when they are stale."""
        results = self._executable.slots(*arrays)
        self._runs += 1
        number = self._runs
        return Views(tuple(results), self._names, lambda: self._runs == number)

    def run_feed(self, inputs: Mapping[str, Any] | Sequence[Any], state: str, output: str | int) -> Any:
        """Runs once, makes that output the value of the state, and returns it.

        For one run; `states[state].feed(output)` does so after each, without a copy.
        """
        chosen = self.states[state]
        (number,) = self._positions([output])
        (made,) = self.run(inputs, outputs=[number])
        if self._executable.feeds.get(state) != number:
            chosen.write(made)
        return made

    def set_extent(self, dim: str, extent: int | None) -> None:
        """Sets the extent of a dim that no input's shape tells, for the runs to come; None clears it.

        Raises `NameNotFound`, `OptionError` for a dim that inputs tell or what is no int, and `ExecutionError` beyond
        its bounds.
        """
        dims = self._compilation.source.dims()
        if not isinstance(dim, str) or dim not in dims:
            raise no_such("dim", dim, dims)
        told = next((s for s in self.inputs if any(dim == n.name for size in s.shape for n in symbols(size))), None)
        if told is not None:
            raise OptionError(f"set_extent: the dim {dim!r} is read off the shape of the input {told.name!r}")
        if extent is not None:
            if not isinstance(extent, int | np.integer) or isinstance(extent, bool):
                raise OptionError(f"set_extent: the extent of {dim!r} is an int or None, got {extent!r}")
            extent = int(extent)
            check_extent(dims[dim], extent, "set_extent")
        self._executable.set_extent(dim, extent)

    def _positions(self, chosen: Sequence[str | int]) -> list[int]:
        if isinstance(chosen, str) or not isinstance(chosen, Iterable):
            raise OptionError(f"outputs are given as a list of names or positions, got {chosen!r}")
        found = []
        for name in chosen:
            if isinstance(name, int) and not isinstance(name, bool) and 0 <= name < len(self._names):
                found.append(name)
            elif isinstance(name, str) and name in self._names:
                found.append(self._names.index(name))
            else:
                raise no_such("output", name, self._names, f", or 0 to {len(self._names) - 1}")
        return found

    def _asked_for(self, chosen: Sequence[str | int]) -> tuple[int, ...]:
        """The positions of chosen outputs, looked up where the same were chosen before."""
        if type(chosen) is not list and type(chosen) is not tuple:
            return tuple(self._positions(chosen))
        try:
            known = self._asked.get(tuple(chosen))
        except TypeError:  # for what can't be hashed, and is no name
            known = None
        if known is None:
            known = tuple(self._positions(chosen))
            if len(self._asked) < KEPT_CHOICES and all(type(name) is str for name in chosen):  # as True is equal to 1
                self._asked[tuple(chosen)] = known
        return known

    def _by_output(self, out: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
        """What `out` gives for each output, None for nothing."""
        if type(out) is list and len(out) == len(self._names):
            return out.copy()
        if type(out) is dict or isinstance(out, Mapping):
            if out.keys() <= self._name_set:
                return list(map(out.get, self._names))
            own: list[Any] = [None] * len(self._names)
            for position, array in zip(self._positions(list(out)), out.values(), strict=True):
                if own[position] is not None:
                    raise OptionError(f"out: output {self._names[position]!r} is given by position and by name")
                own[position] = array
            return own
        if not isinstance(out, Sequence):
            raise OptionError(f"out: expected arrays by name in a mapping, or in a list; got {type(out).__name__}")
        if len(out) != len(self.outputs):
            raise ShapeError(f"out: expected {len(self.outputs)} arrays, got {len(out)}")
        return list(out)

    def _targets(self, given: Sequence[Any]) -> list[Array | None]:
        """The buffers of `out` as arrays over their memory."""
        pairs = zip(self.outputs, given, strict=True)
        targets = [None if t is None else to_target(s, t, f"out for {s.name!r}") for s, t in pairs]
        named = [(s.name, t) for s, t in zip(self.outputs, targets, strict=True) if t is not None]
        for (first, a), (second, b) in combinations(named, 2):
            if share_memory(a, b):
                raise OptionError(f"out: the arrays for {first!r} and {second!r} overlap; each output needs its own")
        return targets

    # ---- what is there

    @property
    def arena(self) -> Any:
        """The memory of activations and outputs: a buffer of bytes, or an `rlx.Array` of u8 where a device has it."""
        arena = self._executable.arena
        return arena.data if isinstance(arena, np.ndarray) else arena

    def read_output_row(self, output: str | int, row: int | tuple[int, ...]) -> Any:
        """A copy of one row of an output of the last run, at the extents that it had.

        It is read where the run left it: in the array of `out=`, or the large one that `run` gave, with what was
        written there since. `row` counts along all axes but the last, flattened (from the end if negative), or is a
        tuple of indices of the first axes. Raises `OptionError` when the last run did not produce that output,
        `ShapeError` for no such row.
        """
        (position,) = self._positions([output])
        exact = self.__dict__.get("_own_exact")
        if exact is not None and exact.ran:
            raise OptionError("read_output_row: runs with sizes of 1 had graphs of their own: take what `run` gives")
        if (results := self._executable.results) is None:
            raise OptionError("read_output_row: there has been no run yet")
        name, array = self._names[position], results[position]
        if array is None:
            raise OptionError(f"read_output_row: the last run did not produce output {name!r}: ask it for that one")
        return row_of(array, row, name)

    def clone(self, *, fresh: bool = False) -> CompiledGraph:
        """Another one over the same weights and code, with its own arena and states: one a thread.

        It starts with copies of the states, bound inputs, feeds and extents as they are now; with `fresh`, with those
        after compiling. Setting a param of one changes that one only, which then has its own of it. Raises
        `OptionError` where the device can't clone.
        """
        made = CompiledGraph.__new__(type(self))
        own = ("_executable", "run_slots", "_own_states", "_own_adapters", "_own_exact")
        made.__dict__.update({k: v for k, v in self.__dict__.items() if k not in own})
        made._attach(self._executable.clone(fresh))
        made._unset, made._changed = set(self._unset), set(self._changed)
        if "_own_adapters" in self.__dict__:
            made.__dict__["_own_adapters"] = type(self.adapters)(made, self.adapters, fresh=fresh)
        return made

    def __copy__(self) -> CompiledGraph:
        return self.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledGraph:
        return self.clone()

    @property
    def plan(self) -> MemoryPlan | None:
        """Where every buffer lies in the arena; None before the first run when a dim is unbounded.

        `plan[value]` is the place of a value of the graph or of an output, also by name.
        """
        plan = self._executable.plan
        if plan is None:
            return None
        if self._shown is None or self._shown[0] is not plan:
            self._shown = plan, replace(plan, find=self._find)
        return self._shown[1]

    def _find(self, value: Value | str) -> Buffer | None:
        if self._places is None:
            from rlx.backends import backend_named
            from rlx.backends.base import CodeGenerator
            from rlx.plan.places import Places

            backend, made = backend_named(self.device), self._compilation
            assert isinstance(backend, CodeGenerator)
            self._places = Places(made.source, made.legal, backend)
        return self._places.find(value)

    @property
    def needs(self) -> Needs | None:
        """Bytes of params, packed weights and arena; None for a device that has no program."""
        from rlx.plan.budget import needs_of

        program = self._executable.program
        return None if program is None else needs_of(program, self._executable.plan, self._executable.offloaded_bytes)

    @property
    def compilation(self) -> Compilation | StoredCompilation:
        """What every stage of the compiler made."""
        return self._compilation

    def save(self, path: str | os.PathLike[str], *, portable: bool = False, external: bool = False) -> None:
        """Writes an artifact: one file that `rlx.load` reads, with no import, no compiling and the same results.

        It holds the graph and its weights, and the code and packed weights for this machine; a `portable` one only the
        first, to be compiled where it is loaded. With `external`, weights that lie in a model file stay there, which
        the artifact knows by its SHA-256. Raises `OptionError` where it can't be written, a device has no code to
        store, or the values of params are gone that a portable file needs.
        """
        from rlx.runtime.artifact import save_artifact

        save_artifact(self, path, portable=portable, external=external)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        from rlx.runtime.pickled import reduced

        return reduced(self)

    def record(self, path: str | os.PathLike[str]) -> AbstractContextManager[Recorder]:
        """A context whose `run` keeps what goes in and comes out, in a file that `rlx.replay` reads."""
        from rlx.runtime.replay import record

        return record(self, path)

    @property
    def decision(self) -> Decision | None:
        """Why it runs on this device: each device with its price or obstacle; None for what no session compiled."""
        if self._decision is None and self.decide is not None:
            self._decision = self.decide()
        return self._decision

    @property
    def joins(self) -> Joins | None:
        """How often threads wait for one another in runs at the shapes of the last one; None before, or if unknown."""
        return self._executable.joins


def compiled_graph(
    compilation: Compilation | StoredCompilation,
    device: str,
    options: CompileOptions,
    memory: ModelMemory | None = None,
) -> CompiledGraph:
    """What runs a compilation: a `ListedGraph` where results are lists, or may be without an element."""
    if not compilation.leaves.results:
        return CompiledGraph(compilation, device, options, memory)
    from rlx.runtime.listed import ListedGraph

    return ListedGraph(compilation, device, options, memory)
