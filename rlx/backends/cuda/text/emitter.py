"""Expressions as CUDA C++ statements: each value is computed once, as far outside of the loops as it may be.

A value is put into the outermost scope that has its variables and operands. Loads and checks stay inside of the
reductions that they are written in, since a reduction may have no turns; a reduction moves out, guarded by that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlx.backends.codegen.arguments import ArgumentTable, Computed, Pointer
from rlx.backends.cuda.text.ranges import Ranges, fits, size_range
from rlx.ir.casting import ends
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Shape, Size, numel, upper
from rlx.kernels.affine import Affine, affine, linear_index
from rlx.kernels.expr import I64, Acc, Apply, Cast, Check, Const, Expr, Load, Reduce, Select, SizeOf, Var, checks
from rlx.kernels.loops.analysis import RESULT, free_vars
from rlx.kernels.program import Buffer

__all__ = [
    "BLOCK",
    "C_TYPES",
    "SITE",
    "SLICES",
    "STATUS",
    "Emitter",
    "Scope",
    "converted",
    "initial_value",
    "is_few",
    "literal",
    "stored_type",
]

C_TYPES = {
    "f32": "float", "f64": "double", "f16": "u16", "bf16": "u16", "bool": "bool", "i8": "i8", "u8": "u8",
    "i16": "short", "u16": "u16", "i32": "int", "u32": "u32", "i64": "i64", "u64": "u64",
}  # fmt: skip
STATUS = Buffer("status", "table", (4,), DTYPES["i64"])  # what a failed check leaves: see `k_fail` in prelude.cuh
SITE = Computed(lambda extents: 0)  # a word that stands for the number of a kernel's first check among those of a graph
FEW = 32  # elements of a reduction that one thread goes through by itself
SUFFIX = {"u32": "u", "i64": "ll", "u64": "ull"}


class Sharing(NamedTuple):
    """Threads that share a reduction: the number of one, how many they are, and the prefix of what joins parts."""

    number: str
    threads: str
    prefix: str


BLOCK = Sharing("threadIdx.x", "blockDim.x", "block")  # all threads of a block
SLICES = Sharing("threadIdx.x / 32", "8", "slices")  # the threads of one lane of each of eight warps


class Scope:
    """A block of the text: the variables that are visible there, and what is computed in it.

    `turns`: of the body of a reduction, the text that says whether it has any; `sharing`: the threads that are in it
    with the same variables, and share its reductions.
    """

    def __init__(
        self, parent: Scope | None, variables: Mapping[Var, str], *, turns: str = "", sharing: Sharing | None = None
    ) -> None:
        self.parent, self.turns, self.sharing = parent, turns, sharing
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.vars: dict[Var, str] = {**({} if parent is None else parent.vars), **variables}
        self.lines: list[str] = []
        self.made: dict[object, str] = {}

    @property
    def chain(self) -> list[Scope]:
        """The scopes around it, the outermost first, and itself."""
        return [*([] if self.parent is None else self.parent.chain), self]

    def find(self, key: object) -> tuple[str, int] | None:
        """What is computed here or further out, and how deep."""
        at: Scope | None = self
        while at is not None:
            if key in at.made:
                return at.made[key], at.depth
            at = at.parent
        return None


class Emitter:
    """Prints the statements of one kernel. `table` numbers its words, `sites` are its checks: (kind, type shown)."""

    def __init__(self) -> None:
        self.table = ArgumentTable()
        self.sites: list[tuple[str, str]] = []
        self.free: dict[Expr, frozenset[Var]] = {}
        self.ranges = Ranges()
        self.count = 0

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def word(self, size: Size) -> str:
        """A size as an i64: a literal, or a word where it depends on the run."""
        return f"{size}ll" if isinstance(size, int) else f"w.v[{self.table.slot(size)}]"

    def number(self, size: Size, narrow: bool) -> str:
        """A size as an i64, or as an int."""
        if not narrow:
            return self.word(size)
        return f"{size}" if isinstance(size, int) else f"(int){self.word(size)}"

    def kind(self, e: Expr) -> str:
        """The type in C++ that a value of the expression has."""
        return "int" if self.ranges.narrow(e) else C_TYPES[e.dtype.name]

    def split(self, flat: str, variables: Sequence[tuple[Var, str, Size]]) -> list[str]:
        """Statements that take a row-major number apart into variables, which get the names; their sizes are bound."""
        for v, _, size in variables:
            self.ranges.bind(v, size)
        most = upper(numel([size for *_, size in variables]))
        narrow = fits(None if most is None else (0, most))
        lines, rest, kind = [], f"(int){flat}" if narrow else flat, "int" if narrow else "i64"
        for v, name, size in reversed(variables[1:]):
            part = self.number(size, narrow)
            whole = f"{rest} / {part}" if narrow else f"k_floordiv({rest}, {part})"
            lines.append(f"const {kind} {name}_q = {whole};")
            lines.append(f"const {self.kind(v)} {name} = {rest} - {name}_q * {part};")
            rest = f"{name}_q"
        if variables:
            v, name, _ = variables[0]
            lines.append(f"const {self.kind(v)} {name} = {rest};")
        return lines

    def pointer(self, buffer: Buffer) -> str:
        """A buffer's address, as a pointer to its elements."""
        return f"(({stored_type(buffer.dtype)}*){self.word_of(buffer)})"

    def word_of(self, buffer: Buffer) -> str:
        """A buffer's address as an i64."""
        return f"w.v[{self.table.slot(Pointer(buffer))}]"

    # ---- values

    def value(self, e: Expr, scope: Scope) -> str:
        """The text of a value of the expression, whose statements are put into the scope or further out."""
        return self._value(e, scope)[0]

    def wide(self, e: Expr, scope: Scope) -> tuple[str, int]:
        """The same in the type that the expression says, where an int would not do."""
        text, depth = self._value(e, scope)
        return (f"(i64){text}" if self.ranges.narrow(e) else text), depth

    def _value(self, e: Expr, scope: Scope) -> tuple[str, int]:
        match e:
            case Const():
                return literal(e.value, DTYPES["i32"] if self.ranges.narrow(e) else e.dtype), 0
            case SizeOf(size=size):
                return self.number(size, self.ranges.narrow(e)), 0
            case Var():
                return scope.vars[e], self.depth_of((e,), scope)
        found = scope.find(e)
        return self._compute(e, scope) if found is None else found

    def depth_of(self, variables: Sequence[Var] | frozenset[Var], scope: Scope) -> int:
        """How deep the scope is that has all of these variables."""
        return next(s.depth for s in scope.chain if all(v in s.vars for v in variables))

    def _inside(self, scope: Scope) -> int:
        """The depth of the innermost reduction: how far out what must not be computed without need may go."""
        return max((s.depth for s in scope.chain if s.turns), default=0)

    def _compute(self, e: Expr, scope: Scope) -> tuple[str, int]:
        match e:
            case Load():
                return self._load(e, scope)
            case Apply(fn="bitcast", args=(a,)):
                text, depth = self.wide(a, scope)
                return self._put(e, f"bits<{C_TYPES[e.dtype.name]}>({text})", depth, scope)
            case Apply(fn=fn, args=args):
                as_int = all(self.ranges.narrow(a) for a in args) and (e.dtype is not I64 or self.ranges.narrow(e))
                parts = [self._value(a, scope) if as_int else self.wide(a, scope) for a in args]
                start = self.ranges.of(args[0]) if as_int and fn in ("floordiv", "mod") else None
                if start is not None and start[0] >= 0:
                    fn = {"floordiv": "idiv", "mod": "irem"}[fn]
                return self._put(e, f"k_{fn}({', '.join(t for t, _ in parts)})", max(d for _, d in parts), scope)
            case Select(cond=cond, a=a, b=b):
                (c, first), (x, second), (y, third) = (self._value(part, scope) for part in (cond, a, b))
                return self._put(e, f"{c} ? {x} : {y}", max(first, second, third), scope)
            case Cast(value=x, dtype=dtype):
                text, depth = self._value(x, scope)
                return self._put(e, converted(text, x.dtype, dtype), depth, scope)
            case Check():
                return self._check(e, scope)
            case Reduce():
                return self._reduce(e, scope)
            case Acc():
                return scope.vars[next(iter(RESULT))], self.depth_of(RESULT, scope)
        raise AssertionError(f"no text for {e}")

    def _put(self, e: Expr, text: str, depth: int, scope: Scope) -> tuple[str, int]:
        at, name = scope.chain[depth], self.fresh()
        at.lines.append(f"const {self.kind(e)} {name} = {text};")
        at.made[e] = name
        return name, depth

    # ---- addresses and loads

    def offset(self, form: Affine, scope: Scope) -> tuple[str, int]:
        """The number of an element, in as few bits as hold it."""
        parts, depth = [], 0
        narrow = self.is_narrow_sum(form)
        for term, coef in form.coefs.items():
            text, own = self._value(term, scope) if narrow else self.wide(term, scope)
            depth = max(depth, own)
            parts.append(text if coef == 1 else f"{text} * {self.number(coef, narrow)}")
        if form.constant != 0 or not parts:
            parts.append(self.number(form.constant, narrow))
        return " + ".join(parts), depth

    def is_narrow_sum(self, form: Affine) -> bool:
        """Whether no partial sum of a linear form leaves 32 bits."""
        total = 0
        for term, coef in (*form.coefs.items(), (Const(1, I64), form.constant)):
            found, scale = self.ranges.of(term), size_range(coef)
            if found is None or scale is None or not self.ranges.narrow(term):
                return False
            total += max(map(abs, found)) * max(map(abs, scale))
        return fits((0, total))

    def _load(self, e: Load, scope: Scope) -> tuple[str, int]:
        whole = len(e.indices) == len(e.source.shape)  # else it has been made one index
        form = linear_index(e.indices, e.source.shape) if whole else affine(e.indices[0])
        index, depth = self.offset(form, scope)
        text = f"{self.pointer(e.source)}[{index}]"
        if e.dtype.kind == "b":
            text = f"{text} != 0"
        if e.where is not None:
            where, own = self._value(e.where, scope)
            text, depth = f"{where} ? ({text}) : {literal(0, e.dtype)}", max(depth, own)
        return self._put(e, text, max(depth, self._inside(scope)), scope)

    def _check(self, e: Check, scope: Scope) -> tuple[str, int]:
        (ok, first), (shown, second), (text, third) = (self.wide(x, scope) for x in (e.ok, e.shown, e.value))
        depth = max(first, second, third, self._inside(scope))
        at = scope.chain[depth]
        kind = e.shown.dtype.kind
        as_bits = f"bits<i64>((double){shown})" if kind == "f" and e.shown.dtype.bits >= 32 else f"(i64){shown}"
        site = f"w.v[{self.table.slot(SITE)}] + {len(self.sites)}"
        self.sites.append((e.kind, e.shown.dtype.name))
        at.lines.append(f"if (!({ok})) k_fail({self.word_of(STATUS)}, {site}, {as_bits});")
        at.made[e] = text
        return text, depth

    # ---- reductions

    def _reduce(self, e: Reduce, scope: Scope) -> tuple[str, int]:
        free = free_vars(e, self.free)
        depth = self.depth_of(free, scope)
        if checks(e):
            depth = max(depth, self._inside(scope))
        at = scope.chain[depth]
        crossed = [s.turns for s in scope.chain[depth + 1 :] if s.turns]
        name, kind = self.fresh(), C_TYPES[e.dtype.name]
        loops = [(v, f"{v.name}_{self.fresh()}", n) for v, n in zip(e.vars, e.extents, strict=True)]
        for v, _, n in loops:
            self.ranges.bind(v, n)
        names = {v: own for v, own, _ in loops}
        body = Scope(at, names, turns=" && ".join(f"{self.word(n)} > 0" for n in e.extents))
        text, _ = self.wide(e.body, body)
        arg = e.kind in ("argmax", "argmin")
        if arg:
            rule = f"{1 if e.kind == 'argmax' else -1}, {'true' if e.last else 'false'}"
            best, element = f"{name}_best", C_TYPES[e.body.dtype.name]
            at.lines += [f"i64 {name} = -1;", f"{element} {best} = {literal(0, e.body.dtype)};"]
            (index,) = names.values()
            step = f"if (k_beats<{rule}>({text}, {index}, {best}, {name})) {{ {best} = {text}; {name} = {index}; }}"
        else:
            wide = e.kind == "add" and e.dtype.name == "f32" and not is_few(e.extents)
            total = f"{name}_sum" if wide else name  # a long sum is kept in f64: threads add one by one
            at.lines.append(
                f"{'double' if wide else kind} {total} = {'0' if wide else initial_value(e.kind, e.dtype)};"
            )
            step = f"{total} = {total} + {text};" if wide else f"{name} = k_{e.kind}({name}, {text});"
        lines = self._loops(loops, [*body.lines, step], at.sharing)
        guard = " && ".join(crossed)
        at.lines += [f"if ({guard}) {{", *lines, "}"] if guard else lines
        if at.sharing is not None:
            join = at.sharing.prefix
            whole = f"{join}_place<{rule}>({best}, {name})" if arg else f"{join}_{e.kind}({total})"
            at.lines.append(f"{name if arg else total} = {whole};")
        if not arg and total != name:
            at.lines.append(f"const float {name} = (float){total};")
        at.made[e] = name
        return name, depth

    def _loops(self, loops: Sequence[tuple[Var, str, Size]], body: Sequence[str], sharing: Sharing | None) -> list[str]:
        if sharing is None:
            heads = []
            for v, name, size in loops:
                end = self.number(size, self.ranges.narrow(v))
                heads.append(f"for ({self.kind(v)} {name} = 0; {name} < {end}; ++{name}) {{")
            return [*heads, *body, "}" * len(heads)]
        whole = numel([size for *_, size in loops])
        if isinstance(whole, int) and sharing.threads.isdigit() and whole <= 16 * int(sharing.threads):
            at, turn, threads = self.fresh(), self.fresh(), int(sharing.threads)
            return [
                "#pragma unroll",
                f"for (int {turn} = 0; {turn} < {-(-whole // threads)}; ++{turn}) {{",
                f"const int {at} = {sharing.number} + {turn} * {threads};",
                f"if ({at} < {whole}) {{",
                *self.split(at, loops),
                *body,
                "}",
                "}",
            ]
        at, total = self.fresh(), " * ".join(self.word(size) for *_, size in loops) or "1ll"
        head = f"for (i64 {at} = {sharing.number}; {at} < {total}; {at} += {sharing.threads}) {{"
        return [head, *self.split(at, loops), *body, "}"]


def is_few(shape: Shape) -> bool:
    """Whether there are no more elements than one thread should go through."""
    most = upper(numel(shape))
    return most is not None and most <= FEW


def stored_type(dtype: DType) -> str:
    return "u8" if dtype.kind == "b" else C_TYPES[dtype.name]


def literal(value: object, dtype: DType) -> str:
    """A constant of the type; 16-bit floats as their bits."""
    name = dtype.name
    if dtype.kind == "b":
        return "true" if value else "false"
    if dtype.is_float:
        number = dtype.numpy.type(value)
        if dtype.bits == 16:
            return f"(u16){int(number.view('u2'))}"
        wide = float(number)
        if math.isnan(wide):
            return f"RLX_NAN{dtype.bits}"
        if math.isinf(wide):
            return f"({'-' if wide < 0 else ''}RLX_INF{dtype.bits})"
        return f"({wide.hex()}{'f' if dtype.bits == 32 else ''})"
    whole = int(value)  # type: ignore[call-overload]
    if whole == -(1 << 63):
        return "(-9223372036854775807ll - 1)"
    if name == "i32" and whole == -(1 << 31):
        return "(-2147483647 - 1)"
    if dtype.bits < 32:
        return f"({C_TYPES[name]})({whole})"
    return f"({whole}{SUFFIX.get(name, '')})" if whole < 0 else f"{whole}{SUFFIX.get(name, '')}"


def initial_value(kind: str, dtype: DType) -> str:
    """What a reduction of no elements gives."""
    if kind in ("max", "min"):
        low, high = (-math.inf, math.inf) if dtype.is_float else (0, 1) if dtype.kind == "b" else ends(dtype)
        return literal(low if kind == "max" else high, dtype)
    return literal({"add": 0, "or": 0, "mul": 1, "and": 1}[kind], dtype)


def converted(text: str, source: DType, to: DType) -> str:
    """A value as another type, by the rule of `rlx.ir.casting`."""
    if source is to:
        return text
    if source.name in ("f16", "bf16"):
        text, source = f"{source.name}_to_f32({text})", DTYPES["f32"]
        if to is source:
            return text
    if to.kind == "b":
        return f"{text} != 0"
    if to.name in ("f16", "bf16"):
        return f"to_{to.name}({f'(int){text}' if source.kind == 'b' else text})"
    kind = C_TYPES[to.name]
    if to.is_integer and source.is_float:
        low, high = ends(to)
        above = f"({float(high + 1).hex()}{'f' if source.bits == 32 else ''})"
        return f"to_whole<{kind}, {C_TYPES[source.name]}>({text}, {literal(low, to)}, {literal(high, to)}, {above})"
    return f"({kind}){text}"
