"""Which way attention is computed."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.backends.cpu.kernels.alternatives import alternatives, only_where
from rlx.backends.cpu.kernels.attention.attention import Way, emit
from rlx.backends.cpu.kernels.attention.grouped_heads import heads_as_rows
from rlx.backends.cpu.kernels.attention.pack_kv import emit_pack, pair_unit
from rlx.backends.cpu.kernels.attention.stored_rows import BLOCKS, FLOATS, in_place
from rlx.backends.cpu.loops.nest import emit_nest
from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.backends.cpu.schedule.attention import AttentionSchedule
from rlx.backends.cpu.schedule.base import FEW_ROWS
from rlx.backends.cpu.schedule.choice import Choice, Limit
from rlx.backends.cpu.strategy import CpuStrategy, Setting, Step, computed
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.encoding import Encoding
from rlx.ir.shape import Shape, Size, ceildiv
from rlx.kernels.affine import Affine
from rlx.kernels.expr import I64, Cast, Expr, Load, Select, const, guarded, size_expr, substitute_vars
from rlx.kernels.lowering import Attention, out_vars
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace

__all__ = ["ATTENTION", "Attend", "accepts_blocks", "accepts_operand", "layout", "unsuited"]

F32, BF16 = DTYPES["f32"], DTYPES["bf16"]
WIDTH = AttentionSchedule.WIDTH
I0, I1, I2, I3 = out_vars(4)


def unsuited(anchor: Attention, dtype: DType) -> str | None:
    """Why no strategy takes attention: they take what is computed in f32."""
    return (
        None
        if {dtype.name, *(x.dtype.name for x in (anchor.q, anchor.k, anchor.v))} <= FLOATS.keys()
        else ("attention is computed in f32 only")
    )


def accepts_blocks(role: str, encoding: Encoding) -> bool:
    """Keys and values are read as stored blocks, of the formats that `stored_rows` has."""
    return role in ("k", "v") and encoding.name in BLOCKS


def accepts_operand(index: Affine) -> bool:
    """Rows may lie anywhere, with their elements next to each other."""
    return index.is_linear and index.coefs.get(I3, 0) == 1


def layout(kernel: Kernel, setting: Setting) -> list[Kernel]:
    """The kernel, computed by the first strategy that takes it, after those that bring its operands into a layout."""
    return computed(kernel, ATTENTION, setting)


def _packed(kernel: Kernel, target: Target) -> list[Kernel]:
    """The kernel that packs keys and values into panels, and the one that reads those."""
    anchor = kernel.anchor
    assert isinstance(anchor, Attention)
    batch, heads, keys, depth = anchor.k_shape
    value_depth = anchor.v_shape[3]
    b, h, panel, row, lane, half = out_vars(6)
    column, unit = panel * WIDTH + lane, pair_unit(anchor, target)
    along: Expr = row * 2 + half if unit else row
    dtype = BF16 if unit else F32

    def panels(
        role: str, operand: Expr, shape: Shape, at: tuple[Expr, ...], sizes: tuple[Size, Size]
    ) -> tuple[Expr, Store]:
        own = (*shape, 2) if unit else shape
        buffer = Buffer(f"{kernel.stores[0].buffer.name}.{role}", "arena", own, dtype)
        element = substitute_vars(operand, dict(zip((I0, I1, I2, I3), at, strict=True)))
        inside = column < size_expr(sizes[0])
        if unit:
            inside = inside & (along < size_expr(sizes[1]))
        value = Select(inside, guarded(element if unit else _wide(element), inside), const(0.0, dtype))
        words = buffer.view(shape, F32) if unit else buffer
        packed = Load(words, (b, h, const(0, I64), const(0, I64), const(0, I64)), F32)
        return packed, Store(buffer, own, out_vars(len(own)), value)

    depth_words, key_words = (AttentionSchedule.words(n, unit) for n in (depth, keys))
    k_shape = (batch, heads, ceildiv(keys, WIDTH), depth_words, WIDTH)
    v_shape = (batch, heads, ceildiv(value_depth, WIDTH), key_words, WIDTH)
    k, k_store = panels("k", anchor.k, k_shape, (b, h, column, along), (keys, depth))
    v, v_store = panels("v", anchor.v, v_shape, (b, h, along, column), (value_depth, keys))
    keys_only = replace(anchor, q=anchor.k, score=None, sinks=None, place=None)
    pack = Kernel("pack k, v", (k_store, v_store), keys_only, nodes=kernel.nodes, strategy=PACK)
    return [pack, kernel.with_anchor(replace(anchor, k=k, v=v))]


def _wide(x: Expr) -> Expr:
    return x if x.dtype is F32 else Cast(x, F32)


PACK = Step("attention.pack", emit_pack)


class Attend(CpuStrategy):
    """A block of query rows at a time, whose scores over all keys stay in scratch: softmax needs no second pass."""

    way = Way()

    def past_caches(self) -> Attend:
        """The same, with copies of a cache's rows that are stored past the processor's caches."""
        made = type(self)(f"{self.name}+streaming")
        made.way = replace(self.way, streaming=True)
        return made

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        return emit(kernel, self.way, target)


class _Decode(Attend):
    """A few query rows: keys and values are read where they lie, each once; packing would cost more than it saves."""

    way = Way(few=True)

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        rows = _query_rows(kernel)
        if isinstance(rows, int):
            return None if rows <= FEW_ROWS else f"it has more than {FEW_ROWS} query rows"
        return f"it may have more than {FEW_ROWS} query rows"

    def layout(self, kernel: Kernel, setting: Setting) -> list[Kernel]:
        return [heads_as_rows(kernel)]


class _Cache(_Decode):
    """Keys that are counted, as those of a cache, for any number of query rows: read where they lie, block by block.

    What a run needs does not depend on how many keys there is room for, and a row has the bits that it has alone.
    """

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        assert isinstance(kernel.anchor, Attention)
        return None if kernel.anchor.count is not None else "its keys are not counted"


class _OwnPanels(Attend):
    """All query rows of a head in a chunk, which packs its keys and values for itself: they never leave the cache."""

    way = Way(own_panels=True)

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        anchor = kernel.anchor
        assert isinstance(anchor, Attention)
        if anchor.q_shape[1] != anchor.k_shape[1]:
            return "several query heads read the same keys"
        return AttentionSchedule.too_large(anchor.q_shape[2], anchor.k_shape[2])

    def layout(self, kernel: Kernel, setting: Setting) -> list[Kernel]:
        return [kernel.with_anchor(kernel.anchor)]


class _Packed(Attend):
    """Keys and values are packed into panels once for each batch entry and key head, which all chunks then read."""

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        return None if isinstance(_query_rows(kernel), int) else "the number of query rows is known at the run only"

    def layout(self, kernel: Kernel, setting: Setting) -> list[Kernel]:
        return _packed(kernel, setting.target)

    def panels(self, kernel: Kernel) -> tuple[Expr, ...]:
        anchor = kernel.anchor
        assert isinstance(anchor, Attention)
        return tuple(e.b if isinstance(e, Select) else e for e in (anchor.k, anchor.v))


class _DecodeOrPacked(_Packed):
    """Where the number of query rows is known at the run only, that decides: both ways are kept.

    Keys and values of the anchor are a choice between the operands and their panels. Where it makes the operands, its
    stores are the result, the panels, and those of the operands.
    """

    way = Way(few=True)

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        return None

    def layout(self, kernel: Kernel, setting: Setting) -> list[Kernel]:
        anchor = kernel.anchor
        assert isinstance(anchor, Attention)
        pack, packed = super().layout(kernel, setting)
        few = size_expr(_query_rows(kernel)) <= FEW_ROWS
        operands = _wide(anchor.k), _wide(anchor.v)
        k, v = (Select(few, *pair) for pair in zip(operands, self.panels(packed), strict=True))
        return [only_where(pack, PACK.name, _choice(kernel), 1), kernel.with_anchor(replace(anchor, k=k, v=v))]

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        anchor = kernel.anchor
        assert isinstance(anchor, Attention)
        result, panels, operands = kernel.stores[:1], kernel.stores[1:3], kernel.stores[3:]
        few = kernel.with_anchor(replace(anchor, k=in_place(anchor.k), v=in_place(anchor.v)))
        k, v = self.panels(kernel)
        many = kernel.with_anchor(replace(anchor, k=k, v=v))
        before = [emit_nest(store, target.lanes) for store in operands]
        if panels:
            before.append(emit_pack(replace(few, stores=panels), target))
        decode = emit(replace(few, stores=(*result, *operands)), self.way, target)
        packed = emit(replace(many, stores=result), Way(), target)
        return alternatives(_choice(kernel), decode, [*before, *packed])

    def read_at(self, kernel: Kernel, operand: Expr, extents: Mapping[str, int]) -> Expr:
        if not isinstance(operand, Select):
            return operand
        return (operand.a, operand.b)[_choice(kernel)(extents)]


def _choice(kernel: Kernel) -> Choice:
    """Whether a run has few query rows, or takes the second way."""
    return Choice(((Limit(_query_rows(kernel), most=FEW_ROWS),),))


def _query_rows(kernel: Kernel) -> Size:
    assert isinstance(kernel.anchor, Attention)
    return kernel.anchor.q_shape[2]


# The first that does not refuse attention computes it.
ATTENTION: tuple[CpuStrategy, ...] = (
    _Decode("attention.decode"),
    _Cache("attention.cache"),
    _OwnPanels("attention.own_panels"),
    _Packed("attention.packed"),
    _DecodeOrPacked("attention.decode_or_packed"),
)
