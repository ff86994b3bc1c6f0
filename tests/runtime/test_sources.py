"""What `rlx.load` takes besides paths: bytes, open files, and models of other libraries; and what it refuses."""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import rlx
from rlx.errors import ModelFormatError, NameNotFound, OptionError

DIGITS = rlx.demo.path("digits")
X = np.load(rlx.demo.path("digits-images"))["images"][:5, None].astype(np.float32)


@pytest.mark.parametrize(
    "form",
    [
        Path.read_bytes,
        lambda path: bytearray(path.read_bytes()),
        lambda path: memoryview(path.read_bytes()),
        lambda path: memoryview(np.repeat(np.frombuffer(path.read_bytes(), np.uint8), 2).tobytes())[::2],
        lambda path: io.BytesIO(path.read_bytes()),
        onnx.load,
    ],
    ids=["bytes", "bytearray", "memoryview", "strided", "file", "ModelProto"],
)
def test_forms_of_a_model_file_run_alike(form: Any) -> None:
    expected = rlx.load(DIGITS, device="cpu", dims={"batch": (1, 8)}).run([X])
    found = rlx.load(form(DIGITS), device="cpu", dims={"batch": (1, 8)}).run([X])
    np.testing.assert_array_equal(found[0], expected[0])


def test_wrong_bytes_are_told_what_they_are(tmp_path: Path) -> None:
    for data, word in [(b"", "not those of a model"), (b"GGUF1234", "GGUF"), (pickle.dumps([1]), "pickle")]:
        with pytest.raises(ModelFormatError, match=word):
            rlx.load(data)
        path = tmp_path / "model.bin"
        path.write_bytes(data)
        with pytest.raises(ModelFormatError):
            rlx.load(path)
    rlx.load(DIGITS, device="cpu", dims={"batch": 1}).save(tmp_path / "d.rlxart")
    with pytest.raises(ModelFormatError, match="write it to one"):
        rlx.load((tmp_path / "d.rlxart").read_bytes())


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    """Not under any name: its code would leave a file."""

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(tmp_path / "ran"), "w")

    for name in ("model.pkl", "model.joblib", "model.onnx", "model"):
        (tmp_path / name).write_bytes(pickle.dumps(Trap()))
        with pytest.raises(ModelFormatError):
            rlx.load(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def closed() -> io.BytesIO:
    file = io.BytesIO(b"")
    file.close()
    return file


@pytest.mark.parametrize(
    "source, options, word",
    [
        (3, {}, "got int"),
        (None, {}, "got NoneType"),
        (len, {}, "rlx.jit"),
        (len, {"example_inputs": (X,)}, "rlx.jit"),
        (io.StringIO("text"), {}, "binary mode"),
        (io.TextIOWrapper(io.BytesIO(DIGITS.read_bytes()), "utf-8"), {}, "binary mode"),
        (closed(), {}, "this one is closed"),
        (DIGITS, {"example_inputs": (X,)}, "example_inputs"),
        (DIGITS.read_bytes(), {"dynamic_shapes": {}}, "dynamic_shapes"),
        (DIGITS, {"providers": ["CPUExecutionProvider"]}, "device="),
        (DIGITS, {"intra_op_num_threads": 1}, "threads="),
        (DIGITS, {"thread": 1}, "did you mean 'threads'"),
    ],
)
def test_wrong_calls_say_what_to_write(source: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(OptionError, match=word):
        rlx.load(source, **options)


@pytest.mark.parametrize(
    "load", [rlx.load, rlx.load_llm, rlx.load_embedder, rlx.estimate], ids=lambda function: str(function.__name__)
)
def test_addresses_and_names_of_hubs_are_no_files(load: Any) -> None:
    for name, word in {
        "https://example.com/a/model.onnx": "https://example.com/a/model.onnx: can't be read: .*download it first",
        "s3://bucket/model.gguf": "not addresses: download it first",
        "sentence-transformers/all-MiniLM-L6-v2": "hf download sentence-transformers/all-MiniLM-L6-v2 --local",
        "models/there-is-none.onnx": "can't be read: [^.]*$",
        "./a/b": "can't be read: [^.]*$",
        "there-is-none": "can't be read: [^.]*$",
    }.items():
        with pytest.raises(ModelFormatError, match=word):
            load(name)


@pytest.mark.parametrize(
    "device, meant",
    [("gpu", "cuda"), ("cuda:0", "cuda"), ("CPU", "cpu"), ("mps", "mlx"), ("jax", "xla"), ("atuo", "auto"), ("x", "")],
)
def test_devices_of_other_libraries(device: str, meant: str) -> None:
    ends = f"; did you mean {meant!r}\\?$" if meant else "'interp'$"
    for call in (lambda: rlx.load(DIGITS, device=device), lambda: rlx.DevicePolicy(prefer=device)):
        with pytest.raises(OptionError, match=f"{device!r}: known are 'auto', 'cpu'.*{ends}"):
            call()


def test_example_files_have_names() -> None:
    assert DIGITS.is_file()
    with pytest.raises(NameNotFound, match="digits-images"):
        rlx.demo.path("numbers")


def test_an_estimator_of_scikit_learn() -> None:
    pytest.importorskip("skl2onnx")
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    features = rng.standard_normal((60, 4)).astype(np.float32)
    estimator = LogisticRegression().fit(features, features[:, 0] > 0)
    with pytest.raises(OptionError, match="example_inputs"):
        rlx.load(estimator)
    labels, probabilities = rlx.load(estimator, example_inputs=features[:1], device="cpu").run([features])
    np.testing.assert_array_equal(labels, estimator.predict(features))
    np.testing.assert_allclose(probabilities, estimator.predict_proba(features), atol=1e-6)


def test_what_an_exporter_says_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """skl2onnx quotes whole tables of nodes, megabytes of text: the message has the beginning, the cause all of it."""

    def convert(*_: Any, **__: Any) -> None:
        raise ValueError("no such node: " + "7, " * 10**6)

    monkeypatch.setitem(sys.modules, "skl2onnx", SimpleNamespace(to_onnx=convert))
    pytest.importorskip("sklearn")
    from sklearn.linear_model import LogisticRegression

    with pytest.raises(ModelFormatError, match="no such node") as raised:
        rlx.load(LogisticRegression(), example_inputs=np.zeros((1, 4), np.float32))
    assert len(str(raised.value)) < 2000
    assert len(str(raised.value.__cause__)) > 10**6


def test_a_module_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.BatchNorm1d(16))
    x = torch.randn(3, 8)
    with pytest.raises(OptionError, match="example_inputs"):
        rlx.load(module)
    shapes = ({0: torch.export.Dim("rows", min=1, max=64)},)
    model = rlx.load(module, example_inputs=(x,), dynamic_shapes=shapes, device="cpu")
    assert all(part.training for part in module.modules())  # as it was
    module.eval()
    for rows in (3, 5):
        x = torch.randn(rows, 8)
        np.testing.assert_allclose(model.run([x])[0], module(x).detach(), atol=1e-6)
    exported = rlx.load(torch.export.export(module, (x,)), device="cpu")
    np.testing.assert_allclose(exported.run([x])[0], module(x).detach(), atol=1e-6)


def test_torch_compile() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    compiled = torch.compile(module, backend="rlx", options={"threads": 1})
    x = torch.randn(3, 8)
    with pytest.raises(OptionError, match="no_grad"):
        compiled(x)
    with torch.no_grad():
        for rows in (3, 4, 5):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), module(x))
        module[0].weight.mul_(2)  # a weight that changes in place is seen
        torch.testing.assert_close(compiled(x), module(x))
        for _ in range(4):  # and another one in its place, wherever in memory that comes to lie
            module[0].weight = torch.nn.Parameter(torch.randn(16, 8))
            torch.testing.assert_close(compiled(x), module(x))
