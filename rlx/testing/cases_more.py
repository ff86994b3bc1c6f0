"""Cases of the ops outside of the core families; see `rlx.testing.cases`."""

from __future__ import annotations

from typing import Any

from rlx.ir.dtype import DTYPES
from rlx.ir.shape import Size
from rlx.ops.base import OPS
from rlx.testing.oracle import ALL, FLOATS, INTEGERS, Cases, Make, Operand, case

__all__ = ["MORE"]


def _op(name: str, *arguments: Any, **attributes: Any) -> Any:
    cls: Any = OPS[name]
    return cls(*arguments, **attributes)


def _bit_shift(name: str, n: Size, m: Size) -> Cases:
    for right in (False, True):
        for dtype in ("u8", "u16", "u32", "u64"):
            yield case(_op(name, right), Operand((n, m), dtype, "any"), Operand((m,), dtype, "whole"))


def _cumulative(name: str, n: Size, m: Size) -> Cases:
    kind = "unit" if name == "cum_prod" else "normal"
    for exclusive in (False, True):
        for reverse in (False, True):
            yield case(_op(name, 0, exclusive, reverse), Operand((n, m), "f32", kind))
            yield case(_op(name, -1, exclusive, reverse), Operand((n, m), "f32", kind), turned=True)
    for dtype in ("f64", "i32", "i64", "u32"):
        yield case(_op(name, 1), Operand((2, n, 3), dtype, "unit" if dtype == "f64" else "ties"))


def _group_norm(name: str, n: Size, m: Size) -> Cases:
    for dtype in FLOATS:
        yield case(_op(name, 2, 0.1), Operand((2, 6, n + 1, m + 1), dtype), Operand((6,), dtype), Operand((6,), dtype))
    yield case(_op(name, 6, 0.1), Operand((n + 1, 6, m + 1)), Operand((6,)), Operand((6,)), turned=True)


def _instance_norm(name: str, n: Size, m: Size) -> Cases:
    for dtype in FLOATS:
        both = Operand((n + 1,), dtype)
        yield case(_op(name, 0.1), Operand((2, n + 1, m + 1), dtype), both, both)


def _lp_normalization(name: str, n: Size, m: Size) -> Cases:
    for p in (1, 2):
        for axis in (-1, 0):
            yield case(_op(name, axis, p), Operand((n + 1, m + 1), "f32", "nonzero"))


def _lrn(name: str, n: Size, m: Size) -> Cases:
    for size in (1, 3, 4):
        yield case(_op(name, size, 0.1, 0.75, 2.0), Operand((2, n, m)))
    yield case(_op(name, 3), Operand((1, m, 2, n), "f64"), turned=True)


def _mean_variance(name: str, n: Size, m: Size) -> Cases:
    yield case(_op(name), Operand((2, 3, n + 2, m + 2)))
    yield case(_op(name, (1,)), Operand((n, m + 2), "f64"))


def _lp_pool(name: str, n: Size, m: Size) -> Cases:
    for p in (1, 2):
        yield case(_op(name, (2, 3), (2, 1), (0, 1, 1, 1), p=p), Operand((1, 2, n, m)))
        yield case(_op(name, (2,), ceil_mode=True, strides=(2,), p=p), Operand((2, n, m), "f64"))


def _global_lp_pool(name: str, n: Size, m: Size) -> Cases:
    for p in (1, 2):
        yield case(_op(name, p), Operand((2, 3, n, m)))


def _depth_to_space(name: str, n: Size, m: Size) -> Cases:
    for mode in ("DCR", "CRD"):
        for dtype in ("f32", "u8"):
            yield case(_op(name, 2, mode), Operand((2, 12, n, m), dtype))


def _space_to_depth(name: str, n: Size, m: Size) -> Cases:
    for turned in (False, True):
        yield case(_op(name, 2), Operand((1, 3, 2 * n, 2 * m)), turned=turned)


def _center_crop_pad(name: str, n: Size, m: Size) -> Cases:
    for sizes in ((5, 9), (n, 4), (12, m)):
        yield case(_op(name, sizes), Operand((n, m)))


def _col2im(name: str, n: Size, m: Size) -> Cases:
    yield case(_op(name, (5, 6), (2, 3), (1, 1), (1, 1), (0, 0, 0, 0)), Operand((n + 1, 12, 16)))
    yield case(_op(name, (6, 6), (2, 2), (2, 2)), Operand((n + 1, 8, 9), "f64"))


def _einsum(name: str, n: Size, m: Size) -> Cases:
    yield case(_op(name, "ij,jk->ik"), Operand((n, m)), Operand((m, 5)))
    yield case(_op(name, "bij,bkj->bik"), Operand((2, n, m)), Operand((2, 3, m)))
    yield case(_op(name, "ij->ji"), Operand((n, m)))
    yield case(_op(name, "ij,ij->"), Operand((n, m)), Operand((n, m)))
    yield case(_op(name, "...i,...i->..."), Operand((n, m)), Operand((n, m)))


def _hardmax(name: str, n: Size, m: Size) -> Cases:
    for axis in (-1, 0):
        yield case(_op(name, axis), Operand((n, m), "f32", "ties"))


def _eye_like(name: str, n: Size, m: Size) -> Cases:
    for k in (-1, 0, 2):
        yield case(_op(name, k), Operand((n, m)))
        yield case(_op(name, k, DTYPES["i64"]), Operand((n, m)))


def _one_hot(name: str, n: Size, m: Size) -> Cases:
    for axis in (-1, 0):
        for dtype in ("f32", "i8"):
            yield case(_op(name, 6, axis), Operand((n, m), "i64", "index", 6), Operand((2,), dtype))


def _reverse_sequence(name: str, n: Size, m: Size) -> Cases:
    yield case(_op(name, 0, 1), Operand((n, 9, m)), Operand((n,), "i64", "whole"))
    yield case(_op(name, 1, 0), Operand((8, n)), Operand((n,), "i64", "whole"))


def _shrink(name: str, n: Size, m: Size) -> Cases:
    for dtype in FLOATS:
        yield case(_op(name, 0.75, 0.25), Operand((n, m), dtype))


def _trilu(name: str, n: Size, m: Size) -> Cases:
    for upper in (False, True):
        for dtype in ("f32", "bool", "i64"):
            yield case(_op(name, upper), Operand((2, n, m), dtype))
        yield case(_op(name, upper), Operand((n, m)), Operand((), "i64", "ties"))


def _top_k(name: str, n: Size, m: Size) -> Cases:
    for largest in (False, True):
        yield case(_op(name, 1, -1, largest), Operand((n, m + 1), "f32"))
        yield case(_op(name, 3, 0, largest), Operand((n + 3, m), "i32", "ties"))


def _quantize(name: str, n: Size, m: Size) -> Cases:
    for to in ("u8", "i8"):
        target = DTYPES[to]
        yield case(_op(name, None, 0, target), Operand((n, m)), Operand((), "f32", "positive"), Operand((), to))
        yield case(_op(name, 1, 0, target), Operand((n, m)), Operand((m,), "f32", "positive"), Operand((m,), to))


def _dynamic_quantize(name: str, n: Size, m: Size) -> Cases:
    yield case(_op(name), Operand((n + 1, m + 1)))


def _integer_product(name: str, n: Size, m: Size) -> Cases:
    for a, b in (("u8", "i8"), ("i8", "i8"), ("u8", "u8")):
        yield case(_op(name), Operand((n, m), a, "any"), Operand((m, 5), b, "any"))
        zeros = Operand((), a), Operand((), b)
        yield case(_op(name), Operand((n, m), a, "any"), Operand((m, 17), b, "any"), *zeros)


def _integer_conv(name: str, n: Size, m: Size) -> Cases:
    x, w = Operand((1, 3, n + 2, m + 2), "u8", "any"), Operand((4, 3, 3, 2), "i8", "any")
    yield case(_op(name, pads=(1, 1, 1, 1)), x, w)
    yield case(_op(name, (2, 1)), x, w, Operand((), "u8"))


def _scatter_elements(name: str, n: Size, m: Size) -> Cases:
    for reduction in ("none", "add", "max"):
        at = Operand((n, 1), "i64", "index", m + 1)
        yield case(_op(name, 1, reduction), Operand((n, m + 1)), at, Operand((n, 1)))


def _scatter_nd(name: str, n: Size, m: Size) -> Cases:
    for reduction in ("none", "add"):
        at = Operand((1, 1), "i64", "index", n + 1)
        yield case(_op(name, reduction), Operand((n + 1, m)), at, Operand((1, m)))


def _dynamic_update_slice(name: str, n: Size, m: Size) -> Cases:
    for dtype in ALL:
        yield case(
            _op(name, 0), Operand((n + 2, m), dtype, "any"), Operand((2, m), dtype, "any"),
            Operand((), "u32", "index", n + 1),
        )  # fmt: skip
    x, rows = Operand((3, n + 1, m)), Operand((3, 1, m))
    yield case(_op(name, 1), x, rows, Operand((3,), "u64", "index", n + 1))
    yield case(_op(name, -1), Operand((2, 3, n + 5)), Operand((2, 3, 5)), Operand((2,), "u32", "index", n + 1))


def _interpolate(name: str, n: Size, m: Size) -> Cases:
    for mode in ("linear", "cubic"):
        for coordinate in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"):
            yield case(_op(name, (1, 2, 2 * n, 3 * m), (), mode, coordinate), Operand((1, 2, n, m)))
    yield case(_op(name, (n, 7), (), "linear"), Operand((n, m), "f64"))


def _grid_sample(name: str, n: Size, m: Size) -> Cases:
    for mode in ("linear", "nearest", "cubic"):
        for padding in ("zeros", "border", "reflection"):
            yield case(_op(name, mode, padding), Operand((1, 2, n, m)), Operand((1, 3, 4, 2), "f32", "unit"))


def _affine_grid(name: str, n: Size, m: Size) -> Cases:
    for corners in (False, True):
        yield case(_op(name, (n + 1, m + 1), corners), Operand((2, 2, 3)))
        yield case(_op(name, (2, n + 1, m + 1), corners), Operand((n, 3, 4), "f64"))


def _rotary(name: str, n: Size, m: Size) -> Cases:
    for interleaved in (False, True):
        caches = Operand((2, n, 4)), Operand((2, n, 4))
        yield case(_op(name, interleaved), Operand((2, 3, n, 8)), *caches)


def _each_dtype(name: str, n: Size, m: Size) -> Cases:
    """Any op of one operand that moves elements."""
    for dtype in ALL:
        yield case(_op(name, (n, m)), Operand((n, m), dtype, "any"))


def _prefix(name: str, n: Size, m: Size) -> Cases:
    for kind in ("add", "max"):
        for exclusive in (False, True):
            yield case(_op(name, 1, kind, exclusive), Operand((n, m), "f32"))
    for dtype in INTEGERS:
        yield case(_op(name, 0), Operand((n, m), dtype, "ties"))


MORE: dict[str, Make] = {
    "affine_grid": _affine_grid,
    "as_shape": _each_dtype,
    "bit_shift": _bit_shift,
    "center_crop_pad": _center_crop_pad,
    "col2im": _col2im,
    "conv_integer": _integer_conv,
    "cum_prod": _cumulative,
    "cum_sum": _cumulative,
    "depth_to_space": _depth_to_space,
    "dynamic_quantize_linear": _dynamic_quantize,
    "dynamic_update_slice": _dynamic_update_slice,
    "einsum": _einsum,
    "eye_like": _eye_like,
    "global_lp_pool": _global_lp_pool,
    "grid_sample": _grid_sample,
    "group_norm": _group_norm,
    "hardmax": _hardmax,
    "instance_norm": _instance_norm,
    "interpolate": _interpolate,
    "lp_normalization": _lp_normalization,
    "lp_pool": _lp_pool,
    "lrn": _lrn,
    "matmul_integer": _integer_product,
    "mean_variance_normalization": _mean_variance,
    "one_hot": _one_hot,
    "prefix": _prefix,
    "quantize": _quantize,
    "reverse_sequence": _reverse_sequence,
    "rotary_embedding": _rotary,
    "scatter_elements": _scatter_elements,
    "scatter_nd": _scatter_nd,
    "shrink": _shrink,
    "space_to_depth": _space_to_depth,
    "top_k": _top_k,
    "trilu": _trilu,
}
