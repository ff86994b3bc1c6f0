"""docs/onnx-support.md says what the code does."""

from __future__ import annotations

import onnx_support
import pytest

from rlx.importers.onnx.mapping import op_table


def test_the_table_of_ops_in_the_document_is_current() -> None:
    """Run tools/onnx_support.py after a change of what is supported."""
    text = onnx_support.DOCUMENT.read_text()
    listed = text[: text.index(onnx_support.COUNTS)]
    assert listed == "\n".join([onnx_support.HEAD, *onnx_support.ops_table()]) + "\n"
    assert len(op_table()) > 240


@pytest.mark.slow
def test_the_counts_in_the_document_are_current() -> None:
    """The numbers of cases that pass, here and in onnxruntime, are those of this tree and the installed packages."""
    assert onnx_support.DOCUMENT.read_text() == onnx_support.page()
