"""The processor: what depends on it, whether a process has the tile registers of AMX, and what these compute."""

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest

from rlx.backends import backend_named
from rlx.backends.cpu.jit import compile as jit
from rlx.backends.cpu.jit import cpuid
from rlx.backends.cpu.jit import load as loader
from rlx.backends.cpu.llvm import amx
from rlx.backends.cpu.llvm.builder import Function, Module

FLAGS = "fpu amx_tile amx_bf16 amx_int8"


@pytest.fixture
def linux(monkeypatch):
    """Linux on a processor with these flags; answers are forgotten before and after."""

    def pretend(flags, request, platform="linux", machine="x86_64"):
        monkeypatch.setattr(cpuid, "described", lambda: {"flags": flags})
        monkeypatch.setattr(cpuid, "request", request)
        monkeypatch.setattr(cpuid.sys, "platform", platform)
        monkeypatch.setattr(cpuid.platform, "machine", lambda: machine)
        cpuid.has_tiles.cache_clear()

    yield pretend
    monkeypatch.undo()
    cpuid.has_tiles.cache_clear()


@pytest.mark.parametrize("flags", ["", "fpu avx512f", "amx_tile amx_int8", "xamx_tile amx_bf16 amx_int8"])
def test_a_processor_without_tiles_is_not_asked_for(linux, flags):
    linux(flags, lambda: pytest.fail("asked"))
    assert not cpuid.has_tiles()


def test_leave_is_asked_for_once(linux):
    asked = []
    linux(FLAGS, lambda: asked.append(1) or 0)
    assert cpuid.has_tiles()
    assert cpuid.has_tiles()
    assert len(asked) == 1


@pytest.mark.parametrize("answer", [-1, OSError("seccomp"), AttributeError("syscall")])
def test_without_leave_there_are_no_tiles(linux, answer):
    def request():
        if isinstance(answer, Exception):
            raise answer
        return answer

    linux(FLAGS, request)
    assert not cpuid.has_tiles()


@pytest.mark.parametrize("platform, machine", [("darwin", "x86_64"), ("win32", "AMD64"), ("linux", "aarch64")])
def test_other_systems_are_not_asked(linux, platform, machine):
    linux(FLAGS, lambda: pytest.fail("asked"), platform, machine)
    assert not cpuid.has_tiles()


def test_identities_tell_whether_there_are_tiles():
    """What is compiled with tiles is found neither by a process without nor the other way round."""
    code = (
        "import sys\nfrom rlx.backends.cpu.jit import cpuid\n"
        "if sys.argv[1] == 'refused': cpuid.request = lambda: -1\n"
        "print(cpuid.identity())\nassert 'llvmlite' not in sys.modules or sys.platform != 'linux'\n"
        "from rlx.backends.cpu.jit import compile as jit\nassert jit.host().tiles <= cpuid.has_tiles()\n"
        "assert cpuid.identity() in jit.compiler_identity()\n"
    )

    def identity(how):
        return subprocess.run([sys.executable, "-c", code, how], check=True, capture_output=True, text=True).stdout

    assert (identity("asked") != identity("refused")) == cpuid.has_tiles()


ZEN = "linux x86_64 AuthenticAMD 25 33 fpu sse4a avx avx2 fma without tiles"
XEON = "linux x86_64 GenuineIntel 6 143 fpu avx avx2 fma avx512f amx_tile amx_bf16 amx_int8 with tiles"


@pytest.mark.parametrize(
    "here, other, said",
    [
        (XEON, XEON.replace("with", "without"), "a process without leave to use tile registers (AMX)"),
        (
            XEON.replace("with", "without"),
            XEON,
            "a process with leave to use tile registers (AMX), which Linux has not",
        ),
        (XEON, ZEN, "another processor with AuthenticAMD 25 33 sse4a, without avx512f amx_tile amx_bf16 amx_int8"),
        (ZEN, XEON, "another processor with avx512f amx_tile amx_bf16 amx_int8, without AuthenticAMD 25 33 sse4a"),
        (ZEN, ZEN.replace("33", "97"), "another processor with 97, without 33"),
        (ZEN, ZEN.replace("fpu", " ".join(f"avx_{i}" for i in range(11))), "avx_6 avx_7 and 3 more, without fpu"),
        ("darwin apple-m3 +neon arm64", XEON, "another processor with avx avx2 fma avx512f"),
        (XEON, "None", "another processor with None, without avx"),
        (ZEN, "", "another processor without avx avx2 fma"),
    ],
)
def test_what_another_processor_is(monkeypatch, here, other, said):
    monkeypatch.setattr(cpuid, "identity", lambda: here)
    assert said in cpuid.unlike(other)


def test_the_processor_is_named_as_its_vendor_does(monkeypatch):
    monkeypatch.setattr(cpuid, "described", lambda: {"model name": "AMD  EPYC 7763   64-Core Processor "})
    assert backend_named("cpu").available().reason.startswith("AMD EPYC 7763 64-Core Processor, ")
    assert ("AMX" in backend_named("cpu").available().reason) == jit.host().tiles
    monkeypatch.setattr(cpuid, "described", dict)
    assert backend_named("cpu").available().reason.startswith(f"{jit.host().cpu}, ")


def test_a_configuration():
    """16 bytes of header, then 16 bits of bytes a row and, from byte 48 on, 8 bits of rows for each tile."""
    data = amx.configuration()
    assert (len(data), data[0], data[48:56]) == (64, 1, [16] * 8)
    assert np.array(data[16:32], np.uint8).view(np.uint16).tolist() == [64] * 8
    assert (amx.bytes_place(7), amx.rows_place(7)) == (30, 55)


def run(f, *args):
    f.ret()
    library = loader.load_object(jit.compile_object(Module([f]).text(), optimize=False))
    ctypes.CFUNCTYPE(None, *[ctypes.c_size_t] * len(args))(library.address(f.name))(*args)


def multiply(name, a, b, total):
    """total += a @ b in one tile each, of 16 rows of 64 bytes, zeroed first where `total` is None."""
    out = np.full((16, 16), 7, np.float32 if name == "tdpbf16ps" else np.int32) if total is None else total
    f = Function("product", [("ptr", i) for i in ("a", "b", "c")])
    amx.configure(f)
    if total is None:
        amx.zero(f, 0)
    else:
        amx.load(f, 0, "%c", 64)
    amx.load(f, 6, "%a", 64)
    amx.load(f, 7, "%b", 64)
    amx.dot(f, name, 0, 6, 7)
    amx.store(f, 0, "%c", 64)
    amx.release(f)
    run(f, *(x.ctypes.data for x in (a, b, out)))
    return out


@pytest.mark.needs("amx")
def test_products_of_bytes():
    rng = np.random.default_rng(0)
    kinds = {"s": np.int8, "u": np.uint8}
    for name in ("tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud"):
        a, b = (rng.integers(0, 256, (16, 64), np.uint8).view(kinds[letter]) for letter in name[4:6])
        exact = a.astype(int) @ b.reshape(16, 16, 4).swapaxes(1, 2).reshape(64, 16).astype(int)
        np.testing.assert_array_equal(multiply(name, a, b, None), exact)
        total = rng.integers(-1000, 1000, (16, 16), np.int32)
        np.testing.assert_array_equal(multiply(name, a, b, total.copy()), exact + total)


@pytest.mark.needs("amx")
def test_products_of_bf16():
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, (16, 32)).astype(np.float32) for _ in range(2))
    exact = a @ b.reshape(16, 16, 2).swapaxes(1, 2).reshape(32, 16)
    halves = [np.ascontiguousarray((x.view(np.uint32) >> 16).astype(np.uint16)) for x in (a, b)]
    np.testing.assert_array_equal(multiply("tdpbf16ps", *halves, None), exact)


@pytest.mark.needs("amx")  # which Linux grants: it has forks
def test_a_fork_has_tiles():
    pid = os.fork()
    if not pid:
        one = np.full((16, 64), 1, np.uint8)
        os._exit(not (multiply("tdpbuud", one, one, None) == 64).all())
    assert os.waitpid(pid, 0)[1] == 0
