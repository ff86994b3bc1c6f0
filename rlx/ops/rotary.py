"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Size, exact_div, unify
from rlx.ops.base import Op, Work, check_kind, check_same_dtype, register, widened
from rlx.ops.index import wrapped_indices

__all__ = ["RotaryEmbedding"]


@register
class RotaryEmbedding(Op):
    """Pairs of elements of each head rotated by the angle of their position. (ONNX RotaryEmbedding-23)

    x is [B, H, S, D], or [B, S, H * D] with `heads` given. cos and sin are [P, R / 2] with positions (i32 or i64)
    [B, S] or [1, S], or [B, S, R / 2] (or [1, S, R / 2]) without. Of a head's D elements the first `dim` = R (0: all)
    are rotated: pairs (2j, 2j + 1) if `interleaved`, else (j, j + R / 2).
    """

    interleaved: bool = False
    heads: int = 0
    dim: int = 0

    def _sizes(self, x: TensorType) -> tuple[Size, Size, int]:
        """Sequence length, head size, rotated elements."""
        if x.rank == 4:
            length, width = x.shape[2], x.shape[3]
        elif x.rank == 3 and self.heads > 0:
            length = x.shape[1]
            each = exact_div(x.shape[2], self.heads)
            if each is None:
                raise ShapeError(f"rotary_embedding: axis 2 of {x} can't be split into {self.heads} heads")
            width = each
        else:
            raise ShapeError(f"rotary_embedding: expected x [B, H, S, D], or [B, S, H * D] with heads given, got {x}")
        rotated = self.dim or width
        if not isinstance(width, int) or not isinstance(rotated, int) or rotated % 2 or not 0 < rotated <= width:
            raise OptionError(f"rotary_embedding: dim {rotated} must be even and from 2 to the head size {width}")
        return length, width, rotated

    def infer(self, x: TensorType, cos: TensorType, sin: TensorType, positions: TensorType | None = None) -> TensorType:
        check_kind(self, x, "f")
        check_same_dtype(self, x, cos, sin)
        length, _, rotated = self._sizes(x)
        if positions is not None and (
            not positions.dtype.is_integer or positions.dtype.bits < 32 or positions.rank != 2
        ):
            raise DTypeError(f"rotary_embedding: expected positions as i64 [B, S], got {positions}")
        for what, t in (("cos", cos), ("sin", sin)):
            if t.rank != (3 if positions is None else 2):
                raise ShapeError(
                    f"rotary_embedding: {what} must be [P, R / 2], or [B, S, R / 2] without positions: {t}"
                )
            unify(t.shape[-1], rotated // 2, f"rotary_embedding: the last axis of {what} {t} is half of {rotated}")
        unify(cos.shape[0], sin.shape[0], f"rotary_embedding: cos {cos} and sin {sin}")
        places = cos if positions is None else positions
        if places.shape[0] != 1:
            unify(places.shape[0], x.shape[0], f"rotary_embedding: the batch of {places} and of {x}")
        unify(places.shape[1], length, f"rotary_embedding: the length of {places} and of {x}")
        unify(cos.shape[-2], sin.shape[-2], f"rotary_embedding: cos {cos} and sin {sin}")
        return TensorType(x.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(3, *x)

    def reference(self, x: Array, cos: Array, sin: Array, positions: Array | None = None) -> Array:
        wide = widened(x)
        if x.ndim == 3:
            wide = wide.reshape(*x.shape[:2], self.heads, -1).swapaxes(1, 2)
        c, s = widened(cos), widened(sin)
        if positions is not None:
            at = wrapped_indices(positions, cos.shape[0], self.op_name)
            c, s = c[at], s[at]
        c, s = c[:, None], s[:, None]
        rotated = self.dim or wide.shape[-1]
        first = slice(0, rotated, 2) if self.interleaved else slice(0, rotated // 2)
        second = slice(1, rotated, 2) if self.interleaved else slice(rotated // 2, rotated)
        out = wide.copy()
        out[..., first] = wide[..., first] * c - wide[..., second] * s
        out[..., second] = wide[..., second] * c + wide[..., first] * s
        return (out if x.ndim == 4 else out.swapaxes(1, 2).reshape(x.shape)).astype(x.dtype)

    def lower(self, k: Any, x: Any, cos: Any, sin: Any, positions: Any = None) -> Any:
        _, width, rotated = self._sizes(x.type)
        half = rotated // 2

        def element(*i: Any) -> Any:
            if x.rank == 4:
                b, _, s, d = i
            else:
                b, s, d = i[0], i[1], i[2] % k.size(width)
            turned = None if rotated == width else d < rotated
            if self.interleaved:
                pair, is_second, partner = d // 2, k.equal(d % 2, 1), i[-1] + 1 - (d % 2) * 2
            else:
                is_second = d >= half
                pair, partner = k.select(is_second, d - half, d), k.select(is_second, i[-1] - half, i[-1] + half)
            own = k.widen(x(*i))
            other = k.widen(x(*i[:-1], partner, where=turned))

            def factor(table: Any) -> Any:
                if positions is None:
                    return k.widen(table(0 if table.shape[0] == 1 else b, s, pair, where=turned))
                at = positions(0 if positions.shape[0] == 1 else b, s)
                return k.widen(table(k.checked_index(at, table.shape[0]), pair, where=turned))

            c, sine = factor(cos), factor(sin)
            value = own * c + k.select(is_second, other * sine, -(other * sine))
            return value if turned is None else k.select(turned, value, own)

        return k.map(element)
