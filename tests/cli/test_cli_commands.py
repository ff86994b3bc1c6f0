"""Every command of the command line: what it prints, its JSON, and its exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper

from rlx import passes
from rlx.backends import backend_named
from rlx.backends.base import Availability
from rlx.cli.inputs import assume_extents
from rlx.cli.main import COMMANDS, cli
from rlx.cli.options import dims_of
from rlx.demo import DIGITS, Digits
from rlx.errors import ModelFormatError, OptionError
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim
from rlx.ops.activation import Relu
from rlx.ops.conv import Conv
from rlx.ops.elementwise import Add, Exp, Round, Sigmoid
from rlx.ops.layout import Pad
from rlx.passes.rewrite import rewrite
from rlx.runtime.cache import finish_writing
from rlx.runtime.session import load
from rlx.runtime.weights import WeightRegistry
from rlx.testing.nodewise import Comparison

MODEL = str(DIGITS)


def rlx(*args: object) -> Result:
    """Runs a command; an exception that is not turned into an exit status fails the test."""
    result = CliRunner().invoke(cli, [str(a) for a in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def rlx_json(*args: object) -> Any:
    result = rlx(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    "args, keys",
    [
        (["demo"], {"accuracy", "memory", "one", "whole", "kernels"}),
        (["demo", "--device", "reference"], {"accuracy", "one", "whole"}),
        (["run", MODEL], {"device", "assumed", "extents", "outputs"}),
        (["bench", MODEL, "--seconds", "0.02", "--device", "reference"], {"run_slots", "run"}),
        (["bench", MODEL, "--seconds", "0.02", "--kernels"], {"compile_s", "run_slots", "run", "memory", "kernels"}),
        (["bench", MODEL, "--seconds", "0.02", "--clones", "1,2", "--scaling", "1,2"], {"clones", "scaling"}),
        (["plan", MODEL], {"at", "totals", "buffers", "rows"}),
        (["explain", MODEL], {"stage", "text", "inputs", "outputs", "memory"}),
        (["explain", MODEL, "--stage", "dispatch"], {"nodes"}),
        (["explain", MODEL, "--compile-time", "--device", "cpu"], {"stages", "emitted", "modules", "text"}),
        (["explain", MODEL, "--preflight"], {"ok", "missing", "weights"}),
        (["verify", MODEL, "--tolerance", "f32=1e-4"], {"ok", "first_bad", "tolerances", "outputs", "nodes"}),
        (["devices"], {"auto", "devices"}),
    ],
    ids=lambda value: " ".join(str(v).rpartition("/")[2] for v in value) if isinstance(value, list) else None,
)
def test_json(args: list[str], keys: set[str]) -> None:
    """Every command prints one JSON object with --json, and text without."""
    assert keys <= rlx_json(*args).keys()
    result = rlx(*args)
    assert result.exit_code == 0
    assert result.stdout.strip()
    assert not result.stderr


@pytest.mark.parametrize(
    "args, status, message",
    [
        (["run", "no-such-file.onnx"], 1, "no-such-file.onnx"),
        (["verfy", MODEL], 2, "Did you mean 'verify'?"),
        (["load", MODEL], 2, "Did you mean 'run'?"),
        (["cache", "limit", "much"], 1, "SIZE='much'"),
        (["run", MODEL, "--input", "image=no-such-file.png"], 1, "can't be read as a picture"),
        (["run", MODEL, "--input", "no-such-file.npz"], 1, "no-such-file.npz"),
        (["run", MODEL.replace(".onnx", "_test.npz")], 1, "digits_test.npz"),
        (["run", MODEL, "--dims", "wrong=3"], 1, "'batch'"),
        (["run", MODEL, "--input", "image=4x1x9x8"], 1, "got (4, 1, 9, 8)"),
        (["run", MODEL, "--input", "picture=4x1x8x8"], 1, "there is no input 'picture'"),
        (["run", MODEL, "--input", "image=all.npz"], 2, "give --input all.npz"),
        (["run", MODEL, "--input", "image=no-such-file.npy"], 1, "no-such-file.npy"),
        (["run", MODEL, *["--input", "image=1x1x8x8"] * 2], 1, "input 'image' is given twice"),
        (["explain", MODEL.replace(".onnx", "_test.npz"), "--preflight"], 1, "neither its ending nor its contents"),
        (["run", MODEL, "--budget", "1KiB", "--dims", "batch=1:8"], 1, "more than the 1,024 B allowed"),
        (["run", MODEL, "--budget", "1KiB", "--over-budget", "no"], 2, "--over-budget"),
        (["run", MODEL, "--budget", "much"], 2, "Invalid value for '--budget': 'much': expected bytes, such as 8GiB"),
        (["estimate", MODEL, "--budget", "10XB"], 2, "'--budget': '10XB'"),
        (["generate", MODEL, "x", "--budget", "10XB"], 2, "'--budget': '10XB'"),
        (["run", MODEL, "--dims", "batch"], 2, "expected NAME=SIZE"),
        (["run", MODEL, "--dims", "batch=8:4"], 2, "above the highest"),
        (["run", MODEL, "--dims", "batch=-1"], 2, "expected NAME=SIZE"),
        (["run", MODEL, "--dims", "batch=1", "--dims", "batch=2"], 2, "twice"),
        (["run", MODEL, "--input", "image=4*8"], 2, "expected NAME=FILE.npy"),
        (["run", MODEL, "--input", "image=4x1x8x8:"], 2, "expected NAME=FILE.npy"),
        (["run", MODEL, "--input", "image=4x1x8x8:one"], 2, "NAME=SHAPE:VALUE"),
        (["run", MODEL, "--input", "image=:1"], 2, "expected NAME=FILE.npy"),
        (["run", MODEL, "--input", "image=4x1x9x8:1"], 1, "got (4, 1, 9, 8)"),
        (["run", MODEL, "--input", "image=scalar:1"], 1, "image"),
        (["run", MODEL, "--input", "image=4x1x8x8:1e300"], 1, "don't fit elements of type f32"),
        (["run", MODEL, "--input", f"image={'9' * 17}x1x8x8:1"], 1, "give a smaller shape"),
        (["bench", MODEL, "--seconds", "nan"], 2, "finite number of seconds"),
        (
            ["bench", MODEL, "--kernels", "--device", "reference"],
            1,
            "--kernels: device 'reference' does not offer",
        ),
        (["bench", MODEL, "--clones", "2", "--device", "reference"], 1, "--clones: device 'reference' does not offer"),
        (["profile", MODEL, "--learn", "--device", "reference"], 1, "--learn: device 'reference' does not offer"),
        (["run", MODEL, "--threads", "2", "--device", "reference"], 1, "device 'reference' can't honour threads=2"),
        (["bench", MODEL, "--seconds", "inf"], 2, "finite number of seconds"),
        (["bench", MODEL, "--clones", "0"], 2, "expected numbers from 1 to 1024"),
        (["verify", MODEL, "--tolerance", "f31=1"], 2, "expected TYPE=RELATIVE"),
        (["calibrate", "cpu", "--seconds", "nan"], 2, "finite number of seconds"),
        (["run", MODEL, "--input", f"image={'9' * 23}x1x8x8"], 1, "input 'image'"),
        (["run", MODEL, "--output-dir", MODEL], 2, "--output-dir"),
        (["run", MODEL, "--threads", "0"], 2, "--threads"),
        (["run", MODEL, "--device", "abacus"], 2, "abacus"),
        (["run", MODEL, "--no-such-option"], 2, "--no-such-option"),
        (["run"], 2, "MODEL"),
        (["explain", MODEL, "--stage", "magic"], 2, "magic"),
        (["no-such-command"], 2, "no-such-command"),
    ],
    ids=lambda value: " ".join(str(v).rpartition("/")[2] for v in value[2:]) if isinstance(value, list) else None,
)
def test_exit_status(args: list[str], status: int, message: str) -> None:
    """Failures exit with 1 and wrong usage with 2; stderr says what, stdout stays empty."""
    result = rlx(*args)
    assert result.exit_code == status, result.output
    assert message in result.stderr
    assert not result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "dtype, text, value",
    [
        (TensorProto.INT64, "16000", 16000), (TensorProto.INT64, "-3", -3), (TensorProto.FLOAT, "16000", 16000),
        (TensorProto.FLOAT, "0.5", 0.5), (TensorProto.FLOAT, "-1e-3", -1e-3), (TensorProto.FLOAT, "-inf", -np.inf),
        (TensorProto.BOOL, "true", True), (TensorProto.BOOL, "0", False), (TensorProto.FLOAT16, "2", 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (2, 3)], ids=["scalar", "rows"])
def test_an_input_of_one_value(dtype: int, text: str, value: float, shape: tuple[int, ...], tmp_path: Path) -> None:
    """NAME=SHAPE:VALUE is that value in every element, of the input's own type; a scalar's shape is `scalar`."""
    x, y = (helper.make_tensor_value_info(name, dtype, shape) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", [x], [y])
    path = tmp_path / "same.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    given = f"x={'x'.join(map(str, shape)) or 'scalar'}:{text}"
    made = rlx_json("run", path, "--input", given, "--output-dir", tmp_path)
    assert not made["assumed"]
    (saved,) = tmp_path.glob("*.npy")
    found = np.load(saved)
    wanted = helper.tensor_dtype_to_np_dtype(dtype)
    assert found.dtype == wanted
    np.testing.assert_array_equal(found, np.full(shape, value, wanted))
    if not shape:
        refused = rlx("run", path, "--input", "x=16000")
        assert refused.exit_code == 1
        assert "give x=scalar:16000" in refused.stderr


def test_a_model_is_a_path_or_the_name_of_an_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or folder of that name comes first; an example that is not there yet says what brings it."""
    monkeypatch.chdir(tmp_path)
    assert rlx("estimate", "digits", "--dims", "batch=4").stdout == rlx("estimate", MODEL, "--dims", "batch=4").stdout
    monkeypatch.setattr("rlx.demo.fetch.places", lambda: [tmp_path])
    done = rlx("run", "smollm2")
    assert done.exit_code == 1
    assert "`rlx fetch smollm2` brings it" in done.stderr
    for name in ("smollm3", "digits-images", "smollm2.gguf"):
        assert f"{name}: can't be read" in rlx("run", name).stderr
    Path("digits").write_bytes(b"no model")
    assert "digits: " in rlx("run", "digits").stderr


def test_over_budget() -> None:
    """What does not fit is refused, with every figure once; the way out that the message names is an option here."""
    command = ["run", MODEL, "--device", "cpu", "--budget", "1KiB", "--dims", "batch=1:8"]
    refused = rlx(*command)
    assert refused.exit_code == 1
    assert refused.stderr.count("more than") == refused.stderr.count("1,024 B") == 1
    assert "over_budget='allow'" in refused.stderr
    assert rlx(*command, "--over-budget", "allow").exit_code == 0


@pytest.mark.parametrize("command", ["run", "bench", "plan", "explain", "verify"])
def test_random_bytes(command: str, tmp_path: Path) -> None:
    """A file that is no model is one line on stderr and exit status 1."""
    path = tmp_path / "noise.onnx"
    path.write_bytes(np.random.default_rng(3).bytes(2000))
    result = rlx(command, path)
    assert result.exit_code == 1
    assert str(path) in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_preflight_of_what_is_missing(tmp_path: Path) -> None:
    """A file with an unknown op is described on stdout, and exit status 1 says that it can't be imported."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Imaginary", ["x"], ["y"], name="node1")], "g", [x], [y])
    path = tmp_path / "imaginary.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    for json_flag in ([], ["--json"]):
        result = rlx("explain", path, "--preflight", *json_flag)
        assert result.exit_code == 1
        assert "Imaginary" in result.stdout
        assert len(result.stderr.splitlines()) == 1
    assert "'node1'" in rlx("run", path).stderr


def test_run_on_files(tmp_path: Path) -> None:
    """`run` reads .npy inputs, writes outputs that NumPy reads, and describes them rightly."""
    images = Digits.load().images[:7]
    np.save(tmp_path / "image.npy", images)
    made = rlx_json("run", MODEL, "--input", f"image={tmp_path / 'image.npy'}", "--output-dir", tmp_path / "out")
    assert made["assumed"] == []
    assert made["extents"] == {"batch": 7}
    (row,) = made["outputs"]
    probabilities = np.load(tmp_path / "out" / "probabilities.npy")
    assert row["file"] == str(tmp_path / "out" / "probabilities.npy")
    assert row["shape"] == [7, 10]
    assert row["max"] == pytest.approx(float(probabilities.max()))
    assert (probabilities.argmax(axis=1) == Digits.load().labels[:7]).all()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
def test_what_is_no_file(tmp_path: Path) -> None:
    """Folders and pipes, which may never begin, are refused wherever a file is read, without opening them."""
    folder, pipe = tmp_path / "folder", tmp_path / "pipe.npy"
    folder.mkdir()
    os.mkfifo(pipe)
    for path, why in ((folder, "is a folder"), (pipe, "is a pipe; expected a file")):
        for args in (["run", path], ["run", MODEL, "--replay", path], ["estimate", pipe], ["explain", path]):
            result = rlx(*args)
            assert result.exit_code == 1
            # a folder may be a model, of safetensors files
            assert why in result.stderr or args[0] == "estimate" or "model.safetensors" in result.stderr
    assert "is a pipe; expected a file" in rlx("run", MODEL, "--input", f"image={pipe}").stderr
    assert "model.safetensors" in rlx("estimate", folder).stderr
    with pytest.raises(ModelFormatError, match="is a pipe; expected a file"):
        WeightRegistry().load(pipe.rename(tmp_path / "pipe.npz"))


def test_run_refuses_pickles_and_archives(tmp_path: Path) -> None:
    """Input files that hold objects, several arrays or something else are named."""
    np.save(tmp_path / "pickle.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("hello")
    with (tmp_path / "archive.npy").open("wb") as file:
        np.savez(file, a=np.zeros(3))
    for name in ("pickle.npy", "text.npy", "archive.npy"):
        result = rlx("run", MODEL, "--input", f"image={tmp_path / name}")
        assert result.exit_code == 1
        assert name in result.stderr


def test_assumed_inputs_are_said_and_repeatable() -> None:
    """Without --input the data depend on the seed only, and every choice is printed."""
    first, same, other = (rlx_json("run", MODEL, "--seed", seed) for seed in (1, 1, 2))
    assert first["outputs"] == same["outputs"] != other["outputs"]
    assert first["assumed"] == ["batch = 1", "image: random f32[1, 1, 8, 8], seed 1"]
    assert "assumed   batch = 1" in rlx("run", MODEL).stdout


def test_estimates_assume_sizes_as_plans_do() -> None:
    """Of dims without a bound; those that --dims bounds keep their bounds."""
    made, fixed = rlx_json("estimate", MODEL), rlx_json("estimate", MODEL, "--dims", "batch=1")
    assert made["assumed"] == rlx_json("plan", MODEL)["assumed"] == ["batch = 1"]
    assert fixed["assumed"] == []
    assert made["peaks"] == fixed["peaks"]
    assert rlx("estimate", MODEL).stdout.startswith("assumed   batch = 1\n")
    assert rlx_json("estimate", MODEL, "--dims", "batch=1:9")["assumed"] == []


def test_assumed_sizes_obey_bounds() -> None:
    """A bounded dim gets a size within its bounds, a fixed one its own."""
    assert rlx_json("run", MODEL, "--dims", "batch=5:9")["extents"] == {"batch": 5}
    assert rlx_json("run", MODEL, "--dims", "batch=4")["outputs"][0]["shape"] == [4, 10]


def test_assumed_sizes_fit_the_model() -> None:
    """Sizes for which a window or a reflected border is too long are enlarged, and equal ones are made equal."""
    g = Graph("audio")
    x = g.input("x", (1, 1, Dim("samples")))
    other = g.input("other", (Dim("a", 3, 90), Dim("b")))
    (padded,) = g.add(Pad((0, 0, 40, 0, 0, 0), mode="reflect"), x)
    g.output(g.add(Conv((160,)), padded, g.param("w", (8, 1, 400)))[0])
    g.output(g.add(Add(), other, g.input("more", (1, Dim("c"))))[0])
    assert assume_extents(g, {}) == {"samples": 512, "a": 3, "b": 16, "c": 16}
    assert assume_extents(g, {"c": 5}) == {"samples": 512, "a": 3, "b": 5}


def test_an_error_of_assumed_sizes_says_so() -> None:
    """When a run fails at sizes that were assumed, the message names them and the way out."""
    from rlx.cli.inputs import Inputs, with_hint
    from rlx.errors import ExecutionError

    error = with_hint(ExecutionError("guard"), Inputs({}, {"h": 64}, ["h = 64"], []))
    assert "h = 64" in str(error)
    assert "--dims" in str(error)
    assert str(with_hint(ExecutionError("guard"), Inputs({}, {}, [], ["x: random"]))) == "guard"


def test_plan_at_bounds_and_at_inputs(tmp_path: Path) -> None:
    """With bounds the plan is made there, and elsewhere at the inputs; the SVG is drawn."""
    svg = tmp_path / "plan.svg"
    assert rlx_json("plan", MODEL, "--dims", "batch=1:32", "--svg", svg)["at"] == {"batch": 32}
    assert svg.read_text().startswith("<svg")
    assert rlx_json("plan", MODEL, "--input", "image=3x1x8x8")["at"] == {"batch": 3}
    unbounded = rlx_json("plan", MODEL)
    assert unbounded["at"] == {"batch": 1}
    assert unbounded["assumed"] == ["batch = 1"]


def test_plan_draws_a_page_and_searches(tmp_path: Path) -> None:
    """The page needs no other file; a search is a number of visits, and anything else is wrong usage."""
    page = tmp_path / "plan.html"
    searched = rlx_json("plan", MODEL, "--dims", "batch=1:32", "--html", page, "--search", "1e4")
    assert (
        searched["totals"]["arena"]
        == rlx_json("plan", MODEL, "--dims", "batch=1:32", "--search", "off")["totals"]["arena"]
    )
    assert page.read_text().startswith("<!doctype html>")
    assert "http" not in page.read_text().replace("http://www.w3.org/", "")
    assert rlx("plan", MODEL, "--search", "long").exit_code == 2
    refused = rlx("plan", MODEL, "--dims", "batch=1:32", "--budget", "1KiB")
    assert refused.exit_code == 1
    assert "activation" in refused.stderr


def test_plan_needs_a_device_that_plans() -> None:
    """The reference device has no arena, and says so."""
    result = rlx("plan", MODEL, "--device", "reference")
    assert result.exit_code == 1
    assert "rlx plan: device 'reference' does not offer 'arena'" in result.stderr


def test_dims_by_input_and_axis() -> None:
    """A size, bounds or another name; several axes of an input, each once."""
    assert rlx_json("run", MODEL, "--dims", "image[0]=3")["outputs"][0]["shape"] == [3, 10]
    assert "many = 1" in rlx("run", MODEL, "--dims", "image[0]=many", "--dims", "many=1:4").stdout
    assert dims_of((("a", {0: 1}), ("a", {1: "n"}), ("n", (1, 2)))) == {"a": {0: 1, 1: "n"}, "n": (1, 2)}
    assert "gives 'image' twice" in rlx("run", MODEL, "--dims", "image[0]=3", "--dims", "image[0]=4").stderr


def test_verify_names_the_first_bad_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a device and the reference disagree on one op, the first node with it is named, with its error."""
    monkeypatch.setattr(Relu, "reference", lambda self, x: np.maximum(x, 0) * np.float32(1.01))
    result = rlx("verify", MODEL)
    assert result.exit_code == 1
    assert "first at relu 'relu1'" in result.stderr
    assert "8 of 11 results agree" in result.stdout


def test_verify_names_the_pass_that_changes_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference runs the model as imported, and the first pass after which a value is another is named."""

    def forget(graph: Graph) -> Graph:
        return rewrite(graph, lambda site: site.inputs[0] if isinstance(site.op, Relu) else None)

    g = Graph("network")
    hidden = g.add(Relu(), g.input("x", (4, 8)), name="hidden")[0]
    g.output(g.add(Sigmoid(), hidden)[0] * 2, name="y")
    path = tmp_path / "network.rlx"  # the text form is not kept in the cache
    path.write_text(str(g))
    assert rlx_json("verify", path, "--device", "cpu")["wrong_pass"] is None
    monkeypatch.setattr(passes, "PASSES", (*passes.PASSES[:4], ("forget", forget), *passes.PASSES[4:]))
    result = rlx("verify", path, "--device", "cpu")
    assert result.exit_code == 1
    assert "the pass 'forget' changes the result of relu 'hidden': largest error" in result.stderr
    assert "results that they rewrote agree" in result.stdout
    found = json.loads(rlx("verify", path, "--device", "cpu", "--json").stdout)
    assert (found["ok"], found["wrong_pass"]) == (False, {"name": "forget", "where": ""})
    assert found["first_bad"]["name"] == "hidden"
    assert rlx("verify", path, "--device", "reference").exit_code == 0


def test_verify_knows_what_rounding_explains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step taken to the other side makes outputs differ, which is said and no failure; a wrong stretch is one."""
    g = Graph("steps")
    level = g.add(Round(), *g.add(Sigmoid(), g.input("x", (3,))))
    g.output(g.add(Exp(), *level)[0] * 9, name="y")
    path = tmp_path / "steps.rlx"
    path.write_text(str(g))
    np.save(tmp_path / "x.npy", np.array([0, 1, 2], np.float32))
    command = ["verify", path, "--device", "cpu", "--input", f"x={tmp_path / 'x.npy'}"]
    exact = Sigmoid.reference
    monkeypatch.setattr(Sigmoid, "reference", lambda self, x: exact(self, x) * np.float32(1 + 1e-6))
    result = rlx(*command)
    assert result.exit_code == 0, result.output
    assert "output    'y': largest error" in result.stdout
    assert "rounding  2 of 2 results agree" in result.stdout
    assert "rounded to its other side" in result.stdout
    found = rlx_json(*command)
    assert found["ok"]
    assert [s["op"] for s in found["between_roundings"]] == ["round", ""]

    wrong = Comparison("level", "round", 1, 0.3, 2, "1 of 3 elements are beyond what a rounding explains")
    monkeypatch.setattr("rlx.cli.verify.compare_between_roundings", lambda *args: [wrong])
    result = rlx(*command)
    assert result.exit_code == 1
    assert "first at round 'level': 1 of 3 elements" in result.stderr


def test_verify_takes_tolerances() -> None:
    """A tolerance of 0 asks for equal bits, which a device's own exponentials don't have; a wide one passes."""
    strict = rlx("verify", MODEL, "--device", "cpu", "--tolerance", "f32=0")
    assert strict.exit_code == 1
    assert "tolerance f32: relative 0, absolute 0" in strict.stdout
    assert rlx("verify", MODEL, "--device", "cpu", "--tolerance", "f32=1e-3:1e-4").exit_code == 0


def test_devices_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is not there is listed with the reason and the remedy."""
    missing = Availability(False, "no LLVM", "pip install llvmlite")
    for name in ("cpu", "xla", "mlx"):
        monkeypatch.setattr(type(backend_named(name)), "available", lambda self: missing)
    result = rlx("devices")
    assert result.exit_code == 0
    assert "no LLVM" in result.stdout
    assert "pip install llvmlite" in result.stdout
    assert "auto chooses among none" in result.stdout


def test_demo_fails_when_the_answers_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than 95 % accuracy is exit status 1."""
    digits = Digits.load()
    wrong = Digits(digits.images, (digits.labels + 1) % 10)
    monkeypatch.setattr(Digits, "load", classmethod(lambda cls: wrong))
    result = rlx("demo")
    assert result.exit_code == 1
    assert "of the digits were read right" in result.stderr


def test_script_on_a_pipe() -> None:
    """The installed script writes no progress or colour to a pipe, and survives an ASCII terminal."""
    script = Path(sys.executable).with_name("rlx")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "rlx"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*command, "run", MODEL], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str) -> None:
    """A command needs none of its streams."""
    code = "from rlx.cli.main import main; main()"
    command = f'exec "{sys.executable}" -c "{code}" plan "{MODEL}" --dims batch=2 {closed}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_wrong_environment_is_no_damaged_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was set wrongly is said, and what the cache holds is kept."""
    model = tmp_path / "model.onnx"
    model.write_bytes(Path(MODEL).read_bytes())
    load(model, cache_dir=tmp_path, device="cpu")
    finish_writing()
    (entry,) = (tmp_path / "artifacts").iterdir()
    monkeypatch.setenv("RLX_SOFT_MEMORY_FRACTION", "much")
    with pytest.raises(OptionError, match="RLX_SOFT_MEMORY_FRACTION='much'"):
        load(model, cache_dir=tmp_path, device="cpu")
    assert entry.exists()


def test_the_graph_of_a_kept_model_comes_without_its_stages(tmp_path: Path) -> None:
    """To know the inputs of a model from the cache the compiler isn't loaded, nor is what reading takes the model's."""
    code = f"""
import sys
import numpy as np, rlx
model = rlx.load({MODEL!r}, cache_dir={str(tmp_path)!r}, device="cpu", dims={{"batch": (1, 4)}})
fresh = "rlx.kernels.fuse" in sys.modules
assert [str(v.shape[0]) for v in model.compilation.source.inputs] == ["batch"]
assert fresh == ("rlx.kernels.fuse" in sys.modules)
assert model.compilation.program is not None and "rlx.kernels.fuse" in sys.modules
model.run([np.zeros((1, 1, 8, 8), np.float32)])
print(fresh, model.memory.measured)
"""
    for fresh in (True, False):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[0] == str(fresh)


def test_the_list_of_commands_is_whole() -> None:
    """Each command is one line that isn't cut off."""
    text = rlx("--help").stdout.partition("Commands:")[2]
    assert "..." not in text
    assert all(f"\n  {name} " in text for name in COMMANDS)


def test_help_survives_without_docstrings() -> None:
    """`python -OO` prints what `python` does."""
    code = (
        "from click.testing import CliRunner; from rlx.cli.main import COMMANDS, cli\n"
        "for name in ('', *COMMANDS): print(CliRunner().invoke(cli, [*name.split(), '--help'], prog_name='rlx').stdout)"
    )

    def helps(*options: str) -> str:
        run = [sys.executable, *options, "-c", code]
        return subprocess.run(run, capture_output=True, text=True, timeout=120, check=True).stdout

    assert helps("-OO") == helps()
    assert "Compare MODEL on a device with the reference." in helps("-OO")


def test_inputs_from_an_archive_and_a_picture(tmp_path: Path) -> None:
    """An npz has arrays by the names of inputs; a picture takes the size, channels and type of its input."""
    images = Digits.load().images[:4]
    np.savez(tmp_path / "all.npz", image=images)
    np.save(tmp_path / "image.npy", images)
    by_name = rlx_json("run", MODEL, "--input", f"image={tmp_path / 'image.npy'}")
    assert rlx_json("run", MODEL, "--input", tmp_path / "all.npz")["outputs"] == by_name["outputs"]
    np.savez(tmp_path / "other.npz", picture=images)
    assert "there is no input 'picture'" in rlx("run", MODEL, "--input", tmp_path / "other.npz").stderr
    twice = ["--input", tmp_path / "all.npz", "--input", f"image={tmp_path / 'image.npy'}"]
    assert "given twice" in rlx("run", MODEL, *twice).stderr

    from PIL import Image

    Image.fromarray(np.full((20, 30, 3), 255, np.uint8)).save(tmp_path / "white.png")
    white = rlx_json("run", MODEL, "--input", f"image={tmp_path / 'white.png'}")
    assert "image: white.png at 8x8, values 0 to 1" in white["assumed"]
    assert white["outputs"] == rlx_json("run", MODEL, "--input", "image=1x1x8x8:1")["outputs"]


@pytest.mark.parametrize(
    "args",
    [
        ["report", MODEL, "-o"], ["plan", MODEL, "--html"], ["plan", MODEL, "--svg"], ["profile", MODEL, "--trace"],
        ["embed", MODEL, "text", "--output"],
    ],
    ids=lambda args: f"{args[0]} {args[-1]}",
)  # fmt: skip
def test_targets_are_checked_before_the_work(args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded for a result that can't be written."""

    def loaded(*args: Any, **options: Any) -> None:
        raise AssertionError("the work was begun")

    for place in ("explain.load_model", "profile.load_model", "language.embed.load_embedder"):
        monkeypatch.setattr(f"rlx.cli.{place}", loaded)
    cases = {tmp_path: "it is a folder", tmp_path / "none" / "page.html": "there is no folder", Path(""): "folder"}
    for path, why in cases.items():
        result = rlx(*args, path)
        assert result.exit_code == 2
        assert f"{path}: can't be written: " in result.stderr.replace("\n", " ")
        assert why in result.stderr
    assert "takes the path of a file" in rlx(*args, "").stderr
    assert not list(tmp_path.iterdir())


def test_cache_is_shown_bounded_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.disk._named", [tmp_path])
    load(MODEL, device="cpu", dims={"batch": 1}).close()
    (tmp_path / "objects").mkdir(mode=0o700, exist_ok=True)
    (tmp_path / "objects" / "code.o").write_bytes(bytes(1000))
    parts = rlx_json("cache")["parts"]
    assert parts["artifacts"]["files"] == 1
    assert parts["objects"]["bytes"] >= 1000
    assert rlx("cache", "clear", "--older-than", "1").stdout.startswith("deleted 0 files")
    assert "at most 1.0 MiB" in rlx("cache", "limit", "1MiB").stdout
    assert rlx_json("cache")["limit"] == 1 << 20
    assert rlx("cache", "limit").stdout.startswith("at most 1.0 MiB: artifacts ")
    load(MODEL, device="cpu", dims={"batch": 2}).close()
    assert sum(part["bytes"] for part in rlx_json("cache")["parts"].values()) <= 1 << 20
    assert rlx("cache", "limit", "0").exit_code == 0
    assert not rlx_json("cache")["parts"]["objects"]["files"]
    assert "usual" in rlx("cache", "limit", "none").stdout
    load(MODEL, device="cpu", dims={"batch": 3})
    rlx("cache", "limit", "2MiB")
    assert rlx("cache", "clear", "--all").exit_code == 0
    assert not any(part["files"] for part in rlx_json("cache")["parts"].values())
    assert rlx_json("cache")["limit"] == 2 << 20, "what the user set is nothing that was measured"


def test_ctrl_c_gives_the_status_of_shells(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlx.cli.run.load_model", interrupted)
    assert rlx("run", MODEL).exit_code == 130


def test_values_of_inputs_that_decide_ranks(tmp_path: Path) -> None:
    """As numbers, or in a file; the model is then one program, which every command takes."""
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)
    inputs = [helper.make_tensor_value_info("x", 1, [2, 3]), helper.make_tensor_value_info("axes", 7, ["k"])]
    made = helper.make_graph([node], "g", inputs, [helper.make_empty_tensor_value_info("y")])
    path = tmp_path / "sum.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    np.save(tmp_path / "axes.npy", np.array([0, 1]))
    for text, shape in (("[1]", [2]), ("[0,-1]", []), (tmp_path / "axes.npy", [])):
        facts = rlx_json("run", path, "--value", f"axes={text}", "--input", "x=2x3:1")
        assert facts["outputs"][0]["shape"] == shape, facts
        assert rlx("verify", path, "--value", f"axes={text}").exit_code == 0
    for text in ("axes", "=1", "axes=", 'axes="a"', "axes={}", "axes=[1"):
        assert rlx("run", path, "--value", text).exit_code == 2
    assert rlx("run", path, "--value", "axis=[1]").exit_code == 1
