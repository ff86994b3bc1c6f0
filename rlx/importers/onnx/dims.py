"""The sizes of a model's inputs: what the file says, and what the user's `dims` fix or bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlx.errors import OptionError, ShapeError, unknown_dim
from rlx.importers.onnx.model import ValueInfo
from rlx.importers.size_names import expressed
from rlx.ir.shape import Dim, Shape, Size, check_text, symbols

__all__ = ["Bound", "DimsOption", "input_shapes", "of_names_and_parts", "own_names", "settled", "unknown_dims"]

Bound = int | tuple[int, int | None] | Dim | None
DimsOption = Mapping[str, Bound | str | Sequence[Bound | str] | Mapping[int, Bound | str]]
_FORMS = "an int (fixed), a pair (lo, hi), a Dim, or None (as in the file)"
_OWN_FORMS = "another name, an int (fixed), a pair (lo, hi), a Dim, or None (as in the file)"


def input_shapes(inputs: Sequence[ValueInfo], dims: DimsOption | None) -> tuple[dict[str, Shape], dict[str, Bound]]:
    """The shape of each input whose rank is known, with `dims` applied, and the entries of `dims` for other dims.

    Named sizes are one `Dim` a name, but a name that is an expression of others, as `past + 1`, is that expression
    unless `dims` says something of it; sizes without one are named after input and axis ("x.2"). `dims` are given by
    dim name or by input, `{"x": (1, 3, (32, 960), (32, 960))}`. What is given by input and axis, `{"y": {0: "M"}}`, or
    another name (or expression of names) in the place of an axis, is for that axis alone: it parts it from others that
    the file gives the same name. Raises `OptionError` for malformed entries, `ShapeError` for one that contradicts the
    file.
    """
    declared = _declared(inputs)
    given = dict(dims or {})
    for info in inputs:
        _part(declared, given, info.name)
    wholes: dict[str, Sequence[Bound]] = {}
    names = {size for shape in declared.values() for size in shape if isinstance(size, str)}
    for info in inputs:
        entry = given.get(info.name)
        if info.name in names or not isinstance(entry, tuple | list):
            continue
        shape = declared.setdefault(info.name, tuple(f"{info.name}.{d}" for d in range(len(entry))))
        if len(shape) != len(entry):
            raise ShapeError(f"dims[{info.name!r}] has {len(entry)} sizes, the input has {len(shape)}: {shape}")
        names.update(size for size in shape if isinstance(size, str))
        wholes[info.name] = entry
        del given[info.name]
    own = {i.name for i in inputs}
    for name, bound in given.items():
        if name in own and name not in names:
            raise OptionError(f"dims[{name!r}] is {bound!r}; an input needs one entry for each axis, each {_FORMS}")
    sizes: dict[str, Size] = {}
    others: dict[str, Bound] = {}
    for name, bound in given.items():
        if isinstance(bound, list):
            bound = tuple(bound)
        if name not in names:
            others[name] = bound  # type: ignore[assignment]
            continue
        _settle(sizes, name, bound, f"dims[{name!r}]")  # type: ignore[arg-type]
    for name, entry in wholes.items():
        for d, (bound, size) in enumerate(zip(entry, declared[name], strict=True)):
            what = f"dims[{name!r}][{d}]"
            if isinstance(size, str):
                _settle(sizes, size, bound, what)
            else:
                _check_fixed(size, bound, what)
    left = [size for shape in declared.values() for size in shape if isinstance(size, str) and size not in sizes]
    plain: dict[str, Size] = {**{name: Dim(name) for name in left}, **sizes}
    for name in left:
        meant = expressed(name, plain)
        sizes[name] = plain[name] if meant is None else meant
    shapes = {
        name: tuple(sizes[size] if isinstance(size, str) else size for size in shape)
        for name, shape in declared.items()
    }
    return shapes, others


def _part(declared: dict[str, tuple[int | str, ...]], given: dict[str, Any], name: str) -> None:
    """Gives axes of an input names of their own, as far as entries of `dims` ask for it; these come out of `given`."""
    entry: Any = given.get(name)
    whole = isinstance(entry, tuple | list) and any(isinstance(bound, str) for bound in entry)
    if not whole and not isinstance(entry, Mapping):
        return
    if name not in declared:
        if not whole:
            raise ShapeError(f"dims[{name!r}]: the file does not say the rank of the input; give all of its sizes")
        declared[name] = tuple(f"{name}.{d}" for d in range(len(entry)))
    shape = list(declared[name])
    if whole and len(entry) != len(shape):
        raise ShapeError(f"dims[{name!r}] has {len(entry)} sizes, the input has {len(shape)}: {tuple(shape)}")
    asked = {d: b for d, b in enumerate(entry) if isinstance(b, str)} if whole else dict(entry)
    for axis, bound in asked.items():
        if not isinstance(axis, int) or isinstance(axis, bool) or not 0 <= axis < len(shape):
            raise OptionError(f"dims[{name!r}]: {axis!r} is no axis of the input of shape {tuple(shape)}")
        what, size = f"dims[{name!r}][{axis}]", shape[axis]
        if bound is None:
            continue
        if isinstance(size, int):
            if isinstance(bound, str):
                raise ShapeError(f"{what} is {bound!r}; the file fixes this size to {size}")
            _check_fixed(size, bound, what)
        elif isinstance(bound, str):
            check_text(what, bound)
            if not bound:
                raise OptionError(f"{what} is an empty name; expected {_OWN_FORMS}")
            shape[axis] = bound
        else:
            own = f"{name}.{axis}"
            taken = {*given, *shape, *(s for other in declared.values() for s in other)}
            while own in taken:
                own += "'"
            _size(own, bound, what, _OWN_FORMS)
            shape[axis] = own
            given[own] = bound
    declared[name] = tuple(shape)
    if whole:
        given[name] = tuple(None if isinstance(b, str) else b for b in entry)
    else:
        del given[name]


def of_names_and_parts(inputs: Sequence[ValueInfo], dims: DimsOption) -> dict[str, Any]:
    """The entries by parts of names, as "N (b)", and those by the names themselves, which are for the other parts."""
    names = {size for info in inputs for size in info.shape or () if isinstance(size, str)}
    known = names | {info.name for info in inputs}
    found: dict[str, Any] = {}
    for part, bound in dims.items():
        for name in names if part not in known else ():
            if isinstance(part, str) and part.startswith(f"{name} ("):
                found |= {part: bound} | {n: dims[n] for n in (name,) if n in dims}
    return found


def own_names(dims: DimsOption | None) -> set[str]:
    """The names that `dims` give to single sizes: each is one dim wherever it stands."""
    found: set[str] = set()
    for entry in (dims or {}).values():
        bounds = entry.values() if isinstance(entry, Mapping) else entry if isinstance(entry, tuple | list) else ()
        for bound in bounds:
            if isinstance(bound, str | Dim):
                found |= {bound} if isinstance(bound, str) else {s.name for s in symbols(bound)}
    return found


def settled(name: str, bound: Bound) -> Size:
    """The size that an entry of `dims` for a dim makes of it."""
    return Dim(name) if bound is None else _size(name, bound, f"dims[{name!r}]")


def _declared(inputs: Sequence[ValueInfo]) -> dict[str, tuple[int | str, ...]]:
    taken = {size for info in inputs for size in info.shape or () if isinstance(size, str)}
    shapes: dict[str, tuple[int | str, ...]] = {}
    for info in inputs:
        if info.shape is None:
            continue
        shape = []
        for d, size in enumerate(info.shape):
            if size is None:
                size = f"{info.name}.{d}"
                while size in taken:
                    size += "'"
                taken.add(size)
            shape.append(size)
        shapes[info.name] = tuple(shape)
    return shapes


def unknown_dims(given: Iterable[str], inputs: Sequence[ValueInfo], produced: Iterable[str]) -> OptionError:
    """The error for the first name in `dims` that means nothing."""
    known = {size for shape in _declared(inputs).values() for size in shape if isinstance(size, str)} | set(produced)
    return unknown_dim(next(iter(given)), sorted(known), (info.name for info in inputs))


def _settle(sizes: dict[str, Size], name: str, bound: Bound, what: str) -> None:
    """Fixes or bounds the dim `name`; what was said about it before must agree."""
    if bound is None:
        return
    size = _size(name, bound, what)
    before = sizes.get(name)
    if before is not None and before != size:
        raise OptionError(f"{what}: the dim {name!r} is {_show(size)} here and {_show(before)} elsewhere in dims")
    sizes[name] = size


def _size(name: str, bound: Bound, what: str, forms: str = _FORMS) -> Size:
    if isinstance(bound, Dim):
        return bound
    if isinstance(bound, int) and not isinstance(bound, bool) and bound >= 0:
        return bound
    if isinstance(bound, tuple | list) and len(bound) == 2:
        lo, hi = bound
        if isinstance(lo, int) and (hi is None or isinstance(hi, int)) and lo >= 0 and (hi is None or lo <= hi):
            return lo if lo == hi else Dim(name, lo, hi)
    raise OptionError(f"{what} is {bound!r}; expected {forms}")


def _show(size: Size) -> str:
    if isinstance(size, Dim) and size.symbol:
        return f"{size.symbol.name} in {size.symbol.lo}..{'' if size.symbol.hi is None else size.symbol.hi}"
    return str(size)


def _check_fixed(size: int, bound: Bound, what: str) -> None:
    """A size that the file fixes may be repeated, or lie in a bound."""
    if bound is None or bound == size:
        return
    found = _size("size", bound, what)
    symbol = found.symbol if isinstance(found, Dim) else None
    if symbol is None or not symbol.lo <= size or (symbol.hi is not None and size > symbol.hi):
        raise ShapeError(f"{what} is {bound!r}; the file fixes this size to {size}")
