"""Values of a graph: their types, and what Python's operators, NumPy's functions and methods do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.boundary import MARK, bounded
from rlx.errors import CompileError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES, DType, dtype_of
from rlx.ir.encoding import Encoding, encoding_named
from rlx.ir.shape import Dim, Shape, Size, bounds, numel, upper
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.ir.graph import Graph, Node

__all__ = ["OPEN", "Array", "TensorType", "Value", "const_value", "register_methods", "stored_as"]

Array = np.ndarray[Any, np.dtype[Any]]
MAX_RANK = 64  # axes of a tensor, as in NumPy
MAX_BYTES = 2**63 - 1  # of a tensor


@dataclass(frozen=True)
class TensorType:
    """Shape (ints and `Dim`s), element type and storage encoding of a value; both also by name ("f32", "q8_0").

    Raises `ShapeError`, `DTypeError` or `OptionError` for what is none.
    """

    shape: Shape
    dtype: DType
    encoding: Encoding | None

    def __init__(self, shape: Sequence[Size], dtype: object, encoding: object = None) -> None:
        plain = type(shape) is tuple and all(type(s) is Dim or (type(s) is int and s >= 0) for s in shape)
        known = encoding is None or isinstance(encoding, Encoding)
        object.__setattr__(self, "shape", shape if plain else _checked_shape(shape))
        object.__setattr__(self, "dtype", dtype if type(dtype) is DType else dtype_of(dtype))
        object.__setattr__(self, "encoding", encoding if known else encoding_named(encoding))
        _check_limits(self)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def decoded(self) -> TensorType:
        """The type of the same elements stored one by one."""
        return self if self.encoding is None else TensorType(self.shape, self.dtype)

    def __str__(self) -> str:
        suffix = f"@{self.encoding.name}" if self.encoding else ""
        return f"{self.dtype}{suffix}[{', '.join(str(s) for s in self.shape)}]"

    def nbytes(self) -> int | None:
        """Stored bytes at the upper bounds of the shape; None when a size is unbounded."""
        sizes = [upper(s) for s in self.shape]
        if any(s is None for s in sizes):
            return None
        known = [s for s in sizes if s is not None]
        if self.encoding:
            return self.encoding.nbytes(known)
        count = 1
        for size in known:
            count *= size
        return self.dtype.nbytes(count)


def stored_as(name: object) -> tuple[DType, Encoding | None]:
    """The elements and the encoding that a name stands for: a type ("f16"), or a block format of f32 ("q8_0")."""
    if isinstance(name, str) and name not in DTYPES:
        return DTYPES["f32"], encoding_named(name)
    return dtype_of(name), None


def _check_limits(type: TensorType) -> None:
    """Raises `ShapeError` for a tensor that no array can hold: NumPy's limits, where axes of size 0 don't help."""
    if len(type.shape) > MAX_RANK:
        raise ShapeError(
            f"a tensor of {len(type.shape)} axes: there may be at most {MAX_RANK}; merge some by a reshape"
        )
    count = 1
    for size in type.shape:
        least = size if isinstance(size, int) else bounds(size)[0]
        count *= least or 1
    if count > MAX_BYTES * 8 // type.dtype.bits:
        raise ShapeError(
            f"{type}: the sizes other than 0 come to {count} elements, more than any memory can address (2^63 bytes)"
        )


def _checked_shape(shape: object) -> Shape:
    if not isinstance(shape, list | tuple):
        raise ShapeError(f"a shape is a tuple or list of sizes, got {shape!r}")
    for size in shape:
        if not isinstance(size, int | Dim | np.integer) or isinstance(size, bool):
            raise ShapeError(f"a size is an int or a Dim, got {size!r}")
        if not isinstance(size, Dim) and size < 0:
            raise ShapeError(f"a size can't be negative, got {size} (a size not known yet is a Dim)")
    return tuple(s if isinstance(s, Dim) else int(s) for s in shape)


OPEN: ContextVar[Any] = ContextVar("rlx_open", default=None)  # the innermost frame of rlx.ir.frames
_METHODS: dict[str, Any] = {}  # arithmetic of values, filled in by rlx.ops so that ir need not know the ops
_MORE: list[Callable[[], object]] = []  # what registers further ones when they are first asked for


class Value:
    """One tensor of a graph: a leaf (input, param, const, state) or an output of a node.

    In a function that is being traced `==` compares element by element; in a graph built by hand it is identity, and
    `rlx.equal` compares.
    """

    __slots__ = ("data", "graph", "index", "kind", "name", "node", "type", "weak")

    def __init__(
        self, graph: Graph, type: TensorType, kind: str, name: str, node: Node | None = None, index: int = 0
    ) -> None:
        self.graph = graph
        self.type = type
        self.kind = kind  # "input", "param", "const", "state" or "node"
        self.name = name
        self.node = node
        self.index = index
        self.data: Array | None = None  # const: its value; param and state: the initial one, if any
        self.weak = False  # whether it stands for a Python number: it then takes the element type of what it meets

    @property
    def shape(self) -> Shape:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def rank(self) -> int:
        return len(self.type.shape)

    def __repr__(self) -> str:
        source = self.name or (self.node.op.op_name if self.node is not None else "?")
        return f"<{self.kind} {source}: {self.type}>"

    @property
    def ndim(self) -> int:
        return len(self.type.shape)

    @property
    def size(self) -> Size:
        """The number of elements."""
        return numel(self.type.shape)

    def __bool__(self) -> bool:
        raise OptionError(
            f"the truth of {self!r} is not known while the graph is built: choose elements by rlx.where, what to do by "
            "rlx.cond, when to stop by rlx.while_loop"
        )

    def _not_known(self, *args: object, **kwargs: object) -> Any:
        raise OptionError(
            f"the elements of {self!r} are not known while the graph is built: it can't become a Python number or a "
            "NumPy array, nor be stored into one (np.stack joins values, x.at[i].set(v) replaces elements); choose by "
            "rlx.where or rlx.cond, loop by rlx.fori_loop, and make what must be known a static argument"
        )

    __int__ = __float__ = __complex__ = __index__ = __array__ = item = tolist = _not_known

    def __setitem__(self, key: object, new: object) -> None:
        raise OptionError("graph values can't be written into: x = x.at[key].set(new) gives a changed one")

    def _is_traced(self) -> bool:
        frame = OPEN.get()
        return frame is not None and frame.encloses(self.graph)

    def __eq__(self, other: object) -> Any:
        return self._binary("equal", other) if self._is_traced() and _comparable(other) else self is other

    def __ne__(self, other: object) -> Any:
        return self._binary("not_equal", other) if self._is_traced() and _comparable(other) else self is not other

    __hash__ = object.__hash__

    @property
    def device(self) -> str:
        """`host`: while a function is traced there is no other; what it is compiled for, `rlx.jit` is told."""
        return "host"

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """The functions of the array API standard over graph values (`docs/array-api.md`)."""
        return _method("array_namespace")(self, api_version)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return _method("array_ufunc")(ufunc, method, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _method("array_function")(function, args, kwargs)

    def __len__(self) -> int:
        if not self.shape or not isinstance(self.shape[0], int):
            raise ShapeError(
                f"len of {self!r}: only a static first axis has one; loop over rows by rlx.scan, or take x.shape[0]"
            )
        return self.shape[0]

    def __iter__(self) -> Iterator[Value]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: object) -> Value:
        return self._binary("getitem", key)

    @property
    def T(self) -> Value:
        """The axes in reverse order."""
        return self._unary("transpose")

    @property
    def mT(self) -> Value:
        """The last two axes exchanged."""
        return self._unary("matrix_transpose")

    @property
    def real(self) -> Value:
        """The real part; of what is real, itself. (numpy.ndarray.real)"""
        return self._unary("real")

    @property
    def imag(self) -> Value:
        """The imaginary part; of what is real, zeros. (numpy.ndarray.imag)"""
        return self._unary("imag")

    @property
    def at(self) -> Any:
        """`x.at[key].set(v)`, `.add(v)` and so on: x with the elements at `key` changed. (jax.numpy.ndarray.at)"""
        return _method("at")(self)

    def __getattr__(self, name: str) -> Any:
        found = None if name.startswith("_") else _method(name)
        if found is None:
            raise AttributeError(f"a graph value has no attribute {name!r}")
        return found.__get__(self)

    def _binary(self, op: str, other: object, swap: bool = False) -> Value:
        operator = (None if OPEN.get() is None else _method(f"np.{op}")) or _method(op)
        result: Value = operator(other, self) if swap else operator(self, other)
        return result

    def _unary(self, op: str) -> Value:
        operator = None if OPEN.get() is None else _method(f"np.{op}")
        result: Value = (operator or _method(op))(self)
        return result

    def __add__(self, other: object) -> Value:
        return self._binary("add", other)

    def __radd__(self, other: object) -> Value:
        return self._binary("add", other, swap=True)

    def __sub__(self, other: object) -> Value:
        return self._binary("sub", other)

    def __rsub__(self, other: object) -> Value:
        return self._binary("sub", other, swap=True)

    def __mul__(self, other: object) -> Value:
        return self._binary("mul", other)

    def __rmul__(self, other: object) -> Value:
        return self._binary("mul", other, swap=True)

    def __truediv__(self, other: object) -> Value:
        return self._binary("div", other)

    def __rtruediv__(self, other: object) -> Value:
        return self._binary("div", other, swap=True)

    def __floordiv__(self, other: object) -> Value:
        return self._binary("floor_div", other)

    def __rfloordiv__(self, other: object) -> Value:
        return self._binary("floor_div", other, swap=True)

    def __mod__(self, other: object) -> Value:
        return self._binary("mod", other)

    def __rmod__(self, other: object) -> Value:
        return self._binary("mod", other, swap=True)

    def __and__(self, other: object) -> Value:
        return self._binary("and", other)

    def __rand__(self, other: object) -> Value:
        return self._binary("and", other, swap=True)

    def __or__(self, other: object) -> Value:
        return self._binary("or", other)

    def __ror__(self, other: object) -> Value:
        return self._binary("or", other, swap=True)

    def __xor__(self, other: object) -> Value:
        return self._binary("xor", other)

    def __rxor__(self, other: object) -> Value:
        return self._binary("xor", other, swap=True)

    def __round__(self, digits: int = 0) -> Value:
        rounded: Value = _method("round")(self, digits)
        return rounded

    def __divmod__(self, other: object) -> tuple[Value, Value]:
        return self // other, self % other

    def __lshift__(self, other: object) -> Value:
        return self._binary("left_shift", other)

    def __rlshift__(self, other: object) -> Value:
        return self._binary("left_shift", other, swap=True)

    def __rshift__(self, other: object) -> Value:
        return self._binary("right_shift", other)

    def __rrshift__(self, other: object) -> Value:
        return self._binary("right_shift", other, swap=True)

    def __pow__(self, other: object) -> Value:
        return self._binary("pow", other)

    def __rpow__(self, other: object) -> Value:
        return self._binary("pow", other, swap=True)

    def __matmul__(self, other: object) -> Value:
        return self._binary("matmul", other)

    def __rmatmul__(self, other: object) -> Value:
        return self._binary("matmul", other, swap=True)

    def __lt__(self, other: object) -> Value:
        return self._binary("less", other)

    def __le__(self, other: object) -> Value:
        return self._binary("less_equal", other)

    def __gt__(self, other: object) -> Value:
        return self._binary("greater", other)

    def __ge__(self, other: object) -> Value:
        return self._binary("greater_equal", other)

    def __neg__(self) -> Value:
        return self._unary("neg")

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return self._unary("abs")

    def __invert__(self) -> Value:
        return self._unary("not")


def _comparable(other: object) -> bool:
    return isinstance(other, Value | np.ndarray | np.generic | int | float | complex | Dim)


def const_value(value: Value) -> Array | None:
    """The array of a constant, else None."""
    return value.data if value.kind == "const" else None


def register_methods(methods: Mapping[str, Any], more: Callable[[], object] | None = None) -> None:
    """Called by rlx.ops: the functions behind the operators and methods of `Value`; `more` registers rarer ones."""
    for name, method in methods.items():
        known = isinstance(method, type) or hasattr(method, MARK)
        _METHODS[name] = method if known else bounded(name, CompileError)(method)
    if more is not None:
        _MORE.append(more)


def _method(name: str) -> Any:
    """The function behind an operator or a method of `Value`; None if there is none."""
    if name not in _METHODS:
        for more in _MORE:  # imports, so that a second thread waits for the first
            more()
    return _METHODS.get(name)
