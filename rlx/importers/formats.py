"""What kind of model file it is, by its first bytes and its ending."""

from __future__ import annotations

__all__ = ["is_onnx", "way_in"]

_WEIGHTS = (
    "holds weights without the graph that computes with them: rlx.estimate says what the model needs, and "
    "WeightRegistry.load reads them for a graph of yours"
)
_ELSEWHERE = {  # other formats by the endings of their files: what they are, and the way from there to here
    (".gguf", ".safetensors"): _WEIGHTS,
    (".pt", ".pth", ".pt2", ".ckpt", ".bin"): "may be a file of PyTorch: write it as ONNX by torch.onnx.export",
    (".tflite", ".pb", ".h5", ".keras"): "may be a file of TensorFlow: write it as ONNX by tf2onnx",
    (".xml", ".mlmodel", ".mlpackage", ".engine", ".plan"): "belongs to another runtime: load the ONNX file it came of",
}


def is_onnx(head: bytes) -> bool:
    """Whether a file may be an ONNX model: a protobuf message whose field 1, the version of the IR, is small."""
    return len(head) > 1 and head[0] == 0x08 and 0 < head[1] < 32


def way_in(head: bytes, ending: str) -> str:
    """How the model of a file that can't be loaded comes in after all; empty where the format is not known.

    `ending` is in lower case, with its dot.
    """
    if head.startswith(b"GGUF"):
        return _WEIGHTS
    return next((way for endings, way in _ELSEWHERE.items() if ending in endings), "")
