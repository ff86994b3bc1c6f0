"""What a device takes before any model: measured once a machine in a fresh process, and kept."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.disk import cache_folder, read_kept, write_kept
from rlx.errors import DeviceUnavailable
from rlx.estimate.system import COMPILED, RESTORED
from rlx.machine import machine_facts
from rlx.records import dataclass, replace

if TYPE_CHECKING:
    from rlx.backends.base import CodeSizes

__all__ = ["FUNCTION", "NODE", "Overhead", "known_overhead", "overhead_of"]

FORMAT = 12
SECONDS = 300  # the longest that a measurement may take
MEASURED_WITH = ("rlx", "llvmlite", "numpy", "ml_dtypes")
MAPPED = 16 << 20  # address space that loading a file takes in passing, at most
SCATTER = 6 << 20  # bytes by which measurements of equal processes differ
ARTIFACT = 5 << 20  # bytes of a stored model that the system reads along with what is used of it
# `passing` is rounded down: what stays is not too small
SCATTERED = ("fixed", "compiling", "opening", "cached", "address")
# Bytes of what Python keeps of a node, and of a kernel's objects and tables, machine code, and what the compiler keeps:
# measured are up to 5 and 41 KiB, as both find freed memory. They are the same on every machine, as budgets are.
NODE, FUNCTION = 8 << 10, 32 << 10
STAGES = 4 << 10  # bytes of a node in what the stages of the compiler pass on, also until Python finds it is garbage
# Bytes for a character of the kernels' text besides itself: what its making leaves in parts that are too small to be
# given back; and lists of lines, and the compiler's own form of it, until it is code. Measured are up to 10.
LEFT_BY_TEXT, PASSING_TEXT = 2, 4


@dataclass(frozen=True)
class Overhead:
    """Growth of the resident set, in bytes: `fixed` from `import rlx` to the first run of a tiny graph.

    Beyond that, a larger graph adds `per_node` for each node, on devices that don't say what their code takes (others
    have 0).
    `compiling` is the part of `fixed` that comes only
    once something is compiled, kernels of every kind and by all threads that compile: how much of the compiler's
    library that brings into memory depends on what is compiled. `passing` is the part that goes again when the code is
    made, such as pages of that library. What is counted for the graph's own code is in none of them. `opening` is the
    growth while the compiler comes into the process, most of which goes before anything is compiled. `cached` is the
    growth where the code of a tiny graph comes from the cache. `address` and `address_compiling` are `fixed` and
    `compiling` of the address space, of which
    libraries are mapped whole and threads reserve more than they use. All are rounded up by what measurements scatter,
    so that they are rather too large. What a process has already it has once: `left` is what is still to come.
    """

    fixed: int
    per_node: int = 0
    compiling: int = 0
    passing: int = 0
    opening: int = 0
    address: int = 0
    address_compiling: int = 0
    cached: int = 0
    guess: bool = False  # not measured on this machine

    def left(self, device: str) -> Overhead:
        """The same for this process as it is now: without what the device has brought into it already.

        What passes comes again when something is compiled, but these are pages of a file, which are nobody's memory.
        """
        if device not in COMPILED:
            return replace(self, cached=0) if device in RESTORED else self
        return replace(self, fixed=0, compiling=0, passing=0, opening=0, cached=0, address=0, address_compiling=0)

    @property
    def stays(self) -> int:
        """Bytes that are there as long as the process."""
        return self.fixed - self.passing

    @property
    def opens(self) -> int:
        """Bytes beyond these while the compiler comes into the process."""
        return max(0, self.opening - self.stays)

    @property
    def certainty(self) -> str:
        """Of parts that go by it: "calibrated", or "guessed" where nothing was measured."""
        return "guessed" if self.guess else "calibrated"

    @property
    def unused(self) -> int:
        """Bytes of address space that are mapped and never resident, rounded up; they count under RLIMIT_AS."""
        return max(0, self.address - self.fixed) + MAPPED

    def code_bytes(self, sizes: CodeSizes | None, nodes: int) -> int:
        """Bytes of a graph's code: what is known of it, and the rest by count."""
        if sizes is None:
            return nodes * self.per_node
        return self.source_bytes(sizes, nodes) + sizes.words + nodes * NODE + sizes.functions * FUNCTION

    def source_bytes(self, sizes: CodeSizes, nodes: int) -> int:
        """Those of them that only compiling takes."""
        return sizes.text + nodes * STAGES

    def left_by_text(self, sizes: CodeSizes) -> int:
        """Bytes beyond these that stay in the process."""
        return LEFT_BY_TEXT * sizes.text if self.fixed else 0  # 0: what the device takes is not asked for

    def passing_text(self, sizes: CodeSizes) -> int:
        """Bytes beyond these that go when the code is made."""
        return PASSING_TEXT * sizes.text if self.fixed else 0


USUAL = Overhead(
    fixed=128 << 20,
    per_node=16 << 10,
    compiling=64 << 20,
    passing=24 << 20,
    opening=64 << 20,
    address=288 << 20,
    address_compiling=96 << 20,
    cached=24 << 20,
    guess=True,
)


def overhead_of(device: str) -> Overhead:
    """The overhead of a device here: from the cache, else measured in a fresh process (a few seconds) and kept.

    Raises `DeviceUnavailable` when it can't be measured.
    """
    kept = _kept(device)
    if kept is not None:
        return kept
    found: dict[str, Any] = _measured(device)
    measured = Overhead(**found)
    write_kept(_path(device), _key(device), vars(measured))
    return measured


def known_overhead(device: str) -> Overhead:
    """The overhead of a device as far as it has been measured here, else a usual one: no process is started."""
    return _kept(device) or USUAL


def _kept(device: str) -> Overhead | None:
    with suppress(AttributeError, TypeError, ValueError, ArithmeticError):
        found: dict[str, Any] = {name: int(size) for name, size in read_kept(_path(device), _key(device)).items()}
        return Overhead(**found)
    return None


def _path(device: str) -> Path:
    return cache_folder() / f"overhead-{device}.json"


def _key(device: str) -> list[Any]:
    return [FORMAT, device, *machine_facts(MEASURED_WITH), *_code_that_came(device)]


def _code_that_came(device: str) -> list[str]:
    """The files of machine code that came with the package: what they have is not compiled."""
    folder = Path(__file__).parents[1] / "backends" / device / "prebuilt"
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(".bin"))
    except OSError:
        return []


def _measured(device: str) -> dict[str, int]:
    """The fields of `Overhead`, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        found = _probed("main", device, folder)
        found |= _probed("again", device, folder)
    found["cached"] += ARTIFACT
    return {name: size + SCATTER * (name in SCATTERED) for name, size in found.items()}


def _probed(function: str, device: str, folder: str) -> dict[str, int]:
    """What a function of the probe prints in a fresh process."""
    import subprocess

    code = (
        f"import rlx, numpy\nfrom rlx.disk import keep_in\nkeep_in({folder!r})\n"  # empty: all code is compiled
        f"from rlx.estimate.probe import {function}\n{function}({device!r}, {folder!r})"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
        return {str(name): int(size) for name, size in json.loads(done.stdout.splitlines()[-1]).items()}
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError, IndexError, AttributeError) as error:
        reason = str(error)
    raise DeviceUnavailable(f"device {device!r}: what it takes by itself can't be measured: {reason}")
