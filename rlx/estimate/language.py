"""The estimate of a language model from its header: weights, KV cache, and a bound on activations."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from rlx.errors import ModelFormatError, OptionError
from rlx.estimate.architecture import Architecture, from_config, from_gguf
from rlx.estimate.calibrate import FUNCTION, NODE, Overhead
from rlx.estimate.experts import ExpertTotals
from rlx.estimate.memory import PARTS, Axis, MemoryEstimate
from rlx.importers.folder import read_folder
from rlx.importers.gguf import read_gguf_parts
from rlx.ir.encoding import Encoding, encoding_named
from rlx.ir.value import TensorType, stored_as
from rlx.models.sizes import CONTEXT, KV_DTYPES, PREFILL
from rlx.records import dataclass, replace
from rlx.units import with_ints

__all__ = [
    "KV_DTYPES", "LanguageModelFile", "Shape", "Stored", "estimate_language_model", "read_gguf_model", "read_hf_model",
    "shape_of",
]  # fmt: skip

NARROWER = ("q8_0", "q4_0")  # what weights could be quantised to
_FORECAST = "a forecast, of the weights as stored, the KV cache, and the rest by rules; loading plans it exactly"
WORKSPACE = 1 << 20  # bytes a thread that no kernel's tiles exceed
NODES_PER_LAYER, FUNCTIONS = 16, 48  # of a decoder after fusion: what code is counted by


@dataclass(frozen=True)
class Stored:
    """A tensor of the file: shape, bytes, and whether it is a matrix that can be quantised."""

    name: str
    shape: tuple[int, ...]
    nbytes: int

    def quantised(self, encoding: Encoding) -> int:
        """Bytes in a block format; as stored where that is smaller, or the tensor is no matrix of whole blocks."""
        if len(self.shape) < 2 or self.shape[-1] % encoding.block:
            return self.nbytes
        return min(self.nbytes, encoding.nbytes(self.shape))


@dataclass(frozen=True)
class LanguageModelFile:
    """What the header of a language model says."""

    name: str
    architecture: Architecture
    tensors: tuple[Stored, ...]

    @property
    def weight_bytes(self) -> int:
        """Stored bytes; tied tensors are stored, and counted, once."""
        return sum(t.nbytes for t in self.tensors)


def read_gguf_model(path: str | os.PathLike[str]) -> LanguageModelFile:
    """The header of a GGUF model, all its parts. Raises `ModelFormatError`."""
    parts = read_gguf_parts(path)
    tensors = tuple(Stored(t.name, t.shape, t.nbytes) for part in parts for t in part.tensors.values())
    embedding = next((t for t in tensors if t.name == "token_embd.weight"), None)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFormatError(f"{parts[0].path}: has no embedding (token_embd.weight): not the file of a whole model")
    architecture = from_gguf(parts[0].path, parts[0].metadata, embedding.shape[0])
    return LanguageModelFile(Path(path).name, architecture, tensors)


def read_hf_model(path: str | os.PathLike[str]) -> LanguageModelFile:
    """The headers of a safetensors model (file, index or folder) with the config.json beside it."""
    files, config, fields = read_folder(path)
    tensors = tuple(Stored(t.name, t.shape, t.nbytes) for file in files for t in file.tensors.values())
    name = config.parent.name or config.name
    return LanguageModelFile(name, from_config(str(config), fields), tensors)


@dataclass(frozen=True)
class Shape:
    """How a model is run: tokens of context, sequences and tokens of a prompt at once, and the type of its cache."""

    context: int
    batch: int
    prefill: int
    kv_dtype: str


def shape_of(
    file: LanguageModelFile,
    context: int | None = None,
    batch: int = 1,
    kv_dtype: str = "f32",
    prefill: int = PREFILL,
) -> Shape:
    """The shape that is asked for, else that of `rlx.load_llm`: the context it was made for, of decoders 4,096 at most.

    Raises `OptionError`.
    """
    longest = file.architecture.context
    if context is None and longest is None:
        raise OptionError(f"{file.name}: does not say how long a context it was made for; give context=")
    context, batch, prefill = with_ints((context, batch, prefill))
    for name, value in (("context", context), ("batch", batch), ("prefill", prefill)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise OptionError(f"{name}={value!r}: expected a number >= 1")
    if kv_dtype not in KV_DTYPES:
        raise OptionError(f"kv_dtype={kv_dtype!r}: expected one of {', '.join(KV_DTYPES)}")
    usual = min(longest or 1, CONTEXT) if file.architecture.causal else longest
    return Shape(context or usual or 1, batch, prefill, kv_dtype)


def estimate_language_model(
    file: LanguageModelFile, shape: Shape, device: str, overhead: Overhead, *, threads: int = 1
) -> MemoryEstimate:
    """A forecast of what a language model takes in that shape.

    Weights are counted at their stored size and read where they lie in the mapped file.
    """
    return _Model(file, device, overhead, threads, file.weight_bytes).at(shape)


@dataclass(frozen=True)
class _Model:
    file: LanguageModelFile
    device: str
    overhead: Overhead
    threads: int
    weights: int

    def at(self, shape: Shape) -> MemoryEstimate:
        file, arch = self.file, self.file.architecture
        tokens = shape.batch * min(shape.context, shape.prefill if arch.causal else shape.context)
        experts = expert_totals(file.tensors)
        longer = arch.context is not None and shape.context > arch.context
        made = MemoryEstimate(
            model=file.name,
            device=self.device,
            weight_bytes=self.weights,
            activation_bytes=activation_bound(arch, tokens, shape.batch),
            input_bytes=8 * tokens,  # ids and positions
            output_bytes=4 * shape.batch * (arch.vocab if arch.causal else arch.hidden),
            state_bytes=shape.batch * kv_bytes(arch.kv_elements(shape.context), shape.kv_dtype),
            workspace_bytes=self.threads * WORKSPACE,
            code_bytes=NODES_PER_LAYER * len(arch.layers) * NODE + FUNCTIONS * FUNCTION,
            overhead_bytes=self.overhead.stays,
            compiler_bytes=self.overhead.passing,
            import_bytes=self.overhead.opens,
            address_bytes=self.overhead.unused,
            certainty={
                **dict.fromkeys(PARTS, "forecast"),
                **dict.fromkeys(("code", "overhead"), self.overhead.certainty),
            },
            stored_weight_bytes=file.weight_bytes,
            mapped_weight_bytes=self.weights,
            dims={"context": shape.context, "batch": shape.batch},
            kv_bytes_per_token=kv_bytes(arch.kv_elements_per_token(), shape.kv_dtype),
            kv_dtype=shape.kv_dtype if arch.causal else None,
            experts=experts if experts.layers else None,
            notes=(*((f"the model was made for {arch.context} tokens of context",) if longer else ()), _FORECAST),
        )
        steps = (1, 16, 64, 256, 512, 1024, 2048) if arch.causal else ()
        buckets = {n: self.peak_with(made, n, shape) for n in (*(s for s in steps if s < shape.context), shape.context)}
        return replace(
            made,
            bucket_peaks=buckets,
            axes={
                "context": Axis(1, arch.context, 1, shape.context, lambda n: self.at(replace(shape, context=n))),
                "batch": Axis(1, None, 1, shape.batch, lambda n: self.at(replace(shape, batch=n))),
            },
            choices=lambda: self.choices(shape),
        )

    def peak_with(self, made: MemoryEstimate, tokens: int, shape: Shape) -> int:
        """The running peak when `tokens` of each sequence go through at once; all of them is the one-shot compile."""
        arch, count = self.file.architecture, shape.batch * tokens
        own = activation_bound(arch, count, shape.batch) + 8 * count
        return made.running_peak_bytes - made.activation_bytes - made.input_bytes + own

    def choices(self, shape: Shape) -> Iterable[tuple[str, MemoryEstimate]]:
        """Other types of cache and weights."""
        if self.file.architecture.causal:
            for name in KV_DTYPES:
                yield f"kv_dtype {name!r}", self.at(replace(shape, kv_dtype=name))
        for name in NARROWER:
            weights = sum(t.quantised(encoding_named(name)) for t in self.file.tensors)
            yield f"weights quantised to {name}", replace(self, weights=weights).at(shape)


def kv_bytes(elements: int, kv_dtype: str) -> int:
    """Bytes of cache elements; whole blocks."""
    dtype, encoding = stored_as(kv_dtype)
    whole = elements if encoding is None else -(-elements // encoding.block) * encoding.block
    return TensorType((whole,), dtype, encoding).nbytes() or 0


def activation_bound(arch: Architecture, tokens: int, batch: int) -> int:
    """Bytes that the arena of a decoder step never exceeds, `tokens` tokens in all, in f32.

    Live at once are the residual stream and the widest stage of a layer: queries, keys and values, these again as
    attention wants them, and what it gives; or gate and up in one matrix and their product; or the normalised input
    with gate and up. The planner's arena for decoders without their cache is 0.55 to 0.85 of it.
    """
    h = arch.hidden
    widest = max(
        h + max(2 * layer.heads_width + 2 * layer.kv_elements, 3 * layer.ffn, h + 2 * layer.ffn)
        for layer in arch.layers
    )
    return 4 * (tokens * widest + batch * arch.vocab)


_STACKED = re.compile(r"(?:blk|.*layers)\.(\d+)\..*(?:_exps\b|experts\.(?:gate_up|gate|up|down)_proj).*")
_SINGLE = re.compile(r".*layers\.(\d+)\..*\.experts\.(\d+)\..*")


def expert_totals(tensors: Iterable[Stored]) -> ExpertTotals:
    """The experts of each MoE layer, from stacked tensors (experts on the outermost axis) or one tensor an expert."""
    counts: dict[int, int] = {}
    totals: dict[int, int] = {}
    for tensor in tensors:
        single = _SINGLE.fullmatch(tensor.name)
        stacked = None if single else _STACKED.fullmatch(tensor.name)
        if single:
            layer, count = int(single[1]), int(single[2]) + 1
        elif stacked and tensor.shape:
            layer, count = int(stacked[1]), tensor.shape[0]
        else:
            continue
        counts[layer] = max(counts.get(layer, 0), count)
        totals[layer] = totals.get(layer, 0) + tensor.nbytes
    layers = sorted(layer for layer in counts if counts[layer])
    return ExpertTotals(
        tuple(counts[layer] for layer in layers), tuple(totals[layer] // counts[layer] for layer in layers)
    )
