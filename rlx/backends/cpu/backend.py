"""The CPU backend: which nodes and anchors it runs, the layouts it wants, and its code for each kernel."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from weakref import WeakKeyDictionary

from rlx.backends.base import Availability, CodeGenerator, CodeSizes, Rates
from rlx.backends.codegen.arguments import scratch_bytes
from rlx.backends.codegen.channels_last import Choice, channels_last
from rlx.backends.codegen.object_cache import ObjectCache
from rlx.backends.codegen.reuse import Reuse
from rlx.backends.codegen.rounded_images import store_rounded
from rlx.backends.codegen.scalars import filled, without_scalars
from rlx.backends.cpu.build import build, compile_codes
from rlx.backends.cpu.gemm.panels import f28
from rlx.backends.cpu.gemm.panels import int8_layout as int8_panels
from rlx.backends.cpu.jit import cpuid
from rlx.backends.cpu.jit.compile import NO_LLVM, Compiling, host
from rlx.backends.cpu.jit.probe_amx import floats_by_tiles
from rlx.backends.cpu.kernels import control
from rlx.backends.cpu.kernels.alternatives import emitted
from rlx.backends.cpu.kernels.attention import decode_cache
from rlx.backends.cpu.kernels.attention import strategies as attention
from rlx.backends.cpu.kernels.conv import fused_depthwise, pairs
from rlx.backends.cpu.kernels.conv import int8 as int8_conv
from rlx.backends.cpu.kernels.conv import strategies as conv
from rlx.backends.cpu.kernels.conv.depthwise import is_depthwise
from rlx.backends.cpu.kernels.conv.int8 import has_planes
from rlx.backends.cpu.kernels.conv.pointwise import is_pointwise, may_be_product
from rlx.backends.cpu.kernels.grouped_matmul import find_layers
from rlx.backends.cpu.kernels.matmul import strategies as matmul
from rlx.backends.cpu.kernels.registry import SPECIALS
from rlx.backends.cpu.llvm.convert import LLVM
from rlx.backends.cpu.native import entry_ir, runner_ir
from rlx.backends.cpu.runtime.executable import CpuExecutable
from rlx.backends.cpu.runtime.prepare import BLOCK
from rlx.backends.cpu.runtime.result_sizes import result_bytes
from rlx.backends.cpu.schedule.arguments import THREADS, KernelCode, Routine
from rlx.backends.cpu.select import laid_out
from rlx.backends.cpu.strategy import CpuStrategy, Setting
from rlx.backends.cpu.target import Target
from rlx.backends.granted import cpu_count, run_threads
from rlx.backends.memory import DeviceMemory, host_memory
from rlx.errors import DeviceUnavailable, OptionError
from rlx.install import install_package
from rlx.ir.dtype import DType
from rlx.ir.encoding import Encoding
from rlx.ir.graph import Graph, Node
from rlx.ir.shape import Shape
from rlx.kernels.affine import Affine
from rlx.kernels.analysis import Fusing
from rlx.kernels.lowering import Anchor, Attention, Contract, Conv, lower_node
from rlx.kernels.narrow import is_narrow, unknown_dtype
from rlx.kernels.prepared import before_loops, make_once, make_once_in_run
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.ops.contract import Gemm, MatMul
from rlx.ops.control import Control
from rlx.ops.conv import Conv as ConvOp
from rlx.ops.conv import ConvTranspose
from rlx.options import DEVICE_OPTIONS, CompileOptions
from rlx.progress import report
from rlx.records import replace

__all__ = ["CpuBackend"]

SMALL = 1 << 16  # bytes that a kernel makes ahead of weights that are read where they lie, such as a folded bias


class CpuBackend(CodeGenerator):
    """This machine's processor, by LLVM."""

    name = "cpu"
    capabilities = CpuExecutable.capabilities
    precisions = frozenset({"f32", "bf16", "f16", "q8"})
    honours = frozenset(DEVICE_OPTIONS)
    fusing = Fusing()

    @property
    def threads(self) -> int:
        return cpu_count()

    @property
    def on_processor(self) -> bool:
        return True

    @property
    def rates(self) -> Rates:
        return Rates(5e10, 2e10, run=3e-6, launch=3e-7)

    def __init__(self, target: Target | None = None) -> None:
        """`target`: the machine that code is made for, this one if it is not given."""
        self._target = target
        self.made: WeakKeyDictionary[Program, dict[Kernel, list[KernelCode]]] = WeakKeyDictionary()
        self.work: WeakKeyDictionary[Program, Compiling] = WeakKeyDictionary()

    @property
    def target(self) -> Target:
        """The machine that code is made for."""
        if self._target is None:
            here = host()
            self._target = replace(here, float_tiles=here.tiles and floats_by_tiles())
        return self._target

    def available(self) -> Availability:
        if find_spec("llvmlite") is None:
            return Availability(False, NO_LLVM, install_package("llvmlite"))
        try:
            target = host()
        except (
            ImportError,
            OSError,
            RuntimeError,
            AttributeError,
        ) as error:  # a broken llvmlite: that is what is to be reported
            return Availability(False, f"LLVM can't be used: {error}", "pip install --force-reinstall llvmlite")
        features = {"VNNI": int8_panels.instructions(target).dots, "AMX": target.tiles}
        has = "".join(f", {feature}" for feature, here in features.items() if here)
        what = f"{cpuid.name() or target.cpu}, {8 * target.vector_bytes}-bit vectors{has}, {target.cores} cores"
        return Availability(True, what)

    def memory(self) -> DeviceMemory:
        return host_memory()

    def claims(self, node: Node) -> str | None:
        if isinstance(node.op, Control) or self.accepts_special(node):
            return None
        lowered = lower_node(node)
        if lowered is None:
            return None if getattr(node.op, "view", False) else "its op has no lowering"
        unknown = unknown_dtype(lowered, self.accepts_dtype)
        if unknown is not None:
            return f"the CPU has no code for {unknown}"
        if lowered.anchor is None or lowered.generic is not None:
            return None
        return self.unsuited(lowered.anchor, node)

    def rounds_ahead(self, node: Node) -> bool | None:
        in_pairs = getattr(node.op, "activations", "") == "bf16" and self.target.multiplies_bf16
        match node.op:
            case MatMul() | Gemm():
                return not in_pairs
            case ConvOp():
                w = node.inputs[1].shape
                taken = is_pointwise(node.op, w) or is_depthwise(node.op, w) or pairs.suits(node.op, w, self.target)
                return not (in_pairs and taken)
            case ConvTranspose():
                return True
        return False  # attention rounds what it reads

    def accepts_dtype(self, dtype: DType) -> bool:
        return dtype.name in LLVM

    def accepts_special(self, node: Node) -> bool:
        special = SPECIALS.get(node.op.op_name)
        narrow = any(is_narrow(v.dtype) for v in (*node.inputs, *node.outputs))
        return special is not None and not narrow and special.accepts(node)

    def encoded_operands(self, node: Node) -> Collection[int]:
        return SPECIALS[node.op.op_name].encoded

    def accepts_anchor(self, anchor: Anchor, node: Node) -> bool:
        return self.unsuited(anchor, node) is None

    def unsuited(self, anchor: Anchor, node: Node) -> str | None:
        """Why no kernel takes the anchor, None where one does."""
        dtype = node.outputs[0].dtype
        match anchor:
            case Contract():
                return matmul.unsuited(anchor, dtype, self.target)
            case Conv():
                return conv.unsuited(anchor, dtype, self.target)
            case Attention():
                return attention.unsuited(anchor, dtype)

    def accepts_operand(self, anchor: Anchor, role: str, shape: Shape, index: Affine) -> bool:
        match anchor:
            case Contract():
                return matmul.accepts_operand(index)
            case Conv():
                return conv.accepts_operand(index)
            case Attention():
                return attention.accepts_operand(index)

    def accepts_blocks(self, anchor: Anchor, role: str, encoding: Encoding) -> bool:
        return isinstance(anchor, Attention) and attention.accepts_blocks(role, encoding)

    def layout(self, program: Program, packing: str = "fast", precision: str = "f32") -> Program:
        channels_last(program, Choice(may_be_product, has_planes))
        if self.target.multiplies_bf16:
            store_rounded(program, lambda kernel: conv.reads_rounded(kernel, self.target))
        prepare: list[Kernel] = []
        run: list[Kernel] = []
        weights = sum(b.bound() or 0 for b in (*program.params, *program.constants))
        setting = Setting(
            self.target, streamed=weights >= f28.STREAMED, shared=packing == "shared", in_place=packing == "none"
        )
        copied: set[Buffer] = set()  # operands in the layout that another kernel reads
        for kernels, own in ((program.prepare, prepare), (program.run, run)):
            for kernel in kernels:
                *before, last = laid_out(kernel, setting)
                copied.update(b for k in before if k.strategy is None for b in k.writes())
                for made in (*before, last):
                    static = bool(made.writes()) and all(b.kind == "prepared" for b in made.writes())
                    (prepare if static else own).append(made)
        program.prepare, program.run = prepare, run
        make_once(program)
        before_loops(program, lambda kernel: kernel.packs)
        make_once_in_run(program, lambda k: k.packs or not copied.isdisjoint(k.writes()))
        fused_depthwise.join(program)
        if packing == "none":
            _refuse_copies(program)
        decode_cache.join(program)
        find_layers(program, self.target)
        return program

    def emit_kernel(self, kernel: Kernel) -> list[KernelCode]:
        """Native code for one kernel: one function, or one for each store of a loop nest or step of a special."""
        bare, numbers = self._parts(kernel)
        return filled(self._emit_bare(bare), numbers)

    def reuse(self) -> Reuse:
        """What emits kernels of a program, and makes the code of those that are alike once."""
        return Reuse(self._emit_bare, self._parts)

    def _emit_bare(self, kernel: Kernel) -> list[KernelCode]:
        """The same of a kernel without the numbers that are words."""
        if kernel.mark is not None:
            return control.emit_mark(kernel.mark)
        return emitted(kernel, self.target)

    def _parts(self, kernel: Kernel) -> tuple[Kernel, tuple[int, ...]]:
        """The kernel without the numbers that are words, and these."""
        way = kernel.strategy
        apart = kernel.special is None if way is None else isinstance(way, CpuStrategy) and way.scalars
        return without_scalars(kernel) if apart else (kernel, ())

    def code_sizes(self, program: Program, options: CompileOptions) -> CodeSizes:
        made = self.made.setdefault(program, {})  # `emit`, which comes next, need not make it again
        work = self.work.get(program)
        emit = self.reuse()

        def codes(kernels: Sequence[Kernel]) -> list[KernelCode]:
            own = [k for k in kernels if k.host is None and k.extents is None]
            for number, kernel in enumerate(own):
                report("code", 0.5 * number / len(own))  # the rest is LLVM's
                if kernel not in made:
                    made[kernel] = emit(kernel)
                    if work is not None:
                        compile_codes(work, made[kernel])
            return [code for kernel in own for code in made[kernel]]

        prepare, run = codes(program.prepare), codes(program.run)
        every = (*prepare, *run)
        threads = run_threads(options.threads)
        functions = {c.symbol for c in every}
        functions |= {w.symbol for c in every for w in c.words if isinstance(w, Routine)}

        scratches = [
            c.scratch for c in run
        ]  # what is returned stays as long as the model, and the code's text must not

        def scratch(extents: Mapping[str, int]) -> int:
            own = {**extents, THREADS: threads}
            return threads * max((scratch_bytes(each, own) for each in scratches), default=0)

        return CodeSizes(
            phases=len(every),
            functions=len(functions),
            text=sum(map(len, {c.ir for c in every})),
            words=8 * sum(len(c.words) for c in every),
            scratch=scratch,
            prepare_scratch=threads * max((c.scratch_bytes({THREADS: threads}) for c in prepare), default=0),
            spare=sum(int8_conv.spare_bytes(kernel, self.target) for kernel in program.prepare),
            results=lambda plan, sizes: result_bytes(program, plan, sizes),
            step=BLOCK,
        )

    @contextmanager
    def compiling(self, program: Program, options: CompileOptions, early: bool) -> Iterator[None]:
        if not early:
            yield
            return
        with Compiling(cache_of(options)) as work:
            self.work[program] = work
            try:
                yield
            finally:
                del self.work[program]

    def emit(self, graph: Graph, program: Program, options: CompileOptions) -> CpuExecutable:
        found = self.available()
        if not found.present:
            raise DeviceUnavailable(f"device 'cpu': {found.reason}. {found.remedy}")
        made = self.made.pop(program, {})
        work = self.work.get(program) or Compiling(cache_of(options), threads=1)
        # after the kernels, of which one may take longer than all else
        work.prepare(runner_ir.RUNTIME, runner_ir.runtime_ir)
        if runner_ir.CPYTHON:
            work.prepare(entry_ir.NAME, entry_ir.entry_ir)
        return build(graph, program, options, lambda kernel: made.get(kernel) or self.emit_kernel(kernel), work)


def _refuse_copies(program: Program) -> None:
    """Raises `OptionError` where a kernel would keep a copy of weights; small tables are made ahead all the same."""
    for kernel in program.prepare:
        size = sum(b.bound() or 0 for b in kernel.writes() if b.kind == "prepared")
        if size > SMALL and any(b.base.kind in ("param", "const") for b in kernel.reads()):
            what = kernel.label or "a kernel without a name"
            raise OptionError(
                f"packing='none': {what} keeps {size} bytes made of its weights ({kernel.name}); only matrix products"
                " with weights of f32, f16, bf16 that no cast rounds, or of blocks along the axis that is summed over,"
                " read them where they lie: use packing='fast'"
            )


def cache_of(options: CompileOptions) -> ObjectCache | None:
    """The object cache in the folder that the options name, None for the user's."""
    return ObjectCache(options.cache_dir) if options.cache_dir is not None else None
