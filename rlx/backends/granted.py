"""How many processors this process may use, and threads a run."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from rlx.lazy_imports import log

__all__ = ["MAX_THREADS", "allowed_cpus", "cpu_count", "run_threads"]

MAX_THREADS = 64  # a run's threads: worker ids are bits of one word


def allowed_cpus() -> set[int]:
    """Returns the CPUs that this process may use, where the system has affinities.

    Affinities are those of threads: a thread that pins itself to a CPU says nothing about the others. Taken are those
    of the main thread and of the one that asks.
    """
    own = os.sched_getaffinity(0)
    try:
        return own | os.sched_getaffinity(os.getpid())
    except OSError:  # the main thread has ended
        return own


def cpu_count(root: str | os.PathLike[str] = "/") -> int:
    """Returns how many CPUs this process may use: its affinity, cut by the cgroup's quota (v1 or v2), at least 1.

    `root` is where /proc and /sys are looked for.
    """
    available = len(allowed_cpus()) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(Path(root))
    return max(1, available if quota is None else min(available, int(quota)))


def run_threads(asked: int | None) -> int:
    """Returns the threads of a run: as many as asked for or, with None, as there are CPUs; `MAX_THREADS` at most.

    Says so, once a process, when more were asked for.
    """
    if asked is not None and asked > MAX_THREADS:
        say_cut(asked)
    return min(cpu_count() if asked is None else asked, MAX_THREADS)


@cache
def say_cut(asked: int) -> None:
    log.warning("threads=%d: a run has %d threads at most: it gets these", asked, MAX_THREADS)


def cgroup_quota(root: Path) -> float | None:
    """Returns the CPUs that the process's control groups and those above them grant, or None without a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    base = root / "sys/fs/cgroup"
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        for top in (base / controllers, base / "cpu") if controllers else (base, base / "unified"):
            # In a container the path may not exist below the mount, which then is the process's own group.
            group = top / path.strip("/")
            while group.is_relative_to(top):
                found.append(group_quota(group))
                group = group.parent
    limits = [quota for quota in found if quota is not None]
    return min(limits) if limits else None


def group_quota(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()[:2]
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no file, or "max"
        return None
