"""Images that only products of bf16 read are stored as the bf16 that these round their elements to.

What makes such an image rounds it in registers, and nothing reads it to round it: memory holds half of it. The bits of
the products are those of an image of f32, but that denormals may count as zero there.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.ir.dtype import DTYPES
from rlx.kernels.accesses import anchor_expressions, with_anchor_expressions
from rlx.kernels.expr import Apply, Cast, Expr, Load, loads, transform
from rlx.kernels.lowering import Conv
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.records import replace

__all__ = ["store_rounded"]

F32, BF16 = DTYPES["f32"], DTYPES["bf16"]


def store_rounded(program: Program, reads: Callable[[Kernel], bool]) -> None:
    """Changes the type of images in place of the program's kernels; `reads`: a convolution reads one of bf16 in place.

    Images are rounded by an instruction of AVX512-BF16.
    """
    kernels = [*program.prepare, *program.run]
    readers = {kernel for kernel in kernels if reads(kernel)}
    if not readers:
        return
    found: dict[Buffer, bool] = {}
    for kernel in kernels:
        image = _rounded_image(kernel) if kernel in readers else None
        if image is not None:
            found[image] = found.get(image, True)
        for b in _others(kernel, image):
            found[b] = False
    for b in (*(b for _, b in program.outputs), *program.updates.values(), *program.copied.values()):
        found[b.base] = False
    made = {b: replace(b, dtype=BF16) for b, fits in found.items() if fits and b.kind == "arena" and b.dtype is F32}
    if made:
        program.prepare = [_rewritten(k, made) for k in program.prepare]
        program.run = [_rewritten(k, made) for k in program.run]


def _rounded_image(kernel: Kernel) -> Buffer | None:
    """What a convolution reads as its image, and rounds each element of."""
    if not isinstance(kernel.anchor, Conv):
        return None
    match kernel.anchor.x:
        case Cast(value=Load(source=source)) as x if x.dtype is BF16 and source.root is None:
            return source  # type: ignore[no-any-return]
    return None


def _others(kernel: Kernel, image: Buffer | None) -> list[Buffer]:
    """What a kernel touches otherwise: reads, or writes not as elements of f32 of a whole buffer."""
    read = [x.source for store in kernel.stores for e in (store.expr, *store.index) for x in loads(e)]
    if kernel.anchor is not None:
        assert kernel.before is None
        expressions = anchor_expressions(kernel.anchor)
        own = kernel.anchor.x if isinstance(kernel.anchor, Conv) and image is not None else None
        read += [x.source for e in expressions if e is not own for x in loads(e)]
    written = [s.buffer for s in kernel.stores if s.buffer.root is not None]
    tested = [] if kernel.mark is None or kernel.mark.test is None else [kernel.mark.test]
    return [b.base for b in (*read, *written, *kernel.operands, *kernel.results, *tested)]


def _rewritten(kernel: Kernel, made: dict[Buffer, Buffer]) -> Kernel:
    """The kernel on images of bf16."""
    if not any(b in made for b in (*kernel.reads(), *kernel.writes())):
        return kernel

    def rounded(x: Expr) -> Expr | None:
        match x:
            case Cast(value=Load(source=source) as image) if source in made:
                return replace(image, source=made[source], dtype=BF16)
        return None

    anchor = kernel.anchor and with_anchor_expressions(kernel.anchor, lambda e: transform(e, rounded))
    return replace(kernel, anchor=anchor, stores=tuple(_stored(s, made) for s in kernel.stores))


def _stored(store: Store, made: dict[Buffer, Buffer]) -> Store:
    if store.buffer not in made:
        return store
    value = store.expr
    return replace(store, buffer=made[store.buffer], expr=Apply("round_bf16", (value,), BF16))
