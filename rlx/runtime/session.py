"""Sessions: a device and options, and the ways from a graph or file to a compiled graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from rlx.arithmetic import usual_arithmetic
from rlx.backends import BACKENDS, check_options, choose_backend
from rlx.backends.base import Backend
from rlx.boundary import bounded, bounded_class
from rlx.disk import MAGIC, is_artifact, path_of, read_regular
from rlx.errors import CompileError, MemoryDeficit, ModelFormatError, OptionError, UndecidedInputs
from rlx.heap import give_back_heap
from rlx.ir.graph import Graph
from rlx.ir.mapped import collect_files, identity_of
from rlx.options import CompileOptions, Options
from rlx.progress import Watcher, reported
from rlx.records import names_of, replace
from rlx.runtime.cache import ArtifactCache
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.container import ENDING
from rlx.runtime.memory import Resident
from rlx.units import int_or_same

if TYPE_CHECKING:
    from rlx.estimate.memory import MemoryEstimate
    from rlx.importers.objects import Held
    from rlx.ir.given import Values
    from rlx.runtime.choice import Decision
    from rlx.runtime.policy import DevicePolicy
    from rlx.runtime.weights import WeightRegistry

__all__ = ["FORMATS", "Session", "compile", "load", "load_artifact"]

# file ending -> importer: (path, dims=, values=, admit=) -> Graph
FORMATS: dict[str, str] = {
    ".onnx": "rlx.importers.onnx:load",
    ".gguf": "rlx.models.loading:load",
    ".safetensors": "rlx.models.loading:load",
}
TEXT = ".rlx"
ARTIFACT = "artifact"

Source = Graph | str | os.PathLike[str]
Bytes = bytes | bytearray | memoryview


class CompileKeywords(Options, total=False):
    """What `rlx.compile` takes besides the graph, for type checkers."""

    progress: Watcher | None
    policy: DevicePolicy | str | None
    registry: WeightRegistry | None
    weights: Mapping[str, str] | None


class LoadKeywords(Options, total=False):
    """What `rlx.load` takes besides the source, for type checkers."""

    progress: Watcher | None
    policy: DevicePolicy | str | None
    transform: Callable[[Graph], Graph] | None
    allow_code: bool
    portable_only: bool
    values: Mapping[str, Any] | None
    variants: int
    example_inputs: Sequence[Any] | Mapping[str, Any] | None
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None


@bounded_class(CompileError)
class Session:
    """Options that several compiles share; the keywords are the fields of `CompileOptions`.

    `registry` provides and shares the weights of all that it compiles.
    """

    def __init__(
        self,
        *,
        policy: DevicePolicy | str | None = None,
        registry: WeightRegistry | None = None,
        **options: Unpack[Options],
    ) -> None:
        self.options = CompileOptions().with_options(options, "policy", "registry")
        self._given = frozenset(options)
        self.policy = policy
        self.registry = registry

    @reported
    @usual_arithmetic()
    def compile(
        self,
        graph: Graph,
        *,
        policy: DevicePolicy | str | None = None,
        registry: WeightRegistry | None = None,
        weights: Mapping[str, str] | None = None,
        progress: Watcher | None = None,  # which the decorator takes
        **options: Unpack[Options],
    ) -> CompiledGraph:
        """Compiles a graph for the device; keywords override the session's options.

        `progress` is called with `rlx.progress.Progress` as the compile goes on; what it raises ends that.

        Params take their values from `registry` (default: the session's), by their own names or by those that `weights`
        gives for them.

        For the device "auto" `policy` (a DevicePolicy, or its text; default: the session's, else that of
        RLX_DEVICE_POLICY) says how to choose; `decision` of the result tells what was chosen and why.
        """
        if not isinstance(graph, Graph):
            raise OptionError(f"compile takes a Graph, got {type(graph).__name__}; rlx.load takes files")
        chosen = self.options.with_options(options, "policy", "registry", "weights", "progress")
        rules = self._policy(policy, chosen)
        shared = registry if registry is not None else self.registry
        _bring_device(chosen)
        before = Resident.read()
        return self._compile_shared(graph, chosen, rules, before, shared, weights)

    def _compile_shared(
        self,
        graph: Graph,
        chosen: CompileOptions,
        policy: DevicePolicy | None,
        before: Resident,
        registry: WeightRegistry | None,
        names: Mapping[str, str] | None = None,
        *,
        tracked: bool = True,
    ) -> CompiledGraph:
        """Compiles it with weights of the registry.

        `tracked`: the caller has the graph and may ask where its values are; else nothing of it is kept.
        """
        if registry is None:
            if names is not None:
                raise OptionError("weights= maps params to the weights of a registry: give registry= too")
            return self._compile(graph, chosen, policy, before)
        from rlx.runtime.weights import WeightRegistry

        if not isinstance(registry, WeightRegistry):
            raise OptionError(f"registry={registry!r}: expected a WeightRegistry")
        filled, holding = registry.fill(graph, names)
        if not tracked:
            filled.became = None  # whose keys would keep the graph alive, with weights of its own
        made = self._compile(filled, chosen, policy, before)
        made.holding = holding
        return made

    def _policy(self, policy: DevicePolicy | str | None, chosen: CompileOptions) -> DevicePolicy | None:
        if chosen.device != "auto" and policy is not None:
            raise OptionError(f"policy: the device is named, {chosen.device!r}; a policy is for device='auto'")
        if chosen.device != "auto":
            return None
        from rlx.runtime.policy import policy_of

        return policy_of(policy if policy is not None else self.policy)

    def _compile(
        self, graph: Graph, chosen: CompileOptions, policy: DevicePolicy | None, before: Resident
    ) -> CompiledGraph:
        from rlx.runtime.auto import compile_chosen, compile_on, named

        if policy is not None:
            return compile_chosen(graph, policy, chosen, before)
        backend = choose_backend(chosen.device)
        made = compile_on(graph, backend, chosen, before)
        made.decide = lambda: named(graph, backend.name)
        return made

    @reported
    @usual_arithmetic()
    def load(
        self,
        source: Source | Held,
        *,
        policy: DevicePolicy | str | None = None,
        transform: Callable[[Graph], Graph] | None = None,
        allow_code: bool = False,
        portable_only: bool = False,
        values: Mapping[str, Any] | None = None,
        variants: int = 32,
        example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
        dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = None,
        progress: Watcher | None = None,  # which the decorator takes
        **options: Unpack[Options],
    ) -> CompiledGraph:
        """Reads a model and compiles it. Raises `ModelFormatError` or `UnsupportedOp` for what it can't read.

        `progress` is called with `rlx.progress.Progress` as that goes on; what it raises ends the load.

        `source` is the path of a file, its bytes, or the file open in binary mode; a Graph; an onnx.ModelProto; a
        module or ExportedProgram of PyTorch, or an estimator of scikit-learn, which their own exporters write as ONNX.
        A module is exported with `example_inputs` (a tuple by position, a mapping by name) and, where sizes may change,
        `dynamic_shapes` as in torch.export; an estimator with features as `example_inputs`. Pickles are never read.

        `values` makes constants of inputs of an ONNX file. Where elements of others decide ranks (axes), it gives a
        `Specialised`: each run reads them, and the first with a new value compiles, up to `variants` of them.

        `transform` is applied to the graph before it is compiled, as `rlx.lora` and `rlx.bind_cache` are. With it or a
        registry, a model file is compiled anew, not taken from the cache.

        An artifact, whose machine code is trusted like a shared library, is only read under its own ending, .rlxart;
        `allow_code` reads it under any name. With `portable_only` only its graph and weights are taken, which are
        compiled here: so an artifact of a stranger can be loaded.
        """
        own = ("policy", "transform", "allow_code", "portable_only", "values", "variants", "example_inputs", "progress")
        chosen = self.options.with_options(options, *own, "dynamic_shapes")
        fixed: Values = {}
        variants = int_or_same(variants)
        if values is not None or variants != 32:
            from rlx.runtime.specialised import fixed_values

            fixed = fixed_values(values, variants, source)
        _check_trust(source, allow_code, portable_only)
        if isinstance(source, Graph):
            return self.compile(_transformed(source, transform), policy=policy, **options)
        rules = self._policy(policy, chosen)
        path, kind = _opened(source, example_inputs, dynamic_shapes, artifacts=allow_code or portable_only)
        if fixed and kind in (ARTIFACT, TEXT):
            raise OptionError(f"{source!s:.80}: values= is for ONNX files: what an artifact or graph takes is in it")
        if kind == ARTIFACT:
            assert isinstance(path, Path)
            if transform is not None:
                raise OptionError(f"{path}: transform= is for model files; an artifact is compiled already")
            from rlx.runtime.artifact import load_artifact

            def compile_again(graph: Graph, asked: CompileOptions) -> CompiledGraph:
                _bring_device(asked)
                return self._compile(graph, asked, rules, Resident.read())

            return load_artifact(path, chosen, self._given | options.keys(), compile_again, portable_only)

        by_default = chosen if policy is None and self.policy is None else None
        return self._load_sized(path, kind, chosen, rules, transform, fixed, variants, by_default)

    def _load_sized(
        self,
        path: Path | Bytes,
        kind: str,
        chosen: CompileOptions,
        rules: DevicePolicy | None,
        transform: Callable[[Graph], Graph] | None,
        fixed: Values,
        variants: int,
        by_default: CompileOptions | None,
    ) -> CompiledGraph:
        """A model file; a `Specialised` where values of inputs that are not `fixed` decide ranks.

        `by_default`: the options by which it is loaded again from its path, None where a policy has chosen its device.
        """

        def of_values(more: Values, registry: WeightRegistry | None, asked: CompileOptions = chosen) -> CompiledGraph:
            return self._load_file(path, kind, asked, rules, transform, {**fixed, **more}, registry)

        def of_any_sizes(more: Values, registry: WeightRegistry | None) -> CompiledGraph:
            """It knows how to come by a graph for single shapes of its inputs."""
            made = of_values(more, registry)
            if made.compilation.leaves.guards and kind != TEXT:
                made._at_shapes = lambda shapes: of_values(
                    more, registry, chosen.with_options({"dims": {**(chosen.dims or {}), **shapes}})
                )
            return made

        try:
            identity = identity_of(os.stat(path)) if isinstance(path, Path) else None
            made = of_any_sizes({}, self.registry)
            whole = transform is None and not fixed and self.registry is None
            if isinstance(path, Path) and identity is not None and whole:
                named = by_default or replace(chosen, device=made.device)
                made._origin = os.path.abspath(path), identity, named
            return made
        except UndecidedInputs as error:
            from rlx.runtime.specialised import specialised

            name = path.stem if isinstance(path, Path) else "model"
            return specialised(name, chosen, error, fixed, of_any_sizes, variants, self.registry)

    def _load_file(
        self,
        path: Path | Bytes,
        kind: str,
        chosen: CompileOptions,
        rules: DevicePolicy | None,
        transform: Callable[[Graph], Graph] | None,
        values: Values,
        registry: WeightRegistry | None,
    ) -> CompiledGraph:
        """A model file with these values of inputs, from the cache or compiled."""
        # An importer settles dims by itself; what comes after it goes without.
        settled = chosen if kind == TEXT else chosen.with_options({"dims": None})
        text = _told(values) if chosen.cache and kind != TEXT and transform is None else None
        kept = text is not None and self.registry is None  # another registry is that of the variants of one model
        cache = ArtifactCache(chosen, repr(rules), text or "") if kept else None
        if cache is not None and isinstance(path, Path):
            again = partial(import_graph, path, kind, chosen.dims, values=values)
            found = cache.find(path, chosen, settled, again)
            if found is not None:
                if rules is not None:
                    found.decide = lambda: _decided(again(), rules, settled)
                return found
        from rlx.estimate.admit import Admission

        admit = Admission(_bring_device(chosen), chosen).weights
        before = Resident.read()
        try:
            with collect_files() as files:
                graph = import_graph(path, kind, chosen.dims, admit, values)
            graph = _transformed(graph, transform)
            model = self._compile_shared(graph, settled, rules, before, registry, tracked=False)
        except MemoryDeficit as error:
            raise self._with_remedies(error, path, kind, chosen) from None
        if cache is not None and isinstance(path, Path):
            cache.keep(path, model, files)
        give_back_heap()  # what reading and compiling took
        return model

    def _with_remedies(self, error: MemoryDeficit, path: Any, kind: str, chosen: CompileOptions) -> MemoryDeficit:
        """The error of a load; where `dims=` fixed sizes, with what less of them would save of the budget."""
        from rlx.estimate.fixed import fixed_dims, with_smaller_dims

        if kind != ".onnx" or chosen.budget_bytes is None or not fixed_dims(chosen.dims):
            return error
        own = {name: getattr(chosen, name) for name in names_of(CompileOptions)}
        return with_smaller_dims(error, lambda: self.estimate(path, **own))

    def estimate(self, model: Source, **options: Any) -> MemoryEstimate:
        """What a graph or model file will take in memory, with this session's options; see `rlx.estimate`."""
        from rlx.estimate.api import estimate

        own = {name: getattr(self.options, name) for name in names_of(CompileOptions)}
        return estimate(model, **{**own, **options})


def _check_trust(source: object, allow_code: object, portable_only: object) -> None:
    """Refuses answers to what a file is trusted with that contradict each other, or that are for no file."""
    for name, given in (("allow_code", allow_code), ("portable_only", portable_only)):
        if not isinstance(given, bool):
            raise OptionError(f"{name}={given!r}: expected True or False")
    if allow_code and portable_only:
        raise OptionError("allow_code and portable_only contradict each other: give one of them")
    if isinstance(source, Graph) and (allow_code or portable_only):
        raise OptionError("allow_code and portable_only are for files: a graph has no machine code")


def _opened(
    source: Source | Held,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None,
    *,
    artifacts: bool,
) -> tuple[Path | Bytes, str]:
    """The path of a model, or its bytes, and its kind; `artifacts`: those are read under any name."""
    if isinstance(source, str | os.PathLike) and example_inputs is None and dynamic_shapes is None:
        return kind_of(source, artifacts=artifacts)
    from rlx.importers.formats import kind_of_bytes
    from rlx.importers.objects import model_bytes

    held = model_bytes(source, example_inputs, dynamic_shapes)
    return held, kind_of_bytes(held)


def _told(values: Values) -> str | None:
    """The values as text, where that tells them from others."""
    if not values:
        return ""
    from rlx.ir.given import values_text

    return values_text(values)


def _transformed(graph: Graph, transform: Callable[[Graph], Graph] | None) -> Graph:
    if transform is None:
        return graph
    made = transform(graph) if callable(transform) else transform
    if not isinstance(made, Graph):
        raise OptionError(f"transform= takes a function that gives a Graph, got {made!r}")
    return made


def _bring_device(options: CompileOptions) -> Backend:
    """The first device that may be used (for "auto" the first of all), with its compiler if memory is left for it."""
    from rlx.estimate.admit import admit_compiler

    admit_compiler(next(iter(BACKENDS)) if options.device == "auto" else options.device, options)
    backend = choose_backend(options.device)
    if options.device != "auto":
        check_options(backend, options)  # before a file is read
    return backend


def _decided(graph: Graph, policy: DevicePolicy, options: CompileOptions) -> Decision:
    from rlx.runtime.auto import decided

    return decided(graph, policy, options)


@bounded("load", ModelFormatError)
def kind_of(source: str | os.PathLike[str], *, artifacts: bool = False) -> tuple[Path, str]:
    """The path of a model file, and the ending of its format: its own, or what the contents say.

    Raises `ModelFormatError`, also for an artifact without its ending, unless `artifacts` may have any.
    """
    if not isinstance(source, str | os.PathLike):
        raise OptionError(f"load takes the path of a model file, got {type(source).__name__}; rlx.compile takes graphs")
    text = path_of(source, "load")
    path = Path(text)
    if os.path.isdir(path) or path.name.endswith(".index.json"):
        from rlx.importers.folder import weights_of

        path = weights_of(path)
        return path, ".safetensors"
    ending = path.suffix.lower()
    try:
        head = read_regular(path, len(MAGIC))
    except OSError as error:
        from rlx.install import instead_of

        raise ModelFormatError(f"{text}: can't be read: {error.strerror or error}{instead_of(text)}") from None
    if is_artifact(head):
        if ending != ENDING and not artifacts:
            from rlx.runtime.misuse import misnamed

            raise misnamed(path)
        return path, ARTIFACT
    if ending in (*FORMATS, TEXT):
        return path, ending
    from rlx.importers.formats import is_onnx, way_in

    if is_onnx(head):
        return path, ".onnx"
    if head.startswith(b"GGUF"):
        return path, ".gguf"
    known = ", ".join((*FORMATS, TEXT, "artifacts"))
    found = way_in(head, ending) or "neither its ending nor its contents are those of a model"
    raise ModelFormatError(f"{path}: {found}; known are {known}")


@bounded("load", ModelFormatError)
def import_graph(
    path: Path | Bytes,
    kind: str,
    dims: Mapping[str, Any] | None,
    admit: Callable[[str, int], None] = lambda model, nbytes: None,
    values: Values | None = None,
) -> Graph:
    """The graph of a model file, by path or as bytes; of the text form without regard to `dims`.

    `values` gives inputs as constants. `admit` is asked before weights are read: it gets the bytes that must be copied
    out of the file. Raises `ModelFormatError`.
    """
    if kind == TEXT:
        from rlx.importers.formats import parse_text

        assert isinstance(path, Path)
        return parse_text(path)
    module, _, name = FORMATS[kind].partition(":")
    importer: Callable[..., Graph] = getattr(import_module(module), name)
    return importer(path, dims=dims, values=values, admit=admit)


@bounded("compile", CompileError)
def compile(graph: Graph, **options: Unpack[CompileKeywords]) -> CompiledGraph:
    """Compiles a graph: `rlx.Session(**options).compile(graph)`."""
    return Session().compile(graph, **options)


@bounded("load", CompileError)
def load(source: Source | Held, **options: Unpack[LoadKeywords]) -> CompiledGraph:
    """Loads and compiles a model file: `Session().load(source, **options)`, whose docstring says what it takes.

    Options are those of `rlx.CompileOptions` (`device`, `dims`, `threads`, `budget`, `precision` and more), and
    `policy`, `transform`, `values` and more of `Session.load`. Language models that write text: `rlx.load_llm`.
    """
    return Session().load(source, **options)


@bounded("load_artifact", CompileError)
def load_artifact(
    path: str | os.PathLike[str], *, portable_only: bool = False, **options: Unpack[Options]
) -> CompiledGraph:
    """Loads what `CompiledGraph.save` wrote, under any name; its machine code is trusted like a shared library.

    With `portable_only` only its graph and weights are taken, and compiled here. Raises `ModelFormatError` for what is
    no artifact.
    """
    name, kind = kind_of(path, artifacts=True)
    if kind != ARTIFACT:
        raise ModelFormatError(f"{name}: is no artifact of rlx; rlx.load takes model files")
    return Session().load(path, allow_code=not portable_only, portable_only=portable_only, **options)
