"""Search sentences by meaning, with MiniLM in 8 bits: which of these lines answers the question best?

usage: python examples/sentence_search.py [QUESTION]

After `rlx fetch minilm-int8 minilm-tokenizer`; it needs `tokenizers` (the extra llm).
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

import rlx
from rlx.models.tokenizer import load as load_tokenizer

LINES = [
    "The bakery on the corner opens at six in the morning.",
    "Trains to the coast leave from platform four.",
    "A cat sleeps for most of the day.",
    "Bread needs flour, water, salt and time.",
    "The library lends films as well as books.",
    "Swimming is not allowed when the red flag flies.",
]


class Sentences:
    """Vectors of sentences: texts -> f32[n, 384], each of length 1."""

    def __init__(self) -> None:
        self.tokenizer = load_tokenizer(rlx.demo.path("minilm-tokenizer").parent)
        dims = {"batch": (1, 64), "sequence": (1, 128)}
        self.model = rlx.load(rlx.demo.path("minilm-int8"), dims=dims, device="cpu")

    def __call__(self, texts: list[str]) -> NDArray[np.float32]:
        rows = [self.tokenizer.encode(text, ends=True)[:128] for text in texts]
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = tokens
        mask = (ids != 0).astype(np.int64)
        out = self.model(input_ids=ids, attention_mask=mask, token_type_ids=np.zeros_like(ids))
        hidden = out["last_hidden_state"]  # [n, tokens, 384]
        means = (hidden * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
        vectors: NDArray[np.float32] = means / np.linalg.norm(means, axis=1, keepdims=True)
        return vectors


def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else "When can I buy rolls for breakfast?"
    embed = Sentences()
    likeness = (embed([question]) @ embed(LINES).T)[0]
    for place in np.argsort(-likeness)[:3]:
        print(f"{likeness[place]:.2f}  {LINES[place]}")


if __name__ == "__main__":
    try:
        main()
    except (rlx.errors.NameNotFound, rlx.errors.DeviceUnavailable) as missing:  # a model, or a package
        sys.exit(str(missing))
