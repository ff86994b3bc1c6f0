"""The entry: one native CPython function that checks arrays, runs a state block and returns a cached object.

`make_entry` gives a builtin `run_slots(*arrays)`. Its `__self__` is an `Entry`, an int whose value is the address of
the state block, so that one native function serves all compiled graphs. On the fast path nothing is allocated. Whatever
is not exactly as recorded (count, element type, rank, shape, contiguity, alignment, overlap with the guarded range), or
finds another thread in the run, goes to a Python fallback.

`selected_entry` gives another one over the same block, `run_selected(selected, *inputs, *out)`, for runs of some phases
and for arrays of the caller to write into: these too are checked in every call, so that none has to be remembered.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, Structure, c_char_p, c_int, c_size_t, c_void_p, py_object, pythonapi
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.cpu.jit import load as loader
from rlx.backends.cpu.native import runner_ir
from rlx.backends.cpu.native.entry_ir import (
    ALIGN_MASK,
    ARRAY_DATA,
    ARRAY_DTYPE,
    ARRAY_FLAGS,
    ARRAY_RANK,
    ARRAY_SHAPE,
    ARRAY_STRIDES,
    BYTES,
    DTYPE,
    ENTRY_NAMES,
    ITEMSIZE,
    KIND,
    KINDS,
    MAX_RANK,
    METH_FASTCALL,
    NAME,
    NONE,
    RANK,
    RECORD_WORDS,
    SHAPE,
    SOURCE,
    TRUE,
    entry_ir,
)
from rlx.backends.cpu.native.pool import aligned_words
from rlx.backends.cpu.native.runner import RunBlock, native
from rlx.backends.cpu.native.runner_ir import CPYTHON, symbol_address
from rlx.errors import ShapeError
from rlx.records import dataclass

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Entry", "InputSpec", "Patch", "make_entry", "output_records", "selected_entry"]

PLAIN = (np.ndarray, np.memmap)  # arrays that are nothing but their memory; other subclasses may be, as masked ones
Patch = tuple[int, int, int]  # (input index, address of a word, byte offset): the word becomes data pointer + offset


@dataclass(frozen=True)
class InputSpec:
    """What one input must look like: element kind ("f", "i", "u", "b" or "c"), bytes an element, shape.

    `dtype` is the NumPy type that is accepted as it is; it is derived from kind and size unless the type has no buffer
    format of its own (bf16, f8: give it here).
    """

    format_kind: str
    itemsize: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None = None


class MethodDef(Structure):
    _fields_ = (("name", c_char_p), ("function", c_void_p), ("flags", c_int), ("doc", c_char_p))


@functools.cache
def code() -> loader.Library:
    """The native functions, which outlive every function object."""
    library = native().library
    symbols = {name: symbol_address(getattr(pythonapi, name)) for name in ENTRY_NAMES}
    symbols |= {name: library.address(name) for name in ("rlx_acquire", "rlx_go", "rlx_release")}
    symbols |= {NONE: id(None), TRUE: id(True)}
    loaded = loader.build(NAME, entry_ir, symbols=symbols)
    for kept in (library, loaded):
        kept.keep()
    return loaded


@functools.cache
def method(name: str, symbol: str) -> MethodDef:
    """A native function as a Python method definition, which must live as long as any function made from it."""
    doc = f"{name}(*arrays)".encode()
    definition = MethodDef(name.encode(), code().address(symbol), METH_FASTCALL, doc)
    pythonapi.Py_IncRef(py_object(definition))
    return definition


def builtin(name: str, symbol: str, entry: Entry) -> Callable[..., Any]:
    """A native function of an entry as Python calls it."""
    new_function = pythonapi.PyCFunction_NewEx
    new_function.restype, new_function.argtypes = py_object, (POINTER(MethodDef), py_object, c_void_p)
    function: Callable[..., Any] = new_function(method(name, symbol), entry, None)
    return function


@functools.cache
def array_type() -> int:
    """Address of NumPy's array type if arrays are laid out as the entry reads them, else 0: read as buffers."""
    array = np.zeros((2, 3), np.float32)
    words = (c_size_t * 9).from_address(id(array))
    shape, strides = words[ARRAY_SHAPE // 8], words[ARRAY_STRIDES // 8]
    found = (words[1], words[ARRAY_DATA // 8], words[ARRAY_RANK // 8] & 0xFFFFFFFF)
    if found != (id(np.ndarray), array.ctypes.data, 2) or words[ARRAY_DTYPE // 8] != id(array.dtype):
        return 0
    if words[ARRAY_FLAGS // 8] & 0xFFFFFFFF != array.flags.num:
        return 0
    # NumPy keeps both vectors in one block, so these pointers can be told from anything else before they are followed.
    if strides - shape != 16 or tuple((c_size_t * 4).from_address(shape)) != (2, 3, 12, 4):
        return 0
    return id(np.ndarray)


class Entry(int):
    """Address of a state block, and owner of all that the native function uses through it."""

    block: RunBlock
    records: NDArray[np.int64]
    patches: NDArray[np.int64]
    inputs: tuple[InputSpec, ...]
    dtypes: list[np.dtype[Any]]
    result: object
    fallback: Callable[..., Any]
    on_error: Callable[[int], Any]

    def update(
        self,
        *,
        shapes: Mapping[int, tuple[int, ...]] | None = None,
        patches: Sequence[Patch] | NDArray[np.int64] | None = None,
        guard: tuple[int, int] | None = None,
    ) -> None:
        """Changes recorded shapes (by input), all patches, or the guarded address range; hold the block meanwhile."""
        for index, shape in (shapes or {}).items():
            self.set_shape(index, shape)
        if patches is not None:
            self.set_patches(patches)
        if guard is not None:
            self.block.words[runner_ir.GUARD_LOW], self.block.words[runner_ir.GUARD_HIGH] = guard

    def set_result(self, result: object) -> None:
        """Sets the object that every successful call returns."""
        old = self.result  # lives until the block points to the new one
        self.result = result
        self.block.words[runner_ir.RESULT] = id(result)
        del old

    def set_shape(self, index: int, shape: tuple[int, ...]) -> None:
        """Records the shape that an input must have. Raises ShapeError for more than 16 axes."""
        if len(shape) > MAX_RANK:
            raise ShapeError(f"input {index} has {len(shape)} axes; the CPU takes at most {MAX_RANK}: reshape it")
        record = self.records[index]
        record[RANK] = len(shape)
        record[SHAPE : SHAPE + len(shape)] = shape
        record[BYTES] = int(record[ITEMSIZE]) * math.prod(shape)

    def close(self) -> None:
        """Makes the check of every call fail, until shapes are set."""
        self.records[:, RANK] = -1

    def set_patches(self, patches: Sequence[Patch] | NDArray[np.int64]) -> None:
        """Sets all patches, or takes a table of them that is kept by others too."""
        self.patches = patches if isinstance(patches, np.ndarray) else patch_table(patches)
        self.block.words[runner_ir.PATCHES] = self.patches.ctypes.data
        self.block.words[runner_ir.PATCH_COUNT] = len(self.patches)

    def set_inputs(self, inputs: Sequence[InputSpec]) -> None:
        self.inputs = tuple(inputs)
        self.records = aligned_words(max(1, len(inputs)) * RECORD_WORDS).reshape(-1, RECORD_WORDS)
        self.dtypes = [spec.dtype or np.dtype(f"{spec.format_kind}{spec.itemsize}") for spec in inputs]
        for index, (spec, dtype) in enumerate(zip(inputs, self.dtypes, strict=True)):
            record = self.records[index]
            record[ITEMSIZE] = spec.itemsize
            record[KIND] = 1 + KINDS.index(spec.format_kind)
            record[DTYPE] = id(dtype)
            record[ALIGN_MASK] = dtype.alignment - 1
            self.set_shape(index, spec.shape)
        self.block.words[runner_ir.INPUTS] = self.records.ctypes.data
        self.block.words[runner_ir.INPUT_COUNT] = len(inputs)

    def run_slots(self, *arrays: Any) -> Any:
        """The same as the native function, in Python, for interpreters that can't call native functions directly."""
        views = [self.view(index, array) for index, array in enumerate(arrays[: len(self.inputs)])]
        if len(arrays) != self.block.words[runner_ir.INPUT_COUNT] or any(view is None for view in views):
            return self.fallback(arrays)
        if not self.block.native.acquire(self.block.address):
            return self.fallback(arrays)
        try:
            pointers = [view.ctypes.data for view in views if view is not None]
            for index, word, offset in self.patches[: int(self.block.words[runner_ir.PATCH_COUNT])]:
                c_size_t.from_address(int(word)).value = pointers[index] + int(offset)
            status = self.block.run_acquired()
        finally:
            self.block.release()
        made = self.result if status == 0 else self.on_error(status)
        return self.fallback(arrays) if made is self else made

    def view(self, index: int, array: Any) -> NDArray[Any] | None:
        """An array over the same memory if it is as recorded, else None."""
        record = self.records[index]
        if record[RANK] < 0:  # closed
            return None
        if isinstance(array, np.ndarray) and type(array) not in PLAIN:
            return None
        try:
            view = array if isinstance(array, np.ndarray) else np.asarray(memoryview(array))
        except (TypeError, ValueError, BufferError):
            return None
        shape = tuple(record[SHAPE : SHAPE + int(record[RANK])].tolist())
        low, high = self.block.words[runner_ir.GUARD_LOW : runner_ir.GUARD_HIGH + 1].tolist()
        start = view.ctypes.data
        same = view.dtype == self.dtypes[index] and view.shape == shape and view.flags.c_contiguous
        outside = start >= high or start + view.nbytes <= low
        return view if same and outside and start & int(record[ALIGN_MASK]) == 0 else None


def patch_table(patches: Sequence[Patch]) -> NDArray[np.int64]:
    """The words of patches."""
    table = aligned_words(3 * len(patches)).reshape(-1, 3)
    if patches:
        table[:] = patches
    return table


def make_entry(
    block: RunBlock,
    inputs: Sequence[InputSpec],
    patches: Sequence[Patch],
    fallback: Callable[..., Any],
    on_error: Callable[[int], Any],
    release_gil: bool,
    *,
    result: object = None,
    guard: tuple[int, int] = (0, 0),
    native: bool = CPYTHON,
) -> Callable[..., Any]:
    """Returns `run_slots(*arrays)` for a block; its `__self__` is the Entry with the methods that change it.

    A call patches the data pointers in, runs the block and returns `result`. It returns `fallback(arrays)` when any
    array is not as in `inputs` or overlaps `guard` (the arena's first and past-the-end address), or the block is busy,
    and `on_error(status)` when the run fails: where that is the entry itself, the fallback runs once more.
    `release_gil` is for programs that run longer than some 10 µs.
    """
    entry = Entry(block.address)
    entry.block = block
    entry.result, entry.fallback, entry.on_error = result, fallback, on_error
    words = block.words
    words[runner_ir.RESULT], words[runner_ir.FALLBACK], words[runner_ir.ON_ERROR] = (
        id(result),
        id(fallback),
        id(on_error),
    )
    words[runner_ir.RELEASE_GIL] = release_gil
    words[runner_ir.ARRAY_TYPE] = array_type() if native else 0
    words[runner_ir.ARRAY_CLASS], words[runner_ir.MAPPED_CLASS] = map(id, PLAIN)
    entry.set_inputs(inputs)
    entry.update(patches=patches, guard=guard)
    if not native:
        return entry.run_slots
    return builtin("run_slots", "rlx_entry", entry)


def selected_entry(entry: Entry) -> Callable[..., Any]:
    """Returns `run_selected(selected, *inputs, *out)` for the block of an entry: no `out`, or one for each output.

    `selected` is an int, the address of SELECTED_WORDS words; what is None in `out` is left alone. A call returns the
    object that these words name, or True when `out` had an array for every output; None where `run_slots` has a
    fallback, or an array of `out` is not as recorded, and always where the layout of NumPy's arrays is not known.
    """
    if entry.block.words[runner_ir.ARRAY_TYPE]:
        return builtin("run_selected", "rlx_selected", entry)
    return lambda *_: None


def output_records(arrays: Sequence[NDArray[Any] | None]) -> NDArray[np.int64]:
    """The records of outputs, by the arrays that show them; None for those that a run does not make."""
    records = aligned_words(max(1, len(arrays)) * RECORD_WORDS).reshape(-1, RECORD_WORDS)
    records[:, RANK] = -1
    for record, array in zip(records, arrays, strict=False):
        if array is not None and array.flags.c_contiguous and array.ndim <= MAX_RANK:
            record[[ITEMSIZE, RANK, DTYPE]] = array.itemsize, array.ndim, id(array.dtype)
            record[[BYTES, SOURCE]] = array.nbytes, array.ctypes.data
            record[SHAPE : SHAPE + array.ndim] = array.shape
    return records
