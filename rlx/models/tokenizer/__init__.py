"""Tokenisers: from text to the numbers of tokens that a model reads, and back.

    tokenizer = load("model.gguf")  # or a folder with tokenizer.json, or the metadata of a GGUF file
    ids = tokenizer.encode("Hello")
    text = tokenizer.decode(ids)

Needs the library `tokenizers`, of the extra `llm`.
"""

from __future__ import annotations

from rlx.models.tokenizer.loading import load
from rlx.models.tokenizer.pieces import Decoder
from rlx.models.tokenizer.tokenizer import Tokenizer

__all__ = ["Decoder", "Tokenizer", "load"]
