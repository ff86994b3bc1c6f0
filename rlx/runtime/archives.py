"""Zip archives of arrays, as states, recordings and npz files are, read such that a damaged one is a clear error.

What rlx writes itself is not compressed, so that no file takes more memory than its own size.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from rlx.boundary import is_out_of_memory
from rlx.disk import open_regular
from rlx.errors import ModelFormatError, RlxError
from rlx.ir.graph import Array

if TYPE_CHECKING:
    from zipfile import ZipFile

__all__ = ["check_shape", "check_stored", "npy_array", "npy_header", "open_archive", "read_npy", "read_stored"]

MOST_AXES = 64
MOST_RATIO = 1100  # no compression that zip files have makes bytes into more


@contextmanager
def open_archive(path: str | os.PathLike[str], bad: str) -> Iterator[ZipFile]:
    """An archive to read in the block; whatever goes wrong there is a `ModelFormatError` that says it is `bad`."""
    import zipfile  # slow to import

    try:
        with open(open_regular(path), "rb") as file, zipfile.ZipFile(file) as bundle:
            if sum(entry.compress_size for entry in bundle.infolist()) > os.fstat(file.fileno()).st_size:
                raise ValueError("its entries overlap")
            yield bundle
    except RlxError:
        raise
    except OSError as error:
        if is_out_of_memory(error):
            raise
        raise ModelFormatError(f"{path}: can't be read: {error.strerror or error}") from None
    except Exception as error:  # zipfile, zlib and NumPy raise many things for damaged bytes
        if is_out_of_memory(error):
            raise
        raise ModelFormatError(f"{path}: {bad}: {error}") from None


def check_stored(bundle: ZipFile, name: str) -> None:
    """Raises `ValueError` for an entry that is compressed."""
    entry = bundle.getinfo(name)
    if entry.compress_type or entry.file_size != entry.compress_size:
        raise ValueError(f"its entry {name!r} is compressed")


def read_stored(bundle: ZipFile, name: str) -> bytes:
    """The bytes of an entry, which must not be compressed."""
    check_stored(bundle, name)
    return bundle.read(name)


def check_shape(what: str, shape: object) -> None:
    """Raises `ValueError` for what a file gives as a shape and is none: sizes from 0 on, of 64 axes at most."""
    sizes = shape if isinstance(shape, list | tuple) else None
    if sizes is None or len(sizes) > MOST_AXES or not all(type(n) is int and 0 <= n < 1 << 63 for n in sizes):
        raise ValueError(f"{what} has no shape but {shape!s:.60}")


def npy_header(bundle: ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an entry in NumPy's format; it is long enough for them."""
    entry = bundle.getinfo(name)
    if entry.file_size > MOST_RATIO * (entry.compress_size + 1):
        raise ValueError(f"its entry {name!r} can't be as large as it says")
    with bundle.open(entry) as data:
        return _checked_header(data, entry.file_size, f"its entry {name!r}")


def npy_array(bundle: ZipFile, name: str) -> Array:
    """An entry in NumPy's format, without pickled objects."""
    npy_header(bundle, name)
    with bundle.open(name) as data:
        return _array(data)


def read_npy(path: str | os.PathLike[str]) -> Array:
    """The array of a .npy file, without pickled objects; raises `OSError`, or `ValueError` for what is damaged."""
    with open(open_regular(path), "rb") as file:
        if file.peek(2)[:2] == b"PK":
            raise ValueError("it is an archive of arrays")
        _checked_header(file, os.fstat(file.fileno()).st_size, "it")
        file.seek(0)
        return _array(file)


def _checked_header(data: IO[bytes], size: int, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type; raises `ValueError` where a file of `size` bytes is too short for them; takes no memory yet."""
    version = np.lib.format.read_magic(data)
    if version not in _HEADERS:
        raise ValueError(
            f"{name} is of version {version} of the format of .npy; known are {', '.join(map(str, _HEADERS))}"
        )
    shape, _, dtype = _HEADERS[version](data)
    check_shape(name, shape)
    need, left = math.prod(shape) * dtype.itemsize, size - data.tell()
    if need > left:
        raise ValueError(f"{name} needs {need} bytes, the file has {left}")
    return shape, dtype


def _array(data: IO[bytes]) -> Array:
    made: Array = np.lib.format.read_array(data, allow_pickle=False)
    return made.astype(made.dtype.newbyteorder("="), copy=False)


_HEADERS: dict[tuple[int, int], Callable[..., Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
