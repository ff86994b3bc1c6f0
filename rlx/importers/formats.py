"""What kind of model file it is, by its first bytes."""

from __future__ import annotations

__all__ = ["is_onnx"]


def is_onnx(head: bytes) -> bool:
    """Whether a file may be an ONNX model: a protobuf message whose field 1, the version of the IR, is small."""
    return len(head) > 1 and head[0] == 0x08 and 0 < head[1] < 32
