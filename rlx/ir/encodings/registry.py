"""The formats by name."""

from __future__ import annotations

from rlx.ir.encoding import Encoding

__all__ = ["ENCODINGS", "register_encoding"]

ENCODINGS: dict[str, Encoding] = {}


def register_encoding(cls: type[Encoding]) -> type[Encoding]:
    """Class decorator: makes the encoding known under its name."""
    ENCODINGS[cls.name] = cls()
    return cls
