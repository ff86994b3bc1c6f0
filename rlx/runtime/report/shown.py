"""What a compiled graph tells of itself: times, costs, the report, explanations, and what notebooks show."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from rlx.boundary import bounded_class
from rlx.disk import target_of
from rlx.errors import ExecutionError, OptionError
from rlx.units import as_int

if TYPE_CHECKING:
    from rlx.backends.base import Executable
    from rlx.backends.timing import KernelTime
    from rlx.compiler import Compilation
    from rlx.cost.io_profile import IoProfile
    from rlx.cost.model import Prediction
    from rlx.options import CompileOptions
    from rlx.runtime.compiled import CompiledGraph
    from rlx.runtime.restore import StoredCompilation
    from rlx.runtime.trace import RunTrace

__all__ = ["Explanation", "Shown"]


class Explanation(str):
    """Text of `explain`; a notebook shows its lines."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from rlx import html

        return html.fragment(html.preformatted(self))


@bounded_class(ExecutionError)
class Shown:
    """The part of `CompiledGraph` that tells and shows."""

    _compilation: Compilation | StoredCompilation
    _executable: Executable[Any]
    _options: CompileOptions

    @property
    def _own(self) -> CompiledGraph:
        return cast("CompiledGraph", self)

    def profile(self, inputs: Mapping[str, Any] | Sequence[Any], repeat: int = 10) -> list[KernelTime]:
        """(kind, name, seconds per run) of every kernel: the low quartile over `repeat` undisturbed runs.

        Each row also has `spread` and `disturbed`: other programs had the processor, and the time may be too long. Up
        to three times as many runs are made while there are such rows.
        """
        runs = as_int(repeat)
        if runs is None or runs < 1:
            raise OptionError(f"profile: repeat={repeat!r}: expected an int >= 1")
        return self._executable.profile(self._own._admit(self._own._given(inputs)), runs)

    def trace(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        path: str | os.PathLike[str] | None = None,
        *,
        repeat: int = 1,
    ) -> RunTrace:
        """The time of every kernel, as `profile` has it, and what each thread did; written to `path` for Perfetto."""
        from rlx.runtime.trace import RunTrace

        if path is not None:
            target_of(path, "trace")  # before the work
        made = RunTrace.of(self._compilation.leaves.name, self._own.device, self.profile(inputs, repeat))
        if path is not None:
            made.save(path)
        return made

    @property
    def io_profile(self) -> IoProfile:
        """What a run moves and launches, at the upper bounds of the dims; `rlx.profile` takes other extents."""
        from rlx.cost.io_profile import profile

        return profile(self._own)

    @property
    def cost(self) -> Prediction:
        """What a run is predicted to take, kernel by kernel, at the upper bounds of the dims (128 for one without).

        It goes by the calibration of the device, or by guesses if there was none; `rlx.cost` predicts at other extents.
        """
        from rlx.runtime.choice import usual_extents
        from rlx.runtime.report.rooflines import rooflines

        at = usual_extents(self._compilation.source, None)
        return rooflines(self._own, at=at, threads=self._options.threads, calibrate=False).prediction

    def report(self, path: str | os.PathLike[str], inputs: Mapping[str, Any] | Sequence[Any] | None = None) -> None:
        """Writes a page (HTML) about it: kernels, roofline, timeline, memory, graph, choice of the device.

        With `inputs` kernels are timed, at the extents of these; states are left as they were. Raises `OptionError`
        where the page can't be written, or the device can't time its kernels.
        """
        from rlx.runtime.report.page import write_report

        target_of(path, "report")  # before the work
        if inputs is not None and "profile" not in self._own.capabilities:
            raise OptionError(f"report: device {self._own.device!r} can't time its kernels: leave inputs= out")
        write_report(
            self._own,
            path,
            None if inputs is None else self._own._admit(self._own._given(inputs)),
            self._options.threads,
        )

    def explain(self, stage: str = "summary", *, why: bool = False) -> Explanation:
        """What was decided, as text: "summary", "graph", "passes", "dispatch", "fuse", "kernels" or "plan".

        "kernels" names the strategy of each kernel; with `why` also those that were tried before it, and why they were
        not taken.
        """
        from rlx.runtime.explain import STAGES, explain

        if not isinstance(stage, str) or stage not in STAGES:
            raise OptionError(f"explain: unknown stage {stage!r}; there are {', '.join(STAGES)}")
        if not isinstance(why, bool):
            raise OptionError(f"explain: why={why!r}: expected True or False")
        if why and stage != "kernels":
            raise OptionError(f"explain: why=True goes with stage 'kernels', not {stage!r}")
        return Explanation(explain(self._own, stage, why=why))

    def _repr_html_(self) -> str:
        from rlx import html

        own = self._own
        plan, needs = own.plan, own.needs
        pairs = {
            "device": own.device,
            "inputs": ", ".join(map(str, own.inputs)),
            "outputs": ", ".join(map(str, own.outputs)),
            "memory": "" if needs is None else str(needs),
            "arena": "" if plan is None else f"{plan.arena:,} B, lower bound {plan.lower_bound:,} B",
            "thread barriers": "" if own.joins is None else str(own.joins),
        }
        title = f"<b>Compiled graph</b> {html.text(own.compilation.leaves.name)}"
        more = "<p class=soft>More: .plan, .cost, .decision, .explain(), .report('report.html')</p>"
        return html.fragment(f"<p>{title}</p>{html.facts(pairs)}{more}")
