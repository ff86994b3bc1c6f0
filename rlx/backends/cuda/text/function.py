"""A printed kernel: its text, what a launch of it takes, and how many threads there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlx.backends.codegen.arguments import Argument, KernelCode
from rlx.backends.cuda.text.emitter import SITE, STATUS, Emitter, Scope, stored_type
from rlx.ir.shape import Shape, evaluate
from rlx.kernels.affine import linear_index
from rlx.kernels.program import Store
from rlx.lazy_imports import sha256
from rlx.records import dataclass

__all__ = ["Function", "Text", "Threads", "function_text", "store_line", "volume"]

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


@dataclass(frozen=True, eq=False)
class Text:
    """A function and the words that a kernel gives it; `sites` are its checks."""

    function: Function
    words: tuple[Argument, ...]
    sites: tuple[tuple[str, str], ...]

    def code(self, first_site: int) -> KernelCode:
        """What the table of phases knows of it; the checks of the graph are numbered from `first_site` on."""
        words = tuple(first_site if word is SITE else word for word in self.words)
        return KernelCode(self.function.symbol, self.function.text, words, self.function.threads.blocks)


def function_text(emitter: Emitter, body: Sequence[str], threads: Threads, *, most: int, alone: bool = False) -> Text:
    """The function of these statements; `most` threads are in a block at most."""
    words = tuple(emitter.table.words)
    assert len(words) <= WORDS, f"a kernel takes {len(words)} words"
    inside = "\n".join(indented(body))
    name = "k" + sha256(f"{most} {inside}".encode()).hexdigest()[:16]
    head = f"RLX_KERNEL __launch_bounds__({most}) {name}(const Words<{max(len(words), 1)}> w) {{"
    return Text(Function(name, f"{head}\n{inside}\n}}\n", threads, alone), words, tuple(emitter.sites))


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
    value = emitter.value(store.expr, scope)
    index, _ = emitter.offset(linear_index(store.index, store.buffer.shape), scope)
    target = emitter.pointer(store.buffer)
    stop = f"if (*(const i64*){emitter.word_of(STATUS)} == 0) " if store.buffer.base.kind == "state" else ""
    assert stored_type(store.buffer.dtype) == stored_type(store.expr.dtype)
    scope.lines.append(f"{stop}{target}[{index}] = {value};")


def volume(shape: Shape, extents: Extents) -> int:
    """The number of elements."""
    total = 1
    for size in shape:
        total *= max(evaluate(size, extents), 0)
    return total
