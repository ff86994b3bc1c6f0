"""The kernel program: ordered kernels over named buffers, in two entries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rlx.ir.dtype import DTYPES, DType
from rlx.ir.encoding import Encoding
from rlx.ir.graph import Array, Node
from rlx.ir.shape import Guard, Shape, Size, Symbol, evaluate, numel, substitute, upper
from rlx.records import dataclass, field, replace

if TYPE_CHECKING:  # a stored program runs without expressions
    from rlx.kernels.experts import ExpertLayer
    from rlx.kernels.expr import Expr
    from rlx.kernels.lowering import Anchor
    from rlx.kernels.strategy import Strategy

__all__ = ["Buffer", "Extents", "Flow", "Kernel", "Mark", "Program", "Store", "loop_spans", "node_names"]


@dataclass(eq=False)
class Buffer:
    """Memory of one tensor. `kind`: "input", "param", "const", "state", "prepared" (made by `prepare`), "arena" or
    "table" (kept by the device's runtime, for kernels of its own).

    A view has a `root` and lies `offset` bytes into it; its contents are compact and row-major. The new value of a
    state is a view of it, which kernels write. `space` is the device whose memory it is, "" for that of the program; a
    view is where its root is. Elements of 2 and 4 bits are packed; those of a `wide` buffer take a byte each, as
    NumPy holds them: of inputs and outputs, states, and rows that a loop stacks. See `rlx.kernels.narrow`.
    """

    name: str
    kind: str
    shape: Shape
    dtype: DType
    encoding: Encoding | None = None
    data: Array | None = None  # const only
    root: Buffer | None = None
    offset: Size = 0
    space: str = ""
    wide: bool = False

    def __repr__(self) -> str:
        return f"%{self.name}"

    @property
    def base(self) -> Buffer:
        """The buffer that owns the memory."""
        return self if self.root is None else self.root

    @property
    def is_fixed(self) -> bool:
        """Whether no run changes it: `prepare` may read it."""
        return self.base.kind in ("param", "const", "prepared")

    @property
    def is_packed(self) -> bool:
        """Whether two elements share a byte."""
        return self.dtype.bits < 8 and not self.wide

    @property
    def bytes(self) -> Buffer:
        """The bytes of a buffer of elements of 8 bits and less, as a view."""
        shape = self.byte_shape if self.is_packed else self.shape
        return Buffer(f"{self.name}.bytes", self.kind, shape, DTYPES["u8"], root=self.base, offset=self.offset)

    def view(self, shape: Shape, dtype: DType) -> Buffer:
        """The same memory in other axes, or as elements of another size."""
        return Buffer(f"{self.name}.view", self.kind, shape, dtype, root=self.base, offset=self.offset)

    @property
    def byte_shape(self) -> Shape:
        """The shape of the bytes of packed elements."""
        parts = 8 // self.dtype.bits
        return ((numel(self.shape) + (parts - 1)) // parts,)

    @property
    def stored_shape(self) -> Shape:
        """The shape of the bytes of an encoded buffer: its last axis is that of a row's blocks."""
        assert self.encoding is not None
        *rows, depth = self.shape
        assert isinstance(depth, int)
        return (*rows, depth // self.encoding.block * self.encoding.block_bytes)

    @property
    def is_part(self) -> bool:
        """Whether it is a view that need not have all of its root."""
        if self.root is None or self.shape == self.root.shape:
            return False
        if self.root.encoding is not None and self.dtype.bits == 8:
            return numel(self.shape) != numel(self.root.stored_shape)
        words = self.root.dtype.bits // self.dtype.bits  # that an element of the root is seen as
        if words > 1 and self.shape == (*self.root.shape, words):
            return False
        return self.root.dtype.bits >= 8 or self.shape != self.root.byte_shape

    def nbytes(self, extents: dict[str, int]) -> int:
        """Bytes at given extents: none where a size is below 0, as in a branch that they don't take; guards say so."""
        return self._bytes([max(evaluate(s, extents), 0) for s in self.shape])

    def most(self, sizes: Mapping[str, Size]) -> int | None:
        """Bytes at the upper bounds of the shape once these symbols are replaced, None if unbounded."""
        tops = [upper(substitute(s, sizes)) for s in self.shape]
        return None if None in tops else self._bytes([max(s, 0) for s in tops if s is not None])

    def bound(self) -> int | None:
        """Bytes at the upper bounds of the shape, None if unbounded."""
        sizes = [upper(s) for s in self.shape]
        return None if None in sizes else self._bytes([s for s in sizes if s is not None])

    def _bytes(self, sizes: list[int]) -> int:
        if self.encoding:
            return self.encoding.nbytes(sizes)
        total = numel(sizes)
        assert isinstance(total, int)
        return total if self.wide else self.dtype.nbytes(total)


@dataclass(frozen=True, eq=False)
class Store:
    """Writes `expr` (over i0 < extents[0], ...) to `buffer` at `index` (expressions of those variables)."""

    buffer: Buffer
    extents: Shape
    index: tuple[Expr, ...]
    expr: Expr


@dataclass(eq=False)
class Flow:
    """One If or loop of a run. Its marks enclose the kernels that it runs, leaves out or repeats.

    An If is "if" (on after "else" where the test fails), "else" (on after "end"), "end"; a loop is "loop", "while" (on
    after "end" where the test fails), "next" (back to after "loop"), "end". `round` is the number of the round: sizes
    and offsets that it occurs in are linear in it, and "loop" and "next" bring them up to date.
    """

    name: str
    round: Symbol | None = None  # loops only
    trips: Size | None = None  # rounds of a loop that counts; None: for as long as the test of "while" holds
    count: Symbol | None = None  # the size that the rounds of a loop with a test become; its bound is checked
    stacked: tuple[Symbol, ...] = ()  # whole sizes of its rows that rounds decide, each the same as the one before


@dataclass(frozen=True, eq=False)
class Mark:
    """A point of a flow: "if", "else", "loop", "while", "next" or "end". `test` is a bool scalar."""

    flow: Flow
    part: str
    test: Buffer | None = None


@dataclass(frozen=True, eq=False)
class Extents:
    """Sizes that data have decided, for all that follows: each is the value of a size or the rounds of a loop.

    `checks` are equalities that can be told only now. Both run when the kernel does, so only in a branch that is taken.
    """

    sizes: tuple[tuple[Symbol, Size | Flow], ...] = ()
    checks: tuple[Guard, ...] = ()


@dataclass(eq=False)
class Kernel:
    """One launch: an anchor (or plain loops) with its stores, or a node run as a whole.

    `anchor` is None for loop nests (map, row, reduce, copy); its operand expressions and the stores' expressions load
    from buffers. Stores after the first may make what the anchor reads, before it or part by part. A node of
    `special` is run by code of the device's own, one of `host` by its reference in NumPy; both read `operands` and
    write `results`. What `before` makes is read by this kernel alone, which makes it itself, part by part: it is never
    in memory as a whole. `device` runs it, "" for the device of the program. Kernels of one `queue` run in order; one
    of another queue waits for the earlier kernels that touch what it touches.
    """

    name: str
    stores: tuple[Store, ...] = ()
    anchor: Anchor | None = None
    special: Node | None = None
    host: Node | None = None
    operands: tuple[Buffer, ...] = ()
    results: tuple[Buffer, ...] = ()
    nodes: tuple[Node, ...] = ()
    strategy: Strategy | None = None  # how the device computes it; None for plain loops, and before that is chosen
    refused: tuple[tuple[str, str], ...] = ()  # the strategies that were tried before, and why they were not taken
    before: Kernel | None = None
    mark: Mark | None = None  # control flow: nothing is computed
    extents: Extents | None = None
    makes: tuple[Symbol, ...] = ()  # the sizes that a node run as a whole decides
    device: str = ""
    queue: int = 0
    role: str = ""  # in a gradient: "backward" of what computes cotangents, "again" of what runs a second time

    @property
    def kind(self) -> str:
        """The anchor name of design §5: contract, conv, attention, row, reduce, map, copy, special, control or host."""
        if self.host is not None or self.special is not None:
            return "special" if self.host is None else "host"
        if self.mark is not None or self.extents is not None:
            return "control"
        if self.anchor is not None:
            return type(self.anchor).__name__.lower()
        from rlx.kernels import accesses

        return accesses.loop_kind(self)

    @property
    def packs(self) -> bool:
        """Whether it only brings operands into a layout of the device."""
        return self.strategy is not None and self.strategy.packs

    def with_anchor(self, anchor: Anchor | None) -> Kernel:
        """A kernel with the same name, stores and nodes, and this anchor."""
        return Kernel(self.name, self.stores, anchor, nodes=self.nodes)

    @property
    def how(self) -> str:
        """The name of the strategy, or the kind of what has none."""
        return self.kind if self.strategy is None else self.strategy.name

    def expressions(self) -> Iterator[Expr]:
        """Every expression of the kernel: operands of the anchor, stores and their indices."""
        from rlx.kernels import accesses

        return accesses.expressions(self)

    def reads(self) -> tuple[Buffer, ...]:
        """The buffers read, each once."""
        from rlx.kernels import accesses

        return accesses.reads(self)

    def looked_up(self) -> tuple[Buffer, ...]:
        """The buffers of which it reads only what indices in memory name, as rows of a table."""
        from rlx.kernels import accesses

        return accesses.looked_up(self)

    def read_whole(self) -> frozenset[Buffer]:
        """The buffers it reads, but tables of which it reads rows that indices in memory name, also in an anchor."""
        from rlx.kernels import accesses

        return accesses.read_whole(self)

    def writes(self) -> tuple[Buffer, ...]:
        """The buffers written, each once."""
        return tuple(dict.fromkeys([*(s.buffer for s in self.stores), *self.results]))

    def in_place_operands(self) -> tuple[Buffer, ...]:
        """The buffers whose memory the single result may take over: each element is read once, where it is written.

        Loop nests only: an anchor stores sums before its epilogue reads. Elements are written once they are read.
        """
        from rlx.kernels import accesses

        return accesses.in_place_operands(self)

    def may_overwrite(self, root: Buffer) -> bool:
        """Whether the kernel, where its results lie in the memory of `root`, reads that only as it writes it."""
        from rlx.kernels import accesses

        return accesses.may_overwrite(self, root)

    def bytes_written(self, extents: Mapping[str, int]) -> int:
        """Bytes that the kernel stores: less than its buffers have where it writes only a part of a state."""
        total = sum(b.nbytes(dict(extents)) for b in self.results)
        for store in self.stores:
            count = numel([evaluate(s, extents) for s in store.extents])
            assert isinstance(count, int)
            total += count * store.buffer.dtype.numpy.itemsize
        return total

    def retarget(self, buffer: Buffer) -> Kernel:
        """The same kernel, but its single result goes into another buffer."""

        def moved(made: Buffer) -> Buffer:
            if made.root is None:
                return buffer
            return replace(made, kind=buffer.kind, root=buffer.base, offset=buffer.offset)  # the bytes of its elements

        return replace(self, stores=tuple(replace(s, buffer=moved(s.buffer)) for s in self.stores))

    @property
    def label(self) -> str:
        """How messages and tables name the kernel: the sources of its nodes."""
        return node_names(self.nodes) or self.name


def node_names(nodes: Sequence[Node]) -> str:
    """The names of nodes as their source has them, at most three; "" where they have none."""
    names = list(dict.fromkeys(n.provenance[0] if n.provenance else n.outputs[0].name for n in nodes))
    known = [name for name in names if name]
    return ", ".join(known[:3]) + (", ..." if len(known) > 3 else "")


@dataclass(eq=False)
class Program:
    """Kernels in order: `prepare` runs when params change, `run` at each call."""

    name: str
    inputs: list[Buffer] = field(default_factory=list)
    params: list[Buffer] = field(default_factory=list)
    states: list[Buffer] = field(default_factory=list)
    constants: list[Buffer] = field(default_factory=list)
    prepare: list[Kernel] = field(default_factory=list)
    run: list[Kernel] = field(default_factory=list)
    outputs: list[tuple[str, Buffer]] = field(default_factory=list)
    updates: dict[str, Buffer] = field(default_factory=dict)
    copied: dict[str, Buffer] = field(default_factory=dict)  # state -> what holds its new value until a copy at the end
    dims: dict[str, Symbol] = field(default_factory=dict)
    guards: list[Guard] = field(default_factory=list)
    made: dict[str, Size | None] = field(default_factory=dict)  # sizes that data decide: the most each can be, if known
    experts: list[ExpertLayer] = field(default_factory=list)  # found by the device, where it has kernels for them

    def buffers(self, kind: str) -> list[Buffer]:
        """The root buffers of a kind, in order of first use."""
        return list(dict.fromkeys(b.base for b in self.touched() if b.base.kind == kind))

    def touched(self) -> Iterable[Buffer]:
        """The buffers (views too) that kernels, outputs and updates name, in order, with repeats."""
        for kernel in (*self.prepare, *self.run):
            yield from kernel.reads()
            yield from kernel.writes()
        yield from (b for _, b in self.outputs)
        yield from self.updates.values()

    def __str__(self) -> str:
        from rlx.kernels.text import print_program

        return print_program(self)


def loop_spans(kernels: Sequence[Kernel]) -> list[tuple[int, int]]:
    """First and last step of each loop, inner ones first: what crosses an end of one is in use through all of it."""
    starts: dict[Flow, int] = {}
    spans = []
    for step, kernel in enumerate(kernels):
        if kernel.mark is not None and kernel.mark.part == "loop":
            starts[kernel.mark.flow] = step
        elif kernel.mark is not None and kernel.mark.part == "next":
            spans.append((starts[kernel.mark.flow], step))
    return spans
