"""How a transform of known length is cut into passes, and the tables of factors that the passes read."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from rlx.errors import OptionError
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Array, TensorType
from rlx.ops.base import Op, Work, check_kind, register
from rlx.records import dataclass

__all__ = ["FftPass", "FftPlan", "FftTable", "is_smooth", "radices", "unit_roots"]

PRIMES = (13, 11, 7, 5, 3)  # odd ones that there is a pass for
FEW = 4  # elements side by side from which on a pass takes them as the lanes of vectors


def unit_roots(steps: Array, length: int) -> Array:
    """exp(-2 pi i steps / length) in f64, from angles of an eighth of a circle at most: right to some last bits."""
    eighths = 8 * (np.asarray(steps, np.int64) % length)
    octant, rest = np.divmod(eighths, length)
    odd = octant % 2 == 1
    angle = np.where(odd, length - rest, rest) * (math.pi / 4 / length)
    cos, sin = np.cos(angle), np.sin(angle)
    cos, sin = np.where((octant + 1) // 2 % 2 == 1, sin, cos), np.where((octant + 1) // 2 % 2 == 1, cos, sin)
    real = np.where((octant >= 2) & (octant < 6), -cos, cos)
    return np.asarray(real - 1j * np.where(octant >= 4, -sin, sin))


def radices(length: int) -> tuple[int, ...] | None:
    """The radices of the passes of a transform in order, None where a prime factor is too large for one."""
    twos = 0
    while length % 2 == 0:
        twos, length = twos + 1, length // 2
    odd = []
    for prime in (9, *PRIMES):
        while length % prime == 0:
            odd.append(prime)
            length //= prime
    if length > 1:
        return None
    eights, rest = divmod(twos, 3)
    if rest == 1 and eights:
        eights, rest = eights - 1, 4
    even = {0: (), 1: (2,), 2: (4,), 4: (4, 4)}[rest]
    first = (8,) * eights + tuple(r for r in even if r > 2)
    return (*first, *sorted(odd, reverse=True), *(r for r in even if r == 2))


def is_smooth(length: int) -> bool:
    """Whether passes alone compute a transform of the length."""
    return radices(length) is not None


def _padded(least: int) -> int:
    """The smallest size from `least` on whose passes are mostly of radix 8 and 4."""
    sizes = []
    for odd in (1, 3, 5, 9, 15):
        twos = max(math.ceil(math.log2(least / odd)), 3) if least > odd else 3
        while odd << twos < least:
            twos += 1
        sizes.append(odd << twos)
    return min(sizes)


@dataclass(frozen=True)
class FftPass:
    """Transforms of `radix` elements that lie `stride * rest` apart, into places that lie `stride` apart. (Stockham)

    For p < rest and q < stride: y[q + stride (radix p + k)] = w^(p k) sum over j of x[q + stride (p + rest j)] u^(j k),
    w and u the first roots of radix * rest and of radix. The factors w^(p k) lie from `table` on: as [p][k > 0][part],
    or, where the lanes of vectors are numbers j = q + stride p (`along`), as [k > 0][part][j].
    """

    radix: int
    rest: int
    stride: int
    table: int
    along: bool


class FftPlan:
    """The passes of a transform of `length` and where each table lies, in elements.

    `halved`: a real signal of even length is taken as half as many complex numbers, and what makes the one spectrum of
    the other has factors at `half`. `width` is how many transforms are made side by side. Where a prime factor is too
    large the transform is a convolution with a chirp (Bluestein 1970), of `size` elements.
    """

    def __init__(self, length: int, halved: bool, width: int) -> None:
        self.length, self.halved, self.width = length, halved, width
        self.core = length // 2 if halved else length
        self.chirped = not is_smooth(self.core)
        self.size = _padded(2 * self.core - 1) if self.chirped else self.core
        self.passes: list[FftPass] = []
        at, rest, stride = 0, self.size, width
        for radix in radices(self.size) or ():
            rest //= radix
            along = stride < FEW
            self.passes.append(FftPass(radix, rest, stride, at, along))
            if rest > 1 or along:
                at += 2 * (radix - 1) * rest * (stride if along else 1)
            stride *= radix
        self.chirp = at  # [part][core]
        self.filter = at = at + 2 * self.core * self.chirped  # [part][size]
        self.half = at = at + 2 * self.size * self.chirped  # [part][core // 2 + 1]
        self.total = at + 2 * (self.core // 2 + 1) * halved

    @cached_property
    def values(self) -> Array:
        """All tables in f64."""
        made = np.zeros(self.total)

        def put(at: int, numbers: Array) -> None:
            """Parts before the last axis where it is split already."""
            flat = numbers.reshape(-1)
            made[at : at + flat.size] = flat

        for one in self.passes:
            p, k = np.arange(one.rest), np.arange(1, one.radix)
            if one.along:
                w = unit_roots(k[:, None] * np.repeat(p, one.stride), one.radix * one.rest)
                put(one.table, np.stack([w.real, w.imag], 1))
            elif one.rest > 1:
                w = unit_roots(p[:, None] * k, one.radix * one.rest)
                put(one.table, np.stack([w.real, w.imag], -1))
        if self.chirped:
            t = np.arange(self.core)
            c = unit_roots(t * t % (2 * self.core), 2 * self.core)
            put(self.chirp, np.stack([c.real, c.imag]))
            b = np.zeros(self.size, np.complex128)
            b[: self.core] = c.conj()
            b[self.size - self.core + 1 :] = c[:0:-1].conj()
            b = np.fft.fft(b) / self.size
            put(self.filter, np.stack([b.real, b.imag]))
        if self.halved:
            w = unit_roots(np.arange(self.core // 2 + 1), self.length)
            put(self.half, np.stack([w.real, w.imag]))
        return made


@register
class FftTable(Op):
    """The factors that the passes of a transform read, as `FftPlan` lays them out; no inputs."""

    length: int
    halved: bool = False
    width: int = 1
    dtype: DType = DTYPES["f32"]

    def infer(self) -> TensorType:
        if self.length < 1 or self.width < 1 or (self.halved and self.length % 2):
            raise OptionError(f"fft_table: expected a length and a width from 1 on, even where halved; got {self}")
        out = TensorType((FftPlan(self.length, self.halved, self.width).total,), self.dtype)
        check_kind(self, out, "f", "result")
        return out

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(25, *x)

    def reference(self) -> Array:
        return FftPlan(self.length, self.halved, self.width).values.astype(self.dtype.numpy)
