"""Real runs of a graph on several devices, for a policy that asks for them; what was measured is kept."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from rlx.backends import backend_named
from rlx.compiler import compile_graph
from rlx.cost.kept import machine_key
from rlx.disk import cache_folder, read_kept, write_kept
from rlx.errors import RlxError
from rlx.estimate.admit import Admission
from rlx.ir.fingerprint import fingerprint
from rlx.ir.graph import Array, Graph
from rlx.ir.shape import evaluate
from rlx.options import CompileOptions
from rlx.runtime.compiled import CompiledGraph, compiled_graph

__all__ = ["assumed", "measured"]


def assumed(graph: Graph, extents: Mapping[str, int], seed: int = 0) -> tuple[dict[str, Array], dict[str, Array]]:
    """Inputs and params without data, by name: small random floats, and zeros of other types."""
    rng = np.random.default_rng(seed)

    def array(shape: tuple[int, ...], dtype: np.dtype) -> Array:
        return rng.standard_normal(shape).astype(dtype) if np.dtype(dtype).kind in "fV" else np.zeros(shape, dtype)

    def of(values: Sequence[object]) -> dict[str, Array]:
        return {v.name: array(tuple(evaluate(s, extents) for s in v.shape), v.dtype.numpy) for v in values}  # type: ignore[attr-defined]

    return of(graph.inputs), of([p for p in graph.params if p.data is None and p.type.encoding is None])


def measured(
    graph: Graph, devices: Sequence[str], runs: int, at: Mapping[str, int], options: CompileOptions
) -> dict[str, float]:
    """Median seconds of a run on each device, taken in turns; from the cache where the same was measured before.

    A device where it does not compile, or does not fit beside the others, is left out.
    """
    path = cache_folder() / f"runs-{fingerprint(graph)[:32]}.json"
    sizes = [[name, n] for name, n in sorted(at.items())]
    key = [sizes, runs, options.threads, *(machine_key(backend_named(d)) for d in devices)]
    kept = read_kept(path, key)
    plain = isinstance(kept, dict) and all(isinstance(seconds, float) for seconds in kept.values())
    if plain and kept and set(kept) <= set(devices):
        return dict(kept)
    inputs, params = assumed(graph, at)
    taken: dict[str, list[float]] = {}
    with ExitStack() as opened:
        models: dict[str, CompiledGraph] = {}
        for name in devices:
            backend = backend_named(name)
            try:
                made = compile_graph(graph, backend, options, Admission(backend, options))
                model = opened.enter_context(compiled_graph(made, name, options))
                model.set_params(params)
                model.run(inputs)
            except RlxError:
                continue  # it stays with its prediction
            models[name] = model
        for _ in range(runs):
            for name, model in models.items():
                start = time.perf_counter()
                model.run(inputs)
                taken.setdefault(name, []).append(time.perf_counter() - start)
    found = {name: float(np.median(times)) for name, times in taken.items()}
    write_kept(path, key, found)
    return found
