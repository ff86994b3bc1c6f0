"""A small typed builder of LLVM IR text.

`Function` hands out SSA names as strings and remembers the LLVM type of each, so most calls need no type. Operands are
SSA names, constant texts, or Python numbers; a number takes the type of the other operand (splatted for vectors). The
same calls print scalar and vector code: `vec("float", w)` is `float` for w = 1 and `<w x float>` above.

    f = Function("axpy", [("ptr", "x"), ("ptr", "y"), ("i64", "n"), ("float", "a")])

    def body(i: str, _: list[str]) -> None:
        y = f.gep("%y", i, "float")
        f.store(f.fma("%a", f.load("float", f.gep("%x", i, "float")), f.load("float", y)), y)

    f.loop(0, "%n", 1, [], body)
    f.ret()
    text = Module([f]).text()
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from rlx.backends.cpu.llvm.constants import constant
from rlx.backends.cpu.llvm.types import arguments_of, element, is_float, size_of, suffix, vec, width

__all__ = [
    "Function",
    "Module",
    "Operand",
    "Typed",
    "arguments_of",
    "constant",
    "element",
    "size_of",
    "suffix",
    "vec",
    "void",
    "width",
]

Operand = str | int | float
Typed = Operand | tuple[str, Operand]  # (type, value) where the type can't be inferred

T = TypeVar("T")
TOGETHER = 64  # lines, from which on they become one string

PREDICATES_INT = {"lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge"}
PREDICATES_FLOAT = {"lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge", "eq": "oeq", "ne": "une"}


def void(_: object) -> None:
    """Drops a value, for callbacks that return none."""


class Function:
    """One LLVM function under construction.

    `args` are (type, name) pairs; a type may carry attributes after it ("ptr noalias readonly"). Argument `name` is the
    value `%name`. `internal` gives internal linkage, for helpers of the module that calls them; `shared` is for helpers
    whose name says all about their body: modules linked together keep one copy of them (linkonce_odr).
    """

    def __init__(
        self,
        name: str,
        args: Sequence[tuple[str, str]],
        ret: str = "void",
        *,
        internal: bool = False,
        shared: bool = False,
        attrs: str = "nounwind",
    ) -> None:
        self.name, self.return_type = name, ret
        self.arg_types = [ty.split()[0] if not ty.startswith("<") else ty for ty, _ in args]
        self.types: dict[str, str] = {
            f"%{n}": t for t, (_, n) in zip(self.arg_types, args, strict=True)
        }  # of arguments
        self.kinds = [""]  # the type of the n-th name, "" for a label: names alone would take some MB
        self.declares: dict[str, str] = {}
        self.arrays: dict[str, str] = {}
        self.callees: dict[str, Function] = {}
        params = ", ".join(f"{ty} %{n}" for ty, n in args)
        linkage = "linkonce_odr hidden " if shared else "internal " if internal else ""
        self.head = f"define {linkage}{ret} @{name}({params}) {attrs}"
        self.parts: list[list[str]] = []  # the text so far, of some lines each; a loop's has phis once it is made
        self.lines: list[str] = []  # that follow
        self.slots: list[str] = []  # allocas: always in the entry block
        self.block = "entry"
        self.vector_bytes = 0  # of the target's vectors, where it is said: functions may use its instructions

    def text(self) -> str:
        """Returns the definition, without the declarations it needs (see `Module`)."""
        # without this LLVM splits 512-bit vectors in two on the CPUs where it prefers 256 bits, and tiles spill
        wide = any(width(ty) * size_of(ty) > 32 for ty in {*self.types.values(), *self.kinds} if ty.startswith("<"))
        head = self.head + (' "min-legal-vector-width"="512" "prefer-vector-width"="512" {' if wide else " {")
        lines = itertools.chain([head, "entry:"], self.slots, *self.parts, self.lines, ["}"])
        return "\n".join(lines) + "\n"

    def new_part(self) -> list[str]:
        """Ends the part that is written, and begins another: an empty one, which what follows comes behind.

        Lines that are done become one string: as many small ones they would take some MB that Python keeps.
        """
        part: list[str] = []
        self.parts += [["\n".join(self.lines)], part] if self.lines else [part]
        self.lines = []
        return part

    def in_entry(self, write: Callable[[], T]) -> T:
        """Has what a function writes, which ends no block, stand in the entry block, wherever it is needed first."""
        before, self.lines = self.lines, []
        try:
            return write()
        finally:
            self.slots.extend(self.lines)
            self.lines = before

    # -- values and types

    def fresh(self, ty: str) -> str:
        """Returns a new SSA name of type `ty` for use with `do`."""
        name = f"%v{len(self.kinds)}"
        self.kinds.append(ty)
        return name

    def op(self, text: str, ty: str) -> str:
        """Emits `name = text` and returns the name; `ty` is the type of the result."""
        name = f"%v{len(self.kinds)}"
        self.kinds.append(ty)
        self.lines.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        """Emits an instruction without a result."""
        self.lines.append("  " + text)

    def known_type(self, name: str) -> str:
        """The type of an SSA name or a pointer to a global, "" where it is not known."""
        if name[:2] == "%v" and (number := name[2:]).isdecimal() and int(number) < len(self.kinds):
            return self.kinds[int(number)]
        return self.types.get(name) or ("ptr" if name == "null" or name[:1] == "@" else "")

    def type_of(self, *operands: Operand, default: str = "") -> str:
        """Returns the type of the first operand whose type is known: SSA names, and pointers to globals."""
        for operand in operands:
            if isinstance(operand, str):
                ty = self.known_type(operand)
                if ty:
                    return ty
        if not default:
            raise TypeError(f"{self.name}: the type of {operands} is not known; pass ty=")
        return default

    def value(self, operand: Operand, ty: str) -> str:
        """Returns the text of an operand of type `ty`."""
        return operand if isinstance(operand, str) else constant(operand, ty)

    def typed(self, operand: Typed) -> tuple[str, str]:
        """Returns (type, text); an int of no given type is an i64."""
        if isinstance(operand, tuple):
            return operand[0], self.value(operand[1], operand[0])
        ty = self.type_of(operand, default="i64" if isinstance(operand, int) else "")
        return ty, self.value(operand, ty)

    # -- arithmetic

    def binary(self, name: str, a: Operand, b: Operand, ty: str | None = None) -> str:
        """Emits the LLVM instruction `name` on two operands of one type (i64 when both are Python ints)."""
        ty = ty or self.type_of(a, b, default="i64" if isinstance(a, int) and isinstance(b, int) else "")
        return self.op(f"{name} {ty} {self.value(a, ty)}, {self.value(b, ty)}", ty)

    def arithmetic(self, name: str, a: Operand, b: Operand, ty: str | None) -> str:
        ty = ty or self.type_of(a, b, default="i64" if isinstance(a, int) and isinstance(b, int) else "")
        x, y = (v if isinstance(v, str) else constant(v, ty) for v in (a, b))
        return self.op(f"{'f' + name if is_float(ty) else name} {ty} {x}, {y}", ty)

    def add(self, a: Operand, b: Operand, ty: str | None = None) -> str:
        """Integer (wrapping) or float addition, by type."""
        return self.arithmetic("add", a, b, ty)

    def sub(self, a: Operand, b: Operand, ty: str | None = None) -> str:
        """Integer (wrapping) or float subtraction, by type."""
        return self.arithmetic("sub", a, b, ty)

    def mul(self, a: Operand, b: Operand, ty: str | None = None) -> str:
        """Integer (wrapping) or float product, by type."""
        return self.arithmetic("mul", a, b, ty)

    def div(self, a: Operand, b: Operand, ty: str | None = None) -> str:
        """Float quotient, or signed integer quotient towards zero; the caller rules out 0 and overflow of integers."""
        ty = ty or self.type_of(a, b, default="i64")
        return self.binary("fdiv" if is_float(ty) else "sdiv", a, b, ty)

    def rem(self, a: Operand, b: Operand, ty: str | None = None) -> str:
        """Signed integer remainder (sign of the dividend); the caller rules out 0 and overflow."""
        return self.binary("srem", a, b, ty)

    def and_(self, a: Operand, b: Operand, ty: str | None = None) -> str:
        return self.binary("and", a, b, ty)

    def or_(self, a: Operand, b: Operand, ty: str | None = None) -> str:
        return self.binary("or", a, b, ty)

    def xor(self, a: Operand, b: Operand, ty: str | None = None) -> str:
        return self.binary("xor", a, b, ty)

    def shl(self, a: Operand, b: Operand, ty: str | None = None) -> str:
        return self.binary("shl", a, b, ty)

    def lshr(self, a: Operand, b: Operand, ty: str | None = None) -> str:
        return self.binary("lshr", a, b, ty)

    def ashr(self, a: Operand, b: Operand, ty: str | None = None) -> str:
        return self.binary("ashr", a, b, ty)

    def neg(self, a: str) -> str:
        """Sign change: exact for floats (-0 and nan too), wrapping for integers."""
        ty = self.type_of(a)
        return self.op(f"fneg {ty} {a}", ty) if is_float(ty) else self.sub(0, a, ty)

    def not_(self, a: str) -> str:
        """Flips all bits: also the negation of an i1."""
        ty = self.type_of(a)
        return self.xor(a, 1 if element(ty) == "i1" else -1, ty)

    def fma(self, a: Operand, b: Operand, c: Operand, ty: str | None = None) -> str:
        """a * b + c with one rounding."""
        return self.intrinsic("fma", a, b, c, ty=ty)

    def min(self, a: Operand, b: Operand, ty: str | None = None) -> str:
        """Smaller of two: signed integers, or floats where b is returned if either is nan (one minps)."""
        ty = ty or self.type_of(a, b, default="i64")
        if not is_float(ty):
            return self.intrinsic("smin", a, b, ty=ty)
        return self.select(self.cmp("lt", a, b, ty), a, b, ty)

    def max(self, a: Operand, b: Operand, ty: str | None = None) -> str:
        """Larger of two: signed integers, or floats where b is returned if either is nan (one maxps)."""
        ty = ty or self.type_of(a, b, default="i64")
        if not is_float(ty):
            return self.intrinsic("smax", a, b, ty=ty)
        return self.select(self.cmp("gt", a, b, ty), a, b, ty)

    def cmp(self, pred: str, a: Operand, b: Operand, ty: str | None = None) -> str:
        """Compares lanes: pred is eq, ne, lt, le, gt, ge (signed; ordered, ne unordered) or any LLVM predicate."""
        ty = ty or self.type_of(a, b, default="i64")
        kind, names = ("fcmp", PREDICATES_FLOAT) if is_float(ty) else ("icmp", PREDICATES_INT)
        text = f"{kind} {names.get(pred, pred)} {ty} {self.value(a, ty)}, {self.value(b, ty)}"
        return self.op(text, vec("i1", width(ty)))

    def select(self, cond: Operand, a: Operand, b: Operand, ty: str | None = None) -> str:
        """a where cond else b, lane by lane."""
        ty = ty or self.type_of(a, b, default="i64" if isinstance(a, int) else "")
        cond_ty = self.type_of(cond, default=vec("i1", width(ty)))
        return self.op(
            f"select {cond_ty} {self.value(cond, cond_ty)}, {ty} {self.value(a, ty)}, {ty} {self.value(b, ty)}", ty
        )

    def cast(self, name: str, a: Operand, to: str, ty: str | None = None) -> str:
        """Emits a conversion (bitcast, sext, zext, trunc, sitofp, uitofp, fptosi, fpext, fptrunc, ptrtoint ...).

        `to` may be a scalar type: it takes the lanes of `a`, except for bitcast. Equal types give `a` back.
        """
        source = ty or self.type_of(a)
        target = to if width(to) > 1 or name == "bitcast" else vec(to, width(source))
        if target == source and isinstance(a, str):
            return a
        return self.op(f"{name} {source} {self.value(a, source)} to {target}", target)

    def intrinsic(self, name: str, *args: Operand, ty: str | None = None, tail: str = "") -> str:
        """Calls `llvm.<name>` overloaded on one type, which the result and all args have; `tail` adds fixed args."""
        ty = ty or self.type_of(*args)
        full = f"llvm.{name}.{suffix(ty)}"
        if full not in self.declares:
            fixed = [t.split()[0] for t in tail.split(",")] if tail else []
            self.declare(full, ty, [ty] * len(args) + fixed)
        text = ", ".join([f"{ty} {a if isinstance(a, str) else constant(a, ty)}" for a in args])
        return self.op(f"call {ty} @{full}({text}{tail and ', '}{tail})", ty)

    # -- vectors

    def splat(self, a: Operand, w: int, ty: str | None = None) -> str:
        """Fills `w` lanes with one scalar."""
        ty = ty or self.type_of(a)
        if not isinstance(a, str):
            return constant(a, vec(ty, w))
        if w == 1:
            return a
        v = vec(ty, w)
        first = self.op(f"insertelement {v} poison, {ty} {a}, i64 0", v)
        return self.op(f"shufflevector {v} {first}, {v} poison, <{w} x i32> zeroinitializer", v)

    def extract(self, a: str, lane: Operand) -> str:
        """One lane as a scalar."""
        ty = self.type_of(a)
        return a if width(ty) == 1 else self.op(f"extractelement {ty} {a}, i64 {lane}", element(ty))

    def insert(self, a: str, value: Operand, lane: Operand, ty: str | None = None) -> str:
        """`a` with one lane replaced; `a` may be "poison" if `ty` gives the vector's type."""
        ty = ty or self.type_of(a)
        scalar = element(ty)
        if width(ty) == 1:
            return self.value(value, scalar)
        return self.op(f"insertelement {ty} {a}, {scalar} {self.value(value, scalar)}, i64 {lane}", ty)

    def shuffle(self, a: str, b: str | None, lanes: Sequence[int]) -> str:
        """Picks lanes out of a (0..w-1) and b (w..2w-1); -1 leaves a lane undefined."""
        ty = self.type_of(a)
        picks = ", ".join("i32 poison" if lane < 0 else f"i32 {lane}" for lane in lanes)
        text = f"shufflevector {ty} {a}, {ty} {b or 'poison'}, <{len(lanes)} x i32> <{picks}>"
        return self.op(text, f"<{len(lanes)} x {element(ty)}>")

    def reduce(self, a: str, combine: Callable[[str, str], str]) -> str:
        """Combines the lanes (a power of two) in a fixed tree, halves first; returns a scalar."""
        w = width(self.type_of(a))
        while w > 1:
            low = self.shuffle(a, None, list(range(w // 2))) if w > 2 else self.extract(a, 0)
            high = self.shuffle(a, None, list(range(w // 2, w))) if w > 2 else self.extract(a, 1)
            a, w = combine(low, high), w // 2
        return a

    def iota(self, w: int, ty: str = "i64") -> str:
        """The constant 0, 1, .. w-1."""
        return constant(list(range(w)), vec(ty, w))

    def mask_below(self, count: str, w: int, ty: str = "i32") -> str:
        """Lanes with index < count (an i64 SSA value, clamped at 0 and w); lanes are compared as `ty`."""
        if w == 1:
            return self.cmp("gt", count, 0)
        bounded = self.max(self.min(count, w), 0)
        narrow = self.cast("trunc", bounded, ty) if ty != "i64" else bounded
        return self.cmp("gt", self.splat(narrow, w), self.iota(w, ty))

    # -- memory

    def gep(self, p: str, index: Operand, ty: str) -> str:
        """The address of element `index` (i64) of an array of `ty` at p."""
        return p if index == 0 else self.op(f"getelementptr inbounds {ty}, ptr {p}, i64 {index}", "ptr")

    def offset(self, p: str, count: Operand) -> str:
        """The address `count` bytes after p."""
        return self.gep(p, count, "i8")

    def load(self, ty: str, p: str, align: int | None = None, tail: str = "") -> str:
        """Loads a value; the alignment is that of one lane unless given. `tail` adds metadata such as ', !range !0'."""
        return self.op(f"load {ty}, ptr {p}, align {align or size_of(ty)}{tail}", ty)

    def store(self, a: Operand, p: str, align: int | None = None, ty: str | None = None) -> None:
        """Stores a value; the alignment is that of one lane unless given."""
        ty = ty or self.type_of(a)
        self.do(f"store {ty} {self.value(a, ty)}, ptr {p}, align {align or size_of(ty)}")

    def memcpy(self, to: str, source: str, count: str) -> None:
        """Copies so many bytes to where none of them lies."""
        self.declare("llvm.memcpy.p0.p0.i64", "void", ["ptr", "ptr", "i64", "i1"])
        self.do(f"call void @llvm.memcpy.p0.p0.i64(ptr {to}, ptr {source}, i64 {count}, i1 false)")

    def stream(self, a: str, p: str) -> None:
        """Stores a vector at a multiple of its size, past the caches if that is possible: it is seen after a fence."""
        ty = self.type_of(a)
        self.do(f"store {ty} {a}, ptr {p}, align {width(ty) * size_of(ty)}, !nontemporal !{{i32 1}}")

    def masked_load(self, ty: str, p: str, mask: str, other: Operand = "zeroinitializer") -> str:
        """Loads the lanes in mask, touching no other memory; the rest are `other`."""
        if width(ty) == 1:
            zero: Operand = "null" if ty == "ptr" else 0
            return self.if_(
                mask, lambda: [self.load(ty, p)], lambda: [(ty, zero if isinstance(other, str) else other)]
            )[0]
        lanes, name = vec("i1", width(ty)), f"llvm.masked.load.{suffix(ty)}.p0"
        self.declare(name, ty, ["ptr", lanes, ty])
        return self.op(
            f"call {ty} @{name}(ptr align {size_of(ty)} {p}, {lanes} {mask}, {ty} {self.value(other, ty)})", ty
        )

    def masked_store(self, a: Operand, p: str, mask: str, ty: str | None = None) -> None:
        """Stores the lanes in mask, touching no other memory."""
        ty = ty or self.type_of(a)
        if width(ty) == 1:
            self.if_(mask, lambda: self.store(a, p, ty=ty))
            return
        lanes, name = vec("i1", width(ty)), f"llvm.masked.store.{suffix(ty)}.p0"
        self.declare(name, "void", [ty, "ptr", lanes])
        self.do(f"call void @{name}({ty} {self.value(a, ty)}, ptr align {size_of(ty)} {p}, {lanes} {mask})")

    def gather(self, ty: str, p: str, indices: str) -> str:
        """Loads elements of scalar type `ty` at i64 indices (scalar or vector), one scalar load a lane."""
        w = width(self.type_of(indices))
        out = "poison"
        for lane in range(w):
            scalar = self.load(ty, self.gep(p, self.extract(indices, lane), ty))
            out = self.insert(out, scalar, lane, vec(ty, w))
        return out

    def alloca(self, ty: str, count: int = 1, align: int = 64) -> str:
        """Room for `count` values on the stack of this call."""
        name = self.fresh("ptr")
        self.slots.append(f"  {name} = alloca {ty}, i64 {count}, align {align}")
        return name

    def prefetch(self, p: str, *, write: bool = False, locality: int = 3) -> None:
        """Hints that the line at p will be used; p need not be a valid address. Locality is 0 (none) to 3 (keep)."""
        self.declare("llvm.prefetch.p0", "void", ["ptr", "i32", "i32", "i32"])
        self.do(f"call void @llvm.prefetch.p0(ptr {p}, i32 {int(write)}, i32 {locality}, i32 1)")

    def keep_order(self, x: str) -> str:
        """The vector x, computed before what is below reads or writes memory, in the order of instructions; no code."""
        ty = self.type_of(x)
        return self.op(f'call {ty} asm sideeffect "", "=v,0,~{{memory}}"({ty} {x})', ty)

    def opaque(self, p: str) -> str:
        """The pointer p, of which LLVM knows nothing: addresses from it are computed as they are written. No code."""
        return self.op(f'call ptr asm sideeffect "", "=r,0"(ptr {p})', "ptr")

    def atomic_load(self, ty: str, p: str, order: str = "acquire") -> str:
        return self.op(f"load atomic {ty}, ptr {p} {order}, align {size_of(ty)}", ty)

    def atomic_rmw(self, name: str, p: str, a: Operand, order: str = "seq_cst", ty: str | None = None) -> str:
        """Atomically applies add, sub, xchg, or, and, max ... and returns the old value."""
        ty = ty or self.type_of(a, default="i64")
        return self.op(f"atomicrmw {name} ptr {p}, {ty} {self.value(a, ty)} {order}", ty)

    def cmpxchg(
        self,
        p: str,
        old: Operand,
        new: Operand,
        order: str = "seq_cst",
        failure: str = "seq_cst",
        ty: str | None = None,
    ) -> tuple[str, str]:
        """Compare and swap: returns (value found, i1 success)."""
        ty = ty or self.type_of(old, new, default="i64")
        text = f"cmpxchg ptr {p}, {ty} {self.value(old, ty)}, {ty} {self.value(new, ty)} {order} {failure}"
        pair_ty = f"{{ {ty}, i1 }}"
        pair = self.op(text, pair_ty)
        return self.op(f"extractvalue {pair_ty} {pair}, 0", ty), self.op(f"extractvalue {pair_ty} {pair}, 1", "i1")

    def array(self, name: str, ty: str, values: Sequence[int | float], align: int = 64) -> str:
        """A private constant array of scalars; returns its address. Equal names must hold equal values."""
        items = ", ".join(f"{ty} {constant(v, ty)}" for v in values)
        text = f"@{name} = private unnamed_addr constant [{len(values)} x {ty}] [{items}], align {align}"
        if self.arrays.setdefault(name, text) != text:
            raise ValueError(f"array {name}: defined twice with different values in {self.name}")
        return f"@{name}"

    # -- calls and control

    def declare(self, name: str, ret: str, arg_types: Sequence[str]) -> None:
        """Notes that the module must declare an external function or intrinsic."""
        self.declares[name] = f"declare {ret} @{name}({', '.join(arg_types)})"

    def call(self, callee: Function | str, args: Sequence[Typed], ret: str = "void") -> str:
        """Calls a Function (which then is part of the module), a pointer value, or an external symbol.

        Returns the result's name ("" for void). Types of args come from the callee if it is a Function.
        """
        if isinstance(callee, Function):
            self.callees[callee.name] = callee
            ret, target = callee.return_type, "@" + callee.name
            typed = [
                (t, self.value(a[1] if isinstance(a, tuple) else a, t))
                for t, a in zip(callee.arg_types, args, strict=True)
            ]
        else:
            typed = [self.typed(a) for a in args]
            target = callee if callee.startswith("%") else "@" + callee
            if not callee.startswith("%"):
                self.declare(callee, ret, [t for t, _ in typed])
        text = f"call {ret} {target}({', '.join(f'{t} {v}' for t, v in typed)})"
        if ret == "void":
            self.do(text)
            return ""
        return self.op(text, ret)

    def ret(self, a: Operand | None = None) -> None:
        """Returns from the function."""
        self.do("ret void" if a is None else f"ret {self.return_type} {self.value(a, self.return_type)}")

    def new_label(self, hint: str = "b") -> str:
        self.kinds.append("")
        return f"{hint}{len(self.kinds) - 1}"

    def label(self, name: str) -> None:
        """Starts a block; the block before must have ended with br, branch, ret or switch."""
        if len(self.lines) >= TOGETHER:
            self.new_part()
        self.lines.append(name + ":")
        self.block = name

    def br(self, label: str) -> None:
        self.do(f"br label %{label}")

    def branch(self, cond: str, then: str, otherwise: str) -> None:
        self.do(f"br i1 {cond}, label %{then}, label %{otherwise}")

    def phi(self, ty: str, edges: Sequence[tuple[Operand, str]]) -> str:
        """Joins values by the block they come from; must be at the start of a block."""
        return self.op(f"phi {ty} " + ", ".join(f"[ {self.value(v, ty)}, %{b} ]" for v, b in edges), ty)

    def loop(
        self,
        start: Operand,
        stop: Operand,
        step: Operand,
        carried: Sequence[Typed],
        body: Callable[[str, list[str]], Sequence[Operand] | None],
        *,
        runs: bool = False,
    ) -> list[str]:
        """Counts an i64 from start while < stop by step > 0; may run zero times, unless `runs` says that it does not.

        `body(i, values)` emits one turn and returns the next values (as many as `carried`); the last ones are returned.
        """
        first = [self.typed(c) for c in carried]
        known = runs or (isinstance(start, int) and isinstance(stop, int) and start < stop)
        before, head, done = self.block, self.new_label("loop"), self.new_label("done")
        if known:
            self.br(head)
        else:
            self.branch(self.cmp("lt", start, stop, "i64"), head, done)
        self.label(head)
        index = self.fresh("i64")
        names = [self.fresh(ty) for ty, _ in first]
        phis = self.new_part()
        after = list(body(index, list(names)) or [])
        if len(after) != len(first):
            raise ValueError(f"{self.name}: a loop body returned {len(after)} values, expected {len(first)}")
        following = self.op(f"add nsw i64 {index}, {step}", "i64")
        again = self.cmp("lt", following, stop, "i64")
        latch = self.block
        self.branch(again, head, done)
        values = [self.value(v, ty) for v, (ty, _) in zip(after, first, strict=True)]
        phis.append(f"  {index} = phi i64 [ {start}, %{before} ], [ {following}, %{latch} ]")
        phis += [
            f"  {n} = phi {ty} [ {v}, %{before} ], [ {a}, %{latch} ]"
            for n, (ty, v), a in zip(names, first, values, strict=True)
        ]
        self.label(done)
        if known:
            return values
        return [self.phi(ty, [(v, before), (a, latch)]) for (ty, v), a in zip(first, values, strict=True)]

    def while_(
        self,
        carried: Sequence[Typed],
        cond: Callable[[list[str]], str],
        body: Callable[[list[str]], Sequence[Operand]],
    ) -> list[str]:
        """Repeats body while cond holds; both get the carried values. Returns the values at the exit."""
        first = [self.typed(c) for c in carried]
        before, head = self.block, self.new_label("while")
        inside, done = self.new_label("do"), self.new_label("done")
        self.br(head)
        self.label(head)
        names = [self.fresh(ty) for ty, _ in first]
        phis = self.new_part()
        self.branch(cond(list(names)), inside, done)
        self.label(inside)
        after = [self.value(v, ty) for v, (ty, _) in zip(body(list(names)), first, strict=True)]
        latch = self.block
        self.br(head)
        phis += [
            f"  {n} = phi {ty} [ {v}, %{before} ], [ {a}, %{latch} ]"
            for n, (ty, v), a in zip(names, first, after, strict=True)
        ]
        self.label(done)
        return names

    def if_(
        self,
        cond: str,
        then: Callable[[], Sequence[Typed] | None],
        otherwise: Callable[[], Sequence[Typed] | None] | None = None,
    ) -> list[str]:
        """Runs one of two branches and returns the values they give, joined."""
        yes, no, done = self.new_label("then"), self.new_label("else"), self.new_label("end")
        self.branch(cond, yes, no)
        ends: list[tuple[list[tuple[str, str]], str]] = []
        for label, branch in ((yes, then), (no, otherwise)):
            self.label(label)
            values = [self.typed(v) for v in (branch() if branch else None) or []]
            ends.append((values, self.block))
            self.br(done)
        self.label(done)
        (a, a_block), (b, b_block) = ends
        if len(a) != len(b):
            raise ValueError(f"{self.name}: the branches of an if return {len(a)} and {len(b)} values")
        return [self.phi(ty, [(va, a_block), (vb, b_block)]) for (ty, va), (_, vb) in zip(a, b, strict=True)]

    def switch(
        self, a: str, cases: Mapping[int, Callable[[], None]], default: Callable[[], None] | None = None
    ) -> None:
        """Runs the case that equals `a`, else the default."""
        ty = self.type_of(a)
        other, done = self.new_label("default"), self.new_label("end")
        labels = {value: self.new_label("case") for value in cases}
        arms = " ".join(f"{ty} {value}, label %{label}" for value, label in labels.items())
        self.do(f"switch {ty} {a}, label %{other} [ {arms} ]")
        for value, body in cases.items():
            self.label(labels[value])
            body()
            self.br(done)
        self.label(other)
        if default:
            default()
        self.br(done)
        self.label(done)


class Module:
    """A self-contained module: the functions given, those they call, and every declaration they need."""

    def __init__(self, functions: Sequence[Function] = (), triple: str = "") -> None:
        self.functions: dict[str, Function] = {}
        self.triple = triple
        for function in functions:
            self.add(function)

    def add(self, function: Function) -> Function:
        """Adds a function; a name already there must be the same function."""
        if self.functions.setdefault(function.name, function) is not function:
            raise ValueError(f"module: function {function.name} is defined twice; give each its own name")
        return function

    def reachable(self) -> list[Function]:
        """Returns the functions added and all they call, each once, callers first."""
        found: dict[str, Function] = {}
        pending = list(self.functions.values())
        while pending:
            function = pending.pop(0)
            if function.name not in found:
                found[function.name] = function
                pending.extend(function.callees.values())
        return list(found.values())

    def text(self) -> str:
        """Returns the module as LLVM IR text."""
        functions = self.reachable()
        defined = {f.name for f in functions}
        declares = {n: d for f in functions for n, d in f.declares.items() if n not in defined}
        arrays = {n: a for f in functions for n, a in f.arrays.items()}
        parts = [f'target triple = "{self.triple}"'] if self.triple else []
        parts += [arrays[n] for n in sorted(arrays)]
        parts += [f.text() for f in functions]
        parts += [declares[n] for n in sorted(declares)]
        return "\n".join(parts) + "\n"
