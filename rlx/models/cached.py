"""Attention over a cache that lives from run to run."""

from __future__ import annotations

from rlx import ops
from rlx.errors import OptionError
from rlx.ir.encodings import ENCODINGS
from rlx.ir.graph import Value
from rlx.ir.shape import Dim, upper
from rlx.models.blocks import Blocks, Described
from rlx.models.config import Config
from rlx.models.sizes import MOVED, WHOLE, cache_rows
from rlx.models.source import Source
from rlx.records import dataclass

__all__ = ["CachedBlocks", "Room"]


@dataclass(frozen=True)
class Room:
    """Sequences, positions of the cache of each, tokens of each in a run, and the type or block format of the cache."""

    batch: int
    capacity: int
    tokens: Dim
    kv_dtype: str = "f32"
    rings: bool = False  # whether layers with a window keep only what it sees

    def rows(self, window: int | None) -> int:
        """Positions of the cache of a layer."""
        return cache_rows(window, self.capacity, upper(self.tokens) or 1, self.rings)


class CachedBlocks(Blocks):
    """The graph of a decoder while it is built.

    Its states are `length` [batch], the positions that are filled, and for each layer N cache.k.N and cache.v.N
    [batch, kv_heads, rows, head_dim], of all positions. Where a layer with a window has room for fewer, they are called
    window.k.N and window.v.N, and hold those from `start` [batch] on, a state that whoever runs the graph moves on with
    what is in these caches.
    """

    def __init__(self, source: Source, family: Described, config: Config, room: Room) -> None:
        super().__init__(source, family, config, room.batch, room.tokens)
        self.room = room
        self.length = self.graph.state("length", (room.batch,), "i64")
        # of each token of each sequence, [batch, tokens]; and how many there are with this step's
        self.positions = ops.reshape(self.length, (room.batch, 1)) + self.iota(room.tokens)
        self.count = self.length + self.size_of(room.tokens)
        self.start = None  # where the caches of windows begin
        if any(room.rows(window) < room.capacity for window in config.windows):
            self.start = self.graph.state("start", (room.batch,), "i64")

    def attention(self, q: Value, k: Value, v: Value, layer: int) -> Value:
        """Causal attention over the layer's cache, to which k and v are added: [batch, tokens, heads * head_dim]."""
        c = self.config
        moved = self.start if self.room.rows(c.windows[layer]) < self.room.capacity else None
        role = WHOLE if moved is None else MOVED
        k, v = self._cached(f"{role}.k", k, layer, moved), self._cached(f"{role}.v", v, layer, moved)
        count = self.count if moved is None else self.count - moved
        more = [self.constant(c.attention_cap)] if c.attention_cap else []
        steps = ("softcap",) * len(more)
        window = c.windows[layer]
        y: Value = ops.attention(
            q, k, v, *more, count, scale=c.scale, causal=True, counted=True, steps=steps,
            window=None if window is None or window >= self.room.capacity else window,
        )  # fmt: skip
        return self.joined(y)

    def _cached(self, name: str, rows: Value, layer: int, moved: Value | None) -> Value:
        c, places = self.config, self.room.rows(self.config.windows[layer])
        kind, shape = self.room.kv_dtype, (self.room.batch, c.kv_heads, places, c.head_dim)
        if kind in ENCODINGS:
            if c.head_dim % ENCODINGS[kind].block:
                raise OptionError(f"kv_dtype={kind!r}: heads of {c.head_dim} elements are not whole blocks; use f16")
            state, rows = self.graph.state(f"{name}.{layer}", shape, encoding=kind), ops.encode(rows, encoding=kind)
        else:
            state = self.graph.state(f"{name}.{layer}", shape, kind)
            rows = rows if kind == "f32" else ops.cast(rows, to=kind)
        place = self.length if moved is None else self.length - moved
        new: Value = ops.dynamic_update_slice(state, rows, place, axis=2)
        self.graph.update(state, new)
        return new
