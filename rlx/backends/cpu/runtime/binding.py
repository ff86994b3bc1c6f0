"""Binding: the operand words of all phases filled in for the extents of a run and the addresses of its memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends.cpu.native.entry import Patch
from rlx.backends.cpu.native.runner import HostCall, RunBlock
from rlx.backends.cpu.native.runner_ir import ERROR_KINDS, EXTENT_BEYOND_BOUND, HOST_CALL_RAISED
from rlx.backends.cpu.runtime.kernel_facts import mentioned, tested_names
from rlx.backends.cpu.schedule.arguments import (
    THREADS,
    Argument,
    Computed,
    KernelCode,
    Link,
    Pointer,
    Routine,
    Scratch,
    ScratchStride,
)
from rlx.errors import ExecutionError
from rlx.ir.extents import bind_result, check_all, check_extent
from rlx.ir.graph import Array
from rlx.ir.shape import Dim, Size, Symbol, evaluate, symbols
from rlx.ir.value import MAX_BYTES
from rlx.kernels.program import Buffer, Flow, Kernel
from rlx.records import dataclass

__all__ = ["Binding", "Overrun", "Phase", "Table", "aligned_bytes", "as_array"]

LARGE_PAGE = 2 << 20
NUMPY_ASKS = 4 << 20  # bytes of arrays from which on NumPy asks the system for large pages

HostArrays = Callable[[Buffer, Mapping[str, int]], Array]
Marks = Mapping[tuple[Flow, str], int]


class Overrun(ExecutionError):
    """A size that data decide is more than the run has room for; a run with more may do."""

    def __init__(self, message: str, name: str, value: int) -> None:
        super().__init__(message)
        self.name, self.value = name, value


@dataclass(frozen=True)
class Phase:
    """One entry of the phase table: code for a part of a kernel, or a host call (code None)."""

    kernel: Kernel
    code: KernelCode | None
    piece: bool = False  # one of those that make disjoint parts of the kernel's result
    cost: int = 0  # ns, about, of what may run beside others, see `rlx.backends.cpu.runtime.concurrent_phases`


def aligned_bytes(count: int, alignment: int = 64) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeros at an aligned address: artifacts hold them, and nothing of this process where they are never written.

    The system maps large ones in when they are first touched, those of a large page or more in large pages.
    """
    least = 0
    if count >= LARGE_PAGE:
        alignment, least = max(alignment, LARGE_PAGE), NUMPY_ASKS
    raw = np.zeros(max(count + alignment, least), np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + count]


def as_array(memory: Array, buffer: Buffer, offset: int, extents: Mapping[str, int]) -> Array:
    """The buffer's contents as an array over `memory`."""
    shape = tuple(evaluate(s, extents) for s in buffer.shape)
    element = buffer.dtype.numpy
    if math.prod(size or 1 for size in shape) * element.itemsize > MAX_BYTES:
        raise ExecutionError(
            f"{_at(extents)} the shape of {buffer.name!r} is {shape}: no array holds that, empty axes aside"
        )
    return memory[offset : offset + math.prod(shape) * element.itemsize].view(element).reshape(shape)


def _at(extents: Mapping[str, int]) -> str:
    return f"at the extents {', '.join(f'{name}={n}' for name, n in extents.items())}"


class Table:
    """The words of some phases, whatever the extents: each distinct size is listed, and so evaluated, once.

    After the words of the phases come those of loops: counters, the bases of words that depend on one, and the lists by
    which loops bring these up to date (see `rlx.backends.cpu.kernels.control`). `marks` are the phases that control
    flow goes to.
    """

    def __init__(
        self, phases: Sequence[Phase], addresses: Mapping[str, int], marks: Marks | None = None, *, threads: int = 1
    ) -> None:
        self.phases = tuple(phases)
        self.threads = threads  # that work is cut for
        self.addresses = addresses
        self.marks = marks or {}
        self.fixed: list[int] = []  # the words, 0 where a binding fills them in
        self.starts: list[int] = []  # by phase: the number of its first word
        self.sizes: dict[Size, int] = {}  # size -> its number
        self.sized: list[tuple[int, int]] = []  # (word, size)
        self.pointers: list[tuple[int, Buffer, int]] = []  # (word, root buffer, size that is added to its address)
        self.computed: list[tuple[int, Callable[[Mapping[str, int]], int], int]] = []  # (word, function, phase)
        self.scratch: list[int] = []
        self.strides: list[int] = []  # words that hold how far the scratch of workers lies apart
        self.links: list[tuple[int, Link]] = []
        loops = [p.kernel.mark.flow for p in phases if p.kernel.mark is not None and p.kernel.mark.part == "loop"]
        self.rounds = {flow.round.name: flow for flow in loops if flow.round is not None}
        self.moving: list[tuple[int, Argument, tuple[Flow, ...]]] = []  # (word, what it is, the loops it depends on)
        for number, phase in enumerate(phases):
            self.starts.append(len(self.fixed))
            for word in phase.code.words if phase.code else ():
                self._add(word, number)
        self._add_loops(loops)
        self.order = list(self.sizes)
        self.mentions = [mentioned(p.kernel) if p.kernel.kind != "control" else set() for p in phases]
        self.affected = functools.cache(self._affected)

    def _add(self, word: Argument, phase: int) -> None:
        number, value = len(self.fixed), 0
        match word:
            case Pointer(buffer=buffer, offset=offset):
                self._sized(number, word, buffer.offset + offset)
            case Computed(fn=fn):
                self.computed.append((number, fn, phase))
            case Routine(symbol=symbol):
                value = self.addresses[symbol]
            case Scratch():
                self.scratch.append(number)
            case ScratchStride():
                self.strides.append(number)
            case Link(flow=flow, what="start" | "else" | "end" as what):
                value = self.marks[flow, what]
            case Link():
                self.links.append((number, word))
            case int():
                value = word
            case _:
                self._sized(number, word, word)
        self.fixed.append(value)

    def _sized(self, number: int, word: Argument, size: Size) -> None:
        loops = tuple(self.rounds[s] for s in dict.fromkeys(s.name for s in symbols(size)) if s in self.rounds)
        if loops:
            self.moving.append((number, word, loops))
        elif isinstance(word, Pointer):
            self.pointers.append((number, word.buffer.base, self._size(size)))
        else:
            self.sized.append((number, self._size(size)))

    def _add_loops(self, loops: Sequence[Flow]) -> None:
        self.counters = {flow: len(self.fixed) + n for n, flow in enumerate(loops)}
        self.fixed.extend(0 for _ in loops)
        self.lists: dict[Flow, tuple[int, int]] = {}  # where the list of a loop starts, and how many words it is for
        self.cells: list[tuple[int, int]] = []  # (word, the word whose address it holds)
        self.terms: list[tuple[int, int, str]] = []  # (word, size, the symbol that it is to be the coefficient of)
        places = {}
        for number, word, _ in self.moving:
            places[number] = base = len(self.fixed)
            self.fixed.append(0)
            if isinstance(word, Pointer):
                self.pointers.append((base, word.buffer.base, self._size(word.buffer.offset + word.offset)))
            else:
                assert isinstance(word, Dim)
                self.sized.append((base, self._size(word)))
        for flow in loops:
            mine = [(number, word, depends) for number, word, depends in self.moving if flow in depends]
            self.lists[flow] = (len(self.fixed), len(mine))
            for number, word, depends in mine:
                size = word.buffer.offset + word.offset if isinstance(word, Pointer) else word
                assert isinstance(size, Dim)
                at = len(self.fixed)
                self.fixed.extend((0, 0, len(depends)))
                self.cells.extend(((at, number), (at + 1, places[number])))
                for other in depends:
                    assert other.round is not None
                    self.terms.append((len(self.fixed), self._size(size), other.round.name))
                    self.cells.append((len(self.fixed) + 1, self.counters[other]))
                    self.fixed.extend((0, 0))

    def _size(self, size: Size) -> int:
        return self.sizes.setdefault(size, len(self.sizes))

    def _affected(self, name: str) -> Affected:
        sizes = {n for size, n in self.sizes.items() if any(s.name == name for s in symbols(size))}
        phases = frozenset(
            n for n, (phase, found) in enumerate(zip(self.phases, self.mentions, strict=True)) if name in found
        )
        return Affected(
            [entry for entry in self.sized if entry[1] in sizes],
            [entry for entry in self.pointers if entry[2] in sizes],
            [entry for entry in self.terms if entry[1] in sizes],
            [entry for entry in self.computed if entry[2] in phases],
            sorted(phases),
        )

    def scratch_bytes(self, extents: Mapping[str, int]) -> int:
        """Bytes of scratch that one worker needs."""
        known = {**extents, THREADS: self.threads}
        return max((p.code.scratch_bytes(known) for p in self.phases if p.code), default=0)


@dataclass(frozen=True)
class Affected:
    """What a size that changes during a run changes: entries of a `Table`, and the numbers of phases."""

    sized: list[tuple[int, int]]
    pointers: list[tuple[int, Buffer, int]]
    terms: list[tuple[int, int, str]]
    computed: list[tuple[int, Callable[[Mapping[str, int]], int], int]]
    phases: list[int]


class Binding:
    """A table filled in: `rows` is the phase table. It keeps alive what its words point to, but not the arena.

    `room` says how much each size that data decide may be; `extents` has it as that size until it is known. `changing`
    is called before such a size changes during a run, and `resized` after; the run then goes on with `rows` as they are
    in `block`.
    """

    def __init__(
        self,
        table: Table,
        extents: Mapping[str, int],
        address: Callable[[Buffer], int],
        scratch: int,
        host_array: HostArrays,
        keep: object = None,
        *,
        room: Mapping[str, int] | None = None,
        dims: Mapping[str, Symbol] | None = None,
    ) -> None:
        self.table, self.keep, self.address = table, keep, address
        self.room, self.dims = dict(room or {}), dims or {}
        self.set_extents({**extents, **self.room, **dict.fromkeys(table.rounds, 0)})
        self.host_array = host_array
        self.block: RunBlock | None = None  # that runs it
        self.changing: Callable[[], None] = lambda: None
        self.resized: Callable[[], None] = lambda: None
        values = [evaluate(size, self.extents) for size in table.sizes]
        words = table.fixed.copy()
        stride = table.scratch_bytes(self.extents)
        for number, size in table.sized:
            words[number] = values[size]
        for number, fn, _ in table.computed:
            words[number] = fn(self.known)
        for number in table.scratch:
            words[number] = scratch
        for number in table.strides:
            words[number] = stride
        self.places: dict[Buffer, dict[int, int]] = {}  # root -> word -> byte offset, of all pointers into it
        for number, root, size in table.pointers:
            self.places.setdefault(root, {})[number] = values[size]
        try:
            self.words = np.array([*words, 0], np.int64)
        except OverflowError:
            raise ExecutionError(
                f"{_at(self.extents)} a tensor on the way has more elements, empty axes aside, than 63 bits count"
            ) from None
        base = int(self.words.ctypes.data)
        for number, cell in table.cells:
            self.words[number] = base + 8 * cell
        self._fill_terms(table.terms)
        for number, link in table.links:
            self.words[number] = self._linked(link, base)
        for root in self.places:
            self.point(root, address(root))
        self.hosts: dict[int, HostCall] = {}
        self.rows: list[tuple[int, int, int]] = []
        for number, (phase, start) in enumerate(zip(table.phases, table.starts, strict=True)):
            code = phase.code
            if code is None:
                call = self.hosts[number] = HostCall(self._host_function(number, phase.kernel))
                self.rows.append((call.address, base, self._host_chunks(phase.kernel)))
            else:
                self.rows.append((table.addresses[code.symbol], base + 8 * start, code.chunks(self.known)))

    def set_extents(self, extents: dict[str, int]) -> None:
        """Goes on with new objects: `once` tells extents apart by that."""
        self.extents = extents
        self.known = {**extents, THREADS: self.table.threads}

    def _fill_terms(self, terms: Sequence[tuple[int, int, str]]) -> None:
        """The coefficients of what depends on the number of a round: how much one more round adds."""
        for number, size, name in terms:
            expression = self.table.order[size]
            self.words[number] = evaluate(expression, {**self.extents, name: 1}) - evaluate(expression, self.extents)

    def _linked(self, link: Link, base: int) -> int:
        match link.what:
            case "counter":
                return base + 8 * self.table.counters[link.flow]
            case "updates":
                return base + 8 * self.table.lists[link.flow][0]
            case "length":
                return self.table.lists[link.flow][1]
            case "most":
                assert link.flow.count is not None
                return self.room[link.flow.count.name]
        raise AssertionError(f"no word for {link.what}")

    def patches(self, inputs: Sequence[Buffer]) -> list[Patch]:
        """The words that each run fills in with the addresses of its inputs."""
        base = int(self.words.ctypes.data)
        return [
            (number, base + 8 * word, shift)
            for number, root in enumerate(inputs)
            for word, shift in self.places.get(root, {}).items()
        ]

    # ---- sizes that data decide

    def settle(self, kernel: Kernel, found: Mapping[str, int]) -> None:
        """Goes on with these sizes. `ExecutionError` where one is beyond its bound, `Overrun` beyond the room."""
        for name, value in found.items():
            check_extent(self.dims[name], value, f"node {kernel.label}")
            if value > self.room[name]:
                raise Overrun(f"node {kernel.label}: there is no room for {name!r} = {value}", name, value)
        changed = [name for name, value in found.items() if self.extents[name] != value]
        if changed:
            self.changing()
            self.set_extents({**self.extents, **found})
            for name in changed:
                self._resize(self.table.affected(name))
            self.resized()

    def _resize(self, affected: Affected) -> None:
        table, sizes = self.table, self.table.order
        for number, size in affected.sized:
            self.words[number] = evaluate(sizes[size], self.extents)
        for number, root, size in affected.pointers:
            shift = evaluate(sizes[size], self.extents)
            self.words[number] += shift - self.places[root][number]
            self.places[root][number] = shift
        self._fill_terms(affected.terms)
        for number, fn, _ in affected.computed:
            self.words[number] = fn(self.known)
        for number in affected.phases:
            code = table.phases[number].code
            if code is not None:
                function, words, _ = self.rows[number]
                self.rows[number] = (function, words, code.chunks(self.known))
                if self.block is not None:
                    self.block.table[number, 2] = self.rows[number][2]

    def scratch_bytes(self) -> int:
        """Bytes of scratch that one worker needs at the present extents."""
        return self.table.scratch_bytes(self.extents)

    def rescratch(self, address: int) -> None:
        """Moves the scratch memory, which is as large as it has to be at the present extents."""
        for number in self.table.scratch:
            self.words[number] = address
        stride = self.scratch_bytes()
        for number in self.table.strides:
            self.words[number] = stride

    # ---- host calls

    def _host_chunks(self, kernel: Kernel) -> int:
        """0 for what holds already: checks of sizes that the inputs tell."""
        extents = kernel.extents
        if extents is None or extents.sizes:
            return 1
        sizes = [size for g in extents.checks for size in (g.lhs, g.rhs)]
        open_ = any(s.name in self.room or s.name in self.table.rounds for size in sizes for s in symbols(size))
        return int(open_ or any(evaluate(g.lhs, self.extents) != evaluate(g.rhs, self.extents) for g in extents.checks))

    def _host_function(self, number: int, kernel: Kernel) -> Callable[[], None]:
        if kernel.extents is not None:
            return lambda: self._take_in(kernel)
        if self.room.keys() & self.table.mentions[number] or kernel.makes:
            return lambda: self._sized_host_call(kernel)
        return host_function(kernel, self.extents, self.host_array)

    def _sized_host_call(self, kernel: Kernel) -> None:
        """A host call on operands, or with results, of sizes that data decide."""
        if not kernel.makes:
            host_function(kernel, self.extents, self.host_array)()
            return
        node, made = kernel.host, {s.name for s in kernel.makes}
        assert node is not None
        op: Any = node.op.at({n: v for n, v in self.extents.items() if n not in made})  # type: ignore[attr-defined]
        results = op.reference(*(self.host_array(b, self.extents).copy() for b in kernel.operands))
        results = tuple(map(np.asarray, results if isinstance(results, tuple) else (results,)))
        known = {name: value for name, value in self.extents.items() if name not in made}
        for buffer, result in zip(kernel.results, results, strict=True):
            bind_result(f"node {kernel.label}", buffer.shape, result.shape, known)
        self.settle(kernel, {name: known[name] for name in made})
        for buffer, result in zip(kernel.results, results, strict=True):
            self.host_array(buffer, self.extents)[...] = result

    def _take_in(self, kernel: Kernel) -> None:
        """Settles the sizes that are known by now, and checks what depends on them."""
        extents = kernel.extents
        assert extents is not None
        found = {}
        for symbol, source in extents.sizes:
            at = self.table.counters[source] if isinstance(source, Flow) else None
            found[symbol.name] = int(self.words[at]) if at is not None else evaluate(source, self.extents)  # type: ignore[arg-type]
        self.settle(kernel, found)
        check_all(extents.checks, self.extents)

    def point(self, root: Buffer, address: int) -> None:
        """Makes every word that points into a root buffer do so at this address."""
        for number, shift in self.places.get(root, {}).items():
            self.words[number] = address + shift

    def error(self, block: RunBlock, status: int) -> Exception:
        """The exception for a nonzero status of the last run; raises what is not an Exception (KeyboardInterrupt)."""
        number = block.failed_phase
        kernel = self.table.phases[number].kernel
        label = kernel.label
        if status & 255 == EXTENT_BEYOND_BOUND and kernel.mark is not None and kernel.mark.flow.count is not None:
            return self._too_many_rounds(kernel.mark.flow.count, label, block.value)
        if status & 255 == HOST_CALL_RAISED:
            call = self.hosts[number]
            cause, call.error = call.error, None
            if isinstance(cause, ExecutionError):
                named = str(cause).startswith("node ") or not kernel.nodes
                return cause if named else ExecutionError(f"node {label}: {cause}")
            if not isinstance(cause, Exception):
                assert cause is not None
                raise cause
            made = ExecutionError(f"node {label}: its host call raised {type(cause).__name__}: {cause}")
            made.__cause__ = cause
            return made
        what = ERROR_KINDS.get(status & 255, f"status {status}")
        shown = f" (value {block.value})" if status & 255 in VALUED else ""
        return ExecutionError(f"node {tested_names(kernel) or label}: {what}{shown}")

    def _too_many_rounds(self, count: Symbol, label: str, value: int) -> Exception:
        try:
            check_extent(count, value, f"node {label}")
        except ExecutionError as error:
            return error
        return Overrun(f"node {label}: there is no room for {count.name!r} = {value}", count.name, value)


VALUED = (1, 4)  # index out of range and extent beyond its bound come with the index or extent


def host_function(kernel: Kernel, extents: Mapping[str, int], array: HostArrays) -> Callable[[], None]:
    """The host call of a kernel: the op's reference on copies of the operands, checked against what it infers."""
    node = kernel.host
    assert node is not None
    op: Any = node.op.at(extents)  # type: ignore[attr-defined]
    operands = [array(b, extents) for b in kernel.operands]
    outputs = [array(b, extents) for b in kernel.results]

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
