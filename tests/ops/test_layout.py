"""Layout ops: the element order of each, with fixed and symbolic sizes, against NumPy and ONNX Runtime."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import check, ort, values

import rlx
from rlx.backends import backend_named
from rlx.compiler import stages_of
from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ir.shape import Dim, evaluate
from rlx.kernels.expr import Apply, loads, walk
from rlx.kernels.lowering import lower_node
from rlx.ops.layout import (
    Concat,
    Expand,
    Full,
    Iota,
    Pad,
    Reshape,
    SizeOf,
    Slice,
    Split,
    Squeeze,
    Tile,
    Transpose,
    Unsqueeze,
)
from rlx.testing.interpret import check_op, interpret, make_node

F32 = DTYPES["f32"]


def f32(*shape: Any) -> TensorType:
    return TensorType(shape, F32)


def functions(op: Reshape, shape: tuple[Any, ...]) -> set[str]:
    """The scalar functions in the one load that the op lowers to."""
    lowered = lower_node(make_node(op, (shape, "f32")))
    assert lowered is not None
    ((piece,),) = lowered.outputs
    (load,) = loads(piece.expr)
    assert piece.expr is load
    return {e.fn for e in walk(load) if isinstance(e, Apply)}


@pytest.mark.parametrize(
    "old, new",
    [
        ((6,), (2, 3)),
        ((2, 3), (6,)),
        ((12, 5), (4, 15)),
        ((4, 15), (12, 5)),
        ((2, 1, 7), (1, 14, 1)),
        ((), (1, 1)),
        ((1, 1), ()),
        ((3, 0, 2), (0, 5)),
        ((4, 6, 5), (8, 3, 5)),
        ((5, 2, 9), (5, 3, 6)),
        ((8, 9), (2, 2, 6, 3)),
        ((2, 3, 5, 7), (15, 14)),
    ],
)
def test_reshape_keeps_the_row_major_order(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    """Index arithmetic of any regrouping of axes reads the elements in row-major order."""
    x = values(old)
    (y,) = check(Reshape(new), x)
    np.testing.assert_array_equal(y, x.reshape(new))


@st.composite
def two_shapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two factorisations of one element count."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 5]), max_size=6))

    def grouped(order: list[int]) -> list[int]:
        shape = []
        while order:
            n = draw(st.integers(1, len(order)))
            shape.append(int(np.prod(order[:n])))
            order = order[n:]
        return shape

    return grouped(draw(st.permutations(factors))), grouped(draw(st.permutations(factors)))


@given(two_shapes())
def test_reshape_between_any_two_shapes(shapes: tuple[list[int], list[int]]) -> None:
    """The simplifications of index arithmetic hold for arbitrary factorisations."""
    old, new = map(tuple, shapes)
    check_op(Reshape(new), np.arange(int(np.prod(old)), dtype=np.int32).reshape(old))


def test_reshape_of_symbolic_sizes() -> None:
    """Groups are found among symbols, and a count that can't be proved becomes a guard that holds."""
    b, h, w = Dim("b"), Dim("h"), Dim("w")
    sizes = {"b": 2, "h": 3, "w": 5, "n": 6, "m": 4}
    for old, new in [
        ((b, h, w), (b, h * w)),
        ((b, h * w), (b, h, w)),
        ((b * h, w), (b, h, w)),
        ((b, h, w), (b * h, 1, w)),
        ((b, h, 8), (b, 2, h, 4)),
        ((b, h, 8), (Dim("n"), 8)),
        ((b, 2 * h, 8), (b, h, 16)),
        ((b, 4 * h), (b * h, Dim("m"))),
        ((b, h, 4), (b * h * 4,)),
    ]:
        x = values(tuple(evaluate(n, sizes) for n in old))
        check_op(Reshape(new), x, shapes=[old], extents=sizes)


def test_reshape_divides_only_where_axes_mix() -> None:
    """Splitting axes, dropping and adding ones, and regrouping by whole factors need no division."""
    b, h, w = Dim("b"), Dim("h"), Dim("w")
    divisions = {"floordiv", "mod"}
    assert not functions(Reshape((b, h, w)), (b, h * w)) & divisions
    assert not functions(Reshape((2, 3, 5)), (30,)) & divisions
    assert not functions(Reshape((b, 1, h)), (b, h)) & divisions
    assert functions(Reshape((b, h, w)), (b, h, w)) == set()
    assert not functions(Reshape((b, 2, 3, 4)), (b, 2, 12)) & divisions
    assert functions(Reshape((6,)), (2, 3)) & divisions == divisions


def test_views_are_marked() -> None:
    """Ops that keep the row-major order say so, others do not."""
    assert all(op.view for op in (Reshape, Squeeze, Unsqueeze))
    assert not any(op.view for op in (Transpose, Slice, Expand))


def test_squeeze_and_unsqueeze() -> None:
    """Axes of size 1 go and come at the places named, counted from either end."""
    x = values((1, 3, 1, 5))
    assert check(Squeeze((0, -2)), x)[0].shape == (3, 5)
    assert check(Squeeze(), x)[0].shape == (3, 5)
    assert check(Squeeze((0,)), x)[0].shape == (3, 1, 5)
    assert check(Unsqueeze((-1, 0)), values((2, 3)))[0].shape == (1, 2, 3, 1)
    assert check(Unsqueeze((0,)), values(()))[0].shape == (1,)
    check_op(Squeeze((1,)), values((3, 1)), shapes=[(3, Dim("n"))], extents={"n": 1})
    with pytest.raises(ShapeError, match=r"axis 1 .* size 1"):
        Squeeze((1,)).infer(f32(1, 3))
    with pytest.raises(ShapeError, match="twice"):
        Unsqueeze((0, -3)).infer(f32(4))


@pytest.mark.parametrize("perm", list(permutations(range(3))))
def test_transpose_orders_axes(perm: tuple[int, ...]) -> None:
    """Every order of three axes."""
    x = values((2, 3, 5))
    np.testing.assert_array_equal(check(Transpose(perm), x)[0], x.transpose(perm))


def test_transpose_defaults_to_reversal() -> None:
    """perm None reverses; scalars and 16-bit floats pass; a wrong perm is named."""
    x = values((2, 3), ml_dtypes.bfloat16)
    np.testing.assert_array_equal(check(Transpose(), x)[0], x.T)
    assert check(Transpose(()), values(()))[0].shape == ()
    for perm in ((0, 0), (0,), (0, 2)):
        with pytest.raises(ShapeError, match="transpose"):
            Transpose(perm).infer(f32(2, 3))


@pytest.mark.parametrize(
    "slices",
    [
        (slice(None), slice(None)),
        (slice(2, 6), slice(1, None, 2)),
        (slice(None, None, -1), slice(4, 1, -2)),
        (slice(3, 3), slice(None)),
        (slice(6, None), slice(0, 1)),
        (slice(None, None, 3), slice(None, None, -4)),
    ],
)
def test_slice_reads_every_step(slices: tuple[slice, ...]) -> None:
    """Starts, sizes and steps of either sign give what NumPy slicing gives."""
    x = values((7, 5))
    ranges = [range(*s.indices(n)) for s, n in zip(slices, x.shape, strict=True)]
    op = Slice(tuple(r.start for r in ranges), tuple(map(len, ranges)), tuple(r.step for r in ranges))
    np.testing.assert_array_equal(check(op, x)[0], x[slices])


def test_slice_with_symbolic_bounds() -> None:
    """A slice to the end, by steps and backwards, of a symbolic axis asks for no guard; one that may fail does."""
    n, k = Dim("n"), Dim("k", 0)
    for op in (Slice((1,), (n - 1,), (1,)), Slice((0,), ((n + 2) // 3,), (3,)), Slice((n - 1,), (n,), (-1,))):
        node = make_node(op, ((n,), "f32"))
        assert not node.outputs[0].graph.guards
        check_op(op, values((7,)), shapes=[(n,)], extents={"n": 7})
    node = make_node(Slice((k,), (2,), (1,)), ((n,), "f32"))
    assert len(node.outputs[0].graph.guards) == 1
    check_op(Slice((k,), (2,), (1,)), values((7,)), shapes=[(n,)], extents={"n": 7, "k": 3})


def test_slice_outside_is_an_error() -> None:
    """Elements before or beyond the axis, a step of 0 and a wrong number of entries."""
    for op in (
        Slice((0,), (6,), (1,)),
        Slice((-1,), (2,), (1,)),
        Slice((4,), (6,), (-1,)),
        Slice((5,), (1,), (-1,)),
        Slice((0,), (3,), (0,)),
        Slice((0,), (-1,), (1,)),
        Slice((0, 0), (1, 1), (1, 1)),
    ):
        with pytest.raises(ShapeError, match="slice"):
            op.infer(f32(5))


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (1, 2, 3, 0), (3, 0, 2, 1), (0, 4, 0, 4)])
def test_pad_matches_onnx_runtime(mode: str, pads: tuple[int, ...]) -> None:
    """Every mode, with pads up to one less than the axis."""
    x = values((4, 5))
    inputs = [x, np.array(pads, np.int64), *([np.float32(2.5)] if mode == "constant" else [])]
    (expected,) = ort("Pad", *map(np.asarray, inputs), mode=mode, opset=19)
    (y,) = check(Pad(pads, 2.5, mode), x)
    np.testing.assert_array_equal(y, expected)


def test_pad_crops_and_pads_each_type() -> None:
    """Negative pads cut; the value is of the input's type; symbolic pads work."""
    x = values((4, 5))
    (expected,) = ort("Pad", x, np.array([-1, 2, 2, -3], np.int64), np.asarray(np.float32(0)), opset=19)
    np.testing.assert_array_equal(check(Pad((-1, 2, 2, -3)), x)[0], expected)
    for dtype in (np.int8, np.bool_, np.float16, np.int64):
        check(Pad((1, 0), 1), values((3,), dtype))
    check(Pad((0, 0, 2, 1), -1), values((0, 3)))
    check(Pad((2, 1), 7), values(()).reshape(1))
    n, p = Dim("n"), Dim("p", 0, 8)
    for mode in ("constant", "reflect", "edge", "wrap"):
        check_op(Pad((p, 1), 2, mode), values((5,)), shapes=[(n,)], extents={"n": 5, "p": 3})


def test_pad_errors() -> None:
    """Reflecting more than the axis holds, unknown modes, wrong counts."""
    with pytest.raises(ShapeError, match="smaller than the axis"):
        Pad((3, 0), mode="reflect").infer(f32(3))
    with pytest.raises(ShapeError, match="empty axis"):
        Pad((1, 0), mode="edge").infer(f32(0))
    with pytest.raises(OptionError, match="mirror"):
        Pad((1, 0), mode="mirror").infer(f32(3))
    with pytest.raises(ShapeError, match="expected 2"):
        Pad((1, 0, 0)).infer(f32(3))
    with pytest.raises(ShapeError, match="negative"):
        Pad((-2, -2)).infer(f32(3))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat_and_split_are_inverse(axis: int) -> None:
    """Parts (an empty one too) joined along an axis are the whole, and splitting gives them back."""
    sizes = (3, 0, 1, 4)
    parts = [values(tuple(n if d == axis % 2 else 5 for d in range(2)), seed=n) for n in sizes]
    (whole,) = check(Concat(axis), *parts)
    np.testing.assert_array_equal(whole, np.concatenate(parts, axis))
    back = check(Split(axis, sizes), whole, symbolic=Split(axis, sizes))
    for part, expected in zip(back, parts, strict=True):
        np.testing.assert_array_equal(part, expected)


def test_concat_and_split_of_symbolic_sizes() -> None:
    """Symbolic offsets of boxes and parts."""
    n, m = Dim("n", 0), Dim("m")
    extents = {"n": 3, "m": 2}
    check_op(
        Concat(1), values((2, 3)), values((2, 2)), values((2, 3)), shapes=[(m, n), (m, m), (m, n)], extents=extents
    )
    check_op(Split(0, (n, 2 * m, 1)), values((8, 2)), shapes=[(n + 2 * m + 1, 2)], extents=extents)


def test_concat_and_split_errors() -> None:
    """Types and sizes that disagree are named."""
    with pytest.raises(DTypeError, match="dtype"):
        Concat(0).infer(f32(2), TensorType((2,), DTYPES["i64"]))
    with pytest.raises(ShapeError, match="rank"):
        Concat(0).infer(f32(2), f32(2, 1))
    with pytest.raises(ShapeError, match="axis 1"):
        Concat(0).infer(f32(2, 3), f32(2, 4))
    with pytest.raises(ShapeError, match="1 or more"):
        Concat(0).infer()
    with pytest.raises(ShapeError, match="add up"):
        Split(0, (2, 2)).infer(f32(5))
    with pytest.raises(ShapeError, match="outside"):
        Split(1, (5,)).infer(f32(5))


@pytest.mark.parametrize("old, new", [((3, 1), (2, 3, 4)), ((2, 3), (1, 1)), ((), (2,)), ((1,), (0,)), ((5,), ())])
def test_expand_broadcasts_both_ways(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    """Sizes of 1 on either side stretch, as in ONNX."""
    x = values(old)
    (expected,) = ort("Expand", x, np.array(new, np.int64))
    (y,) = check(Expand(new), x)
    np.testing.assert_array_equal(y, expected)
    with pytest.raises(ShapeError, match="expand"):
        Expand((3,)).infer(f32(2))


@pytest.mark.parametrize("repeats", [(1, 1), (2, 3), (0, 2), (3, 1)])
def test_tile_repeats(repeats: tuple[int, ...]) -> None:
    """Each axis repeats as a whole."""
    x = values((2, 3))
    np.testing.assert_array_equal(check(Tile(repeats), x)[0], np.tile(x, repeats))
    r = Dim("r", 0)
    check_op(Tile((r, 2)), x, shapes=[(2, 3)], extents={"r": 4})
    check_op(Tile((2,)), values((0,)))
    with pytest.raises(ShapeError, match="tile"):
        Tile((2,)).infer(f32(2, 3))


def test_tile_divides_no_index() -> None:
    """Loops over what is repeated, and over what repeats: a remainder for each element is slow."""
    g = rlx.Graph("tile")
    g.output(g.add(Tile((3, 2, 1)), g.input("x", (4, 6, 5)))[0])
    made = stages_of(g, backend_named("cpu"), rlx.CompileOptions())
    assert made.program is not None
    applied = [x.fn for k in made.program.run for e in k.expressions() for x in walk(e) if isinstance(x, Apply)]
    assert applied == []


def test_sources() -> None:
    """Constants, counting sequences and sizes, of fixed and symbolic extent."""
    n = Dim("n", 0)
    cases: list[tuple[Any, Any]] = [
        (Full((2, n), 3, DTYPES["i8"]), np.full((2, 4), 3, np.int8)),
        (Full((n,), True, DTYPES["bool"]), np.ones(4, np.bool_)),
        (Full((), float("-inf")), np.float32(-np.inf)),
        (Full((2,), 1.5, DTYPES["bf16"]), np.full(2, 1.5, ml_dtypes.bfloat16)),
        (Iota(n), np.arange(4)),
        (Iota(3, 10, -4, DTYPES["i32"]), np.array([10, 6, 2], np.int32)),
        (Iota(n, n, 1), np.arange(4) + 4),
        (Iota(n, 0.5, 0.25, F32), np.array([0.5, 0.75, 1.0, 1.25], np.float32)),
        (Iota(n, n, 2, DTYPES["f16"]), np.array([4, 6, 8, 10], np.float16)),
        (Iota(0), np.arange(0)),
        (SizeOf(2 * n + 1), np.int64(9)),
    ]
    for op, expected in cases:
        (y,) = check_op(op, extents={"n": 4})
        np.testing.assert_array_equal(y, expected)
        assert y.dtype == expected.dtype
    with pytest.raises(DTypeError, match="integers"):
        Iota(3, 0.5).infer()
    with pytest.raises(ShapeError, match="negative"):
        Full((-1,)).infer()


def test_reshape_count_must_agree() -> None:
    """A different number of elements is an error, one that depends on the run a guard."""
    with pytest.raises(ShapeError, match="as many elements"):
        Reshape((4,)).infer(f32(5))
    node = make_node(Reshape((4, 2)), ((Dim("n"), 2), "f32"))
    assert len(node.outputs[0].graph.guards) == 1
    assert interpret(node, [values((4, 2))], {"n": 4})[0].shape == (4, 2)
