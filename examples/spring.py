"""Finds the friction and stiffness of a swinging spring from where it was seen, through 2,000 steps of its motion.

usage: python examples/spring.py

The motion is a scan over 40 stretches of 50 steps. Each stretch is checkpointed: for the gradient the state before it
is kept, and its steps are computed again. `arena` compares the memory that this takes with keeping everything.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import rlx

STRETCHES, STEPS, TIME = 40, 50, 0.01
COUNT = 1000  # springs that swing side by side, each from a place of its own
START = np.linspace(0.5, 1.5, COUNT)


def stretch(nature: Any, state: Any) -> Any:
    """Some steps of friction and a stiffening pull. (symplectic Euler)"""

    def step(_: Any, now: Any) -> Any:
        place, speed = now
        speed = speed - TIME * (nature["pull"] * (place + 0.3 * place**3) + nature["friction"] * speed)
        return place + TIME * speed, speed

    return rlx.fori_loop(0, STEPS, step, state)


def motion(nature: Any, kept: bool = False) -> Any:
    """Where the springs are after each stretch: [stretches, springs]."""
    part = stretch if kept else rlx.checkpoint(stretch)

    def go(state: Any, _: Any) -> Any:
        state = part(nature, state)
        return state, state[0]

    return rlx.scan(go, (START, START * 0), None, length=STRETCHES)[1]


def arena(kept: bool) -> int:
    """Bytes that the planner sets aside for one gradient."""
    loss = lambda nature: np.mean(motion(nature, kept) ** 2)  # noqa: E731
    plan = rlx.jit(rlx.grad(loss)).compile({"pull": 1.0, "friction": 0.1}).plan
    assert plan is not None
    return plan.arena


def main() -> None:
    seen = rlx.jit(motion)({"pull": 2.0, "friction": 0.05})

    @rlx.jit
    def improve(nature: Any) -> Any:
        value, slope = rlx.value_and_grad(lambda n: np.mean((motion(n) - seen) ** 2))(nature)
        return value, {k: v - r * slope[k] for (k, v), r in zip(nature.items(), (0.05, 0.02), strict=True)}

    nature = {"pull": np.float64(1.9), "friction": np.float64(0.15)}
    for number in range(200):
        value, nature = improve(nature)
        if number % 50 == 0:
            print(f"step {number}: error {float(value):.2e}")
    print(f"pull {float(nature['pull']):.3f}, friction {float(nature['friction']):.3f}")
    with_all, with_few = map(partial(arena), (True, False))
    print(f"memory of a gradient: {with_all / 1e6:.1f} MB, with checkpoints {with_few / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
