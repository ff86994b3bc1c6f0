"""Where model bytes live: a file read by position and mapped on demand, memory, the folder of external data."""

from __future__ import annotations

import os
from pathlib import PurePosixPath, PureWindowsPath

import numpy as np
from numpy.typing import NDArray

from rlx.disk import open_regular
from rlx.errors import ModelFormatError
from rlx.ir.mapped import identity_of, map_file, note_file

__all__ = ["FileSource", "Folder", "MemorySource", "read_file"]


class FileSource:
    """A regular file; positioned reads while open, and one read-only mapping made when first asked for.

    The mapping lives as long as this object or an array made from it. Truncating the file under a live mapping kills
    the process (SIGBUS), as with any mmap; replacing the file by a new one is safe.
    """

    def __init__(self, path: str, name: str | None = None) -> None:
        self.name = name if name is not None else path
        self._path = os.path.abspath(path)
        self._map: NDArray[np.uint8] | None = None
        self._fd = self._open()
        status = os.fstat(self._fd)
        self.size = status.st_size
        self._identity = identity_of(status)
        note_file(self._path, status)

    def close(self) -> None:
        """End positioned reads; `view` still works."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, offset: int, size: int) -> bytes:
        """Copy of `size` bytes at `offset`."""
        try:
            data = _pread(self._fd, size, offset)
        except OSError as error:
            raise ModelFormatError(f"{self.name}: reading {size} bytes at {offset} failed: {error.strerror}") from error
        if len(data) != size:
            raise ModelFormatError(f"{self.name}: became shorter while it was read; load it again")
        return data

    def view(self) -> NDArray[np.uint8]:
        """The whole file as read-only bytes, mapped and not copied."""
        if self._map is None:
            fd = self._open()
            try:
                if identity_of(os.fstat(fd)) != self._identity:
                    raise ModelFormatError(f"{self.name}: changed since its header was read; load it again")
                self._map = map_file(fd, self._path)
            except OSError as error:
                raise ModelFormatError(f"{self.name}: can't be mapped: {error.strerror or error}") from error
            finally:
                os.close(fd)
        return self._map

    def address(self) -> int:
        """Where the bytes start in memory, as far as alignment goes: a mapping starts at a page."""
        return 0

    def _open(self) -> int:
        try:
            return open_regular(self._path)
        except OSError as error:
            raise ModelFormatError(f"{self.name}: can't be opened: {error.strerror}") from error
        except ValueError as error:
            raise ModelFormatError(f"{self.name!r}: is no path: {error}") from error


class MemorySource:
    """A model given as bytes."""

    def __init__(self, data: bytes | bytearray | memoryview, name: str = "<bytes>") -> None:
        self.name = name
        try:
            self._data = memoryview(data).toreadonly().cast("B")
        except TypeError as error:
            raise ModelFormatError(f"{name}: the buffer of the model must be contiguous: {error}") from error
        self.size = self._data.nbytes

    def read(self, offset: int, size: int) -> bytes:
        """Copy of `size` bytes at `offset`."""
        return bytes(self._data[offset : offset + size])

    def view(self) -> NDArray[np.uint8]:
        """All bytes, not copied."""
        return np.frombuffer(self._data, np.uint8)

    def address(self) -> int:
        """Where the bytes start in memory."""
        return int(self.view().ctypes.data) if self.size else 0


def read_file(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """All bytes of a regular file; raises `ModelFormatError`, also for one of more than `most` bytes."""
    source = FileSource(os.fspath(path))
    try:
        if most is not None and source.size > most:
            raise ModelFormatError(f"{source.name}: is larger than the limit of {most} bytes")
        return source.read(0, source.size)
    finally:
        source.close()


class Folder:
    """The folder of a model file: opens external data in it, and nothing outside it.

    Links may lead anywhere inside the folder, or beside the file that the model's own path resolves to (the layout of
    download caches, whose model and data are links into one store).
    """

    def __init__(self, model_path: str) -> None:
        self._folder = os.path.dirname(os.path.abspath(model_path))
        real_model = os.path.realpath(model_path)
        self._roots = {os.path.realpath(self._folder), os.path.dirname(real_model)}
        self._sources: dict[str, FileSource] = {}

    def open(self, location: str, owner: str) -> FileSource:
        """The file at the relative path `location`; `owner` (model and tensor) begins any message."""
        check_location(location, owner)
        real = os.path.realpath(os.path.join(self._folder, location))
        if not any(_inside(real, root) for root in self._roots):
            raise ModelFormatError(
                f"{owner}: external data {location!r} is a link to {real!r}, outside the model's folder; "
                "put the file itself beside the model"
            )
        source = self._sources.get(real)
        if source is None:
            if not os.path.exists(real):
                raise ModelFormatError(
                    f"{owner}: external data {location!r} is missing in {self._folder!r}; put it there"
                )
            source = FileSource(real)
            source.close()
            self._sources[real] = source
        return source


def check_location(location: str, owner: str) -> None:
    """Refuse a `location` of external data that is no plain relative path, on this or any other system."""
    windows = PureWindowsPath(location)  # splits at both kinds of slash, and knows drives
    absolute = bool(windows.anchor) or PurePosixPath(location).is_absolute()
    if not location or "\0" in location or absolute or ".." in windows.parts:
        raise ModelFormatError(
            f"{owner}: external data location {location!r} must be a path inside the model's folder, without '..'"
        )


def _inside(path: str, root: str) -> bool:
    return path.startswith(root.rstrip(os.sep) + os.sep)


def _pread(fd: int, size: int, offset: int) -> bytes:
    data = _pread_once(fd, size, offset)
    while 0 < len(data) < size:  # one call gives at most 2 GiB
        more = _pread_once(fd, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def _pread_once(fd: int, size: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(fd, size, offset)
    os.lseek(fd, offset, os.SEEK_SET)
    return os.read(fd, size)
