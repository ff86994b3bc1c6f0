"""What products with few rows multiply (`thin_sums`): how elements in memory become numbers, or words of two."""

from __future__ import annotations

from rlx.backends.cpu.gemm.panels.bf16 import added_pairs, rounded
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, vec
from rlx.ir.dtype import DType
from rlx.records import dataclass

__all__ = ["Types"]

STEPS = 8  # rows of k that are added to a strip at once
BLOCKS = 4  # of k whose sums are lanes of one vector, across


@dataclass(frozen=True)
class Types:
    """The element types of the sums, of both operands in memory, and of what these are rounded to, if they are.

    Vectors have so many bytes. `pairs`: steps are words of two bf16, of operands in f32.
    """

    sums: DType
    many: DType
    few: DType
    vector_bytes: int
    narrow: DType | None = None
    pairs: bool = False

    @property
    def lanes(self) -> int:
        return self.vector_bytes // self.sums.itemsize

    @property
    def streamed(self) -> str:
        """What tells the sums of these apart from others, in names of functions."""
        return "_".join([*(d.name for d in (self.sums, self.many, self.narrow) if d), *["pairs"] * self.pairs])

    @property
    def step(self) -> str:
        """The type in memory of a step of k of a row of the streamed operand."""
        return "i64" if self.pairs else convert.memory_type(self.many)

    @property
    def step_bytes(self) -> int:
        return self.many.itemsize * (2 if self.pairs else 1)

    @property
    def steps(self) -> int:
        """Steps of k that are added to a strip at once."""
        return STEPS // 2 if self.pairs else STEPS

    @property
    def scalar(self) -> str:
        return convert.llvm_type(self.sums)

    @property
    def blocks(self) -> int:
        """Blocks of k whose sums are lanes of one vector, across."""
        return min(BLOCKS, self.lanes)

    @property
    def vector(self) -> str:
        return vec(self.scalar, self.lanes)

    def multiply_add(self, f: Function, x: str, y: str, total: str) -> str:
        """total + x * y, lane by lane, of words the products of both halves."""
        return added_pairs(f, x, y, total) if self.pairs else f.fma(x, y, total, self.vector)

    def of_steps(self, f: Function, x: str) -> str:
        """Steps of the streamed operand, as many as a vector has lanes, as they are multiplied."""
        if not self.pairs:
            return self.widened(f, x, self.many, self.lanes)
        every = f.cast("bitcast", x, vec("float", 2 * self.lanes))
        low, high = (f.shuffle(every, None, [self.lanes * half + i for i in range(self.lanes)]) for half in (0, 1))
        return rounded(f, low, high)

    def widened(self, f: Function, x: str, dtype: DType, w: int) -> str:
        """Elements of memory in the type of the sums."""
        if self.narrow is not None:
            x, dtype = convert.convert(f, x, dtype, self.narrow, w), self.narrow
        return x if dtype is self.sums else convert.convert(f, x, dtype, self.sums, w)
