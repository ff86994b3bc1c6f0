"""Live ranges, sharing by views, and writing in place, on programs made by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from rlx.errors import CompileError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Node
from rlx.ir.shape import Dim, Shape, Size, min_size
from rlx.kernels.expr import I64, Acc, Apply, Expr, Load, Reduce, Var, const
from rlx.kernels.lowering import Contract, out_vars
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.ops.elementwise import Exp
from rlx.plan.liveness import bound_extents, lifetimes

F32, F16 = DTYPES["f32"], DTYPES["f16"]
I, J = out_vars(2)
R = Var("r0")


def buffer(name: str, shape: Shape = (4, 8), dtype: Any = F32, kind: str = "arena", **more: Any) -> Buffer:
    return Buffer(name, kind, shape, dtype, **more)


def view(name: str, root: Buffer, shape: Shape, offset: Size = 0) -> Buffer:
    return Buffer(name, root.kind, shape, root.dtype, root=root, offset=offset)


def load(source: Buffer, *at: Expr, where: Expr | None = None) -> Load:
    return Load(source, at or out_vars(len(source.shape)), source.dtype, where)


def store(target: Buffer, expr: Expr, *at: Expr) -> Store:
    return Store(target, target.shape, at or out_vars(len(target.shape)), expr)


def kernel(target: Buffer, expr: Expr) -> Kernel:
    return Kernel(target.name, (store(target, expr),))


def program(*kernels: Kernel, outputs: tuple[Buffer, ...] = (), dims: tuple[Dim, ...] = ()) -> Program:
    symbols = {s.name: s for d in dims if (s := d.symbol)}
    return Program("p", run=list(kernels), outputs=[(b.name, b) for b in outputs], dims=symbols)


def ranges(p: Program, *, in_place: bool = False, **more: Any) -> dict[str, tuple[int, int]]:
    return {i.name: (i.start, i.stop) for i in lifetimes(p, {}, in_place=in_place, **more).intervals}


X = buffer("x", kind="input")


def host(inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> Kernel:
    return Kernel("host", host=Node(Exp(), ()), operands=inputs, results=outputs)


def test_from_the_write_to_the_last_read() -> None:
    a, b, c, d = (buffer(n) for n in "abcd")
    p = program(kernel(a, load(X)), kernel(b, load(a)), kernel(c, load(b)), kernel(d, load(a) + load(c)), outputs=(d,))
    assert ranges(p) == {"a": (0, 4), "b": (1, 3), "c": (2, 4), "d": (3, 4)}


def test_what_nobody_reads_is_live_while_it_is_written() -> None:
    a, b = buffer("a"), buffer("b")
    assert ranges(program(kernel(a, load(X)), kernel(b, load(X)))) == {"a": (0, 1), "b": (1, 2)}


def test_reading_a_view_keeps_its_root() -> None:
    a, b, c = (buffer(n) for n in "abc")
    v = view("v", a, (32,))
    p = program(kernel(a, load(X)), kernel(b, load(X)), kernel(c, load(v, I * 8 + J)))
    assert ranges(p) == {"a": (0, 3), "b": (1, 2), "c": (2, 3)}


def test_outputs_and_updates_live_to_the_end() -> None:
    a, b, c = (buffer(n) for n in "abc")
    p = program(kernel(a, load(X)), kernel(b, load(X)), kernel(c, load(X)), outputs=(view("v", a, (32,)), X))
    p.updates["s"] = b
    assert ranges(p) == {"a": (0, 3), "b": (1, 3), "c": (2, 3)}


def test_only_the_arena_is_planned() -> None:
    prepared, param = buffer("m", kind="prepared"), buffer("w", kind="param")
    a = buffer("a")
    p = program(kernel(a, load(X) + load(prepared) + load(param)), outputs=(a, param, prepared))
    p.prepare.append(kernel(prepared, load(param)))
    assert ranges(p) == {"a": (0, 1)}


def test_host_calls_with_several_results() -> None:
    a, b, c, d = (buffer(n) for n in "abcd")
    p = program(kernel(a, load(X)), host((a, X), (b, c)), kernel(d, load(c)), outputs=(d,))
    assert ranges(p, in_place=True) == {"a": (0, 2), "b": (1, 2), "c > d": (1, 3)}


def test_scratch_lives_for_its_step() -> None:
    a = buffer("a")
    made = lifetimes(program(kernel(a, load(X)), outputs=(a,)), {}, extra=[("packing", 0, 100)])
    assert [(i.name, i.start, i.stop, i.size) for i in made.intervals] == [("a", 0, 1, 128), ("packing", 0, 1, 100)]
    assert made.buffers == ((a,), ())


@pytest.mark.parametrize(
    "kernels, outputs, message",
    [
        (lambda a, b: [kernel(b, load(a))], (), "reads %a before"),
        (lambda a, b: [kernel(a, load(X)), kernel(a, load(X))], (), "writes %a"),
        (lambda a, b: [kernel(X, load(X))], (), r"writes %x \(input\)"),
        (lambda a, b: [kernel(view("v", a, (32,)), load(X, const(0, I64), I))], (), "writes %v"),
        (lambda a, b: [], (buffer("lost"),), "%lost of 'p' is written by no kernel"),
    ],
)
def test_programs_that_make_no_sense_are_refused(kernels: Any, outputs: tuple[Buffer, ...], message: str) -> None:
    a, b = buffer("a"), buffer("b")
    with pytest.raises(CompileError, match=message):
        lifetimes(program(*kernels(a, b), outputs=outputs), {})


# ---- in place


def test_a_chain_of_maps_is_one_buffer() -> None:
    a, b, c = (buffer(n) for n in "abc")
    p = program(kernel(a, load(X)), kernel(b, load(a) + load(X)), kernel(c, -load(b)), outputs=(c,))
    assert ranges(p, in_place=True) == {"a > b > c": (0, 3)}
    assert lifetimes(p, {}).buffers == ((a, b, c),)


def test_a_long_chain_has_a_short_name() -> None:
    names = [buffer(f"b{n}") for n in range(6)]
    steps = [kernel(names[0], load(X))] + [kernel(y, -load(x)) for x, y in pairwise(names)]
    assert ranges(program(*steps, outputs=(names[-1],)), in_place=True) == {"b0 > 4 more > b5": (0, 6)}


def test_not_while_somebody_else_still_reads() -> None:
    """Neither directly, nor through a view, nor as an output."""
    a, b, c = (buffer(n) for n in "abc")
    later = program(kernel(a, load(X)), kernel(b, -load(a)), kernel(c, load(a)), outputs=(b, c))
    assert ranges(later, in_place=True) == {"a > c": (0, 3), "b": (1, 3)}
    seen = view("v", a, (32,))
    later = program(kernel(a, load(X)), kernel(b, -load(a)), kernel(c, load(seen, I * 8 + J)), outputs=(b, c))
    assert ranges(later, in_place=True) == {"a > c": (0, 3), "b": (1, 3)}
    shown = program(kernel(a, load(X)), kernel(b, -load(a)), outputs=(b, seen))
    assert ranges(shown, in_place=True) == {"a": (0, 2), "b": (1, 2)}
    updated = program(kernel(a, load(X)), kernel(b, -load(a)), outputs=(b,))
    updated.updates["s"] = a
    assert ranges(updated, in_place=True) == {"a": (0, 2), "b": (1, 2)}


def test_only_one_operand_gives_its_place() -> None:
    a, b, c = (buffer(n) for n in "abc")
    p = program(kernel(a, load(X)), kernel(b, load(X)), kernel(c, load(a) + load(b)), outputs=(c,))
    assert sorted(ranges(p, in_place=True).values()) in ([(0, 3), (1, 3)], [(0, 3), (1, 3)])
    assert len(lifetimes(p, {}).intervals) == 2


def test_sizes_must_agree() -> None:
    a, b = buffer("a", (8, 8)), buffer("b")
    p = program(kernel(a, load(X)), kernel(b, load(a)), outputs=(b,))
    assert len(lifetimes(p, {}).intervals) == 2


A, B = buffer("a"), buffer("b")
COLUMN = buffer("column", (4, 1))
IDS = buffer("ids", (4, 8), I64)
HALF = buffer("half", (4, 8), F16)
NIBBLES, MORE_NIBBLES = buffer("nibbles", (8,), DTYPES["u4"]), buffer("more", (8,), DTYPES["u4"])


@pytest.mark.parametrize(
    "made, allowed",
    [
        (kernel(B, load(A)), {A}),
        (kernel(B, load(A) * load(A)), {A}),
        (kernel(B, load(view("v", A, (32,)), I * 8 + J)), {A}),
        (kernel(B, load(A) + load(X)), {A}),  # an input is never written
        (kernel(B, load(A) + load(HALF)), {A}),
        (kernel(B, Apply("bitcast", (load(IDS),), F32)), set()),  # twice as wide
        (kernel(B, load(A, I, J + 1)), set()),
        (kernel(B, load(A) + load(A, I, const(0, I64))), set()),
        (kernel(B, load(view("v", A, (4, 8), 4))), set()),  # shifted by an element
        (kernel(B, load(A, where=I > 0)), set()),
        (kernel(B, load(A, I, load(IDS))), set()),  # read to find another element, which may come later
        (kernel(B, load(A) / Reduce("add", (R,), (8,), load(A, I, R), F32)), set()),
        (kernel(B, Reduce("add", (R,), (8,), load(A), F32)), set()),
        (kernel(B, load(A) + load(COLUMN, I, const(0, I64))), {A}),
        (Kernel("t", (store(buffer("t", (8, 4)), load(A, J, I)),)), set()),  # transposed
        (Kernel("t", (Store(buffer("t", (8, 4)), (4, 8), (J, I), load(A)),)), set()),
        (Kernel("s", (Store(B, (4, 8), (I, load(IDS)), load(A)),)), set()),  # scattered
        (Kernel("u", (store(buffer("u", (1, 4, 8)), load(A, *out_vars(3)[1:])),)), {A}),
        (Kernel("two", (store(B, load(A)), store(buffer("c"), load(A)))), set()),
        (kernel(MORE_NIBBLES, load(NIBBLES)), set()),  # two elements share a byte
        (Kernel("anchor", (store(B, Acc(F32) + load(A)),), Contract(4, 8, 8, load(X), load(X))), set()),
        (host((A,), (B,)), set()),
    ],
)  # fmt: skip
def test_kernels_say_what_they_may_overwrite(made: Kernel, allowed: set[Buffer]) -> None:
    assert set(made.in_place_operands()) == allowed


def test_loops_of_one_turn_do_not_matter() -> None:
    """[1, 8] over [8] read through a view: the same elements, although the indices differ by a loop of one turn."""
    a, b = buffer("a", (1, 8)), buffer("b", (1, 1, 8))
    i = out_vars(3)
    assert kernel(b, load(a, const(0, I64), i[2])).in_place_operands() == (a,)


# ---- sizes


def test_bounds_of_every_dim() -> None:
    n, m = Dim("n", 1, 30, multiple=4), Dim("m", 2, 5)
    a = buffer("a", (n, m))
    p = program(kernel(a, load(X)), outputs=(a,), dims=(n, m))
    assert bound_extents(p) == {"n": 28, "m": 5}
    assert lifetimes(p, {"n": 28, "m": 5}).intervals[0].size == 28 * 5 * 4
    assert lifetimes(p, {"n": 4, "m": 2}).intervals[0].size == 32


def test_without_a_bound_there_are_no_bound_extents() -> None:
    n = Dim("n", 1)
    a = buffer("a", (n,))
    assert bound_extents(program(kernel(a, load(X)), dims=(n,))) is None
    d = Dim("d", 0, 4)  # bounded, but not what is divided by it
    b = buffer("b", (Dim("n", 1, 8) // d,))
    assert bound_extents(program(kernel(b, load(X)), dims=(d,))) is None


def test_a_size_that_is_largest_elsewhere_is_planned_for_its_maximum() -> None:
    """8 - n at n = 8 is 0, but a plan at the bounds has to serve n = 1 too."""
    n = Dim("n", 1, 8)
    a = buffer("a", (8 - n,))
    b = buffer("b", (min_size(n, 5),))
    p = program(kernel(a, load(X)), kernel(b, load(X)), dims=(n,))
    assert [i.size for i in lifetimes(p, {"n": 8}).intervals] == [28, 20]
    assert [i.size for i in lifetimes(p, {"n": 4}).intervals] == [16, 16]
