"""What each command prints with --json is what `rlx.cli.schema` says, and so docs/json.md."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

import json_fields
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

import rlx
from rlx.cli.main import COMMANDS, cli
from rlx.cli.schema import VERSION, outputs
from rlx.cli.show import print_json

MODEL = str(Path(rlx.__file__).parent / "demo" / "digits.onnx")


def misfits(value: Any, kind: Any, where: str = "") -> list[str]:
    """Where a JSON value is not of a type: paths with what was expected."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is NotRequired:
        return misfits(value, arguments[0], where)
    parts: list[tuple[Any, Any, str]] = []
    wrong: list[str] = []
    if is_typeddict(kind) and isinstance(value, dict):
        hints = get_type_hints(kind, include_extras=True)
        needed = {name for name, one in hints.items() if get_origin(one) is not NotRequired}
        wrong = [f"{where}.{name}: not in {kind.__name__}" for name in value.keys() - hints.keys()]
        wrong += [f"{where}.{name}: is missing" for name in needed - value.keys()]
        parts = [(value[name], hints[name], f"{where}.{name}") for name in value.keys() & hints.keys()]
    elif origin in (Union, types.UnionType):
        right = any(not misfits(value, one, where) for one in arguments)
        wrong = [] if right else [f"{where}: {value!r:.60} is no {kind}"]
    elif origin is Literal:
        wrong = [] if value in arguments else [f"{where}: {value!r:.40} is none of {arguments}"]
    elif origin is list and isinstance(value, list):
        parts = [(item, arguments[0], f"{where}[{n}]") for n, item in enumerate(value)]
    elif origin is dict and isinstance(value, dict):
        parts = [(item, arguments[1], f"{where}[{name!r}]") for name, item in value.items()]
    elif origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        parts = [(item, one, f"{where}[{n}]") for n, (item, one) in enumerate(zip(value, arguments, strict=True))]
    elif not (type(value) in (int, float) if kind is float else isinstance(kind, type) and type(value) is kind):
        wrong = [f"{where}: {value!r:.40} is no {kind}"]
    return wrong + [w for part in parts for w in misfits(*part)]


def printed(*args: str, status: int = 0) -> Any:
    """The JSON of a command: valid as other languages read it."""
    done = CliRunner().invoke(cli, [*args, "--json"])
    assert done.exit_code == status, done.output

    def refused(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    return json.loads(done.stdout, parse_constant=refused)


def recorded(folder: Path) -> str:
    model = rlx.load(MODEL, device="cpu")
    with model.record(folder / "runs.npz") as recorder:
        recorder.run([np.zeros((1, 1, 8, 8), np.float32)])
    return str(folder / "runs.npz")


CASES: list[tuple[list[str], str]] = [
    (["run", MODEL], "Run"),
    (["run", MODEL, "--output-dir", "{tmp}"], "Run"),
    (["run", "{complex}"], "Run"),
    (["run", "{nan}"], "Run"),
    (["bench", MODEL, "--seconds", "0.02", "--kernels", "--clones", "1,2", "--scaling", "1,2"], "Bench"),
    (["bench", MODEL, "--seconds", "0.02", "--device", "reference"], "Bench"),
    (["estimate", MODEL, "--dims", "batch=1:8"], "Estimate"),
    (["estimate", MODEL, "--dims", "batch=1:8", "--budget", "1GiB"], "Estimate"),
    (["estimate", "{gguf}", "--context", "100"], "Estimate"),
    (["plan", MODEL], "PlanOutput"),
    (["explain", MODEL], "Explain"),
    (["explain", MODEL, "--device", "cpu"], "Explain"),
    (["explain", MODEL, "--stage", "dispatch"], "Explain"),
    (["explain", MODEL, "--stage", "kernels"], "Explain"),
    (["explain", MODEL, "--compile-time", "--device", "cpu"], "CompileTime"),
    (["explain", MODEL, "--preflight"], "Preflight"),
    (["verify", MODEL], "Verify"),
    (["verify", "{nan}"], "Verify"),
    (["verify", MODEL, "--f64"], "VerifyTruth"),
    (["profile", MODEL, "--guess"], "Profile"),
    (["profile", MODEL, "--guess", "--device", "reference"], "Profile"),
    (["report", MODEL, "--guess"], "Report"),
    (["quantize", MODEL, "{tmp}/small.onnx", "--type", "int8"], "Quantize"),
    (["quantize", MODEL, "{tmp}/none.onnx", "--type", "int8", "--dry-run"], "Quantize"),
    (["devices"], "Devices"),
    (["cache"], "Cache"),
    (["fetch"], "Fetch"),
    (["demo", "--device", "cpu"], "Demo"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Small models by what is special about them."""
    folder = tmp_path_factory.mktemp("json")
    found = {"tmp": str(folder)}
    for name, op, dtype in (("nan", "Log", TensorProto.FLOAT), ("complex", "Identity", TensorProto.COMPLEX64)):
        info = [helper.make_tensor_value_info(n, dtype, [2, 3]) for n in "xy"]
        graph = helper.make_graph([helper.make_node(op, ["x"], ["y"])], name, info[:1], info[1:])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), folder / name)
        found[name] = str((folder / name).rename(folder / f"{name}.onnx"))
    return found


def test_every_command_has_a_schema() -> None:
    """A command that is new, or a type that no case here prints, fails."""
    assert outputs.OUTPUTS.keys() == COMMANDS.keys() - {"chat"}  # a conversation has no --json
    kinds = {kind.__name__ for kinds in outputs.OUTPUTS.values() for kind in kinds}
    own = {"Replay", "Calibrate", "Generate", "Perplexity", "Embed"}  # which have tests of their own below
    assert {kind for _, kind in CASES} | own == kinds


@pytest.mark.parametrize(
    "args, kind", CASES, ids=lambda v: " ".join(a.rpartition("/")[2] for a in v) if isinstance(v, list) else v
)
def test_commands_print_what_the_schema_says(args: list[str], kind: str, files: dict[str, str]) -> None:
    if "{gguf}" in args:
        pytest.importorskip("gguf")
        files = {**files, "gguf": small_gguf(Path(files["tmp"]))}
    found = printed(*(a.format(**files) if a.startswith("{") else a for a in args))
    assert found["schema"] == VERSION
    assert not misfits(found, getattr(outputs, kind))


def small_gguf(folder: Path) -> str:
    from small_decoders import write_gguf

    case = json.loads((Path(__file__).parents[1] / "decoders" / "configs.json").read_text())["llama"]
    return str(write_gguf(folder / "tiny.gguf", case["config"], case["shapes"]))


def test_failures_print_what_the_schema_says(files: dict[str, str]) -> None:
    """A budget that is too small, and a file that can't be imported."""
    found = printed("estimate", MODEL, "--dims", "batch=1:8", "--budget", "1KiB", status=1)
    assert not misfits(found, outputs.Estimate)
    assert found["fits"] is False
    node = helper.make_node("Frobnicate", ["x"], ["y"], domain="mine")
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy"]
    graph = helper.make_graph([node], "unknown", info[:1], info[1:])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    path = Path(files["tmp"], "unknown.onnx")
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    found = printed("explain", str(path), "--preflight", status=1)
    assert not misfits(found, outputs.Preflight)
    assert found["missing"]


def test_a_replay(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    assert not misfits(printed("run", MODEL, "--device", "cpu", "--replay", path), outputs.Replay)


def test_a_calibration() -> None:
    found = printed("calibrate", "reference", "--seconds", "0.5")
    assert not misfits(found, outputs.Calibrate)


def test_a_text(tmp_path: Path) -> None:
    for name in ("tokenizers", "gguf"):
        pytest.importorskip(name)
    path, text = small_gguf(tmp_path), tmp_path / "text"
    text.write_text("hello")
    assert not misfits(printed("generate", path, "hello", "-n", "2", "--device", "cpu"), outputs.Generate)
    assert not misfits(printed("perplexity", path, str(text), "--device", "cpu"), outputs.Perplexity)


def test_embeddings(tmp_path: Path) -> None:
    for name in ("tokenizers", "gguf"):
        pytest.importorskip(name)
    from small_encoders import write_gguf

    case = json.loads((Path(__file__).parents[1] / "encoders" / "configs.json").read_text())["bert"]
    path = str(write_gguf(tmp_path / "small.gguf", case["config"], case["shapes"]))
    for more in ([], ["--output", str(tmp_path / "made.npy")]):
        assert not misfits(printed("embed", path, "a b", "c", "--device", "cpu", *more), outputs.Embed)


def test_numbers_that_json_lacks_are_texts(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [float("inf"), (-float("inf"), 1.5)], "c": {"d": float("nan")}, "e": "nan"})
    found = json.loads(capsys.readouterr().out)
    assert found == {"schema": VERSION, "a": "nan", "b": ["inf", ["-inf", 1.5]], "c": {"d": "nan"}, "e": "nan"}


@pytest.mark.parametrize(
    "change",
    [
        {"extents": None}, {"extents": {"n": 1.5}}, {"more": 1}, {"outputs": [{}]}, {"assumed": "x"}, {"schema": 2},
        {"device": 3},
    ],
)  # fmt: skip
def test_the_comparison_sees_what_differs(change: dict[str, Any]) -> None:
    right = {"schema": 1, "device": "cpu", "assumed": [], "extents": {}, "outputs": []}
    assert not misfits(right, outputs.Run)
    assert misfits({**right, **change}, outputs.Run)
    assert misfits({k: v for k, v in right.items() if k != "device"}, outputs.Run)


def test_the_page_is_current() -> None:
    """Run `python tools/json_fields.py` after a change of the schema."""
    assert json_fields.PAGE.read_text() == json_fields.page()
