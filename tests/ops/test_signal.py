"""Transforms, windows and filters against the onnx package's reference, ONNX Runtime and NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_reference import onnx_reference
from ops_oracle import check, ort, values

from rlx.errors import OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, TensorType
from rlx.ir.shape import Dim
from rlx.ops.signal import ComplexMul, Dft, Frames, MelWeights, Roots, Stft, Window
from rlx.testing.interpret import check_op


@pytest.mark.parametrize("inverse, onesided, parts", [(0, 0, 1), (0, 0, 2), (0, 1, 1), (1, 0, 1), (1, 0, 2), (1, 1, 2)])
@pytest.mark.parametrize("length", [None, 5, 9])
@pytest.mark.parametrize("axis", [1, 2, -3])
def test_dft(axis: int, length: int | None, inverse: int, onesided: int, parts: int) -> None:
    """Real and complex, cut off and filled up, one half of the spectrum and back, on any axis."""
    x = values((2, 7, 3, parts))
    (y,) = check(Dft(length, axis, bool(inverse), bool(onesided)), x, static=(0,))
    given = (x, None if length is None else np.array(length), np.array(axis))
    expected = onnx_reference("DFT", *given, inverse=inverse, onesided=onesided)[0]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [600, 1000, 1024, 521])
def test_long_transforms(length: int) -> None:
    """In steps where the length has divisors, at once where it is prime; results against NumPy's transform."""
    real, pairs = values((2, length, 1)), values((2, length, 2))
    for op, x in (
        (Dft(), real), (Dft(onesided=True), real), (Dft(length - 100, onesided=True), real), (Dft(inverse=True), pairs),
        (Dft(length + 24), pairs),
    ):  # fmt: skip
        check_op(op, x, rtol=3e-4)
    g = Graph()
    Dft().decompose(g, g.input("x", (2, 1024, 1)))
    assert sum(n.op.op_name == "roots" for n in g.nodes) == 1


def test_symbolic_lengths() -> None:
    """A signal whose length is known at the run only, whole, cut off and from half a spectrum."""
    n = Dim("n")
    check_op(Dft(None, -2, False, True), values((3, 10, 1)), shapes=[(3, n, 1)], extents={"n": 10})
    check_op(Dft(n, -2), values((3, 10, 1)), shapes=[(3, n + 2, 1)], extents={"n": 8})
    check_op(Dft(None, 1, True, True), values((3, 6, 2)), shapes=[(3, n, 2)], extents={"n": 6})
    check_op(Dft(), values((3, 6, 2), np.float16), rtol=1e-2)


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("kind", ["hann", "hamming", "blackman"])
@pytest.mark.parametrize("size", [10, 7, 1])
def test_windows(size: int, kind: str, periodic: bool) -> None:
    """Each kind, even and odd; known at the run only."""
    (y,) = check_op(Window(size, kind, periodic))
    if size > 1 or periodic:
        expected = ort(f"{kind.title()}Window", np.array(size), periodic=int(periodic))[0]
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    check_op(Window(Dim("n"), kind, periodic), extents={"n": size})


@pytest.mark.parametrize("mel", [(8, 16, 8192, 0.0, 4096.0), (20, 512, 16000, 20.0, 7600.0), (3, 4, 100, 0.0, 50.0)])
def test_mel_weights(mel: tuple[int, int, int, float, float]) -> None:
    """Filters wider and narrower than a bin."""
    given = [np.array(v, np.int64 if isinstance(v, int) else np.float32) for v in mel]
    np.testing.assert_allclose(check_op(MelWeights(*mel))[0], ort("MelWeightMatrix", *given)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mel", [(4, 79, 8000, 100.0, 4000.0), (4, 159, 16000, 100.0, 8000.0)])
def test_the_first_mel_filter_starts_at_its_bin(mel: tuple[int, int, int, float, float]) -> None:
    """`low` is the frequency of a bin exactly, which 10 ** log10 is not."""
    _, length, rate, low, _ = mel
    (filters,) = check_op(MelWeights(*mel))
    first = int((length + 1) * low) // rate
    assert np.flatnonzero(filters[:, 0])[0] == first + 1


@pytest.mark.parametrize("onesided", [False, True])
def test_stft(onesided: bool) -> None:
    """With and without a window; frames that overlap, and samples left over."""
    x, window = values((2, 50, 1)), np.abs(values((16,)))
    for given, operands in (((x, window), (window,)), ((x,), (None,))):
        (y,) = check(Stft(7, 16, onesided), *given, static=(0, 1))
        expected = ort("STFT", x, np.array(7), *operands, np.array(16), onesided=int(onesided))[0]
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_small_parts() -> None:
    """Products of complex numbers, factors, frames."""
    check(ComplexMul(), values((3, 1, 2)), values((4, 2), seed=1), static=(0, 1))
    check_op(Roots(4, 3, 12, True))
    check(Frames(3, 2), values((2, 8, 1)), static=(0,))


def test_errors() -> None:
    """Transforms and filters that are not defined."""
    x = TensorType((2, 8, 2), DTYPES["f32"])
    with pytest.raises(ShapeError, match="onesided"):
        Dft(onesided=True).infer(x)
    with pytest.raises(ShapeError, match="real and imaginary"):
        Dft(axis=2).infer(x)
    with pytest.raises(ShapeError, match="parts"):
        Dft().infer(TensorType((2, 8, 3), DTYPES["f32"]))
    with pytest.raises(OptionError, match="half the sample rate"):
        MelWeights(4, 16, 1000, 0.0, 600.0).infer()
    with pytest.raises(OptionError, match="kind"):
        Window(8, "kaiser").infer()
    with pytest.raises(ShapeError, match="longer"):
        Stft(2, 9).infer(TensorType((2, 8, 1), DTYPES["f32"]))
