"""The machine that code is made for, as a value: what makes code is given it, and asks nothing else of a machine."""

from __future__ import annotations

from rlx.records import dataclass

__all__ = ["Target"]


@dataclass(frozen=True)
class Target:
    """A processor: `features` is LLVM's list of them, `cores` what this process may use.

    `tiles`: code may use AMX (tile registers, products of bf16 and of bytes) beside vectors of 64 bytes; `float_tiles`:
    and products of f32 are faster made of those.
    """

    cpu: str
    features: str
    triple: str
    vector_bytes: int
    cores: int
    tiles: bool
    float_tiles: bool = False

    @property
    def lanes(self) -> int:
        """Elements of f32 in a vector."""
        return self.vector_bytes // 4

    def multiplies_by_tiles(self, dtype: str) -> bool:
        """Whether products of that type can be computed by tile registers, and soon enough."""
        return dtype == "f32" and self.float_tiles

    def has(self, feature: str) -> bool:
        """Whether it has a feature, by LLVM's name for it."""
        return f"+{feature}" in self.features.split(",")

    @property
    def x86(self) -> bool:
        """Whether it has the instructions of x86-64."""
        return self.triple.startswith(("x86_64", "amd64"))
