"""Forward and backward of an MLP and a small transformer against torch (eager) and jax, in f32.

python benchmarks/gradients.py --threads 1 2 --rounds 5

Each library runs in a process of its own, with that many threads and processors, and they take turns: one process a
round measures some runs and ends. All compute the loss and the gradients of all weights, and their losses must agree.
Printed are medians over rounds of each process's median time, and how many times as long the others take.
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
from typing import Any

import numpy as np

LIBRARIES = ("rlx", "torch", "jax")
HEADS, LAYERS, WIDTH, LENGTH, BATCH = 6, 6, 384, 128, 8
Step = Callable[[], tuple[float, Any]]


def weights(net: str) -> tuple[list[Any], list[Any]]:
    """The weights of a net and its inputs, the same in each process."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return (rng.standard_normal(shape) * 0.05).astype(np.float32)

    if net == "mlp":
        return [normal(784, 1024), normal(1024, 1024), normal(1024, 16)], [normal(128, 784), normal(128, 16)]
    layer = ((WIDTH,), (WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH,), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    made = [normal(*shape) + (len(shape) == 1) for _ in range(LAYERS) for shape in layer]
    return [w.astype(np.float32) for w in made], [normal(BATCH, LENGTH, WIDTH), normal(BATCH, LENGTH, WIDTH)]


def loss(lib: Any, net: str, ws: Any, x: Any, y: Any) -> Any:
    """The mean square of what a net misses, in the functions of a library (see `rlx_step` and others)."""
    if net == "mlp":
        h = x
        for w in ws[:-1]:
            h = lib.relu(h @ w)
        return lib.mean((h @ ws[-1] - y) ** 2)
    h, each = x, len(ws) // LAYERS
    for n in range(LAYERS):
        first, into, out, second, up, down = ws[n * each : (n + 1) * each]
        q, k, v = (lib.heads((lib.norm(h, first) @ into)[..., i * WIDTH : (i + 1) * WIDTH]) for i in range(3))
        h = h + lib.joined(lib.attention(q, k, v)) @ out
        h = h + lib.gelu(lib.norm(h, second) @ up) @ down
    return lib.mean((h - y) ** 2)


def rlx_step(net: str, threads: int) -> Step:
    import rlx
    from rlx import ops

    class Lib:
        relu, attention = ops.relu, ops.attention
        mean = staticmethod(np.mean)
        gelu = staticmethod(lambda x: ops.gelu(x, approximate="tanh"))
        norm = staticmethod(lambda x, w: ops.rms_norm(x, w, epsilon=1e-6))
        heads = staticmethod(lambda x: ops.transpose(x.reshape((BATCH, LENGTH, HEADS, -1)), perm=(0, 2, 1, 3)))
        joined = staticmethod(lambda x: ops.transpose(x, perm=(0, 2, 1, 3)).reshape((BATCH, LENGTH, WIDTH)))

    ws, (x, y) = weights(net)
    step = rlx.jit(rlx.value_and_grad(lambda ws, x, y: loss(Lib, net, ws, x, y)), device="cpu", threads=threads)

    def run() -> tuple[float, Any]:
        value, slopes = step(ws, x, y)
        return float(value), slopes

    return run


def torch_step(net: str, threads: int) -> Step:
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

    given, inputs = weights(net)
    ws = [torch.from_numpy(w).requires_grad_() for w in given]
    x, y = map(torch.from_numpy, inputs)

    def run() -> tuple[float, Any]:
        value = loss(Lib, net, ws, x, y)
        slopes = torch.autograd.grad(value, ws)
        return float(value), slopes

    return run


def jax_step(net: str, threads: int) -> Step:
    import jax
    import jax.numpy as jnp

    class Lib:
        relu, mean = staticmethod(jax.nn.relu), staticmethod(jnp.mean)
        gelu = staticmethod(lambda x: jax.nn.gelu(x, approximate=True))
        norm = staticmethod(lambda x, w: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w)
        heads = staticmethod(lambda x: x.reshape(BATCH, LENGTH, HEADS, -1).transpose(0, 2, 1, 3))
        joined = staticmethod(lambda x: x.transpose(0, 2, 1, 3).reshape(BATCH, LENGTH, WIDTH))

        @staticmethod
        def attention(q: Any, k: Any, v: Any) -> Any:
            scores = q @ k.swapaxes(2, 3) / np.float32(q.shape[-1] ** 0.5)
            return jax.nn.softmax(scores, -1) @ v

    given, inputs = weights(net)
    ws, (x, y) = [jnp.asarray(w) for w in given], [jnp.asarray(v) for v in inputs]
    step = jax.jit(jax.value_and_grad(lambda ws, x, y: loss(Lib, net, ws, x, y)))

    def run() -> tuple[float, Any]:
        value, slopes = jax.block_until_ready(step(ws, x, y))
        return float(value), slopes

    return run


STEPS = {"rlx": rlx_step, "torch": torch_step, "jax": jax_step}


def measure(library: str, net: str, threads: int, runs: int) -> dict[str, float]:
    """In this process: the median time of a step in ms, and the loss."""
    step = STEPS[library](net, threads)
    value, _ = step()
    step()
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return {"ms": statistics.median(times) * 1e3, "loss": value}


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
    parser.add_argument("--nets", nargs="+", choices=("mlp", "transformer"), default=["mlp", "transformer"])
    parser.add_argument("--peers", nargs="*", choices=LIBRARIES[1:], default=list(LIBRARIES[1:]))
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        library, net, threads, runs = args.one
        print(json.dumps(measure(library, net, int(threads), int(runs))))
        return
    for net in args.nets:
        for threads in args.threads:
            libraries = ("rlx", *args.peers)
            found: dict[str, list[dict[str, float]]] = {library: [] for library in libraries}
            for number in range(args.rounds):
                for library in libraries if number % 2 else reversed(libraries):
                    found[library].append(apart(library, net, threads, args.runs))
            losses = [one["loss"] for many in found.values() for one in many]
            assert max(losses) - min(losses) <= 1e-4 * abs(losses[0]), losses
            times = {library: statistics.median(one["ms"] for one in many) for library, many in found.items()}
            line = ", ".join(f"{k} {ms:.2f} ms ({ms / times['rlx']:.2f})" for k, ms in times.items())
            print(f"{net}, {threads} threads: {line}", flush=True)


if __name__ == "__main__":
    main()
