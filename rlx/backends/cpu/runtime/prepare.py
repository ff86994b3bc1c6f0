"""Packing the weights that the clones of a compiled graph have in common: after compiling, and when params change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.codegen.binding import Views
from rlx.backends.codegen.table import Phase, Table
from rlx.backends.cpu.native.runner import RunBlock
from rlx.backends.cpu.runtime import packed_weights
from rlx.backends.cpu.runtime.binding import Binding, aligned_bytes
from rlx.backends.cpu.runtime.residency import Mask
from rlx.ir.graph import Array
from rlx.ir.mapped import copied, copy_to, give_back, mapping_of
from rlx.kernels.program import Buffer
from rlx.progress import report

if TYPE_CHECKING:
    from rlx.backends.cpu.runtime.shared import Shared

__all__ = ["allocated", "needed_params", "pack_outdated", "place_experts"]

BLOCK = 32 << 20  # bytes of packed weights that are allocated together


def pack_outdated(shared: Shared) -> None:
    """Runs the part of `prepare` that depends on the params that have changed."""
    outdated = _outdated(shared)
    partly = {b for phase in outdated for b in phase.kernel.writes()} & shared.residency.masks.keys()
    outdated = [phase for phase in outdated if partly.isdisjoint(phase.kernel.writes())]
    phases = _unshared(shared, outdated)
    report("pack")
    groups = _groups(phases)
    needed = needed_params(shared)
    _settle(shared)
    copies = _Copies(shared)
    for number, group in enumerate(groups):
        report("pack", number / len(groups))
        with copies.of(_sources(shared, group)):
            _run(shared, group)
        sources = _sources(shared, group)  # go in step, so that memory never holds both forms of all weights
        give_back(sources.values())
        _drop_constants(shared, sources.keys() - needed)
    give_back(_sources(shared, phases).values(), whole=True)  # what passes have looked at, too
    for buffer in {b.base for phase in phases for b in phase.kernel.writes()}:
        packed_weights.offer(shared.keys[buffer], shared.memory[buffer])
    for panels in partly:
        _place(shared, panels, shared.residency.masks[panels], None)
    shared.prepared = True
    shared.dirty.clear()
    _drop_packed(shared, needed)
    shared.watch_tables()


def _run(shared: Shared, phases: Sequence[Phase]) -> None:
    table = Table(phases, shared.addresses, threads=shared.threads)
    scratch = aligned_bytes(table.scratch_bytes({}) * shared.threads)
    binding = Binding(table, {}, shared.address, int(scratch.ctypes.data), Views(lambda b, _: shared.contents(b)))
    block = RunBlock(binding.rows, threads=shared.threads)
    status = block.run()
    if status:
        raise binding.error(block, status)


def _sources(shared: Shared, phases: Sequence[Phase]) -> dict[Buffer, Array]:
    """The params and constants that these phases read, where they lie."""
    roots = dict.fromkeys(b.base for phase in phases for b in phase.kernel.reads())
    found = {root: shared.params.get(root) if root.kind == "param" else root.data for root in roots}
    return {root: array for root, array in found.items() if array is not None}


class _Copies:
    """Params that lie in a file where kernels can't read them, copied for a group of phases.

    All groups have the same memory for that: the system clears what it gives anew, which takes longer than to copy.
    """

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.memory = aligned_bytes(0)

    @contextmanager
    def of(self, sources: Mapping[Buffer, Array]) -> Iterator[None]:
        """Within the block the params have the copies as their values."""
        odd = {root: array for root, array in sources.items() if root.kind == "param" and not array.flags.aligned}
        sizes = [-(-array.nbytes // 64) * 64 for array in odd.values()]
        if sum(sizes) > self.memory.nbytes:
            self.memory = aligned_bytes(sum(sizes))
        at = 0
        for (root, array), size in zip(odd.items(), sizes, strict=True):
            copy = self.memory[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            copy_to(copy, array)
            self.shared.params[root] = copy
            at += size
        try:
            yield
        finally:
            self.shared.params |= odd


def _settle(shared: Shared) -> None:
    """Copies the params that runs read, and that lie in a file where kernels can't read them."""
    read = {b.base for phase in shared.run.phases for b in phase.kernel.reads()}
    read |= {b.base for _, b in shared.program.outputs}
    for root in [root for root, array in shared.params.items() if root in read and not array.flags.aligned]:
        there = shared.params[root]
        shared.params[root] = copied(there)
        give_back([there])


def _groups(phases: Sequence[Phase]) -> list[Sequence[Phase]]:
    """The phases in parts that read and write some bytes each: what they read can go when a part is done."""
    groups: list[list[Phase]] = [[]]
    room = BLOCK
    for phase in phases:
        groups[-1].append(phase)
        room -= sum(b.nbytes({}) for b in (*phase.kernel.reads(), *phase.kernel.writes()))
        if room <= 0:
            groups.append([])
            room = BLOCK
    return [group for group in groups if group]


def place_experts(shared: Shared, masks: Mapping[Buffer, Mask]) -> None:
    """Has panels of these experts only, by weight."""
    for panels, mask in masks.items():
        if np.array_equal(mask, shared.residency.mask(shared.residency.weights[panels])):
            continue
        if shared.prepared:
            _place(shared, panels, mask, shared.memory[panels])
        elif mask.all():
            shared.residency.masks.pop(panels, None)
        else:
            shared.residency.masks[panels] = mask
    if shared.prepared:
        _drop_packed(shared, needed_params(shared))


def _place(shared: Shared, panels: Buffer, mask: Mask, have: Array | None) -> None:
    source = shared.residency.weights[panels].source
    root = source.base
    there = root in shared.params or root.kind == "const"
    stays = there and (root.kind != "param" or mapping_of(shared.params[root]) is not None)
    whole = shared.contents(source) if there else None
    shared.memory[panels] = shared.residency.place(shared.residency.weights[panels], mask, have, whole, stays)
    shared.keys[panels] = None
    shared.lent.discard(panels)


def allocated(shared: Shared, buffers: Sequence[Buffer]) -> dict[Buffer, Array]:
    """Memory for prepared buffers; that of experts' panels is given back by itshared."""
    alone = shared.residency.weights
    return _in_blocks([b for b in buffers if b not in alone]) | {
        b: aligned_bytes(8 if b in shared.residency.masks else max(b.nbytes({}), 8)) for b in buffers if b in alone
    }


def _outdated(shared: Shared) -> list[Phase]:
    changed = set(shared.dirty)
    phases = []
    for phase in shared.prepare:
        reads = {b.base for b in phase.kernel.reads()}
        if reads & changed or not shared.prepared:
            changed.update(b.base for b in phase.kernel.writes())
            phases.append(phase)
    return phases


def _unshared(shared: Shared, phases: Sequence[Phase]) -> list[Phase]:
    """Those of the phases that are left to run: what they, or another graph, make of equal weights is made once.

    The rest get memory of their own to write to, where others may read what they had before.
    """
    writers: dict[Buffer, list[Phase]] = {}
    for phase in shared.prepare:
        for root in {b.base for b in phase.kernel.writes()}:
            writers.setdefault(root, []).append(phase)
    found: set[Buffer] = set()
    own: dict[str | None, Array] = {}  # what these phases make, by its key
    for root in dict.fromkeys(b.base for phase in phases for b in phase.kernel.writes()):
        was_common = shared.keys.get(root) is not None or root in shared.lent
        key = shared.keys[root] = packed_weights.key_of(writers[root], shared.keys)
        have = own.get(key) if key in own else packed_weights.find(key)
        if have is not None and have.nbytes == shared.memory[root].nbytes:
            shared.memory[root] = have
            found.add(root)
        elif was_common:
            old = shared.memory[root]
            shared.memory[root] = aligned_bytes(old.nbytes)
            if len(writers[root]) > 1:  # of which some may not run again
                shared.memory[root][...] = old
        if key is not None:
            own.setdefault(key, shared.memory[root])
        shared.lent.discard(root)
    return [p for p in phases if any(b.base not in found for b in p.kernel.writes())]


def needed_params(shared: Shared) -> set[Buffer]:
    """The params that runs read, or that kernels pack together with others; among them constants that runs read."""
    kernels = {id(phase.kernel): phase.kernel for phase in shared.run.phases}.values()  # phases share them
    needed = {b.base for kernel in kernels for b in kernel.reads()}
    sources: dict[Buffer, set[Buffer]] = {}  # prepared buffer -> the params that it depends on
    for phase in shared.prepare:
        own: set[Buffer] = set()
        for b in phase.kernel.reads():
            own |= {b.base} if b.base.kind == "param" else sources.get(b.base, set())
        for b in phase.kernel.writes():
            sources.setdefault(b.base, set()).update(own)
        if len(own) > 1:
            needed |= own
    return needed


def _drop_packed(shared: Shared, needed: AbstractSet[Buffer]) -> None:
    """Lets go of what nothing will read again: params that kernels have packed alone, copies of packed constants."""
    for buffer in shared.params.keys() - needed - shared.residency.sources(shared.params):
        del shared.params[buffer]
    _drop_constants(shared, shared.memory.keys() - needed)


def _drop_constants(shared: Shared, buffers: Iterable[Buffer]) -> None:
    """Lets go of copies of constants."""
    for buffer in buffers:
        if buffer.kind == "const":
            shared.memory.pop(buffer, None)


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
        memory = aligned_bytes(count)
        at = 0
        for buffer in block:
            found[buffer] = memory[at : at + max(buffer.nbytes({}), 8)]
            at += sizes[buffer]
    return found
