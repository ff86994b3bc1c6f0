"""mlx.core as a library of array functions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from rlx.backends.dlpack import DLPackArray
from rlx.backends.library.arrays import Arrays, Flat
from rlx.backends.mlx.ops import SINGLE, functions, native, refusal
from rlx.ir.dtype import DTYPES, DType, dtype_of
from rlx.ir.graph import Array, Node
from rlx.ir.shape import evaluate
from rlx.kernels.lowering import Conv

__all__ = ["MlxArrays"]

NAMES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i8": "int8", "u8": "uint8", "i16": "int16",
    "u16": "uint16", "i32": "int32", "u32": "uint32", "i64": "int64", "u64": "uint64", "bool": "bool_",
    "c64": "complex64",
}  # fmt: skip


class MlxArrays(Arrays):
    """Arrays of MLX on its default device. f64 is there on its CPU only.

    Elements of types that MLX lacks lie in NumPy's arrays: what computes with them runs on the host.
    """

    device = "mlx"

    def __init__(self) -> None:
        import mlx.core as mx

        self.mx = mx
        # Other streams, and so graphs, belong to the thread that made them. This one is for one thread at a time.
        # Before there was such a stream, all of them were for any thread.
        self.stream = getattr(mx, "new_thread_unsafe_stream", mx.new_stream)(mx.default_device())
        self.lock = RLock()
        self.xp = mx
        self.functions = functions(mx)
        self.native = native(mx)
        names = dict(NAMES)
        self.on_cpu = mx.default_device().type == mx.DeviceType.cpu
        if self.on_cpu:
            names["f64"] = "float64"
        self.types = frozenset(names)
        self.own = {DTYPES[name]: getattr(mx, own) for name, own in names.items()}
        self.known = {own: dtype.numpy for dtype, own in self.own.items()}

    @contextmanager
    def session(self) -> Iterator[None]:
        with self.lock, self.mx.stream(self.stream):
            yield

    def lacks(self, fn: str, dtype: DType) -> str | None:
        if dtype.name == "f64" and fn in SINGLE:
            return f"MLX computes {fn} of f64 in single precision"
        if fn == "fmod" and not self.on_cpu:
            return "Metal computes remainders of floats from rounded quotients"
        return super().lacks(fn, dtype)

    def refuses(self, node: Node) -> str | None:
        return refusal(node)

    def dtype(self, dtype: DType) -> Any:
        return self.own[dtype]

    def put(self, array: Array) -> Any:
        dtype = dtype_of(array.dtype)
        if dtype not in self.own:
            return np.array(array)
        if dtype.name == "bf16":
            return (
                self.mx.array(np.ascontiguousarray(array).view(np.uint16)).view(self.mx.bfloat16).reshape(array.shape)
            )
        return self.mx.array(array, dtype=self.own[dtype])

    def fetch(self, held: Any) -> Array:
        if held.dtype == self.mx.bfloat16:
            return np.array(held.view(self.mx.uint16)).view(DTYPES["bf16"].numpy)
        return np.array(held)

    def copy(self, held: Any) -> Any:
        """Views of MLX share memory, and so do its own copies; what is selected is computed."""
        return np.array(held) if isinstance(held, np.ndarray) else self.mx.where(self.mx.array(True), held, held)

    def part(self, held: Any, index: tuple[int | slice, ...]) -> Any:
        return self.copy(held[index])

    def padded(self, held: Any, shape: tuple[int, ...]) -> Any:
        pad = np.pad if isinstance(held, np.ndarray) else self.mx.pad
        return self.copy(pad(held, [(0, size - own) for own, size in zip(held.shape, shape, strict=True)]))

    def export(self, held: Any, options: Mapping[str, Any]) -> Any:
        if isinstance(held, np.ndarray):
            return DLPackArray(held).__dlpack__(**options)
        given = {key: option for key, option in options.items() if option is not None}
        self.mx.eval(held)
        try:
            return held.__dlpack__(**given)
        except TypeError:  # of a release that takes no keywords
            if given.get("copy") or given.get("dl_device", self.place(held)) != self.place(held):
                raise BufferError("this release of MLX shares its memory where it is, and copies nothing") from None
            return held.__dlpack__()

    def place(self, held: Any) -> tuple[int, int]:
        kind, number = held.__dlpack_device__()
        return int(kind), int(number)

    def type_of(self, held: Any) -> np.dtype[Any]:
        return held.dtype if isinstance(held, np.ndarray) else self.known[held.dtype]

    def adopt(self, value: Any) -> Any | None:
        return value if isinstance(value, self.mx.array) and value.dtype in self.known else None

    def wait(self, x: Sequence[Any]) -> None:
        self.mx.eval([one for one in x if not isinstance(one, np.ndarray)])

    def cast(self, x: Any, dtype: DType) -> Any:
        return x if x.dtype == self.own[dtype] else x.astype(self.own[dtype])

    def bitcast(self, x: Any, dtype: DType) -> Any:
        return x.view(self.own[dtype])

    def take(self, x: Any, index: Any, axis: int) -> Any:
        return self.mx.take(x, index, axis=axis)

    def reduce(self, kind: str, x: Any, axes: tuple[int, ...]) -> Any:
        fns = {"add": "sum", "mul": "prod", "and": "all", "or": "any"}
        return getattr(self.mx, fns.get(kind, kind))(x, axis=axes, keepdims=True).astype(x.dtype)

    def search(self, kind: str, x: Any, axis: int) -> Any:
        return getattr(self.mx, kind)(x, axis=axis, keepdims=True).astype(self.mx.int64)

    def matmul(self, a: Any, b: Any, dtype: DType) -> Any:
        if dtype.is_float:
            return self.mx.matmul(a, b)
        return self.mx.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2).astype(a.dtype)

    def conv(self, x: Any, w: Any, anchor: Conv) -> Any | None:
        n = len(anchor.strides)
        pads = [evaluate(p, {}) for p in anchor.pads]
        if x.dtype != self.mx.float32 or n > 3 or min(pads) < 0 or 0 in (*x.shape, *w.shape):
            return None  # of f64 MLX rounds the products to f32
        if n > 2 and anchor.groups > 1:
            return None
        last = (0, *range(2, n + 2), 1)
        y = self.mx.conv_general(
            self.mx.transpose(x, last),
            self.mx.transpose(w, last),
            stride=anchor.strides,
            padding=(pads[:n], pads[n:]),
            kernel_dilation=anchor.dilations,
            groups=anchor.groups,
        )
        return self.mx.transpose(y, (0, n + 1, *range(1, n + 1)))

    def host(self, fn: Callable[..., Sequence[Array]], results: Sequence[tuple[tuple[int, ...], DType]], x: Any) -> Any:
        return [self.put(array) for array in fn(*map(self.fetch, x))]

    def cond(self, test: Any, then: Flat, otherwise: Flat, x: Sequence[Any]) -> list[Any]:
        return then(x) if test.item() else otherwise(x)

    def loop(
        self, test: Callable[[Sequence[Any]], Any], body: Flat, x: Sequence[Any], times: int | None = None
    ) -> list[Any]:
        state = list(x)
        if times is not None:
            for _ in range(times):
                state = body(state)
            return state
        while test(state).item():
            state = body(state)
        return state

    def set_row(self, x: Any, row: Any, at: Any) -> Any:
        here = (self.mx.arange(x.shape[0]) == at).reshape((-1, *[1] * len(row.shape)))
        return self.mx.where(here, row.reshape((1, *row.shape)), x)

    def compile(self, fn: Flat, x: Sequence[Any], pure: bool) -> Flat:
        """Exported and read back: the calls to MLX are then made without Python. (mx.compile would fuse them, by a C++
        compiler that takes seconds for each kernel.)"""
        if not pure or any(isinstance(one, np.ndarray) for one in x):
            return fn
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "graph.mlxfn")
            try:
                self.mx.export_function(path, lambda *arrays: fn(arrays), *x)
            except ValueError:  # a function of MLX that it can't export
                return fn
            code = self.mx.import_function(path)
        return lambda arrays: list(code(*arrays))
