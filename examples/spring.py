"""Finds the friction and the stiffness of swinging springs from where they were seen, through 2,000 steps of motion.

usage: python examples/spring.py

The gradient of a scan keeps the state before each step, and computes the rest of the step again. In a scan of scans the
states before each stretch of 50 steps are kept, and those within one stretch at a time: `arena` compares the memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx

STRETCHES, STEPS, TIME = 40, 50, 0.01
START = np.linspace(0.5, 1.5, 1000)  # springs that swing side by side, each from a place of its own


def step(nature: Any, now: Any) -> Any:
    """A little later: friction, and a pull that gets stiffer outwards. (symplectic Euler)"""
    place, speed = now
    speed = speed - TIME * (nature["pull"] * (place + 0.3 * place**3) + nature["friction"] * speed)
    return place + TIME * speed, speed


def motion(nature: Any) -> Any:
    """Where the springs are after each stretch, [stretches, springs], by a scan of scans."""

    def stretch(state: Any, _: Any) -> Any:
        state = rlx.fori_loop(0, STEPS, lambda _, now: step(nature, now), state)
        return state, state[0]

    return rlx.scan(stretch, (START, START * 0), None, length=STRETCHES)[1]


def motion_in_one(nature: Any) -> Any:
    """The same by one scan over all steps."""

    def go(now: Any, _: Any) -> Any:
        now = step(nature, now)
        return now, now[0]

    return rlx.scan(go, (START, START * 0), None, length=STRETCHES * STEPS)[1][STEPS - 1 :: STEPS]


def arena(way: Any) -> int:
    """Bytes that the planner sets aside for one gradient."""
    plan = rlx.jit(rlx.grad(lambda nature: np.mean(way(nature) ** 2))).compile({"pull": 1.0, "friction": 0.1}).plan
    assert plan is not None
    return plan.arena


def main() -> None:
    seen = rlx.jit(motion)({"pull": 2.0, "friction": 0.05})

    @rlx.jit
    def improve(nature: Any) -> Any:
        value, slope = rlx.value_and_grad(lambda n: np.mean((motion(n) - seen) ** 2))(nature)
        return value, {name: nature[name] - 0.005 * slope[name] for name in nature}

    nature: Any = {"pull": np.float64(1.9), "friction": np.float64(0.15)}
    for number in range(201):
        value, nature = improve(nature)
        if number % 50 == 0:
            print(f"step {number}: error {float(value):.1e}")
    print(f"pull {float(nature['pull']):.3f}, friction {float(nature['friction']):.3f}")
    print(f"memory of a gradient: {arena(motion_in_one) / 1e6:.1f} MB in one scan, {arena(motion) / 1e6:.1f} MB so")


if __name__ == "__main__":
    main()
