"""Logits of tokens that came before are lowered, as `sampling.py` defines it. `history` [rows, H] ends with -1."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlx import numpy as rnp
from rlx import ops
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value

__all__ = ["not_repeated", "penalised"]

ZERO, ZERO_I = np.float32(0), np.int32(0)


def penalised(logits: Value, history: Value, options: Mapping[str, Value]) -> Value:
    """Repetition, frequency and presence penalty; a token is counted once a place."""
    there = history >= ZERO_I
    # Places after the end repeat the first token, whose logit they then write too: as it is where there is none.
    first = rnp.maximum(history[:, :1], ZERO_I)
    tokens = rnp.where(there, history, first)
    same = rnp.logical_and(rnp.equal(tokens[:, :, None], history[:, None, :]), there[:, None, :])
    count = rnp.sum(same.astype(np.float32), axis=2)
    old = ops.gather_elements(logits, tokens, axis=1)
    factor = options["repetition_penalty"]
    new = rnp.where(old > ZERO, old / factor, old * factor)
    new = new - count * options["frequency_penalty"] - options["presence_penalty"]
    made: Value = ops.scatter_elements(logits, tokens, rnp.where(count > ZERO, new, old), axis=1)
    return made


def not_repeated(logits: Value, history: Value, options: Mapping[str, Value]) -> Value:
    """The penalty of tokens that go on with a repetition.

    With R the history from its end backwards, the last n tokens came d places before too where R[k] = R[k + d] for all
    k < n; the token after them was R[d - 1].
    """
    size = int(history.shape[1])
    if size < 2:
        return logits
    length = rnp.sum((history >= ZERO_I).astype(np.int32), axis=1, keepdims=True)
    k = np.arange(size, dtype=np.int32)
    backwards = ops.gather_elements(history, rnp.maximum(length - np.int32(1) - k, ZERO_I), axis=1)
    d = np.arange(1, size, dtype=np.int32)
    places = logits.graph.constant(np.minimum(k + d[:, None], size - 1), DTYPES["i32"])
    other = ops.gather(backwards, places, axis=1)  # [rows, d, k]
    same = rnp.logical_and(rnp.equal(other, backwards[:, None, :]), rnp.less(k + d[:, None], length[:, :, None]))
    run = rnp.min(same.astype(np.int32) * np.int32(size) + k, axis=2).astype(np.float32)  # the first that differs
    run = rnp.minimum(run, options["dry_reach"])
    beyond = run - options["dry_allowed_length"]
    penalty = options["dry_multiplier"] * options["dry_base"] ** rnp.maximum(beyond, ZERO)
    known = rnp.less(d, length)
    penalty = rnp.where(rnp.logical_and(known, beyond >= ZERO), penalty, ZERO)
    tokens = rnp.maximum(rnp.where(known, backwards[:, :-1], backwards[:, :1]), ZERO_I)
    # All places of a token write the same logit.
    equal = rnp.equal(tokens[:, :, None], tokens[:, None, :])
    most = rnp.max(rnp.where(equal, penalty[:, None, :], ZERO), axis=2)
    old = ops.gather_elements(logits, tokens, axis=1)
    made: Value = ops.scatter_elements(logits, tokens, rnp.where(most > ZERO, old - most, old), axis=1)
    return made
