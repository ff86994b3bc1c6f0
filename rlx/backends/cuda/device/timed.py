"""The time of each launch of a run: one graph of the driver with an event before each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cuda.device.driver import driver

__all__ = ["Timed"]


class Timed:
    """A graph of some launches, each of which waits for the one before."""

    def __init__(self, launches: Sequence[Callable[[], None]]) -> None:
        self.driver = device = driver()
        self.events = [device.event() for _ in range(len(launches) + 2)]
        device.begin_capture()
        try:
            device.mark(self.events[0])  # from which to the next one nothing lies between: the time of an event itself
            for event, launch in zip(self.events[1:], launches, strict=False):
                device.mark(event)
                launch()
            device.mark(self.events[-1])
        finally:
            self.graph = device.end_capture()

    def run(self) -> list[float]:
        """Does it once, and gives the seconds of each launch."""
        self.driver.launch_graph(self.graph)
        self.driver.synchronize()
        itself, *found = (self.driver.between(a, b) for a, b in zip(self.events, self.events[1:], strict=False))
        return [max(seconds - itself, seconds / 4) for seconds in found]

    def __del__(self) -> None:
        for event in getattr(self, "events", ()):
            self.driver.drop(event=event)
        if hasattr(self, "graph"):
            self.driver.drop(graph=self.graph)
