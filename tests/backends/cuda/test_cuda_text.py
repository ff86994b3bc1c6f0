"""What kernels are printed as, and that NVRTC compiles it without a device."""

from __future__ import annotations

import pytest

import rlx
from rlx.backends.cuda.backend import CudaBackend
from rlx.backends.cuda.device.compiler import compiler
from rlx.backends.cuda.layout.together import groups_of
from rlx.backends.cuda.text.kernels import kernel_texts, module_texts
from rlx.compiler import stages_of
from rlx.errors import CompileError, DeviceUnavailable
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim, Size
from rlx.ir.value import Value
from rlx.kernels.lowering import Contract
from rlx.kernels.program import Kernel
from rlx.options import CompileOptions
from rlx.records import replace
from rlx.testing.cases import fixed_cases
from rlx.testing.oracle import Batch

ARCHITECTURES = ("sm_80", "sm_90a")
TEMPLATES = ("add", "arg_max", "cast", "conv", "gather", "matmul", "max_pool", "pow", "reduce_prod", "softmax", "top_k")


def kernels(graph: Graph) -> list[Kernel]:
    """The kernels of a graph that are printed."""
    program = stages_of(graph, CudaBackend(), CompileOptions()).program
    assert program is not None
    return [k for k in program.run if k.host is None and k.kind != "control"]


def texts(graph: Graph) -> list[str]:
    """The functions that a graph's kernels are printed as."""
    return [text.function.text for kernel in kernels(graph) for text in kernel_texts(kernel)]


def body(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()[3:-1]]


def test_a_map_is_a_loop_over_elements() -> None:
    """Axes that lie one behind the other are one loop, a size of the run is a word, an index that fits has 32 bits."""
    g = Graph("map")
    g.output(rlx.exp(g.input("x", (Dim("n", 1, 8), 3))) * 2.0, "y")
    (text,) = texts(g)
    assert body(text) == [
        "for (i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x; t < w.v[2]; t += (i64)gridDim.x * blockDim.x) {",
        "const int i1 = (int)t;",
        "const float v1 = ((float*)w.v[0])[i1];",
        "const float v2 = k_exp(v1);",
        "const float v3 = k_mul(v2, (0x1.0000000000000p+1f));",
        "((float*)w.v[1])[i1] = v3;",
        "}",
    ]


def test_reductions_of_a_row_are_shared_by_a_block() -> None:
    """The largest element and the sum are found once a row, before the loop over its elements."""
    g = Graph("row")
    g.output(rlx.softmax(g.input("x", (7, 100))), "y")
    (text,) = texts(g)
    lines = body(text)
    assert lines[0] == "for (i64 row = blockIdx.x; row < 7ll; row += gridDim.x) {"
    last = lines.index("for (i64 t = threadIdx.x; t < 100ll; t += 32) {")
    assert ["block_max" in line or "block_add" in line for line in lines].count(True) == 2
    assert not any("block_" in line for line in lines[last:])


def test_equal_kernels_are_one_function() -> None:
    g = Graph("twice")
    x = g.input("x", (64, 64))
    g.output(rlx.softmax(rlx.softmax(x)), "y")
    first, second = texts(g)
    assert first == second


def test_a_load_stays_inside_of_its_reduction() -> None:
    """A reduction of no elements reads nothing, not even what does not depend on its turn."""
    g = Graph("inside")
    x, y = g.input("x", (Dim("n", 0, 8), 4)), g.input("y", (4,))
    g.output(rlx.reduce_sum(x * y, axes=(0,)), "z")
    (text,) = texts(g)
    lines = body(text)
    loop = next(n for n, line in enumerate(lines) if line.startswith(("for (int r", "for (i64 v")))
    assert all(n > loop for n, line in enumerate(lines) if "((float*)" in line and "] = " not in line)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_nvrtc_compiles_each_template(name: str, arch: str) -> None:
    """Without headers, for an architecture that is not there."""
    try:
        nvrtc = compiler()
    except DeviceUnavailable as error:
        pytest.skip(f'{error}: pip install "rlx[cuda]"')
    functions = [text.function for k in kernels(Batch(fixed_cases(name)[:12]).graph) for text in kernel_texts(k)]
    for text in module_texts(list({f.symbol: f for f in functions}.values())):
        assert nvrtc.compile(text, arch)[:4] == b"\x7fELF"
    with pytest.raises(CompileError, match="undefined"):
        nvrtc.compile("__global__ void k() { undefined(); }", arch)


def products(graph: Graph) -> list[tuple[str, Size]]:
    """The products and marks of a graph in 16 bits, with the columns that each has."""
    program = stages_of(graph, CudaBackend(), CompileOptions(precision="bf16")).program
    assert program is not None
    return [
        (k.kind if k.mark is None else k.mark.part, k.anchor.n if isinstance(k.anchor, Contract) else 0)
        for k in program.run
        if k.mark is not None or isinstance(k.anchor, Contract)
    ]


def rows_and_weights() -> tuple[Graph, Value, list[Value]]:
    g = Graph("parts")
    return g, rlx.tanh(g.input("x", (8, 64))), [g.param(f"w{n}", (64, 64)) for n in range(3)]


def test_products_of_the_same_rows_are_one() -> None:
    """Also where they write parts of one buffer."""
    for joined in (False, True):
        g, x, w = rows_and_weights()
        made = [x @ each for each in w]
        for y in [rlx.concat(*made, axis=1)] if joined else made:
            g.output(y + y)
        assert products(g) == [("contract", 192)]


def test_products_of_other_branches_and_rounds_stay_apart() -> None:
    """What is computed in one branch would be missing in the other; the rows of a loop change."""
    g, x, w = rows_and_weights()
    y = rlx.cond(g.input("c", (), "bool"), lambda: x @ w[0], lambda: x @ w[1])
    g.output(y + x @ w[2])
    assert sorted(products(g)) == sorted(
        [("if", 0), ("contract", 64), ("else", 0), ("contract", 64), ("end", 0), ("contract", 64)]
    )
    g, x, w = rows_and_weights()
    y = rlx.while_loop(lambda v: v[0, 0] < 3.0, lambda v: rlx.tanh(v @ w[0]), x)
    g.output(y @ w[1])
    assert [n for _, n in products(g) if n] == [64, 64]


def test_groups_end_where_rows_or_results_are_touched() -> None:
    """Products whose rows or results another kernel changes between them."""
    g, x, w = rows_and_weights()
    for each in w:
        g.output((x @ each) * 2.0)
    run = stages_of(g, CudaBackend(), CompileOptions()).program.run  # type: ignore[union-attr]
    parts = [k for k in run if isinstance(k.anchor, Contract)]
    rows, result = parts[0].anchor.a.source, parts[2].stores[0].buffer  # type: ignore[union-attr]
    between = [[], [Kernel("rows", (replace(parts[0].stores[0], buffer=rows),))],
               [Kernel("result", (replace(parts[0].stores[0], buffer=result),))]]  # fmt: skip
    found = [[len(group) for group in groups_of([*parts[:2], *more, parts[2]], parts)] for more in between]
    assert found == [[3], [2, 1], [2, 1]]
