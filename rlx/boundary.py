"""The boundary between rlx and its callers: what goes wrong within comes out as a class of `rlx.errors`.

An error that a message was written for is one already. What is left (a `KeyError` that nobody thought of, memory or
threads that the system has no more of, a recursion that is too deep) is turned into one here, with the original as
`__cause__`. Four kinds stay as they are: what the callers' own code raises (a function or op that they gave, a signal
handler), Python's `TypeError` for arguments that a function doesn't take, warnings made errors, and what is no
`Exception` (`KeyboardInterrupt`).
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Collection
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar

from rlx.errors import MemoryDeficit, RlxError

__all__ = ["MARK", "bounded", "bounded_class", "converted", "is_out_of_memory"]

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
Kind = type[RlxError]

MARK = "__bounded__"  # an attribute of the functions that are bounded, for tests
DEFERRED = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR of a code's flags
SPECIAL = {"__init__", "__call__", "__getitem__", "__contains__", "__iter__", "__len__", "__str__"}
DECORATORS = {"contextlib", "functools", "rlx.boundary"}  # modules of which a call may pass the frames
OURS = frozenset({"rlx", "click", "numpy", "ml_dtypes", "llvmlite", "platformdirs", "psutil", "jax", "jaxlib", "mlx"})


def bounded(what: str, kind: Kind) -> Callable[[F], F]:
    """Decorator: errors that are not of rlx become `kind`, in a message that begins with `what`."""

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

    `but` names those that are called so often that they do without or see to it themselves, by `converted`.
    Generators and coroutines only call others.
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
    """What to raise, `from error`, where `error` was just caught; None: the error itself."""
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
    return kind(
        f"{what}: an unexpected {_text(error)}. No check of rlx saw it coming: if the arguments are right, please "
        "report it with the traceback"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the system had no more memory to give, which says nothing about what was read or made."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _is_callers(error: Exception) -> bool:
    """Whether it is for callers as it is: from their code, or of a call with other arguments than a function has."""
    step = error.__traceback__ and error.__traceback__.tb_next  # the first frame is the one that caught it
    modules = []
    while step is not None:
        modules.append(str(step.tb_frame.f_globals.get("__name__", "")))
        step = step.tb_next
    if isinstance(error, TypeError) and set(modules) <= DECORATORS:
        return True
    packages = {module.partition(".")[0] for module in modules}
    return not packages <= OURS | sys.stdlib_module_names
