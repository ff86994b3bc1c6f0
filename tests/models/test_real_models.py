"""The real models of rlx/demo/models.json against ONNX Runtime, every dynamic size at three values from one compile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import rlx
from rlx.backends.base import TensorSpec
from rlx.demo import fetch as fetch_models
from rlx.importers.onnx import preflight

Array = np.ndarray[Any, Any]
Inputs = dict[str, Array]

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


def letters(batch: int, length: int) -> Array:
    return np.random.default_rng(batch).integers(1, 40, (batch, length))


def spoken(batch: int, samples: int, rate: int) -> Inputs:
    """A chunk of sound, the state of a recurrent network in use, and the sampling rate."""
    return {"input": waveform(batch, samples), "state": 0.1 * normal(2, batch, 128), "sr": np.array(rate)}


def spectra(frames: int) -> dict[str, Inputs]:
    """What the three parts of a speech denoiser take for so many frames."""
    maps = {f"e{n}": normal(1, 64, frames, width) for n, width in enumerate((32, 16, 8, 8))}
    emb = normal(1, frames, 512)
    return {
        "enc": {"feat_erb": normal(1, 1, frames, 32), "feat_spec": normal(1, 2, frames, 96)},
        "erb": {"emb": emb, **maps},
        "df": {"emb": emb, "c0": normal(1, 64, frames, 96)},
    }


def rows(width: int, dtype: type = np.float32) -> list[Array]:
    return [(5 * normal(n, width)).astype(dtype) for n in (1, 7, 100)]


def images(*shapes: tuple[int, int, int]) -> list[Inputs]:
    return [{"x": text_image(*shape)} for shape in shapes]


CASES: dict[str, Callable[[], list[Inputs]]] = {
    "minilm-int8": lambda: [sentences(1, 9), sentences(3, 32), sentences(2, 128)],
    "magika": lambda: [{"bytes": file_bytes(batch)} for batch in (1, 2, 3)],
    "ppocrv4-det": lambda: images((1, 64, 96), (2, 96, 160), (3, 160, 64)),
    "ppocrv4-rec": lambda: images((1, 48, 80), (2, 32, 160), (3, 64, 240)),
    "ppocrv4-cls": lambda: images((1, 48, 192), (2, 32, 100), (3, 64, 256)),
    "ppocrv5-det": lambda: images((1, 64, 96), (2, 96, 160), (3, 160, 64)),
    "ppocrv5-rec": lambda: images((1, 48, 80), (2, 48, 160), (3, 48, 240)),
    "ppocrv5-cls": lambda: images((1, 80, 160), (2, 80, 160), (3, 80, 160)),
    "orientation": lambda: images((1, 224, 224), (2, 224, 224), (3, 224, 224)),
    "wakeword-mel": lambda: [{"input": waveform(*shape)} for shape in ((1, 1600), (2, 4000), (3, 12345))],
    "wakeword-embedding": lambda: [{"input_1": normal(batch, 76, 32, 1)} for batch in (1, 2, 3)],
    "basic-pitch": lambda: [{"serving_default_input_2:0": normal(batch, 43844, 1)} for batch in (1, 2, 3)],
    "pulsevad-2k": lambda: [{"log_mel": normal(batch, 64, 21)} for batch in (1, 2, 3)],
    "pulsevad-2k-int8": lambda: [{"log_mel": normal(batch, 64, 21)} for batch in (1, 2, 3)],
    "pulsevad-81k": lambda: [{"log_mel": normal(batch, 64, 21)} for batch in (1, 2, 3)],
    "silero-vad": lambda: [spoken(1, 512, 16000), spoken(2, 640, 16000), spoken(3, 576, 16000), spoken(2, 300, 8000)],
    "silero-vad-ifless": lambda: [spoken(1, 512, 16000), spoken(2, 640, 16000), spoken(3, 256, 8000)],
    "text2tashkeel": lambda: [{"input_ids": letters(*shape)} for shape in ((1, 5), (2, 12), (3, 9))],
    "deepfilternet-enc": lambda: [spectra(frames)["enc"] for frames in (1, 3, 50)],
    "deepfilternet-erb": lambda: [spectra(frames)["erb"] for frames in (1, 3, 50)],
    "deepfilternet-df": lambda: [spectra(frames)["df"] for frames in (1, 3, 50)],
    "atspm": lambda: [{"X": x} for x in rows(25, np.float64)],
    "surfaces-neighbors": lambda: [{"input": x} for x in rows(4)],
    "surfaces-validity": lambda: [{"input": x} for x in rows(4)],
    "surfaces-boosting": lambda: [{"input": x} for x in rows(4)],
    "akiki-vad": lambda: [
        {"audio_with_context": waveform(1, 576) * v, "h": normal(1, 1, 128) * v} for v in (0.1, 1, 2)
    ],
}

# basic-pitch scales by the logarithm of its quietest bin, where the 256 products of a filter cancel: f32 itself is off
# (ONNX Runtime by 6 to 29 tolerances of chirps and tones). Float64 is the measure; ONNX Runtime is, where it holds it.
DOUBLE = {"basic-pitch"}
# what is rounded to 8 bits of a range found at run time: one quantum of that range. (The layers give ONNX Runtime's
# bits but for its approximations of sigmoid and tanh: at four of 26 sizes these move a state, which lies at the middle
# between two quanta, to the other.)
QUANTUM = {"text2tashkeel": 1 / 255}


def test_every_model_has_a_case() -> None:
    onnx = [n for n, entry in fetch_models.entries().items() if entry.relative_path.suffix == ".onnx"]
    assert sorted(CASES) == sorted(onnx)


@pytest.mark.sample(14)
@pytest.mark.models
@pytest.mark.parametrize("name", CASES)
def test_models_agree_with_onnxruntime(name: str, model_path: Callable[[str], Path], tmp_path: Path) -> None:
    """max|a - b| <= 1e-5 + 1e-4 max|b| for every output, at three values of each dynamic size from one compile."""
    path = model_path(name)
    assert preflight(path).ok
    model = rlx.load(path, device="cpu", threads=2)
    cases = CASES[name]()
    dims = [
        {d for a, spec in zip(c.values(), order(model, c), strict=True) for d in open_sizes(a, spec)} for c in cases
    ]
    assert all(len({dict(sizes)[name] for sizes in dims}) >= 3 for name in dict(dims[0])), "fewer than three sizes"
    if name in DOUBLE:
        compare_in_double(model, path, tmp_path / "double.onnx", cases)
    else:
        compare(model, session_of(path), cases, QUANTUM.get(name, 1e-4))


LARGE = ("minilm", "ppocr", "orientation", "basic", "wakeword-emb")  # seconds each


@pytest.mark.models
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n.startswith(LARGE) else ()) for n in CASES]
)
def test_models_on_the_interpreter(name: str, model_path: Callable[[str], Path], full: bool) -> None:
    """Their kernels, executed in NumPy, give what the reference gives node by node; of small models in a quick run."""
    path = model_path(name)
    model, reference = (rlx.load(path, device=device) for device in ("interp", "reference"))
    for inputs in CASES[name]()[: 3 if full else 1]:
        for got, want in zip(map(np.asarray, model.run(inputs)), reference.run(inputs), strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            if got.dtype.kind == "f":
                assert parts_of_tolerance(got, want) <= 1
            else:
                np.testing.assert_array_equal(got, want)


def order(model: rlx.CompiledGraph, inputs: Inputs) -> list[TensorSpec]:
    return [next(spec for spec in model.inputs if spec.name == name) for name in inputs]


def open_sizes(array: Array, spec: TensorSpec) -> list[tuple[str, int]]:
    return [(str(d), size) for size, d in zip(array.shape, spec.shape, strict=True) if not isinstance(d, int)]


def session_of(path: Path) -> onnxruntime.InferenceSession:
    """Without VNNI, ONNX Runtime's sums of u8 by i8 products saturate unless it is told to be precise; and an LSTM of
    several threads rounds the states of each thread by their own range.
    """
    made = onnxruntime.SessionOptions()
    made.log_severity_level, made.intra_op_num_threads = 3, 1
    made.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(path, made, providers=["CPUExecutionProvider"])


def widen(graph: onnx.GraphProto) -> None:
    """Makes the f32 tensors of a graph without subgraphs f64."""
    for node in graph.node:
        for attribute in node.attribute:
            assert not attribute.HasField("g")
            if node.op_type == "Cast" and attribute.i == onnx.TensorProto.FLOAT:
                attribute.i = onnx.TensorProto.DOUBLE
    for tensor in (*graph.initializer, *(a.t for node in graph.node for a in node.attribute if a.HasField("t"))):
        if tensor.data_type == onnx.TensorProto.FLOAT:
            wide = onnx.numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(onnx.numpy_helper.from_array(wide, tensor.name))
    for value in (*graph.input, *graph.output):
        assert value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    del graph.value_info[:]


def compare_in_double(model: rlx.CompiledGraph, path: Path, double: Path, cases: list[Inputs]) -> None:
    """Against the file in float64; and against ONNX Runtime where that is within the tolerance of float64."""
    made = onnx.load(path)
    widen(made.graph)
    double.write_bytes(made.SerializeToString())
    exact, session = rlx.load(double, device="cpu", threads=2), session_of(path)
    for inputs in cases:
        wants = exact.run({name: a.astype(np.float64) for name, a in inputs.items()})
        theirs = session.run(None, inputs)
        for got, want, other in zip(model.run(inputs), wants, theirs, strict=True):
            assert (got.shape, got.dtype, want.dtype) == (want.shape, np.float32, np.float64)
            assert parts_of_tolerance(got, want) <= 1
            assert parts_of_tolerance(other, want) > 1 or parts_of_tolerance(got, other) <= 1
    for sound in sounds(43844):
        inputs = {model.inputs[0].name: sound.astype(np.float32)[None, :, None]}
        wants = exact.run({name: a.astype(np.float64) for name, a in inputs.items()})
        ours, theirs = (
            max(parts_of_tolerance(a, want) for a, want in zip(results, wants, strict=True))
            for results in (model.run(inputs), session.run(None, inputs))
        )
        assert ours <= max(theirs, 0.5)


def parts_of_tolerance(got: Array, want: Array) -> float:
    return float(np.abs(got - want).max() / (1e-5 + 1e-4 * np.abs(want).max()))


def sounds(samples: int) -> list[Array]:
    """A chirp, a tone, the two in a little noise, and a voice of forty partials; f64 [samples] at 22050 Hz."""
    t, rng = np.arange(samples) / 22050, np.random.default_rng(samples)
    noise = rng.standard_normal(samples)
    chirp, tone = 0.5 * np.sin(2 * np.pi * (300 + 800 * t) * t), 0.5 * np.sin(2 * np.pi * 220 * t)
    phase = 2 * np.pi * np.cumsum(110 + 20 * np.sin(6 * np.pi * t)) / 22050
    voice = sum(np.sin(k * phase) / k * np.exp(-(((k * 110 - 700) / 400) ** 2)) for k in range(1, 40))
    return [chirp, tone, chirp + 0.01 * noise, tone + 0.001 * noise, voice + 0.002 * noise]


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
