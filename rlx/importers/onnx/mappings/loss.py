"""ONNX ops that the standard defines by others: losses, gradients, training, gates, caches, convolution with state."""

from __future__ import annotations

from rlx.importers.onnx.mapping import TRAINING, Mapped, NodeContext, onnx_op
from rlx.importers.onnx.mappings.control import scope_of
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.frames import Frame
from rlx.ir.graph import Node, Value
from rlx.ops.activation import Silu
from rlx.ops.base import apply, axis_of
from rlx.ops.conv import Conv
from rlx.ops.elementwise import (
    Add,
    Div,
    Equal,
    GreaterEqual,
    Identity,
    Less,
    Mod,
    Mul,
    Neg,
    Pow,
    Sigmoid,
    Sqrt,
    Sub,
    Where,
)
from rlx.ops.index import Gather, GatherElements
from rlx.ops.layout import Concat, Expand, Iota, Pad, Reshape, SizeOf, Slice, Unsqueeze
from rlx.ops.normalize import BatchNorm, LogSoftmax
from rlx.ops.random import RandomUniform
from rlx.ops.reduction import ReduceMean, ReduceSum
from rlx.ops.scatter import ScatterNd

F32, I64 = DTYPES["f32"], DTYPES["i64"]


@onnx_op("NegativeLogLikelihoodLoss", since=12)
def _nll_loss(ctx: NodeContext) -> Mapped:
    return _loss(ctx, ctx.value(0))


@onnx_op("SoftmaxCrossEntropyLoss", since=12)
def _cross_entropy(ctx: NodeContext) -> tuple[Mapped, ...]:
    scores = ctx.value(0)
    log_prob = ctx.add(LogSoftmax(1), scores)
    return _loss(ctx, log_prob), log_prob


def _loss(ctx: NodeContext, log_prob: Value) -> Value:
    """-weight[target] * log_prob[target], reduced; log_prob [N, C, d..], target [N, d..]."""
    reduction = ctx.text("reduction", "mean")
    if reduction not in ("mean", "sum", "none"):
        ctx.fail(f"reduction={reduction!r} is not supported")
    target = ctx.cast(ctx.value(1), I64)
    weight = ctx.optional(2)
    kept = None
    if ctx.given("ignore_index"):
        ignored = ctx.add(Equal(), target, ctx.constant(ctx.integer("ignore_index"), I64))
        zero = ctx.constant(0, I64)
        target = ctx.add(Where(), ignored, zero, target)
        one, nothing = (ctx.constant(n, log_prob.dtype) for n in (1, 0))
        kept = ctx.add(Where(), ignored, nothing, one)
    picked = ctx.add(GatherElements(1), log_prob, ctx.add(Unsqueeze((1,)), target))
    loss = ctx.add(Neg(), ctx.reshape(picked, *target.shape))
    factor = None if weight is None else ctx.add(Gather(0), weight, target)
    if kept is not None:
        factor = kept if factor is None else ctx.add(Mul(), factor, kept)
    if factor is not None:
        loss = ctx.add(Mul(), loss, factor)
    if reduction == "none":
        return loss
    if reduction == "sum" or factor is None:
        return ctx.add((ReduceSum if reduction == "sum" else ReduceMean)(None, False), loss)
    return ctx.add(Div(), ctx.add(ReduceSum(None, False), loss), ctx.add(ReduceSum(None, False), factor))


# ---- training


def training_batch_norm(ctx: NodeContext) -> tuple[Mapped, ...]:
    """BatchNormalization by the statistics of the batch, in f32 at least; and the running mean and variance."""
    x, scale, bias, mean, variance = (ctx.value(i) for i in range(5))
    momentum, dtype = ctx.real("momentum", 0.9), x.dtype if x.dtype.bits >= 32 else F32
    wide, axes = ctx.cast(x, dtype), tuple(d for d in range(x.rank) if d != 1)
    own = ctx.add(ReduceMean(axes), wide)
    centred = ctx.add(Sub(), wide, own)
    spread = ctx.reshape(ctx.add(ReduceMean(axes), ctx.add(Mul(), centred, centred)), x.shape[1])
    own = ctx.reshape(own, x.shape[1])
    affine = [ctx.cast(v, dtype) for v in (scale, bias)]
    result = ctx.add(BatchNorm(ctx.real("epsilon", 1e-5)), wide, *affine, own, spread)
    running = [
        ctx.cast(_plus(ctx, momentum, ctx.cast(old, dtype), 1 - momentum, new), old.dtype)
        for old, new in ((mean, own), (variance, spread))
    ]
    return ctx.cast(result, x.dtype), *running


def training_dropout(ctx: NodeContext) -> tuple[Mapped, ...]:
    """Dropout with a mask that is drawn by `RandomUniform`, by its seed, the same in every run."""
    x = ctx.value()
    seed = ctx.integer("seed", 0)
    ratio = ctx.cast(ctx.reshape(ctx.value(1)), F32) if ctx.has(1) else ctx.constant(0.5, F32)
    ctx.note("is in training mode: it drops the same elements in every run")
    drawn = ctx.add(RandomUniform(x.shape, 0.0, 1.0, F32, seed))
    kept = ctx.add(GreaterEqual(), drawn, ratio)
    factor = ctx.cast(ctx.add(Div(), ctx.constant(1, F32), ctx.add(Sub(), ctx.constant(1, F32), ratio)), x.dtype)
    return ctx.add(Where(), kept, ctx.add(Mul(), x, factor), ctx.constant(0, x.dtype)), kept


def _plus(ctx: NodeContext, a: float, x: Value, b: float, y: Value) -> Value:
    """a * x + b * y."""
    return ctx.add(Add(), ctx.add(Mul(), ctx.constant(a, x.dtype), x), ctx.add(Mul(), ctx.constant(b, y.dtype), y))


def _optimised(ctx: NodeContext, kinds: int) -> list[tuple[Value, ...]]:
    """For each tensor that a step of training changes: it, its gradient, and what else is kept of it."""
    count, rest = divmod(len(ctx.node.inputs) - 2, kinds)
    if rest or count < 1:
        ctx.fail(f"{len(ctx.node.inputs)} inputs: expected R, T and then {kinds} for each tensor")
    return [tuple(ctx.value(2 + k * count + i) for k in range(kinds)) for i in range(count)]


def _regularised(ctx: NodeContext, x: Value, gradient: Value) -> Value:
    """The gradient with that of norm_coefficient / 2 * |x|^2."""
    return _plus(ctx, ctx.real("norm_coefficient", 0.0), x, 1.0, gradient)


def _rate(ctx: NodeContext, dtype: DType) -> tuple[Value, Value]:
    """The learning rate R and the count of steps T, in the type of a tensor."""
    return ctx.cast(ctx.reshape(ctx.value(0)), dtype), ctx.cast(ctx.reshape(ctx.value(1)), dtype)


def _adaptive(ctx: NodeContext, x: Value, rate: Value, step: Value, squares: Value) -> Value:
    """x - rate * step / (sqrt(squares) + epsilon)."""
    root = ctx.add(Add(), ctx.add(Sqrt(), squares), ctx.constant(ctx.real("epsilon", 1e-6), x.dtype))
    return ctx.add(Sub(), x, ctx.add(Div(), ctx.add(Mul(), rate, step), root))


@onnx_op("Adagrad", domain=TRAINING)
def _adagrad(ctx: NodeContext) -> tuple[Mapped, ...]:
    rows = []
    for x, gradient, squares in _optimised(ctx, 3):
        rate, count = _rate(ctx, x.dtype)
        decay = ctx.add(Mul(), count, ctx.constant(ctx.real("decay_factor", 0.0), x.dtype))
        rate = ctx.add(Div(), rate, ctx.add(Add(), decay, ctx.constant(1, x.dtype)))
        step = _regularised(ctx, x, gradient)
        squares = ctx.add(Add(), squares, ctx.add(Mul(), step, step))
        rows.append((_adaptive(ctx, x, rate, step, squares), squares))
    return tuple(v for column in zip(*rows, strict=True) for v in column)


@onnx_op("Adam", domain=TRAINING)
def _adam(ctx: NodeContext) -> tuple[Mapped, ...]:
    alpha, beta, after = ctx.real("alpha", 0.9), ctx.real("beta", 0.999), ctx.real("norm_coefficient_post", 0.0)
    rows = []
    for x, gradient, mean, squares in _optimised(ctx, 4):
        rate, count = _rate(ctx, x.dtype)
        step = _regularised(ctx, x, gradient)
        mean = _plus(ctx, alpha, mean, 1 - alpha, step)
        squares = _plus(ctx, beta, squares, 1 - beta, ctx.add(Mul(), step, step))
        left = [
            ctx.add(Sub(), ctx.constant(1, x.dtype), ctx.add(Pow(), ctx.constant(base, x.dtype), count))
            for base in (alpha, beta)
        ]
        later = ctx.add(Div(), ctx.add(Mul(), rate, ctx.add(Sqrt(), left[1])), left[0])
        rate = ctx.add(Where(), ctx.add(Less(), ctx.constant(0, x.dtype), count), later, rate)
        made = _adaptive(ctx, x, rate, mean, squares)
        rows.append((ctx.add(Mul(), made, ctx.constant(1 - after, x.dtype)), mean, squares))
    return tuple(v for column in zip(*rows, strict=True) for v in column)


@onnx_op("Momentum", domain=TRAINING)
def _momentum(ctx: NodeContext) -> tuple[Mapped, ...]:
    alpha, beta, mode = ctx.real("alpha"), ctx.real("beta"), ctx.text("mode")
    if mode not in ("standard", "nesterov"):
        ctx.fail(f"mode={mode!r} is not supported")
    rows = []
    for x, gradient, momentum in _optimised(ctx, 3):
        rate, count = _rate(ctx, x.dtype)
        step = _regularised(ctx, x, gradient)
        one = ctx.constant(1, x.dtype)
        share = ctx.add(Where(), ctx.add(Less(), ctx.constant(0, x.dtype), count), ctx.constant(beta, x.dtype), one)
        momentum = _plus(ctx, alpha, momentum, 1.0, ctx.add(Mul(), share, step))
        moved = _plus(ctx, 1.0, step, alpha, momentum) if mode == "nesterov" else momentum
        rows.append((ctx.add(Sub(), x, ctx.add(Mul(), rate, moved)), momentum))
    return tuple(v for column in zip(*rows, strict=True) for v in column)


@onnx_op("Gradient", domain=TRAINING)
def _gradient(ctx: NodeContext) -> tuple[Mapped, ...]:
    """The cotangents of `xs`, for 1 of each element of y, at the values that the node's inputs have.

    Where these are the named tensors themselves, the nodes between them and y are differentiated; else copies of them.
    """
    from rlx.ops.gradients import load_rules  # what differentiates is only loaded where it is asked for
    from rlx.ops.gradients.attach import is_smooth, zeros
    from rlx.ops.gradients.engine import pull

    load_rules()

    xs, names, y = _named(ctx)
    sources, given = [ctx.tensors.value(name) for name in names], [ctx.value(i) for i in range(len(names))]
    for name, source, value in zip(names, sources, given, strict=True):
        if source.type != value.type:
            ctx.fail(f"{name!r} is {source.type}, what it is to be differentiated at {value.type}")
    for name, source in zip(names[: len(xs)], sources, strict=False):
        if not is_smooth(source):
            ctx.fail(f"xs names {name!r}, which is {source.type}: only floats have a gradient")
        if ctx.tensors.known(name) is not None:
            ctx.fail(f"xs names {name!r}, a number that is a part of the model: make it an input")
    if not is_smooth(y):
        ctx.fail(f"y names a tensor that is {y.type}: only floats have a gradient")
    nodes = _between(ctx, set(sources), y)
    with Frame(ctx.graph, kept=True):
        same = all(v is source for v, source in zip(given, sources, strict=True))
        if not same or len(set(sources)) < len(sources):
            given = [apply(Identity(), v) for v in given]
            y, nodes = _again(nodes, dict(zip(sources, given, strict=True)), y)
        found = pull(nodes, {y: zeros(y) + 1}, given[: len(xs)])
        return tuple(zeros(v) if ct is None else ct for v, ct in zip(given, found, strict=False))


def _named(ctx: NodeContext) -> tuple[tuple[str, ...], tuple[str, ...], Value]:
    """The names to differentiate by, these and those of the other inputs, and the tensor to differentiate."""
    xs, y = ctx.texts("xs"), ctx.tensors.value(ctx.text("y"))
    names = (*xs, *ctx.texts("zs", ()))
    if not xs or len(ctx.node.inputs) != len(names) or not all(map(ctx.has, range(len(names)))):
        ctx.fail(f"{len(ctx.node.inputs)} inputs for the {len(names)} tensors that xs and zs name")
    if len(ctx.node.outputs) > len(xs):
        ctx.fail(f"{len(ctx.node.outputs)} outputs for the {len(xs)} tensors that xs names")
    return xs, names, y


def _between(ctx: NodeContext, sources: set[Value], y: Value) -> list[Node]:
    """The nodes that make y of the sources. In a subgraph, what is made of them outside is refused: none is there."""
    changed, needed = set(sources), {y}
    for node in ctx.graph.nodes:
        if any(v in changed for v in node.inputs):
            changed.update(v for v in node.outputs if v not in sources)
    between = []
    for node in reversed(ctx.graph.nodes):
        if any(v in needed and v not in sources for v in node.outputs):
            needed.update(node.inputs)
            if any(v in needed and v in changed and v not in sources for v in node.outputs):
                between.append(node)
    region = scope_of(ctx).region
    if any(region.origin(v) is not v for v in sources):
        outside = (region.origin(v) for v in needed - sources)
        if any(v.graph is not ctx.graph and v.node is not None for v in outside):
            ctx.fail(f"y, {ctx.text('y')!r}, is made outside of the subgraph in which the node stands: put it there")
    return between[::-1]


def _again(nodes: list[Node], values: dict[Value, Value], y: Value) -> tuple[Value, list[Node]]:
    """y computed from other values, and the nodes that this takes: copies of those between them."""
    from rlx.ops.gradients.engine import open_frame, replay

    graph = open_frame().graph
    start = len(graph.nodes)
    replay(nodes, values)
    return values.get(y, y), graph.nodes[start:]


# ---- gates, caches, convolution with a state


@onnx_op("SwiGLU", since=28)
def _swiglu(ctx: NodeContext) -> Mapped:
    a, b, alpha = ctx.value(0), ctx.value(1), ctx.real("alpha", 1.0)
    if alpha == 1:
        return ctx.add(Mul(), ctx.add(Silu(), a), b)
    gate = ctx.add(Sigmoid(), ctx.add(Mul(), a, ctx.constant(alpha, a.dtype)))
    return ctx.add(Mul(), ctx.add(Mul(), a, gate), b)


@onnx_op("TensorScatter", since=24)
def _tensor_scatter(ctx: NodeContext) -> Mapped:
    """Writes update along one axis from a place for each batch entry on: a KV cache's growth."""
    cache, update = ctx.value(0), ctx.value(1)
    mode = ctx.text("mode", "linear")
    if mode not in ("linear", "circular"):
        ctx.fail(f"mode={mode!r} is not supported")
    axis = axis_of(ctx.integer("axis", -2), cache.rank, "TensorScatter")
    if axis == 0:
        ctx.fail("axis=0 is the batch")
    batch, count = update.shape[0], update.shape[axis]
    at = ctx.add(Reshape((1, count)), ctx.add(Iota(count)))
    if ctx.has(2):
        at = ctx.add(Add(), at, ctx.reshape(ctx.cast(ctx.value(2), I64), batch, 1))
    else:
        at = ctx.add(Expand((batch, count)), at)
    if mode == "circular":
        at = ctx.add(Mod(), at, ctx.add(SizeOf(cache.shape[axis])))
    rows = ctx.add(Expand((batch, count)), ctx.add(Reshape((batch, 1)), ctx.add(Iota(batch))))
    places = ctx.add(Concat(2), ctx.add(Unsqueeze((2,)), rows), ctx.add(Unsqueeze((2,)), at))
    first = [0, axis, *(d for d in range(1, cache.rank) if d != axis)]
    back = [first.index(d) for d in range(cache.rank)]
    made = ctx.add(ScatterNd(), ctx.transpose(cache, *first), places, ctx.transpose(update, *first))
    return ctx.transpose(made, *back)


@onnx_op("CausalConvWithState", since=27)
def _causal_conv(ctx: NodeContext) -> tuple[Mapped, ...]:
    """A depthwise convolution of what came before and x; the last k - 1 columns are the new state."""
    x, w = ctx.value(0), ctx.value(1)
    channels, (k,) = x.shape[1], w.shape[2:]
    activation = ctx.text("activation", "none")
    if activation not in ("none", "silu", "swish"):
        ctx.fail(f"activation={activation!r} is not supported")
    if not isinstance(k, int) or not isinstance(channels, int):
        ctx.fail("the channels and the length of the kernel must be known")
    past = ctx.optional(3)
    whole = ctx.add(Pad((0, 0, k - 1, 0, 0, 0)), x) if past is None else ctx.add(Concat(2), past, x)
    bias = [ctx.value(2)] if ctx.has(2) else []
    y = ctx.add(Conv((1,), (1,), (0, 0), channels), whole, w, *bias)
    y = y if activation == "none" else ctx.add(Silu(), y)
    n, _, length = whole.shape
    present = ctx.add(Slice((0, 0, length - (k - 1)), (n, channels, k - 1), (1, 1, 1)), whole)
    return y, present
