"""CUDA as a device: what it takes, what is there, and what its programs take."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rlx.backends.array import MemorySpace
from rlx.backends.base import Availability, CodeGenerator, CodeSizes, Executable, Rates
from rlx.backends.codegen.channels_last import Choice, channels_last
from rlx.backends.codegen.check import check_supported, claim_of_loops
from rlx.backends.codegen.packing import Packing
from rlx.backends.cuda.layout.narrow import store_narrow
from rlx.backends.cuda.layout.together import join_products
from rlx.backends.cuda.text.attention import is_suited
from rlx.backends.memory import DeviceMemory
from rlx.errors import DeviceUnavailable
from rlx.install import install_extra
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph, Node
from rlx.ir.shape import Shape
from rlx.kernels.affine import Affine
from rlx.kernels.analysis import Fusing
from rlx.kernels.lowering import Anchor, Attention, Contract
from rlx.kernels.narrow import as_bytes
from rlx.kernels.program import Program
from rlx.options import CompileOptions

__all__ = ["CudaBackend"]

DRIVER_REMEDY = "install NVIDIA's driver (nvidia-smi must list the device)"
TEXT = 4096  # bytes of a kernel's code, about


class CudaBackend(CodeGenerator):
    """Kernels printed as CUDA C++ and compiled by NVRTC, for the first of NVIDIA's devices."""

    name = "cuda"
    unified = False
    capabilities = frozenset({"arena", "clone", "dynamic", "out", "profile", "slots", "states"})
    honours = frozenset({"alignment", "reuse", "search", "debug"})
    precisions = frozenset({"f32", "bf16", "f16"})
    fusing = Fusing()

    def available(self) -> Availability:
        from rlx.backends.cuda.device.driver import find_driver

        device = find_driver()
        if isinstance(device, DeviceUnavailable):
            return Availability(False, str(device), DRIVER_REMEDY)
        try:
            version = device.compiler_version()
        except DeviceUnavailable as error:
            return Availability(False, f"{device.name}, but {error}", install_extra("cuda"))
        major, minor = device.capability
        if major < 8:
            return Availability(False, f"{device.name} has compute capability {major}.{minor}: 8.0 and later are used")
        return Availability(True, f"{device.name} (compute capability {major}.{minor}), {version}")

    @property
    def space(self) -> MemorySpace | None:
        from rlx.backends.cuda.device.memory import SPACE

        return SPACE

    @property
    def rates(self) -> Rates:
        return Rates(25e12, 1.8e12, run=3e-5, launch=2.5e-6, compile=0.5)  # of an H200, about

    def memory(self) -> DeviceMemory:
        from rlx.backends.cuda.device.driver import driver, find_driver

        if isinstance(find_driver(), DeviceUnavailable):
            return DeviceMemory(None, None)
        device = driver()
        with device.current():
            return DeviceMemory(*device.free_and_total())

    def room(self) -> int | None:
        """All of it before there is a context, which takes half a GB and is not made for a choice of another device."""
        from rlx.backends.cuda.device.driver import driver

        return self.memory().free if driver().is_set_up else driver().total_bytes()

    def claims(self, node: Node) -> str | None:
        return claim_of_loops(self, node)

    def rounds_ahead(self, node: Node) -> bool | None:
        return None  # operands are stored rounded, or rounded as tiles of them are brought together

    def accepts_dtype(self, dtype: DType) -> bool:
        return dtype.kind in "fiub" and not as_bytes(dtype)

    def accepts_special(self, node: Node) -> bool:
        return False

    def encoded_operands(self, node: Node) -> Collection[int]:
        return ()

    def accepts_anchor(self, anchor: Anchor, node: Node) -> bool:
        if isinstance(anchor, Attention):
            return is_suited(anchor)
        return not (isinstance(anchor, Contract) and anchor.activations)

    def accepts_operand(self, anchor: Anchor, role: str, shape: Shape, index: Affine) -> bool:
        return True

    def layout(self, program: Program, packing: str = "fast", precision: str = "f32") -> Program:
        store_narrow(program, precision)
        if precision in ("bf16", "f16"):
            channels_last(program, Choice(weights=True))
            join_products(program)
        return program

    def code_sizes(self, program: Program, options: CompileOptions) -> CodeSizes:
        kernels = [*program.prepare, *program.run]
        words = sum(len(kernel.reads()) + len(kernel.writes()) for kernel in kernels)
        count = len(kernels)
        loading = Packing(program, program.prepare).loading_bytes()
        return CodeSizes(count, count, TEXT * count, 8 * words, lambda extents: 0, 0, loading=loading)

    def emit(self, graph: Graph, program: Program, options: CompileOptions) -> Executable[Any]:
        from rlx.backends.cuda.executable import Code, CudaExecutable

        check_supported(graph, program, "cuda")
        made = CudaExecutable(Code(graph, program, options))
        made.load()
        return made
