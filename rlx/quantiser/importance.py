"""The importance of columns, measured: a language model reads a text, and what its matrices multiply is summed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import rlx
from rlx.errors import OptionError
from rlx.importers.sources import read_file
from rlx.ir.graph import Graph
from rlx.ir.value import Value
from rlx.models.decoder import build_decoder
from rlx.models.tokenizer.loading import load as load_tokenizer
from rlx.models.tokenizer.numbers import token_numbers
from rlx.ops.contract import Gemm, MatMul
from rlx.ops.elementwise import Cast
from rlx.ops.layout import Reshape, Transpose
from rlx.progress import report
from rlx.quantiser.imatrix import Importance

__all__ = ["CHUNK", "measured"]

CHUNK = 512  # tokens that are read at a time, each chunk by itself
MAX_TEXT_BYTES = 1 << 28
VIEWS = (Transpose, Cast, Reshape)


def _tokens_of(path: Path, given: Any, vocab: int) -> list[int]:
    """The tokens to read, of that many: of a text file, or numbers as they are given. Raises `OptionError`."""
    if isinstance(given, str | os.PathLike):
        if Path(given).suffix.lower() != ".txt":
            raise OptionError(f"inputs={str(given)!r}: a language model reads a .txt file, or a list of tokens")
        try:
            text = read_file(given, MAX_TEXT_BYTES).decode()
        except UnicodeDecodeError as error:
            raise OptionError(f"{given}: is not UTF-8: {error}") from None
        tokens = load_tokenizer(path).encode(text, ends=True)
    else:
        tokens = token_numbers(given, vocab, "inputs= of a language model")
    if len(tokens) < 2:
        raise OptionError("inputs= of a language model: expected a text of two tokens and more")
    return tokens


def measured(path: Path, given: Any, threads: int | None) -> tuple[dict[str, Importance], list[int]]:
    """The importance by names of tensors, of the text or the tokens `given`, and the tokens.

    It is of the products of layers, not of the head, which few rows go through. Raises `ModelFormatError` for a file
    that is no language model, `OptionError` for what is no text and no tokens of the model.
    """
    decoder = build_decoder(path, context=CHUNK, prefill=CHUNK)
    tokens = _tokens_of(path, given, decoder.config.vocab)
    names = dict(_add_squares(decoder.graph))
    model = rlx.compile(decoder.graph, device="cpu", threads=threads)
    sums: dict[str, Importance] = {}
    for start in range(0, len(tokens), CHUNK):
        part = np.array([tokens[start : start + CHUNK]], np.int64)
        model.states["length"].write(np.zeros(1, np.int64))
        given = {"ids": part, "counts": np.array([part.size]), "wanted": np.array([part.size - 1])}
        made = model.run(given, outputs=list(names))
        for name, squares in zip(names.values(), made, strict=True):
            more = Importance(np.array(squares, np.float32).reshape(1, -1), np.array([part.size], np.float32))
            old = sums.get(name)
            sums[name] = more if old is None else Importance(old.sums + more.sums, old.counts + more.counts)
        report("inputs", (start + part.size) / len(tokens))
    return sums, tokens


def _add_squares(graph: Graph) -> Iterable[tuple[str, str]]:
    """Adds an output [columns] for each matrix that is a param: the sums of squares of the rows it multiplies."""
    found: list[tuple[str, Value]] = []
    for node in graph.nodes:
        if isinstance(node.op, MatMul | Gemm):
            param = _param(node.inputs[1])
            if param is not None and not param.name.startswith(("output.", "token_embd.")):
                found.append((param.name, node.inputs[0]))
    for number, (name, x) in enumerate(_once(found)):
        graph.output(rlx.ops.reduce_sum(x * x, axes=tuple(range(x.rank - 1)), keepdims=False), f"squares.{number}")
        yield f"squares.{number}", name


def _once(found: list[tuple[str, Value]]) -> Iterator[tuple[str, Value]]:
    seen: set[str] = set()
    for name, x in found:
        if name not in seen:
            seen.add(name)
            yield name, x


def _param(value: Value) -> Value | None:
    """The param that a value is a view of."""
    while value.node is not None and isinstance(value.node.op, VIEWS):
        value = value.node.inputs[0]
    return value if value.kind == "param" else None
