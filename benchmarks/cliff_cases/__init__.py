"""The cases of cliffs.py: for every ONNX op a function that makes a net of it, and the values that its parameters take.

A function is registered for its ops with `cases`; the first value of each parameter is the usual one. It is given a
`Pick` of one value each, and returns a `Net`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cliff_cases import axes, choosing, control, elementwise, layout, products, tables, windows  # noqa: F401
from cliff_cases.base import CASES, Array, Case, Net, Pick, Value

__all__ = ["CASES", "LEFT_OUT", "NUMPY", "SCIPY", "Array", "Case", "Net", "Pick", "Value"]

# Ops that rlx imports and that have no case: no work of their own at run time, or nothing to compare with.
LEFT_OUT = {
    "Constant": "a constant",
    "Optional": "nothing is computed",
    "OptionalGetElement": "nothing is computed",
    "OptionalHasElement": "nothing is computed",
    "SequenceEmpty": "nothing is computed",
    "SequenceAt": "with SplitToSequence",
    "SequenceConstruct": "with ConcatFromSequence",
    "SequenceErase": "nothing is computed",
    "SequenceInsert": "nothing is computed",
    "SequenceLength": "nothing is computed",
    "SequenceMap": "a Scan",
    "Scatter": "ScatterElements by its old name",
    "MelWeightMatrix": "a constant in every file",
    "BlackmanWindow": "a constant in every file",
    "HammingWindow": "a constant in every file",
    "HannWindow": "a constant in every file",
    "ZipMap": "with the classifiers",
    "TransposeMatMul": "FusedMatMul by its old name",
    "BiasSplitGelu": "not on onnxruntime's CPU",
    "NhwcConv": "not on onnxruntime's CPU",
    "MoE": "benchmarks of experts",
    "LinearAttention": "not in onnxruntime",
    "CausalConvWithState": "not in onnxruntime",
    "SwiGLU": "not in onnxruntime",
    "Adagrad": "not in onnxruntime",
    "Adam": "not in onnxruntime",
    "Momentum": "not in onnxruntime",
    "FlexAttention": "not in onnxruntime",
    "Gradient": "not in onnxruntime",
    "ImageDecoder": "image files",
    "CategoryMapper": "strings",
    "RegexFullMatch": "strings",
    "StringConcat": "strings",
    "StringNormalizer": "strings",
    "StringSplit": "strings",
    "Tokenizer": "strings",
    "BitCast": "not in onnxruntime",
}

# What NumPy takes for the same, where onnxruntime has no kernel, or is itself far slower.
NUMPY: Mapping[str, Callable[..., Any]] = {
    "Abs": np.abs,
    "Acos": np.arccos,
    "Acosh": np.arccosh,
    "Add": np.add,
    "And": np.logical_and,
    "Asin": np.arcsin,
    "Asinh": np.arcsinh,
    "Atan": np.arctan,
    "Atanh": np.arctanh,
    "Ceil": np.ceil,
    "Cos": np.cos,
    "Cosh": np.cosh,
    "Det": np.linalg.det,
    "Div": np.divide,
    "Equal": np.equal,
    "Exp": np.exp,
    "Floor": np.floor,
    "Greater": np.greater,
    "Less": np.less,
    "Log": np.log,
    "Max": np.maximum,
    "Min": np.minimum,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Or": np.logical_or,
    "Sign": np.sign,
    "Sin": np.sin,
    "Sinh": np.sinh,
    "Sqrt": np.sqrt,
    "Sub": np.subtract,
    "Tan": np.tan,
    "Tanh": np.tanh,
    "Where": np.where,
    "NonZero": np.nonzero,
    "Reciprocal": np.reciprocal,
}
SCIPY = {"Erf": "erf", "Sigmoid": "expit"}  # of scipy.special
