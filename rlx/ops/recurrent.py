"""Recurrent layers over whole sequences: simple, gated (GRU) and long short-term memory (LSTM).

A layer is one matrix product of all steps at once, and a `Recurrence`: what a step adds to the one before it. That has
no scalar form: it is a host call on devices without a kernel for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError, ExecutionError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Shape, Size, unify
from rlx.ops.base import Op, Work, check_kind, check_same_dtype, register, tensor_bytes, widened
from rlx.ops.contract import MatMul
from rlx.ops.elementwise import Add, Cast, sigmoid
from rlx.ops.layout import Concat, Reshape, Split, Transpose
from rlx.ops.quant import DynamicQuantizeLinear
from rlx.records import dataclass

__all__ = ["Gru", "Lstm", "Recurrence", "Rnn"]

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


@dataclass(frozen=True)
class Function:
    """An activation with its parameters; its argument is bounded by +-`clip` unless that is 0."""

    name: str
    alpha: float | None
    beta: float | None
    clip: float

    def apply(self, x: Array) -> Array:
        """The function of an array, in its type."""
        bounded = x.clip(-self.clip, self.clip) if self.clip else x
        return np.asarray(ACTIVATIONS[self.name][0](bounded, self.alpha, self.beta), x.dtype)


@dataclass(frozen=True)
class Cell:
    """One kind of cell: its gates in order, the usual activations, and the inputs that it may have."""

    gates: str
    usual: tuple[str, ...]
    allowed: tuple[str, ...] = ("bias", "lengths", "initial_h")


CELLS = {
    "rnn": Cell("h", ("tanh",)),
    "gru": Cell("zrh", ("sigmoid", "tanh")),
    "lstm": Cell("iofc", ("sigmoid", "tanh", "tanh"), ("bias", "lengths", "initial_h", "initial_c", "peepholes")),
}


class _Attributes(Op):
    """What layers and `Recurrence` have in common; D is 2 when bidirectional (else 1).

    `activations` are those of one direction after the other (default: the usual), names without regard to case;
    `alpha` and `beta` are consumed in order by those that have such a parameter. `clip` > 0 bounds what goes into the
    functions of gates and candidates (not the cell on its way to the output, as in ONNX Runtime).
    """

    optional: tuple[str, ...]
    direction: str
    activations: tuple[str, ...]
    alpha: tuple[float, ...]
    beta: tuple[float, ...]
    clip: float
    batch_first: bool

    @property
    def kind(self) -> str:
        """The name of the cell in `CELLS`."""
        return self.op_name

    @property
    def spec(self) -> Cell:
        return CELLS[self.kind]

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    def functions(self) -> list[list[Function]]:
        """The activations of each direction with their parameters and what clips their argument (0: nothing)."""
        names = [name.lower() for name in self.activations or self.spec.usual * self.directions]
        alpha, beta = iter(self.alpha), iter(self.beta)
        made: list[Function] = []
        each = len(self.spec.usual)
        for number, name in enumerate(names):
            _, a, b = ACTIVATIONS[name]
            clip = self.clip if number % each < 2 else 0.0
            first, second = None if a is None else next(alpha, a), None if b is None else next(beta, b)
            made.append(Function(name, first, second, max(clip, 0.0)))
        return [made[n : n + each] for n in range(0, len(made), each)]

    def _check(self, given: Sequence[TensorType], allowed: tuple[str, ...]) -> dict[str, TensorType]:
        """The optional inputs by name, after a check of the attributes."""
        name, count = self.op_name, len(given)
        if self.direction not in DIRECTIONS:
            raise OptionError(f"{name}: direction {self.direction!r} is not one of {', '.join(DIRECTIONS)}")
        if len(set(self.optional)) != count or len(self.optional) != count or not set(self.optional) <= set(allowed):
            raise OptionError(
                f"{name}: optional {self.optional} must name the {count} further inputs, of {', '.join(allowed)}"
            )
        unknown = [a for a in self.activations if a.lower() not in ACTIVATIONS]
        if unknown or len(self.activations) not in (0, len(self.spec.usual) * self.directions):
            raise OptionError(
                f"{name}: expected {len(self.spec.usual)} activations for each of {self.directions} directions out "
                f"of {', '.join(ACTIVATIONS)}, got {self.activations}"
            )
        found = dict(zip(self.optional, given, strict=True))
        if "lengths" in found and not found["lengths"].dtype.is_integer:
            raise DTypeError(f"{name}: expected lengths as i32, got {found['lengths']}")
        return found

    def _results(
        self, x: TensorType, hidden: Size, given: dict[str, tuple[TensorType, Shape]]
    ) -> tuple[TensorType, ...]:
        """The output types; `given` are the tensors of x's type with their expected shapes, lengths aside."""
        name, d = self.op_name, self.directions
        check_kind(self, x, "f")
        whole = ("lengths", "r", "zero") if getattr(self, "round_state", False) else ("lengths",)
        check_same_dtype(self, x, *(t for key, (t, _) in given.items() if key not in whole))
        for what, (t, shape) in given.items():
            if t.rank != len(shape):
                raise ShapeError(f"{name}: expected {what} of shape {tuple(map(str, shape))}, got {t}")
            for want, got in zip(shape, t.shape, strict=True):
                unify(want, got, f"{name}: {what} {t} for {x}, expected {tuple(map(str, shape))}")
        length, batch = (x.shape[1], x.shape[0]) if self.batch_first else (x.shape[0], x.shape[1])
        every = (batch, length, d, hidden) if self.batch_first else (length, d, batch, hidden)
        last = TensorType(self._states(batch, hidden), x.dtype)
        return (TensorType(every, x.dtype), *[last] * (2 if self.kind == "lstm" else 1))

    def _states(self, batch: Size, hidden: Size) -> Shape:
        return (batch, self.directions, hidden) if self.batch_first else (self.directions, batch, hidden)

    def _batch(self, x: TensorType) -> Size:
        return x.shape[0 if self.batch_first else 1]


@register
class Recurrence(_Attributes):
    """The steps of a recurrent layer whose inputs are projected already; f32 or f64.

    Inputs: x [T, B, D G H] (for each direction its G gates, with all that does not depend on the state), r [D, G H, H],
    and those that `optional` names: "bias" [D, H] (that of h r_h in a GRU that is `linear_before_reset`), and those of
    the layers. Outputs as of the layers `Rnn`, `Gru` and `Lstm`, of which `cell` names one.

    With `round_state` (an LSTM of f32) the state of a direction is rounded to 8 bits over its range, as in
    `DynamicQuantizeLinear`, before each product; r is of i8, less "zero" i8 [D, G H] and times "scale" [D, G H], and
    "bias" is [D, G H]. Every rounding is where ONNX Runtime has it: exact sums of products of whole numbers times the
    product of the scales, plus x, plus peepholes, plus bias; functions are computed in f64. Sequences that were over
    before the step before it are no part of the range of a step.
    """

    optional: tuple[str, ...] = ()
    cell: str = "lstm"
    direction: str = "forward"
    activations: tuple[str, ...] = ()
    alpha: tuple[float, ...] = ()
    beta: tuple[float, ...] = ()
    clip: float = 0.0
    batch_first: bool = False
    linear_before_reset: bool = False
    input_forget: bool = False
    round_state: bool = False

    @property
    def kind(self) -> str:
        return self.cell

    def infer(self, x: TensorType, r: TensorType, *given: TensorType) -> tuple[TensorType, ...]:
        if self.cell not in CELLS:
            raise OptionError(f"recurrence: cell {self.cell!r} is not one of {', '.join(CELLS)}")
        extra = self._check(given, (*self.spec.allowed, *(("scale", "zero") if self.round_state else ())))
        if self.round_state and (self.cell != "lstm" or x.dtype.name != "f32" or "scale" not in extra):
            raise OptionError(f"recurrence: round_state needs an lstm of f32 with a scale, got {self.cell} of {x}")
        if self.round_state:
            for what, t in {"r": r, "zero": extra.get("zero", r)}.items():
                if t.dtype.name != "i8":
                    raise DTypeError(f"recurrence: round_state needs {what} as i8, got {t}")
        if x.rank != 3 or r.rank != 3:
            raise ShapeError(f"recurrence: expected x and r of three axes, got {x} and {r}")
        d, gates, hidden, batch = self.directions, len(self.spec.gates), r.shape[2], self._batch(x)
        states = self._states(batch, hidden)
        shapes: dict[str, Shape] = {"bias": (d, hidden), "lengths": (batch,), "peepholes": (d, 3 * hidden)}
        shapes |= {"initial_h": states, "initial_c": states}
        if self.round_state:
            shapes |= {"bias": (d, gates * hidden), "scale": (d, gates * hidden), "zero": (d, gates * hidden)}
        expected = {"r": (r, (d, gates * hidden, hidden)), "x": (x, (*x.shape[:2], d * gates * hidden))}
        return self._results(x, hidden, expected | {key: (t, shapes[key]) for key, t in extra.items()})

    def work(self, *x: TensorType) -> Work:
        out = self.infer_types(x)
        flops = x[0].shape[0] * x[0].shape[1] * x[0].shape[2] * (2 * x[1].shape[2] + 10)
        read, written = (sum((tensor_bytes(t) for t in types), start=0) for types in (x, out))
        return Work(flops, read, written)

    def reference(self, x: Array, r: Array, *given: Array) -> tuple[Array, ...]:
        extra = dict(zip(self.optional, given, strict=True))
        hidden = r.shape[2]
        x = x.swapaxes(0, 1) if self.batch_first else x
        length, batch = x.shape[:2]
        steps = x.reshape(length, batch, self.directions, len(self.spec.gates) * hidden)
        lengths = extra.get("lengths", np.full(batch, length))
        if lengths.size and not 0 <= lengths.min() <= lengths.max() <= length:
            raise ExecutionError(f"{self.op_name}: a length of {lengths.tolist()} is outside the {length} steps of x")
        if self.round_state:
            zero = extra.get("zero", np.zeros(r.shape[:2], r.dtype))
            r = r.astype(np.float64) - zero[..., None]  # sums are exact
        every = np.zeros((length, self.directions, batch, hidden), x.dtype)
        last = [np.zeros((self.directions, batch, hidden), x.dtype) for _ in ("h", "c")]
        for d, functions in enumerate(self.functions()):
            backward = self.direction == "reverse" or d == 1
            state = [
                (extra[key][:, d] if self.batch_first else extra[key][d])
                if key in extra
                else np.zeros((batch, hidden), x.dtype)
                for key in ("initial_h", "initial_c")
            ]
            own: dict[str, Array] = {key: extra[key][d] for key in ("bias", "peepholes", "scale") if key in extra}
            for n in range(length):
                live = (n < lengths)[:, None]
                at = np.where(live[:, 0], lengths - 1 - n, n) if backward else np.full(batch, n)
                x_n = steps[at, np.arange(batch), d]
                apply: list[Callable[[Array], Array]] = [f.apply for f in functions]
                if self.round_state:
                    ranged = np.where((n <= lengths)[:, None], state[0], 0)
                    new = self._rounded_step(x_n, [ranged, state[1]], r[d], own, apply)
                else:
                    new = self._step(x_n, state, r[d], own, apply)
                state = [np.where(live, a, b) for a, b in zip(new, state, strict=True)]
                every[at, d, np.arange(batch)] = np.where(live, state[0], 0)
            last[0][d], last[1][d] = state
        if self.batch_first:
            every, last = every.transpose(2, 0, 1, 3), [a.swapaxes(0, 1) for a in last]
        wanted = last if self.cell == "lstm" else last[:1]
        return tuple(np.ascontiguousarray(a) for a in (every, *wanted))

    def _step(
        self, x: Array, state: list[Array], r: Array, own: dict[str, Array], fs: list[Callable[[Array], Array]]
    ) -> list[Array]:
        """The hidden state and the cell after one more step."""
        h, cell = state
        n = r.shape[1]
        if self.cell == "rnn":
            return [fs[0](x + h @ r.T), cell]
        if self.cell == "gru":
            gates = x[:, : 2 * n] + h @ r[: 2 * n].T
            z, reset = fs[0](gates[:, :n]), fs[0](gates[:, n:])
            if self.linear_before_reset:
                kept = reset * (h @ r[2 * n :].T + own.get("bias", np.zeros(n, x.dtype)))
            else:
                kept = (reset * h) @ r[2 * n :].T + own.get("bias", np.zeros(n, x.dtype))
            return [(1 - z) * fs[1](x[:, 2 * n :] + kept) + z * h, cell]
        p_i, p_o, p_f = np.split(own.get("peepholes", np.zeros(3 * n, x.dtype)), 3)
        i, o, f, c = np.split(x + h @ r.T, 4, axis=1)
        i = fs[0](i + p_i * cell)
        f = 1 - i if self.input_forget else fs[0](f + p_f * cell)
        cell = f * cell + i * fs[1](c)
        return [fs[0](o + p_o * cell) * fs[2](cell), cell]

    def _rounded_step(
        self, x: Array, state: list[Array], r: Array, own: dict[str, Array], fs: list[Callable[[Array], Array]]
    ) -> list[Array]:
        """The same of a state that is rounded; `r` is in f64."""
        h, cell = state
        n, f32 = r.shape[1], np.float32
        q, step, zero = DynamicQuantizeLinear().reference(h)
        sums = ((q.astype(np.float64) - zero) @ r.T).astype(f32)
        gates = x + sums * (step * own["scale"])
        bias = own.get("bias", np.zeros(4 * n, f32)).reshape(4, n)
        p_i, p_o, p_f = np.split(own.get("peepholes", np.zeros(3 * n, f32)), 3)

        def of(f: Callable[[Array], Array], x: Array, gate: int | None = None) -> Array:
            return f((x if gate is None else x + bias[gate]).astype(np.float64)).astype(f32)

        i, o, f, c = np.split(gates, 4, axis=1)
        i = of(fs[0], i + p_i * cell, 0)
        f = 1 - i if self.input_forget else of(fs[0], f + p_f * cell, 2)
        cell = f * cell + i * of(fs[1], c, 3)
        return [of(fs[0], o + p_o * cell, 1) * of(fs[2], cell), cell]


@dataclass(frozen=True)
class _Layer(_Attributes):
    """Base of the recurrent layers; D is 2 when bidirectional (else 1), G the gates of the cell, H the hidden size.

    Inputs: x [T, B, I], w [D, G H, I], r [D, G H, H], then those that `optional` names, in its order: "bias" [D, 2 G H]
    (of w, then of r), "lengths" i32 [B], "initial_h" [D, B, H], and for LSTM "initial_c" [D, B, H] and "peepholes"
    [D, 3 H] (input, output, forget). Outputs: all states [T, D, B, H] (0 beyond a sequence's length), the last
    [D, B, H], and for LSTM the last cell. With `batch_first` x is [B, T, I], states are [B, T, D, H], [B, D, H].
    """

    optional: tuple[str, ...] = ()
    direction: str = "forward"
    activations: tuple[str, ...] = ()
    alpha: tuple[float, ...] = ()
    beta: tuple[float, ...] = ()
    clip: float = 0.0
    batch_first: bool = False

    def _recurrence(self, optional: tuple[str, ...]) -> Recurrence:
        return Recurrence(
            optional,
            self.kind,
            self.direction,
            self.activations,
            self.alpha,
            self.beta,
            self.clip,
            self.batch_first,
            linear_before_reset=bool(getattr(self, "linear_before_reset", False)),
            input_forget=bool(getattr(self, "input_forget", False)),
        )

    @property
    def _splits_bias(self) -> bool:
        """Whether part of r's bias has to be added at each step."""
        return bool(getattr(self, "linear_before_reset", False))

    def infer(self, x: TensorType, w: TensorType, r: TensorType, *given: TensorType) -> tuple[TensorType, ...]:
        extra = self._check(given, self.spec.allowed)
        if not x.rank == w.rank == r.rank == 3:
            raise ShapeError(f"{self.op_name}: expected x, w and r of three axes, got {x}, {w}, {r}")
        d, gates, hidden, batch = self.directions, len(self.spec.gates), r.shape[2], self._batch(x)
        states = self._states(batch, hidden)
        shapes: dict[str, Shape] = {"bias": (d, 2 * gates * hidden), "lengths": (batch,), "peepholes": (d, 3 * hidden)}
        shapes |= {"initial_h": states, "initial_c": states}
        expected = {"w": (w, (d, gates * hidden, x.shape[2])), "r": (r, (d, gates * hidden, hidden))}
        return self._results(x, hidden, expected | {key: (t, shapes[key]) for key, t in extra.items()})

    def work(self, *x: TensorType) -> Work:
        out = self.infer_types(x)
        flops = x[0].shape[0] * x[0].shape[1] * x[1].shape[0] * x[1].shape[1] * (2 * x[1].shape[2] + 2 * x[2].shape[2])
        read, written = (sum((tensor_bytes(t) for t in types), start=0) for types in (x, out))
        return Work(flops, read, written)

    def reference(self, x: Array, w: Array, r: Array, *given: Array) -> tuple[Array, ...]:
        extra = {key: a if key == "lengths" else widened(a) for key, a in zip(self.optional, given, strict=True)}
        d, n, hidden = w.shape[0], w.shape[1], r.shape[2]
        steps = widened(x) @ widened(w).reshape(d * n, -1).T
        if "bias" in extra:
            b_w, b_r = np.split(extra.pop("bias"), 2, axis=1)
            now = b_r.copy()
            if self._splits_bias:
                now[:, 2 * hidden :] = 0
                extra["bias"] = b_r[:, 2 * hidden :]
            steps = steps + (b_w + now).reshape(-1)
        made = self._recurrence(tuple(extra)).reference(steps, widened(r), *extra.values())
        return tuple(a.astype(x.dtype) for a in made)

    def decompose(self, g: Graph, x: Value, w: Value, r: Value, *given: Value) -> tuple[Value, ...]:
        def wide(v: Value) -> Value:
            return g.add(Cast(DTYPES["f32"]), v)[0] if v.dtype.is_float and v.dtype.bits < 32 else v

        dtype = x.dtype
        extra = {key: wide(v) for key, v in zip(self.optional, given, strict=True)}
        if "lengths" in extra:
            (extra["lengths"],) = g.add(Cast(DTYPES["i32"]), extra["lengths"])
        x, w, r = wide(x), wide(w), wide(r)
        (d, n, size), hidden = w.shape, r.shape[2]
        (columns,) = g.add(Transpose((1, 0)), g.add(Reshape((d * n, size)), w)[0])
        (steps,) = g.add(MatMul(), g.add(Reshape((x.shape[0] * x.shape[1], size)), x)[0], columns)
        if "bias" in extra:
            b_w, b_r = g.add(Split(1, (n, n)), extra.pop("bias"))
            if self._splits_bias:
                kept = n - hidden
                early, late = g.add(Split(1, (kept, hidden)), b_w)
                b_r, extra["bias"] = g.add(Split(1, (kept, hidden)), b_r)
                (total,) = g.add(Concat(1), g.add(Add(), early, b_r)[0], late)
            else:
                (total,) = g.add(Add(), b_w, b_r)
            (steps,) = g.add(Add(), steps, g.add(Reshape((d * n,)), total)[0])
        (steps,) = g.add(Reshape((*x.shape[:2], d * n)), steps)
        made = g.add(self._recurrence(tuple(extra)), steps, r, *extra.values())
        return made if dtype is x.dtype else tuple(g.add(Cast(dtype), v)[0] for v in made)


@register
class Rnn(_Layer):
    """h = f(x w + h r + bias) for each step. (ONNX RNN-22) Inputs, outputs and attributes: see `_Layer`."""


@register
class Gru(_Layer):
    """A gated recurrent unit: gates z, r and candidate h, in this order in w, r and bias. (ONNX GRU-22)

    h = (1 - z) g(x w_h + (r * h) r_h + bias) + z h; with `linear_before_reset` r scales h r_h + its bias instead.
    Inputs, outputs and attributes: see `_Layer`.
    """

    linear_before_reset: bool = False


@register
class Lstm(_Layer):
    """Long short-term memory: gates i, o, f and candidate c, in this order in w, r and bias. (ONNX LSTM-22)

    cell = f cell + i g(..), h = o h(cell); peepholes add their multiple of the cell to i, f (the old one) and o (the
    new one). `input_forget` makes f = 1 - i. Inputs, outputs and attributes: see `_Layer`.
    """

    input_forget: bool = False
