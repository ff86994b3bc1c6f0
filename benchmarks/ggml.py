"""Matrix products of ggml, which llama.cpp computes with, by ctypes: y = x w.T of one type of weights.

`load(FOLDER)` wants the shared libraries of a build for this machine (`libggml-base`, `libggml-cpu`). Weights are
repacked where its CPU backend does so, as in llama.cpp.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["TYPES", "Ggml", "GgmlProduct", "load"]

P, I64, SIZE, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_int
TYPES = {
    "f32": 0, "f16": 1, "bf16": 30, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q2_k": 10, "q3_k": 11,
    "q4_k": 12, "q5_k": 13, "q6_k": 14, "iq4_nl": 20, "iq4_xs": 23, "mxfp4": 39,
}  # fmt: skip
SPACE = 4 << 20  # bytes for the descriptions of tensors and the graph
BASE: dict[str, tuple[Any, ...]] = {  # the result, then the arguments
    "ggml_new_tensor_2d": (P, P, INT, I64, I64),
    "ggml_mul_mat": (P, P, P, P),
    "ggml_new_graph": (P, P),
    "ggml_build_forward_expand": (None, P, P),
    "ggml_backend_graph_compute": (INT, P, P),
    "ggml_backend_alloc_ctx_tensors_from_buft": (P, P, P),
    "ggml_backend_alloc_ctx_tensors": (P, P, P),
    "ggml_backend_tensor_set": (None, P, P, SIZE, SIZE),
    "ggml_backend_tensor_get": (None, P, P, SIZE, SIZE),
    "ggml_backend_reg_dev_get": (P, P, SIZE),
    "ggml_backend_reg_get_proc_address": (P, P, ctypes.c_char_p),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, P, P),
    "ggml_backend_buft_name": (ctypes.c_char_p, P),
    "ggml_backend_buffer_free": (None, P),
    "ggml_backend_free": (None, P),
    "ggml_free": (None, P),
}
CPU: dict[str, tuple[Any, ...]] = {
    "ggml_backend_cpu_init": (P,),
    "ggml_backend_cpu_set_n_threads": (None, P, INT),
    "ggml_backend_cpu_reg": (P,),
}


class _Init(ctypes.Structure):
    _fields_ = (("size", SIZE), ("memory", P), ("no_memory", ctypes.c_bool))


class Ggml:
    """The functions that are called here, by their names without `ggml_`."""

    def __init__(self, folder: Path) -> None:
        base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
        for library, names in ((base, {**BASE, "ggml_init": (P, _Init)}), (cpu, CPU)):
            for name, (result, *arguments) in names.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name.removeprefix("ggml_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ggml_{name} is not among the functions that are called here")

    def context(self) -> Any:
        return self.init(_Init(SPACE, None, True))

    def layouts(self) -> tuple[Any, Iterator[tuple[str, Any]]]:
        """The device, and the layouts that it repacks weights to."""
        known = self.backend_cpu_reg()
        device = self.backend_reg_dev_get(known, 0)
        address = self.backend_reg_get_proc_address(known, b"ggml_backend_dev_get_extra_bufts")
        found = ctypes.CFUNCTYPE(ctypes.POINTER(P), P)(address)(device) if address else []

        def each() -> Iterator[tuple[str, Any]]:
            for one in found:
                if not one:
                    return
                yield self.backend_buft_name(one).decode(), one

        return device, each()


class GgmlProduct:
    """One product of `rows` rows with weights [n, k]; `how` says whether they are repacked."""

    def __init__(self, ggml: Ggml, kind: str, shape: tuple[int, int, int], data: Any, threads: int) -> None:
        self.ggml, (rows, k, n) = ggml, shape
        self.backend = ggml.backend_cpu_init()
        ggml.backend_cpu_set_n_threads(self.backend, threads)
        device, layouts = ggml.layouts()
        for name, layout in (*layouts, ("as stored", None)):  # a tensor keeps its place, so it is made anew for each
            self.weights, self.values = ggml.context(), ggml.context()
            w = ggml.new_tensor_2d(self.weights, TYPES[kind], k, n)
            self.x = ggml.new_tensor_2d(self.values, TYPES["f32"], k, rows)
            self.y = ggml.mul_mat(self.values, w, self.x)
            if layout is None:
                buffer = ggml.backend_alloc_ctx_tensors(self.weights, self.backend)
            else:
                buffer = ggml.backend_alloc_ctx_tensors_from_buft(self.weights, layout)
            self.how, self.buffers = name, [buffer]
            if layout is None or (buffer and ggml.backend_dev_supports_op(device, self.y)):
                break
            ggml.free(self.weights)
            ggml.free(self.values)
        graph = self.graph = ggml.new_graph(self.values)
        ggml.build_forward_expand(graph, self.y)
        self.buffers.append(ggml.backend_alloc_ctx_tensors(self.values, self.backend))
        ggml.backend_tensor_set(w, data.ctypes.data, 0, data.nbytes)
        self.result = np.empty((rows, n), np.float32)

    def __call__(self, x: Any) -> None:
        """The product, which `get` reads."""
        self.ggml.backend_tensor_set(self.x, x.ctypes.data, 0, x.nbytes)
        self.ggml.backend_graph_compute(self.backend, self.graph)

    def get(self) -> Any:
        self.ggml.backend_tensor_get(self.y, self.result.ctypes.data, 0, self.result.nbytes)
        return self.result

    def close(self) -> None:
        for buffer in self.buffers:
            self.ggml.backend_buffer_free(buffer)
        for context in (self.weights, self.values):
            self.ggml.free(context)
        self.ggml.backend_free(self.backend)


def load(folder: str | Path) -> Ggml:
    """The libraries in a folder. OSError where they are not there."""
    return Ggml(Path(folder))
