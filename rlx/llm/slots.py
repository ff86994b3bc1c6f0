"""The cache of a language model: slots, each with the keys and values of one sequence, at a position of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.ir.adapters import ALL_ADAPTERS, NO_ADAPTER
from rlx.ir.graph import Array
from rlx.ir.shape import upper
from rlx.llm.reading import Reading, reading_of
from rlx.models.sampling import Row, Sampler
from rlx.models.sizes import ADAPTER_INPUTS, MOVED, SPARE, WHOLE
from rlx.records import cached_property, dataclass
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.states import State

__all__ = ["Slots", "shared"]

FORK = 16  # tokens that must be in another slot for these to be copied from there


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the beginning."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(n for n in range(most) if one[n] != other[n])


@dataclass(frozen=True)
class Cache:
    """The keys or values of a layer; `moved`: only those that its window sees, which `Slots` moves."""

    state: State
    moved: bool

    @property
    def rows(self) -> int:
        """The positions that each sequence has there."""
        return int(self.state.spec.shape[2])


def caches_of(model: CompiledGraph) -> dict[str, Cache]:
    """The caches by what they hold, k.N or v.N of layer N."""
    parts = [(*name.partition(".")[::2], state) for name, state in model.states.items()]
    return {what: Cache(state, role == MOVED) for role, what, state in parts if role in (WHOLE, MOVED)}


class Slots:
    """Who has which slot, what is in it, and runs of the model over them.

    A run takes tokens of any of the slots; what the others hold stays. Positions of a slot behind its length are of no
    meaning: a run writes rows there for every slot, as many as the longest part has, and so all slots need that room.

    Caches of layers with a window may have room for fewer positions ("rings" of `build_decoder`): they hold those from
    `starts` on, and where a run has no room there, the last `keep` are moved to the beginning first.

    `adapters` are the LoRA adapters that a slot is computed with: their names (at most one), or None for all, with the
    scales of the model.
    """

    def __init__(self, model: CompiledGraph, sampler: Sampler, context: Callable[[], int]) -> None:
        sizes = {spec.name: spec.shape for spec in (*model.inputs, *model.outputs)}
        self.model, self.sampler = model, sampler
        self.count = int(model.states["length"].spec.shape[0])
        self._caches = caches_of(model)
        self.capacity = next((cache.rows for cache in self._caches.values() if not cache.moved), 0) or context()
        # positions of caches that are moved; 0 where none is
        self.ring = next((cache.rows for cache in self._caches.values() if cache.moved), 0)
        self.prefill, self.rows = int(upper(sizes["ids"][1]) or 1), int(upper(sizes["wanted"][0]) or 1)
        self.keep = self.ring - self.prefill
        self.starts = [0] * self.count
        self.filled: list[list[int]] = [[] for _ in range(self.count)]  # the tokens whose keys and values are there
        self.adapters: list[Sequence[str] | None] = [None] * self.count
        self._with_adapters = set(ADAPTER_INPUTS.values()) & sizes.keys()
        self._owners: list[weakref.ref[Any] | None] = [None] * self.count
        self._used = [0] * self.count  # when each was seated last
        self._neutral: dict[int, dict[str, Array]] = {}  # inputs of the sampler where nothing is drawn, by rows

    @cached_property
    def reading(self) -> Reading | None:
        """What a run for one token reads, where the device says so."""
        return reading_of(self.model, [cache.state for cache in self._caches.values()])

    # ---- who has a slot

    def owner(self, slot: int) -> Any:
        """Whose sequence is in a slot; None where nobody goes on with it."""
        found = self._owners[slot]
        owner = None if found is None else found()
        return None if owner is None or owner.finish_reason is not None else owner

    def held_by(self, slot: int) -> Any:
        """Whose text a slot holds, also where it has ended; None where nobody has it any more."""
        found = self._owners[slot]
        return None if found is None else found()

    def seat(
        self, owner: Any, prompt: Sequence[int], kept: Collection[int] = (), adapter: Sequence[str] | None = None
    ) -> tuple[int, int]:
        """Gives a sequence one of the slots that are not `kept`, and how many tokens of its prompt are there already.

        It is, of those that nobody goes on with, the one whose text begins most like the prompt, of equals the one that
        was used least lately; a longer beginning in another slot is copied. The prompt's last token is never there.
        What was computed with other adapters is as if it were not there.
        """
        same = [self._there(slot, self.begins_like(slot, prompt[:-1], adapter)) for slot in range(self.count)]
        open_ = [slot for slot in range(self.count) if slot not in kept]
        free = [slot for slot in open_ if self.owner(slot) is None]
        if not free:
            free = [min(open_, key=lambda s: self._used[s])]
        slot = max(free, key=lambda s: (same[s], not self.filled[s], -self._used[s]))
        source = max(range(self.count), key=lambda s: same[s])
        copied = same[source] >= same[slot] + FORK
        if copied:
            slot = min(free, key=lambda s: (len(self.filled[s]) > 0, self._used[s]))
        self._owners[slot] = None
        if copied:
            self._copy(source, slot, same[source])
        self.cut(slot, same[source] if copied else same[slot])
        self.adapters[slot] = adapter
        self._owners[slot] = None if owner is None else weakref.ref(owner)
        self._used[slot] = max(self._used) + 1
        return slot, len(self.filled[slot])

    def begins_like(self, slot: int, tokens: Sequence[int], adapter: Sequence[str] | None) -> int:
        """How many of the first tokens a slot has in common with a text that is computed with these adapters."""
        return shared(self.filled[slot], list(tokens)) if self.adapters[slot] == adapter else 0

    def take(self, slot: int) -> None:
        """Ends that a generation goes on with a slot."""
        self._owners[slot] = None

    def cut(self, slot: int, length: int) -> int:
        """Forgets what is behind the first tokens of a slot, or all of it; gives how many tokens are left.

        None are where a window sees what its cache has no more.
        """
        length = self._there(slot, min(length, len(self.filled[slot])))
        lengths = [len(tokens) for tokens in self.filled]
        lengths[slot] = length
        if not length:
            self.starts[slot] = 0
        self._write_lengths(lengths)
        del self.filled[slot][length:]
        return length

    def _there(self, slot: int, length: int) -> int:
        """The length, if all that windows see after so many tokens is in the caches; else 0."""
        start = self.starts[slot]
        return length if not start or length - start >= self.keep - SPARE else 0

    def forget(self) -> None:
        """Empties all slots."""
        self._owners = [None] * self.count
        self.starts = [0] * self.count
        self._write_lengths([0] * self.count)
        self.filled = [[] for _ in range(self.count)]

    def _write_lengths(self, lengths: Sequence[int]) -> None:
        self.model.states["length"].write(np.array(lengths, np.int64))
        if self.ring:
            self.model.states["start"].write(np.array(self.starts, np.int64))

    def _copy(self, source: int, target: int, length: int) -> None:
        """Copies the first positions of a slot to another."""
        self.put_rows(target, self.filled[source][:length], self.rows_of(source, length))

    def rows_of(self, slot: int, length: int | None = None) -> dict[str, Array]:
        """What the caches hold of the first positions of a slot; of windows, what these see and some more."""
        length = len(self.filled[slot]) if length is None else length
        start = self.starts[slot]
        near = slice(max(start, length - self.keep) - start, length - start)
        return {
            what: cache.state.read_rows((slot, slice(None), near if cache.moved else slice(length)))
            for what, cache in self._caches.items()
        }

    def row_types(self, length: int, held: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and type of what `rows_of` gives for so many positions, of which caches of windows have `held`."""
        found: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for what, cache in self._caches.items():
            shape, dtype = cache.state.stored
            found[what] = (shape[1], held if cache.moved else length, shape[3]), dtype
        return found

    def held(self, slot: int) -> int:
        """How many positions of a slot `rows_of` gives of the caches of windows."""
        length = len(self.filled[slot])
        return min(length - self.starts[slot], self.keep) if self.ring else length

    def is_enough(self, held: int, length: int) -> bool:
        """Whether so many positions of the caches of windows are what a text of that length can go on from."""
        if not self.ring or length < self.keep - SPARE:
            return held == length
        return self.keep - SPARE <= held <= min(length, self.keep)

    def put_rows(self, slot: int, tokens: Sequence[int], rows: Mapping[str, Array]) -> None:
        """Fills the beginning of a slot with what `rows_of` gave."""
        self.cut(slot, 0)
        for what, cache in self._caches.items():
            cache.state.write_rows((slot, slice(None), slice(rows[what].shape[1])), rows[what])
            if cache.moved:
                self.starts[slot] = len(tokens) - rows[what].shape[1]
        lengths = [len(own) for own in self.filled]
        lengths[slot] = len(tokens)
        self._write_lengths(lengths)
        self.filled[slot] = list(tokens)

    def _move(self, slot: int) -> None:
        """Moves the last positions of the caches of windows to their beginning."""
        tokens = self.filled[slot]
        drop = len(tokens) - self.starts[slot] - self.keep
        try:
            for cache in self._caches.values():
                if cache.moved:
                    rows = cache.state.read_rows((slot, slice(None), slice(drop, drop + self.keep)))
                    cache.state.write_rows((slot, slice(None), slice(self.keep)), rows)
            self.starts[slot] += drop
            self._write_lengths([len(own) for own in self.filled])
        except BaseException:  # some caches have moved: none of it can be used
            self._give_up(slot, 0)
            raise

    def _give_up(self, slot: int, length: int) -> None:
        """Cuts a slot; whoever goes on with it computes the rest anew."""
        tokens, owner = list(self.filled[slot]), self.owner(slot)
        kept = self.cut(slot, length)
        if owner is not None:
            owner.pending = tokens[kept:] + owner.pending

    # ---- runs

    def room(self, slots: Iterable[int]) -> int:
        """The most tokens of a part, of a run over these slots."""
        return min(self.prefill, self.capacity - max(len(self.filled[slot]) for slot in slots))

    def run(
        self,
        parts: Mapping[int, Sequence[int]],
        wanted: Sequence[tuple[int, int]],
        output: str | None,
        rows: Sequence[Row] | None = None,
    ) -> Array:
        """Adds tokens to slots; gives an output for the places `wanted`, (slot, which of its new tokens).

        `rows` say how each is sampled. A run that fails, or is interrupted, leaves all slots as they were.
        """
        made = self.run_for(parts, wanted, [] if output is None else [output], rows)
        return made[0] if made else np.empty(0)

    def run_for(
        self,
        parts: Mapping[int, Sequence[int]],
        wanted: Sequence[tuple[int, int]],
        outputs: Sequence[str],
        rows: Sequence[Row] | None = None,
    ) -> list[Array]:
        """As `run`, for several outputs."""
        most = max(len(part) for part in parts.values())
        for slot, tokens in enumerate(self.filled):
            if slot not in parts and len(tokens) > self.capacity - most:  # it would be written over
                self._give_up(slot, self.capacity - most)
            if self.ring and len(self.filled[slot]) - self.starts[slot] + most > self.ring:
                self._move(slot)
        ids, counts = np.zeros((self.count, most), np.int64), np.zeros(self.count, np.int64)
        for slot, part in parts.items():
            ids[slot, : len(part)], counts[slot] = part, len(part)
        places = np.array([slot * most + at for slot, at in wanted] or [0], np.int64)
        given = {"ids": ids, "counts": counts, "wanted": places, **self._sampling(rows, len(places))}
        if self._with_adapters:
            given |= self._adapter_inputs(places // most)
        try:
            made = self.model.run(given, outputs=list(outputs))
        except BaseException:
            # nothing before the lengths was written to, and these are known
            self._write_lengths([len(tokens) for tokens in self.filled])
            raise
        for slot, part in parts.items():
            self.filled[slot] += part
        return [np.asarray(array) for array in made]

    def _adapter_inputs(self, wanted: Array) -> dict[str, Array]:
        """The adapter of each slot, and of each row that is wanted, of these slots."""
        own = self.model.adapters
        numbers = [
            ALL_ADAPTERS if names is None else own.rows(names)[0] if names else NO_ADAPTER for names in self.adapters
        ]
        each = np.array(numbers, np.int32)
        made = {ADAPTER_INPUTS["ids"]: each, ADAPTER_INPUTS["wanted"]: each[wanted]}
        return {name: array for name, array in made.items() if name in self._with_adapters}

    def _sampling(self, rows: Sequence[Row] | None, count: int) -> dict[str, Array]:
        """The inputs of the sampler."""
        if rows is not None:
            return self.sampler.feeds(rows)
        if count not in self._neutral:
            self._neutral[count] = self.sampler.feeds([Row()] * count)
        return self._neutral[count]
