"""A compiled graph of a file with sequences or optionals among its outputs: they come under their own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.boundary import bounded_class
from rlx.errors import ExecutionError, OptionError, ShapeError, no_such
from rlx.ir.graph import Result
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.misuse import one_set_of_inputs

__all__ = ["ListedGraph"]


@bounded_class(ExecutionError, but=("run",))
class ListedGraph(CompiledGraph):
    """It runs like a `CompiledGraph`, but `run` and calls give what the file names.

    That is an array for a tensor, a list of arrays for a sequence, and None for an optional without an element;
    `results` says which. `outputs`, plans and views are of the single tensors, of which a sequence `y` has those named
    "y.0", "y.1" and so on or, where the run decides how many, one that has them as rows.
    """

    @property
    def results(self) -> tuple[Result, ...]:
        """What a run gives, in order."""
        return tuple(self._compilation.leaves.results)

    @property
    def _result_names(self) -> Sequence[str]:
        return [result.name for result in self.results]

    def run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        *more: Any,
        outputs: Sequence[str | int] | None = None,
        out: Mapping[str, Any] | Sequence[Any] | None = None,
    ) -> list[Any]:
        """As `CompiledGraph.run`, by the names and positions of `results`; `out` is for tensors only."""
        if more:
            raise one_set_of_inputs(more)
        chosen = self.results if outputs is None else [self._result(which) for which in outputs]
        wanted = [name for result in chosen for name in result.outputs]
        own = None if out is None else self._targets_of(out)
        return self._grouped(super().run(inputs, outputs=wanted, out=own), chosen)

    def _grouped(self, tensors: Sequence[Any], chosen: Sequence[Result] | None = None) -> list[Any]:
        arrays = iter(tensors)
        made: list[Any] = []
        chosen = self.results if chosen is None else chosen
        for result in chosen:
            parts = [next(arrays) for _ in result.outputs]
            match result.kind:
                case "absent":
                    made.append(None)
                case "rows":
                    made.append(list(parts[0]))
                case "list":
                    made.append(parts)
                case _:
                    made.append(parts[0])
        return made

    def _result(self, which: str | int) -> Result:
        results = self.results
        if isinstance(which, int) and not isinstance(which, bool) and 0 <= which < len(results):
            return results[which]
        found = next((r for r in results if r.name == which), None)
        if found is None:
            raise no_such("output", which, self._result_names, f", or 0 to {len(results) - 1}")
        return found

    def _targets_of(self, out: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        """The arrays of `out=` by the names of single tensors."""
        if not isinstance(out, Mapping) and len(out) != len(self.results):
            raise ShapeError(f"out: expected {len(self.results)} arrays or None, got {len(out)}")
        given = out.items() if isinstance(out, Mapping) else enumerate(out)
        own: dict[str, Any] = {}
        for which, array in given:
            result = self._result(which)
            if array is None:
                continue
            if result.kind != "tensor":
                raise OptionError(f"out: output {result.name!r} is a sequence or optional: leave it out")
            if result.name in own:
                raise OptionError(f"out: output {result.name!r} is given by position and by name")
            own[result.outputs[0]] = array
        return own
