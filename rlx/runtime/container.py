"""The file of an artifact: a header in JSON, sections with checksums, and arrays that are mapped and not read.

    0   magic, 8 bytes
    8   u32 version of this format, u32 bytes of the header, SHA-256 of the header
    48  the header
    ... the sections and arrays, each at a multiple of its alignment

Every length, offset, type and count is checked before it is used; what doesn't fit is a `ModelFormatError`. Checksums
tell accidents from what was written; they are no protection from somebody who writes a file to do harm. Of what is read
only machine code, and the tables that go with it, could do any: see docs/security.md.

Arrays may lie in other files. An artifact names these by paths inside its own folder, with their SHA-256; an entry of
the user's cache by any path, with inode, size and time.
"""

from __future__ import annotations

import functools
import json
import os
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.disk import MAGIC, is_artifact, open_regular, replacing
from rlx.errors import ModelFormatError, OptionError
from rlx.ir.dtype import DTYPES, dtype_of
from rlx.ir.graph import Array
from rlx.ir.mapped import Place, identity_of, map_file
from rlx.lazy_imports import sha256
from rlx.records import dataclass, field

__all__ = [
    "ENDING",
    "FORMAT",
    "MAGIC",
    "Container",
    "StaleFile",
    "build_identity",
    "read_container",
    "source_times",
    "write_container",
]

FORMAT = 8
ENDING = ".rlxart"
HEAD = struct.Struct("<8sII32s")
PAGE = 4096
SMALL = 64  # alignment of arrays below a page
MOST_CHECKED = 256 << 20  # bytes of arrays up to which their checksum is tested: all of them are read for that
WORTH_A_THREAD = 1 << 20  # bytes of arrays from which a thread of its own computes their checksum
MOST_HEADER = 8 << 20  # its objects in memory take some twenty times as much
MOST_AXES = 64


class StaleFile(ModelFormatError):
    """A file that an artifact refers to is not as it was."""


@dataclass(frozen=True)
class Container:
    """What a file holds: `facts` are any values of JSON.

    `prove` waits until the checksum of the arrays is known, and raises `ModelFormatError` where it differs.
    """

    facts: Mapping[str, Any]
    sections: Mapping[str, bytes]
    arrays: Sequence[Array] = field(default_factory=tuple)
    prove: Callable[[], None] = lambda: None


def write_container(path: str | os.PathLike[str], made: Container, places: Mapping[int, Place], hashed: bool) -> int:
    """Writes a file beside `path` and renames it; returns its bytes.

    `places` are the arrays (by number) that stay in the file where they lie: with `hashed` one in the same folder, told
    by its SHA-256, else one told by inode, size and time, and the new file is this user's own. Raises `OSError`, and
    `OptionError` for a file elsewhere.
    """
    files = {place.path: _file(place, path if hashed else None) for place in places.values()}
    names = list(files)
    rows: list[Any] = []
    at, crc = 0, 0  # relative to the start of the arrays
    blobs: list[tuple[int, Any]] = []
    for number, array in enumerate(made.arrays):
        where, dtype = places.get(number), dtype_of(array.dtype).name
        if where is not None:
            rows.append([names.index(where.path), where.offset, dtype, list(array.shape)])
            continue
        at = _round_up(at, PAGE if array.nbytes >= PAGE else SMALL)
        rows.append([-1, at, dtype, list(array.shape)])
        blobs.append((at, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data))
        at += array.nbytes
    if at <= MOST_CHECKED:
        for _, data in blobs:
            crc = zlib.crc32(data, crc)
    sections = [[name, len(body), zlib.crc32(body)] for name, body in made.sections.items()]
    header: dict[str, Any] = {"facts": made.facts, "sections": sections, "arrays": rows}
    header |= {"files": list(files.values()), "arrays_bytes": at, "arrays_crc32": crc}
    text = json.dumps(header).encode()
    if len(text) > MOST_HEADER:
        raise OptionError(f"{path}: the header would have {len(text)} bytes, an artifact's has {MOST_HEADER} at most")
    starts, first = _layout([len(body) for body in made.sections.values()], len(text))
    pieces: list[tuple[int, Any]] = [(0, HEAD.pack(MAGIC, FORMAT, len(text), sha256(text).digest()) + text)]
    pieces += list(zip(starts, made.sections.values(), strict=True))
    pieces += [(first + offset, data) for offset, data in blobs]
    with replacing(path, own=not hashed) as file:
        for start, data in pieces:
            file.seek(start)
            file.write(data)
        file.truncate(first + at)
    return first + at


def read_container(path: str | os.PathLike[str], *, own: bool = False, proved: bool = True) -> Container:
    """Reads a file; an `own` one is of the user's cache.

    Without `proved` a thread computes the checksum of the arrays while the caller goes on, who then calls `prove`.
    Raises `ModelFormatError`, and `StaleFile` where a file that it refers to has changed.
    """
    name = os.fspath(path)
    try:
        with open(open_regular(name, own=own), "rb") as file:
            whole = map_file(file.fileno(), name, writable=True)
    except OSError as error:
        raise ModelFormatError(f"{name}: can't be read: {error.strerror or error}") from None
    try:
        made = _parse(whole, None if own else name, not proved)
        if proved:
            made.prove()
        return made
    except StaleFile as error:
        raise StaleFile(f"{name}: {error}") from None
    except ModelFormatError as error:
        raise ModelFormatError(f"{name}: {error}") from None
    except (KeyError, TypeError, ValueError, IndexError, RecursionError, OverflowError) as error:
        raise ModelFormatError(f"{name}: the header of the artifact is damaged: {error!r}") from None


def _parse(whole: Array, name: str | None, beside: bool) -> Container:
    if whole.size < HEAD.size:
        raise ModelFormatError(f"the artifact is cut off: it has {whole.size} bytes")
    magic, version, length, digest = HEAD.unpack(whole[: HEAD.size].tobytes())
    if not is_artifact(magic):
        raise ModelFormatError("it is no artifact of rlx")
    if version != FORMAT:
        newer = "upgrade rlx" if version > FORMAT else "save the model again with this rlx"
        raise ModelFormatError(f"the artifact has format {version}, this rlx reads format {FORMAT}: {newer}")
    text = whole[HEAD.size : HEAD.size + length].tobytes()
    if length > MOST_HEADER or len(text) != length or sha256(text).digest() != digest:
        raise ModelFormatError("the header of the artifact is damaged or cut off")
    header = json.loads(text)
    rows = header["sections"]
    starts, first = _layout([_count(size) for _, size, _ in rows], length)
    arrays_bytes = _count(header["arrays_bytes"])
    if whole.size != first + arrays_bytes:
        raise ModelFormatError(f"the artifact has {whole.size} bytes, its header says {first + arrays_bytes}")
    sections = {}
    for start, (section, size, checksum) in zip(starts, rows, strict=True):
        sections[_text(section)] = body = whole[start : start + size].tobytes()
        if zlib.crc32(body) != checksum:
            raise ModelFormatError(f"the section {section!r} is damaged: its checksum differs")
    own = whole[first:]
    files = [_of_cache(record) if name is None else _beside(record, name) for record in header["files"]]
    arrays = [_array(own if row[0] == -1 else files[_count(row[0])], row) for row in header["arrays"]]
    facts = _facts(header["facts"])
    if arrays_bytes > MOST_CHECKED:
        return Container(facts, sections, arrays)
    checked = [a.reshape(-1).view(np.uint8) for a, row in zip(arrays, header["arrays"], strict=True) if row[0] == -1]
    return Container(facts, sections, arrays, _checking(checked, _count(header["arrays_crc32"]), beside))


def _checking(arrays: Sequence[Array], wanted: int, beside: bool) -> Callable[[], None]:
    """What raises where the checksum of arrays is not `wanted`; `beside`: a thread begins to compute it now."""
    found: list[int] = []

    def compute() -> None:
        crc = 0
        for array in arrays:
            crc = zlib.crc32(array.data, crc)  # gives up the interpreter's lock
        found.append(crc)

    worker = threading.Thread(target=compute, name="rlx checksum", daemon=True)
    started = beside and sum(array.size for array in arrays) >= WORTH_A_THREAD
    if started:
        try:
            worker.start()
        except RuntimeError:  # the system gives no thread
            started = False

    def prove() -> None:
        if started:
            worker.join()
        if not found:
            compute()
        if found != [wanted]:
            raise ModelFormatError("the arrays are damaged: their checksum differs")

    return prove


def _array(memory: Array, row: Sequence[Any]) -> Array:
    _, start, dtype, shape = row
    offset, sizes = _count(start), [_count(size) for size in shape]
    if dtype not in DTYPES or DTYPES[dtype].kind == "s" or len(sizes) > MOST_AXES:
        raise ModelFormatError(f"an array has the unknown type {dtype!r} or {len(sizes)} axes")
    element = DTYPES[dtype].numpy
    nbytes = element.itemsize
    for size in sizes:
        nbytes *= size
    if offset + nbytes > memory.size:
        raise ModelFormatError(f"an array of {nbytes} bytes at {offset} lies outside of {memory.size} bytes")
    return memory[offset : offset + nbytes].view(element).reshape(sizes)


def _file(place: Place, beside: str | os.PathLike[str] | None) -> dict[str, Any]:
    """How a file is named, in an artifact that lies beside it or in the cache."""
    if beside is None:
        return {"path": place.path, "identity": list(place.identity)}
    folder = os.path.dirname(os.path.realpath(beside))
    inside = os.path.relpath(os.path.realpath(place.path), folder)
    if inside.split(os.sep)[0] == os.pardir or os.path.isabs(inside):
        raise OptionError(
            f"save(external=True): weights lie in {place.path!r}, which is not in the folder of the artifact, "
            f"{folder!r}: save it beside that file, or with its weights"
        )
    with open(open_regular(place.path), "rb") as file:
        return {"path": inside.replace(os.sep, "/"), "sha256": _digest(map_file(file.fileno(), place.path))}


def _digest(data: Array) -> str:
    import hashlib  # slow to load, and fast with the many bytes of weights

    return hashlib.sha256(data.data).hexdigest()


def _beside(record: Mapping[str, Any], name: str) -> Array:
    """The bytes of a file in the folder of the artifact `name`, opened as external data of models is."""
    from rlx.importers.sources import Folder

    path, digest = _text(record["path"]), _text(record["sha256"])
    source = Folder(name).open(path, "the artifact")
    view = source.view()
    if _digest(view) != digest:
        raise StaleFile(f"it refers to {path!r}, which has changed since: make it again")
    return view


def _of_cache(record: Mapping[str, Any]) -> Array:
    """The bytes of a file that an entry of the cache refers to."""
    path = _text(record["path"])
    try:
        with open(open_regular(path), "rb") as file:
            if list(identity_of(os.fstat(file.fileno()))) != record["identity"]:
                raise StaleFile(f"it refers to {path!r}, which has changed since: make it again")
            return map_file(file.fileno(), path)
    except OSError as error:
        raise StaleFile(f"it refers to {path!r}, which can't be read: {error.strerror or error}") from None


def _facts(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ModelFormatError(f"the header of the artifact is damaged: {value!r:.80} are no facts")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ModelFormatError(f"the header of the artifact is damaged: {value!r} is no text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ModelFormatError(f"the header of the artifact is damaged: {value!r} is no size")
    return value


def _layout(sizes: Sequence[int], header: int) -> tuple[list[int], int]:
    """Where the sections start, and where the arrays do."""
    starts, at = [], HEAD.size + header
    for size in sizes:
        at = _round_up(at, SMALL)
        starts.append(at)
        at += size
    return starts, _round_up(at, PAGE)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# ---- which build of rlx this is: what stored code depends on besides the machine


@functools.cache
def build_identity() -> str:
    """Version of rlx, its sources by name and size, and the Python whose code objects its functions are."""
    digest = sha256(_sources()[0].encode()).hexdigest()[:16]
    return f"rlx {sys.modules['rlx'].__version__} {digest} {sys.implementation.cache_tag}"


@functools.cache
def source_times() -> str:
    """A hash of when the sources last changed, for what never leaves this machine."""
    return sha256(_sources()[1].encode()).hexdigest()


@functools.cache
def _sources() -> tuple[str, str]:
    """What tells builds apart: relative paths and bytes of all source files; and when these changed.

    Both are empty where the files don't lie in a folder.
    """
    root = str(Path(__file__).parents[1])
    found: list[tuple[str, int, int]] = []
    folders = [root]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.name.endswith(".py"):
                        status = entry.stat()
                        found.append((entry.path[len(root) :], status.st_size, status.st_mtime_ns))
                    elif entry.is_dir() and entry.name != "__pycache__":
                        folders.append(entry.path)
        except OSError:
            return "", ""  # in an archive: the version has to do
    found.sort()
    return repr([row[:2] for row in found]), repr([row[2] for row in found])
