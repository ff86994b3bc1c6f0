"""The programs in examples/ print what their pages say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
DOCS = ROOT / "docs"

PRINTED = {
    "sentence_search.py": (
        "0.51  The bakery on the corner opens at six in the morning.\n"
        "0.30  Bread needs flour, water, salt and time.\n"
        "0.11  The library lends films as well as books.\n"
    ),
    "read_page.py": "Compilers read programs.\nNetworks read pages.\nInvoice No. 2026-11\n",
    "page_orientation.py": "0 degrees (0.92)\n180 degrees (0.92)\n",
    "wake_word.py": "likeness 0.75 at 3.0 s: heard\n",
    "speech_stream.py": "speech from 1.0 to 2.1 s\nspeech from 3.0 to 3.4 s\n",
}
PAGES = {
    "sentence_search.py": "embeddings.md",
    "read_page.py": "ocr.md",
    "wake_word.py": "audio.md",
    "speech_stream.py": "audio.md",
}
NEEDS = {"sentence_search.py": ["tokenizers"], "read_page.py": ["PIL"], "page_orientation.py": ["PIL"]}


def printed(name: str, *arguments: str, timeout: int = 200) -> str:
    """What a program of examples/ prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.models
@pytest.mark.parametrize("name", PRINTED)
def test_with_real_models(name: str, models_dir: Path) -> None:
    """The programs that need downloaded models."""
    for package in NEEDS.get(name, []):
        pytest.importorskip(package)
    assert printed(name) == PRINTED[name]


@pytest.mark.parametrize("name", PAGES)
def test_pages_show_what_is_printed(name: str) -> None:
    """A page that shows a program shows what the test above expects of it."""
    text = (DOCS / PAGES[name]).read_text()
    assert f"```text\n{PRINTED[name]}```" in text
    assert f":::{{literalinclude}} ../examples/{name}" in text
