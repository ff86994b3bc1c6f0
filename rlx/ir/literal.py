"""Attributes and constant arrays as text that reads back bit by bit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np

from rlx.errors import OptionError
from rlx.ir.dtype import DType
from rlx.ir.shape import Dim, format_size
from rlx.ir.value import Array, TensorType

__all__ = ["array_of", "content_hash", "end_bytes", "equal_arrays", "format_attribute", "inline", "same_bytes"]

K = TypeVar("K")
INLINE_ELEMENTS = 16
LEAST = 64 << 10  # bytes of an array that is worth finding its equal for
ENDS = 4 << 10  # bytes
PART = 1 << 20


def content_hash(array: Array) -> str:
    """SHA-256 (hex) of an array's element type, shape and elements."""
    if array.dtype.kind == "T":  # whose memory holds addresses
        return sha256(f"string {json.dumps(array.tolist())}".encode()).hexdigest()
    head = f"{array.dtype.name} {list(array.shape)}\n".encode()
    return sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()


def end_bytes(array: Array) -> bytes:
    """The first and last bytes of a compact array: most unequal arrays differ in them."""
    flat = array.reshape(-1).view(np.uint8)
    return flat[:ENDS].tobytes() + flat[-ENDS:].tobytes()


def same_bytes(a: Array, b: Array) -> bool:
    """Whether two compact arrays have the same bytes; takes no memory for more than a part of them."""
    if a.nbytes != b.nbytes:
        return False
    x, y = (array.reshape(-1).view(np.uint8) for array in (a, b))
    return all(np.array_equal(x[at : at + PART], y[at : at + PART]) for at in range(0, x.size, PART))


def equal_arrays(arrays: Mapping[K, tuple[object, Array]]) -> dict[K, K]:
    """What has the form, bytes, type and shape of an earlier one, given by (form, array) -> the first such.

    Arrays below 64 KiB aren't looked at; of others that are unequal, mostly no more than their ends are read.
    """
    found: dict[K, K] = {}
    forms: dict[object, list[K]] = {}
    for key, (form, a) in arrays.items():
        if a.nbytes >= LEAST and a.flags.c_contiguous:
            forms.setdefault((form, a.dtype, a.shape), []).append(key)
    for alike in forms.values():
        ends: dict[bytes, list[K]] = {}
        for key in alike if len(alike) > 1 else ():
            array = arrays[key][1]
            others = ends.setdefault(end_bytes(array), [])
            first = next((other for other in others if same_bytes(array, arrays[other][1])), None)
            if first is None:
                others.append(key)
            else:
                found[key] = first
    return found


def format_attribute(value: object) -> str:
    """The text of an attribute's value; `OptionError` for a type that attributes can't have."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case int() | np.integer():
            return str(int(value))
        case float() | np.floating():
            return repr(float(value))
        case str():
            return json.dumps(value)
        case DType():
            return value.name
        case Dim():
            return format_size(value)
        case tuple():
            return f"({', '.join(map(format_attribute, value))}{',' if len(value) == 1 else ''})"
    raise OptionError(f"an attribute can't be a {type(value).__name__}: {value!r}")


def inline(type: TensorType, data: Array) -> str | None:
    """The elements as text, or None when they are too many or would not come back bit by bit."""
    if data.size > INLINE_ELEMENTS:
        return None
    if type.dtype.kind == "s":
        return json.dumps(data.reshape(-1).tolist())
    flat = _numbers(np.ascontiguousarray(data))
    text = [_element(x, type.dtype) for x in flat]
    if array_of([_read_element(t) for t in text], type).tobytes() != np.ascontiguousarray(data).tobytes():
        return None
    return f"[{', '.join(text)}]"


def _numbers(data: Array) -> Array:
    """The elements as a flat array; a complex one as its real and imaginary part."""
    return data.reshape(-1).view(data.real.dtype) if data.dtype.kind == "c" else data.reshape(-1)


def _element(x: Any, dtype: DType) -> str:
    if dtype.kind == "b":
        return "true" if x else "false"
    if dtype.is_integer:
        return str(int(x))
    short = str(x)  # shortest text that tells it from its neighbours
    same = np.dtype(type(x)).type(float(short)).tobytes() == x.tobytes()
    return repr(float(short if same else x))


def _read_element(text: str) -> float | int | bool:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def array_of(numbers: Sequence[float | int | bool | str], type: TensorType) -> Array:
    """The array of that static type with these elements; `ValueError` when one does not fit the type."""
    dtype, shape = type.dtype, [s for s in type.shape if isinstance(s, int)]
    bad: list[Any]
    if dtype.kind == "s":
        bad = [n for n in numbers if not isinstance(n, str)]
    elif dtype.kind == "c":
        return np.array(numbers, np.empty(0, dtype.numpy).real.dtype).view(dtype.numpy).reshape(shape)
    elif dtype.is_integer:
        lo, hi = (
            (-(1 << dtype.bits - 1), (1 << dtype.bits - 1) - 1) if dtype.kind == "i" else (0, (1 << dtype.bits) - 1)
        )
        bad = [n for n in numbers if not isinstance(n, int) or isinstance(n, bool) or not lo <= n <= hi]
    else:
        wanted = bool if dtype.kind == "b" else float
        bad = [n for n in numbers if not isinstance(n, wanted)]
    if bad:
        raise ValueError(f"{bad[0]!r} is not an element of type {dtype}")
    if dtype.kind == "s":
        return np.array(numbers, dtype.numpy).reshape(shape)
    with np.errstate(all="ignore"):
        wide = np.array(numbers, np.float64) if dtype.is_float else np.array(numbers, object)
        return wide.astype(dtype.numpy).reshape(shape)
