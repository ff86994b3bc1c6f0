"""What became of a model: each tensor, its bytes and errors, and how far the outputs moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rlx.records import dataclass, field
from rlx.units import bytes_text

__all__ = ["OutputError", "Quantized", "TensorResult"]


@dataclass(frozen=True)
class TensorResult:
    """One tensor. `before` and `after` name types; `reason` says why it has the one that it has.

    `rms` is sqrt(sum of squared differences / sum of squares) over its elements, `worst` the largest difference; both
    are None where nothing was rounded, or nothing was written yet.
    """

    name: str
    shape: tuple[int, ...]
    before: str
    after: str
    bytes_before: int
    bytes_after: int
    reason: str = ""
    rms: float | None = None
    worst: float | None = None


@dataclass(frozen=True)
class OutputError:
    """An output of the new model beside that of the old one, over all given inputs.

    `cosine` is the least over the inputs, `rms` the relative rms difference over all, `top1` the share of rows (along
    the last axis) whose largest element is at the same place, None for an output of a single column.
    """

    name: str
    cosine: float
    rms: float
    top1: float | None
    rows: int

    def __str__(self) -> str:
        top = "" if self.top1 is None else f", top-1 agrees in {self.top1:.2%} of {self.rows} rows"
        return f"{self.name}: cosine {self.cosine:.6f}, rms {self.rms:.3g}{top}"


@dataclass(frozen=True)
class Quantized:
    """What `rlx.quantize` did, or would do: `bytes_before` and `bytes_after` are the sums over `tensors`.

    `written` is the size of the new file, 0 of a dry run.
    """

    source: str
    target: str
    type: str
    tensors: Sequence[TensorResult]
    bytes_before: int
    bytes_after: int
    written: int = 0
    outputs: Sequence[OutputError] = ()
    activations: int = 0
    notes: Sequence[str] = field(default_factory=tuple)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, *, every: bool = False) -> list[str]:
        """The report as text; `every` tensor, or the ten with the largest errors."""
        share = f" ({self.bytes_after / self.bytes_before:.0%})" if self.bytes_before else ""
        made = [f"{self.source} -> {self.target or 'nothing written'} as {self.type}"]
        made.append(f"weights   {bytes_text(self.bytes_before)} -> {bytes_text(self.bytes_after)}{share}")
        if self.activations:
            made.append(f"rounded   {self.activations} activations")
        counts = Counter((t.after, t.reason) for t in self.tensors)
        for (after, reason), count in sorted(counts.items(), key=lambda item: -item[1]):
            made.append(f"{count:>9} {after}{f': {reason}' if reason else ''}")
        rounded = [t for t in self.tensors if t.rms is not None]
        shown = rounded if every else sorted(rounded, key=lambda t: -(t.rms or 0))[:10]
        for t in shown:
            made.append(
                f"rounding  {t.name}: relative rms {t.rms:.3g}, largest {t.worst:.3g} ({t.before} -> {t.after})"
            )
        if len(shown) < len(rounded):
            made.append(f"          and {len(rounded) - len(shown)} tensors with smaller errors")
        made += [f"output    {one}" for one in self.outputs]
        made += [f"note      {note}" for note in self.notes]
        return made
