"""An executable whose host walks the table of phases, over a device's memory: params, states, runs and profiles.

A device says how its memory is reached (`DeviceBytes`), how an input is brought there and how a phase is launched.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol, Self

import numpy as np

from rlx.arithmetic import usual_arithmetic
from rlx.backends.array import Array, MemorySpace, Tensor
from rlx.backends.codegen.arguments import KernelCode
from rlx.backends.codegen.binding import Binding, Overrun, grows, initial, room_for, settable
from rlx.backends.codegen.control import next_phase
from rlx.backends.codegen.packing import Packing
from rlx.backends.codegen.table import Phase, Table, phases_of
from rlx.backends.states import StatefulExecutable
from rlx.backends.timing import KernelTime, Timer, kernel_times
from rlx.errors import ExecutionError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES, DType, pack, unpack
from rlx.ir.extents import bind_extents, check_guards, check_out
from rlx.ir.graph import Array as HostArray
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim, Size, evaluate
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.options import CompileOptions
from rlx.plan import plan as planning
from rlx.plan.arena import MemoryPlan
from rlx.records import dataclass

__all__ = ["Block", "DeviceBytes", "Held", "WalkedCode", "WalkedExecutable", "sizes", "stored"]

BYTE = DTYPES["u8"]
POISON = 0xFF  # every byte of the arena before a run in debug mode: floats are NaN


class Block(Protocol):
    """Bytes of the device that belong to who has this object."""

    @property
    def address(self) -> int: ...


class DeviceBytes(Protocol):
    """The memory of a device as bytes at addresses."""

    def allocate(self, count: int) -> Block: ...

    def read(self, address: int, count: int) -> HostArray:
        """A copy of some bytes, once all that was launched is done."""

    def write(self, address: int, array: HostArray) -> None:
        """Copies the bytes of an array of the host to an address."""

    def fill(self, address: int, count: int, byte: int) -> None: ...


@dataclass(eq=False)
class Held:
    """Elements in the memory of the device, one after the other; those of 4 bits have a byte each.

    `block` is the memory that they lie in, from `address` on.
    """

    block: Any
    address: int
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.numpy.itemsize


def sizes(shape: Sequence[Size], extents: Mapping[str, int]) -> tuple[int, ...]:
    """The numbers that the sizes of a shape are."""
    return tuple(evaluate(s, extents) for s in shape)


class WalkedCode(ABC):
    """What a compiled graph and its clones share: the functions, the tables of phases, and how memory is planned."""

    def __init__(self, graph: Graph, program: Program, options: CompileOptions) -> None:
        self.graph, self.program, self.options = graph, program, options
        self.functions: dict[str, Any] = {}  # symbol -> what a phase of that code is launched by
        prepare, _ = phases_of(program.prepare, self.emit)
        run, marks = phases_of(program.run, self.emit)
        self.symbols = dict.fromkeys(self.functions, 0)
        self.prepare, self.table = Table(prepare, self.symbols), Table(run, self.symbols, marks)
        self.packing = Packing(program, [phase.kernel for phase in prepare])
        self.settable = settable(graph, program)
        self.schedule = planning.schedule(program)
        self.plan = None if self.schedule.bounds is None else self.make_plan(self.schedule.bounds, {})

    def emit(self, kernel: Kernel) -> Sequence[Any]:
        """The code of a kernel; a mark has none, since the host walks the table."""
        if kernel.mark is not None:
            return [None] if kernel.mark.part != "end" else []
        return self.codes(kernel)

    @abstractmethod
    def codes(self, kernel: Kernel) -> Sequence[KernelCode]:
        """The code of a kernel that is launched; `functions` then has its symbols."""

    def make_plan(self, extents: Mapping[str, int], spread: Mapping[str, Any]) -> MemoryPlan:
        o = self.options
        return planning.make_plan(
            self.schedule, extents, alignment=o.alignment, reuse=o.reuse, search=o.search, spread=spread or None
        )


class WalkedExecutable(StatefulExecutable[Tensor], ABC):
    """Runs the phases of a program one by one, on arrays of the device and, by copies, on NumPy's.

    What runs give lies on the device. Inputs, params and states that lie there already are copied there.
    """

    capabilities = frozenset({"arena", "clone", "dynamic", "out", "profile", "slots", "states"})

    program: Program

    def __init__(self, code: WalkedCode) -> None:
        super().__init__()
        self.code, self.graph, self.program = code, code.graph, code.program
        self.plan = code.plan
        self.places: dict[Buffer, Held] = {}  # root buffers that live between runs, and the inputs of one
        self.block: Block = self.memory.allocate(0)  # the arena
        self.size = 0
        self.stale = set(range(len(code.prepare.phases)))  # phases of `prepare` that have to run
        self.own_packed: set[Buffer] = set()  # what they have made that no clone reads
        self.room: dict[str, int] = {}
        self.dims: dict[str, int] = {}
        # the shapes of the inputs of the last run, and the extents that they gave
        self.bound_shapes: tuple[tuple[tuple[int, ...], ...], dict[str, int]] | None = None
        self.outputs: list[Tensor | None] | None = None
        self.spent: list[float] | None = None  # seconds of each phase, while a profile is made

    def load(self) -> None:
        """Takes in the constants, params and states that the graph declares."""
        for root in (*self.program.constants, *self.program.states):
            self.put(root, initial(root))
        self.take_params({value.name: value.data for value in self.graph.params if value.data is not None})

    # ---- the device

    @property
    @abstractmethod
    def memory(self) -> DeviceBytes: ...

    @property
    @abstractmethod
    def space(self) -> MemorySpace: ...

    @abstractmethod
    def another(self) -> Self:
        """An executable of the same code, without params and states."""

    @abstractmethod
    def bring(self, root: Buffer, array: Tensor) -> None:
        """Has an input for a run: where it is if it lies on the device, else as a copy."""

    @abstractmethod
    def launch(self, binding: Binding, number: int, phase: Phase) -> None:
        """Submits the chunks of a kernel; it need not be done when this returns."""

    @abstractmethod
    def wait(self) -> None:
        """Waits for all that was submitted; raises what stopped it."""

    def finish(self) -> None:
        """Waits for what `walk` has left to be waited for, if it does; raises what stopped it."""

    def clear(self) -> None:
        """Forgets what was submitted and did not run."""

    @property
    def listing(self) -> Mapping[Kernel, str]:
        texts: dict[Kernel, str] = {}
        for phase in (*self.code.prepare.phases, *self.code.table.phases):
            if phase.code is not None:
                texts[phase.kernel] = "\n".join(filter(None, (texts.get(phase.kernel), phase.code.ir)))
        return texts

    # ---- memory

    def adopt(self, value: Any) -> Array | None:
        return self.space.local(value)

    def own(self, array: Tensor) -> Array:
        return array.copy() if isinstance(array, Array) else self.space.array(self.space.put(np.asarray(array)))

    def put(self, root: Buffer, array: Tensor) -> None:
        """Copies an array to memory of the device that a buffer has for itself, and has between runs."""
        if root.is_packed or root.encoding is not None:  # then it holds bytes, which the host makes
            array = stored(root, np.asarray(array))
        self.places[root] = self.own(array).held

    def address(self, root: Buffer) -> int:
        """Where a root buffer lies."""
        if root.kind == "arena":
            assert self.plan is not None
            return self.block.address + self.plan.offsets[root]
        if root not in self.places:  # one that `prepare` makes, or an input that no run has brought
            assert root.kind not in ("param", "const", "state"), root
            count = 0 if root.kind == "input" else root.nbytes({})
            block = self.memory.allocate(count)
            self.places[root] = Held(block, block.address, BYTE, (count,))
        return self.places[root].address

    def place(self, buffer: Buffer, extents: Mapping[str, int]) -> tuple[int, tuple[int, ...]]:
        """The address and the shape of a buffer or view."""
        return self.address(buffer.base) + evaluate(buffer.offset, extents), sizes(buffer.shape, extents)

    def view(self, buffer: Buffer, extents: Mapping[str, int]) -> Array:
        """A buffer that is not packed, as an array where it lies."""
        address, shape = self.place(buffer, extents)
        block = self.block if buffer.base.kind == "arena" else self.places[buffer.base].block
        return self.space.array(Held(block, address, buffer.dtype, shape))

    def fetch(self, buffer: Buffer, extents: Mapping[str, int]) -> HostArray:
        """A copy of a buffer for the host, once all that was submitted is done."""
        self.wait()
        address, shape = self.place(buffer, extents)
        if buffer.is_packed:
            return unpack(self.memory.read(address, buffer.nbytes(dict(extents))), buffer.dtype, shape)
        dtype = buffer.dtype.numpy
        return self.memory.read(address, math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def reader(self, buffer: Buffer, extents: Mapping[str, int]) -> Callable[[], HostArray]:
        return lambda: self.fetch(buffer, extents)

    def writer(self, buffer: Buffer, extents: Mapping[str, int]) -> Callable[[HostArray], None]:
        return lambda made: self.memory.write(self.place(buffer, extents)[0], stored(buffer, made))

    @property
    def arena(self) -> Array:
        return self.space.array(Held(self.block, self.block.address, BYTE, (self.size,)))

    def trim(self) -> None:
        self.outputs, self.block, self.size = None, self.memory.allocate(0), 0
        for root in self.program.inputs:
            self.places.pop(root, None)

    def dispose(self) -> None:
        self.places.clear()
        self.kept.clear()
        self.trim()

    def clone(self, fresh: bool = False) -> Self:
        with self.taken():
            made = self.another()
            made.places |= {b: at for b, at in self.places.items() if b.kind in ("param", "const", "prepared")}
            made.stale = set(self.stale)
            self.own_packed.clear()
            for root in self.program.states:
                made.put(root, initial(root) if fresh else self.space.array(self.places[root]))
            if not fresh:
                made.kept, made.fed = dict(self.kept), dict(self.fed)
                made.room, made.dims = dict(self.room), dict(self.dims)
            return made

    # ---- params and states

    def param(self, name: str) -> Buffer:
        return next(b for b in self.program.params if b.name == name)

    def set_params(self, arrays: Mapping[str, Tensor]) -> None:
        with self.taken():
            self.take_params(arrays)

    def take_params(self, arrays: Mapping[str, Tensor]) -> None:
        """Brings params and, in steps, makes of them what runs read: memory never holds both forms of all weights."""
        packing, asked = self.code.packing, [root for root in self.program.params if root.name in arrays]
        before, absent, brought = set(self.stale), set(asked), 0
        never = {root for root in self.program.params if root not in self.places} - absent
        self.stale |= packing.outdated(absent)
        try:
            for root in asked:
                self.put(root, arrays[root.name])
                absent.discard(root)
                brought += self.places[root].nbytes
                if brought >= packing.step:
                    self.prepare(absent | never)
                    brought = 0
        except BaseException:  # those that did not come are what they were
            self.stale -= packing.outdated(absent) - packing.outdated(set(asked) - absent) - before
            raise

    def raw_param(self, name: str) -> Array | None:
        root = self.param(name)
        if root not in self.places:
            return None
        if root.is_packed:
            return self.space.array(self.space.put(self.fetch(root, {})))
        return self.space.array(self.places[root]).copy()

    def state(self, name: str) -> Buffer:
        return next(b for b in self.program.states if b.name == name)

    def get_declared(self, name: str) -> Array:
        root = self.state(name)
        return self.space.array(self.places[root]).copy() if root.encoding is not None else self.view(root, {}).copy()

    def set_declared(self, name: str, array: Tensor | None) -> None:
        root = self.state(name)
        self.put(root, initial(root) if array is None else array)

    def set_extent(self, dim: str, extent: int | None) -> None:
        if dim not in self.code.settable:
            raise OptionError(f"set_extent: the dim {dim!r} is decided by the data of each run")
        self.dims.pop(dim, None)
        self.bound_shapes = None
        if extent is not None:
            self.dims[dim] = extent

    # ---- runs

    @property
    def results(self) -> Sequence[Tensor | None] | None:
        return self.outputs

    @property
    def slots(self) -> Callable[..., Any]:
        return self.serving(self._slots)

    def _slots(self, arrays: tuple[Any, ...]) -> Any:
        admitted = self.admit(arrays)
        with self.taken():
            made = self.run_all(admitted)
            self.finish()
            self.outputs = list(made)
            return self.wrap(tuple(made))

    def run(self, inputs: Sequence[Tensor], out: Sequence[Tensor | None], wanted: Sequence[int]) -> list[Tensor]:
        with self.taken():
            made: list[Tensor] = [array.copy() for array in self.run_all(inputs, out)]
            self.finish()
            for number, target in enumerate(out):
                if target is not None:
                    np.copyto(np.asarray(target), np.asarray(made[number]))
                    made[number] = target
            self.outputs = [a if out[n] is not None or n in wanted else None for n, a in enumerate(made)]
        return [made[n] for n in wanted]

    @usual_arithmetic()
    def run_all(self, inputs: Sequence[Tensor], out: Sequence[Tensor | None] = ()) -> list[Array]:
        """All outputs where the run has left them. The shapes of `out` are checked before anything is changed."""
        self.outputs = None
        shapes = tuple(a.shape for a in inputs)
        if self.bound_shapes is None or self.bound_shapes[0] != shapes:
            self.bound_shapes = shapes, self.extents_of(shapes)
        extents = self.bound_shapes[1]
        check_out(self.graph, extents, out or [None] * len(self.graph.outputs))
        for root, array in zip(self.program.inputs, inputs, strict=True):
            self.bring(root, array)
        if self.stale:
            self.prepare()
        before = {root: self.fetch(root, {}) for root in self.program.states} if grows(self.program) else {}
        while True:
            binding = self.bind(extents)
            try:
                self.walk(binding)
                break
            except Overrun as overrun:  # again, with more room
                for root, array in before.items():
                    self.writer(root, {})(array)
                self.room[overrun.name] = max(overrun.value, 2 * binding.room[overrun.name])
        self.settle(binding.extents)
        made = [self.view(buffer, binding.extents) for _, buffer in self.program.outputs]
        for output, target, array in zip(self.graph.outputs, out, made, strict=False):
            if target is not None and target.shape != array.shape:
                raise ShapeError(f"out for {output.name!r}: this run gave shape {array.shape}, got {target.shape}")
        self.put_fed(made)
        return made

    def extents_of(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """What the shapes of inputs, and `set_extent`, say of the dims; guards hold."""
        named = {b.name: shape for b, shape in zip(self.program.inputs, shapes, strict=True)}
        extents = {**self.dims, **bind_extents(self.graph, named)}
        unset = [name for name in self.code.settable if name not in extents]
        if unset:
            raise ShapeError(f"the extent of dim {unset[0]!r} is not known: give it to set_extent")
        check_guards(self.graph, extents)
        return extents

    def prepare(self, absent: Set[Buffer] = frozenset()) -> None:
        """Makes what depends on params that have changed, and none of which is `absent`; drops what it is made of.

        It is made in memory of its own: clones may still use what there was.
        """
        packing = self.code.packing
        ready = packing.ready(self.stale, absent)
        for root in {root for number in ready for root in packing.reads[number] if root.kind == "const"}:
            if root not in self.places:
                self.put(root, initial(root))
        for root in {
            root for number in ready for root in packing.writes[number]
        } & self.places.keys() - self.own_packed:
            if packing.writers[root] > 1:  # of which some may not run again
                self.places[root] = self.space.copy(self.places[root])
            else:
                del self.places[root]
        phases = self.code.prepare.phases
        parts = [phases[number] for number in ready]
        table = self.code.prepare if len(parts) == len(phases) else Table(parts, self.code.symbols)
        self.walk(Binding(table, {}, self.address, 0, self))
        self.own_packed.update(root for number in ready for root in packing.writes[number])
        self.stale.difference_update(ready)
        for root in packing.spent(self.stale, self.places):
            del self.places[root]

    def bind(self, extents: Mapping[str, int]) -> Binding:
        """The words for these extents, with a plan and an arena that they fit into."""
        room = room_for(self.program, extents, self.room)
        if self.code.schedule.bounds is None:
            spread = {name: Dim(name, 0, most) for name, most in room.items()}
            self.plan = self.code.make_plan({**extents, **room}, spread)
        assert self.plan is not None
        if self.plan.arena > self.size:
            self.reserve({**extents, **room}, self.plan.arena - self.size)
            self.block, self.size = self.memory.allocate(self.plan.arena), self.plan.arena
        if self.code.options.debug:
            self.memory.fill(self.block.address, self.size, POISON)
        return Binding(self.code.table, extents, self.address, 0, self, room=room, dims=self.program.dims)

    def walk(self, binding: Binding) -> None:
        """Launches the phases, as control flow has it, and waits for the last."""
        number, phases = 0, binding.table.phases
        try:
            while number < len(phases):
                kernel = phases[number].kernel
                if kernel.mark is not None:
                    number = next_phase(binding, number, kernel.mark, lambda b: self.holds(b, binding), kernel.label)
                    continue
                self.perform(binding, number, phases[number])
                number += 1
            self.wait()
        finally:
            self.clear()

    def holds(self, test: Buffer, binding: Binding) -> bool:
        return bool(self.fetch(test, binding.extents))

    def perform(self, binding: Binding, number: int, phase: Phase) -> None:
        """Launches a kernel; a host call is made once the device is done."""
        if phase.code is not None:
            self.launch(binding, number, phase)
        elif binding.host_chunks(phase.kernel):
            self.host_call(binding, number, phase.kernel)

    def host_call(self, binding: Binding, number: int, kernel: Kernel) -> None:
        self.wait()
        start = time.perf_counter()
        try:
            with np.errstate(all="ignore"):
                binding.host_call(number, kernel)()
        except ExecutionError as error:
            if str(error).startswith("node ") or not kernel.nodes:
                raise
            raise ExecutionError(f"node {kernel.label}: {error}") from error
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            what = f"its host call raised {type(error).__name__}: {error}"
            raise ExecutionError(f"node {kernel.label}: {what}") from error
        self.note(number, start)

    # ---- profiles

    def note(self, number: int, start: float) -> None:
        """Adds what a phase has taken since `start` to a profile."""
        if self.spent is not None:
            self.spent[number] += time.perf_counter() - start

    @property
    def profiled(self) -> Sequence[Kernel]:
        return [phase.kernel for phase in self.code.table.phases]

    def profile(self, inputs: Sequence[Tensor], repeat: int) -> list[KernelTime]:
        kernels = self.profiled
        with self.taken():
            states, kept = {root: self.places[root] for root in self.program.states}, dict(self.kept)

            if self.stale:
                self.prepare()

            def once() -> tuple[list[float], list[float]]:
                self.places |= {root: self.space.copy(held) for root, held in states.items()}
                self.spent = spent = [0.0] * len(kernels)
                self.run_all(inputs)
                return spent, [0.0] * len(kernels)  # a queue's thread has a clock of its own: not known

            timer = Timer(repeat)
            try:
                once()
                timer.run(once)
            finally:
                self.spent, self.kept = None, kept
                self.places |= states
        return kernel_times(timer, [k.how for k in kernels], [f"{k.name} [{k.label}]" for k in kernels])


def stored(root: Buffer, array: HostArray) -> HostArray:
    """The array that a buffer holds: bytes where it is packed or encoded."""
    if root.is_packed:
        return pack(array)
    return array if root.encoding is None else array.reshape(-1)
