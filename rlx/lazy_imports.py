"""What most runs need a little of, from modules of the standard library that take long to load."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

__all__ = ["log", "sha256"]

if TYPE_CHECKING:
    from hashlib import sha256
    from logging import Logger

    log: Logger
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

    sha256 = _lean_sha256()
    log = _Log()
