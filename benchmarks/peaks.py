"""What this machine can do at most: multiply-adds a second, of f32, pairs of bf16 and fours of bytes, and bytes read
from memory a second.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np

CHAINS = 12  # independent sums: enough to fill two units of a latency of up to six cycles
FMA_STEPS = 40_000_000
READ_BYTES = 1 << 30  # far beyond any cache


class Peaks:
    """Loops as machine code for this CPU: multiply-adds on registers, and a sum over memory.

    `products` are the loops of multiply-adds and the operations of a lane in a step: "f32", and where an instruction
    has them "bf16" and "i8".
    """

    def __init__(self) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        features = llvm.get_host_cpu_features()
        self.pairs, self.fours = (features.get(name, False) for name in ("avx512bf16", "avx512vnni"))
        self.width = 16 if features.get("avx512f") else 8 if features.get("avx") else 4
        target = llvm.Target.from_default_triple()
        machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3)
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(self.source()), machine)
        self.engine.finalize_object()
        kind = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_void_p, ctypes.c_int64)
        self.fma, self.read = (kind(self.engine.get_function_address(name)) for name in ("fma", "read"))
        self.products = {"f32": (self.fma, 2)}
        for name, loop, count in (("bf16", "pairs", 4), ("i8", "fours", 8)):
            if getattr(self, loop):
                self.products[name] = kind(self.engine.get_function_address(loop)), count

    def source(self) -> str:
        """LLVM IR of both loops."""
        return (
            self.loop("fma", self.fma_step)
            + self.loop("read", self.read_step)
            + (self.loop("pairs", pairs_step) + PAIRS if self.pairs else "")
            + (self.loop("fours", fours_step) + FOURS if self.fours else "")
            + f"""
declare {self.vector} @llvm.fma.v{self.width}f32({self.vector}, {self.vector}, {self.vector})
declare float @llvm.vector.reduce.fadd.v{self.width}f32(float, {self.vector})
"""
        )

    @property
    def vector(self) -> str:
        """The type of a register."""
        return f"<{self.width} x float>"

    def fma_step(self, i: int) -> str:
        v = self.vector
        return f"%n{i} = call {v} @llvm.fma.v{self.width}f32({v} %x, {v} %y, {v} %a{i})"

    def read_step(self, i: int) -> str:
        return f"""%o{i} = add i64 %at, {i}
  %p{i} = getelementptr {self.vector}, ptr %data, i64 %o{i}
  %v{i} = load {self.vector}, ptr %p{i}, align 64
  %n{i} = fadd {self.vector} %a{i}, %v{i}"""

    def loop(self, name: str, step: Callable[[int], str]) -> str:
        """A function that does `count` steps on every chain and returns the sum, so that nothing can be left out."""
        v = self.vector
        chains = range(CHAINS)
        phis = "\n".join(f"  %a{i} = phi {v} [ zeroinitializer, %entry ], [ %n{i}, %loop ]" for i in chains)
        steps = "\n".join(f"  {step(i)}" for i in chains)
        total = "\n".join(f"  %s{i} = fadd {v} {f'%s{i - 1}' if i else 'zeroinitializer'}, %n{i}" for i in chains)
        return f"""
define float @{name}(ptr %data, i64 %count) {{
entry:
  %x = load {v}, ptr %data, align 64
  %y = fadd {v} %x, %x
  br label %loop
loop:
  %k = phi i64 [ 0, %entry ], [ %next, %loop ]
{phis}
  %at = mul i64 %k, {CHAINS}
{steps}
  %next = add i64 %k, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %loop, label %end
end:
{total}
  %sum = call float @llvm.vector.reduce.fadd.v{self.width}f32(float 0.0, {v} %s{CHAINS - 1})
  ret float %sum
}}
"""

    def measure(self, threads: int, rounds: int = 8) -> dict[str, float]:
        """GFLOP/s and GB/s, the best of some rounds, over so many threads at once."""
        memory = np.ones(READ_BYTES // 4 + 64, np.float32)
        start = memory.ctypes.data + (-memory.ctypes.data) % 64
        steps = READ_BYTES // threads // (CHAINS * self.width * 4)
        part = steps * CHAINS * self.width * 4
        flops = best(self.fma, [(start, FMA_STEPS)] * threads, rounds)
        read = best(self.read, [(start + i * part, steps) for i in range(threads)], rounds)
        return {
            "gflops": threads * FMA_STEPS * CHAINS * self.width * 2 / flops / 1e9,
            "read_gbs": threads * part / read / 1e9,
        }


PAIRS = "declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)"
FOURS = "declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <16 x i32>, <16 x i32>)"


def pairs_step(i: int) -> str:
    v, pairs = "<16 x float>", "<32 x bfloat>"
    return f"""%x{i} = bitcast {v} %x to {pairs}
  %n{i} = call {v} @llvm.x86.avx512bf16.dpbf16ps.512({v} %a{i}, {pairs} %x{i}, {pairs} %x{i})"""


def fours_step(i: int) -> str:
    v = "<16 x i32>"
    return f"""%x{i} = bitcast <16 x float> %x to {v}
  %i{i} = bitcast <16 x float> %a{i} to {v}
  %d{i} = call {v} @llvm.x86.avx512.vpdpbusd.512({v} %i{i}, {v} %x{i}, {v} %x{i})
  %n{i} = bitcast {v} %d{i} to <16 x float>"""


def best(loop: Any, calls: list[tuple[int, int]], rounds: int) -> float:
    """Seconds of the fastest round: all calls side by side, which are long against the time between their starts."""
    times = []
    for _ in range(rounds):
        gate = threading.Barrier(len(calls) + 1)

        def work(call: tuple[int, int], gate: threading.Barrier = gate) -> None:
            gate.wait()
            loop(*call)  # ctypes gives up the interpreter's lock

        workers = [threading.Thread(target=work, args=(call,)) for call in calls]
        for worker in workers:
            worker.start()
        gate.wait()
        begin = time.perf_counter()
        for worker in workers:
            worker.join()
        times.append(time.perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("threads", type=int, nargs="?", default=os.cpu_count() or 1)
    print(json.dumps(Peaks().measure(parser.parse_args().threads)))
