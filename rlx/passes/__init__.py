"""Passes: Graph -> Graph, one a file. They raise what exporters take apart, fold, and leave out what nothing needs.

A pass is added by a file here, or in `raising` if it makes one op of many: a function with the file's name, which
leaves its argument as it was (`rewrite` has what passes share). Then by its place in `PASSES`, and by
`tests/passes/texts/NAME.txt`: graphs before and after it, and one that it leaves alone. Passes that need more than the
graph, such as `dims` and `legalise`, `rlx/compiler.py` calls itself.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.ir.graph import Graph
from rlx.passes.algebra import algebra
from rlx.passes.cse import cse
from rlx.passes.dce import dce
from rlx.passes.fold import fold
from rlx.passes.fold_batch_norm import fold_batch_norm
from rlx.passes.join_scans import join_scans
from rlx.passes.layout import layout
from rlx.passes.raising.raise_activation import raise_activation
from rlx.passes.raising.raise_attention import raise_attention
from rlx.passes.raising.raise_encoding import raise_encoding
from rlx.passes.raising.raise_integer import raise_integer
from rlx.passes.raising.raise_norm import raise_norm
from rlx.passes.raising.raise_softmax import raise_softmax
from rlx.passes.rewrite import inside_regions
from rlx.passes.scan_rows import scan_rows
from rlx.passes.split_complex import split_complex
from rlx.passes.split_pools import split_pools
from rlx.progress import report

__all__ = ["PASSES", "run_passes"]

Pass = Callable[[Graph], Graph]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("split_complex", split_complex),
    ("raise_encoding", raise_encoding),  # before folding, which would turn small integers into floats
    ("raise_integer", raise_integer),
    ("fold", fold),
    ("layout", layout),
    ("raise_activation", raise_activation),  # before algebra, which would draw the numbers after one into it
    ("algebra", algebra),
    ("cse", cse),
    ("scan_rows", scan_rows),
    ("dce", dce),
    ("join_scans", join_scans),  # after cse, which finds that what they start with is the same
    ("raise_norm", raise_norm),
    ("raise_activation", raise_activation),  # again, for those that algebra made visible
    ("raise_softmax", raise_softmax),
    ("raise_attention", raise_attention),
    ("fold_batch_norm", fold_batch_norm),
    ("split_pools", split_pools),
    ("layout", layout),
    ("algebra", algebra),
    ("fold", fold),
    ("cse", cse),
    ("dce", dce),
)


def run_passes(graph: Graph) -> Graph:
    """The graph after all passes, in the order of `PASSES`; those of regions are passed through them too."""
    for number, (_, one) in enumerate(PASSES):
        report("passes", number / len(PASSES))
        graph = one(graph)
    return inside_regions(graph, run_passes)
