"""The control register of floating-point arithmetic of this thread, as fast-math libraries leave it."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import pytest

from rlx.backends.cpu.jit import load as loader

__all__ = ["STATES", "control", "on_x86", "state"]

on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="sets the register of x86")

USUAL, FLAGS = 0x1F80, 0x3F
# to nearest, down, up, towards zero; without and with results flushed to zero; denormal operands kept or taken as zero
STATES = [
    USUAL | rounding << 13 | flush << 15 | zeros << 6 for rounding, flush, zeros in product(range(4), *[(0, 1)] * 2)
]

IR = """
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
define void @get(ptr %p) { call void @llvm.x86.sse.stmxcsr(ptr %p) ret void }
define void @set(ptr %p) { call void @llvm.x86.sse.ldmxcsr(ptr %p) ret void }
"""


@functools.cache
def _calls() -> tuple[Callable[[int], None], Callable[[int], None]]:
    library = loader.build("register of a test", lambda: IR, symbols={}).keep()
    function = ctypes.PYFUNCTYPE(None, ctypes.c_size_t)
    return function(library.address("get")), function(library.address("set"))


def control() -> int:
    """The register now, without the flags that operations leave."""
    word = ctypes.c_uint32()
    _calls()[0](ctypes.addressof(word))
    return word.value & ~FLAGS


@contextmanager
def state(value: int) -> Iterator[None]:
    """This thread has the register set to that."""
    word, usual = ctypes.c_uint32(value), ctypes.c_uint32(USUAL)
    _calls()[1](ctypes.addressof(word))
    try:
        yield
    finally:
        _calls()[1](ctypes.addressof(usual))
