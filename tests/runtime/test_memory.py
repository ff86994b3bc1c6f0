"""Memory: runs allocate nothing that stays, compiled code can't allocate at all, and budgets are kept."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest
from growth import growth, traced_growth

import rlx
from rlx.backends.cpu import jit
from rlx.errors import MemoryDeficit

Array = np.ndarray[Any, Any]
CALLS = 1000


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


def repeat(call: Callable[[], Any]) -> None:
    for _ in itertools.repeat(None, CALLS):
        call()


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
        blocks, native = growth(functools.partial(repeat, call))
        assert blocks < 20  # those of the measurement
        assert native <= 0
        assert traced_growth(functools.partial(repeat, call))[0] < 1000  # the same: less than a byte a call


def test_lengths_that_alternate_leave_nothing() -> None:
    """What is bound anew is taken from the bindings that are kept; nothing grows with the calls."""
    model = mixed(threads=1)
    short, long = inputs(5), inputs(60)

    def call() -> None:
        model.run_slots(*short)
        model.run_slots(*long)

    repeat(call)
    blocks, native = growth(functools.partial(repeat, call))
    assert blocks < 20  # those of the measurement
    assert native < 1000


def test_run_slots_allocates_no_blocks_at_all() -> None:
    """Not even for a moment: the peak of traced memory does not move."""
    model = mixed(threads=1)
    x, i = inputs(60)
    call = model.run_slots

    def some() -> None:
        for _ in itertools.repeat(None, 100):
            call(x, i)

    some()
    assert traced_growth(some)[1] < 1000


def test_code_imports_no_allocator(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The symbols that the compiled objects of a model import are few, and none of them allocates."""
    seen: list[bytes] = []
    check = jit.check_object
    monkeypatch.setattr(jit, "check_object", lambda obj: (seen.append(obj), check(obj))[1])
    monkeypatch.setattr(jit, "loaded", WeakValueDictionary())  # compile anew
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
    assert text.count("more than") == text.count("10,000 B") == 1  # each figure is said once
    deficit = caught.value
    assert text.count(f"{deficit.peak_bytes:,} B") == text.count(f"{deficit.missing_bytes:,} B") == 1
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
