"""Constants as LLVM's text: exact numbers of each type, scalars and vectors."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence

from rlx.backends.cpu.llvm.types import element, is_float, width

__all__ = ["constant", "has_nan", "scalar_constant"]


def scalar_constant(value: int | float, ty: str) -> str:
    if ty == "i1":
        return "true" if value else "false"
    if not is_float(ty):
        if isinstance(value, float):
            raise TypeError(f"constant of type {ty}: expected an int, got {value!r}; pass int(value)")
        return str(int(value))
    number = float(value)
    if ty == "half":
        return f"0xH{struct.unpack('<H', struct.pack('<e', number))[0]:04X}"
    if ty == "bfloat":
        bits = struct.unpack("<I", struct.pack("<f", number))[0]
        if not math.isnan(number):  # round to nearest even; a nan keeps its top bits
            bits += 0x7FFF + (bits >> 16 & 1)
        return f"0xR{bits >> 16:04X}"
    if ty == "float" and abs(number) != float("inf"):
        number = struct.unpack("<f", struct.pack("<f", number))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"  # a float is written as the double equal to it


def constant(value: int | float | Sequence[int | float], ty: str) -> str:
    """Returns the exact text of a constant of type `ty`; one number fills all lanes, a sequence gives one a lane."""
    scalar, w = element(ty), width(ty)
    if isinstance(value, int | float):
        text = scalar_constant(value, scalar)
        return text if w == 1 else f"splat ({scalar} {text})"
    if len(value) != w:
        raise ValueError(f"constant of type {ty}: expected {w} values, got {len(value)}")
    lanes = ", ".join(f"{scalar} {scalar_constant(v, scalar)}" for v in value)
    return f"<{lanes}>" if w > 1 else scalar_constant(value[0], scalar)


def has_nan(text: str) -> bool:
    """Whether a text of `constant` of a float type has a NaN in any lane."""
    for form, digits in re.findall(r"0x([HR]?)([0-9A-F]+)", text):
        infinity = {"H": 0x7C00, "R": 0x7F80, "": 0x7FF << 52}[form]
        if int(digits, 16) & (1 << 4 * len(digits) - 1) - 1 > infinity:
            return True
    return False
