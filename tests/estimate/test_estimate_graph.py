"""Estimates of graphs: each part worked out by hand, budget edges, and what is asked of dims."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import rlx
from rlx.backends import BACKENDS, backend_named
from rlx.backends.base import CodeGenerator
from rlx.backends.cpu.gemm.panels import int8_layout as int8_panels
from rlx.errors import MemoryDeficit, ModelFormatError, NameNotFound, OptionError, ShapeError
from rlx.estimate.calibrate import Overhead, known_overhead
from rlx.estimate.graph import estimate_graph
from rlx.estimate.memory import MemoryEstimate
from rlx.importers.onnx import load as load_onnx
from rlx.importers.onnx.tensor import TensorRef
from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import encoding_named
from rlx.ops.quant import ConvInteger
from rlx.options import CompileOptions
from rlx.units import bytes_text


def mlp() -> rlx.Graph:
    g = rlx.Graph("mlp")
    x = g.input("x", (rlx.Dim("batch", 1, 64), 784))
    w, b = g.param("w", (784, 10)), g.param("b", (10,))
    g.output(rlx.softmax(x @ w + b), name="probs")
    return g


def estimate(graph: rlx.Graph, **options: object) -> MemoryEstimate:
    return rlx.estimate(graph, "cpu", overhead=0, threads=1, **options)  # type: ignore[no-any-return]


def test_parts_of_a_small_network() -> None:
    """w is packed into panels of 16 columns, b is read as it is; product and result, f32[64, 10], are both live."""
    found = estimate(mlp())
    assert found.weight_bytes == 784 * 16 * 4 + 40
    assert found.packed_weight_bytes == 784 * 16 * 4
    assert found.stored_weight_bytes == 784 * 10 * 4 + 40
    assert found.activation_bytes == 2 * 64 * 10 * 4
    assert found.input_bytes == 64 * 784 * 4
    assert found.output_bytes == 2 * 64 * 10 * 4  # those of the last run are still there when the next are made
    assert found.state_bytes == 0
    assert found.overhead_bytes == 0
    assert found.loading_copy_bytes == 784 * 10 * 4
    assert found.running_peak_bytes == sum(found.parts.values())
    assert found.loading_peak_bytes == found.weight_bytes + found.input_bytes + found.code_bytes + 784 * 10 * 4
    assert found.peak_bytes == max(found.peaks.values())
    assert found.certainty["activation"] == "exact"
    assert found.certainty["overhead"] == "calibrated"
    assert found.dims == {"batch": 64}


@pytest.mark.needs("avx2")
@pytest.mark.parametrize("dots", [False, True])
def test_room_for_unusual_8_bit_weights_is_counted_and_named(dots: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 panels of 16 columns and 2 x 8 rows: 128 bytes for each 8 rows, and three times 64 and 4 that may be empty.

    Instructions that add up dots in 32 bits at once need no such room.
    """
    monkeypatch.setattr(int8_panels, "instructions", lambda _: int8_panels.Instructions(8, dots=dots, tiles=False))
    g = rlx.Graph("bytes")
    x, w = g.input("x", (1, 16, 8, 8), DTYPES["u8"]), g.param("w", (32, 16, 1, 1), DTYPES["i8"])
    g.output(g.add(ConvInteger(), x, w)[0], "y")
    found = estimate(g)
    spare = 0 if dots else 2 * (2 * 3 * 64 + 64)  # places take whole lines of 64
    assert found.packed_weight_bytes == 2 * (128 + 2 * 128) + spare
    assert found.certainty["weight"] == ("exact" if dots else "bounded")
    assert [bytes_text(spare) + " of the weights are room" in note for note in found.notes] == [True] * (not dots)
    assert estimate(mlp()).certainty["weight"] == "exact"
    assert estimate(mlp()).notes == ()


def test_activations_are_those_of_the_compiled_plan() -> None:
    graph = mlp()
    plan = rlx.compile(graph, device="cpu").plan
    assert plan is not None
    assert estimate(graph).activation_bytes == plan.arena


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_scratch_at_the_upper_bounds_is_enough_for_fewer_rows(threads: int) -> None:
    """Fewer rows may be cut into larger chunks than the most are, for which each thread needs more."""

    def product(g: rlx.Graph, rows: rlx.Dim) -> rlx.Value:
        return rlx.transpose(g.input("x", (rows, 768)) @ g.param("w", (768, 3072)), (1, 0))

    def few_columns(g: rlx.Graph, rows: rlx.Dim) -> rlx.Value:
        return g.input("x", (rows, 800)) @ g.param("w", (800, 64))

    def convolution(g: rlx.Graph, rows: rlx.Dim) -> rlx.Value:
        return rlx.conv(g.input("x", (1, 128, rows, 20)), g.param("w", (256, 128, 5, 5)), strides=(2, 2))

    def batches(g: rlx.Graph, rows: rlx.Dim) -> rlx.Value:
        x = g.input("x", (rlx.Dim("batch", 1, 6), rows, 256))
        return rlx.softmax(x @ g.param("w", (256, 1000)))

    for make in (product, few_columns, convolution, batches):
        g = rlx.Graph("open")
        g.output(make(g, rlx.Dim("rows", 5, 513)), "y")
        most = rlx.estimate(g, "cpu", overhead=0, threads=threads).workspace_bytes
        fixed = [{"rows": n} for n in (5, 33, 80, 160, 225, 320, 448, 480, 512, 513)]
        fixed += [{**dims, "batch": 2} for dims in fixed] if make is batches else []
        for dims in fixed:
            sized = rlx.estimate(g, "cpu", overhead=0, threads=threads, dims=dims)
            assert sized.workspace_bytes <= 1.02 * most, (make.__name__, dims)


def test_a_weight_used_twice_counts_once_and_constants_are_weights() -> None:
    g = rlx.Graph("tied")
    x, w = g.input("x", (4, 32)), g.param("w", (32,))
    c = g.constant(np.arange(32, dtype=np.float32))
    g.output(x * w, "a")
    g.output(x + w + c, "b")
    found = estimate(g)
    assert found.stored_weight_bytes == 128
    assert found.constant_bytes == 128
    assert found.weight_bytes == 256
    assert found.activation_bytes == 2 * 4 * 32 * 4
    assert found.output_bytes == 2 * found.activation_bytes


def test_dims_fix_and_bound_the_sizes() -> None:
    assert estimate(mlp(), dims={"batch": 2}).input_bytes == 2 * 784 * 4
    assert estimate(mlp(), dims={"batch": (1, 3)}).input_bytes == 3 * 784 * 4


def test_a_size_without_a_bound_is_an_error() -> None:
    g = rlx.Graph("open")
    g.output(rlx.relu(g.input("x", (rlx.Dim("n"), 4))), "y")
    with pytest.raises(ShapeError, match=r"dim 'n' has no upper bound.*dims={'n': \(1, 512\)}.*--dims n=1:512$"):
        estimate(g)
    assert estimate(g, dims={"n": 8}).input_bytes == 128


def test_budget_edges() -> None:
    """A peak equal to the budget fits; one byte less is a deficit of one byte, with all parts."""
    found = estimate(mlp())
    peak = found.peak_bytes
    assert found.fits(peak)
    assert found.require(peak) is found
    assert found.deficit(peak) is None
    assert not found.fits(peak - 1)
    deficit = found.deficit(peak - 1)
    assert isinstance(deficit, MemoryDeficit)
    assert (deficit.budget_bytes, deficit.peak_bytes, deficit.missing_bytes) == (peak - 1, peak, 1)
    assert {name: deficit.parts[name] for name in found.parts} == found.parts
    with pytest.raises(MemoryDeficit, match=r"missing .* 1 B"):
        found.require(peak - 1)
    with pytest.raises(OptionError, match="size -1"):
        found.fits(-1)


def test_texts_of_budgets() -> None:
    found = MemoryEstimate("m", "cpu", weight_bytes=8 * 10**9)
    assert found.fits("8GB")
    assert found.fits("8GiB")
    assert not found.fits("7.9GB")


def test_largest_batch_is_the_largest_that_fits() -> None:
    found = estimate(mlp())
    for n in (2, 7, 63, 64):
        peak = estimate(mlp(), dims={"batch": (1, n)}).peak_bytes
        assert found.max_batch(peak) == n
        assert found.max_batch(peak - 1) == n - 1
    assert found.max_batch("1TiB") == 64
    assert found.max_batch(10**9, dim="batch") == 64
    with pytest.raises(OptionError, match="free are 'batch'"):
        found.max_context(10**9)


def test_remedies_save_what_they_say() -> None:
    found = estimate(mlp())
    budget = estimate(mlp(), dims={"batch": (1, 10)}).peak_bytes
    deficit = found.deficit(budget)
    assert deficit is not None
    remedy = next(r for r in deficit.remedies if r.action == "batch at most 10")
    assert remedy.saves == found.peak_bytes - budget
    assert remedy.fits
    copy = next(r for r in deficit.remedies if r.action.startswith("no packing copy"))
    assert not copy.fits
    assert copy.action in str(deficit)


def test_remedies_name_sizes_that_the_caller_fixed(tmp_path: Path) -> None:
    """dims={"batch": 64} could be less: of graphs and files, estimated and loaded; what is named fits."""
    path = rlx.demo.path("digits")
    for made in (lambda n: estimate(mlp(), dims={"batch": n}), lambda n: rlx.estimate(path, "cpu", dims={"batch": n})):
        found, budget = made(64), made(20).own.peak_bytes
        (remedy,) = [r for r in found.remedies(budget) if r.action.startswith("batch")]
        size = int(re.findall(r"^batch at most (\d+)$", remedy.action)[0])
        assert 1 < size <= 20
        assert remedy.fits
        assert made(size).fits(budget)
        assert remedy.saves > 0
    with pytest.raises(MemoryDeficit, match=r"batch at most \d+$") as loaded:
        rlx.load(path, device="cpu", dims={"batch": 64}, budget=budget)
    assert [r.action for r in loaded.value.remedies if r.fits] == [remedy.action]
    assert loaded.value.estimate.peak_bytes == loaded.value.peak_bytes
    assert not [r for r in made(1).remedies(1) if r.action.startswith("batch")]


def test_weights_that_a_registry_holds_are_listed_apart() -> None:
    held = {"b": np.zeros(10, np.float32), "other": np.zeros(3)}
    first, second = estimate(mlp()), estimate(mlp(), weights=held)
    assert second.weight_bytes == first.weight_bytes - 40
    assert (second.held_weight_bytes, second.held_weights) == (40, ("b",))
    with pytest.raises(OptionError, match="needs 40 bytes, the registry holds 44"):
        estimate(mlp(), weights={"b": np.zeros(11, np.float32)})


def test_mapped_weights_are_not_copied(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(bytes(784 * 10 * 4 + 40))
    with (tmp_path / "w").open("rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.float32)
    g = rlx.Graph("mlp")
    x = g.input("x", (4, 784))
    w = g.param("w", (784, 10), data=data[:7840].reshape(784, 10))
    b = g.param("b", (10,), data=data[7840:])
    g.output(x @ w + b, "y")
    found = estimate(g)
    assert found.mapped_weight_bytes == 40
    assert found.loading_copy_bytes == 0


def test_a_device_without_a_plan_gives_a_bound() -> None:
    found = rlx.estimate(mlp(), "reference", overhead=0)
    assert found.certainty["activation"] == "bounded"
    assert found.activation_bytes >= estimate(mlp()).activation_bytes


def test_language_options_are_refused_for_graphs() -> None:
    with pytest.raises(OptionError, match="context, kv_dtype: only for language models"):
        estimate(mlp(), context=4, kv_dtype="f16")
    with pytest.raises(OptionError, match=r"estimate takes the path, bytes or open file of a model, .*; got int"):
        rlx.estimate(3, overhead=0)  # type: ignore[arg-type]


def test_a_model_in_memory_is_estimated_like_its_file(tmp_path: Path) -> None:
    """As bytes, an open file and a ModelProto: what `rlx.load` takes."""
    path = Path(rlx.__file__).parent / "demo" / "digits.onnx"
    want = rlx.estimate(path, "cpu", overhead=0, dims={"batch": 4})
    with path.open("rb") as file:
        for held in (path.read_bytes(), memoryview(path.read_bytes()), file, onnx.load(path)):
            made = rlx.estimate(held, "cpu", overhead=0, dims={"batch": 4})
            assert made.activation_bytes == want.activation_bytes
            assert 0 <= made.weight_bytes - want.weight_bytes <= 64  # a constant lies in a mapped file
    with pytest.raises(OptionError, match="context: only for language models, not for a model in memory"):
        rlx.estimate(path.read_bytes(), "cpu", overhead=0, context=3)
    with pytest.raises(ModelFormatError, match="a GGUF model is mapped from its file"):
        rlx.estimate(b"GGUF" + bytes(100), "cpu", overhead=0)
    with pytest.raises(OptionError, match="estimate takes open files, and this one is closed"):
        rlx.estimate(file, "cpu", overhead=0)


def test_sizes_never_round_to_zero() -> None:
    assert [bytes_text(n) for n in (0, 1, 1023, 1024, 1536, 2**20, 3 * 2**30, 5 * 2**40)] == [
        "0 B", "1 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "3.0 GiB", "5.0 TiB",
    ]  # fmt: skip


def test_the_text_and_the_json_have_every_part() -> None:
    found = estimate(mlp())
    shown = str(found)
    for name, size in found.parts.items():
        assert f"  {name}" in shown
        assert f"{size:,} B" in shown
        assert found.to_dict()["parts"][name]["bytes"] == size
    assert found.to_dict()["peak_bytes"] == found.peak_bytes


def test_weights_in_constant_nodes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of equal shape are two weights, although their numbers are unknown; none of their bytes is touched."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((64, 64)).astype(np.float32) for _ in range(2)]
    nodes = [
        onnx.helper.make_node("Constant", [], [f"w{n}"], value=onnx.numpy_helper.from_array(w, f"t{n}"))
        for n, w in enumerate(weights)
    ]
    nodes += [onnx.helper.make_node("MatMul", ["x", "w0"], ["h"]), onnx.helper.make_node("MatMul", ["h", "w1"], ["y"])]
    leaves = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, 64]) for name in "xy"]
    made = onnx.helper.make_graph(nodes, "g", leaves[:1], leaves[1:])
    path = tmp_path / "constants.onnx"
    onnx.save(onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    loaded = rlx.load(path, device="cpu", threads=1)
    assert loaded.memory is not None
    assert loaded.memory.predicted is not None

    def refuse(ref: TensorRef, *, aligned: bool = True) -> None:
        raise AssertionError(f"{ref.name} was read")

    monkeypatch.setattr(TensorRef, "array", refuse)
    found = rlx.estimate(path, "cpu", overhead=0, threads=1)
    assert found.constant_bytes == loaded.memory.predicted.constant_bytes
    assert found.weight_bytes == loaded.memory.predicted.weight_bytes >= 2 * 64 * 64 * 4
    assert found.activation_bytes == loaded.memory.predicted.activation_bytes


# those of the devices that manage their memory themselves that are here
LIBRARIES = [n for n in BACKENDS if not isinstance(b := backend_named(n), CodeGenerator) and b.available().present]


def _open(bounds: tuple[int, int | None]) -> rlx.Graph:
    g = rlx.Graph("g")
    x = g.input("x", (rlx.Dim("n", *bounds), 64))
    w = g.param("w", (64, 64), data=np.eye(64, dtype=np.float32))
    g.output(rlx.softmax(x @ w), "y")
    return g


@pytest.mark.parametrize("device", ["cpu", *LIBRARIES])
def test_a_budget_means_the_same_bytes_on_each_device(device: str) -> None:
    """The least budget that a compile takes is what the estimate says, activations and all."""
    g = _open((1, 4096))
    least = estimate_graph(g, backend_named(device), CompileOptions(), known_overhead(device)).own.peak_bytes
    assert least > 4096 * 64 * 4
    y = rlx.compile(g, device=device, budget=least).run([np.ones((4, 64), np.float32)])[0]
    assert y.shape == (4, 64)
    with pytest.raises(MemoryDeficit, match=f"1 B more than the {least - 1:,} B allowed by budget="):
        rlx.compile(g, device=device, budget=least - 1)


@pytest.mark.parametrize("device", LIBRARIES)
def test_without_bounds_a_run_asks(device: str) -> None:
    """A run at sizes that the budget has no room for is refused before it is made; others go on."""
    model = rlx.compile(_open((1, None)), device=device, budget="1MB")
    small, large = (np.ones((n, 64), np.float32) for n in (8, 4096))
    before = model.run([small])[0]
    for _ in range(2):
        with pytest.raises(MemoryDeficit, match="1,000,000 B allowed by budget="):
            model.run([large])
    np.testing.assert_array_equal(model.run([small])[0], before)


@pytest.mark.parametrize("device", LIBRARIES)
def test_encoded_weights_count_as_they_are_and_decoded(device: str) -> None:
    """A device that decodes its weights holds both forms."""
    g = rlx.Graph("g")
    w = g.param("w", (64, 64), encoding="q8_0")
    g.output(g.input("x", (4, 64)) @ w.T, "y")
    found = rlx.estimate(g, device, overhead=0)
    assert found.weight_bytes == w.type.nbytes() + 64 * 64 * 4


def _twins(tmp_path: Path, pattern: str, external: bool = False) -> Path:
    """A file of products with a weight [128, 256] each; equal letters are equal weights of different names."""
    rng = np.random.default_rng(0)
    arrays = {c: rng.standard_normal((128, 256)).astype(np.float32) for c in sorted(set(pattern))}
    if "z" in arrays:
        arrays["z"] = arrays["a"].copy()
        arrays["z"][64, 100] += 1  # as the first, but for one number in the middle
    nodes = [onnx.helper.make_node("MatMul", ["x", f"w{i}"], [f"y{i}"]) for i in range(len(pattern))]
    proto = onnx.helper.make_model(
        onnx.helper.make_graph(
            nodes,
            "g",
            [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (16, 128))],
            [onnx.helper.make_empty_tensor_value_info(f"y{i}") for i in range(len(pattern))],
            [onnx.numpy_helper.from_array(arrays[c], f"w{i}") for i, c in enumerate(pattern)],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 17)],
        ir_version=8,
    )
    path = tmp_path / f"{pattern}.onnx"
    onnx.save_model(proto, path, save_as_external_data=external, location=f"{pattern}.bin", size_threshold=0)
    return path


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("pattern", ["ab", "aa", "abab", "aaaa", "az"])
def test_equal_weights_count_once(pattern: str, external: bool, tmp_path: Path) -> None:
    """Packed weights are as many bytes as the process then holds: from the file, from a graph, and when compiling."""
    path = _twins(tmp_path, pattern, external)
    found = rlx.estimate(path, "cpu", overhead=0)
    one = rlx.estimate(_twins(tmp_path, "a"), "cpu", overhead=0).packed_weight_bytes
    assert found.packed_weight_bytes == one * len(set(pattern))
    graph = load_onnx(path)
    assert estimate(graph).packed_weight_bytes == found.packed_weight_bytes
    assert estimate(graph).loading_copy_bytes == found.loading_copy_bytes
    model = rlx.compile(graph, device="cpu")
    model.run([np.ones((16, 128), np.float32)])
    shared = model._executable.shared
    held = {a.ctypes.data: a.nbytes for b, a in shared.memory.items() if b.kind == "prepared"}
    assert sum(held.values()) == found.packed_weight_bytes
    assert model.memory.predicted.packed_weight_bytes == found.packed_weight_bytes


def test_equal_weights_that_are_read_as_they_are_count_once() -> None:
    """Two tables of equal rows, which no kernel packs, are one in memory."""
    g = rlx.Graph("tables")
    i = g.input("i", (4,), "i64")
    rows = np.random.default_rng(0).standard_normal((300, 100)).astype(np.float32)
    for name in "ab":
        g.output(rlx.gather(g.param(name, (300, 100), data=rows.copy()), i), name=f"of_{name}")
    assert estimate(g).weight_bytes == rows.nbytes
    model = rlx.compile(g, device="cpu")
    model.run([np.arange(4)])
    assert len({a.ctypes.data for a in model._executable.shared.params.values()}) == 1


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("name", ["a.onnx", "a.rlxart", "a.gguf"])
def test_an_artifact_is_called_one(name: str, portable: bool, tmp_path: Path) -> None:
    """The estimate of an artifact, whatever its name, says what to call; no overhead is measured for it."""
    path = tmp_path / name
    rlx.compile(_open((1, 64)), device="cpu").save(path, portable=portable)
    with pytest.raises(ModelFormatError, match=r"is an artifact of rlx.*load_artifact.*memory.predicted"):
        rlx.estimate(path, "cpu")
    if name == "a.onnx":
        what = (
            "a portable artifact of rlx, a graph" if portable else "an artifact of rlx, whose machine code would be run"
        )
        with pytest.raises(ModelFormatError, match=f"{what}.*rlx.load_artifact"):
            rlx.load(path)
        assert rlx.load(path, portable_only=True).run([np.ones((4, 64), np.float32)])[0].shape == (4, 64)


def test_gradients_are_estimated_before_anything_is_allocated(tmp_path: Path) -> None:
    """With `grad` the arena is that of the compiled graph with gradients; of a graph and of its text."""
    g = rlx.Graph("net")
    h = g.input("x", (rlx.Dim("n", 1, 64), 32))
    for i in range(3):
        h = rlx.tanh(rlx.matmul(h, g.param(f"w{i}", (32, 32))))
    g.output(rlx.reduce_sum(h, keepdims=False), name="loss")
    plain = rlx.estimate(g, device="cpu").activation_bytes
    for grad, keywords in ((True, {}), ("x", {"wrt": "x"}), ({"wrt": ["w0", "x"], "of": "loss"}, {"wrt": ["w0", "x"]})):
        compiled = rlx.compile(rlx.value_and_grad(g, **keywords), device="cpu")
        assert compiled.plan is not None
        found = rlx.estimate(g, device="cpu", grad=grad).activation_bytes
        assert found == compiled.plan.arena > plain
    path = tmp_path / "net.rlx"
    path.write_text(str(g))
    assert rlx.estimate(path, device="cpu", grad=True).activation_bytes > plain
    with pytest.raises(NameNotFound, match="has no leaf 'y'"):
        rlx.estimate(g, grad="y")
    for wrong in (None, 1):
        with pytest.raises(OptionError, match=f"grad={wrong}: expected True, False, names, or keywords"):
            rlx.estimate(g, grad=wrong)  # type: ignore[arg-type]


def test_tables_in_a_file_count_what_a_run_can_read() -> None:
    """Rows that are gathered, each with the pages around it; the whole table where a run reads it in another way."""
    for rows, whole in ((3, False), (900, True)):
        graph = rlx.Graph("table")
        table, places = graph.param("table", (1000, 4096)), graph.input("places", (rows,), "i64")
        graph.output(rlx.gather(table, places))
        options = CompileOptions(device="cpu")
        found = estimate_graph(graph, backend_named("cpu"), options, Overhead(0), mapped=lambda name: True)
        assert found.mapped_weight_bytes == 1000 * 4096 * 4
        assert found.weight_bytes == (1000 * 4096 * 4 if whole else rows * (4096 * 4 + (64 << 10)))
        assert any("can't reach" in note for note in found.notes) is not whole


@pytest.mark.parametrize("encoding", ["q8_0", "q6_k"])
def test_tables_of_blocks_count_what_a_run_can_read(encoding: str) -> None:
    """Also where the same table is packed for a product; then packing reads all of it once."""
    for packed in (False, True):
        graph = rlx.Graph("table")
        data = encoding_named(encoding).encode(np.ones((1000, 4096), np.float32))
        table = graph.param("table", (1000, 4096), encoding=encoding, data=data)
        rows = rlx.gather(table, graph.input("places", (3,), "i64"))
        graph.output(rows @ rlx.transpose(table, (1, 0)) if packed else rows)
        options = CompileOptions(device="cpu")
        found = estimate_graph(graph, backend_named("cpu"), options, Overhead(0), mapped=lambda name: True)
        row = data.nbytes // 1000
        assert found.mapped_weight_bytes == data.nbytes
        assert found.weight_bytes - found.packed_weight_bytes == 3 * (row + (64 << 10))
        assert (found.loading_copy_bytes >= data.nbytes - 3 * (row + (64 << 10))) is packed


def test_a_table_that_rounds_of_a_loop_gather_from_counts_whole() -> None:
    """Each round may reach other rows."""
    graph = rlx.Graph("table")
    table, first = graph.param("table", (1000, 64)), graph.input("first", (64,))
    places = graph.input("places", (50,), "i64")
    graph.output(rlx.scan(lambda h, place: (h + rlx.gather(table, place), None), first, places)[0])
    options = CompileOptions(device="cpu")
    found = estimate_graph(graph, backend_named("cpu"), options, Overhead(0), mapped=lambda name: True)
    assert found.weight_bytes == 1000 * 64 * 4
