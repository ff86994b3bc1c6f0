"""Jobs on several cores, begun while more of them are made."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable

__all__ = ["Crew"]

Job = Callable[[], object]


class Crew:
    """Threads that do jobs, the largest first, while the caller makes more; who waits for the end does jobs too.

    Threads live only as long as there may be jobs: a process that forks later has none. The first error that a job
    raises is raised by `finish`; the jobs that have not begun are dropped then.
    """

    def __init__(self, threads: int) -> None:
        self.most = threads - 1  # beside the caller
        self.jobs: list[tuple[int, int, Job]] = []
        self.added = 0
        self.idle = 0
        self.closed = False
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.threads: list[threading.Thread] = []

    def add(self, size: int, job: Job) -> None:
        """Has a job done; `size` tells how long it takes beside others."""
        with self.changed:
            heapq.heappush(self.jobs, (-size, self.added, job))
            self.added += 1
            self.changed.notify()
            if len(self.threads) < self.most and self.idle < len(self.jobs):
                thread = threading.Thread(target=self.work, name="rlx compiler", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no more of them: those that there are do it, or `finish`
                    self.most = len(self.threads)
                    return
                self.threads.append(thread)

    def work(self, told: Callable[[float], None] | None = None) -> None:
        """Does jobs until there are no more and none will come; `told` hears after each what part has been begun."""
        while (job := self.next()) is not None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001  # it is raised where somebody waits
                with self.changed:
                    self.error = self.error or error
                    self.jobs.clear()
            if told is not None:
                told(1 - len(self.jobs) / self.added)

    def next(self) -> Job | None:
        """The next job; waits for one."""
        with self.changed:
            self.idle += 1
            self.changed.wait_for(lambda: self.jobs or self.closed)
            self.idle -= 1
            return heapq.heappop(self.jobs)[2] if self.jobs else None

    def finish(self, told: Callable[[float], None] | None = None) -> None:
        """Waits until all is done."""
        self.close()
        self.work(told)
        self.join()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Drops what has not begun."""
        with self.changed:
            self.jobs.clear()
        self.close()
        self.join()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def join(self) -> None:
        for thread in self.threads:
            thread.join()
