"""The native entry: what it accepts, patches, returns and hands to Python, and that it allocates nothing."""

from __future__ import annotations

import array
import ctypes
import gc
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from growth import growth, traced_growth
from interrupts import interrupt_at

from rlx.backends.cpu.jit import compile as jit
from rlx.backends.cpu.native import entry as entries
from rlx.backends.cpu.native import runner_ir
from rlx.backends.cpu.native.entry import InputSpec, make_entry, selected_entry
from rlx.backends.cpu.native.runner import RunBlock, host_call
from rlx.backends.cpu.runtime.selected_outputs import Selected, selected
from rlx.errors import ShapeError

# *word1 = first 8 bytes at word0
COPY = """
define void @copy(ptr %words, i64 %chunk, ptr %ctx, i64 %worker) {
  %s = load ptr, ptr %words
  %v = load i64, ptr %s, align 1
  %d.p = getelementptr ptr, ptr %words, i64 1
  %d = load ptr, ptr %d.p
  store i64 %v, ptr %d
  ret void
}
"""
# error kind 1, site 2, by way of the status word
FAIL = """
define void @fail(ptr %words, i64 %chunk, ptr %ctx, i64 %worker) {
  %r = cmpxchg ptr %ctx, i64 0, i64 513 seq_cst monotonic
  ret void
}
"""
# counts word 0 up by one, word 1 times
BURN = """
define void @burn(ptr %words, i64 %chunk, ptr %ctx, i64 %worker) {
entry:
  %n.p = getelementptr i64, ptr %words, i64 1
  %n = load i64, ptr %n.p
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %j, %loop ]
  %v = load volatile i64, ptr %words
  %w = add i64 %v, 1
  store volatile i64 %w, ptr %words
  %j = add i64 %i, 1
  %more = icmp slt i64 %j, %n
  br i1 %more, label %loop, label %done
done:
  ret void
}
"""
RESULT = ("the", "outputs")
VARIANTS = pytest.mark.parametrize("native", [True, False], ids=["native", "python"])


def make(
    inputs: list[InputSpec], *, native: bool = True, patches: list[tuple[int, int, int]] | None = None, **options: Any
) -> Callable[..., Any]:
    """An entry over an empty program that says ("fallback", arrays) or ("error", status) when Python is asked."""
    return make_entry(
        options.pop("block", None) or RunBlock(),
        inputs,
        patches or [],
        lambda arrays: ("fallback", arrays),
        lambda status: ("error", status),
        options.pop("release_gil", False),
        result=RESULT,
        native=native,
        **options,
    )


def accepts(function: Callable[..., Any], *arrays: Any) -> bool:
    """Whether the entry took the arrays itself; the fallback must get exactly what was passed."""
    result = function(*arrays)
    if result is RESULT:
        return True
    assert result[0] == "fallback"
    assert len(result[1]) == len(arrays)
    assert all(a is b for a, b in zip(result[1], arrays, strict=True))
    return False


@VARIANTS
@pytest.mark.parametrize("release_gil", [False, True])
def test_data_pointers_are_patched(native: bool, release_gil: bool) -> None:
    """Each call reads from the arrays of that call, with byte offsets, and one input may go to several words."""
    copy = jit.compile_kernels([("copy", COPY, False)])["copy"]
    out = np.zeros(3, np.int64)
    words = [np.array([0, out[i:].ctypes.data], np.int64) for i in range(3)]
    block = RunBlock([(copy, w.ctypes.data, 1) for w in words])
    patches = [(0, words[0].ctypes.data, 0), (1, words[1].ctypes.data, 8), (0, words[2].ctypes.data, 16)]
    spec = InputSpec("i", 8, (4,))
    run = make([spec, spec], patches=patches, block=block, release_gil=release_gil, native=native)
    for step in range(3):
        a, b = np.arange(4) + 10 * step, np.arange(4) + 1000 + step
        assert run(a, b) is RESULT
        assert out.tolist() == [a[0], b[1], a[2]]


@VARIANTS
@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_count_is_checked(native: bool, count: int) -> None:
    """Exactly the recorded number of arrays is accepted."""
    run = make([InputSpec("f", 4, (2,))] * count, native=native)
    x = np.zeros(2, np.float32)
    assert [accepts(run, *[x] * n) for n in range(6)] == [n == count for n in range(6)]


DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8", "c16", "q", "l", "Q", "L", ">f4"]


@VARIANTS
@pytest.mark.parametrize("name", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1", "c8"])
def test_only_the_recorded_element_type_is_accepted(native: bool, name: str) -> None:
    """Every other type, and the other byte order, go to the fallback; l and q are the same where they have one size."""
    run = make([InputSpec(name[0], int(name[1:]), (2, 3))], native=native)
    for other in DTYPES:
        x = np.zeros((2, 3), other)
        assert accepts(run, x) == (x.dtype == np.dtype(name)), other


@VARIANTS
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 3), (0, 3), (3, 0), (2, 1, 3), (1,) * 16])
def test_only_the_recorded_shape_is_accepted(native: bool, shape: tuple[int, ...]) -> None:
    """Rank and every extent have to be equal, whatever the number of elements."""
    run = make([InputSpec("f", 4, shape)], native=native)
    for other in [(), (0,), (1,), (2,), (3,), (6,), (2, 3), (3, 2), (0, 3), (3, 0), (2, 1, 3), (1,) * 15, (1,) * 16]:
        assert accepts(run, np.zeros(other, np.float32)) == (other == shape), other


@VARIANTS
def test_only_dense_aligned_arrays_are_accepted(native: bool) -> None:
    """Strided, reversed, broadcast and misaligned arrays go to the fallback; strides of size-1 axes don't matter."""
    run = make([InputSpec("f", 4, (3, 3))], native=native)
    base = np.zeros((6, 6), np.float32)
    raw = np.zeros(37, np.uint8)
    misaligned = raw[(1 - raw.ctypes.data) % 4 :][:36].view(np.float32).reshape(3, 3)
    assert accepts(run, base.reshape(-1)[:9].reshape(3, 3))
    for x in (base[:3, :3].T, base[::2, ::2], base[:3, :3], base[2::-1, :3], np.broadcast_to(base[0, :3], (3, 3))):
        assert not accepts(run, x)
    assert not accepts(run, misaligned)
    one = make([InputSpec("f", 4, (1, 3))], native=native)
    assert accepts(one, base[3:4, :3])
    assert accepts(one, base[::-1][:1, :3])


@VARIANTS
def test_objects_with_a_buffer_are_accepted(native: bool) -> None:
    """memoryview, array.array, bytes, bytearray, ctypes and read-only arrays are read in place."""
    floats = make([InputSpec("f", 4, (3,))], native=native)
    x = np.arange(3, dtype=np.float32)
    fixed = x.copy()
    fixed.flags.writeable = False
    assert all(accepts(floats, y) for y in (memoryview(x), array.array("f", [1, 2, 3]), (ctypes.c_float * 3)(), fixed))
    raw = make([InputSpec("u", 1, (3,))], native=native)
    assert all(accepts(raw, y) for y in (b"abc", bytearray(b"abc"), memoryview(b"abc")))
    assert not any(accepts(raw, y) for y in (b"abcd", array.array("f", [1, 2, 3])))


class Sub(np.ndarray[Any, Any]):
    """A subclass of ndarray."""


@VARIANTS
def test_other_objects_go_to_the_fallback(native: bool) -> None:
    """Lists, numbers, None, text and records have no matching buffer; subclasses may be more than their memory."""
    run = make([InputSpec("f", 4, (3,))], native=native)
    for x in (
        [1.0, 2.0, 3.0],
        1.0,
        None,
        "abc",
        object(),
        np.zeros(3, "f4,f4"),
        np.zeros(3, "M8[s]"),
        np.array(["a"] * 3),
        np.zeros(3, np.float32).view(Sub),
        np.ma.masked_array(np.zeros(3, np.float32), [True, False, False]),
    ):
        assert not accepts(run, x)


@VARIANTS
def test_mapped_files_are_read_in_place(native: bool, tmp_path: Path) -> None:
    run = make([InputSpec("f", 4, (3,))], native=native)
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(5,))
    assert accepts(run, mapped[1:4])
    assert not accepts(run, mapped)


@VARIANTS
def test_types_without_a_buffer_format_are_accepted_as_arrays(native: bool) -> None:
    """bfloat16 arrays come in as they are when the spec names their dtype."""
    bf16 = np.dtype(ml_dtypes.bfloat16)
    run = make([InputSpec("u", 2, (3,), bf16)], native=native)
    assert accepts(run, np.zeros(3, bf16))
    assert not accepts(run, np.zeros(3, np.float16))
    assert not accepts(run, np.zeros(4, bf16))


def test_arrays_read_as_buffers_are_accepted_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where NumPy's array layout is not the known one, the buffer protocol gives the same answers."""
    assert entries.array_type() == id(np.ndarray)
    monkeypatch.setattr(entries, "array_type", lambda: 0)
    run = make([InputSpec("f", 4, (2, 3))])
    assert accepts(run, np.zeros((2, 3), np.float32))
    others = [np.zeros((2, 3), np.int32), np.zeros((3, 2), np.float32), np.zeros((3, 2), np.float32).T]
    others.append(np.zeros((2, 3), np.float32).view(Sub))
    assert not any(accepts(run, x) for x in others)


@VARIANTS
def test_arrays_in_the_guarded_range_go_to_the_fallback(native: bool) -> None:
    """An input that overlaps the arena by one byte is not read in place; its neighbours are."""
    memory = np.zeros(64, np.float32)
    low = memory.ctypes.data + 16 * 4
    run = make([InputSpec("f", 4, (8,))], guard=(low, low + 16 * 4), native=native)
    assert [start for start in range(57) if accepts(run, memory[start : start + 8])] == [*range(9), *range(32, 57)]


def test_shapes_patches_and_result_can_change() -> None:
    """After update the entry checks, patches and returns the new ones."""
    copy = jit.compile_kernels([("copy", COPY, False)])["copy"]
    out = np.zeros(2, np.int64)
    words = np.array([0, out.ctypes.data], np.int64)
    block = RunBlock([(copy, words.ctypes.data, 1)])
    run = make([InputSpec("i", 8, (4,))], patches=[(0, words.ctypes.data, 0)], block=block)
    owner = run.__self__  # type: ignore[attr-defined]
    assert run(np.arange(4) + 50) is RESULT
    assert out[0] == 50
    owner.update(shapes={0: (2, 3)}, patches=[(0, words.ctypes.data, 8)])
    owner.set_result(["new"])
    assert run(np.arange(6).reshape(2, 3) + 70) == ["new"]
    assert out[0] == 71
    assert run(np.arange(4))[0] == "fallback"
    with pytest.raises(ShapeError, match="17 axes"):
        owner.update(shapes={0: (1,) * 17})


@VARIANTS
@pytest.mark.parametrize("release_gil", [False, True])
def test_a_status_goes_to_on_error(native: bool, release_gil: bool) -> None:
    """A failed run returns what on_error makes of its status; a busy block goes to the fallback."""
    fail = jit.compile_kernels([("fail", FAIL, False)])["fail"]
    block = RunBlock([(fail, 0, 1)])
    run = make([], block=block, release_gil=release_gil, native=native)
    assert run() == ("error", runner_ir.INDEX_OUT_OF_RANGE | 2 << 8)
    block.acquire()
    assert run() == ("fallback", ())
    block.release()
    block.set_nchunks(0, 0)
    assert run() is RESULT


def test_exceptions_of_the_callables_come_through() -> None:
    """What fallback and on_error raise is what the caller sees, and the next call works."""

    def fallback(arrays: tuple[Any, ...]) -> None:
        raise LookupError(f"{len(arrays)} arrays")

    def on_error(status: int) -> None:
        raise ArithmeticError(f"status {status}")

    fail = jit.compile_kernels([("fail", FAIL, False)])["fail"]
    block = RunBlock([(fail, 0, 0)])
    run = make_entry(block, [InputSpec("f", 4, (1,))], [], fallback, on_error, False, result=RESULT)
    x = np.zeros(1, np.float32)
    with pytest.raises(LookupError, match="2 arrays"):
        run(x, x)
    with pytest.raises(LookupError, match="1 arrays"):
        run("no buffer")
    block.acquire()
    with pytest.raises(LookupError, match="1 arrays"):
        run(x)
    block.release()
    block.set_nchunks(0, 1)
    with pytest.raises(ArithmeticError, match="status 513"):
        run(x)
    block.set_nchunks(0, 0)
    assert run(x) is RESULT
    with pytest.raises(TypeError):
        run(x=x)


def test_the_fallback_can_rebind_and_run() -> None:
    """The intended use: a new shape is recorded by the fallback, and the next call with it is fast."""
    calls: list[tuple[int, ...]] = []

    def fallback(arrays: tuple[Any, ...]) -> Any:
        calls.append(arrays[0].shape)
        block.acquire()
        try:
            run.__self__.update(shapes={0: arrays[0].shape})  # type: ignore[attr-defined]
        finally:
            block.release()
        return run(*arrays)

    block = RunBlock()
    run = make_entry(block, [InputSpec("f", 4, (1,))], [], fallback, print, False, result=RESULT)
    for n in (1, 2, 2, 3, 3):
        assert run(np.zeros(n, np.float32)) is RESULT
    assert calls == [(2,), (3,)]


@VARIANTS
@pytest.mark.parametrize("release_gil", [False, True])
def test_buffers_are_released_on_every_way_out(native: bool, release_gil: bool) -> None:
    """After success, mismatch and error no export is left (a bytearray with one can't be resized)."""
    raw = bytearray(8)
    one, two = InputSpec("u", 1, (8,)), InputSpec("f", 4, (2,))
    fail = jit.compile_kernels([("fail", FAIL, False)])["fail"]
    block = RunBlock([(fail, 0, 0)])
    run = make([one, two], block=block, release_gil=release_gil, native=native)
    good = array.array("f", [1, 2])
    for chunks, other in itertools.product((0, 1), (good, b"wrong", "none", np.zeros(2, np.float32))):
        block.set_nchunks(0, chunks)
        run(raw, other)
        raw.append(0)
        del raw[-1]
    good.append(3)


@pytest.mark.parametrize("release_gil", [False, True])
@pytest.mark.parametrize("as_buffer", [False, True])
def test_the_fast_path_allocates_nothing(release_gil: bool, as_buffer: bool) -> None:
    """1,000 calls leave no more behind than one does; with plain arrays no byte is allocated for a moment either."""
    run = make([InputSpec("f", 4, (2, 3))] * 3, release_gil=release_gil)
    x: Any = np.zeros((2, 3), np.float32)
    if as_buffer:
        x = memoryview(x)

    def some() -> None:
        for _ in itertools.repeat(None, 1000):
            run(x, x, x)

    def references() -> tuple[int, int]:
        return sys.getrefcount(x), sys.getrefcount(RESULT)

    some()
    before = references()
    blocks, native = growth(some)
    assert blocks < 20  # those of the measurement
    assert native <= 0
    left, peak = traced_growth(some)
    assert left < 1000
    if not as_buffer:
        assert peak < 1000
    after = references()
    assert all(a <= b for a, b in zip(after, before, strict=True))  # fewer: what earlier tests left was collected


def test_ctrl_c_ends_a_run_of_the_entry() -> None:
    """KeyboardInterrupt comes out of the call, buffers are released and the block is free again."""
    count = np.array([0, 100_000], np.int64)
    burn = jit.compile_kernels([("burn", BURN, False)])["burn"]

    thread = interrupt_at(count)
    first = host_call(thread.start)
    block = RunBlock([(first.address, 0, 1), *[(burn, count.ctypes.data, 1)] * 100_000])
    raw = bytearray(8)
    run = make([InputSpec("u", 1, (8,))], block=block, release_gil=True)
    with pytest.raises(KeyboardInterrupt):
        run(raw)
    assert 0 < count[0] < 100_000 * 100_000
    raw.append(0)
    block.acquire()


def test_the_entry_owns_its_parts() -> None:
    """The function keeps block and callables alive, alone, and all go with it, also when they form a cycle."""

    class Owner:
        def __init__(self) -> None:
            self.block = RunBlock()
            self.run = make_entry(self.block, [], [], self.fallback, self.fallback, False, result=self)

        def fallback(self, _: Any) -> str:
            return "fallback"

    run = Owner().run
    gc.collect()
    assert run(1) == "fallback"
    assert isinstance(run(), Owner)
    gone = weakref.ref(run())
    block = weakref.ref(run().block)
    del run
    gc.collect()
    assert gone() is None
    assert block() is None


def test_entries_run_at_once_in_threads() -> None:
    """Threads with entries of their own don't disturb each other; on a shared one each call runs or is told busy."""
    copy = jit.compile_kernels([("copy", COPY, False)])["copy"]
    failures: list[Any] = []
    shared = make([InputSpec("i", 8, (1,))], release_gil=True)

    def loop(index: int) -> None:
        out = np.zeros(1, np.int64)
        words = np.array([0, out.ctypes.data], np.int64)
        block = RunBlock([(copy, words.ctypes.data, 1)] * 3, threads=2)
        run = make([InputSpec("i", 8, (1,))], patches=[(0, words.ctypes.data, 0)], block=block, release_gil=True)
        for step in range(2000):
            x = np.array([index * 10_000 + step])
            if run(x) is not RESULT or out[0] != x[0]:
                failures.append((index, step))
            if shared(x) not in (RESULT, ("fallback", (x,))):
                failures.append("shared")

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert not failures


class Chosen:
    """Two outputs of 3 f32 and 4 i64, in `memory`, of a block whose phases are host calls: one that makes each."""

    def __init__(self, asked: tuple[int, ...] = (0, 1), release_gil: bool = False) -> None:
        self.memory = np.zeros(64, np.uint8)
        self.outputs = (self.memory[:12].view(np.float32), self.memory[16:48].view(np.int64))
        self.during: Callable[[], object] = lambda: None
        self.calls = [host_call(lambda number=n: self.make(number)) for n in range(2)]
        self.block = RunBlock([(call.address, 0, 1) for call in self.calls])
        self.entry = make([InputSpec("f", 4, (2,))], block=self.block, release_gil=release_gil)
        table = self.block.table.copy()
        table[[n for n in range(2) if n not in asked], 2] = 0
        self.selected: Selected = selected(self.block.table, table, asked, self.outputs, [self.memory])
        self.run = selected_entry(self.entry.__self__)  # type: ignore[attr-defined]
        self.runs = 0

    def make(self, number: int) -> None:
        self.runs += 1
        self.outputs[number][:] = self.runs + np.arange(len(self.outputs[number]))
        self.during()

    def __call__(self, *out: Any) -> Any:
        return self.run(self.selected, np.zeros(2, np.float32), *out)


def targets() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.zeros(3, np.float32), np.zeros(4, np.int64)


@pytest.mark.parametrize("release_gil", [False, True])
def test_selected_phases_run_and_results_are_copied(release_gil: bool) -> None:
    """The table of the block is walked again afterwards; True says that every output has an array in `out`."""
    chosen = Chosen((1,), release_gil)
    other = targets()[1]
    assert len(chosen()) == 1
    assert chosen()[0] is chosen.outputs[1]
    assert chosen.runs == 2
    assert chosen(None, other) is chosen.selected.kept[2]  # type: ignore[index]
    assert other.tolist() == [3, 4, 5, 6]
    assert chosen.block.value == chosen.selected
    assert chosen(targets()[0], None) is None  # one that is not made
    assert chosen.runs == 3
    assert chosen.entry(np.zeros(2, np.float32)) is RESULT
    assert chosen.runs == 5
    assert chosen.block.value == 0
    every = Chosen((0, 1), release_gil)
    first, second = targets()
    assert every(first, second) is True
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [2, 3, 4, 5])
    assert every.block.value == 0
    assert every(None, second)[0] is every.outputs[0]
    block = RunBlock()
    entry, none = make([], block=block), selected(block.table, block.table, (), [], [])
    assert selected_entry(entry.__self__)(none) == ()  # type: ignore[attr-defined]


def test_every_array_of_out_is_checked_in_every_call(tmp_path: Path) -> None:
    """Type, element type, shape, strides, writability and place; nothing runs and nothing is written otherwise."""
    chosen = Chosen()
    first, second = targets()
    assert chosen(first, second) is True
    shared = np.zeros(80, np.uint8)
    fixed, pair = first.copy(), np.zeros(8, np.int64)
    fixed.flags.writeable = False
    inside = chosen.memory[48:60].view(np.float32)
    wrong: list[tuple[Any, Any]] = [
        (second, first), (first, first), (second, second), (first, pair[::2]), (first, pair[3::-1]), (fixed, second),
        (first, second.astype(">i8")), (first, second.view(np.uint64)), (first, second.reshape(2, 2)),
        (first, pair[:3]), (first, pair[:5]), (first.view(Sub), second), (first.tolist(), second), (inside, second),
        (memoryview(first), second), (np.ma.masked_array(first), second), (np.broadcast_to(first[:1], 3), second),
        (shared[:12].view(np.float32), shared[8:40].view(np.int64)),
        (shared[20:32].view(np.float32), shared[:32].view(np.int64)), (chosen.outputs[0], second),
    ]  # fmt: skip
    before, runs = [a.tobytes() for a in (first, second, pair, shared)], chosen.runs
    for out in wrong:
        assert chosen(*out) is None, out
    assert chosen.runs == runs
    assert [a.tobytes() for a in (first, second, pair, shared)] == before
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(8,))
    for good in (shared[:12].view(np.float32), mapped[4:7], np.zeros((2, 3), np.float32)[1]):
        assert chosen(good, shared[16:48].view(np.int64)) is True
        assert good.tolist() == chosen.outputs[0].tolist()
    for change in ("first.shape = 3, 1", "first.dtype = np.int32", "first.flags.writeable = False"):
        first, second = targets()
        assert chosen(first, second) is True
        exec(change, {"first": first, "np": np})
        assert chosen(first, second) is None, change


@pytest.mark.parametrize("release_gil", [False, True])
def test_an_array_of_out_that_changes_during_the_run_is_not_written(release_gil: bool) -> None:
    chosen = Chosen(release_gil=release_gil)
    first, second = targets()
    chosen.during = lambda: first.resize(1, refcheck=False)
    assert chosen(first, second) is None
    assert first.tolist() == [0]
    assert not second.any()


def test_selected_phases_are_of_one_table() -> None:
    """What was prepared for another table is not run; nor is a busy block, or one whose run fails."""
    chosen = Chosen((1,))
    old = chosen.block.table
    chosen.block.set_phases(old[:, :3].tolist())
    assert chosen() is None
    chosen.block.use(old)
    assert chosen()[0] is chosen.outputs[1]
    chosen.block.acquire()
    assert chosen() is None
    chosen.block.release()
    chosen.during = lambda: 1 / 0  # type: ignore[assignment]
    assert chosen() == ("error", runner_ir.HOST_CALL_RAISED)
    chosen.during = lambda: None
    assert chosen.runs == 2
    assert chosen.entry(np.zeros(2, np.float32)) is RESULT
    assert chosen.runs == 4


def test_selected_runs_allocate_nothing() -> None:
    """As those of `run_slots`, with arrays to write into and without."""
    block = RunBlock()
    entry = make([InputSpec("f", 4, (2, 3))] * 2, block=block)
    memory, x = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    chosen = selected(block.table, block.table.copy(), (0,), [memory], [memory])
    run, out = selected_entry(entry.__self__), np.ones((2, 3), np.float32)  # type: ignore[attr-defined]

    def some() -> None:
        for _ in itertools.repeat(None, 1000):
            run(chosen, x, x)
            run(chosen, x, x, out)

    some()
    assert not out.any()
    blocks, native = growth(some)
    assert blocks < 20
    assert native <= 0
    left, peak = traced_growth(some)
    assert left < 1000
    assert peak < 1000


def test_a_forked_child_walks_all_phases() -> None:
    """A fork in the midst of a run of some phases: the child's next run makes all outputs."""
    chosen = Chosen((1,))
    pipe = os.pipe()

    def fork() -> None:
        if not os.fork():
            chosen.during = lambda: None
            chosen.block.words[runner_ir.STATUS] = 0
            chosen.runs = 0
            chosen.entry(np.zeros(2, np.float32))
            os.write(pipe[1], bytes([chosen.runs]))
            os._exit(0)

    chosen.during = fork
    chosen()
    os.wait()
    assert os.read(pipe[0], 1) == bytes([2])
