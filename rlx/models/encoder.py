"""The program of an encoder: texts to vectors."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from rlx import numpy as rnp
from rlx import ops
from rlx.errors import OptionError
from rlx.ir.graph import Graph, Value
from rlx.ir.shape import Dim
from rlx.models.blocks import Blocks, Described
from rlx.models.config import Config, read_config
from rlx.models.decoder import check_used, vocabulary_size
from rlx.models.families import encoder_of
from rlx.models.pooling import Pooling, pooled, pooling_of
from rlx.models.source import Source, open_source
from rlx.records import dataclass, replace

__all__ = ["Encoder", "build_encoder"]

TOKENS = 8192  # of all texts of a run together, where nothing else is asked for
# Tensors of files that have nothing to do with embeddings: heads for masked words, and tables that follow.
OTHER_HEADS = ("pooler.", "cls.", "lm_head.", "head.", "decoder.", "embeddings.position_ids")


@dataclass(frozen=True)
class Encoder:
    """An encoder's graph, with what it was made of.

    Inputs: `ids` [batch, tokens] (i64) and `counts` [batch], how many tokens of each text count: those after them may
    be anything. Outputs: `embedding` [batch, hidden] and `hidden` [batch, tokens, hidden], in f32.
    """

    graph: Graph
    config: Config
    source: Source
    pooling: Pooling


class EncoderBlocks(Blocks):
    """The graph of an encoder while it is built: every token sees all that count, in some layers within a window."""

    def __init__(self, source: Source, family: Described, config: Config, batch: Dim, tokens: Dim) -> None:
        super().__init__(source, family, config, batch, tokens)
        self.ids = self.graph.input("ids", (batch, tokens), "i64")
        self.counts = self.graph.input("counts", (batch,), "i64")
        self.places = self.iota(tokens)
        self.positions = ops.reshape(self.counts, (batch, 1)) * np.int64(0) + self.places
        self._masks: dict[int, Value] = {}

    def attention(self, q: Value, k: Value, v: Value, layer: int) -> Value:
        """Attention of all tokens to those that count."""
        reach = self.config.windows[layer]
        more = [] if reach is None else [self._near(reach), self.constant(-np.inf)]
        y: Value = ops.attention(
            q, k, v, *more, self.counts, scale=self.config.scale, counted=True, steps=("where",) if more else (),
            empty_row="zero",
        )  # fmt: skip
        return self.joined(y)

    def _near(self, reach: int) -> Value:
        """Whether two tokens are less than `reach` apart, [1, 1, tokens, tokens]."""
        if reach not in self._masks:
            apart = rnp.abs(self.places[:, None] - self.places[None, :])
            self._masks[reach] = rnp.less(apart, np.int64(reach))[None, None]
        return self._masks[reach]


def build_encoder(
    path: str | os.PathLike[str] | Source,
    *,
    context: int | None = None,
    batch: int | None = None,
    pooling: str | None = None,
    normalised: bool | None = None,
) -> Encoder:
    """The encoder of a GGUF file or a folder with safetensors, its weights as they lie in the files.

    `context`: the most tokens of a text (None: what the files say); `batch`: the most texts of a run (None: so many as
    have 8,192 tokens, 1 to 32); `pooling` and `normalised`: others than the files say. Raises `ModelFormatError` and
    `OptionError`.
    """
    source = path if isinstance(path, Source) else open_source(path)
    family = encoder_of(source)
    for name, value in (("context", context), ("batch", batch)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 30):
            raise OptionError(f"{name}={value!r}: expected a number >= 1")
    config = read_config(
        source, vocabulary_size(source, family.names["token_embd"]), every=None, epsilon=family.epsilon
    )
    config = family.configure(config, source, context or config.context)
    said = pooling_of(source)
    longest = context if context is not None else min(config.context, said.longest or config.context)
    if longest > config.context:
        raise OptionError(f"context={longest}: {source.path} has positions for {config.context} tokens")
    said = replace(
        said, longest=longest, kind=said.kind if pooling is None else pooling,
        normalised=said.normalised if normalised is None else normalised,
    )  # fmt: skip
    most = batch if batch is not None else min(max(TOKENS // longest, 1), 32)
    b = EncoderBlocks(source, family, config, Dim("batch", 1, most), Dim("tokens", 1, longest))
    x = family.embed(b, b.ids)
    for layer in range(config.layers):
        x = family.layer(b, x, layer)
    x = family.last(b, x)
    b.graph.output(pooled(x, b.counts, b.places, said.kind, said.normalised), "embedding")
    b.graph.output(x, "hidden")
    check_used(b, OTHER_HEADS)
    b.graph.name = Path(source.path).stem if source.gguf else Path(source.path).parent.name or source.architecture
    return Encoder(b.graph, config, source, said)
