"""Calibrations that are kept in the user's cache folder: for a device, thread count, machine and set of versions."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlx.backends import backend_named
from rlx.backends.base import Backend
from rlx.cost.ceilings import Ceilings, guess
from rlx.disk import cache_folder, read_kept, write_kept
from rlx.errors import DeviceUnavailable, RlxError

__all__ = ["ceilings_of", "keep", "kept_ceilings", "machine_key", "refine"]

log = logging.getLogger("rlx")

FORMAT = 2
PACKAGES = ("rlx", "numpy", "llvmlite", "jax", "jaxlib", "mlx")
POINTS = 12  # that a correction may have
LARGEST = 4.0  # what real runs may change a correction by
WEIGHT = 0.5  # of what real runs say against what was calibrated


def machine_key(backend: Backend) -> list[Any]:
    """What a measurement is valid for: the machine, the device's driver, and the versions of the packages."""
    versions = []
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    system = [platform.platform(), platform.machine(), platform.processor(), platform.python_version()]
    return [FORMAT, backend.name, backend.available().reason, *system, *versions]


def _path(device: str, threads: int) -> Path:
    return cache_folder() / f"ceilings-{device}-{threads}.json"


_loaded: dict[tuple[str, int], Ceilings] = {}


def kept_ceilings(device: str, threads: int | None = None) -> Ceilings | None:
    """The calibration of a device that is kept for this machine; None where there is none that is valid."""
    backend = backend_named(device)
    count = threads or backend.threads
    if (device, count) in _loaded:
        return _loaded[device, count]
    facts = read_kept(_path(device, count), machine_key(backend))
    try:
        made = None if facts is None else Ceilings.from_dict(facts)
    except (RlxError, KeyError, TypeError, ValueError, AttributeError):
        return None
    if made is not None:
        _loaded[device, count] = made
    return made


def keep(ceilings: Ceilings) -> None:
    """Keeps a calibration of this machine."""
    _loaded[ceilings.device, ceilings.threads] = ceilings
    key = machine_key(backend_named(ceilings.device))
    write_kept(_path(ceilings.device, ceilings.threads), key, ceilings.to_dict())


def ceilings_of(
    device: str, threads: int | None = None, *, measure: bool = True, renew: bool = False, seconds: float = 8.0
) -> Ceilings:
    """The ceilings of a device: those kept, else measured now and kept, else a guess that is marked as one.

    `measure=False` never measures; `renew` measures again; `seconds` is what that may take. A device that is not here
    has guesses only.
    """
    if not renew:
        kept = kept_ceilings(device, threads)
        if kept is not None:
            return kept
    backend = backend_named(device)
    count = threads or backend.threads
    if (measure or renew) and backend.available().present:
        from rlx.cost.measure import calibrate

        log.warning("calibrating %s for the choice of devices: some %g s, once on this machine", device, seconds)
        try:
            made = calibrate(device, threads=count, seconds=seconds)
        except DeviceUnavailable:
            raise
        except RlxError as error:
            log.warning("%s can't be calibrated, its ceilings are guesses: %s", device, error)
        else:
            keep(made)
            return made
    return guess(device, threads=count)


def refine(ceilings: Ceilings, found: Mapping[str, Sequence[tuple[float, float]]]) -> Ceilings:
    """Ceilings corrected by real runs: by kind of kernel (predicted seconds, measured / predicted), and keeps them.

    Each point moves the correction half of the way, by a factor of 4 at most; a kind has 12 points at most.
    """
    corrections = dict(ceilings.corrections)
    for kind, points in found.items():
        curve = dict(corrections.get(kind, ()))
        for seconds, ratio in points:
            if not (seconds > 0 and ratio > 0):
                continue
            step = min(max(ratio, 1 / LARGEST), LARGEST) ** WEIGHT
            before = ceilings.correction(kind, seconds)
            near = next((s for s in curve if 0.7 < s / seconds < 1.4), seconds)
            curve[near] = before * step
        kept = sorted(curve.items())
        while len(kept) > POINTS:
            gaps = [kept[i + 1][0] / kept[i - 1][0] for i in range(1, len(kept) - 1)]
            del kept[1 + gaps.index(min(gaps))]
        if kept:
            corrections[kind] = tuple(kept)
    made = replace(ceilings, corrections=corrections)
    if not made.guessed:
        keep(made)
    return made
