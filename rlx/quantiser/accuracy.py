"""How far the outputs of a new model are from those of the old one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import rlx
from rlx.ir.graph import Array
from rlx.models.decoder import build_decoder
from rlx.models.sizes import WANTED
from rlx.progress import report
from rlx.quantiser.importance import CHUNK
from rlx.quantiser.inputs import Inputs
from rlx.quantiser.report import OutputError
from rlx.runtime.compiled import CompiledGraph

__all__ = ["compare", "compare_languages"]


class _Sums:
    """Of one output over all inputs."""

    def __init__(self) -> None:
        self.cosine, self.squares, self.wrong, self.same, self.rows = 1.0, 0.0, 0.0, 0, 0
        self.columns = 0

    def add(self, a: Array, b: Array) -> None:
        x, y = (v.astype(np.float64).reshape(-1) for v in (a, b))
        lengths = float(np.linalg.norm(x) * np.linalg.norm(y))
        self.cosine = min(self.cosine, float(x @ y) / lengths if lengths else float((x == y).all()))
        self.squares, self.wrong = self.squares + float(x @ x), self.wrong + float((x - y) @ (x - y))
        self.columns = a.shape[-1] if a.ndim else 1
        if a.ndim and self.columns > 1:
            self.same += int((a.argmax(-1) == b.argmax(-1)).sum())
            self.rows += a.size // self.columns

    def error(self, name: str) -> OutputError:
        """That of an output of this name."""
        rms = float(np.sqrt(self.wrong / self.squares)) if self.squares else 0.0
        return OutputError(name, self.cosine, rms, self.same / self.rows if self.rows else None, self.rows)


def compare(old: CompiledGraph, new: CompiledGraph, inputs: Inputs) -> list[OutputError]:
    """Runs both on each set of inputs; an error for each output of floats that is in both."""
    sums: dict[str, _Sums] = {}
    for given in inputs.told("outputs"):
        before = {name: np.array(array) for name, array in old(given).items()}
        after = new(given)
        for name, array in before.items():
            if name in after and array.dtype.kind == "f" and array.size:
                sums.setdefault(name, _Sums()).add(array, np.asarray(after[name]))
    return [s.error(name) for name, s in sums.items()]


def compare_languages(old: Path, new: Path, tokens: Sequence[int], threads: int) -> tuple[OutputError, str]:
    """Has both language models read the tokens, `CHUNK` of them at a time, each chunk by itself.

    Gives the error of the logits at each token, with the cosine of the worst token; and in words how well both foretell
    the next token, and how far apart the distributions are that they give.
    """
    models = [_reader(path, threads) for path in (old, new)]
    sums, surprise, divergence, foretold = _Sums(), [0.0, 0.0], 0.0, 0
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        for model in models:
            model.states["length"].write(np.zeros(1, np.int64))
        for first in range(0, len(chunk), WANTED):
            part = np.array(chunk[first : first + WANTED], np.int64)
            given = {"ids": part[None], "counts": np.array([part.size]), "wanted": np.arange(part.size)}
            before, after = (model.run(given, outputs=["logits"])[0].astype(np.float64) for model in models)
            for a, b in zip(before, after, strict=True):
                sums.add(a[None], b[None])
            logs = [_log_softmax(x) for x in (before, after)]
            divergence += float((np.exp(logs[0]) * (logs[0] - logs[1])).sum())
            following = np.array(chunk[first + 1 : first + 1 + part.size], np.int64)
            foretold += following.size
            for i, log in enumerate(logs):
                surprise[i] -= float(log[np.arange(following.size), following].sum())
            report("outputs", (start + first + part.size) / len(tokens))
    a, b = (float(np.exp(total / foretold)) for total in surprise)
    return sums.error("logits"), (
        f"perplexity of the {foretold} tokens after others: {a:.5g} -> {b:.5g}; the KL divergence of the new model's "
        f"distributions is {divergence / len(tokens):.3g}"
    )


def _reader(path: Path, threads: int) -> CompiledGraph:
    return rlx.compile(build_decoder(path, context=CHUNK, prefill=WANTED).graph, device="cpu", threads=threads)


def _log_softmax(x: Array) -> Array:
    x = x - x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))
