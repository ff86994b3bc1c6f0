"""The public names, and the options of a compile: frozen here, because users write them."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import OptionError, RlxError
from rlx.runtime.misuse import ELSEWHERE

PUBLIC = [
    "Array", "Buckets", "CompileOptions", "CompiledGraph", "Decision", "DevicePolicy", "Dim", "Graph", "Op",
    "RunTrace", "Session", "Specialised", "TensorType", "WeightRegistry", "bind_cache", "checkpoint", "choose",
    "compile", "cond", "cost", "custom_jvp", "custom_vjp", "demo", "devices", "devices_for", "errors", "estimate",
    "fake_quantize", "fori_loop", "grad", "hessian", "hvp", "jacfwd", "jacrev", "jit", "jvp", "load",
    "load_artifact", "load_embedder", "load_llm", "lora", "metadata", "moe", "numpy", "ops", "pmean", "profile", "psum",
    "quantize", "register", "replay", "scan", "to_device", "to_dlpack", "value_and_grad", "vjp", "vmap",
    "while_loop",
]  # fmt: skip

OPTIONS = [
    ("device", "str", "auto"),
    ("dims", "Mapping[str, Any] | None", None),
    ("threads", "int | None", None),
    ("precision", "Literal['f32', 'bf16', 'f16', 'q8']", "f32"),
    ("budget", "int | str | None", None),
    ("over_budget", "Literal['error', 'warn', 'allow']", "error"),
    ("deterministic", "bool", True),
    ("alignment", "int", 64),
    ("search", "Literal['off', 'auto'] | int", "auto"),
    ("reuse", "bool", True),
    ("cache_dir", "str | os.PathLike[str] | None", None),
    ("cache", "bool", True),
    ("packing", "Literal['fast', 'shared', 'none']", "fast"),
    ("queue", "int | None", None),
    ("busy", "Literal['error', 'wait']", "error"),
    ("trap", "Literal['off', 'nan', 'inf']", "off"),
    ("debug", "bool", False),
]


def test_public_names() -> None:
    assert rlx.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(rlx, name) is not None
        assert name in dir(rlx)
    assert rlx.softmax is rlx.ops.softmax
    with pytest.raises(AttributeError, match="no attribute or op 'sofmax'; did you mean 'softmax'"):
        _ = rlx.sofmax
    for name, text in {"InferenceSession": r"rlx\.load", "from_torch": "example_inputs", "qzw": "'qzw'$"}.items():
        with pytest.raises(AttributeError, match=text):
            getattr(rlx, name)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_of_other_libraries_say_what_to_write(name: str) -> None:
    """Also where NumPy has that name (`save`); what is said to write is there."""
    with pytest.raises(AttributeError, match=f"{name!r}: ") as raised:
        getattr(rlx, name)
    said = str(raised.value)
    for owner, word in re.findall(r"\b(rlx|[Gg]raph|model)\.(\w+)", said):
        assert hasattr({"rlx": rlx, "model": rlx.CompiledGraph}.get(owner, rlx.Graph), word), said


def test_options_are_these() -> None:
    assert [(f.name, f.type, f.default) for f in dataclasses.fields(rlx.CompileOptions)] == OPTIONS
    assert rlx.errors.__all__ == sorted(rlx.errors.__all__)
    for name in rlx.errors.__all__:
        found = getattr(rlx.errors, name)
        assert name == "UnsupportedNode" or issubclass(found, RlxError)


def test_import_is_light() -> None:
    """`import rlx` loads neither a backend nor LLVM, and prints nothing."""
    code = "import rlx, sys; assert not [m for m in sys.modules if m.startswith(('llvmlite', 'onnx', 'rlx.backends'))]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def small(**options: Any) -> rlx.CompiledGraph:
    g = rlx.Graph("small")
    x = g.input("x", (rlx.Dim("n", 1, 8), 20))
    w = g.param("w", (20, 20), data=np.random.default_rng(0).standard_normal((20, 20)).astype(np.float32))
    y = rlx.tanh(x @ w)
    g.output(rlx.softmax(y + y @ w), name="y")
    return rlx.compile(g, device="cpu", **options)


X = np.random.default_rng(1).standard_normal((5, 20)).astype(np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {"alignment": 8},
        {"alignment": 128},
        {"alignment": 4096},
        {"reuse": False},
        {"reuse": False, "alignment": 256},
        {"debug": True},
        {"deterministic": False},
        {"threads": 3},
        {"dims": {"n": 5}},
        {"dims": {"x": ((2, 6), 20)}},
        {"dims": {"n": (1, None)}},
        {"budget": "1GiB", "over_budget": "warn"},
        {"device": "cpu", "precision": "f32"},
    ],
    ids=str,
)
def test_options_change_no_bit(options: dict[str, Any]) -> None:
    model = small(**{k: v for k, v in options.items() if k != "device"})
    want = small().run([X])[0]
    np.testing.assert_array_equal(model.run([X])[0], want)
    np.testing.assert_array_equal(model.run_slots(X)[0], want)
    plan = model.plan
    assert plan is not None
    step = options.get("alignment", 64)
    assert all(offset % step == 0 for offset in plan.offsets.values())
    start = np.frombuffer(model.arena, np.uint8).ctypes.data
    assert start % max(64, step) == 0
    if not options.get("reuse", True):
        assert plan.saved == 0
        assert plan.arena >= small().plan.arena  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "options, text",
    [
        ({"thread": 2}, "unknown option 'thread': did you mean 'threads'. known are device, dims, threads"),
        ({"threads": 0}, "threads=0: expected an int >= 1"),
        ({"threads": True}, "threads=True"),
        ({"threads": "2"}, "threads='2'"),
        ({"queue": 0}, "queue=0: expected an int >= 1"),
        ({"packing": "small"}, "packing='small': expected 'fast', 'shared' for one copy in several graphs, or 'none'"),
        ({"busy": "block"}, "busy='block': expected 'error', or 'wait'"),
        ({"device": "tpu"}, "unknown device 'tpu': known are 'auto', 'cpu'"),
        ({"device": ""}, "expected the name of a device"),
        ({"precision": "f8"}, "precision='f8'"),
        ({"budget": "many"}, "budget='many': expected bytes"),
        ({"budget": -1}, "budget=-1"),
        ({"search": "long"}, "search='long': expected 'off', 'auto' or a number of visits"),
        ({"search": -1}, "search=-1"),
        ({"over_budget": "ignore"}, "expected 'error', 'warn' or 'allow'"),
        ({"alignment": 48}, "alignment=48: expected a power of two"),
        ({"alignment": 2**40}, "alignment="),
        ({"reuse": "no"}, "reuse='no': expected True or False"),
        ({"deterministic": None}, "deterministic=None"),
        ({"debug": 1}, "debug=1"),
        ({"cache_dir": 5}, "cache_dir=5: expected a folder"),
        ({"dims": [("n", 4)]}, "dims=.*expected a mapping"),
        ({"dims": {"m": 4}}, "unknown dim 'm'; dims: 'n'; inputs: 'x'"),
        ({"dims": {"n": "4"}}, "expected a size, or"),
        ({"dims": {"n": True}}, "expected a size, or"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    g = rlx.Graph("g")
    g.output(g.input("x", (rlx.Dim("n", 1, 8),)) + 1.0, name="y")
    with pytest.raises(OptionError, match=text):
        rlx.compile(g, **options)
    with pytest.raises(OptionError, match=text):
        rlx.Session(**options).compile(g)


def test_unknown_options_are_told_what_a_call_takes() -> None:
    """The known ones that are listed are those of the options and of the call itself."""
    g = rlx.Graph("g")
    g.output(g.input("x", (3,)) + 1.0, name="y")
    calls: dict[str, Any] = {
        "policy, registry": lambda: rlx.Session(polcy="only=cpu"),
        "policy, registry, weights, progress": lambda: rlx.compile(g, polcy="only=cpu"),
        "policy, transform, .*, values, variants, example_inputs, progress, dynamic_shapes": lambda: rlx.load(
            "any.onnx", transfrom=None
        ),
    }
    for own, call in calls.items():
        meant = "unknown option '(polcy|transfrom)': did you mean '(policy|transform)'. known are device, .*debug"
        with pytest.raises(OptionError, match=f"{meant}, {own}$"):
            call()


def test_sessions_and_overrides() -> None:
    session = rlx.Session(device="reference", trap="nan")
    g = rlx.Graph("g")
    g.output(g.input("x", (2,)) + 1.0, name="y")
    assert session.compile(g).device == "reference"
    assert session.compile(g, device="cpu").device == "cpu"
    assert session.load(g).device == "reference"
    assert rlx.compile(g).device == "cpu"
    with pytest.raises(OptionError, match=r"compile takes a Graph, got str; rlx\.load takes files"):
        rlx.compile("model.onnx")  # type: ignore[arg-type]


def run_in_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


COMPILE = """
import numpy as np, rlx
g = rlx.Graph("g")
g.output(rlx.tanh(g.input("x", (3,)) * 2.0) + 1.0, name="y")
model = rlx.compile(g, device="cpu", cache_dir=CACHE)
print(model.run([np.float32([0, 1, 2])])[0].tolist())
"""


@pytest.fixture(scope="module")
def with_new_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `COMPILE` prints with an empty cache."""
    return run_in_process(COMPILE.replace("CACHE", repr(str(tmp_path_factory.mktemp("new")))))


@pytest.mark.parametrize("state", ["new", "used", "damaged", "unwritable", "a file", "below a file"])
def test_cache_folders(state: str, with_new_cache: str, tmp_path: Path) -> None:
    """A cache that is new, used, damaged or can't be is never an error and never changes a result."""
    folder = tmp_path / "cache"
    code = COMPILE.replace("CACHE", repr(str(folder / "deeper" if state == "below a file" else folder)))
    if state in ("used", "damaged"):
        run_in_process(code)
        assert list(folder.iterdir())
    if state == "damaged":
        for path in folder.iterdir():
            data = path.read_bytes()
            path.write_bytes(data[: len(data) // 2] + b"?" * (len(data) // 2))
    if state == "unwritable":
        folder.mkdir(mode=0o500)
    if "file" in state:
        folder.write_text("not a folder")
    assert run_in_process(code) == with_new_cache
