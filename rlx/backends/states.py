"""The calls on states and kept inputs, for devices whose runs take all of these as arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rlx.backends.base import A, Executable, Turns

__all__ = ["StatefulExecutable"]


class StatefulExecutable(Executable[A], ABC):
    """An executable that keeps inputs between runs and feeds outputs to states; one thread at a time is in it.

    The device says how an array is copied (`own`), and where declared states are (`get_declared`, `set_declared`).
    """

    def __init__(self) -> None:
        self.turns = Turns()
        self.kept: dict[str, tuple[A, A]] = {}  # inputs that are kept between runs: their first and present value
        self.fed: dict[str, int] = {}  # states that an output is fed to, with its number

    @abstractmethod
    def own(self, array: A) -> A:
        """The elements in memory that nobody else has; nothing writes there as long as the result is used."""

    @abstractmethod
    def get_declared(self, name: str) -> A:
        """A copy of a declared state."""

    @abstractmethod
    def set_declared(self, name: str, array: A | None) -> None:
        """Copies an array to a declared state; None: its initial value."""

    def session(self) -> AbstractContextManager[object]:
        """What the device's memory is used in."""
        return nullcontext()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Has the executable for the block; see `Turns.taken`."""
        with self.turns.taken(self.waits), self.session():
            yield

    @property
    def bound_inputs(self) -> Mapping[str, A]:
        return {name: present for name, (_, present) in self.kept.items()}

    @property
    def feeds(self) -> Mapping[str, int]:
        return self.fed

    def read_state(self, name: str) -> A:
        with self.taken():
            return self.own(self.kept[name][1]) if name in self.kept else self.get_declared(name)

    def write_state(self, name: str, array: A | None) -> None:
        with self.taken():
            self.put_state(name, array)

    def put_state(self, name: str, array: A | None) -> None:
        """Sets a state; None: to its initial value."""
        if name not in self.kept:
            self.set_declared(name, array)
            return
        first = self.kept[name][0]
        self.kept[name] = first, first if array is None else self.own(array)

    def put_fed(self, outputs: Sequence[A]) -> None:
        """Makes outputs of a run that succeeded the new values of the states that they are fed to."""
        for name, number in self.fed.items():
            self.put_state(name, outputs[number])

    def keep_input(self, name: str, array: A | None) -> None:
        with self.taken():
            first = None if array is None else self.own(array)
            self.kept.pop(name, None)
            self.fed.pop(name, None)
            if first is not None:
                self.kept[name] = first, first

    def feed_state(self, name: str, output: int | None) -> None:
        with self.taken():
            self.fed.pop(name, None)
            if output is not None:
                self.fed[name] = output
