"""What kernels of device cuda take on a GPU: products in 16 bits beside PyTorch's, and networks kernel by kernel.

`python benchmarks/cuda.py products` times each product with the tile that rlx chooses, with `--tiles` with all of them;
`python benchmarks/cuda.py nets FOLDER NAME...` times networks that benchmarks/nets.py has written to FOLDER.
Times are of graphs of the driver that hold the same launch many times, medians; weights and inputs are random.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import rlx
from rlx.backends.cuda.device.compiler import compiler
from rlx.backends.cuda.device.driver import driver
from rlx.backends.cuda.device.memory import SPACE
from rlx.backends.cuda.executable import CudaExecutable
from rlx.backends.cuda.text import wgmma
from rlx.compiler import stages_of

SHAPES = (  # rows, columns, depth
    (128, 384, 384), (128, 1536, 384), (128, 384, 1536), (128, 768, 768), (128, 3072, 768), (128, 768, 3072),
    (1024, 1536, 384), (4096, 768, 768), (4096, 3072, 768), (512, 16384, 2048), (2048, 2048, 2048),
    (4096, 4096, 4096), (8192, 8192, 8192),
)  # fmt: skip
WRONG = 0.01  # of the largest element
ROWS = ((1, 4096, 4096), (1, 16384, 2048))


def seconds(launch: Callable[[], None], times: int, rounds: int = 7) -> float:
    """The median time of a launch, among graphs of so many."""
    device = driver()
    with SPACE.session():
        launch()
        device.synchronize()
        device.begin_capture()
        for _ in range(times):
            launch()
        graph = device.end_capture()
        found = []
        for _ in range(rounds):
            device.launch_graph(graph)
            device.synchronize()
            start = time.perf_counter()
            device.launch_graph(graph)
            device.launch_graph(graph)
            device.synchronize()
            found.append((time.perf_counter() - start) / (2 * times))
        device.drop(graph=graph)
    return median(found)


def phases(model: rlx.CompiledGraph) -> list[tuple[str, float]]:
    """The kernels of a compiled graph that has run, and seconds of each."""
    executable = model._executable
    assert isinstance(executable, CudaExecutable)
    assert executable.last is not None
    binding = executable.last.binding
    made = []
    for number, phase in enumerate(binding.table.phases):
        spent = seconds(partial(executable.launch, binding, number, phase), 20)
        assert phase.code is not None
        blocks = phase.code.chunks(binding.at_round())
        made.append((f"{phase.kernel.kind} {phase.kernel.name} [{blocks} blocks]", spent))
    return made


def product(m: int, n: int, k: int, turned: bool) -> rlx.Graph:
    g = rlx.Graph("product")
    a = g.input("a", (m, k), "bf16")
    b = g.input("b", (n, k) if turned else (k, n), "bf16")
    g.output(a @ (b.T if turned else b), "c")
    return g


def peer(m: int, n: int, k: int, turned: bool) -> float:
    """Seconds of torch.matmul, in a graph as well."""
    import torch

    a = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    b = (
        torch.randn(n, k, dtype=torch.bfloat16, device="cuda").T
        if turned
        else torch.randn(k, n, dtype=torch.bfloat16, device="cuda")
    )
    c = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    times = 3 if m * n * k > 1 << 34 else 20
    for _ in range(3):
        torch.matmul(a, b, out=c)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            torch.matmul(a, b, out=c)
    found = []
    for _ in range(7):
        graph.replay()
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / (2 * times))
    return median(found)


def own(m: int, n: int, k: int, turned: bool) -> tuple[float, float]:
    """Seconds of rlx's kernel, and its largest error against PyTorch's f32, as a part of the largest element."""
    import torch

    model = rlx.compile(product(m, n, k, turned), device="cuda")
    a = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(*((n, k) if turned else (k, n)), dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    (c,) = model.run([a, b])
    wide = a.float() @ (b.T if turned else b).float()
    made = torch.from_dlpack(c).float()
    wrong = float((made - wide).abs().max() / wide.abs().max())
    executable = model._executable
    assert isinstance(executable, CudaExecutable)
    assert executable.last is not None
    binding = executable.last.binding
    (phase,) = binding.table.phases
    times = 3 if m * n * k > 1 << 34 else 20
    return seconds(lambda: executable.launch(binding, 0, phase), times), wrong


def warm(cases: Sequence[tuple[tuple[int, int, int], bool, Any]]) -> None:
    """Compiles kernels side by side, which the cache on disk then has."""
    from rlx.backends.cuda.backend import CudaBackend
    from rlx.backends.cuda.text.form import Target
    from rlx.backends.cuda.text.kernels import kernel_texts, module_texts
    from rlx.options import CompileOptions

    device, texts = driver(), []
    for shape, turned, tile in cases:
        held = wgmma.TILES
        wgmma.TILES = held if tile is None else (tile,)
        program = stages_of(product(*shape, turned), CudaBackend(), CompileOptions()).program
        assert program is not None
        target = Target("f32", device.capability, device.processors)
        texts += module_texts([t.function for kernel in program.run for t in kernel_texts(kernel, target)])
        wgmma.TILES = held
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda text: compiler().image(text, device.arch), texts))


def products(every: bool) -> None:
    """The table of products."""
    tiles = wgmma.TILES
    cases = [(shape, False) for shape in (*SHAPES, *ROWS)] + [(shape, True) for shape in (*SHAPES[4:6], SHAPES[8])]
    wide = [(*case, tile) for case in cases for tile in (None, *(tiles if every else ()))]
    warm(wide)
    ratios = []
    for shape, turned in cases:
        theirs = peer(*shape, turned)
        mine, wrong = own(*shape, turned)
        rate = 2 * np.prod(shape, dtype=np.float64) / mine / 1e12
        form = "x".join(map(str, shape)) + (" B^T" if turned else "")
        ratios.append(theirs / mine)
        times = f"torch {theirs * 1e6:8.2f} us  rlx {mine * 1e6:8.2f} us  {theirs / mine:5.2f}"
        print(f"{form:24} {times}  {rate:6.1f} TFLOP/s  error {wrong:.1e}", flush=True)
        if every and shape[0] > 1:
            found = []
            for tile in tiles:
                wgmma.TILES = (tile,)
                spent, wrong = own(*shape, turned)
                split = f"/{tile.split}" if tile.split > 1 else " turns" if tile.turns else ""
                bad = "" if wrong < WRONG else " WRONG"
                found.append((spent, f"{tile.rows}x{tile.columns}{split} {spent * 1e6:.2f}{bad}"))
            wgmma.TILES = tiles
            print("    ", "  ".join(text for _, text in sorted(found)), flush=True)
    print(f"geometric mean of torch / rlx: {np.exp(np.mean(np.log(ratios))):.3f}")


def nets(folder: Path, names: Sequence[str], detail: bool) -> None:
    """Networks in f32 and bf16: a run with its outputs on the host, the graph alone, and the kernels."""
    for name in names:
        held = np.load(folder / f"{name}.npz")
        outputs = [held[key] for key in held.files if key.startswith("out_")]
        for precision in ("f32", "bf16"):
            start = time.perf_counter()
            model = rlx.load(str(folder / f"{name}.onnx"), device="cuda", precision=precision)
            inputs = [held[spec.name] for spec in model.inputs]
            got = [np.asarray(a) for a in model.run(inputs)]
            first = time.perf_counter() - start
            wrong = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(got, outputs, strict=True))
            for _ in range(5):
                [np.asarray(a) for a in model.run(inputs)]
            whole = []
            for _ in range(50):
                start = time.perf_counter()
                [np.asarray(a) for a in model.run(inputs)]
                whole.append(time.perf_counter() - start)
            executable = model._executable
            assert isinstance(executable, CudaExecutable)
            assert executable.last is not None
            launches = executable.launches(executable.last.binding)
            alone = seconds(launches, 1, 30)
            times = f"{median(whole) * 1e3:.3f} ms, graph alone {alone * 1e3:.3f}"
            print(f"{name} {precision}: {times}, first {first:.1f} s, error {wrong:.1e}", flush=True)
            if detail:
                print_kernels(phases(model))


def print_kernels(spent: Sequence[tuple[str, float]]) -> None:
    """Kernels of the same name together, the longest first."""
    groups: dict[str, list[float]] = defaultdict(list)
    for kind, each in spent:
        groups[kind].append(each)
    print(f"    {len(spent)} kernels, {sum(t for _, t in spent) * 1e3:.3f} ms by themselves")
    for kind, times in sorted(groups.items(), key=lambda pair: -sum(pair[1]))[:14]:
        whole = sum(times) * 1e6
        print(f"    {len(times):3} x {whole / len(times):6.2f} us = {whole:7.1f}  {kind[:100]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["products", "nets"])
    parser.add_argument("names", nargs="*", help="a folder, and networks in it")
    parser.add_argument("--tiles", action="store_true", help="time every tile")
    parser.add_argument("--kernels", action="store_true", help="time every kernel of networks")
    args = parser.parse_intermixed_args()
    if args.what == "products":
        products(args.tiles)
    else:
        nets(Path(args.names[0]), args.names[1:], args.kernels)
