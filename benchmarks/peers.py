"""The runtimes that are compared, one small class each, and the worker process that runs one of them.

`python benchmarks/peers.py PEER NAME FOLDER THREADS [CACHE]` loads FOLDER/NAME.onnx, answers once, and prints a line of
JSON: when that was, and the error. Then each line that it reads, a number of seconds, is answered with the times of
the calls that it made in them.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

MOST = 2000
Run = Callable[[], Sequence[Any]]


class Peer(ABC):
    """A runtime: `package` must be importable; `load` returns a call that is complete when it returns."""

    package: ClassVar[str]
    precision: ClassVar[str] = "f32"  # what it multiplies in
    extra: ClassVar[str] = "bench"  # of this project, which installs it
    answers: int | None = None  # how many of the outputs, from the first, it gives and are compared; None: all

    def __init__(self, folder: Path, threads: int, cache: str | None) -> None:
        self.folder, self.threads, self.cache = folder, threads, cache

    @classmethod
    def supports(cls, name: str, folder: Path) -> bool:
        """Whether the runtime takes part in this workload."""
        return True

    @classmethod
    def make(cls, name: str, folder: Path) -> None:
        """Makes what it needs besides the ONNX file, unless it is there."""
        return

    @abstractmethod
    def load(self, name: str, inputs: Sequence[Any]) -> Run:
        """Imports the library, loads and compiles."""


class Rlx(Peer):
    """rlx by `run_slots`: outputs are views, valid until the next run."""

    package = "rlx"

    def load(self, name: str, inputs: Sequence[Any]) -> Run:
        import rlx

        options: dict[str, Any] = {"threads": self.threads, "cache_dir": self.cache, "precision": self.precision}
        self.model = rlx.load(self.folder / f"{name}.onnx", device="cpu", **options)
        slots = self.model.run_slots
        return lambda: slots(*inputs)


class RlxBf16(Rlx):
    """rlx with operands of products rounded to bf16."""

    precision = "bf16"


class RlxRun(Rlx):
    """rlx by `run`: fresh arrays."""

    def load(self, name: str, inputs: Sequence[Any]) -> Run:
        super().load(name, inputs)
        run, given = self.model.run, list(inputs)
        return lambda: run(given)


class Ort(Peer):
    """ONNX Runtime with all its optimisations."""

    package = "onnxruntime"

    def load(self, name: str, inputs: Sequence[Any]) -> Run:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = self.threads, 1, 3
        path = str(self.folder / f"{name}.onnx")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        feed = {i.name: a for i, a in zip(session.get_inputs(), inputs, strict=True)}
        return lambda: session.run(None, feed)


class OrtFused(Ort):
    """ONNX Runtime after its offline transformer optimiser."""

    @classmethod
    def supports(cls, name: str, folder: Path) -> bool:
        return (folder / f"{name}.fused.onnx").exists()

    def load(self, name: str, inputs: Sequence[Any]) -> Run:
        return super().load(f"{name}.fused", inputs)


class OpenVino(Peer):
    """OpenVINO, latency hint."""

    package = "openvino"

    def load(self, name: str, inputs: Sequence[Any]) -> Run:
        import openvino

        model = openvino.Core().compile_model(
            str(self.folder / f"{name}.onnx"),
            "CPU",
            {
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": self.threads,
                "INFERENCE_PRECISION_HINT": self.precision,
            },
        )
        request = model.create_infer_request()
        for i, array in enumerate(inputs[: len(model.inputs)]):
            request.set_input_tensor(i, openvino.Tensor(array, shared_memory=True))

        def run() -> list[Any]:
            request.infer()
            return [request.get_output_tensor(i).data for i in range(len(model.outputs))]

        return run


class OpenVinoBf16(OpenVino):
    """OpenVINO in bf16, in which it also keeps what lies between ops."""

    precision = "bf16"


class Torch(Peer):
    """PyTorch, eager, on the module that the file was exported from."""

    package = "torch"

    @classmethod
    def supports(cls, name: str, folder: Path) -> bool:
        import workloads

        return name in workloads.NETS

    def load(self, name: str, inputs: Sequence[Any]) -> Run:
        import nets
        import torch

        torch.set_num_threads(self.threads)
        module, given = nets.build(name)
        module = self.prepare(module)

        def run() -> list[Any]:
            with torch.inference_mode():
                result = module(*given)
            return [t.numpy() for t in ((result,) if torch.is_tensor(result) else result)]

        return run

    def prepare(self, module: Any) -> Any:
        """The module as it is."""
        return module


class TorchCompile(Torch):
    """torch.compile with frozen weights."""

    def prepare(self, module: Any) -> Any:
        os.environ["TORCHINDUCTOR_FREEZING"] = "1"
        import torch
        import torch._dynamo

        torch._dynamo.config.allow_rnn = True
        return torch.compile(module)


class Jax(Peer):
    """JAX (XLA): the graph as one jitted function, through rlx's device "xla"."""

    package = "jax"

    def load(self, name: str, inputs: Sequence[Any]) -> Run:
        if self.threads == 1:
            os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
        os.environ["JAX_PLATFORMS"] = "cpu"
        import rlx

        run, given = rlx.load(self.folder / f"{name}.onnx", device="xla").run, list(inputs)
        return lambda: run(given)


class LlamaCpp(Peer):
    """llama.cpp on the decoders, as f32 GGUF files with keys and values in f32.

    It can't be given keys and values, so a step follows 511 tokens that it has read, and its answer is not compared.
    """

    package, extra = "llama_cpp", "llama"

    @classmethod
    def supports(cls, name: str, folder: Path) -> bool:
        return name.startswith(("gpt2-", "llama125-"))

    @classmethod
    def make(cls, name: str, folder: Path) -> None:
        if not (folder / f"{name}.gguf").exists():
            command = [sys.executable, str(Path(__file__).with_name("nets.py")), str(folder), name, "gguf"]
            subprocess.run(command, check=True, capture_output=True)

    def load(self, name: str, inputs: Sequence[Any]) -> Run:
        import llama_cpp as lib
        import numpy as np

        lib.llama_backend_init()
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = 1024, 512, 512
        options.n_threads = options.n_threads_batch = self.threads
        options.type_k = options.type_v = 0  # f32
        path = str(self.folder / f"{name}.gguf").encode()
        model = lib.llama_model_load_from_file(path, lib.llama_model_default_params())
        context = lib.llama_init_from_model(model, options)
        memory = lib.llama_get_memory(context)
        words = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        batch = lib.llama_batch_init(512, 0, 1)

        def read(tokens: Sequence[int], first: int) -> None:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, first + i, 1, 0
                batch.logits[i] = int(i == len(tokens) - 1)
            if lib.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")

        given = inputs[0][0].tolist()
        before = inputs[1].shape[2] if len(inputs) > 1 else 0
        self.answers = 0 if before else 1
        if before:
            read([1 + i % 1000 for i in range(before)], 0)

        def run() -> list[Any]:
            lib.llama_memory_seq_rm(memory, 0, before, -1)
            read(given, before)
            return [np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), shape=(words,)).reshape(1, 1, -1)]

        return run


PEERS: dict[str, type[Peer]] = {
    "rlx": Rlx,
    "rlx-run": RlxRun,
    "rlx-bf16": RlxBf16,
    "before": Rlx,  # of another checkout, which is on the path
    "ort": Ort,
    "ort-fused": OrtFused,
    "openvino": OpenVino,
    "openvino-bf16": OpenVinoBf16,
    "torch": Torch,
    "torch-compile": TorchCompile,
    "jax": Jax,
    "llama.cpp": LlamaCpp,
}


def cpu_seconds() -> float:
    """Processor time of this process and its children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def error_of(got: Sequence[Any], expected: Sequence[Any]) -> float:
    """Largest difference over the largest magnitude, of any output; infinite where shapes or NaNs differ."""
    import numpy as np

    worst = 0.0
    for a, b in zip(map(np.asarray, got), expected, strict=True):
        if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
            return float("inf")
        x, y = np.nan_to_num(a.astype(np.float64)), np.nan_to_num(b.astype(np.float64))
        worst = max(worst, float(np.abs(x - y).max(initial=0) / (np.abs(y).max(initial=0) or 1)))
    return worst


def calls(run: Run, seconds: float, least: int) -> list[float]:
    """Seconds of each call, at most `MOST` of them."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < least or (time.perf_counter() < end and len(taken) < MOST):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return taken


def worker(peer: str, name: str, folder: Path, threads: int, cache: str | None) -> None:
    """Loads, answers once, and then times on request."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the answers

    def say(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    import numpy as np

    data = np.load(folder / f"{name}.npz")
    inputs = [data[f"in_{i}"] for i in range(sum(key.startswith("in_") for key in data))]
    expected = [data[f"out_{i}"] for i in range(sum(key.startswith("out_") for key in data))]
    try:
        runtime = PEERS[peer](folder, threads, cache)
        run = runtime.load(name, inputs)
        got = run()[: runtime.answers]
    except Exception as error:  # noqa: BLE001 - one that fails must not hide the others
        say({"failure": f"{type(error).__name__}: {error}"[:300]})
        return
    facts = {"answered": time.time()}
    say({**facts, "error": error_of(got, expected[: runtime.answers]) if got else None})
    del got, data
    calls(run, 0.5, 1)
    for line in sys.stdin:
        start = cpu_seconds()
        run()  # brings its data back into the caches
        taken = calls(run, float(line), 3)
        say({"times": taken, "cpu": cpu_seconds() - start})


if __name__ == "__main__":
    if len(sys.argv) not in (5, 6):  # by hand: what argparse takes would be in the start and memory of each peer
        print(__doc__)
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    worker(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5] if len(sys.argv) > 5 else None)
