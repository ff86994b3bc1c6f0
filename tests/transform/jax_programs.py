"""Random functions of matrices, each written for rlx and for jax: `test_against_jax` compares their derivatives.

All values of a program are [n, m] in f64; a piece makes one of some others, of a matrix `w` [m, m] and a vector `v`
[m]. n may be a size that each run tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx import ops as o

__all__ = ["PIECES", "Program", "drawn"]

Draw = Callable[[np.random.Generator, int], dict[str, Any]]


@dataclass(frozen=True)
class Piece:
    """One step: `ours(x, w, v, **attributes)` and `theirs(x, w, v, **attributes)` take a list of matrices x."""

    arity: int
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    draw: Draw


PIECES: dict[str, Piece] = {}


def piece(
    name: str, arity: int, ours: Callable[..., Any], theirs: Callable[..., Any], draw: Draw | None = None
) -> None:
    assert name not in PIECES
    PIECES[name] = Piece(arity, ours, theirs, draw or (lambda rng, m: {}))


def weights(k: int, m: int) -> Any:
    """[k, m]: fixed numbers, with which k results become m."""
    return np.cos(np.arange(k * m) * 1.3 + 0.2).reshape(k, m)


def mixed(y: Any, m: int) -> Any:
    """[n, ...] to [n, m]."""
    k = 1
    for size in y.shape[1:]:
        k *= size
    return y.reshape((y.shape[0], k)) @ weights(k, m)


def stacked(name: str, x: Any, w: Any, taps: int) -> Any:
    """[m, m, taps] of w."""
    if name == "ours":
        return o.concat(*[o.sin(w * (t + 1.0)).reshape((*w.shape, 1)) for t in range(taps)], axis=2)
    jnp = jax_numpy()
    return jnp.stack([jnp.sin(w * (t + 1.0)) for t in range(taps)], 2)


def jax_numpy() -> Any:
    import jax.numpy as jnp

    return jnp


def jnn() -> Any:
    import jax

    return jax.nn


def lax() -> Any:
    import jax.lax

    return jax.lax


# ---- element by element

UNARY: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "abs": (o.abs, lambda x: jax_numpy().abs(x)),
    "acos": (lambda x: o.acos(o.tanh(x) * 0.9), lambda x: jax_numpy().arccos(jax_numpy().tanh(x) * 0.9)),
    "acosh": (
        lambda x: o.acosh(o.exp(o.sin(x)) + 1.5),
        lambda x: jax_numpy().arccosh(jax_numpy().exp(jax_numpy().sin(x)) + 1.5)),
    "asin": (lambda x: o.asin(o.tanh(x) * 0.9), lambda x: jax_numpy().arcsin(jax_numpy().tanh(x) * 0.9)),
    "asinh": (o.asinh, lambda x: jax_numpy().arcsinh(x)),
    "atan": (o.atan, lambda x: jax_numpy().arctan(x)),
    "atanh": (lambda x: o.atanh(o.tanh(x) * 0.9), lambda x: jax_numpy().arctanh(jax_numpy().tanh(x) * 0.9)),
    "ceil": (lambda x: o.ceil(x) * x, lambda x: jax_numpy().ceil(x) * x),
    "celu": (lambda x: o.celu(x, alpha=1.5), lambda x: jnn().celu(x, 1.5)),
    "clip": (lambda x: o.clip(x, lo=-0.55, hi=0.75), lambda x: jax_numpy().clip(x, -0.55, 0.75)),
    "cos": (o.cos, lambda x: jax_numpy().cos(x)),
    "cosh": (lambda x: o.cosh(o.sin(x)), lambda x: jax_numpy().cosh(jax_numpy().sin(x))),
    "elu": (lambda x: o.elu(x, alpha=0.7), lambda x: jnn().elu(x, 0.7)),
    "erf": (o.erf, lambda x: lax().erf(x)),
    "exp": (lambda x: o.exp(o.sin(x)), lambda x: jax_numpy().exp(jax_numpy().sin(x))),
    "floor": (lambda x: o.floor(x) + x, lambda x: jax_numpy().floor(x) + x),
    "gelu": (o.gelu, lambda x: jnn().gelu(x, approximate=False)),
    "gelu_tanh": (lambda x: o.gelu(x, approximate="tanh"), lambda x: jnn().gelu(x, approximate=True)),
    "hard_sigmoid": (lambda x: o.hard_sigmoid(x, alpha=1 / 6), lambda x: jnn().hard_sigmoid(x)),
    "hard_swish": (o.hard_swish, lambda x: jnn().hard_swish(x)),
    "identity": (o.identity, lambda x: x),
    "leaky_relu": (lambda x: o.leaky_relu(x, alpha=0.2), lambda x: jnn().leaky_relu(x, 0.2)),
    "log": (lambda x: o.log(x * x + 0.5), lambda x: jax_numpy().log(x * x + 0.5)),
    "mish": (o.mish, lambda x: jnn().mish(x)),
    "neg": (o.neg, lambda x: -x),
    "reciprocal": (lambda x: o.reciprocal(x * x + 1), lambda x: 1 / (x * x + 1)),
    "relu": (o.relu, lambda x: jnn().relu(x)),
    "round": (lambda x: o.round(x) + x, lambda x: jax_numpy().round(x) + x),
    "rsqrt": (lambda x: o.rsqrt(x * x + 0.3), lambda x: lax().rsqrt(x * x + 0.3)),
    "selu": (lambda x: o.selu(x, alpha=1.6732632423543772, gamma=1.0507009873554805), lambda x: jnn().selu(x)),
    "sigmoid": (o.sigmoid, lambda x: jnn().sigmoid(x)),
    "sign": (lambda x: o.sign(x) * x, lambda x: jax_numpy().sign(x) * x),
    "silu": (o.silu, lambda x: jnn().silu(x)),
    "sin": (o.sin, lambda x: jax_numpy().sin(x)),
    "sinh": (lambda x: o.sinh(o.sin(x)), lambda x: jax_numpy().sinh(jax_numpy().sin(x))),
    "softplus": (o.softplus, lambda x: jnn().softplus(x)),
    "softsign": (o.softsign, lambda x: jnn().soft_sign(x)),
    "sqrt": (lambda x: o.sqrt(x * x + 0.2), lambda x: jax_numpy().sqrt(x * x + 0.2)),
    "stop_gradient": (lambda x: o.stop_gradient(x) * x, lambda x: lax().stop_gradient(x) * x),
    "tan": (lambda x: o.tan(o.sin(x)), lambda x: jax_numpy().tan(jax_numpy().sin(x))),
    "tanh": (o.tanh, lambda x: jax_numpy().tanh(x)),
    "shrink": (
        lambda x: o.shrink(x, lambd=0.4, bias=0.1),
        lambda x: jax_numpy().where(x < -0.4, x + 0.1, jax_numpy().where(x > 0.4, x - 0.1, 0.0)),
    ),
    "thresholded_relu": (lambda x: o.thresholded_relu(x, alpha=0.3), lambda x: jax_numpy().where(x > 0.3, x, 0.0)),
    "cast": (lambda x: o.cast(x, to=x.dtype) * 2, lambda x: x * 2),
    "hardmax": (lambda x: o.hardmax(x) + x, lambda x: jnn().one_hot(jax_numpy().argmax(x, -1), x.shape[-1]) + x),
}  # fmt: skip
for _name, (_ours, _theirs) in UNARY.items():
    piece(_name, 1, lambda x, w, v, f=_ours: f(x[0]), lambda x, w, v, f=_theirs: f(x[0]))

piece("add", 2, lambda x, w, v: o.add(x[0], x[1]), lambda x, w, v: x[0] + x[1])
piece("add_row", 1, lambda x, w, v: o.add(x[0], v), lambda x, w, v: x[0] + v)
piece("sub", 2, lambda x, w, v: o.sub(x[0], x[1]), lambda x, w, v: x[0] - x[1])
piece("mul", 2, lambda x, w, v: o.mul(x[0], x[1]), lambda x, w, v: x[0] * x[1])
piece("mul_row", 1, lambda x, w, v: o.mul(v, x[0]), lambda x, w, v: x[0] * v)
piece("div", 2, lambda x, w, v: o.div(x[0], x[1] * x[1] + 0.7), lambda x, w, v: x[0] / (x[1] * x[1] + 0.7))
piece(
    "mod", 2, lambda x, w, v: o.mod(x[0], x[1] * x[1] + 0.7), lambda x, w, v: jax_numpy().mod(x[0], x[1] * x[1] + 0.7)
)
piece("maximum", 2, lambda x, w, v: o.maximum(x[0], x[1]), lambda x, w, v: jax_numpy().maximum(x[0], x[1]))
piece("minimum", 2, lambda x, w, v: o.minimum(x[0], v), lambda x, w, v: jax_numpy().minimum(x[0], v))
piece(
    "pow",
    2,
    lambda x, w, v: o.pow(x[0] * x[0] + 0.4, o.sin(x[1])),
    lambda x, w, v: (x[0] * x[0] + 0.4) ** jax_numpy().sin(x[1]),
)
piece(
    "power",
    1,
    lambda x, w, v, p: o.tanh(o.pow(x[0], p)),
    lambda x, w, v, p: jax_numpy().tanh(x[0] ** p),
    lambda rng, m: {"p": float(rng.integers(1, 5))},
)
piece(
    "where",
    2,
    lambda x, w, v: o.where(o.greater(x[0], x[1]), x[0] * v, x[1]),
    lambda x, w, v: jax_numpy().where(x[0] > x[1], x[0] * v, x[1]),
)
piece("prelu", 1, lambda x, w, v: o.prelu(x[0], v), lambda x, w, v: jax_numpy().where(x[0] >= 0, x[0], x[0] * v))

# ---- products

piece("matmul", 1, lambda x, w, v: o.matmul(x[0], w), lambda x, w, v: x[0] @ w)
piece(
    "matmul_vector",
    1,
    lambda x, w, v: o.unsqueeze(o.matmul(x[0], v), axes=(1,)) * x[0],
    lambda x, w, v: (x[0] @ v)[:, None] * x[0],
)
piece(
    "matmul_both",
    2,
    lambda x, w, v: o.tanh(o.matmul(o.matmul(x[0], o.transpose(x[1])), x[0])),
    lambda x, w, v: jax_numpy().tanh(x[0] @ x[1].T @ x[0]),
)
piece(
    "gemm",
    1,
    lambda x, w, v: o.gemm(x[0], w, v, alpha=0.5, beta=2.0, trans_b=True),
    lambda x, w, v: 0.5 * x[0] @ w.T + 2 * v,
)
piece(
    "batched",
    2,
    lambda x, w, v: (x[0].reshape((-1, 1, w.shape[0])) @ (x[1].reshape((-1, 1, w.shape[0])) * w)).reshape(
        (-1, w.shape[0])
    ),
    lambda x, w, v: (x[0][:, None] @ (x[1][:, None] * w))[:, 0],
)
piece(
    "einsum",
    2,
    lambda x, w, v: o.einsum(x[0], x[1], w, equation="na,nb,bc->nc"),
    lambda x, w, v: jax_numpy().einsum("na,nb,bc->nc", x[0], x[1], w),
)


def _conv(kind: str, x: Any, w: Any, stride: int, dilation: int, pad: int, taps: int, grouped: bool) -> Any:
    m = w.shape[0]
    kernel = stacked(kind, x, w, taps)
    if grouped:  # [n, 2, m] * [m, 1, taps]
        kernel = kernel[:, :1, :]
        image = (
            o.concat(*[(x * k).reshape((-1, 1, m)) for k in (1.0, 0.5)], axis=1)
            if kind == "ours"
            else jax_numpy().stack([x, 0.5 * x], 1)
        )
        kernel = kernel[: m - m % 2]
    else:
        kernel, image = kernel[:, :1, :], x.reshape((-1, 1, m))
    if kind == "ours":
        y = o.conv(
            image, kernel, strides=(stride,), dilations=(dilation,), pads=(pad, pad + 1), groups=2 if grouped else 1
        )
    else:
        y = lax().conv_general_dilated(
            image,
            kernel,
            (stride,),
            [(pad, pad + 1)],
            rhs_dilation=(dilation,),
            feature_group_count=2 if grouped else 1,
        )
    return mixed(y, m)


piece(
    "conv", 1, lambda x, w, v, **a: _conv("ours", x[0], w, **a), lambda x, w, v, **a: _conv("theirs", x[0], w, **a),
    lambda rng, m: {
        "stride": int(rng.integers(1, 4)), "dilation": int(rng.integers(1, 3)), "pad": int(rng.integers(1, 3)),
        "taps": int(rng.integers(1, 4)), "grouped": bool(rng.integers(2)),
    },
)  # fmt: skip


def _conv2(kind: str, x: Any, y: Any, w: Any, stride: int) -> Any:
    """Over an image [1, 2, n, m], whose rows are as many as a run says."""
    m = w.shape[0]
    kernel = w[:2, :2].reshape((1, 2, 1, 2)) * np.array([1.0, 0.3, -0.7]).reshape(1, 1, 3, 1)
    if kind == "ours":
        image = o.concat(*[a.reshape((1, 1, -1, m)) for a in (x, y)], axis=1)
        made = o.conv(image, kernel, strides=(1, stride), pads=(1, 1, 1, 1))
    else:
        image = jax_numpy().stack([x, y])[None]
        made = lax().conv_general_dilated(image, kernel, (1, stride), [(1, 1), (1, 1)])
    return mixed(made.reshape((-1, made.shape[3])), m)


piece(
    "conv2", 2, lambda x, w, v, **a: _conv2("ours", *x, w, **a), lambda x, w, v, **a: _conv2("theirs", *x, w, **a),
    lambda rng, m: {"stride": int(rng.integers(1, 3))},
)  # fmt: skip


def _conv_transpose(kind: str, x: Any, w: Any, stride: int) -> Any:
    """[n, 1, m] with a kernel [1, 2, m]."""
    m = w.shape[0]
    kernel = w[:2].reshape((1, 2, m))
    if kind == "ours":
        return mixed(o.conv_transpose(x.reshape((-1, 1, m)), kernel, strides=(stride,)), m)
    turned = jax_numpy().swapaxes(kernel[:, :, ::-1], 0, 1)
    made = lax().conv_general_dilated(x[:, None], turned, (1,), [(m - 1, m - 1)], lhs_dilation=(stride,))
    return mixed(made, m)


piece(
    "conv_transpose", 1, lambda x, w, v, **a: _conv_transpose("ours", x[0], w, **a),
    lambda x, w, v, **a: _conv_transpose("theirs", x[0], w, **a),
    lambda rng, m: {"stride": int(rng.integers(1, 3))},
)  # fmt: skip


def _attention(kind: str, q: Any, k: Any, v: Any, w: Any, causal: bool) -> Any:
    """Two heads of m over n places; the values are three wide more."""
    m = w.shape[0]
    if kind == "ours":
        heads = [o.concat(a.reshape((1, 1, -1, m)), (a @ w).reshape((1, 1, -1, m)), axis=1) for a in (q, k, v)]
        made = o.attention(*heads, causal=causal, scale=0.6)
        return made[0, 0] + made[0, 1] * 0.5
    jnp = jax_numpy()
    heads = [jnp.stack([a, a @ w]) for a in (q, k, v)]
    scores = 0.6 * heads[0] @ heads[1].swapaxes(1, 2)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
    made = jnn().softmax(scores, -1) @ heads[2]
    return made[0] + made[1] * 0.5


piece(
    "attention", 3, lambda x, w, v, **a: _attention("ours", *x, w, **a),
    lambda x, w, v, **a: _attention("theirs", *x, w, **a),
    lambda rng, m: {"causal": bool(rng.integers(2))},
)  # fmt: skip

# ---- normalisation


def _axis(rng: np.random.Generator, m: int) -> dict[str, Any]:
    return {"axis": int(rng.integers(-2, 2))}


def _standard(x: Any, axes: Any, epsilon: float) -> Any:
    return (x - x.mean(axes, keepdims=True)) / jax_numpy().sqrt(x.var(axes, keepdims=True) + epsilon)


piece(
    "softmax",
    1,
    lambda x, w, v, axis: o.softmax(x[0], axis=axis),
    lambda x, w, v, axis: jnn().softmax(x[0], axis),
    _axis,
)
piece(
    "log_softmax",
    1,
    lambda x, w, v, axis: o.log_softmax(x[0], axis=axis),
    lambda x, w, v, axis: jnn().log_softmax(x[0], axis),
    _axis,
)
piece(
    "layer_norm",
    1,
    lambda x, w, v: o.layer_norm(x[0], v, o.sin(v), epsilon=0.1),
    lambda x, w, v: _standard(x[0], -1, 0.1) * v + jax_numpy().sin(v),
)
piece(
    "layer_norm_plain",
    1,
    lambda x, w, v: o.layer_norm(x[0] @ w, v, epsilon=0.1),
    lambda x, w, v: _standard(x[0] @ w, -1, 0.1) * v,
)
piece(
    "rms_norm",
    1,
    lambda x, w, v: o.rms_norm(x[0], v, epsilon=0.1),
    lambda x, w, v: x[0] * lax().rsqrt((x[0] ** 2).mean(-1, keepdims=True) + 0.1) * v,
)
piece(
    "batch_norm",
    1,
    lambda x, w, v: o.batch_norm(x[0], v, o.sin(v), w[0], w[1] * w[1] + 0.2, epsilon=0.1),
    lambda x, w, v: (x[0] - w[0]) / jax_numpy().sqrt(w[1] ** 2 + 0.3) * v + jax_numpy().sin(v),
)
piece(
    "instance_norm",
    1,
    lambda x, w, v: o.instance_norm(x[0].reshape((-1, 1, w.shape[0])), v[:1], v[1:2], epsilon=0.1).reshape(
        (-1, w.shape[0])
    ),
    lambda x, w, v: _standard(x[0], -1, 0.1) * v[0] + v[1],
)
piece(
    "group_norm",
    1,
    lambda x, w, v: o.group_norm(x[0].reshape((-1, w.shape[0], 1)), v, o.cos(v), groups=2, epsilon=0.1).reshape(
        (-1, w.shape[0])
    ),
    lambda x, w, v: (
        _standard(x[0].reshape(-1, 2, w.shape[0] // 2), -1, 0.1).reshape(-1, w.shape[0]) * v + jax_numpy().cos(v)
    ),
)
piece(
    "lp_normalization",
    1,
    lambda x, w, v, p: o.lp_normalization(x[0] + 0.1, p=p),
    lambda x, w, v, p: (
        (x[0] + 0.1)
        / (
            jax_numpy().abs(x[0] + 0.1).sum(-1, keepdims=True)
            if p == 1
            else jax_numpy().sqrt(((x[0] + 0.1) ** 2).sum(-1, keepdims=True))
        )
    ),
    lambda rng, m: {"p": int(rng.integers(1, 3))},
)
piece(
    "lrn",
    1,
    lambda x, w, v: o.lrn(x[0].reshape((-1, w.shape[0], 1)), size=3, alpha=0.3).reshape((-1, w.shape[0])),
    lambda x, w, v: (
        x[0]
        / (1 + 0.1 * sum(jax_numpy().pad(x[0] ** 2, ((0, 0), (1, 1)))[:, k : k + w.shape[0]] for k in range(3))) ** 0.75
    ),
)
piece(
    "mean_variance",
    1,
    lambda x, w, v: o.mean_variance_normalization(o.concat(x[0], x[0] * x[0] + v, axis=1), axes=(1,))[:, : w.shape[0]],
    lambda x, w, v: _standard(jax_numpy().concatenate([x[0], x[0] ** 2 + v], 1), 1, 0.0)[:, : w.shape[0]],
)

# ---- reductions

REDUCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    "reduce_sum": (lambda x: x, lambda x, a: x.sum(a, keepdims=True)),
    "reduce_mean": (lambda x: x, lambda x, a: x.mean(a, keepdims=True)),
    "reduce_max": (lambda x: x, lambda x, a: x.max(a, keepdims=True)),
    "reduce_min": (lambda x: x, lambda x, a: x.min(a, keepdims=True)),
    "reduce_prod": (lambda x: x, lambda x, a: x.prod(a, keepdims=True)),
    "reduce_l1": (lambda x: x, lambda x, a: jax_numpy().abs(x).sum(a, keepdims=True)),
    "reduce_l2": (lambda x: x * x + 0.1, lambda x, a: jax_numpy().sqrt(((x * x + 0.1) ** 2).sum(a, keepdims=True))),
    "reduce_log_sum": (lambda x: x * x + 0.1, lambda x, a: jax_numpy().log((x * x + 0.1).sum(a, keepdims=True))),
    "reduce_log_sum_exp": (lambda x: x, lambda x, a: jnn().logsumexp(x, a, keepdims=True)),
    "reduce_sum_square": (lambda x: x, lambda x, a: (x * x).sum(a, keepdims=True)),
}
FUNCTIONS: dict[str, Any] = {
    name: getattr(o, name) for name in (*REDUCTIONS, "global_average_pool", "global_max_pool", "global_lp_pool")
}
AXES = ((0,), (1,), (-1,), (0, 1), (-2,))
for _name, (_before, _reduced) in REDUCTIONS.items():
    piece(
        _name, 1,
        lambda x, w, v, axes, f=FUNCTIONS[_name], b=_before: x[0] * 0.5 + o.tanh(f(b(x[0]), axes=axes)),
        lambda x, w, v, axes, f=_reduced: x[0] * 0.5 + jax_numpy().tanh(f(x[0], axes)),
        lambda rng, m: {"axes": AXES[rng.integers(len(AXES))]},
    )  # fmt: skip


def _running(rng: np.random.Generator, m: int) -> dict[str, Any]:
    return {"axis": int(rng.integers(-2, 2)), "exclusive": bool(rng.integers(2)), "reverse": bool(rng.integers(2))}


def _run(f: str, x: Any, axis: int, exclusive: bool, reverse: bool, unit: float) -> Any:
    jnp = jax_numpy()
    x = jnp.flip(x, axis) if reverse else x
    if exclusive:
        x = jnp.concatenate(
            [
                jnp.full_like(lax().slice_in_dim(x, 0, 1, axis=axis), unit),
                lax().slice_in_dim(x, 0, x.shape[axis] - 1, axis=axis),
            ],
            axis,
        )
    y = getattr(jnp, f)(x, axis)
    return jnp.flip(y, axis) if reverse else y


piece(
    "cum_sum",
    1,
    lambda x, w, v, **a: o.tanh(o.cum_sum(x[0], **a)),
    lambda x, w, v, **a: jax_numpy().tanh(_run("cumsum", x[0], **a, unit=0.0)),
    _running,
)
piece(
    "cum_prod",
    1,
    lambda x, w, v, **a: o.tanh(o.cum_prod(x[0], **a)),
    lambda x, w, v, **a: jax_numpy().tanh(_run("cumprod", x[0], **a, unit=1.0)),
    _running,
)
piece(
    "pair_distances",
    2,
    lambda x, w, v: o.pair_distances(x[0], w) + x[1],
    lambda x, w, v: ((x[0][:, None] - w) ** 2).sum(-1) + x[1],
)

# ---- layout


def _rotated(rng: np.random.Generator, m: int) -> dict[str, Any]:
    return {"k": int(rng.integers(1, m))}


piece(
    "concat",
    2,
    lambda x, w, v, k: o.concat(x[0][:, :k], x[1][:, k:], axis=1),
    lambda x, w, v, k: jax_numpy().concatenate([x[0][:, :k], x[1][:, k:]], 1),
    _rotated,
)
piece(
    "concat_rows",
    2,
    lambda x, w, v: o.tanh(o.concat(x[0], x[1], axis=0).reshape((2, -1, w.shape[0]))[1] * x[0]),
    lambda x, w, v: jax_numpy().tanh(x[1] * x[0]),
)
piece("slice", 1, lambda x, w, v: x[0][:, ::-1] * x[0], lambda x, w, v: x[0][:, ::-1] * x[0])
piece(
    "slice_step", 1, lambda x, w, v: mixed(x[0][:, 1::2], w.shape[0]), lambda x, w, v: mixed(x[0][:, 1::2], w.shape[0])
)
piece(
    "slice_rows",
    1,
    lambda x, w, v: x[0] * x[0][-1:] + x[0][:1] + x[0][::-1],
    lambda x, w, v: x[0] * x[0][-1:] + x[0][:1] + x[0][::-1],
)
piece(
    "transpose",
    1,
    lambda x, w, v: o.transpose(o.softplus(o.transpose(x[0]))) + 0.0,
    lambda x, w, v: jnn().softplus(x[0].T).T,
)
piece(
    "split",
    1,
    lambda x, w, v, k: o.concat(*o.split(x[0], axis=1, sizes=(k, w.shape[0] - k))[::-1], axis=1),
    lambda x, w, v, k: jax_numpy().roll(x[0], -k, 1),
    _rotated,
)
piece(
    "pad",
    1,
    lambda x, w, v, mode: mixed(o.pad(x[0], pads=(0, 1, 0, 2), mode=mode), w.shape[0]),
    lambda x, w, v, mode: mixed(jax_numpy().pad(x[0], ((0, 0), (1, 2)), mode=mode), w.shape[0]),
    lambda rng, m: {"mode": ("constant", "edge", "reflect", "wrap")[rng.integers(4)]},
)
piece(
    "tile",
    1,
    lambda x, w, v: mixed(o.tile(x[0], repeats=(1, 2)), w.shape[0]),
    lambda x, w, v: mixed(jax_numpy().tile(x[0], (1, 2)), w.shape[0]),
)
piece(
    "expand",
    1,
    lambda x, w, v: o.expand(v, shape=x[0].shape) * x[0],
    lambda x, w, v: jax_numpy().broadcast_to(v, x[0].shape) * x[0],
)
piece(
    "squeeze", 1, lambda x, w, v: o.squeeze(o.unsqueeze(x[0], axes=(0, 2)), axes=(0, 2)) * v, lambda x, w, v: x[0] * v
)
piece(
    "trilu",
    1,
    lambda x, w, v, upper: o.trilu(x[0], upper=upper) + v,
    lambda x, w, v, upper: (jax_numpy().triu if upper else jax_numpy().tril)(x[0]) + v,
    lambda rng, m: {"upper": bool(rng.integers(2))},
)
piece(
    "depth_to_space",
    1,
    lambda x, w, v: mixed(o.depth_to_space(x[0][:, :4].reshape((-1, 4, 1, 1)), block=2), w.shape[0]),
    lambda x, w, v: mixed(x[0][:, :4], w.shape[0]),
)
piece(
    "space_to_depth",
    1,
    lambda x, w, v: mixed(o.space_to_depth(x[0][:, :4].reshape((-1, 1, 2, 2)), block=2), w.shape[0]),
    lambda x, w, v: mixed(x[0][:, :4], w.shape[0]),
)

# ---- places


def _places(rng: np.random.Generator, m: int) -> dict[str, Any]:
    return {"at": np.array(rng.integers(0, m, m))}


piece("gather", 1, lambda x, w, v, at: o.gather(x[0], at, axis=1), lambda x, w, v, at: x[0][:, at], _places)
piece("gather_rows", 2, lambda x, w, v, at: o.matmul(x[0], o.gather(w, at)), lambda x, w, v, at: x[0] @ w[at], _places)
piece(
    "gather_elements",
    1,
    lambda x, w, v, at: o.matmul(x[0], o.gather_elements(w, at[None, :], axis=0) * w),
    lambda x, w, v, at: x[0] @ (jax_numpy().take_along_axis(w, at[None], 0) * w),
    _places,
)
piece(
    "gather_nd",
    1,
    lambda x, w, v, at: x[0] * o.gather_nd(w, np.stack([at, at[::-1]], 1)),
    lambda x, w, v, at: x[0] * w[at, at[::-1]],
    _places,
)
piece(
    "scatter_elements",
    1,
    lambda x, w, v, at: o.matmul(
        x[0], o.scatter_elements(w, at[None, :], o.unsqueeze(v, axes=(0,)), axis=0, reduction="add")
    ),
    lambda x, w, v, at: x[0] @ w.at[at, np.arange(len(at))].add(v),
    _places,
)
piece(
    "scatter_nd",
    1,
    lambda x, w, v, at: o.matmul(x[0], o.scatter_nd(w, at[:, None], w * v, reduction="add")),
    lambda x, w, v, at: x[0] @ w.at[at].add(w * v),
    _places,
)
piece(
    "scatter_set",
    1,
    lambda x, w, v, at: o.matmul(x[0], o.scatter_nd(w, at[:1, None], o.unsqueeze(v, axes=(0,)))),
    lambda x, w, v, at: x[0] @ w.at[at[0]].set(v),
    _places,
)
piece(
    "top_k",
    1,
    lambda x, w, v, k: mixed(o.top_k(x[0], k=k)[0], w.shape[0]),
    lambda x, w, v, k: mixed(lax().top_k(x[0], k)[0], w.shape[0]),
    _rotated,
)
piece(
    "update",
    1,
    lambda x, w, v, k: x[0] @ o.dynamic_update_slice(w, o.unsqueeze(v, axes=(0,)) * 2, np.int64(k)),
    lambda x, w, v, k: x[0] @ w.at[k].set(v * 2),
    _rotated,
)
piece(
    "reverse_sequence",
    1,
    lambda x, w, v, at: x[0] @ o.reverse_sequence(w, at, batch_axis=0, time_axis=1),
    lambda x, w, v, at: (
        x[0]
        @ jax_numpy().take_along_axis(
            w, np.where(np.arange(len(at)) < at[:, None], at[:, None] - 1 - np.arange(len(at)), np.arange(len(at))), 1
        )
    ),
    lambda rng, m: {"at": np.array(rng.integers(1, m + 1, m))},
)

# ---- windows


def _windows(rng: np.random.Generator, m: int) -> dict[str, Any]:
    return {"kernel": int(rng.integers(1, 4)), "stride": int(rng.integers(1, 3)), "pad": int(rng.integers(0, 2))}


def _pooled(x: Any, kernel: int, stride: int, pad: int, unit: float, f: str) -> Any:
    return lax().reduce_window(x, unit, getattr(lax(), f), (1, kernel), (1, stride), ((0, 0), (pad, pad)))


def _pool(f: Any, x: Any, m: int, kernel: int, stride: int, pad: int, **more: Any) -> Any:
    pad = min(pad, kernel - 1)
    return mixed(f(x.reshape((-1, 1, m)), kernel=(kernel,), strides=(stride,), pads=(pad, pad), **more), m)


def _their_pool(x: Any, m: int, kernel: int, stride: int, pad: int, unit: float, f: str) -> Any:
    return mixed(_pooled(x, kernel, stride, min(pad, kernel - 1), unit, f), m)


piece(
    "max_pool",
    1,
    lambda x, w, v, **a: _pool(o.max_pool, x[0] * v + w[0], w.shape[0], **a),
    lambda x, w, v, **a: _their_pool(x[0] * v + w[0], w.shape[0], **a, unit=-np.inf, f="max"),
    _windows,
)
piece(
    "average_pool",
    1,
    lambda x, w, v, **a: _pool(o.average_pool, x[0], w.shape[0], **a, count_include_pad=True),
    lambda x, w, v, **a: _their_pool(x[0], w.shape[0], **a, unit=0.0, f="add") / a["kernel"],
    _windows,
)
piece(
    "average_pool_inside",
    1,
    lambda x, w, v, **a: _pool(o.average_pool, x[0], w.shape[0], **a),
    lambda x, w, v, **a: mixed(
        _pooled(x[0], a["kernel"], a["stride"], min(a["pad"], a["kernel"] - 1), 0.0, "add")
        / _pooled(jax_numpy().ones_like(x[0]), a["kernel"], a["stride"], min(a["pad"], a["kernel"] - 1), 0.0, "add"),
        w.shape[0],
    ),
    _windows,
)
piece(
    "lp_pool",
    1,
    lambda x, w, v, **a: _pool(o.lp_pool, x[0] * x[0] + 0.3, w.shape[0], **a),
    lambda x, w, v, **a: mixed(
        jax_numpy().sqrt(
            _pooled((x[0] ** 2 + 0.3) ** 2, a["kernel"], a["stride"], min(a["pad"], a["kernel"] - 1), 0.0, "add")
        ),
        w.shape[0],
    ),
    _windows,
)
GLOBAL = {
    "global_average_pool": lambda x: x.mean(-1),
    "global_max_pool": lambda x: x.max(-1),
    "global_lp_pool": lambda x: jax_numpy().sqrt((x * x).sum(-1)),
}
for _name, _theirs in GLOBAL.items():
    piece(
        _name, 1,
        lambda x, w, v, f=FUNCTIONS[_name]: x[0] * f((x[0] + v * 0.1).reshape((-1, 1, w.shape[0]))).reshape((-1, 1)),
        lambda x, w, v, f=_theirs: x[0] * f(x[0] + v * 0.1)[:, None],
    )  # fmt: skip


# ---- whole functions


@dataclass(frozen=True)
class Program:
    """A function of inputs x, y [n, m], w [m, m] and v [m], which gives [n, m]."""

    m: int
    steps: tuple[tuple[str, tuple[int, ...], tuple[tuple[str, Any], ...]], ...]

    def __call__(self, x: Any, y: Any, w: Any, v: Any, ours: bool) -> Any:
        """The value of the last step, of graph values or of jax's arrays, and of those that nothing reads."""
        values, used = [x, y], {0, 1}
        for name, places, attributes in self.steps:
            one = PIECES[name]
            values.append((one.ours if ours else one.theirs)([values[i] for i in places], w, v, **dict(attributes)))
            used.update(places)
        rest = [values[i] for i in range(len(values) - 1) if i not in used]
        return sum(rest, values[-1])

    def __str__(self) -> str:
        lines = [f"m = {self.m}"]
        for k, (name, places, attributes) in enumerate(self.steps):
            lines.append(f"{k + 2}: {name}{places} {dict(attributes)}")
        return "\n".join(lines)


def drawn(rng: np.random.Generator, length: int) -> Program:
    """A program of that many steps; half of what has grown is brought back by tanh."""
    m = int(rng.choice((4, 6)))
    steps: list[tuple[str, tuple[int, ...], tuple[tuple[str, Any], ...]]] = []
    names = sorted(PIECES)
    for _ in range(length):
        name = names[rng.integers(len(names))]
        count = len(steps) + 2
        places = tuple(int(max(0, count - 1 - rng.geometric(0.5) + 1)) for _ in range(PIECES[name].arity))
        steps.append((name, places, tuple(PIECES[name].draw(rng, m).items())))
        if rng.random() < 0.3:
            steps.append(("tanh", (len(steps) + 1,), ()))
    return Program(m, tuple(steps))
