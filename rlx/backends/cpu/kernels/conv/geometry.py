"""What the convolution kernels share: the sizes of a convolution in two spatial axes, arguments, and the epilogue.

Images have their channels last: those of a pixel lie next to each other, and vectors run along them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rlx.backends.cpu.gemm.chunk import chunk_of
from rlx.backends.cpu.gemm.epilogue import Epilogue, epilogue_of
from rlx.backends.cpu.gemm.tile import Tile
from rlx.backends.cpu.llvm.builder import Function, Typed
from rlx.backends.cpu.schedule.arguments import Address, Arguments, Number
from rlx.ir.dtype import DType
from rlx.ir.shape import Size
from rlx.kernels.affine import Affine, linear_index
from rlx.kernels.expr import Load
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.program import Kernel
from rlx.records import dataclass

__all__ = [
    "ConvArguments", "Geometry", "GroupedGemmArguments", "ImplicitGemmArguments", "PixelChunk", "conv_epilogue",
    "geometry",
]  # fmt: skip

AnySize = TypeVar("AnySize", int, Size)


@dataclass(frozen=True)
class Geometry:
    """A convolution of planes; one with a single spatial axis has height 1.

    Strides `x_*` are in elements; the channels of a pixel are next to each other.
    """

    batch: Size
    channels: Size  # of the input, in one group
    outputs: Size  # of one group
    groups: int
    height: Size
    width: Size
    kernel: tuple[Size, Size]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[Size, Size]  # before the first row and column
    no_pads: bool  # neither before nor after
    out_height: Size
    out_width: Size
    x: Affine
    x_n: Size
    x_h: Size
    x_w: Size

    @property
    def depth(self) -> Size:
        """Products that one result element sums."""
        return self.channels * self.kernel[0] * self.kernel[1]

    @property
    def pixels(self) -> Size:
        """Pixels of all results."""
        return self.batch * self.out_height * self.out_width

    def sizes(self, record: type[Arguments]) -> dict[str, Size]:
        """Those that a record of arguments has, by the names that such records call them."""
        named: dict[str, Size] = {
            "height": self.height,
            "width": self.width,
            "out_height": self.out_height,
            "out_width": self.out_width,
            "channels": self.channels,
            "outputs": self.outputs,
            "groups": self.groups,
            "depth": self.depth,
            "pixels": self.pixels,
            "x_n": self.x_n,
            "x_h": self.x_h,
            "x_w": self.x_w,
        }
        for name, pair in (
            ("kernel", self.kernel),
            ("stride", self.strides),
            ("dilation", self.dilations),
            ("pad", self.pads),
        ):
            named |= {f"{name}_h": pair[0], f"{name}_w": pair[1]}
        return {name: size for name, size in named.items() if name in record.kinds}


class ImplicitGemmArguments(Arguments):
    """The arguments of a kernel that reads windows in rows; steps are in elements, places in scratch in bytes."""

    x: Address
    weights: Address
    out: Address
    scratch: Address
    block: Address  # routines
    lines: Address
    height: Number  # of an image
    width: Number
    channels: Number
    x_n: Number
    x_h: Number
    stride_h: Number
    stride_w: Number
    pad_h: Number
    pad_w: Number
    extent_h: Number  # rows of an image that a window covers
    out_height: Number
    out_width: Number
    padded: Number  # pixels of a copied row
    copied: Number  # from copied row to copied row; 0: rows are read in place
    pieces: Number  # of a window
    run: Number
    piece_step: Number
    outputs: Number
    depth: Number
    rows: Number  # of all images
    row_chunk: Number
    panel_chunk: Number
    part: Number  # pixels
    out_step: Number  # from pixel to pixel
    scratch_stride: Number
    copies: Number  # places in scratch, after the table of offsets
    sums: Number
    group: Number  # pieces of a block of steps
    steps: Number  # of one of these pieces
    x_c: Number  # from plane to plane of an image whose channels are not together; of groups, from pixel to pixel


class GroupedGemmArguments(ImplicitGemmArguments):
    """Those of a kernel whose chunks copy the channels of a group."""

    apart: Number  # from column to column of a window; such columns are copied next to each other


class ConvArguments(Arguments):
    """The arguments of a product, before those of `windows`; strides are in elements."""

    x: Address
    a_step: Number  # from window to window, in the image or in scratch
    weights: Address
    channels: Number  # of a group
    outputs: Number  # of a group
    depth: Number
    groups: Number
    pixels: Number
    pixel_chunk: Number
    panel_chunk: Number
    out: Address
    out_step: Number  # from pixel to pixel
    scratch: Address
    scratch_stride: Number  # bytes
    sums: Number  # where a block of sums starts in scratch, in bytes
    copy: Number  # where a copy of a block of A starts in scratch, in bytes; negative: it is read in place
    steps: Number  # of k in a block, at most; 0: by tiles, which use the room for a copy
    part: Number  # pixels
    block: Address  # routines
    windows: Address


class PixelChunk:
    """A chunk of a product of windows and weights, [pixels, K] times panels [K, outputs of a group].

        for each part of the chunk's pixels:
            gather their windows into scratch      unless these lie in the image as they are
            multiply them by the chunk's panels, and compute the epilogue

    Values in the code: pixels `p0` to `p1`, `count` outputs from `first` on, which is number `n0` of `group`.
    `columns`: outputs of a chunk, but the last. `own`: this worker's scratch. `x`: the image from the group's first
    channel on.
    """

    def __init__(self, f: Function, w: ConvArguments, tile: Tile, *, even_panels: bool = True) -> None:
        self.f, self.w, self.tile = f, w, tile
        width = tile.width
        at = chunk_of(
            f, w.pixels, w.pixel_chunk, w.outputs, w.panel_chunk, width, groups=w.groups, even_panels=even_panels
        )
        self.columns, self.group, self.p0, self.p1, self.n0 = at.room, at.matrix, at.r0, at.r1, at.n0
        self.own = f.offset(w.scratch, f.mul("%worker", w.scratch_stride))
        self.x = f.gep(w.x, f.mul(self.group, w.channels), tile.a_scalar)
        self.first = f.add(f.mul(self.group, w.outputs), self.n0)
        self.count = f.sub(at.n1, self.n0)

    @property
    def stride(self) -> str:
        """Elements in memory from panel to panel."""
        return self.tile.format.panel(self.f, self.w.depth, self.tile.scalar)

    def number_of(self, column: str) -> str:
        """The number of the panel that a column of the group is in, counted through all groups."""
        f, width = self.f, self.tile.width
        panels = f.div(f.add(self.w.outputs, width - 1), width)
        return f.add(f.mul(self.group, panels), f.div(column, width))

    def panel_at(self, column: str) -> str:
        """The address of the panel that a column of the group is in."""
        return self.f.gep(self.w.weights, self.f.mul(self.number_of(column), self.stride), self.tile.b_scalar)

    def parts(self, in_image: bool, of_part: Callable[[str, str, str], None], gathering: Sequence[Typed] = ()) -> None:
        """A loop over parts of the pixels: `of_part(a, q0, q1)` computes the results of those from q0 to q1.

        The row of the first one's window is at `a`, `a_step` elements before the next. `gathering` are the arguments
        of `windows` besides those that all such routines have.
        """
        f, w = self.f, self.w

        def some_pixels(q0: str, _: list[str]) -> None:
            q1 = f.min(f.add(q0, w.part), self.p1)
            if in_image:
                a = f.gep(self.x, f.mul(q0, w.a_step), self.tile.a_scalar)
            else:
                f.call(w.windows, [self.x, self.own, w.behind(f), q0, q1, w.a_step, *gathering])
                a = self.own
            of_part(a, q0, q1)

        f.loop(self.p0, self.p1, w.part, [], some_pixels)

    def place(self, in_place: bool, pixel: str, output: str) -> tuple[str, str]:
        """The address and the step from row to row, in elements, of a block of results that starts there.

        It is in the results where sums take their places, else in scratch.
        """
        f, w = self.f, self.w
        room = f.offset(self.own, w.sums), self.columns
        if not in_place:
            return room
        return f.gep(w.out, f.add(f.mul(pixel, w.out_step), output), self.tile.c_scalar), w.out_step

    def block(self, a: str, at: str, c: tuple[str, str], rows: str, columns: str, *more: Typed) -> None:
        """Multiplies rows at `a` by the panels at `at`, into a block of results at `c`; `more`: of the format."""
        f, w = self.f, self.w
        copy = f.select(f.cmp("ge", w.copy, 0), f.offset(self.own, w.copy), "null", "ptr")
        f.call(w.block, [a, w.a_step, at, self.stride, *c, rows, columns, w.depth, w.steps, copy, *more])


def geometry(kernel: Kernel) -> Geometry:
    """The sizes of a convolution kernel."""
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Conv)
    assert isinstance(anchor.x, Load)
    rank = len(anchor.x_shape)
    n, _, *space = out_vars(rank)
    x = linear_index(anchor.x.indices, anchor.x.source.shape)
    height, width = _planar(anchor.x_shape[2:], 1)
    out_height, out_width = _planar(store.extents[2:], 1)
    # the stride of an axis of one element is that of a compact image
    x_w = x.coefs.get(space[-1], 0) if width != 1 else anchor.x_shape[1]
    x_h = x.coefs.get(space[0], 0) if rank == 4 and height != 1 else width * x_w
    x_n = x.coefs.get(n, 0) if anchor.x_shape[0] != 1 else height * x_h
    return Geometry(
        anchor.x_shape[0],
        anchor.w_shape[1],
        anchor.w_shape[0] // anchor.groups,
        anchor.groups,
        height,
        width,
        _planar(anchor.w_shape[2:], 1),
        _planar(anchor.strides, 1),
        _planar(anchor.dilations, 1),
        _planar(anchor.pads[: rank - 2], 0),
        all(p == 0 for p in anchor.pads),
        out_height,
        out_width,
        x,
        x_n,
        x_h,
        x_w,
    )


def _planar(values: tuple[AnySize, ...], missing: AnySize) -> tuple[AnySize, AnySize]:
    """The entries for rows and columns of what may be given for columns only."""
    return (missing, values[0]) if len(values) == 1 else (values[0], values[1])


def conv_epilogue(kernel: Kernel, sums: DType) -> Epilogue:
    """The epilogue of a convolution; its rows are the pixels of all images."""
    store = kernel.stores[0]
    image, channel, *space = out_vars(len(store.extents))
    sizes = [store.extents[0], *store.extents[2:]]
    return epilogue_of(store, [image, *space], sizes, channel, store.extents[1], sums)
