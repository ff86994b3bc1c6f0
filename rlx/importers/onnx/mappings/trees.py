"""Tree ensembles of ai.onnx.ml."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import ModelFormatError
from rlx.importers.onnx.mapping import ML, Mapped, NodeContext, onnx_op
from rlx.importers.onnx.ml_scores import Labels, label_by, labels_of, second_class, transformed
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Array, Value
from rlx.ops.elementwise import Add, Greater, Neg, Where
from rlx.ops.layout import Concat, Expand, Slice
from rlx.ops.ml import MODES, TreeEnsemble
from rlx.ops.reduction import ArgMax
from rlx.records import dataclass, field, replace

F32, F64 = DTYPES["f32"], DTYPES["f64"]
_MODES = {"LEAF": 0, "BRANCH_LEQ": 1, "BRANCH_LT": 2, "BRANCH_GTE": 3, "BRANCH_GT": 4, "BRANCH_EQ": 5, "BRANCH_NEQ": 6}
MAX_DEPTH = 4096
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")


@dataclass
class _Trees:
    """The tables of `TreeEnsemble` while they are filled."""

    feature: list[int] = field(default_factory=list)
    threshold: list[float] = field(default_factory=list)
    mode: list[int] = field(default_factory=list)
    yes: list[int] = field(default_factory=list)
    no: list[int] = field(default_factory=list)
    missing: list[bool] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    weights: dict[int, list[tuple[int, float]]] = field(default_factory=dict)

    def node(self, feature: int, threshold: float, mode: int, ends: tuple[int, int], missing: bool) -> int:
        self.feature.append(feature)
        self.threshold.append(threshold)
        self.mode.append(mode)
        self.yes.append(ends[0])
        self.no.append(ends[1])
        self.missing.append(missing)
        return len(self.mode) - 1

    def depth(self) -> int:
        """The longest way to a leaf; `ModelFormatError` for trees that lead back to themselves or nowhere."""
        count, level, depth = len(self.mode), np.array(self.roots, np.int64), 0
        mode, yes, no = (np.array(a, np.int64) for a in (self.mode, self.yes, self.no))
        while level.size:
            if int(level.min()) < 0 or int(level.max()) >= count:
                raise ModelFormatError("a tree leads to a node that does not exist")
            inner = np.unique(level[mode[level] != 0])
            level = np.concatenate([yes[inner], no[inner]])
            depth += bool(inner.size)
            if depth > min(count, MAX_DEPTH):
                raise ModelFormatError(f"a tree is deeper than {MAX_DEPTH} or leads back to itself")
        return depth

    def scores(self, ctx: NodeContext, x: Value, targets: int, aggregate: str) -> Value:
        """Adds the op."""
        try:
            depth = self.depth()
        except ModelFormatError as error:
            ctx.fail(str(error))
        first = np.zeros(len(self.mode) + 1, np.int32)
        pairs: list[tuple[int, float]] = []
        for n in range(len(self.mode)):
            pairs += self.weights.get(n, ())
            first[n + 1] = len(pairs)
        if any(not 0 <= t < targets for t, _ in pairs):
            ctx.fail(f"a weight is for a target outside 0 to {targets - 1}")
        real = x.dtype.numpy

        def table(items: Sequence[Any] | Array, dtype: Any) -> Value:
            return ctx.graph.constant(np.array(items, dtype))

        tables = [
            table(self.feature, np.int32),
            table(self.threshold, real),
            table(self.mode, np.uint8),
            table(self.yes, np.int32),
            table(self.no, np.int32),
            table(self.missing, np.bool_),
            table(self.roots, np.int32),
            table(first, np.int32),
            table([t for t, _ in pairs], np.int32),
            table([w for _, w in pairs], real),
        ]
        return ctx.add(TreeEnsemble(targets, depth, aggregate), x, *tables)

    def seen(self, ctx: NodeContext, x: Value, targets: int) -> Value | Array:
        """Whether any tree gives the target a weight, bool [N, targets], or [targets] where each row has the same.

        Known for a target that no leaf has, or all leaves of one tree.
        """
        has = np.zeros((len(self.mode), targets), bool)
        for n, pairs in self.weights.items():
            has[n, [t for t, _ in pairs]] = True
        never, always = ~has.any(axis=0), np.zeros(targets, bool)
        mode, yes, no = (np.array(a, np.int64) for a in (self.mode, self.yes, self.no))
        for root in self.roots:
            level, every = np.array([root]), np.ones(targets, bool)
            while level.size:
                inner = mode[level] != 0
                every &= has[level[~inner]].all(axis=0)
                level = np.unique(np.concatenate([yes[level[inner]], no[level[inner]]]))
            always |= every
        if (never | always).all():
            return always
        ones = replace(self, weights={n: [(t, 1.0) for t, _ in pairs] for n, pairs in self.weights.items()})
        return ctx.add(Greater(), ones.scores(ctx, x, targets, "max"), ctx.constant(0, x.dtype))


def _numbers(ctx: NodeContext, name: str) -> list[float]:
    """Attribute `name`, or its form for doubles, `name`_as_tensor."""
    tensor = ctx.tensor(f"{name}_as_tensor") if ctx.given(f"{name}_as_tensor") else None
    if tensor is not None:
        ctx.ignore(name)
        return [float(v) for v in tensor.array().reshape(-1)]
    return list(ctx.floats(name, ()))


def _input(ctx: NodeContext) -> Value:
    x = ctx.value()
    if x.rank == 1:
        x = ctx.reshape(x, 1, x.shape[0])
    return x if x.dtype in (F32, F64) else ctx.cast(x, F32)


# ---- versions 1 to 3: nodes numbered within trees


def _numbered(ctx: NodeContext, prefix: str, targets: int) -> _Trees:
    """Trees given by (tree, node) numbers; weights by attributes `prefix`_*.

    A leaf may have several weights for a target, which count together; but with one target it has the first alone, as
    in onnxruntime (scikit-learn's number of the leaf is written so).
    """
    trees = _Trees()
    tree_ids, node_ids = ctx.ints("nodes_treeids"), ctx.ints("nodes_nodeids")
    features, modes = ctx.ints("nodes_featureids"), ctx.texts("nodes_modes")
    yes, no = ctx.ints("nodes_truenodeids"), ctx.ints("nodes_falsenodeids")
    values = _numbers(ctx, "nodes_values")
    missing = ctx.ints("nodes_missing_value_tracks_true", ()) or (0,) * len(tree_ids)
    ctx.ignore("nodes_hitrates", "nodes_hitrates_as_tensor")
    lengths = {len(a) for a in (tree_ids, node_ids, features, modes, yes, no, values, missing)}
    if len(lengths) != 1:
        ctx.fail("its tables of nodes differ in length")
    places = {key: n for n, key in enumerate(zip(tree_ids, node_ids, strict=True))}
    for n, tree in enumerate(tree_ids):
        mode = _MODES.get(modes[n])
        if mode is None:
            ctx.fail(f"the node mode {modes[n]!r} is not supported")
        ends = (0, 0) if mode == 0 else (places.get((tree, yes[n]), -1), places.get((tree, no[n]), -1))
        trees.node(features[n] if mode else 0, values[n], mode, ends, bool(missing[n]))
        if n == 0 or tree != tree_ids[n - 1]:
            trees.roots.append(n)  # a tree starts with its root
    ids = ctx.ints("class_ids" if prefix == "class" else "target_ids")
    weights = _numbers(ctx, f"{prefix}_weights")
    owners = zip(ctx.ints(f"{prefix}_treeids"), ctx.ints(f"{prefix}_nodeids"), ids, weights, strict=False)
    if len({len(ids), len(weights), len(ctx.ints(f"{prefix}_treeids")), len(ctx.ints(f"{prefix}_nodeids"))}) != 1:
        ctx.fail("its tables of weights differ in length")
    for tree, node, target, weight in owners:
        if (tree, node) not in places:
            ctx.fail(f"a weight is for node {node} of tree {tree}, which does not exist")
        own = trees.weights.setdefault(places[tree, node], [])
        if targets > 1 or not own:
            own.append((target, weight))
    return trees


def _base(ctx: NodeContext, dtype: DType, *counts: int) -> list[float]:
    """The base values, none or one of `counts`, at the precision of `dtype`."""
    values = _numbers(ctx, "base_values")
    if len(values) not in (0, *counts):
        ctx.fail(f"it has {len(values)} base_values; expected none or {' or '.join(map(str, counts))}")
    return [float(v) for v in np.array(values, dtype.numpy)]


def _outputs(ctx: NodeContext, x: Value, trees: _Trees, targets: int, aggregate: str, base: list[float]) -> Value:
    """A regressor's scores with its base values; one that no tree gave a weight is 0 (as in onnxruntime)."""
    scores = trees.scores(ctx, x, targets, aggregate)
    if not base:
        return scores
    moved = ctx.add(Add(), scores, ctx.constant(base, x.dtype))
    if targets == 1:
        return moved
    return _where(ctx, trees.seen(ctx, x, targets), moved, ctx.constant(0, x.dtype))


@onnx_op("TreeEnsembleRegressor", domain=ML)
def _regressor(ctx: NodeContext) -> Mapped:
    x = _input(ctx)
    aggregate = ctx.text("aggregate_function", "SUM")
    if aggregate not in _AGGREGATES:
        ctx.fail(f"aggregate_function={aggregate!r} is not supported")
    targets = ctx.integer("n_targets")
    base = _base(ctx, x.dtype, targets)
    scores = _outputs(ctx, x, _numbered(ctx, "target", targets), targets, aggregate.lower(), base)
    return ctx.cast(transformed(ctx, scores, ctx.text("post_transform", "NONE")), F32)


@onnx_op("TreeEnsembleClassifier", domain=ML)
def _classifier(ctx: NodeContext) -> tuple[Mapped, ...]:
    x, labels = _input(ctx), labels_of(ctx, "classlabels_strings", "classlabels_int64s")
    post = ctx.text("post_transform", "NONE")
    classes = max(len(labels), 1)
    trees = _numbered(ctx, "class", classes)
    raw = trees.scores(ctx, x, classes, "sum")
    base = _base(ctx, x.dtype, *((1, 2) if classes == 2 else (classes,)))
    if classes == 1:
        return _one_class(ctx, raw, base, post)
    seen = trees.seen(ctx, x, classes)
    if classes == 2:
        return _two_classes(ctx, raw, trees, seen, labels, base, post)
    if base:
        raw, seen = ctx.add(Add(), raw, ctx.constant(base, x.dtype)), np.ones(classes, bool)
    best = ctx.add(ArgMax(1, False), _where(ctx, seen, raw, ctx.constant(-np.inf, x.dtype)))
    return label_by(ctx, best, labels), ctx.cast(transformed(ctx, raw, post), F32)


def _column(ctx: NodeContext, x: Value | Array, n: int) -> Value | Array:
    if isinstance(x, np.ndarray):
        return x[n : n + 1]
    return ctx.add(Slice((0, n), (x.shape[0], 1), (1, 1)), x)


def _where(ctx: NodeContext, which: Value | Array, yes: Value, no: Value) -> Value:
    """`yes` where `which` holds, which may be known."""
    if isinstance(which, Value):
        return ctx.add(Where(), which, yes, no)
    return yes if which.all() else ctx.add(Where(), ctx.graph.constant(which), yes, no)


def _one_class(ctx: NodeContext, score: Value, base: list[float], post: str) -> tuple[Mapped, ...]:
    """The label is 1 where the score is positive, else 0."""
    if ctx.given("classlabels_strings"):
        ctx.fail("it has one label that is a string, and two to choose from")
    if len(base) == 1:
        score = ctx.add(Add(), score, ctx.constant(base, score.dtype))
    above = ctx.reshape(ctx.add(Greater(), score, ctx.constant(0, score.dtype)), score.shape[0])
    return label_by(ctx, above, (0, 1)), ctx.cast(transformed(ctx, score, post), F32)


def _two_classes(
    ctx: NodeContext, raw: Value, trees: _Trees, seen: Value | Array, labels: Labels, base: list[float], post: str
) -> tuple[Mapped, ...]:
    """Where the specification is silent, what onnxruntime gives, which asks for each row what classes have weights.

    With a weight for the second class its score decides; with none the first score alone makes both columns. Weights
    of one class only: the labels are those given, by the score's sign, or whether it exceeds 1/2 if no weight is
    negative. Else they are 1 and 0. Base values of classes without a weight don't count, and two of them make the
    second score the first and the second base value.
    """
    dtype = raw.dtype
    zero = ctx.constant(0, dtype)
    pairs = [pair for rows in trees.weights.values() for pair in rows]
    alone = len({target for target, _ in pairs}) == 1
    positive = all(weight >= 0 for _, weight in pairs)
    (s0, s1), (has0, has1) = ([_column(ctx, t, n) for n in (0, 1)] for t in (raw, seen))
    assert isinstance(s0, Value)
    assert isinstance(s1, Value)
    first = ctx.add(Add(), s0, ctx.constant([base[0]], dtype)) if base else s0
    first = _where(ctx, has0, first, zero)
    columns = (first, s1)
    if len(base) == 2:
        second = ctx.add(Add(), s0, ctx.constant([base[1]], dtype))
        columns = (_where(ctx, has0, ctx.add(Neg(), second), zero), second)
    scores = transformed(ctx, ctx.add(Concat(1), *columns), post)
    decides = columns[1]
    if isinstance(has1, Value) or not has1.all():
        single = _single_score(ctx, first, post, len(base), alone, alone and positive)
        scores, decides = _where(ctx, has1, scores, single), _where(ctx, has1, decides, first)
    limit = ctx.constant(0.5 if alone and positive else 0.0, dtype)
    above = ctx.reshape(ctx.add(Greater(), decides, limit), raw.shape[0])
    chosen = labels if alone or isinstance(labels[0], str) else (0, 1)
    return label_by(ctx, above, chosen), ctx.cast(scores, F32)


def _single_score(ctx: NodeContext, first: Value, post: str, base: int, alone: bool, positive: bool) -> Value:
    """Both columns from the first score; the second is 0 where onnxruntime leaves it unset."""
    nothing = ctx.add(Expand((first.shape[0], 1)), ctx.constant(0, first.dtype))
    if base == 2:
        return transformed(ctx, ctx.add(Concat(1), first, nothing), post)
    if base == 1 and not alone and post != "PROBIT":
        return ctx.add(Concat(1), first, nothing)
    return second_class(ctx, first, post, one_minus=positive)


# ---- version 5: nodes and leaves in tables of their own


@onnx_op("TreeEnsemble", since=5, domain=ML)
def _tree_ensemble(ctx: NodeContext) -> Mapped:
    x, trees = _input(ctx), _Trees()
    aggregate, post = ctx.integer("aggregate_function", 1), ctx.integer("post_transform", 0)
    if aggregate not in range(4) or post not in range(5):
        ctx.fail(f"aggregate_function={aggregate} or post_transform={post} is not known")
    features, yes, no = (ctx.ints(f"nodes_{n}") for n in ("featureids", "truenodeids", "falsenodeids"))
    yes_leaf, no_leaf = ctx.ints("nodes_trueleafs"), ctx.ints("nodes_falseleafs")
    modes = _array(ctx, "nodes_modes").astype(np.int64)
    splits, weights = _array(ctx, "nodes_splits"), _array(ctx, "leaf_weights")
    missing = ctx.ints("nodes_missing_value_tracks_true", ()) or (0,) * len(features)
    ctx.ignore("nodes_hitrates")
    targets = ctx.ints("leaf_targetids")
    sets = _sets(_array(ctx, "membership_values")) if ctx.given("membership_values") else []
    if len({len(a) for a in (features, yes, no, yes_leaf, no_leaf, modes, splits, missing)}) != 1:
        ctx.fail("its tables of nodes differ in length")
    if len(targets) != len(weights):
        ctx.fail("its tables of leaves differ in length")
    count = len(features)
    for n in range(count):
        mode = int(modes[n])  # 0 LEQ, 1 LT, 2 GTE, 3 GT, 4 EQ, 5 NEQ, 6 MEMBER
        if not 0 <= mode <= 6:
            ctx.fail(f"the node mode {mode} is not known")
        ends = yes[n] + (count if yes_leaf[n] else 0), no[n] + (count if no_leaf[n] else 0)
        trees.node(features[n], float(splits[n]), 5 if mode == 6 else mode + 1, ends, bool(missing[n]))
    for target, weight in zip(targets, weights.tolist(), strict=True):
        leaf = trees.node(0, 0.0, 0, (0, 0), False)
        trees.weights[leaf] = [(target, weight)]
    _spread_sets(ctx, trees, [n for n in range(count) if modes[n] == 6], sets)
    trees.roots.extend(ctx.ints("tree_roots"))
    count = ctx.integer("n_targets")
    scores = trees.scores(ctx, x, count, ("average", "sum", "min", "max")[aggregate])
    return transformed(ctx, scores, ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")[post])


def _array(ctx: NodeContext, name: str) -> Array:
    ref = ctx.tensor(name)
    if ref is None:
        ctx.fail(f"the attribute {name!r} is missing")
    return ref.array().reshape(-1)


def _sets(values: Array) -> list[list[float]]:
    """Membership values are sets one after the other, each ended by a NaN."""
    sets: list[list[float]] = [[]]
    for value in values.tolist():
        if value == value:
            sets[-1].append(value)
        else:
            sets.append([])
    return sets


def _spread_sets(ctx: NodeContext, trees: _Trees, nodes: list[int], sets: list[list[float]]) -> None:
    """Each test for membership as a chain of tests for equality that lead to the same place."""
    if len(nodes) > len(sets):
        ctx.fail(f"there are {len(nodes)} membership nodes and {len(sets)} sets")
    for n, members in zip(nodes, sets, strict=False):
        after = trees.no[n]
        for value in reversed(members[1:]):
            after = trees.node(trees.feature[n], value, MODES.index("eq"), (trees.yes[n], after), trees.missing[n])
        trees.threshold[n], trees.mode[n], trees.no[n] = members[0] if members else np.nan, MODES.index("eq"), after
