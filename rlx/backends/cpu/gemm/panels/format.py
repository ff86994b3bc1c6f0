"""What a panel format is: how panels hold the elements of B, how B gets there, and how registers get numbers of it.

A format is a file in this folder and an entry in a list of `kernels/matmul/strategies.py`: docs/adding-a-strategy.md
adds one. `PanelFormat` is itself the plain format; a subclass overrides what differs.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from rlx.backends.cpu.gemm.panels.operands import accumulates_in, panels_of, rows_in_place, scaled_behind
from rlx.backends.cpu.llvm.builder import Function, element, size_of, vec, width
from rlx.backends.cpu.schedule.arguments import Routine
from rlx.backends.cpu.schedule.matmul import MatmulSchedule
from rlx.backends.cpu.strategy import Setting, Step
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Size
from rlx.kernels.expr import Expr
from rlx.kernels.lowering import Contract
from rlx.kernels.program import Kernel
from rlx.records import replace

if TYPE_CHECKING:
    from rlx.backends.cpu.gemm.accumulators import Accumulators
    from rlx.backends.cpu.gemm.tile import Tile

__all__ = ["AS_SUMS", "Ends", "PanelFormat"]

F32 = DTYPES["f32"]


class PanelFormat:
    """Elements of the type that sums are kept in, [ceil(N / width)][K][width], for any types.

    `stored` is the LLVM type of an element in memory, "" for that of the sums. `parts`: how many bf16 (3, or 1) add up
    to exactly one element, for tile registers. `by_tiles`: those may compute with it. `placed`: blocks are given all of
    B and the number of their first panel, since panels are not equally long. `spare`: registers that a tile of 16
    leaves for the conversion of elements. `pack` is the kernel that packs a B that lies in memory as matrices; others
    are packed by loops.

    A multiplication takes `depth` elements of a row of A and of each column of a panel, neighbours along k. Where that
    is more than one, K is padded to whole turns of the loop, of `turn` elements, and is one block. `few_shapes`: there
    are tiles of a few shapes only, which are sooner compiled. `fetches`: tiles prefetch panels to come. `arguments` are
    those of a block of C besides `kernel.BLOCK_ARGUMENTS`; its tiles get them too, and the number of their first panel.
    """

    name = ""  # of what panels hold, in names of functions
    stored = ""
    parts = 3
    by_tiles = True
    placed = False
    spare = 0
    depth = 1
    turn = 0  # 0: as many as suit sums of this type
    few_shapes = False
    fetches = True
    arguments: tuple[tuple[str, str], ...] = ()
    pack: Step | None = None

    # ---- choosing it, and packing

    @property
    def summary(self) -> str:
        """What it holds and needs, in a sentence."""
        return " ".join((inspect.getdoc(type(self)) or "").split("\n\n")[0].split())

    def refuses(self, kernel: Kernel, anchor: Contract, setting: Setting) -> str | None:
        """Why panels of B can't be in this format, or why that would be slower; None where they are."""
        return None

    def normal(self, kernel: Kernel) -> Kernel:
        """The kernel as panels are made of it: in f32 the scale by column of weights of bytes comes after the sums."""
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
        # for any number of rows, known or not: results have the same bits
        return scaled_behind(kernel, anchor) if accumulates_in(anchor) is F32 else kernel

    def layout(self, kernel: Kernel) -> list[Kernel]:
        """The kernels that bring A and B into their layouts, and last the product."""
        kernel = self.normal(kernel)
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
        a, copies = rows_in_place(kernel, anchor, accumulates_in(anchor))
        b, pack = self.packed(kernel, anchor)
        return [*copies, pack, kernel.with_anchor(replace(anchor, a=a, b=b))]

    def packed(self, kernel: Kernel, anchor: Contract) -> tuple[Expr, Kernel]:
        """What reads B in panels, and the kernel that packs them."""
        sums = accumulates_in(anchor)
        return panels_of(kernel, anchor, anchor.b, sums, sums, self.pack)

    def of(self, dtype: DType) -> PanelFormat:
        """The variant of the format whose panels hold elements of this type."""
        return self

    def schedule(self, product: MatmulSchedule, target: Target) -> MatmulSchedule:
        """How the work is cut into chunks."""
        return product

    def panel_bytes(self, nbytes: int) -> int:
        """How many bytes of panels a product reads, of so many that they take."""
        return nbytes

    # ---- reading

    def sums(self, a: DType) -> DType:
        """The type of sums, of rows of A of a type."""
        return a

    def scalar(self, sums: str) -> str:
        """The LLVM type of an element in memory, where sums are of that type."""
        return self.stored or sums

    def left(self, sums: str) -> str:
        """The LLVM type of an element of A in memory."""
        return sums

    def result(self, sums: str) -> str:
        """The LLVM type of an element of C in memory."""
        return sums

    def steps(self, k: Size) -> Size:
        """How many steps of panels a sum over so many elements takes."""
        return k

    def column_bytes(self, sums: str) -> int:
        """Bytes from column to column of a panel."""
        return size_of(self.scalar(sums))

    def step_bytes(self, sums: str) -> int:
        """Bytes of a step of a panel, on average."""
        return 64 // size_of(sums) * size_of(self.scalar(sums))

    def panel(self, f: Function, k: str, sums: str) -> str:
        """Elements in memory from panel to panel, of k steps."""
        return f.mul(k, self.step_bytes(sums) // size_of(self.scalar(sums)))

    @property
    def f32_scalar(self) -> str:
        """The LLVM type of an element in memory, of sums of f32."""
        return self.scalar("float")

    @property
    def f32_step(self) -> int:
        """Bytes of a step of a panel, of sums of f32."""
        return self.step_bytes("float")

    def load(self, f: Function, p: str, v: str) -> str:
        """A vector of the elements at `p`, as one of type `v`."""
        return f.load(v, p)

    def load_left(self, f: Function, p: str, v: str) -> str:
        """The elements of A at `p` that a multiplication takes, in all lanes of a vector of sums, of type `v`."""
        return f.splat(f.load(element(v), p), width(v))

    def multiply_add(self, f: Function, tile: Tile, a: str, b: str, total: str) -> str | None:
        """total + a * b, lane by lane, of what `load_left` and `load` give; None: as sums of that type are computed."""
        return None

    def ends(self, f: Function, tile: Tile, rows: int, vectors: int) -> Ends | None:
        """What tiles of so many sums begin and end with; None: zeros, and `Accumulators.put`."""
        return None

    def words(self, f: Function, p: str) -> str:
        """The bits of 16 elements at `p`, as f32."""
        v = vec("i32", 16)
        return f.cast("bitcast", self.load(f, p, vec("float", 16)), v) if self.stored else f.load(v, p)

    def block_routine(self, tile: Tile) -> Routine | None:
        """The function that computes a block of sums; None: `gemm.kernel` has it, by `load`."""
        return None


AS_SUMS = PanelFormat()  # of tiles that are given no other


class Ends(ABC):
    """What the sums of a tile begin with, and what becomes of them."""

    @abstractmethod
    def first(self) -> list[str]:
        """The sums before the first step, row by row."""

    @abstractmethod
    def finish(self, sums: Accumulators, a_rows: list[str], c_rows: list[str]) -> None:
        """Stores what is made of the sums; A and C have these rows."""
