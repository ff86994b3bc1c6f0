"""Machine code that comes with rlx: of kernels and routines that many models have, for a few kinds of processors.

tools/prebuild.py makes an archive for each `Level`, a set of features that processors share. Code is found by its text,
so what is found is what LLVM would make of that text here, but for the choice and the order of instructions: results
have the same bits. A machine looks into the archives of all levels whose features it has, the best one first. What no
archive has is compiled.

    0   b"rlxpre01", u32 bytes of the head
    12  the head, in JSON: {"by": the compiler, "objects": {key: [offset behind the head, bytes], ...}}
    ... objects (ELF), each compressed by zlib
"""

from __future__ import annotations

import functools
import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

from rlx.backends.cpu.target import Target
from rlx.ir.mapped import identity_of
from rlx.lazy_imports import log
from rlx.records import dataclass

__all__ = ["LEVELS", "Archive", "Level", "archive_bytes", "archives_of", "levels_of", "read", "symbol_of"]

MAGIC = b"rlxpre01"
FOLDER = Path(__file__).parents[1] / "prebuilt"
TRIPLE = "x86_64-unknown-linux-gnu"

V3 = "sse sse2 sse3 ssse3 sse4.1 sse4.2 popcnt cx16 sahf fxsr mmx cmov cx8 avx avx2 bmi bmi2 f16c fma lzcnt movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
VENDORS = {"AuthenticAMD": "amd"}  # what /proc/cpuinfo says -> whose archives are looked into; others: "intel"


@dataclass(frozen=True)
class Level:
    """Processors of a vendor that have all these features.

    `tuned_for` is LLVM's name of the one whose order of instructions is taken: without one, a block of products takes
    some 3 % longer.
    """

    name: str
    vendor: str
    tuned_for: str
    has: str
    vector_bytes: int
    tiles: bool = False

    @property
    def features(self) -> frozenset[str]:
        """LLVM's names of the features."""
        return frozenset(self.has.split())

    @property
    def target(self) -> Target:
        """The machine that code of the level is made for; it is `tuned_for` with no other features."""
        listed = ",".join(f"+{name}" for name in sorted(self.features))
        return Target(self.tuned_for, listed, TRIPLE, self.vector_bytes, 1, self.tiles, self.tiles)

    @property
    def path(self) -> Path:
        """The file of its archive."""
        return FOLDER / f"{self.name}-{self.vendor}.bin"


LEVELS = (  # of each vendor, the best first
    Level("amx", "intel", "sapphirerapids", f"{V4} avx512vnni avx512bf16 amx-tile amx-bf16 amx-int8", 64, tiles=True),
    Level("avx512-vnni", "intel", "icelake-server", f"{V4} avx512vnni", 64),
    Level("avx512", "intel", "skylake-avx512", V4, 64),
    Level("avx2-vnni", "intel", "alderlake", f"{V3} avxvnni", 32),
    Level("avx2", "intel", "haswell", V3, 32),
    Level("avx512-vnni", "amd", "znver4", f"{V4} avx512vnni", 64),
    Level("avx2", "amd", "znver3", V3, 32),
)


class Archive:
    """Objects by key, in a file: only its head stays in memory. Raises ValueError for what is no archive, OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.file = identity_of(os.fstat(file.fileno()))
            begin = file.read(len(MAGIC) + 4)
            if begin[: len(MAGIC)] != MAGIC or len(begin) < len(MAGIC) + 4:
                raise ValueError("not an archive of code")
            (length,) = struct.unpack_from("<I", begin, len(MAGIC))
            self.start, size = len(begin) + length, os.fstat(file.fileno()).st_size
            if self.start > size:
                raise ValueError("its head is cut off")
            head = json.loads(file.read(length))
        self.by: str = head["by"]
        self.places: dict[str, list[int]] = dict(head["objects"])
        if self.start + sum(size for _, size in self.places.values()) != size:
            raise ValueError("it ends too early or too late")

    def find(self, key: str) -> bytes | None:
        """The object for a key; None where there is none, or it is damaged, or the file is another one by now."""
        place = self.places.get(key)
        if place is None:
            return None
        at, size = place
        try:
            with self.path.open("rb") as file:
                if identity_of(os.fstat(file.fileno())) != self.file:
                    return None
                file.seek(self.start + at)
                return zlib.decompress(file.read(size))
        except (OSError, zlib.error) as error:
            log.warning("ignoring damaged code in an archive by %s: %s", self.by, error)
            return None


def archive_bytes(objects: Mapping[str, bytes], by: str) -> bytes:
    """The archive of some objects, made by that compiler."""
    places, parts, at = {}, [], 0
    for key, obj in sorted(objects.items()):
        parts.append(zlib.compress(obj, 9))
        places[key] = [at, len(parts[-1])]
        at += len(parts[-1])
    head = json.dumps({"by": by, "objects": places}, separators=(",", ":")).encode()
    return MAGIC + struct.pack("<I", len(head)) + head + b"".join(parts)


@functools.cache
def archives_of(features: str, vendor: str) -> tuple[Archive, ...]:
    """The archives of code for a machine with these features, as LLVM lists them, of that vendor."""
    return tuple(archive for level in levels_of(features, vendor) if (archive := read(level.path)) is not None)


def levels_of(features: str, vendor: str) -> list[Level]:
    """The levels of a machine with these features, the best first."""
    there = {name[1:] for name in features.split(",") if name.startswith("+")}
    own = VENDORS.get(vendor, "intel")
    return [level for level in LEVELS if level.vendor == own and level.features <= there]


def read(path: Path) -> Archive | None:
    """The archive in a file; None where it is not there, as in a checkout, or is damaged."""
    try:
        return Archive(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, struct.error) as error:
        log.warning("ignoring a damaged archive of code: %s (%s)", path, error)
        return None


def symbol_of(key: str) -> str:
    """The name under which an object defines the function that it was made for."""
    return f"rlx_{key[:32]}"
