"""`rlx.estimate`: from a model in any form to its memory, reading headers and the ends of weights that may be equal."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from rlx.backends import choose_backend, device_named
from rlx.backends.base import CodeGenerator
from rlx.backends.granted import run_threads
from rlx.boundary import bounded
from rlx.disk import MAGIC, is_artifact, path_of, read_regular
from rlx.errors import CompileError, DeviceUnavailable, ModelFormatError, OptionError
from rlx.estimate.calibrate import Overhead, overhead_of
from rlx.estimate.fixed import with_fixed_axes
from rlx.estimate.language import (
    LanguageModelFile,
    Shape,
    estimate_language_model,
    read_gguf_model,
    read_hf_model,
    shape_of,
)
from rlx.estimate.memory import MemoryEstimate
from rlx.importers.formats import is_onnx, kind_of_bytes
from rlx.importers.sources import read_file
from rlx.ir.graph import Graph
from rlx.ir.literal import equal_arrays
from rlx.options import CompileOptions, EveryDevicesOptions
from rlx.records import replace

if TYPE_CHECKING:
    from rlx.importers.objects import Held
    from rlx.importers.onnx.tensor import TensorRef

__all__ = ["estimate"]

LISTED = 128  # bytes that importing takes for a number in an attribute: as an object of Python, and in arrays


@bounded("estimate", CompileError)
def estimate(
    model: Graph | str | os.PathLike[str] | Held,
    device: str = "auto",
    *,
    dims: Mapping[str, Any] | None = None,
    context: int | None = None,
    batch: int | None = None,
    kv_dtype: str | None = None,
    prefill: int | None = None,
    weights: Mapping[str, Any] | None = None,
    overhead: Overhead | int | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = None,
    grad: bool | str | Sequence[str] | Mapping[str, Any] = False,
    **options: Unpack[EveryDevicesOptions],
) -> MemoryEstimate:
    """What a model will take in memory: a Graph, the path of an ONNX, GGUF, safetensors or .rlx file, or what else
    `rlx.load` takes, with `example_inputs` and `dynamic_shapes` as there.

    Only headers are read, and of an ONNX file the ends of weights of one type and shape: equal ones count once. `dims`
    as in `rlx.load`; `context` (tokens), `batch` (sequences, the slots of `rlx.load_llm`), `kv_dtype` and `prefill`
    (tokens of a prompt at once) are for language models: GGUF files, and safetensors with their config.json. A decoder
    that `rlx.load_llm` takes is planned as there, with its defaults; of others there is a forecast.
    `grad` asks for the model with gradients: True, names, or the keywords of `rlx.value_and_grad` of a graph, such as
    {"wrt": names, "of": output}. `weights` are those that are in memory already, arrays by name. `overhead` gives the
    device's own bytes; None: those measured once on this machine. Further keywords are those of `rlx.compile`. Raises
    `ShapeError` where a size has no bound, `OptionError`, and what reading and compiling raise.
    """
    chosen = CompileOptions(device=device).with_options({**options, "dims": dims})
    name = device_named(device)
    language: dict[str, Any] = {"context": context, "batch": batch, "kv_dtype": kv_dtype, "prefill": prefill}
    given = {name: value for name, value in language.items() if value is not None}
    change = _with_gradients(grad)
    if isinstance(model, Graph):
        _refuse(given, "a graph")
        return _opened(partial(_graph, change), model, choose_backend(name), chosen, _overhead(overhead, name), weights)
    if not isinstance(model, str | os.PathLike) or example_inputs is not None or dynamic_shapes is not None:
        from rlx.importers.objects import model_bytes

        data = model_bytes(model, example_inputs, dynamic_shapes, "estimate")
        kind_of_bytes(data)
        _refuse(given, "a model in memory, whose sizes are given by dims=")
        return _opened(partial(_onnx, change), data, choose_backend(name), chosen, _overhead(overhead, name), weights)
    text = path_of(model, "estimate")
    path = Path(text)
    ending = _ending(path, text)
    if ending in (".onnx", ".rlx"):
        _refuse(given, f"{path.name}, whose sizes are given by dims=")
        own, backend = _overhead(overhead, name), choose_backend(name)
        made_of = partial(_onnx if ending == ".onnx" else _text, change)
        return _opened(made_of, path, backend, chosen, own, weights)
    if dims is not None:
        raise OptionError(f"dims={dims!r}: {path.name} is a language model: give context= and batch=")
    if change is not None:
        raise OptionError(f"grad={grad!r}: {path.name} is a language model, which is run only: give a graph")
    if weights is not None:
        raise OptionError(f"weights=: {path.name} is a language model, whose weights are shared by mapping its file")
    file = read_gguf_model(path) if ending == ".gguf" else read_hf_model(path)
    shape = shape_of(file, **given)
    return _language_model(path, file, shape, name, chosen, _overhead(overhead, name))


def _language_model(
    path: Path, file: LanguageModelFile, shape: Shape, device: str, options: CompileOptions, overhead: Overhead
) -> MemoryEstimate:
    """Of a decoder that load_llm takes its plan, of others a forecast that says why."""
    why = "it has no program that writes text"
    if file.architecture.causal:
        from rlx.estimate.decoder import build_unread, estimate_decoder  # brings the ops, and the compiler

        try:
            decoder = build_unread(path, shape)
            backend = choose_backend(device)
        except (ModelFormatError, DeviceUnavailable) as error:
            why = str(error)
        else:
            if isinstance(backend, CodeGenerator):
                return estimate_decoder(file, shape, decoder, partial(build_unread, path), backend, options, overhead)
            why = f"the device {device!r} plans memory by itself"
    made = estimate_language_model(file, shape, device, overhead, threads=run_threads(options.threads))
    return replace(made, notes=(*made.notes, f"no plan: {why}"))


def _overhead(given: Overhead | int | None, device: str) -> Overhead:
    """What the device takes by itself: as given, else as measured, once on a machine."""
    return Overhead(given) if isinstance(given, int) else given or overhead_of(device)


def _refuse(given: Mapping[str, Any], what: str) -> None:
    if given:
        raise OptionError(f"{', '.join(given)}: only for language models, not for {what}")


def _ending(path: Path, given: str) -> str:
    """What kind of file it is, by its ending or its first bytes; messages have it as it was given."""
    ending = path.suffix.lower()
    if os.path.isdir(path) or path.name.endswith(".safetensors.index.json"):
        return ".safetensors"
    try:
        head = read_regular(path, len(MAGIC))
    except OSError as error:
        from rlx.install import instead_of

        raise ModelFormatError(f"{given}: can't be read: {error.strerror or error}{instead_of(given)}") from None
    if is_artifact(head):
        raise ModelFormatError(
            f"{path}: is an artifact of rlx, which is planned already: load it by rlx.load_artifact(path) and read its "
            "memory.predicted, or give the model file that it was made from"
        )
    if ending in (".onnx", ".rlx", ".gguf", ".safetensors"):
        return ending
    if head.startswith(b"GGUF"):
        return ".gguf"
    if is_onnx(head):
        return ".onnx"
    raise ModelFormatError(f"{path}: is no model that is known: expected .onnx, .gguf, .safetensors or .rlx")


def _opened(
    made_of: Callable[..., MemoryEstimate],
    source: Any,
    backend: Any,
    options: CompileOptions,
    overhead: Overhead,
    held: Mapping[str, Any] | None,
) -> MemoryEstimate:
    """The estimate of a source, with remedies for the sizes that `dims=` fixes."""

    def again(dims: Mapping[str, Any] | None) -> MemoryEstimate:
        return made_of(source, backend, replace(options, dims=dims), overhead, held)

    return with_fixed_axes(again(options.dims), options.dims, again)


Change = Callable[[Graph], Graph] | None  # what is made of the graph of a model before it is planned


def _with_gradients(grad: bool | str | Sequence[str] | Mapping[str, Any]) -> Change:
    """What gives a graph its gradients, as `grad` says; None for none."""
    if grad is False:
        return None
    if not isinstance(grad, bool | str | Sequence | Mapping):
        raise OptionError(f"grad={grad!r:.60}: expected True, False, names, or keywords of rlx.value_and_grad")
    given = grad if isinstance(grad, Mapping) else {} if grad is True else {"wrt": grad}

    def change(graph: Graph) -> Graph:
        from rlx.ops.gradients import with_gradients

        return with_gradients(graph, **given)

    return change


def _graph(
    change: Change,
    graph: Graph,
    backend: Any,
    options: CompileOptions,
    overhead: Overhead,
    held: Mapping[str, Any] | None,
) -> MemoryEstimate:
    from rlx.estimate.graph import estimate_graph  # brings the compiler, which headers alone don't need

    graph = graph if change is None else change(graph)
    return estimate_graph(graph, backend, options, overhead, held=held)


def _text(
    change: Change,
    path: Path,
    backend: Any,
    options: CompileOptions,
    overhead: Overhead,
    held: Mapping[str, Any] | None,
) -> MemoryEstimate:
    from rlx.ir.text import parse_graph

    try:
        graph = parse_graph(read_file(path).decode())
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path}: is not text: {error}") from None
    return replace(_graph(change, graph, backend, options, overhead, held), model=path.name)


def _onnx(
    change: Change,
    source: Path | bytes | bytearray | memoryview,
    backend: Any,
    options: CompileOptions,
    overhead: Overhead,
    held: Mapping[str, Any] | None,
) -> MemoryEstimate:
    from rlx.estimate.graph import estimate_graph
    from rlx.importers.onnx.importer import check, import_model
    from rlx.importers.onnx.model import read_model
    from rlx.importers.onnx.tensor import TensorRef

    file = read_model(source)
    done = import_model(file, dims=options.dims, weights=False)
    check(done)
    refs = file.graph.initializers
    inline = {
        node.outputs[0]: a.value
        for node in file.graph.nodes
        if node.op_type == "Constant" and (a := node.attributes.get("value")) is not None
        if isinstance(a.value, TensorRef)
    }
    params = {p.name for p in done.graph.params}

    def mapped(name: str) -> bool:
        return name in refs and refs[name].zero_copy

    def touched(kept: Collection[str]) -> int:
        used = {**{name: refs[name] for name in params & refs.keys()}, **inline}
        return sum(ref.nbytes for name, ref in used.items() if not (name in kept and ref.zero_copy))

    listed = sum(
        len(a.value) for node in file.graph.nodes for a in node.attributes.values() if isinstance(a.value, tuple | list)
    )
    made = estimate_graph(
        done.graph if change is None else change(done.graph),
        backend,
        replace(options, dims=None),
        overhead,
        mapped=mapped,
        lies=lambda name: name in refs and not refs[name].is_copied,
        held=held,
        file_bytes=touched,
        equal=_equal({name: refs[name] for name in params & refs.keys()}),
    )
    model = source.name if isinstance(source, Path) else made.model
    return replace(made, model=model, import_bytes=max(made.import_bytes, listed * LISTED))


def _equal(refs: Mapping[str, TensorRef]) -> dict[str, str]:
    """The weights that have the bytes of an earlier one, which memory then holds once.

    Of those of one type and shape the ends are read, and the rest of those whose ends are equal; others stay unread.
    """
    forms = Counter((ref.elem_type, ref.dims) for ref in refs.values())
    found = {name: ref for name, ref in refs.items() if forms[ref.elem_type, ref.dims] > 1 and not ref.is_copied}
    return equal_arrays({name: (None, ref.array(aligned=False)) for name, ref in found.items() if not ref.lacks()})
