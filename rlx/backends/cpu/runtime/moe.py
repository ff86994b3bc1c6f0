"""The calls on the mixture-of-experts layers of a compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rlx.backends.base import Executable, ExpertFigures, ExpertLayerSpec
from rlx.backends.cpu.runtime.shared import Shared
from rlx.errors import OptionError
from rlx.ir.graph import Array
from rlx.ir.mapped import mapping_of
from rlx.kernels.program import Program
from rlx.records import cached_property

if TYPE_CHECKING:
    from rlx.backends.cpu.runtime.moe_memory import ExpertMemory
    from rlx.backends.cpu.runtime.residency import Mask
    from rlx.kernels.experts import ExpertLayer

__all__ = ["ExpertCalls"]


class ExpertCalls(Executable[Array]):
    """The calls on experts of `CpuExecutable`; each holds the state block meanwhile."""

    program: Program
    shared: Shared
    captured: int  # calls of each layer that are captured from the first run on
    held: Callable[[], AbstractContextManager[None]]
    forget: Callable[[], None]

    @cached_property
    def experts(self) -> ExpertMemory:
        """The memory for the layers, for graphs that have some."""
        from rlx.backends.cpu.runtime.moe_memory import ExpertMemory

        return ExpertMemory(self.program, self.captured)

    @property
    def expert_layers(self) -> Sequence[ExpertLayerSpec]:
        from rlx.backends.cpu.runtime.residency import panel_bytes

        return [
            ExpertLayerSpec(layer.name, layer.experts, layer.top_k, sum(map(panel_bytes, layer.weights)))
            for layer in self.program.experts
        ]

    @property
    def offloaded_bytes(self) -> int:
        return self.shared.residency.saved_bytes()

    def set_resident(self, masks: Sequence[Mask]) -> None:
        for layer, mask in zip(self.program.experts, masks, strict=True):
            for weight in layer.weights if not mask.all() else ():
                stored = self.shared.memory.get(weight.panels)
                if self.shared.prepared and weight.source.base not in self.shared.params and stored is not None:
                    self._check_file(layer, stored)
        with self.held():
            self.forget()  # first: what is bound knows where panels lie now, also where only some can be placed
            self.shared = self.shared.parted(self)  # type: ignore[arg-type]
            pairs = zip(self.program.experts, masks, strict=True)
            self.shared.place_experts({w.panels: mask for layer, mask in pairs for w in layer.weights})

    def _check_file(self, layer: ExpertLayer, panels: Array) -> None:
        if mapping_of(panels) is not None:
            raise OptionError(
                f"set_resident_experts: layer {layer.name!r} was loaded from an artifact, which has its weights as "
                "they are packed, in pages that the system drops by itself; load the model file to choose experts"
            )

    def capture(self, calls: int) -> None:
        with self.held():
            self.forget()
            self.experts.capture(calls)

    def take_captured(self) -> Mapping[str, list[Array]]:
        with self.held():
            found = {layer.name: self.experts.captured(layer) for layer in self.experts.layers}
            self.experts.drop_captured()
            return found

    def take_figures(self) -> Mapping[str, ExpertFigures]:
        with self.held():
            found = {layer.name: self.experts.figures(layer) for layer in self.experts.layers}
            self.experts.drop_figures()
            return found
