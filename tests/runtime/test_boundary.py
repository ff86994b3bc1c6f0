"""Nothing but errors of rlx comes out of rlx: what is public is bounded, and what callers raise stays as it is."""

from __future__ import annotations

import errno
import functools
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.boundary import MARK, bounded, bounded_class
from rlx.errors import CompileError, ExecutionError, MemoryDeficit, OptionError, RlxError, ShapeError
from rlx.runtime.adapters import Adapters
from rlx.runtime.replay import Recorder
from rlx.runtime.states import State, States
from rlx.trace.jit import Traced

CLASSES = (
    rlx.CompiledGraph, rlx.Session, rlx.Graph, rlx.Buckets, rlx.WeightRegistry, rlx.DevicePolicy, rlx.CompileOptions,
    State, States, Adapters, Recorder, Traced, rlx.Array, rlx.Specialised, rlx.custom_vjp,
    rlx.custom_jvp,
)  # fmt: skip
INLINE = {(rlx.CompiledGraph, "run"), (rlx.CompiledGraph, "run_views")}  # they turn errors within themselves
DEFERRED = {"arun", "values"}  # a coroutine and a generator, over calls that are bounded
RESULTS = {"Decision", "RunTrace"}  # what calls return
BASES = {"Dim", "TensorType", "Op"}  # their own checks are all there is, which the fuzz of ops tries


def own_members(cls: type) -> Iterator[tuple[str, Any]]:
    for name in dir(cls):
        owner = next(base for base in cls.__mro__ if name in vars(base))
        if not name.startswith("_") and owner.__module__.startswith("rlx"):
            yield name, inspect.getattr_static(cls, name)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_public_call_of_a_class_is_bounded(cls: type) -> None:
    for name, member in own_members(cls):
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and (cls, name) not in INLINE and name not in DEFERRED:
            assert hasattr(function, MARK), name


def test_every_public_function_is_bounded() -> None:
    for name in rlx.__all__:
        value = getattr(rlx, name)
        if inspect.isfunction(value):
            assert hasattr(value, MARK), name
        elif inspect.isclass(value):
            assert value in CLASSES or name in RESULTS | BASES, name
    assert hasattr(rlx.softmax, MARK)
    assert hasattr(rlx.numpy.zeros, MARK)


# ---- what becomes of an error


def fit(work: Callable[[], object]) -> object:
    """Runs what stands for code of rlx."""
    return bounded("fit", CompileError)(work)()


def within(code: str, arguments: str = "") -> Any:
    """A function whose code counts as that of rlx."""
    space: dict[str, Any] = {"__name__": "rlx.made_up", "os": os}
    exec(f"def work({arguments}):\n    {code}", space)
    return space["work"]


@pytest.mark.parametrize(
    "code, kind, words",
    [
        ("return {}['k']", CompileError, "fit: an unexpected KeyError: 'k'"),
        ("return [][1]", CompileError, "an unexpected IndexError"),
        ("raise NotImplementedError", CompileError, "an unexpected NotImplementedError"),
        ("return len(5)", CompileError, "an unexpected TypeError"),
        ("return work()", CompileError, "nested too deeply"),
        ('raise RuntimeError("can\'t start new thread")', CompileError, "no more threads"),
        ("raise MemoryError('of 8 GiB')", MemoryDeficit, "not enough memory: MemoryError: of 8 GiB"),
        (f"raise OSError({errno.ENOMEM}, 'Cannot allocate memory')", MemoryDeficit, "not enough memory"),
        (f"raise OSError({errno.EIO}, 'Input/output error', 'w.bin')", CompileError, "fit: w.bin: Input/output error"),
    ],
)
def test_what_nobody_thought_of_says_so(code: str, kind: type[RlxError], words: str) -> None:
    with pytest.raises(kind) as caught:
        fit(within(code))
    assert words in str(caught.value)
    assert type(caught.value) is kind
    assert caught.value.__cause__ is not None


def test_an_error_of_rlx_stays_as_it_is() -> None:
    error = ShapeError("x")
    with pytest.raises(ShapeError) as caught:
        fit(lambda: (_ for _ in ()).throw(error))
    assert caught.value is error


def test_wrong_arguments_of_a_call_stay_pythons() -> None:
    calls: tuple[Any, ...] = (rlx.compile, rlx.load, rlx.Session().compile, rlx.Graph("g").input, rlx.lora)
    for call in calls:
        with pytest.raises(TypeError, match="argument") as caught:
            call()
        assert not isinstance(caught.value, RlxError)


def test_a_generator_and_a_property() -> None:
    @bounded_class(ExecutionError)
    class Thing:
        def rows(self) -> Iterator[int]:
            yield 1

        bad = property(within("return {}['k']", "self"), doc="Text.")

        def _inner(self) -> object:
            return within("return {}['k']", "*_")()

    assert list(Thing().rows()) == [1]
    assert inspect.getdoc(Thing.bad) == "Text."
    with pytest.raises(ExecutionError, match=r"Thing\.bad"):
        Thing().bad  # noqa: B018
    with pytest.raises(KeyError):
        Thing()._inner()


def test_functions_of_callers_that_take_other_arguments() -> None:
    """What calls them, and how, instead of an error that nobody thought of; also methods, objects and partials."""

    class Called:
        def __call__(self) -> bool:
            return True

        def method(self) -> bool:
            return True

    def two(a: Any, *, b: Any) -> Any:
        return a

    x = np.ones(3, np.float32)

    def with_policy(policy: Any) -> object:
        f = rlx.checkpoint(lambda v: rlx.exp(v) * v, policy=policy)
        return rlx.grad(lambda v: rlx.reduce_sum(f(v), keepdims=False))(x)

    def with_rule(custom: Any, *rules: Any) -> object:
        f = custom(lambda v: v)
        (f.defvjp if custom is rlx.custom_vjp else f.defjvp)(*rules)
        return rlx.grad(lambda v: rlx.reduce_sum(f(v), keepdims=False))(x)

    calls: dict[str, Callable[[], object]] = {
        r"checkpoint calls .*<lambda>\(\) takes 0": lambda: with_policy(lambda: True),
        r"checkpoint calls .*two\(\) missing 1 required keyword-only": lambda: with_policy(two),
        r"checkpoint calls .*Called.__call__\(\) takes 1": lambda: with_policy(Called()),
        r"checkpoint calls .*Called.method\(\) takes 1": lambda: with_policy(Called().method),
        r"checkpoint calls .*two\(\) got multiple values": lambda: with_policy(functools.partial(two, a=1, b=2)),
        r"grad calls .*<lambda>\(\) takes 0": lambda: with_rule(rlx.custom_vjp, lambda: 1, lambda k, c: (c,)),
        r"grad calls .*<lambda>\(\) takes 1": lambda: with_rule(rlx.custom_jvp, lambda p: 1),
        r"scan calls .*<lambda>\(\) takes 1": lambda: rlx.jit(lambda a: rlx.scan(lambda c: c, a, None, length=2))(x),
        r"cond calls .*two\(\) missing 1": lambda: rlx.jit(lambda a: rlx.cond(a[0] > 0, two, two, a))(x),
        r"load calls .*<lambda>\(\) takes 0": lambda: rlx.load(
            rlx.demo.path("digits"), device="cpu", transform=lambda: None
        ),
    }
    for words, call in calls.items():
        with pytest.raises(OptionError, match=words):
            call()
    with pytest.raises(CompileError, match="an unexpected TypeError"):
        fit(within("return (lambda: 1)(2)"))


class Own(Exception):
    """An error of a caller."""


def raise_it(*args: Any) -> Any:
    raise Own


def raise_plain(*args: Any) -> Any:
    raise ValueError("of the caller")


@pytest.mark.parametrize("function, kind", [(raise_it, Own), (raise_plain, ValueError)])
def test_what_callers_raise_stays_theirs(function: Callable[..., Any], kind: type[Exception]) -> None:
    g = rlx.Graph("g")
    g.output(g.input("x", (2,)), "y")
    x = np.ones(2, np.float32)
    model = rlx.compile(g, device="cpu")
    calls: list[Callable[[], object]] = [
        lambda: rlx.jit(function, device="cpu")(x),
        lambda: rlx.jit(lambda a: rlx.cond(a[0] > 0, function, function, a), device="cpu")(x),
        lambda: rlx.Session(device="cpu").load(g, transform=function),
        lambda: list(model.run_many(function(n) for n in range(2))),
    ]
    for call in calls:
        with pytest.raises(kind) as caught:
            call()
        assert type(caught.value) is kind


def compile_for_ever() -> None:
    while True:
        g = rlx.Graph("g")
        g.output(rlx.softmax(g.input("x", (2,))), "y")
        rlx.compile(g, device="reference")


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs SIGALRM")
def test_what_a_signal_handler_raises_stays_its_own() -> None:
    """As timeouts do that are made of signals."""
    before = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 5)  # again, should the first one meet code that drops all exceptions
    try:
        with pytest.raises(Own):
            compile_for_ever()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- limits

DEVICES = ("cpu", "reference")


def nested(depth: int) -> rlx.Graph:
    """So many `if`s within each other: 2 x at the innermost."""

    def region(name: str, inner: tuple[rlx.Graph, rlx.Graph] | None) -> rlx.Graph:
        g = rlx.Graph(name)
        c, x = g.input("c", (), "bool"), g.input("x", (2,))
        g.output(x * 2.0 if inner is None else g.add(rlx.ops.control.If(), c, c, x, regions=inner)[0], "y")
        return g

    pair: tuple[rlx.Graph, rlx.Graph] | None = None
    for n in range(depth):
        pair = region(f"then{n}", pair), region(f"else{n}", None)
    return region("all", pair)


@pytest.mark.parametrize("device", DEVICES)
def test_regions_may_be_nested_so_far_and_no_farther(device: str) -> None:
    model = rlx.compile(nested(48), device=device)
    assert model.run([np.array(True), np.ones(2, np.float32)])[0].tolist() == [2, 2]
    assert rlx.compile(nested(48), device=device).explain("graph")
    for depth in (49, 500):
        with pytest.raises(OptionError, match="48 regions within each other"):
            nested(depth)


@pytest.mark.parametrize("device", DEVICES)
def test_sizes_may_be_nested_so_far_and_no_farther(device: str, tmp_path: Path) -> None:
    size: Any = rlx.Dim("n")
    for _ in range(100):
        size = (size + 1) // 2
    g = rlx.Graph("g")
    g.input("x", (rlx.Dim("n"),))
    g.output(rlx.expand(g.constant(1.0), shape=(size,)), "y")
    assert rlx.compile(g, device=device).run([np.ones(9, np.float32)])[0].shape == (1,)
    (tmp_path / "g.rlx").write_text(str(g))  # what can be built can be read again
    assert rlx.load(tmp_path / "g.rlx", device=device).run([np.ones(9, np.float32)])[0].shape == (1,)
    with pytest.raises(ShapeError, match="more than 100"):
        (size + 1) // 2


def test_deep_chains_are_no_matter(full: bool) -> None:
    """Chains of more nodes than Python has frames."""
    assert sys.getrecursionlimit() < 2 * 600
    g = rlx.Graph("g")
    y = x = g.input("x", (4,))
    for _ in range(1500 if full else 600):
        y = y * 0.5 + rlx.reshape(x, shape=(2, 2)).reshape(4)
    g.output(y, "y")
    assert np.allclose(rlx.compile(g, device="cpu").run([np.ones(4, np.float32)])[0], 2)


def test_axes_and_bytes_of_a_tensor_are_limited() -> None:
    x = rlx.Graph("g").input("x", (1,))
    assert rlx.reshape(x, shape=(1,) * 64).rank == 64
    wrong: list[Callable[[], object]] = [
        lambda: rlx.reshape(x, shape=(1,) * 65),
        lambda: rlx.Graph("g").input("y", (1,) * 65),
        lambda: rlx.TensorType((1,) * 65, "f32"),
        lambda: rlx.expand(x, shape=(2**61,)),
        lambda: rlx.expand(x, shape=(2**64,)),
        lambda: rlx.Graph("g").input("y", (0, 2**62)),  # NumPy has no such array either
        lambda: rlx.Graph("g").input("y", (rlx.Dim("n", 0), 2**62)),
        lambda: rlx.TensorType((2**33, 2**33), "u8"),
    ]
    for call in wrong:
        with pytest.raises(ShapeError, match=r"at most 64|2\^63"):
            call()
    assert rlx.TensorType((0, 2**60), "f32").nbytes() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_sizes_beyond_63_bits_at_the_extents_of_a_run(device: str) -> None:
    n, m = rlx.Dim("n", 0), rlx.Dim("m", 0)
    for shape, axes in (((n, m, m), [1, 2]), ((m, m, n), [0, 1]), ((n, m, m), [1]), ((n, m, 1), [2])):
        g = rlx.Graph("g")
        g.input("x", (n, m), "u8")
        g.output(rlx.reduce_sum(rlx.expand(g.constant(1.0), shape=shape), axes=axes), "y")
        model = rlx.compile(g, device=device)
        assert model.run([np.empty((0, 3), np.uint8)])[0].size == 0
        with pytest.raises(ExecutionError) as caught:
            model.run([np.empty((0, 2**62), np.uint8)])
        assert "unexpected" not in str(caught.value)
        assert model.run([np.empty((0, 3), np.uint8)])[0].size == 0  # it goes on as before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ["conv", "conv_transpose", "conv_integer", "grouped"])
def test_convolutions_to_no_channels(device: str, op: str) -> None:
    g = rlx.Graph("g")
    x = g.input("x", (1, 4, 8, 8), "u8" if op == "conv_integer" else "f32")
    if op == "conv_transpose":
        y = rlx.conv_transpose(x, g.constant(np.ones((4, 0, 3, 3), np.float32)))
    elif op == "conv_integer":
        y = rlx.byte_conv(x, g.constant(np.ones((0, 4, 3, 3), np.int8)))
    elif op == "grouped":
        y = rlx.conv(x, g.constant(np.ones((0, 2, 3, 3), np.float32)), groups=2)
    else:
        y = rlx.conv(x, g.constant(np.ones((0, 4, 3, 3), np.float32)), g.constant(np.ones((0,), np.float32)))
    g.output(y, "y")
    given = np.ones((1, 4, 8, 8), x.dtype.numpy)
    size = 10 if op == "conv_transpose" else 6
    assert rlx.compile(g, device=device).run([given])[0].shape == (1, 0, size, size)


# ---- what the system refuses


@pytest.fixture
def no_threads() -> Iterator[None]:
    """No thread can be started: its stack would be larger than all addresses."""
    before = threading.stack_size(1 << 47)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        yield
    finally:
        threading.stack_size(before)


def wide() -> rlx.Graph:
    g = rlx.Graph("wide")
    x = g.input("x", (64, 256))
    g.output(rlx.softmax(x @ g.constant(np.ones((256, 256), np.float32))) + rlx.tanh(x), "y")
    return g


@pytest.mark.usefixtures("no_threads")
def test_without_threads_it_compiles_and_runs_on_one(tmp_path: Path) -> None:
    model = rlx.compile(wide(), device="cpu", threads=4, cache_dir=tmp_path)
    x = np.ones((64, 256), np.float32)
    assert model.run([x])[0].shape == (64, 256)
    for call in (model.submit, lambda inputs: list(model.run_many([inputs]))):
        with pytest.raises(ExecutionError, match="no thread can be started"):
            call([x])
    model.sync()
    assert model.run([x])[0].shape == (64, 256)


REFUSED = """
import json, resource, sys
import psutil, rlx
from rlx.errors import RlxError
g = rlx.Graph("first")  # imports what is needed: the limit is about the file
g.output(rlx.relu(g.input("x", (4,))), "y")
path, other, cache = sys.argv[1:]
rlx.compile(g, device="cpu", threads=1, cache_dir=cache).save(other)
rlx.load(other, device="cpu", threads=1, cache_dir=cache)
limit = psutil.Process().memory_info().vms + (16 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    rlx.load(path, device="cpu", threads=1, cache_dir=cache, over_budget="allow")
    print(json.dumps("loaded"))
except RlxError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
@pytest.mark.parametrize("portable", [False, True])
def test_a_file_that_the_system_has_no_room_for_is_not_called_damaged(portable: bool, tmp_path: Path) -> None:
    g = rlx.Graph("large")
    g.output(g.input("x", (1, 4096)) @ g.constant(np.ones((4096, 4096), np.float32)), "y")
    path = tmp_path / "large.rlxart"
    rlx.compile(g, device="cpu", threads=1).save(path, portable=portable)
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, str(path), str(tmp_path / "other.rlxart"), str(tmp_path / "cache")],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kind, message = json.loads(done.stdout)
    assert kind == "MemoryDeficit"
    assert "damaged" not in message


def test_a_command_that_fails_unexpectedly_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of the library that reads the command line are none of a caller's."""
    from click.testing import CliRunner

    from rlx.cli.devices import devices
    from rlx.cli.main import cli

    monkeypatch.setattr(devices, "params", [])
    monkeypatch.setattr(devices, "callback", functools.partial({}.__getitem__, "x"))
    done = CliRunner().invoke(cli, ["devices"])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert "unexpected KeyError" in done.output
