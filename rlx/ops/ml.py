"""Decision tree ensembles."""

from __future__ import annotations

import numpy as np

from rlx.errors import DTypeError, ExecutionError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Size, unify
from rlx.ops.base import Op, Work, check_kind, check_same_dtype, register, tensor_bytes

__all__ = ["AGGREGATES", "MODES", "TreeEnsemble"]

AGGREGATES = ("sum", "average", "min", "max")
MODES = ("leaf", "le", "lt", "ge", "gt", "eq", "ne")  # a node's number in `mode`
I32, U8, BOOL = DTYPES["i32"], DTYPES["u8"], DTYPES["bool"]


def _check_tables(
    op: TreeEnsemble, mode: Array, yes: Array, no: Array, roots: Array, first: Array, target: Array, weight: Array
) -> None:
    """`ExecutionError` unless every node, weight and target that a table names is there."""
    inner, starts, ends = mode != 0, first[:-1][mode == 0], first[1:][mode == 0]
    named = {"yes": yes[inner], "no": no[inner], "roots": roots}
    found = {what: ((at >= 0) & (at < len(mode))).all() for what, at in named.items()}
    found["mode"] = (mode < len(MODES)).all()
    found["first"] = ((starts >= 0) & (starts <= ends) & (ends <= len(weight))).all()
    found["target"] = ((target >= 0) & (target < op.targets)).all()
    wrong = [what for what, fine in found.items() if not fine]
    if wrong:
        raise ExecutionError(f"tree_ensemble: an entry of the table {wrong[0]!r} is outside of what it may name")


@register
class TreeEnsemble(Op):
    """The scores [N, targets] of decision trees for the rows of x [N, features]. (ONNX TreeEnsemble-5)

    Nodes are in tables of one row each: `feature` i32, `threshold` (the type of x), `mode` u8 (see `MODES`), `yes` and
    `no` i32 (the next node where x[feature] compares with the threshold, or does not), `missing` bool (NaN goes to
    yes). `roots` i32 [trees]. Leaf node n has the weights first[n] .. first[n + 1] - 1 of `target` i32 and `weight`
    (the type of x); `first` is i32 [nodes + 1]. For each target the weights of the trees are combined in order by
    `aggregate`: "sum", "average" (the sum over the number of trees), "min" or "max" (0 where no tree has a weight).
    `depth` is the longest way from a root to a leaf.
    """

    targets: int
    depth: int
    aggregate: str = "sum"

    def infer(
        self,
        x: TensorType,
        feature: TensorType,
        threshold: TensorType,
        mode: TensorType,
        yes: TensorType,
        no: TensorType,
        missing: TensorType,
        roots: TensorType,
        first: TensorType,
        target: TensorType,
        weight: TensorType,
    ) -> TensorType:
        check_kind(self, x, "f")
        check_same_dtype(self, x, threshold, weight)
        if x.rank != 2:
            raise ShapeError(f"tree_ensemble: expected x [N, features], got {x}")
        if self.aggregate not in AGGREGATES or self.targets < 1 or self.depth < 0:
            raise OptionError(
                f"tree_ensemble: aggregate {self.aggregate!r} must be one of {', '.join(AGGREGATES)}, "
                f"targets {self.targets} at least 1 and depth {self.depth} at least 0"
            )
        tables = {"feature": feature, "yes": yes, "no": no, "roots": roots, "first": first, "target": target}
        for what, t in tables.items():
            if t.dtype is not I32 or t.rank != 1:
                raise DTypeError(f"tree_ensemble: expected {what} as i32 of one axis, got {t}")
        if mode.dtype is not U8 or missing.dtype is not BOOL:
            raise DTypeError(f"tree_ensemble: expected mode u8 and missing bool, got {mode}, {missing}")
        for what, t in {"threshold": threshold, "mode": mode, "yes": yes, "no": no, "missing": missing}.items():
            unify(t.shape[0], feature.shape[0], f"tree_ensemble: the nodes of {what} and feature")
        unify(first.shape[0], feature.shape[0] + 1, "tree_ensemble: first has one entry more than there are nodes")
        unify(target.shape[0], weight.shape[0], "tree_ensemble: target and weight")
        return TensorType((x.shape[0], self.targets), x.dtype)

    def work(self, *x: TensorType) -> Work:
        steps: Size = x[0].shape[0] * x[7].shape[0] * max(self.depth, 1)
        read = tensor_bytes(x[0])
        for t in x[1:]:
            read = read + tensor_bytes(t)
        return Work(steps * 2, read, tensor_bytes(self.infer_types(x)[0]))

    def reference(
        self,
        x: Array,
        feature: Array,
        threshold: Array,
        mode: Array,
        yes: Array,
        no: Array,
        missing: Array,
        roots: Array,
        first: Array,
        target: Array,
        weight: Array,
    ) -> Array:
        _check_tables(self, mode, yes, no, roots, first, target, weight)
        inner = mode != 0
        if inner.any() and (int(feature[inner].max()) >= x.shape[1] or int(feature[inner].min()) < 0):
            raise ExecutionError(f"tree_ensemble: the trees read feature {int(feature[inner].max())} of {x.shape[1]}")
        rows = np.arange(x.shape[0])[:, None]
        at = np.broadcast_to(roots, (x.shape[0], roots.size))
        for _ in range(self.depth):
            value, limit = x[rows, feature[at] * inner[at]], threshold[at]
            compared = [at == at, value <= limit, value < limit, value >= limit, value > limit, value == limit]
            holds = np.choose(mode[at], [*compared, value != limit]) | (missing[at] & np.isnan(value))
            at = np.where(inner[at], np.where(holds, yes[at], no[at]), at)
        return self._scores(at, first, target, weight)

    def _scores(self, leaves: Array, first: Array, target: Array, weight: Array) -> Array:
        out = np.zeros((leaves.shape[0], self.targets), weight.dtype)
        seen = np.zeros(out.shape, bool)
        most = int((first[1:] - first[:-1]).max(initial=0))
        for tree in range(leaves.shape[1]):
            start, end = first[leaves[:, tree]], first[leaves[:, tree] + 1]
            for k in range(most):
                (rows,) = np.nonzero(start + k < end)
                places = start[rows] + k
                spot, w = (rows, target[places]), weight[places]
                if self.aggregate in ("sum", "average"):
                    out[spot] += w
                else:
                    pick = np.minimum if self.aggregate == "min" else np.maximum
                    out[spot] = np.where(seen[spot], pick(out[spot], w), w)
                seen[spot] = True
        if self.aggregate == "average" and leaves.shape[1]:
            out /= out.dtype.type(leaves.shape[1])
        return out
