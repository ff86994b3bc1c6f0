"""How several threads compute a recurrence together: a *team* for each direction and block of rows.

A chunk is a thread's way into a team; members claim blocks of groups turn by turn (each from its own place, so that it
finds the same weights in its cache again), and begin the next turn once all blocks are done. A member waits only for
blocks that somebody has claimed, and who comes late finds less to do or nothing: the work gets done by one thread too.
A worker whose turn of a CPU is over leaves, as long as another member stays, and comes back by another chunk.

The counters of a team, words of i64, zero before the first turn:

    0                 how many blocks are done, of all turns
    1                 how many members are present
    LINE * (1 + i)    the turn in which block i can be claimed next
"""

from __future__ import annotations

import platform
from collections.abc import Callable

from rlx.backends.cpu.llvm.builder import Function, void
from rlx.backends.cpu.loops.looks import look
from rlx.backends.cpu.native.os_ir import NO_PAUSE, PAUSE
from rlx.backends.cpu.native.runner_ir import MIDWAY
from rlx.backends.cpu.schedule.recurrence import LINE, MEMBERS

__all__ = ["Team"]

LONG = 1024  # pauses of a member that waits, until it gives way


class Team:
    """The code of a member; all but `run` are SSA values.

    `run(first, last, turn)` emits the groups from `first` to `last` of a turn. There are `turns` turns of `groups`
    groups, in `blocks` blocks of `per_block`. A member asks whether to give way in turns whose number has none of the
    bits of `rare` set.
    """

    def __init__(
        self,
        f: Function,
        counters: str,
        run: Callable[[str, str, str], None],
        turns: str,
        groups: str,
        blocks: str,
        per_block: str,
        rare: str,
    ) -> None:
        self.f, self.run = f, run
        self.turns, self.groups, self.blocks, self.per_block, self.rare = turns, groups, blocks, per_block, rare
        self.done = counters
        self.present = f.gep(counters, 1, "i64")
        self.claims = f.gep(counters, LINE, "i64")
        midway = f.load("i64", f.gep("%ctx", MIDWAY, "i64"))
        self.pooled = f.cmp("ne", midway, 0)  # else one thread runs alone
        self.midway = f.cast("inttoptr", midway, "ptr")
        # where 2, 4 or 8 begin: far apart
        place = f.add(f.add(f.mul(f.and_("%worker", 1), 4), f.and_("%worker", 2)), f.lshr(f.and_("%worker", 4), 2))
        self.shift = f.div(f.mul(place, blocks), MEMBERS)

    def member(self, members: str) -> None:
        """A member, until all turns are over or it leaves; beyond `members` of them it leaves at once if it can."""
        f = self.f
        before = f.atomic_rmw("add", self.present, 1, "acq_rel")
        (outside,) = f.if_(f.cmp("ge", before, members), lambda: [self.leave()], lambda: [("i64", "0")])
        first = f.select(f.cmp("ne", outside, 0), self.turns, self.reached())
        f.while_([("i64", first)], lambda s: f.cmp("lt", s[0], self.turns), lambda s: self.one_turn(s[0]))

    def one_turn(self, turn: str) -> list[str]:
        """Computes blocks of a turn, and waits for those of others; the turn that comes next for this member."""
        f, blocks = self.f, self.blocks
        (mine,) = f.loop(0, blocks, 1, [0], lambda i, carried: self.take(turn, i, carried[0]))
        f.if_(f.cmp("gt", mine, 0), lambda: void(f.atomic_rmw("add", self.done, mine, "acq_rel")))
        waited = self.wait(f.mul(f.add(turn, 1), blocks))
        following = f.add(turn, 1)
        due = f.or_(f.cmp("eq", f.and_(following, self.rare), 0), f.cmp("ge", waited, LONG))
        return f.if_(f.and_(due, self.pooled), self.midst, lambda: [following])

    def take(self, turn: str, i: str, mine: str) -> list[str]:
        """Computes the i-th block that this member looks at, unless somebody else has it; `mine`, and 1 more if so."""
        f = self.f
        at = f.rem(f.add(i, self.shift), self.blocks)
        claim = f.gep(self.claims, f.mul(at, LINE), "i64")
        free = f.cmp("eq", f.atomic_load("i64", claim, "monotonic"), turn)

        def claimed() -> list[str]:
            first = f.mul(at, self.per_block)
            self.run(first, f.min(f.add(first, self.per_block), self.groups), turn)
            return [f.add(mine, 1)]

        def tried() -> list[str]:
            _, own = f.cmpxchg(claim, turn, f.add(turn, 1), "acq_rel", "monotonic")
            return f.if_(own, claimed, lambda: [mine])

        return f.if_(free, tried, lambda: [mine])

    def wait(self, target: str) -> str:
        """Waits until so many blocks are done; after how many pauses."""
        f = self.f

        def waiting(_: list[str]) -> str:
            return f.cmp("lt", f.atomic_load("i64", self.done), target)

        def pause(state: list[str]) -> list[str]:
            text = PAUSE.get(platform.machine(), NO_PAUSE)
            if "@llvm.x86.sse2.pause" in text:
                f.declare("llvm.x86.sse2.pause", "void", [])
            f.do(text)
            waited = f.add(state[0], 1)
            long = f.and_(f.cmp("eq", f.and_(waited, LONG - 1), 0), self.pooled)

            def rest() -> None:
                look(f)  # who had the block may have left, as all are to
                self.ask(1)

            f.if_(long, rest)
            return [waited]

        return f.while_([("i64", "0")], waiting, pause)[0]

    def midst(self) -> list[str]:
        """Gives way if it is time to; the turn that the team is at then, `turns` for who has left."""
        f = self.f

        def over() -> list[str]:
            left = f.cmp("ne", self.leave(), 0)
            f.if_(left, lambda: None, lambda: void(self.ask(1)))
            return [f.select(left, self.turns, self.reached())]

        look(f)
        return f.if_(f.cmp("ne", self.ask(0), 0), over, lambda: [self.reached()])

    def ask(self, do: int) -> str:
        """Asks the runner whether the thread's turn of its CPU is over (0), or has it give way (1)."""
        return self.f.call(self.midway, ["%ctx", "%worker", ("i64", str(do))], "i64")

    def reached(self) -> str:
        """The turn that the team is at."""
        return self.f.div(self.f.atomic_load("i64", self.done), self.blocks)

    def leave(self) -> str:
        """1 if another member stays, 0 if this one has to."""
        f = self.f

        def tried(state: list[str]) -> list[str]:
            found, left = f.cmpxchg(self.present, state[0], f.sub(state[0], 1), "acq_rel", "monotonic")
            return [found, f.cast("zext", left, "i64")]

        def untried(state: list[str]) -> str:
            return f.and_(f.cmp("gt", state[0], 1), f.cmp("eq", state[1], 0))

        first = ("i64", f.atomic_load("i64", self.present, "monotonic"))
        return f.while_([first, ("i64", "0")], untried, tried)[1]
