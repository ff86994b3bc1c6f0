"""Derivatives of random programs against jax, in f64: gradients, both modes, vmap of gradients, second derivatives.

`python tests/transform/test_against_jax.py 500 --seed 1` runs more of them and prints which ops were in them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax_programs_more  # noqa: F401 - more pieces
import numpy as np
import pytest
from jax_programs import PIECES, Program, drawn

import rlx
from rlx.ir.graph import Graph
from rlx.ops import OPS
from rlx.testing.cases import cases_of, covered
from rlx.testing.derivatives import differentiable

jax = pytest.importorskip("jax")

MODES = ("grad", "jvp", "vjp", "vmap", "hvp", "sizes")
Arrays = tuple[Any, ...]


def scalar(program: Program, ours: bool) -> Callable[..., Any]:
    """The program as a loss."""

    def loss(*given: Any) -> Any:
        y = program(*given, ours=ours)
        return rlx.reduce_sum(y * y * 0.5 + y, keepdims=False) if ours else (y * y * 0.5 + y).sum()

    return loss


def matrix(program: Program, ours: bool) -> Callable[..., Any]:
    """The program as it is."""
    return lambda *given: program(*given, ours=ours)


def arrays(rng: np.random.Generator, n: int, m: int, *lead: int) -> Arrays:
    return tuple(rng.standard_normal((*lead, *shape)) * 0.8 for shape in ((n, m), (n, m), (m, m), (m,)))


ALL = (0, 1, 2, 3)


def rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of each row, one after another: XLA ends the process on some convolutions under jax.vmap."""

    def run(*given: Any) -> Any:
        found = [function(*(a[i] for a in given)) for i in range(len(given[0]))]
        return jax.tree.map(lambda *parts: jax.numpy.stack(parts), *found)

    return run


def derivative(mode: str, lib: Any, program: Program, given: Arrays, along: Arrays, ct: Any) -> Callable[..., Any]:
    """What a mode computes, of the library's own functions: a function of the arguments."""
    ours = lib is rlx
    loss, whole = scalar(program, ours), matrix(program, ours)
    if mode in ("grad", "sizes"):
        return lib.grad(loss, ALL)  # type: ignore[no-any-return]
    if mode == "vmap":
        return rlx.vmap(rlx.grad(loss, ALL)) if ours else rows(jax.grad(loss, ALL))
    if mode == "jvp":
        return lambda *x: lib.jvp(whole, x, along)
    if mode == "vjp":
        return lambda *x: lib.vjp(whole, *x)[1](ct)
    if ours:
        return lambda *x: rlx.hvp(lambda tree: loss(*tree), (x,), (along,))
    return lambda *x: jax.jvp(jax.grad(loss, ALL), x, along)[1]


def compare(program: Program, mode: str, seed: int, device: str, seen: Counter[str]) -> None:
    """One derivative of a program, at two sizes where they are open."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 6))
    lead = (2,) if mode == "vmap" else ()
    given = arrays(rng, n, program.m, *lead)
    along, ct = arrays(rng, n, program.m), rng.standard_normal((n, program.m))
    dims = {"dims": {"x": ("n", None), "y": ("n", None)}} if mode == "sizes" else {}

    def named(x: Any, y: Any, w: Any, v: Any) -> Any:
        return derivative(mode, rlx, program, given, along, ct)(x, y, w, v)

    run = rlx.jit(named, device=device, **dims)
    sets = [given, arrays(rng, n + 3, program.m)] if mode == "sizes" else [given]
    count_ops(rlx.jit(matrix(program, True)).lower(*arrays(rng, n, program.m)), seen)
    for one in sets:
        with jax.enable_x64(True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = jax.tree.leaves(jax.jit(derivative(mode, jax, program, one, along, ct))(*one))
            expected = [np.asarray(e) for e in expected]
        found = jax.tree.leaves(run(*one))
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            size = float(np.max(np.abs(b), initial=1.0, where=np.isfinite(b)))
            np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9 * size, err_msg=f"{mode}, {device}, n {n}\n{program}")


def count_ops(graph: Graph, seen: Counter[str]) -> None:
    """Counts each op of a graph and of its regions once."""
    seen.update(ops_in(graph))


def ops_in(graph: Graph) -> set[str]:
    inner = (ops_in(region) for node in graph.nodes for region in node.regions)
    return {node.op.op_name for node in graph.nodes}.union(*inner)


def program_of(seed: int) -> tuple[Program, str]:
    """Programs of one to eight steps, each mode in turn."""
    rng = np.random.default_rng(seed)
    return drawn(rng, int(rng.integers(1, 9))), MODES[seed % len(MODES)]


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(36))
def test_random_programs(seed: int) -> None:
    """A sample; most on the reference, every seventh on the CPU."""
    program, mode = program_of(seed)
    compare(program, mode, seed, "cpu" if seed % 7 == 0 else "reference", Counter())


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", sorted(PIECES))
def test_each_piece(name: str) -> None:
    """Second derivatives of each piece by itself."""
    rng = np.random.default_rng(len(name))
    steps = ((name, tuple(i % 2 for i in range(PIECES[name].arity)), tuple(PIECES[name].draw(rng, 4).items())),)
    compare(Program(4, steps), "hvp", 1, "reference", Counter())


def differentiable_ops() -> set[str]:
    """The ops that take floats and give floats, and have a rule or ops that they consist of."""
    return {
        name
        for name, op in OPS.items()
        if op.__module__.startswith("rlx.") and covered(name) and differentiable(cases_of(name, 3, 4))
    }


def work(first: int, end: int, device: str) -> None:
    """Programs first to end - 1, with a line for each: its seed, its ops and what was wrong."""
    for seed in range(first, end):
        program, mode = program_of(seed)
        seen: Counter[str] = Counter()
        wrong = ""
        try:
            compare(program, mode, seed, device, seen)
        except Exception as error:  # noqa: BLE001 - all are reported
            wrong = f"{mode}\n{program}\n{type(error).__name__}: {str(error)[:1500]}"
        sys.stdout.write(json.dumps([seed, seen, wrong]) + "\n")
        sys.stdout.flush()


@dataclass
class Found:
    """What became of programs: how many had each op, which differ, and which XLA ended the process on."""

    count: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    wrong: dict[int, str] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        wanted = differentiable_ops()
        lines = [f"seed {seed}: {text}" for seed, text in self.wrong.items()]
        lines.append(f"{self.count} programs, {len(self.wrong)} differ; XLA ended the process on {self.ended}")
        lines.append("ops: " + ", ".join(f"{k} {c}" for k, c in sorted(self.seen.items()) if k in wanted))
        lines.append(f"never, of {len(wanted)}: " + ", ".join(sorted(wanted - set(self.seen))))
        return "\n".join(lines)


def run(first: int, count: int, device: str) -> Found:
    """The programs in processes of their own, as XLA ends the process on some convolutions."""
    found, seed = Found(), first
    while seed < first + count:
        end = min(seed + 100, first + count)
        command = [sys.executable, __file__, "--work", str(seed), str(end), "--device", device]
        made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
        for line in made.stdout.splitlines():
            seed, seen, wrong = json.loads(line)
            found.count += 1
            found.seen.update(seen)
            if wrong:
                found.wrong[seed] = wrong
            seed += 1
        if seed < end:
            found.ended.append(seed)
            seed += 1
    return found


@pytest.mark.slow
def test_two_thousand_programs() -> None:
    """Nearly every op that has a derivative is in them; none differs."""
    found = run(1_000_000, 2000, "reference")
    assert not found.wrong, str(found)
    assert found.count > 1900
    assert len(differentiable_ops() - set(found.seen)) < 12, str(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="reference")
    parser.add_argument("--work", type=int, nargs=2, metavar=("FIRST", "END"), help="what a process of its own does")
    args = parser.parse_args()
    if args.work is not None:
        work(*args.work, args.device)
        return
    sys.stdout.write(f"{run(args.seed * 100_000, args.count, args.device)}\n")


if __name__ == "__main__":
    main()
