"""A graph as the kernels that a device runs, and as those that it would run without fusion."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from rlx.backends.base import Backend, CodeGenerator
from rlx.compiler import DEFAULT, legal_graph, lower_graph
from rlx.errors import OptionError, ShapeError, no_such
from rlx.ir.dtype import DType
from rlx.ir.encoding import Encoding
from rlx.ir.extents import check_extent, of_parts
from rlx.ir.graph import Graph, Node
from rlx.ir.shape import Shape, evaluate
from rlx.ir.verify import verify
from rlx.kernels.affine import Affine
from rlx.kernels.analysis import Fusing
from rlx.kernels.fuse import Target, fuse
from rlx.kernels.lowering import Anchor, lower_node
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.options import CompileOptions
from rlx.passes import run_passes
from rlx.passes.legalise import Dispatch, legalise
from rlx.passes.number_strings import number_strings
from rlx.records import cached_property, dataclass
from rlx.units import as_int, with_ints

__all__ = ["Lowered", "extents_at", "lower", "lowered_from", "needed", "results_of", "rounds_of"]


@dataclass(frozen=True)
class AnyTarget:
    """What fusion is told for a library, or for a device that is not here: it runs whatever it claims."""

    claims: Callable[[Node], str | None]
    fusing: Fusing = Fusing()

    def accepts_dtype(self, dtype: DType) -> bool:
        return True

    def accepts_special(self, node: Node) -> bool:
        return lower_node(node) is None and self.claims(node) is None

    def encoded_operands(self, node: Node) -> range:
        return range(len(node.inputs))  # params are decoded as they are set

    def accepts_anchor(self, anchor: Anchor, node: Node) -> bool:
        return True

    def accepts_operand(self, anchor: Anchor, role: str, shape: Shape, index: Affine) -> bool:
        return index.is_linear

    def accepts_blocks(self, anchor: Anchor, role: str, encoding: Encoding) -> bool:
        return True


@dataclass(frozen=True)
class Lowered:
    """A graph on a device. `syncs(kernel)`: whether the device waits for it before it goes on."""

    graph: Graph
    legal: Graph
    dispatch: list[Dispatch]
    program: Program
    target: Target
    syncs: Callable[[Kernel], bool]

    @cached_property
    def unmerged(self) -> Program:
        """The program without fusion: kernels of one node each; nodes that the planner makes views have none."""
        return fuse(self.legal, self.target, merge=False)


def lower(graph: Graph, backend: Backend | None, options: CompileOptions = DEFAULT) -> Lowered:
    """Brings a graph to kernels; None stands for a device that runs every op that can be lowered.

    Raises `UnsupportedOp` with every node that the device can't run, and `DeviceUnavailable` for a library that is
    not installed.
    """
    verify(graph)
    if backend is None:
        legal, dispatch = legalise(run_passes(number_strings(graph)), _lowerable)
    else:
        _, legal, dispatch = legal_graph(graph, backend, options.precision)
    program = lower_graph(legal, backend, options) if isinstance(backend, CodeGenerator) else None
    return lowered_from(graph, legal, dispatch, backend, program)


def lowered_from(
    graph: Graph, legal: Graph, dispatch: list[Dispatch], backend: Backend | None, program: Program | None = None
) -> Lowered:
    """The same for a graph that has been legalised (and, with `program`, lowered) already."""
    claims = _lowerable if backend is None else backend.claims
    target: Target = backend if isinstance(backend, CodeGenerator) else AnyTarget(claims)
    if program is None:
        program = fuse(legal, target)
    flushes = frozenset() if backend is None else backend.sync_ops

    def syncs(kernel: Kernel) -> bool:
        return kernel.host is not None or any(node.op.op_name in flushes for node in kernel.nodes)

    return Lowered(graph, legal, dispatch, program, target, syncs)


def _lowerable(node: Node) -> str | None:
    return None if node.regions or lower_node(node) is not None else "its op has no lowering"


def extents_at(graph: Graph, at: Mapping[str, int] | None) -> dict[str, int]:
    """The extent of every dim: as given, else its upper bound. `ShapeError` names a dim that has neither."""
    dims = graph.dims()
    given = of_parts(with_ints(at or {}), dims)
    for name, extent in given.items():
        if name not in dims:
            raise no_such("dim", name, dims, call="at")
        if as_int(extent) is None:
            raise OptionError(f"at[{name!r}]={extent!r}: expected a size")
        check_extent(dims[name], extent, "at")
    for name, symbol in dims.items():
        if name in given:
            continue
        if symbol.hi is None:
            raise ShapeError(f"dim {name!r} has no upper bound: say at which size, such as at={{{name!r}: 128}}")
        given[name] = symbol.hi // symbol.multiple * symbol.multiple
    return given


def needed(program: Program, outputs: Collection[str] | None) -> list[Kernel]:
    """The kernels of a run that the named outputs (None: all) and the states need, in order."""
    wanted = [b for name, b in program.outputs if outputs is None or name in outputs]
    live: set[Buffer] = {b.base for b in (*wanted, *program.updates.values())}
    kept: set[Kernel] = set()
    while True:  # again where a round of a loop reads what the one before has written
        before = len(kept)
        for kernel in reversed(program.run):
            if kernel not in kept and any(b.base in live for b in kernel.writes()):
                kept.add(kernel)
                live |= {b.base for b in kernel.reads()}
        if len(kept) == before:
            return [k for k in program.run if k in kept]


def results_of(legal: Graph, ops: Collection[str], programs: Collection[Program]) -> list[object]:
    """The ops that give the results of nodes of these ops, where the passes or the device have taken them apart.

    Where a result is a view of another, the op that makes that one in a kernel of the programs.
    """
    placed = {id(node.op) for program in programs for kernel in program.run for node in kernel.nodes}
    found: list[object] = []
    for old, new in (legal.became or {}).items():
        if old.node is None or old.node.op.op_name not in ops:
            continue
        given = {legal.became.get(v) for v in old.node.inputs} if legal.became else set()
        while new not in given and new.node is not None and id(new.node.op) not in placed and new.node.inputs:
            new = new.node.inputs[0]
        if new not in given and new.node is not None:
            found.append(new.node.op)
    for node in legal.nodes:
        for region in node.regions:
            found += results_of(region, ops, programs)
    return found


def rounds_of(program: Program, extents: dict[str, int]) -> dict[Kernel, int]:
    """How often each kernel of a run is launched: the rounds of the loops around it, one where data end a loop.

    Adds the numbers of the rounds to the extents (0), since sizes may be linear in them.
    """
    found: dict[Kernel, int] = {}
    around = [1]
    for kernel in program.run:
        mark = kernel.mark
        if mark is not None and mark.flow.round is not None:
            extents[mark.flow.round.name] = 0
            if mark.part == "loop":
                around.append(around[-1] * (1 if mark.flow.trips is None else evaluate(mark.flow.trips, extents)))
            elif mark.part == "end":
                around.pop()
        found[kernel] = around[-1]
    return found
