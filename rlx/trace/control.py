"""`rlx.cond`, `while_loop`, `fori_loop` and `scan`: control flow over Python functions, each traced into a region.

The functions take and return trees of arrays. What they read of the function around them becomes a captured input of
the region. They work in functions made by `rlx.jit` and on the values of a graph built by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from rlx.boundary import bounded
from rlx.errors import CompileError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.frames import Frame, frame_of, number_type
from rlx.ir.graph import Graph, TensorType, Value, refuse_masked
from rlx.ir.shape import Dim, Size, max_size, unify
from rlx.ops.control import If, Scan, While
from rlx.ops.elementwise import Cast
from rlx.ops.layout import Iota, SizeOf
from rlx.records import dataclass
from rlx.trace.tree import differs_at, fill, leaves_of

__all__ = ["cond", "fori_loop", "opened", "scan", "value_of", "while_loop"]

BOOL, I64 = DTYPES["bool"], DTYPES["i64"]
ROUNDS = 4  # of tracing a loop body until the types of its number carries are found


def value_of(frame: Frame, leaf: Any, path: str) -> Value:
    """A leaf as a value of the frame's graph: arrays and numbers become constants. `OptionError` for others."""
    if isinstance(leaf, Value):
        return frame.own(leaf)
    if isinstance(leaf, Dim):
        (made,) = frame.graph.add(SizeOf(leaf))
        made.weak = True
        return made
    if isinstance(leaf, bool | int | float) and not isinstance(leaf, np.generic):
        made = frame.array(leaf, number_type(leaf))
        made.weak = True
        return made
    refuse_masked(path, leaf)
    array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    if array.dtype.kind in "OUS":
        raise OptionError(f"{path} is a {type(leaf).__name__}: expected arrays and numbers in dicts, lists and tuples")
    return frame.array(array)


@dataclass
class _Traced:
    """A function traced into a region: its result, and the leaves of that as values of the region."""

    frame: Frame
    formal: list[Value]
    tree: Any
    leaves: list[tuple[str, Value]]

    def close(self, captured: Sequence[Value], results: Sequence[Value]) -> Graph:
        """The finished region, with an input for each of these values of the graph around it."""
        graph, inner = self.frame.graph, self.frame.captured
        inputs = [*self.formal, *(inner[v] if v in inner else self.frame.input(v.type) for v in captured)]
        graph.inputs[:] = inputs
        for i, value in enumerate(inputs):
            value.name = f"in{i}"
        for i, value in enumerate(results):
            graph.output(value, f"out{i}")
        return graph


def _trace(
    outer: Frame, name: str, function: Callable[..., Any], trees: Sequence[Any], like: Sequence[Value | TensorType]
) -> _Traced:
    """Traces `function` on trees whose leaves are inputs of these types, in order."""
    frame = Frame(Graph(name), outer)
    formal = [frame.input(v.type if isinstance(v, Value) else v) for v in like]
    for value, given in zip(formal, like, strict=True):
        value.weak = isinstance(given, Value) and given.weak
    leaves = iter(formal)
    with frame:
        result = function(*(fill(tree, leaves) for tree in trees))
        found = [(path, value_of(frame, leaf, f"{name}: {path}")) for path, leaf in leaves_of(result, "result")]
    return _Traced(frame, formal, result, found)


def _captured(*traced: _Traced) -> list[Value]:
    return list(dict.fromkeys(v for one in traced for v in one.frame.captured))


@contextmanager
def opened(what: str, trees: Sequence[Any]) -> Iterator[Frame]:
    """The frame that a control-flow call adds to: the innermost one, or one for a graph built by hand."""
    values = [leaf for tree in trees for _, leaf in leaves_of(tree, "") if isinstance(leaf, Value)]
    graph, frame = frame_of(values, what)
    if frame is not None:
        yield frame
        return
    with Frame(graph, kept=True) as frame:
        yield frame


def _cast(frame: Frame, value: Value, to: DType) -> Value:
    return value if value.dtype is to else frame.graph.add(Cast(to), value)[0]


def _number_fits(value: Value, dtype: DType) -> bool:
    """Whether a Python number can take an element type: no fraction is lost."""
    return value.weak and value.shape == () and "buif".find(value.dtype.kind) <= "buif".find(dtype.kind)


# ---- cond


@bounded("cond", CompileError)
def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], *operands: Any) -> Any:
    """`true_fn(*operands)` where the bool scalar `pred` holds, else `false_fn(*operands)`; only one is run.

    Both return trees of the same structure, shapes and element types; else `ShapeError` or `DTypeError` names the leaf.
    A `pred` that is known already calls its function and no other. (jax.lax.cond)
    """
    for function in (true_fn, false_fn):
        if not callable(function):
            raise OptionError(f"cond: expected two functions, got {function!r}; rlx.where chooses between arrays")
    if isinstance(pred, bool | np.bool_):
        return (true_fn if pred else false_fn)(*operands)
    if not isinstance(pred, Value):
        raise OptionError(f"cond: the condition is a bool or a bool[] value, got {pred!r}; compare, as in x > 0")
    if pred.dtype is not BOOL or pred.shape != ():
        raise OptionError(
            f"cond: the condition must be bool[], got {pred.type}; compare, and reduce by np.any or np.all"
        )
    with opened("cond", [pred, operands]) as outer:
        given = [value_of(outer, leaf, f"cond: operand{path}") for path, leaf in leaves_of(operands, "")]
        sides = [_trace(outer, n, f, operands, given) for n, f in (("true_fn", true_fn), ("false_fn", false_fn))]
        difference = differs_at(sides[0].tree, sides[1].tree, "result")
        if difference is not None:
            raise OptionError(f"cond: {difference} from true_fn and false_fn: both must return the same structure")
        results: list[tuple[Value, Value]] = []
        for (path, a), (_, b) in zip(sides[0].leaves, sides[1].leaves, strict=True):
            results.append(_alike(sides, path, a, b))
        weak = [a.weak and b.weak for a, b in results]
        captured = _captured(*sides)
        regions = [side.close(captured, [r[i] for r in results]) for i, side in enumerate(sides)]
        made = outer.graph.add(If(), outer.own(pred), *given, *captured, regions=regions)
    return fill(sides[0].tree, _marked(made, weak))


def _alike(sides: Sequence[_Traced], path: str, a: Value, b: Value) -> tuple[Value, Value]:
    if a.shape != b.shape or (a.dtype is not b.dtype and not (_number_fits(a, b.dtype) or _number_fits(b, a.dtype))):
        raise ShapeError(
            f"cond: {path} is {a.type} from true_fn and {b.type} from false_fn: cast or reshape one, so that both are "
            "the same"
        )
    if _number_fits(a, b.dtype):
        with sides[0].frame:
            return _cast(sides[0].frame, a, b.dtype), b
    with sides[1].frame:
        return a, _cast(sides[1].frame, b, a.dtype)


def _marked(values: Sequence[Value], weak: Sequence[bool]) -> Sequence[Value]:
    for value, number in zip(values, weak, strict=True):
        value.weak = number
    return values


# ---- loops


def _settle(
    what: str, outer: Frame, init: Any, trace: Callable[[list[Value]], _Traced], carry: Callable[[Any], Any]
) -> tuple[list[Value], _Traced, list[Value]]:
    """The first carries, the body, and its new carries, in equal types.

    A Python number among the first carries takes the type that the body gives it, for which the body is traced again.
    """
    named = leaves_of(init, "carry")
    first = [value_of(outer, leaf, f"{what}: {path}") for path, leaf in named]
    for _ in range(ROUNDS):
        body = trace(first)
        difference = differs_at(init, carry(body.tree), "carry")
        if difference is not None:
            raise OptionError(f"{what}: {difference} before and after a round: the body must return it as it got it")
        after = [value for _, value in body.leaves[: len(first)]]
        changed = False
        for i, ((path, _), old, new) in enumerate(zip(named, first, after, strict=True)):
            if new.type == old.type.decoded:
                continue
            if new.shape == old.shape and _number_fits(new, old.dtype):
                with body.frame:
                    after[i] = _cast(body.frame, new, old.dtype)
            elif new.shape == old.shape and _number_fits(old, new.dtype):
                first[i] = _cast(outer, old, new.dtype)
                changed = True
            else:
                raise ShapeError(
                    f"{what}: {path} is {old.type} before a round and {new.type} after it: {_way(old, new)}"
                )
        if not changed:
            return first, body, after
    raise OptionError(f"{what}: the types of the carries don't settle: give arrays of a type instead of Python numbers")


def _way(old: Value, new: Value) -> str:
    if old.shape == new.shape:
        return f"start with {new.dtype} elements, or return new.astype({old.dtype.name!r})"
    return "start with an array of the shape that the body returns; a carry can't change in shape"


@bounded("while_loop", CompileError)
def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init: Any) -> Any:
    """`while cond_fun(carry): carry = body_fun(carry)` from `init` on, as long as the data say. (jax.lax.while_loop)

    The carry is a tree whose structure, shapes and element types stay; else `ShapeError` names the leaf.
    """
    with opened("while_loop", [init]) as outer:

        def trace(first: list[Value]) -> _Traced:
            return _trace(outer, "body_fun", body_fun, [init], first)

        first, body, after = _settle("while_loop", outer, init, trace, lambda tree: tree)
        asked = _trace(outer, "cond_fun", cond_fun, [init], first)
        if len(asked.leaves) != 1 or asked.leaves[0][1].type != TensorType((), BOOL):
            given = ", ".join(str(value.type) for _, value in asked.leaves) or "nothing"
            raise ShapeError(f"while_loop: cond_fun must return one bool[], got {given}; compare, as in i < n")
        captured = _captured(asked, body)
        regions = [asked.close(captured, [asked.leaves[0][1]]), body.close(captured, after)]
        made = outer.graph.add(While(len(first)), *first, *captured, regions=regions)
        weak = [v.weak for v in first]
    return fill(init, _marked(made, weak))


@bounded("fori_loop", CompileError)
def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Any, Any], Any], init: Any) -> Any:
    """`for i in range(lower, upper): carry = body_fun(i, carry)` from `init` on. (jax.lax.fori_loop)

    The bounds are ints, sizes of the run (`x.shape[0]`) or integer values; i counts as a Python int. Also see
    `while_loop`.
    """
    if isinstance(lower, Value) or isinstance(upper, Value):
        return while_loop(lambda c: c[0] < upper, lambda c: (c[0] + 1, body_fun(c[0], c[1])), (lower, init))[1]
    for bound in (lower, upper):
        if isinstance(bound, bool) or not isinstance(bound, int | np.integer | Dim):
            raise OptionError(f"fori_loop: the bounds are ints, sizes or integer values, got {bound!r}")
    lower, upper = (b if isinstance(b, Dim) else int(b) for b in (lower, upper))
    rounds: Size = max_size(upper - lower, 0)
    with opened("fori_loop", [init]) as outer:
        (numbers,) = outer.graph.add(Iota(rounds, lower), name="")
        numbers.weak = True
        carry, _ = _scan("fori_loop", outer, lambda c, i: (body_fun(i, c), None), init, numbers, None, False)
    return carry


@bounded("scan", CompileError)
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    *,
    length: Size | None = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """`carry, y = f(carry, x)` for each row x of `xs`; gives the last carry and the y stacked. (jax.lax.scan)

    `xs` is a tree of arrays [n, ...], or None with `length` n. The carry keeps structure, shapes and element types;
    else `ShapeError` names the leaf. `reverse` goes from the last row to the first; y of row i is row i of the result.
    """
    with opened("scan", [init, xs]) as outer:
        return _scan("scan", outer, f, init, xs, length, reverse)


def _scan(
    what: str, outer: Frame, f: Callable[..., Any], init: Any, xs: Any, length: Size | None, reverse: bool
) -> tuple[Any, Any]:
    sequences: list[Value] = []
    total = length
    for path, leaf in leaves_of(xs, "xs"):
        value = value_of(outer, leaf, f"{what}: {path}")
        if value.rank == 0:
            raise ShapeError(f"{what}: {path} is {value.type}: it needs an axis to go along")
        total = value.shape[0] if total is None else unify(total, value.shape[0], f"{what}: {path} in its first axis")
        sequences.append(value)
    if total is None:
        raise ShapeError(f"{what}: without xs the number of rounds is needed: give length=")

    def rows() -> list[Value]:
        made = [Value(outer.graph, TensorType(v.shape[1:], v.dtype), "input", "") for v in sequences]
        return list(_marked(made, [v.weak for v in sequences]))

    def trace(first: list[Value]) -> _Traced:
        traced = _trace(outer, "body", f, [init, xs], [*first, *rows()])
        if not isinstance(traced.tree, tuple) or len(traced.tree) != 2:
            raise OptionError(f"{what}: f must return (carry, y), got {traced.tree!r}")
        return traced

    first, body, after = _settle(what, outer, init, trace, lambda tree: tree[0])
    stacked = [value for _, value in body.leaves[len(first) :]]
    captured = _captured(body)
    op = Scan(len(first), len(sequences), length if not sequences else None, reverse)
    region = body.close(captured, [*after, *stacked])
    made = outer.graph.add(op, *first, *sequences, *captured, regions=[region])
    _marked(made[: len(first)], [v.weak for v in first])
    return fill(init, made[: len(first)]), fill(body.tree[1], made[len(first) :])
