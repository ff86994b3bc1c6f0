"""Binding: the words of all phases filled in for the extents of a run and the addresses of its memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlx.backends.codegen.arguments import THREADS, Link
from rlx.backends.codegen.table import Affected, Table
from rlx.errors import ExecutionError
from rlx.ir.dtype import pack, unpack
from rlx.ir.extents import bind_result, check_all, check_extent, uneven_rows
from rlx.ir.graph import Array, Graph
from rlx.ir.shape import Symbol, evaluate, symbols
from rlx.ir.value import MAX_BYTES
from rlx.kernels.program import Buffer, Flow, Kernel, Program

__all__ = [
    "FIRST_ROOM",
    "Binding",
    "HostMemory",
    "Overrun",
    "Views",
    "as_array",
    "grows",
    "host_function",
    "initial",
    "room_for",
    "settable",
]

FIRST_ROOM = 16  # for a size that data decide and nothing bounds; a run that needs more starts again with more


class HostMemory(Protocol):
    """How host calls reach the memory of the device, at the extents of a run."""

    def reader(self, buffer: Buffer, extents: Mapping[str, int]) -> Callable[[], Array]:
        """What gives a copy of a buffer's contents."""

    def writer(self, buffer: Buffer, extents: Mapping[str, int]) -> Callable[[Array], None]:
        """What takes over an array of the buffer's shape and type as its contents."""


class Views:
    """The memory of a device whose buffers are arrays of the host: `array` gives a buffer as a view of it."""

    def __init__(self, array: Callable[[Buffer, Mapping[str, int]], Array]) -> None:
        self.array = array

    def reader(self, buffer: Buffer, extents: Mapping[str, int]) -> Callable[[], Array]:
        if not buffer.is_packed:
            return self.array(buffer, extents).copy
        source = self.array(buffer.bytes, extents)
        shape = tuple(evaluate(s, extents) for s in buffer.shape)
        return lambda: unpack(source, buffer.dtype, shape)

    def writer(self, buffer: Buffer, extents: Mapping[str, int]) -> Callable[[Array], None]:
        packed = buffer.is_packed
        target = self.array(buffer.bytes if packed else buffer, extents)

        def write(made: Array) -> None:
            target[...] = pack(made) if packed else made

        return write


class Overrun(ExecutionError):
    """A size that data decide is more than the run has room for; a run with more may do."""

    def __init__(self, message: str, name: str, value: int) -> None:
        super().__init__(message)
        self.name, self.value = name, value


def as_array(memory: Array, buffer: Buffer, offset: int, extents: Mapping[str, int]) -> Array:
    """The buffer's contents as an array over `memory`; a copy where its elements are packed."""
    shape = tuple(evaluate(s, extents) for s in buffer.shape)
    element = buffer.dtype.numpy
    if math.prod(size or 1 for size in shape) * element.itemsize > MAX_BYTES:
        raise ExecutionError(
            f"{_at(extents)} the shape of {buffer.name!r} is {shape}: no array holds that, empty axes aside"
        )
    if buffer.is_packed:
        return unpack(memory[offset : offset + buffer.dtype.nbytes(math.prod(shape))], buffer.dtype, shape)
    return memory[offset : offset + math.prod(shape) * element.itemsize].view(element).reshape(shape)


def _at(extents: Mapping[str, int]) -> str:
    return f"at the extents {', '.join(f'{name}={n}' for name, n in extents.items())}"


class Binding:
    """A table filled in: `words` are its words. It keeps alive what these point to (`keep`).

    `address` is where a root buffer lies in the device's memory, `scratch` where its scratch memory starts;
    `host` is what host calls read and write. `room` says how much each size that data
    decide may be; `extents` has it as that size until it is known. `changing` is called before such a size changes
    during a run, and `resized` after.
    """

    def __init__(
        self,
        table: Table,
        extents: Mapping[str, int],
        address: Callable[[Buffer], int],
        scratch: int,
        host: HostMemory,
        keep: object = None,
        *,
        room: Mapping[str, int] | None = None,
        dims: Mapping[str, Symbol] | None = None,
    ) -> None:
        self.table, self.keep, self.address = table, keep, address
        self.room, self.dims = dict(room or {}), dims or {}
        self.set_extents({**extents, **self.room, **dict.fromkeys(table.rounds, 0)})
        self.host = host
        self.changing: Callable[[], None] = lambda: None
        self.resized: Callable[[], None] = lambda: None
        values = [evaluate(size, self.extents) for size in table.sizes]
        words = table.fixed.copy()
        stride = self.scratch_bytes()
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

    def set_extents(self, extents: dict[str, int]) -> None:
        """Goes on with new objects: `once` tells extents apart by that."""
        self.extents = extents
        self.known = {**extents, THREADS: self.table.threads}

    def at_round(self) -> dict[str, int]:
        """The extents, with the numbers of the rounds that loops are in."""
        counters = self.table.counters
        return {**self.extents, **{name: int(self.words[counters[flow]]) for name, flow in self.table.rounds.items()}}

    def arguments(self, number: int) -> list[int]:
        """The words of a phase, as its launch takes them."""
        start = self.table.starts[number]
        code = self.table.phases[number].code
        return self.words[start : start + (len(code.words) if code is not None else 0)].tolist()  # type: ignore[no-any-return]

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

    # ---- sizes that data decide

    def settle(self, kernel: Kernel, found: Mapping[str, int]) -> None:
        """Goes on with these sizes. `ExecutionError` where one is beyond its bound, `Overrun` beyond the room.

        What a later round of a loop decides has to be what its first did if rows of that size are stacked.
        """
        for name, value in found.items():
            check_extent(self.dims[name], value, f"node {kernel.label}")
            if value > self.room[name]:
                raise Overrun(f"node {kernel.label}: there is no room for {name!r} = {value}", name, value)
        changed = [name for name, value in found.items() if self.extents[name] != value]
        if changed:
            for name in changed:
                flows = self.table.stacked.get((kernel, name), ())
                if any(self.words[self.table.counters[flow]] > 0 for flow in flows):
                    raise uneven_rows(f"node {kernel.label}: {name!r}", self.extents[name], found[name])
            self.changing()
            self.set_extents({**self.extents, **found})
            for name in changed:
                self._resize(self.table.affected(name))
            self.resized()

    def _resize(self, affected: Affected) -> None:
        sizes = self.table.order
        for number, size in affected.sized:
            self.words[number] = evaluate(sizes[size], self.extents)
        for number, root, size in affected.pointers:
            shift = evaluate(sizes[size], self.extents)
            self.words[number] += shift - self.places[root][number]
            self.places[root][number] = shift
        self._fill_terms(affected.terms)
        for number, fn, _ in affected.computed:
            self.words[number] = fn(self.known)

    def scratch_bytes(self) -> int:
        """Bytes of scratch that one worker needs at the present extents."""
        return self.table.scratch_bytes(self.known)

    def rescratch(self, address: int) -> None:
        """Moves the scratch memory, which is as large as it has to be at the present extents."""
        for number in self.table.scratch:
            self.words[number] = address
        stride = self.scratch_bytes()
        for number in self.table.strides:
            self.words[number] = stride

    # ---- host calls

    def host_chunks(self, kernel: Kernel) -> int:
        """The number of chunks of a host call: 0 for what holds already: checks of sizes that the inputs tell."""
        extents = kernel.extents
        if extents is None or extents.sizes:
            return 1
        sizes = [size for g in extents.checks for size in (g.lhs, g.rhs)]
        open_ = any(s.name in self.room or s.name in self.table.rounds for size in sizes for s in symbols(size))
        return int(open_ or any(evaluate(g.lhs, self.extents) != evaluate(g.rhs, self.extents) for g in extents.checks))

    def host_call(self, number: int, kernel: Kernel) -> Callable[[], None]:
        """What the phase of that number does where it has no code."""
        if kernel.extents is not None:
            return lambda: self._take_in(kernel)
        if self.room.keys() & self.table.mentions[number] or kernel.makes:
            return lambda: self._sized_host_call(kernel)
        return host_function(kernel, self.extents, self.host)

    def _sized_host_call(self, kernel: Kernel) -> None:
        """A host call on operands, or with results, of sizes that data decide."""
        if not kernel.makes:
            host_function(kernel, self.extents, self.host)()
            return
        node, made = kernel.host, {s.name for s in kernel.makes}
        assert node is not None
        op: Any = node.op.at({n: v for n, v in self.extents.items() if n not in made})  # type: ignore[attr-defined]
        results = op.reference(*(self.host.reader(b, self.extents)() for b in kernel.operands))
        results = tuple(map(np.asarray, results if isinstance(results, tuple) else (results,)))
        known = {name: value for name, value in self.extents.items() if name not in made}
        for buffer, result in zip(kernel.results, results, strict=True):
            bind_result(f"node {kernel.label}", buffer.shape, result.shape, known)
        self.settle(kernel, {name: known[name] for name in made})
        for buffer, result in zip(kernel.results, results, strict=True):
            self.host.writer(buffer, self.extents)(result)

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

    def too_many_rounds(self, count: Symbol, label: str, value: int) -> Exception:
        """The error of a loop that needs more rounds than its bound, or than there is room for."""
        try:
            check_extent(count, value, f"node {label}")
        except ExecutionError as error:
            return error
        return Overrun(f"node {label}: there is no room for {count.name!r} = {value}", count.name, value)


def host_function(kernel: Kernel, extents: Mapping[str, int], host: HostMemory) -> Callable[[], None]:
    """The host call of a kernel: the op's reference on copies of the operands, checked against what it infers."""
    node = kernel.host
    assert node is not None
    op: Any = node.op.at(extents)  # type: ignore[attr-defined]
    operands = [host.reader(b, extents) for b in kernel.operands]
    outputs = [
        (tuple(evaluate(s, extents) for s in b.shape), b.dtype.numpy, host.writer(b, extents)) for b in kernel.results
    ]

    def call() -> None:
        made = op.reference(*(read() for read in operands))
        results = made if isinstance(made, tuple) else (made,)
        if len(results) != len(outputs):
            raise ExecutionError(f"reference gave {len(results)} results, infer says {len(outputs)}")
        for (shape, dtype, write), result in zip(outputs, map(np.asarray, results), strict=True):
            if result.shape != shape or result.dtype != dtype:
                raise ExecutionError(
                    f"reference gave {result.dtype}{list(result.shape)}, infer says {dtype}{list(shape)}"
                )
            write(result)

    return call


# ---- sizes that no input's shape tells


def settable(graph: Graph, program: Program) -> frozenset[str]:
    """The dims that no input's shape tells and no node's data decide."""
    told = {s.name for value in graph.inputs for size in value.shape for s in symbols(size)}
    inside = {name for node in graph.nodes for region in node.regions for name in region.dims()}
    return frozenset(graph.dims().keys() - told - program.made.keys() - inside)


def initial(state: Buffer) -> Array:
    """The value that a state starts with, in stored bytes if it is encoded; its shape is fixed. Read-only."""
    if state.data is not None:
        return state.data
    coded = state.encoding is not None
    shape = (state.nbytes({}),) if coded else tuple(evaluate(s, {}) for s in state.shape)
    return np.broadcast_to(np.zeros((), np.uint8 if coded else state.dtype.numpy), shape)  # takes no memory


def room_for(program: Program, extents: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """The most that the sizes which data decide can be at these extents; where nothing says, what `more` has for them.

    `more` is what earlier runs have found that they need.
    """
    found: dict[str, int] = {}
    for name, most in program.made.items():
        symbol = program.dims[name]
        tops = [] if symbol.hi is None else [symbol.hi // symbol.multiple * symbol.multiple]
        if most is not None and all(s.name in extents or s.name in found for s in symbols(most)):
            tops.append(max(evaluate(most, {**extents, **found}), symbol.lo))
        found[name] = min(tops, default=more.get(name, FIRST_ROOM))
    return found


def grows(program: Program) -> bool:
    """Whether a run may find that it needs more room."""
    return any(most is None and program.dims[name].hi is None for name, most in program.made.items())
