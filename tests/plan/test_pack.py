"""The portfolio packs validly, never above a textbook greedy, and at the lower bound on the shapes that graphs have."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.errors import CompileError, MemoryDeficit, OptionError
from rlx.plan.bound import lower_bound
from rlx.plan.check import check
from rlx.plan.greedy import Problem, place, sweep
from rlx.plan.interval import Interval, Placement
from rlx.plan.pack import pack


def intervals_of(rows: Sequence[tuple[int, int, int]], alignment: int = 1) -> list[Interval]:
    return [Interval(f"b{i}", start, stop, size, alignment) for i, (start, stop, size) in enumerate(rows)]


@st.composite
def interval_sets(draw: st.DrawFn, *, fixed: bool = False) -> list[Interval]:
    result: list[Interval] = []
    for index in range(draw(st.integers(0, 24))):
        start = draw(st.integers(0, 12))
        interval = Interval(
            f"b{index}",
            start,
            start + draw(st.integers(1, 8)),
            draw(st.integers(0, 300)),
            draw(st.sampled_from([1, 64, 256])),
        )
        result.append(interval)
    if fixed and result:  # disjoint by construction: each beyond the last
        offset = 0
        for index in draw(st.sets(st.integers(0, len(result) - 1), max_size=4)):
            old = result[index]
            result[index] = Interval(old.name, old.start, old.stop, old.size, old.alignment, offset)
            offset += 512 * draw(st.integers(1, 3))
    return result


def checked(intervals: Sequence[Interval], *, base_alignment: int = 64, effort: float = 0.05) -> Placement:
    placement = pack(intervals, base_alignment=base_alignment, effort=effort)
    check(intervals, placement.offsets, placement.height, base_alignment=base_alignment)
    assert placement.height >= lower_bound(intervals, base_alignment=base_alignment)
    assert placement.height % base_alignment == 0
    return placement


def textbook_greedy(intervals: Sequence[Interval], order: Sequence[int]) -> int:
    """Height of first fit in the given order, by trying every place where a block may sit."""
    placed: list[tuple[Interval, int]] = []
    for index in order:
        one = intervals[index]
        near = [(o, o + b.size) for b, o in placed if b.start < one.stop and one.start < b.stop]
        spots = sorted({0} | {high for _, high in near})
        offset = next(s for s in spots if all(s + one.size <= low or high <= s for low, high in near))
        placed.append((one, offset))
    return max((o + b.size for b, o in placed), default=0)


@given(interval_sets())
@settings(max_examples=150, deadline=None)
def test_random_sets_are_valid_and_not_below_the_bound(intervals: list[Interval]) -> None:
    checked(intervals)


@given(interval_sets(fixed=True))
@settings(max_examples=150, deadline=None)
def test_fixed_buffers_stay_and_the_rest_packs_around_them(intervals: list[Interval]) -> None:
    placement = checked(intervals)
    for interval, offset in zip(intervals, placement.offsets, strict=True):
        assert interval.fixed is None or offset == interval.fixed


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(1, 8), st.integers(1, 40)), min_size=1, max_size=24))
@settings(max_examples=150, deadline=None)
def test_never_above_a_single_greedy(rows: list[tuple[int, int, int]]) -> None:
    """Each textbook order, computed here by brute force, is an upper bound of the portfolio."""
    intervals = sorted(
        intervals_of([(start, start + span, size) for start, span, size in rows]),
        key=lambda b: (b.start, -b.stop, -b.size),
    )
    height = checked(intervals, base_alignment=1, effort=1).height
    count = range(len(intervals))
    for key in (
        lambda i: -intervals[i].size,
        lambda i: intervals[i].start - intervals[i].stop,
        lambda i: intervals[i].size * (intervals[i].start - intervals[i].stop),
        lambda i: i,
    ):
        assert height <= textbook_greedy(intervals, sorted(count, key=key))


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(1, 8), st.integers(1, 40)), min_size=1, max_size=24))
@settings(max_examples=150, deadline=None)
def test_list_sweep_and_array_implementations_agree(rows: list[tuple[int, int, int]]) -> None:
    """A sweep is list placement in program order, and the array path gives the offsets of the list path."""
    rows = sorted(((start, start + span, size) for start, span, size in rows), key=lambda r: (r[0], -r[1], -r[2]))
    starts, stops, sizes = (list(column) for column in zip(*rows, strict=True))
    problem = Problem(starts, stops, sizes, [4] * len(rows), [-1] * len(rows))
    order = list(range(len(rows)))
    for best_fit in (True, False):
        listed = place(problem, order, best_fit=best_fit, dense=False, limit=10**6)
        assert listed == place(problem, order, best_fit=best_fit, dense=True, limit=10**6)
        assert listed == sweep(problem, best_fit=best_fit, limit=10**6, patient=True)
    shuffled = sorted(order, key=lambda i: -sizes[i])
    assert place(problem, shuffled, best_fit=True, dense=False, limit=10**6) == place(
        problem, shuffled, best_fit=True, dense=True, limit=10**6
    )


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12), st.integers(1, 40)), min_size=1, max_size=16))
@settings(deadline=None)
def test_degrees_and_breadths_equal_their_definition(rows: list[tuple[int, int, int]]) -> None:
    rows = sorted(((start, start + span, size) for start, span, size in rows), key=lambda r: (r[0], -r[1], -r[2]))
    starts, stops, sizes = (list(column) for column in zip(*rows, strict=True))
    problem = Problem(starts, stops, sizes, [1] * len(rows), [-1] * len(rows))
    live = [sum(size for start, stop, size in rows if start <= step < stop) for step in range(max(stops))]
    assert problem.breadths == [max(live[start:stop]) for start, stop, _ in rows]
    meets = [{j for j, b in enumerate(rows) if j != i and b[0] < a[1] and a[0] < b[1]} for i, a in enumerate(rows)]
    assert [set(near) for near in problem.neighbours] == meets
    assert problem.degrees == [len(near) for near in problem.neighbours] == [len(near) for near in meets]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("best_fit", [False, True])
def test_gap_before_the_first_live_block_is_used(dense: bool, best_fit: bool) -> None:
    """Only a block at 8 is met, so the 8 bytes below it are free, and no other block bounds that gap."""
    # b0 (dead when b2 starts) lifts b1 to 8; b2 meets b1 only
    problem = Problem(starts=[0, 1, 3], stops=[2, 4, 5], sizes=[8, 8, 8], alignments=[1] * 3, fixed=[-1] * 3)
    assert place(problem, [0, 1, 2], best_fit=best_fit, dense=dense, limit=100) == [0, 8, 0]


def test_gap_before_a_fixed_block_is_used() -> None:
    intervals = [Interval("pinned", 0, 2, 64, fixed=128), Interval("free", 1, 3, 128)]
    assert pack(intervals) == Placement((128, 0), 192, pack(intervals).method, 192)


def test_same_input_gives_the_same_plan() -> None:
    rng = random.Random(3)
    intervals = intervals_of(
        [(s := rng.randrange(60), s + rng.randrange(1, 20), rng.randrange(999)) for _ in range(90)]
    )
    assert len({pack(intervals, effort=0.2) for _ in range(3)}) == 1


def test_more_effort_is_never_worse() -> None:
    rng = random.Random(5)
    intervals = intervals_of(
        [(s := rng.randrange(60), s + rng.randrange(1, 20), rng.randrange(1, 999)) for _ in range(90)]
    )
    heights = [pack(intervals, base_alignment=1, effort=effort, search="off").height for effort in (0, 0.1, 1)]
    assert heights == sorted(heights, reverse=True)
    assert heights[-1] < heights[0]


def test_buffers_lie_where_others_of_their_size_lay() -> None:
    """In a chain of blocks of one shape, where the buffers of the blocks before were, in no more memory."""
    sizes, intervals = (64 * 50, 64 * 300, 64 * 300), [Interval("large", 0, 1, 64 * 1000)]
    for step in range(1, 25, 3):
        for number, size in enumerate(sizes):  # the first is read again at the end of the block
            start = step + number
            intervals.append(Interval(f"{start}", start, start + (4 if number == 0 else 2), size))
    placement = pack(intervals)
    assert placement.height == placement.bound
    check(intervals, placement.offsets, placement.height)
    for size in set(sizes):
        later = [o for i, o in zip(intervals, placement.offsets, strict=True) if i.size == size and i.start >= 7]
        assert len(set(later)) <= 3


def test_zero_sizes_get_a_valid_offset_and_no_space() -> None:
    intervals = [Interval("empty", 0, 9, 0, 256), Interval("full", 0, 9, 64), Interval("pin", 0, 9, 0, fixed=64)]
    placement = checked(intervals)
    assert placement.height == 64
    assert placement.offsets[2] == 64
    assert checked([]).height == 0
    assert checked(intervals[:1]).height == 0


def test_alignment_is_kept_and_sizes_round_to_the_base() -> None:
    intervals = [Interval("a", 0, 2, 1), Interval("b", 0, 2, 1, 4096), Interval("c", 0, 2, 1, 1)]
    placement = checked(intervals)
    assert placement.offsets[1] % 4096 == 0
    assert placement.height == 192


def test_no_reuse_gives_every_buffer_its_own_place() -> None:
    intervals = [Interval("pin", 0, 1, 64, fixed=64)] + [Interval(f"b{i}", i, i + 1, 60) for i in range(5)]
    placement = pack(intervals, reuse=False)
    always_live = [Interval(b.name, 0, 9, b.size, b.alignment, b.fixed) for b in intervals]
    check(always_live, placement.offsets, placement.height)
    assert placement.height == 64 + 6 * 64


def test_capacity_exceeded_names_the_bytes() -> None:
    intervals = [Interval("a", 0, 2, 640), Interval("b", 1, 3, 640)]
    assert pack(intervals, capacity=1280).height == 1280
    with pytest.raises(MemoryDeficit, match=r"needs 1280 bytes, capacity is 1000: 280 short.*step 1"):
        pack(intervals, capacity=1000)


@pytest.mark.parametrize(
    "interval, message",
    [
        (Interval("x", 3, 3, 8), "'x': empty live range"),
        (Interval("x", 0, 1, -8), "'x': size"),
        (Interval("x", 0, 1, 8, 48), "'x': alignment must be a power of two, got 48"),
        (Interval("x", 0, 1, 8, fixed=32), "'x': fixed offset 32 .* multiple of 64"),
        (Interval("x", 0, 1, 8, fixed=-64), "'x': fixed offset -64"),
    ],
)
def test_bad_intervals_are_named(interval: Interval, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        pack([interval])


def test_bad_options_are_named() -> None:
    with pytest.raises(OptionError, match="base_alignment must be a power of two, got 0"):
        pack([], base_alignment=0)
    with pytest.raises(OptionError, match="effort"):
        pack([], effort=-1)


def test_overlapping_fixed_buffers_are_named() -> None:
    intervals = [Interval("left", 0, 2, 100, fixed=0), Interval("right", 1, 3, 8, fixed=64)]
    with pytest.raises(CompileError, match=r"'left'.*'right'"):
        pack(intervals)


def live_ranges(ops: Sequence[tuple[str, int, Sequence[str]]]) -> list[Interval]:
    """(name, bytes, inputs) in program order -> intervals; what nobody reads lives for its own step."""
    last = {}
    for step, (name, _, inputs) in enumerate(ops):
        last[name] = step + 1
        last.update(dict.fromkeys(inputs, step + 1))
    return [Interval(name, step, last[name], size) for step, (name, size, _) in enumerate(ops)]


def chain(seed: int) -> list[Interval]:
    rng = random.Random(seed)
    return [Interval(f"v{i}", i, i + 2, rng.randrange(1, 10_000)) for i in range(300)]


def unet(depth: int, channels: int, pixels: int) -> list[Interval]:
    ops: list[tuple[str, int, list[str]]] = [("x", pixels * pixels * 12, [])]

    def add(name: str, size: int, *extra: str) -> None:
        ops.append((name, 4 * size, [ops[-1][0], *extra]))

    for level in range(depth):
        size = (pixels >> level) ** 2 * (channels << level)
        add(f"down{level}a", size)
        add(f"down{level}b", size)
        add(f"pool{level}", size // 4)
    for level in reversed(range(depth)):
        size = (pixels >> level) ** 2 * (channels << level)
        add(f"up{level}", size)
        add(f"concat{level}", 2 * size, f"down{level}b")
        add(f"conv{level}", size)
    return live_ranges(ops)


def transformer(layers: int, tokens: int, width: int, heads: int, states: int = 0) -> list[Interval]:
    row, scores = 4 * tokens * width, 4 * heads * tokens * tokens
    ops: list[tuple[str, int, list[str]]] = [("x", row, [])]
    x = "x"
    for i in range(layers):
        ops += [(f"norm{i}", row, [x]), (f"q{i}", row, [f"norm{i}"])]
        ops += [(f"k{i}", row // 4, [f"norm{i}"]), (f"v{i}", row // 4, [f"norm{i}"])]
        ops += [(f"scores{i}", scores, [f"q{i}", f"k{i}"]), (f"probs{i}", scores, [f"scores{i}"])]
        ops += [(f"mix{i}", row, [f"probs{i}", f"v{i}"]), (f"proj{i}", row, [f"mix{i}"])]
        ops += [(f"mid{i}", row, [x, f"proj{i}"]), (f"norm2{i}", row, [f"mid{i}"])]
        ops += [(f"gate{i}", 3 * row, [f"norm2{i}"]), (f"up{i}", 3 * row, [f"norm2{i}"])]
        ops += [(f"act{i}", 3 * row, [f"gate{i}", f"up{i}"]), (f"down{i}", row, [f"act{i}"])]
        ops += [(f"out{i}", row, [f"mid{i}", f"down{i}"])]
        x = f"out{i}"
    whole_run = [Interval(f"state{i}", 0, len(ops), 4096 * (i + 1)) for i in range(states)]
    return live_ranges(ops) + whole_run


def training(layers: int) -> list[Interval]:
    rng = random.Random(layers)
    sizes = [rng.randrange(1, 100_000) for _ in range(layers)]
    ops = [(f"act{i}", sizes[i], [f"act{i - 1}"] if i else []) for i in range(layers)]
    for i in reversed(range(layers)):
        grad = [f"grad{i + 1}"] if i + 1 < layers else []
        ops.append((f"grad{i}", sizes[i], [f"act{i}", *grad]))
    return live_ranges(ops)


@pytest.mark.parametrize(
    "intervals",
    [
        chain(0),
        chain(1),
        unet(4, 64, 256),
        unet(3, 48, 192),
        transformer(12, 128, 768, 12),
        transformer(4, 512, 256, 16, states=40),
        training(100),
        training(1500),
    ],
    ids=["chain0", "chain1", "unet4", "unet3", "encoder", "states", "training", "deep-training"],
)
def test_ordinary_graphs_reach_the_lower_bound(intervals: list[Interval]) -> None:
    assert checked(intervals).height == lower_bound(intervals)


def test_public_example_packs_at_its_capacity() -> None:
    """`input.12` of google/minimalloc (Apache-2.0): five buffers of 4 bytes that fit in 12."""
    intervals = intervals_of([(0, 3, 4), (3, 9, 4), (0, 9, 4), (9, 21, 4), (0, 21, 4)])
    assert checked(intervals, base_alignment=1).height == 12


def test_large_dense_sets_stay_valid() -> None:
    """Enough conflicts for the array path and the give-up rule of the sweeps."""
    rng = random.Random(9)
    intervals = [
        Interval(f"b{i}", s := rng.randrange(400), s + rng.randrange(1, 300), rng.randrange(5000)) for i in range(1500)
    ]
    checked(intervals, effort=0.2)
