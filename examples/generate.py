"""Chat with a language model on the terminal: a GGUF file, or a folder with safetensors and a config.json.

usage: python examples/generate.py MODEL [QUESTION ...]     without questions they are read from stdin, a line each
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import rlx


def main(model: str, questions: Iterable[str]) -> None:
    """Answers each question, knowing those before; what was said before is in the cache and not computed again."""
    llm = rlx.load_llm(model)
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, max_tokens=256)
        pieces = []
        for piece in answer:
            print(piece, end="", flush=True)
            pieces.append(piece)
        messages.append({"role": "assistant", "content": "".join(pieces)})
        print(f"\n[{answer.stats}]")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:] or map(str.strip, sys.stdin))
