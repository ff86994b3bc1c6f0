"""The bytes of tokens: what a token adds to a text, and texts put together from them, also token by token."""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import overload

from rlx.errors import OptionError
from rlx.records import dataclass

__all__ = ["SPACE", "Decoder", "Pieces", "Texts", "byte_level", "spaced", "word_pieces"]

SPACE = "\u2581"  # stands for a space in the tokens of SentencePiece
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_table() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies (GPT-2): visible ones for themselves."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(others)}


BYTES = _byte_table()


def utf8(text: str) -> bytes:
    """UTF-8; what came in as bytes that are none (`surrogateescape`) goes out as these."""
    return text.encode("utf-8", errors="surrogateescape")


def byte_level(token: str) -> bytes:
    """The bytes of a token in which each character stands for one."""
    try:
        return bytes([BYTES[char] for char in token])
    except KeyError:
        return utf8(token)


def spaced(token: str) -> bytes:
    """The bytes of a token of SentencePiece: ▁ is a space, <0x0A> a byte."""
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else utf8(token.replace(SPACE, " "))


def word_pieces(token: str) -> bytes:
    """The bytes of a token of WordPiece: ##x goes on with a word, all others begin one."""
    return utf8(token[2:] if token.startswith("##") else " " + token)


class Texts(Sequence[str]):
    """Strings that lie one after another in memory: a list of some 10^5 short ones takes five times as much."""

    def __init__(self, texts: Iterable[str]) -> None:
        parts = [text.encode("utf-8", errors="surrogatepass") for text in texts]
        self._data, self._ends = b"".join(parts), array("Q", accumulate(map(len, parts)))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(index)
        return self._data[self._ends[at - 1] if at else 0 : self._ends[at]].decode("utf-8", errors="surrogatepass")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Texts):
            return NotImplemented
        return self._data == other._data and self._ends == other._ends

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Pieces:
    """The bytes of each token.

    `tokens` are the texts of the vocabulary, `plain` the numbers of those that stand for themselves (added ones) and
    `special` of those that are no text at all; `piece` gives the bytes of all others. `strip` is true where the first
    space of a text was put there by the tokeniser.
    """

    tokens: Sequence[str]
    plain: frozenset[int]
    special: frozenset[int]
    piece: Callable[[str], bytes]
    strip: bool

    def __len__(self) -> int:
        return len(self.tokens)

    def bytes_of(self, token: int, *, special: bool | Collection[int] = False) -> bytes:
        """What a token adds to a text; nothing for a special one, unless `special` is true or has it.

        Raises `OptionError`.
        """
        if not 0 <= token < len(self.tokens):
            raise OptionError(f"there is no token {token}: expected 0 to {len(self.tokens) - 1}")
        if token in self.special:
            shown = special if isinstance(special, bool) else token in special
            return utf8(self.tokens[token]) if shown else b""
        text = self.tokens[token]
        return utf8(text) if token in self.plain else self.piece(text)


class Decoder:
    """Text of tokens that come one by one: what is given out is whole characters, and never taken back.

    Bytes that are no UTF-8 come out as U+FFFD, as soon as it is sure that no character can become of them.
    """

    def __init__(self, pieces: Pieces, *, special: bool | Collection[int] = False, continued: bool = False) -> None:
        self._pieces, self._special = pieces, special
        self._strip = pieces.strip and not continued
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that is sure after one more token; often empty in the midst of a character."""
        return self._utf8.decode(self._bytes(token))

    def finish(self) -> str:
        """The text of what is left, a part of a character as U+FFFD. The decoder then begins anew, going on a text."""
        return self._utf8.decode(b"", final=True)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of all tokens, to the end."""
        return self._utf8.decode(b"".join(map(self._bytes, tokens)), final=True)

    def _bytes(self, token: int) -> bytes:
        data = self._pieces.bytes_of(token, special=self._special)
        if self._strip and data and token not in self._pieces.special:
            self._strip = False
            return data.removeprefix(b" ")
        return data
