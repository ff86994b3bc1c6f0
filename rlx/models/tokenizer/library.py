"""Optional libraries, imported when first used; panics of theirs become one error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from rlx.errors import DeviceUnavailable, ModelFormatError, RlxError
from rlx.install import install_extra

__all__ = ["needed", "tokenizers", "translated"]


def needed(module: str, use: str) -> Any:
    """An optional library of the extra `llm`. Raises `DeviceUnavailable` with the command that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise DeviceUnavailable(f"{use} needs the library {module}: {install_extra('llm')} ({error})") from None


def tokenizers() -> Any:
    return needed("tokenizers", "a tokenizer")


@contextmanager
def translated(what: str, *, library: str = "tokenizers", kind: type[RlxError] = ModelFormatError) -> Iterator[None]:
    """What a library raises, panics of its Rust code among it, becomes an error of a kind; `what` begins it."""
    try:
        yield
    except (RlxError, MemoryError):
        raise
    except BaseException as error:
        # A panic derives from BaseException, and its class can't be imported.
        panic = type(error).__name__ == "PanicException"
        if not panic and not isinstance(error, Exception):
            raise
        text = " ".join(str(error).split())[:300]
        raise kind(f"{what}: the library {library} refuses it: {text or type(error).__name__}") from None
