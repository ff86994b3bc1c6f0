"""The text form of graphs: it parses back to an equal graph, and bad texts are errors with a line number."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.errors import ModelFormatError, OptionError
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.fingerprint import fingerprint, graphs_equal
from rlx.ir.graph import Array, Graph, TensorType
from rlx.ir.shape import Dim, Guard, Size, max_size, min_size
from rlx.ir.text import constants_table, parse_graph, print_graph
from rlx.ir.verify import verify
from rlx.ops.base import Op, register
from rlx.testing.graphs import random_graph


@register
class TextProbe(Op):
    """An op with an attribute of each type."""

    count: int = 1
    ratio: float = 0.5
    label: str = "x"
    on: bool = False
    to: DType = DTYPES["f32"]
    axes: tuple[int, ...] | None = None
    shape: tuple[Size, ...] = ()
    pairs: tuple[tuple[int, float], ...] = ()
    limit: Size = 0

    def infer(self, *x: TensorType) -> tuple[TensorType, ...]:
        return tuple(TensorType(self.shape or t.shape, self.to) for t in x)

    def reference(self, *x: Array) -> tuple[Array, ...]:
        return x


@register
class TextBlock(Op):
    """An op with regions."""

    def infer(self, x: TensorType) -> TensorType:
        return x

    def infer_types(self, inputs: Any, regions: Any = ()) -> tuple[TensorType, ...]:
        return (inputs[0],)

    def reference(self, x: Array) -> Array:
        return x


def round_trip(graph: Graph) -> Graph:
    """The graph read back, checked to be equal and to print the same."""
    text = print_graph(graph)
    back = parse_graph(text, constants_table(graph))
    verify(back)
    assert print_graph(back) == text
    assert graphs_equal(graph, back)
    assert fingerprint(graph) == fingerprint(back)
    return back


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.sample(12)
def test_random_graphs_come_back(seed: int) -> None:
    """Graphs over the real ops parse back to equal ones that print identically."""
    dtypes = ("f32", "f16", "bf16", "f64", "i32", "i64", "bool") if seed % 2 else ("f32", "i64")
    round_trip(random_graph(seed, dtypes=dtypes)[0])


def test_the_form_is_as_documented() -> None:
    """The text of a small graph, word by word."""
    g = Graph("mlp")
    batch = Dim("batch", 1, 64, multiple=8)
    x = g.input("x", (batch, 4))
    w = g.param("w/0", (4, 10), data=np.zeros((4, 10), np.float32))
    one = g.constant([0.1], name="one")
    (h,) = g.add(TextProbe(ratio=1.0, axes=(0, -1)), x, name="h", provenance=["Gemm_0", 'a "b"'])
    (y,) = g.add(TextProbe(shape=(batch // 2 + 1, 3)), h)
    g.output(y, "y")
    assert w.name == "w/0"
    assert one.name == "one"
    assert print_graph(g) == (
        "graph mlp {\n"
        "  dim batch = 1..64 multiple 8\n"
        "  input x: f32[batch, 4]\n"
        "  param w/0: f32[4, 10]\n"
        "  const one: f32[1] = [0.1]\n"
        '  h: f32[batch, 4] = text_probe(x, ratio=1.0, axes=(0, -1)) from "Gemm_0", "a \\"b\\""\n'
        "  %0: f32[floordiv(batch, 2) + 1, 3] = text_probe(h, shape=(floordiv(batch, 2) + 1, 3))\n"
        "  output y = %0\n"
        "}\n"
    )
    round_trip(g)


def test_everything_in_one_graph() -> None:
    """Regions, states, updates, guards, encodings, odd and repeated names, several outputs of a node."""
    n, odd = Dim("n", 0, None), Dim("batch size")
    g = Graph("odd name")
    x = g.input("input", (n, odd))
    q = g.param("q", (2, 64), encoding="q8_0")
    s = g.state("the state", (3,), "bf16")
    inner = Graph("then")
    xi = inner.input("x", (n, odd))
    inner.output(inner.add(TextBlock(), xi, regions=[Graph("empty")])[0], "r")
    (a,) = g.add(TextBlock(), x, name="input", regions=[inner, Graph("")])
    b, c = g.add(TextProbe(), x, q, name="pair")
    (new,) = g.add(TextProbe(to=DTYPES["bf16"]), s, name="%0")
    g.update(s, new)
    g.output(x, "input")
    for i, value in enumerate((a, b, c, b)):
        g.output(value, f"out {i}")
    g.guards.append(Guard(n * odd, min_size(n, 4) + 1, 'why "so"\n'))
    back = round_trip(g)
    assert [v.name for v in back.nodes[1].outputs] == ["pair.0", "pair.1"]
    assert back.nodes[2].outputs[0].name == "%0"
    assert back.params[0].type.encoding is q.type.encoding


FLOATS = st.floats(allow_nan=True)
NAMES = st.text(min_size=1, max_size=6)
SIZES = st.integers(-9, 9) | st.sampled_from(
    [Dim("n") + 1, Dim("a b", 2, 9) * Dim("n"), Dim("n") // 3 - 2, max_size(Dim("n"), Dim("m") * 2, 7), -Dim("m")]
)


@given(
    st.builds(
        TextProbe,
        st.integers(),
        FLOATS | st.integers(-3, 3),
        st.text(),
        st.booleans(),
        st.sampled_from(list(DTYPES.values())),
        st.none() | st.lists(st.integers(-99, 99)).map(tuple),
        st.just(()),
        st.lists(st.tuples(st.integers(0, 9), FLOATS)).map(tuple),
        SIZES,
    ),
    st.lists(NAMES, max_size=3),
    NAMES,
    NAMES,
)
def test_attributes_and_names_come_back(op: TextProbe, source: list[str], leaf: str, dim: str) -> None:
    """Attributes of each type, and any text as name, dim or provenance."""
    if dim in ("n", "m", "a b"):
        dim = "other"
    g = Graph(leaf)
    x = g.input(leaf, (Dim(dim), 2))
    (y,) = g.add(op, x, provenance=source, name=dim)
    g.output(y, dim)
    back = round_trip(g).nodes[0]
    assert repr(back.op) == repr(op)
    assert back.provenance == tuple(source)


def _constants(dtype: DType) -> list[Array]:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 256, 13 * dtype.numpy.itemsize, np.uint8).tobytes()
    if dtype.bits == 4:
        return [
            np.arange(16).astype(np.int8).astype(ml_dtypes.uint4).view(np.uint8).astype(np.int8).astype(dtype.numpy)
        ]
    if dtype.kind == "b":
        return [np.array([True, False]), np.array(True)]
    if dtype.kind == "s":
        return [np.array(t, dtype.numpy) for t in (["a", "", '\0\n"é', "🚆"], "one", [["x"]] * 40, [])]
    made = [np.frombuffer(bits, dtype.numpy), np.zeros((0, 3), dtype.numpy), np.ones((), dtype.numpy)]
    if dtype.is_integer:
        info = ml_dtypes.iinfo(dtype.numpy)
        made.append(np.array([info.min, info.max, 0], dtype.numpy))
    else:
        made.append(np.array([0.1, -0.0, np.nan, np.inf, -np.inf, 1e-7], np.float64).astype(dtype.numpy))
        made.append(rng.standard_normal((2, 30)).astype(dtype.numpy))
    return made


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_constants_come_back_bit_by_bit(name: str) -> None:
    """Random bit patterns (NaN payloads too), extremes and empty arrays of each type, inline or by hash."""
    with np.errstate(all="ignore"):
        arrays = _constants(DTYPES[name])
    g = Graph()
    for array in arrays:
        g.constant(array)
    back = round_trip(g)
    for array, const in zip(arrays, back.constants, strict=True):
        assert const.data is not None
        assert const.data.dtype == array.dtype
        assert const.data.shape == array.shape
        same = const.data.tolist() == array.tolist() if name == "string" else const.data.tobytes() == array.tobytes()
        assert same


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=16))
def test_inline_floats_are_exact(values: list[float]) -> None:
    """Every finite f32 prints inline and comes back exactly."""
    g = Graph()
    g.constant(np.array(values, np.float32))
    assert not constants_table(g)
    back = parse_graph(print_graph(g)).constants[0].data
    assert back is not None
    assert back.tobytes() == np.array(values, np.float32).tobytes()


def test_constants_by_hash_need_the_right_table() -> None:
    """A constant that is missing from the table, or another array under its hash, is an error."""
    g = Graph()
    g.constant(np.arange(20))
    text, table = print_graph(g), constants_table(g)
    assert list(table) == [text.split("sha256:")[1].split("\n")[0]]
    with pytest.raises(ModelFormatError, match=r"line 2: .*not among those given"):
        parse_graph(text)
    with pytest.raises(ModelFormatError, match=r"line 2: .*another hash"):
        parse_graph(text, {key: np.arange(1, 21) for key in table})


@pytest.mark.parametrize(
    "body, message",
    [
        ("input x: f99[2]", "line 2: unknown element type 'f99'"),
        ("input x: f32[n]", "line 2: the dim 'n' is not declared"),
        ("input x: f32[-2]", "line 2: .*negative"),
        ("input x f32[2]", "line 2: expected ':', got 'f32'"),
        ("input x: f32[2]\n input x: f32[2]", "line 3: .*already taken"),
        ("dim n = 5..4", "line 2: Dim"),
        ("dim n = 1..\n dim n = 1..", "line 3: the dim 'n' is declared twice"),
        ("dim n = 1..\n input x: f32[floordiv(n, 0)]", "line 3: .*positive divisor"),
        ("const c: f32[2] = [1.0]", "line 2: "),
        ("const c: i8[1] = [300]", "line 2: 300 is not an element of type i8"),
        ("const c: i8[1] = [1.5]", "line 2: 1.5 is not an element of type i8"),
        ("y: f32[2] = text_probe(x)", "line 2: there is no value 'x' before this line"),
        ("input x: f32[2]\n y: f32[3] = text_probe(x)", r"line 3: text_probe gives f32\[2\]; the text says f32\[3\]"),
        ("input x: f32[2]\n y: f32[2] = no_such_op(x)", "line 3: no op is named 'no_such_op'"),
        ("input x: f32[2]\n y: f32[2] = text_probe(x, axes=3)", "line 3: text_probe: attribute 'axes'"),
        ("input x: f32[2]\n y: f32[2] = text_probe(x, count=true)", "line 3: text_probe: attribute 'count' is a int"),
        ("input x: f32[2]\n y: f32[2] = text_probe(x, what=3)", "line 3: text_probe has no attribute 'what'"),
        ("input x: f32[2]\n y: f32[2] = text_probe(count=3, x)", "line 3: inputs come before attributes"),
        ("input x: f32[2]\n y: f32[2] = reshape(x)", "line 3: reshape needs the attribute 'shape'"),
        ("input x: f32[2]\n y: f32[2] = softmax(x, axis=7)", "line 3: .*axis 7"),
        ("input x: f32[2]\n y: f32[2] = add(x)", "line 3: .*2 inputs, 1 given"),
        ("update s = x", "line 2: .*no leaf 's'"),
        ("output y = y", "line 2: there is no value 'y'"),
        ("param p: f32@q9[32]", "line 2: unknown encoding 'q9'"),
        ("input p: f32@q8_0[32]", "line 2: only params and states can"),
        ("const c: f32@q8_0[32] = [1]", "line 2: only params and states can"),
        ("graph x {", "line 2: 'graph' can't stand here"),
        ("input x: f32[2] 'quoted'", 'line 2: unexpected "'),
        ("input x: f32[" + "9" * 50 + "]", "line 2: an integer of 50 digits"),
        ("dim n = 1..\n input x: f32[" + "n*" * 400 + "n]", "line 3: a size of more than"),
        ("dim n = 1..\n input x: f32[" + "min(" * 400, "line 3: .*too deeply nested"),
        ("input x: f32[2]\n y: f32[2] = text_probe(x, axes=" + "(" * 400, "line 3: tuples are nested"),
        ("y: f32[2] = text_probe() {\n" + "graph a {\n y: f32[2] = text_probe() {\n" * 60, "regions are nested"),
        ('input "x', "line 2: unexpected"),
        ('input "\\q": f32[]', "line 2: "),
    ],
)
def test_bad_texts_name_the_line(body: str, message: str) -> None:
    """Each kind of mistake, and texts made to exhaust the parser, are ModelFormatErrors that say where."""
    with pytest.raises(ModelFormatError, match=message):
        parse_graph(f"graph g {{\n {body}\n}}\n")


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.sample(20)
def test_damaged_texts_never_crash(seed: int) -> None:
    """A text with characters dropped, doubled or swapped parses or is a ModelFormatError, nothing else."""
    rng = random.Random(seed)
    graph = random_graph(seed)[0]
    text, table = print_graph(graph), constants_table(graph)
    for _ in range(20):
        at, length = rng.randrange(len(text)), rng.randint(1, 8)
        piece = text[at : at + length]
        other = rng.randrange(len(text))
        cut = text[:at] + rng.choice(["", piece + piece, text[other : other + length]]) + text[at + length :]
        with contextlib.suppress(ModelFormatError):
            parse_graph(cut, table)


def test_unprintable_attribute() -> None:
    """An attribute of a type that the text has no form for is refused, not printed wrongly."""
    g = Graph()
    g.add(TextProbe(label={"a": 1}), g.input("x", (1,)))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="can't be a dict"):
        print_graph(g)
