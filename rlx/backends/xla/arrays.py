"""jax as a library of array functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from rlx.backends.library.arrays import Arrays, Flat
from rlx.backends.xla.ops import functions, native, refusal
from rlx.ir.dtype import DTYPES, DType, dtype_of
from rlx.ir.graph import Array, Node
from rlx.ir.shape import evaluate
from rlx.kernels.lowering import Conv

__all__ = ["XlaArrays"]

HOST = 1  # kDLCPU of dlpack.h


class XlaArrays(Arrays):
    """Arrays of jax, on its default device, with 64-bit types."""

    device = "xla"
    types = frozenset(name for name, dtype in DTYPES.items() if dtype.bits >= 8)

    def __init__(self) -> None:
        import jax

        self.jax = jax
        self.xp = jax.numpy
        self.functions = functions(jax)
        self.native = native(jax)

    def session(self) -> AbstractContextManager[object]:
        return self.jax.enable_x64(True)  # type: ignore[no-any-return]

    def refuses(self, node: Node) -> str | None:
        return refusal(self.jax, node)

    def dtype(self, dtype: DType) -> Any:
        return dtype.numpy

    def put(self, array: Array) -> Any:
        return self.xp.array(array, copy=True)

    def borrow(self, array: Array) -> Any:
        return np.ascontiguousarray(array).reshape(array.shape)

    def fetch(self, held: Any) -> Array:
        return np.array(held)

    def copy(self, held: Any) -> Any:
        return self.xp.array(held, copy=True)

    def part(self, held: Any, index: tuple[int | slice, ...]) -> Any:
        return self.xp.array(held[index], copy=True)

    def padded(self, held: Any, shape: tuple[int, ...]) -> Any:
        return self.xp.pad(held, [(0, size - own) for own, size in zip(held.shape, shape, strict=True)])

    def export(self, held: Any, options: Mapping[str, Any]) -> Any:
        return held.__dlpack__(**options)

    def place(self, held: Any) -> tuple[int, int]:
        kind, number = held.__dlpack_device__()
        return int(kind), int(number)

    def adopt(self, value: Any) -> Any | None:
        jax = self.jax
        if not isinstance(value, jax.Array):
            try:
                kind, _ = value.__dlpack_device__()
                value = None if int(kind) == HOST else jax.dlpack.from_dlpack(value)
            except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):  # the way over the host says why
                return None
        if value is None or isinstance(value, jax.core.Tracer) or not isinstance(value.dtype, np.dtype):
            return None
        if value.is_deleted():
            return None
        home = jax.config.jax_default_device or jax.local_devices()[0]
        return value if value.devices() == {home} else jax.device_put(value, home)

    def wait(self, x: Sequence[Any]) -> None:
        self.jax.block_until_ready(x)

    def cast(self, x: Any, dtype: DType) -> Any:
        return x if x.dtype == dtype.numpy else self.jax.lax.convert_element_type(x, dtype.numpy)

    def bitcast(self, x: Any, dtype: DType) -> Any:
        return self.jax.lax.bitcast_convert_type(x, dtype.numpy)

    def take(self, x: Any, index: Any, axis: int) -> Any:
        if math.prod(x.shape) < 2**31:
            index = index.astype(np.int32)
        return self.xp.take(x, index, axis=axis, mode="clip")

    def reduce(self, kind: str, x: Any, axes: tuple[int, ...]) -> Any:
        fn: Any = {"add": self.xp.sum, "mul": self.xp.prod, "max": self.xp.max, "min": self.xp.min}.get(kind)
        if fn is None:
            return {"and": self.xp.all, "or": self.xp.any}[kind](x, axis=axes, keepdims=True)
        more = {"dtype": x.dtype} if kind in ("add", "mul") else {}
        return fn(x, axis=axes, keepdims=True, **more)

    def search(self, kind: str, x: Any, axis: int) -> Any:
        return getattr(self.xp, kind)(x, axis=axis, keepdims=True).astype(np.int64)

    def matmul(self, a: Any, b: Any, dtype: DType) -> Any:
        return self.xp.matmul(a, b, precision=self.jax.lax.Precision.HIGHEST)

    def conv(self, x: Any, w: Any, anchor: Conv) -> Any:
        n = len(anchor.strides)
        pads = [evaluate(p, {}) for p in anchor.pads]
        return self.jax.lax.conv_general_dilated(
            x,
            w,
            anchor.strides,
            list(zip(pads[:n], pads[n:], strict=True)),
            rhs_dilation=anchor.dilations,
            feature_group_count=anchor.groups,
            precision=self.jax.lax.Precision.HIGHEST,
        )

    def host(self, fn: Callable[..., Sequence[Array]], results: Sequence[tuple[tuple[int, ...], DType]], x: Any) -> Any:
        """Elements of 64 bits travel as pairs of u32: jax calls back outside of `session`, where it has none.

        Those of 2 and 4 bits travel as u8: of an odd number of the latter a GPU hands over all but the last.
        """
        lax, wanted = self.jax.lax, [(shape, dtype.numpy) for shape, dtype in results]
        given = [(array.shape, np.dtype(array.dtype)) for array in x]

        def packed(a: Any, t: np.dtype[Any]) -> Any:
            if _narrow(t):
                return lax.convert_element_type(lax.bitcast_convert_type(a, _unsigned(t)), np.uint8)
            return lax.bitcast_convert_type(a, np.uint32) if _wide(t) else a

        def unpacked(a: Any, t: np.dtype[Any]) -> Any:
            if _narrow(t):
                return lax.bitcast_convert_type(lax.convert_element_type(a, _unsigned(t)), t)
            return lax.bitcast_convert_type(a, t) if _wide(t) else a

        def carrier(shape: tuple[int, ...], t: np.dtype[Any]) -> Any:
            shape, t = ((*shape, 2), np.dtype("u4")) if _wide(t) else (shape, np.dtype("u1") if _narrow(t) else t)
            return self.jax.ShapeDtypeStruct(shape, t)

        def call(*arrays: Any) -> list[Array]:
            raw = [np.ascontiguousarray(a) for a in arrays]
            whole = [a.view(t).reshape(s) for a, (s, t) in zip(raw, given, strict=True)]
            made = [np.ascontiguousarray(a) for a in fn(*whole)]
            return [
                a.reshape(*s, 1).view(c.dtype).reshape(c.shape)
                for a, (s, _), c in zip(made, wanted, types, strict=True)
            ]

        types = [carrier(*result) for result in wanted]
        made = self.jax.pure_callback(call, types, *(packed(a, t) for a, (_, t) in zip(x, given, strict=True)))
        return [unpacked(a, t) for a, (_, t) in zip(made, wanted, strict=True)]

    def cond(self, test: Any, then: Flat, otherwise: Flat, x: Sequence[Any]) -> list[Any]:
        return list(self.jax.lax.cond(test, then, otherwise, list(x)))

    def loop(
        self, test: Callable[[Sequence[Any]], Any], body: Flat, x: Sequence[Any], times: int | None = None
    ) -> list[Any]:
        return list(self.jax.lax.while_loop(test, body, list(x)))

    def set_row(self, x: Any, row: Any, at: Any) -> Any:
        return self.jax.lax.dynamic_update_index_in_dim(x, row, at, 0)

    def compile(self, fn: Flat, x: Sequence[Any], pure: bool) -> Flat:
        """A cast to a narrower float and back rounds, where XLA would leave out both."""
        jitted: Flat = self.jax.jit(fn, compiler_options={"xla_allow_excess_precision": False})
        return jitted


def _narrow(dtype: np.dtype[Any]) -> bool:
    """Whether an element has 2 or 4 bits, and NumPy's a byte."""
    return dtype_of(dtype).bits < 8


def _unsigned(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The unsigned integers of the same width."""
    return DTYPES[f"u{dtype_of(dtype).bits}"].numpy


def _wide(dtype: np.dtype[Any]) -> bool:
    """Whether elements are numbers of 64 bits (complex ones are two of 32)."""
    return dtype.itemsize == 8 and dtype.kind in "fiu"
