"""ONNX files with narrower weights, and with products of 8-bit numbers."""
