"""The standard networks of the benchmark as PyTorch modules, and their export to ONNX.

Architectures are the published ones at their usual sizes; weights are random with a fixed seed, since speed does not
depend on them. The PyTorch peers run these modules, all others the exported files.

`python benchmarks/nets.py FOLDER NAME` writes FOLDER/NAME.onnx, and its inputs and outputs to FOLDER/NAME.npz; with
`gguf` after the name it writes the decoder NAME to FOLDER/NAME.gguf, for llama.cpp.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # before PyTorch is imported: --help does not need it
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("form", nargs="?", choices=["gguf"])
    args = parser.parse_args()

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EXPORTING = [False]  # attention is exported as the matmuls and softmax that exporters commonly give


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention of (batch, heads, length, size) tensors."""
    if not EXPORTING[0]:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return torch.softmax(scores if mask is None else scores + mask, -1) @ v


def heads(x: Tensor, n: int) -> Tensor:
    """(batch, length, n*size) as (batch, n, length, size)."""
    return x.view(*x.shape[:2], n, -1).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """The inverse of `heads`."""
    return x.transpose(1, 2).flatten(2)


class EncoderLayer(nn.Module):
    """A transformer encoder layer: norms after each block (BERT) or before (ViT)."""

    def __init__(self, size: int, n: int, hidden: int, *, norm_first: bool) -> None:
        super().__init__()
        self.n, self.norm_first = n, norm_first
        self.q, self.k, self.v, self.o = (nn.Linear(size, size) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(size, eps=1e-6), nn.LayerNorm(size, eps=1e-6)
        self.up, self.down = nn.Linear(size, hidden), nn.Linear(hidden, size)

    def attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (heads(f(x), self.n) for f in (self.q, self.k, self.v))
        projected: Tensor = self.o(merged(attend(q, k, v, mask)))
        return projected

    def feed_forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.gelu(self.up(x)))
        return down

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.norm_first:
            x = x + self.attention(self.norm1(x), mask)
            return x + self.feed_forward(self.norm2(x))
        x = self.norm1(x + self.attention(x, mask))
        normed: Tensor = self.norm2(x + self.feed_forward(x))
        return normed


class Bert(nn.Module):
    """BERT's encoder over token ids and a mask (Devlin et al. 2018); 6 x 384 is the size of MiniLM."""

    def __init__(self, layers: int, size: int) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(30522, size), nn.Embedding(512, size)
        self.norm = nn.LayerNorm(size, eps=1e-12)
        self.layers = nn.ModuleList(EncoderLayer(size, 12, 4 * size, norm_first=False) for _ in range(layers))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x: Tensor = self.norm(self.word(ids) + self.position.weight[: ids.shape[1]])
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(x, bias)
        return x


class VisionTransformer(nn.Module):
    """ViT-B/16 at 224 x 224 (Dosovitskiy et al. 2020)."""

    def __init__(self, layers: int = 12, size: int = 768) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, size, 16, 16)
        self.token = nn.Parameter(torch.randn(1, 1, size) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 197, size) * 0.02)
        self.layers = nn.ModuleList(EncoderLayer(size, 12, 4 * size, norm_first=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(size, eps=1e-6), nn.Linear(size, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits


def conv_norm(i: int, o: int, k: int, stride: int = 1, groups: int = 1, act: nn.Module | None = None) -> nn.Sequential:
    """Convolution and batch norm, with an activation."""
    parts = [nn.Conv2d(i, o, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o)]
    return nn.Sequential(*parts, *([act] if act else []))


class Bottleneck(nn.Module):
    """The 1x1, 3x3, 1x1 block of ResNet."""

    def __init__(self, i: int, mid: int, stride: int) -> None:
        super().__init__()
        o = 4 * mid
        self.body = nn.Sequential(
            conv_norm(i, mid, 1, act=nn.ReLU()), conv_norm(mid, mid, 3, stride, act=nn.ReLU()), conv_norm(mid, o, 1)
        )
        self.short = conv_norm(i, o, 1, stride) if stride != 1 or i != o else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


class ResNet50(nn.Module):
    """ResNet-50 v1.5 (He et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        blocks, i = [], 64
        for mid, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for block in range(count):
                blocks.append(Bottleneck(i, mid, stride if block == 0 else 1))
                i = 4 * mid
        self.stem = nn.Sequential(conv_norm(3, 64, 7, 2, act=nn.ReLU()), nn.MaxPool2d(3, 2, 1))
        self.body, self.head = nn.Sequential(*blocks), nn.Linear(2048, 1000)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.head(F.adaptive_avg_pool2d(self.body(self.stem(image)), 1).flatten(1))
        return logits


class InvertedResidual(nn.Module):
    """The expand, depthwise, project block of MobileNetV2."""

    def __init__(self, i: int, o: int, stride: int, expand: int) -> None:
        super().__init__()
        mid = i * expand
        first = [] if expand == 1 else [conv_norm(i, mid, 1, act=nn.ReLU6())]
        self.body = nn.Sequential(*first, conv_norm(mid, mid, 3, stride, mid, nn.ReLU6()), conv_norm(mid, o, 1))
        self.residual = stride == 1 and i == o

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.residual else y


class MobileNetV2(nn.Module):
    """MobileNetV2 (Sandler et al. 2018)."""

    STAGES = (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = [conv_norm(3, 32, 3, 2, act=nn.ReLU6())]
        i = 32
        for expand, o, count, stride in self.STAGES:
            for block in range(count):
                blocks.append(InvertedResidual(i, o, stride if block == 0 else 1, expand))
                i = o
        self.body = nn.Sequential(*blocks, conv_norm(320, 1280, 1, act=nn.ReLU6()))
        self.head = nn.Linear(1280, 1000)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.head(F.adaptive_avg_pool2d(self.body(image), 1).flatten(1))
        return logits


def conv1d_stack(*layers: tuple[int, int, int]) -> nn.Sequential:
    """3-tap convolutions with ReLU; each (channels in, channels out, stride)."""
    return nn.Sequential(*(m for i, o, s in layers for m in (nn.Conv1d(i, o, 3, s, 1), nn.ReLU())))


class VadChunk(nn.Module):
    """A streaming voice detector of Silero's shape: spectrum by convolution, four convolutions, one LSTM step."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Conv1d(1, 258, 256, 128, bias=False)
        self.body = conv1d_stack((129, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1))
        self.lstm, self.head = nn.LSTM(128, 128), nn.Conv1d(128, 1, 1)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.spectrum(F.pad(x[:, None, :], (0, 64), mode="reflect"))
        y = self.body(torch.sqrt(s[:, :129] ** 2 + s[:, 129:] ** 2))
        y, (h, c) = self.lstm(y.permute(2, 0, 1), (h, c))
        return torch.sigmoid(self.head(F.relu(y.permute(1, 2, 0)))).mean(-1), h, c


class AudioRnn(nn.Module):
    """Four seconds of speech: spectrum by convolution, three convolutions, two LSTM or GRU layers over 200 frames."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.spectrum = nn.Conv1d(1, 402, 400, 160, padding=200, bias=False)
        self.body = conv1d_stack((201, 256, 1), (256, 256, 2), (256, 256, 1))
        self.rnn, self.head = cell(256, 256, 2), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        s = self.spectrum(x[:, None, :])
        y = self.body(torch.log1p(s[:, :201] ** 2 + s[:, 201:] ** 2)).permute(2, 0, 1)
        h = torch.zeros(2, 1, 256)
        y, _ = self.rnn(y, (h, h) if isinstance(self.rnn, nn.LSTM) else h)
        return torch.log_softmax(self.head(y), -1)


def causal(length: int, past: int) -> Tensor:
    """Additive mask of `length` new positions after `past` old ones."""
    row = torch.arange(length)[:, None] + past
    return torch.where(torch.arange(length + past)[None, :] <= row, 0.0, -1e9)


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of halves."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class DecoderLayer(nn.Module):
    """A decoder layer over past keys and values: GPT-2's, or Llama's (rotary, grouped heads, gated)."""

    def __init__(self, size: int, n: int, kv: int, hidden: int, *, llama: bool) -> None:
        super().__init__()
        norm = RMSNorm if llama else nn.LayerNorm
        self.n, self.kv, self.llama = n, kv, llama
        self.norm1, self.norm2 = norm(size), norm(size)
        self.qkv = nn.Linear(size, size // n * (n + 2 * kv), bias=not llama)
        self.o = nn.Linear(size, size, bias=not llama)
        self.up, self.down = nn.Linear(size, hidden, bias=not llama), nn.Linear(hidden, size, bias=not llama)
        self.gate = nn.Linear(size, hidden, bias=False) if llama else None

    def forward(
        self, x: Tensor, mask: Tensor | None, rope: tuple[Tensor, Tensor] | None, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        each = x.shape[2] // self.n
        q, k, v = self.qkv(self.norm1(x)).split([self.n * each, self.kv * each, self.kv * each], -1)
        q, k, v = heads(q, self.n), heads(k, self.kv), heads(v, self.kv)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if past:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        repeat = self.n // self.kv
        wide = [t if repeat == 1 else t[:, :, None].expand(-1, -1, repeat, -1, -1).flatten(1, 2) for t in (k, v)]
        x = x + self.o(merged(attend(q, wide[0], wide[1], mask)))
        z = self.norm2(x)
        inner = F.silu(self.gate(z)) * self.up(z) if self.gate is not None else F.gelu(self.up(z), approximate="tanh")
        return x + self.down(inner), k, v


class Decoder(nn.Module):
    """GPT-2 (124 M, tied head) or a Llama of 125 M: ids, past keys and values in; last logits, keys and values out."""

    def __init__(self, *, llama: bool, layers: int = 12, size: int = 768) -> None:
        super().__init__()
        vocabulary, kv, hidden = (32000, 4, 2048) if llama else (50257, 12, 4 * size)
        self.word = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList(DecoderLayer(size, 12, kv, hidden, llama=llama) for _ in range(layers))
        self.norm = RMSNorm(size) if llama else nn.LayerNorm(size)
        self.position = None if llama else nn.Embedding(1024, size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        if llama:
            angles = torch.outer(torch.arange(1024).float(), 1 / 10000 ** (torch.arange(0, 64, 2) / 64))
            angles = torch.cat([angles, angles], -1)
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())
        else:
            self.head.weight = self.word.weight
            self.word.weight.data.mul_(0.02)

    def forward(self, ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        length = ids.shape[1]
        before = past[0].shape[2] if past else 0
        x, rope = self.word(ids), None
        if self.position is not None:
            x = x + self.position.weight[before : before + length]
        else:
            rope = (self.cos[before : before + length], self.sin[before : before + length])
        mask = causal(length, before) if length > 1 else None
        caches: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x, k, v = layer(x, mask, rope, past[2 * i : 2 * i + 2])
            caches += [k, v]
        return (self.head(self.norm(x)[:, -1:]), *caches)


@dataclass(frozen=True)
class Net:
    """A network at one size of inputs; `fused` is what ONNX Runtime's transformer optimiser is told: type and width."""

    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    fused: tuple[str, int] | None = None


def noise(*shape: int, scale: float = 1.0) -> Tensor:
    """Normal values with a fixed seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)) * scale


def tokens(batch: int, length: int, vocabulary: int = 30522) -> Tensor:
    """Token ids with a fixed seed."""
    return torch.randint(5, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def text(batch: int, length: int) -> Callable[[], tuple[Tensor, ...]]:
    """Inputs of an encoder."""
    return lambda: (tokens(batch, length), torch.ones(batch, length, dtype=torch.int64))


def image() -> tuple[Tensor, ...]:
    """One picture."""
    return (noise(1, 3, 224, 224),)


def step(kv: int) -> Callable[[], tuple[Tensor, ...]]:
    """One token after 511."""
    return lambda: (tokens(1, 1), *(noise(1, kv, 511, 64) for _ in range(24)))


NETS = {
    "minilm-b1-s16": Net(lambda: Bert(6, 384), text(1, 16), ("bert", 384)),
    "minilm-b1-s128": Net(lambda: Bert(6, 384), text(1, 128), ("bert", 384)),
    "minilm-b8-s128": Net(lambda: Bert(6, 384), text(8, 128), ("bert", 384)),
    "bert-b1-s128": Net(lambda: Bert(12, 768), text(1, 128), ("bert", 768)),
    "vit-b16": Net(VisionTransformer, image, ("vit", 768)),
    "resnet50": Net(ResNet50, image),
    "mobilenetv2": Net(MobileNetV2, image),
    "vad-chunk": Net(VadChunk, lambda: (noise(1, 576, scale=0.1), torch.zeros(1, 1, 128), torch.zeros(1, 1, 128))),
    "audio-lstm": Net(lambda: AudioRnn(nn.LSTM), lambda: (noise(1, 64000, scale=0.1),)),
    "audio-gru": Net(lambda: AudioRnn(nn.GRU), lambda: (noise(1, 64000, scale=0.1),)),
    "gpt2-prefill-128": Net(lambda: Decoder(llama=False), lambda: (tokens(1, 128),), ("gpt2", 768)),
    "gpt2-decode-512": Net(lambda: Decoder(llama=False), step(12), ("gpt2", 768)),
    "llama125-prefill-128": Net(lambda: Decoder(llama=True), lambda: (tokens(1, 128),)),
    "llama125-decode-512": Net(lambda: Decoder(llama=True), step(4)),
}


def build(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module and its inputs, the same on every call."""
    torch.manual_seed(0)
    module = NETS[name].module()
    for part in module.modules():  # keep random networks tame, and give batch norms real statistics
        if isinstance(part, nn.BatchNorm2d):
            assert part.running_mean is not None
            assert part.running_var is not None
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)
            part.weight.data.uniform_(0.5, 1.0)
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
    return module.eval(), NETS[name].inputs()


def export(name: str, folder: Path) -> None:
    """Writes NAME.onnx and NAME.npz, and NAME.fused.onnx where ONNX Runtime's transformer optimiser knows the type."""
    warnings.filterwarnings("ignore")
    module, inputs = build(name)
    with torch.inference_mode():
        result = module(*inputs)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    path = folder / f"{name}.onnx"
    names: dict[str, Any] = {
        "input_names": [f"in_{i}" for i in range(len(inputs))],
        "output_names": [f"out_{i}" for i in range(len(outputs))],
    }
    EXPORTING[0] = True
    torch.onnx.export(module, inputs, str(path), opset_version=17, dynamo=False, do_constant_folding=True, **names)
    EXPORTING[0] = False
    arrays = dict(zip([*names["input_names"], *names["output_names"]], [*inputs, *outputs], strict=True))
    fused = NETS[name].fused
    if fused is not None:
        from onnxruntime.transformers import optimizer

        kind, size = fused
        model = optimizer.optimize_model(str(path), model_type=kind, num_heads=12, hidden_size=size, opt_level=0)
        model.save_model_to_file(str(folder / f"{name}.fused.onnx"))
    np.savez(folder / f"{name}.npz", **{k: t.numpy() for k, t in arrays.items()})  # last: it marks the set as complete


def export_gguf(name: str, path: Path) -> None:
    """Writes a decoder as a GGUF file of f32 tensors without a tokenizer, as llama.cpp reads it."""
    import gguf

    module, _ = build(name)
    assert isinstance(module, Decoder)
    llama, layer = module.position is None, module.layers[0]
    assert isinstance(layer, DecoderLayer)
    size, hidden = layer.o.in_features, layer.up.out_features
    writer = gguf.GGUFWriter(path, "llama" if llama else "gpt2")
    writer.add_block_count(len(module.layers))
    writer.add_context_length(1024)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(layer.n)
    writer.add_head_count_kv(layer.kv)
    writer.add_vocab_size(module.word.num_embeddings)
    writer.add_tokenizer_model("no_vocab")
    if llama:
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(size // layer.n)
    else:
        writer.add_layer_norm_eps(1e-5)

    def add(key: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            writer.add_tensor(key, np.ascontiguousarray(tensor.detach().numpy()))

    def both(key: str, part: Any) -> None:
        add(f"{key}.weight", part.weight)
        add(f"{key}.bias", getattr(part, "bias", None))

    def pairs(weight: Tensor, count: int) -> Tensor:
        """Rows of heads with the two halves interleaved, which is how llama.cpp's "llama" rotates."""
        return weight.view(count, 2, -1, size).transpose(1, 2).reshape(weight.shape)

    both("token_embd", module.word)
    both("output_norm", module.norm)
    if module.position is None:
        both("output", module.head)
    else:
        both("position_embd", module.position)
    for i, part in enumerate(module.layers):
        at = f"blk.{i}"
        both(f"{at}.attn_norm", part.norm1)
        both(f"{at}.ffn_norm", part.norm2)
        both(f"{at}.attn_output", part.o)
        both(f"{at}.ffn_up", part.up)
        both(f"{at}.ffn_down", part.down)
        if part.gate is None:
            both(f"{at}.attn_qkv", part.qkv)
            continue
        both(f"{at}.ffn_gate", part.gate)
        width = size // part.n
        q, k, v = part.qkv.weight.split([part.n * width, part.kv * width, part.kv * width])
        for key, weight in (("q", pairs(q, part.n)), ("k", pairs(k, part.kv)), ("v", v)):
            add(f"{at}.attn_{key}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if args.form == "gguf":
        export_gguf(args.name, args.folder / f"{args.name}.gguf")
    else:
        export(args.name, args.folder)
