"""Decoders as exporters write them generate what onnxruntime generates, with their caches as states.

`tools/export_decoders.py` wrote the graphs: optimum's Llama, GPT-2 and Qwen2, and a Llama of torch.onnx's exporter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner
from export_decoders import FAMILIES, FOLDER, filled

import rlx
from rlx.cli.main import cli
from rlx.errors import ExecutionError, OptionError

PROMPT = [5, 17, 33, 8, 90, 41, 2]
CAPACITY = 48
NEW = 32


def is_optimums(name: str) -> bool:
    return "dynamo" not in name


def dims_of(data: bytes) -> dict[str, Any]:
    """What has to be said of a mask whose size has a name of its own: that it has an entry for every position."""
    sizes = {spec.name: spec.shape for spec in rlx.Session(device="reference").load(data).inputs}
    if "attention_mask" not in sizes or "past.0.key" not in sizes:
        return {}
    return {"attention_mask": {1: f"{sizes['past.0.key'][2]} + {sizes['input_ids'][1]}"}}


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request: pytest.FixtureRequest) -> tuple[str, bytes]:
    return request.param, filled(FOLDER / f"{request.param}.onnx.gz")


class Peer:
    """onnxruntime, fed with its own presents; `mask` [batch, positions] covers more positions than come."""

    def __init__(self, data: bytes, batch: int = 1, mask: Any = None) -> None:
        self.session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        self.names = [o.name for o in self.session.get_outputs()]
        self.past = {
            i.name: np.zeros((batch, i.shape[1], 0, i.shape[3]), np.float32)
            for i in self.session.get_inputs()
            if i.name.startswith("past")
        }
        self.asked = {i.name for i in self.session.get_inputs()}
        self.at, self.mask = 0, np.ones((batch, CAPACITY), np.int64) if mask is None else mask

    def __call__(self, ids: Any) -> Any:
        stop = self.at + ids.shape[1]
        given = fed(ids, self.at, self.mask[:, :stop], self.asked)
        made = dict(zip(self.names, self.session.run(None, {**given, **self.past}), strict=True))
        self.past = {n: made[n.replace("past_key_values", "present").replace("past", "present")] for n in self.past}
        self.at = stop
        return made["logits"]


class Bound:
    """The same with caches that are states."""

    def __init__(self, data: bytes, batch: int = 1, mask: Any = None, **options: Any) -> None:
        def bound(graph: rlx.Graph) -> rlx.Graph:
            return rlx.bind_cache(graph, CAPACITY, dims={n: batch for n in graph.dims() if n == "batch_size"})

        self.model = rlx.load(data, device="cpu", transform=bound, dims=dims_of(data), **options)
        self.asked = {spec.name for spec in self.model.inputs}
        self.at, self.mask = 0, np.ones((batch, CAPACITY), np.int64) if mask is None else mask

    def __call__(self, ids: Any) -> Any:
        given = fed(ids, self.at, self.mask, self.asked)
        self.at += ids.shape[1]
        return self.model.run(given)[0]


def fed(ids: Any, at: int, mask: Any, asked: set[str]) -> dict[str, Any]:
    positions = np.broadcast_to(np.arange(at, at + ids.shape[1]), ids.shape)
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": np.ascontiguousarray(positions)}
    return {name: array for name, array in given.items() if name in asked}


def greedy(step: Any, prompt: Any) -> Any:
    """The tokens [batch, NEW] that follow the prompt [batch, n], and all logits of its last places."""
    ids, tokens, logits = prompt, [], []
    for _ in range(NEW):
        logits.append(step(ids)[:, -1])
        ids = logits[-1].argmax(axis=-1)[:, None]
        tokens.append(ids)
    return np.concatenate(tokens, axis=1), np.stack(logits)


def test_tokens_are_those_of_onnxruntime(exported: tuple[str, bytes]) -> None:
    """32 greedy ones after a prompt of 7; no cache goes in or out, and no step takes memory."""
    _, data = exported
    prompt = np.array([PROMPT])
    want, logits = greedy(Peer(data), prompt)
    bound = Bound(data)
    assert not [spec.name for spec in bound.model.inputs if spec.name.startswith("past")]
    assert [spec.name for spec in bound.model.outputs] == ["logits"]
    assert len(bound.model.states) == 5
    found, own = greedy(bound, prompt)
    assert found.tolist() == want.tolist()
    np.testing.assert_allclose(own, logits, atol=2e-4, rtol=2e-4)
    assert len(set(want[0].tolist())) > 3, "a model that repeats itself shows nothing"
    arena = len(bound.model.arena)
    bound.model.states["length"].write(np.zeros((), np.int64))
    bound.at = 0
    assert greedy(bound, prompt)[0].tolist() == want.tolist()
    assert len(bound.model.arena) == arena


@pytest.mark.parametrize("name", [n for n in FAMILIES if is_optimums(n)])
def test_two_sequences_one_of_them_padded(name: str) -> None:
    """The flattened mask of a batch is read by its own places too; what it masks counts nothing."""
    data = filled(FOLDER / f"{name}.onnx.gz")
    prompt = np.array([PROMPT, [0, 0, *PROMPT[2:]]])
    mask = np.ones((2, CAPACITY), np.int64)
    mask[1, :2] = 0
    want, logits = greedy(Peer(data, 2, mask), prompt)
    found, own = greedy(Bound(data, 2, mask), prompt)
    assert found.tolist() == want.tolist()
    np.testing.assert_allclose(own, logits, atol=2e-4, rtol=2e-4)
    assert want[0].tolist() != want[1].tolist()


def test_a_mask_with_a_size_of_its_own_gets_a_hint() -> None:
    """It says what `dims_of` gives, and that a load with it binds."""
    data = filled(FOLDER / "llama-dynamo-masked.onnx.gz")
    with pytest.raises(OptionError, match="if axis 1 of the input 'attention_mask' has an entry") as caught:
        rlx.load(data, device="cpu", transform=lambda graph: rlx.bind_cache(graph, CAPACITY))
    assert str(caught.value).endswith(f"load the file with dims={dims_of(data)}")


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16"])
def test_narrow_caches(kv_dtype: str) -> None:
    """Stored in half the bytes; logits are near those of f32."""
    data = filled(FOLDER / "llama.onnx.gz")

    def bound(graph: rlx.Graph) -> rlx.Graph:
        return rlx.bind_cache(graph, CAPACITY, dims={"batch_size": 1}, kv_dtype=kv_dtype)

    model = rlx.load(data, device="cpu", transform=bound)
    assert {str(s.spec.dtype) for name, s in model.states.items() if name != "length"} == {kv_dtype}
    ids = np.array([PROMPT])
    made = model.run(fed(ids, 0, np.ones((1, CAPACITY), np.int64), {s.name for s in model.inputs}))[0]
    np.testing.assert_allclose(made, Peer(data)(ids), atol=0.1, rtol=0.1)


def test_a_run_beyond_the_capacity_is_refused() -> None:
    bound = Bound(filled(FOLDER / "gpt2.onnx.gz"))
    bound(np.full((1, CAPACITY), 3))
    with pytest.raises(ExecutionError):
        bound(np.full((1, 1), 3))


@pytest.mark.parametrize("name", [n for n in FAMILIES if is_optimums(n)])
def test_assumed_sizes_agree(name: str, tmp_path: Path) -> None:
    """The mask has past_sequence_length + sequence_length entries: a run with assumed inputs is one that can be."""
    path = tmp_path / "model.onnx"
    path.write_bytes(filled(FOLDER / f"{name}.onnx.gz"))
    done = CliRunner().invoke(cli, ["run", str(path), "--device", "cpu", "--dims", "past_sequence_length=0:64"])
    assert done.exit_code == 0, done.output
    model = rlx.load(path, device="cpu", dims={"batch_size": 1, "sequence_length": 1, "past_sequence_length": (0, 9)})
    shapes = {spec.name: spec.shape for spec in model.inputs}
    assert str(shapes["attention_mask"][1]) == "past_sequence_length + 1"
    with pytest.raises(OptionError, match="unknown dim 'past_sequence'"):
        rlx.load(path, device="cpu", dims={"past_sequence": 4})
