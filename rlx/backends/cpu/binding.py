"""Binding: the operand words of all phases filled in for the extents of a run and the addresses of its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.backends.cpu.runner import BUSY_STATUS, ERROR_KINDS, HOST_CALL_RAISED, HostCall, RunBlock
from rlx.backends.cpu.words import Computed, KernelCode, Pointer, Routine, Scratch, Word
from rlx.errors import BusyError, ExecutionError
from rlx.ir.graph import Array, Node
from rlx.ir.shape import Size, evaluate
from rlx.kernels.expr import Check, walk
from rlx.kernels.lowering import lower_node
from rlx.kernels.program import Buffer, Kernel, node_names

__all__ = ["Binding", "Phase", "Table", "aligned_bytes", "as_array"]

HostArrays = Callable[[Buffer], Array]


@dataclass(frozen=True)
class Phase:
    """One entry of the phase table: code for a part of a kernel, or a host call (code None)."""

    kernel: Kernel
    code: KernelCode | None


def aligned_bytes(count: int, alignment: int = 64) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes at an aligned address; the system maps large ones in when they are first touched."""
    raw = np.empty(count + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + count]


def as_array(memory: Array, buffer: Buffer, offset: int, extents: Mapping[str, int]) -> Array:
    """The buffer's contents as an array over `memory`."""
    shape = tuple(evaluate(s, extents) for s in buffer.shape)
    nbytes = int(np.prod(shape, dtype=np.int64)) * buffer.dtype.numpy.itemsize
    return memory[offset : offset + nbytes].view(buffer.dtype.numpy).reshape(shape)


class Table:
    """The words of some phases, whatever the extents: each distinct size is listed, and so evaluated, once."""

    def __init__(self, phases: Sequence[Phase], addresses: Mapping[str, int]) -> None:
        self.phases = tuple(phases)
        self.addresses = addresses
        self.fixed: list[int] = []  # the words, 0 where a binding fills them in
        self.starts: list[int] = []  # by phase: the number of its first word
        self.sizes: dict[Size, int] = {}  # size -> its number
        self.sized: list[tuple[int, int]] = []  # (word, size)
        self.pointers: list[tuple[int, Buffer, int]] = []  # (word, root buffer, size that is added to its address)
        self.computed: list[tuple[int, Callable[[Mapping[str, int]], int]]] = []
        self.scratch: list[int] = []
        for phase in phases:
            self.starts.append(len(self.fixed))
            for word in phase.code.words if phase.code else ():
                self._add(word)

    def _add(self, word: Word) -> None:
        number, value = len(self.fixed), 0
        match word:
            case Pointer(buffer=buffer, offset=offset):
                self.pointers.append((number, buffer.base, self._size(buffer.offset + offset)))
            case Computed(fn=fn):
                self.computed.append((number, fn))
            case Routine(symbol=symbol):
                value = self.addresses[symbol]
            case Scratch():
                self.scratch.append(number)
            case int():
                value = word
            case _:
                self.sized.append((number, self._size(word)))
        self.fixed.append(value)

    def _size(self, size: Size) -> int:
        return self.sizes.setdefault(size, len(self.sizes))

    def scratch_bytes(self, extents: Mapping[str, int]) -> int:
        """Bytes of scratch that one worker needs."""
        return max((p.code.scratch_bytes(extents) for p in self.phases if p.code), default=0)


class Binding:
    """A table filled in: `rows` is the phase table. It keeps alive what its words point to, but not the arena."""

    def __init__(
        self,
        table: Table,
        extents: Mapping[str, int],
        address: Callable[[Buffer], int],
        scratch: int,
        host_array: HostArrays,
        keep: object = None,
    ) -> None:
        self.table, self.extents, self.keep = table, extents, keep
        values = [evaluate(size, extents) for size in table.sizes]
        words = table.fixed.copy()
        for number, size in table.sized:
            words[number] = values[size]
        for number, fn in table.computed:
            words[number] = fn(extents)
        for number in table.scratch:
            words[number] = scratch
        self.places: dict[Buffer, list[tuple[int, int]]] = {}  # root -> (word, byte offset) of all pointers into it
        for number, root, size in table.pointers:
            self.places.setdefault(root, []).append((number, values[size]))
        self.words = np.array([*words, 0], np.int64)
        for root in self.places:
            self.point(root, address(root))
        self.hosts: dict[int, HostCall] = {}
        self.rows: list[tuple[int, int, int]] = []
        base = int(self.words.ctypes.data)
        for number, (phase, start) in enumerate(zip(table.phases, table.starts, strict=True)):
            code = phase.code
            if code is None:
                call = self.hosts[number] = HostCall(host_function(phase.kernel, extents, host_array))
                self.rows.append((call.address, base, 1))
            else:
                self.rows.append((table.addresses[code.symbol], base + 8 * start, code.chunks(extents)))

    def point(self, root: Buffer, address: int) -> None:
        """Makes every word that points into a root buffer do so at this address."""
        for number, shift in self.places.get(root, ()):
            self.words[number] = address + shift

    def error(self, block: RunBlock, status: int) -> Exception:
        """The exception for a nonzero status of the last run; raises what is not an Exception (KeyboardInterrupt)."""
        if status == BUSY_STATUS:
            return BusyError("the compiled graph is running in another thread; use `clone()` for one graph a thread")
        number = block.failed_phase
        kernel = self.table.phases[number].kernel
        label = kernel.label
        if status & 255 == HOST_CALL_RAISED:
            call = self.hosts[number]
            cause, call.error = call.error, None
            if not isinstance(cause, Exception):
                assert cause is not None
                raise cause
            made = ExecutionError(f"node {label}: its host call raised {type(cause).__name__}: {cause}")
            made.__cause__ = cause
            return made
        what = ERROR_KINDS.get(status & 255, f"status {status}")
        shown = f" (value {block.value})" if status & 255 in VALUED else ""
        tested = node_names([n for n in kernel.nodes if _tests(n)])  # not those that were fused with it
        return ExecutionError(f"node {tested or label}: {what}{shown}")


def _tests(node: Node) -> bool:
    """Whether the node's own code can stop a run."""
    lowered = lower_node(node)
    pieces = () if lowered is None else (p for output in lowered.outputs for p in output)
    return any(isinstance(x, Check) for piece in pieces for x in walk(piece.expr))


VALUED = (1, 4)  # index out of range and extent beyond its bound come with the index or extent


def host_function(kernel: Kernel, extents: Mapping[str, int], array: HostArrays) -> Callable[[], None]:
    """The host call of a kernel: the op's reference on copies of the operands, checked against what it infers."""
    node = kernel.host
    assert node is not None
    op: Any = node.op.at(extents)  # type: ignore[attr-defined]
    operands = [array(b) for b in kernel.operands]
    outputs = [array(b) for b in kernel.results]

    def call() -> None:
        made = op.reference(*(a.copy() for a in operands))
        results = made if isinstance(made, tuple) else (made,)
        if len(results) != len(outputs):
            raise ExecutionError(f"reference gave {len(results)} results, infer says {len(outputs)}")
        for target, result in zip(outputs, map(np.asarray, results), strict=True):
            if result.shape != target.shape or result.dtype != target.dtype:
                raise ExecutionError(
                    f"reference gave {result.dtype}{list(result.shape)}, infer says {target.dtype}{list(target.shape)}"
                )
            target[...] = result

    return call
