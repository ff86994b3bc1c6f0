"""Which strategy computes what: graphs as text in, names of strategies out; and the page that lists them."""

from __future__ import annotations

from pathlib import Path

import pytest
import strategy_table

import rlx
from rlx.backends.cpu.gemm.panels.blocks import ENCODED
from rlx.backends.cpu.gemm.panels.coded import PAIRED, SCALED
from rlx.backends.cpu.gemm.panels.q8 import Q8_FORMATS
from rlx.backends.cpu.kernels.conv.winograd_forms import FORMS
from rlx.backends.cpu.kernels.matmul.strategies import IN_PLACE
from rlx.backends.cpu.kernels.registry import SPECIALS
from rlx.backends.cpu.select import STRATEGIES
from rlx.errors import OptionError
from rlx.ir.text import parse_graph


def graph(out: str, call: str, *before: str, **leaves: str) -> str:
    """A graph of one node, and those before it, over inputs and, by names in capitals, params; of an open size n."""
    lines = [f"{'param' if name.isupper() else 'input'} {name}: {type}" for name, type in leaves.items()]
    return "\n  ".join(["graph g {", "dim n = 1..64", *lines, *before, f"y: {out} = {call}", "output y = y"]) + "\n}\n"


def conv(out: str, x: str, w: str, attributes: str = "") -> str:
    return graph(out, f"conv(x, W{attributes})", x=x, W=w)


def attention(rows: str, keys: str, heads: tuple[int, int] = (4, 4), counted: str = "") -> str:
    q, k = (f"f32[1, {h}, {n}, 32]" for h, n in zip(heads, (rows, keys), strict=True))
    if counted:
        return graph(q, f"attention(q, k, v, {counted}, counted=true)", q=q, k=k, v=k, **{counted: "i64[]"})
    return graph(q, "attention(q, k, v)", q=q, k=k, v=k)


LARGE = "f32[2048, 1024]"  # as of 8 MiB weights are read from memory in every run
CASES = {
    "matmul.int8": graph("i32[4, 48]", "matmul_integer(x, W)", x="u8[4, 64]", W="i8[64, 48]"),
    "matmul.thin": graph("f32[4, 48]", "matmul(x, v)", x="f32[4, 64]", v="f32[64, 48]"),
    "matmul.panels+f28": graph("f32[1, 1024]", "matmul(x, W)", x="f32[1, 2048]", W=LARGE),
    "matmul.bf16_thin": graph("f32[4, 48]", "matmul(x, v)", x="f32[4, 64]", v="f32[64, 48]"),
    "matmul.bf16_pairs": graph("f32[40, 48]", "matmul(x, W)", x="f32[40, 64]", W="f32[64, 48]"),
    "matmul.i16_pairs": graph("i32[4, 48]", "widening_matmul(x, W)", x="i16[4, 64]", W="i16[64, 48]"),
    "matmul.panels+f16": graph("f16[4, 48]", "matmul(x, W)", x="f16[4, 64]", W="f16[64, 48]"),
    "matmul.panels+bf16": graph("bf16[4, 48]", "matmul(x, W)", x="bf16[4, 64]", W="bf16[64, 48]"),
    "matmul.panels+bytes": graph(
        "f32[1, 48]", "matmul(x, w)", "w: f32[64, 48] = cast(W, to=f32)", x="f32[1, 64]", W="i8[64, 48]"
    ),
    "conv.int8": conv("i32[1, 8, 7, 7]", "u8[1, 8, 9, 9]", "i8[8, 8, 3, 3]").replace("conv(", "conv_integer("),
    "conv.int8_depthwise": conv("i32[1, 16, 7, 7]", "u8[1, 16, 9, 9]", "i8[16, 1, 3, 3]", ", groups=16").replace(
        "conv(", "conv_integer("
    ),
    "matmul.panels": graph("f32[40, 48]", "matmul(x, W)", x="f32[40, 64]", W="f32[64, 48]"),
    "conv.depthwise": conv("f32[1, 16, 7, 7]", "f32[1, 16, 9, 9]", "f32[16, 1, 3, 3]", ", groups=16"),
    "conv.few_outputs": conv("f32[1, 2, 7, 7]", "f32[1, 8, 9, 9]", "f32[2, 8, 3, 3]"),
    "conv.implicit_gemm": conv("f32[1, 8, 7, 7]", "f32[1, 8, 9, 9]", "f32[8, 8, 3, 3]"),
    "conv.in_image": conv("f32[1, 24, 9, 9]", "f32[1, 8, 9, 9]", "f32[24, 8, 1, 1]"),
    "conv.in_image+few": conv("f32[1, 2, 9, 9]", "f32[1, 8, 9, 9]", "f32[2, 8, 1, 1]"),
    "conv.grouped": conv("f32[1, 4, 7, 7]", "f32[1, 8, 9, 9]", "f32[4, 4, 3, 3]", ", groups=2"),
    "conv.im2col+few": conv("f32[1, 4, 7, 7]", "f32[1, 128, 9, 9]", "f32[4, 64, 3, 3]", ", groups=2"),
    "conv.im2col": conv("f32[1, 16, 5, 5]", "f32[1, 8, 9, 9]", "f32[16, 8, 1, 1]", ", strides=(2, 2)"),
    "conv.implicit_gemm+bf16_pairs": conv("f32[1, 8, 7, 7]", "f32[1, 8, 9, 9]", "f32[8, 8, 3, 3]"),
    "conv.in_image+bf16_pairs": conv("f32[1, 16, 32, 32]", "f32[1, 8, 32, 32]", "f32[16, 8, 1, 1]"),
    "conv.im2col+bf16_pairs": conv("f32[1, 16, 5, 5]", "f32[1, 8, 9, 9]", "f32[16, 8, 1, 1]", ", strides=(2, 2)"),
    "conv.winograd_f2x2_3x3": conv("f32[1, 512, 7, 7]", "f32[1, 512, 9, 9]", "f32[512, 512, 3, 3]"),
    "conv.winograd_f4x4_3x3": conv("f32[1, 64, 7, 7]", "f32[1, 64, 9, 9]", "f32[64, 64, 3, 3]"),
    "attention.decode": attention("1", "100"),
    "attention.cache": attention("12", "100", counted="count"),
    "attention.own_panels": attention("12", "12"),
    "attention.packed": attention("12", "12", (4, 2)),
    "attention.decode_or_packed": attention("n", "12", (4, 2)),
}
for form in FORMS.values():
    if 1 in form.m:
        (m, n), (r, s) = form.m, form.r
        w, out = f"f32[64, 64, {r}, {s}]", f"f32[1, 64, {41 - r}, {41 - s}]"
        CASES[f"conv.winograd_lines+f{m}x{n}_{r}x{s}"] = conv(out, "f32[1, 64, 40, 40]", w)
# chosen by the tests of encoded weights, one format after the other
FORMATS = {
    *(f"matmul.panels+{format.name}" for format in ENCODED),
    *(f"matmul.panels+{format.name}" for format in SCALED),
    *(f"matmul.bf16_pairs+{format.whole.name}" for format in PAIRED),
    *(f"matmul.q8+{format.code.name}" for format in Q8_FORMATS),
    *(way.name for ways in IN_PLACE.values() for way in ways),
}


ROUNDED = [
    "matmul.bf16_thin", "matmul.bf16_pairs", "conv.implicit_gemm+bf16_pairs", "conv.in_image+bf16_pairs",
    "conv.im2col+bf16_pairs",
]  # fmt: skip
NEEDS = dict.fromkeys(
    ["matmul.int8", "conv.int8", "conv.int8_depthwise", "matmul.i16_pairs", "matmul.panels+f16", "matmul.panels+f28"],
    "avx2",
) | dict.fromkeys(ROUNDED, "bf16")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.needs(NEEDS[n])] if n in NEEDS else []) for n in CASES]
)
def test_what_computes_it(name: str) -> None:
    """The kernel of the graph's node names its strategy, in explain too, which says why none before it was taken."""
    precision = "bf16" if name in ROUNDED else "f32"
    model = rlx.compile(parse_graph(CASES[name]), device="cpu", threads=1, precision=precision)
    assert model.compilation.program is not None
    (kernel,) = [k for k in model.compilation.program.run if k.how == name]
    (tried,) = [s for s in STRATEGIES.values() if name in [x.name for x in s]]
    before = [x.name for x in tried][: [x.name for x in tried].index(name)]
    after = ["conv.fused_depthwise"] if name == "conv.depthwise" else []
    assert [refused for refused, _ in kernel.refused] == before + after
    assert f" {name} " in model.explain("kernels")
    table = model.explain("kernels", why=True)
    assert all(f": {why}" in table and other.partition("+")[0] in table for other, why in kernel.refused)


def test_every_strategy_has_a_case_and_a_name_of_its_own() -> None:
    """Names are the anchor, a dot and the way; those of ops with code of their own are the op's.

    One without a case here has a file of tests, which asks for it by its name.
    """
    names = [s.name for strategies in STRATEGIES.values() for s in strategies]
    assert len(names) == len(set(names))
    here = Path(__file__)
    tests = "".join(path.read_text() for path in sorted(here.parent.glob("test_*.py")) if path.name != here.name)
    assert {*CASES, *SPECIALS, *FORMATS} <= set(names)
    assert not [n for n in names if n not in {*CASES, *SPECIALS, *FORMATS} and f'"{n}"' not in tests]
    assert all(s.summary.endswith(".") for strategies in STRATEGIES.values() for s in strategies)


APART = {
    "a product whose weights are an input": (
        graph("i32[4, 48]", "matmul_integer(x, w)", x="u8[4, 64]", w="i8[64, 48]"),
        "byte_matmul as it is: its second operand is no weight",
    ),
    "windows of three axes": (
        conv("i32[1, 4, 3, 3, 3]", "u8[1, 8, 5, 5, 5]", "i8[4, 8, 3, 3, 3]").replace("conv(", "conv_integer("),
        "byte_conv as it is: its image has neither one nor two axes of pixels",
    ),
    "four depthwise channels": (
        conv("i32[1, 4, 3, 3]", "u8[1, 4, 5, 5]", "i8[4, 1, 3, 3]", ", groups=4").replace("conv(", "conv_integer("),
        "byte_conv as it is: it is depthwise, of too few channels or too many taps for vectors of bytes",
    ),
}


@pytest.mark.needs("avx2")
@pytest.mark.parametrize("what", APART)
def test_why_bytes_are_computed_as_something_else(what: str) -> None:
    """The kernels that such a node is taken apart into say so, with why; no other kernel does."""
    text, why = APART[what]
    model = rlx.compile(parse_graph(text), device="cpu", threads=1)
    assert f"         not {why}" in model.explain("kernels", why=True)
    assert " as it is:" not in rlx.compile(parse_graph(CASES["matmul.int8"]), device="cpu").explain("kernels", why=True)


def test_why_goes_with_kernels() -> None:
    model = rlx.compile(parse_graph(CASES["matmul.panels"]), device="cpu")
    with pytest.raises(OptionError, match="why=True goes with stage 'kernels'"):
        model.explain("fuse", why=True)
    assert "makes its own" in rlx.compile(parse_graph(CASES["matmul.panels"]), device="reference").explain("kernels")


def test_page_is_current() -> None:
    """Run `python tools/strategy_table.py` after a change."""
    assert strategy_table.PAGE.read_text() == strategy_table.page()
