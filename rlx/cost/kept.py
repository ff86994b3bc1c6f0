"""Calibrations that are kept in the user's cache folder: for a device, thread count, machine and set of versions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.backends import backend_named
from rlx.backends.base import Backend
from rlx.cost.ceilings import Ceilings, guess_of
from rlx.disk import cache_folder, read_kept, write_kept
from rlx.errors import DeviceUnavailable, RlxError
from rlx.lazy_imports import log
from rlx.machine import machine_facts
from rlx.records import replace

__all__ = ["ceilings_of", "keep", "kept_ceilings", "machine_key", "refine"]

FORMAT = 9
PACKAGES = ("rlx", "numpy", "llvmlite", "jax", "jaxlib", "mlx")
POINTS = 24  # that a correction may have
LARGEST = 4.0  # what real runs may change a correction by
SAME = 0.35  # distance of logarithms below which one point takes the place of another
WEIGHT = 0.5  # of what real runs say against what was calibrated


def machine_key(backend: Backend) -> list[Any]:
    """What a measurement is valid for: the machine, the device's driver, and the versions of the packages."""
    return [FORMAT, backend.name, backend.available().reason, *machine_facts(PACKAGES)]


def _path(device: str, threads: int) -> Path:
    return cache_folder() / f"ceilings-{device}-{threads}.json"


_loaded: dict[tuple[str, int], Ceilings] = {}


def kept_ceilings(device: str, threads: int | None = None) -> Ceilings | None:
    """The calibration of a device that is kept for this machine; None where there is none that is valid."""
    backend = backend_named(device)
    count = backend.threads_of(threads)
    if (device, count) in _loaded:
        return _loaded[device, count]
    facts = read_kept(_path(device, count), machine_key(backend))
    try:
        made = None if facts is None else Ceilings.from_dict(facts)
    except (RlxError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
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
    count = backend.threads_of(threads)
    if (measure or renew) and backend.available().present:
        from rlx.cost.measure import calibrate

        log.warning("calibrating %s: some %g s, once on this machine", device, seconds)
        try:
            made = calibrate(device, threads=count, seconds=seconds)
        except DeviceUnavailable:
            raise
        except RlxError as error:
            log.warning("%s can't be calibrated, its ceilings are guesses: %s", device, error)
        else:
            keep(made)
            return made
    return guess_of(backend, count)


def refine(ceilings: Ceilings, found: Mapping[str, Sequence[tuple[float, ...]]]) -> Ceilings:
    """Ceilings corrected by real runs, kept: by kind points (predicted seconds, sizes ..., measured / predicted).

    The seconds are those before any correction, the ratio is to those after it. Each point moves the correction half of
    the way, by a factor of 4 at most; a kind has 24 points at most.
    """
    corrections = dict(ceilings.corrections)
    for kind, points in found.items():
        kept = list(corrections.get(kind, ()))
        for *place, ratio in points:
            if not (min(place) > 0 and ratio > 0):
                continue
            step = min(max(ratio, 1 / LARGEST), LARGEST) ** WEIGHT
            moved = (*place, ceilings.correction(kind, place[0], place[1:]) * step)
            kept = [p for p in kept if not _near(p, moved)] + [moved]
        while len(kept) > POINTS:
            pairs = itertools.combinations(range(len(kept)), 2)
            del kept[min(pairs, key=lambda ij: _distance(kept[ij[0]], kept[ij[1]]))[0]]
        if kept:
            corrections[kind] = tuple(sorted(kept))
    made = replace(ceilings, corrections=corrections)
    if not made.guessed:
        keep(made)
    return made


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Between the places of two points."""
    return math.dist(*([math.log(x) for x in p[:-1]] for p in (a, b))) if len(a) == len(b) else math.inf


def _near(a: Sequence[float], b: Sequence[float]) -> bool:
    return _distance(a, b) < SAME
