"""The real models of tools/models.json against ONNX Runtime, every dynamic size at three values from one compile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fetch_models
import numpy as np
import onnxruntime
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_errors

import rlx
from rlx.backends.base import TensorSpec
from rlx.errors import UnsupportedOp
from rlx.importers.onnx import preflight

Array = np.ndarray[Any, Any]
Inputs = dict[str, Array]

# ONNX Runtime saturates sums of u8 x i8 on processors without VNNI: files whose weights reach that far, and how far off
SATURATES = {"text2tashkeel": 0.05}

FONT = {  # 5 rows of 3 pixels
    "A": "757 55", "C": "744 47", "E": "747 47", "H": "557 55", "I": "722 27", "L": "444 47", "M": "577 55",
    "N": "755 55", "O": "755 57", "R": "757 65", "S": "747 17", "T": "722 22", "U": "555 57", "X": "552 55",
    "0": "755 57", "1": "262 27", "2": "717 47", "3": "717 17", "7": "711 11", "8": "757 57", " ": "000 00",
}  # fmt: skip


def glyph(letter: str) -> Array:
    rows = FONT[letter].replace(" ", "") if letter != " " else "00000"
    return np.array([[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in rows])


def draw(text: str, height: int, width: int, scale: int) -> Array:
    """Black text on white as u8 [height, width], cut off at the edges, repeated down the page."""
    line = np.concatenate([np.pad(glyph(letter), ((1, 1), (1, 1))) for letter in text], axis=1)
    pixels = np.kron(line, np.ones((scale, scale), int))
    page = np.tile(pixels, (height // pixels.shape[0] + 1, width // pixels.shape[1] + 1))[:height, :width]
    return (255 * (1 - page)).astype(np.uint8)


def text_image(batch: int, height: int, width: int) -> Array:
    """Normalised images [batch, 3, height, width] of different texts."""
    texts = ["RLX 2038 ", "HELLO TUNER ", "ARENA 177 "]
    pages = [draw(texts[i % 3], height, width, max(1, height // 12) if height < 100 else 4) for i in range(batch)]
    images = np.stack([np.stack([page] * 3) for page in pages])
    return ((images / 255 - 0.5) / 0.5).astype(np.float32)


def sentences(batch: int, length: int) -> Inputs:
    """Token ids with [CLS] and [SEP]; all but the first sentence are padded."""
    rng = np.random.default_rng(batch * 1000 + length)
    ids = rng.integers(1000, 20000, (batch, length))
    ids[:, 0], ids[:, -1] = 101, 102
    mask = np.ones((batch, length), np.int64)
    mask[1:, (length + 1) // 2 + 1 :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def waveform(batch: int, samples: int) -> Array:
    """Chirps in a little noise."""
    t = np.arange(samples) / 16000
    noise = np.random.default_rng(samples).standard_normal((batch, samples)) * 0.01
    sounds = np.stack([np.sin(2 * np.pi * (200 + 300 * i + 900 * t) * t) for i in range(batch)])
    return (0.5 * sounds + noise).astype(np.float32)


def normal(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def file_bytes(batch: int) -> Array:
    """The first and last 1024 bytes of a Python source, of noise, and of a web page, as the model takes them."""
    noise = np.random.default_rng(7).bytes(4096)
    page = b"".join(b"<li class='item-%d'>%d squared is %d</li>\n" % (i, i, i * i) for i in range(90))
    contents = [Path(__file__).read_bytes(), noise, b"<html><body><ul>" + page + b"</ul></body></html>"]
    return np.stack([np.frombuffer(c[:1024] + c[-1024:], np.uint8).astype(np.int32) for c in contents[:batch]])


def images(*shapes: tuple[int, int, int]) -> list[Inputs]:
    return [{"x": text_image(*shape)} for shape in shapes]


CASES: dict[str, Callable[[], list[Inputs]]] = {
    "minilm-int8": lambda: [sentences(1, 9), sentences(3, 32), sentences(2, 128)],
    "magika": lambda: [{"bytes": file_bytes(batch)} for batch in (1, 2, 3)],
    "ppocrv4-det": lambda: images((1, 64, 96), (2, 96, 160), (3, 160, 64)),
    "ppocrv4-rec": lambda: images((1, 48, 80), (2, 48, 160), (3, 48, 240)),
    "ppocrv4-cls": lambda: images((1, 48, 192), (2, 48, 100), (3, 64, 256)),
    "ppocrv5-det": lambda: images((1, 64, 96), (2, 96, 160), (3, 160, 64)),
    "ppocrv5-rec": lambda: images((1, 48, 80), (2, 48, 160), (3, 48, 240)),
    "ppocrv5-cls": lambda: images((1, 80, 160), (2, 80, 160), (3, 80, 160)),
    "orientation": lambda: images((1, 224, 224), (2, 224, 224), (3, 224, 224)),
    "wakeword-mel": lambda: [{"input": waveform(*shape)} for shape in ((1, 1600), (2, 4000), (3, 12345))],
    "wakeword-embedding": lambda: [{"input_1": normal(batch, 76, 32, 1)} for batch in (1, 2, 3)],
    "basic-pitch": lambda: [{"serving_default_input_2:0": waveform(b, 43844)[..., None]} for b in (1, 2, 3)],
    "pulsevad-2k": lambda: [{"log_mel": normal(batch, 64, 21)} for batch in (1, 2, 3)],
    "pulsevad-81k": lambda: [{"log_mel": normal(batch, 64, 21)} for batch in (1, 2, 3)],
}

# basic-pitch takes logarithms of small sums: against float64, ONNX Runtime is off by 4e-5 of the largest, rlx by 6e-6
RELATIVE = {"basic-pitch": 4e-4}

SUPPORTED = [name for name, entry in fetch_models.entries().items() if entry.supported]
OTHERS = [name for name, entry in fetch_models.entries().items() if not entry.supported]


def test_every_supported_model_has_a_case() -> None:
    assert sorted(CASES) == sorted(SUPPORTED)


@pytest.mark.models
@pytest.mark.parametrize("name", CASES)
def test_supported_models_agree_with_onnxruntime(name: str, model_path: Callable[[str], Path]) -> None:
    """max|a - b| <= 1e-5 + 1e-4 max|b| for every output."""
    path = model_path(name)
    model = rlx.load(path, device="cpu", threads=2)
    compare(model, session_of(path), CASES[name](), RELATIVE.get(name, 1e-4))


def session_of(path: Path, **options: Any) -> onnxruntime.InferenceSession:
    made = onnxruntime.SessionOptions()
    made.log_severity_level, made.intra_op_num_threads = 3, 2
    for name, value in options.items():
        setattr(made, name, value)
    return onnxruntime.InferenceSession(path, made, providers=["CPUExecutionProvider"])


def compare(
    model: rlx.CompiledGraph, session: onnxruntime.InferenceSession, cases: list[Inputs], relative: float = 1e-4
) -> None:
    names = [output.name for output in session.get_outputs()]
    assert [spec.name for spec in model.outputs] == names
    for inputs in cases:
        shapes = [a.shape for a in inputs.values()]
        wants = session.run(None, inputs)
        for output, got, want in zip(names, model.run(inputs), wants, strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            error = np.abs(got - want).max()
            assert error <= 1e-5 + relative * np.abs(want).max(), f"{output} at {shapes}: off by {error}"


@pytest.mark.models
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_run_or_say_what_they_miss(name: str, model_path: Callable[[str], Path]) -> None:
    """Preflight lists the nodes that can't be imported, and loading fails with just those, or with what the CPU lacks.

    What can be loaded already agrees with ONNX Runtime on noise, without its optimisations: those of int8 saturate.
    """
    path = model_path(name)
    report = preflight(path)
    missing: UnsupportedOp | None = None
    try:
        model = rlx.load(path, device="cpu", threads=2)
    except UnsupportedOp as error:
        missing = error
    if missing is not None:
        assert missing.nodes
        assert not report.missing or [n.name for n in missing.nodes] == [n.name for n in report.missing]
        assert all(node.reason and node.op in str(missing) for node in missing.nodes)
        return
    assert report.ok
    session = session_of(path, graph_optimization_level=onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)
    for length in (1, 3, 8):
        inputs = {spec.name: noise_of(spec, length) for spec in model.inputs}
        try:
            session.run(None, inputs)
        except (onnxruntime_errors.Fail, onnxruntime_errors.InvalidArgument, onnxruntime_errors.RuntimeException):
            continue  # a size or value that ONNX Runtime does not take either
        compare(model, session, [inputs], SATURATES.get(name, 1e-4))


def noise_of(spec: TensorSpec, length: int) -> Array:
    """Noise in the type of an input, ones where that is an integer; open sizes are `length`."""
    shape = tuple(d if isinstance(d, int) else length for d in spec.shape)
    return normal(*shape).astype(spec.dtype.numpy) if spec.dtype.is_float else np.ones(shape, spec.dtype.numpy)
