"""The text that `explain` gives for each stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rlx.errors import ExecutionError
from rlx.ir.graph import OPERATORS, TensorType

if TYPE_CHECKING:
    from rlx.kernels.program import Buffer, Program
    from rlx.passes.legalise import Dispatch
    from rlx.runtime.compiled import CompiledGraph

__all__ = ["STAGES", "explain"]

STAGES = ("summary", "graph", "passes", "dispatch", "fuse", "kernels", "plan")


def explain(model: CompiledGraph, stage: str, *, why: bool = False) -> str:
    """The text of one stage; `why`: of the kernels, with why other strategies were not taken."""
    made = model.compilation
    match stage:
        case "graph":
            return str(made.source)
        case "passes":
            return str(made.optimised)
        case "dispatch":
            return dispatch_table(model)
        case "fuse":
            return str(made.program) if made.program is not None else str(made.legal)
        case "kernels":
            return kernel_table(model, why)
        case "plan":
            return plan_text(model)
    return summary(model)


def kernel_table(model: CompiledGraph, why: bool) -> str:
    """The strategy of each kernel, and its code where the device prints that.

    `why`: also the strategies that were tried before it, and why they were not taken.
    """
    program = model.compilation.program
    if program is None:
        return f"no kernels: the device {model.device!r} makes its own"
    lines: list[str] = []
    apart = _taken_apart(model.compilation.dispatch) if why else {}
    listing = model.compilation.executable.listing
    for entry, kernels in (("prepare", program.prepare), ("run", program.run)):
        lines.append(entry)
        for number, kernel in enumerate(kernels):
            lines.append(f"  {number:<4} {kernel.how:28} {kernel.label}{' (again)' if kernel.role == 'again' else ''}")
            lines += [f"         {line}" for line in listing.get(kernel, "").splitlines()]
            if kernel.before is not None:
                lines.append(f"       with {kernel.before.how:21} {kernel.before.label}")
            if why:
                for reason, names in _by_reason([*(kernel.before.refused if kernel.before else ()), *kernel.refused]):
                    lines.append(f"         not {', '.join(names)}: {reason}")
                sources = dict.fromkeys(source for node in kernel.nodes for source in node.provenance[:1])
                lines += [f"         not {line}" for source in sources for line in apart.get(source, ())]
    return "\n".join(lines)


def _taken_apart(dispatch: Sequence[Dispatch]) -> dict[str, list[str]]:
    """By node: its ops that have a lowering, but were decomposed since the device has no kernel for their operands."""
    found: dict[str, list[str]] = {}
    for row in dispatch:
        if row.how == "decomposed" and getattr(OPERATORS[row.op], "lower", None) is not None:
            found.setdefault(row.node, []).append(f"{row.op} as it is: {row.why}")
    return found


def _by_reason(refused: Sequence[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Each reason with the strategies that it kept out; several variants of one by their common name."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, reason in refused:
        found.setdefault(reason, {}).setdefault(name.partition("+")[0], []).append(name)
    for reason, strategies in found.items():
        yield reason, [names[0] if len(names) == 1 else common for common, names in strategies.items()]


def plan_text(model: CompiledGraph) -> str:
    """The plan, or why there is none."""
    if model.plan is not None:
        return "\n".join([str(model.plan), *state_lines(model)])
    if model.compilation.program is None:
        return f"no plan: the device {model.device!r} manages its memory itself"
    return "no plan yet: a dim is unbounded, so a plan is made at the first run"


def state_lines(model: CompiledGraph) -> list[str]:
    """For each declared state where its new value is made."""
    program = model.compilation.program
    if program is None:
        return [f"state    {state.spec}" for state in model.states.values()]
    lines = []
    for state in program.states:
        new, copied = program.updates.get(state.name), program.copied.get(state.name)
        if new is None or new is state:
            how = "not updated by the graph"
        elif copied is None:
            how = f"updated in place, {_written(program, new)} written per run"
        else:
            how = f"updated through a copy of {copied.bound():,} B (%{copied.name}): its old value is still being read"
        lines.append(f"state    {state.name}: {TensorType(state.shape, state.dtype, state.encoding)}, {how}")
    return lines


def _written(program: Program, new: Buffer) -> str:
    """The bytes that a run writes over a state, at the upper bounds of the dims that they depend on."""
    if new.encoding is None:
        writers = [k for k in program.run if new in k.writes()]
    else:  # whose bytes are written
        writers = [k for k in program.run if any(b.base is new.base for b in k.writes())]
    tops = {name: symbol.hi for name, symbol in program.dims.items() if symbol.hi is not None}
    for how, at in (("", {}), ("up to ", tops)):
        with suppress(ExecutionError):
            return f"{how}{sum(k.bytes_written(at) for k in writers):,} B"
    return "as many rows as are given"


def dispatch_table(model: CompiledGraph) -> str:
    """How each node runs; host calls are sync points."""
    rows = model.compilation.dispatch
    counts = Counter(d.how for d in rows)
    lines = [", ".join(f"{n} {how}" for how, n in sorted(counts.items())) or "no nodes"]
    lines.extend(f"{d.how:11} {d.op:20} {d.node}{': ' + d.why if d.why else ''}" for d in rows)
    return "\n".join(lines)


def summary(model: CompiledGraph) -> str:
    """Device, inputs and outputs, kernels by kind, memory."""
    made = model.compilation
    lines = [f"device   {model.device}"]
    lines.extend(f"input    {spec}" for spec in model.inputs)
    lines.extend(f"output   {spec}" for spec in model.outputs)
    lines.extend(state_lines(model))
    lines.append(f"nodes    {len(made.source.nodes)} imported, {len(made.optimised.nodes)} after passes")
    counts = Counter(d.how for d in made.dispatch)
    lines.append("dispatch " + (", ".join(f"{n} {how}" for how, n in sorted(counts.items())) or "no nodes"))
    if made.program is not None:
        kinds = Counter(k.how for k in made.program.run)
        lines.append(
            f"kernels  {len(made.program.prepare)} in prepare, {len(made.program.run)} per run: " + _listed(kinds)
        )
        lines.append(f"memory   {model.needs}")
        lines += gradient_lines(made.program)
    if (exact := model.__dict__.get("_own_exact")) is not None:
        lines += exact.lines()
    if model.joins is not None:
        lines.append(f"thread barriers: {model.joins}")
    plan = model.plan
    if plan is not None:
        lines.append(f"plan     arena {plan.arena:,} B, lower bound {plan.lower_bound:,} B, saved {plan.saved:,} B")
    return "\n".join(lines)


def gradient_lines(program: Program) -> list[str]:
    """Of a gradient: what its backward pass finds in memory, and what is computed again for it."""
    from rlx.plan.again import kept_for_backward, made_again

    if not any(kernel.role == "backward" for kernel in program.run):
        return []
    extents = {name: symbol.hi for name, symbol in program.dims.items() if symbol.hi is not None}
    parts = []
    for buffers, what in ((kept_for_backward, "kept for the backward pass"), (made_again, "computed again")):
        found = buffers(program.run)
        size = "open" if len(extents) < len(program.dims) else f"{sum(b.nbytes(extents) for b in found):,} B"
        parts.append(f"{len(found)} values of {size} {what}")
    return [f"gradient {', '.join(parts)}"]


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in counts.most_common())
