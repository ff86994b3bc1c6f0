"""Runs the kernels of a program one by one, every buffer against pages that can't be touched.

A kernel that reads or writes outside its buffers dies at once, instead of giving a result that happens to be right.
Host calls among them are made as in a run.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlx.backends.codegen.binding import Views, host_function
from rlx.backends.cpu.jit.compile import compile_kernels
from rlx.backends.cpu.native.runner import native
from rlx.backends.cpu.native.runner_ir import LOOK, USER_WORDS
from rlx.backends.cpu.schedule.arguments import (
    THREADS,
    Argument,
    Computed,
    KernelCode,
    Link,
    Literal,
    Pointer,
    Routine,
    Scratch,
    ScratchStride,
    text_of,
)
from rlx.errors import CompileError, ExecutionError
from rlx.ir.graph import Array
from rlx.ir.shape import evaluate
from rlx.kernels.program import Buffer, Kernel, Program

__all__ = ["GuardedRun"]

PAGE = mmap.PAGESIZE
Words = ctypes.Array[ctypes.c_int64]
EntryPoint = Callable[[Words, int, Words, int], None]
Runner = Callable[[Kernel, KernelCode, Callable[[int], None], Mapping[Buffer, Array], int], None]


class GuardedMemory:
    """`nbytes` that end (or begin) at a page that can't be touched; the other side is a page away at most."""

    def __init__(self, nbytes: int, *, at_end: bool = True) -> None:
        pages = -(-max(nbytes, 1) // PAGE)
        self.map = mmap.mmap(-1, (pages + 2) * PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        libc = ctypes.CDLL(None, use_errno=True)
        for page in (base, base + (pages + 1) * PAGE):
            if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        start = PAGE + (pages * PAGE - nbytes if at_end else 0)
        self.address = base + start
        self.bytes = np.frombuffer(self.map, np.uint8, count=max(nbytes, 0), offset=start)


class GuardedRun:
    """A program's kernels compiled, to be run at given sizes."""

    def __init__(self, program: Program, emit: Callable[[Kernel], Sequence[KernelCode]]) -> None:
        self.program = program
        kernels = (*program.prepare, *program.run)
        self.steps = [(k, code) for k in kernels for code in ([None] if k.host is not None else emit(k))]
        codes = [code for _, code in self.steps if code is not None]
        items = [(c.symbol, c.ir, c.optimize) for c in codes]
        items += [(w.symbol, text_of(w), False) for c in codes for w in c.words if isinstance(w, Routine)]
        self.addresses = compile_kernels(items)

    def __call__(
        self,
        inputs: Mapping[str, Array],
        extents: Mapping[str, int] | None = None,
        *,
        workers: int = 1,
        threads: int = 1,
        at_end: bool = True,
        reverse: bool = False,
        runner: Runner | None = None,
    ) -> dict[str, Array]:
        """The outputs by name. Chunks go to `workers` in turn, each with scratch of its own; `reverse`: last first.

        They are cut as for so many threads. `runner(kernel, code, run, memory, count)` has them run otherwise:
        `run(chunk)` runs one of `count`, and `memory` is the bytes of all buffers that the code knows. Raises
        `ExecutionError` where a kernel stops the run.
        """
        sizes = {**(extents or {}), THREADS: threads}
        memory: dict[Buffer, GuardedMemory] = {}
        experts = {weight.table: weight.panels for layer in self.program.experts for weight in layer.weights}

        def place(buffer: Buffer) -> GuardedMemory:
            root = buffer.base
            if root not in memory:
                memory[root] = GuardedMemory(root.nbytes(sizes), at_end=at_end)
                memory[root].bytes[:] = 0xFF
                data = inputs.get(root.name, root.data)
                if root.kind in ("input", "param", "const") and data is not None:
                    memory[root].bytes[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
                if root.kind == "table":
                    memory[root].bytes[:] = 0
                if root in experts:
                    entries, panels = memory[root].bytes.view(np.int64).reshape(-1, 2), experts[root]
                    step = panels.nbytes(sizes) // len(entries)
                    entries[:, 0] = place(panels).address + step * np.arange(len(entries))
            return memory[root]

        status = (ctypes.c_int64 * USER_WORDS)()
        status[LOOK] = native().look
        for kernel, code in self.steps:
            if code is None:
                host_function(kernel, sizes, Views(lambda b, extents: self._array(place(b), b, extents)))()
                continue
            scratch = code.scratch_bytes(sizes)
            own = GuardedMemory(scratch * workers)
            own.bytes[:] = 0xFF

            def value(word: Argument, own: GuardedMemory = own, scratch: int = scratch) -> int:
                match word:
                    case Pointer(buffer=buffer, offset=offset):
                        return place(buffer).address + evaluate(buffer.offset, sizes) + evaluate(offset, sizes)
                    case Computed(fn=fn):
                        return fn(sizes)
                    case Scratch():
                        return own.address
                    case ScratchStride():
                        return scratch
                    case Routine(symbol=symbol):
                        return self.addresses[symbol]
                    case Link():
                        raise CompileError("control flow can't be run kernel by kernel: use a compiled graph")
                assert not isinstance(word, Literal)
                return evaluate(word, sizes)

            words = (ctypes.c_int64 * max(len(code.words), 1))(*(value(w) for w in code.words))
            types = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
            entry = ctypes.CFUNCTYPE(None, *types)(self.addresses[code.symbol])

            def run(chunk: int, entry: EntryPoint = entry, words: Words = words, own: GuardedMemory = own) -> None:
                own.bytes[:] = 0xFF
                entry(words, chunk, status, chunk % workers)

            order = range(code.chunks(sizes))
            if runner is not None:
                known = dict.fromkeys(word.buffer.base for word in code.words if isinstance(word, Pointer))
                runner(kernel, code, run, {root: memory[root].bytes for root in known}, len(order))
                continue
            for chunk in reversed(order) if reverse else order:
                entry(words, chunk, status, chunk % workers)
            if status[0]:
                raise ExecutionError(f"the kernel {kernel.name} stops the run, showing {status[1]}")
        return {name: self._array(place(b), b, sizes).copy() for name, b in self.program.outputs}

    def _array(self, memory: GuardedMemory, buffer: Buffer, sizes: Mapping[str, int]) -> Array:
        shape = [evaluate(s, sizes) for s in buffer.shape]
        start = evaluate(buffer.offset, dict(sizes))
        raw = memory.bytes[start : start + buffer.nbytes(dict(sizes))]
        return raw.view(buffer.dtype.numpy).reshape(shape)
