"""Kernels that are computed in one of several ways, of which the sizes of a run choose: by one record for all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from targets import machine

import rlx
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.cpu.kernels.alternatives import alternatives
from rlx.backends.cpu.kernels.conv.winograd import few_pixels
from rlx.backends.cpu.schedule.arguments import THREADS, Computed, KernelCode, Product
from rlx.backends.cpu.schedule.base import FEW_ROWS
from rlx.backends.cpu.schedule.choice import Choice, Chosen, Limit
from rlx.backends.cpu.schedule.thin import LEAST, MOST
from rlx.compiler import stages_of
from rlx.ir.shape import Size
from rlx.ir.text import parse_graph
from rlx.options import CompileOptions

N = rlx.Dim("n", 1, 64)
M = rlx.Dim("m", 1, 64)


def test_the_first_way_all_of_whose_limits_hold() -> None:
    choice = Choice(((Limit(N, most=4), Limit(M, least=8)), (Limit(M, 2, 3),)))
    ways = {(n, m): choice({"n": n, "m": m}) for n in (3, 4, 5) for m in (1, 2, 3, 4, 7, 8)}
    assert [at for at, way in ways.items() if way == 0] == [(3, 8), (4, 8)]
    assert [at for at, way in ways.items() if way == 1] == [(n, m) for n in (3, 4, 5) for m in (2, 3)]
    assert set(ways.values()) == {0, 1, 2}
    assert Choice(())({}) == 0


def test_the_others_have_no_chunks_and_no_scratch() -> None:
    """Nor arguments that are computed. Scratch: a number of bytes, a size, computed, or none. Functions: some a way."""
    scratch: list[Size | Computed] = [64, 128 * N, Computed(Product((N, 64))), 0]
    word = Computed(Product((N, N)))
    codes = [KernelCode(f"k{i}", "", (N, word), Product((N,)), scratch=s) for i, s in enumerate(scratch)]
    choice = Choice(((Limit(N, most=4),), (Limit(N, most=9),)))
    made = alternatives(choice, codes[:2], codes[2:3], codes[3:])
    assert [c.symbol for c in made] == ["k0", "k1", "k2", "k3"]
    for n, first, last in ((4, 0, 2), (9, 2, 3), (10, 3, 4)):
        for i, (code, before) in enumerate(zip(made, codes, strict=True)):
            runs = first <= i < last
            assert code.chunks({"n": n}) == (n if runs else 0)
            assert code.words[0] is N
            assert isinstance(code.words[1], Computed)
            assert code.words[1].fn({"n": n}) == (n * n if runs else 0)
            assert code.scratch_bytes({"n": n}) == (before.scratch_bytes({"n": n}) if runs else 0)


PRODUCT = "y: f32[{m}, {n}] = matmul(a, b)", {"a": "f32[{m}, 40]", "b": "f32[40, {n}]"}
ATTENTION = (
    "y: f32[1, 4, {m}, 32] = attention(q, k, v)",
    {
        "q": "f32[1, 4, {m}, 32]",
        "k": "f32[1, 2, {n}, 32]",
        "v": "f32[1, 2, {n}, 32]",
    },
)
CONV = (
    "y: f32[1, 64, {m}, {n}] = conv(x, W, pads=(1, 0, 1, 0))",
    {
        "x": "f32[1, 64, {m}, {n}]",
        "W": "f32[64, 64, 3, 1]",
    },
)


def graph(name: str, m: int | str, n: int | str) -> rlx.Graph:
    node, leaves = GRAPHS[name][0]
    lines = [f"{'param' if leaf.isupper() else 'input'} {leaf}: {type}" for leaf, type in leaves.items()]
    dims = ["dim m = 1..64", "dim n = 1..64"] if isinstance(m, str) else []
    text = "\n  ".join(["graph g {", *dims, *lines, node, "output y = y"]) + "\n}\n"
    return parse_graph(text.replace("{m}", str(m)).replace("{n}", str(n)))


# graphs of two sizes, with sizes on both sides of what is chosen by, and how many ways there are
GRAPHS: dict[str, tuple[tuple[str, dict[str, str]], list[tuple[int, int]], int]] = {
    "product": (PRODUCT, [(2, LEAST), (MOST, 30), (MOST + 1, 30), (50, MOST), (50, 50), (3, 3)], 3),
    "attention": (ATTENTION, [(1, 20), (FEW_ROWS, 20), (FEW_ROWS + 1, 20), (50, 7)], 2),
    "convolution": (CONV, [(1, 2), (2, 2), (4, 1), (5, 1), (9, 9)], 2),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("vector_bytes", [32, 64])
def test_a_run_takes_one_way_the_one_of_its_sizes(name: str, vector_bytes: int) -> None:
    """For any target: functions are launched as by a compile for the sizes of the run, in as much scratch or none."""
    _, sizes, count = GRAPHS[name]
    backend = CpuBackend(machine(vector_bytes=vector_bytes))
    if name == "convolution" and not few_pixels("conv.winograd_lines+f4x1_3x1", backend.target):
        pytest.skip("vectors of 32 bytes have one way")

    def codes(graph: rlx.Graph) -> list[KernelCode]:
        program = stages_of(graph, backend, CompileOptions(device="cpu")).program
        assert program is not None
        return [code for kernel in program.run for code in backend.emit_kernel(kernel)]

    opened = codes(graph(name, "m", "n"))
    ways = set()
    for m, n in sizes:
        extents = {"m": m, "n": n, THREADS: 1}
        launched = [c for c in opened if c.chunks(extents) > 0]
        choosing = [c.chunks for c in launched if isinstance(c.chunks, Chosen)]
        ways.add(choosing[0].way)
        assert len({chunks.way for chunks in choosing}) == 1
        fixed = [c for c in codes(graph(name, m, n)) if c.chunks(extents) > 0]
        assert [c.chunks(extents) for c in launched] == [c.chunks(extents) for c in fixed]
        most = [max(c.scratch_bytes(extents) for c in made) for made in (opened, fixed)]
        assert most[1] in (most[0], 0)  # sums of a thin product that is known to be small stay in registers
    assert len(ways) == count


@pytest.mark.parametrize("name", GRAPHS)
def test_an_artifact_chooses_as_well(name: str, tmp_path: Path) -> None:
    """What is stored of the choice: results have the bits of a compile for each size."""
    _, sizes, _ = GRAPHS[name]
    source, rng = graph(name, "m", "n"), np.random.default_rng(0)
    weights = {v.name: rng.standard_normal(v.shape).astype(np.float32) for v in source.params}
    opened = rlx.compile(source, device="cpu", cache=False)
    opened.set_params(weights)
    opened.save(tmp_path / "m.rlxart")
    model = rlx.load(tmp_path / "m.rlxart", device="cpu", cache=False)
    for m, n in sizes:
        fixed = graph(name, m, n)
        feed = {v.name: rng.standard_normal(v.shape).astype(np.float32) for v in fixed.inputs}
        exact = rlx.compile(fixed, device="cpu", cache=False)
        exact.set_params(weights)
        assert model.run(feed)[0].tobytes() == exact.run(feed)[0].tobytes()
