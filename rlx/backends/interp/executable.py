"""A compiled graph on the interpreter: its memory, the walk over the table of phases, and the calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.arithmetic import usual_arithmetic
from rlx.backends.array import Array, Tensor
from rlx.backends.codegen.binding import Binding, Overrun, grows, initial, room_for, settable
from rlx.backends.codegen.control import next_phase
from rlx.backends.codegen.table import Phase, Table, phases_of
from rlx.backends.interp.anchors import sizes
from rlx.backends.interp.kernels import Function, code_of
from rlx.backends.interp.memory import DEVICE_MEMORY, HOST_MEMORY, SPACE, Held, Queues
from rlx.backends.states import StatefulExecutable
from rlx.backends.timing import KernelTime, Timer, kernel_times
from rlx.boundary import bounded
from rlx.errors import ExecutionError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES, pack, unpack
from rlx.ir.extents import bind_extents, check_guards, check_out
from rlx.ir.graph import Array as HostArray
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim, evaluate
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.options import CompileOptions
from rlx.plan import plan as planning
from rlx.plan.arena import MemoryPlan

__all__ = ["Code", "InterpExecutable"]

BYTE = DTYPES["u8"]
POISON = 0xFF  # every byte of the arena before a run in debug mode: floats are NaN


class Code:
    """What a compiled graph and its clones share: the functions, the tables of phases, and how memory is planned."""

    def __init__(self, graph: Graph, program: Program, options: CompileOptions) -> None:
        self.graph, self.program, self.options = graph, program, options
        self.functions: dict[str, Function] = {}
        prepare, _ = phases_of(program.prepare, self.emit)
        run, marks = phases_of(program.run, self.emit)
        symbols = dict.fromkeys(self.functions, 0)
        self.prepare, self.table = Table(prepare, symbols), Table(run, symbols, marks)
        self.schedule = planning.schedule(program)
        self.plan = None if self.schedule.bounds is None else self.make_plan(self.schedule.bounds, {})

    def emit(self, kernel: Kernel) -> Sequence[Any]:
        """The code of a kernel; a mark has none, since the host walks the table."""
        if kernel.mark is not None:
            return [None] if kernel.mark.part != "end" else []
        made = []
        for number, function in enumerate(code_of(kernel), len(self.functions)):
            made.append(function.code(f"k{number}"))
            self.functions[made[-1].symbol] = function
        return made

    def make_plan(self, extents: Mapping[str, int], spread: Mapping[str, Any]) -> MemoryPlan:
        o = self.options
        return planning.make_plan(
            self.schedule, extents, alignment=o.alignment, reuse=o.reuse, search=o.search, spread=spread or None
        )


class InterpExecutable(StatefulExecutable[Tensor]):
    """Runs the phases of a program one by one, on arrays of the device and, by copies, on NumPy's.

    What runs give lies on the device. Inputs, params and states that lie there already are copied there.
    """

    capabilities = frozenset({"arena", "clone", "dynamic", "out", "profile", "slots", "states"})

    program: Program

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code, self.graph, self.program = code, code.graph, code.program
        self.queues, self.plan = Queues(), code.plan
        self.places: dict[Buffer, Held] = {}  # root buffers that live between runs, and the inputs of one
        self.block = DEVICE_MEMORY.allocate(0)  # the arena
        self.size = 0
        self.dirty = True  # params have changed since `prepare` ran
        self.room: dict[str, int] = {}
        self.dims: dict[str, int] = {}
        self.outputs: list[Tensor | None] | None = None
        self.spent: list[float] | None = None  # seconds of each phase, while a profile is made

    @staticmethod
    def of(code: Code) -> InterpExecutable:
        """One with the constants, params and states that the graph declares."""
        made = InterpExecutable(code)
        for root in (*code.program.constants, *code.program.states):
            made.put(root, initial(root))
        for value in code.graph.params:
            if value.data is not None:
                made.put(made.param(value.name), value.data)
        return made

    @property
    def listing(self) -> Mapping[Kernel, str]:
        texts: dict[Kernel, str] = {}
        for phase in (*self.code.prepare.phases, *self.code.table.phases):
            if phase.code is not None:
                texts[phase.kernel] = "\n".join(filter(None, (texts.get(phase.kernel), phase.code.ir)))
        return texts

    # ---- memory

    def adopt(self, value: Any) -> Array | None:
        return SPACE.local(value)

    def own(self, array: Tensor) -> Array:
        return array.copy() if isinstance(array, Array) else SPACE.array(SPACE.put(np.asarray(array)))

    def put(self, root: Buffer, array: Tensor) -> None:
        """Copies an array to memory of the device that a buffer has for itself, and has between runs."""
        if root.is_packed or root.encoding is not None:  # then it holds bytes, which the host makes
            array = stored(root, np.asarray(array))[1]
        self.places[root] = self.own(array).held

    def bring(self, root: Buffer, array: Tensor) -> None:
        """Has an input for a run: where it is if it lies on the device, else as a copy in the memory of the host."""
        if isinstance(array, Array):
            written = {self.block, *(self.places[state].block for state in self.program.states)}
            self.places[root] = SPACE.copy(array.held) if array.held.block in written else array.held
            return
        given = np.asarray(array)
        block = HOST_MEMORY.allocate(given.nbytes)
        HOST_MEMORY.write(block.address, root.dtype, given)
        self.places[root] = Held(block, block.address, root.dtype, given.shape)

    def address(self, root: Buffer) -> int:
        """Where a root buffer lies."""
        if root.kind == "arena":
            assert self.plan is not None
            return self.block.address + self.plan.offsets[root]
        if root not in self.places:  # one that `prepare` makes, or an input that no run has brought
            count = 0 if root.kind == "input" else root.nbytes({})
            block = DEVICE_MEMORY.allocate(count)
            self.places[root] = Held(block, block.address, BYTE, (count,))
        return self.places[root].address

    def place(self, buffer: Buffer, extents: Mapping[str, int]) -> tuple[int, tuple[int, ...]]:
        """The address and the shape of a buffer or view."""
        return self.address(buffer.base) + evaluate(buffer.offset, extents), sizes(buffer.shape, extents)

    def view(self, buffer: Buffer, extents: Mapping[str, int]) -> Array:
        """A buffer that is not packed, as an array where it lies."""
        address, shape = self.place(buffer, extents)
        block = self.block if buffer.base.kind == "arena" else self.places[buffer.base].block
        return SPACE.array(Held(block, address, buffer.dtype, shape))

    def fetch(self, buffer: Buffer, extents: Mapping[str, int]) -> HostArray:
        """A copy of a buffer for the host, once all that was submitted is done."""
        self.queues.wait()
        address, shape = self.place(buffer, extents)
        if buffer.is_packed:
            return unpack(DEVICE_MEMORY.bytes(address, buffer.nbytes(dict(extents))), buffer.dtype, shape)
        return DEVICE_MEMORY.array(address, buffer.dtype, shape).copy()

    def reader(self, buffer: Buffer, extents: Mapping[str, int]) -> Callable[[], HostArray]:
        return lambda: self.fetch(buffer, extents)

    def writer(self, buffer: Buffer, extents: Mapping[str, int]) -> Callable[[HostArray], None]:
        return lambda made: DEVICE_MEMORY.write(self.place(buffer, extents)[0], *stored(buffer, made))

    @property
    def arena(self) -> Array:
        return SPACE.array(Held(self.block, self.block.address, BYTE, (self.size,)))

    def trim(self) -> None:
        self.outputs, self.block, self.size = None, DEVICE_MEMORY.allocate(0), 0
        for root in self.program.inputs:
            self.places.pop(root, None)

    def dispose(self) -> None:
        self.places.clear()
        self.kept.clear()
        self.trim()

    def clone(self, fresh: bool = False) -> InterpExecutable:
        with self.taken():
            made = InterpExecutable(self.code)
            made.places |= {b: at for b, at in self.places.items() if b.kind in ("param", "const", "prepared")}
            made.dirty = self.dirty
            for root in self.program.states:
                made.put(root, initial(root) if fresh else SPACE.array(self.places[root]))
            if not fresh:
                made.kept, made.fed = dict(self.kept), dict(self.fed)
                made.room, made.dims = dict(self.room), dict(self.dims)
            return made

    # ---- params and states

    def param(self, name: str) -> Buffer:
        return next(b for b in self.program.params if b.name == name)

    def set_params(self, arrays: Mapping[str, Tensor]) -> None:
        with self.taken():
            for root in self.program.params:
                if root.name in arrays:
                    self.put(root, arrays[root.name])
                    self.dirty = True

    def raw_param(self, name: str) -> Array | None:
        root = self.param(name)
        if root not in self.places:
            return None
        if root.is_packed:
            return SPACE.array(SPACE.put(self.fetch(root, {})))
        return SPACE.array(self.places[root]).copy()

    def state(self, name: str) -> Buffer:
        return next(b for b in self.program.states if b.name == name)

    def get_declared(self, name: str) -> Array:
        root = self.state(name)
        return SPACE.array(self.places[root]).copy() if root.encoding is not None else self.view(root, {}).copy()

    def set_declared(self, name: str, array: Tensor | None) -> None:
        root = self.state(name)
        self.put(root, initial(root) if array is None else array)

    def set_extent(self, dim: str, extent: int | None) -> None:
        if dim not in settable(self.graph, self.program):
            raise OptionError(f"set_extent: the dim {dim!r} is decided by the data of each run")
        self.dims.pop(dim, None)
        if extent is not None:
            self.dims[dim] = extent

    # ---- runs

    @property
    def results(self) -> Sequence[Tensor | None] | None:
        return self.outputs

    @property
    def slots(self) -> Callable[..., Any]:
        @bounded("run_slots", ExecutionError)
        def call(*arrays: Any) -> Any:
            return self.served(self._slots, arrays)

        return call

    def _slots(self, arrays: tuple[Any, ...]) -> Any:
        admitted = self.admit(arrays)
        with self.taken():
            made = self.run_all(admitted)
            self.outputs = list(made)
            return self.wrap(tuple(made))

    def run(self, inputs: Sequence[Tensor], out: Sequence[Tensor | None], wanted: Sequence[int]) -> list[Tensor]:
        with self.taken():
            made: list[Tensor] = [array.copy() for array in self.run_all(inputs, out)]
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
        shapes = {b.name: a.shape for b, a in zip(self.program.inputs, inputs, strict=True)}
        extents = {**self.dims, **bind_extents(self.graph, shapes)}
        unset = [name for name in settable(self.graph, self.program) if name not in extents]
        if unset:
            raise ShapeError(f"the extent of dim {unset[0]!r} is not known: give it to set_extent")
        check_guards(self.graph, extents)
        check_out(self.graph, extents, out or [None] * len(self.graph.outputs))
        for root, array in zip(self.program.inputs, inputs, strict=True):
            self.bring(root, array)
        if self.dirty:
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

    def prepare(self) -> None:
        """Makes what depends on params only, in memory of its own: clones may still use what there was."""
        for root in [root for root in self.places if root.kind == "prepared"]:
            del self.places[root]
        self.walk(Binding(self.code.prepare, {}, self.address, 0, self))
        self.dirty = False

    def bind(self, extents: Mapping[str, int]) -> Binding:
        """The words for these extents, with a plan and an arena that they fit into."""
        room = room_for(self.program, extents, self.room)
        if self.code.schedule.bounds is None:
            spread = {name: Dim(name, 0, most) for name, most in room.items()}
            self.plan = self.code.make_plan({**extents, **room}, spread)
        assert self.plan is not None
        if self.plan.arena > self.size:
            self.reserve({**extents, **room}, self.plan.arena - self.size)
            self.block, self.size = DEVICE_MEMORY.allocate(self.plan.arena), self.plan.arena
        if self.code.options.debug:
            DEVICE_MEMORY.bytes(self.block.address, self.size).fill(POISON)
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
                self.launch(binding, number, phases[number])
                number += 1
            self.queues.wait()
        finally:
            self.queues.clear()

    def holds(self, test: Buffer, binding: Binding) -> bool:
        return bool(self.fetch(test, binding.extents))

    def launch(self, binding: Binding, number: int, phase: Phase) -> None:
        """Submits the chunks of a kernel; a host call is made once the device is done."""
        code = phase.code
        if code is None:
            if binding.host_chunks(phase.kernel):
                self.host_call(binding, number, phase.kernel)
            return
        function, words = self.code.functions[code.symbol], binding.arguments(number)
        chunks = code.chunks(function.extents(words))

        def run() -> None:
            start = time.perf_counter()
            with np.errstate(all="ignore"):
                for chunk in range(chunks):
                    function(words, chunk)
            self.note(number, start)

        self.queues.submit(phase.kernel.queue, run, function.touches(words))

    def host_call(self, binding: Binding, number: int, kernel: Kernel) -> None:
        self.queues.wait()
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

            def once() -> tuple[list[float], list[float]]:
                self.places |= {root: SPACE.copy(held) for root, held in states.items()}
                self.spent = spent = [0.0] * len(kernels)
                self.run_all(inputs)
                return spent, [0.0] * len(kernels)  # a queue's thread has a clock of its own: not known

            timer = Timer(repeat)
            try:
                once()  # which prepares
                timer.run(once)
            finally:
                self.spent, self.kept = None, kept
                self.places |= states
        return kernel_times(timer, [k.how for k in kernels], [f"{k.name} [{k.label}]" for k in kernels])


def stored(root: Buffer, array: HostArray) -> tuple[Any, HostArray]:
    """The element type and the array that a buffer holds: bytes where it is encoded."""
    if root.is_packed:
        return BYTE, pack(array)
    return (root.dtype, array) if root.encoding is None else (BYTE, array.reshape(-1))
