"""Models that are objects of other libraries, as the bytes of an ONNX file; their own exporters write it.

onnx.ModelProto, open files, PyTorch's Module and ExportedProgram (torch.onnx.export), scikit-learn's estimators
(skl2onnx). None of these libraries is imported unless an object of it is given.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rlx.errors import ModelFormatError, OptionError

__all__ = ["Estimator", "Held", "OnnxModel", "Opened", "TorchModel", "TorchProgram", "model_bytes"]

LARGEST = 2**31 - 1  # bytes of a protobuf message
MOST_QUOTED = 1000  # characters of what an exporter says


@runtime_checkable
class OnnxModel(Protocol):
    """An onnx.ModelProto."""

    def SerializeToString(self) -> bytes: ...


@runtime_checkable
class Opened(Protocol):
    """A file that is open for reading, in binary mode."""

    def read(self) -> bytes: ...


@runtime_checkable
class TorchModel(Protocol):
    """A torch.nn.Module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any: ...
    def state_dict(self) -> Any: ...


@runtime_checkable
class TorchProgram(Protocol):
    """A torch.export.ExportedProgram."""

    def module(self) -> Any: ...
    @property
    def graph_signature(self) -> Any: ...


@runtime_checkable
class Estimator(Protocol):
    """A fitted estimator or pipeline of scikit-learn."""

    def fit(self, X: Any, y: Any = None) -> Any: ...
    def get_params(self) -> Any: ...


Held = bytes | bytearray | memoryview | OnnxModel | Opened | TorchModel | TorchProgram | Estimator


def model_bytes(
    source: object,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = None,
    call: str = "load",
) -> bytes | bytearray | memoryview:
    """An object as the bytes of a model file; errors name `call`.

    `example_inputs` are arguments of a module (by position, or by name in a mapping), or one array of the features of
    an estimator. `dynamic_shapes` says which of their sizes a run may change, as torch.export has it. Raises
    `OptionError` for what is no model, `ModelFormatError` with the exporter's words where it fails.
    """
    exported = isinstance(source, TorchModel | TorchProgram | Estimator)
    if callable(source) and not exported:
        raise OptionError(
            f"{call} takes models, got {source!r:.80}: rlx.jit(f) makes a compiled function of it, and "
            "rlx.jit(f).compile(*arrays) a model for arrays like these"
        )
    if not exported and example_inputs is not None:
        raise OptionError("example_inputs= is for modules of PyTorch and estimators: model files say their inputs")
    if dynamic_shapes is not None and not isinstance(source, TorchModel):
        raise OptionError("dynamic_shapes= is for modules of PyTorch; sizes of files are given by dims=")
    match source:
        case memoryview():
            return source if source.c_contiguous else source.tobytes()
        case bytes() | bytearray():
            return source
        case OnnxModel():
            return _serialised(source)
        case TorchModel() | TorchProgram():
            return _torch(source, example_inputs, dynamic_shapes)
        case Estimator():
            return _estimator(source, example_inputs)
        case Opened():
            if getattr(source, "closed", False):
                raise OptionError(f"{call} takes open files, and this one is closed")
            try:
                found = source.read()
            except UnicodeDecodeError:  # it is open as text
                found = None
            if not isinstance(found, bytes):
                raise OptionError(f"{call} takes files that are open in binary mode, 'rb'")
            return found
    raise OptionError(
        f"{call} takes the path, bytes or open file of a model, an onnx.ModelProto, a module of PyTorch or an "
        f"estimator of scikit-learn; got {type(source).__name__}"
    )


def _serialised(model: OnnxModel) -> bytes:
    try:
        return model.SerializeToString()
    except Exception as error:  # protobuf's own class
        raise ModelFormatError(
            f"the ModelProto can't be written to memory ({error}): models above 2 GiB are loaded from a file, written "
            "by onnx.save(model, path, save_as_external_data=True)"
        ) from error


def _torch(
    model: TorchModel | TorchProgram,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None,
) -> bytes:
    """What PyTorch's exporter writes, of a module in evaluation mode."""
    torch = _library("torch", "PyTorch")
    _library("onnxscript", "PyTorch's exporter to ONNX")
    if isinstance(model, TorchModel):
        if example_inputs is None:
            raise OptionError("a module of PyTorch is exported with example inputs: load(module, example_inputs=(x,))")
        named = isinstance(example_inputs, Mapping)
        given: dict[str, Any] = {"args": () if named else tuple(example_inputs)}
        given |= {"kwargs": dict(example_inputs)} if named else {}
        given |= {"dynamic_shapes": dynamic_shapes} if dynamic_shapes is not None else {}
    elif example_inputs is not None:
        raise OptionError("an ExportedProgram has its inputs already: leave example_inputs= out")
    else:
        given = {}
    training = [part for part in (model.modules() if hasattr(model, "modules") else ()) if part.training]
    for part in training:  # as `eval` would leave them, and back afterwards
        part.training = False
    try:
        with torch.no_grad():
            program = torch.onnx.export(model, **given, dynamo=True, verbose=False)
        file = io.BytesIO()
        program.save(file)
        return file.getvalue()
    except Exception as error:
        raise ModelFormatError(f"torch.onnx.export: {type(model).__name__}: {_short(error)}") from error
    finally:
        for part in training:
            part.training = True


def _estimator(model: Estimator, features: Any) -> bytes:
    """What skl2onnx writes; classifiers give probabilities as an array."""
    convert = _library("skl2onnx", "the exporter of scikit-learn's models").to_onnx
    if features is None:
        raise OptionError("an estimator is exported with example features: load(estimator, example_inputs=X[:1])")
    options = {id(model): {"zipmap": False}} if hasattr(model, "predict_proba") else None
    try:
        return _serialised(convert(model, features, options=options))
    except ModelFormatError:
        raise
    except Exception as error:
        raise ModelFormatError(f"skl2onnx: {type(model).__name__}: {_short(error)}") from error


def _short(error: Exception) -> str:
    """The beginning of what an exporter says: some quote whole models, which the error's cause still has."""
    text = str(error)
    return text if len(text) <= MOST_QUOTED else f"{text[:MOST_QUOTED]} ..."


def _library(name: str, what: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise OptionError(f"{what} is needed for this model and not installed: pip install {name}") from error
