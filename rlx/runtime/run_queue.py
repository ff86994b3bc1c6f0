"""The queue of submitted runs: bounded, with one thread for each compiled graph.

The thread starts with the first run that is submitted, goes through the queue in order by the ordinary `run`, and ends
with the graph. When the interpreter exits, runs that were submitted are finished first, unless it exits by Ctrl-C.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

from rlx.errors import BusyError, ClosedError, ExecutionError
from rlx.forks import restart_in_child
from rlx.lazy_imports import log

__all__ = ["Call", "Place", "RunFuture", "RunQueue", "wait"]

FAILED = 16  # errors that nobody has looked at, kept for `sync`
EXIT_SECONDS = 2.0  # for which submitted runs wait at exit for a thread that has their graph
BUSY_SECONDS = 2e-5, 1e-3  # between looks at a graph that another thread runs: the first, and the longest

Call = Callable[[], list[Any]]
Job = tuple["RunFuture", Call, "Place"]
Place = Future[None]  # one of the queue's `depth`; done once it is held, where it had to be waited for


class RunFuture(Future[list[Any]]):
    """The outputs of a submitted run, its own copies: a `concurrent.futures.Future`.

    In a forked child, one that was not finished raises `ExecutionError`: its run goes on in the parent only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.process = os.getpid()
        self.settled = False  # its run has ended
        self.seen = False  # somebody has looked at how

    def result(self, timeout: float | None = None) -> list[Any]:
        """The outputs, once they are there. Raises what the run raised, `CancelledError` or `TimeoutError`."""
        self._check()
        try:
            return super().result(timeout)
        finally:
            self.seen = self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the run raised, None for one that succeeded. Raises `CancelledError` or `TimeoutError`."""
        self._check()
        try:
            return super().exception(timeout)
        finally:
            self.seen = self.done()

    def _check(self) -> None:
        if not self.settled and self.process != os.getpid():
            raise ExecutionError("the run was submitted before this process was forked off: submit it here again")


class RunQueue:
    """At most `depth` runs that have not ended, in the order in which they came, and the thread that runs them."""

    def __init__(self, depth: int, ask: Callable[[int], None] | None = None) -> None:
        self.depth = depth
        self.ask = ask  # whether it may hold that many bytes of inputs
        self.admitted = 0
        self.closed = False
        self.deadline = math.inf  # for the runs of other threads to end
        self.restart()
        restart_in_child(self.restart)
        _queues.add(self)

    def restart(self) -> None:
        """Starts empty; what was there is forgotten. For a new queue, and for a forked child, which has no threads."""
        self.lock = threading.RLock()  # reentrant for signal handlers that submit
        self.held: set[Place] = set()  # a set, since an interrupt never leaves one half changed
        self.waiting: deque[Place] = deque()  # first come first served
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.open: dict[RunFuture, None] = {}
        self.failed: list[RunFuture] = []
        self.thread: threading.Thread | None = None
        self.ended = threading.Event()

    # ---- what callers do

    def admit(self, nbytes: int) -> None:
        """Asks for the memory of a full queue of runs with inputs of this size. Raises `MemoryDeficit`."""
        if nbytes > self.admitted and self.ask is not None:
            self.ask(nbytes * self.depth)
            self.admitted = nbytes

    @property
    def free(self) -> int:
        """How many more runs may be submitted before one has to wait."""
        return self.depth - len(self.held)

    def reserve(self, place: Place) -> bool:
        """Takes a place for one more run, or says that it must be waited for. `put` or `give_back` follows."""
        with self.lock:
            if self.closed:
                raise ClosedError("the compiled graph is closed, or the interpreter is about to exit")
            if self.free > 0:
                self.held.add(place)
                return True
            if self.thread is threading.current_thread():
                raise BusyError(f"{self.depth} runs are queued, and a callback of one of them can't wait for them")
            self.waiting.append(place)
        return False

    def give_back(self, place: Place) -> None:
        """Makes a place free, or gives up waiting for it; does nothing for one that was never taken."""
        if place not in self.held and place.cancel():
            return
        with self.lock:
            self.held.discard(place)
            while self.waiting and self.free > 0:
                first = self.waiting.popleft()
                if first.set_running_or_notify_cancel():
                    self.held.add(first)
                    first.set_result(None)

    def put(self, owner: object, call: Call, place: Place) -> RunFuture:
        """Queues a run at a place that was reserved; the thread ends when `owner` is gone."""
        future = RunFuture()
        try:
            with self.lock:
                if self.closed:
                    raise ClosedError("the compiled graph is closed, or the interpreter is about to exit")
                if self.thread is None:
                    thread = threading.Thread(target=self.work, name="rlx-queue", daemon=True)
                    try:
                        thread.start()
                    except RuntimeError as error:  # also while the interpreter shuts down
                        raise ExecutionError(
                            f"submit: no thread can be started for the queue ({error}); use run"
                        ) from error
                    self.thread = thread
                    weakref.finalize(owner, self.jobs.put, None).atexit = False
                self.open[future] = None
                self.jobs.put((future, call, place))
        except BaseException:  # of an interrupt nobody knows whether it came before or after the run was queued
            if future.cancel():  # else it has begun, and is waited for
                self.open.pop(future, None)
            raise
        return future

    def drain(self) -> None:
        """Waits until no run is left."""
        if self.thread is threading.current_thread():
            raise BusyError("a callback of a run can't wait for the runs behind it: wait in another thread")
        wait(list(self.open))

    def raise_failed(self) -> None:
        """Raises the first error that nobody has looked at, and forgets the others."""
        with self.lock:
            failed, self.failed = self.failed, []
        for future in failed:
            if not future.seen:
                future.result()

    def cancel(self) -> None:
        """Cancels the runs that have not begun."""
        for future in list(self.open):
            future.cancel()

    def close(self) -> None:
        """Takes no more runs, and ends the thread after those that are there."""
        with self.lock:
            self.closed, self.ask = True, None
            waiting, self.waiting = list(self.waiting), deque()
        for place in waiting:
            if place.set_running_or_notify_cancel():
                place.set_exception(ClosedError("the compiled graph was closed while a run waited for its place"))
        self.jobs.put(None)

    def join(self) -> None:
        """Waits until the thread has nothing more to do. (An interrupted `Thread.join` takes it to have ended.)"""
        if self.thread is not None and self.thread is not threading.current_thread():
            self.ended.wait()

    # ---- what the thread does

    def work(self) -> None:
        jobs = self.jobs
        while (job := jobs.get()) is not None:
            try:
                self.do(*job)
            except BaseException:  # noqa: BLE001  # of a callback; the runs behind it must go on
                log.exception("a callback of a submitted run raised")
            finally:
                self.open.pop(job[0], None)
            del job  # may hold the last reference to the graph
        self.ended.set()

    def do(self, future: RunFuture, call: Call, place: Place) -> None:
        if not future.set_running_or_notify_cancel():
            self.give_back(place)
            return
        try:
            made = self.unless_busy(call)
        except BaseException as error:  # noqa: BLE001  # goes to whoever asks the future
            self.give_back(place)  # first, for callbacks that submit
            with self.lock:
                unseen = [f for f in self.failed if not f.seen]
                self.failed = [*unseen[: FAILED - 1], future]
            future.set_exception(error)
            future.settled = True
            del future, call  # the traceback holds this frame
        else:
            self.give_back(place)
            future.set_result(made)
            future.settled = True

    def unless_busy(self, call: Call) -> list[Any]:
        """What the call gives, once no other thread has the graph. At exit that may be never: `BusyError` then."""
        delay, longest = BUSY_SECONDS
        while True:
            try:
                return call()
            except BusyError:
                if time.monotonic() > self.deadline:
                    raise
            time.sleep(delay)
            delay = min(2 * delay, longest)


_queues: weakref.WeakSet[RunQueue] = weakref.WeakSet()


def finish_all(cancels: bool | None = None) -> None:
    """At exit: no thread may be in a run when the interpreter goes."""
    if cancels is None:
        cancels = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    started = [queue for queue in _queues if queue.thread is not None]
    try:
        for queue in started:
            if cancels:
                queue.cancel()
            queue.deadline = time.monotonic() + EXIT_SECONDS
            queue.close()
        for queue in started:
            queue.join()
    except KeyboardInterrupt:
        if cancels:
            raise
        finish_all(cancels=True)


atexit.register(finish_all)
