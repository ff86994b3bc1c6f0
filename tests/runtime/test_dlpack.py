"""DLPack both ways: no copies, owners that stay alive, read-only and strided memory, bf16, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.backends.dlpack import _type_of, read_dlpack
from rlx.errors import DTypeError, OptionError, RlxError, ShapeError, StaleView

Array = np.ndarray[Any, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
X = np.arange(1, 7, dtype=np.float32).reshape(2, 3)


class Tensor:
    """A tensor of another library: it has DLPack and nothing else. `old`: from before versions of the protocol."""

    def __init__(self, array: Array, device: int = 1, old: bool = False) -> None:
        self.array, self.device, self.old = array, device, old

    def __dlpack__(self, **options: Any) -> Any:
        if self.old and options:
            raise TypeError("unexpected keyword argument")
        return rlx.to_dlpack(self.array).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


def doubled(dtype: str = "f32", **options: Any) -> rlx.CompiledGraph:
    g = rlx.Graph("doubled")
    x = g.input("x", (2, 3), dtype)
    g.output(x + x, name="y")
    g.output(rlx.transpose(x, (1, 0)), name="t")
    return rlx.compile(g, device="cpu", **options)


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "plain": np.copy,
    "strided": lambda x: np.repeat(np.repeat(x, 2, 0), 2, 1)[::2, ::2],
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "broadcast": lambda x: np.broadcast_to(x[:1], (2, 3)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64", "f8e4m3", "f8e4m3fnuz", "f8e5m2fnuz"])
def test_inputs(layout: str, dtype: str) -> None:
    model = doubled(dtype)
    x = LAYOUTS[layout](X.astype(model.inputs[0].dtype.numpy))
    for _ in range(2):
        y, t = model.run([Tensor(x)])
        np.testing.assert_array_equal(y, x + x)
        np.testing.assert_array_equal(t, x.T)
        np.testing.assert_array_equal(model.run_slots(Tensor(x))[0], x + x)


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_reading_copies_nothing_and_keeps_the_owner(dtype: str) -> None:
    array = np.ones(64, getattr(ml_dtypes, dtype, dtype))
    for tensor in (Tensor(array), rlx.to_dlpack(array)):
        read = read_dlpack(tensor)
        assert read.dtype == array.dtype
        assert read.ctypes.data == array.ctypes.data
        assert read.flags.writeable
    place, read = read.ctypes.data, read[3:5]
    del array, tensor
    gc.collect()
    churn = [np.zeros(64, np.int8) for _ in range(100)]
    assert read.ctypes.data > place
    assert read.astype(np.float32).tolist() == [1, 1]
    assert len(churn) == 100


def test_read_only_memory_stays_so() -> None:
    array = X.copy()
    array.flags.writeable = False
    assert not read_dlpack(array).flags.writeable
    np.testing.assert_array_equal(doubled().run([Tensor(array)])[0], X + X)
    bits = array.astype(BF16)
    bits.flags.writeable = False
    assert not read_dlpack(rlx.to_dlpack(bits)).flags.writeable
    with pytest.raises(BufferError):
        rlx.to_dlpack(bits).__dlpack__()  # a consumer that can't be told


def test_old_producers_are_read() -> None:
    np.testing.assert_array_equal(doubled().run([Tensor(X.copy(), old=True)])[0], X + X)
    np.testing.assert_array_equal(doubled("bf16").run([Tensor(X.astype(BF16), old=True)])[0], (X + X).astype(BF16))


def test_views_keep_the_arena_alive() -> None:
    """What a consumer holds is good after the model is gone; before that it is overwritten by the next run."""
    model = doubled("bf16")
    view = model.run_views([X.astype(BF16)])["y"]
    other = read_dlpack(rlx.to_dlpack(view))
    assert other.ctypes.data == view.ctypes.data
    assert not other.flags.writeable
    model.run_views([(10 * X).astype(BF16)])
    np.testing.assert_array_equal(other, (20 * X).astype(BF16))
    model.close()
    del model, view
    gc.collect()
    churn = [np.zeros(4096, np.int8) for _ in range(50)]
    np.testing.assert_array_equal(other, (20 * X).astype(BF16))
    assert len(churn) == 50


def test_stale_views_are_told_in_debug_mode() -> None:
    model = doubled(debug=True)
    views = model.run_views([X])
    shared = np.from_dlpack(views["y"])
    np.testing.assert_array_equal(shared, 2 * X)
    model.run_views([3 * X])
    with pytest.raises(StaleView):
        rlx.to_dlpack(views["y"])
    np.testing.assert_array_equal(shared, 6 * X)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_outputs_are_written_into_tensors(dtype: str) -> None:
    """Straight where the layout allows, else by one copy; the tensor itself is returned."""
    model = doubled(dtype)
    x = X.astype(model.inputs[0].dtype.numpy)
    plain, strided = np.zeros((2, 3), x.dtype), np.zeros((4, 6), x.dtype)[::2, ::2]
    for array in (plain, strided):
        tensor = Tensor(array)
        for out in ({"y": tensor}, [tensor, None]):
            array[...] = 0
            made = model.run([x], out=out)
            assert made[0] is tensor
            np.testing.assert_array_equal(array, x + x)
            np.testing.assert_array_equal(made[1], x.T)
    memory = bytearray(24)
    (view,) = doubled().run([X], outputs=["y"], out={"y": memoryview(memory).cast("f", (2, 3))})
    assert isinstance(view, memoryview)
    np.testing.assert_array_equal(np.frombuffer(memory, np.float32).reshape(2, 3), 2 * X)


def test_outputs_over_inputs_are_right() -> None:
    """The same memory as input and output, shifted by one element too, and the other output transposed."""
    model = doubled()
    memory = np.zeros(7, np.float32)
    for shift in (0, 1):
        x, target = memory[:6].reshape(2, 3), memory[shift : 6 + shift].reshape(2, 3)
        x[...] = X
        model.run([Tensor(x)], out={"y": Tensor(target)})
        np.testing.assert_array_equal(target, 2 * X)
        x[...] = X
        turned = memory[shift : 6 + shift].reshape(3, 2)
        model.run([Tensor(x)], out={"t": Tensor(turned)})
        np.testing.assert_array_equal(turned, X.T)


def frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "read-only": (lambda: Tensor(frozen(X.copy())), OptionError, "'y'.*read-only"),
    "read-only bytes": (lambda: memoryview(bytes(24)).cast("f", (2, 3)), OptionError, "'y'.*read-only"),
    "another device": (lambda: Tensor(X.copy(), 2), OptionError, "'y'.*cuda:0: copy it to the CPU"),
    "another type": (lambda: Tensor(X.astype(BF16)), DTypeError, "'y'.*expected elements of type f32, got bfloat16"),
    "another shape": (lambda: Tensor(X.T.copy()), ShapeError, r"'y'.*expected shape \(2, 3\), got \(3, 2\)"),
    "no buffer": (lambda: [[0.0] * 3] * 2, OptionError, "'y'.*writable array, list is none"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_targets_that_do_not_fit_are_refused(case: str) -> None:
    make, error, text = REFUSED[case]
    with pytest.raises(error, match=text) as caught:
        doubled().run([X], out={"y": make()})
    assert isinstance(caught.value, RlxError)


def test_two_outputs_need_two_tensors() -> None:
    g = rlx.Graph()
    x = g.input("x", (2, 3))
    for name in "ab":
        g.output(x + 1.0, name=name)
    array = X.copy()
    with pytest.raises(OptionError, match="overlap"):
        rlx.compile(g, device="cpu").run([X], out={"a": Tensor(array), "b": Tensor(array)})


@pytest.mark.parametrize("device, name", [(2, "cuda:0"), (8, "metal:0"), (99, "device type 99")])
def test_memory_of_other_devices_is_refused(device: int, name: str) -> None:
    with pytest.raises(DTypeError, match=f"input 'x'.*{name}.*copy it to the CPU first"):
        doubled().run([Tensor(X.copy(), device)])


def test_what_can_not_be_shared_is_told() -> None:
    with pytest.raises(DTypeError, match="i4"):
        rlx.to_dlpack(np.zeros(4, ml_dtypes.int4))

    class Odd(Tensor):
        def __dlpack__(self, **options: Any) -> Any:
            capsule = super().__dlpack__(**options)
            _type_of(capsule)[0] = 99
            return capsule

    with pytest.raises(DTypeError, match="input 'x'"):
        doubled().run([Odd(X.copy())])


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
def test_functions_take_what_runs_take(dtype: np.dtype[Any]) -> None:
    """Arguments of a traced function are read through DLPack, bf16 too; memory of another device is refused."""
    double = rlx.jit(lambda x: {"y": x + x}, device="cpu")
    for given in (Tensor(X.astype(dtype)), Tensor(X.astype(dtype), old=True), X.astype(dtype)):
        y = double(given)["y"]
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, (X + X).astype(dtype))
    assert len(double.traces) == 1
    with pytest.raises(DTypeError, match="jit: an argument"):
        double(Tensor(X.astype(dtype), device=2))


def test_functions_take_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    y = rlx.jit(np.tanh, device="cpu")(x)
    np.testing.assert_allclose(y.astype(np.float32), torch.tanh(x).float().numpy(), rtol=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_both_ways(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    model = doubled({"float32": "f32", "bfloat16": "bf16"}[dtype])
    x = torch.arange(1, 7).reshape(2, 3).to(getattr(torch, dtype))
    for given in (x, x.t().contiguous().t(), x.repeat_interleave(2, 0)[::2]):
        (y,) = model.run([given], outputs=["y"])
        np.testing.assert_array_equal(y.astype(np.float32), 2 * X)
    back = torch.from_dlpack(rlx.to_dlpack(y))
    assert torch.equal(back, x + x)
    assert back.data_ptr() == y.ctypes.data
    view = torch.from_dlpack(rlx.to_dlpack(model.run_views([x])["y"]))
    model.close()
    del model
    gc.collect()
    assert torch.equal(view, x + x)
    target = torch.zeros(2, 3, dtype=x.dtype)
    other = doubled({"float32": "f32", "bfloat16": "bf16"}[dtype])
    assert other.run([x], out={"y": target})[0] is target
    assert torch.equal(target, x + x)
    if dtype == "float32":
        with pytest.raises(DTypeError, match="grad"):
            other.run([x.requires_grad_()])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_both_ways(dtype: str) -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    model = doubled({"float32": "f32", "bfloat16": "bf16"}[dtype])
    x = jnp.asarray(X, dtype, device=jax.devices("cpu")[0])
    (y,) = model.run([x], outputs=["y"])
    np.testing.assert_array_equal(np.asarray(jnp.from_dlpack(rlx.to_dlpack(y)), np.float32), 2 * X)
    with pytest.raises(OptionError, match="read-only"):
        model.run([x], out={"y": x})  # arrays of jax never change
