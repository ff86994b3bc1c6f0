"""What language models are made of, as parts of a graph: weights by name, norms, heads, rotary positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from rlx import ops
from rlx.errors import ModelFormatError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Value
from rlx.ir.shape import Size
from rlx.models.config import Config
from rlx.models.rope import Rope
from rlx.models.source import Source
from rlx.ops.layout import Iota, SizeOf

__all__ = ["PREFIXES", "Blocks", "Described", "Names"]

# our name of a tensor: its name in GGUF and in safetensors (or several, with | between), {} for the layer
Names = Mapping[str, tuple[str, str]]

F32, I64 = DTYPES["f32"], DTYPES["i64"]
PREFIXES = (
    "", "model.", "transformer.", "language_model.model.", "model.language_model.", "language_model.",
    "bert.", "roberta.", "nomic_bert.",
)  # fmt: skip


class Described(Protocol):
    """What `Blocks` asks of a family: names of tensors, and how rotary positions pair the elements of GGUF files."""

    @property
    def names(self) -> Names: ...
    @property
    def interleaved(self) -> bool: ...


class Blocks(ABC):
    """The graph of a language model while it is built.

    A run takes `tokens` tokens of each of `batch` sequences; x is [batch, tokens, hidden] in f32. What the files hold
    in blocks or in 16 bits stays so in params, which have the names of the file.
    """

    positions: Value  # of each token of each sequence, [batch, tokens]

    def __init__(self, source: Source, family: Described, config: Config, batch: Size, tokens: Size) -> None:
        self.source, self.config, self.batch, self.tokens = source, config, batch, tokens
        self.names, self.interleaved = family.names, family.interleaved and source.gguf
        self.graph = Graph(source.architecture)
        self.used: set[str] = set()
        self._params: dict[str, Value] = {}
        self._turns: dict[Rope, tuple[Value, Value]] = {}

    def iota(self, size: Size) -> Value:
        """0, 1, ... (i64)."""
        return self.graph.add(Iota(size))[0]

    def size_of(self, size: Size) -> Value:
        """The extent of a size in a run (i64)."""
        return self.graph.add(SizeOf(size))[0]

    # ---- weights

    def _file_name(self, name: str, layer: int | None, expert: int = 0) -> str:
        """The name in the file of a tensor that is there, "" where it is not."""
        for part in (".weight", ".bias"):
            if name.endswith(part):
                break
        else:
            part = ""
        stem = name.removesuffix(part)
        known = self.names.get(stem)
        if known is None:
            return ""
        names = known[0 if self.source.gguf else 1].replace("{}", str(layer)).replace("[]", str(expert))
        owns = [own + part for own in names.split("|")]
        prefixes = PREFIXES[:1] if self.source.gguf else PREFIXES
        return next((p + own for own in owns for p in prefixes if p + own in self.source.tensors), "")

    def has(self, name: str, layer: int | None = None) -> bool:
        """Whether the file has a tensor, such as "attn_q.bias"."""
        return bool(self._file_name(name, layer))

    def param(self, name: str, layer: int | None, shape: tuple[int, ...], expert: int = 0) -> Value:
        """A weight as it is stored. Raises `ModelFormatError` where it is missing or has another shape."""
        found = self._file_name(name, layer, expert)
        if not found:
            stem, _, part = name.rpartition(".")
            wanted = self.names[stem][0 if self.source.gguf else 1].split("|")[0]
            wanted = wanted.replace("{}", str(layer)).replace("[]", str(expert))
            raise ModelFormatError(f"{self.source.path}: the tensor {wanted + '.' + part!r} is missing")
        if found not in self._params:
            self._params[found] = self._declared(found, shape)
        self.used.add(found)
        return self._params[found]

    def stacked(self, name: str, layer: int, count: int, shape: tuple[int, ...]) -> Value:
        """The matrices of a layer's experts, [count, *shape] in f32; folders have one tensor for each."""
        if self.source.gguf:
            return self.wide(self.param(f"{name}.weight", layer, (count, *shape)))
        found = [self.wide(self.param(f"{name}.weight", layer, shape, expert)) for expert in range(count)]
        return _value(ops.concat(*(ops.unsqueeze(w, axes=(0,)) for w in found), axis=0))

    def row(self, name: str, layer: int, size: int) -> Value:
        """A weight of one row, [size] or [1, size] in the file, in f32."""
        stored = self.source.tensors.get(self._file_name(f"{name}.weight", layer))
        shape = (1, size) if stored is not None and stored.type.rank == 2 else (size,)
        return self.wide(self.param(f"{name}.weight", layer, shape))

    def rows_of(self, name: str) -> int:
        """The first size of a tensor that is there."""
        size = self.source.tensors[self._file_name(name, None)].type.shape[0]
        assert isinstance(size, int)
        return size

    def _declared(self, name: str, shape: tuple[int, ...]) -> Value:
        stored = self.source.tensors[name]
        type = stored.type
        if type.shape != shape:
            raise ModelFormatError(
                f"{self.source.path}: tensor {name!r}: expected shape {list(shape)}, got {list(type.shape)}"
            )
        if stored.encoding is not None:
            if type.encoding is None:
                raise ModelFormatError(
                    f"{self.source.path}: tensor {name!r}: blocks of {stored.encoding} are not known"
                )
            if type.encoding.native:
                return self.graph.param(name, shape, "f32", data=stored.read(), encoding=type.encoding)
            if not self.source.decoded:
                return self.graph.param(name, shape, "f32")
            return self.graph.param(name, data=type.encoding.decode(stored.read(), shape))
        if not type.dtype.is_float or type.dtype.bits < 16:
            raise ModelFormatError(f"{self.source.path}: tensor {name!r}: expected floats or blocks, got {type.dtype}")
        return self.graph.param(name, data=stored.read())  # where it lies, aligned or not: who loads it copies it

    def wide(self, value: Value) -> Value:
        """The numbers of a weight in f32."""
        return value if value.dtype is F32 else _value(ops.cast(value, to=F32))

    def constant(self, number: float) -> Value:
        return self.graph.constant(np.float32(number))

    # ---- layers

    def linear(self, x: Value, name: str, layer: int | None, width: int, *, turned: bool = False) -> Value:
        """x w^T + b, w [width, the last axis of x], `turned` x w + b with w the other way; b where the file has one."""
        shape = (width, _last(x))
        w = self.wide(self.param(f"{name}.weight", layer, shape[::-1] if turned else shape))
        y = _value(ops.matmul(x, w if turned else ops.transpose(w, (1, 0))))
        if self.has(f"{name}.bias", layer):
            y = y + self.wide(self.param(f"{name}.bias", layer, (width,)))
        return y

    def parts(self, x: Value, sizes: tuple[int, ...]) -> list[Value]:
        """The pieces of the last axis."""
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        return [x[..., start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def embedding(self, ids: Value, name: str = "token_embd", rows: int = 0) -> Value:
        """The rows of a table [rows or vocab, hidden] for ids."""
        table = self.param(f"{name}.weight", None, (rows or self.config.vocab, self.config.hidden))
        return self.wide(ops.gather(table, ids, axis=0))

    def rms_norm(self, x: Value, name: str, layer: int | None, offset: float = 0.0) -> Value:
        """x / rms(x) * (w + offset) over the last axis."""
        w = self.wide(self.param(f"{name}.weight", layer, (_last(x),)))
        return _value(ops.rms_norm(x, w + offset if offset else w, epsilon=self.config.epsilon))

    def layer_norm(self, x: Value, name: str, layer: int | None) -> Value:
        """(x - mean) / deviation * w + b over the last axis; b where the file has one."""
        parts = [part for part in ("weight", "bias") if part == "weight" or self.has(f"{name}.bias", layer)]
        found = [self.wide(self.param(f"{name}.{part}", layer, (_last(x),))) for part in parts]
        return _value(ops.layer_norm(x, *found, epsilon=self.config.epsilon))

    def heads(self, x: Value, count: int) -> Value:
        """[batch, tokens, count * head_dim] -> [batch, count, tokens, head_dim]."""
        split = ops.reshape(x, (self.batch, self.tokens, count, self.config.head_dim))
        return _value(ops.transpose(split, (0, 2, 1, 3)))

    def fused_heads(self, x: Value, layer: int) -> tuple[Value, Value, Value]:
        """Queries, keys and values of one matrix, "attn_qkv", as heads."""
        c = self.config
        counts = (c.heads, c.kv_heads, c.kv_heads)
        sizes = tuple(n * c.head_dim for n in counts)
        parts = self.parts(self.linear(x, "attn_qkv", layer, sum(sizes)), sizes)
        q, k, v = (self.heads(part, n) for part, n in zip(parts, counts, strict=True))
        return q, k, v

    def rotate(self, x: Value, rope: Rope | None) -> Value:
        """Heads turned by their positions."""
        if rope is None:
            return x
        if rope not in self._turns:
            angles = ops.cast(self.positions, to=F32)
            angles = ops.reshape(angles, (self.batch, self.tokens, 1)) * self.graph.constant(
                np.asarray(rope.frequencies, np.float32)
            )
            cos, sin = ops.cos(angles), ops.sin(angles)
            if rope.factor != 1:
                cos, sin = cos * self.constant(rope.factor), sin * self.constant(rope.factor)
            self._turns[rope] = cos, sin
        dim = 0 if rope.dim == self.config.head_dim else rope.dim
        return _value(ops.rotary_embedding(x, *self._turns[rope], interleaved=self.interleaved, dim=dim))

    @abstractmethod
    def attention(self, q: Value, k: Value, v: Value, layer: int) -> Value:
        """Attention of heads to those of a layer: [batch, tokens, heads * head_dim]."""

    def joined(self, y: Value) -> Value:
        """[batch, heads, tokens, head_dim] -> [batch, tokens, heads * head_dim]."""
        width = self.config.heads * self.config.head_dim
        return _value(ops.reshape(ops.transpose(y, (0, 2, 1, 3)), (self.batch, self.tokens, width)))


def _last(x: Value) -> int:
    """The last size of x, a number."""
    size = x.shape[-1]
    assert isinstance(size, int)
    return size


def _value(made: Any) -> Value:
    """What the function of an op with one result gives."""
    assert isinstance(made, Value)
    return made
