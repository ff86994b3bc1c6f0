"""From the kernels of a program to a compiled graph on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rlx.backends.cpu.jit.compile import Compiling
from rlx.backends.cpu.runtime.binding import Phase
from rlx.backends.cpu.runtime.concurrent_phases import priced
from rlx.backends.cpu.runtime.executable import FIRST_ROOM, CpuExecutable, settable
from rlx.backends.cpu.runtime.shared import Shared
from rlx.backends.cpu.schedule.arguments import KernelCode, Routine
from rlx.errors import UnsupportedNode, UnsupportedOp
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim, symbols
from rlx.kernels.program import Flow, Kernel, Program
from rlx.options import CompileOptions

__all__ = ["build", "compile_codes"]


def build(
    graph: Graph,
    program: Program,
    options: CompileOptions,
    emit: Callable[[Kernel], list[KernelCode]],
    work: Compiling,
) -> CpuExecutable:
    """Compiles every kernel of the program and sets up its memory. Raises `UnsupportedOp` for what it can't run."""
    check_supported(graph, program)

    def phases(kernels: Sequence[Kernel]) -> list[Phase]:
        made: list[Phase] = []
        for kernel in kernels:
            by_host = kernel.host is not None or kernel.extents is not None
            codes: Sequence[KernelCode | None] = [None] if by_host else emit(kernel)
            made.extend(Phase(kernel, code) for code in codes)
            if kernel.mark is not None:  # what follows it
                part = {"loop": "start"}.get(kernel.mark.part, kernel.mark.part)
                marks[kernel.mark.flow, part] = len(made)
        return made

    marks: dict[tuple[Flow, str], int] = {}
    prepare, run = phases(program.prepare), priced(phases(program.run), program)
    with work:
        compile_codes(work, [p.code for p in (*prepare, *run) if p.code is not None])
        addresses = work.finish()
    shared = Shared(graph, program, options, prepare, run, addresses, marks)
    data = {v.name: v.data for v in graph.params if v.data is not None}
    if data:
        shared.set_params(data)
    return CpuExecutable(shared)


def compile_codes(work: Compiling, codes: Iterable[KernelCode]) -> None:
    """Has kernels and the routines that they call compiled."""
    for code in codes:
        work.add(code.symbol, code.ir, code.optimize)
        for word in code.words:
            if isinstance(word, Routine):
                work.add(word.symbol, word.ir, False)


def check_supported(graph: Graph, program: Program) -> None:
    """`UnsupportedOp` naming every weight or state whose size is open, and every size that nothing tells."""
    found = []
    for leaf in (*graph.params, *graph.states):
        if any(isinstance(size, Dim) for size in leaf.shape):
            found.append(UnsupportedNode(leaf.name, leaf.kind, f"its shape {leaf.type} is not fixed: give dims"))
    known = {s.name for value in graph.inputs for size in value.shape for s in symbols(size)}
    known |= program.made.keys() | settable(graph, program)
    for node in graph.nodes:
        own = {s.name for value in node.outputs for size in value.shape for s in symbols(size)} - known
        known |= own
        if own:
            why = f"the size {', '.join(sorted(own))} can't be read off an input's shape, and no node decides it"
            found.append(UnsupportedNode(node.label, node.op.op_name, why))
    finite = {name: Dim(name, symbol.lo, symbol.lo + FIRST_ROOM) for name, symbol in program.dims.items()}
    for kernel in program.run if program.made else ():
        for buffer in kernel.writes():
            if buffer.most(finite) is None:
                why = f"the shape ({', '.join(map(str, buffer.shape))}) has no bound by the sizes that data decide"
                found.append(UnsupportedNode(kernel.label, kernel.name, why))
    if found:
        lines = "".join(f"\n  {n.op} {n.name!r}: {n.reason}" for n in found)
        raise UnsupportedOp(f"graph {graph.name!r} can't be run on the CPU:{lines}", found)
