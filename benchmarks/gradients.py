"""Forward and backward of four nets against torch (eager and compiled) and jax, in f32: time and memory.

python benchmarks/gradients.py --threads 1 2 --rounds 5

MLP (784-1024-1024-16, b128), LSTM (128-256, 64 steps, b32), ResNet-18 with the norms of its batch (b8, 224 x 224) and a
transformer (6 x 384, b8 s128). Each library runs in a process of its own, with that many threads and processors, and
they take turns: one process a round measures some runs and ends. All compute the loss and the gradients of all weights,
and their losses must agree. Printed are the least times of a step (other programs only make them longer), how many
times as long the others take, the share of the FMA peak (of rlx: arithmetic of products over time, with `--peak`
GFLOP/s of a thread), and the peak of resident memory above that after imports and data, compiling included, in MB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NETS = ("mlp", "lstm", "resnet18", "transformer")
LIBRARIES = ("rlx", "torch", "compiled", "jax")
REFUSED = {("compiled", "lstm")}  # torch 2.13: TypeError: expected Tensor() for op mkldnn_rnn_layer
HEADS, LAYERS, WIDTH, LENGTH, BATCH = 6, 6, 384, 128, 8
STEPS_OF_LSTM, ROWS, FEATURES, HIDDEN = 64, 32, 128, 256
STAGES = (
    (64, 64, 1),
    (64, 64, 1),
    (64, 128, 2),
    (128, 128, 1),
    (128, 256, 2),
    (256, 256, 1),
    (256, 512, 2),
    (512, 512, 1),
)
Step = Callable[[], tuple[float, Any]]


def weights(net: str) -> tuple[list[Any], list[Any]]:
    """The weights of a net and its inputs, the same in each process."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 0.05) -> Any:
        return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(np.float32)

    def conv(o: int, i: int, k: int) -> list[Any]:
        return [normal(o, i, k, k, scale=(2 / (i * k * k)) ** 0.5), normal(o) + 1, normal(o)]

    if net == "mlp":
        return [normal(784, 1024), normal(1024, 1024), normal(1024, 16)], [normal(128, 784), normal(128, 16)]
    if net == "lstm":
        shapes = ((FEATURES, 4 * HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN,))
        inputs = [normal(STEPS_OF_LSTM, ROWS, FEATURES, scale=1), normal(STEPS_OF_LSTM, ROWS, HIDDEN)]
        return [normal(*shape) for shape in shapes], inputs
    if net == "resnet18":
        found = conv(64, 3, 7)
        for i, o, stride in STAGES:
            found += conv(o, i, 3) + conv(o, o, 3) + (conv(o, i, 1) if stride > 1 else [])
        return [*found, normal(512, 1000)], [normal(BATCH, 3, 224, 224, scale=1), normal(BATCH, 1000)]
    layer = ((WIDTH,), (WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH,), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    made = [normal(*shape) + (len(shape) == 1) for _ in range(LAYERS) for shape in layer]
    return [w.astype(np.float32) for w in made], [normal(BATCH, LENGTH, WIDTH), normal(BATCH, LENGTH, WIDTH)]


def loss(lib: Any, net: str, ws: Any, x: Any, y: Any) -> Any:
    """The mean square of what a net misses, in the functions of a library (see `rlx_step` and others)."""
    return lib.mean(({"mlp": mlp, "lstm": lstm, "resnet18": resnet}.get(net, transformer)(lib, ws, x) - y) ** 2)


def mlp(lib: Any, ws: Any, x: Any) -> Any:
    for w in ws[:-1]:
        x = lib.relu(x @ w)
    return x @ ws[-1]


def lstm(lib: Any, ws: Any, x: Any) -> Any:
    if hasattr(lib, "lstm"):
        return lib.lstm(x, *ws)
    into, again, bias = ws

    def step(carry: Any, row: Any) -> Any:
        h, c = carry
        gates = row + h @ again
        i, f, g, o = (gates[:, n * HIDDEN : (n + 1) * HIDDEN] for n in range(4))
        c = lib.sigmoid(f) * c + lib.sigmoid(i) * lib.tanh(g)
        h = lib.sigmoid(o) * lib.tanh(c)
        return (h, c), h

    zero = np.zeros((ROWS, HIDDEN), np.float32)
    return lib.scan(step, (zero, zero), x @ into + bias)[1]


def resnet(lib: Any, ws: Any, x: Any) -> Any:
    left = iter(ws)

    def conv(x: Any, stride: int) -> Any:
        w, gain, bias = next(left), next(left), next(left)
        return lib.batch_norm(lib.conv(x, w, stride, w.shape[-1] // 2), gain, bias)

    x = lib.pool(lib.relu(conv(x, 2)))
    for _, _, stride in STAGES:
        inner = conv(lib.relu(conv(x, stride)), 1)
        x = lib.relu(inner + (conv(x, stride) if stride > 1 else x))
    return lib.places(x) @ next(left)


def transformer(lib: Any, ws: Any, x: Any) -> Any:
    h, each = x, len(ws) // LAYERS
    for n in range(LAYERS):
        first, into, out, second, up, down = ws[n * each : (n + 1) * each]
        q, k, v = (lib.heads((lib.norm(h, first) @ into)[..., i * WIDTH : (i + 1) * WIDTH]) for i in range(3))
        h = h + lib.joined(lib.attention(q, k, v)) @ out
        h = h + lib.gelu(lib.norm(h, second) @ up) @ down
    return h


def batch_norm(x: Any, gain: Any, bias: Any, rsqrt: Any) -> Any:
    """By the mean and variance of the batch."""
    off = x - x.mean((0, 2, 3), keepdims=True)
    spread = rsqrt((off * off).mean((0, 2, 3), keepdims=True) + 1e-5)
    return off * (spread * gain.reshape((1, -1, 1, 1))) + bias.reshape((1, -1, 1, 1))


def rlx_step(net: str, threads: int, budget: str | None = None) -> Callable[[], Step]:
    import rlx
    from rlx import ops

    class Lib:
        relu, attention, scan, sigmoid, tanh = ops.relu, ops.attention, rlx.scan, ops.sigmoid, ops.tanh
        mean = staticmethod(np.mean)
        gelu = staticmethod(lambda x: ops.gelu(x, approximate="tanh"))
        norm = staticmethod(lambda x, w: ops.rms_norm(x, w, epsilon=1e-6))
        heads = staticmethod(lambda x: ops.transpose(x.reshape((BATCH, LENGTH, HEADS, -1)), perm=(0, 2, 1, 3)))
        joined = staticmethod(lambda x: ops.transpose(x, perm=(0, 2, 1, 3)).reshape((BATCH, LENGTH, WIDTH)))
        conv = staticmethod(lambda x, w, s, p: ops.conv(x, w, strides=(s, s), pads=(p,) * 4))
        pool = staticmethod(lambda x: ops.max_pool(x, kernel=(3, 3), strides=(2, 2), pads=(1,) * 4))
        places = staticmethod(lambda x: ops.reduce_mean(x, axes=(2, 3), keepdims=False))

        @staticmethod
        def batch_norm(x: Any, gain: Any, bias: Any) -> Any:
            def mean(x: Any) -> Any:
                return ops.reduce_mean(x, axes=(0, 2, 3), keepdims=True)

            off = x - mean(x)
            scale = ops.rsqrt(mean(off * off) + 1e-5) * gain.reshape((1, -1, 1, 1))
            return off * scale + bias.reshape((1, -1, 1, 1))

    def make() -> Step:
        ws, (x, y) = data
        traced = rlx.value_and_grad(lambda ws, x, y: loss(Lib, net, ws, x, y), budget=budget)
        step = rlx.jit(traced, device="cpu", threads=threads)

        def run() -> tuple[float, Any]:
            value, slopes = step(ws, x, y)
            return float(value), slopes

        run.flops = lambda: products(step.compile(ws, x, y))  # type: ignore[attr-defined]
        return run

    data = weights(net)
    return make


def products(model: Any) -> int:
    """The arithmetic of the matrix products and convolutions of a run."""
    from rlx.cost.lowered import rounds_of
    from rlx.kernels.work import kernel_work

    sizes: dict[str, int] = {}
    rounds = rounds_of(model.compilation.program, sizes)
    return sum(kernel_work(k, sizes).products * n for k, n in rounds.items() if k.mark is None and k.extents is None)


def torch_step(net: str, threads: int, compiled: bool = False) -> Callable[[], Step]:
    import torch
    from torch.nn import functional as f

    torch.set_num_threads(threads)

    class Lib:
        relu, mean = torch.relu, torch.mean
        attention = staticmethod(f.scaled_dot_product_attention)
        gelu = staticmethod(lambda x: f.gelu(x, approximate="tanh"))
        norm = staticmethod(lambda x, w: f.rms_norm(x, (WIDTH,), w, 1e-6))
        heads = staticmethod(lambda x: x.reshape(BATCH, LENGTH, HEADS, -1).transpose(1, 2))
        joined = staticmethod(lambda x: x.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        conv = staticmethod(lambda x, w, s, p: f.conv2d(x, w, stride=s, padding=p))
        pool = staticmethod(lambda x: f.max_pool2d(x, 3, 2, 1))
        places = staticmethod(lambda x: x.mean((2, 3)))
        batch_norm = staticmethod(lambda x, gain, bias: f.batch_norm(x, None, None, gain, bias, training=True))

        @staticmethod
        def lstm(x: Any, into: Any, again: Any, bias: Any) -> Any:
            zero = torch.zeros(1, ROWS, HIDDEN)
            given = [into.T, again.T, bias, torch.zeros_like(bias)]
            return torch._VF.lstm(x, (zero, zero), given, True, 1, 0.0, False, False, False)[0]

    given, inputs = weights(net)
    ws = [torch.from_numpy(w).requires_grad_() for w in given]
    x, y = map(torch.from_numpy, inputs)

    def make() -> Step:
        def value_of(*ws: Any) -> Any:
            return loss(Lib, net, ws, x, y)

        traced = torch.compile(value_of) if compiled else value_of

        def run() -> tuple[float, Any]:
            value = traced(*ws)
            slopes = torch.autograd.grad(value, ws)
            return float(value.detach()), slopes

        return run

    return make


def jax_step(net: str, threads: int) -> Callable[[], Step]:
    import jax
    import jax.numpy as jnp

    class Lib:
        relu, mean, scan = staticmethod(jax.nn.relu), staticmethod(jnp.mean), staticmethod(jax.lax.scan)
        sigmoid, tanh = staticmethod(jax.nn.sigmoid), staticmethod(jnp.tanh)
        gelu = staticmethod(lambda x: jax.nn.gelu(x, approximate=True))
        norm = staticmethod(lambda x, w: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w)
        heads = staticmethod(lambda x: x.reshape(BATCH, LENGTH, HEADS, -1).transpose(0, 2, 1, 3))
        joined = staticmethod(lambda x: x.transpose(0, 2, 1, 3).reshape(BATCH, LENGTH, WIDTH))
        conv = staticmethod(lambda x, w, s, p: jax.lax.conv_general_dilated(x, w, (s, s), [(p, p)] * 2))
        places = staticmethod(lambda x: x.mean((2, 3)))
        batch_norm = staticmethod(lambda x, gain, bias: batch_norm(x, gain, bias, jax.lax.rsqrt))

        @staticmethod
        def pool(x: Any) -> Any:
            pads = ((0, 0), (0, 0), (1, 1), (1, 1))
            return jax.lax.reduce_window(x, -np.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), pads)

        @staticmethod
        def attention(q: Any, k: Any, v: Any) -> Any:
            scores = q @ k.swapaxes(2, 3) / np.float32(q.shape[-1] ** 0.5)
            return jax.nn.softmax(scores, -1) @ v

    given, inputs = weights(net)
    ws, (x, y) = [jnp.asarray(w) for w in given], [jnp.asarray(v) for v in inputs]

    def make() -> Step:
        step = jax.jit(jax.value_and_grad(lambda ws, x, y: loss(Lib, net, ws, x, y)))

        def run() -> tuple[float, Any]:
            value, slopes = jax.block_until_ready(step(ws, x, y))
            return float(value), slopes

        return run

    return make


def compiled_step(net: str, threads: int) -> Callable[[], Step]:
    return torch_step(net, threads, compiled=True)


STEPS: dict[str, Callable[..., Callable[[], Step]]] = {
    "rlx": rlx_step,
    "torch": torch_step,
    "compiled": compiled_step,
    "jax": jax_step,
}


def resident(name: str) -> float:
    """MB of this process: "VmRSS" now, "VmHWM" at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e6


def measure(library: str, net: str, threads: int, runs: int) -> dict[str, float]:
    """In this process: the least time of a step in ms, the loss, the peak of memory in MB, and the arithmetic."""
    name, _, budget = library.partition(":")
    make = STEPS[name](net, threads, *([budget] if budget else []))
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = resident("VmRSS")
    step = make()
    value, _ = step()
    step()
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    peak = resident("VmHWM") - before
    flops = getattr(step, "flops", lambda: 0)()
    return {"ms": min(times) * 1e3, "loss": value, "mb": peak, "gflop": flops / 1e9}


def apart(library: str, net: str, threads: int, runs: int) -> dict[str, float]:
    """The same in a process that may use as many processors as it has threads."""
    processors = sorted(os.sched_getaffinity(0))[:threads]
    command = [sys.executable, __file__, "--one", library, net, str(threads), str(runs)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        ["taskset", "-c", ",".join(map(str, processors)), *command],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=10, help="timed runs of each process")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=NETS)
    parser.add_argument("--peers", nargs="*", choices=LIBRARIES[1:], default=list(LIBRARIES[1:]))
    parser.add_argument("--budgets", nargs="*", default=[], help="net=bytes: rlx within so many bytes of arena, too")
    parser.add_argument("--peak", type=float, default=0, help="GFLOP/s of fused multiply-adds of a thread")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        library, net, threads, runs = args.one
        print(json.dumps(measure(library, net, int(threads), int(runs))))
        return
    budgets: dict[str, list[str]] = {}
    for net, _, budget in (given.partition("=") for given in args.budgets):
        budgets.setdefault(net, []).append(budget)
    for net in args.nets:
        for threads in args.threads:
            peers = [peer for peer in args.peers if (peer, net) not in REFUSED]
            libraries = ("rlx", *(f"rlx:{budget}" for budget in budgets.get(net, ())), *peers)
            found: dict[str, list[dict[str, float]]] = {library: [] for library in libraries}
            for number in range(args.rounds):
                for library in libraries if number % 2 else reversed(libraries):
                    found[library].append(apart(library, net, threads, args.runs))
            losses = [one["loss"] for many in found.values() for one in many]
            assert max(losses) - min(losses) <= 1e-4 * abs(losses[0]), losses
            times = {library: min(one["ms"] for one in many) for library, many in found.items()}
            memory = {library: statistics.median(one["mb"] for one in many) for library, many in found.items()}
            line = ", ".join(f"{k} {ms:.2f} ms ({ms / times['rlx']:.2f}) {memory[k]:.0f} MB" for k, ms in times.items())
            rate = found["rlx"][0]["gflop"] / times["rlx"] * 1e3
            line += f"; {rate:.0f} GFLOP/s" + (f", {rate / args.peak / threads:.0%} of the peak" if args.peak else "")
            print(f"{net}, {threads} threads: {line}", flush=True)


if __name__ == "__main__":
    main()
