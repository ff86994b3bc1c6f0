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

from rlx.backends.cpu import packed
from rlx.backends.cpu.binding import Binding, Marks, Phase, Table, aligned_bytes, as_array
from rlx.backends.cpu.packed import memory_key
from rlx.backends.cpu.pool import pool
from rlx.backends.cpu.residency import LARGE_PAGE, Mask, Residency, whole_pages
from rlx.backends.cpu.runner import RunBlock
from rlx.backends.granted import run_threads
from rlx.ir.graph import Array, Graph
from rlx.ir.mapped import mapping_of
from rlx.ir.shape import evaluate
from rlx.kernels.program import Buffer, Program
from rlx.options import CompileOptions

if TYPE_CHECKING:
    from rlx.backends.cpu.executable import CpuExecutable

__all__ = ["Shared"]

BLOCK = 32 << 20  # bytes of packed weights that are allocated together


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
        addresses: Mapping[str, int],
        marks: Marks,
        prepared: Mapping[Buffer, Array] | None = None,
    ) -> None:
        self.graph, self.program, self.options = graph, program, options
        self.prepare, self.addresses = tuple(prepare), addresses
        self.threads = run_threads(options.threads)
        if self.threads > 1:
            pool.grow()
        self.run = Table(run, addresses, marks, threads=self.threads)
        self.params: dict[Buffer, Array] = {}
        self.keys: dict[Buffer, str | None] = {}  # of params and prepared buffers: equal ones have equal contents
        self.memory: dict[Buffer, Array] = {b: _constant_bytes(b) for b in program.constants}  # prepared ones too
        self.prepared = prepared is not None
        buffers = program.buffers("prepared")
        self.residency = Residency(program, addresses)
        self.memory |= {b: prepared[b] for b in buffers} if prepared else self._allocated(buffers)
        self.dirty: set[Buffer] = set()  # params that `prepare` has not seen yet
        self.lent: set[Buffer] = set()
        self.users: weakref.WeakSet[CpuExecutable] = weakref.WeakSet()
        self.gate = RunBlock()

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
        by_name = {b.name: b for b in self.program.params}
        ready = {by_name[name]: a if _is_mapped(a) else np.array(a, order="C") for name, a in arrays.items()}
        with self.changing():
            self.params |= ready
            self.keys |= {b: memory_key(a) for b, a in ready.items()}
            self.dirty |= ready.keys()

    def address(self, buffer: Buffer) -> int:
        """The address of a param, constant or prepared root buffer."""
        array = self.params[buffer] if buffer.kind == "param" else self.memory[buffer]
        return int(array.ctypes.data)

    def contents(self, buffer: Buffer) -> Array:
        """A static buffer (or a view of one) as an array."""
        root = buffer.base
        memory = self.params[root].reshape(-1).view(np.uint8) if root.kind == "param" else self.memory[root]
        return as_array(memory, buffer, evaluate(buffer.offset, {}), {})

    def update(self) -> None:
        """Runs the part of `prepare` that depends on the params that have changed, if any have."""
        with self.changing():
            self._update()

    def _update(self) -> None:
        if self.prepared and not self.dirty:
            return
        outdated = self._outdated()
        partly = {b for phase in outdated for b in phase.kernel.writes()} & self.residency.masks.keys()
        outdated = [phase for phase in outdated if partly.isdisjoint(phase.kernel.writes())]
        table = Table(self._unshared(outdated), self.addresses, threads=self.threads)
        scratch = aligned_bytes(table.scratch_bytes({}) * self.threads)
        binding = Binding(table, {}, self.address, int(scratch.ctypes.data), lambda b, _: self.contents(b))
        block = RunBlock(binding.rows, threads=self.threads)
        status = block.run()
        if status:
            raise binding.error(block, status)
        for buffer in {b.base for phase in table.phases for b in phase.kernel.writes()}:
            packed.offer(self.keys[buffer], self.memory[buffer])
        for panels in partly:
            self._place(panels, self.residency.masks[panels], None)
        self.prepared = True
        self.dirty.clear()
        self._drop_packed()

    def place_experts(self, masks: Mapping[Buffer, Mask]) -> None:
        """Has panels of these experts only, by weight; for the only clone that is left, which is not running."""
        with self.changing():
            if self.prepared and self.dirty:
                self._update()
            for panels, mask in masks.items():
                if np.array_equal(mask, self.residency.mask(self.residency.weights[panels])):
                    continue
                if self.prepared:
                    self._place(panels, mask, self.memory[panels])
                elif mask.all():
                    self.residency.masks.pop(panels, None)
                else:
                    self.residency.masks[panels] = mask
            if self.prepared:
                self._drop_packed()

    def _place(self, panels: Buffer, mask: Mask, have: Array | None) -> None:
        source = self.residency.weights[panels].source
        root = source.base
        there = root in (self.params if root.kind == "param" else self.memory)
        stays = there and (root.kind != "param" or mapping_of(self.params[root]) is not None)
        whole = self.contents(source) if there else None
        self.memory[panels] = self.residency.place(self.residency.weights[panels], mask, have, whole, stays)
        self.keys[panels] = None
        self.lent.discard(panels)

    def _allocated(self, buffers: Sequence[Buffer]) -> dict[Buffer, Array]:
        """Memory for prepared buffers; that of experts' panels is given back by itself."""
        alone = self.residency.weights
        return _in_blocks([b for b in buffers if b not in alone]) | {
            b: whole_pages(0 if b in self.residency.masks else b.nbytes({})) for b in buffers if b in alone
        }

    def _outdated(self) -> list[Phase]:
        changed = set(self.dirty)
        phases = []
        for phase in self.prepare:
            reads = {b.base for b in phase.kernel.reads()}
            if reads & changed or not self.prepared:
                changed.update(b.base for b in phase.kernel.writes())
                phases.append(phase)
        return phases

    def _unshared(self, phases: Sequence[Phase]) -> list[Phase]:
        """Those of the phases that are left to run: what another graph has made of the same weights is taken as it is.

        The rest get memory of their own to write to, where others may read what they had before.
        """
        writers: dict[Buffer, list[Phase]] = {}
        for phase in self.prepare:
            for root in {b.base for b in phase.kernel.writes()}:
                writers.setdefault(root, []).append(phase)
        found: set[Buffer] = set()
        for root in dict.fromkeys(b.base for phase in phases for b in phase.kernel.writes()):
            was_common = self.keys.get(root) is not None or root in self.lent
            key = self.keys[root] = packed.key_of(writers[root], self.keys)
            have = packed.find(key)
            if have is not None and have.nbytes == self.memory[root].nbytes:
                self.memory[root] = have
                found.add(root)
            elif was_common:
                old = self.memory[root]
                self.memory[root] = aligned_bytes(old.nbytes)
                if len(writers[root]) > 1:  # of which some may not run again
                    self.memory[root][...] = old
            self.lent.discard(root)
        return [p for p in phases if any(b.base not in found for b in p.kernel.writes())]

    def _needed(self) -> set[Buffer]:
        """The params that runs read, or that kernels pack together with others."""
        needed = {b.base for phase in self.run.phases for b in phase.kernel.reads()}
        sources: dict[Buffer, set[Buffer]] = {}  # prepared buffer -> the params that it depends on
        for phase in self.prepare:
            own: set[Buffer] = set()
            for b in phase.kernel.reads():
                own |= {b.base} if b.base.kind == "param" else sources.get(b.base, set())
            for b in phase.kernel.writes():
                sources.setdefault(b.base, set()).update(own)
            if len(own) > 1:
                needed |= own
        return needed

    def own_params(self) -> dict[Buffer, Array]:
        """The params that a run or `prepare` still needs."""
        if not self.prepared:
            return self.params
        needed = self._needed()
        return {b: array for b, array in self.params.items() if b in needed}

    def _drop_packed(self) -> None:
        """Lets go of the params that nothing will read again: kernels that read no other params have packed them."""
        needed = self._needed() | self.residency.sources(self.params)
        for buffer in self.params.keys() - needed:
            del self.params[buffer]


def _constant_bytes(buffer: Buffer) -> Array:
    data = buffer.data
    assert data is not None
    if data.size == 0:
        return aligned_bytes(8)
    return np.require(data, requirements=["C", "A"]).reshape(-1).view(np.uint8)


def _is_mapped(array: Array) -> bool:
    """Whether kernels can read the array where it lies, in a memory-mapped file that nobody writes through it."""
    if array.flags.writeable or not array.flags.c_contiguous or not array.flags.aligned:
        return False
    return mapping_of(array) is not None


def _in_blocks(buffers: Sequence[Buffer]) -> dict[Buffer, Array]:
    """Memory for packed weights, in blocks that the system can map by large pages: streamed weights are read faster so.

    A block stays until nobody has any of its buffers, so it is not too large.
    """
    sizes = {b: max(-(-b.nbytes({}) // 64) * 64, 64) for b in buffers}
    blocks: list[list[Buffer]] = []
    room = 0
    for buffer in buffers:
        if sizes[buffer] > room or not blocks:
            blocks.append([])
            room = BLOCK
        blocks[-1].append(buffer)
        room -= sizes[buffer]
    found: dict[Buffer, Array] = {}
    for block in blocks:
        count = sum(sizes[b] for b in block)
        # NumPy asks the system for large pages in arrays of more than 4 MB
        memory = aligned_bytes(count, LARGE_PAGE if count > 2 * LARGE_PAGE else 64)
        at = 0
        for buffer in block:
            found[buffer] = memory[at : at + max(buffer.nbytes({}), 8)]
            at += sizes[buffer]
    return found
