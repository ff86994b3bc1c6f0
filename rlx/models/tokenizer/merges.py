"""SentencePiece's BPE as merges: it joins the two neighbours whose token has the best score, from left to right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlx.errors import ModelFormatError

__all__ = ["merges_of_scores"]

MAX_WORK = 1 << 28  # characters that are looked at: the square of each token's length
MAX_MERGES = 1 << 22  # pairs; the largest vocabularies have some 10^6


def merges_of_scores(tokens: Mapping[str, int], scores: Sequence[float], where: str) -> list[tuple[str, str]]:
    """All pairs of `tokens` (numbers by text) that make a third, those with the best score of that first.

    Raises `ModelFormatError` for tokens so long, or so many pairs, that this takes too much time or memory.
    """
    if sum(len(token) ** 2 for token in tokens) > MAX_WORK:
        raise ModelFormatError(f"{where}: tokenizer.ggml.tokens: the tokens are too long to be split in all ways")
    merges = []
    for token, number in tokens.items():
        score = -scores[number]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in tokens and right in tokens:
                merges.append((score, number, tokens[left], tokens[right], left, right))
        if len(merges) > MAX_MERGES:
            raise ModelFormatError(
                f"{where}: tokenizer.ggml.tokens: more than {MAX_MERGES} pairs of tokens make a third"
            )
    merges.sort()
    return [(left, right) for *_, left, right in merges]
