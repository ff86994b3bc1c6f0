"""Code of kernels that are alike is made once, and is the code that each would have got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from targets import machine

import rlx
from rlx.backends.codegen.arguments import Computed, KernelCode, Literal, Pointer
from rlx.backends.codegen.reuse import Form, Reuse
from rlx.backends.cpu import backend as cpu_backend
from rlx.backends.cpu.backend import CpuBackend
from rlx.compiler import stages_of
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import evaluate
from rlx.kernels.program import Buffer, Kernel
from rlx.ops.quant import DynamicQuantizeLinear, MatMulInteger
from rlx.records import names_of, replace

F32 = DTYPES["f32"]
RNG = np.random.default_rng(3)


def weights(*shape: int) -> Any:
    """Small random numbers."""
    return RNG.standard_normal(shape).astype(np.float32) / 8


def transformer(g: rlx.Graph, layers: int) -> None:
    """Layers of attention and two products, of one shape each."""
    x = g.input("x", (1, 24, 64))
    for i in range(layers):
        q, k, v = (rlx.matmul(x, g.param(f"{name}{i}", data=weights(64, 64))) for name in "qkv")
        q, k, v = (rlx.transpose(rlx.reshape(t, (1, 24, 4, 16)), (0, 2, 1, 3)) for t in (q, k, v))
        a = rlx.reshape(rlx.transpose(rlx.attention(q, k, v), (0, 2, 1, 3)), (1, 24, 64))
        x = rlx.layer_norm(x + a, g.param(f"s{i}", data=weights(64)), g.param(f"b{i}", data=weights(64)))
        h = rlx.gelu(rlx.matmul(x, g.param(f"u{i}", data=weights(64, 128))) + g.param(f"c{i}", data=weights(128)))
        x = rlx.softmax(x + rlx.matmul(h, g.param(f"d{i}", data=weights(128, 64))))
    g.output(x)


def convolutions(g: rlx.Graph, layers: int) -> None:
    """Residual blocks of convolutions, with and without groups."""
    x = g.input("x", (1, 32, 14, 14))
    for i in range(layers):
        h = rlx.relu(rlx.conv(x, g.param(f"w{i}", data=weights(32, 32, 1, 1))))
        h = rlx.relu(rlx.conv(h, g.param(f"d{i}", data=weights(32, 1, 3, 3)), groups=32, pads=(1, 1, 1, 1)))
        x = x + rlx.conv(h, g.param(f"v{i}", data=weights(32, 32, 3, 3)), pads=(1, 1, 1, 1))
    g.output(x)


def scaled(g: rlx.Graph, layers: int) -> None:
    """Layers with a factor and a summand of their own, as data of the graph."""
    x = g.input("x", (1, 16, 14, 14))
    for i in range(layers):
        a, b = (g.constant(np.full((1,), value, np.float32)) for value in (0.3 + i / 7, i / 9 - 0.6))
        h = rlx.hard_swish(rlx.conv(x, g.param(f"w{i}", data=weights(16, 16, 1, 1)))) * a + b
        w = g.param(f"d{i}", data=weights(16, 1, 3, 3))
        h = rlx.relu(rlx.conv(h, w, groups=16, pads=(1, 1, 1, 1))) * b + a
        x = rlx.softmax(x + h * a, axis=1) / b
    g.output(x)


def open_sizes(g: rlx.Graph, layers: int) -> None:
    """Sizes that only a run knows, and parts of values."""
    n = rlx.Dim("n", 1, 512)
    x = g.input("x", (n, 40))
    for i in range(layers):
        x = rlx.matmul(x, g.param(f"w{i}", data=weights(40, 40))) * 0.5
        x = rlx.concat(x[:, 20:], rlx.tanh(x[:, :20]), axis=1)
    g.output(x)


def rounded(g: rlx.Graph, layers: int) -> None:
    """Products of bytes, of which each layer has a scale and a zero of its own."""
    x = g.input("x", (24, 64))
    for i in range(layers):
        small, scale, point = g.add(DynamicQuantizeLinear(), x)
        w = g.param(f"w{i}", data=RNG.integers(0, 255, (64, 64)).astype(np.uint8))
        sums = g.add(MatMulInteger(), small, w, point, g.constant(np.array(100 + i, np.uint8)))[0]
        x = rlx.cast(sums, "f32") * (scale * g.constant(np.float32(0.0123 + i / 7))) + g.param(
            f"b{i}", data=weights(64)
        )
    g.output(x)


def kernels_of(build: Callable[[rlx.Graph, int], None], layers: int) -> list[Kernel]:
    """The kernels of a net, laid out for AVX-512."""
    graph = rlx.Graph("layers")
    build(graph, layers)
    program = stages_of(graph, CpuBackend(machine(vector_bytes=64)), rlx.CompileOptions()).program
    assert program is not None
    return [k for k in (*program.prepare, *program.run) if k.host is None and k.extents is None]


def shown(thing: Any, at: dict[str, int]) -> Any:
    """A word or number of chunks as it is compared: buffers by identity, functions by what they give."""
    if isinstance(thing, Pointer):
        return "pointer", place(thing.buffer), evaluate(thing.offset, at)
    if isinstance(thing, Computed):
        return shown(thing.fn, at)
    return thing(at) if callable(thing) else thing


def place(buffer: Buffer) -> object:
    """The memory that a buffer is, views by where they lie."""
    return buffer if buffer.root is None else (buffer.root, buffer.offset, buffer.shape, buffer.dtype)


def facts(codes: list[KernelCode]) -> list[Any]:
    """What runs of codes depend on."""
    at = {"n": 77, "\0threads": 2}
    return [(c.symbol, c.ir, c.optimize, c.sites, c.scratch_bytes(at), shown(c.chunks, at)) for c in codes] + [
        [shown(word, at) for word in c.words] for c in codes
    ]


@pytest.mark.parametrize("build", [transformer, convolutions, scaled, open_sizes, rounded])
def test_reused_code_is_what_each_kernel_would_have_got(build: Callable[[rlx.Graph, int], None]) -> None:
    """Text, words with their buffers, chunks and scratch, kernel by kernel."""
    backend = CpuBackend(machine(vector_bytes=64))
    reuse = backend.reuse()
    kernels = kernels_of(build, 4)
    for kernel in kernels:
        assert facts(reuse(kernel)) == facts(backend.emit_kernel(kernel)), kernel.how
    assert reuse.emitted < len(kernels)


@pytest.mark.parametrize("build", [transformer, convolutions, scaled, open_sizes, rounded])
def test_more_layers_have_no_more_code(build: Callable[[rlx.Graph, int], None]) -> None:
    """What is emitted does not grow with the number of equal layers."""
    emitted = []
    for layers in (4, 24):
        reuse = CpuBackend(machine(vector_bytes=64)).reuse()
        for kernel in kernels_of(build, layers):
            reuse(kernel)
        emitted.append(reuse.emitted)
    assert emitted[0] == emitted[1]


def test_numbers_of_the_graph_are_words() -> None:
    """Kernels that differ in factors and summands have one text each; limits, which instructions know, stay in it."""
    backend = CpuBackend(machine(vector_bytes=64))
    texts: dict[str, set[str]] = {}
    for low, factor in ((0.1, 0.3), (0.1, 0.7), (0.2, 0.7)):
        graph = rlx.Graph("numbers")
        x = graph.input("x", (1, 3, 40))
        number = graph.constant(np.array([factor], np.float32))
        graph.output(rlx.clip(x * number, lo=low) + 0.5)
        program = stages_of(graph, backend, rlx.CompileOptions()).program
        assert program is not None
        ((code,),) = (backend.emit_kernel(kernel) for kernel in program.run)
        assert int(np.float32(factor).view(np.uint32)) in code.words
        assert not any(isinstance(word, Literal) for word in code.words)
        texts.setdefault(code.ir, set()).add(f"{low}")
    assert list(map(len, texts.values())) == [1, 1]


def norm(kind: str, width: int, epsilon: float, slope: float) -> rlx.Graph:
    """A norm over rows of that width, and a leaky relu."""
    graph = rlx.Graph("norm")
    x, scale = graph.input("x", (1, 7, width)), graph.param("s", data=weights(width))
    if kind == "layer":
        y = rlx.layer_norm(x, scale, graph.param("b", data=weights(width)), epsilon=epsilon)
    else:
        y = rlx.rms_norm(x, scale, epsilon=epsilon)
    graph.output(rlx.leaky_relu(y, alpha=slope))
    return graph


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_of_all_widths_share_texts(kind: str) -> None:
    """The number of elements, what is added to the variance, and a slope are words: whole vectors have one text."""
    backend = CpuBackend(machine(vector_bytes=64))
    texts = set()
    cases = ((128, 1e-5, 0.1), (192, 1e-12, 0.01), (768, 1e-6, 0.25), (1000, 1e-6, 0.25), (257, 1e-5, 0.1))
    for width, epsilon, slope in cases:
        program = stages_of(norm(kind, width, epsilon, slope), backend, rlx.CompileOptions()).program
        assert program is not None
        ((code,),) = (backend.emit_kernel(kernel) for kernel in program.run)
        for number in (epsilon, slope):
            assert int(np.float32(number).view(np.uint32)) in code.words
        texts.add((width % 16 == 0, code.ir))
    assert len(texts) == 2


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("width, slope", [(64, 0.1), (65, -0.3), (128, 0.0), (257, np.inf), (1000, np.nan)])
def test_norms_have_the_bits_that_numbers_in_the_code_give(
    kind: str, width: int, slope: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Powers of two too, by which a division may be a product, and NaN and inf among the elements."""
    x = RNG.standard_normal((1, 7, width), dtype=np.float32)
    x[0, 2, 3], x[0, 4, 5] = np.nan, np.inf
    graph = norm(kind, width, 1e-5, slope)
    with np.errstate(all="ignore"):
        (words,) = rlx.compile(graph, device="cpu", cache=False).run([x])
        monkeypatch.setattr(cpu_backend, "without_scalars", lambda kernel: (kernel, ()))
        (numbers,) = rlx.compile(graph, device="cpu", cache=False).run([x])
    np.testing.assert_array_equal(words.view(np.int32), numbers.view(np.int32))


def test_heads_of_all_widths_share_the_text_of_attention() -> None:
    """What scores are multiplied by is a word."""
    backend = CpuBackend(machine(vector_bytes=64))
    texts = set()
    for width in (64, 96):
        graph, rows = rlx.Graph("heads"), rlx.Dim("rows", 1, 512)
        graph.output(rlx.attention(*(graph.input(name, (1, 2, rows, width)) for name in "qkv")))
        program = stages_of(graph, backend, rlx.CompileOptions()).program
        assert program is not None
        for code in (code for kernel in program.run for code in backend.emit_kernel(kernel)):
            texts.add((width, code.ir))
    assert {ir for width, ir in texts if width == 64} == {ir for width, ir in texts if width == 96}


def test_numbers_that_are_words_give_the_same_bits() -> None:
    """After a product, in a loop, and of numbers that are not finite or that the code keeps."""
    x = RNG.standard_normal((1, 16, 9, 9), dtype=np.float32)
    w = weights(24, 16, 1, 1)
    plain = rlx.Graph("plain")
    plain.output(rlx.relu(rlx.conv(plain.input("x", x.shape), plain.param("w", data=w))))
    sums = rlx.compile(plain, device="cpu").run([x])[0]
    for factor, summand in ((0.3, -0.7), (1.0, 1e-30), (np.inf, 0.1), (0.5, np.nan), (-1e38, 3e38), (1e-40, 1 / 3)):
        a, b = np.float32(factor), np.float32(summand)
        graph = rlx.Graph("scaled")
        y = rlx.relu(rlx.conv(graph.input("x", x.shape), graph.param("w", data=w)))
        graph.output(
            (y * graph.constant(np.array([a])) + graph.constant(np.array([b]))) / graph.constant(np.array([a]))
        )
        with np.errstate(all="ignore"):
            want = (sums * a + b) / a
        np.testing.assert_array_equal(rlx.compile(graph, device="cpu").run([x])[0], want)
        nest = rlx.Graph("nest")
        y = nest.input("y", sums.shape)
        nest.output((y * nest.constant(np.array([a])) + nest.constant(np.array([b]))) / nest.constant(np.array([a])))
        np.testing.assert_array_equal(rlx.compile(nest, device="cpu").run([sums])[0], want)


@pytest.mark.parametrize("field", [name for name in names_of(Buffer("b", "arena", (2,), F32)) if name != "name"])
def test_kernels_whose_buffers_differ_are_not_alike(field: str) -> None:
    """A buffer that differs in a field, other than its name and what it holds, makes another form."""
    other: dict[str, Any] = {
        "kind": "param", "shape": (8, 64), "dtype": DTYPES["i32"], "encoding": object(), "offset": 64, "space": "gpu",
        "wide": True, "root": Buffer("root", "arena", (512,), F32), "data": np.zeros(512, np.float32),
    }  # fmt: skip
    buffer = Buffer("b", "arena", (512,), F32)
    kernel = Kernel("k", operands=(buffer,))
    changed = replace(kernel, operands=(replace(buffer, name="c", **{field: other[field]}),))
    assert (Form(kernel).key == Form(changed).key) is (field == "data")


def test_a_buffer_that_alike_kernels_share_stays() -> None:
    """What code reads besides the buffers of its kernel, as a table of its strategy, is the same for all alike."""
    table = Buffer("table", "const", (64,), F32)
    half = replace(table, name="half", shape=(32,), root=table, offset=128)

    def emit(kernel: Kernel) -> list[KernelCode]:
        return [KernelCode("k", "", (Pointer(kernel.operands[0]), Pointer(table), Pointer(half, 4)), lambda _: 1)]

    reuse = Reuse(emit)
    kernels = [Kernel(name, operands=(Buffer(name, "arena", (8,), F32),)) for name in "ab"]
    for kernel in kernels:
        assert [shown(word, {}) for word in reuse(kernel)[0].words] == [
            shown(word, {}) for word in emit(kernel)[0].words
        ]
    assert reuse.emitted == 1


def test_which_operands_are_the_same_buffer_counts() -> None:
    """x + x is not x + y, though all have one shape."""
    x, y = (Buffer(name, "arena", (8,), F32) for name in "xy")
    keys = [Form(Kernel("k", operands=operands)).key for operands in ((x, x), (x, y), (y, x), (y, y))]
    assert keys[0] == keys[3] != keys[1] == keys[2]


def test_results_of_many_equal_layers_are_the_references() -> None:
    """Each layer reads its own weights."""
    graph = rlx.Graph("layers")
    transformer(graph, 6)
    x = RNG.standard_normal((1, 24, 64)).astype(np.float32)
    (ours,) = rlx.compile(graph, device="cpu", cache=False).run({"x": x})
    (expected,) = rlx.compile(graph, device="reference").run({"x": x})
    np.testing.assert_allclose(ours, expected, rtol=2e-4, atol=2e-5)
