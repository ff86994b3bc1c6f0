"""Files that are damaged, hostile or of a kind that is not known are refused with one clear error, and quickly."""

from __future__ import annotations

import copy
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from small_decoders import write_folder, write_gguf

from rlx.errors import ModelFormatError, OptionError, RlxError
from rlx.models.decoder import build_decoder

CASES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "configs.json").read_text())


def folder_of(tmp_path: Path, name: str = "llama", **changes: Any) -> Path:
    """A model with other values in its config.json; None leaves one out."""
    case = CASES[name]
    config = {k: v for k, v in {**case["config"], **changes}.items() if v is not None}
    return write_folder(tmp_path / "m", config, case["shapes"])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "mamba"}, r"can't run the architecture 'mamba'; known are llama, mistral, qwen2"),
        ({"model_type": None}, "model_type is missing"),
        ({"num_local_experts": 8}, "mixtures of experts"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not known"),
        ({"num_hidden_layers": 4}, r"tensor 'layers.3.input_layernorm.weight' is missing"),
        ({"num_hidden_layers": 2}, r"has no tensors model.layers.2.input_layernorm.weight.* and 5 more"),
        ({"num_hidden_layers": 1 << 39}, "out of range"),
        ({"hidden_size": 64}, r"expected shape \[96, 64\], got \[96, 32\]"),
        ({"num_key_value_heads": 3}, "4 heads of queries, 3 of keys"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"head_dim": 1 << 39}, "elements: expected numbers"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"hidden_act": "relu6"}, "activation 'relu6' is not known"),
        ({"rope_parameters": {"rope_type": "new"}}, "of kind 'new' are not known"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}}, "'yarn' lack"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "positive factors",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 1e9}}, "expected an even number"),
        ({"tie_word_embeddings": "yes"}, "expected true or false"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
    ],
)
def test_configurations(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=message):
        build_decoder(folder_of(tmp_path, **changes))


@pytest.mark.parametrize("options", [{"batch": 0}, {"context": "long"}, {"prefill": True}, {"kv_dtype": "i8"}])
def test_options(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        build_decoder(folder_of(tmp_path), **options)


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="is not to be found there"):
        build_decoder(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFormatError, match="no GGUF file"):
        build_decoder(tmp_path / "m.gguf")


def test_configurations_at_random(tmp_path: Path) -> None:
    """Whatever a value is changed to, the decoder is built or one of our errors says why not."""
    rng = random.Random(5)
    odd: list[Any] = [
        0,
        -1,
        1,
        3,
        1 << 31,
        1 << 62,
        0.5,
        -1e300,
        1e-300,
        "x",
        "",
        None,
        [],
        [1],
        {},
        True,
        [[]],
        {"a": 1},
    ]
    for name in ("llama-llama3", "gemma3", "phi3-longrope", "gpt2"):
        folder = folder_of(tmp_path, name)
        for _ in range(60):
            config = copy.deepcopy(CASES[name]["config"])
            inside = config["rope_parameters"] if "rope_parameters" in config and rng.random() < 0.3 else config
            inside[rng.choice(list(inside))] = rng.choice(odd)
            (folder / "config.json").write_text(json.dumps(config))
            with suppress(RlxError):
                build_decoder(folder, context=64)


def test_gguf_headers_at_random(tmp_path: Path) -> None:
    """Any byte of the header may be any other."""
    rng = random.Random(6)
    path = write_gguf(tmp_path / "m.gguf", CASES["llama-llama3"]["config"], CASES["llama-llama3"]["shapes"])
    data = path.read_bytes()
    header = data.index(b"output_norm") + 64
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(8, header)] = rng.randrange(256)
        path.write_bytes(changed)
        with suppress(RlxError):
            build_decoder(path, context=64)
