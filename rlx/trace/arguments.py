"""How the calls of a traced function are read: the arrays in order, a key that tells traces apart, names of leaves."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.dtype import dtype_of
from rlx.ir.graph import Array, TensorType, refuse_masked
from rlx.ir.shape import Dim, Shape, Size
from rlx.records import dataclass
from rlx.runtime.arrays import on_device, read_array
from rlx.trace.tree import is_record, leaves_of, ordered, structure
from rlx.units import as_int, with_ints

__all__ = ["Arguments", "Leaf"]

NUMBERS = (float, int, bool)
_Layout = tuple[str, list[tuple[str, Any]]]  # the names of arguments; each with its position in calls, or keyword


class WrongCall(OptionError, TypeError):
    """A call with other arguments than the function has."""


@dataclass(frozen=True)
class Leaf:
    """An array argument: where it is in the call, its type, and whether it was a Python number."""

    path: str
    type: TensorType
    number: bool

    def __str__(self) -> str:
        return f"{self.path}: {'number ' if self.number else ''}{self.type}"


@dataclass(frozen=True)
class _Sizes:
    """What was asked of the axes of an argument: a size by axis, and how many axes there are if that was said."""

    by_axis: dict[int, Any]
    rank: int | None = None


class Arguments:
    """The parameters of a function, which of them are static, and which axes of the others are dynamic.

    Those whose default is a string are static: no array can stand for one. A parameter that a call leaves out is no
    argument of it: the function has its default as it is. What Python can't tell the parameters of takes any.
    """

    def __init__(self, function: Callable[..., Any], static: Iterable[str | int], dims: Mapping[str, Any]) -> None:
        self.name = _name_of(function)
        try:
            self.signature = inspect.signature(function)
        except ValueError:
            self.signature = inspect.signature(lambda *args, **kwargs: None)
        self.names = tuple(self.signature.parameters)
        worded = {name for name, p in self.signature.parameters.items() if isinstance(p.default, str | bytes)}
        self.static = frozenset(self._static_name(one) for one in static) | worded
        self.axes, self.bounds = self._specs({**_annotated(function), **dims})
        self.dynamic = frozenset(path.split(".")[0] for path in self.axes)  # the arguments with dynamic axes
        self._layouts: dict[Any, _Layout | None] = {}  # by how many arguments come how: see `_layout`
        self._masks: dict[str, tuple[int, tuple[int, ...]]] = {}  # of arrays seen: their rank and dynamic axes

    def _static_name(self, one: str | int) -> str:
        position = as_int(one)
        if position is not None and 0 <= position < len(self.names):
            return self.names[position]
        if not isinstance(one, str) or one not in self.names:
            raise OptionError(f"jit: {self.name} has no argument {one!r} to be static; it has {', '.join(self.names)}")
        return str(one)

    # ---- dynamic axes

    def _specs(self, dims: Mapping[str, Any]) -> tuple[dict[str, _Sizes], dict[str, Any]]:
        """For each argument (or leaf of one) the sizes given for its axes; and the bounds given for names of dims."""
        axes: dict[str, _Sizes] = {}
        bounds: dict[str, Any] = {}
        for name, spec in with_ints(dims).items():
            if name.split(".")[0] not in self.names:
                bounds[name] = spec
            elif isinstance(spec, Mapping):
                axes[name] = _Sizes(dict(spec))
            elif isinstance(spec, Sequence) and not isinstance(spec, str):
                axes[name] = _Sizes(dict(enumerate(spec)), len(spec))
            else:
                raise OptionError(
                    f"jit: dims[{name!r}]={spec!r}: expected a size for each axis, such as ('batch', None), or "
                    "{axis: size}"
                )
        asked = [size for sizes in axes.values() for size in sizes.by_axis.values()]
        used = {s for s in asked if isinstance(s, str)}
        used |= {s.symbol.name for s in asked if isinstance(s, Dim) and s.symbol}
        for name in bounds:
            if name not in used:
                known = ", ".join(map(repr, (*self.names, *sorted(used))))
                raise OptionError(f"jit: dims: there is no argument or dim {name!r}; there are {known}")
        return axes, bounds

    def _dim(self, path: str, axis: int, spec: Any) -> Size | None:
        """The size that a spec of an axis means; None: that of the array."""
        match spec:
            case None:
                return None
            case Dim():
                return spec
            case str():
                bound = self.bounds.get(spec)
                if isinstance(bound, int):
                    return bound
                lo, hi = bound if bound is not None else (1, None)
                return Dim(spec, lo, hi)
            case int() if not isinstance(spec, bool):
                return spec
            case (int(lo), int() | None as hi):
                return Dim(f"{path}_{axis}", lo, hi)
        raise OptionError(f"jit: dims[{path!r}]: {spec!r} is no size: expected a name, a Dim, an int, a pair or None")

    def _asked(self, path: str) -> _Sizes | None:
        """The sizes for a leaf: given for it, or for the argument that it is a part of."""
        while path not in self.axes:
            if "." not in path:
                return None
            path = path.rpartition(".")[0]
        return self.axes[path]

    def shape(self, path: str, shape: Shape) -> Shape:
        """The shape that a leaf is traced with: dims where they were asked for."""
        asked = self._asked(path)
        if asked is None:
            return shape
        if asked.rank not in (None, len(shape)):
            raise ShapeError(f"jit: dims names {asked.rank} sizes for {path}, which has {len(shape)} axes")
        sizes = list(shape)
        for axis, one in asked.by_axis.items():
            if not -len(shape) <= axis < len(shape):
                raise ShapeError(f"jit: dims names axis {axis} of {path}, which has {len(shape)} axes")
            size = self._dim(path, axis % len(shape), one)
            if isinstance(size, int) and size != sizes[axis]:
                raise ShapeError(f"jit: dims: axis {axis} of {path} is to be {size}, got {sizes[axis]}")
            sizes[axis] = sizes[axis] if size is None else size
        return tuple(sizes)

    # ---- calls

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Array], Any]:
        """The arrays of a call in order, and the key of the trace that serves it."""
        arrays: list[Array] = []
        form = (len(args), *kwargs)
        layout = self._layouts[form] if form in self._layouts else self._layout(form)
        if layout is None:
            bound = self.bind(args, kwargs)
            names, pairs = " ".join(bound), list(bound.items())
        else:
            names, sources = layout
            pairs = [(n, args[source] if type(source) is int else kwargs[source]) for n, source in sources]
        key: list[Any] = [names]
        for name, value in pairs:
            if name in self.static:
                key.append((type(value), _hashable(name, value)))
            elif name in self.dynamic:
                self._read_dynamic(name, value, arrays, key)
            else:
                _flat(value, arrays, key)
        return arrays, tuple(key)

    def _layout(self, form: tuple[Any, ...]) -> _Layout | None:
        """Where the arguments come from in calls of this form: so many by position, these by name.

        None for calls that can't be laid out beforehand: of functions with *args or **kwargs, or wrong ones.
        """
        count, *named = form
        parameters = self.signature.parameters
        found = None
        if all(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values()):
            try:
                given = self.signature.bind(*range(count), **{name: name for name in named}).arguments
            except TypeError:
                return None
            found = " ".join(given), list(given.items())
        self._layouts[form] = found
        return found

    def _read_dynamic(self, name: str, value: Any, arrays: list[Array], key: list[Any]) -> None:
        """An argument with dynamic axes: their extents are no part of the key."""
        if type(value) is np.ndarray and name in self._masks:
            rank, axes = self._masks[name]
            shape = value.shape
            if len(shape) == rank:
                arrays.append(value)
                key.append((value.dtype, tuple([None if d in axes else n for d, n in enumerate(shape)])))
                return
        key.append(structure(value))
        for path, leaf in leaves_of(value, name):
            array = _array(path, leaf)
            arrays.append(array)
            declared = self.shape(path, array.shape)
            axes = tuple(d for d, size in enumerate(declared) if isinstance(size, Dim))
            if path == name and type(leaf) is np.ndarray:
                self._masks[name] = array.ndim, axes
                key.pop()
            fixed = tuple(None if d in axes else n for d, n in enumerate(array.shape))
            key.append((type(leaf) if isinstance(leaf, NUMBERS) else array.dtype, fixed))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, in the order of the parameters."""
        try:
            return dict(self.signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise WrongCall(f"{self.name}: {error}") from None

    def leaves(self, bound: Mapping[str, Any]) -> list[Leaf]:
        """What the array arguments are, in the order of `read`. Raises errors that name the leaf."""
        found: list[Leaf] = []
        for name, value in bound.items():
            for path, leaf in [] if name in self.static else leaves_of(value, name):
                if any(path == other.path for other in found):
                    raise OptionError(f"jit: two leaves of the arguments are both named {path!r}: rename a key")
                if isinstance(leaf, TensorType):
                    found.append(Leaf(path, leaf, False))
                    continue
                array = _array(path, leaf)
                if array.dtype == object or isinstance(leaf, str | bytes):
                    raise OptionError(
                        f"jit: {path} is a {type(leaf).__name__}: expected arrays, or name it in static= where traces "
                        "should depend on its value"
                    )
                try:
                    dtype = dtype_of(array.dtype)
                except DTypeError as error:
                    raise DTypeError(f"jit: {path}: {error}") from None
                found.append(Leaf(path, TensorType(self.shape(path, array.shape), dtype), isinstance(leaf, NUMBERS)))
        return found


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _annotated(function: Callable[..., Any]) -> dict[str, Any]:
    """Sizes given in annotations, as in `x: Annotated[np.ndarray, ("batch", 3)]`."""
    if not getattr(function, "__annotations__", None):
        return {}
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # of types that are only there for a type checker
        return {}
    found = {}
    for name, hint in hints.items():
        for meta in getattr(hint, "__metadata__", ()):
            if isinstance(meta, tuple | list | dict) and name != "return":
                found[name] = meta
    return found


def _hashable(name: str, value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        raise OptionError(
            f"jit: the static argument {name}={value!r} can't be hashed: pass a tuple or a number, or make it an array "
            "argument"
        ) from None
    return value


def _array(path: str, leaf: Any) -> Any:
    if type(leaf) is np.ndarray:
        return leaf
    refuse_masked(f"jit: {path}", leaf)
    if on_device(leaf):
        return leaf
    return read_array(leaf, f"jit: {path}") if hasattr(leaf, "__dlpack__") else np.asarray(leaf)


def _flat(tree: Any, arrays: list[Array], key: list[Any]) -> None:
    """Appends the arrays of a tree, and what traces depend on: structure, types and shapes."""
    kind = type(tree)
    if kind is np.ndarray:
        arrays.append(tree)
        key.append((tree.dtype, tree.shape))
    elif kind in NUMBERS:
        arrays.append(np.asarray(tree))
        key.append(kind)
    elif tree is None:
        key.append(None)
    elif isinstance(tree, dict):
        keys = ordered(tree)
        key.append(tuple(keys))
        for one in keys:
            _flat(tree[one], arrays, key)
    elif isinstance(tree, tuple | list):
        key.append((kind, len(tree)))
        for value in tree:
            _flat(value, arrays, key)
    elif isinstance(tree, TensorType):
        key.append(tree)
    elif is_record(tree):
        key.append(kind)
        for f in fields(tree):
            _flat(getattr(tree, f.name), arrays, key)
    else:
        array = _array("an argument", tree)
        arrays.append(array)
        key.append((array.dtype, array.shape))
