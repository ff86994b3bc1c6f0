"""What an installation needs: packages, wheels, and the commands that messages name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

import rlx
from rlx import install

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNTIME = tomllib.loads((ROOT / "packaging" / "runtime" / "pyproject.toml").read_text())["project"]

RUN_SAVED = """
import sys
import numpy as np, rlx

bounded, open_sizes, source = sys.argv[1:]
x = np.ones((3, 1, 8, 8), np.float32)
model = rlx.load(bounded)
assert model.device == "cpu"
(want,) = model.run({"image": x})
assert np.array_equal(model.clone().run([x])[0], want)
assert np.array_equal(model.submit([x]).result()[0], want)
assert model.plan.arena and model.needs.total
grown = rlx.load(open_sizes)
for n in (1, 5, 700, 3):  # the arena is planned anew
    y = np.full((n, 3), 0.5, np.float32)
    assert np.allclose(grown.run([y])[0], np.tanh(y).sum(axis=1), atol=1e-6)
for call in (lambda: rlx.load(source, device="cpu"), lambda: rlx.load(source), lambda: model.explain()):
    try:
        call()
    except rlx.errors.DeviceUnavailable as error:
        assert "llvmlite" in str(error) and "pip install" in str(error), error
    else:
        raise AssertionError("compiled without LLVM")
assert rlx.load(source, device="reference").run([x])[0].shape == want.shape
foreign = sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names))
assert not {"llvmlite", "onnx", "click", "rich", "psutil", "platformdirs"} & set(foreign), foreign
"""


def saved_models(folder: Path) -> list[str]:
    """Two saved models, of bounded sizes and of open ones, and an ONNX file."""
    source = rlx.demo.path("digits")
    rlx.load(source, dims={"batch": (1, 64)}, device="cpu").save(folder / "bounded.rlxart")
    g = rlx.Graph("open")
    g.output(rlx.tanh(g.input("y", (rlx.Dim("n"), 3))).sum(axes=1), "sums")
    rlx.compile(g, device="cpu").save(folder / "open.rlxart")
    return [str(folder / "bounded.rlxart"), str(folder / "open.rlxart"), str(source)]


def only_runtime(folder: Path) -> str:
    """A search path with rlx, NumPy and ml-dtypes: with `python -S` only the standard library is beside them."""
    packages = folder / "packages"
    packages.mkdir()
    for name in ("numpy", "ml_dtypes"):
        found = find_spec(name)
        assert found is not None
        assert found.origin is not None
        source = Path(found.origin).parent
        for part in (source, source.with_name(f"{name}.libs")):
            if part.exists():
                (packages / part.name).symlink_to(part)
    (packages / "rlx").symlink_to(ROOT / "rlx")
    return str(packages)


def run(command: list[str], folder: Path, **more: str) -> str:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **more}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere psutil and platformdirs are needed too")
def test_saved_models_run_with_numpy_and_ml_dtypes_only(tmp_path: Path) -> None:
    """Nothing else can be imported: models run, compiling says what it needs."""
    models = saved_models(tmp_path)
    run([sys.executable, "-S", "-c", RUN_SAVED, *models], tmp_path, PYTHONPATH=only_runtime(tmp_path))


def test_the_command_line_says_what_it_needs(tmp_path: Path) -> None:
    """`python -m rlx` without click names the command that installs it."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "rlx"],
        env={**os.environ, "PYTHONPATH": only_runtime(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(r"the command line needs the package click: pip install '?click", done.stderr)


def wheels(folder: Path) -> dict[str, Path]:
    """Both wheels, built as `make wheel` does, by name."""
    pytest.importorskip("build")
    for source in (ROOT, ROOT / "packaging" / "runtime"):
        run([sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(source)], folder)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


@pytest.mark.slow
def test_wheels_in_new_environments(tmp_path: Path) -> None:
    """rlx-runtime and what pip brings with it run saved models; rlx reads the digits of its demo."""
    models, built = saved_models(tmp_path), wheels(tmp_path)
    for name, command in (
        ("rlx_runtime", ["-c", RUN_SAVED, *models]),
        ("rlx", ["-m", "rlx", "demo"]),
    ):
        folder = tmp_path / f"venv-{name}"
        run([sys.executable, "-m", "venv", str(folder)], tmp_path)
        python = str(folder / "bin" / "python")
        run([python, "-m", "pip", "install", "--quiet", str(built[name])], tmp_path)
        run([python, *command], tmp_path, PYTHONPATH="")
        there = run([python, "-m", "pip", "list", "--format=freeze"], tmp_path)
        assert ("llvmlite" in there) == (name == "rlx")


@pytest.mark.parametrize("target", ["demo", "test", "lint", "docs", "wheel", "bench", "models"])
def test_targets_install_what_they_run(target: str, tmp_path: Path) -> None:
    """On a machine with nothing, rlx and its dependencies come before the target's own commands."""
    place = tmp_path / "venv"
    lines = run(["make", "--dry-run", f"VENV={place}", "-C", str(ROOT), target], tmp_path).splitlines()
    used = [n for n, line in enumerate(lines) if f"{place}/bin/" in line and " -m pip " not in line]
    made = [n for n, line in enumerate(lines) if "-m venv" in line]
    installed = [n for n, line in enumerate(lines) if " -m pip " in line and "install --editable" in line]
    assert made[0] < installed[0] < used[0]


def test_both_wheels_say_the_same() -> None:
    """What rlx-runtime needs, rlx needs, in the same versions; Python versions and classifiers are equal."""
    needed = set(RUNTIME["dependencies"])
    more = {line for lines in RUNTIME["optional-dependencies"].values() for line in lines}
    assert needed | more == set(PROJECT["dependencies"])
    assert RUNTIME["requires-python"] == PROJECT["requires-python"]
    assert set(RUNTIME["classifiers"]) <= set(PROJECT["classifiers"])


def test_hints_name_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout an extra is one of its path, quoted for a shell."""
    assert install.install_extra("llm") == f"pip install '{ROOT}[llm]'"
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "pyproject.toml").touch()
    monkeypatch.setattr(install, "CHECKOUT", tmp_path / "a b")
    assert install.install_extra("image") == f"pip install '{tmp_path}/a b[image]'"


def test_hints_of_an_installed_wheel_name_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it is the packages themselves, in the versions that rlx takes."""
    monkeypatch.setattr(install, "CHECKOUT", tmp_path)
    lines = [
        "llvmlite<0.52,>=0.47",
        "jinja2<4,>=3.1; extra == 'llm'",
        "tokenizers<1,>=0.22; extra == 'llm'",
        "mlx<1,>=0.30; (sys_platform == 'darwin') and extra == 'mlx'",
        "mlx[cpu]<1,>=0.30; (sys_platform == 'linux') and extra == 'mlx'",
        "click<9,>=8.1; extra == 'cli'",
        "jax<1,>=0.8; extra == 'bench'",
    ]

    def requires(name: str) -> list[str]:
        if name == "rlx":
            raise metadata.PackageNotFoundError(name)
        return lines

    monkeypatch.setattr(metadata, "requires", requires)
    assert install.install_extra("llm") == "pip install 'jinja2<4,>=3.1' 'tokenizers<1,>=0.22'"
    monkeypatch.setattr(sys, "platform", "linux")
    assert install.install_extra("mlx") == "pip install 'mlx[cpu]<1,>=0.30'"
    assert install.install_package("click") == "pip install 'click<9,>=8.1'"
    assert install.install_package("gguf") == "pip install gguf"
    assert "rlx-runtime" in install.install_extra("xla")
    lines.clear()
    assert install.install_package("llvmlite") == "pip install llvmlite"


def test_every_extra_in_a_message_exists() -> None:
    """Messages name extras that pyproject.toml has."""
    text = "\n".join(path.read_text() for path in (ROOT / "rlx").rglob("*.py"))
    named = set(re.findall(r"install_extra\(['\"](\w+)['\"]\)", text))
    assert named
    assert named <= set(PROJECT["optional-dependencies"])
    assert not re.findall(r"pip install ['\"]rlx\[.*", text)


def test_a_name_on_a_hub_is_quoted_for_the_shell() -> None:
    assert "`hf download a/b --local-dir FOLDER`" in install.instead_of("a/b")
    assert "`hf download 'a/b;c $(d)' --local-dir FOLDER`" in install.instead_of("a/b;c $(d)")
    assert install.instead_of("a/b.onnx") == ""
