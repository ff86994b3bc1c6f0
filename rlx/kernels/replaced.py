"""Kernels over other buffers: the same loops, anchors and strategies."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.kernels.accesses import with_anchor_expressions
from rlx.kernels.expr import Expr, Load, transform
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace

__all__ = ["Replaced"]


class Replaced:
    """Puts other buffers in the place of some, in kernels, expressions and views."""

    def __init__(self, same: Mapping[Buffer, Buffer]) -> None:
        self.same = same
        self.views: dict[Buffer, Buffer] = {}

    def buffer(self, b: Buffer) -> Buffer:
        """What stands for a buffer or a view."""
        if b.base not in self.same:
            return b
        if b.root is None:
            return self.same[b]
        if b not in self.views:
            self.views[b] = replace(b, root=self.same[b.root])
        return self.views[b]

    def kernel(self, kernel: Kernel, written: bool = False) -> Kernel:
        """The kernel, reading other buffers; `written`: it writes others, too."""
        if not written and not any(b.base in self.same for b in kernel.reads()):
            return kernel
        anchor = kernel.anchor
        if anchor is not None:
            anchor = with_anchor_expressions(anchor, self.expr)
        target = self.buffer if written else lambda b: b
        stores = tuple(
            Store(target(s.buffer), s.extents, tuple(map(self.expr, s.index)), self.expr(s.expr)) for s in kernel.stores
        )
        operands = tuple(map(self.buffer, kernel.operands))
        mark = kernel.mark
        if mark is not None and mark.test is not None:
            mark = replace(mark, test=self.buffer(mark.test))
        results = tuple(map(target, kernel.results))
        before = None if kernel.before is None else self.kernel(kernel.before)
        return replace(
            kernel, anchor=anchor, stores=stores, operands=operands, results=results, mark=mark, before=before
        )

    def expr(self, e: Expr) -> Expr:
        """The expression with other sources of its loads."""

        def new(x: Expr) -> Expr | None:
            if isinstance(x, Load) and x.source.base in self.same:
                return replace(x, source=self.buffer(x.source))
            return None

        return transform(e, new)
