"""How weights of convolutions are packed for sums of products: in panels, K in the order (row, column, channel)."""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.gemm import requantise
from rlx.backends.cpu.gemm.tile import tile_of
from rlx.backends.cpu.strategy import CpuStrategy, Setting
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Shape, Size, ceildiv
from rlx.kernels.expr import Apply, Cast, Expr, Load, Select, const, guarded, size_expr, substitute_vars
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.prepared import is_static
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace

__all__ = [
    "FEW_OUTPUTS", "ConvStrategy", "PackedWeights", "is_few", "packed", "scaled",
    "with_weights", "without_denormals",
]  # fmt: skip

BF16 = DTYPES["bf16"]
FEW_OUTPUTS = 4


def is_few(outputs: Size) -> bool:
    """Whether so many outputs are better summed as dot products of windows and weights than by panels."""
    return isinstance(outputs, int) and outputs <= FEW_OUTPUTS


def packed(kernel: Kernel, dtype: DType, target: Target) -> tuple[Buffer, Store]:
    """Weights [O, C, *kernel] as panels [groups, O / width, kernel, C, width] padded with zeros, or [O, kernel, C].

    Of operands rounded to bf16, C counts pairs of channels, and panels have words of two neighbours each.
    """
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    window, channels = anchor.w_shape[2:], anchor.w_shape[1]
    outputs = anchor.w_shape[0] // anchor.groups
    width = tile_of(anchor.x.dtype, target).width
    name = f"{kernel.stores[0].buffer.name}.w"
    o, c, *taps = out_vars(len(anchor.w_shape))
    shape: Shape
    if is_few(outputs):
        shape = (anchor.w_shape[0], *window, channels)
        own = out_vars(len(shape))
        element = substitute_vars(anchor.w, {**dict(zip(taps, own[1:-1], strict=True)), o: own[0], c: own[-1]})
    else:
        shape = (anchor.groups, ceildiv(outputs, width), *window, channels, width)
        own = out_vars(len(shape))
        channel: Expr = own[-2]
        if dtype is BF16:
            shape = (*shape, 2)
            channel = channel * 2 + out_vars(len(shape))[-1]
        at = own[1] * width + own[-1]
        whole = own[0] * size_expr(outputs) + at
        element = substitute_vars(anchor.w, {**dict(zip(taps, own[2:-2], strict=True)), o: whole, c: channel})
        if not (isinstance(outputs, int) and outputs % width == 0):
            inside = at < size_expr(outputs)
            element = Select(inside, guarded(element, inside), const(0, element.dtype))
    static = is_static(anchor.w, shape)
    buffer = Buffer(name, "prepared" if static else "arena", shape, dtype)
    element = element if element.dtype is dtype else Cast(element, dtype)
    if static and dtype.name == "f32":
        element = without_denormals(element)
    return buffer, Store(buffer, shape, out_vars(len(shape)), element)


def without_denormals(w: Expr) -> Expr:
    """A weight of f32, 0 in the place of a denormal: many processors take a hundred times as long for those.

    Training that lets channels die leaves them behind. Not exact: a term of the sum is lost that is below 2^-126 |x|,
    which shows only where |x| is beyond 2^100 or all of a filter is denormal.
    """
    return Select(Apply("abs", (w,), w.dtype) < const(2.0**-126, w.dtype), const(0, w.dtype), w)


def with_weights(kernel: Kernel, packed: Buffer) -> Kernel:
    """The kernel, which reads its weights from where they are packed."""
    assert isinstance(kernel.anchor, Conv)
    w = Load(packed, (size_expr(0),) * len(packed.shape), packed.dtype)
    return kernel.with_anchor(replace(kernel.anchor, w=w))


class ConvStrategy(CpuStrategy):
    """A way to compute convolutions, whose weights are packed before any run where they can be."""

    def panels(self, kernel: Kernel) -> tuple[Expr, ...]:
        match kernel.anchor:
            case Conv(w=Load(source=source) as w) if source.base.kind == "prepared":
                return (w,)
        return ()


class PackedWeights(ConvStrategy):
    """Sums of products with packed weights."""

    scalars = True

    def layout(self, kernel: Kernel, setting: Setting) -> list[Kernel]:
        buffer, store = self.packed(kernel, setting.target)
        return [Kernel("pack w", (store,), nodes=kernel.nodes), with_weights(kernel, buffer)]

    def packed(self, kernel: Kernel, target: Target) -> tuple[Buffer, Store]:
        """The weights in the layout of the strategy, and what stores them there."""
        anchor = kernel.anchor
        assert isinstance(anchor, Conv)
        if not anchor.activations:
            return packed(kernel, anchor.x.dtype, target)
        buffer, store = packed(kernel, BF16, target)
        return buffer.view(buffer.shape[:-1], anchor.x.dtype), store  # words, as those of the image


Packing = Callable[[Kernel], tuple[list[Kernel], tuple[Buffer, ...]]]


def scaled(kernel: Kernel, groups: int, outputs: Size, pack: Packing) -> list[Kernel]:
    """The kernel, whose image has its channels last, after those that pack its weights and what its sums are scaled by.

    The load that stands for the weights names the packed buffer.
    """
    made, kernel = requantise.layout(kernel, groups, outputs)
    packing, sums = pack(kernel)
    return [*made, *packing, replace(with_weights(kernel, packing[0].stores[0].buffer), operands=sums)]
