"""Sizes that data decide: a number as a size, what a branch gives, and how many rows a loop stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rlx.errors import ExecutionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.extents import uneven_rows
from rlx.ir.graph import Array, Graph, TensorType
from rlx.ir.shape import Dim, Shape, Size, symbols
from rlx.ops.base import Op, Work, check_kind, register
from rlx.ops.control import Control, RunRegion, _check_condition, _results, _show
from rlx.ops.mask import check_scalar
from rlx.ops.select import Produced

__all__ = ["AsShape", "Extent", "Loop"]


@register
class Loop(Control):
    """Carries are replaced, and rows stacked, for as long as the condition holds. (ONNX Loop with scan outputs)

    Inputs: `carries` carries, captured...; regions: cond(carries..., captured...) -> bool scalar, asked before each
    round, and body(carries..., captured...) -> carries..., rows.... Outputs: the carries when the condition fails, then
    the stacked rows [count, ...]; `count` is a dim that the loop decides, at most its upper bound.
    """

    carries: int
    count: Size

    def at(self, extents: Mapping[str, int]) -> Op:
        """The op with every size an int; `count`, not known yet, is left out of account."""
        unknown = {s.name: 0 for s in symbols(self.count)} if isinstance(self.count, Dim) else {}
        return super().at(unknown | dict(extents))

    def infer_types(self, inputs: Sequence[TensorType], regions: Sequence[Graph] = ()) -> tuple[TensorType, ...]:
        self._check_count(inputs, self.carries, regions, 2)
        cond, body = regions
        for region in regions:
            self._check_inputs(region, inputs)
        if len(cond.outputs) != 1:
            raise ShapeError(f"loop: the condition has {len(cond.outputs)} results, expected one bool[]")
        _check_condition("loop: the result of the condition", _results(cond)[0])
        carried, results = list(inputs[: self.carries]), _results(body)
        if results[: self.carries] != carried:
            raise ShapeError(f"loop: the body gives ({_show(results)}), the carries are ({_show(carried)})")
        return (*carried, *(TensorType((self.count, *t.shape), t.dtype) for t in results[self.carries :]))

    def run_regions(
        self, inputs: Sequence[Array], regions: Sequence[Graph], run: RunRegion, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Array, ...]:
        cond, body = regions
        carries, captured = tuple(inputs[: self.carries]), tuple(inputs[self.carries :])
        rows: list[tuple[Array, ...]] = []
        while run(cond, carries + captured)[0]:
            results = run(body, carries + captured)
            carries = results[: self.carries]
            rows.append(results[self.carries :])
        types = _results(body)[self.carries :]
        if not rows:
            empty = [np.empty((0, *(max(n, 0) for n in s[1:]))) for s in shapes[self.carries :]]
            return carries + tuple(e.astype(t.dtype.numpy) for e, t in zip(empty, types, strict=True))
        for column in zip(*rows, strict=True):
            for before, row in pairwise(column):
                if row.shape != before.shape:
                    raise uneven_rows("the shape of a row", before.shape, row.shape)
        return carries + tuple(np.stack(column) for column in zip(*rows, strict=True))


@register
class AsShape(Op):
    """x as it is, under sizes that are only known when it exists: dims that the run then takes from it.

    A size that is known already is checked: another one stops the run with `ExecutionError`.
    """

    shape: Shape

    def at(self, extents: Mapping[str, int]) -> Op:
        """The op with every size an int; those not known yet are left out of account."""
        unknown = {s.name: 0 for size in self.shape for s in symbols(size)}
        return super().at(unknown | dict(extents))

    def infer(self, x: TensorType) -> TensorType:
        if len(self.shape) != x.rank:
            raise ShapeError(f"as_shape: {x} can't have the {len(self.shape)} sizes {self.shape}")
        return TensorType(self.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        return Work(0, 0, 0)

    def reference(self, x: Array) -> Array:
        return x

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(x)


@register
class Extent(Produced):
    """Makes one integer of the data a size: bool [count, 0], which has no elements. A negative one stops the run.

    `largest` says what it can't exceed, where that is known. What the number was made of may be the second input: the
    error shows that one, and `wanted` says what is expected of it.
    """

    count: Size
    largest: Size | None = None
    wanted: str = "a size can't be negative"

    def most(self, *x: TensorType) -> Size | None:
        return self.largest

    def infer(self, x: TensorType, origin: TensorType | None = None) -> TensorType:
        check_kind(self, x, "iu")
        check_scalar(self, "the size", x)
        if origin is not None:
            check_scalar(self, "what the size is made of", origin)
        return TensorType((self.count, 0), DTYPES["bool"])

    def reference(self, x: Array, origin: Array | None = None) -> Array:
        if int(x.item()) < 0:
            raise ExecutionError(f"extent: {self.wanted}, got {np.asarray(x if origin is None else origin)[()]!s}")
        return np.empty((int(x.item()), 0), np.bool_)
