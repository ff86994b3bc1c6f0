"""The bar of a load in the shell: after a second, with a percentage, on a terminal alone; and what it leaves there."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rlx

MODEL = str(Path(rlx.__file__).parent / "demo" / "digits.onnx")
SLOW = """
import sys, time
from rlx import progress
tell = progress._Reporter.tell
def slow(self, stage, fraction, item=""):
    time.sleep({delay} if stage == "code" and self.fraction < 0.45 else 0)
    tell(self, stage, fraction, item)
progress._Reporter.tell = slow
from rlx.cli import show
show.BAR_AFTER = {after}
from rlx.cli.main import cli
cli({args!r}, prog_name="rlx")
"""


def on_terminal(delay: float, after: float, args: list[str], cache: Path) -> str:
    """What a command writes to a terminal of its own, where a load takes some multiple of `delay` s longer.

    `after`: the seconds before the bar is shown.
    """
    ours, theirs = pty.openpty()
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "TERM": "xterm", "COLUMNS": "100"}
    code = SLOW.format(delay=delay, after=after, args=args)
    with subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        found, end = b"", time.monotonic() + 100
        while time.monotonic() < end:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            found += part
        os.close(ours)
    assert process.returncode == 0, found
    return found.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no terminals of this kind")
def test_a_long_load_shows_its_percentage(tmp_path: Path) -> None:
    written = on_terminal(2.0, 1.0, ["run", MODEL, "--device", "cpu"], tmp_path)
    assert "compiling digits.onnx: code" in written
    assert "%" in written
    assert "probs" in written.splitlines()[-1] or "float32" in written
    quick = on_terminal(0.0, 100.0, ["run", MODEL, "--device", "reference"], tmp_path)
    assert "%" not in quick


def test_without_a_terminal_nothing_is_shown(tmp_path: Path) -> None:
    code = SLOW.format(delay=1.5, after=1.0, args=["run", MODEL, "--device", "cpu"])
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True, timeout=100
    )
    assert not done.stderr
    assert "%" not in done.stdout
