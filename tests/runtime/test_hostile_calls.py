"""Hostile arguments to every call: nothing but errors of rlx comes out; of building ops only what a check foresaw."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import rlx
from rlx.cli.main import COMMANDS, cli
from rlx.demo import DIGITS
from rlx.errors import RlxError
from rlx.ir.dtype import DTYPES
from rlx.ops.base import OPS, functional
from rlx.testing.cases import cases_of, covered
from rlx.testing.oracle import Case

N = rlx.Dim("n", 0)
LARGE = (2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), -1)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, 64, 65, *LARGE, 1.5, -0.0, float("nan"), float("inf"), 1e308, 1j, "", "x", "w", "s",
    "y", "max", "f32", "\udc80", "a\0b", "../..", b"x", (), [], {}, set(), (0,), (1, 2), (-1, -1), (2**62, 2**62),
    ((),), [[1]], {"x": 1}, {"n": (3, 1)}, {"n": "?"}, object(), int, len, Ellipsis, slice(None), range(3), np.zeros(3),
    np.array(5), np.float32(2), np.int64(3), np.zeros((1,) * 64), np.zeros((0, 2**59)), np.array(["a"]),
    np.array([object()]), np.zeros(2, "M8[s]"), np.zeros(2, [("a", "i4")]), rlx.Dim("n"), rlx.Dim("n") * 2**61,
    (rlx.Dim("n"), 2),
)  # fmt: skip
SIZES: tuple[Any, ...] = (0, 1, 2, 3, 5, 65, 2**31, 2**60, 2**62, 2**63, N, rlx.Dim("m", 0, 4), N * 2**61)


def check(call: Callable[[], object], what: object, *, foreseen: bool = True) -> None:
    """Fails for what is no error of rlx, and where all should be `foreseen` for one that nobody thought of."""
    try:
        call()
    except RlxError as error:
        said = str(error)
    else:
        said = ""
    assert not foreseen or "an unexpected" not in said, (what, said)


# ---- ops

OP_NAMES = sorted(name for name in OPS if covered(name))
CALLS = 30  # with each op


def changed(rng: random.Random, case: Case) -> tuple[list[tuple[tuple[Any, ...], str]], dict[str, Any]]:
    """Shapes, types and attributes of a call that was right, some of them changed."""
    types = [(list(o.shape), o.dtype) for o in case.operands]
    attributes = dict(case.op.attributes())
    for _ in range(rng.choice((1, 1, 2, 3))):
        if types and (not attributes or rng.random() < 0.5):
            n = rng.randrange(len(types))
            shape, dtype = types[n]
            kind = rng.randrange(6)
            if kind == 0:
                types[n] = shape, rng.choice(list(DTYPES))
            elif kind == 1:
                types[n] = [1] * rng.choice((32, 63, 64)), dtype
            elif kind == 2:
                types[n:] = []
            elif kind == 3:
                types.append(([*shape, rng.choice(SIZES)], dtype))
            elif shape:
                shape[rng.randrange(len(shape))] = rng.choice(SIZES)
        elif attributes:
            name = rng.choice(list(attributes))
            old = attributes[name]
            if isinstance(old, tuple) and old and rng.random() < 0.6:
                at = rng.randrange(len(old))
                attributes[name] = (*old[:at], rng.choice(VALUES), *old[at + 1 :])
            else:
                attributes[name] = rng.choice(VALUES)
    return [(tuple(shape), dtype) for shape, dtype in types], attributes


def all_cases(name: str) -> list[Case]:
    return [c for n, m in ((2, 3), (0, 5), (3, 0)) for c in cases_of(name, n, m)]


@pytest.mark.sample(40)
@pytest.mark.parametrize("name", OP_NAMES)
def test_calls_of_an_op(name: str) -> None:
    rng, cases = random.Random(name), all_cases(name)
    for _ in range(CALLS if cases else 0):
        types, attributes = changed(rng, rng.choice(cases))

        def build(types: Any = types, attributes: Any = attributes) -> None:
            g = rlx.Graph("g")
            made = functional(OPS[name])(*(g.input(f"x{i}", *t) for i, t in enumerate(types)), **attributes)
            for value in made if isinstance(made, tuple) else (made,):
                g.output(value)
                value.node.op.work(*(v.type for v in value.node.inputs))
            str(g)

        check(build, (name, types, attributes))


@pytest.mark.sample(6)
@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("name", OP_NAMES)
def test_what_can_be_built_compiles_and_runs_or_is_refused(name: str, device: str) -> None:
    """At small sizes and none: huge ones would be right, and run for years."""
    rng, cases = random.Random(name), all_cases(name)
    for _ in range(4 if cases else 0):
        types, attributes = changed(rng, rng.choice(cases))
        types = [(tuple(s if isinstance(s, int) and s < 6 else N for s in shape), t) for shape, t in types]

        def run(types: Any = types, attributes: Any = attributes) -> None:
            g = rlx.Graph("g")
            made = functional(OPS[name])(*(g.input(f"x{i}", *t) for i, t in enumerate(types)), **attributes)
            for value in made if isinstance(made, tuple) else (made,):
                g.output(value)
            model = rlx.compile(g, device=device, dims={"n": rng.choice((0, 1, 3))} if g.dims() else None)
            model.run([np.ones(spec.shape, spec.dtype.numpy) for spec in model.inputs])

        if not any(large(value) for value in attributes.values()):
            check(run, (name, device, types, attributes), foreseen=False)


def large(value: Any) -> bool:
    """Whether there is a number in it that makes work for years."""
    if isinstance(value, tuple | list):
        return any(large(v) for v in value)
    return isinstance(value, rlx.Dim) or (isinstance(value, int | float | np.number) and abs(value) > 99)


# ---- calls


def graph(*, state: bool = True) -> rlx.Graph:
    g = rlx.Graph("g")
    y = g.input("x", (N, 4)) @ g.param("w", (4, 4), data=np.eye(4, dtype=np.float32))
    if state:
        s = g.state("s", (4,))
        g.update(s, s * 0.5)
        y = y + s
    g.output(y, "y")
    return g


class Made:
    """What the calls are made on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.x = np.ones((3, 4), np.float32)
        self.model = rlx.compile(graph(), device="cpu")
        self.model.run([self.x])  # before which there is no plan
        lora = rlx.lora(graph(), rank=2, slots=2)
        self.adapted = rlx.compile(lora, device="cpu")
        self.registry = rlx.WeightRegistry()
        self.buckets = rlx.Buckets(graph(state=False), {"n": [1, 4]}, device="cpu")
        self.jit = rlx.jit(lambda a: a, device="cpu")
        self.folder.joinpath("none.npz").write_bytes(b"PK\3\4nothing")


CALLED: dict[str, Callable[[Made, Any, Any], object]] = {
    "compile": lambda m, a, b: rlx.compile(a, device="cpu"),
    "compile device": lambda m, a, b: rlx.compile(graph(), device=a),
    "compile dims": lambda m, a, b: rlx.compile(graph(), device="cpu", dims=a),
    "compile dims n": lambda m, a, b: rlx.compile(graph(), device="cpu", dims={"n": a}),
    "compile dims x": lambda m, a, b: rlx.compile(graph(), device="cpu", dims={"x": a}),
    "compile budget": lambda m, a, b: rlx.compile(graph(), device="cpu", budget=a),
    "compile threads": lambda m, a, b: rlx.CompileOptions(threads=a),
    "compile queue": lambda m, a, b: rlx.CompileOptions(queue=a),
    "compile alignment": lambda m, a, b: rlx.CompileOptions(alignment=a),
    "compile cache_dir": lambda m, a, b: rlx.CompileOptions(cache_dir=a),
    "compile search": lambda m, a, b: rlx.CompileOptions(search=a),
    "compile registry": lambda m, a, b: rlx.Session(device="cpu").compile(graph(), registry=a, weights=b),
    "compile policy": lambda m, a, b: rlx.compile(graph(), policy=a),
    "session": lambda m, a, b: rlx.Session(policy=a, registry=b).compile(graph(), device="reference"),
    "load": lambda m, a, b: rlx.load(a, device="cpu"),
    "load flags": lambda m, a, b: rlx.load(str(DIGITS), allow_code=a, portable_only=b, device="cpu"),
    "load transform": lambda m, a, b: rlx.Session(device="cpu").load(graph(), transform=None if callable(a) else a),
    "load_artifact": lambda m, a, b: rlx.load_artifact(a, portable_only=b),
    "estimate": lambda m, a, b: rlx.estimate(a, overhead=0),
    "estimate dims": lambda m, a, b: rlx.estimate(graph(), dims={"n": a}, overhead=0),
    "estimate more": lambda m, a, b: rlx.estimate(graph(), context=a, weights=b, overhead=0),
    "estimate fits": lambda m, a, b: rlx.estimate(graph(), dims={"n": 3}, overhead=0).fits(a),
    "estimate require": lambda m, a, b: rlx.estimate(graph(), dims={"n": 3}, overhead=0).require(a),
    "run": lambda m, a, b: m.model.run(a),
    "run x": lambda m, a, b: m.model.run([a]),
    "run named": lambda m, a, b: m.model.run({"x": a}),
    "run two": lambda m, a, b: m.model.run([m.x, a]),
    "run outputs": lambda m, a, b: m.model.run([m.x], outputs=a),
    "run out": lambda m, a, b: m.model.run([m.x], out=a),
    "run out y": lambda m, a, b: m.model.run([m.x], out={"y": a}),
    "run more": lambda m, a, b: m.model.run(a, b),
    "call": lambda m, a, b: m.model(a),
    "call named": lambda m, a, b: m.model(x=a),
    "result": lambda m, a, b: m.model(x=m.x)[a],
    "run_views": lambda m, a, b: m.model.run_views(a),
    "run_slots": lambda m, a, b: m.model.run_slots(a),
    "run_slots two": lambda m, a, b: m.model.run_slots(a, b),
    "run_feed": lambda m, a, b: m.model.run_feed([m.x], a, b),
    "submit": lambda m, a, b: m.model.submit([a], outputs=b).result(),
    "run_many": lambda m, a, b: list(m.model.run_many(a, outputs=b)),
    "run_many x": lambda m, a, b: list(m.model.run_many([[m.x], [a]])),
    "set_param": lambda m, a, b: m.model.set_param(a, b),
    "set_param w": lambda m, a, b: m.model.set_param("w", a, convert=isinstance(b, str)),
    "set_params": lambda m, a, b: m.model.set_params(a),
    "set_extent": lambda m, a, b: m.model.set_extent(a, b),
    "set_extent n": lambda m, a, b: m.model.set_extent("n", a),
    "set_adapter": lambda m, a, b: m.model.set_adapter(a, b),
    "states": lambda m, a, b: m.model.states[a],
    "states write": lambda m, a, b: m.model.states["s"].write(a),
    "states feed": lambda m, a, b: m.model.states["s"].feed(a),
    "states bind": lambda m, a, b: m.model.clone().states.bind(a, b),
    "states bind x": lambda m, a, b: m.model.clone().states.bind("x", a),
    "states load": lambda m, a, b: m.model.states.load(a),
    "read_output_row": lambda m, a, b: m.model.read_output_row(a, b),
    "read_output_row y": lambda m, a, b: m.model.read_output_row("y", a),
    "clone": lambda m, a, b: m.model.clone(fresh=a),
    "explain": lambda m, a, b: m.model.explain(a),
    "profile": lambda m, a, b: m.model.profile(a),
    "plan": lambda m, a, b: m.model.plan[a],  # type: ignore[index]
    "experts": lambda m, a, b: m.model.set_resident_experts(a),
    "routing": lambda m, a, b: m.model.capture_routing(a),
    "replay": lambda m, a, b: rlx.replay(m.model, a),
    "replay model": lambda m, a, b: rlx.replay(a, m.folder / "none.npz"),
    "adapters put": lambda m, a, b: m.adapted.adapters.put(a, b),
    "adapters put w": lambda m, a, b: m.adapted.adapters.put("one", {"w": a}, b),
    "adapters rows": lambda m, a, b: m.adapted.adapters.rows(a),
    "adapters get": lambda m, a, b: m.adapted.adapters[a],
    "adapters remove": lambda m, a, b: m.adapted.adapters.remove(a),
    "registry add": lambda m, a, b: m.registry.add(a, b),
    "registry get": lambda m, a, b: m.registry[a],
    "registry load": lambda m, a, b: m.registry.load(a),
    "registry tie": lambda m, a, b: m.registry.tie(a, b),
    "registry pin": lambda m, a, b: m.registry.pin(a, b),
    "registry release": lambda m, a, b: m.registry.release(a),
    "registry fill": lambda m, a, b: m.registry.fill(a, b),
    "buckets": lambda m, a, b: rlx.Buckets(a, b, device="reference"),
    "buckets steps": lambda m, a, b: rlx.Buckets(graph(state=False), {"n": a}, device="reference"),
    "buckets run": lambda m, a, b: m.buckets.run(a),
    "buckets run x": lambda m, a, b: m.buckets.run([a]),
    "buckets warmup": lambda m, a, b: m.buckets.warmup(a),
    "buckets set_param": lambda m, a, b: m.buckets.set_param(a, b),
    "jit": lambda m, a, b: m.jit(a),
    "jit named": lambda m, a, b: m.jit(a=a),
    "jit options": lambda m, a, b: rlx.jit(lambda x: x, static=a, dims=b)(m.x),
    "jit static_argnums": lambda m, a, b: rlx.jit(lambda x: x, static_argnums=a, device="cpu")(m.x),
    "jit result": lambda m, a, b: rlx.jit(lambda x: a, device="reference")(m.x),
    "jit lower": lambda m, a, b: m.jit.lower(a),
    "cond": lambda m, a, b: rlx.cond(a, lambda x: x, lambda x: x, b),
    "while_loop": lambda m, a, b: rlx.while_loop(lambda x: a, lambda x: b, np.ones(3)),
    "fori_loop": lambda m, a, b: rlx.fori_loop(a, b, lambda i, x: x, np.ones(3)),
    "scan": lambda m, a, b: rlx.scan(lambda c, x: (c, x), a, b),
    "bind_cache": lambda m, a, b: rlx.bind_cache(graph(), a, {"x": b}),
    "lora": lambda m, a, b: rlx.lora(graph(), rank=a, slots=b),
    "lora targets": lambda m, a, b: rlx.lora(graph(), rank=1, targets=a),
    "choose": lambda m, a, b: rlx.choose(a, b),
    "devices_for": lambda m, a, b: rlx.devices_for(a, b),
    "profile graph": lambda m, a, b: rlx.profile(a),
    "to_dlpack": lambda m, a, b: rlx.to_dlpack(a),
    "policy parse": lambda m, a, b: rlx.DevicePolicy.parse(a),
    "dim": lambda m, a, b: rlx.Dim("n", a, b),
    "dim multiple": lambda m, a, b: rlx.Dim("n", multiple=a),
    "type": lambda m, a, b: rlx.TensorType(a, b),
    "type dtype": lambda m, a, b: rlx.TensorType((2,), a, b),
    "graph": lambda m, a, b: rlx.Graph(a),
    "input": lambda m, a, b: rlx.Graph("g").input(a, b),
    "input shape": lambda m, a, b: rlx.Graph("g").input("x", (a, b)),
    "input dtype": lambda m, a, b: rlx.Graph("g").input("x", (2,), a),
    "param": lambda m, a, b: rlx.Graph("g").param("x", a, b),
    "param data": lambda m, a, b: rlx.Graph("g").param("x", data=a, encoding=b),
    "constant": lambda m, a, b: rlx.Graph("g").constant(a, b),
    "state": lambda m, a, b: rlx.Graph("g").state("x", a, initial=b),
    "update": lambda m, a, b: (g := graph()).update(a, g.inputs[0]),
    "output": lambda m, a, b: graph().output(a, b),
    "output of": lambda m, a, b: (g := graph()).output(g.inputs[0], a),
    "add": lambda m, a, b: graph().add(a, b),
    "find": lambda m, a, b: graph().find(a),
    "operand": lambda m, a, b: graph().inputs[0] + a,
    "power": lambda m, a, b: graph().inputs[0] ** a,
    "matmul": lambda m, a, b: graph().inputs[0] @ a,
    "index": lambda m, a, b: graph().inputs[0][a],
    "index two": lambda m, a, b: graph().inputs[0][a, b],
    "at": lambda m, a, b: graph().inputs[0].at[a].set(b),
    "reshape": lambda m, a, b: graph().inputs[0].reshape(a, b),
    "astype": lambda m, a, b: graph().inputs[0].astype(a),
    "sum": lambda m, a, b: graph().inputs[0].sum(a, b),
    "np.concatenate": lambda m, a, b: np.concatenate([graph().inputs[0], a], b),
    "np.where": lambda m, a, b: np.where(graph().inputs[0] > 0, a, b),
    "np.take": lambda m, a, b: np.take(graph().inputs[0], a, b),
    "np.pad": lambda m, a, b: np.pad(graph().inputs[0], a),
    "np.repeat": lambda m, a, b: np.repeat(graph().inputs[0], a, b),
    "np.clip": lambda m, a, b: np.clip(graph().inputs[0], a, b),
    "np.split": lambda m, a, b: np.split(graph().inputs[0], a, b),
    "np.einsum": lambda m, a, b: np.einsum(a, graph().inputs[0]),
    "np.moveaxis": lambda m, a, b: np.moveaxis(graph().inputs[0], a, b),
    "np.linalg.norm": lambda m, a, b: np.linalg.norm(graph().inputs[0], a, b),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    made = Made(tmp_path_factory.mktemp("calls"))
    yield made
    assert np.array_equal(rlx.compile(graph(), device="cpu").run([made.x])[0], made.x)  # nothing in common was changed


@pytest.mark.sample(30)
@pytest.mark.parametrize("call", CALLED)
def test_hostile_arguments(made: Made, call: str) -> None:
    rng = random.Random(call)
    for value in VALUES:
        other = rng.choice(VALUES)
        if not skipped(call, value):
            check(lambda v=value, o=other: CALLED[call](made, v, o), (call, value, other), foreseen=False)  # type: ignore[misc]


def skipped(call: str, value: object) -> bool:
    """What would be right: a loop of so many rounds, and a function of Python's that is traced."""
    return call in ("fori_loop", "while_loop") and isinstance(value, int | float)


# ---- the command line

WORDS = ("", "x", "-1", "0", "1e30", "nan", "9" * 30, "x=1", "x=", "n=0", "x=(1,2)", "/dev/null", "none.npz", "\udc80")
FLAGS = (
    "--device", "--dims", "--threads", "--budget", "--over-budget", "--input", "--json", "--stage", "--seconds",
    "--allow-code", "--portable-only", "-o",
)  # fmt: skip


@pytest.mark.sample(12)
@pytest.mark.parametrize("number", range(200))
def test_hostile_command_lines(number: int, tmp_path: Path) -> None:
    rng = random.Random(number)
    command = rng.choice(sorted(COMMANDS.keys() - {"demo", "calibrate", "bench", "verify"}))
    words = [rng.choice((str(DIGITS), *WORDS))]
    for _ in range(rng.randrange(4)):
        words += [rng.choice(FLAGS), rng.choice(WORDS)]
    with CliRunner().isolated_filesystem(tmp_path):
        done = CliRunner().invoke(cli, [command, *words])
    assert done.exit_code in (0, 1, 2), words
    assert done.exception is None or isinstance(done.exception, SystemExit), (command, words, done.exception)
    assert "an unexpected" not in done.output, (command, words, done.output)
