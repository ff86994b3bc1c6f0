"""Sizes and times as people read them, and numbers as callers give them: Python's, or those of NumPy and others."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

__all__ = ["as_int", "as_number", "bytes_text", "int_or_same", "long_text", "seconds_text", "with_ints"]


def bytes_text(count: int | None) -> str:
    """1536 -> "1.5 KiB"; only 0 is shown as 0, and None is not known."""
    if count is None:
        return "unknown"
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def seconds_text(seconds: float) -> str:
    """0.0123 -> "12.3 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.0f} ns"


def long_text(seconds: float) -> str:
    """5400.0 -> "1.5 hours"; of one second or more."""
    units = (("years", 31_557_600.0), ("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
    unit, scale = next(u for u in units if seconds >= u[1])
    return f"{seconds / scale:,.1f} {unit}"


# ---- numbers that are given


def as_int(value: object) -> int | None:
    """The value as an int where it is an integer of any library (also an array of one); None for others and bools."""
    if type(value) is int:
        return value
    try:
        return operator.index(value) if _may_be_number(value) else None  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - whatever a class of the caller raises: it is no integer
        return None


def as_number(value: object) -> int | float | None:
    """The value as an int or a float where it is a real number of any library; None for others, bools and texts."""
    whole = as_int(value)
    if isinstance(value, float):
        return value
    if whole is not None or isinstance(value, str | bytes | bytearray):
        return whole
    try:
        known = hasattr(type(value), "__float__") and _may_be_number(value)
        return float(value) if known else None  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001
        return None


def _may_be_number(value: object) -> bool:
    """Whether it is no bool, and no text, time, complex number or bool of an array library: many convert to numbers."""
    dtype = getattr(value, "dtype", None)
    name = str(getattr(dtype, "name", dtype))  # "uint8" and "bfloat16" of NumPy, "torch.int64"
    return not isinstance(value, bool) and (dtype is None or "int" in name or "float" in name)


def int_or_same(value: Any) -> Any:
    """The value as an int where it is an integer, else as it is: the check that follows refuses what was given."""
    whole = as_int(value)
    return value if whole is None else whole


def with_ints(tree: Any) -> Any:
    """A tree of mappings, tuples and lists, such as `dims`, whose integers of other libraries are Python's."""
    if isinstance(tree, Mapping):
        return {int_or_same(key): with_ints(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map(with_ints, tree)) if type(tree) in (tuple, list) else tree
    return tree if isinstance(tree, str) else int_or_same(tree)
