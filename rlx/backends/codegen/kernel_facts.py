"""What a run needs to know of a kernel once its code is there: buffers and names, no expressions and no nodes."""

from __future__ import annotations

from typing import Any

from rlx.ir.graph import Node
from rlx.ir.shape import Dim, symbols
from rlx.kernels.program import Buffer, Kernel, node_names
from rlx.records import dataclass, names_of

__all__ = ["KernelFacts", "facts_of", "mentioned", "tested_names"]


@dataclass(eq=False)
class KernelFacts(Kernel):
    """A kernel that was stored: `stores`, `anchor`, `nodes` and `before` are gone, and what they told is listed."""

    shown: tuple[str, str, str, str] = (
        "",
        "",
        "",
        "",
    )  # kind, how, label, names of the nodes whose code can stop a run
    read: tuple[Buffer, ...] = ()
    named: tuple[Buffer, ...] = ()  # as `looked_up` says
    written: tuple[Buffer, ...] = ()
    replaceable: tuple[Buffer, ...] = ()  # as `in_place_operands` says
    sizes: tuple[str, ...] = ()  # the symbols that its code and words depend on

    @property
    def kind(self) -> str:
        return self.shown[0]

    @property
    def how(self) -> str:
        return self.shown[1]

    @property
    def label(self) -> str:
        return self.shown[2]

    def reads(self) -> tuple[Buffer, ...]:
        return self.read

    def looked_up(self) -> tuple[Buffer, ...]:
        return self.named

    def writes(self) -> tuple[Buffer, ...]:
        return self.written

    def in_place_operands(self) -> tuple[Buffer, ...]:
        return self.replaceable


def facts_of(kernel: Kernel) -> KernelFacts:
    """The facts of a kernel; all its other fields are kept."""
    if isinstance(kernel, KernelFacts):
        return kernel
    kept: dict[str, Any] = {name: getattr(kernel, name) for name in names_of(Kernel)}
    kept |= {
        "stores": (),
        "anchor": None,
        "special": None,
        "nodes": (),
        "strategy": None,
        "refused": (),
        "before": None,
    }
    return KernelFacts(
        **kept,
        shown=(kernel.kind, kernel.how, kernel.label, tested_names(kernel)),
        read=kernel.reads(),
        named=kernel.looked_up(),
        written=kernel.writes(),
        replaceable=kernel.in_place_operands(),
        sizes=tuple(sorted(mentioned(kernel))) if kernel.kind != "control" else (),
    )


def tested_names(kernel: Kernel) -> str:
    """The names of the nodes whose own code can stop a run, and not of those that were fused with them."""
    if isinstance(kernel, KernelFacts):
        return kernel.shown[3]
    return node_names([node for node in kernel.nodes if _tests(node)])


def mentioned(kernel: Kernel) -> set[str]:
    """The symbols of every size that a kernel has to do with."""
    if isinstance(kernel, KernelFacts):
        return set(kernel.sizes)
    from rlx.kernels.expr import Reduce, SizeOf, walk

    sizes: list[Any] = [size for b in (*kernel.reads(), *kernel.writes()) for size in (*b.shape, b.offset)]
    sizes += [size for store in kernel.stores for size in store.extents]
    for expr in kernel.expressions():
        for x in walk(expr):
            sizes += x.extents if isinstance(x, Reduce) else [x.size] if isinstance(x, SizeOf) else []
    if kernel.before is not None:
        sizes += [size for b in kernel.before.writes() for size in b.shape]
    for owner in (kernel.anchor, *(node.op for node in kernel.nodes)):
        for value in vars(owner).values() if owner is not None else ():
            sizes += value if isinstance(value, tuple) else [value]
    return {s.name for size in sizes if isinstance(size, Dim) for s in symbols(size)}


def _tests(node: Node) -> bool:
    from rlx.kernels.expr import Check, walk
    from rlx.kernels.lowering import lower_node

    lowered = lower_node(node)
    pieces = () if lowered is None else (p for output in lowered.outputs for p in output)
    return any(isinstance(x, Check) for piece in pieces for x in walk(piece.expr))
