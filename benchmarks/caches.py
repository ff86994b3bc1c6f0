"""One step of attention over a full cache, by what that is stored in: microseconds, and the share of read bandwidth.

Types take turns in one process, so that they see the same machine; bandwidth is that of a sum over 192 MiB in between.

    python benchmarks/caches.py --types f32 f16 q8_0 --threads 1 2 --keys 512 8192 --depths 128
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import rlx
from rlx.ir.value import TensorType, stored_as

HEADS, OWN = 32, 8


def median(seconds: list[float]) -> float:
    return float(np.median(seconds))


def step(kind: str, keys: int, depth: int, threads: int) -> tuple[Callable[[], Any], int]:
    """A step that writes one row of keys and values and attends over all; the bytes of the cache."""
    dtype, encoding = stored_as(kind)
    g = rlx.Graph("step")
    q, row = g.input("q", (1, HEADS, 1, depth)), g.input("row", (1, OWN, 1, depth))
    count = g.input("count", (), "i64")
    new = rlx.cast(row, to=dtype) if encoding is None else rlx.encode(row, encoding=encoding.name)
    caches = []
    for name in ("k", "v"):
        state = g.state(name, (1, OWN, keys, depth), dtype, encoding=encoding)
        caches.append(rlx.dynamic_update_slice(state, new, count - 1, axis=2))
        g.update(state, caches[-1])
    g.output(rlx.attention(q, *caches, count, counted=True), "y")
    model = rlx.compile(g, device="cpu", threads=threads)
    rng = np.random.default_rng(0)
    for name in ("k", "v"):
        held = rng.standard_normal((1, OWN, keys, depth)).astype(np.float32)
        model.states[name].write(held.astype(dtype.numpy))
    given = {n: rng.standard_normal((1, h, 1, depth)).astype(np.float32) for n, h in (("q", HEADS), ("row", OWN))}
    given["count"] = np.array(keys)
    return lambda: model.run(given), 2 * (TensorType((OWN, keys, depth), dtype, encoding).nbytes() or 0)


def reading(threads: int) -> tuple[Callable[[], Any], int]:
    """A sum over a state that no cache holds; its bytes."""
    g = rlx.Graph("read")
    held = g.state("held", (64, 786432))
    g.update(held, held)
    g.output(held.sum(axes=1), "sums")
    model = rlx.compile(g, device="cpu", threads=threads)
    return lambda: model.run({}), 64 * 786432 * 4


def timed(run: Callable[[], Any]) -> float:
    run()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=["f32", "f16", "bf16", "q8_0", "q4_0"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--keys", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--depths", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--rounds", type=int, default=30)
    wanted = parser.parse_args()
    for threads in wanted.threads:
        read, size = reading(threads)
        for depth in wanted.depths:
            for keys in wanted.keys:
                steps = {kind: step(kind, keys, depth, threads) for kind in wanted.types}
                times: dict[str, list[float]] = {kind: [] for kind in steps}
                rates = []
                for turn in range(wanted.rounds):
                    for kind, (run, _) in steps.items():
                        times[kind].append(timed(run))
                    if turn % 10 == 0:
                        rates.append(size / timed(read))
                print(
                    f"{threads} threads, depth {depth}, {keys} keys; memory is read at {median(rates) / 1e9:.1f} GB/s"
                )
                first = median(times[wanted.types[0]])
                for kind, (_, nbytes) in steps.items():
                    taken = median(times[kind])
                    share = nbytes / taken / median(rates)
                    print(f"  {kind:5} {taken * 1e6:8.1f} us  {taken / first:5.2f} of {wanted.types[0]}  {share:6.1%}")


if __name__ == "__main__":
    main()
