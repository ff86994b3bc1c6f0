"""Conversions of weights that a user asked for: none is ever made unasked."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.dtype import dtype_of
from rlx.ir.encodings import ENCODINGS
from rlx.ir.graph import Array, TensorType, refuse_masked

__all__ = ["convert"]


def convert(array: Any, type: TensorType, what: str, encoding: str | None = None) -> tuple[Array, str]:
    """The elements as `type` stores them, and what was done: "widened f16 to f32", "encoded f32 as q8_0", or "".

    `encoding` names the blocks that `array` (u8) holds; None: it holds elements. What loses precision is not done,
    except by an encoding. Raises `DTypeError` and `ShapeError`.
    """
    refuse_masked(what, array)
    try:
        given = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DTypeError(f"{what}: {array.__class__.__name__} can't be read as an array: {error}") from None
    wanted = None if type.encoding is None else type.encoding.name
    if encoding is not None and encoding == wanted:
        return given, ""
    shape = tuple(int(s) for s in type.shape if isinstance(s, int))
    if encoding is not None:
        if encoding not in ENCODINGS:
            known = ", ".join(ENCODINGS)
            raise DTypeError(f"{what}: blocks of {encoding} can't be decoded; known are {known}")
        made, _ = convert(ENCODINGS[encoding].decode(given, shape), type, what)
        return made, f"decoded {encoding} to {wanted or type.dtype}"
    if type.encoding is not None:
        if given.dtype == np.uint8 and given.nbytes == type.nbytes():
            return given.reshape(-1), ""
        if not dtype_of(given.dtype).is_float:
            raise DTypeError(f"{what}: expected floats to encode as {wanted}, or its blocks (u8), got {given.dtype}")
        if given.shape != shape:
            raise ShapeError(f"{what}: expected shape {shape}, got {given.shape}")
        return type.encoding.encode(given.astype(np.float32)), f"encoded {dtype_of(given.dtype)} as {wanted}"
    if given.dtype == type.dtype.numpy:
        return given, ""
    source = dtype_of(given.dtype)
    if not np.can_cast(given.dtype, type.dtype.numpy, "safe"):
        raise DTypeError(
            f"{what}: {source} to {type.dtype} can lose precision, which convert=True does not do; "
            f"convert the array first"
        )
    return given.astype(type.dtype.numpy), f"widened {source} to {type.dtype}"
