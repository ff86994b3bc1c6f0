"""The protocol that every backend implements, and what it gives back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rlx.backends.memory import DeviceMemory
from rlx.boundary import bounded
from rlx.errors import BusyError, ExecutionError, NameNotFound, OptionError, ShapeError, no_such
from rlx.forks import restart_in_child
from rlx.ir.dtype import DType
from rlx.ir.encoding import Encoding
from rlx.ir.extents import UnequalSizes
from rlx.ir.graph import Array, Graph, Node, TensorType, Value
from rlx.ir.shape import Shape
from rlx.options import CompileOptions
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.backends.array import MemorySpace, Tensor
    from rlx.backends.timing import KernelTime
    from rlx.kernels.analysis import Fusing
    from rlx.kernels.lowering import Anchor
    from rlx.kernels.program import Kernel, Program
    from rlx.plan.arena import MemoryPlan

__all__ = [
    "CAPABILITIES",
    "A",
    "Availability",
    "Backend",
    "CodeGenerator",
    "CodeSizes",
    "DeviceMemory",
    "Executable",
    "ExpertFigures",
    "ExpertLayerSpec",
    "Image",
    "Joins",
    "LibraryBackend",
    "Rates",
    "Restorer",
    "TensorSpec",
    "Turns",
    "by_position",
    "spec_of",
]


CAPABILITIES = ("arena", "clone", "dynamic", "experts", "out", "profile", "save", "slots", "states")


@dataclass(frozen=True)
class TensorSpec:
    """An input, output, param or state as a user sees it. `bytes` is at the upper bounds, None when unbounded."""

    name: str
    shape: Shape
    dtype: DType
    bytes: int | None
    encoding: Encoding | None = None

    def __str__(self) -> str:
        return f"{self.name}: {TensorType(self.shape, self.dtype, self.encoding)}"


def spec_of(value: Value, name: str = "") -> TensorSpec:
    """The spec of a leaf or output of a graph."""
    encoding = value.type.encoding if value.kind == "state" else None
    return TensorSpec(name or value.name, value.shape, value.dtype, value.type.nbytes(), encoding)


def by_position(specs: Sequence[TensorSpec], given: Any, what: str) -> Sequence[Any]:
    """Values in the order of the specs, from a mapping by name or a sequence by position."""
    if type(given) is dict or isinstance(given, Mapping):
        try:
            values = [given[spec.name] for spec in specs]
        except KeyError:
            values = []
        if len(given) == len(specs) == len(values):
            return values
        names = [spec.name for spec in specs]
        for name in given:
            if name not in names:
                raise no_such(what, name, names)
        absent = [name for name in names if name not in given]
        raise NameNotFound(f"{what} {absent[0]!r} is missing: expected {', '.join(map(repr, names))}")
    if isinstance(given, list | tuple):
        if len(given) != len(specs):
            raise ShapeError(f"expected {len(specs)} {what}s ({', '.join(s.name for s in specs)}), got {len(given)}")
        return given
    raise ShapeError(f"{what}s are given by name in a mapping, or by position in a list; got {type(given).__name__}")


@dataclass(frozen=True)
class Availability:
    """Whether a device can be used here; `reason` says what is there or what is missing, `remedy` how to get it."""

    present: bool
    reason: str
    remedy: str = ""

    @property
    def why(self) -> str:
        """Both as one text."""
        return ": ".join(part for part in (self.reason, self.remedy) if part)


@dataclass(frozen=True)
class CodeSizes:
    """What the code of a program takes besides its buffers, in bytes, known before any of it is compiled.

    `phases` counts calls of kernels, `functions` the different ones; `text` is the source of these, `words` their
    arguments; `scratch(extents)` is working memory of a run for all threads, `prepare_scratch` that of packing.
    `spare` are bytes of packed weights that only unusual values fill. `results(plan, sizes)` is what runs by a plan
    take beside its arena for results of these sizes, where the caller still has those of the run before.
    Weights in a file that kernels can't read there are copied to be packed, in parts that end once they are so many
    bytes (`step`) with their packed forms; None: all are copied before. `loading`: of a device that copies all weights
    to memory of its own, what is there at the most while they come, beside what stays.
    """

    phases: int
    functions: int
    text: int
    words: int
    scratch: Callable[[Mapping[str, int]], int]
    prepare_scratch: int
    spare: int = 0
    results: Callable[[MemoryPlan, Sequence[int]], int] = lambda plan, sizes: sum(sizes)
    step: int | None = None
    loading: int | None = None


@dataclass(frozen=True)
class Image:
    """An executable as data, for the machine that `target` describes: tables, machine code, and the arrays they name.

    It is trusted like a shared library.
    """

    target: str
    tables: bytes
    objects: Sequence[bytes]
    arrays: Sequence[Array]


@dataclass(frozen=True)
class ExpertLayerSpec:
    """A mixture-of-experts layer of a compiled graph; `expert_bytes` is what a resident expert takes in memory."""

    name: str
    experts: int
    top_k: int
    expert_bytes: int


@dataclass(frozen=True, eq=False)
class ExpertFigures:
    """What was counted of a layer, an i64 for each expert.

    `tokens` went there, each to `top_k` experts. A run of the layer that sends tokens to an expert is one of its `hits`
    where it was resident, else one of its `misses`; `fetched_bytes` were read for these.
    """

    tokens: Array
    hits: Array
    misses: Array
    fetched_bytes: Array


@dataclass(frozen=True)
class Joins:
    """How often the threads of a run wait for one another: `made` times, `serial` if phases ran one by one.

    `beside` phases run side by side, in `groups`. What is in a loop counts once.
    """

    made: int
    serial: int
    beside: int
    groups: int

    def __str__(self) -> str:
        made = f"{self.made} per run"
        if not self.groups:
            return made
        return f"{made} ({self.serial} one by one); {self.beside} phases run side by side, in {self.groups} groups"


A = TypeVar("A", bound="Tensor")


class Executable(ABC, Generic[A]):
    """A compiled graph on a device: code, memory and the run. Arrays that come in have been checked by the caller.

    `A` is the kind of array that the device takes and gives: NumPy's where kernels read the host's memory. A device
    with memory of its own gives `rlx.Array`s and takes NumPy's arrays too, which it copies there: then `A` is `Tensor`,
    which both are. Addresses in the host's memory are known to the CPU's own classes only.
    `capabilities` names the calls of the API that it supports, among `CAPABILITIES`.
    """

    capabilities: frozenset[str] = frozenset()
    plan: MemoryPlan | None = None
    program: Program | None = None
    admit: Callable[[Sequence[Any]], Sequence[A]]  # set by the runtime: checks and converts what a user passes
    wrap: Callable[[tuple[A, ...]], Any]  # set by the runtime: what `slots` returns for the outputs
    # Set by the runtime: what `slots` gives for arrays whose sizes this graph refuses, or the error again.
    instead: Callable[[tuple[Any, ...], UnequalSizes], Any] | None = None
    waits: bool = False  # set by the runtime: whether calls wait while another thread runs it, and raise no `BusyError`
    # Set by the runtime: asked before an arena takes that many bytes for extents; told of the first run of a binding.
    reserve: Callable[[Mapping[str, int], int], None] = staticmethod(lambda extents, nbytes: None)
    settle: Callable[[Mapping[str, int]], None] = staticmethod(lambda extents: None)

    def adopt(self, value: Any) -> A | None:
        """What a user gives as an array, if it lies in memory of the device's own already; else None."""
        return None

    @abstractmethod
    def set_params(self, arrays: Mapping[str, A]) -> None:
        """Takes over the values: afterwards the caller may change the arrays (read-only mapped ones are kept)."""

    @property
    @abstractmethod
    def results(self) -> Sequence[A | None] | None:
        """The outputs of the last run, None before the first and for one that it was not asked for.

        Raises `ExecutionError` when that run failed.
        """

    @abstractmethod
    def run(self, inputs: Sequence[A], out: Sequence[A | None], wanted: Sequence[int]) -> list[A]:
        """One run on arrays of the specs' types; the outputs numbered `wanted`, as fresh arrays.

        What only other outputs need is left out where the device can; updates of states and feeds are always made.
        An output that `out` (None or a writable array of its type, for each) gives an array for is written there, and
        that array is what is returned for it. Raises `ShapeError` for one of another shape, before any is written.
        """

    def run_fresh(
        self, inputs: Sequence[Any], wanted: tuple[int, ...] | None = None, out: Sequence[Any] | None = None
    ) -> list[A] | None:
        """As `run` by the fastest way: inputs as for `slots`, nothing checked, all outputs or those numbered `wanted`.

        None when there is no such way here, arrays are not as in a run before, or another thread ran in between: then
        `run` gives the outputs, or says what is wrong.
        """
        return None

    @property
    @abstractmethod
    def slots(self) -> Callable[..., Any]:
        """The fastest call: whatever a user passes, by position, checked; gives `wrap` of the outputs."""

    def served(self, call: Callable[[tuple[Any, ...]], Any], arrays: tuple[Any, ...]) -> Any:
        """`call(arrays)` for `slots`, or what `instead` gives for them."""
        try:
            return call(arrays)
        except UnequalSizes as error:
            if self.instead is None:
                raise
            return self.instead(arrays, error)

    def serving(self, call: Callable[[tuple[Any, ...]], Any]) -> Callable[..., Any]:
        """What `slots` gives where `call` takes all arrays as a tuple."""

        @bounded("run_slots", ExecutionError)
        def slots(*arrays: Any) -> Any:
            return self.served(call, arrays)

        return slots

    @property
    def arena(self) -> A:
        """The memory of activations and outputs, as elements of u8 that only the device may write."""
        raise OptionError("this device has no arena of its own")

    @property
    def joins(self) -> Joins | None:
        """The joins of threads in runs at the shapes of the last one; None before it, or where that is not known."""
        return None

    def trim(self) -> None:
        """Lets go of the memory that the next run can take anew; outputs of the last run are then gone."""

    def dispose(self) -> None:
        """Lets go of all memory, and of what clones share once none is left; nothing is called after that."""

    def clone(self, fresh: bool = False) -> Executable[A]:
        """Another one over the same code and params with its own arena and states: as they are now, or initial ones."""
        raise OptionError("this device can't clone a compiled graph: compile it again")

    # ---- states: names, types and shapes have been checked by the caller

    @property
    def bound_inputs(self) -> Mapping[str, A]:
        """The inputs that are kept between runs, by name: their memory now."""
        return {}

    @property
    def feeds(self) -> Mapping[str, int]:
        """The states that an output is fed to after each run, with its number."""
        return {}

    def read_state(self, name: str) -> A:
        """A copy of a state (a declared one or a kept input)."""
        raise self.keeps_none()

    def write_state(self, name: str, array: A | None) -> None:
        """Sets a state; None: to its initial value."""
        raise self.keeps_none()

    def in_state(self, name: str, does: Callable[[Array], None]) -> bool:
        """Calls `does` with the memory of a state, where it lies in the host's; else does nothing and gives False."""
        return False

    def keep_input(self, name: str, array: A | None) -> None:
        """Keeps an input between runs, from this value on; None: no longer."""
        raise self.keeps_none()

    def feed_state(self, name: str, output: int | None) -> None:
        """Makes an output the state's new value after each run that succeeds; None: no longer."""
        raise self.keeps_none()

    def set_extent(self, dim: str, extent: int | None) -> None:
        """Sets a dim that no input's shape tells; None: no longer."""
        raise OptionError(f"this device reads every extent off the inputs' shapes: {dim!r} can't be set")

    # ---- mixtures of experts: masks have been checked by the caller

    @property
    def expert_layers(self) -> Sequence[ExpertLayerSpec]:
        """The layers whose experts can be chosen and counted, in the order in which they run."""
        raise self.tells_none()

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are not in memory because experts are not resident."""
        return 0

    def set_resident(self, masks: Sequence[A]) -> None:
        """Keeps the weights of these experts ready in memory; a bool for each expert of each layer."""
        raise self.tells_none()

    def capture(self, calls: int) -> None:
        """Keeps the numbers of experts of that many calls of each layer, from now on."""
        raise self.tells_none()

    def take_captured(self) -> Mapping[str, list[A]]:
        """The captured numbers (i64 [tokens, top_k]) of each layer's calls, oldest first; they are dropped."""
        raise self.tells_none()

    def take_figures(self) -> Mapping[str, ExpertFigures]:
        """What was counted of each layer since the last time."""
        raise self.tells_none()

    def tells_none(self) -> OptionError:
        """What the calls on experts raise where a device does not have them."""
        return OptionError("this device does not tell experts apart: see model.capabilities")

    def keeps_none(self) -> OptionError:
        """What the calls on states raise where a device does not have them."""
        return OptionError("this device does not offer states to read, write, bind or feed: see model.capabilities")

    def keep_functions(self, most: int) -> None:
        """How many functions a device that makes one for every set of extents keeps."""

    def forget_function(self, extents: Mapping[str, int]) -> None:
        """Lets go of the function for these extents."""

    def raw_param(self, name: str) -> A | None:
        """The value of a param as it was set, None where only what was made of it is left."""
        return None

    def pack(self) -> None:
        """Makes of the params what runs read, if they are all there; else the first run does."""

    def image(self, source: Graph) -> Image:
        """What `Restorer.restore` makes an equal one of; `source` is the graph that users see."""
        raise OptionError("this device has no compiled code to store: save(path, portable=True) stores the graph")

    @property
    def listing(self) -> Mapping[Kernel, str]:
        """The text of each kernel's code, where the device shows it."""
        return {}

    @property
    def profiled(self) -> Sequence[Kernel]:
        """The kernel of each row of `profile`: one that runs in several phases comes several times."""
        return ()

    def profile(self, inputs: Sequence[A], repeat: int) -> list[KernelTime]:
        """The time of every kernel from `repeat` runs, or more where something disturbed them."""
        raise OptionError("this device has no per-kernel profile")


class Turns:
    """One thread at a time in an executable that runs on a library; others wait or get `BusyError`."""

    def __init__(self) -> None:
        self.restart()
        restart_in_child(self.restart)

    def restart(self) -> None:
        """Nobody has it: for a new one, and for a forked child, where other threads of the parent are not."""
        self.lock = Lock()
        self.holder = 0

    @contextmanager
    def taken(self, waits: bool) -> Iterator[None]:
        """Has it for the block. The thread that has it already (in a signal handler) is never told to wait."""
        if not self.lock.acquire(blocking=False):
            if not waits or self.holder == get_ident():
                raise BusyError(
                    "the compiled graph is running in another thread: compile one for each thread, `sync()` after "
                    "`submit`, or compile with busy='wait'"
                )
            self.lock.acquire()
        self.holder = get_ident()
        try:
            yield
        except BusyError as error:
            raise ExecutionError(f"a call from within the run: {error}") from error  # waiting would not help
        finally:
            self.holder = 0
            self.lock.release()


@dataclass(frozen=True)
class Rates:
    """What is assumed of a device that was never measured; of one that is the processor, `flops` are a thread's."""

    flops: float  # of products of large f32 matrices, a second
    bytes: float  # moved, a second
    run: float  # seconds that a run takes besides its kernels
    launch: float  # seconds of a kernel's own
    compile: float = 0.05  # seconds of compiling a graph


class Backend(ABC):
    """One kind of device.

    `unified`: whether it shares its memory with the host; `sync_ops`: ops that make it wait for the host, besides those
    that it runs there; `merges`: whether it makes one kernel of several nodes; `specialises`: whether it makes code for
    every set of extents; `rewrites`: whether graphs go through the passes before it gets them; `honours`: which of
    `DEVICE_OPTIONS` it does something about, `precisions`: which of `PRECISIONS` it computes in: a compile that sets
    another one is refused; `rates`: its speed before it is measured.
    """

    name: str
    unified: bool = True
    sync_ops: frozenset[str] = frozenset()
    merges: bool = True
    specialises: bool = False
    rewrites: bool = True
    honours: frozenset[str] = frozenset()
    precisions: frozenset[str] = frozenset({"f32"})
    capabilities: frozenset[str] = frozenset()  # of every executable that it makes

    @property
    def threads(self) -> int:
        """Threads of the processor that a run uses unless told otherwise."""
        return 1

    def threads_of(self, asked: int | None) -> int:
        """The threads of a run that is compiled with the option `threads`."""
        return self.threads if asked is None or "threads" not in self.honours else asked

    @property
    def space(self) -> MemorySpace | None:
        """The memory of its own that its runs read and write; None: that of the host."""
        return None

    @property
    def on_processor(self) -> bool:
        """Whether its kernels run on the processor of the host."""
        return False

    @property
    def rates(self) -> Rates:
        return Rates(2.5e12, 120e9, run=80e-6, launch=5e-6)

    @abstractmethod
    def available(self) -> Availability:
        """Whether it can be used in this process."""

    @abstractmethod
    def claims(self, node: Node) -> str | None:
        """None when it runs the node as it is, else the reason why not (then the node is decomposed)."""

    def rounds_ahead(self, node: Node) -> bool | None:
        """Whether casts before a product round its operands to 16 bits; None: it rounds those of all itself."""
        return False

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """The device's memory now."""

    def room(self) -> int | None:
        """Bytes that are free, as far as that is known without setting the device up: what a choice goes by."""
        return self.memory().free

    def ignored(self, options: CompileOptions) -> str:
        """The options that it would ignore, as in "trap='nan'"; "" if there are none."""
        refused = {k: v for k, v in options.of_device().items() if k not in self.honours}
        if options.precision not in self.precisions:
            refused["precision"] = options.precision
        return ", ".join(f"{k}={v!r}" for k, v in refused.items())

    def check(self, legal: Graph) -> None:
        """Raises `UnsupportedOp` for nodes that it claims but can't run in this graph; compiles nothing."""
        return


class Restorer(ABC):
    """Makes executables of a device's images; it needs neither the compiler nor the rest of the backend."""

    name: str

    @abstractmethod
    def target(self) -> str:
        """The machine that images made here run on."""

    def unlike(self, target: str) -> str:
        """What another target is, as in "the code is for ..."; told by how it differs from the one here."""
        return "another processor"

    @abstractmethod
    def restore(self, image: Image, options: CompileOptions) -> tuple[Executable[Any], Graph]:
        """The executable of an image for this machine, and the leaves of its source. Raises `ModelFormatError`."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """The device's memory now."""


class CodeGenerator(Backend):
    """A backend that turns kernels into code of its own.

    What fusion asks it, up to `accepts_blocks`, is explained in `rlx.kernels.fuse.Target`.
    """

    @property
    @abstractmethod
    def fusing(self) -> Fusing: ...

    @abstractmethod
    def accepts_dtype(self, dtype: DType) -> bool: ...

    @abstractmethod
    def accepts_special(self, node: Node) -> bool: ...

    @abstractmethod
    def encoded_operands(self, node: Node) -> Collection[int]: ...

    @abstractmethod
    def accepts_anchor(self, anchor: Anchor, node: Node) -> bool: ...

    @abstractmethod
    def accepts_operand(self, anchor: Anchor, role: str, shape: Shape, index: Any) -> bool: ...

    def accepts_blocks(self, anchor: Anchor, role: str, encoding: Encoding) -> bool:
        return False

    @abstractmethod
    def layout(self, program: Program, packing: str = "fast", precision: str = "f32") -> Program:
        """The program with the kernels that bring operands into this device's layouts; see `CompileOptions`."""

    @abstractmethod
    def code_sizes(self, program: Program, options: CompileOptions) -> CodeSizes:
        """What the program's code and working memory will take; compiles nothing outside of `compiling`."""

    def compiling(self, program: Program, options: CompileOptions, early: bool) -> AbstractContextManager[None]:
        """The time from the first question about a program to its code; with `early`, code may be made all along."""
        return nullcontext()

    @abstractmethod
    def emit(self, graph: Graph, program: Program, options: CompileOptions) -> Executable[Any]:
        """Machine code and memory for the program."""


class LibraryBackend(Backend):
    """A backend that maps each op to a function of a library."""

    @abstractmethod
    def build(self, graph: Graph, options: CompileOptions) -> Executable[Any]:
        """An executable for the graph."""
