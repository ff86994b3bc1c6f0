"""A compiled graph on the CPU: code, params, arena, and the binding of words to the extents of a run."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.backends.base import Executable
from rlx.backends.cpu.entry import Entry, InputSpec, Patch, make_entry
from rlx.backends.cpu.jit import compile_kernels
from rlx.backends.cpu.objcache import ObjectCache
from rlx.backends.cpu.pool import cpu_count
from rlx.backends.cpu.runner import BUSY_STATUS, ERROR_KINDS, HOST_CALL_RAISED, RELEASE_GIL, HostCall, RunBlock
from rlx.backends.cpu.words import Computed, KernelCode, Pointer, Routine, Scratch, Word
from rlx.errors import BusyError, ExecutionError, ShapeError
from rlx.ir.extents import bind_extents, check_guards
from rlx.ir.graph import Array, Graph
from rlx.ir.shape import evaluate
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.options import CompileOptions
from rlx.plan.plan import MemoryPlan, bound_extents, make_plan

__all__ = ["CpuExecutable", "Phase", "Shared"]


@dataclass(frozen=True)
class Phase:
    """One entry of the phase table: code for a part of a kernel, or a host call (code None)."""

    kernel: Kernel
    code: KernelCode | None


def aligned_bytes(count: int, alignment: int = 64) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zero-cost (lazily mapped) bytes at an aligned address."""
    raw = np.empty(count + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + count]


def as_array(memory: Array, buffer: Buffer, offset: int, extents: Mapping[str, int]) -> Array:
    """The buffer's contents as an array over `memory`."""
    shape = tuple(evaluate(s, extents) for s in buffer.shape)
    nbytes = int(np.prod(shape, dtype=np.int64)) * buffer.dtype.itemsize
    return memory[offset : offset + nbytes].view(buffer.dtype.numpy).reshape(shape)


@dataclass(eq=False)
class Shared:
    """What clones have in common: code, params, constants, and what `prepare` makes of them."""

    graph: Graph
    program: Program
    options: CompileOptions
    prepare: list[Phase]
    run: list[Phase]
    addresses: dict[str, int]
    params: dict[Buffer, Array] = field(default_factory=dict)
    memory: dict[Buffer, Array] = field(default_factory=dict)  # constants and prepared buffers, as bytes
    dirty: set[Buffer] = field(default_factory=set)
    prepared: bool = False
    version: int = 0  # counts changes of addresses
    users: weakref.WeakSet[CpuExecutable] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        for buffer in self.program.constants:
            assert buffer.data is not None
            self.memory[buffer] = np.frombuffer(np.ascontiguousarray(buffer.data).tobytes() or b"\0" * 8, np.uint8)
        for buffer in self.program.buffers("prepared"):
            self.memory[buffer] = aligned_bytes(max(buffer.nbytes({}), 8))

    @property
    def threads(self) -> int:
        return self.options.threads or cpu_count()

    def set_params(self, arrays: Mapping[str, Array]) -> None:
        held = []
        try:
            for user in list(self.users):
                user.block.acquire()
                held.append(user)
            self._take(arrays)
            for user in held:
                user.forget()
        finally:
            for user in held:
                user.block.release()

    def _take(self, arrays: Mapping[str, Array]) -> None:
        by_name = {b.name: b for b in self.program.params}
        for name, array in arrays.items():
            buffer = by_name[name]
            mapped = (
                not array.flags.writeable and array.flags.c_contiguous and array.flags.aligned and _is_mapped(array)
            )
            self.params[buffer] = array if mapped else np.array(array, order="C", copy=True)
            self.dirty.add(buffer)
        self.version += 1

    def address(self, buffer: Buffer) -> int:
        """The address of a param, constant or prepared root buffer."""
        array = self.params[buffer] if buffer.kind == "param" else self.memory[buffer]
        return int(array.ctypes.data)

    def update(self) -> None:
        """Runs the part of `prepare` that depends on the params that changed."""
        if self.prepared and not self.dirty:
            return
        changed: set[Buffer] = set(self.dirty)
        phases = []
        for phase in self.prepare:
            reads = {b.base for b in phase.kernel.reads()}
            if reads & changed or (not self.prepared and not any(b.kind == "param" for b in reads)):
                changed.update(b.base for b in phase.kernel.writes())
                phases.append(phase)
        binding = Binding(self, phases, {}, self.address, self.host_arrays(phases))
        binding.run(self.threads)
        self.dirty.clear()
        self.prepared = True
        self._drop()

    def contents(self, buffer: Buffer) -> Array:
        """A static buffer (or a view of one) as a read-only array."""
        root = buffer.base
        memory = self.params[root].reshape(-1).view(np.uint8) if root.kind == "param" else self.memory[root]
        made = as_array(memory, buffer, evaluate(buffer.offset, {}), {})
        made.flags.writeable = root.kind == "prepared"
        return made

    def host_arrays(self, phases: Sequence[Phase]) -> dict[Buffer, Array]:
        """Arrays over the buffers of the host calls among `prepare` phases."""
        calls = [p.kernel for p in phases if p.code is None]
        return {b: self.contents(b) for k in calls for b in (*k.host_inputs, *k.host_outputs)}

    def _drop(self) -> None:
        """Lets go of copies of params that only kernels of their own read: they have been packed."""
        needed = {b.base for phase in self.run for b in phase.kernel.reads()}
        needed |= {b.base for _, b in self.program.outputs}
        sources: dict[Buffer, set[Buffer]] = {}
        for phase in self.prepare:
            own: set[Buffer] = set()
            for b in phase.kernel.reads():
                own |= {b.base} if b.base.kind == "param" else sources.get(b.base, set())
            for b in phase.kernel.writes():
                sources.setdefault(b.base, set()).update(own)
            if len(own) > 1:
                needed |= own
        for buffer in [b for b in self.params if b not in needed]:
            del self.params[buffer]

    def bytes(self) -> int:
        """Bytes that params, constants and prepared buffers take now."""
        return sum(a.nbytes for a in (*self.params.values(), *self.memory.values()))


def _is_mapped(array: Array) -> bool:
    """Whether the array lies in a memory-mapped file that it can't write."""
    base: Any = array
    if array.flags.writeable:
        return False
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return type(base).__name__ == "mmap"


class Binding:
    """Phases with their words filled in for given extents and addresses."""

    def __init__(
        self,
        shared: Shared,
        phases: Sequence[Phase],
        extents: Mapping[str, int],
        address: Callable[[Buffer], int],
        host_arrays: Mapping[Buffer, Array],
    ) -> None:
        self.shared, self.phases, self.extents = shared, list(phases), extents
        self.hosts: dict[int, HostCall] = {}
        self.scratch = aligned_bytes(0)
        counts = [len(p.code.words) if p.code else 0 for p in phases]
        self.words = np.zeros(sum(counts) + 1, np.int64)
        self.pointers: list[tuple[Buffer, int, int]] = []  # (root, word number, byte offset) of inputs and arena
        self.scratch_words: list[int] = []
        self.rows: list[tuple[int, int, int]] = []
        base, at = int(self.words.ctypes.data), 0
        need = 0
        for number, (phase, count) in enumerate(zip(self.phases, counts, strict=True)):
            code = phase.code
            if code is None:
                call = HostCall(host_function(phase.kernel, extents, host_arrays))
                self.hosts[number] = call
                self.rows.append((call.address, base, 1))
                continue
            for i, word in enumerate(code.words):
                self.words[at + i] = self.word(word, at + i, address)
            need = max(need, code.scratch_bytes(extents))
            self.rows.append((shared.addresses[code.symbol], base + 8 * at, code.chunks(extents)))
            at += count
        self.set_scratch(need)

    def word(self, word: Word, number: int, address: Callable[[Buffer], int]) -> int:
        match word:
            case Pointer(buffer=buffer, offset=offset):
                root = buffer.base
                shift = evaluate(buffer.offset, self.extents) + evaluate(offset, self.extents)
                if root.kind in ("input", "arena"):
                    self.pointers.append((root, number, shift))
                return address(root) + shift
            case Computed(fn=fn):
                return fn(self.extents)
            case Routine(symbol=symbol):
                return self.shared.addresses[symbol]
            case Scratch():
                self.scratch_words.append(number)
                return 0
            case _:
                return evaluate(word, self.extents)

    def set_scratch(self, per_worker: int) -> None:
        self.scratch = aligned_bytes(per_worker * self.shared.threads)
        for number in self.scratch_words:
            self.words[number] = self.scratch.ctypes.data

    def run(self, threads: int) -> None:
        """Runs the phases once, in a block of their own."""
        block = RunBlock(self.rows, threads=threads)
        status = block.run()
        if status:
            raise self.error(block, status)

    def error(self, block: RunBlock, status: int) -> Exception:
        """The exception for a nonzero status of the last run."""
        if status == BUSY_STATUS:
            return BusyError("the compiled graph is running in another thread; use `clone()` for one graph a thread")
        number = block.failed_phase
        kernel = self.phases[number].kernel
        if status & 255 == HOST_CALL_RAISED and number in self.hosts:
            try:
                self.hosts[number].raise_error()
            except Exception as error:
                return error
        what = ERROR_KINDS.get(status & 255, f"status {status}")
        shown = f" (value {block.value})" if status & 255 in (1, 2) else ""
        return ExecutionError(f"node {kernel.label}: {what}{shown}")


def host_function(kernel: Kernel, extents: Mapping[str, int], arrays: Mapping[Buffer, Array]) -> Callable[[], None]:
    """The host call of a kernel: the op's reference on the buffers' arrays."""
    node = kernel.host
    assert node is not None
    op: Any = node.op.at(extents)  # type: ignore[attr-defined]

    def call() -> None:
        result = op.reference(*(arrays[b].copy() for b in kernel.host_inputs))
        results = result if isinstance(result, tuple) else (result,)
        for buffer, value in zip(kernel.host_outputs, results, strict=True):
            made = np.asarray(value)
            if made.shape != arrays[buffer].shape or made.dtype != arrays[buffer].dtype:
                raise ExecutionError(
                    f"node {kernel.label}: reference gave {made.dtype}{made.shape}, "
                    f"infer says {arrays[buffer].dtype}{arrays[buffer].shape}"
                )
            arrays[buffer][...] = made

    return call


class CpuExecutable(Executable):
    """The run of one clone: its arena, its words, its entry."""

    capabilities = frozenset({"arena", "slots", "clone", "out", "profile", "dynamic"})

    program: Program

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.program = shared.program
        self.extents: dict[str, int] | None = None
        self.binding: Binding | None = None
        self.memory = aligned_bytes(0)
        self.version = -1
        self.results = None
        self.patches: list[Patch] = []
        bounds = bound_extents(shared.program)
        self.bound_plan = self.make_plan(bounds) if bounds is not None else None
        self.plan = self.bound_plan
        self.block = RunBlock((), threads=shared.threads)
        self.entry = self.make_entry()
        shared.users.add(self)

    # ---- the protocol

    @property
    def slots(self) -> Callable[..., Any]:
        return self.entry if self.program.inputs else self.run_constant

    @property
    def arena(self) -> memoryview:
        return self.memory.data

    def set_params(self, arrays: Mapping[str, Array]) -> None:
        self.shared.set_params(arrays)

    def clone(self) -> CpuExecutable:
        return CpuExecutable(self.shared)

    def run(self, inputs: Sequence[Array], out: Sequence[Array | None] | None = None) -> tuple[Array, ...]:
        ready = self.contiguous(inputs)
        self.prepare_run([a.shape for a in ready])
        direct = self.redirect(ready, out or ())
        try:
            results = self.execute(ready)
        finally:
            for root in direct:
                self.point(root, self.arena_address(root))
        for target, result, (_, buffer) in zip(out or (), results, self.program.outputs, strict=False):
            if target is not None and buffer.base not in direct:
                if target.shape != result.shape:
                    raise ShapeError(f"out: expected an array of shape {result.shape}, got {target.shape}")
                target[...] = result
        return results

    def profile(self, inputs: Sequence[Array], repeat: int) -> list[tuple[str, str, float]]:
        self.run(inputs)
        total = self.block.enable_profile()
        try:
            for _ in range(repeat):
                self.run(inputs)
            seconds = total[: len(self.shared.run)] / (1e9 * repeat)
        finally:
            self.block.disable_profile()
        rows = zip(self.shared.run, seconds, strict=True)
        return [(p.kernel.tag or p.kernel.kind, f"{p.kernel.name} [{p.kernel.label}]", float(s)) for p, s in rows]

    # ---- binding

    def make_plan(self, extents: Mapping[str, int]) -> MemoryPlan:
        options = self.shared.options
        return make_plan(self.program, extents, alignment=options.alignment, reuse=options.reuse)

    def forget(self) -> None:
        """After a change of params: the next call binds again."""
        self.extents = None
        self.entry_of().update(shapes=dict.fromkeys(range(len(self.program.inputs)), (-1,)))

    def prepare_run(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Binds the run to the extents of these input shapes, if it is not bound to them already."""
        names = [b.name for b in self.program.inputs]
        extents = bind_extents(self.shared.graph, dict(zip(names, shapes, strict=True)))
        if extents == self.extents and self.version == self.shared.version:
            return
        self.block.acquire()
        try:
            check_guards(self.shared.graph, extents)
            self.shared.update()
            self.bind(extents, shapes)
        finally:
            self.block.release()

    def bind(self, extents: dict[str, int], shapes: Sequence[tuple[int, ...]]) -> None:
        plan = self.bound_plan or self.make_plan(extents)
        self.plan = plan
        if plan.arena > self.memory.nbytes:
            self.memory = aligned_bytes(plan.arena, max(64, plan.alignment))
        arrays = self.host_arrays(extents)
        binding = Binding(self.shared, self.shared.run, extents, self.address_of, arrays)
        self.binding, self.extents, self.version = binding, extents, self.shared.version
        self.block.set_phases(binding.rows)
        numbers = {b: i for i, b in enumerate(self.program.inputs)}
        base = int(binding.words.ctypes.data)
        self.patches = [
            (numbers[root], base + 8 * number, shift)
            for root, number, shift in binding.pointers
            if root.kind == "input"
        ]
        entry = self.entry_of()
        start = int(self.memory.ctypes.data)
        entry.update(shapes=dict(enumerate(shapes)), patches=self.patches, guard=(start, start + self.memory.nbytes))
        self.results = tuple(self.output_array(b, extents) for _, b in self.program.outputs)
        entry.set_result(self.wrap(self.results))
        self.block.words[RELEASE_GIL] = any(count > 1 for _, _, count in binding.rows)

    def address_of(self, root: Buffer) -> int:
        if root.kind == "input":
            return 0
        return self.arena_address(root) if root.kind == "arena" else self.shared.address(root)

    def arena_address(self, root: Buffer) -> int:
        assert self.plan is not None
        return int(self.memory.ctypes.data) + self.plan.offsets[root]

    def point(self, root: Buffer, address: int) -> None:
        """Makes every word that points to an arena buffer point elsewhere."""
        assert self.binding is not None
        for buffer, number, shift in self.binding.pointers:
            if buffer is root:
                self.binding.words[number] = address + shift

    def redirect(self, inputs: Sequence[Array], out: Sequence[Array | None]) -> set[Buffer]:
        """Points outputs straight at the caller's arrays where a whole arena buffer is the output, once."""
        found: set[Buffer] = set()
        outputs = [b for _, b in self.program.outputs]
        for target, buffer in zip(out, outputs, strict=False):
            shared = sum(b.base is buffer.base for b in outputs) > 1
            plain = buffer.root is None and not shared and buffer not in self.host_buffers()
            if target is None or not plain or target.shape != tuple(evaluate(s, self.bound) for s in buffer.shape):
                continue
            apart = not any(
                np.may_share_memory(target, a)
                for a in (*inputs, *(o for o in out if o is not target and o is not None))
            )
            if apart and target.flags.c_contiguous and target.flags.aligned:
                self.point(buffer, int(target.ctypes.data))
                found.add(buffer)
        return found

    @property
    def bound(self) -> dict[str, int]:
        """The extents that the words are filled in for."""
        assert self.extents is not None
        return self.extents

    def host_buffers(self) -> set[Buffer]:
        calls = [p.kernel for p in self.shared.run if p.code is None]
        return {b.base for k in calls for b in (*k.host_inputs, *k.host_outputs)}

    def host_arrays(self, extents: Mapping[str, int]) -> dict[Buffer, Array]:
        """Arrays over the buffers that host calls use."""
        calls = [p.kernel for p in self.shared.run if p.code is None]
        buffers = {b for k in calls for b in (*k.host_inputs, *k.host_outputs)}
        return {b: self.output_array(b, extents, writable=True) for b in buffers}

    def output_array(self, buffer: Buffer, extents: Mapping[str, int], writable: bool = False) -> Array:
        if buffer.base.kind != "arena":
            return self.shared.contents(buffer)
        assert self.plan is not None
        made = as_array(self.memory, buffer, self.plan.address(buffer, extents), extents)
        made.flags.writeable = writable
        return made

    # ---- calls

    def make_entry(self) -> Any:
        specs = []
        for b in self.program.inputs:
            native = b.dtype.kind if b.dtype.native else "f"
            specs.append(InputSpec(native, b.dtype.itemsize, (-1,), None if b.dtype.native else b.dtype.numpy))
        return make_entry(self.block, specs, [], self.fallback, self.on_error, release_gil=False)

    def entry_of(self) -> Entry:
        return self.entry.__self__  # type: ignore[no-any-return]

    def run_constant(self, *arrays: Any) -> Any:
        """`slots` of a graph without inputs, which has no shapes to tell that params have changed."""
        if arrays or self.version != self.shared.version or self.extents is None:
            return self.fallback(arrays)
        return self.entry()

    def contiguous(self, arrays: Sequence[Array]) -> list[Array]:
        """The arrays as kernels read them: compact, aligned, and not in the arena."""
        start, stop = int(self.memory.ctypes.data), int(self.memory.ctypes.data) + self.memory.nbytes
        ready = []
        for array in arrays:
            compact = np.require(array, requirements=["C", "A"])
            inside = compact.ctypes.data < stop and start < compact.ctypes.data + compact.nbytes
            ready.append(compact.copy() if inside else compact)
        return ready

    def fallback(self, arrays: tuple[Any, ...]) -> Any:
        """The native check found something else than last time: bind to it, or say what is wrong."""
        ready = self.contiguous(self.admit(arrays))
        self.prepare_run([a.shape for a in ready])
        self.execute(ready)
        return self.entry_of().result

    def execute(self, ready: Sequence[Array]) -> tuple[Array, ...]:
        """One run on arrays that the run is bound to."""
        self.block.acquire()
        try:
            for number, word, shift in self.patches:
                ctypes.c_int64.from_address(word).value = ready[number].ctypes.data + shift
            status = self.block.run_acquired()
        finally:
            self.block.release()
        if status:
            self.on_error(status)
        assert self.results is not None
        return self.results

    def on_error(self, status: int) -> Any:
        assert self.binding is not None
        raise self.binding.error(self.block, status)


def build(
    graph: Graph,
    program: Program,
    options: CompileOptions,
    emit: Callable[[Kernel], list[KernelCode]],
) -> CpuExecutable:
    """Compiles every kernel of the program and sets up its memory."""

    def phases(kernels: Sequence[Kernel]) -> list[Phase]:
        made: list[Phase] = []
        for kernel in kernels:
            codes: Sequence[KernelCode | None] = [None] if kernel.host is not None else emit(kernel)
            made.extend(Phase(kernel, code) for code in codes)
        return made

    prepare, run = phases(program.prepare), phases(program.run)
    codes = [p.code for p in (*prepare, *run) if p.code is not None]
    cache = ObjectCache(options.cache_dir) if options.cache_dir is not None else None
    items = {c.symbol: (c.symbol, c.ir, c.optimize) for c in codes}
    items |= {w.symbol: (w.symbol, w.ir, False) for c in codes for w in c.words if isinstance(w, Routine)}
    addresses = compile_kernels(items.values(), cache=cache)
    shared = Shared(graph, program, options, prepare, run, addresses)
    data = {v.name: v.data for v in graph.params if v.data is not None}
    if data:
        shared.set_params(data)
    return CpuExecutable(shared)
