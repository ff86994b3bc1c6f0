"""Fused programs compute what the graph defines, in as few kernels as promised, on two targets that differ most.

Programs run on an interpreter (rlx.testing.program), so no backend is involved. `InRows` takes all anchors and
operands in rows, `Loops` none: there every op is plain loops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fusion_targets import Everything, Loops

from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError
from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import encoding_named
from rlx.ir.extents import bind_extents
from rlx.ir.graph import Array, Graph, Value
from rlx.ir.shape import Dim, Shape
from rlx.kernels.affine import Affine
from rlx.kernels.analysis import Fusing
from rlx.kernels.fuse import fuse
from rlx.kernels.lowering import Anchor, out_vars
from rlx.kernels.lowering import Conv as ConvAnchor
from rlx.kernels.program import Program
from rlx.ops import activation as act
from rlx.ops import contract, index, layout, normalize, pool, reduction
from rlx.ops import elementwise as ew
from rlx.ops.attention import Attention
from rlx.ops.base import Op, apply, register
from rlx.ops.conv import Conv
from rlx.plan.plan import bound_extents, make_plan
from rlx.testing.program import run_program


class InRows(Everything):
    """Takes every anchor and reads every operand in place that is contiguous along its last axis."""

    def accepts_operand(self, anchor: Anchor, role: str, shape: Shape, index: Affine) -> bool:
        if role == "a":
            return any(c == 1 for c in index.coefs.values()) or not index.coefs
        return index.coefs.get(out_vars(len(shape))[-1], 1) == 1


TARGETS = pytest.mark.parametrize("target", [InRows(), Loops()], ids=["anchors", "loops"])
N = Dim("n", 0, 8)
F32 = DTYPES["f32"]


def array(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return (values * 4 if np.dtype(dtype).kind in "iu" else values).astype(dtype)


def check(
    graph: Graph, target: Any, inputs: dict[str, Array], *, kernels: int | None = None, prepare: int | None = None
) -> Program:
    """Fuses, and compares with the reference: in separate memory, then planned at these extents and at the bounds."""
    program = fuse(graph, target)
    params = {p.name: p.data if p.data is not None else array(*map(int, p.shape)) for p in graph.params}  # type: ignore[arg-type]
    states = {s.name: s.data if s.data is not None else array(*map(int, s.shape)) for s in graph.states}  # type: ignore[arg-type]
    plain = {p.name: params[p.name].shape for p in graph.params if p.type.encoding is None}
    extents = bind_extents(graph, {k: v.shape for k, v in inputs.items()} | plain)
    updated = {k: v.copy() for k, v in states.items()}
    expected = run_graph(graph, inputs, params, updated)
    bounds = bound_extents(program)
    plans = [None, make_plan(program, extents), make_plan(program, extents, reuse=False)]
    plans += [make_plan(program, bounds)] if bounds is not None else []
    for plan in plans:
        got = run_program(program, inputs, extents, params=params, states=states, plan=plan)
        assert [name for name, _ in program.outputs] == [o.name for o in graph.outputs]
        for name in (*expected, *graph.updates):
            want = expected.get(name, updated.get(name))
            assert want is not None
            assert got[name].dtype == want.dtype
            tolerance = 1e-2 if want.dtype.itemsize == 2 else 3e-5
            np.testing.assert_allclose(
                got[name].astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance, err_msg=name
            )
    if kernels is not None:
        assert len(program.run) == kernels, str(program)
    if prepare is not None:
        assert len(program.prepare) == prepare, str(program)
    return program


def kinds(program: Program) -> Counter[str]:
    return Counter(k.kind for k in program.run)


def linear(x: Value, w: str, shape: tuple[int, int], bias: bool = True) -> Any:
    y = apply(contract.MatMul(), x, x.graph.param(w, shape))
    return apply(ew.Add(), y, x.graph.param(f"{w}_bias", shape[1:])) if bias else y


# ---- anchors and epilogues


@TARGETS
def test_bias_activation_and_residual_end_up_in_the_contraction(target: Any) -> None:
    g = Graph("mlp")
    x = g.input("x", (N, 6))
    g.output(apply(ew.Add(), apply(act.Gelu(), linear(x, "w", (6, 6))), x), "y")
    program = check(g, target, {"x": array(3, 6)})
    if isinstance(target, InRows):
        assert [k.kind for k in program.run] == ["contract"]
        assert program.run[0].name == "matmul+add+gelu+add"


@TARGETS
def test_axes_of_size_1_do_not_stand_in_the_way_of_an_epilogue(target: Any) -> None:
    """Broadcasting reads such an axis at 0, which is where its loop variable always is."""
    g = Graph("batch of 1")
    x = g.input("x", (1, N, 6))
    g.output(apply(act.Gelu(), apply(ew.Add(), linear(x, "w", (6, 6)), x)), "y")
    program = check(g, target, {"x": array(1, 3, 6)})
    if isinstance(target, InRows):
        assert [k.kind for k in program.run] == ["contract"]


@TARGETS
@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_result_with_two_readers_is_stored_before_its_activation(target: Any, n: int) -> None:
    g = Graph("two readers")
    x = g.input("x", (N, 6))
    h = linear(x, "w", (6, 4))
    g.output(apply(act.Relu(), h), "a")
    g.output(apply(ew.Tanh(), h), "b")
    check(g, target, {"x": array(n, 6)}, kernels=3)


@TARGETS
def test_sum_of_two_contractions(target: Any) -> None:
    """One becomes the epilogue of the other, which must come later."""
    g = Graph("two")
    x = g.input("x", (4, 6))
    g.output(apply(ew.Add(), linear(x, "w", (6, 5)), linear(x, "v", (6, 5))), "y")
    program = check(g, target, {"x": array(4, 6)})
    if isinstance(target, InRows):
        assert kinds(program) == {"contract": 2}


@TARGETS
def test_chain_of_contractions(target: Any) -> None:
    g = Graph("chain")
    h = g.input("x", (N, 4))
    for layer in range(4):
        h = apply(act.Relu(), linear(h, f"w{layer}", (4, 4)))
    g.output(h, "y")
    check(g, target, {"x": array(5, 4)}, kernels=4, prepare=0)


@TARGETS
def test_transposed_weight_and_activation(target: Any) -> None:
    """Both are read in place where the target can, and never copied where there are no anchors."""
    g = Graph("transposed")
    x, w = g.input("x", (6, N)), g.param("w", (5, 6))
    y = apply(contract.MatMul(), apply(layout.Transpose((1, 0)), x), apply(layout.Transpose((1, 0)), w))
    g.output(y, "y")
    check(g, target, {"x": array(6, 3)}, kernels=1, prepare=0)


@TARGETS
def test_scaled_weight_is_made_by_the_packing_or_prepare(target: Any) -> None:
    g = Graph("scaled")
    x, w, s = g.input("x", (N, 6)), g.param("w", (6, 5)), g.param("s", (5,))
    g.output(apply(contract.MatMul(), x, apply(ew.Mul(), w, apply(ew.Exp(), s))), "y")
    program = check(g, target, {"x": array(3, 6)}, kernels=1)
    assert {b.base.kind for b in program.run[0].reads()} <= {"input", "param", "prepared"}


@TARGETS
def test_static_contraction_stays_in_prepare(target: Any) -> None:
    """An epilogue that needs an input must not drag a product of weights into every run."""
    g = Graph("static")
    x, a, b = g.input("x", (4, 4)), g.param("a", (4, 6)), g.param("b", (6, 4))
    g.output(apply(ew.Add(), apply(contract.MatMul(), a, b), x), "y")
    program = check(g, target, {"x": array(4, 4)}, kernels=1, prepare=1)
    assert program.run[0].kind == "map"


@TARGETS
def test_batched_and_broadcast_contraction(target: Any) -> None:
    g = Graph("batched")
    x, y = g.input("x", (2, 1, 3, 4)), g.input("y", (5, 4, 3))
    g.output(apply(ew.Mul(), apply(contract.MatMul(), x, y), 0.5), "z")
    check(g, target, {"x": array(2, 1, 3, 4), "y": array(5, 4, 3)}, kernels=1)


@TARGETS
def test_convolution_with_folded_batch_norm(target: Any) -> None:
    g = Graph("conv")
    x, w = g.input("x", (N, 3, 5, 5)), g.param("w", (4, 3, 3, 3))
    scale, shift = g.param("scale", (4, 1, 1, 1)), g.param("shift", (4,))
    w = apply(ew.Mul(), w, scale)
    y = apply(Conv(pads=(1, 1, 1, 1), strides=(2, 2), dilations=(1, 1)), x, w, apply(ew.Neg(), shift))
    g.output(apply(act.Relu(), y), "y")
    program = check(g, target, {"x": array(2, 3, 5, 5)}, kernels=1)
    assert isinstance(program.run[0].anchor, ConvAnchor) == isinstance(target, InRows)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_split_and_merged_heads(causal: bool) -> None:
    """Heads are split, transposed and merged without a kernel of their own."""
    g = Graph("attention")
    x = g.input("x", (2, N, 8))
    heads = []
    for role in "qkv":
        h = apply(layout.Reshape((2, N, 2, 4)), linear(x, role, (8, 8)))
        heads.append(apply(layout.Transpose((0, 2, 1, 3)), h))
    y = apply(Attention(causal=causal), *heads)
    y = apply(layout.Reshape((2, N, 8)), apply(layout.Transpose((0, 2, 1, 3)), y))
    g.output(linear(y, "o", (8, 8)), "y")
    program = check(g, InRows(), {"x": array(2, 3, 8)})
    assert kinds(program) == {"contract": 4, "attention": 1}, str(program)


# ---- loops


@TARGETS
def test_elementwise_chain_is_one_kernel(target: Any) -> None:
    g = Graph("chain")
    x, y = g.input("x", (N, 4)), g.input("y", (4,))
    z = apply(ew.Exp(), apply(ew.Add(), x, y))
    z = apply(ew.Sqrt(), apply(ew.Mul(), apply(act.Relu(), z), 2.0))
    g.output(apply(ew.Where(), apply(ew.Greater(), x, y), z, x), "z")
    program = check(g, target, {"x": array(3, 4), "y": array(4)}, kernels=1)
    assert program.run[0].kind == "map"


@TARGETS
def test_softmax_chain(target: Any) -> None:
    """scale and mask are computed in the row kernel (they are cheap), dropout-like scaling after it too."""
    g = Graph("softmax")
    x, mask = g.input("x", (2, N, 5)), g.input("mask", (N, 5))
    scores = apply(ew.Add(), apply(ew.Mul(), x, 0.5), mask)
    g.output(apply(ew.Mul(), apply(normalize.Softmax(), scores), 2.0), "y")
    program = check(g, target, {"x": array(2, 3, 5), "mask": array(3, 5)}, kernels=1)
    assert program.run[0].kind == "row"


@TARGETS
def test_layer_norm_after_a_residual(target: Any) -> None:
    g = Graph("norm")
    x, r = g.input("x", (N, 6)), g.input("r", (N, 6))
    y = apply(normalize.LayerNorm(), apply(ew.Add(), x, r), g.param("g", (6,)), g.param("b", (6,)))
    g.output(y, "y")
    check(g, target, {"x": array(3, 6), "r": array(3, 6, seed=1)}, kernels=1)


@TARGETS
def test_expensive_value_with_two_readers_is_computed_once(target: Any) -> None:
    g = Graph("shared")
    x = g.input("x", (N, 4))
    e = apply(ew.Exp(), x)
    g.output(apply(ew.Add(), e, 1.0), "a")
    g.output(apply(ew.Mul(), e, x), "b")
    check(g, target, {"x": array(3, 4)}, kernels=3)


@TARGETS
def test_expensive_value_is_not_computed_again_by_a_broadcast_or_reduction(target: Any) -> None:
    g = Graph("broadcast")
    x = g.input("x", (4,))
    e = apply(ew.Exp(), x)
    g.output(apply(layout.Expand((3, 4)), e), "wide")
    s = apply(ew.Exp(), g.input("y", (3, 4)))
    g.output(apply(ew.Sub(), s, apply(reduction.ReduceSum((1,)), s)), "centred")
    program = check(g, target, {"x": array(4), "y": array(3, 4)})
    assert len(program.run) == 5, str(program)  # exp, expand; exp, sum, sub


@TARGETS
def test_cheap_value_with_two_readers_is_computed_twice(target: Any) -> None:
    g = Graph("cheap")
    x = g.input("x", (N, 4))
    c = apply(ew.Add(), x, 1.0)
    g.output(apply(ew.Exp(), c), "a")
    g.output(apply(ew.Sin(), c), "b")
    check(g, target, {"x": array(3, 4)}, kernels=2)


@TARGETS
def test_what_is_stored_already_is_read_back(target: Any) -> None:
    """A value that a host call forced into memory is not computed again by the next reader."""
    g = Graph("stored")
    x = g.input("x", (4,))
    c = apply(ew.Add(), x, 1.0)
    g.output(apply(_HostSort(), c), "sorted")
    g.output(apply(ew.Exp(), c), "e")
    program = check(g, target, {"x": array(4)}, kernels=3)
    assert [b.kind for b in program.run[2].reads()] == ["arena"]


@TARGETS
def test_reduction_then_broadcast_back(target: Any) -> None:
    g = Graph("reduce")
    x = g.input("x", (N, 4, 3))
    m = apply(reduction.ReduceMean((1, 2)), x)
    g.output(apply(ew.Div(), x, m), "y")
    check(g, target, {"x": array(2, 4, 3)}, kernels=2)


@TARGETS
def test_pooling_and_arg(target: Any) -> None:
    g = Graph("pool")
    x = g.input("x", (N, 2, 6, 6))
    p = apply(pool.MaxPool((2, 2), strides=(2, 2)), apply(act.Relu(), x))
    g.output(apply(reduction.ArgMax(3, keepdims=False), p), "y")
    check(g, target, {"x": array(2, 2, 6, 6)}, kernels=2)


@TARGETS
@pytest.mark.parametrize("dtype", [np.float16, np.int32, np.float64])
def test_other_types(target: Any, dtype: Any) -> None:
    g = Graph("types")
    x, y = g.input("x", (3, 4), dtype), g.input("y", (4, 5), dtype)
    z = apply(contract.MatMul(), apply(ew.Add(), x, x), y)
    g.output(apply(ew.Cast(F32), apply(act.Relu(), z)), "z")
    check(g, target, {"x": array(3, 4, dtype=dtype), "y": array(4, 5, dtype=dtype)})


# ---- layout


@TARGETS
def test_reshapes_cost_nothing(target: Any) -> None:
    g = Graph("views")
    x = g.input("x", (N, 6))
    h = linear(x, "w", (6, 4))
    h = apply(layout.Reshape((N, 2, 2)), h)
    h = apply(layout.Unsqueeze((0,)), h)
    h = apply(layout.Squeeze((0,)), h)
    g.output(apply(layout.Reshape((N * 4,)), h), "y")
    program = check(g, target, {"x": array(3, 6)}, kernels=1)
    assert program.outputs[0][1].root is program.run[0].writes()[0]


@TARGETS
def test_reshape_of_a_transpose_is_one_copy(target: Any) -> None:
    g = Graph("copy")
    x = g.input("x", (2, 3, 4))
    t = apply(layout.Transpose((2, 0, 1)), x)
    g.output(apply(layout.Reshape((4, 6)), t), "y")
    program = check(g, target, {"x": array(2, 3, 4)}, kernels=1)
    assert program.run[0].kind == "copy"


@TARGETS
def test_contiguous_slices_are_views_and_others_are_not(target: Any) -> None:
    g = Graph("slices")
    x = g.input("x", (4, 6))
    h = apply(ew.Exp(), x)
    g.output(apply(layout.Slice((1, 0), (2, 6), (1, 1)), h), "rows")
    g.output(apply(layout.Slice((0, 1), (4, 3), (1, 2)), h), "columns")
    g.output(apply(layout.Slice((3, 5), (3, 6), (-1, -1)), h), "reversed")
    program = check(g, target, {"x": array(4, 6)}, kernels=3)
    rows = program.outputs[0][1]
    assert rows.root is program.run[0].writes()[0]
    assert rows.offset == 24


@TARGETS
def test_concat_split_and_pad(target: Any) -> None:
    g = Graph("pieces")
    x, y = g.input("x", (N, 4)), g.input("y", (2, 4))
    c = apply(layout.Concat(0), apply(ew.Exp(), x), y, apply(ew.Neg(), x))
    first, second = apply(layout.Split(1, (1, 3)), c)
    g.output(apply(layout.Pad((0, 1, 0, 1), value=2.0), apply(ew.Tanh(), first)), "a")
    g.output(apply(layout.Pad((1, 0, 1, 0), mode="edge"), second), "b")
    program = check(g, target, {"x": array(3, 4), "y": array(2, 4)})
    assert len(program.run[0].stores) == 3  # exp and neg are computed in the pieces


@TARGETS
def test_outputs_that_are_leaves_views_and_repeats(target: Any) -> None:
    g = Graph("outputs")
    x, w = g.input("x", (N, 4)), g.param("w", (3, 2))
    c = g.constant(np.arange(6, dtype=np.float32).reshape(2, 3), name="c")
    g.output(x, "input")
    g.output(w, "param")
    g.output(c, "const")
    g.output(apply(layout.Reshape((N * 4,)), x), "input view")
    g.output(apply(layout.Reshape((6,)), w), "param view")
    g.output(apply(layout.Reshape((3, 2)), c), "const view")
    h = apply(ew.Exp(), x)
    g.output(h, "once")
    g.output(h, "twice")
    g.output(apply(layout.Reshape((N, 2, 2)), h), "view")
    g.output(apply(ew.Neg(), w), "static")
    program = check(g, target, {"x": array(3, 4)}, prepare=1)
    assert {b.kind for _, b in program.outputs} == {"arena"}  # what is not there is copied
    assert kinds(program) == {"copy": 7, "map": 1}
    names = [b.name for b in program.touched()]
    assert len(set(names)) == len({*program.touched()}), names


@TARGETS
def test_gather_chain(target: Any) -> None:
    """Embedding, position embedding and their sum: one kernel, with the index checked once in it."""
    g = Graph("embedding")
    ids = g.input("ids", (2, N), "i64")
    table, places = g.param("table", (10, 4)), g.param("places", (8, 4))
    where = apply(layout.Slice((0, 0), (N, 4), (1, 1)), places)
    g.output(apply(ew.Add(), apply(index.Gather(0), table, ids), where), "y")
    program = check(g, target, {"ids": np.array([[1, 9, -1], [0, 2, -10]])}, kernels=1)
    with pytest.raises(ExecutionError, match="10"):
        run_program(
            program,
            {"ids": np.array([[1, 10]] * 2)},
            {"n": 2},
            params={"table": array(10, 4), "places": array(8, 4)},
        )


@TARGETS
def test_a_check_behind_a_condition_is_not_made_outside_of_it(target: Any) -> None:
    """A shift by padding reads no element at the border, so nothing there may fail."""
    g = Graph("guarded")
    a, b = g.input("a", (4,), "i32"), g.input("b", (4,), "i32")
    g.output(apply(layout.Pad((1, -1)), apply(ew.Div(), a, b)), "y")
    check(g, target, {"a": np.arange(4, dtype=np.int32), "b": np.array([1, 2, 3, 4], np.int32)})


@TARGETS
def test_scalars_and_sizes_of_zero(target: Any) -> None:
    g = Graph("small")
    s, e = g.input("s", ()), g.input("e", (0, 3))
    g.output(apply(ew.Exp(), s), "scalar")
    g.output(apply(ew.Add(), e, s), "empty")
    g.output(apply(layout.Reshape((3, 0)), apply(ew.Exp(), e)), "empty view")
    g.output(apply(reduction.ReduceSum((0,)), e), "sum of none")
    g.output(apply(layout.Reshape((1, 1)), s), "scalar view")
    check(g, target, {"s": array(), "e": array(0, 3)})


@TARGETS
def test_sizes_as_values(target: Any) -> None:
    g = Graph("sizes")
    x = g.input("x", (N, 4))
    count = apply(ew.Cast(F32), g.add(layout.SizeOf(N * 4))[0])
    g.output(apply(ew.Div(), apply(reduction.ReduceSum(), x), count), "mean")
    g.output(g.add(layout.Iota(N))[0], "iota")
    check(g, target, {"x": array(3, 4)})


@TARGETS
def test_operands_are_not_written_over_too_early(target: Any) -> None:
    """Of one size with the result and read last, but at other elements, more than once, or after it is begun."""
    g = Graph("in place")
    x = g.input("x", (4, 4))
    a, b, c, d = (linear(x, w, (4, 4)) for w in "abcd")
    g.output(apply(layout.Transpose((1, 0)), a), "transposed")
    g.output(apply(normalize.Softmax(), b), "softmax")
    g.output(apply(ew.Exp(), c), "exp")
    twice = apply(ew.Sub(), d, apply(layout.Slice((3, 0), (4, 4), (-1, 1)), d))
    g.output(linear(twice, "e", (4, 4)), "reversed")
    check(g, target, {"x": array(4, 4)})


# ---- states, params, encodings, host calls


@TARGETS
def test_state_updates(target: Any) -> None:
    g = Graph("state")
    x, s = g.input("x", (4,)), g.state("s", (4,))
    new = apply(ew.Add(), apply(ew.Mul(), s, 0.5), x)
    g.update(s, new)
    g.output(apply(ew.Exp(), new), "y")
    program = check(g, target, {"x": array(4)})
    assert list(program.updates) == ["s"]


@TARGETS
def test_static_parts_move_to_prepare_unless_they_grow(target: Any) -> None:
    g = Graph("prepare")
    x, v = g.input("x", (N, 4)), g.param("v", (4,))
    rsqrt = apply(ew.Rsqrt(), apply(ew.Add(), apply(ew.Mul(), v, v), 1e-5))
    wide = apply(ew.Exp(), apply(layout.Expand((5000, 4)), v))  # 80 kB out of 16 bytes
    y = apply(ew.Mul(), x, rsqrt)
    g.output(y, "y")
    g.output(apply(ew.Mul(), wide, g.input("big", (5000, 4))), "z")
    program = check_prepare(g, target)
    assert len(program.prepare) == 1
    assert len(program.run) == 2


def check_prepare(graph: Graph, target: Any) -> Program:
    """Without running it on the (slow) interpreter."""
    program = fuse(graph, target)
    for kernel in program.prepare:
        assert all(b.kind == "prepared" for b in kernel.writes())
    return program


@TARGETS
@pytest.mark.parametrize("encoding", ["q8_0", "q4_0"])
def test_encoded_weights_are_decoded_where_they_are_read(target: Any, encoding: str) -> None:
    stored = encoding_named(encoding).encode(array(32, 32))
    g = Graph("encoded")
    x = g.input("x", (N, 32))
    w = g.param("w", (32, 32), data=stored, encoding=encoding)
    g.output(apply(contract.MatMul(), x, w), "y")
    g.output(apply(index.Gather(0), w, g.input("ids", (2,), "i64")), "rows")
    check(g, target, {"x": array(2, 32), "ids": np.array([3, -1])}, kernels=2)


@TARGETS
def test_reshaped_encoded_weight_is_decoded(target: Any) -> None:
    """A view of stored blocks would show bytes, not elements."""
    g = Graph("encoded view")
    w = g.param("w", (2, 32), data=encoding_named("q8_0").encode(array(2, 32)), encoding="q8_0")
    x = g.input("x", (64,))
    g.output(apply(ew.Add(), apply(layout.Reshape((64,)), w), x), "y")
    g.output(apply(layout.Reshape((64,)), w), "flat")
    g.output(w, "w")
    check(g, target, {"x": array(64)})


@register
class _HostSort(Op):
    """An op with neither `lower` nor `decompose`, with two results."""

    op_name = "test_fuse_sort"

    def infer(self, x: Any) -> Any:
        return x

    def reference(self, x: Array) -> Array:
        return np.sort(x, axis=-1)


@TARGETS
def test_host_call_between_kernels(target: Any) -> None:
    g = Graph("host")
    x = g.input("x", (N, 4))
    s = apply(_HostSort(), apply(ew.Exp(), x))
    g.output(apply(ew.Sub(), s, x), "y")
    program = check(g, target, {"x": array(3, 4)}, kernels=3)
    assert [k.kind for k in program.run] == ["map", "host", "map"]


# ---- random graphs

UNARY: list[Callable[[], Op]] = [ew.Exp, ew.Tanh, act.Relu, act.Gelu, ew.Neg, ew.Abs, normalize.Softmax]
BINARY: list[Callable[[], Op]] = [ew.Add, ew.Sub, ew.Mul, ew.Maximum]


@TARGETS
@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", range(60))
def test_random_graphs(target: Any, seed: int) -> None:
    """Ops on values of a few shapes, with several outputs: whatever is fused, stored, viewed or planned agrees."""
    rng = np.random.default_rng(seed)
    g = Graph("random")
    n = Dim("n", 1, 6)
    values: list[Value] = [g.input("x", (n, 4)), g.input("y", (n, 4)), g.param("w", (4, 4)), g.param("v", (4,))]

    def some(*shapes: Shape) -> Value:
        fitting = [v for v in values if not shapes or v.shape in shapes]
        return fitting[int(rng.integers(len(fitting)))]

    for _ in range(int(rng.integers(3, 14))):
        kind = rng.integers(9)
        x = some((n, 4), (4, 4))
        if kind <= 1:
            made = apply(UNARY[int(rng.integers(len(UNARY)))](), apply(ew.Tanh(), some()))
        elif kind <= 3:
            made = apply(BINARY[int(rng.integers(len(BINARY)))](), x, some(x.shape, (4,)))
        elif kind == 4:
            made = apply(contract.MatMul(), x, some((4, 4)))
        elif kind == 5:
            made = apply(ew.Sub(), x, apply(reduction.ReduceMean((1,)), x))
        elif kind == 6:
            wide = apply(layout.Transpose((2, 0, 1)), apply(layout.Reshape((x.shape[0], 2, 2)), x))
            made = apply(layout.Reshape(x.shape), wide)
        elif kind == 7:
            made = apply(layout.Concat(1), *apply(layout.Split(1, (1, 3)), x)[::-1])
        else:
            made = apply(layout.Slice((0, 0), x.shape, (1, 1)), apply(layout.Pad((0, 1, 0, -1)), x))
        values.append(made)
    for number in sorted({*rng.integers(4, len(values), 2).tolist(), len(values) - 1}):
        g.output(values[number], f"o{number}")
    check(g, target, {"x": array(3, 4, seed=1), "y": array(3, 4, seed=2)})


class Dear(Loops):
    """Stores whatever has several readers."""

    fusing = Fusing(again=0)


class Small(Loops):
    """Takes only small expressions."""

    fusing = Fusing(largest=12)


@pytest.mark.parametrize("target, kernels", [(Loops(), 2), (Dear(), 3), (Small(), 2)])
def test_what_is_computed_again_is_for_the_target_to_say(target: Any, kernels: int) -> None:
    """A sum with two readers is computed twice, or stored."""
    g = Graph("g")
    x = g.input("x", (4, 5))
    y = apply(ew.Add(), x, x)
    g.output(apply(ew.Neg(), y), "a")
    g.output(apply(ew.Abs(), y), "b")
    check(g, target, {"x": array(4, 5)}, kernels=kernels)


@pytest.mark.parametrize("target, kernels", [(Loops(), 1), (Dear(), 1), (Small(), 3)])
def test_how_large_an_expression_may_be_is_for_the_target_to_say(target: Any, kernels: int) -> None:
    g = Graph("g")
    x = y = g.input("x", (4, 5))
    for _ in range(12):
        y = apply(ew.Add(), y, x)
    g.output(y, "y")
    check(g, target, {"x": array(4, 5)}, kernels=kernels)
