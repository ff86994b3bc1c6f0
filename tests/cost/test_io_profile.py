"""The IO profile: figures counted by hand, and the same kernels that a run executes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from targets import machine

import rlx
from rlx.backends.cpu.backend import CpuBackend
from rlx.cost import IoProfile, ceilings_of
from rlx.errors import ModelFormatError, NameNotFound, OptionError, ShapeError
from rlx.ir.graph import Array, Graph, TensorType
from rlx.ir.shape import Dim, upper
from rlx.ops.base import Op
from rlx.ops.contract import Gemm
from rlx.ops.control import Scan
from rlx.ops.encoded import Dequantize

# Panels of the CPU's products are 16 columns of f32 wide.


def network() -> Graph:
    """softmax(relu(x w + b) v): two products, one epilogue, one row kernel."""
    g = Graph("network")
    x = g.input("x", (Dim("n", 1, 64), 32))
    w, b, v = g.param("w", (32, 48)), g.param("b", (48,)), g.param("v", (48, 8))
    g.output(rlx.softmax(rlx.relu(x @ w + b) @ v), "p")
    return g


def transform() -> Graph:
    """The discrete Fourier transform of 4 real rows of 32 samples, all bins."""
    g = Graph("fft")
    g.output(rlx.dft(g.input("x", (4, 32, 1)), None, -2, False, False), "y")
    return g


def peaks() -> Graph:
    """The two strongest frequencies of the averaged power of 8 rows of 32 samples."""
    g = Graph("peaks")
    g.output(rlx.welch_peaks(g.input("x", (8, 32)), k=2, group=4), "y")
    return g


def test_network_by_hand() -> None:
    """Each kernel's bytes and flops, at an extent below the bound; without fusion each node has its own."""
    p = rlx.profile(network(), "cpu", at={"n": 3})
    first, second, last = p.kernels
    assert (first.read_bytes, first.written_bytes) == (4 * (3 * 32 + 3 * 32 * 16 + 48), 4 * 3 * 48)
    assert first.flops == 2 * 3 * 32 * 48 + 2 * 3 * 48  # the sum with b, and the maximum with 0
    assert (second.read_bytes, second.written_bytes) == (4 * (3 * 48 + 48 * 16), 4 * 3 * 8)
    assert second.flops == 2 * 3 * 48 * 8
    assert (last.read_bytes, last.written_bytes) == (4 * 3 * 8, 4 * 3 * 8)
    assert last.flops == 7 * 3 * 8  # maximum; difference, exp, sum; difference, exp, quotient
    assert p.launches == 3
    assert p.launches_before == 5  # matmul, add, relu, matmul, softmax
    read = [3 * 32 + 32 * 48, 3 * 48 + 48, 3 * 48, 3 * 48 + 48 * 8, 3 * 8]
    assert [k.read_bytes for k in p.before] == [4 * n for n in read]
    assert [k.written_bytes for k in p.before] == [4 * n for n in (3 * 48, 3 * 48, 3 * 48, 3 * 8, 3 * 8)]
    assert (p.syncs, p.h2d_bytes, p.d2h_bytes) == (0, 0, 4 * 3 * 8)


def test_transform_by_hand() -> None:
    """One kernel, which reads its factors, made before any run: the two views around it are no launches."""
    p = rlx.profile(transform(), "cpu")
    (kernel,) = p.kernels
    factors = 42
    assert kernel.read_bytes == 4 * (4 * 32 + factors)
    assert kernel.written_bytes == 4 * 4 * 64
    assert kernel.flops == 4 * 64 * 10 * (32).bit_length()
    assert (p.launches, p.launches_before, p.syncs) == (1, 1, 0)


def test_peaks_by_hand() -> None:
    """Only the peaks leave. Were the choice of the largest made on the host, what it reads and gives would be moved."""
    p = rlx.profile(peaks(), "cpu", unified=False, sync_ops=("top_k",), fetched=True)
    bins, factors = 17, 42
    spectrum = 4 * 8 * 2 * bins
    expected = [
        ("dft", 4 * (8 * 32 + factors), spectrum),
        ("reduce", spectrum, spectrum // 2),
        ("row", spectrum // 2, 4 * 2 * bins),
        ("top_k", 4 * 2 * bins, (4 + 8) * 2 * 2),
        ("map", (4 + 8) * 2 * 2, 4 * 2 * 2 * 2),
    ]
    assert [(k.kind, k.read_bytes, k.written_bytes) for k in p.kernels] == expected
    assert [k.sync for k in p.kernels] == [False, False, False, True, False]
    assert p.h2d_bytes == 4 * 8 * 32 + (4 + 8) * 2 * 2
    assert p.d2h_bytes == 4 * 2 * 2 * 2 + 4 * 2 * bins
    # transform; squares; mean; / n; top_k; cast; * rate; / n; concat
    assert p.launches_before == 9
    own = rlx.profile(peaks(), "cpu", unified=False, fetched=True)
    assert (own.syncs, own.h2d_bytes, own.d2h_bytes) == (0, 4 * 8 * 32, 4 * 2 * 2 * 2)


@pytest.mark.parametrize("graph", [network, transform, peaks])
def test_launches_are_the_kernels_that_run(graph: Callable[[], Graph]) -> None:
    """The profile of a graph is that of its compiled form, whose kernels are those that a run times one by one."""
    model = rlx.compile(graph(), device="cpu")
    assert rlx.profile(graph(), "cpu") == model.io_profile
    model.set_params({s.name: np.ones(s.shape, np.float32) for s in model.params})
    inputs = [np.ones([upper(s) or 0 for s in spec.shape], np.float32) for spec in model.inputs]
    names = list(dict.fromkeys((kind, name) for kind, name, _ in model.profile(inputs, 1)))
    assert len(names) == model.io_profile.launches


def several() -> Graph:
    g = Graph("several")
    x, table, i = g.input("x", (4, 6)), g.input("table", (100, 8)), g.input("i", (5,), "i32")
    y = rlx.exp(x)
    g.output(y, "y")
    g.output(y.reshape(24), "view")
    g.output(y, "again")
    g.output(x, "leaf")
    g.output(rlx.gather(table, i, axis=0), "rows")
    g.output(x * x + x, "twice")
    return g


def test_outputs_asked_for() -> None:
    """All equals none; views, leaves and repeats are moved too; only what the outputs need is counted."""
    every = rlx.profile(several(), "cpu", unified=False, fetched=True)
    assert every == rlx.profile(several(), "cpu", unified=False, fetched=True, outputs=every.outputs)
    assert every.d2h_bytes == 4 * (4 * 24 + 5 * 8 + 24)
    assert every.h2d_bytes == 4 * (24 + 800 + 5)
    one = rlx.profile(several(), "cpu", unified=False, fetched=True, outputs=["view"])
    assert (one.launches, one.d2h_bytes, one.h2d_bytes) == (1, 96, 96)
    leaf = rlx.profile(several(), "cpu", outputs=["leaf"])
    assert (leaf.launches, leaf.read_bytes, leaf.written_bytes) == (1, 96, 96)  # the run copies it into the arena
    with pytest.raises(NameNotFound, match="'yy'"):
        rlx.profile(several(), "cpu", outputs=["yy"])


def test_rows_of_gathers_and_operands_read_twice() -> None:
    """A gather reads the rows it takes, and an operand that is used three times is read once."""
    rows = rlx.profile(several(), "cpu", outputs=["rows"])
    assert rows.read_bytes == 4 * (5 * 8 + 5)
    twice = rlx.profile(several(), "cpu", outputs=["twice"])
    assert (twice.read_bytes, twice.written_bytes, twice.flops) == (96, 96, 48)
    assert (twice.read_bytes_before, twice.written_bytes_before) == (96 + 192, 192)


def test_views_move_nothing_in_shared_memory() -> None:
    """A run copies each output once; its views are where they are."""
    assert rlx.profile(several(), "cpu", outputs=["y"], views=True).d2h_bytes == 0
    assert rlx.profile(several(), "cpu", outputs=["y"]).d2h_bytes == 96
    assert rlx.profile(several(), "cpu", outputs=["y"], views=True, unified=False, fetched=True).d2h_bytes == 96


def test_results_stay_on_a_device_with_memory_of_its_own() -> None:
    """They are arrays there: copies to the host are counted for who says that it reads them; each text tells which."""
    shared = rlx.profile(several(), "cpu")
    stay, read = (rlx.profile(several(), "cpu", unified=False, fetched=fetched) for fetched in (False, True))
    assert (stay.d2h_bytes, read.d2h_bytes) == (0, shared.d2h_bytes)
    assert stay.h2d_bytes == read.h2d_bytes > 0
    assert [p.results for p in (shared, stay, read)] == ["are copied out", "stay on the device", "are copied out"]
    assert "0 B from it: results stay on the device" in str(stay)
    host = rlx.profile(peaks(), "cpu", unified=False, sync_ops=("top_k",))
    assert host.d2h_bytes == 4 * 2 * 17  # what the host computes with goes there in any case
    own = ceilings_of("interp", measure=False)
    near, far = (rlx.cost.predict(several(), own, fetched=fetched) for fetched in (False, True))
    assert far.transfers - near.transfers == pytest.approx(read.d2h_bytes / own.transfer)
    assert "results stay on the device" in str(near)
    assert "results are copied out" in str(far)


def test_element_types() -> None:
    """Bytes are those of the declared types."""
    g = Graph("types")
    x, b = g.input("x", (10,), "bf16"), g.input("b", (10,), "bool")
    g.output(rlx.where(b, x, x * x), "y")
    p = rlx.profile(g, "cpu")
    assert (p.read_bytes, p.written_bytes, p.d2h_bytes) == (30, 20, 20)


def test_attention_counts_both_products_and_the_causal_half() -> None:
    """Query rows see keys up to their own place from the end."""
    found = {}
    for causal in (False, True):
        g = Graph("attention")
        q, k, v = g.input("q", (1, 2, 5, 8)), g.input("k", (1, 2, 7, 8)), g.input("v", (1, 2, 7, 4))
        g.output(rlx.attention(q, k, v, scale=1.0, causal=causal), "y")
        found[causal] = rlx.profile(g, "cpu")
    assert sum(k.flops for k in found[False].kernels) == 2 * 2 * 5 * 7 * (8 + 4)
    pairs = 3 + 4 + 5 + 6 + 7
    assert sum(k.flops for k in found[True].kernels) == 2 * 2 * pairs * (8 + 4)


@rlx.register
class ProfileTestTrace(Op):
    """The trace of a matrix, in NumPy alone."""

    def infer(self, x: TensorType) -> TensorType:
        return TensorType((), x.dtype)

    def reference(self, x: Array) -> Array:
        return np.asarray(np.trace(x), x.dtype)


def test_sync_ops_take_the_place_of_the_devices_list() -> None:
    """Any op may be said to make the device wait; what runs on the host does by itself."""
    g = Graph("trace")
    g.output(rlx.profile_test_trace(g.input("x", (4, 4))), "y")
    assert rlx.profile(g, "cpu").syncs == 1
    assert rlx.profile(g, "cpu", sync_ops=()).syncs == 0
    assert rlx.profile(network(), "cpu", sync_ops=("softmax",)).syncs == 1

    class Waiting(CpuBackend):
        sync_ops = frozenset(("relu",))

    assert rlx.profile(network(), Waiting()).syncs == 1


def gemms() -> Graph:
    """gemm, reshape of it, and gemm again: the CPU takes both apart."""
    g = Graph("gemms")
    a = g.add(Gemm(), g.input("x", (4, 8)), g.param("w", (8, 8)), g.param("b", (8,)))[0]
    again = g.add(Gemm(), rlx.reshape(a, shape=(8, 4)), g.param("v", (4, 2)), g.param("c", (2,)))[0]
    g.output(again, "y")
    return g


def looped() -> Graph:
    """A discrete Fourier transform in each of two rounds."""

    def body(number: Any, x: Any) -> Any:
        wave = rlx.dft(x, None, -2, False, False)
        return rlx.slice(wave, starts=(0, 0, 0), sizes=(4, 32, 1), steps=(1, 1, 1))

    return rlx.jit(lambda x: rlx.fori_loop(0, 2, body, x), device="cpu").lower(np.ones((4, 32, 1), np.float32))


@pytest.mark.parametrize(
    "graph, op, syncs",
    [
        (transform, "dft", 1), (gemms, "gemm", 2), (peaks, "welch_peaks", 1), (network, "matmul", 2),
        (network, "relu", 1), (network, "gelu", 0), (looped, "dft", 2),
    ],
)  # fmt: skip
def test_sync_ops_may_be_taken_apart(graph: Callable[[], Graph], op: str, syncs: int) -> None:
    """The device waits once for the result of each node of the op, in every round, whatever became of the node."""
    for device in ("cpu", "reference"):
        assert rlx.profile(graph(), device, sync_ops=(op,)).syncs == syncs, device


def test_sync_ops_that_do_not_exist_are_named() -> None:
    with pytest.raises(NameNotFound, match="sync_ops: there is no op 'sofmax'; there are "):
        rlx.profile(network(), "cpu", sync_ops=("sofmax",))


def test_json_and_text() -> None:
    """JSON loads back equal; the text names every kernel and total."""
    p = rlx.profile(peaks(), "cpu")
    assert IoProfile.from_json(p.to_json()) == p
    assert IoProfile.from_json(replace(p, device="elsewhere").to_json()) != p
    for word in ("top_k", "sync", "5", "9", f"{p.read_bytes:,}"):
        assert word in str(p)
    for text in ("", "{}", "[1]", '{"totals": 1}', p.to_json().replace("h2d_bytes", "other")):
        with pytest.raises(ModelFormatError, match="to_json"):
            IoProfile.from_json(text)


def test_bad_arguments() -> None:
    """Unknown dims, sizes beyond bounds, dims without one, other devices and other objects."""
    g = Graph("open")
    g.output(g.input("x", (Dim("n"), 4)) + 1.0, "y")
    with pytest.raises(ShapeError, match="'n' has no upper bound"):
        rlx.profile(g, "cpu")
    assert rlx.profile(g, "cpu", at={"n": 5}).read_bytes == 80
    with pytest.raises(NameNotFound, match="'m'"):
        rlx.profile(g, "cpu", at={"m": 5})
    with pytest.raises(rlx.errors.ExecutionError, match="65"):
        rlx.profile(network(), "cpu", at={"n": 65})
    with pytest.raises(OptionError, match="compiled for 'cpu'"):
        rlx.profile(rlx.compile(g, device="cpu"), "reference", at={"n": 5})
    with pytest.raises(OptionError, match="takes a Graph"):
        rlx.profile("model.onnx")


def test_loops_count_their_rounds() -> None:
    """A scan over 9 rows launches the kernels of its body 9 times, with or without fusion."""
    body = Graph("body")
    carry, row, factor = (body.input(name, (3,)) for name in ("carry", "row", "factor"))
    body.output(carry + row * factor, "new")
    body.output(rlx.exp(carry), "stacked")
    g = Graph("scan")
    x, rows = g.input("x", (3,)), g.input("rows", (Dim("n", 1, 50), 3))
    last, stacked = g.add(Scan(1, 1), x, rows, x, regions=[body])
    g.output(last, "last")
    g.output(stacked, "stacked")
    p, twice = (rlx.profile(g, "cpu", at={"n": n}) for n in (9, 18))
    inside = [k for k in p.kernels if k.times == 9]
    assert {"exp", "add+mul"} <= {k.name for k in inside}
    once = sum(k.times == 1 for k in p.kernels)
    assert p.launches == 9 * len(inside) + once
    assert twice.launches - p.launches == 9 * len(inside)
    assert p.flops == 9 * (3 + 2 * 3)
    assert p.launches_before >= 9 * 3
    guessed = ceilings_of("mlx", measure=False)
    assert rlx.cost.predict(g, guessed, at={"n": 9}).seconds > 9 * guessed.launch


def test_weights_of_convolutions_are_read() -> None:
    """A convolution reads its image, its weights as the device has arranged them, and its biases, each once."""
    g = Graph("conv")
    x, w = g.input("x", (1, 32, 7, 7)), np.ones((64, 32, 1, 1), np.float32)
    y = rlx.conv(x, g.param("w", w.shape, data=w), g.param("b", (64,), data=np.ones(64, np.float32)))
    g.output(rlx.relu(y), "y")
    *_, kernel = rlx.profile(g, "cpu").kernels
    assert kernel.read_bytes == 4 * (32 * 49 + 64 * 32 + 64)
    assert kernel.written_bytes == 4 * 64 * 49


@pytest.mark.parametrize("rows", [1, 64])
def test_weights_of_bytes_are_read(rows: int) -> None:
    """Few rows, and tiles, read panels of bytes, others of floats; all read their scales."""
    g = Graph("bytes")
    x, w, scale = g.input("x", (rows, 96)), g.param("w", (96, 160), dtype="i8"), g.param("scale", (160,))
    g.output(x @ g.add(Dequantize(1), w, scale)[0], "y")
    *_, kernel = rlx.profile(g, "cpu").kernels
    size = 1 if rows == 1 or machine().float_tiles else 4
    assert kernel.read_bytes == 4 * rows * 96 + size * 96 * 160 + 4 * 160
