"""Ops of no family: bits under another type, determinants, image files, marks for gradients."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np

from rlx.errors import DTypeError, ExecutionError, OptionError, ShapeError
from rlx.install import install_extra
from rlx.ir.dtype import DTYPES, DType, dtype_of
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Size, unify
from rlx.ops.base import Op, Work, check_kind, register, tensor_bytes, widened
from rlx.ops.elementwise import Identity
from rlx.ops.select import Produced

__all__ = ["IMAGE_FORMATS", "Again", "BitCast", "DecodeImage", "Det", "StopGradient", "Within"]

IMAGE_FORMATS = ("BMP", "JPEG", "JPEG2000", "TIFF", "PNG", "WEBP", "PPM")
PIXELS = {"RGB": 3, "BGR": 3, "Grayscale": 1}


@register
class BitCast(Op):
    """The same bits read as elements of the type `to`, which must be as wide. (ONNX BitCast-26)"""

    to: DType

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", dtype_of(self.to))

    def infer(self, x: TensorType) -> TensorType:
        if x.dtype.bits != self.to.bits:
            raise DTypeError(f"bit_cast: {x} has elements of {x.dtype.bits} bits, {self.to} of {self.to.bits}")
        return TensorType(x.shape, self.to)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(0, *x)

    def reference(self, x: Array) -> Array:
        return np.ascontiguousarray(x).reshape(-1).view(self.to.numpy).reshape(x.shape)

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(lambda *i: k.bitcast(x(*i), self.to))


class _Itself(Op):
    """Base of marks: x itself, whatever it is."""

    def infer(self, x: TensorType) -> TensorType:
        return TensorType(x.shape, x.dtype)

    def reference(self, x: Array) -> Array:
        return x

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(0, *x)

    def decompose(self, g: Graph, x: Value) -> Value:
        return g.add(Identity(), x)[0]

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(x)


@register
class StopGradient(_Itself):
    """x itself, which gradients take for a constant. (jax.lax.stop_gradient)"""


@register
class Again(_Itself):
    """x itself, as a value that is not found to be equal to x: what is computed of it is computed again."""


@register
class Within(_Itself):
    """x itself, a gradient whose program is to have an arena of at most `budget` bytes (`rlx.plan.again`)."""

    budget: int


@register
class Det(Op):
    """The determinant of each square matrix of x [.., m, m]. (ONNX Det-22, numpy.linalg.det)"""

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "f")
        if x.rank < 2:
            raise ShapeError(f"det: expected matrices [.., m, m], got {x}")
        unify(x.shape[-1], x.shape[-2], f"det: the last two axes of {x}")
        return TensorType(x.shape[:-2], x.dtype)

    def work(self, *x: TensorType) -> Work:
        (out,) = self.infer_types(x)
        flops = x[0].shape[-1] * x[0].shape[-1] * x[0].shape[-1]
        for size in x[0].shape[:-2]:
            flops = flops * size
        return Work(flops, tensor_bytes(x[0]), tensor_bytes(out))

    def reference(self, x: Array) -> Array:
        return np.asarray(np.linalg.det(widened(x))).astype(x.dtype)


@register
class DecodeImage(Produced):
    """The pixels of an image file, u8 [count], channels last, and its height and width, i64 [2]. (ONNX ImageDecoder-20)

    The input is the file, u8 [bytes]; `pixels` is "RGB", "BGR" or "Grayscale". A file that can't be decoded gives no
    pixels. Pillow decodes, on the host; without it a run raises `ExecutionError`.
    """

    count: Size
    pixels: str = "RGB"

    def infer(self, x: TensorType) -> tuple[TensorType, TensorType]:
        if x.rank != 1 or x.dtype is not DTYPES["u8"]:
            raise ShapeError(f"decode_image: expected the bytes of a file, u8 of one axis, got {x}")
        if self.pixels not in PIXELS:
            raise OptionError(f"decode_image: pixels={self.pixels!r}: expected one of {', '.join(PIXELS)}")
        return TensorType((self.count,), DTYPES["u8"]), TensorType((2,), DTYPES["i64"])

    def reference(self, x: Array) -> tuple[Array, Array]:
        try:
            from PIL import Image
        except ImportError:
            raise ExecutionError(f"decode_image: images are decoded by Pillow: {install_extra('image')}") from None
        mode = "L" if self.pixels == "Grayscale" else "RGB"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with Image.open(io.BytesIO(x.tobytes()), formats=IMAGE_FORMATS) as image:
                    found = np.asarray(image.convert(mode)).reshape(image.height, image.width, -1)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning):
            found = np.zeros((0, 0, PIXELS[self.pixels]), np.uint8)
        found = found[..., ::-1] if self.pixels == "BGR" else found
        return np.ascontiguousarray(found).reshape(-1), np.array(found.shape[:2], np.int64)
