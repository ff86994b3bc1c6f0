"""The same gradient graphs on every device, and the same bits for every number of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends import backend_named
from rlx.ir.graph import Graph

RNG = np.random.default_rng(8)
Arrays = dict[str, np.ndarray[Any, Any]]


def total(x: Any) -> Any:
    return rlx.reduce_sum(x, keepdims=False)


def network(x: Any, w: Any, v: Any) -> Any:
    """Images [n, 3, 9, 9]: a convolution, pooling, a norm and a product."""
    y = rlx.max_pool(rlx.relu(rlx.conv(x, w, pads=(1, 1, 1, 1))), kernel=(3, 3), strides=(2, 2))
    y = rlx.layer_norm(y.reshape((-1, 8 * 16)), v[0])
    return total(rlx.log_softmax(y @ v.T)[:, 0])


def heads(x: Any, w: Any, v: Any) -> Any:
    """Attention over [1, 2, 17, 8], with a gather of rows."""
    q, k = x @ w, rlx.gather(x, np.array([3, 3, 0, 16, 5]), axis=2)
    return total(rlx.attention(q, k, k * v, causal=False) ** 2)


def loop(x: Any, w: Any, v: Any) -> Any:
    """A scan with a branch in it, over [19, 6]."""

    def step(c: Any, r: Any) -> Any:
        c = rlx.cond(c[0] > 0, lambda: np.tanh(c @ w) * r, lambda: np.sin(c) + v)
        return c, c * r

    return total(rlx.scan(step, v, x)[1])


def f32(*shape: int) -> np.ndarray[Any, Any]:
    return (RNG.standard_normal(shape) * 0.5).astype(np.float32)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "network": (network, (f32(5, 3, 9, 9), f32(8, 3, 3, 3), f32(10, 128))),
    "heads": (heads, (f32(1, 2, 17, 8), f32(8, 8), f32(8))),
    "loop": (loop, (f32(19, 6), f32(6, 6), f32(6))),
}


def graph_of(name: str) -> tuple[Graph, Arrays]:
    """The graph of all gradients of a case, and its inputs."""
    f, given = CASES[name]
    graph = rlx.jit(rlx.grad(f, (0, 1, 2))).lower(*given)
    return graph, {v.name: a for v, a in zip(graph.inputs, given, strict=True)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ["cpu", "interp", "xla", "mlx"])
def test_devices_agree(device: str, name: str) -> None:
    """Each device gives what the reference gives."""
    found = backend_named(device).available()
    if not found.present:
        pytest.skip(f"{found.reason}: {found.remedy}")
    graph, given = graph_of(name)
    wanted = rlx.compile(graph, device="reference").run(given)
    for a, b in zip(rlx.compile(graph, device=device).run(given), wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_threads(name: str) -> None:
    """One, two, three and eight threads."""
    graph, given = graph_of(name)
    found = []
    for threads in (1, 2, 3, 8):
        with rlx.compile(graph, device="cpu", threads=threads) as model:
            found.append([np.asarray(v).tobytes() for v in model.run(given)])
    assert all(other == found[0] for other in found[1:])


@pytest.mark.parametrize("encoding", ["q8_0", "q4_k"])
def test_gradients_through_encoded_weights(encoding: str) -> None:
    """By the activations of a product with a weight in blocks they are those of the decoded weight."""
    from rlx.ir.encoding import encoding_named

    made = encoding_named(encoding)
    stored = made.encode(f32(256, 256))
    x = f32(3, 256)

    def gradient(**weight: Any) -> Any:
        g = Graph("encoded")
        w = g.param("w", (256, 256), **weight)
        y = rlx.tanh(rlx.matmul(g.input("x", (rlx.Dim("n", 1, 8), 256)), rlx.transpose(w)) * 0.1)
        g.output(total(y), "y")
        return rlx.compile(rlx.grad(g, wrt="x"), device="cpu").run({"x": x})[0]

    plain = gradient(data=made.decode(stored, (256, 256)))
    np.testing.assert_allclose(gradient(data=stored, encoding=encoding), plain, rtol=1e-4, atol=1e-4)
