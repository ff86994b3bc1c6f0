"""What kernels read: all of it, and told once for all of their phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.reference import run_graph
from rlx.kernels import accesses
from rlx.kernels.expr import Expr, loads
from rlx.kernels.fuse import fuse
from rlx.kernels.lowering import Attention, Contract, Conv
from rlx.kernels.program import Program
from rlx.ops.layout import Concat, Split
from rlx.records import names_of


def looks(monkeypatch: pytest.MonkeyPatch, count: int, *, split: bool) -> int:
    """How often expressions are searched for loads while a graph of so many pieces is compiled."""
    seen: Counter[str] = Counter()
    found = accesses.loads

    def counted(e: object) -> object:
        seen["loads"] += 1
        return found(e)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(accesses, "loads", counted)
        g = rlx.Graph("pieces")
        if split:
            for n, y in enumerate(g.add(Split(0, (2,) * count), g.input("x", (2 * count, 3)))):
                g.output(y + 1.0, f"y{n}")
        else:
            g.output(g.add(Concat(0), *(g.input(f"x{n}", (2, 3)) for n in range(count)))[0], "y")
        rlx.compile(g, device="cpu", cache=False)
    return seen["loads"]


@pytest.mark.parametrize("split", [False, True])
def test_compiling_is_linear_in_pieces(monkeypatch: pytest.MonkeyPatch, split: bool) -> None:
    """Of a concatenation, and of a split."""
    small, large = (looks(monkeypatch, count, split=split) for count in (20, 80))
    assert 0 < large <= 5 * small


def programs() -> Iterator[Program]:
    """With anchors of all kinds, all of whose operands a run computes."""
    for features in ({}, {"sinks": True}, {"placed": True, "causal": True}, {"counted": True}):
        yield fuse(attention(**features), CpuBackend())
    g = rlx.Graph("products")
    x = rlx.exp(g.input("x", (1, 4, 6, 6)))
    g.output(rlx.matmul(x, rlx.exp(g.input("y", (1, 4, 6, 6)))))
    g.output(rlx.conv(x, rlx.exp(g.input("w", (8, 4, 3, 3)))))
    yield fuse(g, CpuBackend())


def attention(*, sinks: bool = False, placed: bool = False, counted: bool = False, causal: bool = False) -> rlx.Graph:
    """Of operands that a run computes, in memory that others use before and after."""
    g = rlx.Graph("attention")
    x, s = g.input("x", (2, 4, 8, 16)), g.input("s", (4,))
    operands = [rlx.exp(x), g.input("k", (2, 4, 8, 16)), g.input("v", (2, 4, 8, 16))]
    operands += [rlx.softmax(s) * 3.0] if sinks else []
    operands += [g.input("n", (2,), "i64") * 2 - 2] * (placed + counted)
    y = rlx.attention(*operands, scale=0.3, sinks=sinks, placed=placed, counted=counted, causal=causal)
    others = rlx.reshape(rlx.softmax(s * 2.0), (1, 4, 1, 1))
    g.output(rlx.matmul(y, rlx.transpose(rlx.exp(y), (0, 1, 3, 2))) + others, "y")
    return g


@pytest.mark.parametrize("device", ["cpu", "interp"])
@pytest.mark.parametrize("features", [{"sinks": True}, {"placed": True, "causal": True}, {"counted": True}], ids=str)
def test_operands_of_attention_live_until_it_has_read_them(features: dict[str, bool], device: str) -> None:
    """Those that are no matrix, too."""
    g, rng = attention(**features), np.random.default_rng(0)
    given = {v.name: rng.standard_normal(v.shape).astype(np.float32) for v in g.inputs}
    given |= {"n": np.array([3, 4])} if "n" in given else {}
    got = rlx.compile(g, device=device).run(given)[0]
    np.testing.assert_allclose(got, run_graph(g, given)["y"], rtol=1e-4, atol=1e-4)


def test_all_fields_of_anchors_are_read() -> None:
    found: set[tuple[str, str]] = set()
    for program in programs():
        for kernel in program.run:
            for name in () if kernel.anchor is None else names_of(kernel.anchor):
                e = getattr(kernel.anchor, name)
                if isinstance(e, Expr):
                    found.add((type(kernel.anchor).__name__, name))
                    assert {x.source for x in loads(e)} <= set(kernel.reads()), name
    own = {(kind.__name__, name) for kind in (Attention, Contract, Conv) for name in names_of(kind) if fits(kind, name)}
    assert found == own - {("Contract", "zero"), ("Conv", "zero"), ("Attention", "score")}


def fits(kind: type, name: str) -> bool:
    """Whether a field of an anchor may be an expression."""
    return "Expr" in str(kind.__annotations__[name])


@pytest.mark.parametrize("features", [{"sinks": True}, {"placed": True, "causal": True}, {"counted": True}], ids=str)
def test_operands_of_attention_that_no_run_changes(features: dict[str, bool]) -> None:
    """All of it is computed before any run, whatever is computed for it first."""
    g, rng = rlx.Graph("fixed"), np.random.default_rng(0)
    operands = [
        rlx.exp(g.param(n, (1, 4, 8, 16), data=rng.standard_normal((1, 4, 8, 16)).astype(np.float32))) for n in "qkv"
    ]
    operands += [rlx.softmax(g.param("s", (4,), data=np.arange(4, dtype=np.float32)))] if "sinks" in features else []
    count = "placed" in features or "counted" in features
    operands += [g.param("n", (1,), "i64", data=np.array([2])) * 2] if count else []
    g.output(rlx.attention(*operands, **features) + g.input("x", (1,)), "y")
    given = {"x": np.ones(1, np.float32)}
    got = rlx.compile(g, device="cpu").run(given)[0]
    np.testing.assert_allclose(got, run_graph(g, given)["y"], rtol=1e-4, atol=1e-4)
