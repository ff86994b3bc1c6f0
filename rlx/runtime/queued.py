"""Runs that are submitted and not waited for: the calls of a compiled graph; the queue is in `run_queue`."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlx.boundary import bounded, bounded_class
from rlx.errors import ExecutionError, OptionError
from rlx.ir.graph import Array
from rlx.options import CompileOptions

if TYPE_CHECKING:
    from rlx.runtime.memory import ModelMemory
    from rlx.runtime.run_queue import Call, RunFuture, RunQueue

__all__ = ["Queued"]

DEPTH = 4  # of a queue where nothing else was asked for


@bounded_class(ExecutionError)
class Queued:
    """The calls of a compiled graph that don't wait, and those that wait for these."""

    memory: ModelMemory | None
    _options: CompileOptions
    _positions: Callable[[Sequence[str | int]], list[int]]
    _snapshot: Callable[[Any], dict[str, Array]]
    run: Callable[..., list[Any]]

    @property
    def _queue(self) -> RunQueue:
        """The queue, made when it is first needed: most programs submit nothing."""
        made: RunQueue | None = self.__dict__.get("_own_queue")
        if made is None:
            from rlx.runtime.run_queue import RunQueue

            made = RunQueue(self._options.queue or DEPTH, None if self.memory is None else self.memory.snapshots)
            made = self.__dict__.setdefault("_own_queue", made)  # another thread may have been faster
        return made

    def submit(
        self, inputs: Mapping[str, Any] | Sequence[Any], *, outputs: Sequence[str | int] | None = None
    ) -> RunFuture:
        """Queues a run and returns a future of its outputs; runs are made in the order in which they were submitted.

        Inputs are copied now: the caller may change them at once. Waits while `queue=` runs (4) have not ended. Raises
        what is wrong with the inputs or outputs, and `MemoryDeficit` where a full queue would not fit; what the run
        raises comes from the future, and from `sync` unless somebody has looked at it there.
        """
        from rlx.runtime.run_queue import Place

        queue, place = self._queue, Place()
        try:
            if not queue.reserve(place):
                place.result()
            return queue.put(self, self._call(inputs, outputs), place)
        except BaseException:
            queue.give_back(place)
            raise

    def sync(self) -> None:
        """Waits until all runs that were submitted have ended; raises the first error that nobody has looked at."""
        self._queue.drain()
        self._queue.raise_failed()

    def run_many(
        self,
        sets: Iterable[Mapping[str, Any] | Sequence[Any]],
        *,
        outputs: Sequence[str | int] | None = None,
    ) -> Iterator[list[Any]]:
        """An iterator over the outputs for each set of inputs, in order, as `run` gives them.

        While sets are run the next ones are taken from `sets`, up to `queue=` of them, in the thread that iterates.
        States go from set to set. An error ends it; so does leaving it early: runs that have not begun are dropped.
        """
        if isinstance(sets, Mapping) or not isinstance(sets, Iterable):
            raise OptionError(f"run_many takes an iterable of sets of inputs, got {type(sets).__name__}")
        return self._pipelined(iter(sets), outputs)

    def _pipelined(self, sets: Iterator[Any], outputs: Sequence[str | int] | None) -> Iterator[list[Any]]:
        from rlx.runtime.run_queue import wait

        pending: deque[RunFuture] = deque()
        try:
            for inputs in sets:
                pending.append(self.submit(inputs, outputs=outputs))
                while pending and (len(pending) >= self._queue.depth or pending[0].done()):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            own = [future for future in pending if future.process == os.getpid()]
            for future in own:
                future.cancel()
            wait(own)  # one may have begun

    async def arun(
        self, inputs: Mapping[str, Any] | Sequence[Any], *, outputs: Sequence[str | int] | None = None
    ) -> list[Any]:
        """`submit` for asyncio: awaits its place in the queue and the outputs, and never blocks the event loop.

        Inputs are copied once it has its place. When it is cancelled, the run is dropped unless it has begun.
        """
        import asyncio

        from rlx.runtime.run_queue import Place

        queue, place = self._queue, Place()
        try:
            if not queue.reserve(place):
                await asyncio.wrap_future(place)
            future = queue.put(self, self._call(inputs, outputs), place)
        except BaseException:
            queue.give_back(place)
            raise
        return await asyncio.wrap_future(future)

    @bounded("submit", ExecutionError)
    def _call(self, inputs: Any, outputs: Sequence[str | int] | None) -> Call:
        """The run of these inputs as they are now."""
        given = self._snapshot(inputs)
        wanted = None if outputs is None else self._positions(outputs)
        return lambda: self.run(given, outputs=wanted)
