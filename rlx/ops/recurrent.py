"""Recurrent layers over whole sequences: simple, gated (GRU) and long short-term memory (LSTM).

A step depends on the one before: they have no scalar form and run as host calls on devices without a kernel for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Size, unify
from rlx.ops.base import Op, Work, check_kind, check_same_dtype, register, tensor_bytes, widened
from rlx.ops.elementwise import sigmoid

__all__ = ["Gru", "Lstm", "Rnn"]

Activation = Callable[[Array], Array]
# name: the function of (x, alpha, beta), and the defaults of the two (None: the function has no such parameter)
ACTIVATIONS: dict[str, tuple[Callable[[Any, Any, Any], Any], float | None, float | None]] = {
    "relu": (lambda x, a, b: np.maximum(x, 0), None, None),
    "tanh": (lambda x, a, b: np.tanh(x), None, None),
    "sigmoid": (lambda x, a, b: sigmoid(x), None, None),
    "affine": (lambda x, a, b: a * x + b, 1.0, 0.0),
    "leakyrelu": (lambda x, a, b: np.where(x >= 0, x, a * x), 0.01, None),
    "thresholdedrelu": (lambda x, a, b: np.where(x >= a, x, 0), 1.0, None),
    "scaledtanh": (lambda x, a, b: a * np.tanh(b * x), 1.0, 1.0),
    "hardsigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1), 0.2, 0.5),
    "elu": (lambda x, a, b: np.where(x >= 0, x, a * np.expm1(np.minimum(x, 0))), 1.0, None),
    "softsign": (lambda x, a, b: x / (1 + np.abs(x)), None, None),
    "softplus": (lambda x, a, b: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), None, None),
}
DIRECTIONS = ("forward", "reverse", "bidirectional")


class _Recurrent(Op):
    """Base of the recurrent layers; D is 2 when bidirectional (else 1), G the gates of the cell, H the hidden size.

    Inputs: x [T, B, I], w [D, G H, I], r [D, G H, H], then those that `optional` names, in its order: "bias" [D, 2 G H]
    (of w, then of r), "lengths" i32 [B], "initial_h" [D, B, H], and for LSTM "initial_c" [D, B, H] and "peepholes"
    [D, 3 H] (input, output, forget). Outputs: all states [T, D, B, H] (0 beyond a sequence's length), the last
    [D, B, H], and for LSTM the last cell. With `batch_first` x is [B, T, I], states are [B, T, D, H], [B, D, H].
    `activations` are those of one direction after the other (default: the usual), names without regard to case;
    `alpha` and `beta` are consumed in order by those that have such a parameter. `clip` > 0 bounds what goes into the
    functions of gates and candidates (not the cell on its way to the output, as in ONNX Runtime).
    """

    gates: ClassVar[int]
    usual: ClassVar[tuple[str, ...]]
    allowed: ClassVar[tuple[str, ...]] = ("bias", "lengths", "initial_h")

    optional: tuple[str, ...]
    direction: str
    activations: tuple[str, ...]
    alpha: tuple[float, ...]
    beta: tuple[float, ...]
    clip: float
    batch_first: bool

    @property
    def _directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    def infer(self, x: TensorType, w: TensorType, r: TensorType, *given: TensorType) -> tuple[TensorType, ...]:
        name, extra = self.op_name, dict(zip(self.optional, given, strict=False))
        check_kind(self, x, "f")
        check_same_dtype(self, x, w, r, *(t for key, t in extra.items() if key != "lengths"))
        self._check_attributes(len(given))
        if not x.rank == w.rank == r.rank == 3:
            raise ShapeError(f"{name}: expected x, w and r of three axes, got {x}, {w}, {r}")
        length, batch = (x.shape[1], x.shape[0]) if self.batch_first else (x.shape[0], x.shape[1])
        hidden, d = r.shape[2], self._directions
        states = (batch, d, hidden) if self.batch_first else (d, batch, hidden)
        expected: dict[str, tuple[TensorType, tuple[Size, ...]]] = {
            "w": (w, (d, self.gates * hidden, x.shape[2])),
            "r": (r, (d, self.gates * hidden, hidden)),
        }
        shapes = {
            "bias": (d, 2 * self.gates * hidden),
            "lengths": (batch,),
            "initial_h": states,
            "initial_c": states,
            "peepholes": (d, 3 * hidden),
        }
        expected |= {key: (t, shapes[key]) for key, t in extra.items()}
        for what, (t, shape) in expected.items():
            if t.rank != len(shape):
                raise ShapeError(f"{name}: expected {what} of shape {tuple(map(str, shape))}, got {t}")
            for want, got in zip(shape, t.shape, strict=True):
                unify(want, got, f"{name}: {what} {t} for {x}, expected {tuple(map(str, shape))}")
        if "lengths" in extra and not extra["lengths"].dtype.is_integer:
            raise DTypeError(f"{name}: expected lengths as i32, got {extra['lengths']}")
        every = (batch, length, d, hidden) if self.batch_first else (length, d, batch, hidden)
        last = TensorType(states, x.dtype)
        return (TensorType(every, x.dtype), *[last] * (2 if "initial_c" in self.allowed else 1))

    def _check_attributes(self, given: int) -> None:
        if self.direction not in DIRECTIONS:
            raise OptionError(f"{self.op_name}: direction {self.direction!r} is not one of {', '.join(DIRECTIONS)}")
        if (
            len(set(self.optional)) != given
            or len(self.optional) != given
            or not set(self.optional) <= set(self.allowed)
        ):
            raise OptionError(
                f"{self.op_name}: optional {self.optional} must name the {given} further inputs, of "
                f"{', '.join(self.allowed)}"
            )
        unknown = [a for a in self.activations if a.lower() not in ACTIVATIONS]
        if unknown or len(self.activations) not in (0, len(self.usual) * self._directions):
            raise OptionError(
                f"{self.op_name}: expected {len(self.usual)} activations for each of {self._directions} directions out "
                f"of {', '.join(ACTIVATIONS)}, got {self.activations}"
            )

    def work(self, *x: TensorType) -> Work:
        out = self.infer_types(x)
        steps = x[0].shape[0] * x[0].shape[1] * self._directions
        flops = steps * self.gates * x[2].shape[2] * (2 * x[0].shape[2] + 2 * x[2].shape[2] + 10)
        read, written = (sum((tensor_bytes(t) for t in types), start=0) for types in (x, out))
        return Work(flops, read, written)

    def _functions(self) -> list[list[Activation]]:
        """The activations of each direction, clipping included."""
        names = [name.lower() for name in self.activations or self.usual * self._directions]
        alpha, beta = iter(self.alpha), iter(self.beta)
        made: list[Activation] = []
        each = len(self.usual)
        for name in names:
            fn, a, b = ACTIVATIONS[name]
            clip = self.clip if len(made) % each < 2 else 0.0
            made.append(_bounded(fn, None if a is None else next(alpha, a), None if b is None else next(beta, b), clip))
        return [made[n : n + each] for n in range(0, len(made), each)]

    def reference(self, x: Array, w: Array, r: Array, *given: Array) -> tuple[Array, ...]:
        extra = dict(zip(self.optional, given, strict=True))
        steps = widened(x.swapaxes(0, 1) if self.batch_first else x)
        length, batch, hidden = steps.shape[0], steps.shape[1], r.shape[2]
        lengths = extra.get("lengths", np.full(batch, length))
        if lengths.size and not 0 <= lengths.min() <= lengths.max() <= length:
            raise ShapeError(f"{self.op_name}: a length of {lengths.tolist()} is outside the {length} steps of x")
        every = np.zeros((length, self._directions, batch, hidden), steps.dtype)
        last = [np.zeros((self._directions, batch, hidden), steps.dtype) for _ in ("h", "c")]
        for d, functions in enumerate(self._functions()):
            backward = self.direction == "reverse" or d == 1
            cell = {key: widened(a)[d] for key, a in extra.items() if key in ("bias", "peepholes")}
            state = [
                widened(extra[key][:, d] if self.batch_first else extra[key][d])
                if key in extra
                else np.zeros((batch, hidden), steps.dtype)
                for key in ("initial_h", "initial_c")
            ]
            bias = cell.get("bias", np.zeros(2 * self.gates * hidden, steps.dtype))
            peepholes = cell.get("peepholes", np.zeros(3 * hidden, steps.dtype))
            for t in reversed(range(length)) if backward else range(length):
                new = self._step(steps[t], state, widened(w[d]), widened(r[d]), bias, peepholes, functions)
                live = (t < lengths)[:, None]
                state = [np.where(live, a, b) for a, b in zip(new, state, strict=True)]
                every[t, d] = np.where(live, state[0], 0)
            last[0][d], last[1][d] = state
        if self.batch_first:
            every, last = every.transpose(2, 0, 1, 3), [a.swapaxes(0, 1) for a in last]
        wanted = last if "initial_c" in self.allowed else last[:1]
        return tuple(np.ascontiguousarray(a).astype(x.dtype) for a in (every, *wanted))

    def _step(
        self, x: Array, state: list[Array], w: Array, r: Array, bias: Array, peepholes: Array, fs: list[Activation]
    ) -> list[Array]:
        """The hidden state and the cell after one more step."""
        raise OptionError(f"{self.op_name}: a base class has no cell")


def _bounded(fn: Callable[[Any, Any, Any], Any], alpha: Any, beta: Any, clip: float) -> Activation:
    def apply(x: Array) -> Array:
        return np.asarray(fn(x.clip(-clip, clip) if clip > 0 else x, alpha, beta), x.dtype)

    return apply


@register
class Rnn(_Recurrent):
    """h = f(x w + h r + bias) for each step. (ONNX RNN-22) Inputs, outputs and attributes: see `_Recurrent`."""

    gates, usual = 1, ("tanh",)

    optional: tuple[str, ...] = ()
    direction: str = "forward"
    activations: tuple[str, ...] = ()
    alpha: tuple[float, ...] = ()
    beta: tuple[float, ...] = ()
    clip: float = 0.0
    batch_first: bool = False

    def _step(
        self, x: Array, state: list[Array], w: Array, r: Array, bias: Array, peepholes: Array, fs: list[Activation]
    ) -> list[Array]:
        b_w, b_r = np.split(bias, 2)
        return [fs[0](x @ w.T + state[0] @ r.T + (b_w + b_r)), state[1]]


@register
class Gru(_Recurrent):
    """A gated recurrent unit: gates z, r and candidate h, in this order in w, r and bias. (ONNX GRU-22)

    h = (1 - z) g(x w_h + (r * h) r_h + bias) + z h; with `linear_before_reset` r scales h r_h + its bias instead.
    Inputs, outputs and attributes: see `_Recurrent`.
    """

    gates, usual = 3, ("sigmoid", "tanh")

    optional: tuple[str, ...] = ()
    direction: str = "forward"
    activations: tuple[str, ...] = ()
    alpha: tuple[float, ...] = ()
    beta: tuple[float, ...] = ()
    clip: float = 0.0
    batch_first: bool = False
    linear_before_reset: bool = False

    def _step(
        self, x: Array, state: list[Array], w: Array, r: Array, bias: Array, peepholes: Array, fs: list[Activation]
    ) -> list[Array]:
        f, g = fs
        h, n = state[0], r.shape[1]
        b_w, b_r = np.split(bias, 2)
        given = x @ w.T + b_w
        gates = given[:, : 2 * n] + h @ r[: 2 * n].T + b_r[: 2 * n]
        z, reset = f(gates[:, :n]), f(gates[:, n:])
        if self.linear_before_reset:
            kept = reset * (h @ r[2 * n :].T + b_r[2 * n :])
        else:
            kept = (reset * h) @ r[2 * n :].T + b_r[2 * n :]
        return [(1 - z) * g(given[:, 2 * n :] + kept) + z * h, state[1]]


@register
class Lstm(_Recurrent):
    """Long short-term memory: gates i, o, f and candidate c, in this order in w, r and bias. (ONNX LSTM-22)

    cell = f cell + i g(..), h = o h(cell); peepholes add their multiple of the cell to i, f (the old one) and o (the
    new one). `input_forget` makes f = 1 - i. Inputs, outputs and attributes: see `_Recurrent`.
    """

    gates, usual = 4, ("sigmoid", "tanh", "tanh")
    allowed = ("bias", "lengths", "initial_h", "initial_c", "peepholes")

    optional: tuple[str, ...] = ()
    direction: str = "forward"
    activations: tuple[str, ...] = ()
    alpha: tuple[float, ...] = ()
    beta: tuple[float, ...] = ()
    clip: float = 0.0
    batch_first: bool = False
    input_forget: bool = False

    def _step(
        self, x: Array, state: list[Array], w: Array, r: Array, bias: Array, peepholes: Array, fs: list[Activation]
    ) -> list[Array]:
        sigma, g, squash = fs
        h, cell = state
        b_w, b_r = np.split(bias, 2)
        p_i, p_o, p_f = np.split(peepholes, 3)
        i, o, f, c = np.split(x @ w.T + h @ r.T + (b_w + b_r), 4, axis=1)
        i = sigma(i + p_i * cell)
        f = 1 - i if self.input_forget else sigma(f + p_f * cell)
        cell = f * cell + i * g(c)
        return [sigma(o + p_o * cell) * squash(cell), cell]
