"""Regular expressions in the syntax of RE2, which ONNX names, in time linear in the text.

To `find` matches the text is tried from place to place. Once that has looked at much more than it found, the text is
gone through from its end: at each place that tells the instructions that may yet come to a match there. What follows
them from the left then never goes on beyond the match that it finds. (Where there are too many sets of such
instructions, the rest is tried from each place, which may take quadratic time.)

A pattern becomes a list of instructions (Thompson, Regular Expression Search Algorithm, 1968). What a text may have
come to is an ordered list of them, best first (leftmost match, first alternative), and the step from one such list to
the next by a character is kept. (https://github.com/google/re2/wiki/Syntax)
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NoReturn

from rlx.errors import OptionError
from rlx.records import dataclass

__all__ = ["Pattern", "compile_pattern"]

MOST_REPEATS = 1000  # of {m,n}, as in RE2
MOST_INSTRUCTIONS = 20_000
MOST_PARTS = 200_000
MOST_STEPS = 20_000  # that are kept
MOST_ALIVE = 1 << 20  # instructions in all sets of them that may come to a match
MOST_NESTED = 100  # groups in groups, or repetitions of one part
MOST_DEEP = 250  # parts in parts

Chars = Callable[[str], bool]
Alive = frozenset[int]
CHAR, SPLIT, ASSERT, JUMP, MATCH = range(5)


@dataclass(frozen=True)
class Instruction:
    """CHAR goes on to `next` by a character of `chars`, ASSERT where `where` holds; SPLIT to `next`, else `other`."""

    kind: int
    next: int = 0
    other: int = 0
    chars: Chars | None = None
    where: str = ""


class Pattern:
    """A compiled pattern."""

    def __init__(self, text: str) -> None:
        self.program = _Compiler(text).program
        self.steps: dict[tuple[tuple[int, ...], str, str, Alive | None], tuple[bool, tuple[int, ...]]] = {}
        self.backs: dict[tuple[Alive, str, str], Alive] = {}
        self.held = 0  # instructions in their sets
        self.before: dict[int, list[int]] = {}  # the instructions that lead to one without a character
        for at, one in enumerate(self.program):
            for to in {one.next, one.other} if one.kind == SPLIT else {one.next} if one.kind in (ASSERT, JUMP) else ():
                self.before.setdefault(to, []).append(at)

    def fullmatch(self, text: str) -> bool:
        """Whether it matches the whole text."""
        state: tuple[int, ...] = (0,)
        for at in range(len(text)):
            _, state = self._step(state, text[at - 1] if at else "", text[at], whole=True)
            if not state:
                return False
        return self._step(state, text[-1:], "", whole=True)[0]

    def match(self, text: str, start: int) -> int | None:
        """The end of the best match that begins there."""
        return self._match(text, start, None)[0]

    def _match(self, text: str, start: int, alive: list[Alive | None] | None) -> tuple[int | None, int]:
        """The end of the best match that begins there, and how far the text was looked at."""
        state: tuple[int, ...] = (0,)
        end = None
        for at in range(start, len(text) + 1):
            among = None if alive is None else alive[at]
            matched, state = self._step(state, text[at - 1] if at else "", text[at : at + 1], False, among)
            if matched:
                end = at
            if not state:
                break
        return end, at

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Begin and end of each match that isn't empty, from left to right, none overlapping the one before."""
        alive: list[Alive | None] | None = None
        at = beyond = 0
        while at < len(text):
            end, seen = self._match(text, at, alive)
            beyond += seen - (at if end is None else end)
            if alive is None and beyond > 2 * len(text):
                alive = self._alive(text)
            if end is None or end == at:
                at += 1
            else:
                yield at, end
                at = end

    def _alive(self, text: str) -> list[Alive | None]:
        """The instructions at each place that come to a match from there, None where there are too many sets."""
        found: list[Alive | None] = [None] * (len(text) + 1)
        after: Alive = frozenset()
        spent = 0
        for at in range(len(text), -1, -1):
            before, char = text[at - 1] if at else "", text[at : at + 1]
            key = (after, _kind(before), char)
            made = self.backs.get(key)
            if made is None:
                made = self._back(after, before, char)
                spent += len(made) + 1
                if spent > MOST_ALIVE:
                    break
                if self.held > MOST_ALIVE:
                    self.backs.clear()
                    self.held = 0
                self.backs[key] = made
                self.held += len(made) + 1
            found[at] = after = made
        return found

    def _back(self, after: Alive, before: str, char: str) -> Alive:
        """Those that come to a match before `char`; `after`: those that do behind it."""
        stack = [at for at, one in enumerate(self.program) if one.kind == MATCH]
        if char:
            ends = ((at, one) for at, one in enumerate(self.program) if one.kind == CHAR and one.next in after)
            stack += [at for at, one in ends if one.chars is not None and one.chars(char)]
        seen = set(stack)
        while stack:
            for at in self.before.get(stack.pop(), ()):
                one = self.program[at]
                if at not in seen and (one.kind != ASSERT or _holds(one.where, before, char)):
                    seen.add(at)
                    stack.append(at)
        return frozenset(seen)

    def _step(
        self, state: tuple[int, ...], before: str, char: str, whole: bool, alive: Alive | None = None
    ) -> tuple[bool, tuple[int, ...]]:
        """Whether it matches up to before `char` ("": the end), and the state after it, of instructions in `alive`.

        `whole`: go on beyond.
        """
        key = (state, _kind(before) + ("w" if whole else ""), char, alive)
        found = self.steps.get(key)
        if found is None:
            if len(self.steps) >= MOST_STEPS:
                self.steps.clear()
            found = self.steps[key] = self._stepped(state, before, char, whole, alive)
        return found

    def _stepped(
        self, state: tuple[int, ...], before: str, char: str, whole: bool, alive: Alive | None
    ) -> tuple[bool, tuple[int, ...]]:
        matched, after, seen = False, dict[int, None](), set[int]()
        stack = list(reversed(state))
        while stack:
            at = stack.pop()
            if at in seen or (alive is not None and at not in alive):
                continue
            seen.add(at)
            one = self.program[at]
            if one.kind == MATCH:
                matched = True
                if not whole:
                    break  # what is left is worse
            elif one.kind == CHAR:
                assert one.chars is not None
                if char and one.chars(char):
                    after[one.next] = None
            elif one.kind == SPLIT:
                stack += (one.other, one.next)
            elif one.kind == JUMP or _holds(one.where, before, char):
                stack.append(one.next)
        return matched, tuple(after)


def _kind(before: str) -> str:
    """What assertions ask of the character before."""
    return "" if not before else "\n" if before == "\n" else "a" if _is_word(before) else "."


def _is_word(char: str) -> bool:
    return char == "_" or (char.isascii() and char.isalnum())


def _holds(where: str, before: str, after: str) -> bool:
    edge = _is_word(before) != _is_word(after) if before and after else _is_word(before or after or " ")
    return {
        "start": not before,
        "end": not after,
        "line start": not before or before == "\n",
        "line end": not after or after == "\n",
        "edge": edge,
        "no edge": not edge,
    }[where]


@lru_cache(maxsize=256)
def compile_pattern(text: str) -> Pattern:
    """The pattern; `OptionError` says where its syntax is not RE2's."""
    return Pattern(text)


# ---- sets of characters


def _range(low: str, high: str) -> Chars:
    return lambda c: low <= c <= high


def _any_of(parts: list[Chars]) -> Chars:
    return lambda c: any(part(c) for part in parts)


def _none_of(chars: Chars) -> Chars:
    return lambda c: not chars(c)


def _folded(chars: Chars) -> Chars:
    return lambda c: chars(c) or chars(c.lower()) or chars(c.upper())


def _category(name: str) -> Chars:
    return lambda c: unicodedata.category(c).startswith(name)


_CLASSES: dict[str, Chars] = {"d": _range("0", "9"), "w": _is_word, "s": lambda c: c in "\t\n\f\r "}
_POSIX: dict[str, Chars] = {
    "alnum": lambda c: c.isascii() and c.isalnum(),
    "alpha": lambda c: c.isascii() and c.isalpha(),
    "ascii": lambda c: c.isascii(),
    "blank": lambda c: c in "\t ",
    "cntrl": lambda c: c < " " or c == "\x7f",
    "digit": _CLASSES["d"],
    "graph": _range("!", "~"),
    "lower": _range("a", "z"),
    "print": _range(" ", "~"),
    "punct": lambda c: "!" <= c <= "~" and not c.isalnum(),
    "space": lambda c: c in "\t\n\v\f\r ",
    "upper": _range("A", "Z"),
    "word": _is_word,
    "xdigit": lambda c: c in "0123456789abcdefABCDEF",
}
_ESCAPED = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_WHERE = {"A": "start", "z": "end", "b": "edge", "B": "no edge"}
_KINDS = {"L": "ultmo", "M": "nce", "N": "dlo", "P": "cdseifo", "S": "mcko", "Z": "slp", "C": "cfos"}
_CATEGORIES = {*_KINDS, *(first + second for first, rest in _KINDS.items() for second in rest)}

# ---- syntax; a part of a pattern is a tuple: ("char", chars), ("where", name), ("join", parts), ("or", parts),
# ("repeat", part, least, most or None, greedy)

Part = tuple[Any, ...]


class _Compiler:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth, self.emitted, self.deep = text, 0, 0, 0, 0
        self.flags = {"i": False, "m": False, "s": False, "U": False}
        self.program: list[Instruction] = []
        part = self._choice()
        if self.at < len(text):
            self._fail("an unmatched )")
        self._emit(part)
        self.program.append(Instruction(MATCH))

    def _fail(self, why: str) -> NoReturn:
        raise OptionError(f"the pattern {self.text!r:.200} is none of RE2: {why}, at character {self.at}")

    def _peek(self, ahead: str) -> bool:
        return self.text.startswith(ahead, self.at)

    def _take(self, ahead: str) -> bool:
        found = self._peek(ahead)
        self.at += len(ahead) if found else 0
        return found

    def _next(self) -> str:
        if self.at >= len(self.text):
            self._fail("it ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def _until(self, end: str) -> str:
        stop = self.text.find(end, self.at)
        if stop < 0:
            self._fail(f"{end!r} is missing")
        found = self.text[self.at : stop]
        self.at = stop + len(end)
        return found

    # ---- parsing

    def _choice(self) -> Part:
        self.depth += 1
        if self.depth > MOST_NESTED:
            self._fail(f"groups are nested more than {MOST_NESTED} deep")
        options = [self._joined()]
        while self._take("|"):
            options.append(self._joined())
        self.depth -= 1
        return options[0] if len(options) == 1 else ("or", options)

    def _joined(self) -> Part:
        parts: list[Part] = []
        while self.at < len(self.text) and not self._peek("|") and not self._peek(")"):
            parts.append(self._repeated(self._atom()))
        return ("join", parts)

    def _repeated(self, part: Part) -> Part:
        repeats = 0
        while (counts := self._counts()) is not None:
            repeats += 1
            if repeats > MOST_NESTED:
                self._fail(f"more than {MOST_NESTED} repetitions of one part")
            greedy = (not self._take("?")) != self.flags["U"]
            least, most = counts
            part = ("repeat", part, least, most, greedy)
        return part

    def _counts(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return counts
        stop = self.text.find("}", self.at)
        first, comma, last = self.text[self.at + 1 : stop].partition(",")
        digits = first.isascii() and first.isdigit() and (not last or (last.isascii() and last.isdigit()))
        if not self._peek("{") or stop < 0 or not digits or max(len(first), len(last)) > 9:
            return None  # a brace that counts nothing stands for itself
        least = int(first)
        most = int(last) if last else None if comma else least
        if max(least, most or 0) > MOST_REPEATS or (most is not None and most < least):
            self._fail(f"a count beyond {MOST_REPEATS} or downwards")
        self.at = stop + 1
        return least, most

    def _atom(self) -> Part:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return self._chars(self._set())
        if char == ".":
            return ("char", (lambda c: True) if self.flags["s"] else (lambda c: c != "\n"))
        if char in "^$":
            line = "line " if self.flags["m"] else ""
            return ("where", line + ("start" if char == "^" else "end"))
        if char in "*+?":
            self._fail(f"nothing before {char!r} to repeat")
        if char != "\\":
            return self._chars(_range(char, char))
        if self._take("Q"):
            end = self.text.find("\\E", self.at)
            quoted = self.text[self.at : end if end >= 0 else None]
            self.at = len(self.text) if end < 0 else end + 2
            return ("join", [self._chars(_range(c, c)) for c in quoted])
        if self.at < len(self.text) and self.text[self.at] in _WHERE:
            return ("where", _WHERE[self._next()])
        return self._chars(self._escape())

    def _chars(self, chars: Chars) -> Part:
        return ("char", _folded(chars) if self.flags["i"] else chars)

    def _group(self) -> Part:
        before = dict(self.flags)
        if self._take("?"):
            if self._take("P<") or (self.text[self.at + 1 : self.at + 2] not in ("=", "!") and self._take("<")):
                self._until(">")
            else:
                self._read_flags()
                if self._take(")"):
                    return ("join", [])  # flags for what follows in this group
        part = self._choice()
        if not self._take(")"):
            self._fail("a ) is missing")
        self.flags = before
        return part

    def _read_flags(self) -> None:
        on = True
        while not self._take(":") and not self._peek(")"):
            flag = self._next()
            if flag == "-":
                on = False
            elif flag in self.flags:
                self.flags[flag] = on
            else:
                self._fail(f"(?{flag} is unknown: there is no looking around and no reference back")

    def _escape(self) -> Chars:
        char = self._next()
        if char.lower() in _CLASSES:
            chars = _CLASSES[char.lower()]
            return chars if char.islower() else _none_of(chars)
        if char in "pP":
            name = self._until("}") if self._take("{") else self._next()
            name, negated = name.removeprefix("^"), name.startswith("^") != (char == "P")
            if name not in _CATEGORIES:
                self._fail(f"the class {name!r} is unknown: scripts have none here, general categories do")
            return _none_of(_category(name)) if negated else _category(name)
        literal = self._literal(char)
        return _range(literal, literal)

    def _literal(self, char: str) -> str:
        """The character that stands after a backslash."""
        if char == "x":
            digits = self._until("}") if self._take("{") else self._next() + self._next()
            try:
                return chr(int(digits, 16))
            except (ValueError, OverflowError):
                self._fail(f"{digits!r} is no character")
        if char in _ESCAPED:
            return _ESCAPED[char]
        if char.isascii() and char.isalnum():
            self._fail(f"\\{char} is unknown")
        return char

    def _set(self) -> Chars:
        negated = self._take("^")
        parts: list[Chars] = []
        while not self._peek("]") or not parts:
            if self._take("[:"):
                name = self._until(":]")
                name, inverse = name.removeprefix("^"), name.startswith("^")
                if name not in _POSIX:
                    self._fail(f"the class {name!r} is unknown")
                parts.append(_none_of(_POSIX[name]) if inverse else _POSIX[name])
                continue
            low = self._next()
            if low == "\\":
                if self.text[self.at : self.at + 1].lower() in {*_CLASSES, "p"}:
                    parts.append(self._escape())
                    continue
                low = self._literal(self._next())
            high = low
            if self._peek("-") and not self._peek("-]"):
                self.at += 1
                high = self._next()
                high = self._literal(self._next()) if high == "\\" else high
                if high < low:
                    self._fail(f"the range {low}-{high} is empty")
            parts.append(_range(low, high))
        self.at += 1
        return _none_of(_any_of(parts)) if negated else _any_of(parts)

    # ---- instructions

    def _add(self, one: Instruction) -> int:
        if len(self.program) >= MOST_INSTRUCTIONS:
            raise OptionError(f"the pattern {self.text!r:.200} takes more than {MOST_INSTRUCTIONS} instructions")
        self.program.append(one)
        return len(self.program) - 1

    def _emit(self, part: Part) -> None:
        """Appends the instructions of a part; what follows it is the next one."""
        self.emitted += 1  # parts that have no instructions are gone through as often as others
        if self.emitted > MOST_PARTS:
            raise OptionError(f"the pattern {self.text!r:.200} repeats more than {MOST_PARTS} parts")
        self.deep += 1
        if self.deep > MOST_DEEP:
            raise OptionError(f"the pattern {self.text!r:.200} has parts nested more than {MOST_DEEP} deep")
        match part:
            case ("char", chars):
                self._add(Instruction(CHAR, len(self.program) + 1, chars=chars))
            case ("where", where):
                self._add(Instruction(ASSERT, len(self.program) + 1, where=str(where)))
            case ("join", [*parts]):
                for one in parts:
                    self._emit(one)
            case ("or", [*options]):
                self._emit_options(options)
            case ("repeat", tuple() as inner, int() as least, (int() | None) as most, greedy):
                for _ in range(least):
                    self._emit(inner)
                for _ in range(1 if most is None else most - least):
                    self._skippable(inner, bool(greedy), back=most is None)
        self.deep -= 1

    def _skippable(self, inner: Part, greedy: bool, back: bool) -> None:
        """The part or nothing; `back`: and then again. Copies of x{0,3} one after the other are x?x?x?."""
        start = self._add(Instruction(SPLIT))
        self._emit(inner)
        if back:
            self._add(Instruction(JUMP, start))
        into, beyond = start + 1, len(self.program)
        self.program[start] = Instruction(SPLIT, into, beyond) if greedy else Instruction(SPLIT, beyond, into)

    def _emit_options(self, options: list[Part]) -> None:
        ends = []
        for number, option in enumerate(options):
            last = number == len(options) - 1
            split = -1 if last else self._add(Instruction(SPLIT))
            self._emit(option)
            if not last:
                ends.append(self._add(Instruction(JUMP)))
                self.program[split] = Instruction(SPLIT, split + 1, len(self.program))
        for end in ends:
            self.program[end] = Instruction(JUMP, len(self.program))
