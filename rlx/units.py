"""Sizes and times as people read them."""

from __future__ import annotations

__all__ = ["bytes_text", "long_text", "seconds_text"]


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
