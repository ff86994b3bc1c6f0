"""The digit classifier that `rlx demo` runs: a small network, and handwritten digits that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import rlx
from rlx.errors import NameNotFound
from rlx.ir.graph import Array
from rlx.records import dataclass
from rlx.runtime.compiled import CompiledGraph
from rlx.units import bytes_text

__all__ = ["DIGITS", "Digits", "load_digits_model", "path", "picture", "read", "side_by_side"]

DIGITS = Path(__file__).with_name("digits.onnx")
FULL = 16  # grey level of a black pixel
SHADES = " .:+#@"


FILES = {"digits": DIGITS, "digits-images": DIGITS.with_name("digits_test.npz")}


def path(name: str) -> Path:
    """The file of an example.

    "digits", a classifier (ONNX), and "digits-images", its inputs (npz), come with rlx. Real models, such as
    "minilm-int8", are there once `rlx fetch NAME` has brought them; `rlx fetch` lists them. Raises NameNotFound for
    other names, and for a model that is not there yet.
    """
    if name in FILES:
        return FILES[name]
    from rlx.demo.fetch import entries, place

    listed = entries()
    if name not in listed:
        names = ", ".join(map(repr, (*FILES, *listed)))
        raise NameNotFound(f"there is no example file {name!r}: there are {names}")
    found = place(listed[name])
    if found is None:
        size = bytes_text(listed[name].size)
        raise NameNotFound(
            f"the example file {name!r} is not there yet: `rlx fetch {name}` brings it ({size}, from PyPI)"
        )
    return found


@dataclass(frozen=True)
class Digits:
    """Held-out images [n, 1, 8, 8] f32 with values 0 (paper) to 16 (ink), and what they show."""

    images: Array
    labels: Array

    @classmethod
    def load(cls) -> Digits:
        """The 360 images beside the model."""
        with np.load(DIGITS.with_name("digits_test.npz")) as file:
            return cls(file["images"][:, None].astype(np.float32), file["labels"])


def load_digits_model(device: str = "auto", most: int = 512) -> CompiledGraph:
    """The network for 1 to `most` images at a time: image f32[batch, 1, 8, 8] -> probabilities f32[batch, 10]."""
    model: CompiledGraph = rlx.load(DIGITS, device=device, dims={"batch": (1, most)})
    return model


def read(model: CompiledGraph, images: Array) -> Array:
    """The digit that the model sees in each image."""
    probabilities: Array = np.asarray(model(image=images)["probabilities"])
    return np.asarray(probabilities.argmax(axis=1))


def picture(image: Array) -> list[str]:
    """An image [8, 8] as lines of text, two characters a pixel."""
    levels = np.clip(image * len(SHADES) / (FULL + 1), 0, len(SHADES) - 1).astype(int)
    return ["".join(SHADES[level] * 2 for level in row) for row in levels]


def side_by_side(images: Sequence[Array], captions: Sequence[str], gap: int = 3) -> str:
    """Images as text next to each other, each over its caption."""
    columns = [[*picture(image), caption] for image, caption in zip(images, captions, strict=True)]
    width = max((len(line) for column in columns for line in column), default=0) + gap
    return "\n".join("".join(line.ljust(width) for line in lines).rstrip() for lines in zip(*columns, strict=True))
