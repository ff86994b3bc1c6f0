"""Types of LLVM as text: "float" is a scalar, "<8 x float>" a vector of eight lanes."""

from __future__ import annotations

import re
from functools import cache

__all__ = ["FLOATS", "arguments_of", "element", "is_float", "size_of", "suffix", "vec", "width"]

type_pattern = re.compile(r"<(\d+) x (\w+)>")

FLOATS = {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64"}
SIZES = {"i1": 1, "i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4, "i64": 8, "double": 8, "ptr": 8}


@cache
def vec(ty: str, w: int) -> str:
    """Returns the type of `w` lanes of scalar type `ty`: the scalar type itself for w = 1."""
    return ty if w == 1 else f"<{w} x {ty}>"


@cache
def width(ty: str) -> int:
    """Returns the number of lanes of a type: 1 for a scalar."""
    match = type_pattern.fullmatch(ty)
    return int(match[1]) if match else 1


@cache
def element(ty: str) -> str:
    """Returns the scalar type of a lane."""
    match = type_pattern.fullmatch(ty)
    return match[2] if match else ty


@cache
def size_of(ty: str) -> int:
    """Returns the bytes that one lane takes in memory."""
    return SIZES[element(ty)]


@cache
def suffix(ty: str) -> str:
    """Returns the way `ty` is spelled in an intrinsic's name: v8f32, i64, p0."""
    scalar = element(ty)
    short = FLOATS.get(scalar, "p0" if scalar == "ptr" else scalar)
    return short if width(ty) == 1 else f"v{width(ty)}{short}"


@cache
def is_float(ty: str) -> bool:
    return element(ty) in FLOATS


def arguments_of(text: str) -> list[tuple[str, str]]:
    """Returns the types and names of arguments that are written as in C: "ptr a, i64 step"."""
    return [(ty, name) for ty, name in (argument.split() for argument in text.split(", "))]
