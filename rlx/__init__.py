"""rlx: a tensor compiler and runtime.

model = rlx.load("model.onnx")
outputs = model.run({"x": array})
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rlx import forks as _forks  # noqa: F401 - before there is a thread that imports more

_KEYWORDS = ("and", "if", "not", "or", "while")  # ops whose function has a trailing underscore

__version__ = "0.1.0"

# name -> where it lives; imported at first use, so that `import rlx` is quick and needs no backend
_PUBLIC: dict[str, str] = {
    "Array": "rlx.backends.array",
    "Buckets": "rlx.runtime.buckets",
    "CompileOptions": "rlx.options",
    "CompiledGraph": "rlx.runtime.compiled",
    "Decision": "rlx.runtime.choice",
    "DevicePolicy": "rlx.runtime.policy",
    "Dim": "rlx.ir.shape",
    "Graph": "rlx.ir.graph",
    "Op": "rlx.ops.base",
    "RunTrace": "rlx.runtime.trace",
    "Session": "rlx.runtime.session",
    "Specialised": "rlx.runtime.specialised",
    "TensorType": "rlx.ir.value",
    "WeightRegistry": "rlx.runtime.weights",
    "bind_cache": "rlx.runtime.bind_cache",
    "checkpoint": "rlx.transform.rules",
    "choose": "rlx.runtime.choice",
    "compile": "rlx.runtime.session",
    "cond": "rlx.trace.control",
    "cost": "rlx",
    "custom_jvp": "rlx.transform.rules",
    "custom_vjp": "rlx.transform.rules",
    "demo": "rlx",
    "devices": "rlx.runtime.choice",
    "devices_for": "rlx.runtime.choice",
    "errors": "rlx",
    "estimate": "rlx",
    "fake_quantize": "rlx.transform.fake_quantize",
    "fori_loop": "rlx.trace.control",
    "grad": "rlx.transform.functions",
    "hessian": "rlx.transform.jacobian",
    "hvp": "rlx.transform.functions",
    "jacfwd": "rlx.transform.jacobian",
    "jacrev": "rlx.transform.jacobian",
    "jit": "rlx.trace.jit",
    "jvp": "rlx.transform.functions",
    "load": "rlx.runtime.session",
    "load_artifact": "rlx.runtime.session",
    "load_embedder": "rlx.llm.embedder",
    "load_llm": "rlx.llm.loading",
    "lora": "rlx.passes.lora",
    "metadata": "rlx.importers.metadata",
    "moe": "rlx.ops.experts",
    "numpy": "rlx",
    "ops": "rlx",
    "pmean": "rlx.transform.batching",
    "profile": "rlx.cost.io_profile",
    "psum": "rlx.transform.batching",
    "quantize": "rlx.quantiser.api",
    "register": "rlx.ops.base",
    "replay": "rlx.runtime.replay",
    "scan": "rlx.trace.control",
    "to_device": "rlx.runtime.arrays",
    "to_dlpack": "rlx.backends.dlpack",
    "value_and_grad": "rlx.transform.functions",
    "vjp": "rlx.transform.functions",
    "vmap": "rlx.transform.batching",
    "while_loop": "rlx.trace.control",
}

__all__ = [
    "Array",
    "Buckets",
    "CompileOptions",
    "CompiledGraph",
    "Decision",
    "DevicePolicy",
    "Dim",
    "Graph",
    "Op",
    "RunTrace",
    "Session",
    "Specialised",
    "TensorType",
    "WeightRegistry",
    "bind_cache",
    "checkpoint",
    "choose",
    "compile",
    "cond",
    "cost",
    "custom_jvp",
    "custom_vjp",
    "demo",
    "devices",
    "devices_for",
    "errors",
    "estimate",
    "fake_quantize",
    "fori_loop",
    "grad",
    "hessian",
    "hvp",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "load",
    "load_artifact",
    "load_embedder",
    "load_llm",
    "lora",
    "metadata",
    "moe",
    "numpy",
    "ops",
    "pmean",
    "profile",
    "psum",
    "quantize",
    "register",
    "replay",
    "scan",
    "to_device",
    "to_dlpack",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]


def __getattr__(name: str) -> Any:
    """A public name, the function of an op (`rlx.softmax`), or else of NumPy (`rlx.concatenate`)."""
    if name in ("cost", "demo", "errors", "estimate", "numpy", "ops"):
        return import_module(f"rlx.{name}")
    tracing = ("Graph", "jit", "moe", "cond", "fori_loop", "scan", "while_loop")
    if name in tracing or _PUBLIC.get(name, "").startswith("rlx.transform."):
        import_module("rlx.ops")  # the ops give graph values their arithmetic
    if name in _PUBLIC:
        value = getattr(import_module(_PUBLIC[name]), name)
    elif name.startswith("_"):
        raise AttributeError(f"module 'rlx' has no attribute {name!r}")
    else:
        ops, misuse = import_module("rlx.ops"), import_module("rlx.runtime.misuse")
        own = name.removesuffix("_") in ops.OPS
        # what NumPy has and means otherwise, as `save`, is not taken from it
        value = None if name in misuse.ELSEWHERE else getattr(ops if own else import_module("rlx.numpy"), name, None)
        if value is None:
            meant = misuse.meant_by(name, __dir__())
            raise AttributeError(f"module 'rlx' has no attribute or op {name!r}{meant}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    ops = import_module("rlx.ops").OPS
    return sorted({*__all__, "__version__", *(f"{name}_" if name in _KEYWORDS else name for name in ops)})
