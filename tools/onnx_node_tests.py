"""docs/onnx-node-tests.md: what ONNX's own node tests give on the CPU, on the reference device, and in onnxruntime.

`python tools/onnx_node_tests.py` writes it (some ten minutes). Needs the packages onnx and onnxruntime.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import RlxError, UnsupportedOp
from rlx.importers.onnx import load
from rlx.importers.onnx.mapping import DOMAINS, TRAINING, static_inputs
from rlx.importers.onnx.model import read_model
from rlx.ir.dtype import dtype_of

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "onnx-node-tests.md"
DEVICES = ("cpu", "reference")

DIFFERENT = [  # other values than ONNX's reference by a pattern of the case's name, and why
    (
        r"bernoulli|training_dropout(_default)?(_mask)?$",
        "random numbers, for which ONNX names no generator: ours are Threefry's, the same for a seed on every device",
    ),
    (
        r"resize_downsample_scales_.*_align_corners",
        "corners are aligned in the rounded size, as in onnxruntime and PyTorch",
    ),
    (
        r"cast(like)?_FLOAT(16)?_to_U?INT[24]",
        "floats beyond 2 or 4 bits, which ONNX leaves open, saturate as to any integer type",
    ),
]
NOISE = {"dft_inverse": 1e-6}  # where the expected values are rounding errors around 0
NUMERIC = {
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    9,
    10,
    11,
    12,
    13,
    14,
    16,
    17,
    18,
    19,
    20,
    21,
    22,
    23,
    24,
    25,
    26,
}  # TensorProto.DataType that rlx has
RESULTS = ("pass", "skip", "fail")
WIDER = {"bf16": 2e-2, "bfloat16": 2e-2, "fp16": 3e-3, "float16": 3e-3}  # expected values rounded at other places


@dataclass(frozen=True)
class Outcome:
    """What became of one case: "pass", "skip" or "fail", and why."""

    name: str
    op: str
    numeric: bool
    result: str
    reason: str = ""
    dtypes: tuple[str, ...] = ()


@cache
def cases() -> list[Any]:
    """All node tests of the onnx package, single nodes and expanded functions, and its models with a Gradient.

    It takes 13 s to make them, so they are kept in build/; of several processes that need them one makes them.
    """
    path = ROOT / "build" / f"onnx-node-and-gradient-tests-{onnx.__version__}.pickle"
    path.parent.mkdir(exist_ok=True)
    with path.open("a+b") as file:
        if os.name == "posix":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        file.seek(0)
        try:
            kept: list[Any] = pickle.load(file)
        except (EOFError, pickle.UnpicklingError):  # new, or cut off
            kept = _made()
            file.truncate(0)
            pickle.dump(kept, file)
        return kept


def _made() -> list[Any]:
    from onnx.backend.test.case import model, node

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [*node.collect_testcases(None), *(c for c in model.collect_testcases() if _gradient(c) is not None)]
        return sorted(found, key=lambda c: c.name)


def _gradient(case: Any) -> Any:
    """The node that differentiates in a case of the kind "model", None where there is none."""
    nodes = case.model.graph.node if case.model is not None else ()
    return next((node for node in nodes if node.op_type == "Gradient" and node.domain == TRAINING), None)


def arrays(values: Sequence[Any]) -> list[Any]:
    """Tensors as arrays; others as they are."""
    return [numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for v in values]


def is_numeric(case: Any) -> bool:
    """Whether all inputs and outputs are tensors of numbers that rlx has a type for."""
    graph = case.model.graph
    domains = {node.domain for node in graph.node}
    infos = [*graph.input, *graph.output]
    tensors = all(i.type.WhichOneof("value") == "tensor_type" for i in infos)
    return tensors and all(i.type.tensor_type.elem_type in NUMERIC for i in infos) and domains <= set(DOMAINS)


def settled(model: onnx.ModelProto, given: Sequence[Any], all_integers: bool) -> tuple[bytes, dict[str, Any]]:
    """The model with inputs that sizes come from as initializers, as models have them, and the other arrays."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    read = read_model(model.SerializeToString())
    needed = {name for node in read.graph.nodes for name in static_inputs(node, read.opsets)}
    feed = dict(zip((i.name for i in model.graph.input), given, strict=False))
    for name, array in list(feed.items()):
        whole = isinstance(array, np.ndarray | np.generic) and array.dtype.kind in "iu" and array.ndim < 2
        if isinstance(array, np.ndarray | np.generic) and (name in needed or (all_integers and whole)):
            made.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
            del feed[name]
    kept = [i for i in made.graph.input if i.name in feed]
    del made.graph.input[:]
    made.graph.input.extend(kept)
    return made.SerializeToString(), feed


def run_as_given(device: str, model: onnx.ModelProto, given: Sequence[Any]) -> list[Any]:
    """The outputs of the file as it is on a device, with its inputs as they are."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model.SerializeToString())
        with rlx.load(path, device=device, cache=False, threads=1 if device == "cpu" else None) as loaded:
            return list(loaded.run(dict(zip((i.name for i in model.graph.input), given, strict=False))))


def run_with_constants(device: str, model: onnx.ModelProto, given: Sequence[Any]) -> list[Any]:
    """The outputs where inputs that have to be known at import, or else all short integer ones, are constants."""
    try:
        source, feed = settled(model, given, False)
        graph = load(source)
    except UnsupportedOp:
        source, feed = settled(model, given, True)
        graph = load(source)
    if device == "reference":
        return list(run_graph(graph, feed).values())
    return list(rlx.compile(graph, device=device, threads=1).run(feed))


def run_onnxruntime(model: onnx.ModelProto, given: Sequence[Any]) -> list[Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [i.name for i in model.graph.input]
    return list(session.run(None, {n: a for n, a in zip(names, given, strict=False) if a is not None}))


def compare(case: Any, run: Any) -> None:
    """Raises `AssertionError` where outputs differ from the expected ones beyond the case's tolerance."""
    rtol = max([case.rtol, *(limit for word, limit in WIDER.items() if word in case.name)])
    for inputs, outputs in case.data_sets:
        expected: list[Any] = []
        for value in arrays(outputs):
            expected += value if isinstance(value, list) else [value]
        found: list[Any] = []
        for value in run(case.model, arrays(inputs)):
            found += value if isinstance(value, list) else [value]
        assert len(found) == len(expected), f"{len(found)} outputs, expected {len(expected)}"
        for got, want in zip(found, map(np.asarray, expected), strict=True):
            if got.dtype.kind == "T":
                assert (got.shape, got.tolist()) == (want.shape, want.tolist()), f"got {got}, expected {want}"
                continue
            assert (got.shape, got.dtype) == (want.shape, want.dtype), (got.shape, got.dtype, want.shape, want.dtype)
            if got.dtype.kind not in "fiub":  # types of ml_dtypes
                got, want = got.astype(np.float32), want.astype(np.float32)
            noise = max((limit for word, limit in NOISE.items() if word in case.name), default=0.0)
            atol = max(case.atol, noise, rtol / 10 if rtol > 1e-3 else 0)
            np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def outcome(case: Any, device: str) -> Outcome:
    """Runs one case on a device."""
    node = _gradient(case) or case.model.graph.node[0]
    op = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    name, numeric = case.name.removeprefix("test_"), is_numeric(case)
    try:
        compare(case, partial(run_as_given, device))
    except UnsupportedOp as error:
        return Outcome(name, op, numeric, "fail", str(error).split("): ")[-1])
    except (AssertionError, RlxError) as error:
        for pattern, reason in DIFFERENT:
            if re.match(pattern, name):
                return Outcome(name, op, numeric, "skip", reason)
        return Outcome(name, op, numeric, "fail", " ".join(str(error).split())[:100])
    given = [a for a in arrays(case.data_sets[0][0]) if isinstance(a, np.ndarray | np.generic)]
    kinds = {"string" if a.dtype == object else dtype_of(a.dtype).name for a in given}
    return Outcome(name, op, numeric, "pass", "", tuple(sorted(kinds)))


@cache
def outcomes(device: str) -> tuple[Outcome, ...]:
    """What became of every case on a device."""
    return tuple(outcome(case, device) for case in cases())


def counts_of(run: Any) -> Counter[tuple[bool, str]]:
    """How many cases a runner passes, (numeric, result): "fail" is another result, "skip" that it can't load it."""
    counts: Counter[tuple[bool, str]] = Counter()
    for case in cases():
        try:
            compare(case, run)
            result = "pass"
        except AssertionError:
            result = "fail"
        except Exception:  # noqa: BLE001 - onnxruntime has its own classes of errors, and refuses with any
            result = "skip"
        counts[is_numeric(case), result] += 1
    return counts


# ---- the page

HEAD = f"""# ONNX's node tests

The node tests that the package onnx {onnx.__version__} generates (single nodes and expanded functions), and its two
models with a Gradient, at their own tolerances (16-bit floats: 3e-3, bf16: 2e-2). Written by
`python tools/onnx_node_tests.py`; a test checks that it is current. Numeric: all inputs and outputs are tensors of
types that rlx has.

As they come: each file goes through `rlx.load` unchanged, and each run gets all inputs as arrays, so that axes, shapes,
repeats and the lengths of sequences are run-time data. With constants: inputs that have to be known at import (or else
all short integer ones) are made initializers, as most models have them; sequences and optionals can be none.
"""


def counts() -> Iterator[str]:
    """Pass, skip and fail on each device, in both ways, and the same for onnxruntime."""
    found = {
        f"rlx, {device}, as they come": Counter((o.numeric, o.result) for o in outcomes(device)) for device in DEVICES
    }
    for device in DEVICES:
        found[f"rlx, {device}, with constants (fail: random or left open by ONNX)"] = counts_of(
            partial(run_with_constants, device)
        )
    found["onnxruntime, as they come (skip: can't load it)"] = counts_of(run_onnxruntime)
    yield "| run by | numeric: pass | skip | fail | all: pass | skip | fail | passing |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, by_kind in found.items():
        cells = [by_kind[True, r] for r in RESULTS] + [by_kind[True, r] + by_kind[False, r] for r in RESULTS]
        yield f"| {name} | " + " | ".join(map(str, cells)) + f" | {100 * cells[3] / sum(cells[3:]):.1f} % |"
    yield ""


def reasons() -> Iterator[str]:
    """Every case that does not pass, under the reason why."""
    listed: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for device in DEVICES:
        for o in outcomes(device):
            if o.result != "pass":
                listed[o.result, o.reason][device].append(o.name)
    yield "## Skipped"
    yield ""
    yield "| result | because of | on | cases |"
    yield "|---|---|---|---|"
    for (result, reason), by_device in sorted(listed.items()):
        same = len(by_device) == len(DEVICES) and len({tuple(names) for names in by_device.values()}) == 1
        for device, names in {"both": by_device[DEVICES[0]]}.items() if same else by_device.items():
            yield f"| {result} | {reason} | {device} | {len(names)}: {', '.join(names)} |"
    yield ""


def by_op() -> Iterator[str]:
    """How many cases of each op pass on the CPU, and the types in them."""
    yield "## By op, on the CPU"
    yield ""
    yield "| op | passing cases | element types in them |"
    yield "|---|---|---|"
    found: dict[str, list[Outcome]] = defaultdict(list)
    for o in outcomes("cpu"):
        if o.result == "pass" and "_expanded" not in o.name:
            found[o.op].append(o)
    for op, passing in sorted(found.items()):
        yield f"| {op} | {len(passing)} | {', '.join(sorted({d for o in passing for d in o.dtypes}))} |"


def page() -> str:
    """The whole document."""
    return "\n".join([HEAD, *counts(), *reasons(), *by_op()]) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()  # it takes no arguments but --help
    DOCUMENT.write_text(page())
