"""Values of declared kinds as bytes: nothing but tables, and reading them calls nothing that they name.

    0   u32 bytes of the head, u32 number of references (little-endian)
    8   the head, in JSON: {"scalars": [...], "kinds": [[kind, count], ...]}
    ... the references, u32 each

Objects are numbered: the scalars, then `count` of each kind in turn; the last one is the value. A reference is the
number of an earlier object, so that there are no cycles. Of each kind there is, one after another:

    a record, (X,Y)   for each field a column with one reference an object
    (X), [X]          the lengths, then the items of all: tuples and lists of any length
    {K:V}             the lengths, then all keys, then all values

A `Schema` says which records there are, and of which kinds each field may be; what is anything else is refused.
`rlx.table_writer` writes them.
"""

from __future__ import annotations

import functools
import json
import struct
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import accumulate, repeat
from typing import Any

import numpy as np

from rlx.errors import ModelFormatError, RlxError

__all__ = ["HEAD", "SCALARS", "Schema", "read_tables"]

HEAD = struct.Struct("<II")
SCALARS: dict[type, str] = {type(None): "none", bool: "bool", int: "int", float: "float", str: "str"}
MOST = 1 << 64  # no int is as large

Make = Callable[..., Any]


def split(text: str, mark: str) -> list[str]:
    """The parts of a text between marks that are in no brackets."""
    parts, start = [], 0
    pieces = text.split(mark)
    for stop in range(1, len(pieces) + 1):
        part = mark.join(pieces[start:stop])
        if sum(map(part.count, "([{")) == sum(map(part.count, ")]}")):
            parts.append(part)
            start = stop
    return [*parts, mark.join(pieces[start:])] if start < len(pieces) else parts


class Schema:
    """Which records there are, from a text that lists modules, and below each, indented, its classes:

        Name field:kinds field:kinds ...

    Kinds are "int", "float", "bool", "str", "none", records, containers, and `names`, which stand for such a list;
    "|" is between those that a field may be of. The text goes on in lines that are indented twice.
    """

    def __init__(self, text: str, names: Mapping[str, str]) -> None:
        self.names = names
        self.modules: dict[str, str] = {}  # of the records
        self.records: dict[str, dict[str, str]] = {}  # their fields
        module = ""
        for line in text.replace("\n        ", " ").split("\n"):
            name, *fields = line.split() or [""]
            if line.startswith(" "):
                self.modules[name] = module
                pairs = (field.split(":", 1) for field in fields)
                self.records[name] = {sys.intern(field): kinds for field, kinds in pairs}  # else setting them is slow
            else:
                module = name
        self.allowed = functools.lru_cache(4096)(self._allowed)
        self.columns = functools.lru_cache(4096)(self._columns)

    def _allowed(self, kinds: str) -> frozenset[str]:
        """The kinds of a list as "int|Size"."""
        listed = split(kinds, "|")
        if len(listed) > 1:
            return frozenset().union(*map(self.allowed, listed))
        return self.allowed(self.names[kinds]) if kinds in self.names else frozenset((kinds,))

    def _columns(self, kind: str) -> tuple[str, ...]:
        """The kinds of the fields of a record, the items of a tuple of fixed length, or of what a container holds."""
        if kind in self.records:
            return tuple(self.records[kind].values())
        if kind[0] + kind[-1] not in ("()", "[]", "{}"):
            raise ModelFormatError(f"there is no kind {kind!r}")
        return tuple(split(kind[1:-1], ":" if kind[0] == "{" else ","))

    def is_open(self, kind: str) -> bool:
        """Whether a kind is a container of any length."""
        return kind not in self.records and (kind[0] != "(" or len(self.columns(kind)) == 1)


# ---- reading


def read_tables(data: bytes, kinds: str, schema: Schema, makers: Mapping[str, Make]) -> tuple[Any, int]:
    """The value, which is of one of `kinds`, and the bytes that it takes from the start of `data`.

    Records are filled in field by field, without their `__init__`; those in `makers` are what that function gives for
    their fields. Raises `ModelFormatError`.
    """
    try:
        return _Reader(data, schema, makers).read(kinds)
    except ModelFormatError:
        raise
    except (RlxError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ModelFormatError(f"tables are damaged: {error!r}") from error
    except (struct.error, RecursionError) as error:
        raise ModelFormatError(f"tables are damaged: {error}") from error


class _Reader:
    def __init__(self, data: bytes, schema: Schema, makers: Mapping[str, Make]) -> None:
        self.schema, self.makers = schema, makers
        length, count = HEAD.unpack_from(data)
        first = HEAD.size + length
        self.end = first + 4 * count
        if len(data) < self.end:
            raise ModelFormatError("tables are cut off")
        self.head = json.loads(data[HEAD.size : first])
        self.refs: list[int] = np.frombuffer(data, "<u4", count, first).tolist()
        self.at = 0
        self.objects: list[Any] = list(self.head["scalars"])
        self.kinds = [SCALARS[type(scalar)] for scalar in self.objects]
        self.object_at, self.kind_of = self.objects.__getitem__, self.kinds.__getitem__
        if not all(-MOST < scalar < MOST for scalar in self.objects if type(scalar) is int):
            raise ModelFormatError("tables have a number of more than 64 bits")

    def read(self, kinds: str) -> tuple[Any, int]:
        for kind, count in self.head["kinds"]:
            if type(count) is not int or not 0 < count <= max(1, len(self.refs) - self.at):
                raise ModelFormatError(f"tables have {count!r} of {kind!r}")
            if self.schema.is_open(kind):
                made = self.containers(kind, count)
            else:
                columns = [self.column(kind, count, wanted) for wanted in self.schema.columns(kind)]
                made = self.records(kind, count, columns)
            self.objects += made
            self.kinds += [kind] * count
        if self.at != len(self.refs) or self.kinds[-1] not in self.schema.allowed(kinds):
            raise ModelFormatError(f"tables end in a {self.kinds[-1]!r}, with {len(self.refs) - self.at} numbers left")
        return self.objects[-1], self.end

    def records(self, kind: str, count: int, columns: list[Any]) -> list[Any]:
        """Records, or tuples of a fixed length."""
        if kind not in self.schema.records:
            return list(zip(*columns, strict=True))
        if not columns and count > 1:
            raise ModelFormatError(f"tables have {count} of {kind}, which all are the same")
        if kind in self.makers:
            return list(map(self.makers[kind], *columns))
        cls = getattr(import_module(self.schema.modules[kind]), kind)
        made = [object.__new__(cls) for _ in range(count)]
        for name, column in zip(self.schema.records[kind], columns, strict=True):
            any(map(object.__setattr__, made, repeat(name), column))  # which gives None for each
        return made

    def containers(self, kind: str, count: int) -> list[Any]:
        """Tuples and lists of any length, and dicts."""
        stops = list(accumulate(self.numbers(count)))
        spans = list(map(slice, [0, *stops[:-1]], stops))
        columns = [list(self.column(kind, stops[-1], kinds)) for kinds in self.schema.columns(kind)]
        parts = map(columns[0].__getitem__, spans)
        if kind[0] != "{":
            return list(parts) if kind[0] == "[" else list(map(tuple, parts))
        made = list(map(dict, map(zip, parts, map(columns[1].__getitem__, spans))))
        if sum(map(len, made)) != stops[-1]:
            raise ModelFormatError(f"tables have a key twice in a {kind}")
        return made

    def column(self, kind: str, count: int, kinds: str) -> Any:
        """The objects that the next numbers refer to, which must be of some kinds."""
        column = self.numbers(count)
        if not self.schema.allowed(kinds).issuperset(map(self.kind_of, column)):
            found = ", ".join(sorted(set(map(self.kind_of, column))))
            raise ModelFormatError(f"tables have {found} in a {kind}, where {kinds} belongs")
        return map(self.object_at, column)

    def numbers(self, count: int) -> list[int]:
        start = self.at
        self.at = stop = start + count
        if stop > len(self.refs):
            raise ModelFormatError("tables are cut off")
        return self.refs[start:stop]
