"""Whether tile registers multiply matrices of f32 faster than vectors do: measured once a machine, and kept.

A product of f32 is made of six of bf16, and of work to split its operands. Processors with the same tiles differ, and
so do hosts of virtual machines: on some a tile that products still read can't be loaded anew meanwhile, on most cores
and most of the time, and tiles do a quarter to a half of what they could. Threads wait for the slowest, so each core is
measured several times, and the slow quarter of all that counts.

What is compiled keeps the choice that was made for it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from rlx.backends.cpu.jit import compile as jit
from rlx.backends.cpu.jit import cpuid
from rlx.backends.cpu.jit import load as loader
from rlx.backends.cpu.llvm import amx
from rlx.backends.cpu.llvm.builder import Function, Module, width
from rlx.backends.granted import allowed_cpus
from rlx.disk import cache_folder, read_kept, write_kept

__all__ = ["floats_by_tiles"]

LEAST = 9.0  # times as many products of bf16 as multiply-adds of f32: six, and some more for splitting
SUMS = 12  # independent ones, enough to keep two units busy
VECTOR = "<16 x float>"
TILE_TURNS, FMA_TURNS = 1000, 10_000  # some 20 us each
PAIRS = 15  # of measurements on a core at a time
CORES = 16  # that are measured at most
PASSES, PAUSE = 3, 0.02  # over all of them, and seconds between
FORMAT = 1


@functools.cache
def floats_by_tiles() -> bool:
    """Whether tiles, which the machine must have, are worth it; asked for where code is made."""
    path, key = cache_folder() / "tiles.json", [FORMAT, cpuid.identity()]
    kept = read_kept(path, key)
    if not isinstance(kept, bool):
        kept = measured() >= LEAST
        write_kept(path, key, kept)
    return kept


def measured() -> float:
    """Multiply-adds of bf16 by tiles for each of f32 by vectors, in loops of one thread: the lower quartile."""
    by_tiles, by_vectors = _tiles(), _vectors()
    library = loader.load_object(jit.compile_object(Module([by_tiles, by_vectors]).text(), optimize=False))
    kind = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_int64)
    tiles, vectors = (kind(library.address(f.name)) for f in (by_tiles, by_vectors))
    found: list[float] = []

    def on_each() -> None:
        cpus = sorted(allowed_cpus())
        for turn in range(PASSES):
            time.sleep(PAUSE * (turn > 0))
            for cpu in cpus[:: -(-len(cpus) // CORES)]:
                with suppress(OSError):  # one that it may not use after all: then where it is
                    os.sched_setaffinity(0, {cpu})
                found.append(_on_this_core(tiles, vectors))

    thread = threading.Thread(target=on_each, name="rlx pace of tiles")  # the caller keeps its CPUs
    thread.start()
    thread.join()
    return float(np.quantile(found, 0.25))


def _on_this_core(tiles: Callable[[int, int], None], vectors: Callable[[int, int], None]) -> float:
    data = np.zeros(2048, np.float32)
    place = -(-data.ctypes.data // 64) * 64

    def rate(run: Callable[[int, int], None], turns: int, work: int) -> float:
        start = time.perf_counter_ns()
        run(place, turns)
        return turns * work / max(time.perf_counter_ns() - start, 1)

    def pair() -> float:
        by_tiles = rate(tiles, TILE_TURNS, 4 * amx.ROWS * 16 * 32)  # four of [rows, 32] x [32, 16]
        return by_tiles / rate(vectors, FMA_TURNS, SUMS * width(VECTOR))

    pair()
    return float(np.median([pair() for _ in range(PAIRS)]))


def _tiles() -> Function:
    """As products do: pairs of tiles are loaded and four products made of them."""
    f = Function("rlx_pace_of_tiles", [("ptr", "data"), ("i64", "count")])
    amx.configure(f)

    def turn(_i: str, _: list[str]) -> None:
        for tile in range(4, 8):
            amx.load(f, tile, f.offset("%data", (tile - 4) * amx.ROWS * amx.ROW_BYTES), amx.ROW_BYTES)
        for total in range(4):
            amx.dot(f, "tdpbf16ps", total, 4 + total // 2, 6 + total % 2)

    f.loop(0, "%count", 1, [], turn)
    amx.release(f)
    f.ret()
    return f


def _vectors() -> Function:
    f = Function("rlx_pace_of_vectors", [("ptr", "data"), ("i64", "count")])
    x = f.load(VECTOR, "%data")

    def turn(_: str, sums: list[str]) -> list[str]:
        return [f.fma(x, x, total, VECTOR) for total in sums]

    for i, total in enumerate(f.loop(0, "%count", 1, [(VECTOR, "zeroinitializer")] * SUMS, turn)):
        f.store(total, f.gep("%data", i, VECTOR))
    f.ret()
    return f
