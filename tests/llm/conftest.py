"""A small model for the tests of language models, which need the library `tokenizers`, of the extra `llm`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from small_decoders import write_gguf

import rlx
from rlx.llm.model import LanguageModel

CONFIGS = json.loads((Path(__file__).parents[1] / "decoders" / "configs.json").read_text())

TEMPLATE = (
    "{% for m in messages %}[{{ m.role[:1] }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of the llama family with 96 tokens of one character each, and a context of 256."""
    case = CONFIGS["llama"]
    return write_gguf(tmp_path_factory.mktemp("llm") / "tiny.gguf", case["config"], case["shapes"])


@pytest.fixture(scope="session")
def llm(path: Path) -> LanguageModel:
    """It, in runs of at most 32 tokens."""
    return rlx.load_llm(path, device="cpu", prefill=32)


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a chat template."""
    case = CONFIGS["llama"]
    file = tmp_path_factory.mktemp("llm") / "talking.gguf"
    return write_gguf(file, case["config"], case["shapes"], chat_template=TEMPLATE)
