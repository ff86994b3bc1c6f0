"""The compiler, whole: graph -> precision -> passes -> legalise -> fuse -> layout -> order -> plan -> code.

Every arrow is a function of its input and can be printed: `explain(stage)` of a compiled graph shows what came out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.backends import check_options
from rlx.backends.base import Backend, CodeGenerator, Executable, LibraryBackend
from rlx.backends.strings import StringsExecutable
from rlx.errors import CompileError, OptionError
from rlx.ir.casting import NARROWED
from rlx.ir.graph import Graph, Node
from rlx.ir.verify import verify
from rlx.kernels.fuse import fuse
from rlx.kernels.program import Kernel, Program
from rlx.kernels.verify import verify_program
from rlx.kernels.work import kernel_work
from rlx.options import CompileOptions
from rlx.passes import run_passes
from rlx.passes.dims import apply_dims
from rlx.passes.legalise import Dispatch, legalise, without_budgets
from rlx.passes.number_strings import constant_strings, has_strings, number_strings
from rlx.passes.precision import apply_precision, round_ahead
from rlx.passes.rewrite import track_values
from rlx.plan.again import mark_backward, within
from rlx.plan.liveness import bound_extents
from rlx.plan.order import reorder, usual_extents
from rlx.plan.plan import make_plan
from rlx.progress import report
from rlx.records import dataclass, field

__all__ = ["DEFAULT", "Admit", "Compilation", "Stages", "compile_graph", "legal_graph", "lower_graph", "stages_of"]

DEFAULT = CompileOptions()
Admit = Callable[[Graph, Graph, Program | None], None]  # source, legal graph, program: raises if it should not be made


@dataclass(eq=False)
class Stages:
    """What every stage before the code made. A library backend has no program."""

    source: Graph
    optimised: Graph
    legal: Graph
    dispatch: list[Dispatch]
    program: Program | None


@dataclass(eq=False)
class Compilation(Stages):
    """The stages and the executable that they ended in."""

    executable: Executable[Any] = field(repr=False)

    @property
    def leaves(self) -> Graph:
        """A graph with the inputs, params, states and outputs of `source`."""
        return self.source


def compile_graph(
    graph: Graph,
    backend: Backend,
    options: CompileOptions,
    admit: Admit = lambda *stages: None,
    *,
    early: bool = False,
) -> Compilation:
    """Compiles a graph for a device; `admit` is asked before memory is taken.

    It is asked before code is made too, unless `early`: then that goes on meanwhile. Raises `CompileError`,
    `UnsupportedOp`, `OptionError` for what the device can't honour, or what `admit` raises.
    """
    check_options(backend, options)
    made = stages_of(graph, backend, options)
    report("code")
    if isinstance(backend, LibraryBackend):
        admit(made.source, made.legal, made.program)
        return _compilation(made, backend, backend.build(made.legal, options))
    assert isinstance(backend, CodeGenerator)
    assert made.program is not None
    with backend.compiling(made.program, options, early):
        admit(made.source, made.legal, made.program)
        return _compilation(made, backend, backend.emit(made.legal, made.program, options))


def _compilation(made: Stages, backend: Backend, executable: Executable[Any]) -> Compilation:
    if backend.rewrites and has_strings(made.source):
        executable = StringsExecutable(made.source, constant_strings(made.source), executable)
    return Compilation(**vars(made), executable=executable)


def stages_of(graph: Graph, backend: Backend, options: CompileOptions) -> Stages:
    """The stages up to the program; makes no code."""
    graph = apply_dims(graph, options.dims)
    verify(graph)
    optimised, legal, dispatch = legal_graph(graph, backend, options.precision)
    if isinstance(backend, LibraryBackend):
        return Stages(graph, optimised, legal, dispatch, None)
    if not isinstance(backend, CodeGenerator):
        raise CompileError(f"device {backend.name!r} is neither a code generator nor a library")
    return Stages(graph, optimised, legal, dispatch, lower_graph(legal, backend, options))


def legal_graph(graph: Graph, backend: Backend, precision: str = "f32") -> tuple[Graph, Graph, list[Dispatch]]:
    """The graph after the passes, the same in ops that the device runs, and what became of each node."""
    track_values(graph)
    graph, budget = without_budgets(graph)
    if budget is not None and not isinstance(backend, CodeGenerator):
        raise OptionError(
            f"a gradient of {graph.name!r} has a budget, but the device {backend.name!r} manages its memory itself: "
            "leave budget= of rlx.grad out, or choose a device that runs rlx's own plan, such as cpu"
        )
    track_values(graph)
    graph = apply_precision(graph, precision)
    track_values(graph)
    optimised = run_passes(number_strings(graph)) if backend.rewrites else graph
    track_values(optimised)

    def rounds_ahead(node: Node) -> bool | None:
        """Products that say so themselves are no matter of the device's options."""
        asked = backend.rounds_ahead(node)
        return True if asked is None and precision not in NARROWED else asked

    legal, dispatch = legalise(round_ahead(optimised, rounds_ahead), backend.claims)
    legal.arena_budget = budget
    return optimised, legal, dispatch


def lower_graph(legal: Graph, backend: CodeGenerator, options: CompileOptions = DEFAULT) -> Program:
    """Legal graph -> kernels in the device's layouts, in the order that takes the least memory.

    Where the budget of a gradient is less than that, some kernels run again; see `rlx.plan.again`.
    """
    report("plan")
    program = backend.layout(fuse(legal, backend), options.packing, options.precision)
    report("plan", 0.5)
    verify_program(program)
    program = reorder(program, usual_extents(program))
    mark_backward(program)
    return program if legal.arena_budget is None else _within_budget(program, legal.arena_budget, backend, options)


def _within_budget(program: Program, budget: int, backend: CodeGenerator, options: CompileOptions) -> Program:
    """The program with an arena of at most so many bytes."""
    extents, rates = bound_extents(program), backend.rates

    def arena_of(made: Program) -> int:
        assert extents is not None
        return make_plan(
            made, extents, alignment=options.alignment, reuse=options.reuse, search=options.search, verify=False
        ).arena

    def seconds_of(kernel: Kernel) -> float:
        work = kernel_work(kernel, extents or {})
        return rates.launch + max(work.flops / rates.flops, (work.read + work.written) / rates.bytes)

    made = within(program, budget, arena_of, seconds_of, options.alignment)
    verify_program(made)
    return made
