"""What most runs need a little of, from modules of the standard library that take long to load."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

__all__ = ["log", "sha256"]

LARGE = 1 << 19  # bytes; OpenSSL's SHA-256 is several times as fast, and worth loading from there on

if TYPE_CHECKING:
    from hashlib import _Hash
    from logging import Logger

    log: Logger

    def sha256(data: bytes | memoryview = b"", *, size: int = 0) -> _Hash: ...
else:

    def _lean_sha256() -> Any:
        """As the standard `random` does: hashlib brings OpenSSL."""
        try:
            if sys.version_info >= (3, 12):
                from _sha2 import sha256
            else:
                from _sha256 import sha256
        except ImportError:
            from hashlib import sha256
        return sha256

    class _Log:
        """The logger "rlx"; the first message brings `logging`."""

        def __getattr__(self, name: str) -> Any:
            from logging import getLogger

            return getattr(getLogger("rlx"), name)

    _lean = _lean_sha256()
    log = _Log()

    def sha256(data: Any = b"", *, size: int = 0) -> Any:
        """Python's own, which loads at once, or hashlib's where there is much to digest: `data`, and `size` to come."""
        if "hashlib" in sys.modules or len(data) + size >= LARGE:
            from hashlib import sha256 as fast

            return fast(data)
        return _lean(data)
