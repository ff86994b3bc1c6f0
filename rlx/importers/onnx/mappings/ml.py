"""ai.onnx.ml other than trees: linear models, support vector machines, scalers, encoders."""

from __future__ import annotations

import numpy as np

from rlx.errors import ShapeError
from rlx.importers.onnx.mapping import ML, Mapped, NodeContext, UnsupportedError, element_dtype, onnx_op
from rlx.importers.onnx.ml_scores import Labels, label_by, labels_of, second_class, transformed
from rlx.importers.onnx.svm_coupling import coupled
from rlx.ir.dtype import DTYPES, DType, dtype_of
from rlx.ir.graph import Array, Value
from rlx.ir.shape import numel
from rlx.ops.contract import MatMul
from rlx.ops.elementwise import (
    Abs,
    Add,
    And,
    Div,
    Equal,
    Exp,
    Greater,
    GreaterEqual,
    IsNan,
    Less,
    Maximum,
    Mul,
    Or,
    Pow,
    Sigmoid,
    Sqrt,
    Sub,
    Tanh,
    Where,
)
from rlx.ops.index import Gather, SearchSorted
from rlx.ops.layout import Concat, Pad, Slice
from rlx.ops.reduction import ArgMax, ReduceMax, ReduceSum
from rlx.ops.strings import FindKeys

F32, I64, STRING = DTYPES["f32"], DTYPES["i64"], DTYPES["string"]


def _matrix(ctx: NodeContext) -> Value:
    """Input 0 as f32 [N, features]."""
    x = ctx.value()
    x = ctx.reshape(x, 1, x.shape[0]) if x.rank == 1 else x
    return ctx.cast(x, F32)


def _floating(ctx: NodeContext) -> Value:
    return ctx.cast(ctx.value(), F32)


# ---- linear models


def _linear(ctx: NodeContext, rows: int) -> Value:
    """x W^T + intercepts with W [rows, features] from `coefficients`."""
    x, coefficients = _matrix(ctx), np.array(ctx.floats("coefficients"), np.float32)
    if rows < 1 or coefficients.size % rows:
        raise ShapeError(f"{ctx.node.op_type}: {coefficients.size} coefficients for {rows} targets")
    scores = ctx.add(MatMul(), x, ctx.graph.constant(np.ascontiguousarray(coefficients.reshape(rows, -1).T)))
    intercepts = ctx.floats("intercepts", ())
    return ctx.add(Add(), scores, ctx.constant(intercepts, F32)) if intercepts else scores


@onnx_op("LinearRegressor", domain=ML)
def _linear_regressor(ctx: NodeContext) -> Mapped:
    scores = _linear(ctx, ctx.integer("targets", 1))
    return transformed(ctx, scores, ctx.text("post_transform", "NONE"))


@onnx_op("LinearClassifier", domain=ML)
def _linear_classifier(ctx: NodeContext) -> tuple[Mapped, ...]:
    ctx.ignore("multi_class")
    labels, post = labels_of(ctx, "classlabels_strings", "classlabels_ints"), ctx.text("post_transform", "NONE")
    intercepts = ctx.floats("intercepts", ())
    rows = len(intercepts) or len(labels) or 1
    scores = _linear(ctx, rows)
    if rows > 1:
        best = ctx.add(ArgMax(1, False), scores)
        return label_by(ctx, best, labels or range(rows)), transformed(ctx, scores, post)
    above = ctx.reshape(ctx.add(Greater(), scores, ctx.constant(0, F32)), scores.shape[0])
    if len(labels) != 2:
        if ctx.given("classlabels_strings"):
            ctx.fail(f"it has {len(labels)} labels that are strings, and two to choose from")
        return label_by(ctx, above, (0, 1)), transformed(ctx, scores, post)
    return label_by(ctx, above, labels), second_class(ctx, scores, post, one_minus=True)


# ---- support vector machines


def _kernel(ctx: NodeContext, x: Value, vectors: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> Value:
    """k(x, v) for each row of x and each vector, [N, vectors]."""
    gamma, coef0, degree = (*ctx.floats("kernel_params", (0.0, 0.0, 0.0)), 0.0, 0.0, 0.0)[:3]
    kind = ctx.text("kernel_type", "LINEAR")

    def c(value: float) -> Value:
        return ctx.constant(value, F32)

    if kind == "RBF":
        wide = ctx.reshape(x, x.shape[0], 1, x.shape[1])
        apart = ctx.add(Sub(), wide, ctx.graph.constant(vectors[None]))
        distance = ctx.add(ReduceSum((2,), False), ctx.add(Mul(), apart, apart))
        return ctx.add(Exp(), ctx.add(Mul(), distance, c(-gamma)))
    product = ctx.add(MatMul(), x, ctx.graph.constant(np.ascontiguousarray(vectors.T)))
    if kind == "LINEAR":
        return product
    moved = ctx.add(Add(), ctx.add(Mul(), product, c(gamma)), c(coef0))
    if kind == "POLY":
        return ctx.add(Pow(), moved, c(degree))
    if kind == "SIGMOID":
        return ctx.add(Tanh(), moved)
    raise UnsupportedError(f"kernel_type={kind!r} is not known")


@onnx_op("SVMRegressor", domain=ML)
def _svm_regressor(ctx: NodeContext) -> Mapped:
    x = _matrix(ctx)
    count = ctx.integer("n_supports", 0)
    coefficients = np.array(ctx.floats("coefficients"), np.float32)
    if count:
        vectors = np.array(ctx.floats("support_vectors"), np.float32).reshape(count, -1)
        terms = ctx.add(MatMul(), _kernel(ctx, x, vectors), ctx.graph.constant(coefficients.reshape(count, 1)))
    else:
        ctx.ignore("support_vectors", "kernel_type", "kernel_params")  # a linear model
        terms = ctx.add(MatMul(), x, ctx.graph.constant(coefficients.reshape(-1, 1)))
    scores = ctx.add(Add(), terms, ctx.constant(ctx.floats("rho")[0], F32))
    if ctx.flag("one_class"):
        one, other = ctx.constant(1, F32), ctx.constant(-1, F32)
        scores = ctx.add(Where(), ctx.add(Greater(), scores, ctx.constant(0, F32)), one, other)
    ctx.ignore("post_transform")  # as in onnxruntime
    return scores


MOST_COUPLED = 64  # classes whose probabilities are computed from those of the pairs


@onnx_op("SVMClassifier", domain=ML)
def _svm_classifier(ctx: NodeContext) -> tuple[Mapped, ...]:
    """One-against-one votes of libsvm, with or without probabilities."""
    labels, post = labels_of(ctx, "classlabels_strings", "classlabels_ints"), ctx.text("post_transform", "NONE")
    x, per_class = _matrix(ctx), ctx.ints("vectors_per_class", ())
    prob_a, prob_b = ctx.floats("prob_a", ()), ctx.floats("prob_b", ())
    classes, count = len(per_class), sum(per_class)
    if not count:
        return _linear_machine(ctx, x, labels, post)
    if classes != len(labels):
        ctx.fail(f"it has vectors of {classes} classes and {len(labels)} labels")
    vectors = np.array(ctx.floats("support_vectors"), np.float32).reshape(count, -1)
    coefficients = np.array(ctx.floats("coefficients"), np.float32).reshape(classes - 1, count)
    starts = np.concatenate([[0], np.cumsum(per_class)])
    pairs = [(i, j) for i in range(classes) for j in range(i + 1, classes)]
    weights = np.zeros((count, len(pairs)), np.float32)
    votes = np.zeros((2, len(pairs), classes), np.float32)
    for n, (i, j) in enumerate(pairs):
        weights[starts[i] : starts[i + 1], n] = coefficients[j - 1, starts[i] : starts[i + 1]]
        weights[starts[j] : starts[j + 1], n] = coefficients[i, starts[j] : starts[j + 1]]
        votes[0, n, i] = votes[1, n, j] = 1
    products = ctx.add(MatMul(), _kernel(ctx, x, vectors), ctx.graph.constant(weights))
    sides = ctx.add(Add(), products, ctx.constant(ctx.floats("rho"), F32))
    first = ctx.cast(ctx.add(Greater(), sides, ctx.constant(0, F32)), F32)
    second = ctx.add(Sub(), ctx.constant(1, F32), first)
    counts = [ctx.add(MatMul(), side, ctx.graph.constant(votes[k])) for k, side in enumerate((first, second))]
    best = ctx.add(ArgMax(1, False), ctx.add(Add(), *counts))
    if not prob_a:
        if classes > 2:
            return label_by(ctx, best, labels), transformed(ctx, sides, post)
        return label_by(ctx, best, labels), second_class(ctx, sides, post, one_minus=post != "NONE")
    scaled = ctx.add(Add(), ctx.add(Mul(), sides, ctx.constant(prob_a, F32)), ctx.constant(prob_b, F32))
    least, most = (ctx.constant(v, F32) for v in (1e-7, 1 - 1e-7))
    p = ctx.add(Sub(), ctx.constant(1, F32), ctx.add(Sigmoid(), scaled))
    p = ctx.add(Where(), ctx.add(Greater(), least, p), least, p)
    p = ctx.add(Where(), ctx.add(Greater(), p, most), most, p)
    if classes > MOST_COUPLED:
        ctx.fail(f"probabilities of {classes} classes are more than the {MOST_COUPLED} supported")
    return label_by(ctx, best, labels), transformed(ctx, coupled(ctx.graph, p, classes, ctx.label), post)


def _linear_machine(ctx: NodeContext, x: Value, labels: Labels, post: str) -> tuple[Mapped, ...]:
    """A score for each class, without support vectors; of two, the second where onnxruntime chooses it."""
    ctx.ignore("support_vectors", "kernel_type", "kernel_params")
    classes, weights = len(labels), np.array(ctx.floats("coefficients"), np.float32)
    if not classes or weights.size % classes:
        ctx.fail(f"it has {weights.size} coefficients for {classes} classes")
    rows = ctx.graph.constant(np.ascontiguousarray(weights.reshape(classes, -1).T))
    scores = ctx.add(Add(), ctx.add(MatMul(), x, rows), ctx.constant(ctx.floats("rho")[0], F32))
    best = ctx.add(ArgMax(1, False), scores)
    if classes == 2 and not ctx.floats("prob_a", ()):
        most, limit = ctx.add(ReduceMax((1,), False), scores), ctx.constant(0.5 if (weights >= 0).all() else 0, F32)
        above = ctx.add(GreaterEqual() if (weights >= 0).all() else Greater(), most, limit)
        best = ctx.add(Where(), above, ctx.constant(1, I64), best)
    return label_by(ctx, best, labels), transformed(ctx, scores, post)


# ---- scaling and thresholds


@onnx_op("Scaler", domain=ML)
def _scaler(ctx: NodeContext) -> Mapped:
    x = _floating(ctx)
    offset, scale = (ctx.constant(ctx.floats(n, (d,)), F32) for n, d in (("offset", 0.0), ("scale", 1.0)))
    return ctx.add(Mul(), ctx.add(Sub(), x, offset), scale)


@onnx_op("Normalizer", domain=ML)
def _normalizer(ctx: NodeContext) -> Mapped:
    x, norm = _floating(ctx), ctx.text("norm", "MAX")
    axis = (x.rank - 1,)
    if norm == "MAX":
        size = ctx.add(ReduceMax(axis, True), x)
    elif norm == "L1":
        size = ctx.add(ReduceSum(axis, True), ctx.add(Abs(), x))
    elif norm == "L2":
        size = ctx.add(Sqrt(), ctx.add(ReduceSum(axis, True), ctx.add(Mul(), x, x)))
    else:
        ctx.fail(f"norm={norm!r} is not known")
    zero = ctx.add(Equal(), size, ctx.constant(0, F32))
    return ctx.add(Div(), x, ctx.add(Where(), zero, ctx.constant(1, F32), size))


@onnx_op("Binarizer", domain=ML)
def _binarizer(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    return ctx.cast(ctx.add(Greater(), x, ctx.constant(ctx.real("threshold", 0.0), x.dtype)), x.dtype)


@onnx_op("Imputer", domain=ML)
def _imputer(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    kind = "float" if x.dtype.is_float else "int64"
    read = ctx.floats if x.dtype.is_float else ctx.ints
    values = read(f"imputed_value_{kind}s", ())
    replaced = ctx.real("replaced_value_float", 0.0) if x.dtype.is_float else ctx.integer("replaced_value_int64", 0)
    if not values:
        ctx.fail(f"imputed_value_{kind}s is missing")
    if replaced != replaced:
        hit = ctx.add(IsNan(), x)
    else:
        hit = ctx.add(Equal(), x, ctx.constant(replaced, x.dtype))
    return ctx.add(Where(), hit, ctx.constant(values if len(values) > 1 else values[0], x.dtype), x)


# ---- encoders


FEW_KEYS = 64  # that are compared one by one
SPARSE, SMALL_TABLE = 8, 1 << 16  # of a table of all integers between keys: times their number, or so many


@onnx_op("OneHotEncoder", domain=ML)
def _one_hot_encoder(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    ctx.ignore("zeros")
    if x.dtype is STRING:
        categories = ctx.constant(ctx.texts("cats_strings"), STRING)
    else:
        x, categories = ctx.cast(x, I64), ctx.constant(ctx.ints("cats_int64s"), I64)
    return ctx.cast(ctx.add(Equal(), ctx.reshape(x, *x.shape, 1), categories), F32)


@onnx_op("LabelEncoder", domain=ML)
def _label_encoder(ctx: NodeContext) -> Mapped:
    """Each element by the first key that equals it."""
    x = ctx.value()
    if ctx.given("classes_strings"):
        return _class_of(ctx, x)
    keys, values = _labels(ctx, "keys"), _labels(ctx, "values")
    key_type = dtype_of(keys.dtype)
    if not keys.size or keys.size != values.size:
        ctx.fail(f"it has {keys.size} keys and {values.size} values")
    if (key_type is STRING) != (x.dtype is STRING):
        ctx.fail(f"its keys are of {key_type}, its input is {x.type}")
    return _mapped(ctx, ctx.cast(x, key_type), keys, values, _default(ctx, dtype_of(values.dtype)))


def _mapped(ctx: NodeContext, x: Value, keys: Array, values: Array, default: Value) -> Value:
    """For each element of x the value of the first key that equals it, or the default; NaN equals NaN.

    Integers that lie close together are places of a table, and few keys are compared one by one, both by kernels.
    """
    table = ctx.graph.constant(keys)
    if _is_dense(keys) or keys.size > FEW_KEYS:
        found = place_of(ctx, x, keys)
        known = ctx.add(Less(), found, ctx.constant(keys.size, I64))
        at = ctx.add(Where(), known, found, ctx.constant(0, I64))
    else:
        wide = ctx.reshape(x, *x.shape, 1)
        hit = ctx.add(Equal(), wide, table)
        if x.dtype.is_float and np.isnan(keys).any():
            hit = ctx.add(Or(), hit, ctx.add(And(), ctx.add(IsNan(), wide), ctx.add(IsNan(), table)))
        hits = ctx.cast(hit, DTYPES["i32"])
        at = ctx.add(ArgMax(-1, False), hits)
        known = ctx.cast(ctx.add(ReduceMax((x.rank,), False), hits), DTYPES["bool"])
    return ctx.add(Where(), known, ctx.add(Gather(0), ctx.graph.constant(values), at), default)


def _is_dense(keys: Array) -> bool:
    """Whether a table from the least to the largest key is not much larger than they are."""
    return keys.dtype.kind == "i" and int(keys.max()) - int(keys.min()) < max(SPARSE * keys.size, SMALL_TABLE)


def place_of(ctx: NodeContext, x: Value, keys: Array) -> Value:
    """The number of the first key that each element equals, or the number of keys where none does.

    By a table of what lies between the keys, or by halving; only strings, and NaN as a key, are looked up by the host.
    """
    if _is_dense(keys):
        return _by_table(ctx, x, keys)
    if keys.dtype.kind not in "iuf" or np.isnan(keys).any():
        return ctx.add(FindKeys(), x, ctx.graph.constant(keys))
    ordered, places = np.unique(keys, return_index=True)
    flat = ctx.reshape(x, 1, numel(x.shape))
    below = ctx.add(SearchSorted(), ctx.constant(ordered[None], x.dtype), flat)
    at = ctx.add(Maximum(), ctx.reshape(ctx.add(Sub(), below, ctx.constant(1, I64)), *x.shape), ctx.constant(0, I64))
    same = ctx.add(Equal(), ctx.add(Gather(0), ctx.graph.constant(ordered), at), x)
    found = ctx.add(Gather(0), ctx.graph.constant(places.astype(np.int64)), at)
    return ctx.add(Where(), same, found, ctx.constant(keys.size, I64))


def _by_table(ctx: NodeContext, x: Value, keys: Array) -> Value:
    low, count = int(keys.min()), int(keys.max()) - int(keys.min()) + 1
    places = np.full(count, keys.size, np.int64)
    places[keys[::-1].astype(np.int64) - low] = np.arange(keys.size)[::-1]
    at = ctx.add(Sub(), ctx.cast(x, I64), ctx.constant(low, I64))  # wraps for numbers that are far away
    inside = ctx.add(Less(), ctx.cast(at, DTYPES["u64"]), ctx.constant(count, DTYPES["u64"]))
    found = ctx.add(Gather(0), ctx.graph.constant(places), ctx.add(Where(), inside, at, ctx.constant(0, I64)))
    return ctx.add(Where(), inside, found, ctx.constant(keys.size, I64))


def _class_of(ctx: NodeContext, x: Value) -> Value:
    """The form of version 1: number n gives class n, and a class its number; others the default."""
    classes = np.array(ctx.texts("classes_strings"), STRING.numpy)
    default_text, default_number = ctx.text("default_string", "_Unused"), ctx.integer("default_int64", -1)
    if not classes.size or not (x.dtype is STRING or x.dtype.is_integer):
        ctx.fail(f"it has {classes.size} classes for {x.type}; expected some, for strings or integers")
    numbers = np.arange(classes.size)
    if x.dtype is STRING:
        return _mapped(ctx, x, classes, numbers, ctx.constant(default_number, I64))
    return _mapped(ctx, ctx.cast(x, I64), numbers, classes, ctx.constant(default_text, STRING))


@onnx_op("CategoryMapper", domain=ML)
def _category_mapper(ctx: NodeContext) -> Mapped:
    x, texts = ctx.value(), np.array(ctx.texts("cats_strings"), STRING.numpy)
    numbers = np.array(ctx.ints("cats_int64s"), np.int64)
    default_text, default_number = ctx.text("default_string", "_Unused"), ctx.integer("default_int64", -1)
    if not texts.size or texts.size != numbers.size:
        ctx.fail(f"it has {texts.size} strings and {numbers.size} numbers")
    if x.dtype is STRING:
        return _mapped(ctx, x, texts, numbers, ctx.constant(default_number, I64))
    return _mapped(ctx, ctx.cast(x, I64), numbers, texts, ctx.constant(default_text, STRING))


def _labels(ctx: NodeContext, what: str) -> Array:
    """Keys or values."""
    if ctx.given(f"{what}_tensor"):
        ref = ctx.tensor(f"{what}_tensor")
        assert ref is not None
        return ref.array().reshape(-1)
    if ctx.given(f"{what}_strings"):
        return np.array(ctx.texts(f"{what}_strings"), STRING.numpy)
    if ctx.given(f"{what}_int64s"):
        return np.array(ctx.ints(f"{what}_int64s"), np.int64)
    return np.array(ctx.floats(f"{what}_floats", ()), np.float32)


def _default(ctx: NodeContext, dtype: DType) -> Value:
    """The value of elements that no key equals; defaults for other types of values say nothing."""
    ctx.ignore("default_string", "default_int64", "default_float")
    if ctx.given("default_tensor"):
        ref = ctx.tensor("default_tensor")
        assert ref is not None
        if ref.size != 1 or element_dtype(ref.elem_type) is not dtype:
            ctx.fail(f"default_tensor must be one element of {dtype}, as the values are")
        return ctx.constant(ref.array().reshape(-1)[0], dtype)
    if dtype is STRING:
        return ctx.constant(ctx.text("default_string", "_Unused"), STRING)
    if dtype.is_float:
        return ctx.constant(ctx.real("default_float", -0.0), dtype)
    return ctx.constant(ctx.integer("default_int64", -1), dtype)


# ---- features


@onnx_op("ArrayFeatureExtractor", domain=ML)
def _extract(ctx: NodeContext) -> Mapped:
    x, places = ctx.value(0), ctx.value(1)
    count = numel(places.shape)
    y = ctx.add(Gather(x.rank - 1), x, ctx.reshape(places, count))
    return ctx.reshape(y, 1, count) if x.rank == 1 else y


@onnx_op("FeatureVectorizer", domain=ML)
def _vectorize(ctx: NodeContext) -> Mapped:
    """The inputs beside each other, each cut or filled up with zeros to the width that it is said to have."""
    parts = []
    for i, size in enumerate(ctx.ints("inputdimensions")):
        x = ctx.cast(ctx.value(i), F32)
        x = ctx.reshape(x, 1, x.shape[0]) if x.rank == 1 else x
        width = x.shape[1]
        if not isinstance(width, int):
            ctx.fail(f"input {i} has {width} features; expected {size}")
        if width < size:
            x = ctx.add(Pad((0, 0, 0, size - width)), x)
        parts.append(x if width <= size else ctx.add(Slice((0, 0), (x.shape[0], size), (1, 1)), x))
    return parts[0] if len(parts) == 1 else ctx.add(Concat(1), *parts)


@onnx_op("ZipMap", domain=ML)
def _zip_map(ctx: NodeContext) -> Mapped:
    """The probabilities as the tensor they are: a column for each label, in the order of the labels."""
    names = ctx.texts("classlabels_strings", ()) or ctx.ints("classlabels_int64s", ())
    shown = ", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")
    ctx.note(f"gives its input, a tensor with a column for each class ({shown}), not a list of dictionaries")
    return ctx.value()
