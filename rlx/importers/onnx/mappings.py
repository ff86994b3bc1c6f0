"""All modules of mapping functions; importing this one fills the table of ops."""

from __future__ import annotations

from rlx.importers.onnx import (
    mapping_control,
    mapping_layout,
    mapping_loss,
    mapping_math,
    mapping_ml,
    mapping_more,
    mapping_quant,
    mapping_sequence,
    mapping_shape,
    mapping_trees,
    mapping_window,
)

__all__ = ["TABLES"]

TABLES = (
    mapping_control,
    mapping_layout,
    mapping_loss,
    mapping_math,
    mapping_ml,
    mapping_more,
    mapping_quant,
    mapping_sequence,
    mapping_shape,
    mapping_trees,
    mapping_window,
)
