"""What classifiers of ai.onnx.ml share: class labels, and what becomes of raw scores."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.importers.onnx.mapping import NodeContext, UnsupportedError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ops.elementwise import Abs, Add, Div, Exp, Greater, Log, Mul, Neg, Sigmoid, Sign, Sqrt, Sub, Where
from rlx.ops.index import Gather
from rlx.ops.layout import Concat, Expand
from rlx.ops.normalize import Softmax
from rlx.ops.reduction import ReduceMax, ReduceSum

__all__ = ["Labels", "label_by", "labels_of", "second_class", "transformed"]

Labels = Sequence[int] | Sequence[str]


def labels_of(ctx: NodeContext, strings: str, ints: str) -> Labels:
    """The class labels."""
    texts, numbers = ctx.texts(strings, ()), ctx.ints(ints, ())
    return numbers or texts


def label_by(ctx: NodeContext, choice: Value, labels: Labels) -> Value:
    """The label for each row: by number, or (bool) the second where it holds."""
    dtype = DTYPES["string" if isinstance(labels[0], str) else "i64"]
    if choice.dtype.kind == "b":
        return ctx.add(Where(), choice, ctx.constant(labels[1], dtype), ctx.constant(labels[0], dtype))
    if list(labels) == list(range(len(labels))):
        return choice
    return ctx.add(Gather(0), ctx.constant(list(labels), dtype), choice)


def transformed(ctx: NodeContext, scores: Value, post: str) -> Value:
    """Scores [N, C] after `post_transform`, of which one score alone knows only PROBIT (as in onnxruntime)."""
    if scores.shape[-1] == 1 and post in ("LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"):
        return scores
    match post:
        case "NONE":
            return scores
        case "LOGISTIC":
            return ctx.add(Sigmoid(), scores)
        case "SOFTMAX":
            return ctx.add(Softmax(-1), scores)
        case "SOFTMAX_ZERO":
            return _softmax_zero(ctx, scores)
        case "PROBIT":
            return _probit(ctx, scores)
    raise UnsupportedError(f"post_transform={post!r} is not known")


def _softmax_zero(ctx: NodeContext, x: Value) -> Value:
    """Softmax where scores of 0 count as nothing: they are multiplied by exp(-max) instead."""
    peak = ctx.add(ReduceMax((1,), True), x)
    far = ctx.add(Greater(), ctx.add(Abs(), x), ctx.constant(1e-7, x.dtype))
    close = ctx.add(Mul(), x, ctx.add(Exp(), ctx.add(Neg(), peak)))
    e = ctx.add(Where(), far, ctx.add(Exp(), ctx.add(Sub(), x, peak)), close)
    return ctx.add(Div(), e, ctx.add(ReduceSum((1,), True), e))


def _probit(ctx: NodeContext, x: Value) -> Value:
    """sqrt(2) erfinv(2 x - 1), by Winitzki's approximation, as onnxruntime has it."""

    def c(value: float) -> Value:
        return ctx.constant(value, x.dtype)

    y = ctx.add(Sub(), ctx.add(Mul(), x, c(2)), c(1))
    log = ctx.add(Log(), ctx.add(Mul(), ctx.add(Sub(), c(1), y), ctx.add(Add(), c(1), y)))
    v = ctx.add(Add(), ctx.add(Mul(), log, c(0.5)), c(2 / (3.14159 * 0.147)))
    inner = ctx.add(Sub(), ctx.add(Mul(), v, v), ctx.add(Mul(), log, c(1 / 0.147)))
    root = ctx.add(Sqrt(), ctx.add(Sub(), ctx.add(Sqrt(), inner), v))
    sign = ctx.add(Sign(), y)
    return ctx.add(Mul(), ctx.add(Mul(), sign, root), c(1.41421356))


def second_class(ctx: NodeContext, score: Value, post: str, one_minus: bool) -> Value:
    """The scores [N, 2] of two classes from one, [N, 1]: (1 - s, s) or (-s, s), or the logistic of (-s, s).

    For PROBIT onnxruntime sets the first column only; the second is 0 here.
    """
    if post == "PROBIT":
        nothing = ctx.add(Expand((score.shape[0], 1)), ctx.constant(0, score.dtype))
        return ctx.add(Concat(1), _probit(ctx, score), nothing)
    if one_minus and post != "LOGISTIC":
        return ctx.add(Concat(1), ctx.add(Sub(), ctx.constant(1, score.dtype), score), score)
    pair = ctx.add(Concat(1), ctx.add(Neg(), score), score)
    return ctx.add(Sigmoid(), pair) if post == "LOGISTIC" else pair
