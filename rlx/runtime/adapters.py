"""The adapters of a compiled graph that `rlx.lora` made room in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.base import TensorSpec
from rlx.errors import DTypeError, NameNotFound, OptionError, ShapeError
from rlx.ir.graph import Array

if TYPE_CHECKING:
    from rlx.runtime.compiled import CompiledGraph

__all__ = ["Adapters"]

# As rlx.passes.lora has them, which would bring the compiler to graphs that were loaded without.
GAIN, A_SUFFIX, B_SUFFIX = "lora.gain", ".lora_a", ".lora_b"


class Adapters(Mapping[str, float]):
    """The adapters by name, with their scales. Each clone has its own, which start as those of its original."""

    def __init__(self, model: CompiledGraph, slots: Mapping[str, int] | None = None) -> None:
        self._model = model
        self._slots = dict(slots or {})  # name -> number of its slot

    def __getitem__(self, name: str) -> float:
        return float(self._gain()[self._slot(name), 0])

    def __contains__(self, name: object) -> bool:
        return name in self._slots

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __repr__(self) -> str:
        return f"<Adapters: {', '.join(f'{name!r} x {scale:g}' for name, scale in self.items()) or 'none'}>"

    def _slot(self, name: str) -> int:
        if name not in self._slots:
            raise NameNotFound(f"there is no adapter {name!r}; there are {', '.join(map(repr, self._slots)) or 'none'}")
        return self._slots[name]

    def _gain(self) -> Array:
        if GAIN not in self._model.states:
            raise OptionError("this graph has no room for adapters: compile rlx.lora(graph, rank=..., slots=...)")
        return self._model.states[GAIN].read()

    @property
    def targets(self) -> tuple[str, ...]:
        """The params that adapters add to."""
        return tuple(name.removesuffix(A_SUFFIX) for name in self._model.states if name.endswith(A_SUFFIX))

    def put(self, name: str, weights: Mapping[str, Any], scale: float = 1.0, *, prefix: str = "") -> None:
        """Puts an adapter into a free slot, or in place of the one of that name.

        `weights` has, for each param that it adds to, `<prefix><param>.lora_a` [r, inputs] and `.lora_b` [outputs, r],
        with r up to the rank of `rlx.lora`; the rest is zero. It may be a `WeightRegistry`. Values are copied. Raises
        `OptionError` where no slot is free, `NameNotFound`, `DTypeError` and `ShapeError`, and then changes nothing.
        """
        gain = self._gain()
        slots, rank = gain.shape
        number = self._slots.get(name, next((n for n in range(slots) if n not in self._slots.values()), None))
        if number is None:
            raise OptionError(f"adapter {name!r}: all {slots} slots are taken ({', '.join(self._slots)}); remove one")
        own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        own = {k: v for k, v in own.items() if k.endswith((A_SUFFIX, B_SUFFIX))} if prefix else own
        known = {f"{target}{suffix}" for target in self.targets for suffix in (A_SUFFIX, B_SUFFIX)}
        for key in own:
            if key not in known:
                raise NameNotFound(f"adapter {name!r}: there is no {key!r}; there are {', '.join(sorted(known))}")
        if not own:
            raise NameNotFound(f"adapter {name!r}: no weights; expected some of {', '.join(sorted(known))}")
        at = slice(number * rank, (number + 1) * rank)
        ready: dict[str, Array] = {}
        for target in self.targets:
            specs = [self._model.states[target + suffix].spec for suffix in (A_SUFFIX, B_SUFFIX)]
            both = [_matrix(own.get(target + s), specs[i], name) for i, s in enumerate((A_SUFFIX, B_SUFFIX))]
            a, b = [self._model.states[spec.name].read() for spec in specs]
            a[:, at], b[at] = 0, 0
            if both[0] is not None and both[1] is not None:
                _check(name, target, both[0], both[1], rank, a.shape[0], b.shape[1])
                used = len(both[0])
                a[:, at.start : at.start + used], b[at.start : at.start + used] = both[0].T, both[1].T
            elif both[0] is not None or both[1] is not None:
                raise NameNotFound(f"adapter {name!r}: {target!r} needs both {A_SUFFIX} and {B_SUFFIX}")
            ready |= {specs[0].name: a, specs[1].name: b}
        gain[number] = _scale(name, scale)
        for state, value in {**ready, GAIN: gain}.items():
            self._model.states[state].write(value)
        self._slots[name] = number

    def set(self, name: str | None, scale: float = 1.0, *, only: bool = False) -> None:
        """Sets the scale of an adapter, 0 for off; with `only`, that of all others to 0. None: of all."""
        gain = self._gain()
        if only or name is None:
            gain[...] = 0
        if name is not None:
            gain[self._slot(name)] = _scale(name, scale)
        self._model.states[GAIN].write(gain)

    def remove(self, name: str) -> None:
        """Takes an adapter out: its slot is free."""
        self.set(name, 0.0)
        del self._slots[name]

    def rows(self, names: Sequence[str | None]) -> Array:
        """The slot numbers (i32) that the input of `rlx.lora(rows=...)` takes: an adapter, or None, for each row."""
        return np.array([-1 if name is None else self._slot(name) for name in names], np.int32)


def _scale(name: str, scale: float) -> float:
    if not isinstance(scale, int | float | np.integer | np.floating) or not math.isfinite(scale):
        raise OptionError(f"adapter {name!r}: scale={scale!r}: expected a finite number")
    return float(scale)


def _matrix(value: Any, spec: TensorSpec, name: str) -> Array | None:
    if value is None:
        return None
    array = np.asarray(value)
    if array.dtype != spec.dtype.numpy:
        raise DTypeError(f"adapter {name!r}: {spec.name} is {spec.dtype}, got {array.dtype}; convert it first")
    if array.ndim != 2:
        raise ShapeError(f"adapter {name!r}: {spec.name}: expected a matrix, got shape {array.shape}")
    return array


def _check(name: str, target: str, a: Array, b: Array, rank: int, inputs: int, outputs: int) -> None:
    if a.shape[1] != inputs or b.shape[0] != outputs or a.shape[0] != b.shape[1] or len(a) > rank:
        raise ShapeError(
            f"adapter {name!r}: {target!r} takes A [r, {inputs}] and B [{outputs}, r] with r up to {rank}, got "
            f"{list(a.shape)} and {list(b.shape)}"
        )
