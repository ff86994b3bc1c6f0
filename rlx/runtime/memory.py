"""The memory of a compiled graph: predicted against measured, and the ways to give it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from rlx.backends.base import Executable
from rlx.boundary import bounded_class
from rlx.errors import ClosedError, ExecutionError
from rlx.estimate.resident import peak_bytes, resident_bytes
from rlx.estimate.stored import StoredAdmission
from rlx.estimate.system import COMPILED, RESTORED
from rlx.heap import give_back_heap
from rlx.records import dataclass
from rlx.runtime.queued import Queued

if TYPE_CHECKING:
    from rlx.compiler import Compilation
    from rlx.estimate.admit import Admission
    from rlx.estimate.memory import MemoryEstimate
    from rlx.runtime.restore import StoredCompilation
    from rlx.runtime.writing import Writer

__all__ = ["Closed", "Lifetime", "ModelMemory", "Resident", "give_back"]


@dataclass(frozen=True)
class Resident:
    """This process's resident set and its peak so far, in bytes."""

    now: int
    peak: int

    @staticmethod
    def read() -> Resident:
        """The figures now."""
        return Resident(resident_bytes(), peak_bytes())


class ModelMemory:
    """What a model takes in memory: predicted when it was compiled, measured around its first run.

    `measured` is how far the peak of the resident set rose from before loading, with the device's compiler in the
    process, to after the first run, in bytes; where the process had been larger before, so that this can't be seen,
    what the resident set itself has grown by. It is None before a run. `residual` is predicted less measured.
    """

    def __init__(self, admission: Admission | StoredAdmission, before: Resident) -> None:
        self._admission = admission
        self._before = before
        self._stored = isinstance(admission, StoredAdmission)
        brought = RESTORED if self._stored else COMPILED
        brought.add(admission.backend.name)
        self._extents: Mapping[str, int] | None = None
        self._offloaded = 0  # bytes of experts that are not resident
        self.measured: int | None = None
        self.is_peak = False

    @property
    def _careful(self) -> Admission:
        """What asks, in the form that knows every part."""
        return self._admission.careful if isinstance(self._admission, StoredAdmission) else self._admission

    @property
    def predicted(self) -> MemoryEstimate | None:
        """The estimate at the sizes that the arena is planned for; None for a graph that was compiled elsewhere."""
        made = self._admission.predicted(self._extents)
        return made if made is None or not self._offloaded else made.without_experts(self._offloaded)

    def with_offloaded(self, nbytes: int) -> ModelMemory:
        """The same for a model, or clone, with that many bytes of its experts not resident."""
        from copy import copy

        made = copy(self)
        made._offloaded = nbytes
        return made

    def admit_experts(self, more: int) -> None:
        """Asks whether that many bytes of experts more may be resident; raises `MemoryDeficit`."""
        self._careful.experts(self._extents, self._offloaded, more)

    @property
    def parts(self) -> dict[str, int]:
        """The predicted parts in bytes, without what the device takes by itself."""
        made = self.predicted
        return {} if made is None else {name: size for name, size in made.parts.items() if name != "overhead"}

    @property
    def predicted_bytes(self) -> int | None:
        """What the resident set is predicted to grow by: the largest peak, with pages of the file that loading reads.

        What the device takes by itself counts as far as compiling the graph brings it into the process.
        """
        made = self.predicted
        if made is None:
            return None
        if self._stored:
            return made.own.cached_peak_bytes
        own, brought = made.own, self._careful.overhead
        after = max(own.loading_peak_bytes, own.running_peak_bytes) - brought.passing
        compiling = own.compiling_peak_bytes + made.compiler_bytes - brought.passing
        left = made.overhead_bytes - brought.stays
        return max(after, compiling) + left + made.file_bytes + brought.compiling

    @property
    def residual(self) -> int | None:
        """Predicted less measured bytes, None before the first run."""
        predicted = self.predicted_bytes
        return None if predicted is None or self.measured is None else predicted - self.measured

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What the process grows by meanwhile isn't measured as the model's."""
        start = Resident.read()
        yield
        now = Resident.read()
        self._before = Resident(self._before.now + max(0, now.now - start.now), max(self._before.peak, now.peak))

    def planned(self, extents: Mapping[str, int] | None) -> None:
        """Takes note of the sizes that the arena is planned for."""
        self._extents = extents

    def reserve(self, extents: Mapping[str, int], nbytes: int) -> None:
        """Asks whether the arena may grow by that much; raises `MemoryDeficit`."""
        self._admission.room(extents, nbytes)

    def snapshots(self, nbytes: int) -> None:
        """Asks whether a queue of runs may hold that many bytes of inputs; raises `MemoryDeficit`."""
        self._careful.snapshots(self._extents, nbytes)

    def settle(self, extents: Mapping[str, int]) -> None:
        """Measures, once: after the first run."""
        self._extents = extents
        if self.measured is not None:
            return
        after = Resident.read()
        self.is_peak = after.peak > self._before.peak
        self.measured = max(0, (after.peak if self.is_peak else after.now) - self._before.now)

    def past(self) -> ModelMemory:
        """The same figures without the graph, for when it is closed."""
        from copy import copy

        from rlx.estimate.admit import PastAdmission

        made = copy(self)
        made._admission = PastAdmission(self._careful, self._extents)
        return made

    def figures(self) -> dict[str, int]:
        """The sizes that are stored with the code."""
        from rlx.estimate.admit import figures_of

        return figures_of(self._careful)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "parts": self.parts,
            "predicted_bytes": self.predicted_bytes,
            "measured_bytes": self.measured,
            "measured": "peak" if self.is_peak else "at the end",
            "residual_bytes": self.residual,
        }

    def __str__(self) -> str:
        from rlx.units import bytes_text

        lines = [f"{name:11} {bytes_text(size):>12}" for name, size in self.parts.items()]
        for name, size in (("predicted", self.predicted_bytes), ("measured", self.measured)):
            lines.append(f"{name:11} {bytes_text(size):>12}")
        if self.residual is not None:
            lines.append(f"{'residual':11} {bytes_text(self.residual):>12}")
        return "\n".join(lines)


class Closed:
    """Stands for what a closed graph had: whatever is asked of it raises `ClosedError`."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ClosedError("the compiled graph is closed: load or compile it again, or keep a clone open")

    def refuse(self, *args: Any, **named: Any) -> NoReturn:
        """A call of it."""
        self.__getattr__("")


@bounded_class(ExecutionError)
class Lifetime(Queued):
    """Closing and trimming, for a compiled graph; it is a context manager that closes at the end of the block."""

    memory: ModelMemory | None
    run_slots: Callable[..., Any]
    decide: Callable[[], Any] | None
    holding: object = None  # what keeps its weights in a registry; clones have it in common
    _writer: Writer | None = None  # of its entry in the cache; clones have it in common
    _executable: Executable[Any]
    _compilation: Compilation | StoredCompilation

    def close(self) -> None:
        """Gives back arena and bindings, and with the last clone the weights; later calls raise `ClosedError`.

        What `memory` predicted and measured can still be read. Closing again does nothing. Runs that were submitted
        are finished first. Views of outputs that are still held keep their own memory until they are dropped. Raises
        `BusyError` while it runs in another thread.
        """
        if self.closed:
            return
        if self._writer is not None:
            self._writer.finish()  # it has the weights
        closed: Any = Closed()
        self._queue.drain()
        self._executable.dispose()
        self._queue.close()
        self._executable.admit = closed.refuse
        self._executable = self._compilation = closed
        self.run_slots = self.decide = closed.refuse  # what decides on a device holds the graph and so its weights
        if (exact := self.__dict__.pop("_own_exact", None)) is not None:
            exact.close()
        self.holding = None
        if self.memory is not None:
            self.memory = self.memory.past()  # clones go on with theirs
        give_back()

    def trim(self) -> int:
        """Gives memory that no later run needs as it is back to the system: the arena, bindings, and what was freed.

        The next run takes what it needs anew. Returns the bytes by which the resident set shrank. Raises `BusyError`
        while it runs in another thread.
        """
        before = resident_bytes()
        self._executable.trim()
        give_back()
        return max(0, before - resident_bytes())

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return isinstance(self._executable, Closed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._queue.cancel()
        self.close()


def give_back() -> None:
    """Collects garbage and has the C allocator hand free memory to the system, where it can."""
    import gc

    gc.collect()
    give_back_heap()
