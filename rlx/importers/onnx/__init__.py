"""Importer of ONNX models, opset 7 and later."""

from rlx.importers.onnx.importer import load
from rlx.importers.onnx.preflight import Preflight, preflight

__all__ = ["Preflight", "load", "preflight"]
