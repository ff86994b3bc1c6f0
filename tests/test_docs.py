"""Every example in the README and the docs runs as it is printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_decoders import write_gguf
from small_encoders import write_gguf as write_encoder

import rlx

ROOT = Path(__file__).parents[1]
EMBEDS = json.loads((ROOT / "tests" / "encoders" / "configs.json").read_text())["bert"]
SMALL = json.loads((ROOT / "tests" / "decoders" / "configs.json").read_text())["llama"]
LANGUAGES = {"sh", "python", "text", "json", ""}
NOT_RUN = {"docs/design.md"}  # the contract: it also shows API that is not there yet
OWN = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [path for path in (*OWN, *sorted((ROOT / "docs").rglob("*.md"))) if str(path.relative_to(ROOT)) not in NOT_RUN]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the line of its first line, and its text."""

    language: str
    line: int
    text: str


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, those in lists too."""
    found = []
    fence = re.compile(r"^([ ]*)```([^\n]*)\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
    text = page.read_text()
    for match in fence.finditer(text):
        indent, language, body = match.groups()
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(Block(language.strip(), line, re.sub(f"^{indent}", "", body, flags=re.MULTILINE)))
    return found


def python_source(page: Path) -> str:
    """The python blocks of a page as one script, each line at its number on the page: tracebacks point there."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python":
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n"


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


SH_BLOCKS = [
    pytest.param(block, id=f"{page_id(page)}:{block.line}")
    for page in PAGES
    for block in blocks(page)
    if block.language == "sh"
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like the checkout to the examples: it has rlx/demo's files, and nothing to spoil.

    And model.gguf, a small language model, and embedder.gguf, which embeds texts.
    """
    write_encoder(tmp_path / "embedder.gguf", EMBEDS["config"], EMBEDS["shapes"])
    write_gguf(tmp_path / "model.gguf", SMALL["config"], SMALL["shapes"])
    shutil.copytree(
        ROOT / "rlx" / "demo", tmp_path / "rlx" / "demo", ignore=shutil.ignore_patterns("*.py", "__pycache__")
    )
    return tmp_path


def needs(page: Path) -> list[str]:
    """The modules that a page names by `<!-- needs: torch onnxscript -->`."""
    return [
        name for line in re.findall(r"^<!-- needs: (.+) -->$", page.read_text(), re.MULTILINE) for name in line.split()
    ]


def need(page: Path) -> None:
    """Skips a page whose `needs` are not installed."""
    for name in needs(page):
        pytest.importorskip(name, reason=f"{page.name} needs {name}")


def run(command: list[str], folder: Path, **more: str) -> None:
    """Run in `folder` with this interpreter's scripts first on the PATH; a failure shows all output."""
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": scripts, **more}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_blocks_have_a_known_language(page: Path) -> None:
    """No example escapes these tests by a misspelt language or an unclosed fence."""
    found = blocks(page)
    assert {block.language for block in found} <= LANGUAGES
    assert page.read_text().count("```") == 2 * len(found)


@pytest.mark.parametrize("page", [page for page in PAGES if python_source(page).strip()], ids=page_id)
def test_python_blocks_run(page: Path, folder: Path) -> None:
    """The python blocks of a page run in order in one namespace."""
    need(page)
    script = folder / page.name
    script.write_text(python_source(page))
    run([sys.executable, "-P", str(script)], folder)


@pytest.mark.parametrize("block", SH_BLOCKS)
def test_sh_blocks_run(block: Block, folder: Path) -> None:
    """Shell examples exit with status 0; those that start with `make` name targets of the Makefile instead."""
    if not block.text.startswith("make"):
        own_cache = {"XDG_CACHE_HOME": str(folder / "cache")} if "rlx cache" in block.text else {}
        run(["bash", "-euo", "pipefail", "-c", block.text], folder, **own_cache)
        return
    commands = [line.partition("#")[0].split() for line in block.text.splitlines() if line.strip()]
    assert all(command[0] == "make" for command in commands), "a block of make commands holds nothing else"
    named = {word for command in commands for word in command[1:] if "=" not in word}
    assert named <= makefile_targets()


def test_readme_lists_the_models_that_are_tested() -> None:
    """The table of supported models has a row for each real model, with its package and version."""
    models = json.loads((ROOT / "rlx" / "demo" / "models.json").read_text())
    rows = re.findall(r"^\| [^|]+ \| ([\w-]+ [\d.]+) \| yes \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    models = [model for model in models if model["member"].endswith((".onnx", ".gguf"))]
    assert sorted(rows) == sorted(f"{model['package']} {model['version']}" for model in models)


# where a path on a page may start
ROOTS = [ROOT, ROOT / "docs", ROOT / "rlx"]
ROOTS += [ROOT / "rlx" / "backends" / folder for folder in ("", "cpu", "cpu/gemm", "codegen", "interp")]


def is_there(name: str) -> bool:
    return any((root / name).exists() for root in ROOTS)


def defines(name: str) -> bool:
    """Whether "folder/module.thing" names something that the module defines."""
    module, _, thing = name.rpartition(".")
    texts = [path.read_text() for root in ROOTS if (path := root / f"{module}.py").exists()]
    return any(re.search(rf"^(?:def|class) {thing}\b|^{thing}\b", text, re.MULTILINE) for text in texts)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs" / "design.md"], ids=page_id)
def test_files_that_pages_name_are_there(page: Path) -> None:
    """A page that names a module, something in one, a tool or another page names what exists."""
    text = page.read_text()
    named = set(re.findall(r"`([\w/.-]+\.(?:py|md|txt))`", text))
    named |= set(re.findall(r"`((?:rlx|tests|tools|benchmarks|docs)/[\w/.-]+)`", text))
    links = {page.parent / link for link in re.findall(r"\]\(([\w/.-]+\.md)[)#]", text)}
    assert not [name for name in named if not is_there(name)] + [link for link in links if not link.exists()]
    inside = set(re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)+\.(?!py\b|md\b|txt\b)[A-Za-z_]\w*)(?:\(\))?`", text))
    assert not [name for name in inside if not is_there(name) and not defines(name)]


def test_the_design_names_every_part() -> None:
    """The tree in docs/design.md has a line for each module and folder of rlx, and for each folder of the CPU."""
    tree = (ROOT / "docs" / "design.md").read_text().split("## 2.")[1].split("## 3.")[0]
    package, cpu = ROOT / "rlx", ROOT / "rlx" / "backends" / "cpu"
    names = {path.name for path in package.glob("[!_]*.py")} | {path.stem for path in cpu.glob("[!_]*.py")}
    names |= {f"{init.parent.name}/" for folder in (package, cpu) for init in folder.glob("*/__init__.py")}
    assert not [name for name in names if name not in tree]


def test_the_reference_has_every_name() -> None:
    """The page that `make docs` makes of the docstrings has each public name, and an example of each."""
    import api_reference

    page = api_reference.page()
    assert not [name for name in rlx.__all__ if f"## `rlx.{name}`\n" not in page and name not in ("numpy", "ops")]
    assert not api_reference.without_example()


def test_every_page_has_a_place() -> None:
    """Each page is in one of the lists of docs/index.md (`page`, or `Another title <page>`), and only pages are."""
    index = (ROOT / "docs" / "index.md").read_text()
    lists = re.findall(r"^:::\{toctree\}\n(.*?)^:::", index, re.MULTILINE | re.DOTALL)
    lines = [line for part in lists for line in part.splitlines() if line and not line.startswith(":")]
    listed = [line.rpartition("<")[2].rstrip(">") for line in lines]
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"} | {"reference"}
    assert sorted(listed) == sorted(pages)


def test_numbers_of_formats_are_in_the_docs() -> None:
    from rlx.backends.codegen.object_cache import MAGIC
    from rlx.runtime.container import FORMAT

    assert f"**format {FORMAT}**" in (ROOT / "docs" / "artifacts.md").read_text()
    assert f"reads format {FORMAT}." in (ROOT / "docs" / "security.md").read_text()
    assert MAGIC.decode() in (ROOT / "docs" / "formats.md").read_text()


def test_words_are_listed_once_and_in_order() -> None:
    """The glossary: rows sorted by their first word, no word in two rows, and each is one that rlx uses."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    rows = re.findall(r"^\| ([^|]+?) \| (?:[^|]+) \|$", text.split("|---|---|\n")[1], re.MULTILINE)
    assert len(rows) == text.split("|---|---|\n")[1].count("\n")
    assert rows == sorted(rows, key=str.lower)
    words = [word for row in rows for word in re.findall(r"[a-z]+(?: [a-z]+)*", row)]
    assert len(set(words)) == len(words)
    said = "\n".join(path.read_text().lower() for path in (ROOT / "rlx").rglob("*.py"))
    assert not [word for word in words if not re.search(rf"\b{word}s?\b", re.sub(r"\s+", " ", said))]


ODD = re.compile(  # what was said once, and what is said now
    r"holds until the next run"  # valid until the next run
    r"|invented (?:batch|input|size|dim)"  # assumed
    r"|(?:[µun]s|\bms|seconds) a run\b"  # per run
    r"|joins (?:\d+|\{[^\n]*\}) (?:a|in a) run\b"  # thread barriers: 4 per run
    r"|is no dim or input"  # unknown dim 'batc'; dims: batch
    r"|is no regular file"  # is a device
)


def test_odd_phrases_are_gone() -> None:
    """Of messages, pages and examples."""
    suffixes = (".py", ".md", ".js", ".css", ".ipynb")
    files = [p for d in ("rlx", "docs", "examples") for p in (ROOT / d).rglob("*") if p.suffix in suffixes]
    assert len(files) > 500
    said = {
        f"{page_id(path)}: {found[0]}"
        for path in (*files, *OWN)
        for found in ODD.finditer(re.sub(r'"\s*\n\s*f?"', "", path.read_text()))
    }
    assert not said
    for old in (
        "it holds until the next run",
        "144 µs a run",
        "joins 4 a run",
        "invented batch",
        "'batc' is no dim or input",
    ):
        assert ODD.search(old), old


def test_the_comparison_says_where_others_are_better() -> None:
    """Each runtime of its table has a section with reasons to take it, and one says when to take rlx."""
    text = (ROOT / "docs" / "comparison.md").read_text()
    header = re.findall(r"^\|(.+)\|$", text, re.MULTILINE)[0]
    names = [name.strip() for name in header.split("|")]
    assert names[:2] == ["", "rlx"]
    assert {"ONNX Runtime", "OpenVINO", "JAX", "llama.cpp"} == set(names[2:])
    sections = dict(re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    for name in names[2:]:
        assert len(re.findall(r"^- ", sections[f"{name} is better"], re.MULTILINE)) >= 3, name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_tables_are_whole(page: Path) -> None:
    """Rows that an empty line cuts off from their table are shown as text."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = table.splitlines()
        assert len(rows) > 1, rows[0]
        assert re.fullmatch(r"\|(?: *:?-+:? *\|)+", rows[1]), rows[0]


def test_readme_opens_with_the_two_commands() -> None:
    """A newcomer meets `make demo` and `make test` first."""
    first = next(block for block in blocks(ROOT / "README.md") if block.language == "sh")
    assert [line.split()[:2] for line in first.text.splitlines()] == [["make", "demo"], ["make", "test"]]
