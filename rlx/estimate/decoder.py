"""The estimate of a decoder that `rlx.load_llm` takes: its program is planned as loading plans it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

from rlx.backends import check_options, choose_backend, device_named
from rlx.backends.base import CodeGenerator
from rlx.compiler import legal_graph, lower_graph
from rlx.errors import MemoryDeficit
from rlx.estimate.calibrate import Overhead
from rlx.estimate.graph import lowered_of
from rlx.estimate.language import NARROWER, LanguageModelFile, Shape, kv_bytes
from rlx.estimate.layers import layer_of, stand_ins
from rlx.estimate.memory import Axis, MemoryEstimate, Remedy
from rlx.ir.encoding import encoding_named
from rlx.ir.encodings import ENCODINGS
from rlx.models.config import Config
from rlx.models.decoder import Decoder, build_decoder
from rlx.models.sizes import KV_DTYPES, cache_rows
from rlx.models.source import open_source
from rlx.options import CompileOptions
from rlx.records import dataclass, replace

__all__ = ["Grown", "build_unread", "estimate_decoder", "largest_context"]

SIZED = ("activation", "input", "output", "state", "workspace")  # parts that depend on the context
# Bytes that the library of tokenizers takes, and of each token of a vocabulary with its merges: measured are 5 MiB and
# 265 of one with 49,152 tokens.
TOKENIZER, TOKEN = 6 << 20, 288
STEPS = (1, 16, 64, 256, 512, 1024, 2048)  # tokens of a step whose peaks are told


def build_unread(
    path: str | os.PathLike[str], shape: Shape, layers: Sequence[int] | None = None, *, lora: str = ""
) -> Decoder:
    """The graph of its files, or of some layers, whose weights are not read.

    Raises `ModelFormatError` where load_llm does not take it.
    """
    return build_decoder(
        replace(open_source(path), decoded=False),
        context=shape.context,
        batch=shape.batch,
        prefill=shape.prefill,
        kv_dtype=shape.kv_dtype,
        sampling=True,
        layers=layers,
        rings=True,
        lora=lora,
    )


def cache_bytes(config: Config, shape: Shape) -> int:
    """The states of a decoder but for adapters: lengths, where caches of windows begin, keys and values."""
    prefill = min(shape.prefill, shape.context)
    rows = [cache_rows(window, shape.context, prefill, True) for window in config.windows]
    numbers = 8 * shape.batch * (1 + (min(rows) < shape.context))
    return numbers + 2 * kv_bytes(shape.batch * config.kv_heads * config.head_dim * sum(rows), shape.kv_dtype)


def estimate_decoder(
    file: LanguageModelFile,
    shape: Shape,
    decoder: Decoder,
    again: Callable[[Shape, Sequence[int] | None], Decoder],
    backend: CodeGenerator,
    options: CompileOptions,
    overhead: Overhead,
) -> MemoryEstimate:
    """What it takes at the upper bounds of its sizes: `prefill` tokens of each sequence, and all rows of logits.

    `decoder` is that of the shape, `again` makes those of others, and of some layers. Other contexts follow from one
    plan; other batches and formats of weights are forecasts.
    """
    check_options(backend, options)
    overhead = _with_text(overhead, decoder.config.vocab)

    @cache
    def plan(other: Shape) -> Grown:
        whole = decoder if other == shape else again(other, None)
        planned = _planned(whole, lambda layers: again(other, layers), backend, replace(options, dims=None), overhead)
        return Grown(planned, other, decoder.config)

    made = _Planned(file, shape, plan, decoder.config).at(shape)
    return replace(made, bucket_peaks=_step_peaks(plan(shape).planned, shape))


def _with_text(overhead: Overhead, vocab: int) -> Overhead:
    """The overhead with the tokenizer that the model brings; none where none is to be counted."""
    if not overhead.fixed:
        return overhead
    more = TOKENIZER + TOKEN * vocab
    sizes = {name: getattr(overhead, name) + more for name in ("fixed", "cached", "address")}
    return replace(overhead, **sizes)


def _planned(
    whole: Decoder,
    some: Callable[[Sequence[int]], Decoder],
    backend: CodeGenerator,
    options: CompileOptions,
    overhead: Overhead,
) -> MemoryEstimate:
    """The estimate at the upper bounds, of the layers that stand for all."""
    counts = stand_ins(whole)
    part = whole if len(counts) == whole.config.layers else some(list(counts))
    _, legal, _ = legal_graph(part.graph, backend, options.precision)
    program = lower_graph(legal, backend, options)

    def times(param: str) -> int:
        layer = layer_of(param)
        return 1 if layer is None else counts.get(layer, 1)

    lowered = lowered_of(whole.graph, program, backend, options, overhead, times=times)
    words = lowered.sizes.words * len(whole.graph.nodes) // len(part.graph.nodes)
    made = replace(lowered, sizes=replace(lowered.sizes, words=words)).at_bounds()
    assert made is not None  # all dims of a decoder have bounds
    if part is whole:
        return made
    note = f"planned with {len(counts)} of {whole.config.layers} layers, which the others are like"
    # not planned themselves: the whole arena may be laid out in another way
    certainty = {**made.certainty, **dict.fromkeys(("activation", "workspace"), "forecast")}
    return replace(made, notes=(*made.notes, note), certainty=certainty)


def largest_context(
    error: MemoryDeficit, path: str | os.PathLike[str], shape: Shape, options: CompileOptions, lora: str = ""
) -> tuple[int, list[Remedy]]:
    """The longest context, up to that of the shape, with which what did not fit does; 0 if there is none.

    And what else would help, which stored code does not know.
    """
    backend = choose_backend(device_named(options.device))
    if not isinstance(backend, CodeGenerator) or error.estimate is None:
        return 0, list(error.remedies)

    @cache
    def plan(context: int) -> Grown:
        other = replace(shape, context=context)
        whole = build_unread(path, other, lora=lora)
        planned = _planned(whole, partial(build_unread, path, other, lora=lora), backend, options, Overhead(0))
        own = {f"{part}_bytes": getattr(planned, f"{part}_bytes") for part in SIZED}
        return Grown(replace(error.estimate, **own, axes=planned.axes), other, whole.config)

    remedies = list(error.remedies) or plan(shape.context).planned.remedies(error.budget_bytes)
    return _largest(plan, shape.context, error.budget_bytes), remedies


def _largest(plan: Callable[[int], Grown], asked: int, allowed: int) -> int:
    """The longest context below `asked` with a peak of at most `allowed` bytes.

    Scratch grows with the context too, from some length on. So a plan says too much of shorter contexts and too little
    of longer ones; few plans are enough to find the length at which one fits and no longer one can.
    """
    above = plan(asked)
    least = above.longest(allowed, asked)
    while least:
        fits = plan(least)
        most = fits.longest(allowed, above.shape.context)
        if most == least:
            break
        above = plan(most)
        if above.planned.peak_bytes <= allowed:
            return most
        steps = (above.planned.workspace_bytes - fits.planned.workspace_bytes) / (most - least)
        between = replace(fits, scratch_step=steps).longest(allowed, most)
        if between == least:
            break
        least = between
    return least


@dataclass(frozen=True)
class Grown:
    """A decoder that was planned for a shape, with a cache of another context.

    A run takes no more tokens than the cache has room for: below that number the arena shrinks.
    """

    planned: MemoryEstimate
    shape: Shape
    config: Config
    scratch_step: float = 0  # bytes of scratch that a token more of context takes

    def longest(self, allowed: int, below: int) -> int:
        """The longest context below a number whose peak is at most that; 0 if there is none."""
        least = 0
        while below - least > 1:
            middle = (least + below) // 2
            least, below = (middle, below) if self.at(middle).peak_bytes <= allowed else (least, middle)
        return least

    def at(self, context: int) -> MemoryEstimate:
        """The same with a cache of `context` tokens."""
        made, tokens = self.planned, self.planned.axes.get("tokens")
        if tokens is not None and context < tokens.current:
            less = tokens.at(context)
            own = {f"{part}_bytes": getattr(less, f"{part}_bytes") for part in SIZED if part != "state"}
            made = replace(made, **own, axes=less.axes)
        more = math.ceil(self.scratch_step * (context - self.shape.context))
        grown = cache_bytes(self.config, replace(self.shape, context=context)) - cache_bytes(self.config, self.shape)
        return replace(made, state_bytes=made.state_bytes + grown, workspace_bytes=made.workspace_bytes + more)


@dataclass(frozen=True)
class _Planned:
    """A decoder in the terms of a language model: axes, choices and peaks of other shapes than the one asked for."""

    file: LanguageModelFile
    shape: Shape
    plan: Callable[[Shape], Grown]
    config: Config

    def at(self, shape: Shape) -> MemoryEstimate:
        """The estimate; of the shape asked for it is planned, of others it follows from that."""
        file, arch, asked = self.file, self.file.architecture, self.shape
        # a cache that is shorter than a step holds it back: with a longer one the arena grows
        longer = asked if shape.context <= asked.context else replace(asked, context=max(asked.context, asked.prefill))
        made = self.plan(longer).at(shape.context)
        if shape.batch != asked.batch:
            made = _scaled(made, asked.batch, shape.batch)
        state = cache_bytes(self.config, shape)
        windows = self.config.windows
        beyond = arch.context is not None and shape.context > arch.context
        made = replace(
            made,
            model=file.name,
            state_bytes=state,
            dims={"context": shape.context, "batch": shape.batch},
            kv_dtype=shape.kv_dtype,
            kv_bytes_per_token=2 * kv_bytes(self.config.kv_heads * self.config.head_dim, shape.kv_dtype) * len(windows),
            notes=(*((f"the model was made for {arch.context} tokens of context",) if beyond else ()), *made.notes),
        )
        longest = max(arch.context or 0, shape.context)
        return replace(
            made,
            axes={
                "context": Axis(1, longest, 1, shape.context, lambda n: self.at(replace(shape, context=n))),
                "batch": Axis(1, None, 1, shape.batch, lambda n: self.at(replace(shape, batch=n))),
            },
            choices=lambda: self.choices(made, shape),
        )

    def choices(self, made: MemoryEstimate, shape: Shape) -> Iterable[tuple[str, MemoryEstimate]]:
        """Other types of cache and weights."""
        for name in KV_DTYPES:
            if name not in ENCODINGS or self.config.head_dim % ENCODINGS[name].block == 0:
                yield f"kv_dtype {name!r}", self.at(replace(shape, kv_dtype=name))
        for name in NARROWER:
            less = sum(t.nbytes - t.quantised(encoding_named(name)) for t in self.file.tensors)
            yield f"weights quantised to {name}", replace(made, weight_bytes=max(0, made.weight_bytes - less))


def _scaled(made: MemoryEstimate, before: int, batch: int) -> MemoryEstimate:
    """A forecast for another number of sequences: what they take grows with it."""
    parts = ("activation", "input", "output", "state", "workspace")
    sizes = {f"{part}_bytes": -(-getattr(made, f"{part}_bytes") * batch // before) for part in parts}
    certainty = {**made.certainty, **dict.fromkeys(set(parts) - {"state"}, "forecast")}
    return replace(made, **sizes, certainty=certainty, axes={})


def _step_peaks(planned: MemoryEstimate, shape: Shape) -> dict[int, int]:
    """The running peak where steps have that many tokens of each sequence, and one row of logits is asked for each."""
    rows = planned.axes.get("rows")
    one = rows.at(shape.batch) if rows is not None else planned
    tokens = one.axes.get("tokens")
    if tokens is None:
        return {}
    steps = (*(n for n in STEPS if n < tokens.current), tokens.current)
    return {n: tokens.at(n).running_peak_bytes for n in steps}
