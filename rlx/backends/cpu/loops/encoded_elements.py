"""Decoding of encoded matrices inside of functions that are written by hand."""

from __future__ import annotations

from rlx.backends.cpu.llvm.builder import Function
from rlx.backends.cpu.loops.emitter import Emitter, Scope
from rlx.backends.cpu.schedule.arguments import ArgumentTable
from rlx.ir.dtype import DType
from rlx.ir.encoding import Encoding
from rlx.kernels.encoded import element
from rlx.kernels.expr import Apply, Const, Expr, Var, transform
from rlx.kernels.lowering import Lowering
from rlx.kernels.program import Buffer

__all__ = ["Decoder"]

AT, LANE = Var("at"), Var("lane")


class Decoder:
    """Emits code that decodes elements of the blocks at `base` to `dtype`: one, or `lanes` adjacent ones of a block."""

    def __init__(self, f: Function, encoding: Encoding, dtype: DType, base: str, lanes: int) -> None:
        blocks = Buffer("blocks", "param", (encoding.block_bytes,), Lowering.byte)
        self.emitter = Emitter(f, ArgumentTable(), lanes)
        self.emitter.loaded[blocks] = base
        k = Lowering(())
        self.one = k.cast(element(blocks, encoding, AT), dtype)
        several = k.cast(element(blocks, encoding, AT + LANE), dtype)
        # elsewhere lanes may be in different blocks
        self.several = transform(several, lambda x: _same_block(x, lanes)) if encoding.block % lanes == 0 else several

    def elements(self, number: str, lanes: int) -> str:
        """The elements from `number` on, which is a multiple of `lanes`."""
        if lanes == 1:
            return self.emitter.lanes_of(self.one, Scope(1, None, {AT: number}))
        return self.emitter.lanes_of(self.several, Scope(lanes, LANE, {AT: number, LANE: "0"}))


def _same_block(x: Expr, lanes: int) -> Expr | None:
    """(x + lane) // n -> x // n and (x + lane) % n -> x % n + lane, as x and n are multiples of the lanes."""
    match x:
        case Apply(fn="floordiv", args=(Apply(fn="add", args=(at, lane)), Const(value=int(by)) as n)):
            return at // n if lane == LANE and by % lanes == 0 else None
        case Apply(fn="mod", args=(Apply(fn="add", args=(at, lane)), Const(value=int(by)) as n)):
            return at % n + LANE if lane == LANE and by % lanes == 0 else None
    return None
