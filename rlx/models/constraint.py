"""Output that has a form: a JSON schema, a regular expression or a grammar says which tokens may come next.

    forms = Constraints(tokenizer)
    form = forms.json_schema({"type": "object", ...})
    while not form.stopped:
        token = ...  # sampled with Row(mask=form.mask())
        form.accept(token)

The masks are those of `llguidance` (the extra `llm`); the graph applies them (`rlx.models.sampling`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.errors import OptionError
from rlx.models.tokenizer.library import needed, translated
from rlx.models.tokenizer.tokenizer import Tokenizer

__all__ = ["Constraint", "Constraints"]

MAX_FORM = 1 << 20  # characters of a schema, pattern or grammar
FUEL = 200_000  # work on what a form is made of: with it the slowest that we found take 0.4 s, with the default 3.6 s


def _refused(what: str) -> AbstractContextManager[None]:
    return translated(what, library="llguidance", kind=OptionError)


class _Words:
    """A tokenizer as llguidance asks for it: the bytes of all tokens, and a function from text to tokens."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, count: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_ids[0], tokenizer.bos_id
        known = [tokenizer.token_bytes(token, special=True) for token in range(len(tokenizer))]
        # Logits often have more places than there are tokens: none of these may come.
        self.tokens = known + [b""] * (count - len(known))
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._by_bytes: dict[bytes, int] | None = None
        self._most = 1

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of a text that goes on from another: no space may be put before it, as encoders of texts do."""
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        ids = self._tokenizer.encode(plain)
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        return ids if b"".join(self.tokens[i] for i in ids) == data else self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        """Tokens that spell the bytes, each the longest that does; the bytes that none does are left out."""
        if self._by_bytes is None:
            special = set(self.special_token_ids)
            self._by_bytes = {b: i for i, b in enumerate(self.tokens) if b and i not in special}
            self._most = max(map(len, self._by_bytes), default=1)
        ids, at = [], 0
        while at < len(data):
            size = next((n for n in range(self._most, 0, -1) if data[at : at + n] in self._by_bytes), 0)
            if size:
                ids.append(self._by_bytes[data[at : at + size]])
            at += size or 1
        return ids


class Constraints:
    """Makes constraints for a tokenizer; made once, as it looks at all tokens.

    `vocab`: how many places logits have, where that is more than there are tokens. Raises `DeviceUnavailable` where
    llguidance is missing, `OptionError` for a tokenizer without a token that ends an answer.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab: int | None = None) -> None:
        self._library = needed("llguidance", "output that has a form")
        self.vocab = len(tokenizer) if vocab is None else vocab
        if type(self.vocab) is not int or self.vocab < len(tokenizer):
            raise OptionError(f"Constraints: vocab={vocab!r}: expected at least {len(tokenizer)}, the number of tokens")
        if not tokenizer.eos_ids:
            raise OptionError(f"Constraints: {tokenizer!r} has no token that ends an answer")
        with _refused("Constraints"):
            self._tokenizer = self._library.LLTokenizer(
                _Words(tokenizer, self.vocab), n_vocab=self.vocab, eos_token=list(tokenizer.eos_ids)
            )
            self._limits = self._library.LLParserLimits(initial_lexer_fuel=FUEL)

    def json_schema(self, schema: Mapping[str, Any] | str | bool, *, whitespace: bool = False) -> Constraint:
        """JSON that fits a schema; `whitespace`: also with spaces and lines between its parts. Raises `OptionError`.

        What of JSON Schema is supported is what llguidance supports; other keywords are refused.
        """
        try:
            data = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(dict(data) if isinstance(data, Mapping) else data)
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"json_schema: is no JSON: {error}") from None
        if data is True:
            text = "{}"
        elif not isinstance(data, Mapping):
            raise OptionError(f"json_schema: expected an object, got {text[:60]}")
        self._check(text, "json_schema")
        with _refused("json_schema"):
            grammar = self._library.JsonCompiler(whitespace_flexible=whitespace).compile(text, check=False)
        return self._made(grammar, "json_schema")

    def regex(self, pattern: str) -> Constraint:
        """Text that a regular expression matches as a whole (the syntax of Rust's `regex`). Raises `OptionError`."""
        self._check(pattern, "regex")
        return self._made(self._library.LLMatcher.grammar_from_regex(pattern), "regex")

    def grammar(self, text: str) -> Constraint:
        """Text of a grammar, in Lark's syntax or llama.cpp's GBNF. Raises `OptionError`."""
        self._check(text, "grammar")
        with _refused("grammar"):
            grammar = self._library.grammar_from("gbnf", text)
        return self._made(grammar, "grammar")

    def choice(self, texts: Sequence[str]) -> Constraint:
        """One of some texts. Raises `OptionError`."""
        if isinstance(texts, str) or not texts or not all(isinstance(t, str) for t in texts):
            raise OptionError(f"choice: expected a list of texts, got {texts!r:.80}")
        rule = " | ".join(json.dumps(text) for text in texts)
        self._check(rule, "choice")
        return self._made(self._library.LLMatcher.grammar_from_lark(f"start: {rule}"), "choice")

    def _check(self, text: str, what: str) -> None:
        if not isinstance(text, str):
            raise OptionError(f"{what}: expected a str, got {type(text).__name__}")
        if len(text) > MAX_FORM:
            raise OptionError(f"{what}: {len(text)} characters are more than the limit of {MAX_FORM}")

    def _made(self, grammar: str, what: str) -> Constraint:
        with _refused(what):
            matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise OptionError(f"{what}: {' '.join(str(matcher.get_error()).split())[:500]}")
        return Constraint(matcher, self.vocab, what)


class Constraint:
    """Where in its form an answer is: which tokens may come next, and whether it may or must end here."""

    def __init__(self, matcher: Any, vocab: int, what: str) -> None:
        self._matcher, self._vocab, self._what = matcher, vocab, what

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def stopped(self) -> bool:
        """Whether the answer has ended: no token may follow."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> NDArray[np.uint32]:
        """The tokens that may come next: bit t % 32 of word t // 32 for token t."""
        words = np.zeros(-(-self._vocab // 32), np.uint32)
        with _refused(self._what):
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        return words

    def accept(self, token: int) -> None:
        """Goes on by a token. Raises `OptionError` for one that may not come here; the state stays as it was."""
        if not 0 <= token < self._vocab or self.stopped or self._matcher.validate_tokens([token]) != 1:
            raise OptionError(f"{self._what}: token {token} may not come here")
        self._matcher.consume_token(token)
        self._check()

    def forced(self) -> list[int]:
        """Tokens that come next whatever is sampled; they are not accepted yet."""
        return list(self._matcher.compute_ff_tokens())

    def copy(self) -> Constraint:
        """Another that goes on from here by itself."""
        return Constraint(self._matcher.deep_copy(), self._vocab, self._what)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise OptionError(f"{self._what}: {' '.join(str(self._matcher.get_error()).split())[:500]}")
