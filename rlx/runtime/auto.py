"""Compiling for device="auto": on the device that the choice names, or on several where that is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.backends import BACKENDS, backend_named
from rlx.backends.base import Backend
from rlx.compiler import compile_graph
from rlx.cost.kept import ceilings_of
from rlx.cost.patience import long_kernels
from rlx.errors import DeviceUnavailable
from rlx.estimate.admit import Admission, plenty
from rlx.ir.graph import Graph
from rlx.lazy_imports import log
from rlx.options import CompileOptions
from rlx.passes.dims import apply_dims
from rlx.passes.precision import apply_precision
from rlx.records import names_of
from rlx.runtime.choice import Candidate, Decision, choose, usual_extents
from rlx.runtime.compiled import CompiledGraph, compiled_graph
from rlx.runtime.memory import ModelMemory, Resident
from rlx.runtime.policy import DevicePolicy
from rlx.runtime.split import Part, compile_split, copy_seconds, partition
from rlx.units import long_text

__all__ = ["compile_chosen", "compile_on", "decided", "named"]


def compile_on(graph: Graph, backend: Backend, options: CompileOptions, before: Resident) -> CompiledGraph:
    """The graph on a device, if its memory is there; `before` is this process before the graph was read."""
    admission = Admission(backend, options)
    made = compile_graph(graph, backend, options, admission, early=plenty(options))
    if made.program is not None:
        ceilings = ceilings_of(backend.name, options.threads, measure=False)
        for kernel, turns, seconds in long_kernels(made.program, ceilings):
            log.warning(
                "%s: %s alone turns its loops %.3g times in a run and is predicted to take %s, even at the lowest "
                "sizes of its dims: is a size not what was meant?",
                graph.name, kernel.label, turns, long_text(seconds),
            )  # fmt: skip
    return compiled_graph(made, backend.name, options, ModelMemory(admission, before))


def compile_chosen(graph: Graph, policy: DevicePolicy, options: CompileOptions, before: Resident) -> CompiledGraph:
    """The graph on the device that the policy gives. With one device here there is nothing to price before."""
    allowed = [backend_named(name) for name in BACKENDS if not policy.forbids(name)]
    here = [b.name for b in allowed if b.available().present and not policy.unfit(b, options)]
    if len(here) == 1 and not policy.split:
        made = compile_on(graph, backend_named(here[0]), options, before)
        made.decide = lambda: decided(graph, policy, options)
        return made
    try:
        decision = choose(graph, policy, **_keywords(options))
    except DeviceUnavailable:
        if not policy.split or not here:
            raise
        return _split(graph, here, options)
    made = compile_on(graph, backend_named(decision.device), options, before)
    made.decide = lambda: decision
    return made


def decided(graph: Graph, policy: DevicePolicy, options: CompileOptions) -> Decision:
    """What the policy decides with the figures that there are, without measuring any."""
    return choose(graph, policy, calibrate=False, **_keywords(options))


def _keywords(options: CompileOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names_of(options) if name != "device"}


def _split(graph: Graph, devices: list[str], options: CompileOptions) -> CompiledGraph:
    """Parts on several devices; the decision lists them, and what the copies between them cost."""
    fixed = apply_precision(apply_dims(graph, options.dims), options.precision)
    parts = partition(fixed, devices)
    at = usual_extents(fixed, None)
    used = list(dict.fromkeys(p.device for p in parts))
    seconds = copy_seconds(parts, at, {name: ceilings_of(name, measure=False) for name in used})
    made = compiled_graph(compile_split(fixed, parts, options), "+".join(used), options)
    decision = Decision(fixed.name, made.device, _story(parts_text(parts, at), seconds), (), at)
    made.decide = lambda: decision
    return made


def parts_text(parts: Sequence[Part], at: Mapping[str, int]) -> str:
    """Each part with its device, nodes, and the bytes that come from others."""
    shown = []
    for p in parts:
        moved = p.copied_bytes(at)
        size = "bytes that data decide" if moved is None else f"{moved:,} B"
        shown.append(f"{len(p.graph.nodes)} nodes on {p.device} ({size} come from other parts)")
    return ", ".join(shown)


def _story(parts: str, seconds: float) -> str:
    return f"no device runs it whole, split: {parts}; the copies take about {seconds * 1e6:.0f} us"


def named(graph: Graph, device: str) -> Decision:
    """The decision where the user named the device."""
    return Decision(graph.name, device, "named by the caller", (Candidate(device, ""),), usual_extents(graph, None))
