"""Measurements in a process of their own.

How much of a process is resident depends on what ran in it before: the allocators reuse what earlier tests freed, other
threads end, and a peak that was larger hides a new one. So what judges by resident memory measures in a new process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

CALL = """
import importlib, json, sys
module, function, arguments = sys.argv[1:]
print(json.dumps(getattr(importlib.import_module(module), function)(*json.loads(arguments))))
"""


def in_fresh_process(function: Callable[..., T], *arguments: object) -> T:
    """What a function of a test module returns in a new process; arguments and result are JSON values."""
    done = subprocess.run(
        [sys.executable, "-c", CALL, function.__module__, function.__name__, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: T = json.loads(done.stdout)
    return result
