"""Caches as states: a decoder that takes and gives growing caches, against itself with these as states."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from growth import growth
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx.errors import ExecutionError, NameNotFound, OptionError, ShapeError
from rlx.runtime.session import import_graph

Array = np.ndarray[Any, Any]
LAYERS, HEADS, DEPTH, WIDTH, WORDS, PLACES = 2, 2, 8, 16, 31, 1024
CACHES = [f"{i}.{part}" for i in range(LAYERS) for part in ("key", "value")]


class Decoder:
    """A small decoder in the style of exporters: positions and masks computed from the shapes of the caches."""

    def __init__(self, groups: int = 1) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.rng = np.random.default_rng(5)
        self.groups = groups  # query heads for each key head

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.const(self.rng.standard_normal(shape) / 4, np.float32)

    def size(self, of: str, axis: int) -> str:
        return self.add("Gather", self.add("Shape", of), self.const(axis))

    def heads(self, x: str, count: int) -> str:
        split = self.add("Reshape", x, self.const([1, -1, count, DEPTH]))
        return self.add("Transpose", split, perm=[0, 2, 1, 3])

    def model(self) -> onnx.ModelProto:
        before, rows = self.size("past.0.key", 2), self.size("ids", 1)
        after = self.add("Add", before, rows)
        places = self.add("Range", before, after, self.const(1))
        x = self.add("Gather", self.weight(WORDS, WIDTH), "ids")
        x = self.add("Add", x, self.place_embedding(before, after, places))
        keys = self.add("Range", self.const(0), after, self.const(1))
        seen = self.add("LessOrEqual", keys, self.add("Unsqueeze", places, self.const([1])))
        wide = self.add("Unsqueeze", self.add("Cast", "mask", to=TensorProto.BOOL), self.const([1, 2]))
        bias = self.add("Where", self.add("And", seen, wide), self.const(0, np.float32), self.const(-1e9, np.float32))
        for layer in range(LAYERS):
            x = self.add("Add", x, self.layer(layer, x, bias))
        logits = self.add("MatMul", x, self.weight(WIDTH, WORDS))
        self.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
        floats, ints = TensorProto.FLOAT, TensorProto.INT64
        cache = [1, HEADS, "past", DEPTH]
        inputs = [
            ("ids", ints, [1, "rows"]),
            ("mask", ints, [1, "all"]),
            *((f"past.{c}", floats, cache) for c in CACHES),
        ]
        outputs = [("logits", floats, [1, "rows", WORDS])]
        outputs += [(f"present.{c}", floats, [1, HEADS, "grown", DEPTH]) for c in CACHES]
        infos = [[helper.make_tensor_value_info(*spec) for spec in specs] for specs in (inputs, outputs)]
        graph = helper.make_graph(self.nodes, "decoder", infos[0], infos[1], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)

    def place_embedding(self, before: str, after: str, places: str) -> str:
        table = self.weight(PLACES, WIDTH)
        if self.groups == 1:
            return self.add("Gather", table, places)
        ends = [self.add("Unsqueeze", x, self.const([0])) for x in (before, after)]
        return self.add("Slice", table, *ends, self.const([0]))  # which would be clipped at the end of the table

    def layer(self, layer: int, x: str, bias: str) -> str:
        many = HEADS * self.groups
        q = self.heads(self.add("MatMul", x, self.weight(WIDTH, many * DEPTH)), many)
        k, v = (self.heads(self.add("MatMul", x, self.weight(WIDTH, HEADS * DEPTH)), HEADS) for _ in "kv")
        grown = []
        for part, new in (("key", k), ("value", v)):
            self.nodes.append(
                helper.make_node("Concat", [f"past.{layer}.{part}", new], [f"present.{layer}.{part}"], axis=2)
            )
            grown.append(self.repeated(f"present.{layer}.{part}"))
        scores = self.add("MatMul", q, self.add("Transpose", grown[0], perm=[0, 1, 3, 2]))
        scores = self.add("Add", self.add("Div", scores, self.const(DEPTH**0.5, np.float32)), bias)
        mixed = self.add("MatMul", self.add("Softmax", scores, axis=-1), grown[1])
        flat = self.add("Reshape", self.add("Transpose", mixed, perm=[0, 2, 1, 3]), self.const([1, -1, many * DEPTH]))
        return self.add("MatMul", flat, self.weight(many * DEPTH, WIDTH))

    def repeated(self, x: str) -> str:
        """Each head `groups` times, by way of an expanded axis."""
        if self.groups == 1:
            return x
        length = self.add("Unsqueeze", self.size(x, 2), self.const([0]))
        parts = [[1, HEADS, self.groups], length, [DEPTH]]
        wide = self.add("Concat", *(p if isinstance(p, str) else self.const(p) for p in parts), axis=0)
        parts[0] = [1, HEADS * self.groups]
        flat = self.add("Concat", *(p if isinstance(p, str) else self.const(p) for p in parts), axis=0)
        return self.add("Reshape", self.add("Expand", self.add("Unsqueeze", x, self.const([2])), wide), flat)


@pytest.fixture(scope="module", params=[1, 3], ids=["heads", "grouped heads"])
def path(request: Any, tmp_path_factory: Any) -> Path:
    path = Path(tmp_path_factory.mktemp("decoder")) / "decoder.onnx"
    onnx.save(Decoder(request.param).model(), path)
    return path


def graph_of(path: Path) -> Any:
    return import_graph(path, ".onnx", None)


@functools.cache
def compiled(path: Path, capacity: int) -> rlx.CompiledGraph:
    """With the caches as states; outside, where the capacity is 0."""
    if not capacity:
        return rlx.load(path, device="cpu", cache=False, dims={"past": (0, PLACES)})
    return rlx.compile(rlx.bind_cache(graph_of(path), capacity), device="cpu")


def bound(path: Path, capacity: int = 24) -> rlx.CompiledGraph:
    model = compiled(path, capacity).clone(fresh=True)
    model.states.bind("mask", np.ones((1, capacity), np.int64))
    return model


def close(a: Array, b: Array) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class Loop:
    """The usual loop of a caller: caches grow outside."""

    def __init__(self, path: Path) -> None:
        self.model = compiled(path, 0)
        self.caches = {f"past.{c}": np.zeros((1, HEADS, 0, DEPTH), np.float32) for c in CACHES}

    def run(self, ids: Array, mask: Array | None = None) -> Array:
        held = self.caches["past.0.key"].shape[2] + ids.shape[1]
        mask = np.ones((1, held), np.int64) if mask is None else mask
        logits, *grown = self.model.run({"ids": ids, "mask": mask, **self.caches})
        self.caches = dict(zip(self.caches, grown, strict=True))
        return logits


def words(rows: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, WORDS, (1, rows))


def test_steps_give_what_growing_caches_give(path: Path) -> None:
    """Prompts and single steps; the caches are those that the caller would have."""
    model, loop = bound(path), Loop(path)
    assert [spec.name for spec in model.inputs] == ["ids", "mask"]
    assert [spec.name for spec in model.outputs] == ["logits"]
    for step, rows in enumerate((5, 1, 1, 3, 1, 6, 1)):
        ids = words(rows, step)
        close(model.run({"ids": ids})[0], loop.run(ids))
        held = int(model.states["length"].read())
        for name, array in loop.caches.items():
            assert array.shape[2] == held
            close(model.states[name].read()[:, :, :held], array)


def test_a_mask_is_that_of_every_position(path: Path) -> None:
    model, loop = bound(path), Loop(path)
    mask = np.ones((1, 24), np.int64)
    mask[0, :2] = 0  # a prompt that is padded on the left
    for step, rows in enumerate((6, 1, 2)):
        held = int(model.states["length"].read()) + rows
        ids = words(rows, step)
        (got,) = model.run({"ids": ids, "mask": mask})
        close(got[:, -1], loop.run(ids, np.ascontiguousarray(mask[:, :held]))[:, -1])


def test_the_length_can_be_set_back(path: Path) -> None:
    """A part of the cache is dropped by writing the length: its rows are written over."""
    model, loop = bound(path), Loop(path)
    first, second = words(7, 1), words(4, 2)
    model.run({"ids": first})
    model.run({"ids": words(9, 3)})
    model.states["length"].write(np.array(7))
    loop.run(first)
    close(model.run({"ids": second})[0], loop.run(second))
    model.states["length"].reset()
    close(model.run({"ids": first})[0], Loop(path).run(first))


def test_beyond_the_capacity_nothing_is_written(path: Path) -> None:
    model = bound(path, 8)
    model.run({"ids": words(6)})
    before = {name: state.read() for name, state in model.states.items()}
    with pytest.raises(ExecutionError, match=r"present\.0\.key: index out of range"):
        model.run({"ids": words(3)})
    for name, array in before.items():
        np.testing.assert_array_equal(model.states[name].read(), array)
    model.run({"ids": words(2)})
    with pytest.raises(ExecutionError):
        model.run({"ids": words(9)})


def test_a_step_writes_its_rows_and_allocates_nothing(path: Path) -> None:
    """The same binding for every step, states in place, and only new rows written."""
    model = bound(path)
    for _ in range(3):
        model.run({"ids": words(1)})
    binding, arena = model._executable.bound, model._executable.memory  # type: ignore[attr-defined]
    places = {b: model._executable.address(b) for b in model._executable.program.states}  # type: ignore[attr-defined, union-attr]
    for _ in range(5):
        model.run({"ids": words(1)})
    assert model._executable.bound is binding  # type: ignore[attr-defined]
    assert model._executable.memory is arena  # type: ignore[attr-defined]
    assert places == {b: model._executable.address(b) for b in places}  # type: ignore[attr-defined]
    program = model.compilation.program
    assert program is not None
    assert program.copied.keys() <= {"length"}
    for state in program.states:
        new = program.updates[state.name]
        written = sum(k.bytes_written({"rows": 1}) for k in program.run if new in k.writes())
        assert written == (HEADS * DEPTH * 4 if state.name.startswith("past") else 8)
    assert "in place" in model.explain("plan")


def test_a_thousand_steps_keep_their_memory(path: Path) -> None:
    """A state of 1,024 positions, step by step: every row as of one run over all words, and no memory grows."""
    steps = 1000
    ids = words(steps)
    want = Loop(path).run(ids)[0]
    model = bound(path, 1024)
    model.run_slots(ids[:, :1])
    model.states["length"].reset()
    step = itertools.count()

    def hundred() -> None:
        for _ in range(100):
            at = next(step)
            got = model.run_slots(ids[:, at : at + 1])[0]
        close(got[0, 0], want[at])

    hundred()
    blocks, native = growth(hundred, 9)
    assert next(step) == int(model.states["length"].read()) == steps
    assert blocks < 20
    assert native < 1000


def test_load_takes_what_changes_the_graph(path: Path, tmp_path: Path) -> None:
    model = rlx.load(path, device="cpu", transform=lambda g: rlx.bind_cache(g, 24), cache_dir=tmp_path)
    ids = words(5)
    mask = np.ones((1, 24), np.int64)
    (got,) = model.run({"ids": ids, "mask": mask})
    close(got, Loop(path).run(ids))
    model.save(tmp_path / "decoder.rlxart")
    again = rlx.load(tmp_path / "decoder.rlxart", device="cpu")
    np.testing.assert_array_equal(again.run({"ids": ids, "mask": mask})[0], got)
    with pytest.raises(OptionError, match="transform"):
        rlx.load(tmp_path / "decoder.rlxart", transform=lambda g: g)


def test_rows_put_in_place_and_vectors_become_states() -> None:
    """Caches of one size, as TensorScatter and Attention-24 have them: only rows are written; no capacity is needed."""

    def build() -> Any:
        g = rlx.Graph("scatter")
        x, at, h = g.input("x", (2, 2, 1, 8)), g.input("at", (2,), "i64"), g.input("h", (2, 8))
        keys = rlx.dynamic_update_slice(g.input("keys", (2, 2, 16, 8)), x, at, axis=2)
        y = rlx.attention(x, keys, keys, at + 1, counted=True)
        g.output(y, "y")
        g.output(keys, "keys.new")
        g.output(rlx.tanh(h + y.sum(axes=(1, 2))), "h.new")
        return g

    with pytest.raises(OptionError, match="neither concat"):
        rlx.bind_cache(build(), 16, {"keys": "h.new"})
    model = rlx.compile(rlx.bind_cache(build(), pairs={"keys": "keys.new", "h": "h.new"}), device="cpu")
    assert set(rlx.bind_cache(build()).updates) == {"keys"}  # what is found; vectors have to be named
    plain = rlx.compile(build(), device="cpu")
    keys, h = np.zeros((2, 2, 16, 8), np.float32), np.zeros((2, 8), np.float32)
    for step in range(4):
        x = np.random.default_rng(step).standard_normal((2, 2, 1, 8)).astype(np.float32)
        at = np.array([step, 2 * step])
        want, keys, h = plain.run({"x": x, "at": at, "keys": keys, "h": h})
        np.testing.assert_array_equal(model.run({"x": x, "at": at})[0], want)
    np.testing.assert_array_equal(model.states["keys"].read(), keys)
    np.testing.assert_array_equal(model.states["h"].read(), h)
    assert "keys: f32[2, 2, 16, 8], updated in place, 128 B written per run" in model.explain("plan")


# ---- what is refused


def cache_graph(build: Any, past: Any = None, new: Any = None) -> Any:
    g = rlx.Graph("small")
    n, s = rlx.Dim("n", 0, 64), rlx.Dim("s", 1, 8)
    old = g.input("past", (1, 2, n, 8) if past is None else past)
    rows = g.input("rows", (1, 2, s, 8) if new is None else new)
    grown = rlx.concat(old, rows, axis=2)
    g.output(grown, "present")
    g.output(build(g, old, rows, grown), "y")
    return g


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "sum of positions": (lambda g, o, r, x: x.sum(axes=(2,)), {}, OptionError, "sums or compares"),
    "past read by others": (lambda g, o, r, x: rlx.relu(o), {}, OptionError, "not as a factor|more than its concat"),
    "unknown input": (lambda g, o, r, x: r, {"pairs": {"p": "present"}}, NameNotFound, "no input 'p'"),
    "unknown output": (lambda g, o, r, x: r, {"pairs": {"past": "q"}}, NameNotFound, "no output 'q'"),
    "not a pair": (lambda g, o, r, x: r, {"pairs": {"past": "y"}}, OptionError, "neither concat"),
    "no capacity": (lambda g, o, r, x: r, {"capacity": 0}, OptionError, "capacity=0"),
    "name taken": (lambda g, o, r, x: r, {"length": "rows"}, OptionError, "'rows' is taken"),
    "fixed": (lambda g, o, r, x: r, {"dims": {"n": 4}}, ShapeError, "leave that dim open"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_cache_is_refused(case: str) -> None:
    build, options, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        rlx.bind_cache(cache_graph(build), **{"capacity": 16, **options})


def test_an_open_batch_and_no_pairs_are_refused() -> None:
    b = rlx.Dim("b", 1, 4)
    g = cache_graph(lambda g, o, r, x: r, (b, 2, rlx.Dim("n", 0, 64), 8), (b, 2, rlx.Dim("s", 1, 8), 8))
    with pytest.raises(ShapeError, match="fix its other dims"):
        rlx.bind_cache(g, 16)
    assert rlx.bind_cache(g, 16, dims={"b": 2}).states[-1].shape == (2, 2, 16, 8)
    with pytest.raises(OptionError, match="no output"):
        rlx.bind_cache(rlx.Graph("empty"), 16)


@pytest.mark.parametrize("kv, error", [("f16", 2e-3), ("bf16", 2e-2)])
def test_caches_are_stored_in_the_type_that_is_asked_for(path: Path, kv: str, error: float) -> None:
    """Rows are rounded once, as they are written."""
    model = rlx.compile(rlx.bind_cache(graph_of(path), 24, kv_dtype=kv), device="cpu")
    large = rlx.compile(rlx.bind_cache(graph_of(path), 240, kv_dtype=kv), device="cpu")
    model.states.bind("mask", np.ones((1, 24), np.int64))
    large.states.bind("mask", np.ones((1, 240), np.int64))
    wide = bound(path)
    assert all(str(model.states[f"past.{c}"].spec.dtype) == kv for c in CACHES)
    for step, rows in enumerate((5, 1, 3, 1)):
        ids = words(rows, step)
        want = wide.run({"ids": ids})[0]
        for one in (model, large):
            np.testing.assert_allclose(one.run({"ids": ids})[0], want, rtol=error, atol=error)
    first = wide.states["past.0.key"].read()
    np.testing.assert_array_equal(
        model.states["past.0.key"].read(), first.astype(model.states["past.0.key"].spec.dtype.numpy)
    )


def test_caches_in_blocks() -> None:
    def build() -> rlx.Graph:
        g = rlx.Graph("decoder")
        past, rows = rlx.Dim("past", 0, 4096), rlx.Dim("rows", 1, 64)
        x = g.input("x", (1, 4, rows, 32))
        own = g.input("own", (1, 2, rows, 32))
        keys = rlx.concat(g.input("past.key", (1, 2, past, 32)), own, axis=2)
        values = rlx.concat(g.input("past.value", (1, 2, past, 32)), own * 2.0, axis=2)
        g.output(rlx.attention(x, keys, values, causal=True), "y")
        g.output(keys, "present.key")
        g.output(values, "present.value")
        return g

    model = rlx.compile(rlx.bind_cache(build(), 100, kv_dtype="q8_0"), device="cpu")
    wide = rlx.compile(rlx.bind_cache(build(), 100), device="cpu")
    rng = np.random.default_rng(0)
    for rows in (5, 1, 40, 1):
        given = {n: rng.standard_normal((1, h, rows, 32)).astype(np.float32) for n, h in (("x", 4), ("own", 2))}
        np.testing.assert_allclose(model.run(given)[0], wide.run(given)[0], rtol=3e-2, atol=3e-2)
    assert model.states["past.key"].spec.bytes == 2 * 100 * 34
    for wrong in ("f17", "i8", "q4_k", 3):
        with pytest.raises(OptionError, match="kv_dtype"):
            rlx.bind_cache(build(), 100, kv_dtype=wrong)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="block"):
        rlx.bind_cache(cache_graph(lambda g, o, r, x: rlx.attention(r, x, x)), 16, kv_dtype="q8_0")
