"""A compiled graph on the interpreter: its memory, the walk over the table of phases, and the calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.arithmetic import usual_arithmetic
from rlx.backends.base import Executable, Turns
from rlx.backends.codegen.binding import Binding, Overrun, grows, initial, room_for, settable
from rlx.backends.codegen.control import next_phase
from rlx.backends.codegen.table import Phase, Table, phases_of
from rlx.backends.interp.anchors import sizes
from rlx.backends.interp.kernels import Function, code_of
from rlx.backends.interp.memory import Memory, Queues
from rlx.boundary import bounded
from rlx.errors import ExecutionError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES, pack, unpack
from rlx.ir.extents import bind_extents, check_guards, check_out
from rlx.ir.graph import Array, Graph
from rlx.ir.shape import Dim, evaluate
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.options import CompileOptions
from rlx.plan import plan as planning
from rlx.plan.arena import MemoryPlan

__all__ = ["HOST", "InterpExecutable"]

BYTE = DTYPES["u8"]
HOST = "host"  # the space that inputs lie in before a kernel brings them to the device
POISON = 0xFF  # every byte of the arena before a run in debug mode: floats are NaN


class InterpExecutable(Executable[Array]):
    """Runs the phases of a program one by one; only inputs, params, states and outputs cross to the host, by copies."""

    capabilities = frozenset({"out", "slots", "states", "dynamic"})

    program: Program

    def __init__(self, graph: Graph, program: Program, options: CompileOptions) -> None:
        self.graph, self.program, self.options = graph, program, options
        self.device, self.host_memory, self.queues = Memory(1 << 20), Memory(1 << 40), Queues()
        self.memories = {"": self.device, HOST: self.host_memory}
        self.functions: dict[str, Function] = {}
        prepare, _ = phases_of(program.prepare, self.emit)
        run, marks = phases_of(program.run, self.emit)
        symbols = dict.fromkeys(self.functions, 0)
        self.prepare, self.table = Table(prepare, symbols), Table(run, symbols, marks)
        self.schedule = planning.schedule(program)
        self.plan = None if self.schedule.bounds is None else self.make_plan(self.schedule.bounds, {})
        self.places: dict[Buffer, int] = {}  # root buffers that live between runs, and the inputs of the host
        self.arena_start, self.arena_size = self.device.allocate(0), 0
        self.dirty = True  # params have changed since `prepare` ran
        self.room: dict[str, int] = {}
        self.dims: dict[str, int] = {}
        self.kept: dict[str, tuple[Array, Array]] = {}  # inputs that were bound: their first and present values
        self.fed: dict[str, int] = {}
        self.outputs: list[Array | None] | None = None
        self.turns = Turns()
        for root in program.constants:
            assert root.data is not None
            self.put(root, root.data)
        for state in program.states:
            self.put(state, initial(state))
        self.set_params({v.name: v.data for v in graph.params if v.data is not None})

    def emit(self, kernel: Kernel) -> Sequence[Any]:
        """The code of a kernel; a mark has none, since the host walks the table."""
        if kernel.mark is not None:
            return [None] if kernel.mark.part != "end" else []
        made = []
        for number, function in enumerate(code_of(kernel), len(self.functions)):
            made.append(function.code(f"k{number}"))
            self.functions[made[-1].symbol] = function
        return made

    @property
    def listing(self) -> Mapping[Kernel, str]:
        texts: dict[Kernel, str] = {}
        for phase in (*self.prepare.phases, *self.table.phases):
            if phase.code is not None:
                texts[phase.kernel] = "\n".join(filter(None, (texts.get(phase.kernel), phase.code.ir)))
        return texts

    # ---- memory

    def put(self, root: Buffer, array: Array) -> None:
        """Copies an array of the host to a buffer that lives between runs, or to an input's place on the host."""
        memory = self.memories[root.space]
        if root in self.places:
            memory.free(self.places.pop(root))
        dtype, array = stored(root, array)
        self.places[root] = address = memory.allocate(array.nbytes)
        memory.write(address, dtype, array)

    def address(self, root: Buffer) -> int:
        """Where a root buffer lies."""
        if root.kind == "arena":
            assert self.plan is not None
            return self.arena_start + self.plan.offsets[root]
        if root not in self.places:  # one that `prepare` makes, or an input that each run brings
            self.places[root] = self.memories[root.space].allocate(0 if root.kind == "input" else root.nbytes({}))
        return self.places[root]

    def place(self, buffer: Buffer, extents: Mapping[str, int]) -> tuple[int, tuple[int, ...]]:
        """The address and the shape of a buffer or view."""
        return self.address(buffer.base) + evaluate(buffer.offset, extents), sizes(buffer.shape, extents)

    def fetch(self, buffer: Buffer, extents: Mapping[str, int]) -> Array:
        """A copy of a buffer for the host, once all that was submitted is done."""
        self.queues.wait()
        address, shape = self.place(buffer, extents)
        if buffer.is_packed:
            return unpack(self.device.bytes(address, buffer.nbytes(dict(extents))), buffer.dtype, shape)
        return self.device.read(address, buffer.dtype, shape)

    def reader(self, buffer: Buffer, extents: Mapping[str, int]) -> Callable[[], Array]:
        return lambda: self.fetch(buffer, extents)

    def writer(self, buffer: Buffer, extents: Mapping[str, int]) -> Callable[[Array], None]:
        return lambda made: self.device.write(self.place(buffer, extents)[0], *stored(buffer, made))

    def make_plan(self, extents: Mapping[str, int], spread: Mapping[str, Any]) -> MemoryPlan:
        o = self.options
        return planning.make_plan(
            self.schedule, extents, alignment=o.alignment, reuse=o.reuse, search=o.search, spread=spread or None
        )

    # ---- params and states

    def set_params(self, arrays: Mapping[str, Array]) -> None:
        with self.turns.taken(self.waits):
            for root in self.program.params:
                if root.name in arrays:
                    self.put(root, arrays[root.name])
                    self.dirty = True

    def raw_param(self, name: str) -> Array | None:
        root = next(b for b in self.program.params if b.name == name)
        if root not in self.places:
            return None
        if root.encoding is None:
            return self.fetch(root, {})
        return self.device.read(self.places[root], BYTE, (root.nbytes({}),))

    def state(self, name: str) -> Buffer:
        return next(b for b in self.program.states if b.name == name)

    @property
    def bound_inputs(self) -> Mapping[str, Array]:
        return {name: now for name, (_, now) in self.kept.items()}

    @property
    def feeds(self) -> Mapping[str, int]:
        return self.fed

    def read_state(self, name: str) -> Array:
        return self.kept[name][1].copy() if name in self.kept else self.fetch(self.state(name), {})

    def write_state(self, name: str, array: Array | None) -> None:
        with self.turns.taken(self.waits):
            self.put_state(name, array)

    def put_state(self, name: str, array: Array | None) -> None:
        """Sets a state; None: to its initial value."""
        if name in self.kept:
            first = self.kept[name][0]
            self.kept[name] = (first, first if array is None else array.copy())
            return
        root = self.state(name)
        self.writer(root, {})(initial(root) if array is None else array)

    def keep_input(self, name: str, array: Array | None) -> None:
        with self.turns.taken(self.waits):
            self.kept.pop(name, None)
            self.fed.pop(name, None)
            if array is not None:
                self.kept[name] = (array.copy(), array.copy())

    def feed_state(self, name: str, output: int | None) -> None:
        with self.turns.taken(self.waits):
            self.fed.pop(name, None)
            if output is not None:
                self.fed[name] = output

    def set_extent(self, dim: str, extent: int | None) -> None:
        if dim not in settable(self.graph, self.program):
            raise OptionError(f"set_extent: the dim {dim!r} is decided by the data of each run")
        self.dims.pop(dim, None)
        if extent is not None:
            self.dims[dim] = extent

    # ---- runs

    @property
    def results(self) -> Sequence[Array | None] | None:
        return self.outputs

    @property
    def slots(self) -> Callable[..., Any]:
        @bounded("run_slots", ExecutionError)
        def call(*arrays: Any) -> Any:
            admitted = self.admit(arrays)
            with self.turns.taken(self.waits):
                return self.wrap(tuple(self.run_all(admitted)))

        return call

    def run(self, inputs: Sequence[Array], out: Sequence[Array | None], wanted: Sequence[int]) -> list[Array]:
        with self.turns.taken(self.waits):
            made = self.run_all(inputs, out)
        for target, array, output in zip(out, made, self.graph.outputs, strict=True):
            if target is not None and target.shape != array.shape:
                raise ShapeError(f"out for {output.name!r}: this run gave shape {array.shape}, got {target.shape}")
        for number, target in enumerate(out):
            if target is not None:
                target[...] = made[number]
                made[number] = target
            elif number not in wanted and self.outputs is not None:
                self.outputs[number] = None
        return [made[n] for n in wanted]

    @usual_arithmetic()
    def run_all(self, inputs: Sequence[Array], out: Sequence[Array | None] | None = None) -> list[Array]:
        """All outputs, as arrays of the host. The shapes of `out` are checked before anything is changed."""
        self.outputs = None
        shapes = {b.name: a.shape for b, a in zip(self.program.inputs, inputs, strict=True)}
        extents = {**self.dims, **bind_extents(self.graph, shapes)}
        unset = [name for name in settable(self.graph, self.program) if name not in extents]
        if unset:
            raise ShapeError(f"the extent of dim {unset[0]!r} is not known: give it to set_extent")
        check_guards(self.graph, extents)
        check_out(self.graph, extents, out or [None] * len(self.graph.outputs))
        for root, array in zip(self.program.inputs, inputs, strict=True):
            self.put(root, array)
        if self.dirty:
            self.walk(Binding(self.prepare, {}, self.address, 0, self))
            self.dirty = False
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
        made = [self.fetch(buffer, binding.extents) for _, buffer in self.program.outputs]
        self.outputs = [array.copy() for array in made]
        for name, number in self.fed.items():
            self.put_state(name, made[number])
        return made

    def bind(self, extents: Mapping[str, int]) -> Binding:
        """The words for these extents, with a plan and an arena that they fit into."""
        room = room_for(self.program, extents, self.room)
        if self.schedule.bounds is None:
            spread = {name: Dim(name, 0, most) for name, most in room.items()}
            self.plan = self.make_plan({**extents, **room}, spread)
        assert self.plan is not None
        if self.plan.arena > self.arena_size:
            self.reserve({**extents, **room}, self.plan.arena - self.arena_size)
            self.device.free(self.arena_start)
            self.arena_start, self.arena_size = self.device.allocate(self.plan.arena), self.plan.arena
        if self.options.debug:
            self.device.bytes(self.arena_start, self.arena_size).fill(POISON)
        return Binding(self.table, extents, self.address, 0, self, room=room, dims=self.program.dims)

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
        function, words = self.functions[code.symbol], binding.arguments(number)
        chunks = code.chunks(function.extents(words))

        def run() -> None:
            with np.errstate(all="ignore"):
                for chunk in range(chunks):
                    function(self.memories, words, chunk)

        self.queues.submit(phase.kernel.queue, run, function.touches(words))

    def host_call(self, binding: Binding, number: int, kernel: Kernel) -> None:
        self.queues.wait()
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


def stored(root: Buffer, array: Array) -> tuple[Any, Array]:
    """The element type and the array that a buffer holds: bytes where it is encoded."""
    if root.is_packed:
        return BYTE, pack(array)
    return (root.dtype, array) if root.encoding is None else (BYTE, array.reshape(-1))
