"""What `growth` says of leaks and of what is none: the tests of memory judge by it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from growth import growth, mallinfo2, traced_growth

CALLS = 100
kept: list[Any] = []
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p


def keep() -> None:
    kept.append(object())


def cycle() -> None:
    links: list[Any] = []
    links.append(links)


def allocate() -> None:
    kept.append(libc.malloc(ctypes.c_size_t(48)))


def array() -> None:
    kept.append(np.empty(1000))


def large() -> None:
    if len(kept) < 100:
        kept.append(np.empty(1 << 20))  # mapped on its own, never touched: no page of it is resident


def nothing() -> None:
    np.empty(1000)


@pytest.fixture(autouse=True)
def _emptied() -> Any:
    yield
    kept.clear()


def repeated(call: Callable[[], None]) -> Callable[[], None]:
    def some() -> None:
        for _ in range(CALLS):
            call()

    return some


@pytest.mark.parametrize("leak", [keep, cycle, array])
def test_blocks_of_python_that_leak_are_seen(leak: Callable[[], None]) -> None:
    assert growth(repeated(leak)).blocks > 0.9 * CALLS


@pytest.mark.skipif(mallinfo2 is None, reason="no mallinfo2 in this C library")
@pytest.mark.parametrize("leak, size", [(allocate, 48), (array, 8000)])
def test_bytes_of_the_c_allocator_that_leak_are_seen(leak: Callable[[], None], size: int) -> None:
    assert growth(repeated(leak)).native >= CALLS * size


@pytest.mark.skipif(mallinfo2 is None, reason="no mallinfo2 in this C library")
def test_one_array_a_round_is_seen() -> None:
    assert growth(large).native >= 8 << 20
    assert traced_growth(large)[0] >= 8 << 20


def test_what_grows_in_one_round_only_is_no_leak() -> None:
    rounds: list[int] = []

    def grows_at_third() -> None:
        rounds.append(0)
        if len(rounds) == 3:
            repeated(keep)()
            repeated(array)()

    assert growth(grows_at_third).blocks < 20
    assert growth(grows_at_third).native < 1000
    assert traced_growth(grows_at_third)[0] < 1000


def test_what_is_freed_in_one_round_hides_no_leak() -> None:
    rounds: list[int] = []
    held = [object() for _ in range(50 * CALLS)]

    def leaks_while_others_free() -> None:
        rounds.append(0)
        repeated(keep)()
        if len(rounds) == 3:
            held.clear()

    assert growth(leaks_while_others_free).blocks > 0.9 * CALLS


def test_what_is_given_back_shows_in_the_peak_alone() -> None:
    blocks, native = growth(repeated(nothing))
    assert blocks < 20
    assert native < 1000
    left, peak = traced_growth(repeated(nothing))
    assert left < 1000
    assert peak >= 8000
