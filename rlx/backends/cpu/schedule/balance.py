"""How work is cut for many threads: into the chunks with which all of them are soonest done.

Up to `FEW_THREADS` the schedules give each thread an equal part. More threads than that want finer chunks, and a count
of chunks that is a multiple of theirs. A cut decides which thread computes a row or a column, never the order of a sum,
so results have the same bits for any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.schedule.arguments import FEW_THREADS

__all__ = ["TURNS", "shares", "wants_shares"]

TURNS = 4  # chunks for each thread, from which on little is lost at the end
SPREAD = 0.4  # of a chunk's time by which some take longer: two cores may be one that does two threads
START = 1e-6  # seconds that a chunk takes to begin
CLAIM = 0.1e-6  # seconds for which claiming it holds up the other threads


def wants_shares(chunks: int, threads: int) -> bool:
    """Whether there are many threads, and so few chunks that some would be without work for long."""
    return threads > FEW_THREADS and 0 < chunks < TURNS * threads


def shares(
    rows: int,
    panels: int,
    threads: int,
    cost: Callable[[int, int], float],
    *,
    copies: int = 1,
    most_rows: int = 1 << 62,
    least_panels: int = 1,
) -> tuple[int, int]:
    """Rows and panels of a chunk of [rows, panels], `copies` times, with which the threads are soonest done.

    `cost(rows, panels)` is the time of a chunk in seconds. It has `most_rows` rows at most; panels are split into parts
    of at least so many.
    """
    rows, panels = max(rows, 1), max(panels, 1)
    most = max(min(most_rows, rows), 1)
    best, found = float("inf"), (most, panels)
    parts = range(1, max(min(panels // least_panels, threads), 1) + 1)
    for panel_chunk in dict.fromkeys(-(-panels // n) for n in parts):
        across = copies * -(-panels // panel_chunk)
        counts = (1, threads // 4, threads // 2, *(n * threads for n in range(1, TURNS + 1)))
        for row_chunk in dict.fromkeys(min(-(-rows // max(n // across, 1)), most) for n in counts):
            count = across * -(-rows // row_chunk)
            a_chunk = cost(row_chunk, panel_chunk) + START
            time = (-(-count // threads) + SPREAD) * a_chunk + count * CLAIM
            if time < best:
                best, found = time, (row_chunk, panel_chunk)
    return found
