"""docs/onnx-support.md from the code: the table of ops, and what ONNX's own node tests give, here and in onnxruntime.

`python tools/onnx_support.py` writes it (about a minute). Needs the packages onnx and onnxruntime.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from rlx.backends.reference import run_graph
from rlx.errors import RlxError, UnsupportedOp
from rlx.importers.onnx import load
from rlx.importers.onnx.mapping import DOMAINS, op_table, static_inputs
from rlx.importers.onnx.model import read_model
from rlx.ir.dtype import dtype_of

DOCUMENT = Path(__file__).parents[1] / "docs" / "onnx-support.md"
COUNTS = "## Conformance"

# why a case is left out, by a pattern of its name; the importer must refuse it with an error that matches the second
SKIPS = [
    (r"adagrad|adam|momentum|nesterov", "training", "not supported"),
    (r"batchnorm_.*training_mode|training_dropout", "training", "only inference|training_mode"),
    (r"flexattention", "the preview domain", "ai.onnx.preview"),
    (r"image_decoder", "image files", "not supported"),
    (r"not_\dd", "opset 1", "opset 1 is outside"),
    (
        r"(cast|castlike|quantizelinear|dequantizelinear)_.*(FNUZ|E8M0|INT2|int2)",
        "an element type of no device",
        "type",
    ),
    (r"if_opt|if_seq", "sequences of different lengths from branches", "differ in length"),
    (r"identity_(sequence|opt)|sequence_|loop1[36]_seq|optional_", "a sequence or optional as input", "input of kind"),
    (r"(equal_)?string|strnorm|regex|.*label_encoder", "strings", "STRING|not supported"),
]
DIFFERENT = [  # other values than ONNX's reference, and why
    (r"bernoulli", "random numbers are our own"),
    (
        r"resize_downsample_scales_.*_align_corners",
        "corners are aligned in the rounded size, as in onnxruntime and PyTorch",
    ),
]
NOISE = {"dft_inverse": 1e-6}  # where the expected values are rounding errors around 0
NUMERIC = {1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 16, 17, 19, 21, 22, 23}  # TensorProto.DataType that rlx has
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
    """All node tests of the onnx package, single nodes and expanded functions."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sorted(collect_testcases(None), key=lambda c: c.name)


def arrays(values: Sequence[Any]) -> list[Any]:
    """Tensors as arrays; others as they are."""
    return [numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for v in values]


def is_numeric(case: Any) -> bool:
    """Whether all inputs and outputs are tensors of numbers that rlx has a type for, outside training and previews."""
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


def run_rlx(model: onnx.ModelProto, given: Sequence[Any]) -> list[Any]:
    """The outputs on the reference device; sizes are run-time data first, else known at import."""
    names = [i.name for i in model.graph.input]
    attempts: tuple[Callable[[], tuple[bytes, dict[str, Any]]], ...] = (
        lambda: (model.SerializeToString(), dict(zip(names, given, strict=False))),
        lambda: settled(model, given, False),
        lambda: settled(model, given, True),
    )
    for number, attempt in enumerate(attempts):
        source, feed = attempt()
        try:
            graph = load(source)
        except UnsupportedOp:
            if number + 1 == len(attempts):
                raise
            continue
        return list(run_graph(graph, feed).values())
    raise AssertionError


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
            assert (got.shape, got.dtype) == (want.shape, want.dtype), (got.shape, got.dtype, want.shape, want.dtype)
            if got.dtype.kind not in "fiub":  # types of ml_dtypes
                got, want = got.astype(np.float32), want.astype(np.float32)
            noise = max((limit for word, limit in NOISE.items() if word in case.name), default=0.0)
            atol = max(case.atol, noise, rtol / 10 if rtol > 1e-3 else 0)
            np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def outcome(case: Any) -> Outcome:
    """Runs one case on the reference device."""
    node = case.model.graph.node[0]
    op = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    name, numeric = case.name.removeprefix("test_"), is_numeric(case)
    try:
        compare(case, run_rlx)
    except UnsupportedOp as error:
        for pattern, reason, said in SKIPS:
            if re.search(pattern, name) and re.search(said, str(error)):
                return Outcome(name, op, numeric, "skip", reason)
        return Outcome(name, op, numeric, "fail", str(error).split("): ")[-1])
    except (AssertionError, RlxError) as error:
        for pattern, reason in DIFFERENT:
            if re.match(pattern, name):
                return Outcome(name, op, numeric, "skip", reason)
        if name.startswith("optional_has_element_empty"):
            return Outcome(name, op, False, "skip", "a sequence or optional as input")
        return Outcome(name, op, numeric, "fail", " ".join(str(error).split())[:100])
    kinds = {dtype_of(a.dtype).name for a in arrays(case.data_sets[0][0]) if isinstance(a, np.ndarray | np.generic)}
    return Outcome(name, op, numeric, "pass", "", tuple(sorted(kinds)))


@cache
def outcomes() -> tuple[Outcome, ...]:
    return tuple(outcome(case) for case in cases())


def peer_counts() -> Counter[tuple[bool, str]]:
    """How many cases onnxruntime passes, (numeric, result): "fail" is another result, "skip" that it can't load it."""
    counts: Counter[tuple[bool, str]] = Counter()
    for case in cases():
        try:
            compare(case, run_onnxruntime)
            result = "pass"
        except AssertionError:
            result = "fail"
        except Exception:  # noqa: BLE001 - it has its own classes of errors, and refuses with any
            result = "skip"
        counts[is_numeric(case), result] += 1
    return counts


# ---- the page


def ops_table() -> Iterator[str]:
    """The table of ops, from the importer's own table."""
    for domain in DOMAINS:
        yield f"### {domain or 'ai.onnx'}"
        yield ""
        yield "| op | versions |"
        yield "|---|---|"
        for (own, name), entries in sorted(op_table().items()):
            if own != domain:
                continue
            oldest, newest = DOMAINS[domain]
            first = max(oldest, entries[0].since)
            last = entries[-1].until or newest
            yield f"| {name} | {first}{f' to {last}' if last != first else ''} |"
        yield ""


def counts_section() -> Iterator[str]:
    """Pass, skip and fail of the node tests, and every skip with its reason."""
    found = outcomes()
    peers = peer_counts()
    yield COUNTS
    yield ""
    yield f"The node tests of onnx {onnx.__version__} at their own tolerances (16-bit floats: 3e-3, bf16: 2e-2), on"
    yield "the reference device. Numeric: all inputs and outputs are tensors of the types above, outside training and"
    yield "previews. A case that needs a size at import gets that input as an initializer."
    yield ""
    yield "| cases | rlx pass | skip | fail | onnxruntime pass | refused | fail |"
    yield "|---|---|---|---|---|---|---|"
    for label, kinds in (("numeric", (True,)), ("all", (True, False))):
        mine = Counter(o.result for o in found if o.numeric in kinds)
        other = {r: sum(peers[k, r] for k in kinds) for r in ("pass", "skip", "fail")}
        cells = [
            sum(mine.values()),
            mine["pass"],
            mine["skip"],
            mine["fail"],
            other["pass"],
            other["skip"],
            other["fail"],
        ]
        yield f"| {label}: " + " | ".join(map(str, cells)) + " |"
    yield ""
    yield "| skipped because of | cases |"
    yield "|---|---|"
    reasons: dict[str, list[str]] = defaultdict(list)
    for o in found:
        if o.result != "pass":
            reasons[o.reason if o.result == "skip" else f"FAIL: {o.reason}"].append(o.name)
    for reason, names in sorted(reasons.items()):
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        yield f"| {reason} | {len(names)}: {shown} |"
    yield ""
    yield "| op | passing cases | element types in them |"
    yield "|---|---|---|"
    by_op: dict[str, list[Outcome]] = defaultdict(list)
    for o in found:
        if o.result == "pass" and "_expanded" not in o.name:
            by_op[o.op].append(o)
    for op, passing in sorted(by_op.items()):
        dtypes = sorted({d for o in passing for d in o.dtypes})
        yield f"| {op} | {len(passing)} | {', '.join(dtypes)} |"


HEAD = """# ONNX support

Generated by `python tools/onnx_support.py`; a test checks that it is current. `rlx.importers.onnx.preflight(path)`
says for one file what of it is supported, and all that is missing.

Element types: f64 f32 f16 bf16 f8e4m3 f8e5m2 f4e2m1 i4 u4 i8 u8 i16 u16 i32 u32 i64 u64 bool c64. Refused, with the
type named: strings, FLOAT8E4M3FNUZ, FLOAT8E5M2FNUZ, FLOAT8E8M0, INT2, UINT2, FLOAT6, COMPLEX128.

- Model functions are inlined; a local function takes the place of an op of the same name.
- If with a condition known at import leaves one branch. Branches that differ in a size give a dim that the run decides;
  that differ in rank, where the condition is that two sizes are equal, become the first branch and a guard.
- Loop with a known or run-time trip count is a scan, with a condition of its own a native loop. A loop whose carries
  change in size, or are sequences, is written out when its count is known and at most 64.
- Sequences and optionals are lists known at import. A sequence as output `y` is given as `y.0`, `y.1` ...; as input of
  the model it is refused.
- Sizes that data decide (NonZero, NonMaxSuppression, Reshape by computed shapes ...) are dims named after the output,
  `boxes.count`; `dims={"boxes.count": (0, 300)}` bounds them.
- Random ops draw by their own counter-based generator from the node's seed, or its name where it has none.
- ZipMap gives the tensor of probabilities. String labels of classifiers are refused where they are read.
- MatMulNBits and DynamicQuantizeLSTM dequantise their weights; QLinear ops of com.microsoft compute in f32 between.

## Ops
"""


def page() -> str:
    """The whole document."""
    return "\n".join([HEAD, *ops_table(), *counts_section()]) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(page())
