"""All modules of mapping functions: importing this one fills the table of ops."""

# ruff: noqa: F401  # modules are imported for what they register

from __future__ import annotations

from rlx.importers.onnx.mappings import (
    attention,
    control,
    layout,
    loss,
    math,
    microsoft,
    microsoft_attention,
    microsoft_experts,
    ml,
    more,
    quant,
    resize,
    sequence,
    shape,
    signal,
    text,
    trees,
    window,
)
