"""docs/onnx-support.md and docs/onnx-node-tests.md say what the code does."""

from __future__ import annotations

import onnx_node_tests
import onnx_support
import pytest

from rlx.importers.onnx.mapping import op_table


def test_the_table_of_ops_is_current() -> None:
    """Run tools/onnx_support.py after a change of what is supported."""
    assert onnx_support.DOCUMENT.read_text() == onnx_support.page()
    assert len(op_table()) > 240


@pytest.mark.slow
def test_the_counts_of_node_tests_are_current() -> None:
    """The numbers of cases that pass, here and in onnxruntime, are those of this tree and the installed packages."""
    assert onnx_node_tests.DOCUMENT.read_text() == onnx_node_tests.page()
