"""Estimates of language models from their headers: weights, cache, experts, and the bound on activations."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import rlx
from rlx.cli.main import cli
from rlx.errors import ModelFormatError, OptionError
from rlx.estimate.architecture import from_config
from rlx.estimate.language import activation_bound
from rlx.estimate.memory import MemoryEstimate

HIDDEN, FFN, VOCAB, LAYERS, HEADS, KV_HEADS = 64, 128, 96, 2, 4, 2
FAMILY = "starcoder2"  # which rlx can't run: there is a forecast


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write_gguf(path: Path, fields: dict[str, int | str], tensors: dict[str, tuple[tuple[int, ...], int, int]]) -> Path:
    """A GGUF file of tensors (sizes as in the file, type, bytes) whose data is a hole."""
    pairs = []
    for key, value in fields.items():
        kind, data = (8, text(value)) if isinstance(value, str) else (4, struct.pack("<I", value))
        pairs.append(text(key) + struct.pack("<I", kind) + data)
    infos, offset = [], 0
    for name, (sizes, kind, nbytes) in tensors.items():
        infos.append(text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset))
        offset += -(-nbytes // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join([*pairs, *infos])
    path.write_bytes(head)
    os.truncate(path, -(-len(head) // 32) * 32 + offset)
    return path


def fields(**changes: int | str) -> dict[str, int | str]:
    known: dict[str, int | str] = {
        "block_count": LAYERS,
        "context_length": 1000,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    return {"general.architecture": FAMILY, **{f"{FAMILY}.{k}": v for k, v in {**known, **changes}.items()}}


def tensors(scale: int = 1) -> dict[str, tuple[tuple[int, ...], int, int]]:
    made: dict[str, tuple[tuple[int, ...], int, int]] = {"token_embd.weight": ((HIDDEN, VOCAB), 0, 4 * HIDDEN * VOCAB)}
    for layer in range(LAYERS):
        made[f"blk.{layer}.ffn_up.weight"] = ((HIDDEN, FFN * scale), 8, HIDDEN * FFN * scale // 32 * 34)
        made[f"blk.{layer}.ffn_norm.weight"] = ((HIDDEN,), 0, 4 * HIDDEN)
    return made


def estimate(path: Path, **options: Any) -> MemoryEstimate:
    return rlx.estimate(path, "cpu", overhead=0, threads=1, **options)  # type: ignore[no-any-return]


def test_parts_of_a_small_decoder(tmp_path: Path) -> None:
    """Tied embedding once; a token takes 2 layers x (keys + values) x 2 heads of 16 elements in f32."""
    found = estimate(write_gguf(tmp_path / "m.gguf", fields(), tensors()), context=100, batch=3)
    assert found.weight_bytes == 4 * HIDDEN * VOCAB + LAYERS * (HIDDEN * FFN // 32 * 34 + 4 * HIDDEN)
    assert found.stored_weight_bytes == found.mapped_weight_bytes == found.weight_bytes
    assert found.kv_bytes_per_token == LAYERS * 2 * KV_HEADS * 16 * 4
    assert found.state_bytes == 3 * 100 * found.kv_bytes_per_token
    assert found.input_bytes == 3 * 100 * 8
    assert found.output_bytes == 3 * VOCAB * 4
    assert found.activation_bytes == 4 * (300 * (HIDDEN + max(3 * FFN, HIDDEN + 2 * FFN)) + 3 * VOCAB)
    assert "exact" not in found.certainty.values()  # the header is read, and no graph is planned
    assert found.certainty["weight"] == found.certainty["state"] == found.certainty["activation"] == "forecast"
    assert "forecast" in found.notes[-2]
    assert "no plan: " in found.notes[-1]
    assert f"rlx can't run the architecture '{FAMILY}'" in found.notes[-1]
    assert found.bucket_peaks[100] == found.running_peak_bytes
    assert found.bucket_peaks[1] < found.bucket_peaks[16] < found.bucket_peaks[100]


@pytest.mark.parametrize("kv_dtype, nbytes", [("f32", 512), ("f16", 256), ("q8_0", 136), ("q4_0", 72)])
def test_cache_types(tmp_path: Path, kv_dtype: str, nbytes: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", fields(), tensors())
    assert estimate(path, kv_dtype=kv_dtype).kv_bytes_per_token == nbytes


def test_context_defaults_to_what_the_model_was_made_for(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", fields(), tensors())
    assert estimate(path).dims == {"context": 1000, "batch": 1}
    assert "1000 tokens" in estimate(path, context=2000).notes[0]


def test_sliding_windows_keep_their_window(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3_text", "num_hidden_layers": 12, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128, "vocab_size": 100, "sliding_window": 10,
        "sliding_window_pattern": 6,
    }  # fmt: skip
    found = from_config("c", config)
    assert [layer.window for layer in found.layers] == ([10] * 5 + [None]) * 2
    assert found.kv_elements(100) == 64 * (10 * 10 + 2 * 100)
    assert found.kv_elements(4) == 64 * 12 * 4
    kinds = ["sliding_attention", "full_attention"] * 6
    assert [layer.window for layer in from_config("c", {**config, "layer_types": kinds}).layers] == [10, None] * 6
    off = {**config, "model_type": "qwen2", "use_sliding_window": False}
    assert from_config("c", off).kv_elements(100) == 64 * 12 * 100


def test_latent_attention_keeps_one_vector_for_all_heads() -> None:
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 16,
        "intermediate_size": 128, "vocab_size": 100, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    }  # fmt: skip
    assert from_config("c", config).kv_elements_per_token() == 2 * 576


def test_recurrent_models_are_refused() -> None:
    with pytest.raises(ModelFormatError, match="recurrent state"):
        from_config("c", {"model_type": "mamba"})


def test_longest_context_and_largest_batch(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", fields(), tensors())
    found = estimate(path)
    for n in (1, 511, 513, 999):
        peak = estimate(path, context=n).peak_bytes
        assert found.max_context(peak) == n
        assert found.max_context(peak - 1) == n - 1
    peak = estimate(path, batch=37).peak_bytes
    assert (found.max_batch(peak), found.max_batch(peak - 1)) == (37, 36)
    assert found.max_batch(1) == 0


def test_remedies_name_context_cache_and_weights(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", fields(), tensors())
    found = estimate(path, batch=2)
    budget = estimate(path, batch=2, context=600).peak_bytes
    deficit = found.deficit(budget)
    assert deficit is not None
    saved = {r.action: r.saves for r in deficit.remedies}
    assert saved["context at most 600"] == found.peak_bytes - budget
    assert saved["kv_dtype 'q8_0'"] == found.state_bytes - estimate(path, batch=2, kv_dtype="q8_0").state_bytes
    assert saved["weights quantised to q4_0"] > 0
    assert "batch at most 1" in saved


def test_experts(tmp_path: Path) -> None:
    """8 experts a layer, each a gate, up and down of 64 x 32 f16 elements."""
    made = tensors()
    for layer in range(LAYERS):
        for part in ("gate", "up", "down"):
            made[f"blk.{layer}.ffn_{part}_exps.weight"] = ((HIDDEN, 32, 8), 1, HIDDEN * 32 * 8 * 2)
    path = write_gguf(
        tmp_path / "m.gguf", fields(expert_count=8, expert_used_count=2, expert_feed_forward_length=32), made
    )
    found = estimate(path, context=10)
    assert found.experts is not None
    assert found.experts.experts == (8, 8)
    assert found.experts.expert_bytes == (3 * HIDDEN * 32 * 2,) * 2
    budget = found.peak_bytes - 5 * 2 * 3 * HIDDEN * 32 * 2
    assert found.offload(budget).resident == (3, 3)
    deficit = found.deficit(budget)
    assert deficit is not None
    assert any(r.action.startswith("3 of 8 experts") and r.fits for r in deficit.remedies)


def test_safetensors_with_its_config(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2,
        "intermediate_size": 16, "vocab_size": 10, "max_position_embeddings": 64,
    }  # fmt: skip
    header = json.dumps({"embed": {"dtype": "BF16", "shape": [10, 8], "data_offsets": [0, 160]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(160))
    with pytest.raises(ModelFormatError, match=r"config\.json is not beside it.*put it there"):
        estimate(path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for given in (path, tmp_path):
        found = estimate(given)
        assert (found.weight_bytes, found.state_bytes) == (160, 64 * 2 * 8 * 4)


@pytest.mark.parametrize("head", [b"", b"\x08", b"\x08\x00", b"GGU"])
def test_a_file_of_few_bytes_is_no_model(head: bytes, tmp_path: Path) -> None:
    """The first bytes are looked at as far as they are there."""
    path = tmp_path / "model"
    path.write_bytes(head)
    with pytest.raises(ModelFormatError, match="no model that is known"):
        rlx.estimate(path, overhead=0)
    with pytest.raises(ModelFormatError, match="neither its ending nor its contents"):
        rlx.load(path)


def test_bad_options(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", fields(), tensors())
    with pytest.raises(OptionError, match="context=0"):
        estimate(path, context=0)
    with pytest.raises(OptionError, match="kv_dtype='f12'"):
        estimate(path, kv_dtype="f12")
    with pytest.raises(OptionError, match="give context= and batch="):
        estimate(path, dims={"seq": 3})
    (tmp_path / "x.bin").write_bytes(b"what")
    with pytest.raises(ModelFormatError, match="no model that is known"):
        estimate(tmp_path / "x.bin")


def test_bound_on_activations_holds_for_a_planned_layer() -> None:
    """The arena of a decoder layer of this shape, built from ops, is within the bound."""
    tokens, head = 24, 16
    g = rlx.Graph("layer")
    x = g.input("x", (tokens, HIDDEN))

    def norm(value: Any) -> Any:
        return value * rlx.rsqrt(rlx.reduce_mean(value * value, axes=(-1,), keepdims=True) + 1e-5)

    def heads(name: str, count: int) -> Any:
        made = norm(x) @ g.param(name, (HIDDEN, count * head))
        return rlx.transpose(rlx.reshape(made, shape=(tokens, count, head)), perm=(1, 0, 2))

    q, k, v = heads("q", HEADS), heads("k", HEADS), heads("v", HEADS)
    scores = rlx.softmax(q @ rlx.transpose(k, perm=(0, 2, 1)))
    mixed = rlx.reshape(rlx.transpose(scores @ v, perm=(1, 0, 2)), shape=(tokens, HIDDEN))
    y = x + mixed @ g.param("o", (HIDDEN, HIDDEN))
    gate, up = norm(y) @ g.param("gate", (HIDDEN, FFN)), norm(y) @ g.param("up", (HIDDEN, FFN))
    y = y + (gate * rlx.sigmoid(gate) * up) @ g.param("down", (FFN, HIDDEN))
    g.output(norm(y), "y")
    config = {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "intermediate_size": FFN, "vocab_size": VOCAB,
    }  # fmt: skip
    planned = rlx.estimate(g, "cpu", overhead=0, threads=1).activation_bytes
    assert planned <= activation_bound(from_config("c", config), tokens, 1)


HUGE = """
import sys
import rlx, rlx.estimate
from rlx.estimate.resident import peak_bytes
found = rlx.estimate(sys.argv[1], "cpu", overhead=0)
print(found.weight_bytes, peak_bytes(), *(name for name in sys.modules if name == "llvmlite"))
"""


def test_a_file_of_100_gb_costs_its_header_only(tmp_path: Path) -> None:
    """A sparse file: the whole process stays small and no compiler comes into it, as only headers are read."""
    path = tmp_path / "huge.gguf"
    rows, layers = 1 << 22, 100
    nbytes = 256 * rows // 32 * 34
    made = {"token_embd.weight": ((HIDDEN, VOCAB), 0, 4 * HIDDEN * VOCAB)}
    made |= {f"blk.{i}.ffn_up.weight": ((256, rows), 8, nbytes) for i in range(layers)}
    try:
        write_gguf(path, fields(block_count=layers), made)
    except OSError:
        pytest.skip("the file system has no sparse files")
    assert path.stat().st_size > 100e9
    done = subprocess.run(
        [sys.executable, "-c", HUGE, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    weights, peak, *loaded = done.stdout.split()
    assert int(weights) == layers * nbytes + 4 * HIDDEN * VOCAB
    assert int(peak) < 70_000_000
    assert not loaded


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 1 and the deficit's table where it doesn't fit; JSON with the same figures."""
    from rlx.estimate import api
    from rlx.estimate.calibrate import Overhead

    monkeypatch.setattr(api, "overhead_of", lambda device: Overhead(1000))
    path = str(write_gguf(tmp_path / "m.gguf", fields(), tensors()))
    run = CliRunner().invoke
    fine = run(cli, ["estimate", path, "--context", "50", "--budget", "1GiB"])
    assert fine.exit_code == 0, fine.output
    assert "fits in 1GiB" in fine.output
    assert "largest context 1,000" in fine.output
    tight = run(cli, ["estimate", path, "--budget", "100KiB"])
    assert tight.exit_code == 1
    assert "missing" in tight.output
    assert "remedies" in tight.output
    shown = json.loads(run(cli, ["estimate", path, "--context", "50", "--json"]).output)
    assert shown["parts"]["overhead"] == {"bytes": 1000, "certainty": "calibrated"}
    assert shown["peak_bytes"] == rlx.estimate(path, "cpu", context=50, overhead=1000).peak_bytes
