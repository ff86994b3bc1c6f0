"""Weights of GGUF and safetensors files: what each tensor becomes, its bytes, and what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from small_decoders import write_gguf, write_safetensors

import rlx
from rlx.errors import (
    ExecutionError,
    MemoryDeficit,
    ModelFormatError,
    NameNotFound,
    OptionError,
    RlxError,
    ShapeError,
)  # fmt: skip
from rlx.importers.gguf import read_gguf
from rlx.importers.safetensors import read_safetensors
from rlx.ir.encodings import ENCODINGS
from rlx.models.tokenizer.loading import load as load_tokenizer
from rlx.progress import Progress
from rlx.quantiser.imatrix import Importance, read_imatrix, write_imatrix
from rlx.quantiser.rules import BLOCKS, MIXES
from rlx.quantiser.write_gguf import Typed, pair
from rlx.quantiser.write_gguf import write_gguf as write_parts

CASES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[1] / "decoders" / "configs.json").read_text())
RNG = np.random.default_rng(0)


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    shapes = {
        "blk.0.attn_q.weight": (24, 512),
        "blk.0.attn_norm.weight": (512,),
        "blk.0.ffn_gate_inp.weight": (8, 512),
        "blk.0.ffn_down_exps.weight": (3, 16, 256),
        "blk.0.odd.weight": (40, 96),
        "blk.0.prime.weight": (40, 37),
        "token_embd.weight": (64, 256),
        "output.weight": (64, 256),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A safetensors file in f32."""
    path = tmp_path / "in.safetensors"
    write_safetensors(path, arrays(), "F32")
    return path


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_those_of_the_encoders(kind: str, source: Path, tmp_path: Path) -> None:
    """Every format: the bytes of `encode`, whatever number of rows is encoded at a time."""
    made = rlx.quantize(source, tmp_path / "out.gguf", kind, output=kind)
    file, encoding = read_gguf(tmp_path / "out.gguf"), ENCODINGS[kind]
    results = {t.name: t for t in made.tensors}
    for name, array in arrays().items():
        after = results[name].after
        assert file.tensors[name].type.name == after
        assert file.tensors[name].shape == array.shape
        if after == kind:
            expected = encoding.encode(array)
            np.testing.assert_array_equal(file.raw(name), expected)
            back = encoding.decode(expected, array.shape).astype(np.float64)
            error = np.sqrt(np.square(array - back).sum() / np.square(array.astype(np.float64)).sum())
            assert results[name].rms == pytest.approx(error, rel=1e-5)
            assert results[name].worst == pytest.approx(np.abs(array - back).max(), rel=1e-5)
    assert results["blk.0.attn_q.weight"].after == kind
    assert results["blk.0.attn_norm.weight"].reason == "one axis"
    assert results["blk.0.ffn_gate_inp.weight"].after == "f32"
    assert made.bytes_after == sum(t.nbytes for t in file.tensors.values())


def test_rows_that_are_no_blocks_get_others(source: Path, tmp_path: Path) -> None:
    """A format of 32 elements, or f16."""
    made = rlx.quantize(source, tmp_path / "out.gguf", "q4_k")
    found = {t.name: (t.after, t.reason) for t in made.tensors}
    assert found["blk.0.odd.weight"] == ("q5_0", "rows of 96 are no whole blocks of q4_k")
    assert found["blk.0.prime.weight"] == ("f16", "rows of 37 are no whole blocks of q4_k")
    assert found["output.weight"] == ("q6_k", "head")


@pytest.mark.parametrize("mix", MIXES)
def test_mixes_give_some_tensors_more_bits(mix: str, tmp_path: Path) -> None:
    """Of eight layers the first, the last and each third between."""
    names = [f"blk.{i}.{part}.weight" for i in range(8) for part in ("attn_v", "ffn_down", "attn_k")]
    write_safetensors(tmp_path / "in.safetensors", {n: np.ones((8, 256), np.float32) for n in names}, "F32")
    rlx.quantize(tmp_path / "in.safetensors", tmp_path / "f.gguf", "f32")
    pairs = [("general.architecture", "x"), ("x.block_count", 8)]
    with_layers(tmp_path / "f.gguf", tmp_path / "g.gguf", pairs)
    made = rlx.quantize(tmp_path / "g.gguf", tmp_path / "out.gguf", mix)
    after = {t.name: t.after for t in made.tensors}
    assert {after[f"blk.{i}.attn_k.weight"] for i in range(8)} == {MIXES[mix]}
    more = [i for i in range(8) if after[f"blk.{i}.ffn_down.weight"] != MIXES[mix]]
    assert more == (list(range(8)) if mix == "q3_k_m" else [0, 3, 6, 7])


def with_layers(source: Path, target: Path, pairs: list[tuple[str, Any]]) -> None:
    """The file with more metadata."""
    from rlx.quantiser.write_gguf import Typed, pair
    from rlx.quantiser.write_gguf import write_gguf as write

    file = read_gguf(source)
    with target.open("wb") as out:
        made = [pair(k, Typed("text" if isinstance(v, str) else "u32", v)) for k, v in pairs]
        write(
            out,
            made,
            {n: (t.shape, t.type.name) for n, t in file.tensors.items()},
            [[file.raw(n)] for n in file.tensors],
        )


def test_names_say_what_becomes_of_tensors(source: Path, tmp_path: Path) -> None:
    """The first pattern counts; what is kept keeps its type; embeddings and head have wishes of their own."""
    made = rlx.quantize(
        source, tmp_path / "out.gguf", "q8_0", tensors=[("*attn_q*", "q4_0"), ("blk.*", "q5_0")], keep=["*odd*"],
        embeddings="q4_1", output="f16",
    )  # fmt: skip
    after = {t.name: t.after for t in made.tensors}
    assert after["blk.0.attn_q.weight"] == "q4_0"
    assert after["blk.0.odd.weight"] == "f32"
    assert after["blk.0.ffn_gate_inp.weight"] == "q5_0"  # asked for by name
    assert (after["token_embd.weight"], after["output.weight"]) == ("q4_1", "f16")


def test_any_container_to_any(source: Path, tmp_path: Path) -> None:
    """safetensors -> GGUF in blocks -> safetensors in bf16 -> safetensors in f16, with the elements expected."""
    rlx.quantize(source, tmp_path / "a.gguf", "q8_0")
    rlx.quantize(tmp_path / "a.gguf", tmp_path / "b.safetensors", "bf16")
    rlx.quantize(tmp_path / "b.safetensors", tmp_path / "c.safetensors", "f16")
    before, file = arrays(), read_safetensors(tmp_path / "c.safetensors")
    name = "blk.0.attn_q.weight"
    blocks = ENCODINGS["q8_0"]
    expected = blocks.decode(blocks.encode(before[name]), before[name].shape).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(file.array(name), expected.astype(np.float16))
    np.testing.assert_array_equal(file.array("blk.0.attn_norm.weight"), before["blk.0.attn_norm.weight"])


def test_equal_types_are_copied(source: Path, tmp_path: Path) -> None:
    """A second time nothing is rounded, and the bytes are the same."""
    first = rlx.quantize(source, tmp_path / "a.gguf", "q4_k_m")
    again = rlx.quantize(tmp_path / "a.gguf", tmp_path / "b.gguf", "q4_k_m")
    assert any(t.rms is not None for t in first.tensors)
    assert all(t.rms is None for t in again.tensors)
    a, b = (read_gguf(tmp_path / n) for n in ("a.gguf", "b.gguf"))
    for name in a.tensors:
        np.testing.assert_array_equal(a.raw(name), b.raw(name))


def test_metadata_stays(tmp_path: Path) -> None:
    """All of a GGUF file but what says how it is stored; a language model still loads and answers alike."""
    case = CASES["llama"]
    path = write_gguf(tmp_path / "in.gguf", case["config"], case["shapes"])
    rlx.quantize(path, tmp_path / "out.gguf", "q8_0")
    before, after = read_gguf(path), read_gguf(tmp_path / "out.gguf")
    for key, value in before.metadata.items():
        other = after.metadata[key]
        assert (value.values() == other.values()) if hasattr(value, "values") else value == other
    assert after.metadata["general.file_type"] == 7
    text = rlx.load_llm(tmp_path / "out.gguf", context=64).generate("abc", 4)
    assert "".join(text) == "".join(rlx.load_llm(path, context=64).generate("abc", 4))


def test_a_dry_run_says_the_sizes_and_writes_nothing(source: Path, tmp_path: Path) -> None:
    """What is planned is what is written then."""
    planned = rlx.quantize(source, tmp_path / "out.gguf", "q5_k", dry_run=True)
    assert not (tmp_path / "out.gguf").exists()
    assert rlx.quantize(source, None, "q5_k").bytes_after > 0
    made = rlx.quantize(source, tmp_path / "out.gguf", "q5_k")
    assert planned.bytes_after == made.bytes_after
    assert [(t.name, t.after) for t in planned.tensors] == [(t.name, t.after) for t in made.tensors]
    assert "rms" in str(made)


def test_the_source_is_never_written_to(source: Path, tmp_path: Path) -> None:
    """Not by its name, not by a link to it; a target that is there is replaced whole, and kept where the call fails."""
    (tmp_path / "link.safetensors").symlink_to(source)
    (tmp_path / "hard.safetensors").hardlink_to(source)
    data = source.read_bytes()
    for name in ("in.safetensors", "link.safetensors", "hard.safetensors"):
        with pytest.raises(OptionError, match="is what is read"):
            rlx.quantize(source, tmp_path / name, "f16")
    assert source.read_bytes() == data
    target = tmp_path / "out.gguf"
    target.write_bytes(b"old")
    with pytest.raises(NameNotFound):
        rlx.quantize(source, target, "q8_0", keep=["nothing*"])
    write_safetensors(tmp_path / "nan.safetensors", {"w": np.full((32, 64), np.nan, np.float32)}, "F32")
    with pytest.raises(ModelFormatError, match="NaN or infinite"):
        rlx.quantize(tmp_path / "nan.safetensors", target, "q8_0")
    assert target.read_bytes() == b"old"
    assert not list(tmp_path.glob("*.tmp"))
    rlx.quantize(source, target, "q8_0")
    assert read_gguf(target).tensors


def test_no_part_of_the_source_is_written_to(tmp_path: Path) -> None:
    """Not a later part of a GGUF model, not a file that an index names, not by the measured importance."""
    for number in (1, 2):
        data = [np.ones((32, 64), np.float32).view(np.uint8).reshape(-1)]
        with (tmp_path / f"m-{number:05}-of-00002.gguf").open("wb") as file:
            write_parts(file, [pair("split.count", Typed("u32", 2))], {f"w{number}": ((32, 64), "f32")}, [data])
    index = tmp_path / "model.safetensors.index.json"
    write_safetensors(tmp_path / "a.safetensors", {"w": np.ones((32, 64), np.float32)}, "F32")
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    first, second = sorted(tmp_path.glob("*.gguf"))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    wanted: list[tuple[Path, Path, dict[str, Any]]] = [
        (first, second, {}),
        (index, tmp_path / "a.safetensors", {"type": "f16"}),
        (first, tmp_path / "out.gguf", {"inputs": [1, 2], "save_imatrix": second}),
    ]
    for source, target, options in wanted:
        with pytest.raises(OptionError, match="is what is read"):
            rlx.quantize(source, target, **options)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_can_not_be_is_refused(source: Path, tmp_path: Path) -> None:
    """Types, endings, elements that do not fit, values of graphs."""
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (source, "x.safetensors", {"type": "q8_0"}, "can't hold q8_0"),
        (source, "x.onnx", {}, "must end in .gguf or .safetensors"),
        (source, "x.gguf", {"type": "q9_9"}, "no type 'q9_9'"),
        (source, "x.gguf", {"tensors": {"*": "q4_k_m"}}, "mix of types"),
        (source, "x.gguf", {"type": "iq1_s"}, "no type 'iq1_s'"),
        (source, "x.gguf", {"activations": "u8"}, "type int8 of ONNX"),
        (source, "x.gguf", {"inputs": [1, 2]}, "measure the importance of a GGUF"),
        (source, "x.gguf", {"save_imatrix": "i.gguf"}, "writes what inputs= measured"),
        (source, "x.gguf", {"ranges": "best"}, "ranges="),
        (tmp_path / "none.gguf", "x.gguf", {}, "can't be opened"),
        (3, "x.gguf", {}, "takes the path"),
    ]
    for given, target, options, message in cases:
        with pytest.raises(RlxError, match=message):
            rlx.quantize(given, tmp_path / target, options.pop("type", "q8_0"), **options)
    write_safetensors(tmp_path / "big.safetensors", {"w": np.full((32, 64), 1e6, np.float32)}, "F32")
    with pytest.raises(OptionError, match="beyond those of f16"):
        rlx.quantize(tmp_path / "big.safetensors", tmp_path / "x.gguf", "f16")
    g = rlx.Graph("g")
    with pytest.raises(OptionError, match=r"rlx\.ops\.quantize"):
        rlx.quantize(g.input("x", (3,)), None)  # type: ignore[arg-type]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big.safetensors", "in.safetensors"]


# ---- importance


def importance() -> dict[str, Importance]:
    rng = np.random.default_rng(3)
    one = rng.random((1, 512)).astype(np.float32) * 10
    stacked = rng.random((3, 256)).astype(np.float32)
    return {
        "blk.0.attn_q.weight": Importance(one, np.array([5], np.float32)),
        "blk.0.ffn_down_exps.weight": Importance(stacked, np.array([2, 0, 4], np.float32)),
    }


def test_importance_weighs_errors(source: Path, tmp_path: Path) -> None:
    """The bytes are those of `encode` with the mean squares, for each expert its own; 1 where nothing was seen."""
    write_imatrix(tmp_path / "i.gguf", importance(), "test", 1)
    rlx.quantize(source, tmp_path / "out.gguf", "q4_k", imatrix=tmp_path / "i.gguf")
    file, before = read_gguf(tmp_path / "out.gguf"), arrays()
    encoding = ENCODINGS["q4_k"]
    name = "blk.0.attn_q.weight"
    expected = encoding.encode(before[name], importance()[name].sums[0] / 5)
    np.testing.assert_array_equal(file.raw(name), expected)
    assert (expected != encoding.encode(before[name])).any()
    name = "blk.0.ffn_down_exps.weight"
    means = [importance()[name].sums[0] / 2, np.ones(256, np.float32), importance()[name].sums[2] / 4]
    parts = [encoding.encode(matrix, mean) for matrix, mean in zip(before[name], means, strict=True)]
    np.testing.assert_array_equal(file.raw(name), np.concatenate(parts))


def test_older_files_of_importance(source: Path, tmp_path: Path) -> None:
    """The list that llama.cpp wrote before: sums that are to be divided by the number of calls."""
    values, name = np.arange(512, dtype="<f4"), b"blk.0.attn_q.weight"
    data = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii", 4, 512) + values.tobytes()
    (tmp_path / "i.dat").write_bytes(data + struct.pack("<ii", 7, 0))
    found = read_imatrix(tmp_path / "i.dat")
    np.testing.assert_array_equal(found[name.decode()].means, values / 4)
    for cut in range(len(data)):
        (tmp_path / "cut.dat").write_bytes(data[:cut])
        with pytest.raises(ModelFormatError):
            read_imatrix(tmp_path / "cut.dat")


@pytest.mark.parametrize(
    "options",
    [
        {"tensors": "abc"}, {"tensors": [1, 2]}, {"tensors": ["ab"]}, {"tensors": 3}, {"tensors": {1: "q8_0"}},
        {"keep": 5}, {"keep": "blk.0.*"}, {"keep": [1]}, {"threads": "x"}, {"threads": -1}, {"percentile": "x"},
    ],
)  # fmt: skip
def test_arguments_of_a_wrong_type_are_named(options: dict[str, Any], source: Path, tmp_path: Path) -> None:
    (name,) = options
    with pytest.raises(OptionError, match=f"^{name}=.*expected"):
        rlx.quantize(source, tmp_path / "o.gguf", "q8_0", **options)


def test_importance_of_another_model_is_refused(source: Path, tmp_path: Path) -> None:
    """No tensor in common, other sizes, numbers that are none."""
    write_imatrix(tmp_path / "i.gguf", {"x": importance()["blk.0.attn_q.weight"]}, "test", 1)
    with pytest.raises(NameNotFound, match="no tensor of this model"):
        rlx.quantize(source, tmp_path / "o.gguf", "q4_k", imatrix=tmp_path / "i.gguf")
    short = Importance(np.ones((1, 256), np.float32), np.ones(1, np.float32))
    with pytest.raises(ShapeError, match="512 columns"):
        rlx.quantize(source, tmp_path / "o.gguf", "q4_k", imatrix={"blk.0.attn_q.weight": short})
    bad = Importance(np.full((1, 512), np.nan, np.float32), np.ones(1, np.float32))
    write_imatrix(tmp_path / "i.gguf", {"blk.0.attn_q.weight": bad}, "test", 1)
    with pytest.raises(ModelFormatError, match="finite"):
        rlx.quantize(source, tmp_path / "o.gguf", "q4_k", imatrix=tmp_path / "i.gguf")


def test_importance_is_measured(tmp_path: Path) -> None:
    """The mean squares of what the first layer's queries multiply: norms of the embeddings of all tokens."""
    case = CASES["llama"]
    path = write_gguf(tmp_path / "in.gguf", case["config"], case["shapes"])
    vocab = case["config"]["vocab_size"]
    tokens = np.random.default_rng(0).integers(0, vocab, 700).tolist()
    rlx.quantize(path, tmp_path / "out.gguf", "q8_0", inputs=tokens, save_imatrix=tmp_path / "i.gguf")
    found, file = read_imatrix(tmp_path / "i.gguf"), read_gguf(path)
    hidden = case["config"]["hidden_size"]
    table = file.raw("token_embd.weight").view(np.float32).reshape(vocab, hidden).astype(np.float64)
    x = table[tokens]
    x = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + case["config"]["rms_norm_eps"])
    x = x * file.raw("blk.0.attn_norm.weight").view(np.float32)
    for name in ("attn_q", "attn_k", "attn_v"):
        one = found[f"blk.0.{name}.weight"]
        np.testing.assert_allclose(one.means, np.square(x).mean(axis=0), rtol=1e-4)
        assert one.counts.tolist() == [700]
    products = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    layers = case["config"]["num_hidden_layers"]
    assert set(found) == {f"blk.{i}.{p}.weight" for i in range(layers) for p in products}


def test_a_text_is_read_by_the_models_own_tokens(tmp_path: Path) -> None:
    """A .txt file gives what its tokens give; tokens that the model lacks, and other files, are refused."""
    case = CASES["llama"]
    path = write_gguf(tmp_path / "in.gguf", case["config"], case["shapes"])
    (tmp_path / "t.txt").write_text("abc abc, this is a text")
    rlx.quantize(path, tmp_path / "a.gguf", "q4_0", inputs=tmp_path / "t.txt", save_imatrix=tmp_path / "i.gguf")
    tokens = load_tokenizer(path).encode("abc abc, this is a text", ends=True)
    rlx.quantize(path, tmp_path / "b.gguf", "q4_0", inputs=tokens, save_imatrix=tmp_path / "j.gguf")
    a, b = (read_imatrix(tmp_path / name) for name in ("i.gguf", "j.gguf"))
    assert a.keys() == b.keys()
    for name, one in a.items():
        np.testing.assert_array_equal(one.sums, b[name].sums)
    for given, message in (
        ([1, 10**6], "1000000 is no token"),
        ("t.npz", "reads a .txt"),
        ([1], "two tokens"),
        (3, "list"),
    ):
        with pytest.raises(RlxError, match=message):
            rlx.quantize(path, tmp_path / "c.gguf", "q4_0", inputs=given)  # type: ignore[arg-type]
    assert not (tmp_path / "c.gguf").exists()


def test_language_models_are_compared_on_what_they_read(tmp_path: Path) -> None:
    """The logits at each token, 512 tokens at a time, beside those of `load_llm`; equal weights have no error."""
    case = CASES["llama"]
    path = write_gguf(tmp_path / "in.gguf", case["config"], case["shapes"])
    tokens = np.random.default_rng(0).integers(0, case["config"]["vocab_size"], 550).tolist()
    same = rlx.quantize(path, tmp_path / "same.gguf", "f32", inputs=tokens)
    assert [(o.name, o.rms, o.top1, o.rows) for o in same.outputs] == [("logits", 0, 1, 550)]
    made = rlx.quantize(path, tmp_path / "q4.gguf", "q4_0", inputs=tokens)
    logits = []
    for file in (path, tmp_path / "q4.gguf"):
        model = rlx.load_llm(file, context=512)
        rows = []
        for chunk in (tokens[:512], tokens[512:]):
            model.reset()
            rows += [model.extend(0, chunk[at : at + 32], "logits") for at in range(0, len(chunk), 32)]
        logits.append(np.concatenate(rows).astype(np.float64))
    x, y = logits
    (found,) = made.outputs
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    assert found.cosine == pytest.approx(((x * y).sum(1) / lengths).min(), rel=1e-5)
    assert found.rms == pytest.approx(np.sqrt(((x - y) ** 2).sum() / (x**2).sum()), rel=1e-4)
    assert found.top1 == pytest.approx((x.argmax(1) == y.argmax(1)).mean())
    logs = [z - z.max(1, keepdims=True) for z in logits]
    logs = [z - np.log(np.exp(z).sum(1, keepdims=True)) for z in logs]
    (note,) = (n for n in made.notes if "KL" in n)
    told = float(note.rsplit(" ", 1)[1])
    assert told == pytest.approx((np.exp(logs[0]) * (logs[0] - logs[1])).sum(1).mean(), rel=0.01)
    following = [i for i in range(549) if i != 511]  # the token after a chunk's last one is foretold by none
    old = np.exp(-np.mean([logs[0][i, tokens[i + 1]] for i in following]))
    assert f"of the 548 tokens after others: {old:.4g}"[:-1] in note
    assert "logits: cosine" in str(made)
    assert not rlx.quantize(path, None, "q4_0", inputs=tokens).outputs


def test_a_comparison_that_fails_leaves_the_file_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["llama"]
    path = write_gguf(tmp_path / "in.gguf", case["config"], case["shapes"])
    rlx.quantize(path, tmp_path / "whole.gguf", "q8_0", inputs=[1, 2, 3])

    def fail(*_: object) -> None:
        raise MemoryDeficit("it does not fit")

    monkeypatch.setattr("rlx.quantiser.accuracy.compare_languages", fail)
    words = "out.gguf is written and whole, but comparing it with in.gguf failed: it does not fit"
    with pytest.raises(ExecutionError, match=words):
        rlx.quantize(path, tmp_path / "out.gguf", "q8_0", inputs=[1, 2, 3])
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_progress_is_told_as_of_a_load(tmp_path: Path) -> None:
    """One form of event: stages in order, fractions that never fall, once done; a load within is not told."""
    case = CASES["llama"]
    path = write_gguf(tmp_path / "in.gguf", case["config"], case["shapes"])
    events: list[Progress] = []
    made = rlx.quantize(path, tmp_path / "a.gguf", progress=events.append)
    assert list(dict.fromkeys(e.stage for e in events)) == ["weights", "done"]
    assert {e.item for e in events} <= {t.name for t in made.tensors} | {""}
    assert len(events) > 5
    assert [e.fraction for e in events] == sorted(e.fraction for e in events)
    events.clear()
    tokens = np.random.default_rng(0).integers(0, case["config"]["vocab_size"], 700).tolist()
    rlx.quantize(path, tmp_path / "b.gguf", inputs=tokens, progress=events.append)
    assert list(dict.fromkeys(e.stage for e in events)) == ["inputs", "weights", "outputs", "done"]
    assert [e.fraction for e in events] == sorted(e.fraction for e in events)
    assert [e.fraction for e in events if e.fraction >= 1] == [1]
    with pytest.raises(OptionError, match=r"progress=.*: expected a function"):
        rlx.quantize(path, tmp_path / "c.gguf", progress=3)  # type: ignore[arg-type]

    def stops(event: Progress) -> None:
        if event.stage == "weights":
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rlx.quantize(path, tmp_path / "c.gguf", progress=stops)
    assert not (tmp_path / "c.gguf").exists()


def test_empty_and_packed_tensors_are_copied(tmp_path: Path) -> None:
    """A tensor without elements, whatever its other sizes; elements of 4 bits stay two to a byte."""
    header = {
        "none": {"dtype": "F32", "shape": [1 << 40, 0], "data_offsets": [0, 0]},
        "four": {"dtype": "F4", "shape": [3, 6], "data_offsets": [0, 9]},
    }
    text = json.dumps(header).encode()
    data = bytes(range(9))
    (tmp_path / "in.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    rlx.quantize(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "f16", tensors={"none": "bf16"})
    file = read_safetensors(tmp_path / "out.safetensors")
    assert file.array("four").tobytes() == data
    assert file.tensors["none"].shape == (1 << 40, 0)
