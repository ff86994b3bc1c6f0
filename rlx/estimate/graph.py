"""The estimate of a graph: through the compiler up to the plan, with weights known by type only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from shlex import quote
from typing import Any

from rlx.backends import check_options
from rlx.backends.base import Backend, CodeGenerator, CodeSizes
from rlx.compiler import legal_graph, lower_graph
from rlx.errors import OptionError, ShapeError
from rlx.estimate.calibrate import Overhead
from rlx.estimate.experts import ExpertTotals
from rlx.estimate.memory import Axis, MemoryEstimate
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, TensorType
from rlx.ir.literal import equal_arrays
from rlx.ir.mapped import PART, lies_in_file, read_in_place
from rlx.ir.shape import Symbol, evaluate, numel, symbols
from rlx.ir.verify import verify
from rlx.kernels.expr import Apply, Expr, Load, Var, index, loads, transform, walk
from rlx.kernels.lowering import out_vars
from rlx.kernels.prepared import alike, kept_leaves, origins
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.options import CompileOptions
from rlx.passes.dims import apply_dims
from rlx.plan.arena import Schedule
from rlx.plan.liveness import schedule
from rlx.plan.plan import make_plan
from rlx.records import dataclass, replace
from rlx.units import bytes_text

__all__ = ["Lowered", "estimate_graph", "estimate_library", "lowered_of"]

Mapped = Callable[[str], bool]

TOLD = 64 << 10  # bytes of a weight from which on it is told that it is there in two forms
SPREAD = 32  # sizes of a dim whose scratch is looked at
AROUND = 64 << 10  # bytes that Linux brings of a mapped file for one that is touched
BAND = 32  # rows that products are cut by: the first few numbers of bands are cut in ways of their own
U8 = DTYPES["u8"]
_UNBOUNDED = "a dim has no upper bound: activations, inputs and outputs are not in this"
_EXACT = ("activation", "input", "output", "state", "workspace")  # parts that the plan and the types give


def estimate_graph(
    graph: Graph,
    backend: Backend,
    options: CompileOptions,
    overhead: Overhead,
    *,
    mapped: Mapped | None = None,
    lies: Mapped | None = None,
    held: Mapping[str, Any] | None = None,
    file_bytes: Callable[[Collection[str]], int] = lambda kept: 0,
    equal: Mapping[str, str] | None = None,
) -> MemoryEstimate:
    """What a compiled graph takes, at the upper bounds of its dims.

    `mapped` says of a param whether kernels can read it where it lies in a mapped file (default: whether its data is
    such an array); `held` are weights by name that a registry has already; `file_bytes` gives the pages of the model's
    file that loading touches, besides those of the params named, which stay in use; `equal` are params that have the
    bytes of an earlier one (default: by their data). Raises `ShapeError` where a size has no bound, and what the
    compiler raises.
    """
    check_options(backend, options)
    graph = apply_dims(graph, options.dims)
    verify(graph)
    check_bounded(graph)
    _, legal, _ = legal_graph(graph, backend, options.precision)
    if not isinstance(backend, CodeGenerator):
        return estimate_library(graph, legal, backend.name, overhead, options)
    program = lower_graph(legal, backend, options)
    made = lowered_of(
        graph,
        program,
        backend,
        options,
        overhead,
        mapped=mapped,
        lies=lies,
        held=held,
        file_bytes=file_bytes,
        equal=equal,
    ).at_bounds()
    if made is None:
        raise ShapeError(f"graph {graph.name!r}: a size of its activations has no upper bound; bound it with dims=")
    return made


def lowered_of(
    graph: Graph,
    program: Program,
    backend: CodeGenerator,
    options: CompileOptions,
    overhead: Overhead,
    *,
    mapped: Mapped | None = None,
    lies: Mapped | None = None,
    held: Mapping[str, Any] | None = None,
    file_bytes: Callable[[Collection[str]], int] = lambda kept: 0,
    equal: Mapping[str, str] | None = None,
    times: Callable[[str], int] | None = None,
) -> Lowered:
    """The program of a graph with all that its memory depends on; arguments as in `estimate_graph`.

    `times`: the program has a part of the graph only, in which the param stands for so many like it.
    """
    data = {p.name: p.data for p in graph.params}
    stays = lies if lies is not None else lambda name: (a := data.get(name)) is not None and lies_in_file(a)
    in_file = mapped if mapped is not None else lambda name: (a := data.get(name)) is not None and read_in_place(a)
    if equal is None:
        equal = equal_arrays({p.name: (p.type.encoding, p.data) for p in graph.params if p.data is not None})
    sizes = backend.code_sizes(program, options)
    weights = weigh(program, in_file, stays, _checked_held(graph, held or {}), equal, sizes.step, times)
    return Lowered(graph, program, schedule(program), options, sizes, weights, backend.name, overhead, file_bytes)


def check_bounded(graph: Graph) -> None:
    """`ShapeError` naming every dim of the graph that has no upper bound."""
    free = [name for name, symbol in graph.dims().items() if symbol.hi is None]
    if free:
        have = f"dim {free[0]!r} has" if len(free) == 1 else f"dims {', '.join(map(repr, free))} have"
        dims = ", ".join(f"{name!r}: (1, 512)" for name in free)
        flags = " ".join(f"--dims {quote(f'{name}=1:512')}" for name in free)
        raise ShapeError(
            f"graph {graph.name!r}: {have} no upper bound, so its memory has none; give bounds, such as "
            f"dims={{{dims}}}, on the command line {flags}"
        )


def _checked_held(graph: Graph, held: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of the params that a registry holds; one of another size is an error."""
    found = {}
    for param in graph.params:
        if param.name in held:
            have, want = int(held[param.name].nbytes), param.type.nbytes()
            if have != want:
                raise OptionError(f"weight {param.name!r}: the graph needs {want} bytes, the registry holds {have}")
            found[param.name] = have
    return found


@dataclass(frozen=True)
class Weights:
    """Weights of a program in bytes; `kept` are the params that runs read as they are."""

    stored: int
    kept: int
    kept_mapped: int
    packed: int
    constants: int
    unread: int  # of those that lie in a file, the rows of tables that a run can't reach
    passing: int  # of these, what packing reads once
    copies: int  # private copies of params that are dropped after packing
    in_step: int  # of what packing reads where it lies in a file, the most that is in memory at a time
    beside: int  # of what lies in a file, what is mapped and in neither
    held: int
    held_names: tuple[str, ...]
    kept_names: frozenset[str]
    experts: ExpertTotals | None  # where their weights lie in a file, so that fewer in memory are fewer bytes
    twice: tuple[Buffer, ...]  # the leaves that are kept as they are and packed too


def weigh(
    program: Program,
    in_file: Mapped,
    lies: Mapped,
    held: Mapping[str, int],
    equal: Mapping[str, str],
    step: int | None,
    times: Callable[[str], int] | None = None,
) -> Weights:
    """Adds up params, constants and what `prepare` makes; each param once, however often it is used.

    `in_file` says of a param whether kernels read it where it lies in a file, `lies` whether it lies there at all: then
    only `step` bytes, and one weight, are copied at a time, where that is not None. Of `equal` params there is one
    copy, and one of what is packed of them; those that are read in a file lie there. A param, with what is made of it,
    counts so many `times`.
    """
    by_name = {p.name: p for p in program.params}
    same = {by_name[a]: by_name[b] for a, b in equal.items() if a in by_name and b in by_name}
    packed, _ = alike(program, same)
    made_of = {b.base: own for kernel, own in origins(program) for b in kernel.writes()}

    def total(buffers: Iterable[Buffer], least: int = 0) -> int:
        def count(b: Buffer) -> int:
            if times is None:
                return 1
            return max((times(p.name) for p in made_of.get(b, {b}) if p.kind == "param"), default=1)

        return sum(max(_bound(b), least) * count(b) for b in buffers)

    def place(b: Buffer) -> Buffer:
        """The param whose memory a param has."""
        return b if in_file(b.name) else same.get(b, b)

    kept = kept_leaves(program)
    new = [p for p in program.params if p.name not in held]
    kept_new = [p for p in dict.fromkeys(map(place, (p for p in new if p in kept))) if p.name not in held]
    in_place = [b for b in program.constants if b.data is not None and read_in_place(b.data)]
    from_file = [b for b in program.constants if b.data is not None and b not in kept and lies_in_file(b.data)]
    kept_mapped = [*(p for p in kept_new if in_file(p.name)), *(b for b in in_place if b in kept)]
    packed_new = dict.fromkeys(map(place, (p for p in new if p not in kept)))
    odd = [p for p in packed_new if p not in kept_new and p.name not in held and not in_file(p.name)]
    odd += [b for b in from_file if b not in in_place]
    late = [b for b in odd if step is not None and (b.kind == "const" or lies(b.name))]
    early = [b for b in odd if b not in late]
    leaves = (*program.params, *program.constants)
    copies, in_step = 0, total(leaves)
    if step is not None:
        there = [b for b in _packed_too(program) if b not in late]
        parts = None if times is not None else _parts(program, step)
        copies, in_step = (_at_a_time(some, total(some), step, parts) for some in (late, there))
        odd_params = [p for p in program.params if lies(p.name) and not in_file(p.name)]
        in_step += min(2 * PART, max(map(_bound, odd_params), default=0))  # of the file, while they are copied
    readers = _readers(program) if kept_mapped else {}
    left = {b: _bound(b) - _rows_read(b, readers.get(b, ())) for b in kept_mapped}
    twice = tuple(b for b in _packed_too(program) if b in kept)
    return Weights(
        stored=total(program.params),
        kept=total(kept_new),
        kept_mapped=total(kept_mapped),
        packed=total((b for b in program.buffers("prepared") if b not in packed), 8),
        constants=total(b for b in program.constants if b not in from_file),
        copies=total(early) + copies,
        unread=sum(left.values()),
        passing=sum(left.get(b, 0) for b in twice),
        in_step=in_step,
        beside=max(0, total(leaves) - in_step),
        held=sum(held.values()),
        held_names=tuple(held),
        kept_names=frozenset(b.name for b in (*program.params, *in_place) if b in kept),
        experts=_experts(program, in_file),
        twice=twice,
    )


def _readers(program: Program) -> dict[Buffer, list[tuple[Kernel, bool]]]:
    """By buffer the kernels of a run that read it or a view of it, and whether each is in a loop; in one walk."""
    found: dict[Buffer, list[tuple[Kernel, bool]]] = {}
    loops = 0
    for kernel in program.run:
        if kernel.mark is not None and kernel.mark.flow.round is not None:
            loops += {"loop": 1, "end": -1}.get(kernel.mark.part, 0)
        for base in {b.base for b in kernel.reads()}:
            found.setdefault(base, []).append((kernel, loops != 0))
    return found


def _rows_read(table: Buffer, readers: Iterable[tuple[Kernel, bool]]) -> int:
    """Bytes of a param or constant in a file that one run can bring into memory: the rows that it gathers, with the
    pages that the system brings around each; all where it is read in other ways, or in a loop.
    """
    whole = _bound(table)
    found = 0
    for kernel, loops in readers:
        every = {x for e in kernel.expressions() for x in loads(e) if x.source.base is table}
        own = {x: store for store in kernel.stores for x in loads(store.expr) if x.source.base is table}
        if loops or kernel.special is not None or not every or every - own.keys():
            return whole
        for row, store in {_named_row(x, table): store for x, store in own.items()}.items():
            extents = dict(zip(out_vars(len(store.extents)), store.extents, strict=True))
            given = row is not None and any(isinstance(x, Load) for x in walk(row))
            variables = {x for x in walk(row) if isinstance(x, Var)} if row is not None else set()
            rows = TensorType(tuple(extents.get(v, 0) for v in variables), U8).nbytes()
            if not given or not variables <= extents.keys() or rows is None:
                return whole
            found += rows * (_bound(table) // max(1, int(table.shape[0])) + AROUND)
    return min(whole, found)


def _named_row(load: Load, table: Buffer) -> Expr | None:
    """The row of a table that a load reads, None where that can't be told.

    It is the first index; of blocks, which are read as bytes, it is r in the number of the element, r * width + place,
    if nothing else counts for which byte is read.
    """
    if not load.indices:
        return None
    if load.source is table:
        return load.indices[0]
    width = numel(table.shape[1:])
    if table.encoding is None or len(load.indices) != 1 or not isinstance(width, int):
        return None
    for x in walk(load.indices[0]):
        if isinstance(x, Apply) and x.fn == "add" and isinstance(x.args[0], Apply) and x.args[0].fn == "mul":
            row, by = x.args[0].args
            if by == index(width) and any(True for _ in loads(row)):
                return row if _depends_only(load.indices[0], x) else None
    return None


def _depends_only(e: Expr, part: Expr) -> bool:
    """Whether nothing in e varies but a part of it."""
    rest = transform(e, lambda x: index(0) if x == part else None)
    return not any(isinstance(x, Load | Var) for x in walk(rest))


def _at_a_time(buffers: Sequence[Buffer], total: int, step: int, parts: Sequence[set[Buffer]] | None) -> int:
    """The most that is there of buffers that come and go in these parts, or in some of so many bytes and one buffer."""
    if parts is None:
        return min(total, step + max(map(_bound, buffers), default=0))
    return max((sum(_bound(b) for b in buffers if b in part) for part in parts), default=0)


def _parts(program: Program, step: int) -> list[set[Buffer]]:
    """The leaves that packing reads, in the parts in which they come and go: of so many bytes and one kernel."""
    found: list[set[Buffer]] = [set()]
    room = step
    for kernel in program.prepare:
        found[-1] |= {b.base for b in kernel.reads()}
        room -= sum(map(_bound, (*kernel.reads(), *kernel.writes())))
        if room <= 0:
            found.append(set())
            room = step
    return found


def _packed_too(program: Program) -> Iterator[Buffer]:
    """The params and constants that `prepare` makes others of, each once."""
    read = dict.fromkeys(b.base for kernel in program.prepare for b in kernel.reads())
    return (b for b in read if b.kind in ("param", "const"))


def _experts(program: Program, in_file: Mapped) -> ExpertTotals | None:
    weights = [weight for layer in program.experts for weight in layer.weights]
    if not weights or not all(w.source.base.kind == "param" and in_file(w.source.base.name) for w in weights):
        return None
    sizes = (sum(_bound(w.panels) for w in layer.weights) // layer.experts for layer in program.experts)
    return ExpertTotals(tuple(layer.experts for layer in program.experts), tuple(sizes))


def _bound(buffer: Buffer) -> int:
    size = buffer.bound()
    if size is None:
        raise ShapeError(f"{buffer.kind} {buffer.name!r}: its shape {buffer.shape} has no upper bound; give dims=")
    return size


@dataclass(frozen=True)
class Lowered:
    """A lowered graph, which can be sized at any extents."""

    graph: Graph
    program: Program
    timeline: Schedule
    options: CompileOptions
    sizes: CodeSizes
    weights: Weights
    device: str
    overhead: Overhead
    file_bytes: Callable[[Collection[str]], int]

    def at_bounds(self) -> MemoryEstimate | None:
        """The estimate that holds for every run, None where a size has no bound."""
        return None if self.timeline.bounds is None else self.at(self.timeline.bounds)

    def fixed(self) -> MemoryEstimate:
        """What does not depend on the dims: weights and code."""
        weights, sizes = self.weights, self.sizes
        return MemoryEstimate(
            model=self.graph.name,
            device=self.device,
            weight_bytes=weights.kept - weights.unread + weights.packed + weights.constants,
            code_bytes=self.overhead.code_bytes(sizes, len(self.graph.nodes)),
            overhead_bytes=self.overhead.stays + self.overhead.left_by_text(sizes),
            compiler_bytes=self.overhead.passing + self.overhead.passing_text(sizes),
            import_bytes=self.overhead.opens,
            cached_overhead_bytes=self.overhead.cached,
            source_bytes=self.overhead.source_bytes(sizes, len(self.graph.nodes)),
            address_bytes=self.overhead.unused + weights.unread + weights.beside,
            certainty={
                "weight": "bounded" if sizes.spare or weights.unread else "exact",
                **dict.fromkeys(("code", "overhead"), self.overhead.certainty),
            },
            stored_weight_bytes=weights.stored,
            packed_weight_bytes=weights.packed,
            constant_bytes=weights.constants,
            mapped_weight_bytes=weights.kept_mapped,
            held_weight_bytes=weights.held,
            held_weights=weights.held_names,
            loading_copy_bytes=weights.passing
            + (weights.copies + sizes.prepare_scratch if sizes.loading is None else sizes.loading),
            file_bytes=min(self.file_bytes(weights.kept_names), weights.in_step),
            experts=weights.experts,
            notes=(_UNBOUNDED, *self._notes),
        )

    @property
    def _notes(self) -> tuple[str, ...]:
        """What is said of weights that are packed with room for unusual values, or there in two forms."""
        spare, twice = self.sizes.spare, [b for b in self.weights.twice if _bound(b) >= TOLD]
        found = [f"{bytes_text(spare)} of the weights are room that only unusual values fill"] if spare else []
        if self.weights.unread >= TOLD:
            size = bytes_text(self.weights.unread)
            found.append(f"{size} of tables are not counted: rows that one run can't reach, in pages of the file")
        if twice:
            names = ", ".join(repr(b.name) for b in twice[:3]) + (", ..." if len(twice) > 3 else "")
            size = bytes_text(sum(map(_bound, twice)))
            found.append(f"{size} of the weights are there in two forms, as they are and packed: {names}")
        return tuple(found)

    def at(self, extents: Mapping[str, int]) -> MemoryEstimate:
        """The estimate at extents; at the upper bounds a size is the most that it can be within them."""
        options, fixed = self.options, self.fixed()
        plan = make_plan(
            self.timeline,
            extents,
            alignment=options.alignment,
            reuse=options.reuse,
            verify=False,
            search=options.search,
        )
        at_bounds = dict(extents) == self.timeline.bounds

        def sizes(types: list[TensorType]) -> list[int]:
            return [_type_bytes(t, extents, at_bounds) for t in types]

        return replace(
            fixed,
            activation_bytes=plan.arena,
            input_bytes=options.input_sets * sum(sizes([v.type for v in self.graph.inputs])),
            output_bytes=self.sizes.results(plan, sizes([o.value.type for o in self.graph.outputs])),
            state_bytes=sum(sizes([v.type for v in self.graph.states])),
            workspace_bytes=self._most_scratch(extents) if at_bounds else self.sizes.scratch(extents),
            certainty={**fixed.certainty, **dict.fromkeys(_EXACT, "exact")},
            dims=dict(extents),
            axes={name: self.axis(symbol, extents) for name, symbol in self.graph.dims().items() if name in extents},
            notes=self._notes,
        )

    def _most_scratch(self, bounds: Mapping[str, int]) -> int:
        """Scratch of the size that takes the most: work of fewer rows may be cut into larger chunks.

        Looks at some sizes, of each dim alone and of all of them, that are evenly spread up to the bounds.
        """
        known = self.graph.dims()
        some = {name: _spread(known[name], hi) if name in known else [hi] for name, hi in bounds.items()}
        sizes = [{**bounds, name: n} for name, found in some.items() for n in found]
        if len(some) > 1:
            sizes += [{name: found[i * len(found) // SPREAD] for name, found in some.items()} for i in range(SPREAD)]
        return max(map(self.sizes.scratch, sizes or [{}]))

    def axis(self, symbol: Symbol, extents: Mapping[str, int]) -> Axis:
        """One dim as a size that can be varied within its bounds."""
        low = max(symbol.lo, 1)
        current = extents[symbol.name]
        return Axis(low, current, symbol.multiple, current, lambda n: self.at({**extents, symbol.name: n}))


def _spread(symbol: Symbol, most: int) -> list[int]:
    """`SPREAD` sizes of a dim from its lower bound on, and those that need one more of few bands of rows; ascending."""
    low, step = max(symbol.lo, 1), symbol.multiple
    wanted = [*(most * i // SPREAD for i in range(1, SPREAD)), *range(BAND + 1, SPREAD * BAND, BAND)]
    sizes = {max(n // step * step, -(-low // step) * step) for n in wanted}
    return sorted({n for n in sizes if n <= most} | {most})


def _type_bytes(type: TensorType, extents: Mapping[str, int], at_bounds: bool) -> int:
    most = type.nbytes() if at_bounds else None
    if most is not None:
        return most
    sizes = [evaluate(s, extents) for s in type.shape]
    if type.encoding is not None:
        return type.encoding.nbytes(sizes)
    count = numel(sizes)
    assert isinstance(count, int)
    return type.dtype.nbytes(count)


def estimate_library(
    graph: Graph,
    legal: Graph,
    device: str,
    overhead: Overhead,
    options: CompileOptions,
    extents: Mapping[str, int] | None = None,
    *,
    known: bool = False,
) -> MemoryEstimate:
    """For a device that manages its memory itself: no more than every value of the graph at once.

    At the extents of all dims, or (None) at their upper bounds; `known`: without what has other dims.
    """

    def total(types: list[TensorType]) -> int:
        if known and extents is not None:
            types = [t for t in types if all(s.name in extents for size in t.shape for s in symbols(size))]
        return sum(_type_bytes(t, extents or {}, extents is None) for t in types)

    constants = total([v.type for v in legal.constants])
    # encoded weights stay as the caller has them, beside what the device reads
    params = total([v.type for v in legal.params])
    decoded = total([v.type.decoded for v in legal.params if v.type.encoding is not None])
    return MemoryEstimate(
        model=graph.name,
        device=device,
        weight_bytes=params + decoded + constants,
        activation_bytes=total([v.type for node in legal.nodes for v in node.outputs]),
        input_bytes=options.input_sets * total([v.type for v in graph.inputs]),
        output_bytes=total([o.value.type for o in graph.outputs]),
        state_bytes=total([v.type for v in graph.states]),
        code_bytes=overhead.code_bytes(None, len(graph.nodes)),
        overhead_bytes=overhead.fixed,
        address_bytes=overhead.unused,
        certainty={
            **dict.fromkeys(("weight", "input", "output", "state"), "exact"),
            "activation": "bounded",
            "workspace": "bounded",
            **dict.fromkeys(("code", "overhead"), overhead.certainty),
        },
        stored_weight_bytes=params,
        constant_bytes=constants,
        dims=dict(extents or {name: s.hi for name, s in graph.dims().items() if s.hi is not None}),
        notes=("this device plans no memory: activations are counted as if all were there at once",),
    )
