"""How products with few rows, or few columns, are cut into chunks, and which products are such: see `base`."""

from __future__ import annotations

from rlx.backends.cpu.schedule.arguments import Extents, thread_count
from rlx.backends.cpu.schedule.balance import TURNS, wants_shares
from rlx.backends.cpu.schedule.base import aligned, pieces
from rlx.backends.cpu.schedule.choice import Limit
from rlx.backends.cpu.schedule.matmul import k_block
from rlx.backends.cpu.target import Rates
from rlx.ir.shape import Shape, Size, bounds, evaluate
from rlx.records import dataclass

__all__ = ["LEAST", "MOST", "STRIDE", "STRIP", "ThinParts", "ThinSchedule", "are_tiles", "may_be_thin", "thin_limits"]

MOST = 12  # rows, or columns, that are few: fewer than tile registers are used for
LEAST = 16  # rows or columns of the operand that is streamed: whole vectors of any machine
STRIP = 2048  # columns whose sums stay in L1 while rows of the streamed operand pass by
STRIDE = STRIP + LEAST  # from strip to strip: keeps them off the same sets of the cache
NARROW = 256  # columns that a chunk takes at least: it reads so many elements of a row of k, then those of the next
FEWEST_OF_TILES = 3  # rows: of fewer, strips read less from the caches
FEW_LINES = 24  # that are read at once wherever they come from
NEAR = 512 << 10  # bytes that stay in L2
MOST_TIME, LEAST_TIME = 120e-6, 20e-6  # seconds of a chunk at most, and at least where there are few


def may_be_thin(few: Size, many: Size) -> bool | None:
    """Whether so few rows (or columns) meet so many of the other operand: in all runs, in none, or None: in some."""
    (low, high), (least, most) = bounds(few), bounds(many)
    if (low or 0) > MOST or (most is not None and most < LEAST):
        return False
    return True if high is not None and high <= MOST and (least or 0) >= LEAST else None


def thin_limits(few: Size, many: Size) -> tuple[Limit, ...]:
    """In which runs that is so."""
    return Limit(few, most=MOST), Limit(many, least=LEAST)


def are_tiles(few: int, k: Size, step: Size, size: int) -> bool:
    """Whether sums of so many rows are tiles in registers, rather than strips; a row of k is `step` elements of `size`.

    Tiles read `k` places at once, and again for further rows: from a near cache, and not from the same sets of it.
    """
    if not isinstance(k, int) or not isinstance(step, int) or few < FEWEST_OF_TILES:
        return False
    return k <= FEW_LINES or (k * step * size <= NEAR and step * size % 4096 != 0)


@dataclass(frozen=True)
class ThinParts:
    """How the work is split, into units = matrix * blocks + block of the streamed operand; a chunk takes some."""

    blocks: int
    units: int
    per_chunk: int
    steps: int  # of k in a block of a sum
    room: int  # bytes of scratch before the sums
    line: int  # elements from the sums of one of the few to those of the next, in scratch
    scratch: int
    chunks: int


NOTHING = ThinParts(1, 0, 1, 8, 0, 0, 0, 0)


@dataclass(eq=False, repr=False)
class ThinSchedule:
    """The chunks of `count` products of `few` rows (or columns) and the `many` of the other operand, which is streamed.

    `shape` is the result's. An element of sums has `size` bytes, one of the streamed operand `streamed`; `along`: those
    of a step of k lie side by side; `to_scratch`: sums go to scratch; `in_tiles`: they need no other room there. Blocks
    of k are those of so many `steps`.
    """

    few: Size
    many: Size
    k: Size
    count: Size
    size: int
    streamed: int
    along: bool
    to_scratch: bool
    shape: Shape
    rates: Rates
    steps: Size
    in_tiles: bool

    def __call__(self, extents: Extents) -> ThinParts:
        if not all(evaluate(s, extents) for s in self.shape):
            return NOTHING
        few, many, k, count = (evaluate(s, extents) for s in (self.few, self.many, self.k, self.count))
        threads = thread_count(extents)
        products = 2.0 * few * k / self.rates.flops * (self.size / 4)
        time = count * many * max(k * self.streamed / self.rates.memory, products)
        wanted = pieces(time, MOST_TIME, LEAST_TIME)
        if wants_shares(wanted, threads):
            wanted = max(wanted, min(TURNS * threads, int(time / LEAST_TIME)))
        least = min(max(many // threads, NARROW), STRIP) if self.along else LEAST
        blocks = max(min(-(-wanted // count), many // least), 1)
        units = count * blocks
        per_chunk = max(-(-units // wanted), 1)
        line = -(-many // blocks) + LEAST
        room = 0 if self.in_tiles else aligned(few * STRIDE * self.size) + aligned(few * k * self.size)
        scratch = room + (aligned(few * line * self.size) if self.to_scratch else 0)
        steps = k_block(evaluate(self.steps, extents))
        return ThinParts(blocks, units, per_chunk, steps, room, line, scratch, -(-units // per_chunk))
