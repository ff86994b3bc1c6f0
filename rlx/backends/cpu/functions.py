"""Functions as data: a function written in this package, nested ones and lambdas too, with the values it closes over.

A function is found again by its module, the function or method that its code lies in, and the place in that one's
code; a digest of the code tells whether it is still the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import CellType, CodeType, FunctionType
from typing import Any

from rlx.errors import ModelFormatError
from rlx.lean import sha256

__all__ = ["describe", "restore"]

Place = tuple[str, str, tuple[int, ...], str]  # module, name of the outermost function, path in its constants, digest
Described = tuple[Place, tuple[Any, ...], tuple[Any, ...]]  # where it is, defaults, values of the cells


def describe(function: FunctionType) -> Described | None:
    """What `restore` needs to make the function again; None for one that is not from this package."""
    if not function.__module__.startswith("rlx."):
        return None
    outermost = function.__qualname__.split(".<locals>", 1)[0]
    code = _code(function.__module__, outermost)
    path = None if code is None else next((p for p, c in _nested(code) if c is function.__code__), None)
    if path is None or function.__kwdefaults__:
        return None
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    place = (function.__module__, outermost, path, _digest(function.__code__))
    return place, function.__defaults__ or (), cells


def restore(place: Place, defaults: tuple[Any, ...], cells: tuple[Any, ...]) -> FunctionType:
    """The function that was described. Raises `ModelFormatError` when this version of the package has another."""
    module, outermost, path, digest = place
    code = _code(module, outermost) if module.startswith("rlx.") else None
    for index in path:
        constants = () if code is None else code.co_consts
        inner = constants[index] if 0 <= index < len(constants) else None
        code = inner if isinstance(inner, CodeType) else None
    if code is None or _digest(code) != digest or len(code.co_freevars) != len(cells):
        raise ModelFormatError(f"the function {outermost} of {module} is not the one that was stored")
    names = vars(sys.modules[module])
    return FunctionType(code, names, code.co_name, defaults, tuple(CellType(value) for value in cells))


def _code(module: str, outermost: str) -> CodeType | None:
    """The code of a function or method of a module."""
    found: Any = import_module(module)
    for name in outermost.split("."):
        found = getattr(found, name, None)
    found = getattr(found, "fget", found)  # a property
    return getattr(found, "__code__", None)


def _nested(code: CodeType, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], CodeType]]:
    """A code object and all that are defined in it."""
    yield path, code
    for index, constant in enumerate(code.co_consts):
        if isinstance(constant, CodeType):
            yield from _nested(constant, (*path, index))


def _digest(code: CodeType) -> str:
    plain = [constant for constant in code.co_consts if not isinstance(constant, CodeType)]
    shown = repr((code.co_code, code.co_names, code.co_freevars, plain))
    return sha256(shown.encode()).hexdigest()[:16]
