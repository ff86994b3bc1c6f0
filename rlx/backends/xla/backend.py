"""The XLA device: whether jax is there, and StableHLO of what runs on it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from rlx.backends.base import Availability, Executable, Rates
from rlx.backends.library.arrays import Arrays
from rlx.backends.library.executable import ArrayBackend, ArrayExecutable
from rlx.backends.memory import DeviceMemory
from rlx.install import install_extra
from rlx.ir.graph import Graph
from rlx.ir.shape import evaluate

__all__ = ["XlaBackend", "XlaExecutable"]


class XlaExecutable(ArrayExecutable):
    """A graph as jitted functions of jax."""

    def stablehlo(self, at: Mapping[str, int] | None = None) -> str:
        """The StableHLO text of the function of inputs, params and states for these extents of the dims."""
        import jax
        from jax import export

        function = self.specialised(tuple(sorted((at or {}).items())))
        shapes = [tuple(evaluate(s, at or {}) for s in v.shape) for v in function.leaves]
        with self.lib.session():
            types = [jax.ShapeDtypeStruct(s, v.dtype.numpy) for s, v in zip(shapes, function.leaves, strict=True)]
            return str(export.export(jax.jit(function.trace))(types).mlir_module())


class XlaBackend(ArrayBackend):
    """XLA through jax: CPU, and GPUs and TPUs where jax has them."""

    name = "xla"

    @property
    def unified(self) -> bool:  # type: ignore[override]
        if not self.available().present:
            return True
        import jax

        return bool(jax.default_backend() == "cpu")

    @property
    def on_processor(self) -> bool:
        return self.unified

    @property
    def rates(self) -> Rates:
        flops, moved = (5e10, 2e10) if self.on_processor else (12e12, 900e9)
        return Rates(flops, moved, run=6e-5, launch=2e-6, compile=0.3)

    def available(self) -> Availability:
        remedy = install_extra("xla")
        if find_spec("jax") is None:
            return Availability(False, "jax is not installed", remedy)
        try:
            import jax

            kinds = sorted({f"{d.platform} ({d.device_kind})" for d in jax.devices()})
        except (AttributeError, ImportError, OSError, RuntimeError) as error:  # a broken or mismatched installation
            return Availability(False, f"jax can't be used: {error}", remedy)
        return Availability(True, f"jax {jax.__version__} on {', '.join(kinds)}")

    def arrays(self) -> Arrays:
        from rlx.backends.xla.arrays import XlaArrays

        return XlaArrays()

    def memory(self) -> DeviceMemory:
        if not self.available().present:
            return DeviceMemory(None, None)
        import jax

        stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
        if stats is None:
            return super().memory()
        total = stats.get("bytes_limit")
        return DeviceMemory(None if total is None else total - stats.get("bytes_in_use", 0), total)

    def executable(self, graph: Graph) -> Executable[Any]:
        return XlaExecutable(self.name, self.lib, graph)
