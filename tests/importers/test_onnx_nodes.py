"""The node tests of ONNX itself: every case made of ops that the importer knows gives its expected outputs.

Each case is imported twice, with the sizes of its inputs fixed and with all of them dynamic. Inputs that an op needs at
import (shapes, axes, pads) are given as initializers, as models have them. Cases that can't be imported are listed with
the reason that the error must give.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from rlx.backends.reference import run_graph
from rlx.errors import RlxError, ShapeError, UnsupportedOp
from rlx.importers.onnx import load
from rlx.importers.onnx.mapping import _TABLE, UnsupportedError, find_op, static_inputs
from rlx.importers.onnx.model import read_model

# cases by a pattern of their names, and what the error says
UNSUPPORTED = [
    (r"attention_.*(past|nonpad|padded_kv|cache|qk_matmul)", "a cache, padding lengths and the score"),
    (r"attention_.*softcap", "softcap is not supported"),
    (r"attention_.*window", "a cache, padding lengths and the score|'left_window_size' is not known"),
    (r"batchnorm_.*_training_mode", "only inference"),
    (r"(cast|castlike)_.*(FNUZ|INT2|E8M0)", "elements of type"),
    (r"dequantizelinear_u?int2", "elements of type U?INT2"),
    (r"equal_string", "elements of type STRING"),
    (r"identity_(opt|sequence)", "an input of kind"),
    (r"maxpool_with_argmax_2d_precomputed_strides", "storage_order=1"),
    (r"resize_.*(linear|cubic)", "mode='(linear|cubic)' is not supported"),
    (r"resize_tf_crop_and_resize", "mode='linear' is not supported"),
    (r"training_dropout", "only inference|training_mode"),
]
TOLERANCE = {"bf16": 2e-2, "fp16": 3e-3}  # where the expected values were rounded at other places than ours
GROUPS = [*sorted(_TABLE), "functions"]


@cache
def _groups() -> dict[str, list[Any]]:
    """The cases by the op they test; expansions of ops that have no mapping of their own are in "functions"."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = list(collect_testcases(None))
    ops = {c.name: c.model.graph.node[0].op_type for c in cases if "_expanded" not in c.name}
    found: dict[str, list[Any]] = {group: [] for group in GROUPS}
    for case in cases:
        if not _is_mapped(case.model):
            continue
        op = ops.get(case.name.split("_expanded")[0], "functions")
        found[op if op in found else "functions"].append(case)
    return found


def _is_mapped(model: onnx.ModelProto) -> bool:
    read = read_model(model.SerializeToString())
    try:
        for node in read.graph.nodes:
            find_op(node, read.opsets)
    except UnsupportedError:
        return False
    return True


def _arrays(values: Sequence[Any]) -> list[np.ndarray | None]:
    return [numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for v in values]


def _prepared(
    model: onnx.ModelProto, arrays: Sequence[np.ndarray | None], dynamic: bool, integers: bool
) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The model with inputs needed at import as initializers, and the arrays of the other inputs."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    read = read_model(model.SerializeToString())
    needed = {name for node in read.graph.nodes for name in static_inputs(node, read.opsets)}
    feed = dict(zip((i.name for i in model.graph.input), arrays, strict=False))
    for name, array in list(feed.items()):
        if array is None or not isinstance(array, np.ndarray | np.generic):
            continue
        if name in needed or (integers and array.dtype.kind in "iu" and array.ndim < 2):
            made.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
            del feed[name]
    kept = [i for i in made.graph.input if i.name in feed]
    del made.graph.input[:]
    made.graph.input.extend(kept)
    for info in made.graph.input if dynamic else ():
        for d, size in enumerate(info.type.tensor_type.shape.dim):
            if size.dim_value > 1:  # a size of 1 may broadcast, which is told at import
                size.dim_param = f"{info.name}_{d}"
    return made, feed


def _run(model: onnx.ModelProto, arrays: Sequence[Any], dynamic: bool) -> list[np.ndarray]:
    made, feed = _prepared(model, arrays, dynamic, integers=False)
    try:
        graph = load(made.SerializeToString())
    except UnsupportedOp as error:
        if "must be known at import" not in str(error):
            raise
        made, feed = _prepared(model, arrays, dynamic, integers=True)  # sizes computed from an integer input
        graph = load(made.SerializeToString())
    return list(run_graph(graph, feed).values())


def _check(case: Any, dynamic: bool) -> None:
    rtol = max([case.rtol, *(limit for word, limit in TOLERANCE.items() if word in case.name)])
    for inputs, expected in case.data_sets:
        results = _run(case.model, _arrays(inputs), dynamic)
        for got, want in zip(results, _arrays(expected), strict=True):
            want = np.asarray(want)
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            if got.dtype.kind not in "fiub":  # types of ml_dtypes
                got, want = got.astype(np.float32), want.astype(np.float32)
            np.testing.assert_allclose(got, want, rtol=rtol, atol=max(case.atol, rtol / 10 if rtol > 1e-3 else 0))


def _reason(case: Any) -> str | None:
    name = case.name.removeprefix("test_")
    return next((reason for pattern, reason in UNSUPPORTED if re.match(pattern, name)), None)


def _failures(cases: Sequence[Any]) -> Iterator[str]:
    for case in cases:
        try:
            _check(case, dynamic=False)
        except UnsupportedOp as error:
            reason = _reason(case)
            if reason is None or not re.search(reason, str(error)):
                yield f"{case.name}: {error}"
        except (AssertionError, RlxError) as error:
            yield f"{case.name}: {error}"


@pytest.mark.parametrize("group", GROUPS)
def test_cases_give_the_expected_outputs(group: str) -> None:
    """Shapes, dtypes and values of all cases are those that ONNX ships; the rest is refused for the listed reason."""
    failures = list(_failures(_groups()[group]))
    assert not failures, "\n".join(failures)


@pytest.mark.sample(30)
@pytest.mark.parametrize("group", GROUPS)
def test_dynamic_sizes_give_the_same_or_are_refused(group: str) -> None:
    """With every size of the inputs dynamic a case gives the same outputs, or can't be imported: never others."""
    failures = []
    for case in _groups()[group]:
        try:
            _check(case, dynamic=True)
        except (UnsupportedOp, ShapeError):
            continue
        except (AssertionError, RlxError) as error:
            failures.append(f"{case.name}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_enough_cases_run() -> None:
    """The suite does not shrink unnoticed: how many cases run fixed and dynamic, and how many are refused."""
    counts: Counter[str] = Counter()
    for case in (case for cases in _groups().values() for case in cases):
        for dynamic in (False, True):
            try:
                _run(case.model, _arrays(case.data_sets[0][0]), dynamic)
                counts["dynamic" if dynamic else "fixed"] += 1
            except (UnsupportedOp, ShapeError):
                counts["refused dynamic" if dynamic else "refused"] += 1
    assert counts["fixed"] >= 1130, counts
    assert counts["dynamic"] >= 990, counts


def test_every_listed_reason_is_needed() -> None:
    """A pattern of the list that no refused case matches any more has to go."""
    names = [case.name.removeprefix("test_") for cases in _groups().values() for case in cases]
    unused = [pattern for pattern, _ in UNSUPPORTED if not any(re.match(pattern, name) for name in names)]
    assert not unused
