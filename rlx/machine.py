"""What a measurement that is kept holds for: the system, and the versions of the packages that take part.

`importlib.metadata` would bring 3 MB of modules for that, and `platform.processor` start a process.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib.util import find_spec

__all__ = ["machine_facts"]

RECORDS = (".dist-info", ".egg-info")  # how the folder or file ends that an installer leaves beside a package


def machine_facts(packages: tuple[str, ...]) -> list[str]:
    """The system and the Python, and of these packages those that are there, with their versions where known."""
    return [
        *(platform.system(), platform.release(), platform.version(), platform.machine(), platform.python_version()),
        *(found for name in packages if (found := _installed(name))),
    ]


def _installed(package: str) -> str:
    """Name and version of an installed package, as its record's name has them; "" where it is not there."""
    if package == "rlx":  # it may lie on the path only
        return f"rlx-{sys.modules['rlx'].__version__}"
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # what claims to be that package is no such thing
        return package
    if spec is None:
        return ""
    place = (spec.origin and os.path.dirname(spec.origin)) or next(iter(spec.submodule_search_locations or ()), "")
    try:
        beside = sorted(os.listdir(os.path.dirname(place)))
    except OSError:
        return package
    starts = f"{package}-"
    return next((name for name in beside if name.startswith(starts) and name.endswith(RECORDS)), package)
