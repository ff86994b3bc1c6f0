"""LoRA adapters of language models: what they compute is what merged weights compute, from PEFT's and GGUF files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from small_decoders import weight, write_folder, write_gguf, write_safetensors

import rlx
from rlx.cli.main import cli
from rlx.errors import MemoryDeficit, ModelFormatError, NameNotFound, OptionError
from rlx.llm.together import Together
from rlx.models.adapters import UNKNOWN

gguf = pytest.importorskip("gguf")

CASES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[1] / "decoders" / "configs.json").read_text())
IDS = [1, 40, 41, 50, 60, 7, 9]
LAYER = "model.layers.{}."
SEED = 5


def shapes_of(case: str, modules: list[str]) -> dict[str, tuple[int, int]]:
    """[outputs, inputs] of the modules of PEFT's files, by name."""
    conv1d = CASES[case]["config"]["model_type"] == "gpt2"
    found = {m: tuple(CASES[case]["shapes"][m + ".weight"]) for m in modules}
    return {m: (s[1], s[0]) if conv1d else (s[0], s[1]) for m, s in found.items()}


def pairs_of(shapes: dict[str, tuple[int, int]], rank: int, seed: int = SEED) -> dict[str, tuple[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {
        module: (
            rng.normal(0, 0.3, (rank, inputs)).astype(np.float32),
            rng.normal(0, 0.3, (outputs, rank)).astype(np.float32),
        )
        for module, (outputs, inputs) in shapes.items()
    }


def write_peft(folder: Path, pairs: dict[str, tuple[Any, Any]], **config: Any) -> Path:
    folder.mkdir()
    rank = max(len(a) for a, _ in pairs.values())
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    tensors = {}
    for module, (a, b) in pairs.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    write_safetensors(folder / "adapter_model.safetensors", tensors, "F32")
    return folder


def write_adapter_gguf(path: Path, family: str, pairs: dict[str, tuple[Any, Any]], alpha: float, layers: int) -> Path:
    """As llama.cpp's convert_lora_to_gguf.py writes it: rows of B in the order of its weights."""
    writer = gguf.GGUFWriter(path, family)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    number = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(number, layers)
    for module, (a, b) in pairs.items():
        heads = 4 if "q_proj" in module else 2
        if family == "llama" and ("q_proj" in module or "k_proj" in module):
            b = b.reshape(heads, 2, len(b) // heads // 2, -1).swapaxes(1, 2).reshape(b.shape)
        own = names.get_name(module)
        writer.add_tensor(f"{own}.weight.lora_a", a)
        writer.add_tensor(f"{own}.weight.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_merged(folder: Path, case: str, changes: dict[str, Any]) -> Path:
    """The folder with changed weights, [outputs, inputs] of each module."""
    config, shapes = CASES[case]["config"], CASES[case]["shapes"]
    write_folder(folder, config, shapes)
    tensors = {n: weight(n, tuple(s)) for n, s in shapes.items()}
    for module, change in changes.items():
        own = change.T if config["model_type"] == "gpt2" else change
        tensors[module + ".weight"] = (tensors[module + ".weight"] + own).astype(np.float32)
    (folder / "model.safetensors.index.json").unlink()
    write_safetensors(folder / "model.safetensors", tensors, "F32")
    return folder


def logits_of(path: Path, **options: Any) -> Any:
    with rlx.load_llm(path, device="cpu", context=64, cache=False, **options) as llm:
        return np.asarray(llm.extend(llm.begin(None, IDS)[0], IDS, "logits"))


ALL = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def modules_of(case: str) -> list[str]:
    if case == "gpt2":
        return [f"transformer.h.{n}.{m}" for n in range(3) for m in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")]
    if case == "phi3":
        return [LAYER.format(n) + m for n in range(3) for m in ("self_attn.qkv_proj", "mlp.gate_up_proj")]
    layers = CASES[case]["config"]["num_hidden_layers"]
    return [LAYER.format(n) + m for n in range(layers) for m in (*ALL, *MLP)]


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt2", "phi3"])
@pytest.mark.parametrize("base", ["folder", "gguf"])
def test_an_adapter_computes_what_merged_weights_do(case: str, base: str, tmp_path: Path) -> None:
    """y = W x + alpha / r B A x of every product, of a folder and of a GGUF file whose rows of q and k are permuted."""
    pairs = pairs_of(shapes_of(case, modules_of(case)), 3)
    adapter = write_peft(tmp_path / "a", pairs)
    config, shapes = CASES[case]["config"], CASES[case]["shapes"]
    model = tmp_path / "m.gguf"
    model = write_gguf(model, config, shapes) if base == "gguf" else write_folder(tmp_path / "m", config, shapes)
    merged = write_merged(tmp_path / "merged", case, {m: 2 * b @ a for m, (a, b) in pairs.items()})
    wanted, plain = logits_of(merged), logits_of(model)
    found = logits_of(model, lora=adapter)
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)
    assert np.abs(plain - wanted).max() > 0.05
    np.testing.assert_array_equal(logits_of(model, lora=(adapter, 0.0)), plain)


@pytest.mark.parametrize("base", ["folder", "gguf"])
def test_adapters_of_gguf_files(base: str, tmp_path: Path) -> None:
    pairs = pairs_of(shapes_of("llama", modules_of("llama")), 4)
    adapter = write_adapter_gguf(tmp_path / "a.gguf", "llama", pairs, 6.0, 3)
    config, shapes = CASES["llama"]["config"], CASES["llama"]["shapes"]
    model = tmp_path / "m.gguf"
    model = write_gguf(model, config, shapes) if base == "gguf" else write_folder(tmp_path / "m", config, shapes)
    merged = write_merged(tmp_path / "merged", "llama", {m: 1.5 * b @ a for m, (a, b) in pairs.items()})
    np.testing.assert_allclose(logits_of(model, lora=adapter), logits_of(merged), atol=1e-4, rtol=1e-4)


def test_several_adapters_add_up_and_change_while_the_model_runs(tmp_path: Path) -> None:
    """Of different ranks, with scales by module, by the root of r, and one that adds to the head."""
    modules = [LAYER.format(0) + "self_attn.q_proj", LAYER.format(2) + "mlp.down_proj"]
    one = pairs_of(shapes_of("llama", modules), 2, 1)
    two = pairs_of(shapes_of("llama", [*modules[1:], "lm_head"]), 5, 2)
    first = write_peft(tmp_path / "first", one, alpha_pattern={"down_proj": 8.0})
    second = write_peft(tmp_path / "second", two, use_rslora=True, lora_alpha=3.0)
    changes: dict[str, Any] = {m: (4.0 if "down" in m else 2.0) * b @ a for m, (a, b) in one.items()}
    for module, (a, b) in two.items():
        changes[module] = changes.get(module, 0) + 0.5 * 3 / 5**0.5 * b @ a
    config, shapes = CASES["llama"]["config"], CASES["llama"]["shapes"]
    model = write_gguf(tmp_path / "m.gguf", config, shapes)
    wanted = logits_of(write_merged(tmp_path / "merged", "llama", changes))
    given = {"one": first, "two": (second, 0.5)}
    with rlx.load_llm(model, device="cpu", context=64, cache=False, lora=given) as llm:
        assert llm.adapters == {"one": 1.0, "two": 0.5}

        def logits() -> Any:
            llm.reset()
            return np.asarray(llm.extend(llm.begin(None, IDS)[0], IDS, "logits"))

        np.testing.assert_allclose(logits(), wanted, atol=1e-4, rtol=1e-4)
        made = llm.generate(IDS, 4, ignore_eos=True)
        next(made)
        data = llm.snapshot(made)
        llm.set_adapter(None)
        assert llm.slots.filled == [[]]  # what was there came of the adapters
        np.testing.assert_array_equal(logits(), logits_of(model))
        with pytest.raises(OptionError, match="other adapters"):
            llm.restore(data)
        llm.set_adapter("one")
        llm.set_adapter("two", 0.5)
        llm.restore(data)
        np.testing.assert_allclose(logits(), wanted, atol=1e-4, rtol=1e-4)
        with pytest.raises(NameNotFound):
            llm.set_adapter("three")


def two_adapters(tmp_path: Path) -> tuple[Path, dict[str, Path]]:
    """A model, and two adapters that add to products of its layers; the second one to the head too."""
    modules = [LAYER.format(n) + m for n in range(3) for m in ("self_attn.q_proj", "mlp.down_proj")]
    first = write_peft(tmp_path / "first", pairs_of(shapes_of("llama", modules), 2, 1))
    second = write_peft(tmp_path / "second", pairs_of(shapes_of("llama", [*modules, "lm_head"]), 5, 2))
    model = write_gguf(tmp_path / "m.gguf", CASES["llama"]["config"], CASES["llama"]["shapes"])
    return model, {"one": first, "two": second}


CHOICES: list[dict[str, Any]] = [{"adapter": "one"}, {"adapter": None}, {"adapter": "two"}, {}]


def test_each_text_has_an_adapter_of_its_own(tmp_path: Path) -> None:
    """In one run, also of the head: a text is that of a model with this adapter alone, and caches are not mixed."""
    model, adapters = two_adapters(tmp_path)
    options: dict[str, Any] = {"device": "cpu", "context": 64, "cache": False}
    loras = [{"one": adapters["one"]}, None, {"two": adapters["two"]}, adapters]
    wanted = []
    for lora in loras:
        with rlx.load_llm(model, lora=lora, **options) as alone:
            made = alone.generate(IDS, 12, ignore_eos=True)
            list(made)
            wanted.append(made.ids)
    assert len(set(map(tuple, wanted))) == 4
    with rlx.load_llm(model, lora=adapters, slots=4, **options) as llm:
        for _ in range(2):
            every = [llm.generate(IDS, 12, ignore_eos=True, **choice) for choice in CHOICES]
            Together(llm, every).texts()
            assert [made.ids for made in every] == wanted
        assert [made.stats.cached_tokens for made in every] == [len(IDS) - 1] * 4  # each goes on from its own
        longer = llm.generate([*IDS, *wanted[0][:3]], 4, ignore_eos=True, adapter="one")
        list(longer)
        assert longer.ids == wanted[0][3:7]
        assert longer.stats.cached_tokens == len(IDS) + 2
        with pytest.raises(NameNotFound, match="three"):
            llm.generate(IDS, adapter="three")
        with pytest.raises(OptionError, match="adapter=3: expected the name of one, or None"):
            llm.generate(IDS, adapter=3)  # type: ignore[arg-type]


def test_a_snapshot_keeps_the_adapter_of_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other adapters are nothing to it; and the weights of each are read through once."""
    model, adapters = two_adapters(tmp_path)
    options: dict[str, Any] = {"device": "cpu", "context": 64, "cache": False}
    with rlx.load_llm(model, lora=adapters, **options) as llm:
        made = llm.generate(IDS, 12, ignore_eos=True, adapter="two")
        next(made)
        hashed: list[int] = []
        real = hashlib.sha256
        monkeypatch.setattr("rlx.runtime.adapters.sha256", lambda *given: hashed.append(1) or real(*given))
        data = llm.snapshot(made)
        first = len(hashed)
        llm.snapshot(made)
        assert len(hashed) - first == first - 1  # model, snapshot, and the first time the adapter
        monkeypatch.undo()
        rest = "".join(made)
        llm.set_adapter("one", 0.25)
        assert "".join(llm.restore(data)) == rest
        llm.set_adapter("two", 0.25)
        with pytest.raises(OptionError, match="other adapters"):
            llm.restore(data)
    with rlx.load_llm(model, lora={"two": adapters["two"]}, **options) as other:
        assert "".join(other.restore(data)) == rest


def test_the_command_takes_adapters(tmp_path: Path) -> None:
    """--lora PATH and PATH=SCALE give the text of Python's `lora=`."""
    model, adapters = two_adapters(tmp_path)
    scaled = {"one": adapters["one"], "two": (adapters["two"], 0.5)}
    with rlx.load_llm(model, device="cpu", context=64, lora=scaled) as llm:
        wanted = "".join(llm.generate("hello", 12))
    with rlx.load_llm(model, device="cpu", context=64) as llm:
        assert "".join(llm.generate("hello", 12)) != wanted
    asked = ["generate", str(model), "hello", "-n", "12", "--device", "cpu", "--context", "64"]
    given = ["--lora", str(adapters["one"]), "--lora", f"{adapters['two']}=0.5"]
    done = CliRunner().invoke(cli, [*asked, *given])
    assert (done.exit_code, done.stdout) == (0, wanted + "\n")
    wrong = CliRunner().invoke(cli, [*asked, "--lora", f"{adapters['one']}=much"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "expected PATH=SCALE, with a number" in wrong.stderr


def test_adapters_are_called_as_their_files_and_folders(tmp_path: Path) -> None:
    """Folders by the whole name, which may have points."""
    pairs = pairs_of(shapes_of("llama", [LAYER.format(0) + "self_attn.q_proj"]), 2)
    places = [write_peft(tmp_path / name, pairs) for name in ("tuned-v1.0", "tuned-v1.1")]
    places.append(write_adapter_gguf(tmp_path / "other-v1.2.gguf", "llama", pairs, 1.0, 3))
    model = write_folder(tmp_path / "m", CASES["llama"]["config"], CASES["llama"]["shapes"])
    with rlx.load_llm(model, device="cpu", context=32, cache=False, lora=places) as llm:
        assert list(llm.adapters) == ["tuned-v1.0", "tuned-v1.1", "other-v1.2"]


def test_weights_in_blocks_stay_as_they_are(tmp_path: Path) -> None:
    pairs = pairs_of(shapes_of("llama", modules_of("llama")), 3)
    adapter = write_peft(tmp_path / "a", pairs)
    config, shapes = CASES["llama"]["config"], CASES["llama"]["shapes"]
    model = write_gguf(tmp_path / "m.gguf", config, shapes, "Q8_0")
    plain = rlx.load_llm(model, device="cpu", context=64, cache=False)
    with rlx.load_llm(model, device="cpu", context=64, cache=False, lora=adapter) as llm:
        assert [s for s in llm.model.params if ".lora_" not in s.name] == list(plain.model.params)
        changed = logits_of(model, lora=adapter)
    merged = logits_of(write_merged(tmp_path / "x", "llama", {m: 2 * b @ a for m, (a, b) in pairs.items()}))
    assert np.abs(changed - merged).max() < 0.1 * np.abs(merged - logits_of(model)).max()


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    config, shapes = CASES["llama"]["config"], CASES["llama"]["shapes"]
    model = write_folder(tmp_path / "m", config, shapes)
    pairs = pairs_of(shapes_of("llama", [LAYER.format(0) + "self_attn.q_proj"]), 2)

    def refused(match: str, number: list[int] = [0], kind: Any = ModelFormatError, **told: Any) -> None:  # noqa: B006
        number[0] += 1
        folder = write_peft(tmp_path / f"bad{number[0]}", told.pop("pairs", pairs), **told)
        with pytest.raises(kind, match=match):
            rlx.load_llm(model, device="cpu", context=32, lora=folder)

    refused("peft_type 'IA3' is not known", peft_type="IA3")
    refused("DoRA are not known", use_dora=True)
    for name in (*UNKNOWN, "alora_invocation_tokens", "use_qalora", "layer_replication", "arrow_config"):
        refused(f"{name}: .* are not known", **{name: [1]})
    refused("bias 'all'", bias="all")
    refused("weights that are replaced", modules_to_save=["lm_head"])
    for start in ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga"):
        refused(f"'{start}' changes the model's own weights", init_lora_weights=start)
    refused("alpha_pattern: expected numbers by names", alpha_pattern={"(a+)+b": 1})
    ((module, (a, b)),) = pairs.items()
    refused("has no 'model.layers.0.cross.q_proj'", pairs={module.replace("self_attn", "cross"): (a, b)})
    refused("no attn_q in layer 99", pairs={module.replace("layers.0", "layers.99"): (a, b)})
    refused("are not \\[r, inputs\\] and \\[outputs, r\\]", pairs={module: (a, b[:, :1])})
    refused("takes A \\[r, 32\\] and B \\[32, r\\]", pairs={module: (a, b[:5])}, kind=rlx.errors.ShapeError)
    refused("NaN or infinities", pairs={module: (a, b * np.float32(np.inf))})
    embedding = pairs_of({"model.embed_tokens": (32, 96)}, 2)
    refused("adapters of experts and of embeddings are not known", pairs=embedding, kind=OptionError)
    with pytest.raises(OptionError, match="different names"):
        rlx.load_llm(model, device="cpu", lora=[])
    with pytest.raises(ModelFormatError, match="is no LoRA adapter"):
        rlx.load_llm(model, device="cpu", lora=write_gguf(tmp_path / "m.gguf", config, shapes))
    other = write_adapter_gguf(tmp_path / "o.gguf", "qwen2", pairs, 1.0, 3)
    with pytest.raises(ModelFormatError, match="an adapter of 'qwen2', and the model is of 'llama'"):
        rlx.load_llm(model, device="cpu", lora=other)


def test_adapters_count_in_the_memory(tmp_path: Path) -> None:
    config, shapes = CASES["llama"]["config"], CASES["llama"]["shapes"]
    model = write_folder(tmp_path / "m", config, shapes)
    adapter = write_peft(tmp_path / "a", pairs_of(shapes_of("llama", modules_of("llama")), 8))
    needs = []
    for lora in (None, adapter):
        with pytest.raises(MemoryDeficit) as caught:
            rlx.load_llm(model, device="cpu", context=32, budget=1, lora=lora, cache=False)
        needs.append(caught.value.estimate.weight_bytes)
    sizes = shapes_of("llama", modules_of("llama")).values()
    assert needs[1] - needs[0] >= sum(4 * 8 * (inputs + outputs) for outputs, inputs in sizes)
