"""The memory estimate: parts, peaks, and the questions that are asked of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rlx.errors import MemoryDeficit, OptionError
from rlx.options import parse_bytes
from rlx.records import dataclass, field, replace
from rlx.units import bytes_text

if TYPE_CHECKING:
    from rlx.estimate.experts import ExpertPlan, ExpertTotals

__all__ = ["PARTS", "Axis", "MemoryEstimate", "Remedy", "deficit_details", "remedy_lines"]

PARTS = ("weight", "activation", "input", "output", "state", "workspace", "code", "overhead")
_LATER = ("activation", "output", "workspace")  # parts that are not there yet while weights are loaded
UNLIMITED = 1 << 30  # where a search over an axis without a bound ends


@dataclass(frozen=True)
class Remedy:
    """A change that makes a model smaller: what to do, the bytes it takes off the peak, and whether that is enough."""

    action: str
    saves: int
    fits: bool


@dataclass(frozen=True)
class Axis:
    """A size that can be varied: `at(n)` is the estimate with it, from `low` to `high` in steps of `step`."""

    low: int
    high: int | None
    step: int
    current: int
    at: Callable[[int], MemoryEstimate]


@dataclass(frozen=True)
class MemoryEstimate:
    """What a model takes in memory, in bytes, known before a weight is read.

    The eight parts add up to the running peak. `weight_bytes` is what lies in memory during a run: weights in the form
    that kernels read them (`packed_weight_bytes` of them made by packing, `mapped_weight_bytes` in pages of the model's
    file), and constants; `stored_weight_bytes` is their size in the file. `activation_bytes` is the planner's arena,
    outputs among it; `output_bytes` the copies that `run` makes of them. `loading_copy_bytes` is there only while
    weights are loaded: copies that are dropped once they are packed. `file_bytes` are further pages of the file that
    loading touches and the system can drop at any time: they are in no sum, nor are `address_bytes`, which the device
    maps and never fills: only a limit on the address space counts them. `held_weight_bytes` are weights that a registry
    holds already. `source_bytes` of the code are there only where it is compiled, not where it comes from the cache,
    and there `cached_overhead_bytes` are what the device takes. `compiler_bytes` are those of the device that go once
    the code is made. `import_bytes` are what importing a file, or bringing
    the compiler into the process, takes in passing, before anything is compiled. A process has the overhead once,
    however many models it runs: a budget is for
    the model's `own` bytes, which are without it. `certainty` says of each part "exact",
    "bounded" (no more than that), "calibrated", "guessed", or "forecast" for what was not planned: a model that can't
    be run yet, or one of which some layers stand for others.
    """

    model: str
    device: str
    weight_bytes: int = 0
    activation_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    state_bytes: int = 0
    workspace_bytes: int = 0
    code_bytes: int = 0
    overhead_bytes: int = 0
    certainty: Mapping[str, str] = field(default_factory=dict)
    stored_weight_bytes: int = 0
    packed_weight_bytes: int = 0
    constant_bytes: int = 0
    mapped_weight_bytes: int = 0
    held_weight_bytes: int = 0
    held_weights: tuple[str, ...] = ()
    loading_copy_bytes: int = 0
    file_bytes: int = 0
    address_bytes: int = 0
    source_bytes: int = 0
    import_bytes: int = 0
    cached_overhead_bytes: int = 0
    compiler_bytes: int = 0
    dims: Mapping[str, int] = field(default_factory=dict)
    kv_bytes_per_token: int = 0
    kv_dtype: str | None = None
    bucket_peaks: Mapping[int, int] = field(default_factory=dict)
    experts: ExpertTotals | None = None
    notes: tuple[str, ...] = ()
    axes: Mapping[str, Axis] = field(default_factory=dict, repr=False, compare=False)
    opened: Callable[[], Mapping[str, Axis]] | None = field(default=None, repr=False, compare=False)  # of fixed dims
    choices: Callable[[], Iterable[tuple[str, MemoryEstimate]]] | None = field(default=None, repr=False, compare=False)

    # ---- sizes

    @property
    def parts(self) -> dict[str, int]:
        """The eight parts by name."""
        return {name: getattr(self, f"{name}_bytes") for name in PARTS}

    @property
    def running_peak_bytes(self) -> int:
        """The most while running: the sum of the parts."""
        return sum(self.parts.values())

    @property
    def loading_peak_bytes(self) -> int:
        """The most while weights are loaded and packed; the arena is not there yet."""
        later = sum(self.parts[name] for name in _LATER)
        return self.running_peak_bytes - later + self.loading_copy_bytes

    @property
    def compiling_peak_bytes(self) -> int:
        """The most while importing and compiling: before weights are loaded."""
        made = max(self.code_bytes + self.compiler_bytes, self.import_bytes)
        return self.overhead_bytes + made + self.constant_bytes

    @property
    def peaks(self) -> dict[str, int]:
        """The three peaks by name: "loading", "compiling" and "running"."""
        return {
            "loading": self.loading_peak_bytes,
            "compiling": self.compiling_peak_bytes,
            "running": self.running_peak_bytes,
        }

    @property
    def peak_bytes(self) -> int:
        """The largest of the three peaks."""
        return max(self.peaks.values())

    @property
    def own(self) -> MemoryEstimate:
        """The same without what the device takes by itself: what is compared with a budget, here and by `rlx.load`."""
        return replace(self, overhead_bytes=0, cached_overhead_bytes=0, import_bytes=0, compiler_bytes=0)

    @property
    def cached_peak_bytes(self) -> int:
        """The largest peak where the code and the packed weights come from the cache: nothing is compiled or packed."""
        compiled = self.overhead_bytes + self.source_bytes
        return self.running_peak_bytes - compiled + self.cached_overhead_bytes

    @property
    def parts_at_peak(self) -> dict[str, int]:
        """The eight parts, with the copies of loading where these make the peak."""
        parts = self.parts
        if self.peak_bytes > self.running_peak_bytes:
            parts["loading copy"] = self.loading_copy_bytes
        return parts

    def without_experts(self, nbytes: int) -> MemoryEstimate:
        """The same with that many bytes of packed experts not in memory."""
        return replace(
            self, weight_bytes=self.weight_bytes - nbytes, packed_weight_bytes=self.packed_weight_bytes - nbytes
        )

    # ---- questions

    def fits(self, budget: int | str) -> bool:
        """Whether the peak of its `own` bytes is at most the budget (bytes, or a text such as "8GiB")."""
        return self.own.peak_bytes <= parse_bytes(budget)

    def require(self, budget: int | str) -> MemoryEstimate:
        """This estimate if it fits; else raises `MemoryDeficit` with the parts, what is missing, and remedies."""
        deficit = self.deficit(budget)
        if deficit is not None:
            raise deficit
        return self

    def deficit(self, budget: int | str) -> MemoryDeficit | None:
        """The `MemoryDeficit` that `require` would raise, None if it fits."""
        allowed, own = parse_bytes(budget), self.own
        if own.peak_bytes <= allowed:
            return None
        remedies, parts = own.remedies(allowed), own.parts_at_peak
        return MemoryDeficit(
            deficit_text(own, allowed, parts, remedies),
            budget_bytes=allowed,
            peak_bytes=own.peak_bytes,
            parts=parts,
            remedies=remedies,
            estimate=own,
        )

    def max_batch(self, budget: int | str, dim: str | None = None) -> int:
        """The largest batch whose peak is within the budget, 0 if none is; `dim` names it where its name isn't usual.

        Raises `OptionError` if there is no such dim.
        """
        return self._largest(self._axis("batch", dim, ("batch", "batch_size", "n", "N", "B")), parse_bytes(budget))

    def max_context(self, budget: int | str, dim: str | None = None) -> int:
        """The longest context (of an LLM) or sequence whose peak is within the budget, 0 if none is; else as above."""
        names = ("context", "seq", "sequence", "seq_len", "sequence_length", "length", "T")
        return self._largest(self._axis("context", dim, names), parse_bytes(budget))

    def _axis(self, what: str, dim: str | None, names: tuple[str, ...]) -> Axis:
        wanted = names if dim is None else (dim,)
        for name in wanted:
            if name in self.axes:
                return self.axes[name]
        known = ", ".join(map(repr, self.axes)) or "none"
        raise OptionError(f"max_{what}: there is no dim called {' or '.join(map(repr, wanted))}; free are {known}")

    def _largest(self, axis: Axis, budget: int) -> int:
        """The largest size that fits, by bisection: what a size takes never shrinks as it grows."""
        first = -(-axis.low // axis.step)
        if axis.at(first * axis.step).own.peak_bytes > budget:
            return 0
        good, bad = first, None if axis.high is None else axis.high // axis.step + 1
        while bad is None:
            trial = max(2 * good, good + 1)
            if trial * axis.step > UNLIMITED:
                bad = UNLIMITED // axis.step + 1
            elif axis.at(trial * axis.step).own.peak_bytes <= budget:
                good = trial
            else:
                bad = trial
        while bad - good > 1:
            trial = (good + bad) // 2
            if axis.at(trial * axis.step).own.peak_bytes <= budget:
                good = trial
            else:
                bad = trial
        return good * axis.step

    def remedies(self, budget: int | str) -> list[Remedy]:
        """What would make it smaller, each with the bytes it saves; those that are enough come first."""
        allowed = parse_bytes(budget)
        found = []
        for name, axis in {**self.axes, **(self.opened() if self.opened is not None else {})}.items():
            if axis.current <= axis.low:
                continue
            size = self._largest(axis, allowed)
            lowest = -(-axis.low // axis.step) * axis.step
            made = axis.at(size or lowest)
            found.append((f"{name} at most {size}" if size else f"{name} {lowest}, the lowest", made))
        if self.choices is not None:
            found += self.choices()
        others: list[Remedy] = []
        uncopied = max(self.running_peak_bytes, self.loading_peak_bytes - self.loading_copy_bytes)
        if self.peak_bytes > max(uncopied, self.compiling_peak_bytes):
            text = "no packing copy: weights aligned in a file that can be mapped"
            others.append(Remedy(text, self.peak_bytes - uncopied, uncopied - self.overhead_bytes <= allowed))
        if self.experts is not None:
            others += self._offloaded(allowed)
        before = self.own.peak_bytes
        made_of = [Remedy(t, before - e.own.peak_bytes, e.own.peak_bytes <= allowed) for t, e in found]
        useful = [r for r in (*made_of, *others) if r.saves > 0]
        return sorted(useful, key=lambda r: (not r.fits, -r.saves))

    def _offloaded(self, allowed: int) -> list[Remedy]:
        try:
            plan = self.offload(allowed)
        except MemoryDeficit:
            return []
        counts = sorted(set(plan.resident))
        shown = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        text = f"{shown} of {max(plan.totals.experts)} experts of each layer resident, the others offloaded"
        return [Remedy(text, plan.all_resident_bytes - plan.resident_bytes, True)]

    def offload(
        self,
        budget: int | str,
        *,
        reserve: float = 0.0,
        cap: int | None = None,
        layer_budgets: Iterable[int | str] | None = None,
    ) -> ExpertPlan:
        """How many experts of each MoE layer can be resident; see `rlx.estimate.experts.place_experts`."""
        if self.experts is None:
            raise OptionError(f"{self.model}: has no experts to offload")
        from rlx.estimate.experts import place_experts

        return place_experts(
            self.own, self.experts, budget=budget, reserve=reserve, cap=cap, layer_budgets=layer_budgets
        )

    # ---- shown

    def to_table(self) -> str:
        """The parts and peaks as a part of a page; what is guessed says so."""
        from rlx import html

        largest = max([*self.parts.values(), 1])
        rows = []
        for name, size in self.parts.items():
            bar = "▬" * round(20 * size / largest) if size else ""
            rows.append((name, bytes_text(size), f"{size:,} B", self.certainty.get(name, "exact"), bar))
        parts = html.table(rows, ("part", "size", "", "known as", ""), right=(1, 2))
        peaks = {f"{name} peak": size for name, size in self.peaks.items()}
        peaks |= {"without the device's own": self.own.peak_bytes} if self.overhead_bytes else {}
        peaks |= {
            "weights in the file": self.stored_weight_bytes,
            "packed weights": self.packed_weight_bytes,
            "mapped weights": self.mapped_weight_bytes,
        }
        sums = html.table(
            [(n, bytes_text(b), f"{b:,} B") for n, b in peaks.items() if b], ("sum", "size", ""), right=(1, 2)
        )
        notes = "".join(f"<p class=soft>Note: {html.text(note)}</p>" for note in self.notes)
        said = "exact, bounded (no more than that), calibrated, guessed, or forecast for a model that can't be run yet"
        return f"{parts}<p class=soft>Known as: {said}.</p>{sums}{notes}"

    def _repr_html_(self) -> str:
        from rlx import html

        at = ", ".join(f"{name} = {size}" for name, size in self.dims.items())
        where = html.text(f"{self.model} on {self.device}" + (f" at {at}" if at else ""))
        return html.fragment(f"<p><b>Memory estimate</b> {where}</p>{self.to_table()}")

    def __str__(self) -> str:
        at = ", ".join(f"{name} = {size}" for name, size in self.dims.items())
        lines = [f"{self.model} on {self.device}" + (f" at {at}" if at else "")]
        lines += part_lines(self.parts, self.certainty)
        peaks = {f"{name} peak": size for name, size in self.peaks.items()}
        if self.cached_overhead_bytes:
            peaks["peak from cache"] = self.cached_peak_bytes
        if self.overhead_bytes:
            peaks["without overhead"] = self.own.peak_bytes
        lines += [f"  {name:18}{bytes_text(size):>12}  {size:,} B" for name, size in peaks.items()]
        if self.kv_bytes_per_token:
            lines.append(f"  KV cache in {self.kv_dtype}: {self.kv_bytes_per_token:,} B per token and sequence")
        lines.append(
            f"  weights: {bytes_text(self.stored_weight_bytes)} stored, {bytes_text(self.packed_weight_bytes)} packed, "
            f"{bytes_text(self.mapped_weight_bytes)} in mapped pages of the file"
        )
        if self.held_weight_bytes:
            lines.append(f"  held already: {bytes_text(self.held_weight_bytes)} in {len(self.held_weights)} weights")
        if self.experts is not None:
            lines.append(f"  experts: {self.experts}")
        if self.bucket_peaks:
            shown = ", ".join(f"{tokens}: {bytes_text(size)}" for tokens, size in self.bucket_peaks.items())
            lines.append(f"  running peak by tokens per step: {shown}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """All figures as JSON values."""
        parts = {
            name: {"bytes": size, "certainty": self.certainty.get(name, "exact")} for name, size in self.parts.items()
        }
        extra = (
            "stored_weight_bytes", "packed_weight_bytes", "constant_bytes", "mapped_weight_bytes", "held_weight_bytes",
            "loading_copy_bytes", "file_bytes", "address_bytes", "source_bytes", "import_bytes",
            "cached_overhead_bytes", "compiler_bytes", "kv_bytes_per_token", "kv_dtype",
        )  # fmt: skip
        return {
            "model": self.model,
            "device": self.device,
            "dims": dict(self.dims),
            "parts": parts,
            "peaks": self.peaks,
            "peak_bytes": self.peak_bytes,
            "own_peak_bytes": self.own.peak_bytes,
            "cached_peak_bytes": self.cached_peak_bytes,
            **{name: getattr(self, name) for name in extra},
            "held_weights": list(self.held_weights),
            "bucket_peaks": {str(tokens): size for tokens, size in self.bucket_peaks.items()},
            "experts": None if self.experts is None else self.experts.to_dict(),
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1)


def part_lines(parts: Mapping[str, int], certainty: Mapping[str, str]) -> list[str]:
    """A line for each part."""
    return [
        f"  {name:18}{bytes_text(size):>12}  {size:,} B {certainty.get(name, '')}".rstrip()
        for name, size in parts.items()
    ]


def deficit_text(estimate: MemoryEstimate, budget: int, parts: Mapping[str, int], remedies: Iterable[Remedy]) -> str:
    """Peak, budget, missing, each part, and the remedies."""
    peak = estimate.peak_bytes
    which = next(name for name, size in estimate.peaks.items() if size == peak)
    rows = {"peak": peak, "budget": budget, "missing": peak - budget}
    lines = [
        f"{estimate.model!r} does not fit in memory on {estimate.device}: while {which} it takes more than allowed"
    ]
    lines += [f"  {name:18}{bytes_text(size):>12}  {size:,} B" for name, size in rows.items()]
    return "\n".join([*lines, deficit_details(estimate, parts, remedies)])


def deficit_details(estimate: MemoryEstimate, parts: Mapping[str, int], remedies: Iterable[Remedy]) -> str:
    """Each part, and the remedies."""
    return "\n".join(["parts", *part_lines(parts, estimate.certainty), *remedy_lines(remedies)])


def remedy_lines(remedies: Iterable[Remedy]) -> list[str]:
    """The remedies with their heading, one a line."""
    shown = [
        f"  saves {bytes_text(r.saves):>12}  {r.action}{'' if r.fits else ' (not enough alone)'}" for r in remedies
    ]
    return ["remedies", *(shown or ["  raise the budget, or take a smaller model: no size of this one can be less"])]
