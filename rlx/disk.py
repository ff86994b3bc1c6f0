"""The user's cache folder: where it is, how caches in it stay bounded, and measurements that are kept there."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["cache_folder", "evict", "read_kept", "replacing", "write_kept"]

log = logging.getLogger("rlx")


def cache_folder() -> Path:
    """The user's cache folder of rlx."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("rlx"))


def evict(paths: Iterable[Path], most: int, target: int) -> None:
    """If the files take more than `most` bytes, deletes the least recently used ones until they take `target`.

    Files that vanish meanwhile, or can't be deleted, are passed over.
    """
    entries = []
    for path in paths:
        with suppress(OSError):
            status = path.stat()
            entries.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    if total <= most:
        return
    for _, size, path in sorted(entries):
        if total <= target:
            break
        with suppress(OSError):
            path.unlink()
        total -= size


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` at the end of the block: readers see the old, the new or no file.

    An error within the block removes it and leaves the old one.
    """
    name = f"{os.fspath(path)}.{os.urandom(6).hex()}.tmp"
    try:
        with open(name, "xb") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def read_kept(path: Path, key: Sequence[Any]) -> Any:
    """The value of a file that was written for this key; None for an old, partial, corrupt or missing file."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return kept["value"] if kept["key"] == list(key) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_kept(path: Path, key: Sequence[Any], value: Any) -> None:
    """Writes a value for a key, whole or not at all; a folder that can't be written is only logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps({"key": list(key), "value": value}).encode())
    except OSError as error:
        log.debug("%s can't be kept: %s", path, error)
