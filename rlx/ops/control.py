"""Control flow: ops with regions. A region is a closed graph; what it uses of the outside is an input of the node.

The inputs of each region are, in order, what the class's docstring lists; names don't matter. Values that don't change
between rounds are the trailing, captured inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.extents import uneven_rows
from rlx.ir.graph import Array, Graph, TensorType
from rlx.ir.shape import Size, unify
from rlx.ops.base import Op, Work, _sum, register, tensor_bytes

__all__ = ["Control", "If", "RunRegion", "Scan", "While"]

RunRegion = Callable[[Graph, Sequence[Array]], tuple[Array, ...]]


class Control(Op, ABC):
    """Base of the ops with regions: their types and values follow from the regions, not from the inputs alone."""

    strings: ClassVar[str] = "moved"

    def infer(self, *inputs: TensorType) -> TensorType:
        """Always raises `ShapeError`: without its regions the op has no types."""
        raise ShapeError(f"{self.op_name}: the output types follow from the regions: use infer_types(inputs, regions)")

    @abstractmethod
    def run_regions(
        self, inputs: Sequence[Array], regions: Sequence[Graph], run: RunRegion, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Array, ...]:
        """The outputs, for a device that runs regions with `run`; `shapes` are the output shapes of this run."""

    def work(self, *x: TensorType) -> Work:
        """What the node reads; what its regions cost is counted by the nodes in them."""
        return Work(0, _sum(tensor_bytes(t) for t in x), 0)

    def _check_count(self, inputs: Sequence[TensorType], least: int, regions: Sequence[Graph], wanted: int) -> None:
        if len(inputs) < least:
            raise ShapeError(f"{self.op_name}: takes {least} or more inputs, {len(inputs)} given")
        if len(regions) != wanted:
            raise ShapeError(f"{self.op_name}: takes {wanted} regions, {len(regions)} given")

    def _check_inputs(self, region: Graph, given: Sequence[TensorType]) -> None:
        declared = [v.type for v in region.inputs]
        if declared != list(given):
            raise ShapeError(
                f"{self.op_name}: region {region.name!r} takes ({_show(declared)}), it would be given ({_show(given)})"
            )


def _show(types: Sequence[TensorType]) -> str:
    return ", ".join(map(str, types))


def _results(region: Graph) -> list[TensorType]:
    return [o.value.type for o in region.outputs]


def _check_condition(what: str, type: TensorType) -> None:
    if type.dtype is not DTYPES["bool"]:
        raise DTypeError(f"{what}: expected bool[], got {type}")
    if type.shape != ():
        raise ShapeError(f"{what}: expected bool[], got {type}")


@register
class If(Control):
    """The results of the first region where the condition holds, else of the second. (ONNX If, jax.lax.cond)

    Inputs: cond (bool scalar), captured...; regions: then(captured...), otherwise(captured...) of equal result types.
    """

    def infer_types(self, inputs: Sequence[TensorType], regions: Sequence[Graph] = ()) -> tuple[TensorType, ...]:
        self._check_count(inputs, 1, regions, 2)
        _check_condition("if: the condition", inputs[0])
        then, otherwise = (_results(region) for region in regions)
        for region in regions:
            self._check_inputs(region, inputs[1:])
        if then != otherwise:
            raise ShapeError(f"if: the branches give ({_show(then)}) and ({_show(otherwise)}); they must be the same")
        return tuple(then)

    def run_regions(
        self, inputs: Sequence[Array], regions: Sequence[Graph], run: RunRegion, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Array, ...]:
        return run(regions[0 if inputs[0] else 1], inputs[1:])


@register
class While(Control):
    """Carries are replaced by the body's results for as long as the condition holds. (ONNX Loop, jax.lax.while_loop)

    Inputs: `carries` carries, captured...; regions: cond(carries..., captured...) -> bool scalar, asked before each
    round, and body(carries..., captured...) -> carries. Outputs: the carries when the condition fails.
    """

    carries: int

    def infer_types(self, inputs: Sequence[TensorType], regions: Sequence[Graph] = ()) -> tuple[TensorType, ...]:
        self._check_count(inputs, self.carries, regions, 2)
        cond, body = regions
        for region in regions:
            self._check_inputs(region, inputs)
        if len(cond.outputs) != 1:
            raise ShapeError(f"while: the condition has {len(cond.outputs)} results, expected one bool[]")
        _check_condition("while: the condition", cond.outputs[0].value.type)
        carried = list(inputs[: self.carries])
        if _results(body) != carried:
            raise ShapeError(f"while: the body gives ({_show(_results(body))}), the carries are ({_show(carried)})")
        return tuple(carried)

    def run_regions(
        self, inputs: Sequence[Array], regions: Sequence[Graph], run: RunRegion, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Array, ...]:
        cond, body = regions
        carries, captured = tuple(inputs[: self.carries]), tuple(inputs[self.carries :])
        while run(cond, carries + captured)[0]:
            carries = run(body, carries + captured)
        return carries


@register
class Scan(Control):
    """A loop over the rows of the scanned inputs that stacks a row of each further result. (ONNX Scan, jax.lax.scan)

    Inputs: `carries` carries, `scanned` scanned inputs [n, ...], captured...; region: body(carries..., rows...,
    captured...) -> carries..., rows.... Outputs: the last carries, then the stacked rows [n, ...]. With no scanned
    inputs `length` is n. `reverse` goes from the last row to the first; row i of a result stays at i.
    """

    carries: int
    scanned: int
    length: Size | None = None
    reverse: bool = False

    def infer_types(self, inputs: Sequence[TensorType], regions: Sequence[Graph] = ()) -> tuple[TensorType, ...]:
        self._check_count(inputs, self.carries + self.scanned, regions, 1)
        (body,) = regions
        carried = list(inputs[: self.carries])
        sequences = inputs[self.carries : self.carries + self.scanned]
        length = self.rounds(sequences)
        rows = [TensorType(t.shape[1:], t.dtype) for t in sequences]
        self._check_inputs(body, [*carried, *rows, *inputs[self.carries + self.scanned :]])
        results = _results(body)
        if results[: self.carries] != carried:
            raise ShapeError(f"scan: the body gives ({_show(results)}), the carries are ({_show(carried)})")
        return (*carried, *(TensorType((length, *t.shape), t.dtype) for t in results[self.carries :]))

    def rounds(self, sequences: Sequence[TensorType]) -> Size:
        """The number of rounds over scanned inputs of these types. Raises `ShapeError`."""
        lengths = [] if self.length is None else [self.length]
        for t in sequences:
            if t.rank == 0:
                raise ShapeError(f"scan: a scanned input needs an axis to go along, got {t}")
            lengths.append(t.shape[0])
        if not lengths:
            raise ShapeError("scan: without scanned inputs the attribute 'length' is needed")
        length = lengths[0]
        for other in lengths[1:]:
            length = unify(length, other, "scan: the lengths of the scanned inputs")
        if isinstance(length, int) and length < 0:
            raise ShapeError(f"scan: the length can't be negative, got {length}")
        return length

    def run_regions(
        self, inputs: Sequence[Array], regions: Sequence[Graph], run: RunRegion, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Array, ...]:
        (body,) = regions
        carries = tuple(inputs[: self.carries])
        sequences = inputs[self.carries : self.carries + self.scanned]
        captured = tuple(inputs[self.carries + self.scanned :])
        types = _results(body)[self.carries :]
        length = sequences[0].shape[0] if sequences else self.length
        assert isinstance(length, int), "sizes in attributes are ints by the time an op runs"
        sizes = [tuple(max(n, 0) for n in shape) for shape in shapes[self.carries :]]  # -1 where rounds decide
        stacked = tuple(np.empty(s, t.dtype.numpy) for s, t in zip(sizes, types, strict=True))
        for n in range(length):
            i = length - 1 - n if self.reverse else n
            results = run(body, (*carries, *(x[i] for x in sequences), *captured))
            carries, rows = results[: self.carries], results[self.carries :]
            if n == 0:
                stacked = tuple(np.empty((length, *row.shape), row.dtype) for row in rows)
            for made, row in zip(stacked, rows, strict=True):
                if made.shape[1:] != row.shape:
                    raise uneven_rows("the shape of a row", made.shape[1:], row.shape)
                made[i] = row
        return carries + stacked
