"""Rotary positions: the angle of each pair of elements a position, with the scalings that models were stretched by.

A position p turns pair j by the angle p * frequencies[j], computed in f32 as the models' own code does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.errors import ModelFormatError
from rlx.importers.fields import Fields
from rlx.ir.graph import Array
from rlx.records import dataclass

__all__ = ["MAX_DIM", "Rope", "config_rope", "gguf_rope", "plain_frequencies"]

MAX_DIM = 1 << 16  # elements of a head
KINDS = ("default", "none", "linear", "llama3", "yarn", "longrope", "su")


@dataclass(frozen=True)
class Rope:
    """`frequencies` [dim / 2]; the sines and cosines are multiplied by `factor`."""

    frequencies: tuple[float, ...]
    factor: float = 1.0

    @property
    def dim(self) -> int:
        """Elements of a head that are turned."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True)
class _Scaling:
    kind: str
    factor: float = 1.0
    original: int = 0  # tokens of context before the model was stretched
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    attention: float | None = None  # the factor of sines and cosines where the file gives one
    short: Sequence[float] | None = None
    long: Sequence[float] | None = None


def plain_frequencies(base: float, dim: int) -> Array:
    """The angles a position of models that were not stretched, [dim / 2] in f32."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.asarray(np.float32(1) / np.float32(base) ** exponents)


def _scaled(path: str, base: float, dim: int, s: _Scaling, context: int) -> Rope:
    """The frequencies for a cache of `context` tokens."""
    if not 2 <= dim <= MAX_DIM or dim % 2 or base <= 0:
        raise ModelFormatError(
            f"{path}: rotary positions of {dim} elements and base {base:g}: expected an even number up to {MAX_DIM} "
            "and a positive base"
        )
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # of hostile files
        return _with_scaling(path, base, dim, s, context)


def _with_scaling(path: str, base: float, dim: int, s: _Scaling, context: int) -> Rope:
    plain, factor = plain_frequencies(base, dim), 1.0
    if s.kind in ("linear", "llama3", "yarn") and not s.factor >= 1e-3:
        raise ModelFormatError(f"{path}: the factor {s.factor} of rotary positions must be positive")
    match s.kind:
        case "linear":
            plain = plain / np.float32(s.factor)
        case "llama3":
            plain = _llama3(path, plain, s)
        case "yarn":
            plain = _yarn(path, plain, base, dim, s)
            factor = _magnitude(s.factor) if s.attention is None else s.attention
        case "longrope":
            plain, factor = _long(path, plain, s, context)
    return Rope(tuple(np.asarray(plain, np.float32).tolist()), factor)


def _llama3(path: str, plain: Array, s: _Scaling) -> Array:
    """Low frequencies are divided by the factor, high ones kept, those between are mixed. (Llama 3.1)"""
    if not s.original or s.high <= s.low:
        raise ModelFormatError(f"{path}: rotary positions of kind 'llama3' lack the original context or their limits")
    turns = s.original * plain / np.float32(2 * math.pi)
    smooth = np.clip((turns - s.low) / (s.high - s.low), 0, 1)
    return np.asarray((1 - smooth) * plain / s.factor + smooth * plain)


def _yarn(path: str, plain: Array, base: float, dim: int, s: _Scaling) -> Array:
    """Pairs that turn more than `fast` times in the original context are kept, those below `slow` divided. (YaRN)"""
    if not s.original or base <= 1 or not min(s.fast, s.slow) > 0:
        raise ModelFormatError(f"{path}: rotary positions of kind 'yarn' lack the original context or their limits")

    def pair(turns: float) -> float:
        return dim * math.log(s.original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair(s.fast)), 0), min(math.ceil(pair(s.slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    return np.asarray(plain / s.factor * ramp + plain * (1 - ramp))


def _magnitude(factor: float) -> float:
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def _long(path: str, plain: Array, s: _Scaling, context: int) -> tuple[Array, float]:
    """Own divisors for each pair, others beyond the original context. (LongRoPE)"""
    divisors = s.long if context > s.original else s.short
    if divisors is None or len(divisors) != len(plain) or not all(d > 0 for d in divisors):
        raise ModelFormatError(f"{path}: rotary positions of kind 'longrope': expected {len(plain)} positive factors")
    factor = s.attention
    if factor is None:
        factor = math.sqrt(1 + math.log(s.factor) / math.log(s.original)) if s.factor > 1 and s.original > 1 else 1.0
    return plain / np.asarray(divisors, np.float32), factor


def config_rope(f: Fields, dim: int, base: float, context: int, kind: str = "") -> Rope:
    """Of a config.json: `rope_parameters` (of the attention `kind`, where they differ), or `rope_scaling`.

    `base` counts where the file has none. Raises `ModelFormatError` for a scaling that is not known.
    """
    given: Any = f.get("rope_parameters") or f.get("rope_scaling") or {}
    if isinstance(given, Mapping) and kind in given:
        given = given[kind]
    if not isinstance(given, Mapping):
        raise ModelFormatError(f"{f.path}: the scaling of rotary positions is {given!r:.60}: expected an object")
    own = Fields(f.path, given.get)
    base = own.real("rope_theta", default=f.real("rope_theta", default=base))
    dim = int(dim * own.real("partial_rotary_factor", default=f.real("partial_rotary_factor", default=1.0)))
    name = own.text("rope_type", "type", default="default")
    if name not in KINDS:
        known = ", ".join(KINDS)
        raise ModelFormatError(f"{f.path}: rotary positions of kind {name!r} are not known; known are {known}")
    longest = f.number("max_position_embeddings", default=0)
    original = own.number(
        "original_max_position_embeddings", default=f.number("original_max_position_embeddings", default=longest)
    )
    stretched = longest / original if name in ("longrope", "su") and original else 1.0
    attention = own.real("attention_factor", default=math.nan)
    scaling = _Scaling(
        "longrope" if name == "su" else name,
        own.real("factor", default=stretched),
        original,
        own.real("low_freq_factor", default=1.0),
        own.real("high_freq_factor", default=4.0),
        own.real("beta_fast", default=32.0),
        own.real("beta_slow", default=1.0),
        None if math.isnan(attention) else attention,
        _numbers(f.path, given.get("short_factor")),
        _numbers(f.path, given.get("long_factor")),
    )
    if own.real("mscale", default=0.0) or own.real("mscale_all_dim", default=0.0):
        raise ModelFormatError(f"{f.path}: mscale of rotary positions is not known")
    return _scaled(f.path, base, dim, scaling, context)


def _numbers(path: str, value: Any) -> list[float] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(v) in (int, float) and math.isfinite(v) for v in value):
        raise ModelFormatError(f"{path}: the factors of rotary positions: expected a list of numbers")
    return [float(v) for v in value]


def gguf_rope(f: Fields, dim: int, base: float, context: int, factors: Mapping[str, Array]) -> Rope:
    """Of a GGUF file, whose keys `f` has without the name of the architecture.

    `factors` are the tensors rope_freqs, rope_factors_long and rope_factors_short, where the file has them: divisors.
    """
    kind = f.text("rope.scaling.type", default="none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ModelFormatError(f"{f.path}: rope.scaling.type {kind!r}: known are none, linear, yarn and longrope")
    longest = f.number("context_length", default=0)
    original = f.number("rope.scaling.original_context_length", default=longest)
    stretched = f.real("rope.scaling.factor", default=1.0) or 1.0  # 0 stands for none
    attention = f.real("rope.scaling.attn_factor", default=1.0)  # 1 where files don't say, as llama.cpp has it
    long, short = (factors.get(f"rope_factors_{name}") for name in ("long", "short"))
    if long is not None and short is not None:
        kind = "longrope"
    if kind == "yarn":
        attention *= _magnitude(stretched)
    scaling = _Scaling(
        kind, stretched, original,
        fast=f.real("rope.scaling.yarn_beta_fast", default=32.0),
        slow=f.real("rope.scaling.yarn_beta_slow", default=1.0),
        attention=attention,
        short=None if short is None else short.tolist(),
        long=None if long is None else long.tolist(),
    )  # fmt: skip
    made = _scaled(f.path, base, dim, scaling, context)
    own = factors.get("rope_freqs")
    if own is None:
        return made
    if own.shape != (dim // 2,) or not (own > 0).all():
        raise ModelFormatError(f"{f.path}: rope_freqs: expected {dim // 2} positive numbers, got {list(own.shape)}")
    divided = np.asarray(made.frequencies, np.float32) / own.astype(np.float32)
    return Rope(tuple(divided.tolist()), made.factor)
