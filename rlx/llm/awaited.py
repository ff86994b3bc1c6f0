"""Iterators that compute in a thread, for `async for`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

__all__ = ["awaited"]

T = TypeVar("T")


async def awaited(pieces: Iterator[T], cancel: Callable[[], None]) -> AsyncIterator[T]:
    """The pieces, each computed in a thread of the event loop's pool.

    Where the task is cancelled, or the iteration is given up, `cancel` is called, and what runs is waited for.
    """
    import asyncio  # slow to import, and most processes have no event loop

    end = object()
    try:
        while True:
            running = asyncio.ensure_future(asyncio.to_thread(next, pieces, end))
            try:
                piece = await asyncio.shield(running)
            except asyncio.CancelledError:
                cancel()
                await asyncio.wait([running])
                raise
            if piece is end:
                return
            yield piece  # type: ignore[misc]
    finally:
        cancel()
