"""The user's cache folder: where it is, how caches in it stay bounded, and measurements that are kept there."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from rlx.errors import ModelFormatError, OptionError
from rlx.lazy_imports import log, sha256

__all__ = [
    "MAGIC", "NotOwn", "cache_folder", "check_owner", "check_regular", "content_key", "evict", "is_artifact",
    "keep_in", "open_regular", "own_folder", "path_of", "read_kept", "replacing", "saving", "write_kept",
]  # fmt: skip


MAGIC = b"\x93rlxart\n"  # what an artifact begins with
_named: list[Path] = []  # the folders in the place of the user's, the last one counts
MOST_KEPT = 1 << 20  # bytes of a kept measurement


def cache_folder() -> Path:
    """The user's cache folder of rlx, or what `keep_in` named."""
    if _named:
        return _named[-1]
    import platformdirs

    return Path(platformdirs.user_cache_dir("rlx"))


def keep_in(folder: str | os.PathLike[str]) -> None:
    """Makes this the cache folder of this process, as of one that measures what an empty cache costs."""
    _named.append(Path(folder))


def is_artifact(head: bytes) -> bool:
    """Whether a file that begins so is an artifact, whatever its name."""
    return head[: len(MAGIC)] == MAGIC


def content_key(*parts: str) -> str:
    """Returns the SHA-256 hex digest of texts; it depends on where one part ends and the next begins."""
    digest = sha256()
    for part in parts:
        data = part.encode()
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


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
def replacing(path: str | os.PathLike[str], *, own: bool = False) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` at the end of the block: readers see the old, the new or no file.

    An error within the block removes it and leaves the old one. A link stays one; a pipe or device is written to. An
    `own` file is for this user alone, and takes the place of whatever is there.
    """
    target = os.fsdecode(path) if own else os.path.realpath(os.fsdecode(path))
    if not own and os.path.exists(target) and not os.path.isfile(target) and not os.path.isdir(target):
        with open(target, "wb") as file:
            yield file
        return
    name = f"{target}.{os.urandom(6).hex()}.tmp"
    try:
        with open(name, "xb", opener=_private if own else None) as file:
            yield file
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def path_of(path: Any, what: str) -> str:
    """The path of a file that a user gives to `what`; raises `OptionError` for anything that is none."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise OptionError(f"{what} takes the path of a file, got {path!r}")
    name = os.fsdecode(path)
    if "\0" in name:
        raise OptionError(f"{what}: {name!r} is no path: it has a zero character")
    return name


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def own_folder(folder: Path) -> None:
    """Makes a folder that only this user can look into; raises `OSError` where it can't be, or is another user's.

    A folder of this user that others could look into or write to is closed to them.
    """
    missing = []
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(each, 0o700)
        folder = each
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is no folder", str(folder))
    check_owner(status, folder)
    if os.name == "posix" and status.st_mode & 0o077:
        os.chmod(folder, 0o700)


class NotOwn(OSError):
    """A file or folder that another user can write to."""


def check_owner(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Raises `NotOwn` for a file or folder of another user."""
    if os.name == "posix" and status.st_uid != os.geteuid():
        raise NotOwn(errno.EPERM, f"belongs to user {status.st_uid}, not to {os.geteuid()}", os.fspath(path))


def open_regular(path: str | os.PathLike[str], *, own: bool = False) -> int:
    """A descriptor of a regular file for reading; raises `OSError`, at once for pipes, devices and folders.

    An `own` file must be this user's, in a folder of this user, no link, and such that no other can write to it.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    fd = os.open(path, flags | (getattr(os, "O_NOFOLLOW", 0) if own else 0))
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise OSError(errno.EINVAL, f"is {kind}; expected a file", os.fspath(path))
        if own:
            folder = os.path.dirname(path) or os.curdir
            check_owner(os.lstat(folder), folder)
            check_owner(status, path)
        if own and os.name == "posix" and status.st_mode & 0o022:
            raise NotOwn(errno.EPERM, "can be written to by other users", os.fspath(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_regular(path: str | os.PathLike[str], name: str | None = None) -> None:
    """Raises `ModelFormatError` for what is there and no regular file: pipes may never begin, devices never end.

    What isn't there is left to who opens it.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise ModelFormatError(f"{name or os.fspath(path)}: is {kind}; expected a file")


@contextmanager
def saving(path: Any, what: str) -> Iterator[BinaryIO]:
    """As `replacing`, for a path that a user gives; raises `OptionError` where it is none or can't be written."""
    name = path_of(path, what)
    try:
        with replacing(name) as file:
            yield file
    except OSError as error:
        raise OptionError(f"{name}: can't be written: {error.strerror or error}") from None


def read_kept(path: Path, key: Sequence[Any]) -> Any:
    """The value of a file that was written for this key; None for one that is old, damaged, missing, or no file."""
    try:
        with open(open_regular(path, own=True), "rb") as file:
            kept = json.loads(file.read(MOST_KEPT))
        return kept["value"] if kept["key"] == list(key) else None
    except NotOwn as error:
        log.warning("ignoring a file of the cache: %s: %s", path, error.strerror)
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_kept(path: Path, key: Sequence[Any], value: Any) -> None:
    """Writes a value for a key, whole or not at all; where that can't be done, or there is no file, is only logged."""
    try:
        own_folder(path.parent)
        with replacing(path, own=True) as file:
            file.write(json.dumps({"key": list(key), "value": value}).encode())
    except OSError as error:
        log.debug("%s can't be kept: %s", path, error)
