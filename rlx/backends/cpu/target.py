"""The machine that code is made for, as a value: what makes code is given it, and asks nothing else of a machine."""

from __future__ import annotations

from functools import lru_cache

from rlx.records import dataclass

__all__ = ["Rates", "Target", "TileTimes"]


@dataclass(frozen=True, eq=False)
class TileTimes:
    """Nanoseconds that products by tile registers take, for a step of k where nothing else is said."""

    split: int = 700  # to split 32 rows, half of which come from another core's cache
    square: int = 160  # for a square of sums
    pair: int = 400  # to make parts of two panels beside that
    first_pair: int = 200  # and of the first ones
    split_few: int = 200  # of up to 32 rows in all: to split them
    beside: int = 160  # and for a square beside which parts of two panels are made
    blocks: int = 60  # for two tiles of encoded blocks, which are made before they are used
    gather: int = 300  # to gather 32 rows of windows
    start: int = 1000  # of a chunk
    start_few: int = 2500  # of few rows, beside whose products weights come from memory: that begins slowly


@dataclass(frozen=True, eq=False)
class Rates:
    """What a core does a second, about: work is cut into chunks by these, and no result depends on them.

    They were measured on processors with AVX2, AVX-512 and AMX; only their ratios matter much.
    """

    flops: float = 80e9  # operations of f32, two a multiply-add
    read: float = 40e9  # bytes of packed operands, from a cache that cores share
    near: float = 60e9  # bytes of what was just made, from the core's own
    write: float = 20e9  # bytes of results
    copy: float = 10e9  # bytes that are gathered, packed or copied
    gather: float = 7.7e9  # bytes of windows of images of bytes
    memory: float = 15e9  # bytes that are streamed from memory
    taps: float = 2e9  # vectors that are added to sums along windows
    transforms: float = 3e9  # vectors of products and transforms of Winograd
    byte_products: float = 60e9  # products of bytes
    byte_result: float = 0.5e-9  # seconds that a result of them takes besides
    tiles: TileTimes = TileTimes()  # where there are tile registers


@dataclass(frozen=True)
class Target:
    """A processor: `features` is LLVM's list of them, `cores` what this process may use.

    `tiles`: code may use AMX (tile registers, products of bf16 and of bytes) beside vectors of 64 bytes; `float_tiles`:
    and products of f32 are faster made of those.
    """

    cpu: str
    features: str
    triple: str
    vector_bytes: int
    cores: int
    tiles: bool
    float_tiles: bool = False

    @property
    def lanes(self) -> int:
        """Elements of f32 in a vector."""
        return self.vector_bytes // 4

    def multiplies_by_tiles(self, dtype: str) -> bool:
        """Whether products of that type can be computed by tile registers, and soon enough."""
        return dtype == "f32" and self.float_tiles

    def has(self, feature: str) -> bool:
        """Whether it has a feature, by LLVM's name for it."""
        return f"+{feature}" in self.features.split(",")

    @property
    def multiplies_bf16(self) -> bool:
        """Whether an instruction multiplies and adds up pairs of bf16 in a vector of 64 bytes."""
        return self.vector_bytes == 64 and self.has("avx512bf16")

    @property
    def wide_bytes(self) -> bool:
        """Whether an instruction multiplies and adds up a vector of 64 bytes."""
        return self.vector_bytes == 64 and self.has("avx512vnni") and self.has("avx512vl")

    @property
    def rates(self) -> Rates:
        """How fast it is thought to be."""
        return _rates(self.wide_bytes, self.tiles)

    @property
    def x86(self) -> bool:
        """Whether it has the instructions of x86-64."""
        return self.triple.startswith(("x86_64", "amd64"))


@lru_cache
def _rates(wide_bytes: bool, tiles: bool) -> Rates:
    """Those of a machine with these instructions: one object, which all schedules for it share."""
    if not wide_bytes:
        return Rates()
    return Rates(byte_products=700e9 if tiles else 250e9, byte_result=0.13e-9)
