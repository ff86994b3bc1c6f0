"""A graph of strings on a device that knows numbers only: each run has a dictionary, and strings are what users see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.base import Executable, ExpertFigures, ExpertLayerSpec, Joins
from rlx.errors import OptionError
from rlx.ir.graph import Graph
from rlx.ir.strings import Dictionary, Texts
from rlx.kernels.program import Kernel

if TYPE_CHECKING:
    from rlx.backends.timing import KernelTime

__all__ = ["StringsExecutable"]


class StringsExecutable(Executable[Any]):
    """The executable `inner` of a graph whose strings were numbered, those of constants as in `texts`."""

    def __init__(self, graph: Graph, texts: Texts, inner: Executable[Any]) -> None:
        self.graph = graph
        self.texts = texts
        self.inner = inner
        self.plan, self.program = inner.plan, inner.program
        self.capabilities = inner.capabilities - {"save"}  # whose code would be loaded without its dictionary
        self.string_inputs = [v.dtype.kind == "s" for v in graph.inputs]
        self.string_outputs = [o.value.dtype.kind == "s" for o in graph.outputs]
        self.last: list[Any] | None = None
        inner.admit, inner.wrap = list, tuple

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("waits", "reserve", "settle"):  # what the runtime sets
            setattr(self.inner, name, value)

    # ---- runs

    def encoded(self, inputs: Sequence[Any]) -> tuple[Dictionary, list[Any]]:
        """The dictionary of a run, and its inputs with numbers for strings and the key at the end."""
        held = Dictionary(self.texts)
        flags = zip(inputs, self.string_inputs, strict=True)
        return held, [*(held.encode(a) if text else a for a, text in flags), np.array(held.key)]

    def run(self, inputs: Sequence[Any], out: Sequence[Any | None], wanted: Sequence[int]) -> list[Any]:
        held, given = self.encoded(inputs)
        asked = [None if text else a for a, text in zip(out, self.string_outputs, strict=True)]
        made = None
        if not self.inner.bound_inputs and all(a is None for a in asked):
            every = range(len(self.string_outputs))
            made = self.inner.run_fresh(given, None if list(wanted) == list(every) else tuple(wanted))
        if made is None:
            made = self.inner.run(given, asked, wanted)
        results = [self.decoded(held, n, a) for n, a in zip(wanted, made, strict=True)]
        for place, number in enumerate(wanted):
            target = out[number]
            if target is not None and self.string_outputs[number]:
                target[...] = results[place]
                results[place] = target
        self.last = self.shown(held)
        return results

    def decoded(self, held: Dictionary, number: int, array: Any) -> Any:
        """An output as users see it."""
        return held.decode(np.asarray(array)) if self.string_outputs[number] else array

    def shown(self, held: Dictionary) -> list[Any] | None:
        found = self.inner.results
        if found is None:
            return None
        return [None if a is None else self.decoded(held, n, a) for n, a in enumerate(found)]

    @property
    def results(self) -> Sequence[Any] | None:
        return self.last

    @property
    def slots(self) -> Callable[..., Any]:
        return self.serving(self._slots)

    def _slots(self, arrays: tuple[Any, ...]) -> Any:
        held, given = self.encoded(self.admit(arrays))
        made = self.inner.slots(*given)
        self.last = [self.decoded(held, n, a) for n, a in enumerate(made)]
        return self.wrap(tuple(self.last))

    def profile(self, inputs: Sequence[Any], repeat: int) -> list[KernelTime]:
        held, given = self.encoded(inputs)
        found = self.inner.profile(given, repeat)
        del held  # whose key the run has used
        return found

    def clone(self, fresh: bool = False) -> StringsExecutable:
        return StringsExecutable(self.graph, self.texts, self.inner.clone(fresh))

    # ---- states: none is made of strings

    def keep_input(self, name: str, array: Any | None) -> None:
        if any(v.name == name and v.dtype.kind == "s" for v in self.graph.inputs):
            raise OptionError(f"input {name!r} is made of strings, which belong to one run: give it to each")
        self.inner.keep_input(name, array)

    def feed_state(self, name: str, output: int | None) -> None:
        self.inner.feed_state(name, output)

    @property
    def bound_inputs(self) -> Mapping[str, Any]:
        return self.inner.bound_inputs

    @property
    def feeds(self) -> Mapping[str, int]:
        return self.inner.feeds

    def read_state(self, name: str) -> Any:
        return self.inner.read_state(name)

    def write_state(self, name: str, array: Any | None) -> None:
        self.inner.write_state(name, array)

    def set_extent(self, dim: str, extent: int | None) -> None:
        self.inner.set_extent(dim, extent)

    # ---- as they are

    def adopt(self, value: Any) -> Any | None:
        return self.inner.adopt(value)

    def set_params(self, arrays: Mapping[str, Any]) -> None:
        self.inner.set_params(arrays)

    def raw_param(self, name: str) -> Any | None:
        return self.inner.raw_param(name)

    @property
    def arena(self) -> Any:
        return self.inner.arena

    @property
    def joins(self) -> Joins | None:
        return self.inner.joins

    def trim(self) -> None:
        self.inner.trim()
        self.last = None

    def dispose(self) -> None:
        self.inner.dispose()
        self.last = None

    def keep_functions(self, most: int) -> None:
        self.inner.keep_functions(most)

    def forget_function(self, extents: Mapping[str, int]) -> None:
        self.inner.forget_function(extents)

    @property
    def listing(self) -> Mapping[Kernel, str]:
        return self.inner.listing

    @property
    def profiled(self) -> Sequence[Kernel]:
        return self.inner.profiled

    @property
    def expert_layers(self) -> Sequence[ExpertLayerSpec]:
        return self.inner.expert_layers

    @property
    def offloaded_bytes(self) -> int:
        return self.inner.offloaded_bytes

    def set_resident(self, masks: Sequence[Any]) -> None:
        self.inner.set_resident(masks)

    def capture(self, calls: int) -> None:
        self.inner.capture(calls)

    def take_captured(self) -> Mapping[str, list[Any]]:
        return self.inner.take_captured()

    def take_figures(self) -> Mapping[str, ExpertFigures]:
        return self.inner.take_figures()
