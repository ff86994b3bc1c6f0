"""LoRA adapters of language models: their files, and the room that a decoder's graph makes for them. (arXiv 2106.09685)

A file is a folder of PEFT (adapter_config.json, adapter_model.safetensors) or a GGUF file of llama.cpp's. An adapter
adds scale * B A x to a product W x; scale is alpha / r, or alpha / sqrt(r) where PEFT says so. W stays as it is stored,
and the graph has two thin products more, r * (inputs + outputs) multiplications a token: in blocks the sum could not be
written back without loss, and so scales can change while the model runs.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import ModelFormatError, NameNotFound, OptionError
from rlx.importers.fields import Fields
from rlx.importers.folder import read_json
from rlx.importers.gguf import read_gguf
from rlx.importers.safetensors import read_safetensors
from rlx.importers.stored import Stored, gguf_tensors, safetensors_tensors
from rlx.ir.adapters import A_SUFFIX, B_SUFFIX
from rlx.ir.graph import Array, Graph
from rlx.models.blocks import PREFIXES, Names
from rlx.models.config import Config
from rlx.models.families.base import Family
from rlx.models.sizes import ADAPTER_INPUTS
from rlx.models.source import Source
from rlx.records import dataclass

__all__ = ["Adapter", "read_adapter", "room_for", "weights_of", "with_room"]

MAX_RANK = 1 << 14
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WRAPPED = "base_model.model."  # before the names of modules in PEFT's files
PARTS = {"lora_A": "a", "lora_B": "b", "lora_a": "a", "lora_b": "b"}
UNKNOWN = {  # fields of PEFT's file that must not say anything: what they are for
    "use_dora": "DoRA", "modules_to_save": "weights that are replaced", "lora_bias": "biases of adapters",
    "trainable_token_indices": "changed embeddings", "target_parameters": "adapters of single parameters",
    "alora_invocation_tokens": "adapters that are on after some tokens only", "use_qalora": "pooled inputs",
    "layer_replication": "repeated layers", "arrow_config": "adapters that are chosen for each token",
}  # fmt: skip
CHANGES_WEIGHTS = ("pissa", "olora", "corda", "lora_ga")  # ways of starting after which the model's weights are others

Target = tuple[str, int | None]  # our name of a product's weight, and its layer


@dataclass(frozen=True)
class Adapter:
    """An adapter as its file says: A [r, inputs] and B [outputs, r] in f32 by target; B has the scale in it.

    `gguf`: rows of B are in the order of GGUF files.
    """

    path: str
    gguf: bool
    pairs: Mapping[Target, tuple[Array, Array]]

    @property
    def rank(self) -> int:
        return max(len(a) for a, _ in self.pairs.values())

    @property
    def names(self) -> set[str]:
        """Our names of the weights that it adds to."""
        return {name for name, _ in self.pairs}


def read_adapter(path: str | os.PathLike[str], family: Family, architecture: str) -> Adapter:
    """The adapter of a folder or a GGUF file, for a model of that family. Raises `ModelFormatError`."""
    path = Path(path)
    gguf = not os.path.isdir(path) and path.suffix != ".safetensors"
    found, scale_of = (_gguf if gguf else _peft)(path, architecture)
    pairs: dict[Target, dict[str, Array]] = {}
    scales: dict[Target, float] = {}
    for name, stored in found.items():
        module, part = _parts_of(str(path), name)
        target = _target(module, family.names, gguf)
        if target is None:
            raise ModelFormatError(f"{path}: {name!r}: {architecture!r} has no {module!r} that adapters can add to")
        if part in pairs.setdefault(target, {}):
            raise ModelFormatError(f"{path}: {name!r}: {module!r} has two adapters")
        pairs[target][part] = _matrix(str(path), name, stored)
        if part == "a":
            scales[target] = scale_of(module, len(pairs[target][part]))
    made = {target: _pair(str(path), target, parts, scales.get(target, 1.0)) for target, parts in pairs.items()}
    if not made:
        raise ModelFormatError(f"{path}: has no adapters")
    return Adapter(str(path), gguf, made)


def _pair(path: str, target: Target, parts: Mapping[str, Array], scale: float) -> tuple[Array, Array]:
    name = target[0] if target[1] is None else f"{target[0]} of layer {target[1]}"
    if len(parts) != 2:
        raise ModelFormatError(f"{path}: {name}: expected both A and B")
    a, b = parts["a"], parts["b"]
    if not 1 <= len(a) <= MAX_RANK or b.shape[1] != len(a):
        raise ModelFormatError(
            f"{path}: {name}: A {list(a.shape)} and B {list(b.shape)} are not [r, inputs] and [outputs, r]"
        )
    b = b * np.float32(scale)
    if not np.isfinite(a).all() or not np.isfinite(b).all():
        raise ModelFormatError(f"{path}: {name}: A or B has NaN or infinities")
    return a, b


def _matrix(path: str, name: str, stored: Stored) -> Array:
    type = stored.type
    if type.rank != 2 or not type.dtype.is_float or type.dtype.bits < 16 or (stored.encoding and not type.encoding):
        raise ModelFormatError(f"{path}: {name!r}: expected a matrix of floats, got {stored.encoding or type}")
    data, shape = stored.read(), [int(size) for size in type.shape]
    return np.asarray(data if type.encoding is None else type.encoding.decode(data, shape), np.float32)


def _parts_of(path: str, name: str) -> tuple[str, str]:
    """The module and "a" or "b" of the name of a tensor: module.lora_A.weight, module.weight.lora_a."""
    found = re.fullmatch(r"(.+?)(?:\.weight)?\.(lora_[ABab])(?:\.default)?(?:\.weight)?", name)
    if found is None:
        raise ModelFormatError(f"{path}: {name!r} is no A or B of a matrix product, which is all that is known")
    return found[1].removeprefix(WRAPPED), PARTS[found[2]]


def _target(module: str, names: Names, gguf: bool) -> Target | None:
    """Our name of the weight of a module in a file."""
    for ours, known in names.items():
        for own in known[0 if gguf else 1].split("|"):
            pattern = re.escape(own).replace(r"\{\}", "([0-9]{1,5})")
            before = "" if gguf else f"(?:{'|'.join(map(re.escape, PREFIXES))})"
            found = re.fullmatch(before + pattern, module)
            if found is not None:
                return ours, int(found[1]) if found.groups() else None
    return None


# ---- files


def _gguf(path: Path, architecture: str) -> tuple[dict[str, Stored], Any]:
    file = read_gguf(path)
    get = file.metadata.get
    if get("general.type") != "adapter" or get("adapter.type") != "lora":
        raise ModelFormatError(f"{path}: is no LoRA adapter: general.type is {get('general.type')!r:.40}")
    if get("general.architecture") != architecture:
        other = get("general.architecture")
        raise ModelFormatError(f"{path}: is an adapter of {other!r:.40}, and the model is of {architecture!r}")
    if get("adapter.alora.invocation_tokens") is not None:
        raise ModelFormatError(f"{path}: an adapter that is on after some tokens only is not known")
    alpha = Fields(str(path), get).real("adapter.lora.alpha", default=0.0)
    return dict(gguf_tensors([file])), lambda module, rank: alpha / rank if alpha and rank else 1.0


def _peft(path: Path, architecture: str) -> tuple[dict[str, Stored], Any]:
    folder = path if os.path.isdir(path) else path.parent
    fields = read_json(folder / CONFIG)
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise ModelFormatError(f"{folder}: {CONFIG}: peft_type {kind!r:.40} is not known; LORA is")
    for name, what in UNKNOWN.items():
        if fields.get(name):
            raise ModelFormatError(f"{folder}: {CONFIG}: {name}: {what} are not known")
    bias, start = fields.get("bias", "none"), fields.get("init_lora_weights")
    if bias != "none":
        raise ModelFormatError(f"{folder}: {CONFIG}: bias {bias!r:.40}: changed biases are not known")
    if isinstance(start, str) and start.startswith(CHANGES_WEIGHTS):
        raise ModelFormatError(f"{folder}: {CONFIG}: init_lora_weights {start!r:.40} changes the model's own weights")
    given = Fields(str(folder / CONFIG), fields.get)
    usual, root = given.real("lora_alpha", default=8.0), given.flag("use_rslora", default=False)
    alphas = _alphas(folder, fields.get("alpha_pattern"))

    def scale_of(module: str, rank: int) -> float:
        alpha = next((a for end, a in alphas.items() if module == end or module.endswith("." + end)), usual)
        return alpha / (math.sqrt(rank) if root else rank) if rank else 0.0

    return dict(safetensors_tensors([read_safetensors(folder / WEIGHTS)])), scale_of


def _alphas(folder: Path, given: Any) -> dict[str, float]:
    """The alphas of modules by the ends of their names."""
    if not given:
        return {}
    if not isinstance(given, dict) or not all(re.fullmatch(r"\^?[\w.]+", str(name)) for name in given):
        raise ModelFormatError(f"{folder}: {CONFIG}: alpha_pattern: expected numbers by names of modules")
    fields = Fields(str(folder / CONFIG), given.get)
    return {name.removeprefix("^"): fields.real(name) for name in given}


# ---- in a graph


def room_for(adapters: Iterable[Adapter]) -> str:
    """What `build_decoder(lora=...)` takes to have room for these: rank x number : names of weights."""
    every = list(adapters)
    names = sorted(set().union(*(adapter.names for adapter in every)))
    return f"{max(adapter.rank for adapter in every)}x{len(every)}:{','.join(names)}"


def with_room(graph: Graph, room: str, source: Source, family: Family) -> Graph:
    """The graph with room for adapters, as `room_for` says. Raises `OptionError`."""
    from rlx.passes.lora import lora  # only who has adapters needs it

    found = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,3}):([a-z_,]+)", room) if isinstance(room, str) else None
    if found is None:
        raise OptionError(f"lora={room!r:.60}: expected what rlx.load_llm(lora=...) makes of adapters")
    names = set(found[3].split(","))
    targets = [param.name for param in graph.params if _name_of(param.name, source, family) in names]
    known = {_name_of(name, source, family) for name in targets}
    if "output" in names and "output" not in known:  # the head is the table of the embedding
        targets += [p.name for p in graph.params if _name_of(p.name, source, family) == "token_embd"]
        known.add("output")
    missing = sorted(names - known)
    if missing:
        raise OptionError(f"lora: {source.path} has no weights {', '.join(missing)}")
    try:
        return lora(graph, rank=int(found[1]), slots=int(found[2]), targets=targets, rows=ADAPTER_INPUTS)
    except NameNotFound as error:
        raise OptionError(f"lora: adapters of experts and of embeddings are not known: {error}") from None


def _name_of(param: str, source: Source, family: Family) -> str | None:
    found = _target(param.removesuffix(".weight"), family.names, source.gguf) if param.endswith(".weight") else None
    return None if found is None else found[0]


def weights_of(
    adapter: Adapter, params: Iterable[str], source: Source, family: Family, config: Config
) -> dict[str, Array]:
    """A and B by the names that `Adapters.put` takes, of a model with these params."""
    by_target = {_target(p.removesuffix(".weight"), family.names, source.gguf): p for p in params}
    found: dict[str, Array] = {}
    for (name, layer), (a, b) in adapter.pairs.items():
        own = by_target.get((name, layer)) or (by_target.get(("token_embd", None)) if name == "output" else None)
        if own is None:
            raise ModelFormatError(f"{adapter.path}: the model has no {name} in layer {layer}")
        found[own + A_SUFFIX], found[own + B_SUFFIX] = a, _turned(b, name, adapter.gguf, source.gguf, family, config)
    return found


def _turned(b: Array, name: str, gguf: bool, to_gguf: bool, family: Family, config: Config) -> Array:
    """The rows of B in the order that the model's file has."""
    change = family.stored_in_gguf(name, config) if name in ("attn_q", "attn_k") else None
    if gguf == to_gguf or change is None:
        return b
    rows = config.head_dim * (config.heads if name == "attn_q" else config.kv_heads)
    if len(b) != rows:
        return b  # `put` says what is expected
    if to_gguf:
        return change(b)
    order = change(np.arange(rows, dtype=np.int64)[:, None])[:, 0]
    made = np.empty_like(b)
    made[order] = b
    return made
