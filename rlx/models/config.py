"""What a decoder computes, in numbers; the same for both file formats."""

from __future__ import annotations

from rlx.errors import ModelFormatError
from rlx.importers.fields import sliding_windows
from rlx.models.rope import MAX_DIM, Rope
from rlx.models.source import Source
from rlx.records import dataclass

__all__ = ["Config", "read_config"]

MAX_LAYERS, MAX_SIZE, MAX_CONTEXT = 1 << 12, 1 << 24, 1 << 30


@dataclass(frozen=True)
class Config:
    """Sizes and factors of a decoder; a family changes what is its own.

    `windows` gives for each layer how many positions it sees back, None for all. Scores are multiplied by `scale`
    (None: 1 / sqrt(head_dim)). Of `experts` of width `expert_ffn` a token uses `experts_used`. `rope` turns queries and
    keys; layers with a window use `window_rope` where it is given.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    epsilon: float
    windows: tuple[int | None, ...]
    rope: Rope | None = None
    window_rope: Rope | None = None
    scale: float | None = None
    attention_cap: float = 0.0
    final_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: int = 0
    experts_used: int = 0
    expert_ffn: int = 0


def read_config(source: Source, vocab: int, *, every: int | None, epsilon: float) -> Config:
    """What the files say; `every`: of so many layers the last sees everything, where a window is given without a list.

    Raises `ModelFormatError`.
    """
    facts = source.facts
    layers, hidden = facts.number("layers"), facts.number("hidden")
    heads = facts.number("heads")
    if not 1 <= layers <= MAX_LAYERS or not 1 <= hidden <= MAX_SIZE or not 1 <= heads <= hidden:
        raise ModelFormatError(f"{source.path}: {layers} layers of {hidden} elements in {heads} heads: out of range")
    kv_heads = facts.number("kv_heads", heads)
    head_dim = facts.number("head_dim", hidden // heads)
    if not 1 <= kv_heads <= heads or heads % kv_heads or not 1 <= head_dim <= MAX_DIM:
        raise ModelFormatError(
            f"{source.path}: {heads} heads of queries, {kv_heads} of keys, of {head_dim} elements: expected numbers "
            "of heads that divide, and elements"
        )
    if facts.number("value_dim", head_dim) != head_dim:
        raise ModelFormatError(f"{source.path}: heads of values and of keys differ in size, which is not known")
    ffn, context = facts.number("ffn", 4 * hidden) or 4 * hidden, facts.number("context")
    if not 1 <= ffn <= MAX_SIZE or not 1 <= context <= MAX_CONTEXT:
        raise ModelFormatError(f"{source.path}: width {ffn} or context {context} out of range")
    return Config(
        layers, hidden, heads, kv_heads, head_dim, ffn, vocab, context,
        facts.real("epsilon", epsilon),
        tuple(_windows(source, layers, every)),
    )  # fmt: skip


def _windows(source: Source, layers: int, every: int | None) -> list[int | None]:
    fields, metadata = source.facts.fields, source.metadata
    window = source.facts.number("window", 0)
    if source.gguf:
        return sliding_windows(window, fields.get("attention.sliding_window_pattern"), layers, every)
    if not fields.flag("use_sliding_window", default=True):
        window = 0
    kinds = metadata.get("layer_types")
    pattern = metadata.get("sliding_window_pattern", metadata.get("_sliding_window_pattern"))
    if isinstance(kinds, list):
        odd = next((kind for kind in kinds if kind not in ("full_attention", "sliding_attention")), None)
        if odd is not None or len(kinds) != layers:
            raise ModelFormatError(f"{source.path}: layer_types: expected {layers}, of full or sliding_attention")
        pattern = [kind == "sliding_attention" for kind in kinds]
    return sliding_windows(window, pattern, layers, every)
