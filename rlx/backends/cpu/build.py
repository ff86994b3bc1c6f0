"""From the kernels of a program to a compiled graph on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rlx.backends.codegen.check import check_supported
from rlx.backends.codegen.table import Phase, phases_of
from rlx.backends.cpu.jit.compile import Compiling
from rlx.backends.cpu.runtime.concurrent_phases import priced
from rlx.backends.cpu.runtime.executable import CpuExecutable
from rlx.backends.cpu.runtime.shared import Shared
from rlx.backends.cpu.schedule.arguments import KernelCode, Routine
from rlx.ir.graph import Graph
from rlx.kernels.program import Kernel, Program
from rlx.options import CompileOptions
from rlx.records import replace

__all__ = ["build", "compile_codes"]


def build(
    graph: Graph,
    program: Program,
    options: CompileOptions,
    emit: Callable[[Kernel], list[KernelCode]],
    work: Compiling,
) -> CpuExecutable:
    """Compiles every kernel of the program and sets up its memory. Raises `UnsupportedOp` for what it can't run."""
    check_supported(graph, program, "the CPU")

    prepare, _ = phases_of(program.prepare, emit)
    phases, marks = phases_of(program.run, emit)
    run = priced(phases, program)
    with work:
        compile_codes(work, [p.code for p in (*prepare, *run) if p.code is not None])
        addresses = work.finish()
    bare = _Bare()
    packing, running = [bare(p) for p in prepare], [bare(p) for p in run]
    shared = Shared(graph, program, options, packing, running, addresses, marks)
    data = {v.name: v.data for v in graph.params if v.data is not None}
    if data:
        shared.set_params(data)
    return CpuExecutable(shared)


class _Bare:
    """Phases without the text of their code, some MB that nobody reads again."""

    def __init__(self) -> None:
        self.codes: dict[int, tuple[KernelCode, KernelCode]] = {}  # by identity: what it was made of stays there

    def __call__(self, phase: Phase) -> Phase:
        code = phase.code
        if code is None:
            return phase
        if id(code) not in self.codes:
            self.codes[id(code)] = code, replace(code, ir="")
        return replace(phase, code=self.codes[id(code)][1])


def compile_codes(work: Compiling, codes: Iterable[KernelCode]) -> None:
    """Has kernels and the routines that they call compiled."""
    for code in codes:
        work.add(code.symbol, code.ir, code.optimize)
        for word in code.words:
            if isinstance(word, Routine):
                work.add_routine(word)
