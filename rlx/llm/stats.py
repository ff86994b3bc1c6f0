"""What a generation took."""

from __future__ import annotations

from rlx.records import dataclass
from rlx.units import bytes_text

__all__ = ["Stats"]


@dataclass(frozen=True)
class Stats:
    """Tokens and seconds of one generation.

    `prompt_tokens` are those of the prompt, of which `cached_tokens` were in the cache from the last one and not
    computed; `generated_tokens` the new ones, the end of the text too. `prompt_seconds` is the time for the prompt,
    `decode_seconds` that for all tokens after the first; `first_token_seconds` is from the call to the first token.
    `decode_bytes` are the weights, keys and values that the runs for these had to read, 0 where that is not known.
    Of `guessed_tokens` (with `speculate=`) `right_tokens` were chosen by the model too.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prompt_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_bytes: int = 0
    guessed_tokens: int = 0
    right_tokens: int = 0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Tokens of the prompt that were computed, a second; 0 before there are any."""
        return (self.prompt_tokens - self.cached_tokens) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens after the first, a second; 0 before there are any."""
        return (self.generated_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes that were read a second for new tokens after the first; 0 where that is not known."""
        return self.decode_bytes / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def acceptance(self) -> float:
        """The share of guesses that were right; 0 where there were none."""
        return self.right_tokens / self.guessed_tokens if self.guessed_tokens else 0.0

    def __str__(self) -> str:
        prompt = f"{self.prompt_tokens} prompt token{'s' * (self.prompt_tokens != 1)} ({self.cached_tokens} cached)"
        new = f"{self.generated_tokens} new token{'s' * (self.generated_tokens != 1)}, {self.tokens_per_second:,.1f}/s"
        new += f" ({bytes_text(int(self.bytes_per_second))}/s read)" if self.decode_bytes else ""
        first = f"first token after {self.first_token_seconds:.3f} s"
        guessed = f"; {self.right_tokens} of {self.guessed_tokens} guesses right" if self.guessed_tokens else ""
        return f"{prompt}, {self.prompt_tokens_per_second:,.1f}/s; {first}; {new}{guessed}"
