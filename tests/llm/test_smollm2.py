"""SmolLM2-135M in Q4_1: its greedy text is that of an f32 evaluation (tools/smollm2_text.py wrote what is expected)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.llm.model import LanguageModel

EXPECTED = Path(__file__).parent / "smollm2.npz"
EVERY = 64

pytestmark = pytest.mark.models


@pytest.fixture(scope="module")
def smollm2(model_path: Callable[[str], Path]) -> LanguageModel:
    return rlx.load_llm(model_path("smollm2"), context=512, device="cpu")


@pytest.fixture(scope="module")
def expected() -> Any:
    return np.load(EXPECTED)


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(10))
def test_the_greedy_text_is_that_of_f32(number: int, smollm2: LanguageModel, expected: Any) -> None:
    """128 tokens after a prompt are equal, and the logits of the last within 1e-4."""
    prompt, ids = (expected[f"{name}{number}"].tolist() for name in ("prompt", "ids"))
    made = smollm2.generate(prompt, 128, ignore_eos=True)
    list(made)
    assert prompt + made.ids == ids
    smollm2.reset()
    with smollm2.alone():
        slot, _ = smollm2.begin(None, [])
        logits = smollm2.extend(slot, ids[:-1], "logits")[-1, ::EVERY]
    np.testing.assert_allclose(logits, expected[f"logits{number}"], rtol=1e-4, atol=1e-4)


def test_a_chat(smollm2: LanguageModel) -> None:
    """The answer of the model's template ends by itself, and the next turn computes only what is new."""
    messages = [{"role": "user", "content": "What is the capital of Italy?"}]
    made = smollm2.chat(messages, 60)
    answer = "".join(made)
    assert made.finish_reason == "stop"
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And of France?"}]
    more = smollm2.chat(messages, 5)
    list(more)
    assert more.stats.cached_tokens > made.stats.prompt_tokens
