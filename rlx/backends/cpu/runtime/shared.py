"""What the clones of a compiled graph have in common: code, params, constants, and what `prepare` makes of them.

A clone whose params are set takes its leave of the others first: it gets its own `Shared`, over the same memory, of
which it replaces what depends on these params.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.codegen.binding import as_array
from rlx.backends.codegen.table import Marks, Phase, Table
from rlx.backends.cpu.jit.load import Kernels
from rlx.backends.cpu.native.pool import pool
from rlx.backends.cpu.native.runner import RunBlock
from rlx.backends.cpu.runtime.binding import aligned_bytes
from rlx.backends.cpu.runtime.concurrent_phases import Span, spans
from rlx.backends.granted import run_threads
from rlx.ir.dtype import pack
from rlx.ir.graph import Array, Graph
from rlx.ir.mapped import copied, lies_in_file, mapping_of, read_in_place
from rlx.ir.shape import evaluate
from rlx.kernels.program import Buffer, Program
from rlx.options import CompileOptions
from rlx.plan.arena import MemoryPlan, Schedule
from rlx.records import cached_property

if TYPE_CHECKING:
    from rlx.backends.cpu.runtime.executable import CpuExecutable
    from rlx.backends.cpu.runtime.residency import Mask, Residency

__all__ = ["Shared", "timeline"]

BROUGHT = 64 << 10  # bytes around a page that Linux brings with it


class Shared:
    """Code, params and prepared buffers (those given, or made by `prepare`).

    Others may read the memory of prepared buffers that are `lent`: it is replaced and not written to.
    `gate` is a lock around the changes of all this. It is a state block, because a forked child finds those open.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program,
        options: CompileOptions,
        prepare: Sequence[Phase],
        run: Sequence[Phase],
        addresses: Kernels,
        marks: Marks,
        prepared: Mapping[Buffer, Array] | None = None,
    ) -> None:
        self.graph, self.program, self.options = graph, program, options
        self.prepare, self.addresses = tuple(prepare), addresses
        self.threads = run_threads(options.threads)
        if self.threads > 1:
            pool.grow()
        self.run = Table(run, addresses, marks, threads=self.threads)
        self.spans: tuple[MemoryPlan, tuple[Span, ...]] | None = None  # of the last plan
        self.params: dict[Buffer, Array] = {}
        self.keys: dict[Buffer, str | None] = {}  # of params and prepared buffers: equal ones have equal contents
        self.memory: dict[Buffer, Array] = {}  # of prepared buffers, and of constants once something has read them
        self.prepared = prepared is not None
        buffers = program.buffers("prepared")
        if prepared:
            self.memory |= {b: prepared[b] for b in buffers}
        elif buffers:
            self.memory |= self._allocated(buffers)
        self.dirty: set[Buffer] = set()  # params that `prepare` has not seen yet
        self.lent: set[Buffer] = set()
        self.users: weakref.WeakSet[CpuExecutable] = weakref.WeakSet()
        self.gate = RunBlock()

    @cached_property
    def residency(self) -> Residency:
        """Which experts' panels lie in memory."""
        from rlx.backends.cpu.runtime.residency import Residency

        return Residency(self.program, self.addresses)

    def spans_of(self, plan: MemoryPlan) -> tuple[Span, ...]:
        """The phases that may run side by side, see `rlx.backends.cpu.runtime.concurrent_phases`."""
        known = self.spans
        if known is None or known[0] is not plan:
            apart = not self.program.made  # else chunk counts change while a run goes on
            self.spans = known = plan, spans(self.run.phases, plan) if apart else ()
        return known[1]

    def _allocated(self, buffers: Sequence[Buffer]) -> dict[Buffer, Array]:
        """Memory for prepared buffers."""
        from rlx.backends.cpu.runtime.prepare import allocated

        return allocated(self, buffers)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Waits until nobody changes what is shared, and keeps others from it."""
        while not self.gate.native.acquire(self.gate.address):
            time.sleep(1e-4)
        try:
            yield
        finally:
            self.gate.release()

    def enter(self, user: CpuExecutable) -> None:
        """Adds a clone."""
        with self.changing():
            self.users.add(user)

    def leave(self, user: CpuExecutable) -> None:
        """Takes a clone away; with the last one the weights go."""
        with self.changing():
            self.users.discard(user)
            if not self.users:
                self.params.clear()
                self.memory.clear()

    def parted(self, user: CpuExecutable) -> Shared:
        """The same for this clone alone: its params can be set."""
        with self.changing():
            if set(self.users) == {user}:
                return self
            if self.prepared or all(b in self.params for b in self.program.params):
                self._update()  # before there are two that would pack
            from copy import copy

            made = copy(self)
            made.params, made.keys, made.memory = dict(self.params), dict(self.keys), dict(self.memory)
            made.residency = self.residency.copy()
            made.dirty, made.gate, made.users = set(self.dirty), RunBlock(), weakref.WeakSet([user])
            prepared = self.program.buffers("prepared")
            if self.prepared:
                self.lent.update(prepared)
            else:
                made.memory |= self._allocated(prepared)
            made.lent = set(self.lent)
            self.users.discard(user)
        return made

    def set_params(self, arrays: Mapping[str, Array]) -> None:
        """Takes the values over, for the only clone that is left, which is not running."""
        from rlx.backends.cpu.runtime.packed_weights import memory_key, new_key
        from rlx.ir.literal import equal_arrays

        by_name = {b.name: b for b in self.program.params}
        given = {(b := by_name[name]): pack(a) if b.is_packed else a for name, a in arrays.items()}
        keys = {b: memory_key(a) for b, a in given.items()}
        ready: dict[Buffer, Array] = {}
        equal = equal_arrays({b: (b.encoding, a) for b, a in given.items()})
        for b, a in given.items():
            first = equal.get(b)
            if first is not None:
                keys[b] = keys[first] = keys[first] or new_key()
            ready[b] = a if self._stays(b, a) else copied(a) if first is None else ready[first]
        with self.changing():
            self.dirty |= ready.keys()
            self.keys |= dict.fromkeys(ready)
            self.params |= ready
            self.keys |= keys

    def _stays(self, param: Buffer, array: Array) -> bool:
        """Whether the values of a param can stay where they are: packing copies what it can't read in a file there,
        some at a time. Runs read experts at any time.
        """
        if read_in_place(array):
            return True
        experts = self.residency.weights.values() if self.program.experts else ()
        return lies_in_file(array) and all(weight.source.base is not param for weight in experts)

    def watch_tables(self) -> None:
        """Of params in mapped files of which runs read rows, the system brings only those pages that are touched.

        So it does of small ones, which lie between those that have been packed.
        """
        named = {root for phase in self.run.phases for root in phase.kernel.looked_up()}
        there = {root: a for root, a in self.params.items() if mapping_of(a) is not None}
        few = [(int(a.ctypes.data), a.nbytes) for root, a in there.items() if root in named or a.nbytes < BROUGHT]
        if few:
            from rlx.backends.cpu.jit.single_pages import bring_single_pages

            bring_single_pages(few)

    def address(self, buffer: Buffer) -> int:
        """The address of a param, constant or prepared root buffer."""
        array = self.params[buffer] if buffer.kind == "param" else self.memory_of(buffer)
        return int(array.ctypes.data)

    def memory_of(self, root: Buffer) -> Array:
        """The bytes of a prepared buffer or constant."""
        held = self.memory.get(root)
        if held is None and root.kind == "const":
            held = self.memory.setdefault(root, _constant_bytes(root))  # of two threads both get the first
        assert held is not None
        return held

    def contents(self, buffer: Buffer) -> Array:
        """A static buffer (or a view of one) as an array."""
        root = buffer.base
        memory = self.params[root].reshape(-1).view(np.uint8) if root.kind == "param" else self.memory_of(root)
        return as_array(memory, buffer, evaluate(buffer.offset, {}), {})

    def update(self) -> None:
        """Runs the part of `prepare` that depends on the params that have changed, if any have."""
        with self.changing():
            self._update()

    def _update(self) -> None:
        if self.prepared and not self.dirty:
            return
        from rlx.backends.cpu.runtime.prepare import pack_outdated

        pack_outdated(self)

    def place_experts(self, masks: Mapping[Buffer, Mask]) -> None:
        """Has panels of these experts only, by weight; for the only clone that is left, which is not running."""
        from rlx.backends.cpu.runtime.prepare import place_experts

        with self.changing():
            if self.prepared and self.dirty:
                self._update()
            place_experts(self, masks)

    def own_params(self) -> dict[Buffer, Array]:
        """The params that a run or `prepare` still needs."""
        if not self.prepared:
            return self.params
        from rlx.backends.cpu.runtime.prepare import needed_params

        needed = needed_params(self)
        return {b: array for b, array in self.params.items() if b in needed}


def _constant_bytes(buffer: Buffer) -> Array:
    data = buffer.data
    assert data is not None
    if data.size == 0:
        return aligned_bytes(8)
    if buffer.is_packed:
        return pack(data)
    return np.require(data, requirements=["C", "A"]).reshape(-1).view(np.uint8)


def timeline(program: Program) -> Schedule:
    """What planning needs of a program."""
    from rlx.plan.plan import schedule

    return schedule(program)
