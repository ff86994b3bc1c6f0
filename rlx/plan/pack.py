"""Offset assignment: greedy packers, then a local search, then an exact one; it stops at the lower bound.

Ordinary graphs end in the first near-linear sweeps, at the bound. What misses it goes on to list placement in several
orders (size and live range: Pisarchyk & Lee, arXiv 2001.03288, and XLA; conflicts: TVM) and to growing the plan from
its lowest floor, repeated with more weight on the buffers that stood too high, and at last to the search of
`rlx.plan.exact`. Work is counted in visits, never in time, so a plan is the same on every run and machine. At the end
buffers move to where others of their size were before, which is in the caches of those who write them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Literal

from rlx.errors import MemoryDeficit, OptionError
from rlx.plan.bound import lower_bound, peak_step
from rlx.plan.check import check
from rlx.plan.greedy import Problem, place, place_floors, settled, sweep, sweep_two_ended
from rlx.plan.interval import DEFAULT_ALIGNMENT, Interval, Placement, round_up, validate
from rlx.records import dataclass, replace

__all__ = ["Search", "pack", "pack_spaces"]

Search = Literal["off", "auto"] | int

_AUTO_VISITS = 70_000  # of an exact search in plain Python: some 0.2 s
_AUTO_VISITS_TO_FIT = 200_000_000  # of a compiled one, where the plan is above its capacity without it: some 2 s
_WORK = 1_000_000  # visited pairs for one unit of effort: some 0.4 s of plain Python
_DENSE_DEGREE = 100  # mean number of conflicts from which array operations beat lists
_MAX_LISTED_PAIRS = 500_000  # conflict lists beyond this cost more memory than floors are worth
_MAX_SETTLED_PAIRS = 50_000  # beyond this looking for familiar places takes longer than it is worth
_HEIGHT_WEIGHT = 0.3  # how much a buffer's rank rises for standing one bound too high


def pack(
    intervals: Sequence[Interval],
    *,
    base_alignment: int = DEFAULT_ALIGNMENT,
    reuse: bool = True,
    capacity: int | None = None,
    enough: int = 0,
    effort: float = 1.0,
    search: Search = "auto",
) -> Placement:
    """Choose an arena offset in bytes for each interval so that no two that are live at one step share a byte.

    Offsets are multiples of `base_alignment` and of the interval's own alignment, and the height of `base_alignment`;
    the arena itself must start at the largest of these alignments. `reuse=False` gives every buffer its own place.
    `effort` scales the greedy work spent on plans that miss the lower bound; 0 runs the first packer only. `search` is
    what an exact search may then spend: "off", "auto" (a fraction of a second; up to 2 s where the plan would take more
    than `capacity`) or a number of visits, some 10**8 of which take a second. For more than a fraction of a second it
    is compiled, once a process, which takes some 0.3 s.
    The first plan that takes `enough` bytes or fewer is taken, where lower ones are of no use.
    Raises `OptionError` for a bad interval, `CompileError` where fixed buffers overlap, and `MemoryDeficit` where the
    plan takes more than `capacity` bytes.
    """
    if effort < 0:
        raise OptionError(f"effort must be 0 or more, got {effort}")
    visits = _visits(search)
    validate(intervals, base_alignment)
    if len({interval.space for interval in intervals}) > 1:
        raise OptionError("intervals of several memory spaces: pack them with pack_spaces")
    bound = lower_bound(intervals, base_alignment=base_alignment)
    _check_fixed(intervals, bound, base_alignment)
    if not reuse:
        placement = _place_apart(intervals, base_alignment)
    else:
        placement = _place_shared(
            intervals, base_alignment, bound, int(effort * _WORK), visits, search == "auto", capacity, enough
        )
    if capacity is not None and placement.height > capacity:
        raise MemoryDeficit(_deficit(intervals, placement, capacity, bound, base_alignment))
    return placement


def pack_spaces(
    intervals: Sequence[Interval],
    *,
    capacities: Mapping[str, int] | None = None,
    base_alignment: int = DEFAULT_ALIGNMENT,
    reuse: bool = True,
    search: Search = "auto",
) -> dict[str, Placement]:
    """One arena for each memory space, packed by `pack` below its capacity in bytes, if it has one.

    A placement has the offsets of the intervals of its space, in their order.
    """
    spaces = list(dict.fromkeys(interval.space for interval in intervals))
    return {
        space: pack(
            [interval for interval in intervals if interval.space == space],
            base_alignment=base_alignment,
            reuse=reuse,
            capacity=(capacities or {}).get(space),
            search=search,
        )
        for space in spaces
    }


def _visits(search: Search) -> int:
    if search == "auto":
        return _AUTO_VISITS
    if search == "off":
        return 0
    if isinstance(search, int) and not isinstance(search, bool) and search >= 0:
        return search
    raise OptionError(f"search={search!r}: expected 'off', 'auto' or a number of visits, 0 or more")


def _check_fixed(intervals: Sequence[Interval], bound: int, base_alignment: int) -> None:
    pinned = [interval for interval in intervals if interval.fixed is not None]
    offsets = [interval.fixed for interval in pinned if interval.fixed is not None]
    rounded = [replace(interval, size=interval.room(base_alignment), guard=0) for interval in pinned]
    check(rounded, offsets, max([bound, *offsets]), base_alignment=base_alignment)


def _deficit(
    intervals: Sequence[Interval], placement: Placement, capacity: int, bound: int, base_alignment: int
) -> str:
    message = (
        f"memory plan: needs {placement.height} bytes, capacity is {capacity}: {placement.height - capacity} short"
    )
    if bound <= capacity:
        return f"{message}; the lower bound of {bound} would fit: give more to the search"
    step = peak_step(intervals, base_alignment=base_alignment)
    return f"{message}; at least {bound} are needed by any plan (peak at step {step}): lower the batch or extents"


def _place_apart(intervals: Sequence[Interval], base_alignment: int) -> Placement:
    """Every free buffer beyond the last one, after the fixed ones."""
    ends = [interval.fixed + interval.room(base_alignment) for interval in intervals if interval.fixed is not None]
    height = max(ends, default=0)
    offsets = []
    for interval in intervals:
        if interval.fixed is not None or interval.size == 0:
            offsets.append(interval.fixed or 0)
            continue
        offset = round_up(height, max(interval.alignment, base_alignment))
        offsets.append(offset)
        height = offset + interval.room(base_alignment)
    return Placement(tuple(offsets), height, "no reuse", height)


def _place_shared(
    intervals: Sequence[Interval],
    base_alignment: int,
    bound: int,
    work: int,
    visits: int,
    plain: bool,
    capacity: int | None,
    enough: int,
) -> Placement:
    offsets = [interval.fixed or 0 for interval in intervals]  # what has no size stays at 0
    numbers = [index for index, interval in enumerate(intervals) if interval.size]
    numbers.sort(key=lambda i: (intervals[i].start, -intervals[i].stop, -intervals[i].size, i))
    if not numbers:
        return Placement(tuple(offsets), bound, "empty", bound)
    chosen = [intervals[i] for i in numbers]
    problem = Problem(
        starts=[interval.start for interval in chosen],
        stops=[interval.stop for interval in chosen],
        sizes=[interval.room(base_alignment) for interval in chosen],
        alignments=[max(interval.alignment, base_alignment) for interval in chosen],
        fixed=[-1 if interval.fixed is None else interval.fixed for interval in chosen],
    )
    best = _best(problem, max(bound, enough), work)
    best = _searched(problem, replace(best, bound=bound), visits, plain, capacity, enough)
    if sum(problem.degrees) // 2 <= _MAX_SETTLED_PAIRS:
        best = replace(best, offsets=tuple(settled(problem, best.offsets)))
    for index, offset in zip(numbers, best.offsets, strict=True):
        offsets[index] = offset
    return Placement(tuple(offsets), max(best.height, bound), best.method, best.bound)


def _searched(
    problem: Problem, greedy: Placement, visits: int, plain: bool, capacity: int | None, enough: int
) -> Placement:
    """The greedy plan, or the lower one that an exact search finds."""
    if greedy.height <= max(greedy.bound, enough) or not visits:
        return greedy
    from rlx.plan.exact import improve, is_searchable

    if not is_searchable(problem, visits):
        return greedy
    found = improve(problem, greedy.height, greedy.bound, visits, wanted=capacity, enough=enough, plain=plain)
    if plain and capacity is not None and found.bound <= capacity < found.height:
        fitting = improve(
            problem, found.height, found.bound, _AUTO_VISITS_TO_FIT, wanted=capacity, enough=max(enough, capacity)
        )
        found = replace(fitting, offsets=fitting.offsets or found.offsets, nodes=found.nodes + fitting.nodes)
    searched = f"exact search, {found.nodes:,} nodes"
    if found.bound >= found.height:
        searched = f"{searched}, proved least"
    if found.offsets is None:
        return replace(greedy, method=f"{greedy.method}; {searched}, none lower found", bound=found.bound)
    return Placement(found.offsets, found.height, searched, found.bound)


@dataclass(frozen=True)
class _Candidate:
    """A packer, what a run of it visits, and the run: offsets lower than the limit it is given, or None."""

    method: str
    work: int
    run: Callable[[int], list[int] | None]


def _best(problem: Problem, bound: int, work: int) -> Placement:
    """The smallest of all candidates that the work pays for; the first one always runs."""
    pairs = sum(problem.degrees) // 2
    best = Placement((), _stacked(problem) + 1, "")
    for candidate in _candidates(problem, bound, pairs):
        if best.offsets and candidate.work > work:
            continue
        offsets = candidate.run(best.height)
        work -= candidate.work if offsets else candidate.work // 4  # None: it gave up early
        best = _smaller(problem, best, offsets, candidate.method)
        if best.offsets and best.height <= bound:
            return best
    if problem.has_fixed or pairs > _MAX_LISTED_PAIRS:
        return best
    return _reweighted(problem, best, bound, rounds=work // _floors_work(problem, pairs))


def _stacked(problem: Problem) -> int:
    """A height that list placement never exceeds, whatever the order."""
    fixed_end = max(offset + size for offset, size in zip(problem.fixed, problem.sizes, strict=True))
    return max(fixed_end, 0) + sum(problem.sizes) + sum(problem.alignments)


def _smaller(problem: Problem, best: Placement, offsets: list[int] | None, method: str) -> Placement:
    if offsets is None:
        return best
    height = max(offset + size for offset, size in zip(offsets, problem.sizes, strict=True))
    return Placement(tuple(offsets), height, method) if height < best.height else best


def _candidates(problem: Problem, bound: int, pairs: int) -> Iterator[_Candidate]:
    sweeps = iter(()) if problem.has_fixed else _sweeps(problem, bound)
    floors = iter(()) if problem.has_fixed or pairs > _MAX_LISTED_PAIRS else _floors(problem, pairs)
    # The first two floors are mostly the best of all: what comes after them then gives up early.
    return chain(islice(sweeps, 3), islice(floors, 2), sweeps, _lists(problem, pairs), floors)


def _sweeps(problem: Problem, bound: int) -> Iterator[_Candidate]:
    work = 8 * len(problem)
    mirrored, order = problem.reversed()

    def back(offsets: list[int] | None) -> list[int] | None:
        if offsets is None:
            return None
        result = [0] * len(order)
        for number, offset in zip(order, offsets, strict=True):
            result[number] = offset
        return result

    yield _Candidate(
        "program order, first fit", work, lambda limit: sweep(problem, best_fit=False, limit=limit, patient=True)
    )
    yield _Candidate("two-ended", work, lambda _: sweep_two_ended(problem, ceiling=bound))
    yield _Candidate("reverse two-ended", work, lambda _: back(sweep_two_ended(mirrored, ceiling=bound)))
    yield _Candidate("program order, best fit", work, lambda limit: sweep(problem, best_fit=True, limit=limit))
    yield _Candidate("reverse order, first fit", work, lambda limit: back(sweep(mirrored, best_fit=False, limit=limit)))
    yield _Candidate("reverse order, best fit", work, lambda limit: back(sweep(mirrored, best_fit=True, limit=limit)))


def _ranks(problem: Problem) -> dict[str, Callable[[int], int]]:
    sizes, degrees, breadths = problem.sizes, problem.degrees, problem.breadths
    largest = max(sizes)
    spans = [stop - start for start, stop in zip(problem.starts, problem.stops, strict=True)]
    return {
        "breadth": lambda i: breadths[i] * (largest + 1) + sizes[i],
        "size": lambda i: sizes[i],
        "size x conflicts": lambda i: sizes[i] * degrees[i],
        "live range": lambda i: spans[i],
        "area": lambda i: sizes[i] * spans[i],
        "conflicts": lambda i: degrees[i],
        "program": lambda i: -i,
    }


def _lists(problem: Problem, pairs: int) -> Iterator[_Candidate]:
    count = len(problem)
    dense = pairs > _DENSE_DEGREE * count
    work = count * (60 + count // 70) if dense else 10 * count + 2 * pairs
    for name, rank in _ranks(problem).items():
        if name == "program" and not problem.has_fixed:
            continue  # the sweeps have done it
        order = sorted(range(count), key=rank, reverse=True)  # stable: ties stay in program order
        for best_fit, fit in ((True, "best fit"), (False, "first fit")):
            yield _Candidate(
                f"{name}, {fit}",
                work,
                lambda limit, order=order, best_fit=best_fit: place(  # type: ignore[misc]
                    problem, order, best_fit=best_fit, dense=dense, limit=limit
                ),
            )


def _floors_work(problem: Problem, pairs: int) -> int:
    return 10 * len(problem) + 2 * pairs


def _floors(problem: Problem, pairs: int) -> Iterator[_Candidate]:
    work, ranks = _floors_work(problem, pairs), _ranks(problem)
    for name in ("area", "breadth", *(name for name in ranks if name not in ("area", "breadth"))):
        rank = ranks[name]
        yield _Candidate(
            f"lowest floor by {name}",
            work,
            lambda limit, rank=rank: place_floors(problem, rank, limit=limit),  # type: ignore[misc]
        )


def _reweighted(problem: Problem, best: Placement, bound: int, *, rounds: int) -> Placement:
    """Lowest floor by conflicts, again and again; buffers that end above the bound rise in rank for the next round."""
    most = max(1, *problem.degrees)
    ranks = [degree / most for degree in problem.degrees]
    for _ in range(rounds):
        offsets = place_floors(problem, ranks.__getitem__, limit=None)
        best = _smaller(problem, best, offsets, "lowest floor, reweighted")
        if offsets is None or best.height <= bound:
            break
        for one, offset in enumerate(offsets):
            excess = offset + problem.sizes[one] - bound
            if excess > 0:
                ranks[one] += _HEIGHT_WEIGHT * excess / bound
    return best
