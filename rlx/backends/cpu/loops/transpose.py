"""Transposes: square tiles that are loaded along one axis, turned in registers, and stored along another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, vec
from rlx.backends.cpu.loops.emitter import Emitter, Scope
from rlx.ir.shape import Size
from rlx.kernels.affine import affine
from rlx.kernels.expr import Expr, Load, Reduce, Var, walk

__all__ = ["emit_tile", "tile_axis", "transposed"]


def tile_axis(expr: Expr, target: Expr, names: Sequence[Var], sizes: Sequence[Size], lanes: int) -> Var | None:
    """The outer loop along which the loads that are not contiguous along the last one are, if it is worth tiles."""
    if len(names) < 2 or affine(target).coefs.get(names[-1]) != 1 or any(isinstance(x, Reduce) for x in walk(expr)):
        return None
    turned = _turned(expr, names[-1])
    for name, size in zip(names[:-1], sizes[:-1], strict=True):
        fits = all(isinstance(s, int) and s >= lanes for s in (size, sizes[-1]))
        if fits and turned and all(x.where is None and _along(x, name) for x in turned):
            return name
    return None


def _turned(expr: Expr, last: Var) -> list[Load]:
    loads = [x for x in walk(expr) if isinstance(x, Load)]
    return [x for x in loads if affine(x.indices[0]).coefs.get(last, 0) not in (0, 1)]


def _along(load: Load, name: Var) -> bool:
    form = affine(load.indices[0])
    return form.is_linear and form.coefs.get(name) == 1


def emit_tile(
    emitter: Emitter, expr: Expr, axis: Var, last: Var, row: Scope, column: str, put: Callable[[Scope], None]
) -> None:
    """Emits a tile of as many rows along `axis` (from where `row` has it) as lanes, at `column` of the last loop."""
    f, w = emitter.f, emitter.lanes
    corner = row.inner({last: column})
    tiles: dict[Load, list[str]] = {}
    for load in _turned(expr, last):
        ty = convert.memory_type(load.dtype)
        step = emitter.size(affine(load.indices[0]).coefs[last])
        address = emitter.address(load, corner)
        lines = []
        for _ in range(w):
            lines.append(f.load(vec(ty, w), address))
            address = f.gep(address, step, ty)
        tiles[load] = transposed(f, lines)
    for j in range(w):
        scope = row.inner({axis: f.add(row.vars[axis], j, "i64") if j else row.vars[axis], last: column}, w, last)
        for load, lines in tiles.items():
            scope.cache[load] = (convert.from_memory(f, lines[j], load.dtype, w), w)
        put(scope)


def transposed(f: Function, rows: list[str]) -> list[str]:
    """Exchanges the off-diagonal blocks of ever smaller squares."""
    w = len(rows)
    distance = w // 2
    while distance:
        for i in range(w):
            if i & distance:
                continue
            a, b = rows[i], rows[i + distance]
            low = [j + w - distance if j & distance else j for j in range(w)]
            high = [j + w if j & distance else j + distance for j in range(w)]
            rows[i], rows[i + distance] = f.shuffle(a, b, low), f.shuffle(a, b, high)
        distance //= 2
    return rows
