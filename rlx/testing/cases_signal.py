"""Cases of spectra, random numbers, recurrence, quantised products and regions; see `rlx.testing.cases`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlx.ir.dtype import DTYPES
from rlx.ir.shape import Dim, Size
from rlx.ops.base import OPS
from rlx.testing.oracle import ALL, FLOATS, Cases, Make, Operand, case

__all__ = ["SIGNAL"]


def _op(name: str, *arguments: Any, **attributes: Any) -> Any:
    cls: Any = OPS[name]
    return cls(*arguments, **attributes)


# ---- tables and transforms


def _window(name: str, n: Size, m: Size) -> Cases:
    for kind in ("hann", "hamming", "blackman"):
        for periodic in (False, True):
            yield case(_op(name, n, kind, periodic))
            yield case(_op(name, m + 1, kind, periodic, DTYPES["f64"]))


def _roots(name: str, n: Size, m: Size) -> Cases:
    for inverse in (False, True):
        for dtype in FLOATS:
            yield case(_op(name, n, m, n * m + 1, inverse, DTYPES[dtype]))


def _dft_table(name: str, n: Size, m: Size) -> Cases:
    for inverse in (False, True):
        yield case(_op(name, n, m, m + 1, 2, 2, inverse))
        yield case(_op(name, n, m // 2 + 1, m + 2, 1, 2, inverse, DTYPES["f64"]))
    yield case(_op(name, n // 2 + 1, n + 1, n + 1, 2, 1, True))


def _mel_weights(name: str, n: Size, m: Size) -> Cases:
    if isinstance(n, int) and isinstance(m, int):
        yield case(_op(name, n, 2 * m + 16, 8000, 0.0, 4000.0))
        yield case(_op(name, n, 32, 16000, 300.0, 6000.0, DTYPES["f64"]))
    else:
        yield case(_op(name, 5, 32, 16000, 0.0, 8000.0))


def _complex_mul(name: str, n: Size, m: Size) -> Cases:
    for dtype in FLOATS:
        yield case(_op(name), Operand((n, m, 2), dtype), Operand((m, 2), dtype))
    yield case(_op(name), Operand((n, 1, 2)), Operand((1, m, 2)))
    yield case(_op(name), Operand((2, n)), Operand((2, n)), turned=True)


def _complex(name: str, n: Size, m: Size) -> Cases:
    for dtype in ("c64", "c128"):
        yield case(_op(name), Operand((n, m), dtype, "any"))
        yield case(_op(name), Operand((m,), dtype))
    yield case(_op(name), Operand((n, m), "c64"), turned=True)


def _complex_of(name: str, n: Size, m: Size) -> Cases:
    for dtype in ("f32", "f64"):
        if name == "from_pairs":
            yield case(_op(name), Operand((n, m, 2), dtype, "any"))
            yield case(_op(name), Operand((2,), dtype))
        else:
            yield case(_op(name), Operand((n, m), dtype, "any"), Operand((n, m), dtype))
            yield case(_op(name), Operand((n, 1), dtype), Operand((n, 1), dtype), turned=True)


def _dft(name: str, n: Size, m: Size) -> Cases:
    for dtype in FLOATS:
        yield case(_op(name), Operand((n, m + 1, 2), dtype))
    for inverse in (False, True):
        for parts in (1, 2):
            yield case(_op(name, None, 0, inverse), Operand((n + 1, m, parts)))
            yield case(_op(name, m + 3, -2, inverse), Operand((n, m, parts)))
            yield case(_op(name, n // 2 + 1, -2, inverse), Operand((m, n, parts)))
    for dtype in ("f32", "f64"):
        yield case(_op(name, onesided=True), Operand((n, m + 1, 1), dtype))
        yield case(_op(name, None, -2, True, True), Operand((n, m + 1, 2), dtype))
    yield case(_op(name, 600), Operand((1, m, 2)))
    for length in (8, 63, 97, 128, 135, 240):  # by passes and by a chirp, side by side and each by itself
        for dtype in ("f32", "f64"):
            yield case(_op(name), Operand((n + 1, length, 2), dtype))
            yield case(_op(name, None, 1, False, True), Operand((2, length, n + 1, 1), dtype))
            yield case(_op(name, length, -2, True, True), Operand((3, length // 2 + 1, 2), dtype))


def _fft_table(name: str, n: Size, m: Size) -> Cases:
    for dtype in FLOATS:
        yield case(_op(name, 120, True, 1, DTYPES[dtype]))
        yield case(_op(name, 17, False, 8, DTYPES[dtype]))


def _frames(name: str, n: Size, m: Size) -> Cases:
    for dtype in ("f32", "bool", "i64"):
        yield case(_op(name, 4, 3), Operand((n, m + 4, 2), dtype))
    yield case(_op(name, m + 1, n + 1), Operand((n + m + 2, 1)))
    yield case(_op(name, 2, 1), Operand((2, n, m + 2)), turned=True)


def _stft(name: str, n: Size, m: Size) -> Cases:
    for dtype in FLOATS:
        yield case(_op(name, 3, 8), Operand((n, m + 8, 1), dtype), Operand((8,), dtype))
    for onesided in (False, True):
        yield case(_op(name, m + 1, n + 1, onesided), Operand((2, n + 2 * m + 1, 1)))
    yield case(_op(name, 2, 5, False), Operand((n, m + 5, 2)), Operand((5,)))


def _log_mel(name: str, n: Size, m: Size) -> Cases:
    for dtype in FLOATS:
        yield case(_op(name, 16000, 32, 8, 5), Operand((n, m + 32), dtype))
    yield case(_op(name, 8000, 16, 5, 4, 200.0, 3000.0, 1e-3), Operand((n + m + 16,)), Operand((16,)))


def _welch_peaks(name: str, n: Size, m: Size) -> Cases:
    for dtype in ("f32", "f64", "f16"):
        yield case(_op(name, 3, 2, 100.0), Operand((2 * n, 32), dtype), Operand((32,), dtype, "positive"))
    yield case(_op(name, 1, 1), Operand((2, n, m + 1)))


def _divide_by_size(name: str, n: Size, m: Size) -> Cases:
    for dtype in FLOATS:
        yield case(_op(name, m + 1), Operand((n, m), dtype))
    yield case(_op(name, n + 2), Operand((n, m), "f32", "any"), turned=True)


# ---- random numbers: equal seeds give equal ones on every device


def _random(name: str, n: Size, m: Size) -> Cases:
    for dtype in FLOATS:
        yield case(_op(name, (n, m), -1.0, 2.5, DTYPES[dtype], 7))
    yield case(_op(name, (m, 3), seed=2**40 + 1), Operand((), "i64", "whole"))
    yield case(_op(name, ()))


def _bernoulli(name: str, n: Size, m: Size) -> Cases:
    for dtype in FLOATS:
        yield case(_op(name, None, 3), Operand((n, m), dtype, "unit"))
    yield case(_op(name, DTYPES["bool"], 4), Operand((n, m), "f32", "unit"), Operand((1,), "i32", "whole"))


def _multinomial(name: str, n: Size, m: Size) -> Cases:
    for dtype in ("f32", "f16"):
        yield case(_op(name, 5, DTYPES["i64"]), Operand((n, m + 1), dtype))
    yield case(_op(name, n, seed=9), Operand((3, m + 1)), Operand((), "i64", "whole"))


# ---- recurrence


def _recurrent(name: str, n: Size, m: Size) -> Cases:
    gates = {"rnn": 1, "gru": 3, "lstm": 4}[name]
    hidden, size = 3, 4
    every = ("bias", "lengths", "initial_h", "initial_c", "peepholes")[: 5 if name == "lstm" else 3]

    def arguments(dtype: str, d: int, batch_first: bool, optional: tuple[str, ...]) -> Iterator[Operand]:
        yield Operand((m, n, size) if batch_first else (n, m, size), dtype)
        yield Operand((d, gates * hidden, size), dtype)
        yield Operand((d, gates * hidden, hidden), dtype)
        state = Operand((m, d, hidden) if batch_first else (d, m, hidden), dtype)
        given = {
            "bias": Operand((d, 2 * gates * hidden), dtype),
            "lengths": Operand((m,), "u32", "index", n),
            "initial_h": state,
            "initial_c": state,
            "peepholes": Operand((d, 3 * hidden), dtype),
        }
        yield from (given[key] for key in optional)

    for dtype in FLOATS:
        yield case(_op(name), *arguments(dtype, 1, False, ()))
    for direction in ("reverse", "bidirectional"):
        d = 2 if direction == "bidirectional" else 1
        for first in (False, True):
            op = _op(name, every, direction, clip=0.8, batch_first=first)
            yield case(op, *arguments("f32", d, first, every))


def _recurrence(name: str, n: Size, m: Size) -> Cases:
    hidden = 19  # more than a vector of any host, and no multiple of one
    for cell, gates in (("rnn", 1), ("gru", 3), ("lstm", 4)):
        for flag in (False, True):
            switch = {"gru": "linear_before_reset", "lstm": "input_forget"}.get(cell)
            own: dict[str, object] = {switch: flag} if switch else {"activations": ("hardsigmoid",) * 2}  # no chaos
            op = _op(name, ("bias", "lengths"), cell, "bidirectional", **own)
            x, r = Operand((n, m, 2 * gates * hidden)), Operand((2, gates * hidden, hidden))
            yield case(op, x, r, Operand((2, hidden)), Operand((m,), "u32", "index", n))
    whole = (Operand((n, m, 4 * hidden), "f64"), Operand((1, 4 * hidden, hidden), "f64"))
    yield case(_op(name, direction="reverse"), *whole)
    for names in (("scale",), ("scale", "zero"), ("scale", "bias", "lengths", "peepholes", "initial_h", "initial_c")):
        given = {
            "zero": Operand((2, 4 * hidden), "i8", "any"),
            "scale": Operand((2, 4 * hidden), "f32", "positive"),
            "bias": Operand((2, 4 * hidden)),
            "lengths": Operand((m,), "u32", "index", n),
            "peepholes": Operand((2, 3 * hidden)),
            "initial_h": Operand((2, m, hidden)),
            "initial_c": Operand((2, m, hidden)),
        }
        op = _op(name, names, "lstm", "bidirectional", ("hardsigmoid",) * 6, round_state=True)
        x, r = Operand((n, m, 8 * hidden)), Operand((2, 4 * hidden, hidden), "i8", "any")
        yield case(op, x, r, *(given[key] for key in names))


# ---- quantised products


def _requantize(name: str, n: Size, m: Size) -> Cases:
    for to in ("u8", "i8", "u16", "i16"):
        x, zero = Operand((n, m), "i32"), Operand((), to)
        yield case(_op(name, DTYPES[to]), x, Operand((m,), "f32", "positive"), zero)
        yield case(_op(name, DTYPES[to]), Operand((n, m), "i32", "any"), Operand((), "f32", "positive"))
        yield case(_op(name, DTYPES[to]), x, Operand((m,), "f32", "positive"), zero, Operand((m,)))
    yield case(_op(name), Operand((n, m), "i32"), Operand((n, 1), "f32", "positive"), Operand((m,), "u8"), turned=True)


def _byte_conv(name: str, n: Size, m: Size) -> Cases:
    """Windows in place and gathered, tails of the tile of 5 pixels, 16 outputs and 8 products, and depthwise ones."""
    for x, w in (("u8", "i8"), ("i8", "i8"), ("u8", "i16")):
        values, zero = "any" if w == "i8" else "whole", Operand((), x)
        yield case(_op(name), Operand((2, 16, n, m), x, "any"), Operand((33, 16, 1, 1), w, values), zero)
        image, padded = Operand((1, 5, n, m), x, "any"), _op(name, (2, 1), (), (1, 0, 2, 1))
        yield case(padded, image, Operand((17, 5, 3, 2), w, values), zero)
        yield case(_op(name, pads=(2, 1)), Operand((2, 3, m), x, "any"), Operand((16, 3, 4), w, values))
        planes = Operand((2, 3, n, m), x, "any")
        yield case(_op(name, (2, 1), (2, 1), (1, 1, 1, 1)), planes, Operand((8, 3, 3, 3), w, values), zero)
        yield case(_op(name, groups=2), Operand((1, 8, n, m), x, "any"), Operand((6, 4, 2, 2), w, values), zero)
        for channels in (16, 23):
            wide = Operand((2, channels, n, m), x, "any")
            whole = _op(name, pads=(1, 1, 1, 1), groups=channels)
            yield case(whole, wide, Operand((channels, 1, 3, 3), w, values), zero)
        wide = Operand((1, 40, n, m), x, "any")
        yield case(_op(name, (2, 2), (1, 2), (0, 2, 1, 2), 40), wide, Operand((40, 1, 2, 5), w, values), zero)


def _byte_matmul(name: str, n: Size, m: Size) -> Cases:
    for a, b in (("u8", "i8"), ("i8", "i8"), ("i8", "i16")):
        values, zero = "any" if b == "i8" else "whole", Operand((), a)
        for depth in (1, 8, 13):
            yield case(_op(name), Operand((n, depth), a, "any"), Operand((depth, 33), b, values), zero, leaf="param")
        yield case(_op(name), Operand((2, n, m, 5), a, "any"), Operand((5, 16), b, values))
        yield case(_op(name), Operand((m, n, 16), a, "any"), Operand((16, 7), b, values), zero)
        yield case(_op(name), Operand((n, 8), a, "any"), Operand((8, 17), b, values), turned=True)


def _qlinear_matmul(name: str, n: Size, m: Size) -> Cases:
    for a, b, y in (("u8", "i8", "u8"), ("i8", "i8", "i8"), ("u8", "u8", "u8")):
        whole = Operand((), "f32", "positive")
        left = (Operand((n, m), a, "any"), whole, Operand((), a))
        yield case(_op(name), *left, Operand((m, 5), b, "any"), whole, Operand((), b), whole, Operand((), y))
        right = (Operand((m, 17), b, "any"), Operand((17,), "f32", "positive"), Operand((17,), b))
        yield case(_op(name), *left, *right, whole, Operand((), y))


def _qlinear_conv(name: str, n: Size, m: Size) -> Cases:
    whole = Operand((), "f32", "positive")
    for x, w, y in (("u8", "i8", "u8"), ("i8", "i8", "i8")):
        image = (Operand((2, 4, n + 2, m + 2), x, "any"), whole, Operand((), x))
        kernel = (Operand((6, 4, 3, 3), w, "any"), Operand((6,), "f32", "positive"), Operand((6,), w))
        yield case(_op(name, pads=(1, 1, 1, 1)), *image, *kernel, whole, Operand((), y), Operand((6,), "i32"))
        grouped = (Operand((4, 2, 3, 2), w, "any"), whole, Operand((), w))
        yield case(_op(name, (2, 1), groups=2), *image, *grouped, whole, Operand((), y))


# ---- regions, taps and places


def _regions(name: str, n: Size, m: Size) -> Cases:
    for mode, half_pixel in (("avg", True), ("max", False)):
        for dtype in FLOATS:  # no place is within a rounding error of a border, where what counts changes at once
            given = Operand((2, 3, n + 1, m + 1), dtype), Operand((4, 4), dtype, "whole")
            yield case(_op(name, (2, 3), 0.27, mode, half_pixel), *given, Operand((4,), "u32", "index", 2))
        given = Operand((2, 3, n + 1, m + 1)), Operand((4, 4), "f32", "whole")  # many on it, all without an error
        yield case(_op(name, (2, 1), 0.25, mode, half_pixel), *given, Operand((4,), "u32", "index", 2))
    if name == "roi_align":
        op = _op(name, (3, 1), samples=3)
        yield case(op, Operand((1, 2, n + 1, m + 1)), Operand((m, 4), "f32", "unit"), Operand((m,), "u32", "index"))


def _max_roi_pool(name: str, n: Size, m: Size) -> Cases:
    for dtype in FLOATS:  # places below 1: the first image
        yield case(_op(name, (2, 3), 9.0), Operand((1, 3, n + 1, m + 1), dtype), Operand((4, 5), dtype, "unit"))
    yield case(_op(name, (1, 1)), Operand((1, n, 5, 4)), Operand((m, 5), "f32", "unit"))


def _max_unpool(name: str, n: Size, m: Size) -> Cases:
    for dtype in ALL:
        yield case(_op(name, (7, 5)), Operand((1, 2, n, 3), dtype), Operand((1, 2, n, 3), "i64", "whole"))
    yield case(_op(name, (9,), (8,)), Operand((2, 1, m)), Operand((2, 1, m), "i64", "whole"))


def _deform_conv(name: str, n: Size, m: Size) -> Cases:
    for dtype in ("f32", "f64", "bf16"):
        x, weight = Operand((2, 3, n + 1, m + 1), dtype), Operand((2, 3, 2, 2), dtype)
        yield case(_op(name), x, weight, Operand((2, 8, n, m), dtype), Operand((2,), dtype))
    x, weight, offset = Operand((1, 4, n + 1, m + 1)), Operand((2, 2, 2, 1)), Operand((1, 8, n + 1, m + 2))
    mask = Operand((1, 4, n + 1, m + 2), "f32", "unit")
    yield case(_op(name, (1, 1), (1, 1), (1, 1, 0, 0), 2, 2), x, weight, offset, Operand((2,)), mask)


def _deform_sample(name: str, n: Size, m: Size) -> Cases:
    for dtype in ("f32", "f64", "bf16"):
        taps = _op(name, (2, 2), (1, 1), (1, 1), (0, 0, 0, 0))
        yield case(taps, Operand((2, 3, n + 1, m + 1), dtype), Operand((2, 8, n, m), dtype))
    mask = Operand((1, 4, n + 1, m + 2), "f32", "unit")
    grouped = _op(name, (2, 1), (1, 1), (1, 1), (1, 1, 0, 0), 2)
    yield case(grouped, Operand((1, 4, n + 1, m + 1)), Operand((1, 8, n + 1, m + 2)), mask)


def _interpolate_axis(name: str, n: Size, m: Size) -> Cases:
    for mode in ("nearest", "linear", "cubic"):
        for coordinate in ("half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric"):
            yield case(_op(name, 1, 2 * m + 1, None, mode, coordinate), Operand((n, m + 1, 2)))
        yield case(_op(name, 0, n // 2 + 1, None, mode, antialias=True), Operand((n + 1, m), "f64"))
        crop = _op(name, -1, 7, None, mode, "tf_crop_and_resize", region=(-0.2, 1.1), extrapolation=9.0)
        yield case(crop, Operand((n, m + 1)))
        yield case(_op(name, -1, 9, 1.7, mode, exclude_outside=True), Operand((n, 5)))
        yield case(_op(name, 0, 2 * n, None, mode, "asymmetric"), Operand((n, m)), Operand((), "f32", "positive"))


def _relabel(name: str, n: Size, m: Size) -> Cases:
    for dtype in ALL:
        yield case(_op(name, (0, 1, 0), (1, 0)), Operand((n, m, n), dtype, "any"))
    yield case(_op(name, (0, 0), (0,)), Operand((n, n)), turned=True)
    yield case(_op(name, (0, 1, 2), (2, 0, 1)), Operand((n, m, 3)))


# ---- sizes that the data decide


COUNT = Dim("count", 0, 10_000)


def _arange(name: str, n: Size, m: Size) -> Cases:
    for dtype in ("i32", "i64", "f32", "f64"):
        number = Operand((), dtype, "whole" if dtype in FLOATS else "ties")
        yield case(_op(name, COUNT), number, number, Operand((), dtype, "nonzero"))


def _compress(name: str, n: Size, m: Size) -> Cases:
    for dtype in ALL:
        yield case(_op(name, COUNT, 0), Operand((n, m), dtype, "any"), Operand((n,), "bool"))
    yield case(_op(name, COUNT), Operand((n, m)), Operand((m,), "bool"))


def _extent(name: str, n: Size, m: Size) -> Cases:
    for dtype in ("u8", "i32", "i64"):
        yield case(_op(name, COUNT), Operand((), dtype, "whole"))
    yield case(_op(name, COUNT), Operand((), "i64", "whole"), Operand(()))


def _non_max_suppression(name: str, n: Size, m: Size) -> Cases:
    boxes, scores = Operand((2, m, 4), "f32", "unit"), Operand((2, 3, m))
    limits = Operand((), "i64", "whole"), Operand((), "f32", "unit"), Operand((), "f32")
    for center in (False, True):
        for given in ((), limits[:1], limits):
            yield case(_op(name, COUNT, center), boxes, scores, *given)


def _non_zero(name: str, n: Size, m: Size) -> Cases:
    for dtype in ALL:
        yield case(_op(name, COUNT), Operand((n, m), dtype, "ties"))
    yield case(_op(name, COUNT), Operand(()))


def _unique(name: str, n: Size, m: Size) -> Cases:
    for ordered in (False, True):
        for dtype in ALL:
            yield case(_op(name, COUNT, None, ordered), Operand((n, m), dtype, "ties"))
        yield case(_op(name, COUNT, 1, ordered), Operand((2, m), "f32", "ties"))


def _decode_image(name: str, n: Size, m: Size) -> Cases:
    """A picture of 3 x 2 pixels in a file of the simplest format, and a file that is none."""
    file = b"P6 3 2 255\n" + bytes(range(0, 180, 10))
    for pixels in ("RGB", "BGR", "Grayscale"):
        yield case(_op(name, COUNT, pixels), Operand((len(file),), "u8", data=tuple(file)))
    yield case(_op(name, COUNT), Operand((5,), "u8"))


SIGNAL: dict[str, Make] = {
    "arange": _arange,
    "bernoulli": _bernoulli,
    "byte_conv": _byte_conv,
    "byte_matmul": _byte_matmul,
    "complex_mul": _complex_mul,
    "compress": _compress,
    "decode_image": _decode_image,
    "deform_conv": _deform_conv,
    "deform_sample": _deform_sample,
    "dft": _dft,
    "dft_at_run": _dft,
    "dft_table": _dft_table,
    "divide_by_size": _divide_by_size,
    "extent": _extent,
    "fft_table": _fft_table,
    "frames": _frames,
    "from_pairs": _complex_of,
    "gru": _recurrent,
    "imaginary_part": _complex,
    "interpolate_axis": _interpolate_axis,
    "log_mel_spectrogram": _log_mel,
    "lstm": _recurrent,
    "make_complex": _complex_of,
    "max_roi_pool": _max_roi_pool,
    "max_unpool": _max_unpool,
    "mel_weights": _mel_weights,
    "multinomial": _multinomial,
    "non_max_suppression": _non_max_suppression,
    "non_zero": _non_zero,
    "pairs": _complex,
    "qlinear_conv": _qlinear_conv,
    "qlinear_matmul": _qlinear_matmul,
    "random_normal": _random,
    "random_uniform": _random,
    "real_part": _complex,
    "relabel": _relabel,
    "requantize": _requantize,
    "recurrence": _recurrence,
    "rnn": _recurrent,
    "roi_align": _regions,
    "roi_align_adaptive": _regions,
    "roots": _roots,
    "stft": _stft,
    "unique": _unique,
    "welch_peaks": _welch_peaks,
    "window": _window,
}
