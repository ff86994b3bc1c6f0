"""ONNX ImageDecoder: files that Pillow reads, files that are none, and no Pillow."""

from __future__ import annotations

import io

import numpy as np
import pytest
from onnx import TensorProto, helper

import rlx
from rlx.errors import UnsupportedOp
from rlx.importers.onnx import load
from rlx.importers.onnx.mappings import more

PIXELS = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)
DEVICES = ("cpu", "reference", "interp")


def decoder(pixel_format: str) -> bytes:
    node = helper.make_node("ImageDecoder", ["data"], ["y"], pixel_format=pixel_format)
    data = helper.make_tensor_value_info("data", TensorProto.UINT8, ["n"])
    graph = helper.make_graph([node], "g", [data], [helper.make_empty_tensor_value_info("y")])
    made: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString()
    return made


def png(pixels: np.ndarray) -> np.ndarray:
    image = pytest.importorskip("PIL.Image").fromarray(pixels)
    file = io.BytesIO()
    image.save(file, "PNG")
    return np.frombuffer(file.getvalue(), np.uint8)


@pytest.mark.parametrize("device", DEVICES)
def test_images_of_any_size_from_one_compile(device: str) -> None:
    """The pixels are those of the file, in the order asked for; the next image may be larger."""
    model = rlx.compile(load(decoder("BGR")), device=device)
    for pixels in (PIXELS, np.tile(PIXELS, (40, 30, 1)), PIXELS[:1, :1]):
        (y,) = model.run([png(pixels)])
        np.testing.assert_array_equal(np.asarray(y), pixels[..., ::-1])


@pytest.mark.parametrize("pixel_format, channels", [("RGB", 3), ("Grayscale", 1)])
def test_a_file_that_cannot_be_decoded_gives_an_empty_image(pixel_format: str, channels: int) -> None:
    """Noise, an image that is cut off, and next to nothing, as the standard says."""
    model = rlx.compile(load(decoder(pixel_format)), device="cpu")
    whole = png(np.tile(PIXELS, (40, 30, 1)))
    for data in (PIXELS.reshape(-1), whole[: len(whole) // 2], whole[:1]):
        assert model.run([data])[0].shape == (0, 0, channels)
    assert model.run([whole])[0].shape == (280, 150, channels)


def test_an_image_that_would_take_all_memory_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's limit of pixels holds."""
    monkeypatch.setattr(pytest.importorskip("PIL.Image"), "MAX_IMAGE_PIXELS", 30)
    model = rlx.compile(load(decoder("RGB")), device="cpu")
    assert model.run([png(PIXELS)])[0].shape == (0, 0, 3)


def test_without_pillow_the_import_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything runs."""
    monkeypatch.setattr(more, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedOp, match=r"pip install '.*\[image\]'"):
        load(decoder("RGB"))
