"""Compiling, checking, loading and caching native code."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from fresh_process import in_fresh_process

import rlx
from rlx.backends.codegen import object_cache
from rlx.backends.codegen.arguments import Routine, forget_texts, routines, text_key, text_of
from rlx.backends.codegen.object_cache import ObjectCache
from rlx.backends.cpu.jit import compile as jit
from rlx.backends.cpu.jit import elf
from rlx.backends.cpu.jit import load as loader
from rlx.backends.cpu.jit.code import is_code, read_code
from rlx.disk import content_key
from rlx.errors import CompileError

HEAD = "(ptr %words, i64 %chunk, ptr %ctx, i64 %worker) {\n"


def store_kernel(name: str, value: int) -> str:
    """A kernel that writes a constant through its first operand word."""
    return f"define void @{name}{HEAD}  %p = load ptr, ptr %words\n  store i64 {value}, ptr %p\n  ret void\n}}\n"


def run(address: int) -> int:
    """What a store_kernel writes."""
    out = np.zeros(1, np.int64)
    words = np.array([out.ctypes.data], np.int64)
    ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_int64, ctypes.c_size_t, ctypes.c_int64)(address)(
        words.ctypes.data, 0, 0, 0
    )
    return int(out[0])


def test_host_describes_a_usable_target() -> None:
    """The vector width is one that kernels are written for, and there is at least one core."""
    target = jit.host()
    assert target.vector_bytes in (16, 32, 64)
    assert target.cores >= 1
    assert target.cpu
    assert target.triple


def test_llvmlite_is_not_imported_with_the_backend() -> None:
    """Importing the modules alone stays cheap: llvmlite comes with the first compilation."""
    code = "import sys, rlx.backends.cpu.native.entry; sys.exit('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("optimize", [False, True])
def test_a_compiled_object_runs(optimize: bool) -> None:
    """Text becomes code that does what it says, at both levels."""
    obj = jit.compile_object(store_kernel("k", 41), optimize=optimize)
    loader.check_object(obj)
    assert run(loader.load_object(obj).address("k")) == 41


def test_optimize_vectorises_loops() -> None:
    """O2 turns a scalar loop into vector code; without passes it stays scalar."""
    ir = (
        f"define void @k{HEAD}entry:\n  %p = load ptr, ptr %words\n  br label %l\nl:\n"
        "  %i = phi i64 [ 0, %entry ], [ %n, %l ]\n  %q = getelementptr float, ptr %p, i64 %i\n"
        "  %v = load float, ptr %q\n  %w = fmul float %v, 3.0\n  store float %w, ptr %q\n"
        "  %n = add nuw nsw i64 %i, 1\n  %c = icmp ult i64 %n, 4096\n"
        "  br i1 %c, label %l, label %x\nx:\n  ret void\n}\n"
    )
    machine = jit.target_machine()
    for optimize in (False, True):
        with jit.llvm().create_context() as context, jit.parse(ir, machine, context) as module:
            jit.emit(module, machine, optimize=optimize)
            assert ("x float>" in str(module)) == optimize


def test_multiply_and_add_are_not_contracted() -> None:
    """A separate multiply and add round twice, as in the reference; only llvm.fma fuses."""
    ir = (
        f"define void @k{HEAD}  %p = load ptr, ptr %words\n  %q = getelementptr float, ptr %p, i64 1\n"
        "  %a = load float, ptr %p\n  %m = fmul float %a, %a\n  %s = fsub float %m, 1.0\n"
        "  store float %s, ptr %q\n  ret void\n}\n"
    )
    library = loader.load_object(jit.compile_object(ir, optimize=True))
    data = np.array([1 + 2**-12, 0], np.float32)
    words = np.array([data.ctypes.data], np.int64)
    ctypes.CFUNCTYPE(None, ctypes.c_size_t)(library.address("k"))(words.ctypes.data)
    assert data[1] == data[0] * data[0] - np.float32(1)


def test_bad_ir_is_a_compile_error() -> None:
    """LLVM's complaint arrives as our error and keeps its text."""
    with pytest.raises(CompileError, match="expected top-level entity"):
        jit.compile_object("not IR", optimize=False)


@pytest.mark.parametrize("name", ["malloc", "expf", "__divti3", "nowhere"])
def test_foreign_symbols_are_rejected(name: str) -> None:
    """Code that needs an allocator, libm, a compiler runtime or an unknown symbol is refused before it is loaded."""
    ir = f"declare void @{name}()\ndefine void @k{HEAD}  call void @{name}()\n  ret void\n}}\n"
    with pytest.raises(CompileError, match=name):
        loader.check_object(jit.compile_object(ir, optimize=False))
    with pytest.raises(CompileError, match=name):
        jit.compile_kernels([("k", ir, False)], cache=ObjectCache("/nonexistent/rlx"))


def test_memory_intrinsics_may_call_libc() -> None:
    """memcpy, which LLVM emits by itself, is allowed, found and works."""
    ir = (
        "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)\n"
        f"define void @k{HEAD}  %d = load ptr, ptr %words\n  %s.p = getelementptr ptr, ptr %words, i64 1\n"
        "  %s = load ptr, ptr %s.p\n  %n.p = getelementptr i64, ptr %words, i64 2\n  %n = load i64, ptr %n.p\n"
        "  call void @llvm.memcpy.p0.p0.i64(ptr %d, ptr %s, i64 %n, i1 false)\n  ret void\n}\n"
    )
    obj = jit.compile_object(ir, optimize=False)
    assert elf.read(obj).undefined == {"memcpy"}
    loader.check_object(obj)
    library = loader.load_object(obj)
    source, target = np.arange(1000, dtype=np.int64), np.zeros(1000, np.int64)
    words = np.array([target.ctypes.data, source.ctypes.data, source.nbytes], np.int64)
    ctypes.CFUNCTYPE(None, ctypes.c_size_t)(library.address("k"))(words.ctypes.data)
    np.testing.assert_array_equal(target, source)


def test_constants_tables_and_globals_are_loaded() -> None:
    """Constant data, a jump table, a table of pointers and a writable global reach their code."""
    cases = "".join(f"    i64 {i}, label %c{i}\n" for i in range(12))
    blocks = "".join(f"c{i}:\n  br label %join\n" for i in range(12))
    incoming = ", ".join(f"[ {(7 * i * i) % 11}, %c{i} ]" for i in range(12))
    ir = (
        "@table = internal constant [4 x i64] [i64 10, i64 20, i64 30, i64 40]\n"
        "@pointers = internal constant [2 x ptr] [ptr @table, ptr getelementptr (i64, ptr @table, i64 2)]\n"
        "@count = internal global i64 5\n"
        f"define void @k{HEAD}entry:\n  %p = load ptr, ptr %words\n"
        f"  switch i64 %chunk, label %other [\n{cases}  ]\n{blocks}other:\n  br label %join\n"
        f"join:\n  %v = phi i64 {incoming}, [ 99, %other ]\n"
        "  %old = load i64, ptr @count\n  %new = add i64 %old, 1\n  store i64 %new, ptr @count\n"
        "  %which = and i64 %chunk, 1\n  %pp = getelementptr ptr, ptr @pointers, i64 %which\n  %q = load ptr, ptr %pp\n"
        "  %t = load i64, ptr %q\n  %a = add i64 %v, %t\n  %b = add i64 %a, %new\n"
        "  store i64 %b, ptr %p\n  ret void\n}\n"
    )
    library = loader.load_object(jit.compile_object(ir, optimize=False))
    call = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_int64)(library.address("k"))
    out = np.zeros(1, np.int64)
    words = np.array([out.ctypes.data], np.int64)
    for step, chunk in enumerate([0, 3, 11, 12]):
        call(words.ctypes.data, chunk)
        value = (7 * chunk * chunk) % 11 if chunk < 12 else 99
        assert out[0] == value + (10, 30)[chunk & 1] + 6 + step


def test_objects_that_define_one_symbol_twice_are_refused() -> None:
    """Which of two equal symbols would be called is never left to chance."""
    objs = [jit.compile_object(store_kernel("k", value), optimize=False) for value in (1, 2)]
    with pytest.raises(CompileError, match="'k'"):
        loader.load_object(*objs)


def test_a_damaged_object_is_a_compile_error() -> None:
    """Truncated bytes never reach the loader's copy loop."""
    obj = jit.compile_object(store_kernel("k", 1), optimize=False)
    with pytest.raises(CompileError, match="damaged"):
        loader.check_object(obj[:100])


def test_linked_code_is_the_same_after_a_file() -> None:
    """Kernels with constants, pointers and imports run from linked code; a cut or changed head is a compile error."""
    body = (
        f"{HEAD}  %p = load ptr, ptr %words\n  %at = getelementptr ptr, ptr @a, i64 %chunk\n  %q = load ptr, ptr %at\n"
    )
    body += "  %v = load i64, ptr %q\n  store i64 %v, ptr %p\n  ret void\n}\n"
    tables = "@t = internal constant i64 {0}\n@a = internal constant [2 x ptr] [ptr @t, ptr null]\n"
    texts = [f"{tables.format(50 + i)}define void @k{i}{body}" for i in range(3)]
    objs = [jit.compile_object(text, optimize=False) for text in texts]
    code = jit.linked(objs)
    if not is_code(code):
        pytest.skip("LLVM loads the objects here")
    assert read_code(code).absolute, "the pointers to constants"
    loaded = loader.load_object(code)
    assert [run(loaded.address(f"k{i}")) for i in range(3)] == [50, 51, 52]
    for damaged in (code[:9], code[:40], code.replace(b'"k1": ', b'"k1": 9999999'), code.replace(b"[", b"{", 1)):
        with pytest.raises(CompileError, match="damaged"):
            loader.load_object(damaged)


def test_kernels_come_back_by_name(tmp_path: Path) -> None:
    """Each name gets its own code, also with helpers and globals of equal names, across bundles and levels."""
    helper = "@c = constant i64 {0}\ndefine i64 @h() noinline {{\n  %v = load i64, ptr @c\n  ret i64 %v\n}}\n"
    body = f"{HEAD}  %p = load ptr, ptr %words\n  %v = call i64 @h()\n  store i64 %v, ptr %p\n  ret void\n}}\n"
    items = [(f"k{i}", helper.format(i) + f"define void @k{i}{body}", i % 3 == 0) for i in range(40)]
    found = jit.compile_kernels(items, cache=ObjectCache(tmp_path))
    assert {name: run(address) for name, address in found.items()} == {f"k{i}": i for i in range(40)}


def test_equal_kernels_are_compiled_once(tmp_path: Path) -> None:
    """The same item again gives the same address and compiles nothing."""
    cache = ObjectCache(tmp_path)
    first = jit.compile_kernels([("once", store_kernel("once", 77001), False)], cache=cache)
    files = sorted(tmp_path.iterdir())
    again = jit.compile_kernels([("once", store_kernel("once", 77001), False)] * 2, cache=cache)
    assert again == first
    assert sorted(tmp_path.iterdir()) == files


def test_kernel_names_must_agree() -> None:
    """Two codes under one name, or a module without the named function, are errors that name it."""
    with pytest.raises(CompileError, match="'same'"):
        jit.compile_kernels([("same", store_kernel("same", 1), False), ("same", store_kernel("same", 2), False)])
    with pytest.raises(CompileError, match="'absent'"):
        jit.compile_kernels([("absent", store_kernel("other", 1), False)])


def test_kernels_are_found_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process (here: emptied tables) compiles nothing, also when it wants only part of a bundle."""
    items = [(f"d{i}", store_kernel(f"d{i}", 500 + i), False) for i in range(5)]
    jit.compile_kernels(items, cache=ObjectCache(tmp_path))
    monkeypatch.setattr(jit, "loaded", {})
    monkeypatch.setattr(jit, "emit", None)
    found = jit.compile_kernels(items[1:3], cache=ObjectCache(tmp_path))
    assert [run(found[name]) for name in ("d1", "d2")] == [501, 502]


def test_a_lost_bundle_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eviction may take the object and leave the references to it."""
    items = [("lost", store_kernel("lost", 600), False)]
    jit.compile_kernels(items, cache=ObjectCache(tmp_path))
    max(tmp_path.iterdir(), key=lambda path: path.stat().st_size).unlink()
    monkeypatch.setattr(jit, "loaded", {})
    assert run(jit.compile_kernels(items, cache=ObjectCache(tmp_path))["lost"]) == 600


def test_kernels_are_unloaded_with_the_last_that_holds_them(tmp_path: Path) -> None:
    """Code stays as long as one compile has it, and a later compile of the same loads it anew."""

    def compiled() -> loader.Kernels:
        with jit.Compiling(ObjectCache(tmp_path)) as work:
            work.add("held", store_kernel("held", 650), False)
            return work.finish()

    first, second = compiled(), compiled()
    assert first == second
    code = weakref.ref(*first.code)
    del first
    gc.collect()
    assert code() is not None
    assert run(second["held"]) == 650
    del second
    gc.collect()
    assert code() is None
    again = compiled()
    assert run(again["held"]) == 650


def test_cache_returns_what_was_put(tmp_path: Path) -> None:
    """Bytes come back equal, unknown keys are misses, empty values are values."""
    cache = ObjectCache(tmp_path / "new" / "folder")
    assert cache.get("a") is None
    assert cache.put("a", b"data")
    assert cache.put("b", b"")
    assert ObjectCache(cache.folder).get("a") == b"data"
    assert cache.get("b") == b""


@pytest.mark.parametrize("damage", [b"", b"junk", b"flip", b"cut"])
def test_damaged_files_are_misses(tmp_path: Path, damage: bytes) -> None:
    """Any damage is found by the checksum; the file is dropped and can be written anew."""
    cache = ObjectCache(tmp_path)
    cache.put("k", b"some object code")
    path = cache.path("k")
    blob = path.read_bytes()
    path.write_bytes({b"flip": blob[:-1] + bytes([blob[-1] ^ 1]), b"cut": blob[:-3]}.get(damage, damage))
    assert cache.get("k") is None
    assert not path.exists()
    assert cache.put("k", b"x")
    assert cache.get("k") == b"x"


def test_files_of_another_format_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ObjectCache(tmp_path)
    with monkeypatch.context() as older:
        older.setattr(object_cache, "MAGIC", b"rlxobj%02d" % (object_cache.CACHE_FORMAT - 1))
        cache.put("k", b"of an older version")
    assert cache.get("k") is None
    assert cache.put("k", b"x")
    assert cache.get("k") == b"x"


def test_least_recently_used_files_go_first(tmp_path: Path) -> None:
    """The bound on the folder holds and a hit protects an entry."""
    cache = ObjectCache(tmp_path, max_bytes=5000)
    for index in range(4):
        cache.put(f"k{index}", bytes(1000))
        os.utime(cache.path(f"k{index}"), (index + 1, index + 1))
    assert cache.get("k0") is not None
    cache.put("k4", bytes(1000))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 5000
    assert cache.get("k0") is not None
    assert cache.get("k1") is None
    assert not cache.put("big", bytes(6000))


def test_an_unwritable_folder_means_no_cache(tmp_path: Path) -> None:
    """Where a file stands in the way of the folder, nothing is stored and kernels still compile."""
    (tmp_path / "file").write_bytes(b"")
    cache = ObjectCache(tmp_path / "file" / "below")
    assert not cache.put("k", b"x")
    assert cache.get("k") is None
    items = [("nocache", store_kernel("nocache", 700), False)]
    assert run(jit.compile_kernels(items, cache=cache)["nocache"]) == 700


def test_concurrent_processes_share_a_folder(tmp_path: Path) -> None:
    """Writers, readers and evictions of several processes never give a wrong value and leave no temporary files."""
    code = (
        "import sys; from rlx.backends.codegen.object_cache import ObjectCache\n"
        f"cache = ObjectCache({str(tmp_path)!r}, max_bytes=20000)\n"
        "for i in range(300):\n"
        "    key = str(i % 30)\n"
        "    found = cache.get(key)\n"
        "    assert found in (None, key.encode() * 500), key\n"
        "    cache.put(key, key.encode() * 500)\n"
    )
    jobs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [job.wait(timeout=60) for job in jobs] == [0, 0, 0]
    assert not list(tmp_path.glob("*.tmp"))


def test_keys_separate_their_parts() -> None:
    """Moving text from one part to the next changes the key."""
    assert content_key("ab", "c") != content_key("a", "bc")
    parts = ["ü" * (1 << 19), "", "x"]  # so many that OpenSSL digests them
    expected = hashlib.sha256(b"".join(b"%d:%s" % (len(data), data) for data in (p.encode() for p in parts)))
    assert content_key(*parts) == expected.hexdigest()


def test_many_bytes_are_digested_by_openssl() -> None:
    """Which is several times as fast; few are not worth loading it."""
    code = (
        "import sys; from rlx.lazy_imports import LARGE, sha256; few = sha256(b'x' * 100).hexdigest();"
        "assert 'hashlib' not in sys.modules; {};"
        "assert 'hashlib' in sys.modules; assert sha256(b'x' * 100).hexdigest() == few"
    )
    for call in ("sha256(b'x' * LARGE)", "sha256(size=LARGE)"):
        subprocess.run([sys.executable, "-c", code.format(call)], check=True, timeout=60)


def compile_and_count() -> list[int]:
    """Of a model that has been compiled: characters of code's text that are still there, and of the longest routine."""
    from rlx.backends.codegen import arguments

    g = rlx.Graph("product and map")
    x = g.input("x", (64, 32))
    g.output(rlx.tanh(x @ g.param("w", (32, 48), data=np.ones((32, 48), np.float32))), "y")
    model = rlx.compile(g, device="cpu", cache=False)
    (first,) = model.run([np.ones((64, 32), np.float32)])
    gc.collect()
    codes = [o for o in gc.get_objects() if isinstance(o, arguments.KernelCode)]
    held = [text for text in arguments._texts.values() if text.text is not None]
    made = [len(text()) for text in arguments._texts.values()]
    arguments.forget_texts()
    jit.loaded.clear()
    (again,) = rlx.compile(g, device="cpu", cache=False).run([np.ones((64, 32), np.float32)])
    assert first.tobytes() == again.tobytes()
    assert model.needs is not None
    return [sum(len(code.ir) for code in codes), len(held), max(made)]


def test_text_of_code_does_not_stay() -> None:
    """Neither that of kernels nor that of routines, which is made again where it is asked for."""
    of_kernels, held, longest = in_fresh_process(compile_and_count)
    assert of_kernels == 0
    assert held == 0
    assert longest > 100_000


def test_a_routine_is_told_by_its_text() -> None:
    made: list[int] = []

    @routines
    def one(n: int) -> Routine:
        made.append(n)
        return Routine("rlx_one", f"; {n}\ndefine void @rlx_one() {{ ret void }}")

    first = one(1)
    assert first == one(1)
    assert first != one(2)
    assert made == [1, 2]
    assert first.ir == text_key("rlx_one", text_of(first), False)
    forget_texts()
    assert text_of(first).startswith("; 1\n")
    assert made == [1, 2, 1]
    with jit.Compiling() as work:
        work.add_routine(first)
        work.add_routine(first)
        with pytest.raises(CompileError, match="two different kernels"):
            work.add_routine(one(2))
