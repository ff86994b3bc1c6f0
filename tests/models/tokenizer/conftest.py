"""These tests need the library `tokenizers`, of the extra `llm`."""

from __future__ import annotations

import pytest

pytest.importorskip("tokenizers")
