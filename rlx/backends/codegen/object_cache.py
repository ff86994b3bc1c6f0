"""On-disk cache of compiled objects: one checksummed file a key, bounded in bytes, safe between processes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from rlx.disk import USUAL_LIMITS, cache_folder, evict, log_unused, own_folder, parts_of_limit, read_regular, replacing
from rlx.lazy_imports import log, sha256

__all__ = ["ObjectCache"]

CACHE_FORMAT = 2
MAGIC = b"rlxobj%02d" % CACHE_FORMAT
DIGEST_BYTES = 32
KEEP_AFTER_EVICTION = 0.9  # evict somewhat below the bound, so that not every put has to scan the folder
SCANS = 32  # the folder is looked through each time that this part of the bound has been written


class ObjectCache:
    """Files in `folder` (default: the user's cache folder), some `max_bytes` bytes or what the user allows; the least
    recently used go first.

    The bound may be exceeded by a thirty-second part for each process that writes. A folder that can't be read or
    written, a damaged file or a full disk only means misses, never an error.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, max_bytes: int = USUAL_LIMITS["objects"]) -> None:
        self.folder = Path(folder) if folder is not None else cache_folder() / "objects"
        self.max_bytes = max_bytes
        self.step = max_bytes // SCANS
        # Bytes; random, so that short processes together scan often enough.
        self.unscanned = int.from_bytes(os.urandom(8)) % (self.step + 1)

    def get(self, key: str) -> bytes | None:
        """Returns the bytes stored under a key, or None; a hit counts as a use."""
        path = self.path(key)
        try:
            blob = read_regular(path, self.max_bytes, own=True)
        except OSError as error:
            log_unused(path, error)
            return None
        body = blob[len(MAGIC) + DIGEST_BYTES :]
        if blob[: len(MAGIC) + DIGEST_BYTES] != head(key, body):
            log.warning("ignoring a damaged cache file: %s", path)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)
        return body

    def put(self, key: str, body: bytes) -> bool:
        """Stores bytes under a key; returns whether it could."""
        blob = head(key, body) + body
        if len(blob) > self.max_bytes:
            return False
        try:
            own_folder(self.folder)
            with replacing(self.path(key), own=True) as file:
                file.write(blob)
        except OSError as error:
            log_unused(self.folder, error)
            return False
        self.unscanned += len(blob)
        if self.unscanned > self.step:
            self.unscanned = 0
            self.evict()
        return True

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.o"

    def evict(self) -> None:
        """Deletes the least recently used files until the bound holds."""
        most = min(self.max_bytes, parts_of_limit()["objects"])
        with suppress(OSError):
            evict(self.folder.iterdir(), most, int(most * KEEP_AFTER_EVICTION))


def head(key: str, body: bytes) -> bytes:
    """What a file begins with; it belongs to the key, so that a file under another's name counts as damaged."""
    return MAGIC + sha256(key.encode() + body).digest()
