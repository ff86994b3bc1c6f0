"""Log-mel spectrograms and Welch peaks: the decomposition against NumPy, and what they find in known signals."""

from __future__ import annotations

import numpy as np
import pytest
from ops_oracle import values

from rlx.errors import OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ir.shape import Dim
from rlx.ops.fourier.spectrum import LogMelSpectrogram, WelchPeaks
from rlx.testing.interpret import check_op


def test_log_mel_spectrogram() -> None:
    """Batches, one signal of a length known at the run only, a window of one's own, f16."""
    op = LogMelSpectrogram(16000, 64, 32, 10)
    (y,) = check_op(op, values((2, 400)), rtol=1e-3)
    assert y.shape == (2, 11, 10)
    check_op(op, values((400,)), shapes=[(Dim("t", 64),)], extents={"t": 400}, rtol=1e-3)
    check_op(op, values((2, 400)), np.abs(values((64,))), rtol=1e-3)
    check_op(op, values((2, 400), np.float16), rtol=1e-2)


def test_a_tone_is_loudest_in_its_filter() -> None:
    """And silence is the logarithm of the floor."""
    op = LogMelSpectrogram(8000, 256, 128, 20)
    t = np.arange(1024) / 8000
    (y,) = check_op(op, np.sin(2 * np.pi * 1000 * t).astype(np.float32), rtol=2e-2)
    weights = op._filters.reference()
    assert set(y.argmax(axis=1)) == {int(weights[32].argmax())}  # bin 32 of 256 is 1000 Hz
    np.testing.assert_allclose(op.reference(np.zeros(256, np.float32)), np.log(1e-10), rtol=1e-6)


def test_welch_peaks() -> None:
    """Two tones are found in order of power, group by group."""
    t, rate = np.arange(64), 6400.0
    weak, strong = np.sin(2 * np.pi * 5 * t / 64), 3 * np.sin(2 * np.pi * 12 * t / 64)
    rows = np.stack([weak + strong] * 4 + [3 * weak + strong / 3] * 4).astype(np.float32)
    rows += 0.01 * values(rows.shape)
    (y,) = check_op(WelchPeaks(2, 4, rate), rows, rtol=1e-3)
    assert y.shape == (2, 2, 2)
    np.testing.assert_allclose(y[..., 0], [[1200, 500], [500, 1200]])
    np.testing.assert_allclose(y[0, :, 1], [(3 * 32) ** 2 / 64, 32**2 / 64], rtol=0.05)
    n = Dim("n")
    check_op(WelchPeaks(2, 2, rate), rows, np.abs(values((64,))), rtol=1e-3)
    check_op(WelchPeaks(2, 2), rows, shapes=[(8, n)], extents={"n": 64}, rtol=1e-3)


def test_errors() -> None:
    """More peaks than frequencies, rows that do not make groups, windows of another length."""
    x = TensorType((6, 8), DTYPES["f32"])
    with pytest.raises(ShapeError, match="exceeds"):
        WelchPeaks(6, 2).infer(x)
    with pytest.raises(ShapeError, match="multiple"):
        WelchPeaks(2, 4).infer(x)
    with pytest.raises(ShapeError, match="window"):
        WelchPeaks(2, 2).infer(x, TensorType((7,), DTYPES["f32"]))
    with pytest.raises(OptionError, match="floor"):
        LogMelSpectrogram(8000, 4, 2, 2, floor=0.0).infer(x)
