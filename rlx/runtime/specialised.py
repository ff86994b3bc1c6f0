"""A model file of which elements of inputs decide ranks: one compiled graph for each of their values.

Such inputs (axes, a permutation, a flag) are read in every run, on the host; so is how many tensors a sequence holds.
What a run brings for the first time is compiled then, with these inputs as constants. The graphs share their weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rlx.backends.base import TensorSpec, by_position
from rlx.boundary import bounded_class
from rlx.errors import ClosedError, ExecutionError, OptionError, ShapeError, UndecidedInputs, UnsupportedOp
from rlx.ir.given import MOST_ELEMENTS, Formal, Given, Items, Values
from rlx.ir.graph import Graph
from rlx.options import CompileOptions
from rlx.runtime.arrays import Views, on_device, snapshot, to_array
from rlx.runtime.compiled import CompiledGraph, Results
from rlx.runtime.memory import give_back
from rlx.runtime.report.shown import Explanation
from rlx.runtime.trace import RunTrace
from rlx.runtime.weights import WeightRegistry

if TYPE_CHECKING:
    from rlx.backends.timing import KernelTime

__all__ = ["ExactSizes", "ItemsSpec", "Specialised", "exact_for", "fixed_values", "specialised"]

Key = tuple[tuple[str, Any], ...]  # of each input that decides something, what is read of it
# what there is of a single compiled graph only
OF_ONE = {
    "_changed", "_compilation", "_declared", "_executable", "_names", "_param_types", "_places", "_runs", "_shown",
    "_unset", "outputs", "params",
}  # fmt: skip
MOST_SHOWN = 16  # elements of a value
CLOSED = "the model is closed: load it again"


class ItemsSpec(TensorSpec):
    """An input that is a list of tensors, each of this type, or, of an optional, a tensor or None."""

    def __str__(self) -> str:
        return f"{super().__str__()} in a list or optional"


@bounded_class(ExecutionError)
class Specialised(CompiledGraph):
    """A model with a compiled graph for each value of the inputs `decides`; it runs like a `CompiledGraph`.

    `variants` has those that there are; `variant(inputs)` is the one for these inputs. What a single program only can
    tell or do (its plan, states, params, `save`) is asked of a variant, or of `rlx.load(path, values=...)`, which makes
    such inputs constants; asked of this it raises `OptionError`. A run raises `ExecutionError` for a value beyond the
    `limit` of variants.
    """

    def __init__(
        self,
        name: str,
        options: CompileOptions,
        signature: Sequence[Formal],
        decides: Sequence[str],
        load: Callable[[Values], CompiledGraph],
        limit: int,
    ) -> None:
        self.memory = None
        self.limit = limit
        self._name = name
        self._options = options
        self._device = options.device
        self._decision = None
        self._formals = {formal.name: formal for formal in signature}
        self.inputs = tuple(_spec(formal) for formal in signature)
        self._first = tuple(decides)
        self._load = load
        self._found: dict[
            Key, CompiledGraph | tuple[str, ...]
        ] = {}  # a variant, or all that decides where that is more
        self._told: dict[Key, str] = {}  # the values of each as text
        self._seconds: dict[Key, float] = {}
        self._lock = threading.Lock()
        self._closed = False

    def __getattr__(self, name: str) -> NoReturn:
        if name in OF_ONE:
            raise OptionError(
                f"{self._name!r} has a program for each value of {', '.join(map(repr, self.decides))}: ask "
                "variant(inputs), or load it with values= for one of them"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        inputs = ", ".join(map(str, self.inputs))
        return f"<Specialised on {self.device!r}: {inputs}; {len(self.variants)} of {self.limit} variants>"

    @property
    def decides(self) -> tuple[str, ...]:
        """The inputs that are read: their elements, or how many tensors they are, decide ranks."""
        more = (names for names in self._found.values() if isinstance(names, tuple))
        return tuple(dict.fromkeys((*self._first, *(name for names in more for name in names))))

    @property
    def variants(self) -> dict[str, CompiledGraph]:
        """The compiled graphs, by the values that each is for."""
        return {self._told[key]: made for key, made in self._found.items() if isinstance(made, CompiledGraph)}

    # ---- variants

    def variant(self, inputs: Mapping[str, Any] | Sequence[Any]) -> CompiledGraph:
        """The compiled graph for the values of these inputs, made if there is none.

        Raises `ExecutionError` where that would be more than `limit`, and what `rlx.load` raises.
        """
        return self._variant(self._by_name(inputs))

    def _by_name(self, inputs: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        given = by_position(self.inputs, inputs, "input")
        return {spec.name: value for spec, value in zip(self.inputs, given, strict=True)}

    def _variant(self, given: Mapping[str, Any]) -> CompiledGraph:
        names = self._first
        while True:
            read = {name: self._read(name, given[name]) for name in names}
            key = tuple((name, _key(value)) for name, value in read.items())
            found = self._found.get(key)
            if found is None:
                with self._lock:
                    found = self._made(key, names, read)
            if isinstance(found, CompiledGraph):
                return found
            names = found

    def _read(self, name: str, value: Any) -> Given:
        formal, what = self._formals[name], f"input {name!r}"
        if formal.kind == "tensor":
            array = np.asarray(to_array(_spec(formal), value, what))
            if array.size > MOST_ELEMENTS:
                raise ExecutionError(f"{what} has {array.size} elements: at most {MOST_ELEMENTS} are read")
            return array.copy()
        if value is None and formal.kind.startswith("optional"):
            return Items(None)
        if formal.kind == "optional(tensor)":
            return Items((len(np.shape(value)),))
        if not isinstance(value, list | tuple):
            raise ShapeError(f"{what} is a sequence: expected a list of arrays, got {type(value).__name__}")
        return Items(tuple(len(np.shape(item)) for item in value))

    def _made(self, key: Key, names: tuple[str, ...], read: Values) -> CompiledGraph | tuple[str, ...]:
        """The variant for these values, or the inputs that decide besides; the lock is held."""
        if self._closed:
            raise ClosedError(CLOSED)
        if key in self._found:
            return self._found[key]
        made: CompiledGraph | tuple[str, ...]
        if len(self.variants) >= self.limit:
            raise ExecutionError(
                f"{self._name!r} is compiled for {self.limit} values of {', '.join(map(repr, names))}, the limit, and "
                f"this run brings another, {_text(read)}: load it with variants= for more, or with values= for one"
            )
        start = time.perf_counter()
        try:
            made = self._load(read)
        except UndecidedInputs as error:
            more = [name for name in error.inputs if name not in read]
            if not more:
                raise UnsupportedOp(str(error), error.nodes) from error
            made = (*names, *more)
        else:
            self._device = made.device
            self._told[key], self._seconds[key] = _text(read), time.perf_counter() - start
        self._found[key] = made
        return made

    def _chosen(self, given: Mapping[str, Any]) -> tuple[CompiledGraph, list[Any]]:
        """The variant for these inputs, and its own inputs, by position."""
        model, flat = self._variant(given), dict(given)
        for name, value in given.items():
            if "sequence" in self._formals[name].kind:
                flat |= {f"{name}.{i}": item for i, item in enumerate(value or ())}
        return model, [flat[spec.name] for spec in model.inputs]

    # ---- runs

    def run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        *more: Any,
        outputs: Sequence[str | int] | None = None,
        out: Mapping[str, Any] | Sequence[Any] | None = None,
    ) -> list[Any]:
        """Runs the variant for the values of the inputs, which is made if there is none; else as `CompiledGraph.run`.

        A sequence comes as a list of arrays, an absent optional as None.
        """
        if more:
            from rlx.runtime.misuse import one_set_of_inputs

            raise one_set_of_inputs(more)
        model, fed = self._chosen(self._by_name(inputs))
        return model.run(fed, outputs=outputs, out=out)

    def __call__(self, *args: Any, **named: Any) -> Results:
        """Runs with inputs by position, as one mapping, or by keyword; the outputs by name."""
        if len(args) == 1 and isinstance(args[0], Mapping) and not named:
            given = self._by_name(args[0])
        else:
            names = [spec.name for spec in self.inputs][: len(args)]
            if twice := set(names) & named.keys():
                raise OptionError(f"input {min(twice)!r} is given by position and by name")
            if len(args) > len(self.inputs):
                raise ShapeError(f"expected at most {len(self.inputs)} inputs, got {len(args)}")
            given = self._by_name({**dict(zip(names, args, strict=True)), **named})
        model, fed = self._chosen(given)
        return Results(model._result_names, model.run(fed))

    def run_views(self, inputs: Mapping[str, Any] | Sequence[Any]) -> Views:
        """Runs once and returns read-only views of the outputs, valid until the next run of the same variant."""
        model, fed = self._chosen(self._by_name(inputs))
        return model.run_views(fed)

    def run_slots(self, *arrays: Any) -> Any:
        """`run_views` with inputs by position."""
        return self.run_views(arrays)

    def profile(self, inputs: Mapping[str, Any] | Sequence[Any], repeat: int = 10) -> list[KernelTime]:
        """(kind, name, seconds per run) of every kernel of the variant for these inputs."""
        model, fed = self._chosen(self._by_name(inputs))
        return model.profile(fed, repeat)

    def trace(self, inputs: Any, path: Any = None, *, repeat: int = 1) -> RunTrace:
        """The time of every kernel of the variant for these inputs, as of `CompiledGraph.trace`."""
        model, fed = self._chosen(self._by_name(inputs))
        return model.trace(fed, path, repeat=repeat)

    def _snapshot(self, inputs: Any) -> dict[str, Any]:
        return {name: self._copied(name, value) for name, value in self._by_name(inputs).items()}

    def _copied(self, name: str, value: Any) -> Any:
        """A copy of an input that no later change of it reaches."""
        formal = self._formals[name]
        if "sequence" in formal.kind and value is not None:
            return [snapshot(item if on_device(item) else np.asarray(item)) for item in value]
        checked = to_array(_spec(formal), value, f"input {name!r}") if formal.kind == "tensor" else value
        return None if checked is None else snapshot(checked if on_device(checked) else np.asarray(checked))

    def _positions(self, chosen: Sequence[str | int]) -> Any:
        return chosen  # the variant's run checks them

    # ---- what is there

    def explain(self, stage: str = "summary", *, why: bool = False) -> Explanation:
        """What decides, which variants there are, and that stage of each."""
        lines = [f"input    {spec}" for spec in self.inputs]
        lines.append(f"decides  {', '.join(self.decides)}: read in each run, a compile for each value")
        lines.append(f"variants {len(self.variants)} of {self.limit}")
        for key, made in self._found.items():
            if isinstance(made, CompiledGraph):
                lines += [f"variant  {self._told[key]} ({self._seconds[key]:.3f} s)", made.explain(stage, why=why)]
        return Explanation("\n".join(lines))

    def clone(self, *, fresh: bool = False) -> Specialised:
        """Another one over the same weights and code: its variants are clones of those that there are."""
        with self._lock:
            if self._closed:
                raise ClosedError(CLOSED)
            made = Specialised(
                self._name, self._options, tuple(self._formals.values()), self._first, self._load, self.limit
            )
            made._told, made._seconds, made._device = dict(self._told), dict(self._seconds), self._device
            for key, found in self._found.items():
                made._found[key] = found.clone(fresh=fresh) if isinstance(found, CompiledGraph) else found
        return made

    def trim(self) -> int:
        """Gives back memory that no later run needs as it is; see `CompiledGraph.trim`."""
        return sum(model.trim() for model in self.variants.values())

    def close(self) -> None:
        """Closes every variant; later runs raise `ClosedError`."""
        if self._closed:
            return
        self._queue.drain()
        self._queue.close()
        with self._lock:
            self._closed = True
            for model in self.variants.values():
                model.close()
            self._found.clear()
        give_back()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed


class ExactSizes:
    """Compiled graphs of a model file for single shapes of all inputs, beside the one for all sizes.

    A size that isn't known at import counts as equal to the one that it meets; where it is 1 in a run, ONNX repeats it.
    """

    def __init__(self, load: Callable[[Mapping[str, tuple[int, ...]]], CompiledGraph], limit: int = 32) -> None:
        self.load = load
        self.limit = limit
        self.found: dict[tuple[tuple[int, ...], ...], CompiledGraph | None] = {}  # None where there can't be one
        self._lock = threading.Lock()

    def variant(self, model: CompiledGraph, inputs: Any, error: ExecutionError) -> CompiledGraph | None:
        """The graph for the shapes of these inputs, which the general one refused; None where it was right to.

        So it is where the model has states or params that were set, which no other graph shares. Raises
        `ExecutionError` where that would be more than `limit`.
        """
        if model.compilation.leaves.states or model._changed or model._executable.bound_inputs:
            return None
        given = by_position(model.inputs, inputs, "input")
        shapes = tuple(tuple(map(int, np.shape(array))) for array in given)
        with self._lock:
            if shapes not in self.found:
                if len(self.found) >= self.limit:
                    raise ExecutionError(
                        f"{error}; it is compiled for {self.limit} shapes of inputs with a size of 1, the limit: give "
                        "such sizes by dims= in a model of their own"
                    )
                try:
                    self.found[shapes] = self.load(dict(zip((s.name for s in model.inputs), shapes, strict=True)))
                except (ShapeError, OptionError, UnsupportedOp):  # an input named like a dim can't be given a shape
                    self.found[shapes] = None
            return self.found[shapes]

    @property
    def ran(self) -> bool:
        """Whether there are any."""
        return any(model is not None for model in self.found.values())

    def lines(self) -> list[str]:
        """What `explain` says of them."""
        made = [shapes for shapes, model in self.found.items() if model is not None]
        return [f"exact    {len(made)} of {self.limit}, for runs in which a size is 1: " + "; ".join(map(_sizes, made))]

    def close(self) -> None:
        """Closes every one of them."""
        for model in self.found.values():
            if model is not None:
                model.close()
        self.found.clear()


def exact_for(
    model: CompiledGraph,
    load: Callable[[Mapping[str, tuple[int, ...]]], CompiledGraph],
    inputs: Any,
    error: ExecutionError,
) -> CompiledGraph | None:
    """The graph for the shapes of these inputs, as `ExactSizes.variant` of the model; `load` makes one."""
    exact: ExactSizes = model.__dict__.setdefault("_own_exact", ExactSizes(load))
    return exact.variant(model, inputs, error)


def _sizes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join("x".join(map(str, shape)) or "()" for shape in shapes)


def _spec(formal: Formal) -> TensorSpec:
    kind = TensorSpec if formal.kind == "tensor" else ItemsSpec
    return kind(formal.name, formal.shape or (), formal.dtype, None)


def _key(value: Given) -> Any:
    return value.ranks if isinstance(value, Items) else (value.shape, value.tobytes())


def _text(values: Values) -> str:
    """The values that a variant is for."""
    return ", ".join(f"{name}={_shown(value)}" for name, value in values.items())


def _shown(value: Given) -> str:
    if not isinstance(value, Items):
        return str(value.tolist()) if value.size <= MOST_SHOWN else f"{value.size} elements"
    if value.ranks is None:
        return "absent"
    return f"{len(value.ranks)} tensors of rank {', '.join(map(str, sorted(set(value.ranks))))}"


# ---- what `load` needs


def specialised(
    name: str,
    options: CompileOptions,
    error: UndecidedInputs,
    fixed: Values,
    load: Callable[[Values, WeightRegistry], CompiledGraph],
    limit: int,
    registry: WeightRegistry | None,
) -> Specialised:
    """The model for what stood in the way of its import; its variants share their weights."""
    shared = WeightRegistry() if registry is None else registry
    signature = [formal for formal in error.signature if formal.name not in fixed]
    return Specialised(name, options, signature, error.inputs, lambda values: load(values, shared), limit)


def fixed_values(values: object, variants: object, source: object) -> dict[str, Any]:
    """The arrays of `values=`; raises `OptionError` for what is none."""
    if isinstance(variants, bool) or not isinstance(variants, int) or variants < 1:
        raise OptionError(f"variants={variants!r}: expected an int >= 1, the values that are compiled for")
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise OptionError(f"values= takes a mapping of inputs to arrays, got {type(values).__name__}")
    if isinstance(source, Graph):
        raise OptionError("values= is for model files: the inputs of a graph are what it says")
    return dict(values)
