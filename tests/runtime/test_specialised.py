"""Models whose inputs decide ranks: what is compiled for each value, how that is shown, and what is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx.compiler import Compilation
from rlx.errors import (
    ClosedError,
    ExecutionError,
    ModelFormatError,
    NameNotFound,
    OptionError,
    ShapeError,
    UndecidedInputs,
    UnsupportedOp,
)
from rlx.importers.onnx import load, preflight
from rlx.ir.text import parse_graph
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.restore import StoredCompilation

F32, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
DEVICES = ("cpu", "reference", "interp")


def info(name: str, shape: Any, elem: int = F32) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, shape)


def of_items(name: str, kind: str = "sequence") -> onnx.ValueInfoProto:
    """A sequence, an optional tensor, or an optional sequence of f32 tensors of one open size."""
    tensor = helper.make_tensor_type_proto(F32, [None])
    sequence = helper.make_sequence_type_proto(tensor)
    types = {
        "sequence": sequence,
        "optional": helper.make_optional_type_proto(tensor),
        "optional sequence": helper.make_optional_type_proto(sequence),
    }
    return helper.make_value_info(name, types[kind])


def file(
    folder: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[str],
    weights: dict[str, Any] | None = None,
) -> Path:
    made = helper.make_graph(
        nodes,
        "g",
        inputs,
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()],
    )
    path = folder / "model.onnx"
    opsets = [helper.make_opsetid("", 18)]
    path.write_bytes(helper.make_model(made, opset_imports=opsets, ir_version=9).SerializeToString())
    return path


def sums(folder: Path, count: int | str = 1) -> Path:
    """y = the sum of x over axes that come in, with weights added."""
    nodes = [
        helper.make_node("Add", ["x", "w"], ["moved"]),
        helper.make_node("ReduceSum", ["moved", "axes"], ["y"], keepdims=0),
    ]
    weight = np.full((3, 4), 0.5, np.float32)
    return file(folder, nodes, [info("x", ["n", 3, 4]), info("axes", [count], I64)], ["y"], {"w": weight})


def axes_of(*axes: int) -> np.ndarray:
    return np.array(axes, np.int64)


@pytest.mark.parametrize("device", DEVICES)
def test_each_value_has_one_compile(tmp_path: Path, device: str) -> None:
    """Results are those of NumPy for each value and size; only a new value compiles, and explain tells."""
    model = rlx.load(sums(tmp_path, "k"), device=device)
    assert isinstance(model, rlx.Specialised)
    assert model.decides == ("axes",)
    seen = [axes_of(0), axes_of(1, 2), axes_of(0), axes_of(-1), axes_of(1, 2)]
    for rows, axes in enumerate(seen, 1):
        x = np.concatenate([X] * rows)
        (y,) = model.run({"x": x, "axes": axes})
        np.testing.assert_allclose(y, (x + np.float32(0.5)).sum(tuple(axes)), rtol=1e-5)
    assert list(model.variants) == ["axes=[0]", "axes=[1, 2]", "axes=[-1]"]
    text = model.explain()
    assert "variants 3 of 32" in text
    assert "variant  axes=[1, 2]" in text
    assert model.variant([X, axes_of(0)]) is model.variants["axes=[0]"]


def test_beyond_the_limit_a_run_says_so(tmp_path: Path) -> None:
    """The limit is an error with ways out, and what is compiled goes on running."""
    model = rlx.load(sums(tmp_path), device="cpu", variants=2)
    for axis in (0, 1):
        model.run([X, axes_of(axis)])
    with pytest.raises(ExecutionError, match=r"compiled for 2 values of 'axes', the limit.*axes=\[2\].*variants="):
        model.run([X, axes_of(2)])
    np.testing.assert_allclose(model.run([X, axes_of(1)])[0], (X + np.float32(0.5)).sum(1), rtol=1e-5)
    assert len(model.variants) == 2


def test_a_value_that_fails_is_not_kept(tmp_path: Path) -> None:
    """An axis that there is not is one clear error each time, and takes no place of the limit."""
    model = rlx.load(sums(tmp_path), device="cpu", variants=1)
    for _ in range(2):
        with pytest.raises(ShapeError, match="axis 7"):
            model.run([X, axes_of(7)])
    assert not model.variants
    model.run([X, axes_of(0)])


def test_values_make_constants(tmp_path: Path) -> None:
    """`values=` gives a compiled graph without these inputs; what does not fit is refused by name."""
    path = sums(tmp_path)
    model = rlx.load(path, device="cpu", values={"axes": [1]})
    assert type(model) is CompiledGraph
    assert [spec.name for spec in model.inputs] == ["x"]
    again = rlx.load(path, device="cpu", values={"axes": [2]})
    np.testing.assert_allclose(model.run([X])[0], (X + np.float32(0.5)).sum(1), rtol=1e-5)
    np.testing.assert_allclose(again.run([X])[0], (X + np.float32(0.5)).sum(2), rtol=1e-5)
    for values, error, word in (
        ({"axis": [1]}, NameNotFound, "no input 'axis'"),
        ({"axes": [1.5]}, OptionError, r"values\['axes'\]: expected elements of type i64"),
        ({"axes": [[1]]}, ShapeError, r"values\['axes'\]: expected shape \(1\)"),
        (3, OptionError, "takes a mapping"),
    ):
        with pytest.raises(error, match=word):
            rlx.load(path, device="cpu", values=values)
    with pytest.raises(OptionError, match="variants=0"):
        rlx.load(path, device="cpu", variants=0)


def test_the_importer_names_what_decides(tmp_path: Path) -> None:
    """`load` of bytes raises one error that lists the inputs; preflight says that the file needs something."""
    source = sums(tmp_path).read_bytes()
    with pytest.raises(UndecidedInputs, match="The values of 'axes' decide ranks") as caught:
        load(source)
    assert caught.value.inputs == ("axes",)
    assert isinstance(caught.value, UnsupportedOp)
    assert not preflight(source).ok
    assert [v.name for v in load(source, values={"axes": axes_of(0)}).inputs] == ["x"]


def test_what_data_decide_otherwise_is_still_refused(tmp_path: Path) -> None:
    """Axes computed from an input of several axes, or of weights that can be set, have no values to go by."""
    nodes = [
        helper.make_node("ArgMax", ["x"], ["best"], axis=1, keepdims=0),
        helper.make_node("ReduceSum", ["x", "best"], ["y"], keepdims=0),
    ]
    with pytest.raises(UnsupportedOp, match="must be known at import") as caught:
        rlx.load(file(tmp_path, nodes, [info("x", [1, 3])], ["y"]), device="cpu")
    assert not isinstance(caught.value, UndecidedInputs)


@pytest.mark.parametrize("device", DEVICES)
def test_more_may_decide_once_something_is_known(tmp_path: Path, device: str) -> None:
    """A branch that is taken may need another input; one that is not needs none."""
    summed = helper.make_graph(
        [helper.make_node("ReduceSum", ["x", "axes"], ["s"], keepdims=0)],
        "then",
        [],
        [helper.make_empty_tensor_value_info("s")],
    )
    kept = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["k"])], "else", [], [helper.make_empty_tensor_value_info("k")]
    )
    nodes = [helper.make_node("If", ["flag"], ["y"], then_branch=summed, else_branch=kept)]
    inputs = [info("x", [2, 3, 4]), info("axes", [1], I64), info("flag", [], BOOL)]
    model = rlx.load(file(tmp_path, nodes, inputs, ["y"]), device=device)
    assert isinstance(model, rlx.Specialised)
    for axis in (0, 2):
        np.testing.assert_allclose(model(X, axes_of(axis), np.True_)["y"], X.sum(axis), rtol=1e-5)
    for axis in (0, 9):
        np.testing.assert_array_equal(model(X, axes_of(axis), np.False_)["y"], X)


@pytest.mark.parametrize("device", DEVICES)
def test_branches_of_different_rank(tmp_path: Path, device: str) -> None:
    """Which is taken is read in each run where the condition follows from an input."""
    branches = [
        helper.make_graph([helper.make_node(op, ["x"], [out])], op, [], [helper.make_empty_tensor_value_info(out)])
        for op, out in (("Neg", "a"), ("Flatten", "b"))
    ]
    nodes = [
        helper.make_node("Less", ["k", "three"], ["cond"]),
        helper.make_node("If", ["cond"], ["y"], then_branch=branches[0], else_branch=branches[1]),
    ]
    path = file(tmp_path, nodes, [info("x", [2, 3, 4]), info("k", [], I64)], ["y"], {"three": np.int64(3)})
    model = rlx.load(path, device=device)
    np.testing.assert_array_equal(model.run([X, 1])[0], -X)
    np.testing.assert_array_equal(model.run([X, 5])[0], X.reshape(2, 12))


@pytest.mark.parametrize("device", DEVICES)
def test_sequences_come_in_as_lists(tmp_path: Path, device: str) -> None:
    """One compile for each number of tensors, for tensors of any sizes."""
    nodes = [
        helper.make_node("ConcatFromSequence", ["parts"], ["y"], axis=0),
        helper.make_node("SequenceLength", ["parts"], ["n"]),
    ]
    model = rlx.load(file(tmp_path, nodes, [of_items("parts")], ["y", "n"]), device=device)
    assert isinstance(model, rlx.Specialised)
    for lengths in ((2, 3), (4, 1), (5,)):
        parts = [np.arange(n, dtype=np.float32) for n in lengths]
        y, n = model.run([parts])
        np.testing.assert_array_equal(y, np.concatenate(parts))
        assert np.asarray(n) == len(parts)
    assert list(model.variants) == ["parts=2 tensors of rank 1", "parts=1 tensors of rank 1"]
    with pytest.raises(ShapeError, match=r"input 'parts\.0': expected 1 axes, got 2"):
        model.run([[X[0]]])
    with pytest.raises(ShapeError, match="'parts' is a sequence: expected a list"):
        model.run([X[0, 0]])


@pytest.mark.parametrize("kind", ["optional", "optional sequence"])
def test_optionals_may_be_absent(tmp_path: Path, kind: str) -> None:
    """None is an absent one; an empty sequence in an optional is an element."""
    nodes = [helper.make_node("OptionalHasElement", ["x"], ["y"])]
    model = rlx.load(file(tmp_path, nodes, [of_items("x", kind)], ["y"]), device="cpu")
    ones = np.ones(2, np.float32)
    given = [ones] if kind == "optional" else [[ones], []]
    assert model(None)["y"] == np.False_
    assert all(model(value)["y"] == np.True_ for value in given)


def test_an_optional_that_holds_an_empty_sequence_has_an_element(tmp_path: Path) -> None:
    """Optional(SequenceEmpty()) is no absent optional."""
    nodes = [
        helper.make_node("SequenceEmpty", [], ["s"]),
        helper.make_node("Optional", ["s"], ["o"]),
        helper.make_node("OptionalHasElement", ["o"], ["y"]),
    ]
    assert rlx.load(file(tmp_path, nodes, [], ["y"]), device="cpu").run([])[0] == np.True_


def test_calls_of_one_program_are_refused_by_name(tmp_path: Path) -> None:
    """What there is once for each value can't be asked of all."""
    model = rlx.load(sums(tmp_path), device="cpu")
    for ask in (
        lambda: model.outputs,
        lambda: model.plan,
        lambda: model.states,
        lambda: model.set_param("w", np.zeros((3, 4), np.float32)),
        lambda: model.save(tmp_path / "m.rlxart"),
        lambda: model.capabilities,
    ):
        with pytest.raises(OptionError, match=r"a program for each value of 'axes': ask variant\(inputs\)"):
            ask()
    assert not hasattr(model, "something")


def test_other_ways_to_run(tmp_path: Path) -> None:
    """Views, slots, submitted runs, chosen outputs, buffers of `out` and clones give the same."""
    model = rlx.load(sums(tmp_path), device="cpu")
    want = (X + np.float32(0.5)).sum(1)
    given = {"x": X, "axes": axes_of(1)}
    out = np.empty_like(want)
    assert model.run(given, out={"y": out})[0] is out
    future = model.submit(given, outputs=["y"])
    clone = model.clone()
    for found in (
        out,
        model.run_views(given)["y"],
        model.run_slots(X, axes_of(1))[0],
        future.result()[0],
        clone.run(given)[0],
        *(row[0] for row in model.run_many([given, given])),
    ):
        np.testing.assert_allclose(found, want, rtol=1e-5)
    assert clone.variants["axes=[1]"] is not model.variants["axes=[1]"]
    assert model.profile(given, 1)
    assert len(model.trace(given).to_dict()) > 0
    model.close()
    with pytest.raises(ClosedError):
        model.run(given)
    np.testing.assert_allclose(clone.run(given)[0], want, rtol=1e-5)


def test_threads_compile_a_value_once(tmp_path: Path) -> None:
    """Of threads that bring the same new value one compiles."""
    model = rlx.load(sums(tmp_path), device="cpu", busy="wait")
    found: list[CompiledGraph] = []
    threads = [threading.Thread(target=lambda: found.append(model.variant([X, axes_of(0)]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(map(id, found))) == 1


def test_many_elements_are_no_value(tmp_path: Path) -> None:
    """More than 1024 elements decide nothing."""
    model = rlx.load(sums(tmp_path, "k"), device="cpu")
    with pytest.raises(ExecutionError, match="2000 elements: at most 1024"):
        model.run([X, np.zeros(2000, np.int64)])


# ---- sizes that are 1 in a run


def broadcasting(folder: Path) -> Path:
    """Two branches over an image whose sizes are equal for even ones; those of a tiny image broadcast."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("MaxPool", ["x"], ["b"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Mul", ["a", "b"], ["y"]),
    ]
    weight = np.random.default_rng(0).standard_normal((1, 1, 3, 3)).astype(np.float32)
    return file(folder, nodes, [info("x", [1, 1, "h", "w"])], ["y"], {"w": weight})


@pytest.mark.parametrize("device", DEVICES)
def test_a_size_of_1_broadcasts(device: str, tmp_path: Path) -> None:
    """As onnxruntime has it, by run, run_views, run_slots, submit and a clone; each pair of sizes is compiled once."""
    path = broadcasting(tmp_path)
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    with rlx.load(path, device=device) as model:
        assert isinstance(model, CompiledGraph)
        assert "exact" not in model.explain()
        for height, width in ((8, 6), (3, 6), (3, 3), (8, 6), (3, 6)):
            x = np.random.default_rng(height).standard_normal((1, 1, height, width)).astype(np.float32)
            (want,) = session.run(None, {"x": x})
            got = [*model.run({"x": x}), *model.run_views([x]), *model.submit([x]).result(), model(x)["y"]]
            got += [*model.run_slots(x), *model.run_slots(x)]
            out = np.empty_like(want)
            got += [*model.run([x], out=[out], outputs=["y"]), out]
            got += model.clone().run([x]) if "clone" in model.capabilities else []
            for y in got:
                np.testing.assert_allclose(np.asarray(y), want, rtol=1e-5, atol=1e-6)
        assert "exact    2 of 32, for runs in which a size is 1: 1x1x3x6; 1x1x3x3" in model.explain()
        for _ in range(2):  # 3 and 2: an error, which no other compile would mend
            for call in (model.run, model.run_views, lambda arrays: model.run_slots(*arrays)):
                with pytest.raises(ExecutionError, match="in this run"):
                    call([np.zeros((1, 1, 5, 6), np.float32)])
    with pytest.raises(ClosedError):
        model.run([x])


def test_rows_of_runs_by_other_graphs_are_refused(tmp_path: Path) -> None:
    """`read_output_row` would read what the general graph left at an earlier run."""
    with rlx.load(broadcasting(tmp_path), device="cpu") as model:
        model.run([np.ones((1, 1, 8, 6), np.float32)])
        model.read_output_row("y", 0)
        model.run([np.ones((1, 1, 3, 6), np.float32)])
        with pytest.raises(OptionError, match="sizes of 1"):
            model.read_output_row("y", 0)


def test_an_input_named_like_a_dim_keeps_the_error(tmp_path: Path) -> None:
    """Its shape can't be said by its name; the error is that of the run."""
    nodes = [helper.make_node("Add", ["n", "b"], ["y"])]
    model = rlx.load(file(tmp_path, nodes, [info("n", ["n", 2]), info("b", ["m", 2])], ["y"]), device="reference")
    with pytest.raises(ExecutionError, match="in this run"):
        model.run([np.ones((1, 2), np.float32), np.ones((3, 2), np.float32)])


def test_the_number_of_exact_shapes_is_limited(tmp_path: Path) -> None:
    """Beyond it the error says so; what is compiled goes on running."""
    model = rlx.load(broadcasting(tmp_path), device="reference")
    for width in range(2, 66, 2):
        model.run([np.ones((1, 1, 3, width), np.float32)])
    for _ in range(2):
        with pytest.raises(ExecutionError, match=r"32 shapes .* the limit"):
            model.run([np.ones((1, 1, 3, 66), np.float32)])
        model.run([np.ones((1, 1, 3, 64), np.float32)])
        model.run([np.ones((1, 1, 4, 66), np.float32)])


def test_shapes_that_can_not_broadcast_stay_an_error(tmp_path: Path) -> None:
    """With a size of 1 too, where ONNX needs equal ones; of params that were set no other graph knows."""
    nodes = [helper.make_node("Add", ["a", "b"], ["c"]), helper.make_node("MatMul", ["c", "d"], ["y"])]
    inputs = [info("a", ["n"]), info("b", ["m"]), info("d", ["k", 3])]
    model = rlx.load(file(tmp_path, nodes, inputs, ["y"]), device="reference")
    one, four = np.ones(1, np.float32), np.ones(4, np.float32)
    assert model.run([one, four, np.ones((4, 3), np.float32)])[0].tolist() == [4 * 2.0] * 3
    with pytest.raises(ExecutionError, match=r"4 and .* 1 in this run"):
        model.run([four, four, np.ones((1, 3), np.float32)])
    model = rlx.load(broadcasting(tmp_path), device="cpu")
    model.set_params({"w": np.zeros((1, 1, 3, 3), np.float32)})
    with pytest.raises(ExecutionError, match="in this run"):
        model.run([np.ones((1, 1, 3, 4), np.float32)])


def test_variants_are_kept_in_the_cache(tmp_path: Path) -> None:
    """A later process finds what was compiled for each value, and only for that; results are the same."""
    path, cache = sums(tmp_path), tmp_path / "cache"
    made = []
    for _ in range(2):
        model = rlx.load(path, device="cpu", cache_dir=cache)
        made.append([model.run([X, axes_of(axis)])[0] for axis in (0, 1)])
        kinds = [type(variant._compilation) for variant in model.variants.values()]
        model.close()
    assert kinds == [StoredCompilation, StoredCompilation]
    for first, second, axis in zip(*made, (0, 1), strict=True):
        assert first.tobytes() == second.tobytes()
        np.testing.assert_allclose(second, (X + np.float32(0.5)).sum(axis), rtol=1e-5)
    model = rlx.load(path, device="cpu", cache_dir=cache)
    model.run([X, axes_of(2)])
    assert not isinstance(model.variants["axes=[2]"]._compilation, StoredCompilation)
    for expected in (Compilation, StoredCompilation):
        fixed = rlx.load(path, device="cpu", cache_dir=cache, values={"axes": axes_of(-1)})
        assert isinstance(fixed._compilation, expected)


def lists(folder: Path) -> Path:
    """x [6, 2] in rows, as a sequence s; its positive part y; an optional o without an element."""
    optional = helper.make_optional_type_proto(helper.make_tensor_type_proto(F32, [None]))
    nodes = [
        helper.make_node("SplitToSequence", ["x"], ["s"], axis=0, keepdims=1),
        helper.make_node("Relu", ["x"], ["y"]),
        helper.make_node("Optional", [], ["o"], type=helper.make_tensor_type_proto(F32, [None])),
    ]
    outputs = [
        helper.make_tensor_sequence_value_info("s", F32, None),
        info("y", [6, 2]),
        helper.make_value_info("o", optional),
    ]
    path = folder / "lists.onnx"
    made = helper.make_graph(nodes, "g", [info("x", [6, 2])], outputs)
    path.write_bytes(
        helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()
    )
    return path


@pytest.mark.parametrize("device", DEVICES)
def test_sequences_and_optionals_come_under_their_names(tmp_path: Path, device: str) -> None:
    """A list, an array and None, by position and by name, also from the cache, a clone, an artifact and the text."""
    x = np.arange(12, dtype=np.float32).reshape(6, 2) - 5
    path = lists(tmp_path)
    models = [rlx.load(path, device=device, cache_dir=tmp_path / "cache") for _ in range(2)]
    models.append(rlx.compile(parse_graph(str(load(path))), device=device))
    if device == "cpu":
        models[0].save(tmp_path / "m.rlxart")
        models += [models[0].clone(), rlx.load(tmp_path / "m.rlxart")]
        models.append(rlx.load(tmp_path / "m.rlxart", portable_only=True))
    for model in models:
        assert [(r.name, r.kind, len(r.outputs)) for r in model.results] == [
            ("s", "list", 6),
            ("y", "tensor", 1),
            ("o", "absent", 0),
        ]
        parts, positive, nothing = model.run([x])
        assert np.array_equal(np.concatenate(parts), x)
        assert np.array_equal(positive, np.maximum(x, 0))
        assert nothing is None
        named = model(x=x)
        assert list(named) == ["s", "y", "o"]
        assert (type(named["s"]), named["o"]) == (list, None)
        assert [type(r) for r in model.run([x], outputs=["o", "y"])] == [type(None), type(positive)]
        with pytest.raises(NameNotFound, match=r"'s\.0'"):
            model.run([x], outputs=["s.0"])


def test_arrays_to_write_into_are_for_tensors(tmp_path: Path) -> None:
    """`out=` by name and position; for a list it is refused before the run."""
    x = np.ones((6, 2), np.float32)
    model = rlx.load(lists(tmp_path), device="cpu")
    for out in ({"y": (own := np.zeros_like(x))}, [None, own, None], {1: own}):
        own[:] = 0
        assert np.shares_memory(model.run([x], out=out)[1], own)
        assert (own == 1).all()
    with pytest.raises(OptionError, match="output 's' is a sequence"):
        model.run([x], out={"s": own})
    with pytest.raises(ShapeError, match="expected 3 arrays"):
        model.run([x], out=[own])


def test_results_of_a_text_are_outputs_of_it(tmp_path: Path) -> None:
    """What there is not, twice, or of a kind that is none, is refused."""
    text = str(load(lists(tmp_path)))
    for old, new in (("[y]", "[z]"), ("result y tensor", "result y pair"), ("absent = []", "absent = [y]")):
        assert old in text
        with pytest.raises(ModelFormatError, match="can't be a"):
            parse_graph(text.replace(old, new))
