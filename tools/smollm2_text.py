"""Writes tests/llm/smollm2.npz: the greedy text of SmolLM2-135M in f32, on its weights decoded from Q4_1.

FOLDER is where the GGUF file of rlx/demo/models.json lies; it needs torch, transformers, gguf and accelerate.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

OUT = Path(__file__).parents[1] / "tests" / "llm" / "smollm2.npz"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENS, EVERY = 128, 64
PROMPTS = (
    "The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):\n",
    "The three laws of thermodynamics state that", "Dear Sir or Madam,\n\nI am writing to", "Water boils at",
    "In 1969, the first", "SELECT name FROM users WHERE", "To make bread you need flour, water, salt and",
    "The largest planet in our solar system is",
)  # fmt: skip


def main(folder: str) -> None:
    """For each prompt: its tokens with 128 more, and every 64th logit after the last but one."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    found = {}
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
        with torch.no_grad():
            text = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
            logits = model(text).logits[0, -2, ::EVERY]
        found[f"ids{number}"], found[f"logits{number}"] = text[0].numpy().astype(np.int32), logits.numpy()
        found[f"prompt{number}"] = ids[0].numpy().astype(np.int32)
    np.savez_compressed(OUT, **found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    main(parser.parse_args().folder)
