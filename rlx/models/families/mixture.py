"""Decoders whose MLPs are mixtures of experts: Mixtral, Qwen 2 and 3 MoE. (arXiv 2401.04088, 2407.10671, 2505.09388)"""

from __future__ import annotations

from typing import ClassVar

from rlx import ops
from rlx.errors import ModelFormatError
from rlx.ir.graph import Value
from rlx.models.blocks import Blocks, Names
from rlx.models.config import Config
from rlx.models.families.base import Family
from rlx.models.families.llama import Llama
from rlx.models.families.qwen import Qwen2, Qwen3
from rlx.models.source import Source
from rlx.ops.experts import combine, route
from rlx.records import replace

__all__ = ["Mixtral", "Qwen2Moe", "Qwen3Moe"]

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def mixed(config: Config, source: Source) -> Config:
    """The configuration with its experts. Raises `ModelFormatError`."""
    facts = source.facts
    count, used = facts.number("experts"), facts.number("experts_used")
    width = facts.number("expert_ffn", config.ffn)
    if not 1 <= used <= count <= 1 << 16 or not 1 <= width <= 1 << 24:
        raise ModelFormatError(f"{source.path}: {used} of {count} experts of width {width}: out of range")
    return replace(config, experts=count, experts_used=used, expert_ffn=width)


def mixture(family: Family, b: Blocks, x: Value, layer: int, *, normalised: bool) -> Value:
    """Each token goes to the experts that the router likes best, weighted by the softmax of what it says of them."""
    c = b.config
    logits = b.linear(x, "ffn_gate_inp", layer, c.experts)
    weights, numbers = route(logits, c.experts_used, normalize=normalised, name=f"layer {layer}")
    shapes = ((c.expert_ffn, c.hidden), (c.expert_ffn, c.hidden), (c.hidden, c.expert_ffn))
    gate, up, down = (b.stacked(n, layer, c.experts, s) for n, s in zip(EXPERTS, shapes, strict=True))
    rows = ops.unsqueeze(x, axes=(-2,))
    hidden = family.act(b, ops.grouped_matmul(rows, gate, numbers, transposed=True))
    hidden = hidden * ops.grouped_matmul(rows, up, numbers, transposed=True)
    return combine(ops.grouped_matmul(hidden, down, numbers, transposed=True), weights)


def _names(base: Names, layer: str, gate: str, up: str, down: str) -> Names:
    """Those of a family whose MLP is in `layer`; [] stands for the number of an expert."""
    own = {name: found for name, found in base.items() if name not in ("ffn_gate", "ffn_up", "ffn_down")}
    parts = dict(zip(EXPERTS, (gate, up, down), strict=True))
    return {
        **own,
        "ffn_gate_inp": ("blk.{}.ffn_gate_inp", f"layers.{{}}.{layer}.gate"),
        **{name: (f"blk.{{}}.{name}", f"layers.{{}}.{layer}.experts.[].{part}") for name, part in parts.items()},
    }


def check_every_layer(source: Source) -> None:
    """Raises `ModelFormatError` where some layers of a Qwen have no experts."""
    fields = source.facts.fields
    dense = fields.get("mlp_only_layers") or fields.number("decoder_sparse_step", default=1) != 1
    if not source.gguf and dense:
        raise ModelFormatError(f"{source.path}: layers without experts among those with some are not known")


class Mixtral(Llama):
    """As Mistral, with experts; GGUF files call both llama."""

    config = ("mixtral",)
    mixture = True
    names: ClassVar[Names] = _names(Llama.names, "block_sparse_moe", "w1", "w3", "w2")

    def configure(self, config: Config, source: Source, context: int) -> Config:
        return mixed(super().configure(config, source, context), source)

    def mlp(self, b: Blocks, x: Value, layer: int) -> Value:
        return mixture(self, b, x, layer, normalised=True)


class Qwen2Moe(Qwen2):
    """As Qwen 2, with experts, and one more that all tokens go through, weighted by a gate of its own."""

    gguf = ("qwen2moe",)
    config = ("qwen2_moe",)
    mixture = True
    names: ClassVar[Names] = {
        **_names(Qwen2.names, "mlp", "gate_proj", "up_proj", "down_proj"),
        "ffn_gate_inp_shexp": ("blk.{}.ffn_gate_inp_shexp", "layers.{}.mlp.shared_expert_gate"),
        "ffn_gate": ("blk.{}.ffn_gate_shexp", "layers.{}.mlp.shared_expert.gate_proj"),
        "ffn_up": ("blk.{}.ffn_up_shexp", "layers.{}.mlp.shared_expert.up_proj"),
        "ffn_down": ("blk.{}.ffn_down_shexp", "layers.{}.mlp.shared_expert.down_proj"),
    }

    def configure(self, config: Config, source: Source, context: int) -> Config:
        check_every_layer(source)
        made = mixed(super().configure(config, source, context), source)
        width = source.facts.number("shared_ffn", 0)
        if not 1 <= width <= 1 << 24:
            raise ModelFormatError(f"{source.path}: a shared expert of width {width}: out of range")
        return replace(made, ffn=width)

    def mlp(self, b: Blocks, x: Value, layer: int) -> Value:
        normalised = not b.source.gguf and b.source.facts.fields.flag("norm_topk_prob", default=False)
        # converters to GGUF leave out the axis of one row
        gate = b.row("ffn_gate_inp_shexp", layer, b.config.hidden)
        open_ = ops.sigmoid(ops.matmul(x, ops.reshape(gate, (b.config.hidden, 1))))
        made: Value = mixture(self, b, x, layer, normalised=normalised) + open_ * super().mlp(b, x, layer)
        return made


class Qwen3Moe(Qwen3):
    """As Qwen 3, with experts in every layer."""

    gguf = ("qwen3moe",)
    config = ("qwen3_moe",)
    mixture = True
    names: ClassVar[Names] = _names(Qwen3.names, "mlp", "gate_proj", "up_proj", "down_proj")

    def configure(self, config: Config, source: Source, context: int) -> Config:
        check_every_layer(source)
        return mixed(super().configure(config, source, context), source)

    def mlp(self, b: Blocks, x: Value, layer: int) -> Value:
        normalised = b.source.gguf or b.source.facts.fields.flag("norm_topk_prob", default=False)
        return mixture(self, b, x, layer, normalised=normalised)
