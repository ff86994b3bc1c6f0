"""How the next token of a generation is chosen: the likeliest, or drawn by the graph's sampler."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.models.constraint import Constraint
from rlx.models.sampling import Row, Sampling

__all__ = ["Chooser"]


class Chooser:
    """Says how a row of logits is sampled; `step` counts the tokens.

    `plain` is true where the likeliest is taken and no more is asked for; `told`: of how probable it is, too.
    """

    def __init__(self, sampling: Sampling, constraint: Constraint | None, *, told: bool = False) -> None:
        self.sampling, self.constraint = sampling, constraint
        self.step = 0
        self.plain = not told and sampling == Sampling(temperature=0.0, seed=sampling.seed) and constraint is None

    @property
    def ended(self) -> bool:
        """Whether the form of the answer lets no token follow."""
        return self.constraint is not None and self.constraint.stopped

    def rows(self, text: Sequence[int], guesses: Sequence[int], history: int) -> list[Row]:
        """For the token after a text, and for those after each guess; `history` is how many last tokens count."""
        form = None if self.constraint is None else self.constraint.copy() if guesses else self.constraint
        found, text = [], list(text)
        for n in range(len(guesses) + 1):
            mask = None if form is None else form.mask()
            found.append(Row(self.sampling, text[-history:], self.step + n, mask))
            if n < len(guesses):
                text.append(guesses[n])
                if form is not None:
                    form.accept(guesses[n])
        return found

    def allowed(self, guesses: Sequence[int]) -> list[int]:
        """The guesses up to the first that the form of the answer forbids, or by which it ends."""
        if self.constraint is None:
            return list(guesses)
        form = self.constraint.copy()
        for n, token in enumerate(guesses):
            if not int(form.mask()[token // 32]) >> token % 32 & 1 or self._ends(form, token):
                return list(guesses[:n])
        return list(guesses)

    @staticmethod
    def _ends(form: Constraint, token: int) -> bool:
        """Whether an answer of this form ends by a token, which it goes on with."""
        form.accept(token)
        return form.stopped

    def accept(self, token: int) -> None:
        """A token was chosen."""
        if self.constraint is not None:
            self.constraint.accept(token)
        self.step += 1
