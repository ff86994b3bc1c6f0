"""`rlx.Array`: what devices with memory of their own give, and take back; on a test double and the libraries here."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from own_memory import OwnMemory

import rlx
from rlx.backends import BACKENDS, backend_named
from rlx.backends.array import Array
from rlx.backends.dlpack import read_dlpack
from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES, dtype_of

X = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
LIBRARIES = ("xla", "mlx")
HOST_MEMORY = 1  # DLPack's number of the device type


@pytest.fixture(params=("own", "interp", *LIBRARIES))
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of each device whose memory is not the host's; skips, saying why, where one is absent."""
    name: str = request.param
    monkeypatch.setitem(BACKENDS, "own", "own_memory:OwnMemoryBackend")
    found = backend_named(name).available()
    if not found.present:
        pytest.skip(f"{found.reason}: {found.remedy}")
    return name


@pytest.fixture
def copies(device: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The copies between the host and the device from now on, as "put" and "fetch", but for the word that tells
    whether a run failed."""
    space, seen = backend_named(device).space, list[str]()

    def counted(name: str) -> Callable[[Any], Any]:
        known = getattr(space, name)

        def call(x: Any) -> Any:
            if not (name == "fetch" and tuple(x.shape) == (2,) and dtype_of(space.type_of(x)).name == "i64"):  # type: ignore[union-attr]
                seen.append("fetch" if name == "fetch" else "put")
            return known(x)

        return call

    for name in ("put", "fetch", *(("borrow",) if device in LIBRARIES else ())):
        monkeypatch.setattr(space, name, counted(name))
    return seen


def doubled(device: str, dtype: str = "f32") -> rlx.CompiledGraph:
    g = rlx.Graph("doubled")
    x = g.input("x", (2, 3), dtype)
    g.output(x + x, name="y")
    return rlx.compile(g, device=device)


def pointer(array: Array) -> int:
    """Where the elements are."""
    if array.device == "xla":
        return int(array.held.unsafe_buffer_pointer())
    if array.device == "interp":
        return int(array.held.address)
    return int(read_dlpack(array).ctypes.data)


class OnCpu:
    """What takes an array's DLPack as a copy in the memory of the host."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**{**options, "dl_device": (1, 0)})

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


# ---- what it is


def test_results_are_arrays_on_the_device(device: str, copies: list[str]) -> None:
    """They have shape, type and device; nothing is copied to the host until it is asked for."""
    model = doubled(device)
    (y,) = model.run([X])
    assert type(y) is rlx.Array
    assert (y.shape, y.ndim, y.size, y.nbytes, len(y)) == ((2, 3), 2, 6, 24, 2)
    assert y.dtype == np.float32
    assert y.device == device == model.device
    assert repr(y) == f"<rlx.Array f32[2, 3] on '{device}'>"
    assert copies.count("fetch") == 0
    np.testing.assert_array_equal(y, 2 * X)
    assert np.mean(y) == np.mean(2 * X)
    assert copies.count("fetch") == 2
    fresh = y.numpy()
    fresh[...] = 0
    np.testing.assert_array_equal(y.numpy(), 2 * X)
    assert np.asarray(y, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy=False"):
        np.asarray(y, copy=False)
    named = model(x=X)
    assert repr(named) == "{'y': float32[2, 3]}"
    assert type(named["y"]) is rlx.Array


def test_results_go_back_without_the_host(device: str, copies: list[str]) -> None:
    """As inputs, bound inputs, states and params; by name, by position, in a queue and in a traced function."""
    g = rlx.Graph("all")
    x, s, w = g.input("x", (2, 3)), g.state("s", (2, 3)), g.param("w", (2, 3))
    g.output(x * w + s, "y")
    model = rlx.compile(g, device=device)
    copies.clear()
    here = rlx.to_device(X, device)
    assert copies == ["put"]
    copies.clear()
    model.set_param("w", here)
    (y,) = model.run([here])
    (y,) = model.run({"x": y})
    model.states["s"].write(here)
    made = model.submit([y]).result(60)[0]
    model.states.bind("x", y)
    (last,) = model.run([])
    model.states["x"].write(here)
    assert rlx.to_device(last, device) is last
    function = rlx.jit(lambda a, b: a * b, device=device)
    product = function(y, b=here)
    if device != "own":  # which puts its zeros by itself
        assert set(copies) <= {"put"}  # constants of the graphs
    assert "fetch" not in copies
    np.testing.assert_array_equal(y, X * X * X)
    np.testing.assert_array_equal(made, X**4 + X)
    np.testing.assert_array_equal(last, X**4 + X)
    np.testing.assert_array_equal(model.run([])[0], X * X + X)
    np.testing.assert_array_equal(product, X**4)


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "string"])  # no state can be one
def test_every_type_goes_in_and_comes_out_as_declared(name: str, device: str) -> None:
    """Computed and passed on: as NumPy's arrays, as the device's own, and by DLPack where the type has it."""
    dtype = DTYPES[name]
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype.numpy)
    g = rlx.Graph("pass")
    x, s = g.input("x", (2, 3), name), g.state("s", (2, 3), name)
    g.output(x, "same")
    g.output(s, "old")
    g.output(rlx.transpose(x, (1, 0)), "turned")
    model = rlx.compile(g, device=device)
    for given in (values, rlx.to_device(values, device)):
        same, old, turned = model.run([given])
        assert same.dtype == old.dtype == turned.dtype == dtype.numpy
        assert same.numpy().tobytes() == values.tobytes()
        assert turned.numpy().tobytes() == values.T.tobytes()
        assert not any(old.numpy().tobytes())
    model.states["s"].write(same)
    kept = model.states["s"].read()
    assert type(kept) is rlx.Array
    assert kept.dtype == dtype.numpy
    assert model.run([kept])[1].numpy().tobytes() == values.tobytes()
    cpu = rlx.Graph("cpu")
    cpu.output(cpu.input("x", (2, 3), name), "y")
    (there,) = rlx.compile(cpu, device="cpu").run([same])  # a result of one device is an input of another
    assert type(there) is np.ndarray
    assert there.tobytes() == values.tobytes()
    if dtype.bits < 8:
        with pytest.raises(BufferError, match=f"{name} can't be shared"):
            same.__dlpack__()
    elif device == "interp":  # its memory is not the host's: what asks for a copy there gets one
        assert np.asarray(read_dlpack(OnCpu(same))).tobytes() == values.tobytes()
        with pytest.raises(BufferError, match=r"\.numpy\(\)"):
            same.__dlpack__()
    elif device != "own":
        if same.__dlpack_device__()[0] == HOST_MEMORY:
            assert read_dlpack(same).tobytes() == values.tobytes()
        else:
            with pytest.raises(BufferError, match="copy it to the CPU first"):
                read_dlpack(same)
        back = rlx.to_device(same, device)
        assert back.numpy().tobytes() == values.tobytes()


def test_parts_are_taken_on_the_device(device: str, copies: list[str]) -> None:
    """As NumPy takes them; what libraries would clamp or read beyond the end is refused."""
    (y,) = doubled(device).run([X])
    want, copies[:] = 2 * X, []
    slices = (slice(None), slice(1, 9), slice(5, 2), (slice(1), 0), (slice(None), slice(0, 3, 2)))
    for index in (0, -1, (1, 2), (-2, -3), ..., (..., 1), (0, ...), *slices):
        part = y[index]
        assert type(part) is rlx.Array
        np.testing.assert_array_equal(part.numpy(), want[index], err_msg=str(index))
    assert copies.count("put") == 0
    assert [row.numpy().tolist() for row in y] == want.tolist()
    for index in (2, -3, (0, 3), (0, 0, 0), (..., ...)):
        with pytest.raises(IndexError):
            y[index]
    for index in ("a", None, [0], X > 2, True, slice(None, None, -1), 1.0):
        with pytest.raises(TypeError, match="numpy"):
            y[index]
    with pytest.raises(TypeError, match="no length"):
        len(y[0, 0])


def test_rows_of_the_last_run_are_read_on_the_device(device: str) -> None:
    model = doubled(device)
    model.run([X])
    for row, want in ((0, 2 * X[0]), (-1, 2 * X[1]), ((1, 2), 2 * X[1, 2]), ((), 2 * X)):
        read = model.read_output_row("y", row)
        assert type(read) is rlx.Array
        np.testing.assert_array_equal(read, want)
    with pytest.raises(ShapeError, match="no row 2"):
        model.read_output_row("y", 2)


def test_what_it_does_not_offer_is_said(device: str) -> None:
    """No silent answer by identity or truth, and the way out by name."""
    (y,) = doubled(device).run([X])
    with pytest.raises(TypeError, match=r"\.numpy\(\)"):
        _ = y == X
    with pytest.raises(TypeError, match=r"\.numpy\(\)"):
        bool(y)
    with pytest.raises(TypeError, match=r"pickle what \.numpy\(\) gives"):
        pickle.dumps(y)
    with pytest.raises(AttributeError, match=r"no 'argmax': \.numpy\(\)"):
        y.argmax()
    assert len({y, y}) == 1
    for other in (copy.copy(y), copy.deepcopy(y), y.copy()):
        assert other is not y
        np.testing.assert_array_equal(other, y)


@pytest.mark.parametrize("device", LIBRARIES, indirect=True)
def test_buckets_pad_on_the_device(device: str, copies: list[str]) -> None:
    """A size below the top of its rung: zeros are added and results cut where they lie."""
    g = rlx.Graph("rows")
    x = g.input("x", (rlx.Dim("n", 1, 8), 3))
    g.output(rlx.softmax(x * 2.0), "y")
    buckets = rlx.Buckets(g, {"n": [4, 8]}, policy="buckets", device=device)
    buckets.warmup()
    for n in (3, 4, 7):
        rows = np.arange(3 * n, dtype=np.float32).reshape(n, 3)
        given = rlx.to_device(rows, device)
        copies.clear()
        (y,) = buckets.run([given])
        assert copies == []
        assert y.shape == (n, 3)
        np.testing.assert_allclose(y, np.exp(2 * rows) / np.exp(2 * rows).sum(1, keepdims=True), rtol=1e-5)


# ---- whose memory it is


@pytest.mark.parametrize("name", ["interp", *LIBRARIES])
def test_results_have_memory_of_their_own(name: str) -> None:
    """Outputs that are inputs, weights, states or parts of these, and equal ones: writing to one changes no other."""
    if not backend_named(name).available().present:
        pytest.skip(f"{name} is not installed")
    g = rlx.Graph("shared")
    x, w, s = g.input("x", (4, 3)), g.param("w", (4, 3)), g.state("s", (4, 3))
    y = x * w
    for value in (x, w, s, y, y, y.reshape(3, 4), x.reshape(12), w[1:3], rlx.transpose(w, (1, 0)), s + 0.0):
        g.output(value, f"o{len(g.outputs)}")
    g.update(s, y)
    model = rlx.compile(g, device=name)
    x_now = rlx.to_device(np.ones((4, 3), np.float32), name)
    model.set_param("w", x_now)
    for _ in range(3):
        results = model.run([x_now])
        leaves = [x_now, model._executable.raw_param("w"), model.states["s"].read()]
        spans = sorted((pointer(a), a.nbytes) for a in (*results, *leaves) if a is not None)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
    model.states.bind("x", x_now)
    kept = model._executable.bound_inputs["x"]
    assert pointer(kept) != pointer(x_now)


def test_arrays_outlive_the_model(device: str) -> None:
    """And are read from any thread."""
    model = doubled(device)
    (y,) = model.run([X])
    model.run([3 * X])
    model.close()
    del model
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(y.numpy()))
    thread.start()
    thread.join(60)
    np.testing.assert_array_equal(got[0], 2 * X)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool"])
def test_arrays_of_jax_go_in_and_out(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken where they lie, and jax takes ours so."""
    jax = pytest.importorskip("jax")
    values = X.astype(getattr(ml_dtypes, dtype, dtype))
    g = rlx.Graph("turn")
    g.output(rlx.transpose(g.input("x", (2, 3), values.dtype), (1, 0)), "y")
    model = rlx.compile(g, device="xla")
    with jax.enable_x64(True):
        given = jax.numpy.asarray(values)
    space = backend_named("xla").space

    def refuse(x: Any) -> Any:
        raise AssertionError("it went through the host")

    monkeypatch.setattr(space, "put", refuse)
    monkeypatch.setattr(space, "borrow", refuse)
    own = rlx.to_device(given, "xla")
    assert pointer(own) == given.unsafe_buffer_pointer()
    for x in (given, own):
        with monkeypatch.context() as within:
            within.setattr(space, "put", type(space).put.__get__(space))  # of the word that tells a failure
            (y,) = model.run([x])
        with jax.enable_x64(True):
            back = jax.dlpack.from_dlpack(y)
        assert back.unsafe_buffer_pointer() == pointer(y)
        assert np.asarray(back).tobytes() == values.T.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool_", "complex64"])
def test_arrays_of_mlx_go_in_and_out(dtype: str) -> None:
    mx = pytest.importorskip("mlx.core")
    if not backend_named("mlx").available().present:
        pytest.skip("mlx can't be used here")
    given = mx.array([[1, 0, 1], [0, 1, 1]]).astype(getattr(mx, dtype))
    own = rlx.to_device(given, "mlx")
    assert own.held is given
    g = rlx.Graph("turn")
    g.output(rlx.transpose(g.input("x", (2, 3), own.dtype), (1, 0)), "y")
    for x in (given, own):
        (y,) = rlx.compile(g, device="mlx").run([x])
        assert read_dlpack(y).tobytes() == own.numpy().T.tobytes()


# ---- what the runtime does with it


def test_states_are_as_those_of_the_reference(device: str) -> None:
    """Read, written, reset, bound, fed, given for one run, left as they were by a run that failed."""
    g = rlx.Graph("states")
    n = rlx.Dim("n", 1, 8)
    h, x, i = g.input("h", (n,)), g.input("x", (n,)), g.input("i", (), "i64")
    total = g.state("total", (3,), initial=np.arange(3, dtype=np.float32))
    g.update(total, total + 1.0)
    g.output(h * 2.0 + x, "y")
    g.output(rlx.gather(total, i), "one")
    models = [rlx.compile(g, device=name) for name in (device, "reference")]

    def same(call: Callable[[rlx.CompiledGraph], Any]) -> None:
        got, want = (call(model) for model in models)
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert type(a) is rlx.Array
            np.testing.assert_array_equal(a, b)
        for name in models[1].states:
            np.testing.assert_array_equal(*(model.states[name].read() for model in models))

    ones, zero = np.ones(3, np.float32), np.array(0)
    for model in models:
        model.states.bind("h", ones * 5)
    same(lambda model: model.run({"x": ones, "i": zero}))
    same(lambda model: model.run({"x": ones, "i": zero, "h": ones}))
    for model in models:
        model.states["h"].feed("y")
    for _ in range(3):
        same(lambda model: model.run([ones, zero]))
    same(lambda model: model.run([ones, zero], outputs=["one"]))
    for model in models:
        with pytest.raises(rlx.errors.ExecutionError):
            model.run([ones, np.array(7)])
    same(lambda model: model.run([ones, zero]))
    for model in models:
        model.states["h"].write(ones)
        model.states["total"].reset()
    same(lambda model: model.run([ones, zero]))
    same(lambda model: [model.run_feed({"x": ones, "i": zero}, "total", "y")])
    for model in models:
        model.states["h"].feed(None)
        model.states["h"].reset()
    same(lambda model: model.run([ones, zero]))
    for model in models:
        model.states.bind("h", np.ones(4, np.float32))  # another length
    same(lambda model: model.run([np.ones(4, np.float32), zero]))
    for model in models:
        model.states.bind("h", None)
        assert list(model.states) == ["total"]
        with pytest.raises(rlx.errors.NameNotFound, match="'h' is missing"):
            model.run({"x": ones, "i": zero})


def test_wrong_arrays_are_refused_by_name(device: str) -> None:
    model = doubled(device)
    for bad, error, text in (
        (np.zeros((2, 3)), DTypeError, "input 'x': expected elements of type f32, got float64"),
        (np.zeros((3, 2), np.float32), ShapeError, r"input 'x': expected shape \(2, 3\), got \(3, 2\)"),
    ):
        with pytest.raises(error, match=text):
            model.run([rlx.to_device(bad, device)])
    if device == "own":
        with pytest.raises(OptionError, match=r"out for 'y'.*cuda:0"):
            model.run([X], out={"y": rlx.to_device(X, device)})


def test_memory_that_can_not_be_taken_is_said(device: str) -> None:
    """Of a device that neither this one nor the host reads."""

    class Elsewhere:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("it stays where it is")

    with pytest.raises(DTypeError, match=r"input 'x'.*cuda:0: copy it to the CPU first"):
        doubled(device).run([Elsewhere()])
    if device == "xla":
        jax = pytest.importorskip("jax")
        gone = jax.numpy.asarray(X)
        gone.delete()
        with pytest.raises(DTypeError, match=r"input 'x'.*deleted"):
            doubled(device).run([gone])
        with pytest.raises(Exception, match=r"[Tt]racer"):
            jax.jit(lambda x: doubled(device).run([x]))(X)


def test_to_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own memory is shared; what is no array, or no device, is said."""
    monkeypatch.setitem(BACKENDS, "own", "own_memory:OwnMemoryBackend")
    assert rlx.to_device(X, "cpu") is X
    shared = rlx.to_device(rlx.to_dlpack(X.astype(ml_dtypes.bfloat16)), "cpu")
    assert shared.dtype == ml_dtypes.bfloat16
    assert rlx.to_device(bytearray(3), "own").shape == (3,)
    assert rlx.to_device(np.float32(2), "own").shape == ()
    for bad in ([1.0], 3, "text", None, np.array(["a"]), np.ma.masked_array(X), X.astype(">f4")):
        with pytest.raises((DTypeError, OptionError)):
            rlx.to_device(bad, "own")
    with pytest.raises(OptionError, match="unknown device 'gpu'"):
        rlx.to_device(X, "gpu")
    (read,) = doubled("cpu").run([rlx.to_device(X, "own")])  # by __array__: its DLPack is another device's
    np.testing.assert_array_equal(read, 2 * X)


def test_what_goes_to_files_is_read_first(device: str, tmp_path: Path) -> None:
    """States, recordings and artifacts hold the elements; they load on the CPU too."""
    g = rlx.Graph("files")
    x, s, w = g.input("x", (2, 3)), g.state("s", (2, 3)), g.param("w", (2, 3))
    g.update(s, s + x)
    g.output((s + x) * w, "y")
    model = rlx.compile(g, device=device)
    model.set_param("w", rlx.to_device(X, device))
    with model.record(tmp_path / "runs.npz") as recorder:
        (first,) = recorder.run([rlx.to_device(X, device)])
    assert type(first) is rlx.Array
    model.states.save(tmp_path / "states")
    model.states["s"].reset()
    assert rlx.replay(model, tmp_path / "runs.npz").ok
    other = rlx.compile(g, device="cpu")
    other.states.load(tmp_path / "states")
    np.testing.assert_array_equal(other.states["s"].read(), X)
    if device in LIBRARIES:
        model.save(tmp_path / "m.rlxart", portable=True)
        np.testing.assert_array_equal(rlx.load(tmp_path / "m.rlxart", device="cpu").run([X])[0], X * X)


def test_the_arena_of_a_device_is_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "own", "own_memory:OwnMemoryBackend")
    assert type(doubled("own").arena) is rlx.Array
    arena = doubled("cpu").arena
    assert isinstance(arena, memoryview)
    assert arena.readonly


def test_the_double_keeps_every_element() -> None:
    """Its memory is bytes: two elements of 4 bits in one."""
    for name, dtype in [(name, dtype) for name, dtype in DTYPES.items() if name != "string"]:
        values = np.arange(-8, 7).astype(dtype.numpy)
        space = OwnMemory()
        held = space.put(values)
        assert len(held.bytes) == (15 * dtype.bits + 7) // 8
        assert space.fetch(held).tobytes() == values.tobytes(), name
