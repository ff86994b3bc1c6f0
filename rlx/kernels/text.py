"""The text of a program, for people: its buffers, and each kernel with the expression of every element it stores.

    program mlp
      dim n = 1..64
      input   x: f32[n, 784]
      param   w: f32[784, 10]
      arena   y: f32[n, 10]
    run
      0 contract matmul+add (x f32[n, 784], w f32[784, 10], b f32[10]) -> y f32[n, 10]  from "Gemm_0"
        m = n, n = 10, k = 784
        a = x[i0, k]
        b = w[k, i1]
        y[i0, i1] = acc + b[i1]

A buffer that is not in the memory of the device of the program is printed as `f32[4] in host`, a kernel of another
device or queue with `on host`, `queue 1` at its end.

`x[i | c]` loads where c holds and is 0 elsewhere; `sum_{r0<8}(e)` reduces; `checked(v, ok)` is v after a test; `t0`,
`t1`, ... name parts that occur more than once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count

from rlx.ir.shape import Dim, Shape, Size, Symbol, format_size, format_symbol
from rlx.kernels.expr import (
    Acc,
    Apply,
    Cast,
    Check,
    Const,
    Expr,
    Load,
    Reduce,
    Select,
    SizeOf,
    Var,
    children,
    walk,
)
from rlx.kernels.lowering import Attention, Contract, Conv
from rlx.kernels.program import Buffer, Flow, Kernel, Program
from rlx.records import dataclass, field

__all__ = ["format_expr", "kernel_text", "print_program"]

INFIX = {
    "or": ("|", 1),
    "xor": ("^", 2),
    "and": ("&", 3),
    "eq": ("==", 4),
    "ne": ("!=", 4),
    "lt": ("<", 4),
    "le": ("<=", 4),
    "gt": (">", 4),
    "ge": (">=", 4),
    "add": ("+", 5),
    "sub": ("-", 5),
    "mul": ("*", 6),
    "div": ("/", 6),
    "floordiv": ("//", 6),
    "mod": ("%", 6),
}
PREFIX, ATOM = 7, 8
REDUCTIONS = {"add": "sum", "mul": "prod", "and": "all", "or": "any"}
NAMED = 24  # characters from which a part that occurs again gets a name
KINDS = ("input", "param", "state", "const", "prepared", "arena", "table")


def print_program(program: Program) -> str:
    """The text form, see the module; it ends in a newline."""
    lines = [f"program {program.name}"]
    lines += [f"  {_dim(symbol)}" for symbol in program.dims.values()]
    lines += [f"  guard {guard.lhs} == {guard.rhs}: {guard.why}" for guard in program.guards]
    known = {"input": program.inputs, "param": program.params, "state": program.states, "const": program.constants}
    for kind in KINDS:
        buffers = dict.fromkeys([*known.get(kind, ()), *program.buffers(kind)])
        lines += [f"  {kind:<8} {buffer.name}: {_type(buffer)}" for buffer in buffers]
    views = dict.fromkeys(b for b in program.touched() if b.root is not None)
    lines += [f"  view     {b.name}: {_type(b)} = {b.base.name} + {format_size(b.offset)} B" for b in views]
    for entry, kernels in (("prepare", program.prepare), ("run", program.run)):
        if kernels or entry == "run":
            lines.append(entry)
        for number, kernel in enumerate(kernels):
            lines += [f"  {line}" for line in _kernel_lines(number, kernel)]
    lines += [f"output {name} = {buffer.name}" for name, buffer in program.outputs]
    lines += [f"update {name} = {buffer.name}" for name, buffer in program.updates.items()]
    return "\n".join(lines) + "\n"


def _dim(symbol: Symbol) -> str:
    multiple = f" multiple {symbol.multiple}" if symbol.multiple != 1 else ""
    return f"dim {format_symbol(symbol.name)} = {symbol.lo}..{'' if symbol.hi is None else symbol.hi}{multiple}"


def _type(buffer: Buffer) -> str:
    encoding = f"@{buffer.encoding.name}" if buffer.encoding else ""
    encoding += " a byte each " if buffer.wide and buffer.dtype.bits < 8 else ""
    return f"{buffer.dtype}{encoding}{_shape(buffer.shape)}{f' in {buffer.base.space}' if buffer.base.space else ''}"


def _shape(shape: Shape) -> str:
    return f"[{', '.join(map(format_size, shape))}]"


def _control_line(number: int, kernel: Kernel) -> str:
    """A mark of control flow, or the sizes that are settled here."""
    mark, extents = kernel.mark, kernel.extents
    if mark is not None:
        flow = mark.flow
        test = "" if mark.test is None else f" {mark.test.name}"
        trips = f" for 0..{format_size(flow.trips)}" if flow.trips is not None else ""
        return f"{number} {mark.part} {flow.name}{test}{trips if mark.part == 'loop' else ''}"
    assert extents is not None
    sizes = [f"{s.name} = {f'rounds of {n.name}' if isinstance(n, Flow) else n}" for s, n in extents.sizes]
    return f"{number} extents " + ", ".join([*sizes, *(f"check {g.lhs} == {g.rhs}" for g in extents.checks)])


def _kernel_lines(number: int, kernel: Kernel) -> Iterator[str]:
    if kernel.kind == "control":
        yield _control_line(number, kernel)
        return
    reads = ", ".join(f"{b.name} {_type(b)}" for b in kernel.reads())
    writes = ", ".join(f"{b.name} {_type(b)}" for b in kernel.writes())
    sources = dict.fromkeys(p for n in kernel.nodes for p in n.provenance)
    origin = f"  from {', '.join(map(json.dumps, sources))}" if sources else ""
    strategy = f" [{kernel.how}]" if kernel.strategy is not None else ""
    origin += f"  decides {', '.join(s.name for s in kernel.makes)}" if kernel.makes else ""
    origin += f"  on {kernel.device}" if kernel.device else ""
    origin += f"  queue {kernel.queue}" if kernel.queue else ""
    yield f"{number} {kernel.kind}{strategy} {kernel.name} ({reads}) -> {writes}{origin}"
    if kernel.before is not None:
        for line in (*_anchor_lines(kernel.before), *_store_lines(kernel.before)):
            yield f"  before: {line}"
    for line in (*_anchor_lines(kernel), *_store_lines(kernel)):
        yield f"  {line}"


def kernel_text(kernel: Kernel) -> str:
    """What a kernel computes: its anchor, and the expression of every element that it stores, a line each."""
    return "\n".join((*_anchor_lines(kernel), *_store_lines(kernel)))


def _anchor_lines(kernel: Kernel) -> Iterator[str]:
    operands: list[tuple[str, Expr]] = []
    match kernel.anchor:
        case Contract(m=m, n=n, k=k, a=a, b=b, zero=zero):
            rounded = f", activations {kernel.anchor.activations}" if kernel.anchor.activations else ""
            yield f"m = {format_size(m)}, n = {format_size(n)}, k = {format_size(k)}{rounded}"
            operands = [("a", a), ("b", b), *([] if zero is None else [("zero", zero)])]
        case Conv() as conv:
            yield (
                f"x {_shape(conv.x_shape)}, w {_shape(conv.w_shape)}, strides {list(conv.strides)}, "
                f"dilations {list(conv.dilations)}, pads {_shape(conv.pads)}, groups {conv.groups}"
            )
            operands = [("x", conv.x), ("w", conv.w)]
            if conv.zero is not None:
                operands.append(("zero", conv.zero))
        case Attention() as attention:
            shapes = (attention.q_shape, attention.k_shape, attention.v_shape)
            causal = ", causal" if attention.causal else ""
            causal += f", window {attention.window}" if attention.window is not None else ""
            causal += ", ring" if attention.ring else ""
            yield (
                f"{', '.join(f'{role} {_shape(s)}' for role, s in zip('qkv', shapes, strict=True))}, "
                f"scale {attention.scale:.9g}{causal}, an empty row is {attention.empty_row}"
            )
            operands = [("q", attention.q), ("k", attention.k), ("v", attention.v)]
            if attention.score is not None:
                operands.append(("score", attention.score))
            more = (("sinks", attention.sinks), ("place", attention.place), ("count", attention.count))
            operands.extend((role, x) for role, x in more if x is not None)
    for role, operand in operands:
        yield from _assignment(role, operand)


def _store_lines(kernel: Kernel) -> Iterator[str]:
    for store in kernel.stores:
        at = ", ".join(format_expr(i) for i in store.index)
        box = f" over {_shape(store.extents)}" if store.extents != store.buffer.shape else ""
        yield from _assignment(f"{store.buffer.name}[{at}]{box}", store.expr)


def _assignment(target: str, expr: Expr) -> Iterator[str]:
    printer = _Printer(_shared(expr))
    yield f"{target} = {printer.show(expr)}"
    for name, text in printer.named:
        yield f"  {name} = {text}"


def format_expr(expr: Expr) -> str:
    """An expression in infix notation, as one text."""
    return _Printer(frozenset()).show(expr)


def _shared(expr: Expr) -> frozenset[Expr]:
    """The sub-expressions that occur in more than one place."""
    seen: set[Expr] = set()
    again: set[Expr] = set()
    for x in walk(expr):
        for child in children(x):
            (again if child in seen else seen).add(child)
    return frozenset(again)


@dataclass
class _Printer:
    """Prints expressions, each distinct one once; long ones that are `shared` get a name."""

    shared: frozenset[Expr]
    named: list[tuple[str, str]] = field(default_factory=list)
    memo: dict[Expr, tuple[str, int]] = field(default_factory=dict)
    fresh: count[int] = field(default_factory=count)

    def show(self, e: Expr, least: int = 0) -> str:
        """The text of an expression, in parentheses if it binds less than `least`."""
        if e not in self.memo:
            text, level = self._format(e)
            if e in self.shared and len(text) >= NAMED:
                name = f"t{next(self.fresh)}"
                self.named.append((name, text))
                text, level = name, ATOM
            self.memo[e] = text, level
        text, level = self.memo[e]
        return text if level >= least else f"({text})"

    def _format(self, e: Expr) -> tuple[str, int]:
        match e:
            case Const(value=value):
                negative = not isinstance(value, bool | complex) and value < 0
                return (f"{value:.9g}" if isinstance(value, float) else str(value)), PREFIX if negative else ATOM
            case Var(name=name):
                return name, ATOM
            case SizeOf(size=size):
                return _size(size)
            case Acc():
                return "acc", ATOM
            case Load(source=source, indices=indices, where=where):
                name = getattr(source, "name", "") or "?"
                inside = f" | {self.show(where)}" if where is not None else ""
                return f"{name}[{self._list(indices)}{inside}]", ATOM
            case Apply(fn=fn, args=args):
                return self._apply(fn, args, e)
            case Select(cond=cond, a=a, b=b):
                return f"select({self._list((cond, a, b))})", ATOM
            case Cast(value=value, dtype=dtype):
                return f"{dtype}({self.show(value)})", ATOM
            case Check(ok=ok, value=value):
                return f"checked({self._list((value, ok))})", ATOM
            case Reduce(kind=kind, vars=variables, extents=extents, body=body, last=last):
                loops = ", ".join(f"{v.name}<{format_size(n)}" for v, n in zip(variables, extents, strict=True))
                name = REDUCTIONS.get(kind, kind) + ("_last" if last else "")
                return f"{name}_{{{loops}}}({self.show(body)})", ATOM
        raise AssertionError(f"unknown expression {type(e).__name__}")

    def _apply(self, fn: str, args: Sequence[Expr], e: Apply) -> tuple[str, int]:
        if fn in INFIX:
            symbol, level = INFIX[fn]
            left, right = args
            # A chain of comparisons would read as Python's, so both sides of one need parentheses.
            return f"{self.show(left, level + (level == 4))} {symbol} {self.show(right, level + 1)}", level
        if fn in ("neg", "not"):
            return f"{'-' if fn == 'neg' else '~'}{self.show(args[0], PREFIX)}", PREFIX
        name = f"bitcast_{e.dtype}" if fn == "bitcast" else fn
        return f"{name}({self._list(args)})", ATOM

    def _list(self, parts: Sequence[Expr]) -> str:
        return ", ".join(self.show(p) for p in parts)


def _size(size: Size) -> tuple[str, int]:
    text = format_size(size)
    simple = not isinstance(size, Dim) or size.symbol is not None
    return text, ATOM if simple else 5
