"""Writes the tables that `rlx.tables` reads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy as np

from rlx.errors import OptionError
from rlx.tables import HEAD, MOST, SCALARS, Schema

__all__ = ["write_tables"]

IDENTITY: tuple[Any, ...] = (None, object.__hash__)  # the hash of classes whose objects are never merged

Parts = Callable[[Any], tuple[str, tuple[Any, ...]] | None]  # an object -> its record's name and the fields' values


def write_tables(value: Any, kinds: str, schema: Schema, parts: Parts) -> bytes:
    """The bytes that `read_tables` reads.

    `parts` may give another record for an object; where it gives None, the fields of the object's class are stored.
    Raises `OptionError` for what the schema has no place for.
    """
    writer = _Writer(schema, parts)
    writer.item(value, kinds)
    number, refs, listed = len(writer.scalars), list[int](), []
    for group in _groups(writer.items):
        for item in group:
            item.number, number = number, number + 1
        refs += _columns(schema, group[0].kind, group)
        listed.append([group[0].kind, len(group)])
    head = json.dumps({"scalars": writer.scalars, "kinds": listed}).encode()
    return HEAD.pack(len(head), len(refs)) + head + np.array(refs, "<u4").tobytes()


def _groups(items: list[_Item]) -> Iterator[list[_Item]]:
    """The objects in groups of one kind, each object after its parts; few groups, because each costs time to read."""
    left, readers = Counter(item.kind for item in items), dict[_Item, list[_Item]]()
    ready: dict[str, list[_Item]] = {}
    below: dict[str, set[str]] = {kind: set() for kind in left}  # a kind -> all kinds that its objects may be made of
    for item in items:
        wanted = {part for part in item.parts if part.number < 0}
        below[item.kind].update(part.kind for part in wanted)
        item.waits = len(wanted)
        for part in wanted:
            readers.setdefault(part, []).append(item)
        if not wanted:
            ready.setdefault(item.kind, []).append(item)
    for middle, needed in below.items():
        for kinds in below.values():
            kinds |= needed if middle in kinds else set()
    while ready:
        free = [kind for kind in ready if not any(left[other] and kind not in below[other] for other in below[kind])]
        kind = max(free, key=lambda kind: len(ready[kind]) / left[kind])
        group = ready.pop(kind)
        left[kind] -= len(group)
        yield group
        for item in (reader for part in group for reader in readers.get(part, ())):
            item.waits -= 1
            if not item.waits:
                ready.setdefault(item.kind, []).append(item)


def _columns(schema: Schema, kind: str, group: list[_Item]) -> list[int]:
    """All references of the objects of a kind."""
    rows = [[part.number for part in item.parts] for item in group]
    if not schema.is_open(kind):
        return [number for column in zip(*rows, strict=True) for number in column]
    if kind[0] != "{":
        return [*map(len, rows), *(number for row in rows for number in row)]
    halves = [number for half in (0, 1) for row in rows for number in row[half::2]]
    return [*(len(row) // 2 for row in rows), *halves]


class _Item:
    """An object to be written, after its parts."""

    def __init__(self, kind: str, parts: tuple[_Item, ...], number: int = -1) -> None:
        self.kind, self.parts = kind, parts
        self.number = number  # -1: not known yet
        self.waits = 0  # for so many parts


class _Writer:
    def __init__(self, schema: Schema, parts: Parts) -> None:
        self.schema, self.parts = schema, parts
        self.items: list[_Item] = []
        self.scalars: list[Any] = []
        self.shown: dict[str, _Item] = {}  # scalars by kind and text
        self.known: dict[tuple[int, str], tuple[Any, _Item]] = {}  # by id and kinds; the thing is kept for its id
        self.records: dict[int, tuple[Any, _Item]] = {}  # by id
        self.equal: dict[tuple[str, tuple[_Item, ...]], _Item] = {}  # what is compared by value

    def item(self, value: Any, kinds: str) -> _Item:
        if (id(value), kinds) in self.known:
            return self.known[id(value), kinds][1]
        allowed = self.schema.allowed(kinds)
        made: _Item | None
        if SCALARS.get(type(value)) in allowed:
            made = self.scalar(value)
        elif type(value) in (tuple, list, dict):
            made = self.container(value, allowed)
        else:
            made = self.record(value, allowed)
        if made is None:
            name = type(value).__name__
            raise OptionError(f"save: a {name} can't be stored where {kinds} belongs: {value!r:.80}")
        self.known[id(value), kinds] = value, made
        return made

    def scalar(self, value: Any) -> _Item:
        kind = SCALARS[type(value)]
        found = self.shown.get(f"{kind} {value!r}")
        if found is None:
            if type(value) is int and abs(value) >= MOST:
                raise OptionError(f"save: an int of more than 64 bits can't be stored: {value:#x}")
            found = self.shown[f"{kind} {value!r}"] = _Item(kind, (), len(self.scalars))
            self.scalars.append(value)
        return found

    def container(self, value: Any, allowed: frozenset[str]) -> _Item | None:
        bracket = "(" if type(value) is tuple else "[" if type(value) is list else "{"
        for kind in sorted(allowed):
            if kind[0] != bracket:
                continue
            columns, is_open = self.schema.columns(kind), self.schema.is_open(kind)
            if not is_open and len(columns) != len(value):
                continue
            things = [thing for pair in value.items() for thing in pair] if bracket == "{" else value
            turns = cycle(columns) if is_open else columns
            parts = tuple(self.item(thing, kinds) for thing, kinds in zip(things, turns, strict=False))
            return self.put(kind, parts, by_value=bracket == "(")
        return None

    def record(self, value: Any, allowed: frozenset[str]) -> _Item | None:
        if id(value) not in self.records:
            kind, values = self.parts(value) or (type(value).__name__, None)
            fields = self.schema.records.get(kind)
            if fields is None:
                return None
            of = values if values is not None else [getattr(value, name) for name in fields]
            parts = tuple(self.item(v, k) for v, k in zip(of, fields.values(), strict=True))
            by_value = type(value).__hash__ not in IDENTITY
            self.records[id(value)] = value, self.put(kind, parts, by_value)
        made = self.records[id(value)][1]
        return made if made.kind in allowed else None

    def put(self, kind: str, parts: tuple[_Item, ...], by_value: bool) -> _Item:
        """A new object; with `by_value` an equal earlier one, if there is one."""
        if by_value and (kind, parts) in self.equal:
            return self.equal[kind, parts]
        made = self.equal[kind, parts] = _Item(kind, parts)
        self.items.append(made)
        return made
