"""Tile registers in Python, for code that uses AMX on machines without it: each instruction is a call of these."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from rlx.ir.graph import Array

TINY = np.float32(2.0**-126)


def flushed(x: Array) -> Array:
    return np.where(np.abs(x) < TINY, np.float32(0), x)


class TileRegisters:
    """Eight tiles, as `ldtilecfg` shapes them. What code asks of them that hardware refuses is an error here."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.shapes: list[tuple[int, int]] = []  # rows and bytes of a row; none: not configured
        self.tiles = [np.zeros((16, 64), np.uint8) for _ in range(8)]

    def ldtilecfg(self, p: int) -> None:
        data = np.ctypeslib.as_array((ctypes.c_uint8 * 64).from_address(p))
        widths, rows = data[16:32].view(np.uint16), data[48:56]
        self.shapes = [(int(r), int(w)) for r, w in zip(rows, widths, strict=True)]
        self.check(data[0] == 1 and all(r <= 16 and w <= 64 for r, w in self.shapes), "configuration")
        for tile in self.tiles:
            tile[:] = 0

    def tilerelease(self) -> None:
        self.check(bool(self.shapes), "release")
        self.shapes = []

    def tilezero(self, t: int) -> None:
        self.tiles[t][:] = 0

    def tileloadd64(self, t: int, p: int, step: int) -> None:
        rows, width = self.shapes[t]
        self.tiles[t][:] = 0
        for i in range(rows):
            self.tiles[t][i, :width] = np.ctypeslib.as_array((ctypes.c_uint8 * width).from_address(p + i * step))

    def tilestored64(self, t: int, p: int, step: int) -> None:
        rows, width = self.shapes[t]
        for i in range(rows):
            np.ctypeslib.as_array((ctypes.c_uint8 * width).from_address(p + i * step))[:] = self.tiles[t][i, :width]

    def tdpbf16ps(self, c: int, a: int, b: int) -> None:
        (m, n), (rows, depth), (steps, width) = (self.shapes[t] for t in (c, a, b))
        self.check(m == rows and n == width and depth == 4 * steps and len({a, b, c}) == 3, f"{self.shapes}")
        x, y = (flushed((self.tiles[t].view(np.uint16).astype(np.uint32) << 16).view(np.float32)) for t in (a, b))
        total = self.tiles[c].view(np.float32)
        x, y = x.reshape(16, 16, 2), y.reshape(16, 16, 2)
        with np.errstate(all="ignore"):
            for k, half in np.ndindex(16, 2):
                total[:m] = flushed(total[:m] + flushed(x[:m, k, half, None] * y[k, None, :, half]))

    def check(self, good: bool, what: str) -> None:
        if not good:
            self.errors.append(what)


def emulated(text: str, name: str, count: int, tiles: TileRegisters) -> Callable[..., None]:
    """The function of that name in a module of LLVM IR, which takes so many words."""
    kept: list[Any] = []
    for instruction in sorted(set(re.findall(r"@llvm\.x86\.(t\w+|ldtilecfg)\(", text))):
        declared = re.search(rf"declare void @llvm\.x86\.{instruction}\(([^)]*)\)", text)
        assert declared is not None
        words = [ty for ty in declared[1].split(",") if ty.strip()]
        types = [ctypes.c_int8 if "i8" in ty else ctypes.c_int64 for ty in words]
        call = ctypes.CFUNCTYPE(None, *types)(getattr(tiles, instruction))
        kept.append(call)
        address = ctypes.cast(call, ctypes.c_void_p).value
        assert address is not None
        llvm.add_symbol(f"emulated_{instruction}", address)
    text = re.sub(r"@llvm\.x86\.(t\w+|ldtilecfg)\(", r"@emulated_\1(", text).replace(" immarg", "")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten()
    )
    module = llvm.parse_assembly(text)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(engine.get_function_address(name))

    def run(*words: int) -> None:
        function(*words)
        assert not tiles.errors, tiles.errors
        assert not tiles.shapes, "tiles stay in use"
        _ = kept, engine

    return run
