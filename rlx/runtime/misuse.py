"""Wrong arguments of calls that are rare or never right: no process reads this before it meets one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlx.errors import ModelFormatError, OptionError, RlxError
from rlx.ir.graph import Array
from rlx.runtime.container import ENDING, read_container

__all__ = ["misnamed", "one_set_of_inputs", "refuse_repeats"]


def one_set_of_inputs(more: Sequence[Any]) -> OptionError:
    """The error for a run with arguments after its inputs, as in ONNX Runtime's order `run(names, feeds)`."""
    return OptionError(
        f"run takes all inputs as one argument, got {1 + len(more)}: run(feeds) with a mapping by name or a list by "
        "position, and run(feeds, outputs=['y']) where not all outputs are wanted (ONNX Runtime's run(names, feeds) "
        "has them the other way round)"
    )


def refuse_repeats(array: Array, what: str, kind: str) -> None:
    """Raises `OptionError` for an `out` whose elements share memory: some axis steps by less than smaller ones span."""
    span = array.itemsize
    for stride, extent in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < span and array.size:
            raise OptionError(f"{what}: expected memory for each element, this {kind} repeats some")
        span += stride * (extent - 1)


def misnamed(path: Path) -> ModelFormatError:
    """The error for an artifact that does not bear its ending."""
    try:
        portable = "code" not in read_container(path).facts
    except RlxError:
        portable = False  # a damaged one is called that once it is loaded as an artifact
    if portable:
        return ModelFormatError(
            f"{path}: is a portable artifact of rlx, a graph with its weights, under the name of something else: "
            f"rename it to end in {ENDING}, or load it by rlx.load_artifact(path) or with portable_only=True"
        )
    return ModelFormatError(
        f"{path}: is an artifact of rlx, whose machine code would be run, under the name of something else. If you "
        f"trust who made it, rename it to end in {ENDING} or load it by rlx.load_artifact(path), or with "
        "allow_code=True; with portable_only=True its code is not touched"
    )
