"""The states of a compiled graph on the CPU: memory outside the arena that lives between runs.

Each clone has its own. A state that its graph updates lies at one address for good: the run writes it in place. One
that an output is fed to has two memories, which change places after each run that succeeds: the last phase of the run
does that, by rewriting the operand words that point to them, so nothing is copied and no Python runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

import numpy as np

from rlx.backends.base import Executable
from rlx.backends.codegen.binding import as_array, initial
from rlx.backends.cpu.jit import load as loader
from rlx.backends.cpu.native.pool import aligned_words
from rlx.backends.cpu.native.runner_ir import RESULT
from rlx.backends.cpu.runtime.binding import Binding, aligned_bytes
from rlx.ir.graph import Array
from rlx.ir.shape import evaluate
from rlx.kernels.program import Buffer, Program
from rlx.records import dataclass

__all__ = ["Feed", "StateCalls", "StateMemory"]

SWAP, COPY = 0, 1
PIECE = 64 << 10  # bytes that are looked at together

# words: address of the parity, the object that a call returns for parity 0 and 1, the number of records; a record is
# SWAP, address of a cell (state, spare), number of words for each, then (word, shift) pairs; or COPY, to, from, bytes.
FEED_IR = """
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define internal ptr @point(ptr %from, i64 %count, i64 %address) {
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %one ]
  %p = phi ptr [ %from, %entry ], [ %p.next, %one ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %one, label %out
one:
  %word = load ptr, ptr %p, align 8
  %shift.p = getelementptr i64, ptr %p, i64 1
  %shift = load i64, ptr %shift.p, align 8
  %value = add i64 %address, %shift
  store i64 %value, ptr %word, align 8
  %i.next = add i64 %i, 1
  %p.next = getelementptr i64, ptr %p, i64 2
  br label %loop
out:
  ret ptr %p
}

define void @rlx_feed(ptr %words, i64 %chunk, ptr %ctx, i64 %worker) {
entry:
  %parity.p = load ptr, ptr %words, align 8
  %parity = load i64, ptr %parity.p, align 8
  %flipped = xor i64 %parity, 1
  store i64 %flipped, ptr %parity.p, align 8
  %which = add i64 %flipped, 1
  %result.p = getelementptr i64, ptr %words, i64 %which
  %result = load i64, ptr %result.p, align 8
  %slot.p = getelementptr i64, ptr %ctx, i64 $RESULT
  store i64 %result, ptr %slot.p, align 8
  %count.p = getelementptr i64, ptr %words, i64 3
  %count = load i64, ptr %count.p, align 8
  %first = getelementptr i64, ptr %words, i64 4
  br label %loop
loop:
  %n = phi i64 [ 0, %entry ], [ %n.next, %copy ], [ %n.next, %swap ]
  %p = phi ptr [ %first, %entry ], [ %end, %copy ], [ %last, %swap ]
  %more = icmp slt i64 %n, %count
  br i1 %more, label %record, label %out
record:
  %n.next = add i64 %n, 1
  %kind = load i64, ptr %p, align 8
  %a.p = getelementptr i64, ptr %p, i64 1
  %a = load ptr, ptr %a.p, align 8
  %b.p = getelementptr i64, ptr %p, i64 2
  %b = load i64, ptr %b.p, align 8
  %c.p = getelementptr i64, ptr %p, i64 3
  %c = load i64, ptr %c.p, align 8
  %end = getelementptr i64, ptr %p, i64 4
  %swaps = icmp eq i64 %kind, 0
  br i1 %swaps, label %swap, label %copy
copy:
  %from = inttoptr i64 %b to ptr
  call void @llvm.memcpy.p0.p0.i64(ptr %a, ptr %from, i64 %c, i1 false)
  br label %loop
swap:
  %spare.p = getelementptr i64, ptr %a, i64 1
  %old = load i64, ptr %a, align 8
  %new = load i64, ptr %spare.p, align 8
  store i64 %new, ptr %a, align 8
  store i64 %old, ptr %spare.p, align 8
  %mid = call ptr @point(ptr %end, i64 %b, i64 %new)
  %last = call ptr @point(ptr %mid, i64 %c, i64 %old)
  br label %loop
out:
  ret void
}
"""


@functools.cache
def feed_code() -> loader.Library:
    """The phase that gives fed states their new memory."""
    return loader.build("feed", lambda: FEED_IR.replace("$RESULT", str(RESULT)), symbols={})


@dataclass(eq=False)
class Feed:
    """An output that becomes a state: output `number`, whose buffer is `source`.

    `cell` holds the addresses of the state and of the spare memory, where the output is made; without a cell the output
    is copied (it is a part of another buffer, shown twice, or made or read by a host call).
    """

    number: int
    source: Buffer
    pair: tuple[Array, Array]  # the state's memory while the parity is even and odd
    cell: Array | None


class StateMemory:
    """The memory of states, and of inputs that are kept between runs, by their buffers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.memory: dict[Buffer, Array] = {}
        self.shapes: dict[Buffer, tuple[int, ...]] = {}
        self.feeds: dict[Buffer, Feed] = {}
        self.first: dict[Buffer, Array | None] = {}  # what kept inputs began with; None for zeros
        self.parity = aligned_words(1)
        for buffer in program.states:
            self.place(buffer, initial(buffer))

    def copy(self) -> StateMemory:
        """The same states in memory of its own."""
        made = StateMemory(self.program)
        made.first = dict(self.first)
        for root in self.memory:
            made.place(root, self.array(root))
        for root, feed in self.feeds.items():
            made.feed(root, feed.number, feed.source, feed.cell is not None)
        return made

    def place(self, root: Buffer, array: Array) -> None:
        """Memory for a state of this value; what it was fed with stays."""
        self.memory[root], self.shapes[root] = held_bytes(array), array.shape

    def keep(self, root: Buffer, array: Array | None) -> None:
        """Keeps an input from this value on, or no longer; what it was fed with ends."""
        if array is None:
            held, first = None, None
        else:
            held = held_bytes(array)
            zeros = not array.view(np.uint8).any() if array.flags.c_contiguous and array.ndim else False
            first = None if zeros else array.copy()
        self.settle()
        self.feeds.pop(root, None)
        for kept in (self.memory, self.shapes, self.first):
            kept.pop(root, None)
        if held is not None and array is not None:
            self.memory[root], self.shapes[root], self.first[root] = held, array.shape, first

    def current(self, root: Buffer) -> Array:
        """The bytes of the state now."""
        feed = self.feeds.get(root)
        return self.memory[root] if feed is None else feed.pair[self.odd(feed)]

    def odd(self, feed: Feed) -> int:
        return int(self.parity[0]) if feed.cell is not None else 0

    def array(self, root: Buffer) -> Array:
        """The state now, as an array over its memory: of stored bytes if it is encoded."""
        shape, dtype = self.shapes[root], np.dtype(np.uint8) if root.encoding is not None else root.dtype.numpy
        count = math.prod(shape) * dtype.itemsize
        return self.current(root)[:count].view(dtype).reshape(shape)

    def feed(self, root: Buffer, number: int, source: Buffer, swaps: bool) -> None:
        """Makes an output become the state after each run, in place of another one."""
        spare = aligned_bytes(self.memory[root].nbytes) if swaps else None
        cell = aligned_words(2) if swaps else None
        self.settle()
        held = self.memory[root]
        if spare is not None and cell is not None:
            cell[:] = held.ctypes.data, spare.ctypes.data
        self.feeds[root] = Feed(number, source, (held, held if spare is None else spare), cell)

    def unfeed(self, root: Buffer) -> None:
        """Ends a feed, if there is one; the state keeps its value."""
        self.settle()
        self.feeds.pop(root, None)

    def settle(self) -> None:
        """Makes the parity even: the memory that holds a state now is its first."""
        for root, feed in self.feeds.items():
            if self.odd(feed):
                feed.pair = feed.pair[1], feed.pair[0]
                self.memory[root] = feed.pair[0]
        self.parity[0] = 0

    def address(self, root: Buffer) -> int | None:
        """Where a root buffer lies now, if its memory is here: a state, or an output that is fed to one."""
        if root in self.memory:
            return int(self.current(root).ctypes.data)
        for feed in self.feeds.values():
            if feed.source is root and feed.cell is not None:
                return int(feed.cell[1])
        return None

    def roots(self) -> Iterable[Buffer]:
        """The buffers whose memory is here."""
        yield from self.memory
        yield from (f.source for f in self.feeds.values() if f.cell is not None)

    def named(self) -> Iterable[tuple[str, Array]]:
        """All memory that is here, by what it is called."""
        kept = (*self.memory.items(), *((root, array) for root, feed in self.feeds.items() for array in feed.pair))
        yield from ((f"state {root.name!r}", array) for root, array in kept)

    def output(self, number: int, parity: int, extents: Mapping[str, int]) -> Array | None:
        """A fed output after a run that ended with this parity; None for one that lies in the arena."""
        for feed in self.feeds.values():
            if feed.number == number and feed.cell is not None:
                return as_array(feed.pair[parity], feed.source, 0, extents)
        return None

    def phase(
        self, binding: Binding, results: tuple[object, object], address: Callable[[Buffer], int]
    ) -> tuple[tuple[int, int, int], Array]:
        """The last phase of a run, and its words, to be kept alive; `results` are what calls return by parity."""
        words = [int(self.parity.ctypes.data), *map(id, results), len(self.feeds)]
        base = int(binding.words.ctypes.data)
        for root, feed in self.feeds.items():
            if feed.cell is None:
                source = address(feed.source.base) + evaluate(feed.source.offset, binding.extents)
                words += [COPY, int(feed.pair[0].ctypes.data), source, self.array(root).nbytes]
                continue
            places = [binding.places.get(b, {}) for b in (root, feed.source)]
            words += [SWAP, int(feed.cell.ctypes.data), *map(len, places)]
            words += [
                number for place in places for word, shift in place.items() for number in (base + 8 * word, shift)
            ]
        table = aligned_words(len(words))
        table[:] = words
        return (feed_code().address("rlx_feed"), int(table.ctypes.data), 1), table


def held_bytes(array: Array) -> Array:
    """Memory with the contents of an array. What is zero is not written: caches take memory as they are filled."""
    held = aligned_bytes(max(array.nbytes, 8))
    if not any(array.strides) and not array.reshape(-1)[:1].view(np.uint8).any():
        return held
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        if piece.any():
            held[start : start + len(piece)] = piece
    return held


class StateCalls(Executable[Array]):
    """The calls on states of `CpuExecutable`; each holds the state block meanwhile."""

    program: Program
    states: StateMemory
    held: Callable[[], AbstractContextManager[None]]
    forget: Callable[[], None]
    is_movable: Callable[[Buffer], bool]

    @property
    def bound_inputs(self) -> Mapping[str, Array]:
        memory = self.states.memory
        return {b.name: self.states.array(b) for b in self.program.inputs if b in memory} if memory else {}

    @property
    def feeds(self) -> Mapping[str, int]:
        return {root.name: feed.number for root, feed in self.states.feeds.items()}

    def root_of(self, name: str) -> Buffer:
        """The buffer of a state or input."""
        return next(b for b in (*self.program.states, *self.program.inputs) if b.name == name)

    def read_state(self, name: str) -> Array:
        with self.held():
            return self.states.array(self.root_of(name)).copy()

    def write_state(self, name: str, array: Array | None) -> None:
        root = self.root_of(name)
        with self.held():
            if array is None and root.kind == "state":
                array = initial(root)
            target = self.states.array(root)
            first = self.states.first.get(root)
            target[...] = array if array is not None else 0 if first is None else first

    def in_state(self, name: str, does: Callable[[Array], None]) -> bool:
        root = self.root_of(name)
        with self.held():
            does(self.states.array(root))
        return True

    def keep_input(self, name: str, array: Array | None) -> None:
        root = self.root_of(name)
        with self.held():
            self.forget()  # first: what is bound knows the states as they are
            self.states.keep(root, array)

    def feed_state(self, name: str, output: int | None) -> None:
        root = self.root_of(name)
        with self.held():
            self.forget()
            if output is None:
                self.states.unfeed(root)
                return
            source = self.program.outputs[output][1]
            hosts = any(root in (b.base for b in k.operands) for k in self.program.run if k.host is not None)
            self.states.feed(root, output, source, swaps=self.is_movable(source) and not hosts)
