"""The program of a decoder: one graph for prompts and for single tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlx import ops
from rlx.errors import ModelFormatError, OptionError
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim
from rlx.models.adapters import with_room
from rlx.models.blocks import PREFIXES, Blocks
from rlx.models.cached import CachedBlocks, Room
from rlx.models.config import Config, read_config
from rlx.models.families import family_of
from rlx.models.families.base import Family
from rlx.models.sizes import CONTEXT, KV_DTYPES, PREFILL, WANTED, sampler_of
from rlx.models.source import Source, open_source
from rlx.records import dataclass

__all__ = ["Decoder", "build_decoder", "check_used", "sampler_of", "vocabulary_size"]

# Tensors of files that say nothing new: tables that follow from the configuration.
DERIVED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
DERIVED_ENDINGS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True)
class Decoder:
    """A decoder's graph, with what it was made of.

    Inputs: `ids` [batch, tokens] (i64); `counts` [batch], how many of them there are for each sequence, which it moves
    on by; `wanted` [rows], the places among the batch * tokens of which results are wanted. Outputs, of these rows:
    `logits` [rows, vocab]; `token` [rows] (i64), where these are largest; and `hidden` [rows, hidden], what they are
    made of. States are those of `CachedBlocks`.
    """

    graph: Graph
    config: Config
    source: Source


def build_decoder(
    path: str | os.PathLike[str] | Source,
    *,
    context: int | None = None,
    batch: int = 1,
    prefill: int = PREFILL,
    kv_dtype: str = "f32",
    sampling: bool = False,
    layers: Sequence[int] | None = None,
    lora: str = "",
    rings: bool = False,
) -> Decoder:
    """The decoder of a GGUF file or a folder with safetensors, its weights as they lie in the files.

    `context`: positions that the cache has room for (None: those that the model was made for, 4,096 at most);
    `prefill`: the most tokens of a sequence in one run; `kv_dtype`: of the cache, one of KV_DTYPES; `sampling`:
    with the inputs of `sampler_of`, and the outputs `sampled` [rows] (i32) and `logprob` [rows]. `layers`: these
    layers only, for an estimate; `lora`: with room for adapters, as `rlx.models.adapters.room_for` says;
    `rings`: caches of layers with a window have room for what it sees only, which `rlx.llm.slots` moves. Raises
    `ModelFormatError` and `OptionError`.
    """
    source = path if isinstance(path, Source) else open_source(path)
    family = family_of(source)
    sizes = {"batch": batch, "prefill": prefill, **({} if context is None else {"context": context})}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 30:
            raise OptionError(f"{name}={value!r}: expected a number >= 1")
    if kv_dtype not in KV_DTYPES:
        raise OptionError(f"kv_dtype={kv_dtype!r}: expected {', '.join(KV_DTYPES)}")
    config = read_config(
        source, vocabulary_size(source, family.names["token_embd"]), every=family.every, epsilon=family.epsilon
    )
    capacity = min(config.context, CONTEXT) if context is None else context
    config = family.configure(config, source, capacity)
    tokens = Dim("tokens", 1, min(prefill, capacity))
    b = CachedBlocks(source, family, config, Room(batch, capacity, tokens, kv_dtype, rings))
    _add_program(b, family, sampling, range(config.layers) if layers is None else layers)
    if layers is None:
        check_used(b)
    b.graph.name = Path(source.path).stem if source.gguf else Path(source.path).parent.name or source.architecture
    return Decoder(with_room(b.graph, lora, source, family) if lora else b.graph, config, source)


def _add_program(b: CachedBlocks, family: Family, sampling: bool, layers: Sequence[int]) -> None:
    g, room, config = b.graph, b.room, b.config
    ids = g.input("ids", (room.batch, room.tokens), "i64")
    counts = g.input("counts", (room.batch,), "i64")
    wanted = g.input("wanted", (Dim("rows", 1, max(room.batch, WANTED)),), "i64")
    x = family.embed(b, ids)
    for layer in layers:
        x = family.layer(b, x, layer)
    rows = ops.gather(ops.reshape(x, (room.tokens * room.batch, config.hidden)), wanted, axis=0)
    hidden = family.norm(b, rows, "output_norm", None)
    logits = family.logits(b, hidden)
    g.output(logits, "logits")
    g.output(ops.arg_max(logits, axis=-1, keepdims=False), "token")
    g.output(hidden, "hidden")
    if sampling:
        found = sampler_of(config.vocab, wanted.shape[0]).add(g, logits)
        g.output(found.token, "sampled")
        g.output(found.logprob, "logprob")
    g.update(b.length, b.length + counts)


def vocabulary_size(source: Source, names: tuple[str, str]) -> int:
    """The rows of the embedding."""
    own = names[0 if source.gguf else 1] + ".weight"
    found = next((t for n, t in source.tensors.items() if n == own or n.endswith("." + own)), None)
    if found is None or found.type.rank != 2:
        raise ModelFormatError(f"{source.path}: has no embedding ({own}): not the files of a whole model")
    (vocab, _) = found.type.shape
    assert isinstance(vocab, int)
    return vocab


def check_used(b: Blocks, others: tuple[str, ...] = ()) -> None:
    """Raises `ModelFormatError` for tensors that the family does not know: what they do would be left out.

    `others`: beginnings of the names of those that may be.
    """
    starts = tuple(p + other for other in others for p in PREFIXES)
    names = {n for n in b.source.tensors.keys() - b.used if not starts or not n.startswith(starts)}
    tied = {n for n in names if n in ("lm_head.weight", "output.weight")}
    unknown = sorted(n for n in names - tied if n not in DERIVED and not n.endswith(DERIVED_ENDINGS))
    if unknown:
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        raise ModelFormatError(
            f"{b.source.path}: {b.source.architecture!r} as rlx knows it has no tensors {', '.join(unknown[:4])}{more}"
        )
