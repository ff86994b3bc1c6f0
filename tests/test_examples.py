"""The programs in examples/ print what their pages say."""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlx
from rlx.demo.fetch import entries

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


def python(arguments: list[str], environment: dict[str, str], timeout: int = 100) -> subprocess.CompletedProcess[str]:
    """A process of Python with these arguments, and with what is added to the environment."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def printed(name: str, *arguments: str, timeout: int = 200) -> str:
    """What a program of examples/ prints."""
    done = python([str(EXAMPLES / name), *arguments], {"PYTHONPATH": str(ROOT)}, timeout)
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


@pytest.mark.parametrize("name", PRINTED)
def test_without_its_model_an_example_says_what_brings_it(name: str, tmp_path: Path) -> None:
    """On a machine without a checkout: one line that names the command, no traceback."""
    for package in NEEDS.get(name, []):
        pytest.importorskip(package)
    (tmp_path / "rlx").symlink_to(ROOT / "rlx")
    done = python([str(EXAMPLES / name)], {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    model = re.search(r"is not there yet: `rlx fetch ([\w-]+)` brings it", line)
    assert model is not None, line
    assert f" {model[1]}" in ast.get_docstring(ast.parse((EXAMPLES / name).read_text())).replace("`", "")  # type: ignore[union-attr]


@pytest.mark.models
@pytest.mark.parametrize(
    "name, package", [*((name, package) for name, needs in NEEDS.items() for package in needs), ("table.py", "sklearn")]
)
def test_without_its_package_an_example_says_what_brings_it(name: str, package: str, models_dir: Path) -> None:
    hidden = f"import runpy, sys; sys.modules[{package!r}] = None"
    code = f"{hidden}; runpy.run_path({str(EXAMPLES / name)!r}, None, '__main__')"
    done = python(["-c", code], {"PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)])})
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.search(rf"needs .*: pip install .*({package}|pillow|scikit-learn)", line), line


def test_models_that_pages_fetch_are_listed() -> None:
    """Each name after `rlx fetch`, in examples and pages, is one that it knows, and so is each of rlx.demo.path."""
    known = entries()
    for path in (*EXAMPLES.iterdir(), *DOCS.glob("*.md")):
        if path.is_file():
            text = path.read_text()
            named = [name for line in re.findall(r"rlx fetch ((?:[a-z0-9-]+ ?)+)", text) for name in line.split()]
            named += [name for name in re.findall(r"demo\.path\(\"([\w-]+)\"\)", text) if not name.startswith("digits")]
            assert not [name for name in named if name not in known], path


ALONE = {
    "nearest_points.py": (
        "5 points, 2 queries: 1.993 to the first; as NumPy: True\n"
        "1000 points, 7 queries: 0.071 to the first; as NumPy: True\n"
        "20000 points, 1 queries: 0.114 to the first; as NumPy: True\n"
        "traced 1 time for all sizes\n"
    ),
    "custom_op.py": (
        "8 results agree with the definition\ncode of its own: True\nslope at 0.5: 1.9093 (1 + sin 2 = 1.9093)\n"
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_without_files(name: str) -> None:
    """The programs that need nothing else."""
    assert printed(name) == ALONE[name]


def test_newton_converges() -> None:
    """Newton's method: the slope is squared, about, in each of the last steps."""
    *steps, last = printed("newton.py").splitlines()
    slopes = [float(line.rpartition(" ")[2]) for line in steps]
    assert steps[0] == "step 0: loss 0.693147, slope 4e-01"
    assert slopes[-1] < 1e-5
    assert slopes[-1] < slopes[-2] / 20
    assert last == "95.6% of the points on their side"


def test_springs_are_found_in_little_memory() -> None:
    """Gradients through 2,000 steps; a scan of scans keeps a twentieth of what one scan does."""
    *_, found, memory = printed("spring.py").splitlines()
    assert found == "pull 1.999, friction 0.050"
    whole, part = map(float, re.findall(r"([\d.]+) MB", memory))
    assert part < whole / 20


def test_a_pipeline_of_scikit_learn() -> None:
    pytest.importorskip("skl2onnx")
    assert "as scikit-learn says: True" in printed("table.py")


def test_fit_by_hand_learns() -> None:
    losses = [float(line.rpartition(" ")[2]) for line in printed("fit_by_hand.py", "400").splitlines()]
    assert losses[-1] < losses[0] / 2


def asked(app: Any, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON of one request, as a server would make it of an ASGI application."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
             "raw_path": path.encode(), "query_string": b"", "headers": headers, "scheme": "http"}  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(b"".join(part.get("body", b"") for part in sent[1:]))


def test_a_web_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to images, to many requests, and to wrong ones."""
    pytest.importorskip("fastapi")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    app = importlib.import_module("digits_service").app
    digits = rlx.demo.Digits.load()
    status, answer = asked(app, "POST", "/digits", {"images": digits.images[:18, 0].tolist()})
    assert status == 200
    assert answer["digits"] == digits.labels[:18].tolist()
    assert asked(app, "GET", "/health")[1]["device"] == "cpu"
    for wrong in ([[1.0]], digits.images[:65, 0].tolist(), []):
        status, answer = asked(app, "POST", "/digits", {"images": wrong})
        assert status == 422
        assert "detail" in answer


def test_the_notebook() -> None:
    """Its cells run in order; a plan, a model and a cost are shown as HTML, and digits are read right."""
    notebook = json.loads((EXAMPLES / "memory_map.ipynb").read_text())
    assert notebook["nbformat"] == 4
    space: dict[str, Any] = {}
    shown = []
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [], "committed without outputs"
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {number}", "exec"), space)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), space))
    fits, model, plan, right, cost, explained = shown
    assert fits is True
    assert right >= 62
    for thing in (model, plan, cost, explained):
        assert "<" in thing._repr_html_()
    assert "<svg" in plan._repr_html_()


def test_every_example_is_listed_and_tested() -> None:
    """examples/README.md has a line for each program, and a test of this file names it."""
    listed = (EXAMPLES / "README.md").read_text()
    tests = Path(__file__).read_text()
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".ipynb"):
            assert f"`{path.name}`" in listed
            assert path.name in ("generate.py", "train_digits.py") or path.stem in tests
