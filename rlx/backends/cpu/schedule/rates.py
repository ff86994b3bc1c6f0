"""What a core does a second, about: work is cut into chunks by these, and no result depends on them.

They were measured on processors with AVX2 and AVX-512; only their ratios matter much. A schedule is stored with the
code that it cuts work for, so it holds no target: what differs by far between targets (products of bytes, tile
registers) is given to it.
"""

from __future__ import annotations

__all__ = ["COPY", "FLOPS", "READ", "WRITE"]

FLOPS = 80e9  # operations of f32, two a multiply-add
READ = 40e9  # bytes of packed operands, from a cache that cores share
WRITE = 20e9  # bytes of results
COPY = 10e9  # bytes that are gathered, packed or copied
