"""The disk cache of whole artifacts: what was compiled from a model file, with its packed weights.

An entry is found by the identity of the model file (device, inode, size, time of change and a hash of its first 64
KiB), the values of inputs that are constants, the options that code depends on, the processor, the versions of rlx,
Python and LLVM. It lists the other files that the import read, such as external weights, and is void when one of them
has changed. Params that are used as they lie in a mapped file stay there; packed ones are in the entry.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from rlx.backends import RESTORERS, restorer_named
from rlx.disk import USUAL_LIMITS, cache_folder, evict, log_unused, open_regular, own_folder, parts_of_limit
from rlx.errors import ModelFormatError, OptionError
from rlx.ir.graph import Graph
from rlx.ir.mapped import FileIdentity, identity_of
from rlx.lazy_imports import log, sha256
from rlx.options import CompileOptions
from rlx.runtime.container import ENDING, FORMAT, StaleFile, build_identity, read_container, source_times
from rlx.runtime.restore import CODE_OPTIONS, restore

if TYPE_CHECKING:
    from rlx.runtime.compiled import CompiledGraph
    from rlx.runtime.writing import Writer

__all__ = ["MAX_BYTES", "ArtifactCache", "finish_writing"]

MAX_BYTES = USUAL_LIMITS["artifacts"]  # of all entries together; one larger than a quarter of it is not kept
HEAD_BYTES = 64 << 10

_writers: WeakValueDictionary[Path, Writer] = WeakValueDictionary()  # of entries that are on their way


class ArtifactCache:
    """Entries in a folder, at most `max_bytes` bytes, least recently used out first.

    A damaged entry, one that another user could have written, a folder that can't be read or written or a full disk
    only means misses, never an error.
    """

    def __init__(self, options: CompileOptions, policy: str, values: str = "", max_bytes: int = MAX_BYTES) -> None:
        self.policy = policy  # for the device "auto"
        self.values = values  # of inputs that are constants in what is compiled
        self.folder = (cache_folder() if options.cache_dir is None else Path(options.cache_dir)) / "artifacts"
        self.max_bytes = max_bytes
        self.place: Path | None = None  # of the entry, once `find` was asked

    def find(
        self, path: Path, options: CompileOptions, settled: CompileOptions, source: Callable[[], Graph]
    ) -> CompiledGraph | None:
        """The compiled graph for a model file, if there is an entry.

        `settled` are the options once the file is imported, which `source` does.
        """
        entry = self.place = self.entry(path, options)
        if entry is None:
            return None
        if (writer := _writers.get(entry)) is not None:
            writer.finish()
        if not os.path.lexists(entry):  # a method of `Path` raises where a folder can't be looked into
            return None
        try:
            file = read_container(entry, own=True, proved=False)
            if file.facts["key"] != entry.stem:
                raise ModelFormatError("it was made for something else")
            for name, identity in file.facts["files"]:
                if list(identity_of(os.stat(name))) != identity:
                    raise StaleFile(f"{name} has changed")
            try:
                model = restore(file, settled, source)
            except Exception:
                file.prove()  # what is damaged is the cause
                raise
            file.prove()  # it was computed beside that, which uses none of the arrays yet
        except StaleFile as error:
            log.debug("not taken from the cache: %s", error)
            return None
        except OptionError:
            raise  # of what the user set, as the memory to keep to
        except (ModelFormatError, OSError, KeyError, TypeError, ValueError) as error:
            log.warning("ignoring a damaged or foreign cache file: %s (%s)", entry, error)
            with suppress(OSError):
                entry.unlink()
            return None
        with suppress(OSError):
            os.utime(entry)
        return model

    def keep(self, path: Path, model: CompiledGraph, files: Mapping[str, FileIdentity]) -> None:
        """Stores what was compiled from a model file that `find` was asked for, where that can be done.

        Weights are packed for it now; the entry is written beside what the model is used for: see `Writer`.
        """
        entry = self.place
        if entry is None or model._unset or "save" not in model.capabilities:
            return
        needs = model.needs
        if needs is not None and needs.prepared > self.max_bytes // 4:
            log.debug("%s: not kept in the cache: its packed weights take %d bytes", path, needs.prepared)
            return
        model._executable.pack()
        listed = [[name, list(identity)] for name, identity in files.items()]
        if "clone" not in model.capabilities:
            self._store(path, model, entry, listed)
            return
        twin = model.clone(fresh=True)  # with the weights as they are now, whatever the model is given later

        def write() -> None:
            try:
                self._store(path, twin, entry, listed)
            finally:
                twin._executable.dispose()

        from rlx.runtime.writing import Writer

        for other in list(_writers.values()):  # at most one waits, with a model that does not run
            other.begin.set()
        model._writer = _writers[entry] = Writer(entry, write)

    def _store(self, path: Path, model: CompiledGraph, entry: Path, files: Sequence[Any]) -> None:
        from rlx.runtime.artifact import store

        try:
            own_folder(self.folder)
            store(model, entry, {"key": entry.stem, "files": files})
            self.evict()
        except OSError as error:
            log_unused(self.folder, error)
        except OptionError as error:
            log.debug("%s: can't be stored in the cache: %s", path, error)

    def entry(self, path: Path, options: CompileOptions) -> Path | None:
        """Where the entry for a model file is or would be; None where it can't be told apart from others."""
        devices = [name for name in RESTORERS if options.device in ("auto", name)]
        if not devices or not _is_plain(options.dims):
            return None
        try:
            with open(open_regular(path), "rb") as file:
                identity = identity_of(os.fstat(file.fileno()))
                head = sha256(file.read(HEAD_BYTES)).hexdigest()
        except OSError:
            return None
        chosen = {name: getattr(options, name) for name in CODE_OPTIONS} | {"dims": _sorted(options.dims)}
        targets = [restorer.target() for restorer in map(restorer_named, devices) if restorer is not None]
        versions = (FORMAT, build_identity(), source_times(), targets)
        key = repr(
            (
                os.path.abspath(path),
                identity,
                head,
                options.device,
                self.policy,
                self.values,
                sorted(chosen.items()),
                versions,
            )
        )
        return self.folder / (sha256(key.encode()).hexdigest() + ENDING)

    def evict(self) -> None:
        """Deletes the least recently used files until the bound holds: entries, and what a process that died left."""
        most = min(self.max_bytes, parts_of_limit()["artifacts"])
        evict(self.folder.iterdir(), most, most)


def finish_writing() -> None:
    """Waits until all entries are there that are on their way."""
    for writer in list(_writers.values()):
        writer.finish()


def _is_plain(value: Any) -> bool:
    """Whether equal values have equal texts, and others have not."""
    if isinstance(value, Mapping):
        return all(type(k) in (int, str) and _is_plain(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (int, str)


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return sorted(((k, _sorted(v)) for k, v in value.items()), key=repr)
    return tuple(map(_sorted, value)) if isinstance(value, list | tuple) else value
