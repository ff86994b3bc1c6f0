"""What loading leaves in memory: pages of weight files and of the compiler's library are given back."""

from __future__ import annotations

import mmap
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fresh_process import in_fresh_process

import rlx
from rlx.backends.cpu.jit import resident, single_pages
from rlx.backends.cpu.runtime import binding, prepare
from rlx.backends.cpu.runtime.binding import aligned_bytes
from rlx.estimate.resident import peak_bytes, resident_bytes
from rlx.ir import mapped
from rlx.ir.mapped import copied, give_back, lies_in_file, map_file

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/smaps")

Array = np.ndarray[Any, Any]
SIZE, LAYERS = 2048, 8  # matrices of 16 MiB
MIB = 1 << 20


def resident_of(name: str) -> int:
    """Bytes of the mapped files whose paths hold this name that are resident."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        parts = line.split()
        if "-" in parts[0] and not parts[0].endswith(":"):
            inside = len(parts) > 5 and name in parts[5]
        elif inside and parts[0] == "Rss:":
            total += 1024 * int(parts[1])
    return total


def mapped_bytes(path: str, *, writable: bool = False) -> Array:
    with open(path, "rb") as file:
        return map_file(file.fileno(), path, writable=writable)


def weights_in(path: str, offset: int) -> list[Array]:
    """Matrices of a file, which kernels can read there if the offset is a multiple of 4."""
    whole = mapped_bytes(path)[offset : offset + LAYERS * SIZE * SIZE * 4].view(np.float32)
    return list(whole.reshape(LAYERS, SIZE, SIZE))


def chain(weights: list[Array], table: Array | None = None) -> rlx.Graph:
    """A product with each of the matrices, after a row of the table."""
    g = rlx.Graph("chain")
    if table is None:
        x: Any = g.input("x", (1, SIZE))
    else:
        x = rlx.gather(g.param("table", table.shape, data=table), g.input("x", (1,), "i64"))
    for number, w in enumerate(weights):
        x = rlx.tanh(x @ g.param(f"w{number}", w.shape, data=w))
    g.output(x, "y")
    return g


def load_and_measure(path: str, offset: int) -> dict[str, Any]:
    """A run of the chain over a file, and what it left in memory."""
    rlx.compile(_small(), device="cpu").run([np.ones((1, 4), np.float32)])
    weights = weights_in(path, offset)
    before = resident_bytes()
    model = rlx.compile(chain(weights), device="cpu", threads=1, cache=False)
    (y,) = model.run([np.ones((1, SIZE), np.float32)])
    return {
        "bits": y.tobytes().hex(),
        "file": resident_of(path),
        "grown": resident_bytes() - before,
        "peak": peak_bytes() - before,
        "library": resident_of("libllvmlite"),
    }


def _small() -> rlx.Graph:
    g = rlx.Graph("small")
    g.output(rlx.relu(g.input("x", (1, 4))), "y")
    return g


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("weights") / "chain.bin"
    weights = np.random.default_rng(0).standard_normal((LAYERS, SIZE, SIZE), dtype=np.float32) / np.float32(45)
    for offset in (0, 1):
        made.with_suffix(f".{offset}").write_bytes(bytes(offset) + weights.tobytes())
    return str(made.with_suffix(""))


@pytest.mark.parametrize("offset", [0, 1])
def test_packed_weights_leave_no_pages_of_their_file(path: str, offset: int) -> None:
    """Neither at the end nor meanwhile is the file in memory beside what was packed of it, as it lies or as a copy."""
    found = in_fresh_process(load_and_measure, f"{path}.{offset}", offset)
    total = LAYERS * SIZE * SIZE * 4
    assert found["file"] < 2 * MIB
    assert found["grown"] < total + 24 * MIB
    assert found["peak"] < total + 112 * MIB  # two parts of 32 MiB, and what the compiler takes
    assert found["library"] < 12 * MIB
    (y,) = rlx.compile(chain([np.array(w) for w in weights_in(f"{path}.{offset}", offset)]), device="cpu").run(
        [np.ones((1, SIZE), np.float32)]
    )
    assert bytes.fromhex(found["bits"]) == y.tobytes()


def compile_one(single: bool) -> tuple[bool, int]:
    """Whether pages come one by one, and the bytes of LLVM's library that compiling a kernel brings into memory."""
    from rlx.backends.cpu.jit import compile as jit

    made: Any = jit
    if not single:
        made.bring_single_pages = lambda path: False
    adds = "define void @f(ptr %p) { %x = load float, ptr %p %y = fadd float %x, %x store float %y, ptr %p ret void }"
    jit.llvm()
    made.give_back_now_and_then = lambda path: None
    jit.compile_object(adds, optimize=True)
    return resident.bring_single_pages(jit.library_path()), resident_of("libllvmlite")


def test_the_compiler_brings_only_pages_that_it_reads() -> None:
    able, single = in_fresh_process(compile_one, True)
    if not able:
        pytest.skip("the system has no userfaultfd that lets writes go on: Linux before 6.7, or it is filtered")
    _, usual = in_fresh_process(compile_one, False)
    assert 4 * MIB < single < usual * 0.6


def test_without_a_watch_pages_come_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems that have no such call, or refuse it, or do not know what is asked of it; and no descriptor is left."""
    library = "libc.so.6"
    path = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if library in line)
    bring = resident.bring_single_pages.__wrapped__
    monkeypatch.setattr(single_pages, "_watches", {})
    before = sorted(os.listdir("/proc/self/fd"))
    assert not bring(None)
    assert not bring("/no/such/library.so")
    for name, value in (("WATCH", {}), ("WATCH", {platform.machine(): 100_000}), ("WRITES_GO_ON", 1 << 60)):
        with monkeypatch.context() as change:
            change.setattr(single_pages, name, value)
            change.setattr(single_pages, "_watches", {})
            assert not bring(path)
    assert sorted(os.listdir("/proc/self/fd")) == before


ROWS = 64  # of a table, each in a page of its own and far from the others


def rows_of_a_table(path: str, offset: int, saved: str) -> tuple[bool, list[int], bool]:
    """Whether pages can come one by one; what rows, and a small param beside, left in memory of their file: of a table
    that is compiled, of what was saved of it, and of a clone; and whether all of these gave the right rows.
    """
    whole = mapped_bytes(path)[offset:]
    table, scale = whole[: SIZE * SIZE * 4].view(np.float32).reshape(-1, 64), whole[-256:].view(np.float32)
    g = rlx.Graph("rows")
    rows = rlx.gather(g.param("table", table.shape, data=table), g.input("i", (ROWS,), "i64"))
    g.output(rows * g.param("scale", (64,), data=scale), "y")
    places = np.arange(ROWS) * (len(table) // ROWS)
    expected = np.fromfile(path, np.float32, offset=offset)
    expected = expected[: SIZE * SIZE].reshape(-1, 64)[places] * expected[-64:]
    compiled = rlx.compile(g, device="cpu")
    compiled.save(saved)
    left, right = [], True
    for name, model in ((path, compiled), (saved, rlx.load(saved)), (path, compiled.clone())):
        for param in model._executable.shared.params.values():  # loading has read what was saved
            param_file: Any = mapped.mapping_of(param)
            param_file.madvise(mmap.MADV_DONTNEED)
        right = right and np.array_equal(model.run([places])[0], expected)
        left.append(resident_of(name))
    return single_pages.bring_single_pages([(table.ctypes.data, 1)]), left, right


def test_a_table_takes_the_pages_of_rows_that_runs_read(path: str, tmp_path: Path) -> None:
    able, left, right = in_fresh_process(rows_of_a_table, f"{path}.0", 0, str(tmp_path / "rows.rlxart"))
    assert right
    if not able:
        pytest.skip("the system has no userfaultfd that lets writes go on: Linux before 6.7, or it is filtered")
    assert max(left) <= (2 * ROWS + 64) * mmap.PAGESIZE  # with tables and code of what was saved


def child_that_looks_up(path: str) -> int:
    """What a forked process brings of a table that its parent has: its watch is one of its own."""
    table = mapped_bytes(path)[: SIZE * SIZE * 4].view(np.float32).reshape(-1, 64)
    single_pages.bring_single_pages([(int(table.ctypes.data), table.nbytes)])
    read, write = os.pipe()
    if os.fork() == 0:
        single_pages.bring_single_pages([(int(table.ctypes.data), table.nbytes)])
        assert table[::1024].sum() != 0
        os.write(write, resident_of(path).to_bytes(8, "little"))
        os._exit(0)
    os.wait()
    return int.from_bytes(os.read(read, 8), "little")


def test_a_forked_process_has_a_watch_of_its_own(path: str) -> None:
    able, _ = in_fresh_process(compile_one, True)
    if not able:
        pytest.skip("the system has no userfaultfd that lets writes go on: Linux before 6.7, or it is filtered")
    assert in_fresh_process(child_that_looks_up, f"{path}.0") <= 80 * mmap.PAGESIZE


def test_a_weight_that_runs_read_is_copied_where_kernels_cannot_read_it(path: str) -> None:
    """A table of rows, at an odd place of a file: runs read a copy, and setting a param again packs from the file."""
    weights = weights_in(f"{path}.1", 1)
    assert lies_in_file(weights[0])
    assert not weights[0].flags.aligned
    graph, plain = chain(weights[1:3], weights[0]), chain([np.array(w) for w in weights[1:3]], np.array(weights[0]))
    model, other = rlx.compile(graph, device="cpu"), rlx.compile(plain, device="cpu")
    row = np.array([5])
    assert np.array_equal(model.run([row])[0], other.run([row])[0])
    for each in (model, other):
        each.set_params({"w1": np.array(weights[4])})
    assert np.array_equal(model.run([row])[0], other.run([row])[0])
    model.set_params({"w0": weights[5], "table": weights[6]})
    other.set_params({"w0": np.array(weights[5]), "table": np.array(weights[6])})
    assert np.array_equal(model.run([row])[0], other.run([row])[0])


def test_copies_for_packing_have_one_memory(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that kernels can't read in their file are copied, part after part, to where the part before was."""
    model = rlx.compile(chain(weights_in(f"{path}.1", 1)), device="cpu")
    taken: list[int] = []
    monkeypatch.setattr(prepare, "aligned_bytes", lambda size: taken.append(size) or aligned_bytes(size))
    model._executable.pack()
    (large,) = [size for size in taken if size >= MIB]
    assert large == 16 * MIB  # what the estimate says, below


def test_an_arena_in_usual_pages_where_the_system_has_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux without large pages refuses the advice."""

    class Refusing(mmap.mmap):
        def madvise(self, *given: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(binding.mmap, "mmap", Refusing)
    memory = aligned_bytes(3 << 20, 256, sparse=True)
    assert memory.nbytes == 3 << 20
    assert memory.ctypes.data % 256 == 0
    memory[-1] = 7
    assert memory.sum() == 7


def test_what_is_given_back_is_read_again(path: str) -> None:
    whole = mapped_bytes(f"{path}.1")
    part = whole[4097 : 4097 + 3 * MIB]
    expected = part.tobytes()
    before = resident_of(path)
    give_back([part, np.ones(5), whole[:0]])
    assert resident_of(path) <= before - 2 * MIB
    assert part.tobytes() == expected
    give_back([part], whole=True)
    assert resident_of(path) == 0
    assert part.tobytes() == expected


def test_what_was_written_is_not_given_back(path: str) -> None:
    whole = mapped_bytes(f"{path}.0", writable=True)
    whole[:100] = 7
    give_back([whole[:100]])
    give_back([whole], whole=True)
    assert (whole[:100] == 7).all()


def test_copies_are_aligned_and_equal(path: str) -> None:
    for array in (weights_in(f"{path}.1", 1)[0], weights_in(f"{path}.1", 1)[0][0], weights_in(f"{path}.1", 1)[0].T):
        assert copied(array).flags.aligned
        assert copied(array).tobytes() == array.tobytes()


def test_a_copy_is_not_in_memory_beside_all_of_what_it_is_made_of(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights_in(f"{path}.1", 1)[0]
    held: list[int] = []

    def noted(arrays: list[Array]) -> None:
        held.append(resident_of(path))
        give_back(arrays)

    give_back([weight], whole=True)
    monkeypatch.setattr(mapped, "give_back", noted)
    made = copied(weight)
    assert len(held) == 2
    assert 8 * MIB <= max(held) < 12 * MIB  # the system brings some pages ahead
    assert resident_of(path) < MIB
    assert made.tobytes() == weight.tobytes()


def test_the_estimate_says_what_is_copied_at_a_time(path: str) -> None:
    """Of weights that kernels can't read in their file those of a part: here one, 32 MiB with its packed form."""
    odd = rlx.estimate(chain(weights_in(f"{path}.1", 1)), "cpu", overhead=0)
    even = rlx.estimate(chain(weights_in(f"{path}.0", 0)), "cpu", overhead=0)
    plain = rlx.estimate(chain([np.array(w) for w in weights_in(f"{path}.0", 0)]), "cpu", overhead=0)
    assert odd.loading_copy_bytes - even.loading_copy_bytes == 16 * MIB
    assert plain.loading_copy_bytes - even.loading_copy_bytes == LAYERS * SIZE * SIZE * 4
