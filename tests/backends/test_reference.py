"""The reference device: it runs graphs, checks what it is given, and catches ops whose types are wrong."""

from __future__ import annotations

import numpy as np
import pytest

from rlx.backends.reference import run_graph
from rlx.errors import DTypeError, ExecutionError, NameNotFound, OptionError, ShapeError
from rlx.ir.encoding import encoding_named
from rlx.ir.graph import Array, Graph, TensorType
from rlx.ir.shape import Dim
from rlx.ops.base import Op, register
from rlx.ops.contract import MatMul
from rlx.ops.elementwise import Add, Identity, Mul, Neg
from rlx.ops.layout import Reshape, Slice

N, M = Dim("n", 1, 8), Dim("m", 2, 8, multiple=2)


@register
class ReferenceLiar(Op):
    """Infers its input's type and gives something else."""

    what: str = "shape"

    def infer(self, x: TensorType) -> TensorType:
        return x

    def reference(self, x: Array) -> Array | tuple[Array, ...]:
        match self.what:
            case "shape":
                return x[:1]
            case "rank":
                return x[None]
            case "dtype":
                return x.astype(np.float64)
            case "count":
                return x, x
            case _:
                raise IndexError("index 9 is outside the axis of 3")


@register
class ReferencePositive(Op):
    """The elements > 0: as many as the data say, at most 3."""

    def infer(self, x: TensorType) -> TensorType:
        return TensorType((Dim("positive", 0, 3),), x.dtype)

    def reference(self, x: Array) -> Array:
        return x[x > 0]


def test_symbolic_sizes_and_attributes() -> None:
    """One graph at several extents; sizes in attributes are those of the run."""
    g = Graph()
    x = g.input("x", (N, M))
    (rows,) = g.add(Slice((0, M // 2), (N, M - M // 2), (1, 1)), x)
    (flat,) = g.add(Reshape((N * (M - M // 2),)), rows)
    g.output(flat, "flat")
    g.output(x, "x")
    for n, m in [(1, 2), (8, 8), (3, 4)]:
        data = np.arange(n * m, dtype=np.float32).reshape(n, m)
        got = run_graph(g, {"x": data})
        np.testing.assert_array_equal(got["flat"], data[:, m // 2 :].ravel())
        assert not np.shares_memory(got["x"], data)


def test_params_and_states() -> None:
    """Params come from the call or their declaration; states start at their initial value or zeros and are updated."""
    g = Graph()
    x = g.input("x", (2,))
    p = g.param("p", (2,), data=np.full(2, 10, np.float32))
    s, t = g.state("s", (2,)), g.state("t", (2,), initial=np.ones(2, np.float32))
    (total,) = g.add(Add(), s, x)
    g.update(s, total)
    g.output(g.add(Mul(), g.add(Add(), total, t)[0], p)[0], "y")
    states: dict[str, Array] = {}
    one = np.ones(2, np.float32)
    assert run_graph(g, {"x": one}, states=states)["y"].tolist() == [20, 20]
    assert run_graph(g, {"x": one}, states=states)["y"].tolist() == [30, 30]
    assert list(states) == ["s"]
    assert states["s"].tolist() == [2, 2]
    assert run_graph(g, {"x": one}, {"p": one}, {"s": one * 4, "t": one * 0})["y"].tolist() == [5, 5]
    assert run_graph(g, {"x": one})["y"].tolist() == [20, 20]


def test_encoded_params_are_decoded() -> None:
    """A quantised weight computes as its decoded elements."""
    q8 = encoding_named("q8_0")
    w = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    g = Graph()
    p = g.param("w", w.shape, encoding="q8_0")
    g.output(g.add(MatMul(), g.input("x", (N, 32)), g.add(Identity(), p)[0])[0], "y")
    x = np.ones((2, 32), np.float32)
    got = run_graph(g, {"x": x}, {"w": q8.encode(w)})["y"]
    np.testing.assert_allclose(got, x @ q8.decode(q8.encode(w), w.shape), rtol=1e-5)


@pytest.mark.parametrize(
    "inputs, kind, message",
    [
        ({}, OptionError, r"the input 'x' \(f32\[n, m\]\) has no value"),
        ({"x": np.zeros((2, 2), np.float32), "z": np.zeros(1)}, NameNotFound, "no input 'z'; there are 'x'"),
        ({"x": np.zeros((2, 2))}, DTypeError, "input 'x': expected elements of type f32, got float64"),
        ({"x": np.zeros(2, np.float32)}, ShapeError, "input 'x': expected shape"),
        ({"x": np.zeros((9, 2), np.float32)}, ExecutionError, r"the dim 'n' is 9, outside its bounds 1\.\.8"),
        ({"x": np.zeros((2, 3), np.float32)}, ExecutionError, "the dim 'm' is 3, not a multiple of 2"),
    ],
)
def test_wrong_inputs(inputs: dict[str, Array], kind: type[Exception], message: str) -> None:
    """Each is an error before the run that names the input."""
    g = Graph()
    g.output(g.add(Neg(), g.input("x", (N, M)))[0], "y")
    with pytest.raises(kind, match=message):
        run_graph(g, inputs)


def test_guards_are_checked() -> None:
    """Adding n and m elements runs where they are equal, and says which equality fails elsewhere."""
    g = Graph()
    g.output(g.add(Add(), g.input("x", (N,)), g.input("y", (M,)))[0], "z")
    assert len(g.guards) == 1
    run_graph(g, {"x": np.zeros(4, np.float32), "y": np.zeros(4, np.float32)})
    with pytest.raises(ExecutionError, match="n is 2 and m is 4 in this run"):
        run_graph(g, {"x": np.zeros(2, np.float32), "y": np.zeros(4, np.float32)})


@pytest.mark.parametrize(
    "what, message",
    [
        ("shape", r"node reference_liar 'here': expected \(n,\) where n = 3, got \(1,\): the op infers a wrong type"),
        ("rank", r"node reference_liar 'here': expected \(n,\) where n = 3, got \(1, 3\)"),
        ("dtype", r"node reference_liar 'here': gave float64\[3\], inferred f32\[n\]"),
        ("count", "node reference_liar 'here': gave 2 results, its op infers 1"),
        ("index", "node reference_liar 'here': index 9 is outside"),
    ],
)
def test_ops_with_wrong_types_are_caught(what: str, message: str) -> None:
    """A result that is not of the inferred type, or a NumPy error, names the node."""
    g = Graph()
    g.output(g.add(ReferenceLiar(what), g.input("x", (N,)), provenance=["here"])[0], "y")
    with pytest.raises(ExecutionError, match=message):
        run_graph(g, {"x": np.zeros(3, np.float32)})


def test_data_dependent_sizes() -> None:
    """A dim that a node produces is read off its result, used by later nodes, and held to its bound."""
    g = Graph()
    (found,) = g.add(ReferencePositive(), g.input("x", (N,)))
    (n,) = (s for s in found.shape)
    g.output(g.add(Reshape((n, 1)), found)[0], "y")
    got = run_graph(g, {"x": np.array([1, -1, 2, -2], np.float32)})["y"]
    assert got.tolist() == [[1], [2]]
    with pytest.raises(ExecutionError, match=r"the dim 'positive' is 4, outside its bounds 0\.\.3"):
        run_graph(g, {"x": np.ones(4, np.float32)})


def test_trace() -> None:
    """The trace sees each node with its results, in order."""
    g = Graph()
    x = g.input("x", (2,))
    (y,) = g.add(Neg(), x)
    g.output(g.add(Add(), y, x)[0], "z")
    seen: list[tuple[str, list[float]]] = []
    run_graph(
        g,
        {"x": np.ones(2, np.float32)},
        trace=lambda node, results: seen.append((node.op.op_name, results[0].tolist())),
    )
    assert seen == [("neg", [-1, -1]), ("add", [0, 0])]
