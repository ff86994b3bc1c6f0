"""Which type each tensor gets.

The first that applies: what the user says of its name; what stays as it is (whole numbers, one axis, few elements,
routers of experts and tables of positions); the types of embedding and head; the type of the whole, or what a mix says
of a layer. Where rows are no whole blocks, a format of 32 elements of about the same size is taken, and then f16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from rlx.errors import OptionError, no_such
from rlx.ir.encodings import ENCODINGS
from rlx.ir.value import TensorType
from rlx.records import dataclass, field

__all__ = ["FLOATS", "MIXES", "TYPES", "Rules", "bits_of", "is_head", "stored_bytes"]

FLOATS = ("f32", "f16", "bf16")
BLOCKS = tuple(name for name, encoding in ENCODINGS.items() if encoding.native)
MIXES: Mapping[str, str] = {"q3_k_m": "q3_k", "q4_k_m": "q4_k", "q5_k_m": "q5_k"}  # mix -> the type of most tensors
TYPES = (*FLOATS, *BLOCKS, *MIXES)
TINY = 1024  # elements; below, a tensor stays
SMALLER: Mapping[str, str] = {  # formats of 256 elements -> one of 32 that holds as much
    "q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "q8_k": "q8_0", "iq4_xs": "iq4_nl",
    "tq1_0": "q4_0", "tq2_0": "q4_0", "nvfp4": "iq4_nl",
}  # fmt: skip

_EMBEDDING = re.compile(r"(^|\.)(token_embd|embed_tokens|wte|word_embeddings|tok_embeddings)\.weight$")
_HEAD = re.compile(r"(^|\.)(output|lm_head|embed_out)\.weight$")
_KEPT = re.compile(  # their rounding costs more than their bytes
    r"(^|\.)(ffn_gate_inp|router|ssm_conv1d|position_embd|token_types|wpe|position_embeddings|token_type_embeddings)\b"
)
_LAYER = re.compile(r"(?:^|\.)(?:blk|layers|h)\.(\d+)\.")


@dataclass(frozen=True)
class Rules:
    """The user's wishes. `overrides` are pairs (pattern of names with * and ?, type); the first that matches counts."""

    type: str
    overrides: Sequence[tuple[str, str]] = ()
    embeddings: str | None = None
    output: str | None = None
    keep: Sequence[str] = ()
    layers: int = 0  # of the model, for mixes
    tied: bool = False  # whether the embedding is the head too
    known: Sequence[str] = field(default=TYPES)

    def __post_init__(self) -> None:
        for name in (self.type, self.embeddings, self.output, *(t for _, t in self.overrides)):
            if name is not None and name not in self.known:
                raise no_such("type", name, self.known)
        mixed = [t for _, t in self.overrides if t in MIXES] + [t for t in (self.embeddings, self.output) if t in MIXES]
        if mixed:
            raise OptionError(
                f"{mixed[0]} is a mix of types for a whole model: a tensor takes one of {', '.join(BLOCKS)}"
            )

    def choose(self, name: str, type: TensorType) -> tuple[str, str]:
        """The type of a tensor, and why where it is not that of the whole."""
        before = type.dtype.name if type.encoding is None else type.encoding.name
        shape = tuple(int(s) for s in type.shape if isinstance(s, int))
        if any(fnmatchcase(name, pattern) for pattern in self.keep):
            return before, "kept by its name"
        for pattern, wanted in self.overrides:
            if fnmatchcase(name, pattern):
                return _fitting(wanted, shape, f"by {pattern}")
        if not type.dtype.is_float or type.dtype.bits < 16:
            return before, "no float"
        reason = _why_kept(name, shape)
        if reason:
            return before, reason
        wanted, why = self._of_role(name)
        return _fitting(wanted, shape, why)

    def _of_role(self, name: str) -> tuple[str, str]:
        base = MIXES.get(self.type, self.type)
        embedding = _EMBEDDING.search(name) is not None
        head = _HEAD.search(name) is not None or (embedding and self.tied)
        if head and self.output is not None:
            return self.output, "head"
        if embedding and self.embeddings is not None:
            return self.embeddings, "embedding"
        if head and base in ENCODINGS and bits_of(base) < bits_of("q6_k"):
            return "q6_k", "head"
        if self.type in MIXES:
            return _mixed(self.type, name, self.layers)
        return base, ""

    def check_used(self, names: Sequence[str]) -> None:
        """Raises `NameNotFound` for a pattern that matches no tensor."""
        for pattern in (*self.keep, *(p for p, _ in self.overrides)):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise no_such("tensor", pattern, names)


def is_head(name: str) -> bool:
    """Whether a tensor is the product that gives logits, by its name."""
    return _HEAD.search(name) is not None


def _why_kept(name: str, shape: tuple[int, ...]) -> str:
    count = 1
    for size in shape:
        count *= size
    if len([s for s in shape if s > 1]) < 2:
        return "one axis"
    if count < TINY:
        return f"fewer than {TINY} elements"
    return "router or table of positions" if _KEPT.search(name) else ""


def _fitting(wanted: str, shape: tuple[int, ...], why: str) -> tuple[str, str]:
    """The type, or one whose blocks fit rows of that length."""
    row = shape[-1] if shape else 1
    if wanted in FLOATS or row % ENCODINGS[wanted].block == 0:
        return wanted, why
    other = SMALLER.get(wanted)
    found = other if other is not None and row % ENCODINGS[other].block == 0 else "f16"
    return found, f"rows of {row} are no whole blocks of {wanted}"


def _mixed(mix: str, name: str, layers: int) -> tuple[str, str]:
    """What llama.cpp's mixes of that name give values and the second product of the MLP, which need more bits."""
    base, found = MIXES[mix], _LAYER.search(name)
    layer = int(found[1]) if found else 0
    values, down = (re.search(p, name) is not None for p in (r"attn_v\.|v_proj\.", r"ffn_down\.|down_proj\."))
    if not (values or down) and not (mix == "q3_k_m" and re.search(r"attn_output\.|o_proj\.", name)):
        return base, ""
    first, last = layers // 8, 7 * layers // 8
    more = layer < first or layer >= last or (layer - first) % 3 == 2
    if mix == "q3_k_m":
        early = layer < (2 if values else max(1, layers // 16))
        return ("q5_k", mix) if early and (values or down) else ("q4_k", mix)
    return ("q6_k", mix) if more else (base, "")


def bits_of(name: str) -> float:
    """Bits that an element takes."""
    from rlx.ir.dtype import DTYPES

    encoding = ENCODINGS.get(name)
    return DTYPES[name].bits if encoding is None else 8 * encoding.block_bytes / encoding.block


def stored_bytes(name: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of that type."""
    from rlx.ir.dtype import DTYPES

    encoding = ENCODINGS.get(name)
    if encoding is not None:
        return encoding.nbytes(shape)
    count = 1
    for size in shape:
        count *= size
    return DTYPES[name].nbytes(count)
