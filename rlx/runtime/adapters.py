"""The adapters of a compiled graph that `rlx.lora` made room in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.base import TensorSpec
from rlx.boundary import bounded_class
from rlx.errors import DTypeError, ExecutionError, NameNotFound, OptionError, ShapeError, no_such
from rlx.ir.adapters import A_SUFFIX, B_SUFFIX, GAIN, NO_ADAPTER
from rlx.ir.graph import Array, refuse_masked
from rlx.ir.shape import Size
from rlx.lazy_imports import sha256

if TYPE_CHECKING:
    from rlx.runtime.compiled import CompiledGraph

__all__ = ["Adapters"]


Pair = tuple[Array, Array]  # A [r, inputs], B [outputs, r]


@bounded_class(ExecutionError)
class Adapters(Mapping[str, float]):
    """The adapters by name, with their scales. Each clone has its own, which start as those of its original."""

    def __init__(self, model: CompiledGraph, other: Adapters | None = None, *, fresh: bool = False) -> None:
        self._model = model
        self._slots: dict[str, int] = {} if other is None or fresh else dict(other._slots)  # name -> number of its slot
        # What lies in each slot, by target; also in one that was freed: its scale is 0 until it is put anew.
        self._held: dict[int, dict[str, Pair]] = {} if other is None else dict(other._held)
        self._digests: dict[int, str] = {} if other is None else dict(other._digests)  # of slots that were asked for

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
        if not isinstance(name, str) or name not in self._slots:
            raise no_such("adapter", name, self._slots)
        return self._slots[name]

    def _gain(self) -> Array:
        if GAIN not in self._model.states:
            raise OptionError("this graph has no room for adapters: compile rlx.lora(graph, rank=..., slots=...)")
        gain: Array = np.asarray(self._model.states[GAIN].read())
        return gain

    @property
    def targets(self) -> tuple[str, ...]:
        """The params that adapters add to."""
        names = [spec.name for spec in self._model.params]
        return tuple(name.removesuffix(A_SUFFIX) for name in names if name.endswith(A_SUFFIX))

    def put(self, name: str, weights: Mapping[str, Any], scale: float = 1.0, *, prefix: str = "") -> None:
        """Puts an adapter into a free slot, or in place of the one of that name; its weights are packed once, now.

        `weights` has, for each param that it adds to, `<prefix><param>.lora_a` [r, inputs] and `.lora_b` [outputs, r],
        with r up to the rank of `rlx.lora`; the rest is zero. It may be a `WeightRegistry`. Values are copied. Raises
        `OptionError` where no slot is free or a B isn't finite, `NameNotFound`, `DTypeError` and `ShapeError`, and
        then changes nothing.
        """
        gain = self._gain()
        slots, rank = gain.shape
        number = self._slots.get(name, next((n for n in range(slots) if n not in self._slots.values()), None))
        if number is None:
            raise OptionError(f"adapter {name!r}: all {slots} slots are taken ({', '.join(self._slots)}); remove one")
        own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        own = {k: v for k, v in own.items() if k.endswith((A_SUFFIX, B_SUFFIX))} if prefix else own
        specs = {s.name: s for s in self._model.params if s.name.endswith((A_SUFFIX, B_SUFFIX))}
        for key in own:
            if key not in specs:
                raise NameNotFound(f"adapter {name!r}: there is no {key!r}; there are {', '.join(sorted(specs))}")
        if not own:
            raise NameNotFound(f"adapter {name!r}: no weights; expected some of {', '.join(sorted(specs))}")
        pairs: dict[str, Pair] = {}
        for target in self.targets:
            keys = (target + A_SUFFIX, target + B_SUFFIX)
            a, b = (_matrix(own.get(key), specs[key], name) for key in keys)
            if a is not None and b is not None:
                inputs, outputs = (specs[key].shape[axis] for key, axis in zip(keys, (0, 1), strict=True))
                _check(name, target, a, b, rank, inputs, outputs)
                pairs[target] = a, b
            elif a is not None or b is not None:
                raise NameNotFound(f"adapter {name!r}: {target!r} needs both {A_SUFFIX} and {B_SUFFIX}")
        factor = _scale(name, scale)
        touched = dict.fromkeys([*pairs, *self._held.get(number, {})])
        held = {**self._held, number: pairs}
        before = self._params(touched, self._held)
        self._model.set_params(self._params(touched, held))
        gain[number] = factor
        try:
            self._model.states[GAIN].write(gain)
        except BaseException:
            self._model.set_params(before)
            raise
        self._held, self._slots[name] = held, number
        self._digests.pop(number, None)

    def _params(self, targets: Iterable[str], held: Mapping[int, Mapping[str, Pair]]) -> dict[str, Array]:
        """The params of some targets with all slots in them."""
        return {key: value for target in targets for key, value in self._whole(target, held).items()}

    def _whole(self, target: str, held: Mapping[int, Mapping[str, Pair]]) -> dict[str, Array]:
        """The two params of a target with all slots in them."""
        rank = self._gain().shape[1]
        specs = {s.name: s for s in self._model.params}
        a, b = (
            np.zeros([int(n) for n in specs[target + suffix].shape], specs[target + suffix].dtype.numpy)
            for suffix in (A_SUFFIX, B_SUFFIX)
        )
        for number, pairs in held.items():
            if target in pairs:
                down, up = pairs[target]
                at = slice(number * rank, number * rank + len(down))
                a[:, at], b[at] = down.T, up.T
        return {target + A_SUFFIX: a, target + B_SUFFIX: b}

    def value_of(self, param: str) -> Array | None:
        """The value of one of the params that adapters lie in, None for any other."""
        for suffix in (A_SUFFIX, B_SUFFIX):
            target = param.removesuffix(suffix)
            if target != param and target in self.targets and GAIN in self._model.states:
                return self._whole(target, self._held)[param]
        return None

    def table(self) -> list[tuple[str, int, float, dict[str, Pair]]]:
        """(name, slot, scale, weights by target) of each adapter: what `restore` takes."""
        return [(name, number, self[name], dict(self._held.get(number, {}))) for name, number in self._slots.items()]

    def digest(self, name: str) -> str:
        """By what the weights of an adapter are known (SHA-256); computed once."""
        number = self._slot(name)
        if number not in self._digests:
            sha = sha256()
            for target, arrays in sorted(self._held.get(number, {}).items()):
                sha.update(target.encode())
                for array in arrays:
                    sha.update(array.tobytes())
            self._digests[number] = sha.hexdigest()
        return self._digests[number]

    def restore(self, table: Sequence[tuple[str, int, float, dict[str, Pair]]]) -> None:
        """Makes the adapters those of the table, whose weights are in the params already."""
        if not table:
            return
        gain = self._gain()
        slots, rank = gain.shape
        specs = {s.name: s for s in self._model.params}
        if len({name for name, *_ in table}) < len(table) or len({number for _, number, *_ in table}) < len(table):
            raise OptionError("adapters: a name or a slot is there twice")
        for name, number, scale, pairs in table:
            if not 0 <= number < slots:
                raise OptionError(f"adapter {name!r}: its slot {number} is beyond {slots}")
            for target, (a, b) in pairs.items():
                down, up = specs[target + A_SUFFIX], specs[target + B_SUFFIX]
                _check(name, target, a, b, rank, down.shape[0], up.shape[1])
                if (a.dtype, b.dtype) != (down.dtype.numpy, up.dtype.numpy):
                    raise DTypeError(
                        f"adapter {name!r}: {target!r}: expected {down.dtype}, got {a.dtype} and {b.dtype}"
                    )
            gain[number] = _scale(name, scale)
        self._model.states[GAIN].write(gain)
        for name, number, _, pairs in table:
            self._slots[name], self._held[number] = number, pairs
            self._digests.pop(number, None)

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
        return np.array([NO_ADAPTER if name is None else self._slot(name) for name in names], np.int32)


def _scale(name: str, scale: float) -> float:
    if not isinstance(scale, int | float | np.integer | np.floating) or not math.isfinite(scale):
        raise OptionError(f"adapter {name!r}: scale={scale!r}: expected a finite number")
    return float(scale)


def _matrix(value: Any, spec: TensorSpec, name: str) -> Array | None:
    if value is None:
        return None
    refuse_masked(f"adapter {name!r}: {spec.name}", value)
    array = np.array(value)
    if array.dtype != spec.dtype.numpy:
        raise DTypeError(f"adapter {name!r}: {spec.name} is {spec.dtype}, got {array.dtype}; convert it first")
    if array.ndim != 2:
        raise ShapeError(f"adapter {name!r}: {spec.name}: expected a matrix, got shape {array.shape}")
    return array


def _check(name: str, target: str, a: Array, b: Array, rank: int, inputs: Size, outputs: Size) -> None:
    if a.shape[1] != inputs or b.shape[0] != outputs or a.shape[0] != b.shape[1] or len(a) > rank:
        raise ShapeError(
            f"adapter {name!r}: {target!r} takes A [r, {inputs}] and B [{outputs}, r] with r up to {rank}, got "
            f"{list(a.shape)} and {list(b.shape)}"
        )
    if not np.isfinite(b).all():
        raise OptionError(
            f"adapter {name!r}: {target}{B_SUFFIX} has NaN or infinities: times 0, they would reach rows without it"
        )
