"""`rlx.quantize`: a model file with narrower weights, and what that costs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.backends.granted import run_threads
from rlx.boundary import bounded
from rlx.disk import path_of, target_of
from rlx.errors import ExecutionError, ModelFormatError, OptionError, RlxError
from rlx.importers.formats import is_onnx
from rlx.importers.gguf import read_gguf_parts
from rlx.importers.sources import FileSource
from rlx.ir.encodings import ENCODINGS
from rlx.ir.value import Value
from rlx.progress import Watcher, reporting
from rlx.quantiser import weights as files
from rlx.quantiser.imatrix import Importance, read_imatrix, write_imatrix
from rlx.quantiser.inputs import Given
from rlx.quantiser.onnx.weights import ONNX_TYPES
from rlx.quantiser.ranges import RANGES
from rlx.quantiser.report import Quantized
from rlx.quantiser.rules import TYPES, Rules
from rlx.records import dataclass, replace
from rlx.units import as_int

__all__ = ["ALL_TYPES", "Wishes", "quantize"]

ALL_TYPES = tuple(dict.fromkeys((*ONNX_TYPES, *TYPES)))
STAGES = {"inputs": 0.5, "weights": 0.2, "outputs": 0.3}  # where inputs are given; see `rlx.progress`
ENDINGS = {".gguf": "gguf", ".safetensors": "safetensors", ".onnx": "onnx"}


@dataclass(frozen=True)
class Wishes:
    """What a call asks for besides the types; see `quantize`."""

    activations: str | None = None
    ranges: str = "minmax"
    percentile: float = 99.99
    per_channel: bool = True
    keep: Sequence[str] = ()
    threads: int = 1
    dry_run: bool = False
    inputs: Any = None


@bounded("quantize", ModelFormatError)
def quantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None,
    type: str = "q8_0",
    *,
    tensors: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    keep: Sequence[str] = (),
    embeddings: str | None = None,
    output: str | None = None,
    imatrix: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    save_imatrix: str | os.PathLike[str] | None = None,
    activations: str | None = None,
    inputs: Given | Sequence[int] | None = None,
    ranges: str = "mse",
    percentile: float = 99.99,
    per_channel: bool = True,
    threads: int | None = None,
    dry_run: bool = False,
    progress: Watcher | None = None,
) -> Quantized:
    """Writes `source` with narrower weights to `target`: whole or not at all, and never over `source`.

    `source` is an ONNX file, a GGUF file (the first of several parts), a safetensors file or a folder with such. The
    ending of `target` says what it becomes: .onnx of .onnx, .gguf or .safetensors of the others.

    `type` is that of most weights: for ONNX f16, bf16, int8 (a scale for each result), q8_0 or q4_0 (blocks of 32); for
    others f32, f16, bf16, any block format, or a mix of them as q4_k_m. Tensors of one axis, small ones and what is no
    float stay as they are. `tensors` gives patterns of names with * and ? and the types of what they match, in order;
    `keep` patterns of what stays. `embeddings` and `output` are the types of the table of tokens and the head.
    `imatrix` is a file of llama.cpp with the importance of columns. For a GGUF file of a language model, `inputs` are a
    .txt file or a list of tokens, which the model reads so that the importance is measured; `save_imatrix` is a file
    for that. Where a GGUF file is written, both models then read them, and their logits are compared;
    where that fails, the file stays and the error says so.

    With `activations` ("u8" or "i8") and type int8 the products of an ONNX model are made of 8-bit numbers; their
    ranges are found on `inputs`: an npz or npy file, a folder of these, arrays by the names of inputs, a sequence of
    such mappings, or a function that gives one. `ranges` is minmax, percentile (`percentile` of the elements stay
    within) or mse (the least squared error). `keep` then also names nodes. Where `inputs` are given for an ONNX model,
    both models are run on them and the outputs compared.

    `dry_run`, or a `target` of None, says what would be done. `progress` is called with `rlx.progress.Progress`.
    Raises `OptionError`, `NameNotFound`, `ModelFormatError`, `ExecutionError`.
    """
    if isinstance(source, Value):
        raise OptionError("rlx.quantize takes the path of a model file; the op is rlx.ops.quantize(x, scale, zero)")
    path = Path(path_of(source, "quantize"))
    dry = dry_run or target is None
    container = _container(path)
    goal = Path(path_of(target, "quantize")) if target is not None else path.with_suffix(f".{container}")
    made = _made_container(path, container, goal)
    if not dry:
        _check_other(path, container, goal, save_imatrix)
    pairs = _pairs_of(tensors)
    patterns = "a list of patterns of names, such as ['blk.0.*']"
    if not all(isinstance(pattern, str) for pattern in _listed("keep", keep, patterns)):
        raise OptionError(f"keep={keep!r:.80}: expected {patterns}")
    count = as_int(threads)
    if threads is not None and (count is None or count < 1):
        raise OptionError(f"threads={threads!r}: expected a whole number from 1 on")
    _check_choices(made, type, activations, ranges, percentile, inputs)
    if activations is not None and (pairs or embeddings is not None):
        raise OptionError("activations= rounds products and nothing else: tensors= and embeddings= don't go with it")
    rules = Rules(
        type, pairs, embeddings, output, () if activations else tuple(keep),
        known=ONNX_TYPES if made == "onnx" else TYPES,
    )  # fmt: skip
    wishes = Wishes(activations, ranges, percentile, per_channel, tuple(keep), run_threads(count), dry, inputs)
    if made == "onnx":
        _check_onnx(rules, imatrix is not None, save_imatrix is not None)
    else:
        _check_measured(container, inputs, imatrix is not None, save_imatrix is not None)
    with reporting(progress, {"weights": 1.0} if inputs is None else STAGES):
        if made == "onnx":
            from rlx.quantiser.onnx.model import quantize_onnx

            return quantize_onnx(path, goal, rules, wishes)
        given: Mapping[str, Importance] = {}
        tokens: Sequence[int] = ()
        if imatrix is not None:
            given = imatrix if isinstance(imatrix, Mapping) else read_imatrix(imatrix)
        elif inputs is not None and not dry:
            given, tokens = _measured(path, wishes, save_imatrix)
        done = _quantize_weights(path, made, goal, rules, wishes, given)
        if not tokens or made != "gguf":
            return done
        from rlx.quantiser.accuracy import compare_languages

        try:
            error, told = compare_languages(path, goal, tokens, wishes.threads)
        except (RlxError, MemoryError) as failed:
            raise ExecutionError(
                f"{goal} is written and whole, but comparing it with {path.name} failed: {failed}"
            ) from failed
        return replace(done, outputs=[error], notes=[*done.notes, told])


def _measured(
    path: Path, wishes: Wishes, save_imatrix: str | os.PathLike[str] | None
) -> tuple[Mapping[str, Importance], Sequence[int]]:
    """The importance of columns, and the tokens on which it was measured."""
    from rlx.quantiser.importance import CHUNK, measured

    found, tokens = measured(path, wishes.inputs, wishes.threads)
    if save_imatrix is not None:
        write_imatrix(save_imatrix, found, path.name, -(-len(tokens) // CHUNK))
    return found, tokens


def _quantize_weights(
    path: Path, container: str, goal: Path, rules: Rules, wishes: Wishes, given: Mapping[str, Importance]
) -> Quantized:
    weights = files.read_file(path, container)
    plan = files.plan_of(weights, rules, given)
    results, size = plan.tensors, 0
    if not wishes.dry_run:
        size, results = files.write(plan, goal, rules.type, wishes.threads)
    notes = list(weights.remarks)
    twice = [t for t in results if t.before in ENCODINGS and t.after != t.before]
    if twice:
        notes.append(f"{len(twice)} tensors were rounded to blocks before: a file in f16 or bf16 gives smaller errors")
    before = sum(t.bytes_before for t in results)
    target = "" if wishes.dry_run else str(goal)
    return Quantized(str(path), target, rules.type, results, before, plan.size, size, notes=notes)


def _container(path: Path) -> str:
    """What kind of model a path leads to. Raises `ModelFormatError`."""
    if os.path.isdir(path):
        return "safetensors"
    source = FileSource(os.fspath(path))
    try:
        head = source.read(0, min(16, source.size))
    finally:
        source.close()
    if head.startswith(b"GGUF"):
        return "gguf"
    if path.name.lower().endswith((".safetensors", ".index.json")):
        return "safetensors"
    if is_onnx(head) or path.suffix.lower() == ".onnx":
        return "onnx"
    raise ModelFormatError(f"{path}: expected an ONNX, GGUF or safetensors file, or a folder with safetensors")


def _made_container(path: Path, container: str, goal: Path) -> str:
    made = ENDINGS.get(goal.suffix.lower())
    if made is None or (container == "onnx") != (made == "onnx"):
        allowed = ".onnx" if container == "onnx" else ".gguf or .safetensors"
        raise OptionError(f"{goal}: the new file of {path.name} must end in {allowed}")
    return made


def _files_of(path: Path, container: str) -> list[Path]:
    """The files that a model's weights are read from, as far as names and headers tell."""
    if container == "gguf":
        return [Path(part.path) for part in read_gguf_parts(path)]
    if os.path.isdir(path) or path.suffix == ".json":
        return sorted((path if os.path.isdir(path) else path.parent).glob("*.safetensors"))
    return [path]


def _check_other(path: Path, container: str, goal: Path, save_imatrix: str | os.PathLike[str] | None) -> None:
    """Refuses to write to a file that is read, to a folder, or where nothing can be written."""
    for target in (goal, *(() if save_imatrix is None else (Path(path_of(save_imatrix, "quantize")),))):
        if not os.path.exists(target):
            target_of(target, "quantize")
            continue
        if os.path.isdir(target) or any(target.samefile(p) for p in _files_of(path, container)):
            raise OptionError(f"{target}: is what is read; give the new file another name")


def _check_onnx(rules: Rules, imatrix: bool, save_imatrix: bool) -> None:
    """Refuses what says nothing of an ONNX file."""
    if imatrix or save_imatrix:
        name = "imatrix" if imatrix else "save_imatrix"
        raise OptionError(f"{name}= is for block formats in GGUF files; an ONNX file is calibrated by inputs=")
    if rules.output is not None:
        raise OptionError("output= is for language models in GGUF files; give the tensor by its name in tensors=")


def _check_measured(container: str, inputs: Any, imatrix: bool, save_imatrix: bool) -> None:
    if inputs is not None and (container != "gguf" or imatrix):
        raise OptionError(
            "inputs= measure the importance of a GGUF file of a language model; give that, and no imatrix="
        )
    if save_imatrix and inputs is None:
        raise OptionError("save_imatrix= writes what inputs= measured; give those too")


def _listed(name: str, given: Any, what: str) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise OptionError(f"{name}={given!r:.80}: expected {what}")
    return list(given)


def _pairs_of(tensors: Any) -> list[tuple[str, str]]:
    """The patterns and types that `tensors` gives."""
    what = "pairs of a pattern of names and a type, or a dict of them"
    pairs = list(tensors.items()) if isinstance(tensors, Mapping) else _listed("tensors", tensors, what)
    for pair in pairs:
        if [type(part) for part in _listed("tensors", pair, what)] != [str, str]:
            raise OptionError(f"tensors={tensors!r:.80}: expected {what}")
    return [(pattern, kind) for pattern, kind in pairs]


def _check_choices(
    container: str, type: str, activations: str | None, ranges: str, percentile: float, inputs: Any
) -> None:
    if ranges not in RANGES:
        raise OptionError(f"ranges={ranges!r}: expected one of {', '.join(RANGES)}")
    if not isinstance(percentile, int | float) or not 50 < percentile <= 100:
        raise OptionError(f"percentile={percentile!r}: expected more than 50 and at most 100")
    if activations is None:
        return
    if activations not in ("u8", "i8"):
        raise OptionError(f"activations={activations!r}: expected u8 or i8")
    if container != "onnx" or type != "int8":
        raise OptionError(f"activations= goes with type int8 of ONNX models; got type {type} of a {container} file")
    if inputs is None:
        raise OptionError("activations= needs inputs= to find their ranges: an .npz file, a folder of these, or arrays")
