"""Files of weights: read as they are, written as GGUF or safetensors with other types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlx.disk import saving
from rlx.errors import NameNotFound
from rlx.importers.folder import weights_of
from rlx.importers.gguf import GgufFile, read_gguf_parts
from rlx.importers.safetensors import read_safetensors, read_safetensors_index
from rlx.importers.stored import Stored, gguf_tensors, safetensors_tensors
from rlx.ir.graph import Array
from rlx.progress import report
from rlx.quantiser.imatrix import Importance
from rlx.quantiser.report import TensorResult
from rlx.quantiser.rows import Errors, converted_rows
from rlx.quantiser.rules import Rules, is_head, stored_bytes
from rlx.quantiser.write_gguf import FILE_TYPES, Typed, copied_pairs, pair, write_gguf
from rlx.quantiser.write_safetensors import write_safetensors
from rlx.records import dataclass, field, replace

__all__ = ["Plan", "Weights", "plan_of", "read_file", "write"]

QUANTIZATION_VERSION = 2  # of GGUF's block formats


@dataclass(frozen=True)
class Weights:
    """A model's tensors by name, with what its file says besides.

    `changed` gives for a tensor what is to be done with its elements first; `architecture` is empty where it is not
    known, `pairs` are the metadata of a GGUF file to be written, `notes` those of a safetensors file.
    """

    path: Path
    container: str
    tensors: Mapping[str, Stored]
    pairs: Sequence[bytes] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, Callable[[Array], Array]] = field(default_factory=dict)
    layers: int = 0
    remarks: Sequence[str] = ()


def read_file(path: Path, container: str) -> Weights:
    """The weights of a safetensors file or folder, or of a GGUF file, for a file of `container` gguf or safetensors.

    Raises `ModelFormatError`.
    """
    if path.name.lower().endswith(".gguf"):
        return _of_gguf(path, container)
    index = weights_of(path)
    files = read_safetensors_index(index) if index.suffix == ".json" else [read_safetensors(index)]
    if container == "gguf":
        if (index.parent / "config.json").is_file() and path.is_dir():
            from rlx.quantiser.folder import as_gguf

            return as_gguf(path)  # which knows this module
        return Weights(
            path,
            container,
            dict(safetensors_tensors(files)),
        )
    notes = {key: value for file in files for key, value in file.metadata.items()}
    return Weights(path, container, dict(safetensors_tensors(files)), (), notes)


def _of_gguf(path: Path, container: str) -> Weights:
    parts: list[GgufFile] = read_gguf_parts(path)
    first = parts[0]
    layers = first.metadata.get(f"{first.metadata.get('general.architecture')}.block_count", 0)
    without = {"general.file_type", "general.quantization_version", "general.alignment"}
    without |= {key for key in first.metadata if key.startswith("split.")}
    pairs = copied_pairs(first, without) if container == "gguf" else []
    count = layers if type(layers) is int else 0
    return Weights(path, container, dict(gguf_tensors(parts)), pairs, layers=count)


@dataclass(frozen=True)
class Plan:
    """What each tensor becomes, known before any is read."""

    weights: Weights
    tensors: Sequence[TensorResult]
    importance: Mapping[str, Importance]

    @property
    def size(self) -> int:
        """Bytes of all tensors in the new file."""
        return sum(t.bytes_after for t in self.tensors)


def plan_of(weights: Weights, rules: Rules, importance: Mapping[str, Importance]) -> Plan:
    """The plan. Raises `NameNotFound` for a pattern, or an importance matrix, that fits no tensor."""
    rules.check_used(list(weights.tensors))
    rules = replace(rules, layers=weights.layers, tied=not any(is_head(name) for name in weights.tensors))
    if importance and not importance.keys() & weights.tensors.keys():
        some = ", ".join(list(importance)[:3])
        raise NameNotFound(f"{weights.path}: the importance matrix has no tensor of this model; it has {some}, …")
    made = []
    for name, stored in weights.tensors.items():
        shape = tuple(int(s) for s in stored.type.shape if isinstance(s, int))
        before = stored.encoding or stored.type.dtype.name
        after, reason = rules.choose(name, stored.type)
        made.append(
            TensorResult(name, shape, before, after, stored_bytes(before, shape), stored_bytes(after, shape), reason)
        )
    return Plan(weights, made, importance)


def write(plan: Plan, target: Path, kind: str, threads: int) -> tuple[int, list[TensorResult]]:
    """Writes the file; its bytes, and the tensors with their errors."""
    done: list[TensorResult] = []
    weights = plan.weights
    tensors = {t.name: (t.shape, t.after) for t in plan.tensors}
    with ThreadPoolExecutor(max(1, threads)) as pool:
        parts = _parts(plan, pool, done)
        with saving(target, "quantize") as file:
            if weights.container == "gguf":
                version = pair("general.quantization_version", Typed("u32", QUANTIZATION_VERSION))
                pairs = [*weights.pairs, version]
                if kind in FILE_TYPES:
                    pairs.append(pair("general.file_type", Typed("u32", FILE_TYPES[kind])))
                size = write_gguf(file, pairs, tensors, parts)
            else:
                size = write_safetensors(file, weights.notes, tensors, parts)
    return size, done


def _parts(plan: Plan, pool: ThreadPoolExecutor, done: list[TensorResult]) -> Iterator[Iterator[Array]]:
    finished = 0
    for planned in plan.tensors:
        report("weights", finished / max(plan.size, 1), planned.name)
        errors = Errors()
        one = plan.importance.get(planned.name)
        yield converted_rows(
            planned.name,
            plan.weights.tensors[planned.name],
            planned.after,
            pool,
            importance=None if one is None else one.means,
            changed=plan.weights.changed.get(planned.name),
            errors=errors,
        )
        finished += planned.bytes_after
        rounded = planned.after != planned.before
        done.append(_with_errors(planned, errors if rounded else None))


def _with_errors(planned: TensorResult, errors: Errors | None) -> TensorResult:
    return planned if errors is None else replace(planned, rms=errors.rms, worst=errors.worst)
