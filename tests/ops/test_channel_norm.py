"""Normalisations over groups and windows of channels and by norms, against ONNX Runtime."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from ops_oracle import check, ort, values

import rlx
from rlx.errors import OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType, Value
from rlx.ops.channel_norm import GroupNorm, InstanceNorm, LpNormalization, Lrn, MeanVarianceNormalization

X, SCALE, BIAS = values((2, 6, 5, 3)), values((6,), seed=1), values((6,), seed=2)


def close(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_group_norm(groups: int) -> None:
    """From all channels together to each alone."""
    (y,) = check(GroupNorm(groups, 1e-3), X, SCALE, BIAS, static=(0, 1, 2))
    close(y, ort("GroupNormalization", X, SCALE, BIAS, num_groups=groups, epsilon=1e-3)[0])


def test_instance_norm_and_narrow_floats() -> None:
    """Any number of spatial axes; bf16 goes by f32."""
    close(check(InstanceNorm(1e-4), X, SCALE, BIAS)[0], ort("InstanceNormalization", X, SCALE, BIAS, epsilon=1e-4)[0])
    check(InstanceNorm(), *(a.astype(ml_dtypes.bfloat16) for a in (X, SCALE, BIAS)))
    check(InstanceNorm(), values((2, 6, 7)), SCALE, BIAS)


@pytest.mark.parametrize("beta", [0.5, 0.6, 0.75, 1.0])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_lrn(size: int, beta: float) -> None:
    """Exponents with and without a short form."""
    close(check(Lrn(size, 0.1, beta, 1.5), X)[0], ort("LRN", X, size=size, alpha=0.1, beta=beta, bias=1.5)[0])


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_lrn_of_more_neighbours_than_channels(channels: int) -> None:
    """As many steps as there may be channels on both sides, whatever a file says; of gradients too."""
    size = (1 << 62) + 1
    x = values((2, channels, 3))
    want = x / (1.5 + 0.5 * (x * x).sum(axis=1, keepdims=True)) ** 0.75
    for given in (channels, rlx.Dim("c", 1, 9)):
        g = rlx.Graph("lrn")
        g.output(g.add(Lrn(size, 0.5 * size, 0.75, 1.5), g.input("x", (2, given, 3)))[0], "y")
        for device in ("cpu", "reference"):
            close(rlx.compile(g, device=device).run([x])[0], want)

    def slope(size: int) -> np.ndarray:
        def total(v: Value) -> Value:
            return rlx.ops.lrn(v, size=size, alpha=0.5 * size, beta=0.75, bias=1.5).sum()

        return np.asarray(rlx.jit(rlx.grad(total), device="cpu")(x))

    close(slope(size), slope(2 * channels + 1))


def test_lrn_of_an_even_size() -> None:
    """The window has one more channel after than before: c - (size - 1) // 2 .. c + size // 2."""
    (y,) = check(Lrn(2, 0.4, 1.0, 1.0), X)
    square = np.pad(X * X, [(0, 0), (0, 1), (0, 0), (0, 0)])
    close(y, X / (1 + 0.2 * (square[:, :-1] + square[:, 1:])))


@pytest.mark.parametrize("axes", [(0, 2, 3), (1,), (-1, 0)])
def test_mean_variance_normalization(axes: tuple[int, ...]) -> None:
    """Any set of axes."""
    (y,) = check(MeanVarianceNormalization(axes), X)
    close(y, ort("MeanVarianceNormalization", X, axes=[a % 4 for a in axes])[0])


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [-1, 1])
def test_lp_normalization(axis: int, p: int) -> None:
    """Zeros stay zeros."""
    x = X.copy()
    x[0, :, 0] = 0
    x[1, 2] = 0
    close(check(LpNormalization(axis, p), x)[0], ort("LpNormalization", x, axis=axis, p=p)[0])


def test_errors() -> None:
    """Groups that do not divide the channels, ranks, and norms that are not defined."""
    x, c = TensorType((2, 6, 5), DTYPES["f32"]), TensorType((6,), DTYPES["f32"])
    with pytest.raises(ShapeError, match="4 groups"):
        GroupNorm(4).infer(x, c, c)
    with pytest.raises(ShapeError, match="size of scale"):
        InstanceNorm().infer(x, TensorType((5,), DTYPES["f32"]), c)
    with pytest.raises(OptionError, match="size"):
        Lrn(0).infer(x)
    with pytest.raises(OptionError, match="p must be"):
        LpNormalization(-1, 3).infer(x)
