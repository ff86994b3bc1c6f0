"""Vectors of texts: `rlx.load_embedder`.

An embedder is a class of its own and not a `LanguageModel`: it has no cache and writes nothing, its program takes whole
texts and several of them at once, and hardly an option of one means anything to the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from rlx.boundary import bounded, bounded_class
from rlx.disk import path_of
from rlx.errors import CompileError, ExecutionError, ModelFormatError, OptionError
from rlx.ir.graph import Array
from rlx.ir.shape import upper
from rlx.models.decoder import vocabulary_size
from rlx.models.families import encoder_of
from rlx.models.pooling import Pooling, pooling_of
from rlx.models.source import open_source
from rlx.models.tokenizer.numbers import token_numbers
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import LoadKeywords, Session, kind_of

if TYPE_CHECKING:
    from rlx.models.tokenizer import Tokenizer

__all__ = ["Embedder", "load_embedder"]


@bounded("load_embedder", CompileError)
def load_embedder(
    path: str | os.PathLike[str],
    *,
    context: int | None = None,
    batch: int | None = None,
    pooling: str | None = None,
    normalised: bool | None = None,
    **options: Unpack[LoadKeywords],
) -> Embedder:
    """Loads a model that embeds texts: a GGUF file, or a folder with safetensors and a config.json.

    `context`: the most tokens of a text (None: what the files say). `batch`: texts that go through at once (None: so
    many as have 8,192 tokens, 32 at most). `pooling` ("mean", "cls", "last", "max", "mean_sqrt" or "weighted_mean") and
    `normalised` (vectors of length 1) are what the files say where they are None. Further keywords are those of
    `rlx.load`. Raises `ModelFormatError` for files that are damaged or of a kind that is not known, `MemoryDeficit`
    before weights are read where it does not fit, and `OptionError`.
    """
    if "dims" in options:
        raise OptionError("load_embedder: dims= is for other models; give context= and batch=")
    name, kind = kind_of(path_of(path, "load_embedder"))
    if kind not in (".gguf", ".safetensors"):
        raise ModelFormatError(
            f"{name}: load_embedder takes a GGUF file, or a folder with safetensors and a config.json"
        )
    source = open_source(path)
    vocab = vocabulary_size(source, encoder_of(source).names["token_embd"])
    given = {"context": context, "batch": batch, "pooling": pooling, "normalised": normalised}
    options["dims"] = {name: value for name, value in given.items() if value is not None}
    return Embedder(Session().load(path, **options), Path(path_of(path, "load_embedder")), pooling_of(source), vocab)


@bounded_class(ExecutionError)
class Embedder:
    """What `rlx.load_embedder` gives; `model` is the compiled graph below it, `dimensions` the length of a vector.

    `context` is the most tokens of a text, `prompts` are texts that the model's files give to stand before others, by
    name.
    """

    def __init__(self, model: CompiledGraph, path: Path, pooling: Pooling, vocab: int) -> None:
        self.vocab = vocab
        self.model, self.path, self.prompts = model, path, dict(pooling.prompts)
        self._prompt = pooling.prompt
        sizes = {spec.name: spec.shape for spec in (*model.inputs, *model.outputs)}
        self._batch, self.context = (int(upper(size) or 1) for size in sizes["ids"])
        self.dimensions = int(sizes["embedding"][1])

    def __repr__(self) -> str:
        return f"<Embedder {self.path.name!r} on {self.model.device!r}, {self.dimensions} dimensions>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Gives all memory back; later calls raise `ClosedError`."""
        self.model.close()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model's files. Raises `ModelFormatError` where they have none that is known."""
        from rlx.models.tokenizer import load

        return load(self.path)

    def embed(
        self, texts: str | Sequence[str] | Sequence[Sequence[int]], *, prompt: str | None = None, truncate: bool = False
    ) -> Array:
        """The vectors of texts, f32 [texts, dimensions]; of one text [dimensions].

        A text may be given as tokens, with those that the model expects around it. `prompt`: the name of one of
        `prompts`, or a text, to stand before each (None: the model's own default, "" for none). `truncate`: a text that
        is longer than the context is cut, else it is an error. Results of a text don't depend on the others. Raises
        `OptionError`.
        """
        if isinstance(texts, str):
            return np.asarray(self.embed([texts], prompt=prompt, truncate=truncate)[0])
        several: Any = texts
        if not isinstance(several, Sequence) or isinstance(several, bytes):
            raise OptionError(f"embed: expected a text or several, got {type(texts).__name__}")
        before = self._before(prompt)
        ids = [self._ids(n, text, before, truncate) for n, text in enumerate(texts)]
        found = np.empty((len(ids), self.dimensions), np.float32)
        for group in self._groups([len(i) for i in ids]):
            found[group] = self._run([ids[n] for n in group])
        return found

    def _before(self, prompt: str | None) -> str:
        if prompt is None:
            return self.prompts[self._prompt] if self._prompt is not None else ""
        if not isinstance(prompt, str):
            raise OptionError(
                f"prompt={prompt!r:.60}: expected a text, or a name of {', '.join(self.prompts) or 'none'}"
            )
        return self.prompts.get(prompt, prompt)

    def _ids(self, number: int, text: Any, before: str, truncate: bool) -> list[int]:
        """The tokens of a text, checked."""
        most = self.context if truncate else None
        if isinstance(text, str):
            ids = self.tokenizer.encode(before + text, ends=True, most=most)
        else:
            ids = token_numbers(text, self.vocab, f"embed: text {number}")[:most]
        if not ids:
            raise OptionError(f"embed: text {number} has no tokens")
        if len(ids) > self.context:
            raise OptionError(
                f"embed: text {number} has {len(ids):,} tokens, and the model takes {self.context:,}: cut it into "
                "several, or give truncate=True"
            )
        return ids

    def _groups(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Numbers of texts that go through together: of similar lengths, since all are padded to the longest."""
        order = sorted(range(len(lengths)), key=lambda n: lengths[n])
        for start in range(0, len(order), self._batch):
            yield order[start : start + self._batch]

    def _run(self, group: Sequence[Sequence[int]]) -> Array:
        counts = np.array([len(ids) for ids in group], np.int64)
        given = np.zeros((len(group), int(counts.max())), np.int64)
        for row, ids in zip(given, group, strict=True):
            row[: len(ids)] = ids
        (vectors,) = self.model.run({"ids": given, "counts": counts}, outputs=["embedding"])
        return np.asarray(vectors)
