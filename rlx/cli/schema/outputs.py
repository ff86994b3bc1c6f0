"""What each command prints with --json."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from rlx.cli.schema.parts import (
    CachePart,
    Ceilings,
    Clones,
    Comparison,
    CompiledModule,
    Decision,
    Device,
    Dispatched,
    EmittedKernel,
    ExampleModel,
    Experts,
    Extents,
    Io,
    KernelRow,
    KernelTime,
    Missing,
    ModelMemory,
    Needs,
    Number,
    Part,
    Path,
    Plan,
    Prediction,
    QuantizedOutput,
    QuantizedTensor,
    Remedy,
    Scaling,
    Span,
    Tensor,
    Timing,
    Tolerance,
    TrueError,
    Weights,
    WrongPass,
)

__all__ = ["OUTPUTS", "Output"]


class Output(TypedDict):
    """All of them."""

    schema: Literal[1]  # the version of these types


class Run(Output):
    """`rlx run`."""

    device: str
    assumed: list[str]  # what nobody gave: inputs, sizes
    extents: Extents
    outputs: list[Tensor]


class Replay(Output):
    """`rlx run --replay`."""

    ok: bool
    runs: int
    differing: list[tuple[int, str]]  # the number of the run, and the output


class Bench(Output):
    """`rlx bench`."""

    device: str
    assumed: list[str]
    predicted: ModelMemory | None
    compile_s: float
    first_run_s: float
    run_slots: Timing | None
    run: Timing
    memory: Needs
    clones: list[Clones]  # with --clones
    scaling: list[Scaling]  # with --scaling
    kernels: list[KernelTime]  # with --kernels


class Estimate(Output):
    """`rlx estimate`."""

    model: str
    device: str
    dims: Extents
    parts: dict[str, Part]  # weight, activation, input, output, state, workspace, code, overhead
    peaks: dict[str, int]  # while loading, compiling and running
    peak_bytes: int  # the largest of these
    own_peak_bytes: int  # without what the device takes by itself: what a budget is for
    cached_peak_bytes: int  # where the code comes from the cache
    stored_weight_bytes: int  # in the file
    packed_weight_bytes: int
    constant_bytes: int
    mapped_weight_bytes: int  # in pages of the file
    held_weight_bytes: int  # in memory already
    loading_copy_bytes: int
    file_bytes: int
    address_bytes: int
    source_bytes: int
    import_bytes: int
    cached_overhead_bytes: int
    compiler_bytes: int  # of the device, given back once the code is made
    kv_bytes_per_token: int | None
    kv_dtype: str | None
    held_weights: list[str]
    bucket_peaks: dict[str, int]  # peak by tokens of a run
    experts: Experts | None
    notes: list[str]
    assumed: list[str]  # sizes of dims without a bound
    fits: NotRequired[bool]  # with --budget
    budget: NotRequired[str]
    budget_bytes: NotRequired[int]  # where it does not fit
    missing_bytes: NotRequired[int]
    remedies: NotRequired[list[Remedy]]


class PlanOutput(Plan, Output):
    """`rlx plan`."""

    device: str
    assumed: list[str]


class Explain(Output):
    """`rlx explain`."""

    device: str
    stage: str
    text: str  # what the command prints without --json
    inputs: NotRequired[list[str]]  # of the stage summary, like the next three
    outputs: NotRequired[list[str]]
    memory: NotRequired[Needs]
    decision: NotRequired[Decision | None]
    nodes: NotRequired[list[Dispatched]]  # of the stage dispatch


class CompileTime(Output):
    """`rlx explain --compile-time`."""

    device: str
    stages: dict[str, float]  # seconds by stage; "start" is the process and its imports
    kernels: int
    alike: int  # kernels that took the text of another
    emitted: list[EmittedKernel]
    modules: list[CompiledModule]
    came: list[str]  # functions whose machine code came with rlx
    text: str  # what the command prints without --json


class Preflight(Output):
    """`rlx explain --preflight`."""

    ok: bool
    path: Path
    producer: str
    opsets: dict[str, int]  # by domain
    nodes: int
    supported: dict[str, int]  # nodes by op type
    unchecked: int  # supported nodes that depend on missing ones
    unused: int  # nodes that lead to no output
    missing: list[Missing]
    misfits: list[str]
    dynamic: dict[str, list[str]]  # open sizes, and where they stand
    weights: dict[str, Weights]  # by element type
    notes: list[str]


class Verify(Output):
    """`rlx verify`."""

    ok: bool
    device: str
    assumed: list[str]
    wrong_pass: WrongPass | None
    first_bad: Comparison | None
    tolerances: dict[str, Tolerance]  # by element type
    outputs: list[Comparison]
    rewritten: list[Comparison]  # what passes rewrote
    nodes: list[Comparison]
    between_roundings: list[Comparison]


class VerifyTruth(Output):
    """`rlx verify --f64`."""

    device: str
    assumed: list[str]
    errors: list[TrueError]
    kept: list[str]  # nodes that were computed in the file's own types
    onnxruntime: str  # "compared", or why not


class Profile(Output):
    """`rlx profile`."""

    device: str
    assumed: list[str]
    memory: ModelMemory | None
    kernels: list[KernelRow]
    io: Io
    prediction: Prediction


class Report(Profile):
    """`rlx report`."""

    model: str
    timeline: list[Span]
    plan: Plan | None
    decision: Decision | None


class Devices(Output):
    """`rlx devices`."""

    auto: list[str]  # what "auto" chooses among
    cores: int | None
    devices: list[Device]


class Calibrate(Output):
    """`rlx calibrate`."""

    ceilings: list[Ceilings]


class Cache(Output):
    """`rlx cache`."""

    folder: Path
    limit: int | None  # that `rlx cache limit` set
    parts: dict[str, CachePart]  # artifacts, objects, models, measurements


class Fetch(Output):
    """`rlx fetch`."""

    models: list[ExampleModel]


class Generate(Output):
    """`rlx generate`."""

    device: str
    text: str
    ids: list[int]  # the new tokens
    logprobs: list[float] | None  # with --logprobs, of each of these
    finish_reason: str | None  # stop, length or cancelled
    seed: int | None
    prompt_tokens: int
    cached_tokens: int  # of the prompt, that were not computed again
    generated_tokens: int
    prompt_seconds: float
    first_token_seconds: float
    decode_seconds: float
    decode_bytes: int  # weights, keys and values that were read for the tokens after the first
    prompt_tokens_per_second: Number
    tokens_per_second: Number
    bytes_per_second: Number
    bandwidth_share: float | None  # of what `rlx calibrate` measured; null where it has not
    guessed_tokens: int  # with --speculate
    right_tokens: int  # of these, that the model chose too


class Perplexity(Output):
    """`rlx perplexity`."""

    device: str
    tokens: int
    context: int
    stride: int  # tokens from window to window
    perplexity: Number
    seconds: float


class Embed(Output):
    """`rlx embed`."""

    device: str
    dimensions: int
    texts: int
    embeddings: NotRequired[list[list[float]]]  # a vector for each text; without --output
    output: NotRequired[Path]  # with --output: the file that has them


class Quantize(Output):
    """`rlx quantize`."""

    source: Path
    target: Path
    type: str
    tensors: list[QuantizedTensor]
    bytes_before: int  # of all tensors
    bytes_after: int
    written: int  # bytes of the new file; 0 with --dry-run
    outputs: list[QuantizedOutput]
    activations: int  # that are rounded in runs
    notes: list[str]


class Demo(Output):
    """`rlx demo`."""

    device: str
    accuracy: float  # share of the digits that were read right
    images: int
    compile_s: float
    memory: Needs
    free_memory: int | None
    one: Timing  # for one image
    whole: Timing  # for all
    kernels: list[KernelTime]


# command -> what it may print
OUTPUTS: dict[str, tuple[type, ...]] = {
    "run": (Run, Replay),
    "bench": (Bench,),
    "estimate": (Estimate,),
    "plan": (PlanOutput,),
    "explain": (Explain, CompileTime, Preflight),
    "verify": (Verify, VerifyTruth),
    "profile": (Profile,),
    "report": (Report,),
    "devices": (Devices,),
    "calibrate": (Calibrate,),
    "cache": (Cache,),
    "fetch": (Fetch,),
    "generate": (Generate,),
    "perplexity": (Perplexity,),
    "embed": (Embed,),
    "quantize": (Quantize,),
    "demo": (Demo,),
}
