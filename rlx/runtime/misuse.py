"""Errors for wrong arguments that are rare, and for names that rlx lacks: imported only when one is met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlx.errors import ModelFormatError, OptionError, RlxError
from rlx.ir.graph import Array
from rlx.runtime.container import ENDING, read_container

__all__ = ["meant_by", "misnamed", "one_set_of_inputs", "refuse_repeats"]


ELSEWHERE = {  # names that other libraries have -> what is written here
    "Core": "rlx.load(path) gives a model, and rlx.devices() lists what runs it",
    "InferenceSession": "rlx.load(path) gives a model, and model.run(feeds) its outputs",
    "Llama": "rlx.load_llm(path) gives a language model; its generate and chat give text",
    "Model": "rlx.load(path) gives a model",
    "Module": "models come from files, modules of PyTorch and functions: rlx.load(path), rlx.load(module, "
    "example_inputs=(x,)), rlx.jit(function)",
    "SessionOptions": "options are keywords of rlx.load: threads=, device=, budget= and more of rlx.CompileOptions",
    "Tensor": "runs take NumPy arrays and any array with DLPack; values of a graph are made by Graph.input",
    "Variable": "graph.state(...) is what lives between runs",
    "compile_fn": "rlx.jit(function)",
    "compile_model": "rlx.load(path), with device= and other options",
    "convert_model": "rlx.load(path)",
    "function": "rlx.jit(function)",
    "export": "model.save(path) writes what was compiled; rlx.load takes what torch.onnx exports",
    "from_numpy": "runs take NumPy arrays as they are; rlx.to_device(array, device) brings one to a device",
    "device_put": "rlx.to_device(array, device)",
    "from_keras": "write the model as ONNX by tf2onnx, then rlx.load(path)",
    "from_onnx": "rlx.load(path, bytes or ModelProto)",
    "from_sklearn": "rlx.load(estimator, example_inputs=X[:1])",
    "from_torch": "rlx.load(module, example_inputs=(x,)), or torch.compile(module, backend='rlx')",
    "get_available_providers": "rlx.devices() lists devices, and device= chooses one",
    "lax": "its functions have the same names here: rlx.cond, rlx.scan, rlx.while_loop, rlx.fori_loop",
    "load_model": "rlx.load(path)",
    "manual_seed": "seeds are inputs of rlx.random_normal and others; rlx.load_llm's generate takes seed=",
    "nn": "layers are functions of values: x @ w + b, rlx.conv, rlx.layer_norm, rlx.attention and other ops",
    "no_grad": "gradients are computed where rlx.grad asks for them only; rlx.stop_gradient(x) holds a value constant",
    "optim": "an optimiser is written as a function of params and gradients: docs/gradients.md",
    "pmap": "a compiled graph runs on one device: rlx.vmap vectorises, clones run side by side",
    "quantize_dynamic": "rlx.quantize(source, target, type) writes a model with narrower weights",
    "save": "model.save(path) writes what was compiled",
    "set_num_threads": "threads= is an option of rlx.load and rlx.compile",
    "tensor": "runs take NumPy arrays as they are; graph.constant(array) makes a value of a graph",
    "tree_map": "trees of arrays go in and out of functions of rlx.jit as they are",
    **dict.fromkeys(("cuda", "device"), "device= is an option of rlx.load and rlx.compile; rlx.devices() lists them"),
}


def meant_by(name: str, known: Iterable[str]) -> str:
    """What to write instead of a name that the package does not have, to follow the error's message; may be empty."""
    if name in ELSEWHERE:
        return f": {ELSEWHERE[name]}"
    close = get_close_matches(name, known, 1, 0.75)
    return f"; did you mean {close[0]!r}?" if close else ""


def one_set_of_inputs(more: Sequence[Any]) -> OptionError:
    """The error for a run with arguments after its inputs, as in ONNX Runtime's order `run(names, feeds)`."""
    return OptionError(
        f"run takes all inputs as one argument, got {1 + len(more)}: run(feeds) with a mapping by name or a list by "
        "position, and run(feeds, outputs=['y']) where not all outputs are wanted (ONNX Runtime's run(names, feeds) "
        "has them the other way round)"
    )


def refuse_repeats(array: Array, what: str, kind: str) -> None:
    """Raises `OptionError` for an `out` whose elements share memory: some axis steps by less than smaller ones span."""
    span = array.itemsize
    for stride, extent in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < span and array.size:
            raise OptionError(f"{what}: expected memory for each element, this {kind} repeats some")
        span += stride * (extent - 1)


def misnamed(path: Path) -> ModelFormatError:
    """The error for an artifact that does not bear its ending."""
    try:
        portable = "code" not in read_container(path).facts
    except RlxError:
        portable = False  # a damaged one is called that once it is loaded as an artifact
    if portable:
        return ModelFormatError(
            f"{path}: is a portable artifact of rlx, a graph with its weights, under the name of something else: "
            f"rename it to end in {ENDING}, or load it by rlx.load_artifact(path) or with portable_only=True"
        )
    return ModelFormatError(
        f"{path}: is an artifact of rlx, whose machine code would be run, under the name of something else. If you "
        f"trust who made it, rename it to end in {ENDING} or load it by rlx.load_artifact(path), or with "
        "allow_code=True; with portable_only=True its code is not touched"
    )
