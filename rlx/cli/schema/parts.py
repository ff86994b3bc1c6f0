"""Objects within what commands print."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

__all__ = [
    "CachePart",
    "Candidate",
    "Ceilings",
    "Clones",
    "Comparison",
    "CompiledModule",
    "Decision",
    "Device",
    "DeviceMemory",
    "Dispatched",
    "EmittedKernel",
    "ExampleModel",
    "Experts",
    "Extents",
    "Io",
    "IoTotals",
    "KernelIo",
    "KernelRow",
    "KernelTime",
    "Missing",
    "ModelMemory",
    "Needs",
    "Number",
    "Pace",
    "Part",
    "Path",
    "Plan",
    "PlanBuffer",
    "PlanRow",
    "PlanTotals",
    "Prediction",
    "QuantizedOutput",
    "QuantizedTensor",
    "Remedy",
    "Scaling",
    "Span",
    "Tensor",
    "Timing",
    "Tolerance",
    "TrueError",
    "Turn",
    "Weights",
    "WrongPass",
]  # fmt: skip

Number = float | Literal["nan", "inf", "-inf"]  # JSON has no numbers for those
Extents = dict[str, int]  # by the name of a dim
Path = str


class Tensor(TypedDict):
    """An output of a run."""

    name: str
    shape: list[int]
    dtype: str  # NumPy's name of it
    min: NotRequired[float | None]  # of the finite elements; null where there are none. Not for complex ones
    mean: NotRequired[float | None]
    max: NotRequired[float | None]
    not_finite: NotRequired[int]  # elements that are NaN or infinite
    first: list[float | bool | str]  # up to 6 elements; those that are not finite, and complex ones, as text
    file: NotRequired[Path]  # with --output-dir


class Timing(TypedDict):
    """Seconds per call: percentiles over samples of `calls` calls each."""

    median: float
    p10: float
    p90: float
    p99: float
    min: float
    samples: int
    calls: int


class KernelTime(TypedDict):
    """What a kernel takes."""

    kind: str
    name: str
    seconds: float  # per run: the low quartile
    spread: float  # from there to the high quartile
    disturbed: bool  # other programs had the processor: `seconds` may be too long


class Needs(TypedDict):
    """Memory of a compiled graph, in bytes; {} on a device without a plan."""

    params: NotRequired[int]  # weights as they are given
    packed: NotRequired[int]  # what is computed of them once
    constants: NotRequired[int]
    arena: NotRequired[int | None]  # activations and outputs; null where sizes have no bound


class ModelMemory(TypedDict):
    """What a model was predicted to take, and took."""

    parts: dict[str, int]  # predicted bytes by part: weight, activation, input, output, state, workspace, code
    predicted_bytes: int | None  # by which the resident set of the process grows
    measured_bytes: int | None  # by which it grew
    measured: Literal["peak", "at the end"]
    residual_bytes: int | None  # predicted less measured


class Clones(TypedDict):
    """Clones that ran at once, each in a thread."""

    clones: int
    runs_per_second: float  # of all together
    p50: float
    p90: float
    p99: float
    runs: int


class Scaling(TypedDict):
    """One run at a time with so many threads."""

    threads: int
    p50: float
    p90: float
    p99: float
    speedup: float  # against the first number of threads
    runs: int


class Part(TypedDict):
    """A part of an estimate."""

    bytes: int
    certainty: str  # exact, bounded (no more than that), calibrated, guessed or forecast


class Remedy(TypedDict):
    """What makes a model smaller."""

    action: str
    saves: int  # bytes off the peak
    fits: bool  # whether that alone is enough


class Experts(TypedDict):
    """Experts of a mixture, for each layer that has some."""

    layers: int
    experts: list[int]
    expert_bytes: list[int]  # of one expert


class PlanTotals(TypedDict):
    """What a plan comes to, in bytes."""

    buffers: int  # how many
    arena: int
    lower_bound: int  # no arena can be smaller
    gap: float  # of the arena's height, above the lower bound (0.05: 5 %)
    peak_step: int  # the kernel at which most bytes live
    unshared: int  # the arena if no buffers shared memory
    saved: int
    method: str  # how the offsets were found
    in_place: int  # bytes of results that were written over operands


class PlanBuffer(TypedDict):
    """A buffer as it was packed."""

    name: str
    start: int  # the first kernel that needs it
    stop: int  # the kernel after the last one
    size: int
    alignment: int
    fixed: int | None  # the offset that it had to have
    guard: int  # bytes behind it that stay free
    space: str  # the memory that it lies in
    offset: int


class PlanRow(TypedDict):
    """A value in the arena."""

    name: str
    type: str
    start: int
    stop: int
    offset: int
    nbytes: int
    made_by: str
    into: str  # the operand that it is written over, or ""


class Plan(TypedDict):
    """Where buffers lie in the arena."""

    at: Extents  # the sizes that it is for
    alignment: int
    totals: PlanTotals
    buffers: list[PlanBuffer]
    rows: list[PlanRow]


class Pace(TypedDict):
    """How many times as long as when it was calibrated a device takes now."""

    host: float
    kernels: float
    memory: float


class Candidate(TypedDict):
    """A device that was looked at."""

    device: str
    obstacle: str  # why it can't be chosen; "": it can
    seconds: float | None  # predicted per run; null: not priced
    low: float | None  # nine of ten runs lie between low and high
    high: float | None
    cost: float | None  # `seconds` with a share of the compile
    overhead: float | None
    transfers: float | None
    compile: float | None
    guessed: bool  # by figures that nobody measured
    error: float  # the standard deviation of log(measured / predicted)
    peak_bytes: int | None
    budget_bytes: int | None
    device_bytes: int  # what the device itself brings into the process
    bounded: list[str]  # parts of which only an upper bound or a guess is known
    unsupported: list[str]
    measured: float | None
    pace: Pace
    results: str  # what outputs are taken to do: "are copied out", "are views" or "stay on the device"
    fits: bool | None
    deficit_bytes: int
    grows_bytes: int | None  # what the process grows by at the peak


class Turn(TypedDict):
    """From this extent of a dim on another device is cheapest."""

    dim: str
    extent: int
    device: str


class Decision(TypedDict):
    """Which device runs a graph, and why."""

    graph: str
    device: str
    reason: str
    candidates: list[Candidate]
    at: Extents
    objective: str
    turns: list[Turn]


class Dispatched(TypedDict):
    """What became of a node."""

    node: str
    op: str
    how: str  # native, decomposed, host or unsupported
    why: str


class Missing(TypedDict):
    """A node or input that can't be imported."""

    name: str
    op: str
    reason: str
    domain: str
    opset: int
    inputs: list[str]  # of the model: where their values are known it is no obstacle


class Weights(TypedDict):
    """Weights of one element type."""

    tensors: int
    nbytes: int


class Comparison(TypedDict):
    """A result against the reference."""

    name: str
    op: str
    error: Number  # the largest
    relative: Number  # to the largest magnitude involved
    share: Number  # of what is allowed; above 1 it differs
    note: str  # what numbers can't say


class WrongPass(TypedDict):
    """The pass that changed a result."""

    name: str
    where: str


class Tolerance(TypedDict):
    """What outputs of a type may differ by."""

    relative: float
    absolute: float


class TrueError(TypedDict):
    """How far an output is from that of float64."""

    output: str
    runtime: str
    largest: Number
    relative: Number  # norm of the differences over that of the true elements
    correlation: Number


class KernelRow(TypedDict):
    """A kernel against its roofline."""

    kind: str
    name: str
    predicted: float
    measured: float | None
    least: float  # what its flops and bytes take at the device's ceilings
    bound: str  # compute, traffic or launch
    bytes: int
    flops: int
    plain: float  # of one launch, before the correction of its kind
    sizes: list[float]  # that its speed depends on
    spread: float
    disturbed: bool
    fraction: float | None  # least / measured


class KernelIo(TypedDict):
    """What a kernel moves."""

    kind: str
    name: str
    nodes: str
    read_bytes: int
    written_bytes: int
    flops: int
    sync: bool  # whether the device waits for it
    times: int  # more than once in loops


class IoTotals(TypedDict):
    """Sums over the kernels of a run."""

    launches: int
    launches_before: int  # without fusion
    syncs: int
    read_bytes: int
    written_bytes: int
    read_bytes_before: int
    written_bytes_before: int
    flops: int
    intensity: float  # flops a byte


class Io(TypedDict):
    """What a run moves."""

    graph: str
    device: str
    at: Extents
    outputs: list[str]
    kernels: list[KernelIo]
    before: list[KernelIo]  # without fusion
    h2d_bytes: int  # from the host to the device
    d2h_bytes: int
    waits: int
    results: str
    totals: IoTotals


class Prediction(TypedDict):
    """A run in seconds."""

    seconds: float
    low: float  # nine of ten runs lie between low and high
    high: float
    overhead: float
    syncs: float
    transfers: float
    compile: float
    guessed: bool


class Span(TypedDict):
    """What a thread did."""

    kernel: int  # its number in `kernels`
    thread: int  # 0 is the caller's
    start: float
    seconds: float


class DeviceMemory(TypedDict):
    """Bytes of a device's memory; null where it does not say."""

    free: int | None
    total: int | None


class Device(TypedDict):
    """A device."""

    name: str
    present: bool
    reason: str
    remedy: str  # how to get it
    memory: DeviceMemory
    capabilities: list[str]
    calibrated: bool


class Ceilings(TypedDict):
    """What a device can do at most: times in seconds, rates a second (`rlx.cost.Ceilings` says more)."""

    device: str
    flops: float
    bandwidth: list[list[float]]  # (bytes of the working set, bytes/s)
    vector: float
    launch: float
    run: float
    step: float
    sync: float
    host: float
    transfer: float
    compile: float
    compile_kernel: float
    threads: int
    unified: bool
    merges: bool
    dtypes: dict[str, float]
    functions: dict[str, float]
    products: list[list[float]]
    output: float
    copies: list[list[float]]
    corrections: dict[str, list[list[float]]]
    gains: list[list[float]]
    probe: list[float]
    follows: list[float]
    error: float
    guessed: bool


class QuantizedTensor(TypedDict):
    """What became of a tensor."""

    name: str
    shape: list[int]
    before: str  # its type
    after: str
    bytes_before: int
    bytes_after: int
    reason: str  # why it has that type
    rms: Number | None  # error relative to its elements; null where nothing was rounded
    worst: Number | None  # the largest difference


class QuantizedOutput(TypedDict):
    """An output of the new model beside that of the old one, over all given inputs."""

    name: str
    cosine: Number  # the least
    rms: Number  # relative
    top1: Number | None  # share of rows whose largest element is at the same place
    rows: int


class ExampleModel(TypedDict):
    """A model that `rlx fetch` can bring."""

    name: str
    bytes: int
    license: str
    package: str  # on PyPI
    version: str
    path: Path | None  # None: not there


class CachePart(TypedDict):
    """A part of the cache."""

    files: int
    bytes: int


class EmittedKernel(TypedDict):
    """The text of a kernel."""

    how: str  # it is computed
    functions: list[str]
    text: int  # characters
    seconds: float


class CompiledModule(TypedDict):
    """Functions that LLVM compiled together."""

    functions: list[str]
    kinds: list[str]  # how their kernels are computed; the names of routines
    text: int  # characters
    seconds: dict[str, float]  # of a thread, by step: "parse", "passes", "code"
