"""What a function reads from outside of itself, so that a compiled derivative of it is used again only while it holds.

A derivative that is called with arrays is compiled for the function as it is then: variables that it closes over and
globals that it names are constants in the code. `outside` describes them by value, and is None where something can't
be: then nothing is kept.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import ref

import numpy as np

from rlx.lazy_imports import sha256

__all__ = ["compiled_once"]

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), np.dtype, np.generic)
FIXED = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, np.ufunc, type(np.sum))
LIBRARIES = {
    "builtins",
    "functools",
    "itertools",
    "math",
    "ml_dtypes",
    "numpy",
    "operator",
    "rlx",
}  # that stay as they are
CHANGING = {
    *("random", "eval", "exec", "globals", "vars", "open", "input", "__import__", "import_module"),
    *("load", "loadtxt", "genfromtxt", "fromfile", "memmap"),
}  # names by which something is read that isn't seen here: draws, files, other scopes
KEPT = "_rlx_derivatives"  # the attribute of a function that holds them
MOST = 100  # functions that a function calls, and those call, that are looked at


class Kept:
    """What is kept for a function, by key; a copy of the function, or a pickle, has nothing of it."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self.owner = None if function is None else ref(function)
        self.found: dict[Any, tuple[Any, Any]] = {}

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()

    def __copy__(self) -> Kept:
        return Kept()

    def __deepcopy__(self, memo: Any) -> Kept:
        return Kept()


def compiled_once(function: Callable[..., Any], key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """`make()`, or what it gave for this function and key while what the function reads from outside was the same.

    Kept with the function, and gone with it.
    """
    seen = outside(function) if isinstance(function, types.FunctionType) else None
    if seen is None:
        return make()
    kept = function.__dict__.get(KEPT)
    if kept is None or kept.owner is None or kept.owner() is not function:  # functools.wraps copies attributes
        kept = function.__dict__[KEPT] = Kept(function)
    known = kept.found.get(key)
    if known is None or known[0] != seen:
        known = kept.found[key] = (seen, make())
    return known[1]


def outside(function: Any, known: dict[Any, int] | None = None) -> Any:
    """What a function of Python reads from outside, as a value to compare; None where that can't be told.

    `known` numbers the functions that were met on the way.
    """
    known = {} if known is None else known
    if function in known:
        return "function", known[function]
    names = _names(function.__code__)
    if len(known) >= MOST or names is None:
        return None
    known[function] = len(known)
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    values += [pair for pair in function.__dict__.items() if pair[0] != KEPT]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not set yet
            return None
    scope = function.__globals__
    values += [(name, scope[name]) for name in sorted(names) if name in scope]
    found = []
    for value in values:
        described = _described(value, known)
        if described is None:
            return None
        found.append(described)
    return function.__code__, tuple(found)


@lru_cache(1000)
def _names(code: types.CodeType) -> frozenset[str] | None:
    """The names of globals (and of attributes) in a code and those within it; None where it reads what isn't seen."""
    imported = {str(i.argval) for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"}
    found = set(code.co_names).union(*(name.split(".") for name in imported))
    if found & CHANGING or not all(_is_library(name) for name in imported):
        return None
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            within = _names(const)
            if within is None:
                return None
            found |= within
    return frozenset(found)


def _described(value: Any, known: dict[Any, int]) -> Any:
    """A value from outside as one to compare; None for one whose parts may change unseen."""
    if isinstance(value, PLAIN) and _is_library(type(value).__module__):
        return type(value), value if isinstance(value, int) else repr(value)  # NaN equals itself, 1 is not True
    if type(value) is np.ndarray and not value.dtype.hasobject:
        held = np.ascontiguousarray(value)
        return value.shape, value.dtype, sha256(held.view(np.uint8).data if held.size else b"").digest()
    if isinstance(value, FIXED) and _is_of_library(value):
        return "fixed", id(value), value  # held, so that no other takes its place
    if type(value) is tuple:
        found = [_described(one, known) for one in value]
        return None if None in found else tuple(found)
    return outside(value, known) if isinstance(value, types.FunctionType) else None


def _is_of_library(value: Any) -> bool:
    """Whether it is a module, class or function of a library, and no method of something that may change."""
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        return False
    if isinstance(value, types.FunctionType) and not _is_library(value.__globals__.get("__name__")):
        return False  # functools.wraps has given it the module of another
    return _is_library(value.__name__ if isinstance(value, types.ModuleType) else value.__module__)


def _is_library(module: object) -> bool:
    """Whether a module of this name stays as it is, and gives the same each time."""
    parts = str(module).split(".")
    return parts[0] in LIBRARIES and (parts[0] == "rlx" or "random" not in parts)
