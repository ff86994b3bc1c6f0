"""How the next token of a generation is chosen: the likeliest, or drawn by the graph's sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlx.errors import ExecutionError
from rlx.models.constraint import Constraint
from rlx.models.sampling import Row, Sampling

if TYPE_CHECKING:
    from rlx.llm.model import LanguageModel

__all__ = ["Chooser"]


class Chooser:
    """Runs the model on tokens and gives the one that follows; `step` counts them."""

    def __init__(self, llm: LanguageModel, sampling: Sampling, constraint: Constraint | None) -> None:
        self.llm, self.sampling, self.constraint = llm, sampling, constraint
        self.step = 0
        self.plain = sampling == Sampling(temperature=0.0, seed=sampling.seed) and constraint is None

    @property
    def ended(self) -> bool:
        """Whether the form of the answer lets no token follow."""
        return self.constraint is not None and self.constraint.stopped

    def __call__(self, ids: Sequence[int]) -> int:
        if self.plain:
            token = int(self.llm.extend(ids, "token")[0])
        else:
            mask = None if self.constraint is None else self.constraint.mask()
            history = (*self.llm.filled, *ids)[-self.llm.sampler.history :]
            token = int(self.llm.extend(ids, "sampled", Row(self.sampling, history, self.step, mask))[0])
            if token < 0:
                raise ExecutionError("no token can follow: the logits are not finite, or all tokens are forbidden")
            if self.constraint is not None:
                self.constraint.accept(token)
        self.step += 1
        return token
