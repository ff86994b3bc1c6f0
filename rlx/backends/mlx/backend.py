"""The MLX device: whether mlx.core is there."""

from __future__ import annotations

from importlib.util import find_spec

from rlx.backends.base import Availability, Rates
from rlx.backends.library.arrays import Arrays
from rlx.backends.library.executable import ArrayBackend
from rlx.install import install_extra

__all__ = ["MlxBackend"]


class MlxBackend(ArrayBackend):
    """MLX: Metal on Macs, CUDA where it was built for it, else its CPU build."""

    name = "mlx"
    sync_ops = frozenset(("if", "while"))  # it asks for the value that decides
    merges = False

    def available(self) -> Availability:
        remedy = install_extra("mlx")
        if find_spec("mlx") is None:
            return Availability(False, "mlx is not installed", remedy)
        try:
            import mlx.core as mx

            device = mx.default_device()
        except (AttributeError, ImportError, OSError, RuntimeError) as error:  # a missing libmlx.so, say
            return Availability(False, f"mlx can't be used: {error}", remedy)
        return Availability(True, f"mlx {mx.__version__} on {device.type.name}")

    @property
    def on_processor(self) -> bool:
        if not self.available().present:
            return True
        import mlx.core as mx

        return bool(mx.default_device().type.name == "cpu")

    @property
    def rates(self) -> Rates:
        flops, moved = (2e10, 1e10) if self.on_processor else (4e12, 200e9)
        return Rates(flops, moved, run=3e-5, launch=2e-6)

    def arrays(self) -> Arrays:
        from rlx.backends.mlx.arrays import MlxArrays

        return MlxArrays()
