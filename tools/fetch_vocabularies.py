"""Fetch llama.cpp's vocabularies with their test vectors, out of the source distribution of llama-cpp-python on PyPI.

They are laid at DEST/ggml-vocab-NAME.gguf, .gguf.inp (texts) and .gguf.out (tokens), where the tests of the tokenisers
find them.

DEST is models/llama-cpp-vocabularies if not given.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

PACKAGE = "llama-cpp-python==0.3.36"
FOLDER = "vendor/llama.cpp/models/ggml-vocab-"
BUILD = "scikit-build-core"  # pip asks the source for its name, by its own build tool


def fetch(dest: Path) -> int:
    """Lays the files there; how many they are."""
    with tempfile.TemporaryDirectory() as work:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--target", f"{work}/build", BUILD], check=True)
        source_only = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        command = [*pip, "download", *source_only, "--dest", work, PACKAGE]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": f"{work}/build"})
        (archive,) = Path(work).glob("*.tar.gz")
        dest.mkdir(parents=True, exist_ok=True)
        count = 0
        with tarfile.open(archive) as source:
            for member in source:
                inside = member.name.partition("/")[2]
                data = source.extractfile(member) if member.isfile() and inside.startswith(FOLDER) else None
                if data is not None:
                    (dest / PurePosixPath(inside).name).write_bytes(data.read())
                    count += 1
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    usual = Path(__file__).parents[1] / "models" / "llama-cpp-vocabularies"
    parser.add_argument("dest", nargs="?", type=Path, default=usual, metavar="DEST")
    where = parser.parse_args().dest
    print(f"{fetch(where)} files in {where}")
