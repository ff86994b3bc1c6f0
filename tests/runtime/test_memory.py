"""Memory: runs allocate nothing that stays, compiled code can't allocate at all, and budgets are kept."""

from __future__ import annotations

import ctypes
import gc
import itertools
import logging
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu import jit
from rlx.errors import MemoryDeficit

Array = np.ndarray[Any, Any]
CALLS = 1000


class MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
if mallinfo2 is not None:
    mallinfo2.restype = MallInfo


def native_bytes() -> int:
    """Bytes that the C allocator has given out, small and mapped."""
    assert mallinfo2 is not None
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def mixed(**options: Any) -> rlx.CompiledGraph:
    """Products, convolution, attention, softmax, reductions, gather: every kind of kernel, over a dim."""
    rng = np.random.default_rng(0)
    g = rlx.Graph("mixed")
    n = rlx.Dim("n", 1, 64)
    x, i = g.input("x", (n, 32)), g.input("i", (n,), "i64")
    w = g.param("w", (32, 48), data=rng.standard_normal((32, 48)).astype(np.float32))
    k = g.param("k", (8, 1, 3, 3), data=rng.standard_normal((8, 1, 3, 3)).astype(np.float32))
    y = rlx.relu(x @ w)
    q = y.reshape(1, n, 3, 16).transpose(0, 2, 1, 3)
    g.output(rlx.attention(q, q, q), name="attention")
    g.output(rlx.conv(y.reshape(1, 1, n, 48), k, pads=(1, 1, 1, 1)).mean((2, 3)), name="convolution")
    g.output(rlx.gather(rlx.softmax(y), i), name="rows")
    g.output(x, name="input")
    return rlx.compile(g, device="cpu", **options)


def inputs(n: int) -> list[Array]:
    x = np.random.default_rng(n).standard_normal((n, 32)).astype(np.float32)
    return [x, np.arange(n, dtype=np.int64)[::-1].copy()]


@pytest.mark.skipif(mallinfo2 is None, reason="no mallinfo2 in this C library")
@pytest.mark.parametrize("threads", [1, 2])
def test_calls_at_repeated_extents_allocate_nothing_that_stays(threads: int) -> None:
    """1000 calls of run_slots and run_views: net 0 Python blocks and no growth of the native heap."""
    model = mixed(threads=threads)
    long = inputs(60)
    by_name = {"x": long[0], "i": long[1]}
    calls: list[Callable[[], Any]] = [
        lambda: model.run_slots(*long),
        lambda: model.run_views(by_name),
        lambda: model.run_views(long),
    ]
    for call in calls:
        for _ in range(50):
            call()
        rounds = []
        for _ in range(3):  # what leaks does so in every round; the interpreter's own caches grow in one
            gc.collect()
            gc.disable()
            try:
                grown, native = repeat(call)
                tracemalloc.start()
                call()
                start = tracemalloc.get_traced_memory()[0]
                repeat(call)
                rounds.append((grown, native, tracemalloc.get_traced_memory()[0] - start))
            finally:
                tracemalloc.stop()
                gc.enable()
        grown, native, traced = map(min, zip(*rounds, strict=True))
        assert grown < CALLS / 10  # the measurement itself, and Python's free lists
        assert native <= 0
        assert traced < 1000  # the same: less than a byte a call


@pytest.mark.skipif(mallinfo2 is None, reason="no mallinfo2 in this C library")
def test_lengths_that_alternate_leave_nothing() -> None:
    """What is bound anew is taken from the bindings that are kept; nothing grows with the calls."""
    model = mixed(threads=1)
    short, long = inputs(5), inputs(60)

    def call() -> None:
        model.run_slots(*short)
        model.run_slots(*long)

    repeat(call)
    rounds = []
    for _ in range(3):  # what leaks does so in every round; the interpreter's own caches grow in one
        gc.collect()
        blocks, native = sys.getallocatedblocks(), native_bytes()
        repeat(call)
        gc.collect()
        rounds.append((sys.getallocatedblocks() - blocks, native_bytes() - native))
    assert min(blocks for blocks, _ in rounds) < CALLS / 10
    assert min(native for _, native in rounds) < 8 * CALLS


def repeat(call: Callable[[], Any]) -> tuple[int, int]:
    """Python blocks and bytes of the C allocator that `CALLS` calls leave behind."""
    native, blocks = native_bytes(), sys.getallocatedblocks()
    for _ in itertools.repeat(None, CALLS):
        call()
    return sys.getallocatedblocks() - blocks, native_bytes() - native


def test_run_slots_allocates_no_blocks_at_all() -> None:
    """Not even for a moment: the peak of traced memory does not move."""
    model = mixed(threads=1)
    x, i = inputs(60)
    call = model.run_slots
    call(x, i)
    gc.collect()
    tracemalloc.start()
    try:
        call(x, i)
        tracemalloc.reset_peak()
        start = tracemalloc.get_traced_memory()[0]
        for _ in [None] * 100:
            call(x, i)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - start < 2000  # the list of the loop


def test_code_imports_no_allocator(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The symbols that the compiled objects of a model import are few, and none of them allocates."""
    seen: list[bytes] = []
    check = jit.check_object
    monkeypatch.setattr(jit, "check_object", lambda obj: (seen.append(obj), check(obj))[1])
    monkeypatch.setattr(jit, "addresses", {})  # compile anew
    mixed(cache_dir=tmp_path)
    assert seen
    for obj in seen:
        for name in (b"malloc", b"calloc", b"realloc", b"alloc", b"mmap", b"_Znwm", b"free"):
            assert name not in obj


def test_the_budget() -> None:
    """What does not fit is refused, with the parts; or it is logged, or allowed, as asked."""
    with pytest.raises(MemoryDeficit) as caught:
        mixed(budget="10 kB")
    text = str(caught.value)
    for part in ("'mixed' needs", "more than the 10,000 B allowed by budget=", "weight", "activation", "raise budget="):
        assert part in text
    deficit = caught.value
    assert deficit.peak_bytes == deficit.budget_bytes + deficit.missing_bytes
    model = mixed()
    needs = model.needs
    assert needs is not None
    assert needs.arena is not None
    assert needs.total == needs.params + needs.prepared + needs.constants + needs.arena
    assert deficit.peak_bytes >= needs.total
    assert mixed(budget=deficit.peak_bytes).run(inputs(3))[3].shape == (3, 32)
    with pytest.raises(MemoryDeficit):
        mixed(budget=deficit.peak_bytes - 1)
    with pytest.raises(MemoryError):  # it is that builtin too
        mixed(budget="1KiB")


def test_over_budget(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rlx"):
        assert mixed(budget=1, over_budget="allow").run(inputs(3))[3].shape == (3, 32)
        assert not caplog.records
        assert mixed(budget=1, over_budget="warn").run(inputs(3))[3].shape == (3, 32)
    assert "'mixed' needs" in caplog.text


def test_the_budget_holds_for_open_dims_at_the_bounds_of_weights() -> None:
    """With an unbounded dim only the weights are known before a run."""
    g = rlx.Graph("open")
    x, w = g.input("x", (rlx.Dim("n"), 256)), g.param("w", (256, 256))
    g.output(x @ w, name="y")
    with pytest.raises(MemoryDeficit, match="needs"):
        rlx.compile(g, device="cpu", budget=1000)
    model = rlx.compile(g, device="cpu", budget="2MB")
    assert model.needs is not None
    assert model.needs.arena is None
    model.set_param("w", np.ones((256, 256), np.float32))
    assert model.run([np.ones((4, 256), np.float32)])[0].shape == (4, 256)
    with pytest.raises(MemoryDeficit, match="2,000,000 B allowed by budget="):  # the arena is not grown for it
        model.run([np.ones((4096, 256), np.float32)])
    assert model.run([np.ones((5, 256), np.float32)])[0].shape == (5, 256)
