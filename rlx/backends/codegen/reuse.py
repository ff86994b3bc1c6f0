"""Code of kernels that are alike is made once: the others take it, with their own buffers.

Alike are kernels that are equal but for the names of their buffers, as those of the layers of a net are, and for the
numbers in their arithmetic (`scalars`). The key of a
`Form` is equal for such kernels: it has their fields in order, where the n-th buffer that comes up is written as n and
what it is (shape, type, where it lies), and variables of reductions are numbered in the same way. What buffers hold is
left out. Code made of one such kernel is that of all, once the n-th buffer of one is put in the place of the n-th of
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from time import thread_time
from typing import Any

from rlx.backends.codegen.arguments import Argument, KernelCode, Pointer
from rlx.backends.codegen.scalars import filled
from rlx.code_times import Emitted, times
from rlx.ir.shape import Dim
from rlx.kernels.expr import Const, Given, Var
from rlx.kernels.program import Buffer, Kernel
from rlx.records import names_of, replace

__all__ = ["Form", "Reuse"]

LABELS = frozenset({"name", "nodes", "refused"})  # fields of a kernel that only people read
SCALARS = frozenset({type(None), bool, int, float, str})

Parts = Callable[[Kernel], tuple[Kernel, tuple[int, ...]]]  # the kernel without the numbers that are words, and these


class Form:
    """The form of a kernel as `key`, and its buffers in the order in which they come up."""

    def __init__(self, kernel: Kernel) -> None:
        self.buffers: dict[Buffer, int] = {}
        self._parts: list[Any] = []
        self._vars: dict[str, int] = {}  # of reductions
        self._seen: dict[int, int] = {}  # by id, what came up before: expressions share parts
        self._add(kernel)
        self.key: tuple[Hashable, ...] = tuple(self._parts)

    def _add(self, thing: Any) -> None:
        kind = type(thing)
        put = self._parts.append
        if kind in SCALARS:
            put((kind, repr(thing)) if kind is float else (kind, thing) if kind is bool else thing)
        elif kind is tuple:
            put(("tuple", len(thing)))
            for item in thing:
                self._add(item)
        elif kind is Buffer:
            self._add_buffer(thing)
        elif id(thing) in self._seen:
            put(("again", self._seen[id(thing)]))
        elif kind is Kernel:
            self._add_fields(thing, [name for name in names_of(thing) if name not in LABELS])
        elif kind is Var:
            put(("var", self._vars.setdefault(thing.name, len(self._vars)) if thing.name[0] == "r" else thing.name))
            put(thing.dtype)
        elif kind is Const or kind is Given:
            put(("Const", repr(thing.value), thing.dtype))
        elif kind is not Dim and hasattr(kind, "_record_rows"):
            self._add_fields(thing, names_of(thing))
        else:  # sizes, types, strategies, nodes: by their own equality, which for most is identity
            put(thing)

    def _add_fields(self, thing: Any, names: Sequence[str]) -> None:
        self._seen[id(thing)] = len(self._seen)
        self._parts.append(type(thing))
        for name in names:
            self._add(getattr(thing, name))

    def _add_buffer(self, buffer: Buffer) -> None:
        number = self.buffers.get(buffer)
        self._parts.append(("buffer", len(self.buffers) if number is None else number))
        if number is not None:
            return
        self.buffers[buffer] = len(self.buffers)
        self._parts += [buffer.kind, buffer.shape, buffer.dtype, buffer.encoding, buffer.offset, buffer.space]
        self._parts.append(buffer.wide)
        self._add(buffer.root)


class Reuse:
    """The code of kernels, made by `emit` for the first of those that are alike. `emitted` counts these.

    `emit` gets kernels as `parts` leaves them.

    What the code of a kernel holds of its buffers is in its pointers; all else of its words are numbers, functions of
    the extents and routines. Nodes that are run as a whole, and control flow, are never taken for alike.
    """

    def __init__(self, emit: Callable[[Kernel], list[KernelCode]], parts: Parts = lambda kernel: (kernel, ())) -> None:
        self.emit, self.parts = emit, parts
        self.emitted = 0
        self.times = times()
        self.known: dict[tuple[Hashable, ...], tuple[Form, list[KernelCode]]] = {}

    def __call__(self, kernel: Kernel) -> list[KernelCode]:
        if kernel.special is not None or kernel.mark is not None:
            return self._emit(kernel)
        kernel, numbers = self.parts(kernel)
        form = Form(kernel)
        if form.key not in self.known:
            self.known[form.key] = form, self._emit(kernel)
            return filled(self.known[form.key][1], numbers)
        if self.times is not None:
            self.times.alike += 1
        first, codes = self.known[form.key]
        moved = dict(zip(first.buffers, form.buffers, strict=True))
        made = [replace(code, words=tuple(_moved(word, moved) for word in code.words)) for code in codes]
        return filled(made, numbers)

    def _emit(self, kernel: Kernel) -> list[KernelCode]:
        self.emitted += 1
        begun = thread_time()
        made = self.emit(kernel)
        if self.times is not None:
            names = tuple(code.symbol for code in made)
            text = sum(len(code.ir) for code in made)
            self.times.emitted.append(Emitted(kernel.how, names, text, thread_time() - begun))
        return made


def _moved(word: Argument, moved: Mapping[Buffer, Buffer]) -> Argument:
    return Pointer(_moved_buffer(word.buffer, moved), word.offset) if isinstance(word, Pointer) else word


def _moved_buffer(buffer: Buffer, moved: Mapping[Buffer, Buffer]) -> Buffer:
    """The buffer in the place of this one, which may be a view of one that has a place.

    One without is no field of the kernel: its strategy brings it, which kernels that are alike share, so it stays.
    """
    if buffer in moved or buffer.root is None:
        return moved.get(buffer, buffer)
    return replace(buffer, root=_moved_buffer(buffer.root, moved))
