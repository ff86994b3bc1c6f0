"""A folder with safetensors and config.json as the contents of a GGUF file, for the families that rlx knows.

What is written is read back before any tensor is: where the new metadata would say something else, nothing is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import ModelFormatError
from rlx.importers.fields import Fields, sliding_windows
from rlx.importers.stored import Stored
from rlx.ir.graph import Array, TensorType
from rlx.models.blocks import PREFIXES
from rlx.models.config import Config, read_config
from rlx.models.decoder import DERIVED_ENDINGS, vocabulary_size
from rlx.models.families import family_of
from rlx.models.families.base import Family
from rlx.models.rope import plain_frequencies
from rlx.models.source import Facts, Source, open_source
from rlx.quantiser.vocabulary import vocabulary_of
from rlx.quantiser.weights import Weights
from rlx.quantiser.write_gguf import Typed, pair
from rlx.records import dataclass, names_of

__all__ = ["as_gguf"]


def as_gguf(path: Path) -> Weights:
    """The weights under their names in GGUF files, and the metadata. Raises `ModelFormatError`."""
    source = open_source(path)
    family = family_of(source)
    vocab = vocabulary_size(source, family.names["token_embd"])
    plain = read_config(source, vocab, every=family.every, epsilon=family.epsilon)
    config = family.configure(plain, source, plain.context)
    model = _Model(source, family, plain, config)
    tensors, changed = model.tensors()
    metadata = model.metadata()
    tensors |= model.rope(metadata)
    _check_same(model, metadata, tensors)
    words, remarks = vocabulary_of(path, vocab)
    arch = family.gguf[0]
    pairs = [
        pair("general.architecture", Typed("text", arch)),
        pair("general.name", Typed("text", path.resolve().name)),
    ]
    pairs += [pair(f"{arch}.{key}", value) for key, value in metadata.items()]
    pairs += [pair(key, value) for key, value in words.items()]
    return Weights(path, "gguf", tensors, pairs, changed=changed, layers=config.layers, remarks=remarks)


@dataclass(frozen=True)
class _Model:
    """What the folder holds: `plain` is the configuration before the family had its say, `config` after."""

    source: Source
    family: Family
    plain: Config
    config: Config

    def tensors(self) -> tuple[dict[str, Stored], dict[str, Callable[[Array], Array]]]:
        """The tensors by their new names, and what is to be done with some of them."""
        if self.family.mixture:
            raise ModelFormatError(
                f"{self.source.path}: a mixture of experts can't be written as GGUF, where experts lie in one tensor; "
                "name a target that ends in .safetensors, or convert it by llama.cpp's tool"
            )
        rules = [
            (re.compile(re.escape(theirs).replace(r"\{\}", r"(\d+)") + r"\.(weight|bias)"), ours, name)
            for name, (ours, theirs) in self.family.names.items()
        ]
        tensors: dict[str, Stored] = {}
        changed: dict[str, Callable[[Array], Array]] = {}
        tied = self.source.facts.fields.flag("tie_word_embeddings", default=False)
        for old, stored in self.source.tensors.items():
            if old.endswith(DERIVED_ENDINGS) or (tied and old.endswith("lm_head.weight")):
                continue
            made = self._renamed(old, rules)
            if made is None:
                raise ModelFormatError(
                    f"{self.source.path}: {self.source.architecture!r} as rlx knows it has no tensor {old!r}"
                )
            new, name = made
            change = self.family.stored_in_gguf(name, self.config)
            if change is not None:
                changed[new] = change
                stored = _turned(stored, change)
            tensors[new] = stored
        return tensors, changed

    @staticmethod
    def _renamed(old: str, rules: list[tuple[re.Pattern[str], str, str]]) -> tuple[str, str] | None:
        for prefix in PREFIXES:
            for pattern, ours, name in rules:
                found = pattern.fullmatch(old.removeprefix(prefix)) if old.startswith(prefix) else None
                if found is not None:
                    *layer, part = found.groups()
                    return f"{ours.format(*layer)}.{part}", name
        return None

    def metadata(self) -> dict[str, Typed]:
        """The keys after the name of the architecture."""
        c = self.config
        norm = (
            "layer_norm"
            if any(n.endswith(("norm.bias", "ln_f.bias")) for n in self.source.tensors)
            else "layer_norm_rms"
        )
        made = {
            "context_length": Typed("u32", c.context),
            "embedding_length": Typed("u32", c.hidden),
            "block_count": Typed("u32", c.layers),
            "feed_forward_length": Typed("u32", c.ffn),
            "attention.head_count": Typed("u32", c.heads),
            "attention.head_count_kv": Typed("u32", c.kv_heads),
            "attention.key_length": Typed("u32", c.head_dim),
            "attention.value_length": Typed("u32", c.head_dim),
            f"attention.{norm}_epsilon": Typed("f32", c.epsilon),
            "vocab_size": Typed("u32", c.vocab),
        }
        for key, value, usual in (
            ("attn_logit_softcapping", c.attention_cap, 0.0),
            ("final_logit_softcapping", c.final_cap, 0.0),
            ("residual_scale", c.residual_scale, 1.0),
            ("logit_scale", c.logit_scale, 1.0),
        ):
            if value != usual:
                made[key] = Typed("f32", value)
        if self.source.facts.fields.get("embedding_multiplier") is not None:
            made["embedding_scale"] = Typed("f32", c.embedding_scale)
        if c.scale is not None and self.source.facts.fields.get("attention_multiplier") is not None:
            made["attention.scale"] = Typed("f32", c.scale)
        window = max((w for w in c.windows if w is not None), default=0)
        if window:
            made["attention.sliding_window"] = Typed("u32", window)
            if list(c.windows) != sliding_windows(window, None, c.layers, self.family.every):
                made["attention.sliding_window_pattern"] = Typed("bool", [w is not None for w in c.windows])
        return made

    def rope(self, metadata: dict[str, Typed]) -> dict[str, Stored]:
        """Adds the keys of rotary positions; the tensors that hold their divisors."""
        rope, fields = self.config.rope, self.source.facts.fields
        if rope is None:
            return {}
        given: Any = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        given = given.get("full_attention", given)
        own = Fields(fields.path, given.get)
        base = own.real("rope_theta", default=fields.real("rope_theta", default=self.family.rope_base))
        metadata["rope.dimension_count"] = Typed("u32", rope.dim)
        metadata["rope.freq_base"] = Typed("f32", base)
        near = fields.get("rope_local_base_freq")
        if near is not None:
            metadata["rope.freq_base_swa"] = Typed("f32", float(near))
        kind = own.text("rope_type", "type", default="default")
        longest = fields.number("max_position_embeddings", default=0)
        original = own.number(
            "original_max_position_embeddings",
            default=fields.number("original_max_position_embeddings", default=longest),
        )
        if kind == "llama3":
            divisors = plain_frequencies(base, rope.dim) / np.asarray(rope.frequencies, np.float32)
            return {"rope_freqs.weight": _constant(divisors)}
        if kind in ("linear", "yarn"):
            metadata["rope.scaling.type"] = Typed("text", kind)
            metadata["rope.scaling.factor"] = Typed("f32", own.real("factor"))
        if kind == "yarn":
            metadata["rope.scaling.original_context_length"] = Typed("u32", original)
            for key, name in ("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow"):
                if given.get(name) is not None:
                    metadata[f"rope.scaling.{key}"] = Typed("f32", own.real(name))
        if kind in ("longrope", "su"):
            metadata["rope.scaling.original_context_length"] = Typed("u32", original)
            metadata["rope.scaling.attn_factor"] = Typed("f32", rope.factor)
            return {
                f"rope_factors_{n}.weight": _constant(np.asarray(given.get(f"{n}_factor"), np.float32))
                for n in ("long", "short")
            }
        return {}


def _constant(array: Array) -> Stored:
    made = np.ascontiguousarray(array, np.float32)
    return Stored(TensorType(made.shape, "f32"), None, lambda: made)


def _turned(stored: Stored, change: Callable[[Array], Array]) -> Stored:
    """The same tensor, its type in the shape that it gets."""
    shape = tuple(int(s) for s in stored.type.shape if isinstance(s, int))
    after = change(np.empty(shape, np.bool_)).shape
    return stored if after == shape else Stored(TensorType(after, stored.type.dtype), None, stored.read)


def _check_same(model: _Model, metadata: Mapping[str, Typed], tensors: Mapping[str, Stored]) -> None:
    """Raises `ModelFormatError` where the new metadata says something else than config.json."""
    arch, values = model.family.gguf[0], {key: value.value for key, value in metadata.items()}
    fields = Fields(model.source.path, values.get)
    again = Source(model.source.path, True, arch, Facts(fields, True), values, tensors)
    plain = read_config(again, model.config.vocab, every=model.family.every, epsilon=model.family.epsilon)
    for context in {model.config.context, min(model.config.context, 4096)}:
        want = model.family.configure(model.plain, model.source, context)
        got = model.family.configure(plain, again, context)
        for name in names_of(Config):
            if not _close(getattr(want, name), getattr(got, name)):
                raise ModelFormatError(
                    f"{model.source.path}: its {name} can't be said in the metadata of a GGUF file of {arch!r}: "
                    f"{getattr(want, name)!r:.60} would become {getattr(got, name)!r:.60}"
                )


def _close(a: Any, b: Any) -> bool:
    """Whether two values are the same as far as f32 tells."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-5 * max(abs(a), abs(b))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_close, a, b))
    if hasattr(a, "frequencies") and hasattr(b, "frequencies"):
        return _close(a.frequencies, b.frequencies) and _close(a.factor, b.factor)
    return bool(a == b)
