"""The user's cache folder: where it is, how caches in it stay bounded, and measurements that are kept there."""

from __future__ import annotations

import errno
import functools
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from rlx.errors import OptionError
from rlx.lazy_imports import log, sha256

__all__ = [
    "LIMIT", "MAGIC", "NotOwn", "cache_folder", "check_own", "content_key", "evict", "is_artifact", "keep_in",
    "keep_limit", "kept_limit", "log_unused", "open_regular", "own_folder", "parts_of_limit", "path_of", "read_kept",
    "read_regular", "replacing", "saving", "target_of", "write_kept",
]  # fmt: skip


MAGIC = b"\x93rlxart\n"  # what an artifact begins with
_named: list[Path] = []  # the folders in the place of the user's, the last one counts
MOST_KEPT = 1 << 20  # bytes of a kept measurement
USUAL_LIMITS = {"artifacts": 4 << 30, "objects": 512 << 20}  # bytes of the parts of the cache
LIMIT = "limit.json"


def cache_folder() -> Path:
    """The user's cache folder of rlx, or what `keep_in` named."""
    if _named:
        return _named[-1]
    if sys.platform != "linux":
        import platformdirs

        return Path(platformdirs.user_cache_dir("rlx"))
    named = os.environ.get("XDG_CACHE_HOME", "").strip()
    return Path(named or os.path.expanduser("~/.cache"), "rlx")


def keep_in(folder: str | os.PathLike[str]) -> None:
    """Makes this the cache folder of this process, as of one that measures what an empty cache costs."""
    _named.append(Path(folder))


def kept_limit() -> int | None:
    """The bytes that the user allows the cache, None where none were set."""
    found = read_kept(cache_folder() / LIMIT, ["limit"])
    return found if isinstance(found, int) and found >= 0 else None


def keep_limit(limit: int | None) -> None:
    """Sets the bytes that the cache may take from now on, in every process; None: the usual ones."""
    write_kept(cache_folder() / LIMIT, ["limit"], limit)


def parts_of_limit() -> dict[str, int]:
    """The bytes that each part of the cache may take: the usual ones, or its share of what the user allows."""
    limit, usual = kept_limit(), sum(USUAL_LIMITS.values())
    return {name: most if limit is None else limit * most // usual for name, most in USUAL_LIMITS.items()}


def is_artifact(head: bytes) -> bool:
    """Whether a file that begins so is an artifact, whatever its name."""
    return head[: len(MAGIC)] == MAGIC


def content_key(*parts: str) -> str:
    """Returns the SHA-256 hex digest of texts; it depends on where one part ends and the next begins."""
    encoded = [part.encode() for part in parts]
    digest = sha256(size=sum(map(len, encoded)))
    for data in encoded:
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
        given = type(path).__name__ if isinstance(path, bytes | bytearray | memoryview) else f"{path!r:.80}"
        raise OptionError(f"{what} takes the path of a file, got {given}")
    name = os.fsdecode(path)
    if "\0" in name:
        raise OptionError(f"{what}: {name!r} is no path: it has a zero character")
    return name


def target_of(path: Any, what: str) -> str:
    """As `path_of`, for a file to be written later: raises `OptionError` at once where that can't work."""
    name = path_of(path, what)
    target = os.path.realpath(name)
    written = target if os.path.exists(target) and not os.path.isfile(target) else os.path.dirname(target)
    if os.path.isdir(target):
        why = "it is a folder; give the name of a file in it"
    elif not os.path.exists(written):
        why = f"there is no folder {written}"
    else:
        why = "" if os.access(written, os.W_OK) else f"no right to write to {written}"
    if why:
        raise OptionError(f"{name}: can't be written: {why}")
    return name


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def own_folder(folder: Path) -> None:
    """Makes a folder that only this user can look into; raises `OSError` where it can't be made.

    Raises `NotOwn` for one that another user can write to: closing it would leave in it what they have written. One
    that others can only look into is closed to them.
    """
    missing = []
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(each, 0o700)
        folder = each
    if os.name == "posix":
        with _own_folder_opened(folder) as fd:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            if mode & 0o077:
                os.fchmod(fd, mode & 0o700)


class NotOwn(OSError):
    """A file or folder that another user can write to."""


def check_own(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Raises `NotOwn` for a file or folder that belongs to another user, or that another user can write to."""
    if os.name != "posix":
        return
    if status.st_uid != os.geteuid():
        raise NotOwn(errno.EPERM, f"belongs to user {status.st_uid}, not to {os.geteuid()}", os.fspath(path))
    if status.st_mode & 0o022:
        raise NotOwn(errno.EPERM, "can be written to by other users; delete it", os.fspath(path))


def open_regular(path: str | os.PathLike[str], *, own: bool = False) -> int:
    """A descriptor of a regular file for reading; raises `OSError`, at once for pipes, devices and folders.

    An `own` file is no link, and neither it nor its folder belongs to another user or can be written to by one. What is
    checked is what was opened, whatever the path leads to meanwhile.
    """
    flags = os.O_RDONLY | _flags("O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
    try:
        if own and os.open in os.supports_dir_fd:
            folder, name = os.path.split(path)
            with _own_folder_opened(folder or os.curdir) as folder_fd:
                fd = os.open(name, flags | _flags("O_NOFOLLOW"), dir_fd=folder_fd)
        else:
            fd = os.open(path, flags)
    except ValueError as error:  # a NUL in it, or half of a surrogate pair
        raise OSError(errno.EINVAL, f"is no path: {error}", os.fspath(path)) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"is {_kind(status.st_mode)}; expected a file", os.fspath(path))
        if own:
            check_own(status, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _kind(mode: int) -> str:
    """What a path leads to, where that is not a regular file."""
    kinds = {"a folder": stat.S_ISDIR, "a pipe": stat.S_ISFIFO, "a socket": stat.S_ISSOCK}
    return next((kind for kind, fits in kinds.items() if fits(mode)), "a device")


def read_regular(path: str | os.PathLike[str], most: int = -1, *, own: bool = False) -> bytes:
    """The first `most` bytes of a file, -1 for all, opened as `open_regular` does."""
    with open(open_regular(path, own=own), "rb") as file:
        return file.read(most)


@contextmanager
def _own_folder_opened(folder: str | os.PathLike[str]) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | _flags("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC"))
    try:
        check_own(os.fstat(fd), folder)
        yield fd
    finally:
        os.close(fd)


def _flags(*names: str) -> int:
    """Those flags of `os.open` that this system has."""
    flags = 0
    for name in names:
        flags |= getattr(os, name, 0)
    return flags


def log_unused(path: str | os.PathLike[str], error: OSError) -> None:
    """Logs that a file or folder of the cache isn't used, unless it only is not there yet.

    Where another user can write to it that is a warning, once each.
    """
    if isinstance(error, NotOwn):
        _warn_unused(error.filename, error.strerror)
    elif not isinstance(error, FileNotFoundError):
        log.debug("not used as a cache: %s: %s", path, error)


@functools.lru_cache(256)
def _warn_unused(path: str, why: str) -> None:
    log.warning("not used as a cache: %s: %s", path, why)


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
        kept = json.loads(read_regular(path, MOST_KEPT, own=True))
        return kept["value"] if kept["key"] == list(key) else None
    except OSError as error:
        log_unused(path, error)
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def write_kept(path: Path, key: Sequence[Any], value: Any) -> None:
    """Writes a value for a key, whole or not at all; that it can't be done is only logged."""
    try:
        own_folder(path.parent)
        with replacing(path, own=True) as file:
            file.write(json.dumps({"key": list(key), "value": value}).encode())
    except OSError as error:
        log_unused(path, error)
