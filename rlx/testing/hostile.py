"""Elements that no model should be fed with, and that a device must still agree on with the reference.

That is: NaN, infinities, negative and huge numbers of floats, and integers of the whole range, in every operand. Where
an integer is an index or a length that is outside, both must refuse the run.
"""

from __future__ import annotations

import numpy as np

from rlx.ir.dtype import DTYPES, dtype_of
from rlx.ir.graph import Array
from rlx.records import replace
from rlx.testing.oracle import FACTOR, Fill, Operand, Tolerance, compare_arrays, values

__all__ = ["FLAVOURS", "SPREADS", "compare_hostile", "hostile"]

FLOATS = {
    "special": (np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40, -1e-40),
    "nan": (np.nan,),
    "infinite": (np.inf, -np.inf),
    "negative": (-1.0, -2.5, -7.0, -0.0),
    "huge": (2.0**31, -(2.0**31), 2.0**63, -(2.0**63), 2.0**64, 3e38, -3e38, 1e10, -1e10),
}
FLAVOURS = (*FLOATS, "one")

# Fast algorithms, or another order of products, take an element that isn't finite to further results too.
SPREADS = frozenset((
    "conv", "conv_transpose", "cum_prod", "det", "dft", "log_mel_spectrogram", "prefix", "reduce_prod", "stft",
    "welch_peaks",
))  # fmt: skip
# A factor of 0 is left out: of a complex result only one part may be NaN, of a real one fewer than the reference's.
TRANSFORMS = frozenset(("dft", "stft"))
CANCELS = frozenset(("affine_grid", "deform_sample", "grid_sample", "whole_conv"))
PLACES = frozenset(("interpolate_axis", "max_roi_pool", "resize_nearest", "roi_align", "roi_align_adaptive"))


def hostile(flavour: str, op: str) -> Fill:
    """Elements of which some are of a flavour: of floats one of `FLOATS`, of integers any number.

    "one": a single element of each operand is special. Huge numbers are left out where a sum of them depends on the
    order of its terms.
    """
    sums = (op in FACTOR or op in CANCELS) and op not in PLACES

    def fill(rng: np.random.Generator, shape: tuple[int, ...], operand: Operand, limit: int) -> Array:
        dtype = DTYPES[operand.dtype]
        if dtype.kind == "c":  # each part by itself
            part = replace(operand, dtype="f32" if dtype.bits == 64 else "f64")
            return fill(rng, (*shape, 2), part, limit).view(dtype.numpy)[..., 0]
        made = np.array(values(rng, shape, operand, limit))
        if dtype.kind == "b" or not made.size or (flavour == "huge" and dtype.is_float and sums):
            return made
        if dtype.is_float:
            picked = rng.choice(np.array(FLOATS["special" if flavour == "one" else flavour]), shape)
        else:
            picked = _integers(rng, shape, dtype.numpy, flavour)
        some = rng.random(shape) < rng.choice([0.05, 0.3, 1.0])
        if flavour == "one":
            some = np.arange(made.size).reshape(shape) == rng.integers(made.size)
        with np.errstate(all="ignore"):
            return np.where(some, picked.astype(dtype.numpy), made)

    return fill


def _integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, flavour: str) -> Array:
    info = np.iinfo(dtype)
    if flavour == "negative":
        return np.asarray(-rng.integers(0, 40, shape))
    edges = np.array([info.min, info.max, info.max // 2 + 1, 0, 1, 2], dtype)
    return np.asarray(rng.choice(edges, shape))


def compare_hostile(op: str, what: str, got: Array, expected: Array, allowed: Tolerance) -> None:
    """As `compare_arrays`; of `SPREADS` more elements may be NaN or infinite, and which of these they are is free.

    Sums of larger terms than the tolerance is made for may cancel.
    """
    if op in FACTOR:
        allowed = Tolerance(allowed.relative, allowed.absolute * 1000)
    if op in SPREADS and dtype_of(got.dtype).is_float and got.shape == expected.shape:
        wide = expected.astype(np.float64)
        spread = ~np.isfinite(got.astype(np.float64))
        lost = ~np.isfinite(wide)
        if op in TRANSFORMS:
            apart = lost.any(-1) & ~spread.any(-1)
            assert 2 * apart.sum() <= lost.any(-1).sum(), f"{what}: most are finite where the reference's are not"
            spread |= lost
        assert spread[lost].all(), f"{what}: a result is finite where the reference's is not"
        got, expected = np.where(spread, 0, got), np.where(spread, 0, expected)
    compare_arrays(what, got, expected, allowed)
