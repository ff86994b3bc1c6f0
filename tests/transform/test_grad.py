"""Gradients of functions and graphs: trees, nesting, sizes, control flow, rules of one's own, and what is refused."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import pickle
import runpy
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradient_table
import numpy as np
import pytest

import rlx
from rlx.errors import DTypeError, NameNotFound, OptionError, ShapeError, UnsupportedOp
from rlx.ops.base import apply
from rlx.passes.cse import cse
from rlx.passes.dce import dce
from rlx.testing.derivatives import differences

RNG = np.random.default_rng(7)
X, W = RNG.standard_normal((3, 4)), RNG.standard_normal((4, 5))


def total(x: Any) -> Any:
    return rlx.reduce_sum(x, keepdims=False)


@rlx.register
class Ruleless(rlx.Op):
    """Twice x, by an op that nothing is known about."""

    def infer(self, x: Any) -> Any:
        return x

    def reference(self, x: Any) -> Any:
        return 2 * x


def ruleless(x: Any) -> Any:
    return apply(Ruleless(), x)


def test_trees_and_positions() -> None:
    """Gradients are trees like the arguments; several positions give a tuple; aux comes back as it is."""

    def loss(params: dict[str, Any], x: Any, scale: Any) -> Any:
        y = np.tanh(x @ params["w"] + params["b"][0]) * scale
        return total(y), {"y": y}

    params = {"w": W, "b": [RNG.standard_normal(5)], "none": None}
    by_params, by_scale = rlx.jit(rlx.grad(loss, (0, -1), has_aux=True))(params, X, 2.0)[0]
    assert set(by_params) == {"w", "b", "none"}
    assert by_params["none"] is None
    y = np.tanh(X @ W + params["b"][0])
    assert np.allclose(by_params["w"], X.T @ (2 * (1 - y * y)))
    assert np.allclose(by_params["b"][0], (2 * (1 - y * y)).sum(0))
    assert np.allclose(by_scale, y.sum())
    (value, aux), gradient = rlx.value_and_grad(loss, has_aux=True)(params, X, 2.0)
    assert np.allclose(aux["y"], 2 * y)
    assert np.allclose(value, 2 * y.sum())
    assert np.allclose(gradient["w"], by_params["w"])


def test_an_argument_that_is_also_read_from_outside_counts_once() -> None:
    """What is differentiated is told from an equal value that the function closes over."""

    @rlx.jit
    def f(x: Any) -> Any:
        return rlx.grad(lambda y: total(y * x))(x)

    assert np.array_equal(f(X), X)


def test_unused_arguments_and_stopped_ones_have_zeros() -> None:
    """A zero gradient is zeros of the shape."""
    by_x, by_w = rlx.grad(lambda x, w: total(x * rlx.stop_gradient(x)), (0, 1))(X, W)
    assert np.array_equal(by_x, X)
    assert np.array_equal(by_w, np.zeros_like(W))


def test_one_trace_serves_all_sizes() -> None:
    """With open sizes the gradient graph is made once, and is right at each."""
    f = rlx.jit(rlx.grad(lambda x, w: np.mean(np.tanh(x @ w) ** 2)), dims={"x": ("n", None)})
    for n in (1, 3, 8):
        x = RNG.standard_normal((n, 4))
        y = np.tanh(x @ W)
        assert np.allclose(f(x, W), (2 * y * (1 - y * y) / y.size) @ W.T)
    assert len(f.traces) == 1


def test_nested_derivatives() -> None:
    """Second derivatives agree in every order of modes, and hvp with the Hessian."""

    def f(x: Any) -> Any:
        return total(np.sin(x) * x[::-1] * x) + np.prod(x)

    x = X[0]
    forward_over_reverse, reverse_over_reverse = rlx.hessian(f)(x), rlx.jacrev(rlx.grad(f))(x)
    reverse_over_forward = rlx.jacrev(rlx.jacfwd(f))(x)
    assert np.allclose(forward_over_reverse, reverse_over_reverse)
    assert np.allclose(forward_over_reverse, reverse_over_forward)
    assert np.allclose(rlx.hvp(f, (x,), (X[1],)), forward_over_reverse @ X[1])
    third = rlx.jacfwd(rlx.hessian(f))(x)
    assert np.allclose(third, third.transpose(2, 0, 1))


@pytest.mark.parametrize(
    "f, at, gradient, hessian",
    [
        (np.logaddexp, (0.0, 0.0), (0.5, 0.5), ((0.25, -0.25), (-0.25, 0.25))),
        (np.logaddexp, (3.0, 3.0), (0.5, 0.5), ((0.25, -0.25), (-0.25, 0.25))),
        (np.hypot, (3.0, 3.0), (0.5**0.5, 0.5**0.5), np.array(((1, -1), (-1, 1))) / (6 * 2**0.5)),
        (np.hypot, (3.0, -3.0), (0.5**0.5, -(0.5**0.5)), np.array(((1, 1), (1, 1))) / (6 * 2**0.5)),
        (np.hypot, (0.0, 2.0), (0, 1), ((0.5, 0), (0, 0))),
        (np.hypot, (-4.0, 0.0), (-1, 0), ((0, 0), (0, 0.25))),
        (np.arctan2, (0.0, 2.0), (0.5, 0), ((0, -0.25), (-0.25, 0))),
        (np.arctan2, (-0.0, -2.0), (-0.5, 0), ((0, -0.25), (-0.25, 0))),
        (np.arctan2, (2.0, 0.0), (0, -0.5), ((0, 0.25), (0.25, 0))),
        (np.arctan2, (1.0, 1.0), (0.5, -0.5), ((-0.5, 0), (0, 0.5))),
    ],
)
def test_functions_in_cases_are_smooth_where_cases_meet(
    f: Any, at: tuple[float, float], gradient: Any, hessian: Any
) -> None:
    """A smooth function that is computed in cases has its first and second derivatives where they meet."""

    def of_both(v: Any) -> Any:
        return f(v[0], v[1])

    x = np.array(at)
    assert np.allclose(rlx.grad(of_both)(x), gradient)
    assert np.allclose(rlx.hessian(of_both)(x), hessian)


def test_jacobians_of_trees() -> None:
    """A tree of results, each a tree of arguments, of blocks."""

    def f(a: dict[str, Any], b: Any) -> Any:
        return {"u": a["p"] @ b, "v": total(b * b)}

    a, b = {"p": X}, W[:, 0].copy()
    for jacobian in (rlx.jacrev(f, (0, 1)), rlx.jacfwd(f, (0, 1))):
        made = jacobian(a, b)
        assert made["u"][0]["p"].shape == (3, 3, 4)
        assert np.allclose(made["u"][1], X)
        assert np.allclose(made["v"][1], 2 * b)
        assert not made["v"][0]["p"].any()


def loop(x: Any) -> Any:
    carry, rows = rlx.scan(lambda c, r: (np.sin(c) * r, c * c), x[0], x, reverse=True)
    return total(carry) + total(rows)


def branch(x: Any) -> Any:
    return rlx.cond(x[0, 0] > 0, lambda: total(x * x), lambda: total(np.exp(x)) + x[1, 1])


def counted(x: Any) -> Any:
    return total(rlx.fori_loop(0, 5, lambda i, c: np.tanh(c @ x.T @ x) + i, x))


def nested(x: Any) -> Any:
    return total(rlx.scan(lambda c, r: (rlx.cond(r[0] > 0, lambda: c * r, lambda: c - r), None), x[0] + 1.0, x)[0])


@pytest.mark.parametrize("f", [loop, branch, counted, nested])
def test_control_flow(f: Callable[..., Any]) -> None:
    """Gradients through branches and loops, their own gradients too, forwards and backwards."""
    for x in (X * 0.5, -X * 0.5):
        found = rlx.grad(f)(x)
        assert np.allclose(found, differences(f, x), rtol=1e-5, atol=1e-6)
        _, along = rlx.jvp(f, (x,), (X,))
        assert np.allclose(along, np.sum(found * X))
        second = rlx.grad(lambda v, f=f: total(rlx.grad(f)(v) * X))(x)  # type: ignore[misc]
        assert np.allclose(second, rlx.hvp(f, (x,), (X,)))


def test_while_has_forward_derivatives() -> None:
    """A loop that data end: jvp is right, grad says why not."""

    def f(x: Any) -> Any:
        return rlx.while_loop(lambda c: total(c) < 100, lambda c: c * c + x, x)

    x = np.array([1.5, 2.0])
    one = rlx.jvp(f, (x,), (np.array([1.0, 0.0]),))[1]
    run, step = rlx.jit(f), np.array([1e-6, 0.0])
    assert np.allclose(one, (run(x + step) - run(x - step)) / 2e-6, rtol=1e-5)
    with pytest.raises(UnsupportedOp, match=r"how often it runs is not known before; rlx\.scan"):
        rlx.grad(lambda v: total(f(v)))(x)


# ---- rules of one's own


@rlx.custom_vjp
def scaled(x: Any) -> Any:
    return x * 2


scaled.defvjp(lambda x: (x * 2, x), lambda kept, ct: (ct * kept * 100,))


@rlx.custom_jvp
def square(x: Any) -> Any:
    return x * x


square.defjvp(lambda primals, tangents: (primals[0] ** 2, 3 * tangents[0] * primals[0]))


def test_rules_of_ones_own() -> None:
    """They are used by grad, in regions and under vmap, instead of what is in the function."""
    assert np.array_equal(scaled(X), X * 2)
    assert np.allclose(rlx.grad(lambda x: total(scaled(x)))(X), 100 * X)
    assert np.allclose(rlx.grad(lambda x: total(rlx.vmap(scaled)(x)))(X), 100 * X)
    assert np.allclose(rlx.vmap(rlx.grad(lambda r: total(scaled(r))))(X), 100 * X)
    assert np.allclose(rlx.grad(lambda x: total(rlx.scan(lambda c, r: (c, scaled(r)), 0.0, x)[1]))(X), 100 * X)
    assert np.allclose(rlx.grad(lambda x: total(square(x)))(X), 3 * X)
    assert np.allclose(rlx.jvp(square, (X,), (X,))[1], 3 * X * X)
    assert np.allclose(rlx.grad(rlx.checkpoint(lambda x: total(square(scaled(x)))))(X), 3 * 2 * X * 100 * X)
    with pytest.raises(UnsupportedOp, match="a rule for reverse mode only"):
        rlx.jvp(scaled, (X,), (X,))


def test_checkpoint_computes_again() -> None:
    """The same gradient, by a graph that has the part twice."""

    def f(x: Any) -> Any:
        return total(np.tanh(np.sin(x @ W) @ W.T))

    plain, again = (rlx.jit(rlx.grad(g)) for g in (f, rlx.checkpoint(f)))
    assert np.array_equal(plain(X), again(X))
    counts = [str(dce(cse(g.lower(X)))).count("sin(") for g in (plain, again)]
    assert counts[1] == counts[0]  # the first one's result is not needed, the second's is
    kept, twice = (str(dce(cse(rlx.jit(rlx.value_and_grad(g)).lower(X)))).count("sin(") for g in (f, rlx.checkpoint(f)))
    assert twice == kept + 1
    assert np.allclose(rlx.hessian(rlx.checkpoint(f))(X), rlx.hessian(f)(X))


def test_policies_of_checkpoints() -> None:
    """What is kept is not computed again: products, or the ops that a function names; the gradient is the same."""

    def f(x: Any) -> Any:
        return total(np.tanh(np.exp(np.sin(x @ W) @ W.T) @ W))

    plain = rlx.grad(f)(X)
    counts = {}
    for name, policy in {"nothing": "nothing", "products": "products", "sines": lambda op: op == "sin"}.items():
        again = rlx.checkpoint(f, policy=policy)  # type: ignore[arg-type]
        g = rlx.jit(rlx.value_and_grad(again))
        assert np.array_equal(g(X)[1], plain)
        text = str(dce(cse(g.lower(X))))
        counts[name] = [text.count(f"{op}(") for op in ("matmul", "sin", "exp")]
        assert np.allclose(rlx.hessian(again)(X), rlx.hessian(f)(X))
        assert np.allclose(rlx.vmap(rlx.grad(lambda x, a=again: a(x[None])))(X), plain)
    assert [c[1:] for c in counts.values()] == [[2, 2], [1, 2], [1, 2]]
    assert counts["products"][0] < counts["sines"][0] == counts["nothing"][0]
    everything = rlx.checkpoint(lambda x: total(np.sin(x) @ W) ** 2, policy=lambda op: True)
    assert np.allclose(rlx.grad(everything)(X), rlx.grad(lambda x: total(np.sin(x) @ W) ** 2)(X))
    with pytest.raises(OptionError, match="policy='dots': expected 'nothing', 'products', or a function"):
        rlx.checkpoint(f, policy="dots")


@pytest.mark.parametrize("policy", ["nothing", "products", lambda op: True, lambda op: op in ("sin", "identity")])
def test_checkpoints_within_other_transformations(policy: Any) -> None:
    """A policy that keeps all ops counts each once, and tangents go through the rows of a vmap."""

    def plain(x: Any) -> Any:
        inner = np.sin(x @ W)
        return total(inner * (inner @ W.T @ W)), inner

    def check(f: Any, g: Any) -> None:
        assert np.allclose(rlx.grad(g)(X), rlx.grad(f)(X))
        assert np.allclose(rlx.jvp(g, (X,), (X,))[1], rlx.jvp(f, (X,), (X,))[1])
        rows, mapped = rlx.vmap(f), rlx.vmap(g)
        assert np.allclose(rlx.jvp(mapped, (X,), (X,))[1], rlx.jvp(rows, (X,), (X,))[1])
        assert np.allclose(rlx.hessian(lambda x: total(mapped(x)))(X), rlx.hessian(lambda x: total(rows(x)))(X))

    again = rlx.checkpoint(plain, policy=policy)
    check(lambda x: plain(x)[0], lambda x: again(x)[0])
    check(lambda x: total(plain(x)[1]), lambda x: total(again(x)[1]))


# ---- graphs


def with_integers() -> rlx.Graph:
    g = rlx.Graph("whole")
    g.output(total(g.input("x", (3,)) * rlx.cast(g.input("i", (3,), "i64"), to="f32")), name="y")
    return g


def test_gradients_of_a_graph() -> None:
    """Inputs and params by name; the graph that it is made of stays as it is."""
    g = rlx.Graph("net")
    x = g.input("x", (rlx.Dim("n", 1, 64), 4), "f64")
    w = g.param("w", data=W)
    g.output(total(rlx.tanh(rlx.matmul(x, w))), name="loss")
    before = str(g)
    model = rlx.compile(rlx.value_and_grad(g, wrt=["x", "w"]))
    y = np.tanh(X @ W)
    found = model({"x": X})
    assert str(g) == before
    assert list(found) == ["loss", "grad_x", "grad_w"]
    assert np.allclose(found["grad_w"], X.T @ (1 - y * y))
    assert np.allclose(found["grad_x"], (1 - y * y) @ W.T)
    assert [o.name for o in rlx.grad(g).outputs] == ["grad_w"]  # params, where nothing is named
    with pytest.raises(NameNotFound, match="no output 'other'; it has loss"):
        rlx.grad(g, of="other")
    with pytest.raises(NameNotFound):
        rlx.grad(g, wrt="v")
    refused: dict[str, dict[str, Any]] = {
        "wrt=5: expected a name": {"wrt": 5},
        "has a name twice": {"wrt": ("x", "x")},
        "argnums=1 is for functions": {"argnums": 1},
        "has_aux=True is for functions": {"has_aux": True},
        "unknown keyword 'output'": {"output": "loss"},
    }
    for message, keywords in refused.items():
        with pytest.raises(OptionError, match=message):
            rlx.grad(g, **keywords)
    g.output(rlx.cast(x, to="i64"), name="whole")
    with pytest.raises(DTypeError, match=r"the output 'whole' is i64\[n, 4\], and only floats have derivatives"):
        rlx.grad(g, of="whole")
    with pytest.raises(DTypeError, match="only plain floats have a gradient; cast or decode"):
        rlx.grad(with_integers(), wrt="i")


def test_gradient_of_an_imported_graph() -> None:
    """An ONNX model with a convolution, by its weights."""
    helper = pytest.importorskip("onnx.helper")
    from onnx import TensorProto, numpy_helper

    weight = RNG.standard_normal((4, 2, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Tanh", ["c"], ["r"]),
        helper.make_node("AveragePool", ["r"], ["p"], kernel_shape=[2, 2]),
        helper.make_node("ReduceSum", ["p"], ["y"], keepdims=0),
    ]
    made = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])], [numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    from rlx.importers.onnx import load

    g = load(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    x = RNG.standard_normal((2, 2, 8, 8)).astype(np.float32)
    name = g.params[0].name
    slope = rlx.compile(rlx.grad(g, wrt=name))({"x": x})[f"grad_{name}"]
    run = rlx.compile(g)
    for i in ((0, 0, 0, 0), (3, 1, 2, 1), (2, 0, 1, 1)):
        moved = np.zeros_like(weight)
        moved[i] = 1e-2
        ends = []
        for sign in (1, -1):
            run.set_params({name: weight + sign * moved})
            ends.append(float(run({"x": x})["y"]))
        assert abs(slope[i] - (ends[0] - ends[1]) / 2e-2) < 2e-2 * max(1, abs(slope[i]))


# ---- what is refused


def test_errors_say_what_to_do() -> None:
    """Integers, results that are no scalar, positions that are not there, nodes without a rule: all of them."""
    with pytest.raises(DTypeError, match=r"argument 0 is i64\[3\], and only floats have derivatives: cast it"):
        rlx.grad(total)(np.arange(3))
    with pytest.raises(
        ShapeError, match=r"the function returns f64\[3, 4\]: a gradient is that of one float \[\]; sum"
    ):
        rlx.grad(lambda x: x * 2)(X)
    with pytest.raises(
        DTypeError, match=r"the function returns i64\[\], and only floats have derivatives: return a float"
    ):
        rlx.grad(lambda x: total(x).astype(np.int64))(X)
    with pytest.raises(OptionError, match="argnums 2: the call has 1 arguments"):
        rlx.grad(total, 2)(X)
    with pytest.raises(OptionError, match=r"argnums \(0, -1\) names an argument twice: name each once"):
        rlx.grad(total, (0, -1))(X)
    for argnums in (None, 1.0, True, "x"):
        with pytest.raises(OptionError, match=f"argnums {argnums!r}: the call has 2 arguments"):
            rlx.grad(lambda x, y: total(x * y), argnums)(X, X)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="grad: wrt='x' is for graphs: of a function choose by argnums="):
        rlx.grad(total, wrt="x")
    with pytest.raises(OptionError, match="grad takes a function, got int"):
        rlx.grad(3)
    with pytest.raises(UnsupportedOp, match="2 nodes have no gradient") as caught:
        rlx.grad(lambda x: total(ruleless(x)) + total(ruleless(x * 2)))(np.eye(3))
    assert [n.op for n in caught.value.nodes] == ["ruleless", "ruleless"]
    with pytest.raises(ShapeError, match=r"tangents\.0 is f64\[3\], expected f64\[3, 4\]"):
        rlx.jvp(total, (X,), (X[:, 0],))
    with pytest.raises(OptionError, match="has no rule yet: call defvjp"):
        rlx.custom_vjp(lambda x: x)(X)


def test_calling_it_anew_each_time_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """As with jit itself: of a function that reads a list from outside nothing is kept."""
    scales = [1.0]

    def f(x: Any) -> Any:
        return total(x) * scales[0]

    with caplog.at_level(logging.WARNING, "rlx"):
        for _ in range(8):
            rlx.grad(f)(X)
    assert "called 8 times on f" in caplog.text


def test_the_table_is_current() -> None:
    """Run `python tools/gradient_table.py` after a change of rules."""
    assert gradient_table.PAGE.read_text() == gradient_table.page()


def test_a_network_fitted_by_hand(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's loss falls to a fraction."""
    example = Path(__file__).parents[2] / "examples" / "fit_by_hand.py"
    monkeypatch.setattr(sys, "argv", [str(example), "600"])
    runpy.run_path(str(example), run_name="__main__")
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < 0.01 < losses[0]


def test_checkpoint_takes_less_memory() -> None:
    """The planned arena of a deep network's gradient is smaller where its blocks are computed again."""

    def block(h: Any, w: Any) -> Any:
        return np.tanh(np.sin(np.tanh(h @ w) * 1.5) @ w)

    def arena(f: Any) -> int:
        def loss(ws: Any, h: Any) -> Any:
            for w in ws:
                h = f(h, w)
            return np.mean(h * h)

        ws = [np.eye(64, dtype=np.float32)] * 8
        model = rlx.jit(rlx.grad(loss), device="cpu").compile(ws, np.ones((256, 64), np.float32))
        assert model.plan is not None
        return model.plan.arena

    kept, again = arena(block), arena(rlx.checkpoint(block))
    assert again < 0.9 * kept


def compiled_by(caplog: pytest.LogCaptureFixture, call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a call, and how many functions it traced."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "rlx"):
        result = call()
    return result, caplog.text.count("jit: tracing")


def cubes(x: Any) -> Any:
    return total(x**3 * FACTORS)


FACTORS = np.array([1.0, 2.0])


@pytest.mark.parametrize(
    "call",
    [
        lambda x: rlx.jvp(cubes, (x,), (x,))[1],
        lambda x: rlx.hvp(cubes, (x,), (x,)),
        lambda x: rlx.grad(cubes, 0)(x),  # noqa: PLW0108  # made anew in each call
        lambda x: rlx.value_and_grad(cubes)(x)[1],
    ],
    ids=["jvp", "hvp", "grad", "value_and_grad"],
)
def test_a_function_is_compiled_once_for_its_shapes(
    call: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the transformation is made anew in each call; what changed outside of the function counts."""
    cubes.__dict__.clear()
    x = np.array([3.0, 5.0])
    first, count = compiled_by(caplog, lambda: call(x))
    assert count == 1
    again, count = compiled_by(caplog, lambda: call(x))
    assert count == 0
    np.testing.assert_array_equal(again, first)
    assert compiled_by(caplog, lambda: call(np.ones(2, np.float32)))[1] == 1  # another type
    monkeypatch.setattr(sys.modules[__name__], "FACTORS", np.array([10.0, 20.0]))
    np.testing.assert_allclose(call(x), 10 * first)
    FACTORS[:] = [1.0, 2.0]  # in place
    np.testing.assert_allclose(call(x), first)


def test_what_a_function_reads_from_outside_is_compared_by_value(caplog: pytest.LogCaptureFixture) -> None:
    """Closed-over numbers and helpers; where an object is read, whose parts may change, nothing is kept."""
    factor, box = 2.0, [2.0]

    def helper(x: Any) -> Any:
        return x * factor

    def plain(x: Any) -> Any:
        return total(helper(np.sin(x)))

    def boxed(x: Any) -> Any:
        return total(np.sin(x) * box[0])

    x = np.array([0.5, 1.5])
    for f, traced in ((plain, 0), (boxed, 1)):
        rlx.jvp(f, (x,), (x,))
        made, count = compiled_by(caplog, lambda f=f: rlx.jvp(f, (x,), (x,))[1])
        assert count == traced
        np.testing.assert_allclose(made, np.sum(np.cos(x) * x) * 2)
    factor, box[0] = 3.0, 3.0
    for f in (plain, boxed):
        np.testing.assert_allclose(rlx.jvp(f, (x,), (x,))[1], np.sum(np.cos(x) * x) * 3)


def drawn(x: Any) -> Any:
    return total(x * np.random.default_rng().random())


def first(x: Any, depth: int = 3) -> Any:
    return total(x * 2) if depth == 0 else second(x, depth - 1)


def second(x: Any, depth: int) -> Any:
    return first(x, depth) * 3


def test_functions_that_call_each_other_and_draws(caplog: pytest.LogCaptureFixture) -> None:
    """Functions in a ring are described once each; what draws numbers is drawn anew in each call."""
    x = np.ones(2)
    rlx.grad(first)(x)
    made, count = compiled_by(caplog, lambda: rlx.grad(first)(x))
    assert (made.tolist(), count) == ([54.0, 54.0], 0)
    slopes = [rlx.grad(drawn)(x)[0] for _ in range(2)]
    assert slopes[0] != slopes[1]


def test_what_is_kept_for_a_function_goes_with_it() -> None:
    """It does not keep the function alive, nor travel in a copy or a pickle of its attributes."""

    def f(x: Any) -> Any:
        return total(x * x)

    rlx.grad(f)(np.ones(2))

    @functools.wraps(f)
    def other(x: Any) -> Any:
        return total(x * x * x)

    np.testing.assert_allclose(rlx.grad(other)(np.ones(2)), [3, 3])
    np.testing.assert_allclose(rlx.grad(f)(np.ones(2)), [2, 2])
    (kept,) = f.__dict__.values()
    assert not copy.deepcopy(kept).found
    assert not pickle.loads(pickle.dumps(kept)).found
    gone = weakref.ref(kept)
    del f, other, kept
    gc.collect()
    assert gone() is None


class Seen:
    """What the functions below read; each in a way that `outside` does not follow."""

    factor = 2.0


def by_import(x: Any) -> Any:
    import read_by_grad  # type: ignore[import-not-found]

    return total(x * read_by_grad.factor)


def by_import_from(x: Any) -> Any:
    from read_by_grad import factor

    return total(x * factor)


def by_attribute(x: Any) -> Any:
    return total(x * by_attribute.factor)  # type: ignore[attr-defined]


def helper_with_attribute(x: Any) -> Any:
    return total(x * by_attribute.factor)  # type: ignore[attr-defined]


def by_globals(x: Any) -> Any:
    return total(x * globals()["Seen"].factor)


def by_eval(x: Any) -> Any:
    return total(x * eval("Seen.factor"))


@functools.wraps(np.sin)
def of_another_module(x: Any, seen: Any = (Seen,)) -> Any:
    return x * seen[0].factor


def by_wrapped(x: Any) -> Any:
    return total(of_another_module(x))


@pytest.mark.parametrize(
    "f", [by_import, by_import_from, by_attribute, helper_with_attribute, by_globals, by_eval, by_wrapped]
)
def test_a_derivative_is_never_that_of_an_older_function(f: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever way a function reads what has changed since."""
    module = types.ModuleType("read_by_grad")
    monkeypatch.setitem(sys.modules, "read_by_grad", module)
    for factor in (2.0, 5.0):
        module.factor = by_attribute.factor = factor  # type: ignore[attr-defined]
        monkeypatch.setattr(Seen, "factor", factor)
        np.testing.assert_array_equal(rlx.grad(f)(np.ones(2)), np.full(2, factor))


def test_draws_of_a_module_under_another_name_are_drawn_anew() -> None:
    import numpy.random as draws
    from numpy.random import default_rng

    def of_module(x: Any) -> Any:
        return total(x * draws.standard_normal())  # noqa: NPY002

    def of_function(x: Any) -> Any:
        return total(x * default_rng().standard_normal())

    for f in (of_module, of_function):
        assert rlx.grad(f)(np.ones(1)) != rlx.grad(f)(np.ones(1))


def test_an_integer_of_many_digits_is_read_from_outside() -> None:
    many = 10**5000
    np.testing.assert_array_equal(rlx.grad(lambda x: total(x * (many > 0)))(np.ones(2)), np.ones(2))


def test_weights_of_a_loop_are_packed_once_and_summed_after_it() -> None:
    """What a loop reads of outside is packed before it, and a weight's gradient is one product over all rounds."""

    rng = np.random.default_rng(3)
    w, rows = (rng.standard_normal(s).astype(np.float32) / 8 for s in ((40, 40), (7, 3, 40)))
    step = rlx.jit(rlx.grad(recurrent), device="cpu")
    program = step.compile(w, rows).compilation.program
    depth, within = 0, []
    for kernel in program.run:
        if kernel.mark is not None:
            depth += {"loop": 1, "end": -1}.get(kernel.mark.part, 0)
        elif depth:
            within.append(kernel)
    assert not [kernel for kernel in within if kernel.packs]
    assert not [kernel for kernel in within if any(b.shape == w.shape for b in kernel.writes())]
    found, along = step(w, rows), rng.standard_normal(w.shape)
    exact = [a.astype(np.float64) for a in (w, rows)]
    slope = rlx.jit(lambda w, r, t: rlx.jvp(lambda w: recurrent(w, r), (w,), (t,))[1], device="cpu")(*exact, along)
    np.testing.assert_allclose(np.sum(found * along), slope, rtol=1e-4)


def recurrent(w: Any, rows: Any) -> Any:
    def step(h: Any, row: Any) -> Any:
        h = np.tanh(h @ w + row)
        return h, h

    return np.sum(rlx.scan(step, np.zeros((3, 40), np.float32) * rows[0, 0, 0], rows)[1] ** 2)


def gated(w: Any, rows: Any) -> Any:
    """A recurrence of two gates, as an LSTM has four."""

    def step(h: Any, row: Any) -> Any:
        made = h @ w + row
        gate, new = sigmoid(made[:, :5]), np.tanh(made[:, 5:])
        h = gate * h + (1 - gate) * new
        return h, h

    return np.sum(rlx.scan(step, np.zeros((3, 5)) * rows[0, 0, 0], rows)[1] ** 2)


def sigmoid(x: Any) -> Any:
    return rlx.ops.sigmoid(x)


def nodes_within(graph: Any) -> list[Any]:
    return [node for one in graph.nodes for node in (one, *(n for r in one.regions for n in nodes_within(r)))]


def test_a_scan_computes_products_and_functions_once() -> None:
    """Forward and backward are two loops; the second one reads what the first one keeps, and joins no zeros."""
    rng = np.random.default_rng(3)
    w, rows = rng.standard_normal((5, 10)) / 2, rng.standard_normal((7, 3, 10))
    step = rlx.jit(rlx.value_and_grad(gated), device="cpu")
    model = step.compile(w, rows)
    names = [node.op.op_name for node in nodes_within(model.compilation.legal)]
    assert names.count("scan") == 2
    assert (names.count("matmul"), names.count("sigmoid"), names.count("tanh")) == (3, 1, 1)  # 3: h w, g w^T, h^T g
    assert "pad" not in names
    value, slope = step(w, rows)
    along = rng.standard_normal(w.shape)
    exact, tangent = rlx.jit(lambda w, r, t: rlx.jvp(lambda w: gated(w, r), (w,), (t,)), device="reference")(
        w, rows, along
    )
    np.testing.assert_allclose(value, exact, rtol=1e-12)
    np.testing.assert_allclose(np.sum(slope * along), tangent, rtol=1e-10)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_cotangents_of_slices_side_by_side_are_joined(order: tuple[int, ...], axis: int) -> None:
    def f(x: Any) -> Any:
        parts = [x[2 * i : 2 * i + 2] if axis == 0 else x[:, 2 * i : 2 * i + 2] for i in order]
        return sum(np.sum(part * (k + 1.0)) for k, part in enumerate(parts))

    x = np.zeros((6, 6))
    wanted = np.zeros((6, 6))
    for k, i in enumerate(order):
        wanted[(slice(2 * i, 2 * i + 2), slice(None))[:: 1 if axis == 0 else -1]] = k + 1
    for device in ("reference", "cpu"):
        assert np.array_equal(rlx.jit(rlx.grad(f), device=device)(x), wanted)
    pads = str(dce(rlx.jit(rlx.grad(f)).lower(x))).count("pad(")
    assert pads == (0 if order != (1, 0, 2) else 3)  # 2 and 0, which come first, are no neighbours


def test_cotangents_of_a_part_are_padded_once() -> None:
    def f(x: Any) -> Any:
        return np.sum(x[1:3] * 2.0) + np.sum(x[3:4] * 3.0)

    assert np.array_equal(rlx.grad(f)(np.zeros(6)), [0, 2, 2, 3, 0, 0])
    assert str(dce(rlx.jit(rlx.grad(f)).lower(np.zeros(6)))).count("pad(") == 1


def test_a_checkpointed_body_keeps_the_carries_only() -> None:
    def total(w: Any, rows: Any, wrap: Any) -> Any:
        step = wrap(lambda h, row: np.tanh(h @ w + row))
        return np.sum(rlx.scan(lambda h, row: (step(h, row), None), np.zeros((3, 5)) * rows[0, 0, 0], rows)[0])

    rng = np.random.default_rng(5)
    w, rows = rng.standard_normal((5, 5)), rng.standard_normal((4, 3, 5))
    found = []
    for wrap, stacked in ((lambda f: f, 2), (rlx.checkpoint, 1)):
        step = rlx.jit(rlx.grad(lambda w, r, wrap=wrap: total(w, r, wrap)), device="cpu")
        scans = [node for node in step.compile(w, rows).compilation.legal.nodes if node.op.op_name == "scan"]
        assert len(scans[0].outputs) - scans[0].op.carries == stacked  # of tanh, too, if it is kept
        found.append(step(w, rows))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)
