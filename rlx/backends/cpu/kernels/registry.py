"""The ops that have a kernel of their own on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection

from rlx.backends.cpu.kernels import grouped_matmul
from rlx.backends.cpu.kernels.ops import (
    cumulative,
    determinant,
    distances,
    eye,
    fourier,
    max_unpool,
    ngrams,
    nonzero_nms,
    roi,
    scatter,
    topk,
    tree_ensemble,
    unique,
)
from rlx.backends.cpu.kernels.recurrence import recurrence
from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.backends.cpu.strategy import CpuStrategy, Setting
from rlx.backends.cpu.target import Target
from rlx.ir.graph import Node
from rlx.kernels.program import Kernel
from rlx.records import replace

__all__ = ["SPECIALS", "Special"]


def as_it_is(kernel: Kernel, setting: Setting) -> list[Kernel]:
    """Operands as they come."""
    return [kernel]


class Special(CpuStrategy):
    """An op with code of its own: `code` gives a function for each step; `before` may put kernels before it.

    `accepts` says for which nodes. `encoded` are the numbers of the operands that may be stored blocks; others are
    decoded before.
    """

    def __init__(
        self,
        name: str,
        accepts: Callable[[Node], bool],
        code: Callable[[Kernel, Target], list[KernelCode]] | None = None,
        before: Callable[[Kernel, Setting], list[Kernel]] = as_it_is,
        encoded: Collection[int] = (),
    ) -> None:
        super().__init__(name)
        self.accepts, self.code, self.before, self.encoded = accepts, code, before, encoded

    @property
    def summary(self) -> str:
        return (inspect.getdoc(inspect.getmodule(self.accepts)) or "").split("\n\n")[0].replace("\n", " ")

    def layout(self, kernel: Kernel, setting: Setting) -> list[Kernel]:
        *before, last = self.before(kernel, setting)
        return [*before, last if last.strategy is not None else replace(last, strategy=self)]

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        assert self.code is not None
        return self.code(kernel, target)


SPECIALS = {
    special.name: special
    for special in (
        Special("cum_prod", cumulative.accepts, cumulative.emit),
        Special("cum_sum", cumulative.accepts, cumulative.emit),
        Special("det", determinant.accepts, determinant.emit),
        Special("dft", fourier.accepts, fourier.emit, fourier.layout),
        Special("eye_like", eye.accepts, eye.emit),
        Special("grouped_matmul", grouped_matmul.accepts, before=grouped_matmul.layout, encoded=(1,)),
        Special("max_roi_pool", roi.accepts, roi.emit_max),
        Special("max_unpool", max_unpool.accepts, max_unpool.emit),
        Special("ngram_counts", ngrams.accepts, ngrams.emit),
        Special("non_max_places", nonzero_nms.accepts_boxes, nonzero_nms.emit_non_max),
        Special("non_zero_places", nonzero_nms.accepts_any, nonzero_nms.emit_non_zero),
        Special("pair_distances", distances.accepts, distances.emit),
        Special("recurrence", recurrence.accepts, recurrence.emit, recurrence.layout),
        Special("roi_align_adaptive", roi.accepts, roi.emit_align),
        Special("scatter_elements", scatter.accepts, scatter.emit),
        Special("scatter_nd", scatter.accepts, scatter.emit),
        Special("top_k", topk.accepts, topk.emit),
        Special("tree_ensemble", tree_ensemble.accepts, tree_ensemble.emit, tree_ensemble.layout),
        Special("unique_places", unique.accepts, unique.emit),
    )
}
