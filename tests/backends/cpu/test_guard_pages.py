"""No kernel touches a byte outside of its buffers: everything lies against pages that can't be read or written.

A kernel that strays dies of it, so the runs are in a process of their own: this file as a script, with op names.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.cpu.gemm.panels.q8_codes import CODES
from rlx.backends.cpu.kernels.registry import SPECIALS
from rlx.backends.cpu.runtime import binding, executable, shared
from rlx.backends.reference import run_graph
from rlx.compiler import lower_graph
from rlx.ir.encoding import encoding_named
from rlx.ir.extents import bind_extents
from rlx.ir.graph import Array, Graph
from rlx.ops.base import OPS
from rlx.ops.contract import MatMul
from rlx.ops.layout import Pad
from rlx.ops.select import Produced
from rlx.passes import run_passes
from rlx.passes.legalise import legalise
from rlx.testing.cases import cases_of, covered, fixed_cases
from rlx.testing.graphs import random_graph
from rlx.testing.guarded import GuardedMemory, GuardedRun
from rlx.testing.oracle import Batch, Tolerance, compare_results

# not those that run as host calls, nor those that the device refuses
NATIVE = [name for name in sorted(OPS) if OPS[name].lower or OPS[name].decompose or name in SPECIALS]
NAMES = [name for name in NATIVE if covered(name) and not issubclass(OPS[name], Produced)]
ROUNDED = (*CODES, "i8", "u8", "i8_zero", "u8_zero")
E2E = ("add", "softmax", "conv", "matmul", "attention", "gather", "reduce_max", "pad", "cast")  # whole runs too


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_op_stays_inside_its_buffers(name: str, some: Callable[[Sequence[int], int], list[int]]) -> None:
    """Each case of an op (25 in a quick run), with every buffer against a guard page at its end, then at its start."""
    run_script(name, *map(str, some(range(len(fixed_cases(name))), 25)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_random_graphs_stay_inside_their_buffers(first: int) -> None:
    """Fused kernels of random graphs in the same way."""
    run_script(f"random:{first}:{first + 10}")


@pytest.mark.parametrize("name", ROUNDED)
def test_products_of_rounded_activations_stay_inside_their_buffers(name: str) -> None:
    """With encoded weights and bytes, of one row, of several bands, and of rows that end within a block."""
    run_script(f"rounded:{name}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", E2E)
def test_whole_run_stays_inside_its_memory(name: str) -> None:
    """Compiled models with arena, params, packed weights, inputs and `out=` arrays against guard pages."""
    run_script(f"run:{name}")


@pytest.mark.parametrize("mode", ["edge", "reflect", "wrap"])
def test_pads_of_one_side_stay_inside_their_buffers(mode: str) -> None:
    """Fewer elements of padding than a vector has: the index of one side is that of no element on the other."""
    run_script(f"pads:{mode}")


def test_a_stray_read_is_noticed() -> None:
    """The check can fail: reading one element too many ends the process by a signal."""
    code = "from rlx.testing.guarded import GuardedMemory; import ctypes; m = GuardedMemory(12)\n"
    ended = subprocess.run([sys.executable, "-c", code + "ctypes.string_at(m.address, 13)"], check=False)
    assert ended.returncode < 0


def run_script(*arguments: str) -> None:
    command = [sys.executable, "-u", "-X", "faulthandler", str(Path(__file__)), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, f"status {ended.returncode}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"


# ---- in the other process


def guarded(array: Array, *, at_end: bool = True) -> Array:
    """A copy of the array against a guard page."""
    memory = GuardedMemory(array.nbytes, at_end=at_end)
    memory.bytes[:] = array.reshape(-1).view(np.uint8)
    return memory.bytes.view(array.dtype).reshape(array.shape)


def check_kernels(graph: Graph, inputs: dict[str, Array], params: dict[str, Array], sizes: Any, options: Any) -> None:
    """The kernels of the graph one by one, with guards at the ends and then at the starts of buffers."""
    backend = CpuBackend()
    legal, _ = legalise(run_passes(graph), backend.claims)
    run = GuardedRun(lower_graph(legal, backend), backend.emit_kernel)
    expected = run_graph(graph, inputs, params)
    for at_end in (True, False):
        got = run({**inputs, **params}, sizes, at_end=at_end, reverse=not at_end)
        compare_results(expected, got, *options)


def check_rounded(name: str) -> None:
    rng = np.random.default_rng(0)
    for rows, columns, depth in ((1, 17, 1), (2, 16, 2), (9, 50, 1)):
        g = Graph("rounded")
        if name in CODES:
            k, coded = CODES[name].block * depth, encoding_named(name)
            data = coded.encode(rng.standard_normal((columns, k)).astype(np.float32))
            w = rlx.transpose(g.param("w", (columns, k), encoding=name, data=data), perm=(1, 0))
        else:
            k, dtype = 32 * depth + 3, name[:2]
            data = rng.integers(0, 100, (k, columns)).astype("int8" if dtype == "i8" else "uint8")
            w = rlx.cast(g.param("w", (k, columns), dtype=dtype, data=data), "f32")
            w = w - 5.0 if name.endswith("_zero") else w
        g.output(g.add(MatMul("q8"), g.input("x", (rows, k)), w)[0], "y")
        x = rng.standard_normal((rows, k)).astype(np.float32)
        check_kernels(g, {"x": x}, {"w": data}, {}, ({"y": Tolerance(1e-4, 1e-4 * k)},))


def check_random(first: int, last: int) -> None:
    for seed in range(first, last):
        sys.stdout.write(f"random graph {seed}\n")
        graph, make = random_graph(seed, 15, dtypes=("f32", "f64", "f16", "bf16", "i32", "i64", "bool"))
        inputs = make(seed)
        params = {v.name: v.data for v in graph.params if v.data is not None}
        sizes = bind_extents(graph, {k: a.shape for k, a in inputs.items()})
        check_kernels(graph, inputs, params, sizes, ({},))


def check_pads(mode: str) -> None:
    rng = np.random.default_rng(0)
    for dtype in ("f32", "f64", "bf16", "i8"):
        for size in (3, 33, 97, 4097):
            g = Graph("pads")
            x = g.input("x", (3, size), dtype)
            for number, pads in enumerate(((0, 0, 0, 1), (0, 1, 0, 0), (0, 2, 0, 1), (0, 0, 0, 2))):
                g.output(g.add(Pad(pads, 0, mode), x)[0], f"y{number}")
            given = {"x": rng.integers(-9, 9, (3, size)).astype(x.dtype.numpy)}
            check_kernels(g, given, {}, {}, ({},))


def check_run(name: str, patch: pytest.MonkeyPatch) -> None:
    """A model whose own memory is guarded, run into guarded `out=` arrays."""

    def bytes_at_a_guard(count: int, alignment: int = 64, sparse: bool = False) -> Array:
        return GuardedMemory(count).bytes

    for module in (binding, executable, shared):
        patch.setattr(module, "aligned_bytes", bytes_at_a_guard)
    batch = Batch([*cases_of(name, 7, 33), *cases_of(name, 16, 17), *cases_of(name, 0, 5)])
    inputs, params = batch.arrays()
    expected = run_graph(batch.graph, inputs, params)
    model = rlx.compile(batch.graph, device="cpu")
    model.set_params({k: guarded(a) for k, a in params.items()})
    for at_end in (True, False):
        given = {k: guarded(a, at_end=at_end) for k, a in inputs.items()}
        out = {k: guarded(np.zeros_like(a), at_end=at_end) for k, a in expected.items()}
        model.run(given, out=out)
        compare_results(expected, out, batch.allowed, batch.labels)


def main(what: str, *numbers: str) -> None:
    kind, _, rest = what.partition(":")
    if kind == "run":
        with pytest.MonkeyPatch.context() as patch:
            check_run(rest, patch)
    elif kind == "rounded":
        check_rounded(rest)
    elif kind == "pads":
        check_pads(rest)
    elif kind == "random":
        check_random(*map(int, rest.split(":")))
    else:
        cases = fixed_cases(kind)
        batch = Batch([cases[int(number)] for number in numbers])
        check_kernels(batch.graph, *batch.arrays(), {}, (batch.allowed, batch.labels))


if __name__ == "__main__":
    main(*sys.argv[1:])
