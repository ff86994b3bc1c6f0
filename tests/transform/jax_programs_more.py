"""More pieces for `jax_programs`: sampling, signals, recurrent layers, control flow, complex numbers, determinants."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
from jax_programs import _places, jax_numpy, jnn, lax, mixed, piece, weights

import rlx
from rlx import Dim
from rlx import ops as o

# ---- places between elements


def sampled(image: Any, y: Any, x: Any, *lead: Any) -> Any:
    """image[*lead, h, w] at the places y and x, linear between elements and zero outside."""
    jnp = jax_numpy()
    h, w = image.shape[-2:]
    total = 0.0
    for dy in (0, 1):
        for dx in (0, 1):
            at_y, at_x = jnp.floor(y) + dy, jnp.floor(x) + dx
            weight = (1 - jnp.abs(at_y - y)) * (1 - jnp.abs(at_x - x))
            inside = (at_y >= 0) & (at_y < h) & (at_x >= 0) & (at_x < w)
            rows, columns = (jnp.where(inside, a, 0).astype(int) for a in (at_y, at_x))
            total = total + jnp.where(inside, image[(*lead, rows, columns)], 0.0) * weight
    return total


def _grid(kind: str, x: Any, y: Any, w: Any, padding: str, align: bool) -> Any:
    m = w.shape[0]
    if kind == "ours":
        grid = o.tanh(y).reshape((1, -1, m // 2, 2)) * 1.2
        made = o.grid_sample(x.reshape((1, 1, -1, m)), grid, padding=padding, align_corners=align)
        return mixed(made[0, 0], m)
    jnp = jax_numpy()
    grid = jnp.tanh(y).reshape(-1, m // 2, 2) * 1.2
    places = []
    for d, n in ((1, x.shape[0]), (0, m)):
        p = (grid[..., d] + 1) / 2 * (n - 1) if align else ((grid[..., d] + 1) * n - 1) / 2
        places.append(jnp.clip(p, 0, n - 1) if padding == "border" else p)
    return mixed(sampled(x, *places), m)


piece(
    "grid_sample", 2, lambda x, w, v, **a: _grid("ours", *x, w, **a), lambda x, w, v, **a: _grid("theirs", *x, w, **a),
    lambda rng, m: {"padding": ("zeros", "border")[rng.integers(2)], "align": bool(rng.integers(2))},
)  # fmt: skip


def _affine(kind: str, x: Any, w: Any, align: bool) -> Any:
    m = w.shape[0]
    theta = w[:2, :3]
    if kind == "ours":
        made = o.affine_grid(theta.reshape((1, 2, 3)), size=(2, m), align_corners=align)[0]
        return x * made[0, :, 0] + made[1, :, 1]
    jnp = jax_numpy()
    axes = [np.arange(n) * 2 / max(n - 1, 1) - 1 if align else (np.arange(n) * 2 + 1) / n - 1 for n in (2, m)]
    rows, columns = np.meshgrid(*axes, indexing="ij")
    made = jnp.einsum("ij,hwj->hwi", theta, np.stack([columns, rows, np.ones_like(rows)], -1))
    return x * made[0, :, 0] + made[1, :, 1]


piece(
    "affine_grid", 1, lambda x, w, v, **a: _affine("ours", x[0], w, **a),
    lambda x, w, v, **a: _affine("theirs", x[0], w, **a), lambda rng, m: {"align": bool(rng.integers(2))},
)  # fmt: skip


def _deformed(kind: str, x: Any, y: Any, w: Any, masked: bool, whole: bool) -> Any:
    """Images [n, 1, 1, m] under windows of 1 x 2, whose taps are moved by y."""
    m = w.shape[0]
    moves, mask = y @ (weights(m, 4 * (m - 1)) * 0.2), w[0, :1] if masked else None
    if kind == "ours":
        image, offset = x.reshape((-1, 1, 1, m)), moves.reshape((-1, 4, 1, m - 1))
        masks = () if mask is None else (offset[:, :2] * mask,)
        if whole:
            bias = (o.concat(w[1, :1], w[1, :1], axis=0),) if masked else ()
            made = o.deform_conv(image, w[:2, :2].reshape((2, 1, 1, 2)), offset, *bias, *masks)
            return mixed(made.reshape((-1, 2 * (m - 1))), m)
        made = o.deform_sample(
            image, offset, *masks, kernel=(1, 2), strides=(1, 1), dilations=(1, 1), pads=(0, 0, 0, 0)
        )
        return mixed(made.reshape((-1, 2 * (m - 1))), m)
    jnp = jax_numpy()
    offset = moves.reshape(-1, 2, 2, m - 1)
    across = np.arange(m - 1) + np.arange(2)[:, None] + offset[:, :, 1]
    made = sampled(x[:, None], offset[:, :, 0], across, np.arange(len(x))[:, None, None])  # [n, taps, m - 1]
    made = made if mask is None else made * offset.reshape(-1, 4, m - 1)[:, :2] * mask
    if whole:
        made = jnp.einsum("ntl,ct->ncl", made, w[:2, :2]) + (w[1, 0] if masked else 0.0)
    return mixed(made.reshape(len(x), -1), m)


for _name, _whole in (("deform_conv", True), ("deform_sample", False)):
    piece(
        _name, 2, lambda x, w, v, whole=_whole, **a: _deformed("ours", *x, w, whole=whole, **a),
        lambda x, w, v, whole=_whole, **a: _deformed("theirs", *x, w, whole=whole, **a),
        lambda rng, m: {"masked": bool(rng.integers(2))},
    )  # fmt: skip

BINS = weights(6, 1).reshape(3, 2)
REGIONS = np.array([[0.3, 0.1, 3.4, 2.2], [1.1, 0.6, 2.3, 3.8], [0.0, 0.0, 1.5, 1.0]])  # x1, y1, x2, y2


def _regions(kind: str, x: Any, w: Any, v: Any, op: str, mode: str, half: bool) -> Any:
    """Regions of the image w, moved by v, pooled to 2 x 2."""
    m = w.shape[0]
    rois = REGIONS + v[:1] * 0.1
    if kind == "ours":
        extra = {"samples": 2} if op == "roi_align" else {}
        made = getattr(o, op)(w.reshape((1, 1, m, m)), rois, np.zeros(3, np.int64), size=(2, 2), mode=mode,
                              half_pixel=half, **extra)  # fmt: skip
        return x * o.reduce_sum(made * weights(12, 1).reshape(3, 1, 2, 2), keepdims=False)
    jnp = jax_numpy()
    total = 0.0
    for r in range(3):
        axes = []
        for d in (1, 0):
            low, length = rois[r, d] - 0.5 * half, rois[r, d + 2] - rois[r, d]
            step = (length if half else jnp.maximum(length, 1.0)) / 2
            each = 2 if op == "roi_align" else jnp.ceil(step)
            number = np.arange(2 if op == "roi_align" else 4)
            p = low + np.arange(2)[:, None] * step + (number + 0.5) * step / each
            axes.append((p, number < each, each))
        (ys, on_y, count_y), (xs, on_x, count_x) = axes
        y, z = ys[:, :, None, None] + 0 * xs, xs + 0 * ys[:, :, None, None]
        near = (y >= -1) & (y <= m) & (z >= -1) & (z <= m)
        y, z = jnp.clip(jnp.where(near, y, 0.0), 0, m - 1), jnp.clip(jnp.where(near, z, 0.0), 0, m - 1)
        counted = near & on_y[..., None, None] & on_x if op != "roi_align" else near
        if mode == "avg":
            bins = jnp.where(counted, sampled(w, y, z), 0.0).sum((1, 3)) / (count_y * count_x)
        else:
            terms = []
            for dy in (0, 1):
                for dz in (0, 1):
                    at = [jnp.minimum(jnp.floor(p) + t, m - 1).astype(int) for p, t in ((y, dy), (z, dz))]
                    parts = [(p - jnp.floor(p)) if t else 1 - (p - jnp.floor(p)) for p, t in ((y, dy), (z, dz))]
                    terms.append(jnp.where(near, w[at[0], at[1]] * parts[0] * parts[1], 0.0))
            there = on_y[..., None, None] & on_x if op != "roi_align" else True
            bins = jnp.where(there, jnp.stack(terms).max(0), -jnp.inf).max((1, 3))
        total = total + (bins * weights(12, 1).reshape(3, 2, 2)[r]).sum()
    return x * total


for _name in ("roi_align", "roi_align_adaptive"):
    piece(
        _name, 1, lambda x, w, v, op=_name, **a: _regions("ours", x[0], w, v, op, **a),
        lambda x, w, v, op=_name, **a: _regions("theirs", x[0], w, v, op, **a),
        lambda rng, m: {"mode": ("avg", "max")[rng.integers(2)], "half": bool(rng.integers(2))},
    )  # fmt: skip

piece(
    "max_roi_pool",
    1,
    lambda x, w, v: x[0] * o.reduce_sum(
        o.max_roi_pool(w.reshape((1, 1, *w.shape)), np.array([[0, 0, 0, 3, 2.0]]), size=(3, 2)) * BINS, keepdims=False
    ),
    lambda x, w, v: x[0] * sum(w[i, 2 * j : 2 * j + 2].max() * BINS[i, j] for i in range(3) for j in range(2)),
)  # fmt: skip

# ---- layout

NUMBERS = count()


def some() -> Dim:
    """A size that the data decide."""
    return Dim(f"some{next(NUMBERS)}", 0, 64)


def _cropped(x: Any, size: int) -> Any:
    """The middle of the last axis, or zeros around it."""
    m = x.shape[1]
    if size <= m:
        return x[:, (m - size) // 2 : (m - size) // 2 + size]
    return jax_numpy().pad(x, ((0, 0), ((size - m) // 2, size - m - (size - m) // 2)))


piece(
    "center_crop_pad",
    1,
    lambda x, w, v, size: mixed(o.center_crop_pad(x[0], sizes=(size,), axes=(1,)), w.shape[0]),
    lambda x, w, v, size: mixed(_cropped(x[0], size), w.shape[0]),
    lambda rng, m: {"size": int(rng.integers(1, m + 4))},
)


def _added(x: Any) -> Any:
    """Windows of two, [n, 2, k], added up."""
    return jax_numpy().pad(x[:, 0], ((0, 0), (0, 1))) + jax_numpy().pad(x[:, 1], ((0, 0), (1, 0)))


piece(
    "col2im",
    1,
    lambda x, w, v: mixed(
        o.col2im(x[0].reshape((-1, 2, w.shape[0] // 2)), image=(w.shape[0] // 2 + 1,), kernel=(2,)), w.shape[0]
    ),
    lambda x, w, v: mixed(_added(x[0].reshape(-1, 2, w.shape[0] // 2)), w.shape[0]),
)
piece(
    "compress",
    1,
    lambda x, w, v: x[0] * o.reduce_sum(o.compress(w, w[:, 0] > -0.3, count=some(), axis=0), axes=(0,)),
    lambda x, w, v: x[0] * jax_numpy().where(w[:, :1] > -0.3, w, 0.0).sum(0, keepdims=True),
)
piece(
    "unique",
    1,
    lambda x, w, v: x[0] * o.reduce_sum_square(o.unique(w, count=some())[0], keepdims=False),
    lambda x, w, v: x[0] * (w * w).sum(),
)
piece("eye_like", 1, lambda x, w, v: x[0] + o.eye_like(w, k=1)[0], lambda x, w, v: x[0] + np.eye(w.shape[0], k=1)[0])
piece(
    "as_shape",
    1,
    lambda x, w, v: o.as_shape(o.tanh(x[0]), shape=x[0].shape) * x[0],
    lambda x, w, v: jax_numpy().tanh(x[0]) * x[0],
)
piece(
    "again", 1, lambda x, w, v: rlx.checkpoint(lambda a: o.tanh(o.sin(a) @ w))(x[0]),
    lambda x, w, v: jax_numpy().tanh(jax_numpy().sin(x[0]) @ w),
)  # fmt: skip
piece(
    "relabel",
    1,
    lambda x, w, v: x[0] * o.relabel(w, source=(0, 0), target=(0,)),
    lambda x, w, v: x[0] * jax_numpy().diagonal(w),
)
piece(
    "max_unpool",
    1,
    lambda x, w, v, at: x[0] @ o.max_unpool(
        w[:2].reshape((1, 1, 2, w.shape[0])), at.reshape(1, 1, 2, -1), sizes=w.shape
    )[0, 0],
    lambda x, w, v, at: x[0] @ jax_numpy().zeros(w.size).at[at].set(w[:2].reshape(-1)).reshape(w.shape),
    lambda rng, m: {"at": rng.permutation(m * m)[: 2 * m].astype(np.int64)},
)  # fmt: skip
piece(
    "one_hot",
    1,
    lambda x, w, v, at: x[0] * o.reduce_sum(o.one_hot(at, v[:2], depth=w.shape[0]) * w, axes=(0,), keepdims=False),
    lambda x, w, v, at: x[0] * ((v[0] + (v[1] - v[0]) * jnn().one_hot(at, w.shape[0])) * w).sum(0),
    _places,
)
piece(
    "arange",
    1,
    lambda x, w, v: x[0] * o.reduce_sum_square(
        o.arange(v[0], v[0] + 3.5 * (v[1] * v[1] + 0.5), v[1] * v[1] + 0.5, count=some()), keepdims=False
    ),
    lambda x, w, v: x[0] * ((v[0] + np.arange(4) * (v[1] ** 2 + 0.5)) ** 2).sum(),
)  # fmt: skip

# ---- resampling


def _resized(x: Any, k: int, nearest: bool) -> Any:
    """Linear or nearest between the centres of elements."""
    m = x.shape[1]
    p = np.clip((np.arange(k) + 0.5) * m / k - 0.5, 0, m - 1)
    if nearest:
        return x[:, np.clip(np.ceil((np.arange(k) + 0.5) * m / k - 0.5 - 0.5), 0, m - 1).astype(int)]
    low = np.floor(p).astype(int)
    return x[:, low] * (1 - (p - low)) + x[:, np.minimum(low + 1, m - 1)] * (p - low)


def _count(rng: np.random.Generator, m: int) -> dict[str, Any]:
    return {"k": int(rng.integers(2, 2 * m))}


piece(
    "interpolate",
    1,
    lambda x, w, v, k: mixed(o.interpolate(x[0], sizes=(x[0].shape[0], k)), w.shape[0]),
    lambda x, w, v, k: mixed(_resized(x[0], k, False), w.shape[0]),
    _count,
)
piece(
    "interpolate_axis",
    1,
    lambda x, w, v, k: mixed(o.interpolate_axis(x[0], axis=1, size=k), w.shape[0]),
    lambda x, w, v, k: mixed(_resized(x[0], k, False), w.shape[0]),
    _count,
)
piece(
    "resize_nearest",
    1,
    lambda x, w, v, k: mixed(o.resize_nearest(x[0], sizes=(x[0].shape[0], k)), w.shape[0]),
    lambda x, w, v, k: mixed(_resized(x[0], k, True), w.shape[0]),
    _count,
)

# ---- complex numbers and signals


def _pairs(z: Any) -> Any:
    return jax_numpy().stack([z.real, z.imag], -1)


def _as_complex(x: Any) -> Any:
    pairs = x.reshape(x.shape[0], -1, 2)
    return pairs[..., 0] + 1j * pairs[..., 1]


piece(
    "complex_mul",
    2,
    lambda x, w, v: o.complex_mul(*(a.reshape((-1, w.shape[0] // 2, 2)) for a in x)).reshape((-1, w.shape[0])),
    lambda x, w, v: _pairs(_as_complex(x[0]) * _as_complex(x[1])).reshape(x[0].shape),
)
piece(
    "make_complex",
    2,
    lambda x, w, v: (
        np.real(np.exp(o.make_complex(o.sin(x[0]), x[1])[:, ::-1]) * (v + 1j)) + np.abs(o.make_complex(x[1], x[0]) + 2)
    ),
    lambda x, w, v: (
        (jax_numpy().exp((jax_numpy().sin(x[0]) + 1j * x[1])[:, ::-1]) * (v + 1j)).real
        + jax_numpy().abs(x[1] + 1j * x[0] + 2)
    ),
)
piece(
    "fft",
    1,
    lambda x, w, v: np.imag(np.fft.fft(x[0])) + np.real(np.fft.ifft(x[0] * np.exp(1j * v))),
    lambda x, w, v: jax_numpy().fft.fft(x[0]).imag
    + jax_numpy().fft.ifft(x[0] * jax_numpy().exp(1j * v)).real,
)  # fmt: skip


def _dft(op: str, x: Any, m: int, length: int, inverse: bool, onesided: bool) -> Any:
    pairs = x.reshape((-1, m, 1)) if onesided and not inverse else x.reshape((-1, m // 2, 2))
    return mixed(getattr(o, op)(pairs, length=length, inverse=inverse, onesided=onesided), m)


def _their_dft(x: Any, m: int, length: int, inverse: bool, onesided: bool) -> Any:
    fft = jax_numpy().fft
    if onesided:
        made = fft.irfft(_as_complex(x), length)[..., None] if inverse else _pairs(fft.rfft(x, length))
    else:
        made = _pairs((fft.ifft if inverse else fft.fft)(_as_complex(x), length))
    return mixed(made, m)


for _name in ("dft", "dft_at_run"):
    piece(
        _name, 1, lambda x, w, v, op=_name, **a: _dft(op, x[0], w.shape[0], **a),
        lambda x, w, v, **a: _their_dft(x[0], w.shape[0], **{k: b for k, b in a.items() if k != "op"}),
        lambda rng, m: {
            "length": int(rng.integers(2, 2 * m)), "inverse": bool(rng.integers(2)), "onesided": bool(rng.integers(2)),
        },
    )  # fmt: skip


def _framed(x: Any, length: int, step: int) -> Any:
    starts = np.arange((x.shape[1] - length) // step + 1) * step
    return x[:, starts[:, None] + np.arange(length)]


piece(
    "frames",
    1,
    lambda x, w, v: mixed(o.frames(x[0].reshape((-1, w.shape[0], 1)), length=3, step=1), w.shape[0]),
    lambda x, w, v: mixed(_framed(x[0], 3, 1), w.shape[0]),
)
piece(
    "stft",
    1,
    lambda x, w, v: mixed(o.stft(x[0].reshape((-1, w.shape[0], 1)), v[:4], step=2, length=4), w.shape[0]),
    lambda x, w, v: mixed(_pairs(jax_numpy().fft.rfft(_framed(x[0], 4, 2) * v[:4])), w.shape[0]),
)
piece(
    "welch_peaks",
    1,
    lambda x, w, v: x[0] * o.welch_peaks(w, v, k=1, group=w.shape[0])[0, 0, 1],
    lambda x, w, v: x[0] * (jax_numpy().abs(jax_numpy().fft.rfft(w * v)) ** 2 / w.shape[0]).mean(0).max(),
)
piece(
    "divide_by_size",
    1,
    lambda x, w, v: o.divide_by_size(x[0] * v, size=x[0].shape[0]),
    lambda x, w, v: x[0] * v / x[0].shape[0],
)
piece(
    "prefix",
    1,
    lambda x, w, v, kind, reverse: o.tanh(o.prefix(x[0], axis=1, kind=kind, reverse=reverse)),
    lambda x, w, v, kind, reverse: jax_numpy().tanh(
        (jax_numpy().cumsum if kind == "add" else jax_numpy().cumprod)(x[0][:, :: -1 if reverse else 1], 1)[
            :, :: -1 if reverse else 1
        ]
    ),
    lambda rng, m: {"kind": ("add", "mul")[rng.integers(2)], "reverse": bool(rng.integers(2))},
)
piece(
    "rotary_embedding",
    2,
    lambda x, w, v: o.rotary_embedding(
        x[0].reshape((1, 1, -1, w.shape[0])), *(f(x[1][:, : w.shape[0] // 2]).reshape((1, -1, w.shape[0] // 2))
        for f in (o.cos, o.sin)),
    )[0, 0],
    lambda x, w, v: _turned(x[0], x[1][:, : w.shape[0] // 2]),
)  # fmt: skip


def _turned(x: Any, angle: Any) -> Any:
    jnp = jax_numpy()
    first, second = jnp.split(x, 2, 1)
    return jnp.concatenate(
        [first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle) + first * jnp.sin(angle)], 1
    )


# ---- products, decoded integers, determinants

piece(
    "grouped_matmul",
    2,
    lambda x, w, v, at: x[0] * o.grouped_matmul(
        w, o.concat(w[None], w[None] * v, axis=0), at % 2
    )[0] + x[1],
    lambda x, w, v, at: x[0] * (w[0] @ (w * v if at[0] % 2 else w)) + x[1],
    _places,
)  # fmt: skip
piece(
    "dequantize",
    1,
    lambda x, w, v: x[0] * o.dequantize(np.arange(w.shape[0], dtype=np.int8), v, axis=0, to="f64"),
    lambda x, w, v: x[0] * (np.arange(len(v), dtype="f") * v.astype("f")).astype("d"),
)
piece(
    "det",
    1,
    lambda x, w, v: x[0] * o.det(w) + o.det(x[0][:, :4].reshape((-1, 2, 2))).reshape((-1, 1)),
    lambda x, w, v: x[0] * jax_numpy().linalg.det(w)
    + jax_numpy().linalg.det(x[0][:, :4].reshape(-1, 2, 2))[:, None],
)  # fmt: skip

# ---- recurrent layers: n steps of one sequence


def _recurrent(kind: str, op: str, x: Any, w: Any, v: Any, direction: str) -> Any:
    m, gates = w.shape[0], {"rnn": 1, "gru": 3, "lstm": 4}[op]
    into, r = weights(gates * 2, m) @ w, weights(gates * 2, 2) * v[0]
    if kind == "ours":
        made = getattr(o, op)(
            x.reshape((-1, 1, m)), into.reshape((1, gates * 2, m)), r.reshape((1, gates * 2, 2)), direction=direction
        )[0]
        return mixed(made.reshape((-1, 2)), m)
    jnp = jax_numpy()
    steps = x @ into.T
    sigmoid, tanh = jnn().sigmoid, jnp.tanh

    def step(carry: Any, s: Any) -> Any:
        h, c = carry
        parts = [s[2 * k : 2 * k + 2] for k in range(gates)]
        back = [r[2 * k : 2 * k + 2] @ h for k in range(gates)]
        if op == "rnn":
            h = tanh(parts[0] + back[0])
        elif op == "gru":
            z, reset = sigmoid(parts[0] + back[0]), sigmoid(parts[1] + back[1])
            h = (1 - z) * tanh(parts[2] + r[4:6] @ (reset * h)) + z * h
        else:
            i, out, f = (sigmoid(parts[k] + back[k]) for k in range(3))
            c = f * c + i * tanh(parts[3] + back[3])
            h = out * tanh(c)
        return (h, c), h

    none = jnp.zeros(2)
    return mixed(lax().scan(step, (none, none), steps, reverse=direction == "reverse")[1], m)


for _name in ("rnn", "gru", "lstm"):
    piece(
        _name, 1, lambda x, w, v, op=_name, **a: _recurrent("ours", op, x[0], w, v, **a),
        lambda x, w, v, op=_name, **a: _recurrent("theirs", op, x[0], w, v, **a),
        lambda rng, m: {"direction": ("forward", "reverse")[rng.integers(2)]},
    )  # fmt: skip
piece(
    "recurrence",
    1,
    lambda x, w, v: mixed(
        o.recurrence(x[0][:, :2].reshape((-1, 1, 2)), w[:2, :2].reshape((1, 2, 2)), cell="rnn")[0].reshape((-1, 2)),
        w.shape[0],
    ),
    lambda x, w, v: mixed(
        lax().scan(lambda h, s: ((h := jax_numpy().tanh(s + w[:2, :2] @ h)), h), jax_numpy().zeros(2), x[0][:, :2])[1],
        w.shape[0],
    ),
)

# ---- control flow

piece(
    "if",
    2,
    lambda x, w, v: rlx.cond(o.reduce_sum(x[0], keepdims=False) > 0, lambda: x[0] * x[1], lambda: o.sin(x[1])),
    lambda x, w, v: lax().cond(x[0].sum() > 0, lambda: x[0] * x[1], lambda: jax_numpy().sin(x[1])),
)


def _looped(kind: str, x: Any, w: Any, v: Any, reverse: bool, inner: bool) -> Any:
    sin, cond, scan = (o.sin, rlx.cond, rlx.scan) if kind == "ours" else (jax_numpy().sin, lax().cond, lax().scan)

    def step(carry: Any, row: Any) -> Any:
        c = sin(carry @ w) * row + v
        c = cond(c[0] > 0, lambda: c * row, lambda: c - row) if inner else c
        return c, carry * row

    last, rows = scan(step, v * 0.5, x, reverse=reverse)
    return rows + last


piece(
    "scan", 1, lambda x, w, v, **a: _looped("ours", x[0], w, v, **a),
    lambda x, w, v, **a: _looped("theirs", x[0], w, v, **a),
    lambda rng, m: {"reverse": bool(rng.integers(2)), "inner": bool(rng.integers(2))},
)  # fmt: skip
