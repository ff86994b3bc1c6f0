"""How attention, and the packing of its keys and values, is cut into chunks: see `base`."""

from __future__ import annotations

from rlx.backends.cpu.schedule.arguments import Extents, thread_count
from rlx.backends.cpu.schedule.balance import shares, wants_shares
from rlx.backends.cpu.schedule.base import aligned
from rlx.backends.cpu.target import Rates
from rlx.ir.shape import Shape, Size, ceildiv, evaluate
from rlx.records import dataclass

__all__ = ["AttentionSchedule"]


@dataclass(frozen=True)
class AttentionParts:
    """How query rows are cut: chunk = (batch * heads + head) * row blocks + row block."""

    rows: int
    part: int  # rows of a chunk that are computed to results before the next ones
    chunks: int
    score_stride: int
    sums: int
    results: int
    panels: int
    queries: int
    scratch: int


@dataclass(eq=False, repr=False)
class AttentionSchedule:
    """The chunks of attention: `q_shape` is [batch, heads, rows, depth].

    `packs`: each chunk brings its keys and values into panels itself. `widens`: and its queries to f32. `ring`: rows of
    scores begin somewhere in their first `ALIGNED` elements. `pairs`: operands are words of two bf16, in panels and
    rows of whole multiples of so many words; 0: they are f32.
    """

    q_shape: Shape
    keys: Size
    value_depth: Size
    to_scratch: bool
    packs: bool
    causal: bool
    rates: Rates
    widens: bool = False
    ring: bool = False
    pairs: int = 0

    ALIGNED = 64  # keys whose powers are computed side by side: rows of scores are the same from such a number on
    WIDTH = 16  # columns of a panel
    MAX_ROWS = 128
    SCORE_BYTES = 192 * 1024  # of one block of rows
    MOST = 80e-6  # seconds of a chunk
    MOST_ROWS = 256  # of a chunk that packs
    HEADS = 8  # that are chunks enough
    CAUSAL_ROWS = 24  # that are computed at a time if causal: keys that none of them sees cost nothing

    @classmethod
    def too_large(cls, rows: Size, keys: Size) -> str | None:
        """Why all query rows of a head are not one chunk, which would pack keys and values for itself; None if so."""
        if not isinstance(rows, int) or not isinstance(keys, int):
            return "its rows or keys are of open size"
        if rows > cls.MOST_ROWS:
            return f"it has more than {cls.MOST_ROWS} query rows"
        fits = 4 * rows * cls.stride(keys) <= cls.SCORE_BYTES
        return None if fits else f"the scores of a head take more than {cls.SCORE_BYTES >> 10} KiB"

    @classmethod
    def stride(cls, keys: int) -> int:
        """Elements of a row of scores: not a power of two, and room to finish vectors."""
        return -(-keys // cls.WIDTH) * cls.WIDTH + cls.WIDTH

    @classmethod
    def words(cls, elements: Size, pairs: int) -> Size:
        """Words of that many elements along the axis that is summed over: pairs of bf16, or f32."""
        return ceildiv(elements, 2 * pairs) * pairs if pairs else elements

    def __call__(self, extents: Extents) -> AttentionParts:
        batch, heads, rows, depth = (evaluate(s, extents) for s in self.q_shape)
        keys, value_depth = evaluate(self.keys, extents), evaluate(self.value_depth, extents)
        stride = self.stride(keys) + self.ALIGNED * self.ring
        depth_words, key_words = (evaluate(self.words(n, self.pairs), {}) for n in (depth, keys))
        per_row = 2 * keys * depth_words + 2 * key_words * value_depth + 60 * keys + 1
        rates = self.rates
        take = min(int(self.MOST * rates.flops / per_row), self.SCORE_BYTES // (4 * stride), self.MAX_ROWS)
        take = max(min(max(take // 6 * 6, 12), rows), 1)
        blocks = -(-rows // take)
        take = max(-(-rows // max(blocks, 1)), 1)
        if self.packs and batch * heads >= self.HEADS:
            take = max(rows, 1)
        packing = keys * (depth + value_depth) * 4 / rates.copy if self.packs else 0.0
        threads = thread_count(extents)
        if wants_shares(batch * heads * -(-rows // take), threads):

            def cost(some: int, _: int) -> float:
                return some * per_row / rates.flops + keys * (depth + value_depth) * 4 / rates.read + packing

            take, _ = shares(rows, 1, threads, cost, copies=batch * heads, most_rows=take)
        part = min(self.CAUSAL_ROWS, take) if self.causal else take
        sums = (part + 1) * stride * 4  # a row more, for what all rows have of the scores
        results = sums + aligned(part * 8)
        panels = results + (part * -(-value_depth // self.WIDTH) * self.WIDTH * 4 if self.to_scratch else 0)
        padded = (-(-n // self.WIDTH) * self.WIDTH for n in (keys, value_depth))
        held = 4 * sum(n * k for n, k in zip(padded, (depth_words, key_words), strict=True))
        total = panels + (held if self.packs else 0)
        queries = aligned(total)
        total = queries + (part * -(-depth_words // self.WIDTH) * self.WIDTH * 4 if self.widens else 0)
        count = batch * heads * -(-rows // take) if value_depth else 0
        return AttentionParts(take, part, count, stride, sums, results, panels, queries, aligned(total))
