"""The interpreter as a device: what it takes, and where its programs differ from those of other devices."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from rlx.backends.array import MemorySpace
from rlx.backends.base import Availability, CodeGenerator, CodeSizes, Executable, Rates
from rlx.backends.codegen.check import check_supported, claim_of_loops
from rlx.backends.codegen.packing import Packing
from rlx.backends.interp.executable import Code, InterpExecutable
from rlx.backends.interp.memory import HOST, SPACE
from rlx.backends.memory import DeviceMemory
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph, Node
from rlx.ir.shape import Shape
from rlx.kernels.affine import Affine
from rlx.kernels.analysis import Fusing
from rlx.kernels.expr import Load
from rlx.kernels.lowering import Anchor, out_vars
from rlx.kernels.narrow import as_bytes
from rlx.kernels.program import Kernel, Program, Store
from rlx.options import CompileOptions
from rlx.records import replace

__all__ = ["InterpBackend"]


class InterpBackend(CodeGenerator):
    """Kernels executed by NumPy in a memory of their own."""

    name = "interp"
    unified = False
    capabilities = InterpExecutable.capabilities
    precisions = frozenset({"f32", "bf16", "f16", "q8"})
    honours = frozenset({"alignment", "reuse", "search", "debug"})
    fusing = Fusing()

    def available(self) -> Availability:
        return Availability(True, f"kernels executed by NumPy {np.__version__} (slow; the lesson in adding a backend)")

    @property
    def space(self) -> MemorySpace:
        return SPACE

    @property
    def on_processor(self) -> bool:
        return True

    @property
    def rates(self) -> Rates:
        return Rates(1e9, 1e9, run=1e-3, launch=1e-4)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(None, None)

    def claims(self, node: Node) -> str | None:
        return claim_of_loops(self, node)

    def accepts_dtype(self, dtype: DType) -> bool:
        return dtype.kind != "c" and not as_bytes(dtype)

    def accepts_special(self, node: Node) -> bool:
        return False

    def encoded_operands(self, node: Node) -> Collection[int]:
        return ()

    def accepts_anchor(self, anchor: Anchor, node: Node) -> bool:
        return True

    def accepts_operand(self, anchor: Anchor, role: str, shape: Shape, index: Affine) -> bool:
        return True

    def layout(self, program: Program, packing: str = "fast", precision: str = "f32") -> Program:
        """Inputs lie in the memory of the host; kernels of a second queue copy them to the device."""
        views = [b for b in dict.fromkeys(program.touched()) if b.base.kind == "input"]
        copies = []
        for number, here in enumerate(program.inputs):
            there = replace(here, space=HOST)
            program.inputs[number] = there
            here.name, here.kind = f"{here.name}.copy", "arena"
            vars = out_vars(len(here.shape))
            to, source = (here.bytes, there.bytes) if as_bytes(here.dtype) else (here, there)
            store = Store(to, here.shape, vars, Load(source, vars, to.dtype))
            copies.append(Kernel("bring", (store,), queue=1))
        for view in views:
            view.kind = "arena"
        program.run[:0] = copies
        return program

    def code_sizes(self, program: Program, options: CompileOptions) -> CodeSizes:
        kernels = [*program.prepare, *program.run]
        words = sum(len(kernel.reads()) + len(kernel.writes()) for kernel in kernels)
        count = len(kernels)
        loading = Packing(program, program.prepare).loading_bytes()
        return CodeSizes(count, count, 0, 8 * words, lambda extents: 0, 0, loading=loading)

    def emit(self, graph: Graph, program: Program, options: CompileOptions) -> Executable[Any]:
        check_supported(graph, program, "the interpreter")
        made = InterpExecutable(Code(graph, program, options))
        made.load()
        return made
