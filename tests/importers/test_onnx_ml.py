"""Ops of ai.onnx.ml against onnxruntime: tree ensembles bit for bit, linear models, encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import UnsupportedOp
from rlx.importers.onnx import load, preflight

RNG = np.random.default_rng(0)
ALL_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
POSTS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO")
ALL_POSTS = (*POSTS, "PROBIT")


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def floats(count: int) -> list[float]:
    return [float(v) for v in f32(count)]


X = (np.round(RNG.standard_normal((9, 5)) * 2) / 2).astype(np.float32)
X[0, 0] = np.nan


def model(op: str, inputs: list[np.ndarray], outputs: int, attributes: dict[str, Any]) -> bytes:
    names = [f"x{i}" for i in range(len(inputs))]
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, inputs, strict=True)
    ]
    made = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, names, made, domain="ai.onnx.ml", **attributes)
    graph = helper.make_graph([node], "g", infos, [helper.make_empty_tensor_value_info(n) for n in made])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    source: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return source


def check(op: str, inputs: list[np.ndarray], outputs: int = 1, tolerance: float = 1e-5, **attributes: Any) -> None:
    source = model(op, inputs, outputs, attributes)
    feed = {f"x{i}": a for i, a in enumerate(inputs)}
    peer = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, feed)
    for got, want in zip(run_graph(load(source), feed).values(), peer, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def trees(
    prefix: str,
    targets: int,
    count: int = 4,
    modes: tuple[str, ...] = ALL_MODES,
    only: int | None = None,
    positive: bool = False,
) -> dict[str, Any]:
    """Full trees of depth 3 over 5 features; each leaf has a weight for every target, or one of them."""
    rng = np.random.default_rng(count + targets)
    rows: dict[str, list[Any]] = {}

    def put(name: str, value: Any) -> None:
        rows.setdefault(name, []).append(value)

    for tree in range(count):
        for n in range(15):
            leaf = n >= 7
            put("nodes_treeids", tree)
            put("nodes_nodeids", n)
            put("nodes_featureids", 0 if leaf else int(rng.integers(5)))
            put("nodes_modes", "LEAF" if leaf else modes[int(rng.integers(len(modes)))])
            put("nodes_values", 0.0 if leaf else float(rng.choice([-1, -0.5, 0, 0.5, 1])))
            put("nodes_truenodeids", 0 if leaf else 2 * n + 1)
            put("nodes_falsenodeids", 0 if leaf else 2 * n + 2)
            put("nodes_missing_value_tracks_true", int(rng.integers(2)))
            for target in (range(targets) if only is None else [only]) if leaf else []:
                weight = rng.random() / count if positive else rng.standard_normal()
                put(f"{prefix}_treeids", tree)
                put(f"{prefix}_nodeids", n)
                put("class_ids" if prefix == "class" else "target_ids", target)
                put(f"{prefix}_weights", float(np.float32(weight)))
    return rows


def in_double(rows: dict[str, Any], prefix: str) -> dict[str, Any]:
    rows = dict(rows)
    for name in ("nodes_values", f"{prefix}_weights"):
        rows[f"{name}_as_tensor"] = numpy_helper.from_array(np.array(rows.pop(name), np.float64))
    return rows


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("base", [None, [0.5, -0.25]])
@pytest.mark.parametrize("modes", [ALL_MODES[:1], ALL_MODES])
def test_regressors_bit_for_bit(aggregate: str, base: list[float] | None, modes: tuple[str, ...]) -> None:
    """All aggregates, branch modes, missing values and base values in f32."""
    extra = {} if base is None else {"base_values": base}
    rows = trees("target", 2, modes=modes)
    check("TreeEnsembleRegressor", [X], tolerance=0, n_targets=2, aggregate_function=aggregate, **rows, **extra)


def test_doubles_bit_for_bit() -> None:
    """Thresholds, weights and sums in f64, results in f32, over forty trees."""
    x = X.astype(np.float64)
    check("TreeEnsembleRegressor", [x], tolerance=0, n_targets=2, **in_double(trees("target", 2, 40), "target"))
    rows = in_double(trees("class", 3, 40), "class")
    check("TreeEnsembleClassifier", [x], 2, tolerance=0, classlabels_int64s=[0, 1, 2], **rows)


@pytest.mark.parametrize("post", POSTS)
@pytest.mark.parametrize(
    "classes, only, positive",
    [(3, None, False), (2, None, False), (2, 0, False), (2, 0, True), (2, 1, False), (2, 1, True), (1, 0, False)],
)
def test_classifiers(post: str, classes: int, only: int | None, positive: bool) -> None:
    """Labels and scores of many classes, of two by two scores or one, and of one."""
    rows = trees("class", classes, only=only, positive=positive)
    labels = [3, 5, 9][:classes]
    check("TreeEnsembleClassifier", [X], 2, tolerance=3e-7, classlabels_int64s=labels, post_transform=post, **rows)


@pytest.mark.parametrize("base, only", [([0.1], 0), ([0.1, 0.4], None), ([0.2], None)])
def test_classifiers_with_base_values(base: list[float], only: int | None) -> None:
    """Of two classes, in all the ways that onnxruntime reads them."""
    rows = trees("class", 2, only=only)
    check("TreeEnsembleClassifier", [X], 2, 3e-7, classlabels_int64s=[0, 1], base_values=base, **rows)


@pytest.mark.parametrize("post", ALL_POSTS)
@pytest.mark.parametrize("base", [None, [0.15], [0.15, 0.25]])
@pytest.mark.parametrize("leaves", [[{0: 0.7}, {0: 0.2}], [{1: 0.7}, {1: -0.2}], [{0: 0.7, 1: 0.1}, {0: 0.2, 1: 0.6}]])
def test_what_leaves_say_of_two_classes(post: str, base: list[float] | None, leaves: list[dict[int, float]]) -> None:
    """Weights of the first, the second or both classes, with every count of base values and every transform."""
    weights = [(leaf + 1, target, w) for leaf, row in enumerate(leaves) for target, w in row.items()]
    rows = {
        "nodes_treeids": [0] * 3,
        "nodes_nodeids": [0, 1, 2],
        "nodes_featureids": [0] * 3,
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_values": [0.0] * 3,
        "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0],
        "class_treeids": [0] * len(weights),
        "class_nodeids": [node for node, _, _ in weights],
        "class_ids": [target for _, target, _ in weights],
        "class_weights": [w for _, _, w in weights],
        "classlabels_int64s": [7, 8],
        "post_transform": post,
    }
    source = model("TreeEnsembleClassifier", [X], 2, rows | ({} if base is None else {"base_values": base}))
    peer = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, {"x0": X})
    got = run_graph(load(source), {"x0": X})
    np.testing.assert_array_equal(got["y0"], peer[0])
    set_by_peer = slice(0, 1) if post == "PROBIT" and len(base or ()) < 2 and 1 not in leaves[0] else slice(0, 2)
    np.testing.assert_allclose(got["y1"][:, set_by_peer], peer[1][:, set_by_peer], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("aggregate", ["SUM", "MIN"])
@pytest.mark.parametrize("post", ["NONE", "PROBIT"])
def test_targets_that_a_row_has_no_weight_for(aggregate: str, post: str) -> None:
    """They are 0 whatever their base value; in classifiers they are not chosen."""
    rows = trees("target", 3, count=1, positive=True)
    some = [n for n in range(len(rows["target_ids"])) if n % 4 != 0]
    for name in ("target_ids", "target_nodeids", "target_treeids", "target_weights"):
        rows[name] = [rows[name][n] for n in some]
    extra = {"aggregate_function": aggregate, "post_transform": post, "base_values": [0.1, 0.2, 0.3]}
    check("TreeEnsembleRegressor", [X], n_targets=3, **rows, **extra)
    rows = trees("class", 3, count=1)
    rows["class_ids"] = [2 if n % 2 else 1 for n in rows["class_ids"]]
    rows["class_weights"] = [-abs(w) for w in rows["class_weights"]]
    check("TreeEnsembleClassifier", [X], 2, classlabels_int64s=[5, 6, 7], **rows)


@pytest.mark.parametrize("post", ALL_POSTS)
def test_one_score_knows_only_probit(post: str) -> None:
    """The other transforms leave it alone; a support vector regressor has none at all."""
    rows = trees("target", 1, positive=True)
    check("TreeEnsembleRegressor", [X], n_targets=1, post_transform=post, **rows)
    check("LinearRegressor", [f32(4, 5)], coefficients=floats(5), intercepts=[0.1], post_transform=post)
    check("LinearClassifier", [f32(4, 5)], 2, coefficients=floats(5), intercepts=[0.1], post_transform=post)
    shared = {"coefficients": floats(5), "rho": [0.3], "kernel_params": [0.2, 0.1, 3.0]}
    for kernel in ("LINEAR", "RBF"):
        check("SVMRegressor", [f32(4, 5)], kernel_type=kernel, post_transform=post, **shared)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("positive", [False, True])
def test_linear_machines(classes: int, positive: bool) -> None:
    """A support vector classifier without vectors has a row of coefficients for each class."""
    rows = [abs(v) if positive else v for v in floats(5 * classes)]
    labels = list(range(3, 3 + classes))
    check(
        "SVMClassifier",
        [f32(9, 5)],
        2,
        coefficients=rows,
        rho=[0.3],
        kernel_params=[0.2, 0.1, 3.0],
        classlabels_ints=labels,
    )


def test_certain_pairs_have_probabilities() -> None:
    """The limits of 1e-7 stay where the compiler has changed the arithmetic before them."""
    made: dict[str, Any] = {
        "coefficients": [1.0, 0.0],
        "support_vectors": [1.0, 0.0],
        "vectors_per_class": [1, 1],
        "rho": [0.0],
        "kernel_params": [1.0, 0.0, 3.0],
        "classlabels_ints": [0, 1],
        "prob_a": [-1.0],
        "prob_b": [0.0],
    }
    x = np.linspace(-30, 30, 25, dtype=np.float32)[:, None]
    source = model("SVMClassifier", [x], 2, made)
    peer = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, {"x0": x})
    got = rlx.compile(load(source), device="cpu", threads=1).run({"x0": x})
    np.testing.assert_allclose(got[1], peer[1], rtol=1e-5, atol=1e-6)


def test_base_values_of_another_count_are_refused() -> None:
    """They were once dropped without a word."""
    for op, prefix, extra in (
        ("TreeEnsembleRegressor", "target", {"n_targets": 3}),
        ("TreeEnsembleClassifier", "class", {"classlabels_int64s": [0, 1, 2]}),
    ):
        outputs = 1 if prefix == "target" else 2
        with pytest.raises(UnsupportedOp, match=r"2 base_values; expected none or 3"):
            load(model(op, [X], outputs, trees(prefix, 3) | extra | {"base_values": [0.1, 0.2]}))


def test_trees_that_lead_nowhere_are_refused() -> None:
    """A missing node and a tree that leads back to itself."""
    rows = trees("target", 1)
    for broken in ({"nodes_truenodeids": [99] * 60}, {"nodes_truenodeids": [0] * 60}):
        with pytest.raises(UnsupportedOp, match=r"does not exist|back to itself"):
            load(model("TreeEnsembleRegressor", [X], 1, {"n_targets": 1} | rows | broken))


def test_labels_that_are_strings(tmp_path: Path) -> None:
    """They are those of onnxruntime; with one label there is nothing to choose from, which is told."""
    rows = trees("class", 3) | {"classlabels_strings": ["a", "b", "c"]}
    whole = onnx.load_from_string(model("TreeEnsembleClassifier", [X], 2, rows))
    path = tmp_path / "m.onnx"
    path.write_bytes(whole.SerializeToString())
    assert not preflight(path).notes
    names, scores = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x0": X})
    for got in (run_graph(load(path), {"x0": X}), rlx.load(path, device="cpu", threads=1)(X)):
        assert got["y0"].tolist() == list(names)
        np.testing.assert_allclose(got["y1"], scores, rtol=1e-5)
    one = {"coefficients": floats(5), "intercepts": floats(1), "classlabels_strings": ["a"]}
    with pytest.raises(UnsupportedOp, match="labels that are strings, and two to choose from"):
        load(model("LinearClassifier", [f32(4, 5)], 2, one))


TEXTS = np.array(["cat", "dog", "cat", "eel"], object)
LOOKED_UP = {  # op, opset of ai.onnx.ml, inputs, attributes, and the strings that may come
    "labels by place": ("ArrayFeatureExtractor", 3, [TEXTS, np.array([3, 0, 2, 1])], {}, ["cat", "dog", "eel"]),
    "labels by a row": ("ArrayFeatureExtractor", 3, [TEXTS[None], np.array([1])], {}, ["cat", "dog", "eel"]),
    "encoded": (
        "LabelEncoder", 2, [np.array([4, 2, 9, 3])],
        {"keys_int64s": [2, 3, 4], "values_strings": ["b", "a", "b"], "default_string": "?"}, ["b", "a", "?"],
    ),
    "encoded, with a default that is a value": (
        "LabelEncoder", 2, [np.array([[4.0, 2.5]], np.float32)],
        {"keys_floats": [2.0, 4.0], "values_strings": ["b", "a"], "default_string": "a"}, ["b", "a"],
    ),
    "encoded by tensors": (
        "LabelEncoder", 4, [np.array([4, 2, 9])],
        {
            "keys_tensor": helper.make_tensor("k", 7, [2], [4, 2]),
            "values_tensor": helper.make_tensor("v", 8, [2], [b"x", b"y"]),
            "default_tensor": helper.make_tensor("d", 8, [1], [b"z"]),
        }, ["x", "y", "z"],
    ),
    "classes": (
        "LabelEncoder", 1, [np.array([1, 0, 2, 3, -1])],
        {"classes_strings": ["b", "a", "b"], "default_string": "?"}, ["b", "a", "?"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKED_UP)
def test_strings_that_a_model_looks_up(name: str) -> None:
    """They are those of onnxruntime."""
    op, opset, inputs, attributes, order = LOOKED_UP[name]
    whole = onnx.load_from_string(model(op, [a for a in inputs if a.dtype != object], 1, attributes))
    whole.opset_import[1].version = opset
    if inputs[0].dtype == object:
        whole.graph.initializer.append(numpy_helper.from_array(inputs[0], "units"))
        whole.graph.node[0].input.insert(0, "units")
    source = whole.SerializeToString()
    feed = {"x0": inputs[-1]}
    peer = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, feed)[0]
    (got,) = rlx.compile(load(source), device="cpu", threads=1).run(feed)
    assert got.tolist() == peer.tolist()
    assert set(got.reshape(-1)) <= set(order)


@pytest.mark.parametrize("form", ["attribute", "tensor", "looked up"])
def test_strings_of_other_encodings_stay_different(form: str) -> None:
    """Labels in Latin-1, whose last letters are no UTF-8."""
    labels = [b"caf\xe9", b"caf\xe8", b"tea"]
    values = {"values_strings": labels}
    if form == "tensor":
        values = {"values_tensor": helper.make_tensor("v", TensorProto.STRING, [3], labels)}
    if form == "looked up":
        whole = onnx.load_from_string(model("ArrayFeatureExtractor", [np.array([1, 2, 0])], 1, {}))
        whole.graph.initializer.append(helper.make_tensor("units", TensorProto.STRING, [3], labels))
        whole.graph.node[0].input.insert(0, "units")
    else:
        keys = helper.make_tensor("k", TensorProto.INT64, [3], [0, 1, 2])
        given = {"keys_tensor": keys} if form == "tensor" else {"keys_int64s": [0, 1, 2]}
        whole = onnx.load_from_string(model("LabelEncoder", [np.array([1, 2, 0])], 1, given | values))
        whole.opset_import[1].version = 4
    (got,) = rlx.compile(load(whole.SerializeToString()), device="cpu").run({"x0": np.array([1, 2, 0])})
    assert got.reshape(-1).tolist() == ["caf\\xe8", "tea", "caf\\xe9"]


@pytest.mark.parametrize(
    "attributes",
    [
        {"keys_int64s": [1], "values_strings": ["a"], "default_tensor": helper.make_tensor("d", 1, [1], [0.5])},
        {"keys_strings": ["a"], "values_int64s": [1]},
        {"classes_strings": ["a"], "default_int64": 3},
    ],
)
def test_encoders_of_strings_that_make_no_sense(attributes: dict[str, Any]) -> None:
    """A default of another type, strings as keys of numbers, and classes of numbers that are no integers."""
    with pytest.raises(UnsupportedOp, match=r"default_tensor must|its keys are of string|1 classes for f32"):
        load(model("LabelEncoder", [f32(3)], 1, attributes))


@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("aggregate", ["SUM", "MAX"])
def test_several_weights_of_a_leaf_for_a_target(targets: int, aggregate: str) -> None:
    """They count together, but with one target the first alone, as onnxruntime has it."""
    rows = trees("target", targets)
    n = len(rows["target_ids"])
    more = {
        key: [*rows[key], *rows[key][:: 2 if key != "target_weights" else 1]][: n + n // 2]
        for key in ("target_ids", "target_treeids", "target_nodeids", "target_weights")
    }
    check(
        "TreeEnsembleRegressor", [X], 1, tolerance=1e-6, n_targets=targets, aggregate_function=aggregate, **rows | more
    )


@pytest.mark.parametrize("post", POSTS)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_linear_classifiers(post: str, rows: int) -> None:
    """One score for two classes, and a score each."""
    labels = [2, 3, 4][: max(rows, 2)]
    extra = {"coefficients": floats(5 * rows), "intercepts": floats(rows), "classlabels_ints": labels}
    check("LinearClassifier", [f32(4, 5)], 2, post_transform=post, **extra)


@pytest.mark.parametrize("kernel", ["LINEAR", "RBF", "POLY", "SIGMOID"])
def test_support_vector_machines(kernel: str) -> None:
    """Regression, and one-against-one classification of two and three classes."""
    shared = {"kernel_type": kernel, "kernel_params": [0.2, 0.1, 3.0]}
    vectors = {"support_vectors": floats(15), "n_supports": 3, "coefficients": floats(3), "rho": [0.3]}
    check("SVMRegressor", [f32(4, 5)], **vectors, **shared)
    for classes in (2, 3):
        made = {
            "coefficients": floats(2 * classes * (classes - 1)),
            "support_vectors": floats(10 * classes),
            "vectors_per_class": [2] * classes,
            "rho": floats(classes * (classes - 1) // 2),
            "classlabels_ints": list(range(classes)),
        }
        check("SVMClassifier", [f32(6, 5)], 2, **made, **shared)


WITH_NAN = f32(4, 3)
WITH_NAN[0, 1] = np.nan
SIMPLE = {
    "linear": ("LinearRegressor", [f32(4, 5)], {"coefficients": floats(10), "intercepts": [0.1, 0.2], "targets": 2}),
    "scaler": ("Scaler", [f32(4, 5)], {"offset": floats(5), "scale": floats(5)}),
    "scaler_ints": ("Scaler", [RNG.integers(0, 5, (4, 5))], {"offset": [0.5], "scale": [2.0]}),
    "norm_max": ("Normalizer", [f32(4, 5)], {"norm": "MAX"}),
    "norm_l1": ("Normalizer", [f32(4, 5)], {"norm": "L1"}),
    "norm_l2": ("Normalizer", [f32(4, 5)], {"norm": "L2"}),
    "binarizer": ("Binarizer", [f32(4, 5)], {"threshold": 0.3}),
    "imputer": (
        "Imputer",
        [WITH_NAN],
        {"imputed_value_floats": [1.0, 2.0, 3.0], "replaced_value_float": float("nan")},
    ),
    "imputer_ints": ("Imputer", [RNG.integers(0, 3, (4, 3))], {"imputed_value_int64s": [9], "replaced_value_int64": 1}),
    "one_hot": ("OneHotEncoder", [RNG.integers(0, 4, (4, 3))], {"cats_int64s": [0, 2, 3], "zeros": 1}),
    "labels": (
        "LabelEncoder",
        [RNG.integers(0, 4, (6,))],
        {"keys_int64s": [0, 2, 3], "values_floats": [0.1, 0.2, 0.3], "default_float": -9.0},
    ),
    "labels of many numbers": (
        "LabelEncoder",
        [np.array([[-9, 0, 90, 91, 2**63 - 1], [-(2**63), -8, 41, 2**32, -(2**32)]])],
        {"keys_int64s": [*range(-8, 91)], "values_int64s": [*range(99)], "default_int64": -3},
    ),
    "labels of numbers far apart": (
        "LabelEncoder",
        [np.array([5, 0, -(2**63), 2**63 - 1, 700_000])],
        {
            "keys_int64s": [-(2**63), 2**63 - 1, *range(0, 1_000_000, 10_000)],
            "values_int64s": [*range(102)],
            "default_int64": -3,
        },
    ),
    "labels of one number and its neighbours": (
        "LabelEncoder",
        [np.array([2**63 - 1, 2**63 - 2, -(2**63), 0])],
        {"keys_int64s": [2**63 - 1, 2**63 - 3], "values_floats": [0.5, 1.5], "default_float": -9.0},
    ),
    "extract": ("ArrayFeatureExtractor", [f32(4, 5), np.array([1, 3])], {}),
    "extract a column of indices": ("ArrayFeatureExtractor", [f32(1, 5), np.array([[1], [3], [0]])], {}),
    "extract by a matrix of indices": ("ArrayFeatureExtractor", [f32(5), np.array([[1, 2], [3, 3], [0, 4]])], {}),
    "vectorize to fewer and more": ("FeatureVectorizer", [f32(4, 2), f32(4, 3)], {"inputdimensions": [1, 5]}),
    "vectorize ints": ("FeatureVectorizer", [RNG.integers(0, 9, (4, 2))], {"inputdimensions": [2]}),
    "vectorize rows": ("FeatureVectorizer", [f32(2), f32(3)], {"inputdimensions": [2, 3]}),
    "vectorize": ("FeatureVectorizer", [f32(4, 2), f32(4, 3)], {"inputdimensions": [2, 3]}),
}


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_support_vector_machines_with_probabilities(classes: int) -> None:
    """Those of several classes come from those of the pairs, as libsvm couples them; labels go by the votes."""
    pairs, each = classes * (classes - 1) // 2, 3
    check(
        "SVMClassifier",
        [f32(40, 5)],
        2,
        tolerance=1e-4,
        kernel_type="RBF",
        kernel_params=[0.3, 0.0, 3.0],
        support_vectors=floats(5 * each * classes),
        coefficients=[2 * v for v in floats(each * classes * (classes - 1))],
        rho=floats(pairs),
        prob_a=[-1 - abs(v) for v in floats(pairs)],
        prob_b=floats(pairs),
        vectors_per_class=[each] * classes,
        classlabels_ints=list(range(classes)),
        post_transform="NONE",
    )


@pytest.mark.parametrize("name", SIMPLE)
def test_scalers_and_encoders(name: str) -> None:
    """One op each, at typical attributes."""
    op, inputs, attributes = SIMPLE[name]
    check(op, list(inputs), **attributes)


def test_zip_map_gives_its_tensor_and_says_so() -> None:
    """The probabilities keep their columns; the note names the classes."""
    source = model("ZipMap", [f32(4, 2)], 1, {"classlabels_int64s": [3, 7]})
    graph = load(source)
    assert str(graph.outputs[0].value.type) == "f32[4, 2]"
    (note,) = preflight(source).notes
    assert "(3, 7)" in note
