"""The gradient rule of recurrent layers: they are written out as scans of their steps."""

from __future__ import annotations

from typing import Any

from rlx import ops
from rlx.ir.graph import Value
from rlx.ops.base import apply
from rlx.ops.gradients.attach import formula, reshaped, zeros
from rlx.ops.gradients.batching import moved
from rlx.ops.gradients.layout import box
from rlx.ops.layout import Concat, Iota
from rlx.ops.recurrent import Function, Recurrence
from rlx.trace.control import scan

_FUNCTIONS: dict[str, Any] = {
    "relu": lambda x, a, b: ops.relu(x),
    "tanh": lambda x, a, b: ops.tanh(x),
    "sigmoid": lambda x, a, b: ops.sigmoid(x),
    "affine": lambda x, a, b: x * a + b,
    "leakyrelu": lambda x, a, b: ops.leaky_relu(x, alpha=a),
    "thresholdedrelu": lambda x, a, b: ops.thresholded_relu(x, alpha=a),
    "scaledtanh": lambda x, a, b: ops.tanh(x * b) * a,
    "hardsigmoid": lambda x, a, b: ops.hard_sigmoid(x, alpha=a, beta=b),
    "elu": lambda x, a, b: ops.elu(x, alpha=a),
    "softsign": lambda x, a, b: ops.softsign(x),
    "softplus": lambda x, a, b: ops.softplus(x),
}


def _of(f: Function, x: Value) -> Value:
    x = ops.clip(x, lo=-f.clip, hi=f.clip) if f.clip else x
    return _FUNCTIONS[f.name](x, f.alpha, f.beta)  # type: ignore[no-any-return]


def _columns(x: Value, parts: int, n: Any) -> list[Value]:
    """x [rows, parts n] as `parts` of [rows, n]."""
    return [box(x, [0, k * n], (x.shape[0], n)) for k in range(parts)]


def _step(op: Recurrence, x: Value, h: Value, cell: Value, r: Value, own: dict[str, Value], fs: Any) -> list[Value]:
    """The hidden state and the cell after one more step; r is [H, G H]."""
    n = h.shape[1]
    if op.cell == "rnn":
        return [_of(fs[0], x + h @ r), cell]
    if op.cell == "gru":
        r_z, r_r, r_h = _columns(r, 3, n)
        x_z, x_r, x_h = _columns(x, 3, n)
        z, reset = _of(fs[0], x_z + h @ r_z), _of(fs[0], x_r + h @ r_r)
        bias = own.get("bias", zeros(own["none"]))
        kept = reset * (h @ r_h + bias) if op.linear_before_reset else (reset * h) @ r_h + bias
        return [(1 - z) * _of(fs[1], x_h + kept) + z * h, cell]
    i, o, f, c = _columns(x + h @ r, 4, n)
    if "peepholes" in own:
        p_i, p_o, p_f = _columns(own["peepholes"], 3, n)
        i, f = i + p_i * cell, f + p_f * cell
    i = _of(fs[0], i)
    f = 1 - i if op.input_forget else _of(fs[0], f)
    cell = f * cell + i * _of(fs[1], c)
    o = o + p_o * cell if "peepholes" in own else o
    return [_of(fs[0], o) * _of(fs[2], cell), cell]


@formula(Recurrence)
def _recurrence(op: Recurrence, x: Value, r: Value, *given: Value) -> Any:
    if op.round_state:
        return NotImplemented
    extra = dict(zip(op.optional, given, strict=True))
    hidden, gates = r.shape[2], len(op.spec.gates)
    x = moved(x, 0, 1) if op.batch_first else x
    length, batch = x.shape[:2]
    every, last_h, last_c = [], [], []
    for d, functions in enumerate(op.functions()):
        backward = op.direction == "reverse" or d == 1
        steps = box(x, [0, 0, d * gates * hidden], (length, batch, gates * hidden))
        lengths = extra.get("lengths")
        steps = _turned(steps, lengths) if backward else steps
        first = []
        for key in ("initial_h", "initial_c"):
            state = extra.get(key)
            if state is not None and op.batch_first:
                state = moved(state, 1, 0)
            none = ops.full(shape=(batch, hidden), value=0, dtype=x.dtype)
            first.append(
                none if state is None else reshaped(box(state, [d, 0, 0], (1, batch, hidden)), (batch, hidden))
            )
        own: dict[str, Value] = {
            key: box(extra[key], [d, 0], (1, extra[key].shape[1])) for key in ("bias", "peepholes") if key in extra
        }
        own["none"] = ops.full(shape=(1, hidden), value=0, dtype=x.dtype)
        weight = ops.transpose(reshaped(box(r, [d, 0, 0], (1, gates * hidden, hidden)), (gates * hidden, hidden)))

        def body(carry: Any, row: Any, own: Any = own, weight: Any = weight, fs: Any = functions) -> Any:
            x_n, number = row
            h, cell = _step(op, x_n, carry[0], carry[1], weight, own, fs)
            lengths = extra.get("lengths")
            if lengths is None:
                return (h, cell), h
            live = reshaped(ops.less(number, ops.cast(lengths, "i64")), (batch, 1))
            h, cell = ops.where(live, h, carry[0]), ops.where(live, cell, carry[1])
            return (h, cell), ops.where(live, h, zeros(h))

        (h, cell), states = scan(body, tuple(first), (steps, apply(Iota(length))))
        states = _turned(states, lengths) if backward else states
        every.append(reshaped(states, (length, 1, batch, hidden)))
        last_h.append(reshaped(h, (1, batch, hidden)))
        last_c.append(reshaped(cell, (1, batch, hidden)))
    whole = apply(Concat(1), *every)
    last = [apply(Concat(0), *last_h), apply(Concat(0), *last_c)]
    if op.batch_first:
        whole, last = ops.transpose(whole, perm=(2, 0, 1, 3)), [moved(v, 0, 1) for v in last]
    return (whole, *(last if op.cell == "lstm" else last[:1]))


def _turned(x: Value, lengths: Value | None) -> Value:
    """Each sequence of x [T, B, ..] from its end on."""
    if lengths is None:
        return x[::-1]
    return ops.reverse_sequence(x, ops.cast(lengths, "i64"), batch_axis=1, time_axis=0)  # type: ignore[no-any-return]
