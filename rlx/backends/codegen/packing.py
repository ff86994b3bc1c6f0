"""What of `prepare` has to run again once params change, and which weights nothing reads afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from rlx.kernels.prepared import kept_leaves
from rlx.kernels.program import Buffer, Kernel, Program

__all__ = ["Packing"]


class Packing:
    """The phases of `prepare`, by their kernels: what each reads and writes, as root buffers."""

    step = 32 << 20  # bytes of params that are brought before what can be made of them is made

    def __init__(self, program: Program, kernels: Sequence[Kernel]) -> None:
        self.params, self.constants = program.params, program.constants
        self.reads = [{b.base for b in kernel.reads()} for kernel in kernels]
        self.writes = [{b.base for b in kernel.writes()} for kernel in kernels]
        self.writers = Counter(root for written in self.writes for root in written)
        self.needed = kept_leaves(program)

    def outdated(self, changed: Collection[Buffer]) -> set[int]:
        """The phases whose results depend on these params."""
        touched, found = set(changed), set()
        for number, reads in enumerate(self.reads):
            if reads & touched:
                found.add(number)
                touched |= self.writes[number]
        return found

    def ready(self, stale: AbstractSet[int], absent: AbstractSet[Buffer]) -> list[int]:
        """Those of some phases that depend on no param that is still to come."""
        blocked, found = set(absent), []
        for number in sorted(stale):
            if self.reads[number] & blocked:
                blocked |= self.writes[number]
            else:
                found.append(number)
        return found

    def spent(self, stale: AbstractSet[int], there: Collection[Buffer]) -> list[Buffer]:
        """The params and constants among some that neither runs nor these phases read."""
        used = self.needed.union(*(self.reads[number] for number in stale))
        return [b for b in there if b.kind in ("param", "const") and b not in used]

    def loading_bytes(self) -> int:
        """What is there at the most while all params are brought, beside what of them, and made of them, stays."""
        there = {b: b.nbytes({}) for b in self.constants}
        stale, absent, brought, most = set(range(len(self.reads))), set(self.params), 0, 0
        for root in (*self.params, None):
            if root is not None:
                absent.discard(root)
                there[root] = root.nbytes({})
                brought += there[root]
            if brought < self.step and root is not None:
                continue
            ready, brought = self.ready(stale, absent), 0
            there |= {b: b.nbytes({}) for number in ready for b in self.writes[number]}
            most = max(most, sum(there.values()))
            stale.difference_update(ready)
            for b in self.spent(stale, there):
                del there[b]
        return most - sum(there.values())
