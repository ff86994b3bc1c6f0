"""What a type checker tells a user: every public name has its type, and a wrong name, option or value is an error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import get_type_hints

import pytest

from rlx.options import CompileOptions, Options
from tests.test_docs import PAGES, needs, page_id, python_source

ROOT = Path(__file__).parents[1]
STUB = (ROOT / "rlx" / "__init__.pyi").read_text()
RIGHT = """
import numpy as np
import rlx
from rlx.ir.value import Value

model: rlx.CompiledGraph = rlx.load("model.onnx", device="cpu", threads=2, dims={"batch": (1, 64)})
outputs = model.run({"x": np.zeros(3, np.float32)})
total: int = rlx.estimate("model.onnx", budget="8GiB").peak_bytes
graph = rlx.Graph("mlp")
x = graph.input("x", (4, 8), "f32")
y: Value = rlx.softmax(rlx.relu(x + 1) @ x.T, axis=-1)
parts: tuple[Value, ...] = rlx.split(rlx.reduce_sum(x, axes=0), axis=1, sizes=(4, 4))
graph.output(rlx.cast(y, "f16"))
compiled: rlx.CompiledGraph = rlx.compile(graph, precision="bf16")
chosen: str = rlx.choose(graph, threads=1).device


@rlx.jit(dims={"a": ("n", None)})
def double(a: Value) -> Value:
    return a * 2
"""
WRONG = {  # a line, and what must be named
    'rlx.load("m.onnx", thread=2)': "thread",
    'rlx.load("m.onnx", threads="two")': "threads",
    'rlx.load("m.onnx", precision="f33")': "precision",
    "rlx.load(3.5)": "float",
    'rlx.lod("m.onnx")': "lod",
    'rlx.compile("m.onnx")': "Graph",
    'rlx.estimate("m.onnx", contxt=4)': "contxt",
    "rlx.Session(regstry=None)": "regstry",
    "rlx.jit(abs, dim={})": "jit",
    'rlx.softmax(3.0, axis="rows")': "axis",
    "rlx.softmaxx(3.0)": "softmaxx",
    'rlx.Graph("g").inputt("x", (3,))': "inputt",
}


def in_a_process_of_its_own(code: str) -> str:
    """What Python prints, without the ops that other tests registered here."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools")])}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_stub_is_as_its_tool_writes_it() -> None:
    """Run `python tools/public_stub.py` after a change of public names or ops."""
    assert in_a_process_of_its_own("import public_stub; print(public_stub.text(), end='')") == STUB


def test_stub_has_every_name() -> None:
    """What `dir(rlx)` lists is in the stub."""
    names = in_a_process_of_its_own("import rlx; print(*dir(rlx))").split()
    names.remove("__version__")
    assert not [n for n in names if not re.search(rf"\b(def {n}\(|as {n}\n|{n}: Call)", STUB)]


def test_options_for_type_checkers_are_those_of_the_dataclass() -> None:
    assert get_type_hints(Options) == get_type_hints(CompileOptions)
    assert set(Options.__annotations__) <= {field.name for field in fields(CompileOptions)}  # type: ignore[arg-type]


COMMANDS = {
    "mypy": [sys.executable, "-m", "mypy", "--strict"],
    "pyright": [sys.executable, "-m", "pyright", "--pythonpath", sys.executable],
}


def check(checker: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs a type checker on all files of a folder."""
    command = [*COMMANDS[checker], *options, *map(str, folder.glob("*.py"))]
    environment = os.environ | {"MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def errors(checker: str, text: str, folder: Path) -> dict[int, str]:
    """What a type checker says of a user's file: line -> message."""
    (folder / "user.py").write_text(text)
    done = check(checker, folder)
    found: dict[int, str] = {}
    for line, message in re.findall(r"user\.py:(\d+):(?:\d+ -)? error: (.*)", done.stdout):
        found[int(line)] = found.get(int(line), "") + message
    assert found or done.returncode == 0, done.stdout + done.stderr
    return found


@pytest.mark.parametrize("checker", COMMANDS)
def test_a_users_file_is_checked(checker: str, tmp_path: Path) -> None:
    """What is right passes with the strictest settings; of what is wrong each line is refused, by its name."""
    start = RIGHT.count("\n") + 1
    found = errors(checker, RIGHT + "\n".join(WRONG), tmp_path)
    assert [line for line in found if line < start] == []
    assert [line for line in range(start, start + len(WRONG)) if line not in found] == []
    for line, word in enumerate(WRONG.values(), start):
        assert word in found[line]


@pytest.mark.parametrize("checker", COMMANDS)
def test_examples_of_the_docs_are_well_typed(checker: str, tmp_path: Path) -> None:
    """All but the lessons, which show how parts of rlx are written, and pages that need what is not installed.

    Examples leave out types of their own functions.
    """
    pages = [page for page in PAGES if "adding-" not in page.name and all(map(find_spec, needs(page)))]
    texts = {page_id(page): python_source(page) for page in pages}
    for page, text in texts.items():
        (tmp_path / f"{re.sub(r'[^a-z]', '_', page.lower())}.py").write_text(text)
    untyped = ["--allow-untyped-defs", "--allow-untyped-calls", "--allow-incomplete-defs"] if checker == "mypy" else []
    done = check(checker, tmp_path, *untyped)
    assert done.returncode == 0, done.stdout
