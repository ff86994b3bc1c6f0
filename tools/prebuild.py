"""Compiles the code that comes with rlx: for each level of `rlx.backends.cpu.jit.prebuilt`, of kernels of many models.

python tools/prebuild.py            writes rlx/backends/cpu/prebuilt/*.bin, which `make wheel` packs
python tools/prebuild.py --here     only for processors that this one has all features of

What is compiled is what small graphs of the usual layers need: products of all shapes of operands, convolutions,
attention, norms, recurrent cells and what is usually computed with them, and layers of nets for sound
(prebuild_sound.py); all routines that these call, and the native code of runs. No size is in the text of a kernel, so
a layer here stands for such layers of any size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np
from prebuild_sound import sounds

import rlx
from rlx.backends.codegen.arguments import text_key
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.cpu.jit import cpuid
from rlx.backends.cpu.jit.compile import compile_object, compile_together, host
from rlx.backends.cpu.jit.prebuilt import FOLDER, LEVELS, Level, archive_bytes, levels_of, read, symbol_of
from rlx.backends.cpu.native import entry_ir, runner_ir
from rlx.backends.cpu.schedule.arguments import Routine, text_of
from rlx.backends.cpu.target import Target
from rlx.compiler import stages_of
from rlx.disk import replacing
from rlx.ir.dtype import DTYPES
from rlx.ir.value import Value
from rlx.ops.quant import DynamicQuantizeLinear, MatMulInteger
from rlx.options import CompileOptions
from rlx.records import replace

Make = Callable[[rlx.Graph], None]
Item = tuple[str, str, bool]  # name, text, whether LLVM's passes run

AFTER: dict[str, Callable[[Value], Value]] = {  # what usually follows a product or a convolution and its bias
    "nothing": lambda x: x,
    "relu": rlx.relu,
    "relu6": lambda x: rlx.clip(x, lo=0.0, hi=6.0),
    "silu": rlx.silu,
    "hard_swish": rlx.hard_swish,
    "leaky_relu": rlx.leaky_relu,
    "sigmoid": rlx.sigmoid,
    "gelu": rlx.gelu,
    "gelu_tanh": lambda x: rlx.gelu(x, approximate="tanh"),
    "tanh": rlx.tanh,
}
ROWS = (1, 7, 128, rlx.Dim("rows", 1, 4096))
ENCODINGS = ("q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k")


def of(function: Callable[..., None], *given: Any, **named: Any) -> Make:
    """What makes a graph by that function."""
    return lambda g: function(g, *given, **named)


def product(g: rlx.Graph, rows: Any, k: int, n: int, after: str, *, bias: bool, more: str, dtype: str = "f32") -> None:
    """x @ w, a bias, an activation, a residual before or after it."""
    x = g.input("x", (rows, k), dtype)
    y = rlx.matmul(x, g.param("w", (k, n), dtype))
    y = y + g.param("b", (n,), dtype) if bias else y
    y = y + g.input("r", (rows, n), dtype) if more == "before" else y
    y = AFTER[after](y)
    g.output(y + g.input("r", (rows, n), dtype) if more == "after" else y)


def products() -> Iterator[Make]:
    """Products with weights, small and large, and with one another."""
    for rows in ROWS:
        for k, n in ((256, 384), (768, 3072), (3000, 1000)):
            for bias in (False, True):
                yield of(product, rows, k, n, "nothing", bias=bias, more="")
        for after in AFTER:
            yield of(product, rows, 256, 384, after, bias=True, more="")
        for more in ("before", "after"):
            yield of(product, rows, 256, 384, "nothing", bias=True, more=more)
        for dtype in ("f16", "bf16", "f64"):
            yield of(product, rows, 256, 384, "nothing", bias=True, more="", dtype=dtype)
        for encoding in ENCODINGS:
            for precision in ("f32", "q8"):
                yield of(encoded, rows, encoding, precision)
    for turned in (False, True):
        yield of(of_inputs, 128, turned=turned)
        yield of(of_inputs, rlx.Dim("rows", 1, 4096), turned=turned)
    for rows in (128, rlx.Dim("rows", 1, 4096)):
        for after in ("nothing", "relu", "gelu"):
            for dtype in ("i8", "u8"):
                yield of(rounded, rows, dtype, after)


def encoded(g: rlx.Graph, rows: Any, encoding: str, precision: str) -> None:
    """A product with weights in blocks, the layout of GGUF files."""
    w = rlx.transpose(g.param("w", (512, 1024), encoding=encoding), (1, 0))
    x = g.input("x", (rows, 1024))
    g.output(rlx.matmul(x, w, activations="q8" if precision == "q8" else ""))


def of_inputs(g: rlx.Graph, rows: Any, *, turned: bool) -> None:
    """Products of values that a run computes, by heads."""
    a, b = g.input("a", (1, 12, rows, 64)), g.input("b", (1, 12, rows, 64) if turned else (1, 12, 64, rows))
    g.output(rlx.matmul(a, rlx.transpose(b, (0, 1, 3, 2)) if turned else b))


def rounded(g: rlx.Graph, rows: Any, dtype: str, after: str) -> None:
    """Products of bytes that a run rounds its operands to, as dynamic quantisation writes them, and a residual."""
    x, zero = g.input("x", (1, rows, 256)), g.constant(np.array(3, DTYPES[dtype].numpy))
    for number, (k, n) in enumerate(((256, 512), (512, 256))):
        small, scale, point = g.add(DynamicQuantizeLinear(), x)
        sums = g.add(MatMulInteger(), small, g.param(f"w{number}", (k, n), dtype), point, zero)[0]
        y = rlx.cast(sums, "f32") * (scale * g.constant(np.float32(0.017))) + g.param(f"b{number}", (n,))
        x = AFTER[after](y) if number == 0 else y + g.input("r", (1, rows, n))
    g.output(x)


def convolution(
    g: rlx.Graph, channels: int, outputs: int, kernel: int, stride: int, groups: int, after: str, more: str = ""
) -> None:
    """A convolution of an image between two others, so that its channels are last, with a bias."""
    x = g.input("x", (1, channels, 56, 56))
    if channels > 4:
        x = rlx.relu(rlx.conv(x, g.param("w0", (channels, channels, 1, 1)), g.param("b0", (channels,))))
    pads = (kernel // 2,) * 4
    w = g.param("w", (outputs, channels // groups, kernel, kernel))
    y = rlx.conv(x, w, g.param("b", (outputs,)), pads=pads, strides=(stride, stride), groups=groups)
    shape = tuple(y.shape)
    if more:
        r = rlx.relu(rlx.conv(g.input("r", shape), g.param("w1", (outputs, outputs, 1, 1)), g.param("b1", (outputs,))))
        y = AFTER[after](y + r) if more == "before" else AFTER[after](y) + r
    else:
        y = AFTER[after](y)
    g.output(rlx.conv(y, g.param("w2", (outputs, outputs, 1, 1)), g.param("b2", (outputs,))))


def convolutions() -> Iterator[Make]:
    """The convolutions of nets for pictures, with their activations and residuals."""
    activations = ("nothing", "relu", "relu6", "silu", "hard_swish", "leaky_relu")
    for after in activations:
        for kernel, stride in ((1, 1), (1, 2), (3, 1), (3, 2), (5, 1), (7, 2)):
            yield of(convolution, 64, 96, kernel, stride, 1, after)
        for kernel, stride in ((3, 1), (3, 2), (5, 1), (5, 2)):
            yield of(convolution, 96, 96, kernel, stride, 96, after)
        for kernel in (3, 7):
            yield of(convolution, 3, 32, kernel, 2, 1, after)
    for more in ("before", "after"):
        for after in ("nothing", "relu"):
            for kernel in (1, 3):
                yield of(convolution, 64, 64, kernel, 1, 1, after, more)
    yield of(convolution, 64, 64, 3, 1, 8, "relu")
    yield of(convolution, 64, 2, 1, 1, 1, "nothing")
    yield signal


SMALL = {"relu6": AFTER["relu6"], "silu": AFTER["silu"], "hard_swish": AFTER["hard_swish"]}
BLOCKS = (  # of nets for phones: channels in, between and out, stride, pixels along an axis
    (16, 96, 24, 2, 112), (24, 144, 24, 1, 56), (24, 144, 32, 2, 56), (32, 192, 32, 1, 28), (32, 192, 64, 2, 28),
    (64, 384, 64, 1, 14), (64, 384, 96, 1, 14), (96, 576, 160, 2, 14), (160, 960, 160, 1, 7), (160, 960, 320, 1, 7),
)  # fmt: skip
PAIRS = ((16, 32, 1, 160), (32, 64, 2, 160), (64, 128, 1, 80), (128, 256, 2, 80), (256, 256, 1, 40), (256, 512, 2, 40))


def learned(g: rlx.Graph, x: Value, after: str) -> Value:
    """An activation, times and plus a number of the layer's own."""
    return SMALL[after](x) * g.constant(np.float32(0.7)) + g.constant(np.float32(0.1))


def widened(g: rlx.Graph, block: tuple[int, ...], kernel: int, after: str) -> None:
    """Products to more channels, a depthwise convolution, and products to few, with a residual where it fits."""
    channels, wide, outputs, stride, size = block
    x = rlx.conv(g.input("x", (1, 8, size, size)), g.param("w0", (channels, 8, 1, 1)), g.param("b0", (channels,)))
    y = SMALL[after](rlx.conv(x, g.param("w1", (wide, channels, 1, 1)), g.param("b1", (wide,))))
    y = depthwise(g, y, wide, kernel, stride, SMALL[after])
    y = rlx.conv(y, g.param("w3", (outputs, wide, 1, 1)), g.param("b3", (outputs,)))
    g.output(rlx.conv(y + x if (outputs, stride) == (channels, 1) else y, g.param("w4", (8, outputs, 1, 1))))


def separable(g: rlx.Graph, pair: tuple[int, ...], kernel: int, after: str) -> None:
    """A depthwise convolution and products, with a learned factor and summand after each."""
    channels, outputs, stride, size = pair
    x = rlx.conv(g.input("x", (1, 8, size, size)), g.param("w0", (channels, 8, 1, 1)), g.param("b0", (channels,)))
    y = depthwise(g, learned(g, x, after), channels, kernel, stride, lambda y: learned(g, y, after))
    y = learned(g, rlx.conv(y, g.param("w3", (outputs, channels, 1, 1)), g.param("b3", (outputs,))), after)
    g.output(rlx.conv(y, g.param("w4", (8, outputs, 1, 1))))


def depthwise(
    g: rlx.Graph, x: Value, channels: int, kernel: int, stride: int, after: Callable[[Value], Value]
) -> Value:
    """One with a bias, and what comes after it."""
    w, b = g.param("w2", (channels, 1, kernel, kernel)), g.param("b2", (channels,))
    return after(rlx.conv(x, w, b, pads=(kernel // 2,) * 4, strides=(stride, stride), groups=channels))


def blocks() -> Iterator[Make]:
    """What nets for phones consist of."""
    for kernel in (3, 5):
        for block in BLOCKS:
            for after in SMALL:
                yield of(widened, block, kernel, after)
        for pair in PAIRS:
            yield of(separable, pair, kernel, "hard_swish")


def signal(g: rlx.Graph) -> None:
    """Convolutions of one axis, as over sound."""
    x = g.input("x", (1, 1, 4096))
    x = rlx.relu(rlx.conv(x, g.param("w0", (64, 1, 16)), g.param("b0", (64,)), strides=(4,)))
    x = rlx.relu(rlx.conv(x, g.param("w1", (64, 64, 3)), g.param("b1", (64,)), pads=(1, 1)))
    g.output(rlx.conv(x, g.param("w2", (2, 64, 1)), g.param("b2", (2,))))


def bytes_of(g: rlx.Graph, kernel: int, stride: int, groups: int, after: str) -> None:
    """A convolution of bytes between two others, as quantised nets have them."""
    groups = 64 if groups > 1 else 1

    def quantised(x: Value) -> Value:
        made: Value = rlx.ops.quantize(x, g.constant(np.float32(0.02)), g.constant(np.uint8(3)), to=DTYPES["u8"])
        return made

    def bare(x: Value, scale: float, zero: Any) -> Value:
        return rlx.dequantize(x, g.constant(np.float32(scale)), g.constant(zero))

    def conv(x: Value, number: int, outputs: int, kernel: int, stride: int, groups: int) -> Value:
        w = g.param(f"w{number}", (outputs, x.shape[1] // groups, kernel, kernel), "i8")
        b = g.param(f"b{number}", (outputs,))
        weights = rlx.dequantize(w, g.param(f"s{number}", (outputs,)), axis=0)
        return rlx.conv(x, weights, b, pads=(kernel // 2,) * 4, strides=(stride, stride), groups=groups)

    x = bare(quantised(g.input("x", (1, 64, 56, 56))), 0.02, np.uint8(3))
    for number, (outputs, size, step, parts) in enumerate(((64, 1, 1, 1), (64, kernel, stride, groups), (96, 1, 1, 1))):
        x = bare(quantised(AFTER[after](conv(x, number, outputs, size, step, parts))), 0.02, np.uint8(3))
    g.output(x)


def of_bytes() -> Iterator[Make]:
    """Convolutions of bytes."""
    for after in ("nothing", "relu"):
        for kernel, stride, groups in ((1, 1, 1), (3, 1, 1), (3, 2, 1), (3, 1, 64), (3, 2, 64)):
            yield of(bytes_of, kernel, stride, groups, after)


def attentions() -> Iterator[Make]:
    """Attention over all keys, to earlier ones, with a mask, and of one query."""
    for queries, keys in ((128, 128), (1, 512), (rlx.Dim("s", 1, 4096),) * 2):
        for form in ("plain", "causal", "mask"):
            yield of(attention, queries, keys, form)


def attention(g: rlx.Graph, queries: Any, keys: Any, form: str) -> None:
    """Heads side by side in rows, as projections give them."""
    q, k, v = (
        rlx.transpose(rlx.reshape(g.input(name, (1, count, 768)), (1, count, 12, 64)), (0, 2, 1, 3))
        for name, count in (("q", queries), ("k", keys), ("v", keys))
    )
    scores = rlx.matmul(q, rlx.transpose(k, (0, 1, 3, 2))) * 0.125
    if form == "mask":
        scores = scores + g.input("mask", (1, 1, 1, keys))
    y = rlx.attention(q, k, v, causal=True) if form == "causal" else rlx.matmul(rlx.softmax(scores), v)
    g.output(rlx.reshape(rlx.transpose(y, (0, 2, 1, 3)), (1, queries, 768)))


def rows_of() -> Iterator[Make]:
    """Norms, softmax and means of rows."""
    for rows in (128, rlx.Dim("rows", 1, 4096)):
        for norm in (rlx.layer_norm, rlx.rms_norm):
            for residual in (False, True):
                yield of(norm_of, rows, norm, residual=residual)
        yield of(softmax, rows)
    for kernel, pads in ((2, 0), (3, 1)):
        yield of(pool, kernel, pads)


def softmax(g: rlx.Graph, rows: Any) -> None:
    """Of scores."""
    g.output(rlx.softmax(g.input("x", (1, rows, 768))))


def norm_of(g: rlx.Graph, rows: Any, norm: Any, *, residual: bool) -> None:
    """A norm, of a sum too."""
    x = g.input("x", (1, rows, 768))
    x = x + g.input("r", (1, rows, 768)) if residual else x
    weights = [g.param("s", (768,)), *([g.param("b", (768,))] if norm is rlx.layer_norm else [])]
    g.output(norm(x, *weights))


def pool(g: rlx.Graph, kernel: int, pads: int) -> None:
    """Pools behind a convolution."""
    x = rlx.relu(rlx.conv(g.input("x", (1, 3, 56, 56)), g.param("w", (64, 3, 1, 1)), g.param("b", (64,))))
    x = rlx.max_pool(x, kernel=(kernel, kernel), strides=(2, 2), pads=(pads,) * 4)
    x = rlx.conv(x, g.param("w2", (64, 64, 1, 1)), g.param("b2", (64,)))
    g.output(rlx.matmul(rlx.reshape(rlx.global_average_pool(x), (1, 64)), g.param("w3", (64, 1000))))


def cells() -> Iterator[Make]:
    """Recurrent layers."""
    for op, gates in ((rlx.lstm, 4), (rlx.gru, 3)):
        for direction, count in (("forward", 1), ("bidirectional", 2)):
            yield of(cell, op, gates, direction, count)


def cell(g: rlx.Graph, op: Any, gates: int, direction: str, count: int) -> None:
    """One layer with biases."""
    x = g.input("x", (40, 1, 64))
    w, r = g.param("w", (count, gates * 128, 64)), g.param("r", (count, gates * 128, 128))
    made = op(x, w, r, g.param("b", (count, 2 * gates * 128)), optional=("bias",), direction=direction)
    for value in made if isinstance(made, tuple) else (made,):
        g.output(value)


def graphs() -> Iterator[rlx.Graph]:
    """All graphs."""
    for family in (products, convolutions, blocks, of_bytes, attentions, rows_of, cells, sounds):
        for number, make in enumerate(family()):
            graph = rlx.Graph(f"{family.__name__}{number}")
            make(graph)
            yield graph


def texts(level: Level) -> dict[str, Item]:
    """What is compiled for a level, by key."""
    found: dict[str, Item] = {}
    backend = CpuBackend(level.target)

    def add(name: str, ir: str, optimize: bool) -> None:
        found[text_key(name, ir, optimize)] = name, ir, optimize

    for graph in graphs():
        program = stages_of(graph, backend, CompileOptions(device="cpu")).program
        assert program is not None
        for kernel in (*program.prepare, *program.run):
            for code in backend.emit_kernel(kernel) if kernel.host is None and kernel.extents is None else ():
                add(code.symbol, code.ir, code.optimize)
                for word in code.words:
                    if isinstance(word, Routine):
                        add(word.symbol, text_of(word), False)
    return found


def machine_of(level: Level) -> Target:
    """The machine of a level for LLVM, which is told of each feature that it does not have too."""
    known = host().features.split(",")
    others = {name[1:] for name in known} - level.features - {"64bit"}
    return replace(level.target, features=f"{level.target.features},{','.join(f'-{name}' for name in sorted(others))}")


def compiled(given: tuple[Level, str, Item]) -> tuple[str, bytes]:
    """The object of one function, or of the code of runs."""
    level, key, item = given
    if item[0] in (runner_ir.RUNTIME, entry_ir.NAME):
        return key, compile_object(item[1], optimize=item[2], target=machine_of(level))
    return key, compile_together([(item, symbol_of(key))], machine_of(level))


def made(level: Level, done: set[str], folder: Path, pool: ProcessPoolExecutor) -> str:
    """Writes the archive of a level, without what is in `done`, which grows; what an earlier one has is kept."""
    items = texts(level)
    for name, ir in ((runner_ir.RUNTIME, runner_ir.runtime_ir()), (entry_ir.NAME, entry_ir.entry_ir())):
        items[text_key(name, ir, True)] = name, ir, True
    items = {key: item for key, item in items.items() if key not in done}
    by = f"llvmlite {llvmlite.__version__} for {level.tuned_for}"
    before = read(folder / level.path.name)
    kept = before.places.keys() if before is not None and before.by == by else set()
    jobs = sorted((key for key in items if key not in kept), key=lambda key: -len(items[key][1]))
    objects = dict(pool.map(compiled, [(level, key, items[key]) for key in jobs]))
    if before is not None:
        objects |= {key: before.find(key) or b"" for key in items if key in kept}
    data = archive_bytes(objects, by)
    with replacing(folder / level.path.name) as file:
        file.write(data)
    done.update(items)
    return f"{level.path.stem}: {len(items)} functions, {len(jobs)} of them new, {len(data) >> 10} KiB\n"


def main() -> None:
    """Writes the archives; a level has only what no plainer one has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where they are written")
    parser.add_argument("--here", action="store_true", help="only the levels that this machine has")
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    wanted = levels_of(host().features, cpuid.vendor()) if arguments.here else LEVELS
    done: dict[str, set[str]] = {level.vendor: set() for level in wanted}
    with ProcessPoolExecutor() as pool:
        for level in reversed(wanted):
            sys.stdout.write(made(level, done[level.vendor], arguments.folder, pool))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
