"""The core of the exact packer: a search over bottom-left stackings that fits all buffers or proves that none does.

The same functions run as plain Python over lists and, compiled by `rlx.plan.native`, over arrays: they use indexing
and integers only, and give the same answer, since work is counted in visits and never in time.

Time is cut into sections, one a maximal set of buffers that are live together. Each section has a floor, below which
all is decided. In a valley, a run of sections with one floor and higher walls, the address right above the floor of a
section is either covered by a buffer that fits between the walls, and then that buffer stands on the floor, or it is
wasted, and then the floor rises to the next level at which a buffer can stand. These choices exclude each other, so no
stacking is met twice. Parts that no unplaced buffer joins are searched apart, and parts that have failed are kept by
what is unplaced and the floors, also from one run to the next. After Moffitt, "MiniMalloc" (ASPLOS 2023) for canonical
stackings, inference in sections and decomposition, and Maas et al., "TelaMalloc" (ASPLOS 2023) for the use of
conflicts; choosing by valleys and the memory of failures are this module's own.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FOUND", "HELPERS", "OUT_OF_WORK", "REFUTED", "State", "run_search"]

FOUND, REFUTED, OUT_OF_WORK = 1, 0, -1

FAR = 1 << 60  # a wall that nothing crosses
MASK = (1 << 61) - 1

# Fields of a pending part, of a frame (a node of the search with options left), and of the trail of changes.
PART = 4
P_FIRST, P_END, P_PARENT, P_NEXT = 0, 1, 2, 3
FRAME = 11
F_FIRST, F_END, F_SECTION, F_OPTION, F_OPTIONS, F_LEVEL, F_TRAIL, F_PARENT, F_NEXT, F_PARTS, F_KEY = range(11)


class State(NamedTuple):
    """Lists of integers, or arrays (int64) for compiled code. Buffers are numbered by first section, then by size."""

    # The buffers: sections [lo, hi), bytes, how early they are tried (highest first), and a random number each.
    lo: list[int]
    hi: list[int]
    size: list[int]
    rank: list[int]
    code: list[int]
    first: list[int]  # by section: the first buffer that starts there or later
    # What is decided so far.
    placed: list[int]
    offset: list[int]
    floor: list[int]  # by section
    rest: list[int]  # by section: bytes of its unplaced buffers
    cross: list[int]  # by section: unplaced buffers that are live in it and in the one before
    # Scratch of one look at a part, by section.
    run: list[int]  # the first section of its run of equal floors; -1 - that if the run is no valley
    left: list[int]  # the floor of the wall on the left of the run
    right: list[int]
    options: list[int]  # how many unplaced buffers that fit between the walls cover it
    inside: list[int]  # their bytes
    over_left: list[int]  # bytes of those that cross the left wall only
    over_right: list[int]
    lift: list[int]  # the floor it must rise to, 0 if it need not
    # Stacks.
    parts: list[int]
    frames: list[int]
    choices: list[int]
    trail: list[int]
    # What is learnt, kept from run to run.
    failed: list[int]  # keys of parts that can't be packed; its length is a power of two
    weight: list[int]  # by section: how often it was where a branch failed
    work: list[int]  # [visits, nodes] of the last run


def take(s: State, buffer: int, sign: int) -> None:
    """Puts a buffer on the floor of its sections (sign 1), or takes it away again (-1)."""
    height = sign * s.size[buffer]
    for section in range(s.lo[buffer], s.hi[buffer]):
        s.floor[section] += height
        s.rest[section] -= height
        s.cross[section] -= sign
    s.cross[s.lo[buffer]] += sign
    s.placed[buffer] = 1 if sign > 0 else 0


def split(s: State, first: int, end: int, parent: int, following: int, top: int) -> tuple[int, int]:
    """Pushes the parts of [first, end) that share no unplaced buffer; the new head of the list and top of the stack."""
    start = first
    for section in range(first + 1, end + 1):
        if section == end or s.cross[section] == 0:
            if s.rest[start] > 0:
                following, top = push(s, start, section, parent, following, top)
            start = section
    return following, top


def push(s: State, first: int, end: int, parent: int, following: int, top: int) -> tuple[int, int]:
    """Pushes one part."""
    at = PART * top
    s.parts[at + P_FIRST] = first
    s.parts[at + P_END] = end
    s.parts[at + P_PARENT] = parent
    s.parts[at + P_NEXT] = following
    return top, top + 1


def find_valleys(s: State, first: int, end: int) -> None:
    """Finds the runs of equal floors in a part and their walls."""
    start = first
    while start < end:
        floor = s.floor[start]
        stop = start + 1
        while stop < end and s.floor[stop] == floor:
            stop += 1
        left = FAR if start == first else s.floor[start - 1]
        right = FAR if stop == end else s.floor[stop]
        run = start if left > floor and right > floor else -1 - start
        for section in range(start, stop):
            s.run[section] = run
            s.left[section] = left
            s.right[section] = right
            s.options[section] = s.inside[section] = s.over_left[section] = s.over_right[section] = 0
        start = stop
    s.options[end] = s.inside[end] = s.over_left[end] = 0


def sort_buffers(s: State, first: int, end: int) -> int:
    """Enters each unplaced buffer of a part where it starts and ends: inside a valley or over a wall. Their code."""
    code = 0
    for buffer in range(s.first[first], s.first[end]):
        if s.placed[buffer]:
            continue
        code ^= s.code[buffer]
        lo, hi, size = s.lo[buffer], s.hi[buffer], s.size[buffer]
        start, stop = s.run[lo], s.run[hi - 1]
        if start != stop:
            if stop >= 0:
                s.over_left[stop] += size
                s.over_left[hi] -= size
            if start >= 0:
                s.over_right[lo] += size
        elif start >= 0:
            s.options[lo] += 1
            s.options[hi] -= 1
            s.inside[lo] += size
            s.inside[hi] -= size
    return code


def least_end(s: State, section: int, inside: int, over_left: int, over_right: int) -> int:
    """The least height of a section of a valley: what is inside first, then each group from its wall on."""
    end = s.floor[section] + inside
    left, right = s.left[section], s.right[section]
    beyond = s.rest[section] - inside - over_left - over_right
    if left > right:
        left, right, over_left, over_right = right, left, over_right, over_left
    if over_left > 0:
        end = max(end, left) + over_left
    if over_right + beyond > 0:
        end = max(end, right) + over_right + beyond
    return end


def next_level(s: State, section: int, end: int) -> int:
    """The least offset, above its floor, at which a buffer can stand in a section: on a wall, or on one beside it."""
    run, floor = s.run[section], s.floor[section]
    level = min(s.left[section], s.right[section])
    for buffer in range(s.first[run], s.first[end]):
        lo = s.lo[buffer]
        if s.run[lo] != run:
            break
        beside = lo > section or s.hi[buffer] <= section
        if beside and not s.placed[buffer] and s.run[s.hi[buffer] - 1] == run:
            level = min(level, floor + s.size[buffer])
    return level


def scramble(value: int) -> int:
    """A number of 61 bits that looks random; equal with and without overflow of 64 bits."""
    value = (value * 0x1E3779B97F4A7C15) & MASK
    value ^= value >> 31
    value = (value * 0x0F58476D1CE4E5B9) & MASK
    return value ^ (value >> 29)


def examine(s: State, first: int, end: int, capacity: int, mode: int) -> tuple[int, int, int, bool]:
    """Looks at a part once: (section that can't be packed or -1, the section to choose for, key, whether some rise)."""
    find_valleys(s, first, end)
    key = sort_buffers(s, first, end)
    best, best_score, rises = -1, 1e30, False
    options = inside = over_left = over_right = 0
    for section in range(first, end):
        options += s.options[section]
        inside += s.inside[section]
        over_left += s.over_left[section]
        if section == first or s.run[section] != s.run[section - 1]:
            over_right = 0
        over_right += s.over_right[section]
        s.lift[section] = 0
        floor = s.floor[section]
        key ^= scramble(floor + s.code[section])
        if s.run[section] < 0:
            continue
        if least_end(s, section, inside, over_left, over_right) > capacity:
            return section, -1, key, False
        slack = capacity - floor - s.rest[section]
        if options == 0:
            level = next_level(s, section, end)
            if level - floor > slack:
                return section, -1, key, False
            s.lift[section] = level
            rises = True
            continue
        branches = options + 1 if slack > 0 else options
        if mode == 0:
            score = branches / s.weight[section]
        elif mode == 1:
            score = branches + slack / (capacity + 1)
        else:
            score = floor * 64 + branches / s.weight[section]
        if score < best_score:
            best, best_score = section, score
    return -1, best, key, rises


def raise_floors(s: State, first: int, end: int, top: int) -> int:
    """Raises the floors that must rise, and notes them on the trail."""
    for section in range(first, end):
        if s.lift[section] > 0:
            top = note(s, -1 - section, s.floor[section], top)
            s.floor[section] = s.lift[section]
    return top


def note(s: State, what: int, before: int, top: int) -> int:
    """Puts a change on the trail: a buffer placed, or (-1 - section, its floor before)."""
    s.trail[2 * top] = what
    s.trail[2 * top + 1] = before
    return top + 1


def undo(s: State, top: int, mark: int) -> None:
    """Undoes the changes on the trail down to a mark."""
    while top > mark:
        top -= 1
        what = s.trail[2 * top]
        if what >= 0:
            take(s, what, -1)
        else:
            s.floor[-1 - what] = s.trail[2 * top + 1]


def list_choices(s: State, section: int, end: int, top: int) -> int:
    """Pushes the buffers that can cover the floor of a section, highest rank first, one of each shape; the new top."""
    run, mark = s.run[section], top
    for buffer in range(s.first[run], s.first[end]):
        lo, hi = s.lo[buffer], s.hi[buffer]
        if lo > section:
            break
        if s.placed[buffer] or hi <= section or s.run[hi - 1] != run:
            continue
        place, alike = top, False
        for other in range(mark, top):
            choice = s.choices[other]
            alike = alike or (s.lo[choice] == lo and s.hi[choice] == hi and s.size[choice] == s.size[buffer])
        if alike:
            continue
        while place > mark and s.rank[s.choices[place - 1]] < s.rank[buffer]:
            s.choices[place] = s.choices[place - 1]
            place -= 1
        s.choices[place] = buffer
        top += 1
    return top


HELPERS = (
    take, push, split, find_valleys, sort_buffers, least_end, next_level, scramble, examine, note, raise_floors, undo,
    list_choices,
)  # fmt: skip


def run_search(s: State, capacity: int, budget: int, mode: int) -> int:
    """Looks for offsets of all buffers below `capacity` within `budget` visits; `mode` is how sections are chosen.

    FOUND leaves them in `offset`; REFUTED means that there are none; OUT_OF_WORK, that neither is known.
    """
    sections = len(s.rest) - 1
    most_frames = len(s.frames) // FRAME
    slots = len(s.failed) - 1
    visits = nodes = 0
    frames = choices = trail = 0  # tops of the stacks
    part, parts = split(s, 0, sections, -1, -1, 0)
    while part >= 0:
        at = PART * part
        first, end = s.parts[at + P_FIRST], s.parts[at + P_END]
        parent, following = s.parts[at + P_PARENT], s.parts[at + P_NEXT]
        full = frames == most_frames or 2 * (trail + sections) >= len(s.trail) or choices + len(s.lo) >= len(s.choices)
        if visits > budget or full:
            s.work[0], s.work[1] = visits, nodes
            return OUT_OF_WORK
        nodes += 1
        rises = True
        failed = best = -1
        key = 0
        while rises:
            visits += end - first + s.first[end] - s.first[first]
            failed, best, key, rises = examine(s, first, end, capacity, mode)
            if rises:
                if 2 * (trail + sections) >= len(s.trail):
                    s.work[0], s.work[1] = visits, nodes
                    return OUT_OF_WORK
                trail = raise_floors(s, first, end, trail)
        if failed < 0 and s.failed[key & slots] == key:
            failed = best
        if failed >= 0:
            s.weight[failed] += 1
        else:
            at = FRAME * frames
            s.frames[at + F_FIRST], s.frames[at + F_END], s.frames[at + F_SECTION] = first, end, best
            s.frames[at + F_OPTION] = choices
            choices = list_choices(s, best, end, choices)
            s.frames[at + F_OPTIONS] = choices
            level = next_level(s, best, end)
            s.frames[at + F_LEVEL] = level if level <= capacity - s.rest[best] else 0
            s.frames[at + F_TRAIL], s.frames[at + F_PARTS], s.frames[at + F_KEY] = trail, parts, key
            s.frames[at + F_PARENT], s.frames[at + F_NEXT] = parent, following
            parent = frames
            frames += 1
        # The next option of the frame that the part belongs to, or of the nearest one above that has any left.
        part = -1
        while parent >= 0:
            at = FRAME * parent
            undo(s, trail, s.frames[at + F_TRAIL])
            trail, parts = s.frames[at + F_TRAIL], s.frames[at + F_PARTS]
            frames, choices = parent + 1, s.frames[at + F_OPTIONS]
            first, end, following = s.frames[at + F_FIRST], s.frames[at + F_END], s.frames[at + F_NEXT]
            option = s.frames[at + F_OPTION]
            if option < choices:
                s.frames[at + F_OPTION] += 1
                buffer = s.choices[option]
                s.offset[buffer] = s.floor[s.lo[buffer]]
                take(s, buffer, 1)
                trail = note(s, buffer, 0, trail)
                part, parts = split(s, first, end, parent, following, parts)
                if part < 0:
                    s.work[0], s.work[1] = visits, nodes
                    return FOUND
                break
            if s.frames[at + F_LEVEL] > 0:
                section = s.frames[at + F_SECTION]
                trail = note(s, -1 - section, s.floor[section], trail)
                s.floor[section] = s.frames[at + F_LEVEL]
                s.frames[at + F_LEVEL] = 0
                part, parts = push(s, first, end, parent, following, parts)
                break
            key = s.frames[at + F_KEY]
            s.failed[key & slots] = key
            parent = s.frames[at + F_PARENT]
    s.work[0], s.work[1] = visits, nodes
    return REFUTED
