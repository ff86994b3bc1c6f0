"""What the convolution kernels share: the sizes of a convolution in two spatial axes, arguments, and the epilogue.

Images have their channels last: those of a pixel lie next to each other, and vectors run along them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rlx.backends.cpu.gemm.chunk import Product, ProductArguments, chunk_of
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
    "ConvArguments", "Geometry", "GroupedGemmArguments", "ImplicitGemmArguments", "conv_epilogue", "gathered",
    "geometry", "window_product",
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


class ConvArguments(ProductArguments):
    """The arguments of a product of windows and weights, before those of `windows`: its rows are pixels."""

    channels: Number  # of a group
    groups: Number
    part: Number  # pixels
    windows: Address  # a routine


def window_product(f: Function, w: ConvArguments, tile: Tile, *, even_panels: bool = True) -> Product:
    """Begins a chunk of a product of windows and weights, [pixels, K] times panels [K, outputs of a group].

    Each group has channels of its own in all pixels, panels and outputs.
    """
    width = tile.width

    def offsets(group: str) -> tuple[str, str, str]:
        panels = f.mul(group, f.div(f.add(w.n, width - 1), width))
        return f.mul(group, w.channels), f.mul(panels, tile.format.panel(f, w.k, tile.scalar)), f.mul(group, w.n)

    at = chunk_of(f, w.m, w.row_chunk, w.n, w.panel_chunk, width, groups=w.groups, even_panels=even_panels)
    return Product.begin(f, w, tile, at, offsets)


def gathered(w: ConvArguments, product: Product, gathering: Sequence[Typed] = ()) -> Callable[[str, str], str]:
    """What packs the windows of pixels in scratch, and says where. `gathering`: further arguments of `windows`."""

    def windows(q0: str, q1: str) -> str:
        f = product.f
        f.call(w.windows, [product.a, product.own, w.behind(f), q0, q1, w.lda, *gathering])
        return product.own

    return windows


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
