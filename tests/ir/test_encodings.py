"""Block formats: what the `gguf` package decodes and encodes, errors of the encoders, importance, limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.encoding import encoding_named
from rlx.ir.encodings import ENCODINGS

STORED = sorted(name for name, encoding in ENCODINGS.items() if encoding.native)
NOT_IN_GGUF = {"q8_1", "q8_k"}  # formats of activations: never in files
# Root mean square of the error over that of normal numbers, rounded up; the bits of an element decide it.
ERROR = {
    "q8_0": 0.006, "q8_1": 0.006, "q8_k": 0.008, "q6_k": 0.018, "q5_k": 0.04, "q5_0": 0.045, "q5_1": 0.042,
    "q4_k": 0.077, "iq4_xs": 0.08, "iq4_nl": 0.078, "q4_0": 0.092, "q4_1": 0.082, "mxfp4": 0.125, "nvfp4": 0.11,
    "q3_k": 0.15, "q2_k": 0.28, "tq1_0": 0.82, "tq2_0": 0.82,
}  # fmt: skip


def normals(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", sorted(set(ENCODINGS) - NOT_IN_GGUF))
def test_any_bytes_decode_as_the_gguf_package_decodes_them(name: str) -> None:
    """To the bit, scales of inf and NaN included."""
    gguf = pytest.importorskip("gguf")
    encoding = encoding_named(name)
    data = np.frombuffer(np.random.default_rng(0).bytes(200 * encoding.block_bytes), np.uint8).reshape(200, -1)
    want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name.upper()]).astype(np.float32)
    found = encoding.decode(data, (200, encoding.block))
    assert ((found.view(np.uint32) == want.view(np.uint32)) | (np.isnan(found) & np.isnan(want))).all()


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4", "tq1_0", "tq2_0"])
def test_encoders_that_are_fixed_give_the_bytes_of_the_gguf_package(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    values = normals(300, ENCODINGS[name].block) * np.exp(3 * normals(300, 1, seed=1))
    values[0], values[1], values[2] = 0, 1, np.round(values[2])
    want = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(ENCODINGS[name].encode(values), want.reshape(-1))


@given(st.sampled_from(STORED), st.integers(0, 2**32 - 1), st.floats(0.01, 100))
def test_errors_of_encoders_are_what_their_bits_allow(name: str, seed: int, scale: float) -> None:
    """Of normal numbers; zeros stay zeros, and what was decoded encodes to the same values or nearly so."""
    encoding = encoding_named(name)
    values = np.float32(scale) * normals(16, 4 * encoding.block, seed=seed)
    values[0] = 0
    stored = encoding.encode(values)
    assert stored.dtype == np.uint8
    assert stored.nbytes == encoding.nbytes(values.shape)
    decoded = encoding.decode(stored, values.shape)
    assert not decoded[0].any()
    assert np.square(decoded - values).sum() <= np.square(1.15 * ERROR[name] * values).sum()


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"])
def test_importance_lowers_the_error_that_it_weighs(name: str) -> None:
    encoding = encoding_named(name)
    columns = 2 * encoding.block
    values, importance = normals(64, columns), np.exp(2 * normals(columns, seed=1))

    def weighed(stored: np.ndarray) -> float:
        return float((importance * np.square(encoding.decode(stored, values.shape) - values)).sum())

    assert weighed(encoding.encode(values, importance)) < 0.97 * weighed(encoding.encode(values))


def test_q8_0_rounds_halves_away_from_zero() -> None:
    """The format's own rounding: with d = 1, 0.5 and -2.5 become 1 and -3."""
    values = np.zeros((1, 32), np.float32)
    values[0, :3] = 127, 0.5, -2.5
    assert encoding_named("q8_0").decode(encoding_named("q8_0").encode(values), (1, 32))[0, :3].tolist() == [127, 1, -3]


def test_what_encoders_refuse() -> None:
    values = normals(2, 256)
    with pytest.raises(ShapeError, match="importance: expected 256 numbers"):
        ENCODINGS["q4_k"].encode(values, np.ones(32))
    with pytest.raises(OptionError, match="not negative"):
        ENCODINGS["q4_k"].encode(values, np.full(256, -1.0))
    with pytest.raises(DTypeError, match="iq2_xs is only read"):
        ENCODINGS["iq2_xs"].encode(values)
