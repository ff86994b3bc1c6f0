"""The ops that have a kernel of their own on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rlx.backends.cpu.kernels import grouped_matmul
from rlx.backends.cpu.kernels.ops import determinant, max_unpool, nonzero_nms, roi, scatter, topk, tree_ensemble
from rlx.backends.cpu.kernels.recurrence import recurrence
from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.ir.graph import Node
from rlx.kernels.program import Kernel
from rlx.records import dataclass

__all__ = ["SPECIALS", "Special"]


def as_it_is(kernel: Kernel) -> list[Kernel]:
    """Operands as they come."""
    return [kernel]


@dataclass(frozen=True)
class Special:
    """How an op is run: `emit` gives one function for each step; `layout` may put kernels before it.

    `encoded` are the numbers of the operands that may be stored blocks; others are decoded before.
    """

    accepts: Callable[[Node], bool]
    emit: Callable[[Kernel], list[KernelCode]]
    layout: Callable[[Kernel], list[Kernel]] = as_it_is
    encoded: Collection[int] = ()


SPECIALS = {
    "det": Special(determinant.accepts, determinant.emit),
    "grouped_matmul": Special(grouped_matmul.accepts, grouped_matmul.emit, grouped_matmul.layout, encoded=(1,)),
    "max_roi_pool": Special(roi.accepts, roi.emit_max),
    "max_unpool": Special(max_unpool.accepts, max_unpool.emit),
    "non_max_places": Special(nonzero_nms.accepts_boxes, nonzero_nms.emit_non_max),
    "non_zero_places": Special(nonzero_nms.accepts_any, nonzero_nms.emit_non_zero),
    "recurrence": Special(recurrence.accepts, recurrence.emit, recurrence.layout),
    "roi_align_adaptive": Special(roi.accepts, roi.emit_align),
    "scatter_elements": Special(scatter.accepts, scatter.emit),
    "scatter_nd": Special(scatter.accepts, scatter.emit),
    "top_k": Special(topk.accepts, topk.emit),
    "tree_ensemble": Special(tree_ensemble.accepts, tree_ensemble.emit, tree_ensemble.layout),
}
