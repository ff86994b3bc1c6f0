"""Runs that come again with arrays of the host: one graph of the driver brings inputs, launches and copies results.

Such a run asks the driver for one thing, and waits once. Its results stay where they are in the arena until the next
run, which first moves those that somebody still has (`Lent`). Where results of the run before were read by the host,
the graph copies them to pinned memory behind the launches, so that they are there when the run is done.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.array import Array
from rlx.backends.codegen.walked import Held
from rlx.backends.cuda.device.driver import driver
from rlx.backends.cuda.device.memory import MEMORY, SPACE, Lent, Reading
from rlx.backends.cuda.device.pinned import Pinned
from rlx.ir.graph import Array as HostArray
from rlx.kernels.program import Buffer

if TYPE_CHECKING:
    from rlx.backends.cuda.executable import Bound, CudaExecutable

__all__ = ["Repeat", "repeat_of"]

LINE = 256  # bytes that pieces of pinned memory, and inputs on the device, start at a multiple of
MOST = 16 << 20  # bytes of inputs, and of outputs, up to which pinned memory is kept for them


class Repeat:
    """The runs of an executable with arrays of the host, of the shapes and in the places that its last run had."""

    def __init__(self, executable: CudaExecutable, last: Bound) -> None:
        program = executable.program
        self.last, self.block, self.driver = last, executable.block, driver()
        self.inputs = [
            Held(None, 0, b.dtype, shape) for b, shape in zip(program.inputs, shapes_of(executable), strict=True)
        ]
        self.outputs = [Held(None, at, b.dtype, shape) for b, (at, shape) in outputs_of(executable, last)]
        pieces = [*self.inputs, *self.outputs]
        starts = [0, *accumulate(-(-piece.nbytes // LINE) * LINE for piece in pieces)]
        self.from_host = starts[len(self.inputs)]  # bytes of all inputs
        self.pinned = Pinned(starts[-1])
        views = [self.view(start, piece) for start, piece in zip(starts, pieces, strict=False)]
        self.staged, self.mirrors = views[: len(self.inputs)], views[len(self.inputs) :]
        for root in program.inputs:  # the memory that they had so far
            executable.places.pop(root, None)
            executable.brought.pop(root, None)
        self.own = MEMORY.allocate(self.from_host)
        for root, start, held in zip(program.inputs, starts, self.inputs, strict=False):
            held.block, held.address = self.own, self.own.address + start
            executable.brought[root] = executable.places[root] = held
        self.reading = Reading(True)
        self.graphs: dict[bool, Any] = {}  # without copies of the results, and with them
        self.lent: list[weakref.ref[Lent]] = []

    def view(self, start: int, held: Held) -> HostArray:
        """A piece of the pinned memory as an array."""
        return self.pinned.bytes[start : start + held.nbytes].view(held.dtype.numpy).reshape(held.shape)

    def serves(self, inputs: Sequence[Any]) -> bool:
        """Whether these are arrays as those that it was made for."""
        for a, staged in zip(inputs, self.staged, strict=True):
            if type(a) is not np.ndarray or a.shape != staged.shape or a.dtype != staged.dtype:
                return False
        return True

    def run(self, executable: CudaExecutable, inputs: Sequence[HostArray]) -> list[Array]:
        """One run, which is done afterwards: whether a check failed is the caller's to see."""
        self.take_back()
        for staged, array in zip(self.staged, inputs, strict=True):
            staged[...] = array
        wanted, self.reading = self.reading.done, Reading(False)
        graph = self.graphs.get(wanted)
        if graph is None:
            graph = self.graphs[wanted] = self.capture(executable, wanted)
        self.driver.launch_graph(graph)
        self.driver.synchronize()
        made = []
        for held, mirror in zip(self.outputs, self.mirrors, strict=True):
            lent = Lent(self.block, held.address, held.dtype, held.shape, self.reading)
            if wanted:
                lent.mirror, lent.pinned = mirror, self.pinned
            self.lent.append(weakref.ref(lent))
            made.append(SPACE.array(lent))
        return made

    def capture(self, executable: CudaExecutable, wanted: bool) -> Any:
        """The graph of a run, with the copies of its results if they are `wanted`."""
        executable.places |= zip(executable.program.inputs, self.inputs, strict=True)
        submit = executable.launches(executable.bind(self.last.extents), after_copy=True)
        device = self.driver
        device.begin_capture()
        try:
            if self.from_host:
                device.upload_pinned(self.own.address, self.pinned.address, self.from_host)
            submit()
            for held, mirror in zip(self.outputs, self.mirrors, strict=True):
                if wanted and mirror.nbytes:
                    device.download_pinned(int(mirror.ctypes.data), held.address, mirror.nbytes)
        finally:
            graph = device.end_capture()
        return graph

    def take_back(self) -> None:
        """Moves the results that somebody has out of the arena, which is about to be written."""
        for reference in self.lent:
            held = reference()
            if held is not None:
                held.settle()
        self.lent.clear()

    def __del__(self) -> None:
        for graph in getattr(self, "graphs", {}).values():
            self.driver.drop(graph=graph)


def repeat_of(executable: CudaExecutable, inputs: Sequence[Any]) -> Repeat | None:
    """How runs as the last one come again with inputs such as these; None where there is no such way."""
    program, last, shapes = executable.program, executable.last, shapes_of(executable)
    if last is None or last.words is None or not executable.code.straight or executable.code.options.debug:
        return None
    if any(type(a) is not np.ndarray for a in inputs):
        return None
    if any(b.base.kind != "arena" or b.is_packed for _, b in program.outputs):
        return None  # results from memory that lives between runs are copies
    if any(b.is_packed for b in program.inputs) or tuple(a.shape for a in inputs) != shapes:
        return None
    pieces = [Held(None, 0, b.dtype, shape) for b, shape in zip(program.inputs, shapes, strict=True)]
    results = [Held(None, 0, b.dtype, shape) for b, (_, shape) in outputs_of(executable, last)]
    if max(sum(held.nbytes for held in part) for part in (pieces, results)) > MOST:
        return None
    typed = all(a.dtype == held.dtype.numpy for a, held in zip(inputs, pieces, strict=True))
    return Repeat(executable, last) if typed else None


def shapes_of(executable: CudaExecutable) -> tuple[tuple[int, ...], ...]:
    """The shapes of the inputs of the last run."""
    return () if executable.bound_shapes is None else executable.bound_shapes[0]


def outputs_of(executable: CudaExecutable, last: Bound) -> list[tuple[Buffer, tuple[int, tuple[int, ...]]]]:
    """The outputs, with the addresses and shapes that they have in runs as the last one."""
    return [(b, executable.place(b, last.binding.extents)) for _, b in executable.program.outputs]
