"""Mixtures of experts at run time: which experts are kept in memory, where tokens went, and what that cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.base import Executable, ExpertFigures, ExpertLayerSpec
from rlx.boundary import bounded_class
from rlx.errors import ExecutionError, OptionError, ShapeError
from rlx.ir.graph import Array, refuse_masked
from rlx.runtime.memory import ModelMemory, give_back
from rlx.units import as_int

if TYPE_CHECKING:
    from rlx.runtime.writing import Writer

__all__ = ["ExpertControl"]


@bounded_class(ExecutionError)
class ExpertControl:
    """The calls of a compiled graph on its mixture-of-experts layers.

    A layer are the products (`rlx.grouped_matmul`) that go by the same numbers of experts, by weights that no run
    changes: `rlx.moe` makes one of its name. All calls raise `OptionError` on a device without them ("experts" is not
    in `capabilities`) and for a graph without such layers, and `BusyError` while it runs in another thread.
    """

    memory: ModelMemory | None
    _writer: Writer | None
    _executable: Executable[Any]

    @property
    def expert_layers(self) -> tuple[ExpertLayerSpec, ...]:
        """The layers in the order in which they run: name, number of experts, `top_k`, bytes of a resident expert."""
        return tuple(self._executable.expert_layers)

    def set_resident_experts(self, experts: Iterable[Any] | None) -> None:
        """Keeps the weights of these experts ready in memory; those of others are fetched by each run that needs them.

        `experts` is a mask (a bool for each expert) for all layers, or a list of masks, one for each layer; None makes
        all resident. Results are the same bits in any case. What is not resident takes no memory where the weights lie
        in a mapped file, else that of the array that was given; `memory` counts it so. It holds for this graph and the
        clones made from now on, not for others. Raises `ShapeError` for masks of another length or number,
        `MemoryDeficit` where more experts than before do not fit.
        """
        layers = self._layers("set_resident_experts")
        masks = _masks(experts, layers)
        before = self._executable.offloaded_bytes
        if self.memory is not None:
            kept = sum(int(m.sum()) * layer.expert_bytes for m, layer in zip(masks, layers, strict=True))
            every = sum(layer.experts * layer.expert_bytes for layer in layers)
            more = before - (every - kept)
            if more > 0:
                self.memory.admit_experts(more)
        if self._writer is not None:
            self._writer.finish()  # which has all experts
        try:
            self._executable.set_resident(masks)
        finally:  # where memory ran out, some layers are as asked
            give_back()
            if self.memory is not None:
                self.memory = self.memory.with_offloaded(self._executable.offloaded_bytes)
                self._executable.reserve = self.memory.reserve

    def capture_routing(self, calls: int | None) -> None:
        """Keeps the numbers of the experts that tokens go to, of the last `calls` runs of each layer; None ends that.

        What was captured before is dropped. A layer in a loop runs once in each round. Runs stay on the fastest path
        and take no memory for it: there is room for all from the first run on.
        """
        self._layers("capture_routing")
        count = as_int(calls)
        if calls is not None and (count is None or count < 1):
            raise OptionError(f"capture_routing: expected a number of runs >= 1, or None, got {calls!r}")
        self._executable.capture(count or 0)

    def take_routing(self) -> dict[str, list[Array]]:
        """The captured numbers by layer: for each of its runs, oldest first, an i64 array [tokens, top_k], best first.

        They are then dropped. Tokens are all rows that were routed: the leading axes flattened.
        """
        self._layers("take_routing")
        return dict(self._executable.take_captured())

    def take_expert_stats(self) -> dict[str, ExpertFigures]:
        """What was counted by layer since the last time: arrays `tokens`, `hits`, `misses` and `fetched_bytes`.

        Each has an i64 for each expert. A run of a layer counts one hit or miss for every expert that it sends tokens
        to: a hit where that was resident. Counting starts with compiling, and a clone starts at 0.
        """
        self._layers("take_expert_stats")
        return dict(self._executable.take_figures())

    def _layers(self, call: str) -> Sequence[ExpertLayerSpec]:
        layers = self._executable.expert_layers
        if not layers:
            raise OptionError(
                f"{call}: the graph has no mixture-of-experts layer (rlx.moe, or rlx.grouped_matmul by weights that no "
                "run changes)"
            )
        return layers


def _masks(experts: Iterable[Any] | None, layers: Sequence[ExpertLayerSpec]) -> list[Array]:
    """A mask for each layer."""
    if experts is None:
        return [np.ones(layer.experts, np.bool_) for layer in layers]
    if isinstance(experts, str | bytes | Mapping) or not isinstance(experts, Iterable):
        raise OptionError(f"set_resident_experts: expected a mask, a list of masks or None, got {experts!r}")
    given = list(experts)
    if all(np.ndim(item) == 0 for item in given):
        given = [given] * len(layers)
    if len(given) != len(layers):
        names = ", ".join(layer.name for layer in layers)
        raise ShapeError(
            f"set_resident_experts: expected a mask for each of {len(layers)} layers ({names}), got {len(given)}"
        )
    made = []
    for mask, layer in zip(given, layers, strict=True):
        refuse_masked(f"set_resident_experts: layer {layer.name!r}", mask)
        array = np.array(mask)
        if array.shape != (layer.experts,):
            raise ShapeError(
                f"set_resident_experts: layer {layer.name!r} has {layer.experts} experts, "
                f"got a mask of shape {array.shape}"
            )
        if array.dtype != np.bool_:
            raise OptionError(
                f"set_resident_experts: layer {layer.name!r}: expected a bool for each expert, got {array.dtype}"
            )
        made.append(array)
    return made
