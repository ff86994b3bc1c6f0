"""docs/onnx-support.md and docs/onnx-node-tests.md say what the code does."""

from __future__ import annotations

import onnx
import onnx_node_tests
import onnx_support
import pytest

from rlx.importers.onnx.mapping import OLDEST_OPSET, UNCHANGED, op_table


def test_the_table_of_ops_is_current() -> None:
    """Run tools/onnx_support.py after a change of what is supported."""
    assert onnx_support.DOCUMENT.read_text() == onnx_support.page()
    assert len(op_table()) > 240


def test_ops_of_older_opsets_are_those_that_have_not_changed_since() -> None:
    """Each stands under the opset that ONNX's schemas give for it, and none of ours is left out."""
    listed = {op: since for since, ops in UNCHANGED.items() for op in ops.split()}
    ours = {op for domain, op in op_table() if not domain} - {"Loop"}  # experimental then
    found = {}
    for op in ours:
        try:
            schema = onnx.defs.get_schema(op, OLDEST_OPSET, "")
        except onnx.defs.SchemaError:
            continue
        if schema.since_version < OLDEST_OPSET and not schema.deprecated:
            found[op] = schema.since_version
    assert listed == found


@pytest.mark.slow
def test_the_counts_of_node_tests_are_current() -> None:
    """The numbers of cases that pass, here and in onnxruntime, are those of this tree and the installed packages."""
    assert onnx_node_tests.DOCUMENT.read_text() == onnx_node_tests.page()
