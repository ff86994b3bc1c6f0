"""How the work of recurrences is cut into chunks."""

from __future__ import annotations

from rlx.backends.cpu.schedule.arguments import Extents
from rlx.backends.cpu.target import Rates
from rlx.ir.shape import Size, evaluate
from rlx.records import dataclass

__all__ = ["BLOCKS", "LINE", "MEMBERS", "TEAM_ROWS", "RecurrenceSchedule"]

TEAM_ROWS = 12  # rows of the batch that a team takes
TEAM_WORK = 65536  # multiplications in a step from which on a team is worth its waiting
CHUNK = 62.5e-6  # seconds of a chunk of few steps or a small cell
BLOCK_WORK = 16384  # multiplications in a block that a member claims
BLOCKS = 16  # most blocks of a team
MEMBERS = 8
ENTRY = 2.5e-3  # seconds of work for each time that a member may leave and come back: a time slice of a CPU
LOOK = 100e-6  # seconds of work of a team, which its members share, between two looks whether one should leave
LINE = 8  # i64 in a cache line


@dataclass(frozen=True)
class RecurrenceParts:
    """How the work is split: chunk = entry * teams + team; each entry lets a thread into the team."""

    row_chunk: int
    row_blocks: int
    teams: int
    members: int
    blocks: int
    block_groups: int
    entries: int
    rare: int  # a member looks whether to leave in the turns whose number has none of these bits set
    chunks: int
    clears: int  # chunks of what sets the counters of the teams to zero
    counters: int  # i64


@dataclass(eq=False, repr=False)
class RecurrenceSchedule:
    """Chooses teams and their blocks, by the sizes of a run only. A kernel sums `at_once` rows in registers."""

    steps: Size
    batch: Size
    gates: int
    hidden: int
    padded: int
    groups: int
    at_once: int
    directions: int
    round_state: bool
    rates: Rates

    def __call__(self, extents: Extents) -> RecurrenceParts:
        steps, batch = evaluate(self.steps, extents), evaluate(self.batch, extents)
        a_row = self.gates * self.padded * self.hidden  # multiplications
        chunk_work, entry_work, look_work = (int(s * self.rates.flops / 2) for s in (CHUNK, ENTRY, LOOK))
        # the range of a state that is rounded is that of all rows
        row_blocks = 1 if self.round_state else max(-(-batch // TEAM_ROWS), 1)
        rows = max(-(-batch // row_blocks), 1)
        together = a_row * rows >= TEAM_WORK and a_row * rows * steps >= 8 * TEAM_WORK
        if not together and not self.round_state:
            rows = -(-chunk_work // (a_row * max(steps, 1)))
            rows = max(min(-(-rows // self.at_once) * self.at_once, batch), 1)
            row_blocks = max(-(-batch // rows), 1)
        blocks = max(min(a_row * rows // BLOCK_WORK, self.groups, BLOCKS), 1) if together else 1
        block_groups = -(-self.groups // blocks)
        blocks = -(-self.groups // block_groups)
        teams = self.directions * row_blocks
        members = min(blocks, MEMBERS)
        entries = members + a_row * rows * steps // entry_work if members > 1 else 1
        turns = max(look_work // (a_row * rows), 1)  # from look to look, but for the power of two that it is cut to
        rare = (1 << turns.bit_length() >> 1) - 1 if members > 1 else 0
        chunks, clears = teams * entries if batch else 0, int(members > 1)
        counters = teams * (1 + BLOCKS) * LINE
        return RecurrenceParts(
            rows, row_blocks, teams, members, blocks, block_groups, entries, rare, chunks, clears, counters
        )
