"""Cases that were once far slower than the peer, measured again side by side on one thread.

python benchmarks/named.py [--only WORD]

Each line: our time and the peer's, medians of slots in turn; the ratio, the peer's time over ours, above 1 where we
are faster; `below` where it is less than the goal. The peer is onnxruntime, or what the line names. Exit status 1 if
any line is below its goal.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from cliff_cases import Pick
from cliff_cases.base import DTYPES, MICROSOFT, Array, Fixed, Net, ints, net, scalar
from cliff_cases.control import loop
from cliffs import onnxruntime_run
from peers import calls

import rlx
from rlx.demo import DIGITS

ROUNDS, SLOT, FAST, EQUAL = 15, 0.01, 0.8, 1.0
RNG = np.random.default_rng(0)


@dataclass
class Row:
    """A line of the table."""

    name: str
    ours: float
    theirs: float
    ratio: float
    goal: float
    peer: str = "onnxruntime"

    def __str__(self) -> str:
        below = "" if self.ratio >= self.goal else f"  below {self.goal:g}"
        times = f"{1e3 * self.ours:9.4f} ms, {self.peer} {1e3 * self.theirs:9.4f}"
        return f"{self.name:44s} {times}  {self.ratio:5.2f}{below}"


@dataclass
class Kind:
    """Nets by name, and what their ratio should be."""

    goal: float
    nets: dict[str, Callable[[], Net]] = field(default_factory=dict)


def some(*shape: int, dtype: str = "f32", low: float = -1, high: float = 1) -> Array:
    """Uniform values."""
    return RNG.uniform(low, high, shape).astype(np.float32).astype(DTYPES[dtype])


def conv(channels: int, outputs: int, size: tuple[int, ...], window: int | tuple[int, ...], **how: Any) -> Net:
    """A convolution that keeps the size of its image, but for its stride."""
    window = (window,) * len(size) if isinstance(window, int) else window
    group, dtype, stride = how.get("group", 1), how.get("dtype", "f32"), how.get("stride", 1)
    strides = [stride] * len(size) if isinstance(stride, int) else list(stride)
    weights = Fixed(some(outputs, channels // group, *window, dtype=dtype))
    pads = [(k - 1) // 2 for k in window] * 2
    held = (weights, Fixed(some(outputs, dtype=dtype)))
    return net("Conv", some(1, channels, *size, dtype=dtype), *held, group=group, strides=strides, pads=pads)


def lstm(hidden: int, batch: int, direction: str) -> Net:
    """onnxruntime's DynamicQuantizeLSTM over 32 steps of 64 numbers."""
    ways = 1 + (direction == "bidirectional")
    held = [Fixed(RNG.integers(-100, 100, (ways, n, 4 * hidden)).astype(np.int8)) for n in (64, hidden)]
    scales = [Fixed(some(ways, low=0.001, high=0.002)), Fixed(np.zeros(ways, np.int8))]
    x = some(32, batch, 64, low=-2, high=2)
    at: dict[str, Any] = {"hidden_size": hidden, "direction": direction, "outputs": 2, "domain": MICROSOFT}
    return net("DynamicQuantizeLSTM", x, *held, *[None] * 5, *scales, *scales, **at)


def product(left: tuple[int, ...], right: tuple[int, ...]) -> Net:
    """A product of two operands of the run."""
    return net("MatMul", some(*left), some(*right))


def characters() -> Net:
    """A Loop over the characters of a text."""
    values: dict[str, Any] = {"size": 256, "row": 64, "kind": "characters"}
    return loop(Pick("Loop", values, 0))


def kinds() -> list[Kind]:
    """All nets that are compared with onnxruntime."""
    slow, even = Kind(FAST), Kind(EQUAL)
    image, text = some(1, 64, 56, 56), RNG.integers(0, 100, 1 << 16)
    grid = some(1, 64, 64, 2)
    slow.nets = {
        "depthwise 15x15": lambda: conv(32, 32, (56, 56), 15, group=32),
        "MaxPool 13x13": lambda: net("MaxPool", image, kernel_shape=[13, 13], pads=[6] * 4),
        "AveragePool 13x13": lambda: net("AveragePool", image, kernel_shape=[13, 13], pads=[6] * 4),
        "CumSum of the last axis": lambda: net("CumSum", some(256, 4096), Fixed(np.array(1))),
        "CumSum of the first axis": lambda: net("CumSum", some(4096, 256), Fixed(np.array(0))),
        "Tile 8 x 1 MB": lambda: net("Tile", some(1, 256, 1000), ints(8, 1, 1)),
        "Unique of 65,536 integers": lambda: net("Unique", text, outputs=4),
        "Unique of 65,536 floats": lambda: net("Unique", some(1 << 16), outputs=4),
        "GridSample": lambda: net("GridSample", some(1, 32, 64, 64), grid),
        "TopK of equal values": lambda: net("TopK", np.ones((64, 4096), np.float32), ints(16), outputs=2),
        "Loop over characters": characters,
    }
    for n in (512, 1024, 2048, 4096):
        slow.nets[f"matrix {n}² x vector"] = partial(product, (n, n), (n, 1))
        slow.nets[f"vector x matrix {n}²"] = partial(product, (1, n), (n, n))
    slow.nets["64 x (matrix 512² x vector)"] = partial(product, (64, 512, 512), (64, 512, 1))
    for c, size, group in ((64, 56, 4), (128, 28, 4), (128, 28, 32), (256, 14, 8), (256, 14, 32), (512, 7, 32)):
        for window, stride in ((1, 1), (3, 1), (3, 2)):
            name = f"grouped {window}x{window}, {c} x {size}², {group} groups, stride {stride}"
            even.nets[name] = partial(conv, c, c, (size, size), window, group=group, stride=stride)
    for c, o, sizes, windows in (
        (1, 16, (32, 32, 32), (3, 3, 3)), (16, 16, (16, 16, 16), (3, 3, 3)), (3, 16, (16, 16, 16), (3, 3, 3)),
        (32, 32, (8, 28, 28), (3, 3, 3)), (64, 64, (8, 8, 8), (3, 3, 3)), (64, 64, (8, 8, 8), (1, 1, 1)),
        (64, 64, (4, 14, 14), (3, 1, 1)), (3, 32, (16, 56, 56), (3, 7, 7)),
    ):  # fmt: skip
        name = f"3-D {c} > {o}, {'x'.join(map(str, sizes))}, {'x'.join(map(str, windows))}"
        even.nets[name] = partial(conv, c, o, sizes, windows)
    narrow: list[tuple[int, int, tuple[int, ...], int, dict[str, int]]] = [
        (16, 16, (64, 64), 3, {}), (64, 64, (56, 56), 3, {}), (64, 64, (56, 56), 1, {}),
        (128, 128, (28, 28), 3, {"group": 4}), (64, 64, (56, 56), 3, {"group": 64}),
        (3, 64, (112, 112), 7, {"stride": 2}), (64, 64, (512,), 3, {}), (16, 16, (16, 16, 16), 3, {}),
    ]  # fmt: skip
    for dtype in ("f16", "bf16"):
        for c, o, shape, window, at in narrow:
            name = f"{dtype} {window} wide, {c} > {o}, {'x'.join(map(str, shape))} {at or ''}"
            even.nets[name] = partial(conv, c, o, shape, window, dtype=dtype, **at)
    for hidden, batch in ((8, 1), (64, 1), (256, 1), (512, 1), (64, 4), (256, 4), (64, 32), (256, 32)):
        for direction in ("forward", "bidirectional"):
            name = f"DynamicQuantizeLSTM {hidden}, batch {batch}, {direction}"
            even.nets[name] = partial(lstm, hidden, batch, direction)
    return [slow, even]


def compared(name: str, ours: Callable[[], Any], theirs: Callable[[], Any], goal: float, peer: str) -> Row:
    """The row of two calls that take turns."""
    for run in (ours, theirs):
        run()
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for times, run in zip(taken, (ours, theirs), strict=True):
            times.append(statistics.median(calls(run, SLOT, 1)))
    ratio = statistics.median(b / a for a, b in zip(*taken, strict=True))
    return Row(name, statistics.median(taken[0]), statistics.median(taken[1]), ratio, goal, peer)


def against_onnxruntime(only: str) -> Iterator[Row]:
    """The nets."""
    for kind in kinds():
        for name, make in kind.nets.items():
            if only not in name:
                continue
            made = make()
            file = made.model(21)
            try:
                peer = onnxruntime_run(file, made.inputs)
                peer()
            except Exception:  # noqa: BLE001 - it says in many ways that it has no kernel: of bf16, of f16 in 3-D
                continue
            model, inputs = rlx.load(file, device="cpu", threads=1), list(made.inputs.values())
            yield compared(name, partial(model.run, inputs), peer, kind.goal, "onnxruntime")


def transforms(only: str) -> Iterator[Row]:
    """np.fft in jit beside pocketfft, which NumPy calls."""
    if only not in "np.fft":
        return
    fft, rfft = (rlx.jit(function, device="cpu", threads=1) for function in (np.fft.fft, np.fft.rfft))
    for n in (8, 64, 1000, 4099, 65536, 1 << 20):
        for name, ours, theirs, x in (
            ("fft c64", fft, np.fft.fft, some(n).astype(np.complex64)),
            ("fft c128", fft, np.fft.fft, some(n).astype(np.complex128)),
            ("rfft f32", rfft, np.fft.rfft, some(n)),
        ):
            yield compared(f"np.fft, {name} of {n}", partial(ours, x), partial(theirs, x), 1 / 1.5, "numpy")


def ways_to_run(only: str) -> Iterator[Row]:
    """Results in given memory and by name, beside `run`."""
    model = rlx.load(DIGITS, device="cpu", dims={"batch": 4}, threads=1)
    x = some(4, 1, 8, 8)
    out = [np.empty_like(y) for y in model.run([x])]
    run = partial(model.run, [x])
    for name, how in (("run(out=)", {"out": out}), ("run(outputs=)", {"outputs": [model.outputs[0].name]})):
        if only in name:
            yield compared(name, partial(run, **how), run, 1 / 1.2, "run")


def reloaded(folder: Path) -> float:
    """Seconds to load a model again after `close()`."""
    load = partial(rlx.load, DIGITS, device="cpu", dims={"batch": 4}, threads=1, cache_dir=folder)
    model = load()
    taken = []
    for _ in range(ROUNDS):
        model.close()
        begin = time.perf_counter()
        model = load()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def compiled(make: Callable[[int], Net], n: int, folder: Path) -> float:
    """Seconds to compile a net that no cache has."""
    file = make(n).model(21)
    begin = time.perf_counter()
    rlx.load(file, device="cpu", threads=1, cache_dir=folder / str(time.time_ns()))
    return time.perf_counter() - begin


def of_one_call(folder: Path) -> Iterator[tuple[str, Callable[[], float], float]]:
    """What is done once: its name, what gives its seconds, and the most that they should be."""
    yield "reload after close()", partial(reloaded, folder), 0.005
    for n, most in ((600, 0.6), (2000, 2.0)):
        yield f"compile of a Concat of {n}", partial(compiled, concat, n, folder), most
        yield f"compile of a Split in {n}", partial(compiled, split, n, folder), most
    yield "verify of an encoder of T5-base's size", partial(verified, folder), 60


def concat(n: int) -> Net:
    """Many operands, one after the other."""
    return net("Concat", *(some(2, 3) for _ in range(n)), axis=0)


def split(n: int) -> Net:
    """A row for each output."""
    return net("Split", some(n, 3), outputs=n, axis=0, num_outputs=n)


def encoder(layers: int, width: int, heads: int, wide: int, length: int) -> Net:
    """T5's encoder with random weights: RMS norms, a bias of relative places, attention, ReLU between two products."""
    made = Net()
    text = RNG.integers(0, 32128, (1, length))
    (x,) = made.add("Gather", Fixed(some(32128, width)), text)
    bias = Fixed(some(1, heads, length, length))
    scale = np.float32(width**-0.5)

    def dense(v: str, rows: int, columns: int) -> str:
        return made.add("MatMul", v, Fixed(scale * some(rows, columns)))[0]

    def normed(v: str) -> str:
        (mean,) = made.add("ReduceMean", made.add("Mul", v, v)[0], ints(-1))
        (root,) = made.add("Sqrt", made.add("Add", mean, scalar(1e-6))[0])
        return made.add("Mul", made.add("Div", v, root)[0], Fixed(some(width)))[0]

    def split(v: str, order: list[int]) -> str:
        return made.add("Transpose", made.add("Reshape", v, ints(1, length, heads, width // heads))[0], perm=order)[0]

    for _ in range(layers):
        y = normed(x)
        q, k, v = (split(dense(y, width, width), order) for order in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]))
        (scores,) = made.add("Softmax", made.add("Add", made.add("MatMul", q, k)[0], bias)[0], axis=-1)
        (y,) = made.add("Transpose", made.add("MatMul", scores, v)[0], perm=[0, 2, 1, 3])
        y = dense(made.add("Reshape", y, ints(1, length, width))[0], width, width)
        (x,) = made.add("Add", x, y)
        y = dense(made.add("Relu", dense(normed(x), width, wide))[0], wide, width)
        (x,) = made.add("Add", x, y)
    normed(x)
    return made


def verified(folder: Path) -> float:
    """Seconds that `rlx verify` takes for it."""
    made = encoder(12, 768, 12, 3072, 128)
    (folder / "t5.onnx").write_bytes(made.model(21))
    np.savez(folder / "inputs.npz", **made.inputs)  # type: ignore[arg-type]
    command = [sys.executable, "-m", "rlx", "verify", "t5.onnx", "--input", "inputs.npz", "--device", "cpu"]
    begin = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> int:
    """All of them, or those whose name has a word."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word that the names have")
    only = parser.parse_args().only
    below = 0
    for rows in (against_onnxruntime(only), transforms(only), ways_to_run(only)):
        for row in rows:
            print(row, flush=True)
            below += row.ratio < row.goal
    with tempfile.TemporaryDirectory() as folder:
        for name, seconds_of, most in of_one_call(Path(folder)):
            if only in name:
                seconds = seconds_of()
                print(f"{name:44s} {seconds:9.4f} s{'' if seconds <= most else f'  above {most:g}'}", flush=True)
                below += seconds > most
    return int(below > 0)


if __name__ == "__main__":
    sys.exit(main())
