"""What kind of model file it is, by its first bytes and its ending; and the text form of a graph."""

from __future__ import annotations

from pathlib import Path

from rlx.disk import MAGIC, is_artifact
from rlx.errors import ModelFormatError
from rlx.importers.sources import read_file
from rlx.ir.graph import Graph
from rlx.ir.text import parse_graph

__all__ = ["is_onnx", "kind_of_bytes", "parse_text", "way_in"]

_PICKLE = (
    "is a pickle, which runs code of whoever made it, so rlx reads none: if you trust it, load it by the library that "
    "wrote it and give the model itself, rlx.load(estimator, example_inputs=X[:1])"
)
_ELSEWHERE = {  # other formats by the endings of their files: what they are, and the way from there to here
    (".pkl", ".pickle", ".joblib"): _PICKLE,
    (".pt", ".pth", ".pt2", ".ckpt", ".bin"): "may be a file of PyTorch: write it as ONNX by torch.onnx.export",
    (".tflite", ".pb", ".h5", ".keras"): "may be a file of TensorFlow: write it as ONNX by tf2onnx",
    (".xml", ".mlmodel", ".mlpackage", ".engine", ".plan"): "belongs to another runtime: load the ONNX file it came of",
}


def is_onnx(head: bytes) -> bool:
    """Whether a file may be an ONNX model: a protobuf message whose field 1, the version of the IR, is small."""
    return len(head) > 1 and head[0] == 0x08 and 0 < head[1] < 32


def kind_of_bytes(data: bytes | bytearray | memoryview) -> str:
    """The ending of the format of a model in memory; raises `ModelFormatError` for what is none, and for artifacts."""
    head = bytes(memoryview(data).cast("B")[: len(MAGIC)])
    if is_onnx(head):
        return ".onnx"
    if is_artifact(head):
        raise ModelFormatError("<bytes>: an artifact is mapped from its file: write it to one and load that")
    raise ModelFormatError(f"<bytes>: {way_in(head, '') or 'its contents are not those of a model'}; expected ONNX")


def way_in(head: bytes, ending: str) -> str:
    """How the model of a file that can't be loaded comes in after all; empty where the format is not known.

    `ending` is in lower case, with its dot.
    """
    if head.startswith(b"GGUF"):
        return "a GGUF model is mapped from its file: write it to one and load that"
    if head[:1] == b"\x80" and head[1:2] <= b"\x05":  # the opcode of a pickle's protocol, and its number
        return _PICKLE
    return next((way for endings, way in _ELSEWHERE.items() if ending in endings), "")


def parse_text(path: Path) -> Graph:
    """The graph of a file in the text form."""
    try:
        return parse_graph(read_file(path).decode())
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path}: is not text: {error}") from None
    except ModelFormatError as error:
        raise ModelFormatError(f"{path}: {error}") from None
