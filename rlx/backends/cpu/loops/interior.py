"""The part of a row in which tests of indices hold, such as the windows of a pool that don't reach into the padding."""

from __future__ import annotations

from rlx.backends.cpu.loops.emitter import Emitter, Scope
from rlx.ir.shape import Dim, Size
from rlx.kernels.affine import Affine, affine
from rlx.kernels.expr import Apply, Expr, Load, Reduce, Select, Var, conjuncts, const, transform, walk
from rlx.records import replace

__all__ = ["drop_tests", "index_tests", "interior", "outside_of"]

LARGEST = 1 << 31  # of the factors of a form; times the extent of a loop it stays below 63 bits


def index_tests(expr: Expr, last: Var) -> dict[Expr, Affine]:
    """The tests of loads and selections as forms that are >= 0 where the test holds, lowest over reduction variables.

    Only tests that are linear in the loops; those of a row alone are among them.
    """
    extents: dict[Var, Size] = {}
    for x in walk(expr):
        if isinstance(x, Reduce):
            for var, size in zip(x.vars, x.extents, strict=True):
                if extents.setdefault(var, size) != size:
                    return {}
    found: dict[Expr, Affine] = {}
    for x in walk(expr):
        condition = x.where if isinstance(x, Load) else x.cond if isinstance(x, Select) else None
        for test in conjuncts(condition):
            form = _lowest(test, extents)
            if form is not None and isinstance(form.coefs.get(last, 0), int):
                found[test] = form
    return found


def _lowest(test: Expr, extents: dict[Var, Size]) -> Affine | None:
    """The form that is >= 0 exactly where a comparison of indices holds, at its lowest over the reductions."""
    if not isinstance(test, Apply) or test.fn not in ("ge", "gt", "le", "lt") or test.args[0].dtype.name != "i64":
        return None
    a, b = (affine(e) for e in (test.args if test.fn[0] == "g" else test.args[::-1]))
    form = a.plus(b, -1).plus(Affine(-1 if test.fn[1] == "t" else 0))
    if not all(_is_small(size) for side in (a, b, form) for size in (side.constant, *side.coefs.values())):
        return None
    for term, coef in form.coefs.items():
        if not isinstance(term, Var):
            return None
        if term in extents:
            if not isinstance(coef, int):
                return None
            worst = coef * (extents[term] - 1) if coef < 0 else 0
            form = Affine(form.constant + worst, {t: c for t, c in form.coefs.items() if t != term})
    return form


def _is_small(size: Size) -> bool:
    """Whether its factors are those of indices: with larger ones, from i64 data, the form has another value than
    arithmetic that wraps."""
    return all(abs(factor) <= LARGEST for _, factor in (size.terms if isinstance(size, Dim) else (((), size),)))


def drop_tests(expr: Expr, tests: dict[Expr, Affine]) -> Expr:
    """The expression where all of the tests hold."""

    def visit(x: Expr) -> Expr | None:
        if isinstance(x, Load) and x.where is not None:
            rest = None
            for test in conjuncts(x.where):
                if test not in tests:
                    rest = test if rest is None else rest & test
            return replace(x, where=rest)
        if isinstance(x, Select) and all(test in tests for test in conjuncts(x.cond)):
            return x.a
        return None

    return transform(expr, visit)


def outside_of(expr: Expr, tests: dict[Expr, Affine]) -> Expr | None:
    """The expression where some test fails, if it tests one thing: every condition is that all of them hold.

    No index may depend on one: vectors of what is outside go on into the interior, where that index is of no element.
    """
    nodes = walk(expr)
    conditions = [x.where if isinstance(x, Load) else x.cond for x in nodes if isinstance(x, Load | Select)]
    one = all(set(conjuncts(c)) == set(tests) for c in conditions if c is not None)
    if not tests or not one or any(isinstance(x, Reduce) for x in nodes):  # the forms of reductions are at their lowest
        return None
    within = [y for x in nodes if isinstance(x, Load) for index in x.indices for y in walk(index)]
    if any(isinstance(y, Select) or (isinstance(y, Load) and y.where is not None) for y in within):
        return None

    def visit(x: Expr) -> Expr | None:
        if isinstance(x, Load) and x.where is not None:
            return const(0, x.dtype)
        return x.b if isinstance(x, Select) else None

    return transform(expr, visit)


def interior(
    emitter: Emitter, tests: dict[Expr, Affine], last: Var, start: str, stop: str, scope: Scope
) -> tuple[str, str]:
    """The part of [start, stop) of the loop over `last` in which all tests hold, found at the scope of a row."""
    f = emitter.f
    low, high = start, stop
    for form in tests.values():
        step = form.coefs.get(last, 0)
        rest = Affine(form.constant, {t: c for t, c in form.coefs.items() if t != last})
        emitter.preload([], [rest.constant, *rest.coefs.values()])
        value = emitter.sum(rest, scope)  # the test is step * last + value >= 0
        assert isinstance(step, int)
        if step == 0:
            high = f.select(f.cmp("ge", value, 0, "i64"), high, low, "i64")
        elif step > 0:
            needed = f.max(f.sub(0, value, "i64"), 0, "i64")
            low = f.max(low, _divided(emitter, f.add(needed, step - 1, "i64"), step), "i64")
        else:
            high = f.min(high, _divided(emitter, f.max(f.sub(value, step, "i64"), 0, "i64"), -step), "i64")
    low = f.min(low, stop, "i64")
    return low, f.min(f.max(low, high, "i64"), stop, "i64")


def _divided(emitter: Emitter, value: str, by: int) -> str:
    return value if by == 1 else emitter.f.binary("udiv", value, by, "i64")
