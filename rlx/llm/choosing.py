"""How the next token of a generation is chosen: the likeliest, or drawn by the graph's sampler."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.models.constraint import Constraint
from rlx.models.sampling import Row, Sampling

__all__ = ["Chooser"]


class Chooser:
    """Says how a row of logits is sampled; `step` counts the tokens, `plain` is true where the likeliest is taken."""

    def __init__(self, sampling: Sampling, constraint: Constraint | None) -> None:
        self.sampling, self.constraint = sampling, constraint
        self.step = 0
        self.plain = sampling == Sampling(temperature=0.0, seed=sampling.seed) and constraint is None

    @property
    def ended(self) -> bool:
        """Whether the form of the answer lets no token follow."""
        return self.constraint is not None and self.constraint.stopped

    def row(self, history: Sequence[int]) -> Row:
        """For the token after `history`."""
        return Row(self.sampling, history, self.step, None if self.constraint is None else self.constraint.mask())

    def accept(self, token: int) -> None:
        """A token was chosen."""
        if self.constraint is not None:
            self.constraint.accept(token)
        self.step += 1
