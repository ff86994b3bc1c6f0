"""The ceilings of a device: how fast it moves bytes, multiplies matrices and starts kernels, as plain numbers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from rlx.backends.base import Backend
from rlx.cost.pace import Pace, Probe, present
from rlx.errors import OptionError
from rlx.records import cached_property, dataclass, field

__all__ = ["Ceilings", "guess_of"]

Curve = tuple[tuple[float, float], ...]
Points = tuple[tuple[float, ...], ...]
BESIDE = 3.0  # square of a distance within which a correction says more of a product than the one that was measured
PRODUCT = "contract"  # the kind of a product, where devices don't tell ways to compute it apart
NEAR = 0.01  # square of a distance (of logarithms) within which points are as good as equal

# scalar functions on the elements of vectors, in the time of a sum that is loaded and stored ("loop")
FUNCTIONS: dict[str, float] = {
    "plain": 0.2, "loop": 1, "scattered": 4, "div": 4, "sqrt": 4, "exp": 10, "log": 12, "tanh": 14, "sigmoid": 14,
    "erf": 16, "normal_cdf": 12, "sin": 16, "cos": 16, "pow": 28, "floordiv": 16, "mod": 16, "idiv": 16, "irem": 16,
    "fmod": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Ceilings:
    """What a device can do at most; times in seconds, rates a second. Every number is finite and above 0.

    `flops`: products of large f32 matrices. `products`: (m, k, n, flops/s) on a full grid of sizes, between which rates
    are interpolated; without it small products are taken to be slower by a rule. `dtypes`: the rate of products of a
    type, relative to f32. `bandwidth`: (working set in bytes, bytes/s), ascending. `vector`: sums of f32 elements;
    `functions`: what other scalar functions take, in sums. `launch`: a kernel's own time; `run`: what a run takes
    besides its kernels; `step`: a step of a recurrent loop; `sync`: a wait for the host; `host`: a host call;
    `transfer`: bytes/s between host and device where memory is not `unified`. `compile` and `compile_kernel`: compiling
    a graph, and each kernel of it. `merges`: whether nodes are fused. `output`: each output of a run but the first;
    `copies`, like `bandwidth`: handing its bytes out where memory is unified (default: as kernels move them).
    `corrections`: by kind of kernel (predicted seconds, sizes that its speed depends on ..., measured / predicted),
    between which the nearest count; far from them kernels that are just products take what `products` say. `probe`:
    what `rlx.cost.pace.probe` took at that time for calls, arithmetic and memory, of a device that is the processor: by
    it predictions follow the present speed.
    `follows`: which power of what the probe's arithmetic takes more kernels take more, those that multiply no matrices
    and those that do at `flops`.
    `gains`: (sums of a kernel, how many times as fast as `vector`), where threads share the larger ones.
    `error` is the standard deviation of log(measured / predicted). `guessed`: nothing of it has been measured.
    """

    device: str
    flops: float
    bandwidth: Curve
    vector: float
    launch: float
    run: float
    step: float = 3e-7
    sync: float = 2e-5
    host: float = 2e-5
    transfer: float = 1e10
    compile: float = 0.05
    compile_kernel: float = 0.005
    threads: int = 1
    unified: bool = True
    merges: bool = True
    dtypes: Mapping[str, float] = field(default_factory=dict)
    functions: Mapping[str, float] = field(default_factory=dict)
    products: tuple[tuple[float, float, float, float], ...] = ()
    output: float = 3e-7
    copies: Curve = ()
    corrections: Mapping[str, Points] = field(default_factory=dict)
    gains: Curve = ()
    probe: tuple[float, ...] = ()
    follows: tuple[float, float] = (1.0, 1.0)
    error: float = 0.7
    guessed: bool = True

    def __post_init__(self) -> None:
        for f in fields(self):
            for number in _numbers(getattr(self, f.name)):
                if not (math.isfinite(number) and number > 0):
                    raise OptionError(f"ceilings of {self.device!r}: {f.name}: expected a number above 0, got {number}")
        if not self.bandwidth:
            raise OptionError(f"ceilings of {self.device!r}: bandwidth: expected at least one (bytes, bytes/s)")
        for name, curve in (("bandwidth", self.bandwidth), ("copies", self.copies), ("gains", self.gains)):
            if list(curve) != sorted(curve):
                raise OptionError(f"ceilings of {self.device!r}: {name}: expected points in ascending order")
        if any(len(point) < 2 for points in self.corrections.values() for point in points):
            raise OptionError(f"ceilings of {self.device!r}: corrections: expected (seconds, sizes ..., ratio)")
        if self.products and len(self.products) != math.prod(map(len, self._axes)):
            raise OptionError(f"ceilings of {self.device!r}: products: expected every (m, k, n) of a grid")

    @cached_property
    def _axes(self) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(sorted({p[i] for p in self.products})) for i in range(3))

    @cached_property
    def _rates(self) -> dict[tuple[float, ...], float]:
        return {p[:3]: math.log(p[3]) for p in self.products}

    def _multiplied(self, points: Points) -> Points:
        """The products as points of a correction, (seconds, batch, m, k, n, 1), but those beside one of `points`."""
        places = ((2 * m * k * n / rate, 1.0, m, k, n) for m, k, n, rate in self.products)
        return tuple((*place, 1.0) for place in places if all(distance(p, place) > BESIDE for p in points))

    def bytes_rate(self, working_set: float) -> float:
        """Bytes a second of a kernel that moves so many bytes."""
        return _on_curve(self.bandwidth, working_set)

    def product_rate(self, m: float, k: float, n: float, dtype: str = "f32") -> float:
        """Flops a second of a product of m x k by k x n."""
        scale = self.dtypes.get(dtype, 1.0)
        if not self.products:
            return scale * self.flops * m / (m + 8) * k / (k + 32) * n / (n + 16)
        places = [_between(axis, x) for axis, x in zip(self._axes, (m, k, n), strict=True)]
        total = 0.0
        for corner in range(8):
            weight, at = 1.0, []
            for d, (low, high, share) in enumerate(places):
                up = corner >> d & 1
                weight *= share if up else 1 - share
                at.append(high if up else low)
            if weight:
                total += weight * self._rates[tuple(at)]
        return scale * math.exp(total)

    def vector_seconds(self, sums: float) -> float:
        """Seconds of a kernel whose functions are worth so many sums."""
        return sums / self.vector / (_on_curve(self.gains, sums) if self.gains else 1.0)

    def function_cost(self, fn: str) -> float:
        """Time of a scalar function on an element, in sums."""
        return self.functions.get(fn, FUNCTIONS.get(fn, 1.0))

    def copy_seconds(self, nbytes: int) -> float:
        """Seconds of handing an output of so many bytes to the caller, where memory is unified."""
        if self.copies:
            return nbytes / _on_curve(self.copies, nbytes)
        return 2 * nbytes / self.bytes_rate(2 * nbytes)

    def correction(self, kind: str, seconds: float, sizes: Sequence[float] = ()) -> float:
        """Measured over predicted time of kernels of that kind, predicted to take so long, of those sizes."""
        plain = kind.removesuffix(" plus planes").partition("+")[0]  # without what makes it a variant of that
        points = self.corrections.get(kind) or self.corrections.get(plain, ())
        if points and plain == PRODUCT:
            points = (*points, *self._multiplied(points))
        return nearest(points, (seconds, *sizes))

    def pace(self, now: Probe) -> Pace:
        """How much longer than when it was calibrated everything takes, by what the probe takes now."""
        if not self.probe:
            return Pace()
        taken = (now.calls, now.arithmetic, now.memory)
        return Pace(*(took / before for took, before in zip(taken, self.probe, strict=True)))

    def kernel_pace(self, pace: Pace, rate: float, moving: float) -> float:
        """How much longer a kernel takes that multiplies at a rate and of whose time a share goes into moving bytes."""
        return float(pace.kernels ** (self.power(rate) * (1 - moving)) * pace.memory**moving)

    def power(self, rate: float) -> float:
        """Which power of what the probe's arithmetic takes more a kernel takes that multiplies at a rate."""
        few, most = self.follows
        return few + (most - few) * min(1.0, rate / self.flops)

    def present_pace(self) -> Pace:
        """The same by a probe taken now, or in the last two seconds; that of the calibration if it had no probe."""
        return self.pace(present()) if self.probe else Pace()

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(facts: Mapping[str, Any]) -> Ceilings:
        """Ceilings from what `to_dict` gave. Raises `OptionError`, `KeyError` or `TypeError` for anything else."""
        made = dict(facts)
        for name in ("bandwidth", "products", "copies", "gains"):
            made[name] = tuple(tuple(map(float, p)) for p in made[name])
        for name in ("probe", "follows"):
            made[name] = tuple(map(float, made[name]))
        made["corrections"] = {k: tuple(tuple(map(float, p)) for p in c) for k, c in made["corrections"].items()}
        return Ceilings(**made)


def distance(point: Sequence[float], at: Sequence[float]) -> float:
    """The square of how far a point (place ..., value) is from a place, by logarithms."""
    return sum(math.log(max(a, 1e-12) / max(b, 1e-12)) ** 2 for a, b in zip(point[:-1], at, strict=False))


def nearest(points: Points, at: Sequence[float]) -> float:
    """What points (place ..., value) say at a place: the mean by logarithms, each with its distance to the power -4."""
    weights, values = [], []
    for point in points:
        weights.append(1 / (distance(point, at) + NEAR) ** 2)
        values.append(math.log(point[-1]))
    return math.exp(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)) if points else 1.0


def _numbers(value: Any) -> list[float]:
    if isinstance(value, bool | str):
        return []
    if isinstance(value, int | float):
        return [float(value)]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, Sequence):
        return [n for part in value for n in _numbers(part)]
    return [math.nan]


def _between(axis: Sequence[float], x: float) -> tuple[float, float, float]:
    """The neighbours of x on an axis, and how far it lies between them by logarithm."""
    i = bisect_left(axis, x)
    if i == 0:
        return axis[0], axis[0], 0.0
    if i == len(axis):
        return axis[-1], axis[-1], 0.0
    low, high = axis[i - 1], axis[i]
    return low, high, math.log(x / low) / math.log(high / low)


def _on_curve(curve: Curve, x: float) -> float:
    """The curve at x, interpolated by logarithms, level beyond its ends."""
    low, high, share = _between([p[0] for p in curve], max(x, 1e-12))
    values = dict(curve)
    return math.exp((1 - share) * math.log(values[low]) + share * math.log(values[high]))


def guess_of(backend: Backend, threads: int) -> Ceilings:
    """Ceilings that nobody measured, marked as guesses: what follows from the rates that a backend declares."""
    rates = backend.rates
    flops = rates.flops * (threads if backend.on_processor else 1)
    return Ceilings(
        backend.name,
        flops,
        ((1.0, rates.bytes),),
        flops / 8,
        rates.launch,
        rates.run,
        step=rates.launch,
        threads=threads,
        unified=backend.unified,
        merges=backend.merges,
        compile=rates.compile,
    )
