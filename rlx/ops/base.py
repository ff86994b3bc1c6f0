"""What an op is: one class that says everything that is true of it on every device."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, ClassVar, TypeVar, dataclass_transform

import numpy as np

from rlx.boundary import bounded
from rlx.errors import CompileError, DTypeError, NameNotFound, OptionError, ShapeError
from rlx.ir.casting import NARROWED
from rlx.ir.dtype import DType, dtype_of
from rlx.ir.frames import Frame, frame_of, weakest
from rlx.ir.graph import OPERATORS, Array, Graph, TensorType, Value
from rlx.ir.shape import Dim, Size, evaluate, numel, substitute
from rlx.records import dataclass

__all__ = [
    "OPS",
    "Op",
    "Work",
    "apply",
    "axis_of",
    "check_activations",
    "check_kind",
    "check_same_dtype",
    "functional",
    "op_named",
    "product",
    "register",
    "tensor_bytes",
    "widened",
]

OPS: dict[str, type[Op]] = OPERATORS


@dataclass(frozen=True)
class Work:
    """What one application costs at least: floating-point (or integer) operations, and bytes read and written."""

    flops: Size
    read: Size
    written: Size


class Op:
    """Base of all ops. A subclass is decorated with `@register`; its annotated fields are the attributes.

    Write `infer` and `reference`, and either `lower` (a primitive: scalar expressions or an anchor) or `decompose` (in
    smaller ops). An op with neither runs on every device as a host call of its `reference`.
    """

    op_name: ClassVar[str]
    arity: ClassVar[tuple[int, int | None]]  # fewest and most inputs (None: any number)

    infer: ClassVar[Callable[..., Any]]  # (*types) -> type or tuple of types; sizes may be symbolic
    reference: ClassVar[Callable[..., Any]]  # (*arrays) -> array or tuple; NumPy, short; attributes are ints by then
    lower: ClassVar[Callable[..., Any] | None] = None  # (k: Lowering, *operands) -> what k.map, k.contract ... return
    decompose: ClassVar[Callable[..., Any] | None] = None  # (g: Graph, *values) -> value or tuple of values
    lower_in_place: ClassVar[Callable[..., Any] | None] = None  # as lower, for a part of x: k.written(...)

    # gradients (design.md section 4): attached by rlx.ops.gradients, or methods of an op from elsewhere
    jvp: ClassVar[Callable[..., Any] | None] = None  # (inputs, outputs, tangents or None) -> tangents of the outputs
    transpose: ClassVar[Callable[..., Any] | None] = None  # (inputs, cotangents, i) -> cotangent of input i, or None
    vjp: ClassVar[Callable[..., Any] | None] = None  # (inputs, outputs, cotangents) -> cotangents of the inputs
    formula: ClassVar[Callable[..., Any] | None] = None  # (*inputs) -> outputs, in ops that have rules
    batch: ClassVar[Callable[..., Any] | None] = None  # (inputs, batched) -> outputs with one more axis in front
    linear: ClassVar[str] = ""  # "each" or "joint": how it depends on its float inputs; "zero": not to first order

    alike: ClassVar[bool] = False  # whether the inputs are of one element type, which Python numbers then take
    overwrites: ClassVar[int | None] = None  # the input whose memory a device's own kernel may put the result into
    strings: ClassVar[str] = "none"  # "none": refused; "moved": or compared for equality; "read" on the host
    takes_stored: ClassVar[bool] = False  # whether `infer` is given types with their encodings: it moves blocks as such
    places: ClassVar[int | None] = None  # the input whose numbers say which elements of input 0 are read or written

    @property
    def title(self) -> str:
        """What reports call it."""
        return self.op_name

    def work(self, *x: TensorType) -> Work:
        """Cost of one application on inputs of these types; by default one operation an output element."""
        return self.elementwise_work(1, *x)

    def elementwise_work(self, flops: Size, *x: TensorType) -> Work:
        """The cost when each output element takes `flops` operations and every tensor is touched once."""
        out = self.infer_types(x)
        return Work(flops * numel(out[0].shape), _sum(tensor_bytes(t) for t in x), _sum(tensor_bytes(t) for t in out))

    def infer_types(self, inputs: Sequence[TensorType], regions: Sequence[Graph] = ()) -> tuple[TensorType, ...]:
        """`infer` with the number of inputs checked; always a tuple."""
        least, most = self.arity
        if len(inputs) < least or (most is not None and len(inputs) > most):
            wanted = str(least) if most == least else f"{least} to {most}" if most is not None else f"{least} or more"
            raise ShapeError(f"{self.op_name}: takes {wanted} inputs, {len(inputs)} given")
        if self.strings == "none" and any(t.dtype.kind == "s" for t in inputs):
            raise DTypeError(f"{self.op_name}: takes no strings, got {', '.join(map(str, inputs))}")
        out = self.infer(*inputs)
        return out if isinstance(out, tuple) else (out,)

    def with_sizes(self, sizes: Mapping[str, Size]) -> Op:
        """The op with the named symbols in its attributes replaced."""
        return self._map_dims(lambda d: substitute(d, sizes))

    def at(self, extents: Mapping[str, int]) -> Op:
        """The op with every size in its attributes an int, for `reference`."""
        return self._map_dims(lambda d: evaluate(d, extents))

    def _map_dims(self, fn: Callable[[Dim], Size]) -> Op:
        changed = {}
        for f in fields(self):  # type: ignore[arg-type]
            old = getattr(self, f.name)
            new = _map_value(old, fn)
            if new is not old:
                changed[f.name] = new
        return replace(self, **changed) if changed else self  # type: ignore[type-var]

    def attributes(self) -> dict[str, Any]:
        """Attribute names and values, in order of declaration."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


def _map_value(value: Any, fn: Callable[[Dim], Size]) -> Any:
    if isinstance(value, Dim):
        return fn(value)
    if isinstance(value, tuple) and any(isinstance(v, Dim | tuple) for v in value):
        return tuple(_map_value(v, fn) for v in value)
    return value


def _sum(sizes: Any) -> Size:
    total: Size = 0
    for size in sizes:
        total = total + size
    return total


def tensor_bytes(t: TensorType) -> Size:
    """Bytes of a tensor as a size (encoded tensors: at their bounds)."""
    if t.encoding:
        return t.nbytes() or 0
    return numel(t.shape) * t.dtype.bits // 8 if t.dtype.bits % 8 else numel(t.shape) * (t.dtype.bits // 8)


T = TypeVar("T", bound=type[Op])


@bounded("register", OptionError)
@dataclass_transform(frozen_default=True)
def register(cls: T) -> T:
    """Class decorator: makes the class a frozen dataclass of its attributes and known under its snake_case name."""
    made: T = dataclass(frozen=True)(cls)  # type: ignore[assignment]
    name = cls.__dict__.get("op_name") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
    made.op_name = name
    if name in OPS and OPS[name].__module__ != cls.__module__:
        raise OptionError(f"an op named {name!r} is already registered by {OPS[name].__module__}")
    positional = list(inspect.signature(cls.infer).parameters.values())[1:]
    least = sum(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in positional)
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in positional)
    made.arity = (least, None if open_ended else sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in positional))
    OPS[name] = made
    return made


def op_named(name: str) -> type[Op]:
    """The op class registered under `name`; `NameNotFound` if there is none."""
    if name not in OPS:
        raise NameNotFound(f"no op is named {name!r}; import the module that registers it")
    return OPS[name]


def axis_of(axis: int, rank: int, op: str) -> int:
    """A possibly negative axis as 0 <= axis < rank; `ShapeError` when it is outside, `OptionError` for no int."""
    if not isinstance(axis, int | np.integer):
        raise OptionError(f"{op}: an axis is an int, got {axis!r}")
    if not -rank <= axis < rank:
        raise ShapeError(f"{op}: axis {axis} is outside a tensor of rank {rank}")
    return axis % rank


KINDS = {"f": "floating-point", "i": "signed integer", "u": "unsigned integer", "b": "bool"}
KINDS |= {"c": "complex", "s": "string"}


def check_kind(op: Op, t: TensorType, kinds: str, what: str = "input") -> None:
    """Raises `DTypeError` unless the elements are of one of the `DType.kind`s and can be computed with (not 4-bit)."""
    packed = t.dtype.is_integer and t.dtype.bits < 8
    if t.dtype.kind not in kinds or packed:
        expected = " or ".join(KINDS[kind] for kind in kinds)
        raise DTypeError(f"{op.op_name}: expected {expected} elements as {what}, got {t}; cast it first")


def check_activations(op: Op, activations: str, *types: TensorType, known: Sequence[str] = NARROWED) -> None:
    """Raises `OptionError` unless it is "" or one of those known, `DTypeError` unless it rounds operands of f32."""
    if activations not in ("", *known):
        wanted = ", ".join(map(repr, known))
        raise OptionError(f"{op.op_name}: activations={activations!r}: expected {wanted}, or '' for what they are")
    if activations and any(t.dtype.name != "f32" for t in types):
        raise DTypeError(f"{op.op_name}: activations={activations!r} takes f32, got {', '.join(map(str, types))}")


def check_same_dtype(op: Op, first: TensorType, *others: TensorType) -> None:
    """Raises `DTypeError` unless all have the element type of the first."""
    for t in others:
        if t.dtype is not first.dtype:
            raise DTypeError(f"{op.op_name}: the inputs differ in element type: {first} and {t}; cast one of them")


def widened(x: Array) -> Array:
    """The array in the type that arithmetic on it is done in: floats below 32 bits as f32, others as they are."""
    dtype = dtype_of(x.dtype)
    return x.astype(np.float32) if dtype.is_float and dtype.bits < 32 else x


def product(x: Array, y: Array) -> Array:
    """x @ y, in its type: of integers, which wrap, by f64 where that holds all sums, as NumPy's own is far slower."""
    if x.dtype.kind in "iu" and x.size and y.size and x.shape[-1] * _largest(x) * _largest(y) < 2**53:
        return np.asarray(np.matmul(x.astype(np.float64), y.astype(np.float64)).astype(np.int64).astype(x.dtype))
    return np.asarray(np.matmul(x, y))


def _largest(x: Array) -> int:
    """The largest magnitude of integers."""
    return max(-int(x.min()), int(x.max()))


def apply(op: Op, *inputs: object, name: str = "") -> Any:
    """Adds the op to the graph of its inputs (numbers and arrays become constants); one Value, or a tuple of them.

    A Python number takes the element type of the last graph value among the inputs, and a size of this run (a `Dim`)
    counts as one. In a function that is being traced the node goes to the innermost graph.
    """
    values = [v for v in inputs if isinstance(v, Value)]
    graph, frame = frame_of(values, op.op_name)
    like = weakest(values) if values else None
    made = [_input(op, graph, frame, v, like) for v in inputs]
    outputs = graph.add(op, *made, name=name)
    return outputs[0] if len(outputs) == 1 else outputs


def _input(op: Op, graph: Graph, frame: Frame | None, value: object, like: DType | None) -> Value:
    if isinstance(value, Value):
        own = value if frame is None else frame.own(value)
        adapts = own.weak and op.alike and like is not None and "b" not in (like.kind, own.dtype.kind)
        return graph.add(OPS["cast"](to=like), own)[0] if adapts and own.dtype is not like else own  # type: ignore[call-arg]
    if isinstance(value, Dim):
        (size,) = graph.add(OPS["size_of"](size=value))  # type: ignore[call-arg]
        return graph.add(OPS["cast"](to=like), size)[0] if op.alike and like is not None else size  # type: ignore[call-arg]
    add = graph.constant if frame is None else frame.array
    if not isinstance(value, int | float) or isinstance(value, bool | np.generic) or like is None or like.kind == "b":
        return add(value)
    try:
        fits = like.kind in "fc" or int(value) == value
        if fits:
            return add(value, like)
    except (OverflowError, ValueError):
        pass
    raise DTypeError(
        f"{op.op_name}: the number {value!r:.40} does not fit the element type {like}; cast the tensor first"
    )


def functional(cls: type[Op]) -> Callable[..., Any]:
    """The function that applies the op: inputs by position, then attributes by position or keyword."""
    least, most = cls.arity

    @bounded(cls.op_name, CompileError)
    def function(*args: Any, name: str = "", **attributes: Any) -> Any:
        given_inputs = len(args) if most is None else min(most, len(args))
        count = given_inputs
        while count > least and not isinstance(args[count - 1], Value | Dim | np.ndarray | np.generic | int | float):
            count -= 1
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        absent = 0  # None in the place of an optional input
        while count + absent < given_inputs and args[count + absent] is None:
            absent += 1
        rest = args[count + absent :]
        if len(rest) > len(names):
            raise OptionError(f"{cls.op_name}: too many arguments")
        given = dict(zip(names, rest, strict=False)) | attributes
        if "axes" in names:
            given = _with_axes(cls.op_name, given)
        unknown = [key for key in given if key not in names]
        if unknown:
            raise OptionError(f"{cls.op_name} has no attribute {unknown[0]!r}; it has {', '.join(names) or 'none'}")
        return apply(_made(cls, given), *args[:count], name=name)

    function.__name__ = function.__qualname__ = cls.op_name
    function.__signature__ = _signature(cls)  # type: ignore[attr-defined]
    listed = ", ".join(f"{f.name}: {f.type}" for f in fields(cls))  # type: ignore[arg-type]
    function.__doc__ = f"{cls.__doc__}\n\nAttributes: {listed or 'none'}."
    return function


def _with_axes(op: str, given: dict[str, Any]) -> dict[str, Any]:
    """Attributes with `axes` as a tuple: `axis=`, as NumPy spells it, and an int mean the same."""
    if "axis" in given and "axes" in given:
        raise OptionError(f"{op}: axis={given['axis']!r} and axes={given['axes']!r} mean the same: give one")
    given = {"axes" if key == "axis" else key: value for key, value in given.items()}
    if isinstance(given.get("axes"), int | np.integer):
        given["axes"] = (int(given["axes"]),)
    return given


def _signature(cls: type[Op]) -> inspect.Signature:
    """What inspect and help show: the inputs by their names in `infer`, then the attributes with their defaults."""
    by_position = inspect.Parameter.POSITIONAL_ONLY
    shown = [p for n, p in inspect.signature(cls.infer).parameters.items() if n != "self"]
    inputs = [p.replace(annotation=p.empty, kind=p.kind if p.kind is p.VAR_POSITIONAL else by_position) for p in shown]
    attributes = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is MISSING else f.default,
            annotation=f.type,
        )
        for f in fields(cls)  # type: ignore[arg-type]
    ]
    name = inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, default="", annotation="str")
    return inspect.Signature([*inputs, *attributes, name])


_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "bool": (bool,), "str": (str,), "None": (type(None),)}
_KINDS |= {"float": (float, int), "Size": (int, Dim), "DType": (DType,)}
_TUPLE = re.compile(r"tuple\[(.+?)(, \.\.\.|(?:, \w+)*)\]$")  # of one kind of items; "Shape" is one too


def _fits(value: Any, kind: str) -> bool:
    """Whether an attribute is of the kind that its field declares; True for kinds that only the op itself can tell."""
    return any(_fits_one(value, option) for option in re.split(r" \| (?![^\[]*\])", kind))


def _fits_one(value: Any, kind: str) -> bool:
    items = _TUPLE.match("tuple[Size, ...]" if kind == "Shape" else kind)
    if items is not None:
        return isinstance(value, tuple) and all(_fits(item, items[1]) for item in value)
    known = _KINDS.get(kind)
    return known is None or (isinstance(value, known) and (not isinstance(value, bool) or kind == "bool"))


def _made(cls: type[Op], given: Mapping[str, Any]) -> Op:
    """The op with these attributes; `OptionError` for one that is missing or of another kind than declared."""
    values = {key: _freeze(value) for key, value in given.items()}
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name not in values:
            if f.default is MISSING:
                raise OptionError(f"{cls.op_name}: the attribute {f.name!r} ({f.type}) is needed")
            continue
        if f.type in ("DType", "DType | None") and values[f.name] is not None:
            values[f.name] = dtype_of(values[f.name])
        if not _fits(values[f.name], str(f.type)):
            raise OptionError(f"{cls.op_name}: {f.name}={values[f.name]!r}: expected {f.type}")
    return cls(**values)


def _freeze(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, type) and issubclass(value, np.generic):
        return dtype_of(value)
    if isinstance(value, np.integer):
        return int(value)
    return value
