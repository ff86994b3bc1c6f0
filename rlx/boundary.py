"""The boundary between rlx and its callers: what goes wrong within comes out as a class of `rlx.errors`.

Errors that the code expects are raised as such a class. All others (a `KeyError` that nobody thought of, a system
without memory or threads left, a recursion that is too deep) are turned into one here; `__cause__` is the original.
Four kinds stay as they are: what the caller's own code raises (a function or op that it gave, a signal handler),
Python's `TypeError` for arguments that a function doesn't take, warnings that were made errors, and `KeyboardInterrupt`
and others that are no `Exception`.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Collection
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar

from rlx.errors import MemoryDeficit, OptionError, RlxError

__all__ = ["MARK", "bounded", "bounded_class", "converted", "is_out_of_memory"]

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
Kind = type[RlxError]

MARK = "__bounded__"  # an attribute of the functions that are bounded, for tests
DEFERRED = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR of a code's flags
SPECIAL = {"__init__", "__call__", "__getitem__", "__contains__", "__iter__", "__len__", "__str__"}
DECORATORS = {"contextlib", "functools", "rlx.boundary", "rlx.progress"}  # modules of which a call may pass the frames
OURS = frozenset({"rlx", "click", "numpy", "ml_dtypes", "llvmlite", "platformdirs", "psutil", "jax", "jaxlib", "mlx"})


def bounded(what: str, kind: Kind) -> Callable[[F], F]:
    """Decorator: other errors than those of rlx become errors of the class `kind`; their message begins with `what`."""

    def decorate(function: F) -> F:
        @wraps(function)
        def inside(*args: Any, **named: Any) -> Any:
            try:
                return function(*args, **named)
            except RlxError:
                raise
            except Exception as error:
                made = converted(error, what, kind)
                if made is None:
                    raise
                raise made from error

        setattr(inside, MARK, kind)
        return inside  # type: ignore[return-value]

    return decorate


def bounded_class(kind: Kind, *, but: Collection[str] = ()) -> Callable[[C], C]:
    """Decorator of a class: its public methods and properties are `bounded`.

    Not those named in `but`: they are called so often that the decorator would cost too much, and use `converted`
    themselves where they can fail. Nor generators and coroutines, which only call bounded ones.
    """

    def decorate(cls: C) -> C:
        for name, value in list(vars(cls).items()):
            if name in but or (name.startswith("_") and name not in SPECIAL):
                continue
            what = cls.__name__ if name == "__init__" else f"{cls.__name__}.{name}"
            guard = bounded(what, kind)
            if isinstance(value, property) and value.fget is not None:
                setattr(cls, name, property(guard(value.fget), value.fset, value.fdel, value.__doc__))
            elif isinstance(value, staticmethod | classmethod):
                setattr(cls, name, type(value)(guard(value.__func__)))
            elif isinstance(value, FunctionType) and not _is_deferred(value):
                setattr(cls, name, guard(value))
        return cls

    return decorate


def _is_deferred(function: FunctionType) -> bool:
    """Whether it is a generator or coroutine: calling it runs nothing yet."""
    return bool(function.__code__.co_flags & DEFERRED)


def converted(error: Exception, what: str, kind: Kind) -> RlxError | None:
    """The error of rlx to raise in place of one that was just caught; None: raise that one itself."""
    if isinstance(error, RlxError | Warning) or _is_callers(error):
        return None
    if is_out_of_memory(error):
        return MemoryDeficit(f"{what}: the system has not enough memory: {_text(error)}")
    if isinstance(error, RecursionError):
        return kind(f"{what}: something is nested too deeply: Python's recursion limit was reached")
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return kind(f"{what}: the system can start no more threads: raise its limit, or use fewer")
    if isinstance(error, OSError) and error.strerror:
        return kind(f"{what}: {'' if error.filename is None else f'{error.filename}: '}{error.strerror}")
    if _is_wrong_call(error):
        return OptionError(f"{what} calls a function that it was given with arguments that it does not take: {error}")
    return kind(
        f"{what}: an unexpected {_text(error)}. No check of rlx saw it coming: if the arguments are right, please "
        "report it with the traceback"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that the system had no memory left, and not that something is wrong with a file."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _is_wrong_call(error: Exception) -> bool:
    """Whether the error is that code of rlx called a function of the caller's with arguments that it doesn't take."""
    step = error.__traceback__
    name, called, _ = str(error).partition("() ")
    if not isinstance(error, TypeError) or not called or step is None:
        return False
    while step.tb_next is not None:
        step = step.tb_next
    held = list(step.tb_frame.f_locals.values())
    held += [value for one in held for value in getattr(one, "__dict__", {}).values()]
    try:
        return any(_is_named(value, name) for value in held)
    except Exception:  # noqa: BLE001 - of an object that does not say what it is
        return False


def _is_named(value: object, name: str) -> bool:
    """Whether messages of Python call a function, or an object that can be called, by that name, and it isn't ours."""
    for one in (value, getattr(value, "func", None), getattr(type(value), "__call__", None)):  # noqa: B004
        if getattr(one, "__qualname__", None) == name:
            return str(getattr(one, "__module__", "")).partition(".")[0] not in OURS
    return False


def _is_callers(error: Exception) -> bool:
    """Whether the error comes from the caller's code, or from a call with arguments that the function doesn't take."""
    step = error.__traceback__ and error.__traceback__.tb_next  # the first frame is the one that caught it
    modules = []
    while step is not None:
        modules.append(str(step.tb_frame.f_globals.get("__name__", "")))
        step = step.tb_next
    if isinstance(error, TypeError) and set(modules) <= DECORATORS:
        return True
    packages = {module.partition(".")[0] for module in modules}
    return not packages <= OURS | sys.stdlib_module_names
