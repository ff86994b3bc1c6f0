"""All modules of mapping functions; importing this one fills the table of ops."""

from __future__ import annotations

from rlx.importers.onnx import (
    mapping_attention,
    mapping_control,
    mapping_layout,
    mapping_loss,
    mapping_math,
    mapping_microsoft,
    mapping_microsoft_attention,
    mapping_microsoft_experts,
    mapping_ml,
    mapping_more,
    mapping_quant,
    mapping_resize,
    mapping_sequence,
    mapping_shape,
    mapping_signal,
    mapping_text,
    mapping_trees,
    mapping_window,
)

__all__ = ["TABLES"]

TABLES = (
    mapping_attention,
    mapping_control,
    mapping_layout,
    mapping_loss,
    mapping_math,
    mapping_microsoft,
    mapping_microsoft_attention,
    mapping_microsoft_experts,
    mapping_ml,
    mapping_more,
    mapping_quant,
    mapping_resize,
    mapping_sequence,
    mapping_shape,
    mapping_signal,
    mapping_text,
    mapping_trees,
    mapping_window,
)
