"""Tags of kernels that backends set and the cost model reads."""

from __future__ import annotations

__all__ = [
    "BLOCKS", "EITHER", "FEW", "GEMM", "GEMM_OF_BYTES", "GEMM_OF_SHORT", "MANY", "PACK", "STREAMING", "WHOLE",
    "WINOGRAD", "is_gemm",
]  # fmt: skip

GEMM = "gemm"  # a product with panels that a kernel before it packs
GEMM_OF_BYTES = "gemm of bytes"  # one of floats whose panels hold bytes, or differences of two as i16
GEMM_OF_SHORT = "gemm of short floats"  # one of few rows, whose panels hold 28 bits of each number
BLOCKS = "gemm of blocks of "  # starts the tags of those whose panels hold encoded blocks; then the encoding
PACK = "pack"  # brings what its anchor reads into panels
WINOGRAD = "winograd"  # starts the tags of convolutions by transforms; then comes the window, "2x2"

# attention: of few query rows, in place; by panels that a kernel before it packs, or that each chunk packs for itself;
# and where the number of rows is known at the run only
FEW, MANY, WHOLE, EITHER = "few", "many", "whole", "either"
STREAMING = " streaming"  # after the first or the last: few rows copy old keys and values past the processor's caches


def is_gemm(tag: str) -> bool:
    """Whether it is that of a product with packed panels, of whatever they hold."""
    return tag in (GEMM, GEMM_OF_BYTES, GEMM_OF_SHORT) or tag.startswith(BLOCKS)
