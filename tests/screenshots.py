"""Pictures of pages, by a real browser: Debian's chromium, where it is installed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

BROWSER = shutil.which("chromium")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--virtual-time-budget=2000",
)  # fmt: skip


def screenshot(page: Path, path: Path, width: int = 1200, height: int = 3000, *, dark: bool = False) -> np.ndarray:
    """The page as pixels [height, width, 3]; it is in a frame of this width, as a window has 500 at least."""
    frame = page.with_suffix(".frame.html")
    frame.write_text(
        f'<body style="margin:0"><iframe src="{page.name}" style="border:0;width:{width}px;height:{height}px"></iframe>'
    )
    with tempfile.TemporaryDirectory() as profile:
        dark_flag = ["--blink-settings=preferredColorScheme=0"] if dark else []
        size = f"--window-size={max(width, 500)},{height}"
        command = [str(BROWSER), *FLAGS, *dark_flag, size, f"--user-data-dir={profile}", f"--screenshot={path}"]
        subprocess.run([*command, frame.as_uri()], check=True, capture_output=True, timeout=120)
    return np.asarray(Image.open(path).convert("RGB"))[:, :width]


def texts(page: Path) -> str:
    """The document after its scripts have run."""
    with tempfile.TemporaryDirectory() as profile:
        command = [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
