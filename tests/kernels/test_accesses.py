"""What kernels read is told once for all of their phases."""

from __future__ import annotations

from collections import Counter

import pytest

import rlx
from rlx.kernels import accesses
from rlx.ops.layout import Concat, Split


def looks(monkeypatch: pytest.MonkeyPatch, count: int, *, split: bool) -> int:
    """How often expressions are searched for loads while a graph of so many pieces is compiled."""
    seen: Counter[str] = Counter()
    found = accesses.loads

    def counted(e: object) -> object:
        seen["loads"] += 1
        return found(e)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(accesses, "loads", counted)
        g = rlx.Graph("pieces")
        if split:
            for n, y in enumerate(g.add(Split(0, (2,) * count), g.input("x", (2 * count, 3)))):
                g.output(y + 1.0, f"y{n}")
        else:
            g.output(g.add(Concat(0), *(g.input(f"x{n}", (2, 3)) for n in range(count)))[0], "y")
        rlx.compile(g, device="cpu", cache=False)
    return seen["loads"]


@pytest.mark.parametrize("split", [False, True])
def test_compiling_is_linear_in_pieces(monkeypatch: pytest.MonkeyPatch, split: bool) -> None:
    """Of a concatenation, and of a split."""
    small, large = (looks(monkeypatch, count, split=split) for count in (20, 80))
    assert 0 < large <= 5 * small
