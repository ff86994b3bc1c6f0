"""A printed kernel: its text, what a launch of it takes, and how many threads there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlx.backends.codegen.arguments import Argument, KernelCode
from rlx.backends.cuda.text.emitter import SITE, STATUS, Emitter, Scope, stored_type
from rlx.backends.cuda.text.maps import MapForm
from rlx.ir.shape import Shape, evaluate
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Cast, Expr
from rlx.kernels.program import Buffer, Store
from rlx.lazy_imports import sha256
from rlx.records import dataclass

__all__ = [
    "Function",
    "LaunchCode",
    "PartStore",
    "Special",
    "Text",
    "Threads",
    "TwinStore",
    "function_text",
    "store_line",
    "targets",
    "volume",
    "with_twins",
]

WORDS = 500  # that a launch takes at most: it has 4 KB of arguments
Extents = Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Threads:
    """Launch geometry at some extents: blocks in the grid, and threads in a block."""

    blocks: Callable[[Extents], int]
    block: Callable[[Extents], int]


@dataclass(frozen=True, eq=False)
class Function:
    """A function of a module, by its symbol."""

    symbol: str
    text: str
    threads: Threads
    alone: bool = False  # takes long to compile: in a module of its own, so that others are compiled beside it
    shared: int = 0  # bytes of shared memory that a launch asks for
    hopper: bool = False  # written in hopper.cuh
    overlaps: bool = True  # a launch may start before the kernel before it is done


@dataclass(frozen=True, eq=False)
class Text:
    """A function and the words that a kernel gives it; `sites` are its checks, `maps` what the copy engine reads."""

    function: Function
    words: tuple[Argument, ...]
    sites: tuple[tuple[str, str], ...]
    maps: tuple[MapForm, ...] = ()

    def code(self, first_site: int) -> KernelCode:
        """What the table of phases knows of it; the checks of the graph are numbered from `first_site` on."""
        words = tuple(first_site if word is SITE else word for word in self.words)
        return LaunchCode(self.function.symbol, self.function.text, words, self.function.threads.blocks, maps=self.maps)


@dataclass(frozen=True)
class LaunchCode(KernelCode):
    """Code whose launches take maps of the copy engine beside words."""

    maps: tuple[MapForm, ...] = ()


@dataclass(frozen=True, eq=False)
class TwinStore(Store):
    """A store that leaves the same elements, converted, in further buffers of the same shape too."""

    twins: tuple[Buffer, ...] = ()


@dataclass(frozen=True, eq=False)
class PartStore(Store):
    """The store of some columns of a product, from column `first` on: its last axis goes over these."""

    first: int = 0


@dataclass(frozen=True)
class Special:
    """What a function of hopper.cuh needs: its maps, bytes of shared memory, blocks of a cluster, and helpers."""

    maps: tuple[MapForm, ...]
    shared: int
    cluster: int = 1
    helpers: str = ""


def function_text(
    emitter: Emitter,
    body: Sequence[str],
    threads: Threads,
    *,
    most: int,
    alone: bool = False,
    special: Special | None = None,
    overlaps: bool = True,
) -> Text:
    """The function of these statements; `most` threads are in a block at most.

    Blocks that start early wait on the processors that are free, several on one: those that work long should not.
    """
    words = tuple(emitter.table.words)
    assert len(words) <= WORDS, f"a kernel takes {len(words)} words"
    if special is None:
        at = 1 if body[0] == "RLX_NEXT;" else 0
        body = [*body[:at], "RLX_WAIT;", *body[at:]]
    inside = "\n".join(indented(body))
    hopper = special or Special((), 0)
    bounds = f"__launch_bounds__({most}{', 1' if hopper.maps else ''})"
    if hopper.cluster > 1:
        bounds += f" __cluster_dims__({hopper.cluster}, 1, 1)"
    name = "k" + sha256(f"{bounds} {hopper.shared} {inside}".encode()).hexdigest()[:16]
    arguments = [f"const Words<{max(len(words), 1)}> w", *(f"RLX_MAP map{n}" for n in range(len(hopper.maps)))]
    head = f"{hopper.helpers}RLX_KERNEL {bounds} {name}({', '.join(arguments)}) {{"
    made = Function(name, f"{head}\n{inside}\n}}\n", threads, alone, hopper.shared, special is not None, overlaps)
    return Text(made, words, tuple(emitter.sites), hopper.maps)


def indented(lines: Sequence[str]) -> list[str]:
    """The lines, two spaces further in for each open brace."""
    made, depth = [], 1
    for line in lines:
        closing = len(line) - len(line.lstrip("}"))
        made.append("  " * (depth - closing) + line)
        depth += line.count("{") - line.count("}")
    return made


def store_line(emitter: Emitter, store: Store, scope: Scope) -> None:
    """The statements that compute an element and store it, at the end of the scope."""
    values = [(b, emitter.value(e, scope)) for b, e in targets(store)]
    index, _ = emitter.offset(linear_index(store.index, store.buffer.shape), scope)
    stop = f"if (*(const i64*){emitter.word_of(STATUS)} == 0) " if store.buffer.base.kind == "state" else ""
    made = [f"{emitter.pointer(b)}[{index}] = {value};" for b, value in values]
    scope.lines.append(f"{stop}{made[0]}" if len(made) == 1 else f"{stop}{{ {' '.join(made)} }}")


def targets(store: Store) -> list[tuple[Buffer, Expr]]:
    """The buffers that elements go to, and what they are there."""
    twins = store.twins if isinstance(store, TwinStore) else ()
    made = [(store.buffer, store.expr), *((b, Cast(store.expr, b.dtype)) for b in twins)]
    assert all(stored_type(b.dtype) == stored_type(e.dtype) for b, e in made)
    return made


def with_twins(stores: Sequence[Store]) -> list[Store]:
    """The stores, of which those that only convert the elements of another are its twins.

    Parts are of columns of their own, whatever their expressions look like.
    """
    made: list[Store] = []
    if any(isinstance(store, PartStore) for store in stores):
        return list(stores)
    for store in stores:
        for number, main in enumerate(made):
            same = main.index == store.index and main.buffer.shape == store.buffer.shape
            if same and isinstance(store.expr, Cast) and store.expr.value == main.expr:
                twins = (*(main.twins if isinstance(main, TwinStore) else ()), store.buffer)
                made[number] = TwinStore(main.buffer, main.extents, main.index, main.expr, twins)
                break
        else:
            made.append(store)
    return made


def volume(shape: Shape, extents: Extents) -> int:
    """The number of elements."""
    total = 1
    for size in shape:
        total *= max(evaluate(size, extents), 0)
    return total
