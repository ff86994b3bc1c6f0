"""Operands stored in blocks: every op and every encoding gives what its decoded operand gives, whatever reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.gemm.panels.block_formats import CODES
from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import Encoding, encoding_named
from rlx.ir.encodings import ENCODINGS, register_encoding
from rlx.ops.base import OPS
from rlx.ops.elementwise import Identity
from rlx.ops.select import Produced
from rlx.testing.cases import cases_of, covered
from rlx.testing.cases_encoded import encoded_cases, encoded_symbolic_cases
from rlx.testing.oracle import FLOATS, Batch, Operand, case, check, compare

NAMES = [name for name in sorted(OPS) if covered(name)]
STORED = sorted(name for name, encoding in ENCODINGS.items() if encoding.native)
DECIDING = [name for name in NAMES if issubclass(OPS[name], Produced)]  # their data decide a size
# Their operands of floats can't be whole blocks: numbers, pairs, corners of boxes; or they hold whole numbers.
NEVER = {
    "affine_grid", "col2im", "complex_mul", "dft", "dft_at_run", "frames", "from_pairs", "one_hot", "qlinear_conv",
    "qlinear_matmul", "stft", "tree_ensemble", "whole_conv",
}  # fmt: skip
FEW = {"encode", "log_mel_spectrogram"}  # their operands are no whole blocks of some encodings


@pytest.mark.sample(12)
@pytest.mark.parametrize("encoding", STORED)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in DECIDING and encoded_cases(name, "q8_0")])
def test_every_op_takes_operands_of_every_encoding(name: str, encoding: str) -> None:
    assert check(encoded_cases(name, encoding)) > 0 or name in FEW


@pytest.mark.sample(3)
@pytest.mark.parametrize("encoding", STORED)
@pytest.mark.parametrize("name", DECIDING)
def test_ops_whose_data_decide_a_size(name: str, encoding: str) -> None:
    """Sizes in one graph would be one another's: each case is a graph of its own."""
    for one in encoded_cases(name, encoding)[:4]:
        check([one])


@pytest.mark.sample(8)
@pytest.mark.parametrize("encoding", STORED)
@pytest.mark.parametrize("name", [name for name in NAMES if encoded_symbolic_cases(name, "q8_0")])
def test_beside_operands_of_symbolic_sizes(name: str, encoding: str) -> None:
    tells = case(Identity(), Operand((rlx.Dim("n", 1, 64),)))  # an input to read the dim off
    for one in encoded_symbolic_cases(name, encoding):
        guarded = Batch([one]).graph.guards  # as where n is the size of a block
        check([tells, one], extents=[{"n": n} for n in ((32,) if guarded else (1, 32, 64))])


def test_no_op_of_floats_is_without_cases() -> None:
    for name in NAMES:
        floats = any(o.dtype in FLOATS and o.shape for c in cases_of(name, 3, 32) for o in c.operands)
        assert not floats or name in NEVER or encoded_cases(name, "q8_0"), name


# ---- views, and what reads them


def encoded(g: Any, encoding: str, *shape: int, name: str = "w", seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """A param, and its blocks by name."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return g.param(name, shape, encoding=encoding), {name: encoding_named(encoding).encode(values)}


def normals(*shape: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda w: w,
    "reshape": lambda w: rlx.reshape(w, (8, w.shape[1] // 2)),  # rows that begin within a block
    "transpose": rlx.transpose,
    "slice": lambda w: rlx.slice(w, (1, 3), (3, 61), (1, 1)),
    "reversed": lambda w: rlx.slice(w, (3, w.shape[1] - 1), (4, w.shape[1]), (-1, -1)),
    "concat": lambda w: rlx.concat(w, w * 2.0, axis=1),
    "split": lambda w: rlx.split(w, sizes=(40, w.shape[1] - 40), axis=1)[1],
    "row": lambda w: rlx.reshape(rlx.slice(w, (2, 0), (1, w.shape[1]), (1, 1)), (4, w.shape[1] // 4)),
    "expand": lambda w: rlx.reshape(rlx.expand(rlx.unsqueeze(w, axes=(0,)), (3, *w.shape)), (12, w.shape[1])),
}
READERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "add": lambda x: x + 1.0,
    "softmax": rlx.softmax,
    "twice": lambda x: rlx.tanh(x) * rlx.reduce_max(x, axes=(0,)),
    "top_k": lambda x: rlx.top_k(x, k=3)[0],
    "cum_sum": lambda x: rlx.cum_sum(x, axis=1),
    "product": lambda x: rlx.matmul(x, rlx.transpose(x)),
    "arg_max": lambda x: rlx.arg_max(x, axis=1),
    "gather": lambda x: rlx.softmax(rlx.gather(x, np.array([2, 0, -1]))),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("encoding", STORED)
def test_views_of_blocks(encoding: str, view: str) -> None:
    g = rlx.Graph("views")
    w, params = encoded(g, encoding, 4, 3 * encoding_named(encoding).block)
    for name, reader in READERS.items():
        g.output(reader(VIEWS[view](w)), name)
    compare(g, {}, params)


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("encoding", STORED)
def test_a_table_that_is_looked_up_normalised_and_multiplied(encoding: str, device: str) -> None:
    """As the embedding of a language model with tied weights, of an odd number of blocks, in runs of all lengths."""
    if device == "xla":
        pytest.importorskip("jax")
    g = rlx.Graph("tied")
    columns = 3 * encoding_named(encoding).block
    w, params = encoded(g, encoding, 7, columns)
    t = rlx.Dim("t", 1, 40)
    h = rlx.gather(w, g.input("ids", (t,), "i64"))
    scale, more = encoded(g, encoding, columns, name="scale")
    y = rlx.rms_norm(h, scale)
    g.output(y, "normal")
    g.output(rlx.matmul(y + h, rlx.transpose(w)), "logits")
    for n in (1, 3, 40):
        ids = np.random.default_rng(n).integers(-7, 7, n)
        compare(g, {"ids": ids}, params | more, device)


@pytest.mark.parametrize("encoding", STORED)
def test_operands_of_anchors_on_either_side(encoding: str) -> None:
    g = rlx.Graph("anchors")
    b = encoding_named(encoding).block
    w, params = encoded(g, encoding, 5, b)
    image, more = encoded(g, encoding, 1, 3, 5, b, name="image")
    q, more2 = encoded(g, encoding, 1, 2, 5, b, name="q")
    x = g.input("x", (b, 6))
    g.output(rlx.matmul(w, x), "left")
    g.output(rlx.matmul(rlx.transpose(x), rlx.transpose(w)), "right")
    kernel = g.input("kernel", (4, 3, 3, 3))
    g.output(rlx.conv(image, kernel, pads=(1, 1, 1, 1)), "image")
    g.output(rlx.attention(q, q, g.input("v", (1, 2, 5, 32))), "attention")
    inputs = {"x": normals(b, 6), "kernel": normals(4, 3, 3, 3), "v": normals(1, 2, 5, 32)}
    compare(g, inputs, params | more | more2)


# ---- regions


@pytest.mark.parametrize("device", ["cpu", "reference", "xla"])
@pytest.mark.parametrize("encoding", STORED)
def test_regions_take_blocks(encoding: str, device: str) -> None:
    """Captured, chosen, carried and scanned: a scan goes over layers of weights as they are stored."""
    if device == "xla":
        pytest.importorskip("jax")
    g = rlx.Graph("regions")
    b = encoding_named(encoding).block
    w, params = encoded(g, encoding, b, b)
    layers, more = encoded(g, encoding, 3, b, b, name="layers", seed=5)
    x, yes = g.input("x", (rlx.Dim("t", 1, 9), b)), g.input("yes", (), "bool")
    g.output(rlx.cond(yes, lambda: rlx.matmul(x, rlx.transpose(w)), lambda: x * 2.0), "product")
    g.output(rlx.cond(yes, lambda: w, lambda: rlx.softmax(w)), "chosen")
    g.output(rlx.cond(yes, lambda: rlx.top_k(w, k=2)[0], lambda: rlx.top_k(w * 2.0, k=2)[0]), "special")

    def layer(h: Any, row: Any) -> tuple[Any, Any]:
        return rlx.tanh(rlx.matmul(h, rlx.transpose(row))), rlx.softmax(row)

    last, rows = rlx.scan(layer, x, layers)
    g.output(last, "last")
    g.output(rows, "rows")
    few = lambda a: rlx.reduce_max(a, keepdims=False) < 100.0  # noqa: E731
    g.output(rlx.while_loop(few, lambda a: a * 2.0 + rlx.abs(w), w), "carried")
    for chosen in (True, False):
        compare(g, {"x": normals(9, b), "yes": np.array(chosen)}, params | more, device)


# ---- experts


def experts(encoding: str, transposed: bool, count: int = 32, k: int = 96, n: int = 64) -> tuple[Any, dict[str, Any]]:
    g = rlx.Graph("experts")
    t = rlx.Dim("t", 1, 90)
    x, numbers = g.input("x", (t, k)), g.input("numbers", (t,), "i32")
    w, params = encoded(g, encoding, count, *((n, k) if transposed else (k, n)))
    g.output(rlx.grouped_matmul(x, w, numbers, transposed=transposed), "y")
    return g, params


@pytest.mark.sample(2)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("encoding", STORED)
def test_products_with_encoded_experts(encoding: str, transposed: bool) -> None:
    """Those of decoded weights, in the memory that the blocks take; bits depend on neither residency nor other rows.

    Numbers of blocks that are multiplied in registers are scaled after they are summed; others give the same bits.
    """
    block = encoding_named(encoding).block
    k, n = 4 * block, 64 if transposed else 2 * block  # whole blocks of k in the order of f32 too
    g, params = experts(encoding, transposed, k=k, n=n)
    model = rlx.compile(g, device="cpu")
    model.set_params(params)
    plain = rlx.Graph("decoded")
    shape = g.params[0].shape
    x, numbers = plain.input("x", (rlx.Dim("t", 1, 90), k)), plain.input("numbers", (rlx.Dim("t", 1, 90),), "i32")
    w = plain.param("w", data=encoding_named(encoding).decode(params["w"], [int(n) for n in shape]))  # type: ignore[call-overload]
    plain.output(rlx.grouped_matmul(x, w, numbers, transposed=transposed), "y")
    other = rlx.compile(plain, device="cpu")
    for rows in (1, 3, 90):
        inputs = {"x": normals(rows, k), "numbers": np.random.default_rng(rows).integers(-32, 32, rows, np.int32)}
        compare(g, inputs, params)
        expected = model(inputs)["y"]
        decoded = other(inputs)["y"]
        np.testing.assert_allclose(expected, decoded, rtol=1e-4, atol=1e-4 * float(np.abs(decoded).max()))
        assert np.array_equal(expected, decoded) or (transposed and encoding in CODES)
        alone = model({name: array[-1:] for name, array in inputs.items()})["y"]
        assert np.array_equal(alone, expected[-1:])
        for mask in (np.arange(32) % 3 == 0, np.zeros(32, np.bool_), None):
            model.set_resident_experts(mask)
            assert np.array_equal(model(inputs)["y"], expected)
    assert model.expert_layers[0].expert_bytes * 32 == params["w"].nbytes
    assert params["w"].nbytes <= model.needs.prepared < params["w"].nbytes + 4096


# ---- an encoding that nobody knows yet


class Fresh(Encoding):
    """24 bytes of a block are elements / 16, less 8; blocks of 24 are parts of vectors."""

    name, block, block_bytes = "test_fresh", 24, 25

    def of_block(self, k: Any, byte: Callable[[Any], Any], i: Any) -> Any:
        return k.cast(byte(1 + i), "f32") / 16.0 - 8.0

    def _encode_blocks(self, blocks: Any, weights: Any) -> Any:
        stored = np.clip(np.rint((blocks + 8) * 16), 0, 255).astype(np.uint8)
        return np.concatenate([np.full((len(blocks), 1), 255, np.uint8), stored], axis=1)


@pytest.fixture
def fresh() -> Iterator[str]:
    register_encoding(Fresh)
    yield Fresh.name
    del ENCODINGS[Fresh.name]


@pytest.mark.parametrize("name", ["softmax", "top_k", "matmul", "gather"])
def test_another_encoding_needs_no_more_than_its_class(fresh: str, name: str) -> None:
    assert check(encoded_cases(name, fresh)) > 0


@pytest.mark.parametrize("transposed", [True, False])
def test_experts_of_another_encoding(fresh: str, transposed: bool) -> None:
    g, params = experts(fresh, transposed, count=5, k=72, n=48)
    compare(g, {"x": normals(20, 72), "numbers": np.arange(20, dtype=np.int32) % 5}, params)


# ---- what is refused


def test_what_can_not_be_encoded_is_refused_where_it_is_declared() -> None:
    g = rlx.Graph("refused")
    with pytest.raises(ShapeError, match=r"param 'a'.*multiple of the block of 32"):
        g.param("a", (4, 33), encoding="q8_0")
    with pytest.raises(ShapeError, match=r"param 'b'.*multiple"):
        g.param("b", (), encoding="q4_0")
    with pytest.raises(ShapeError, match=r"param 'c'.*give ints"):
        g.param("c", (rlx.Dim("n", 1, 4), 32), encoding="q8_0")
    with pytest.raises(DTypeError, match=r"param 'd'.*floating-point"):
        g.param("d", (4, 32), "i32", encoding="q8_0")
    with pytest.raises(DTypeError, match=r"param 'e'.*iq2_xs is decoded when it is loaded"):
        g.param("e", (4, 256), encoding="iq2_xs")


def test_results_of_ops_are_never_encoded() -> None:
    g = rlx.Graph("types")
    w = g.param("w", (4, 32), encoding="q8_0")
    for made in (rlx.identity(w), rlx.reshape(w, (128,)), rlx.transpose(w), rlx.gather(w, np.array([1]))):
        assert made.type.encoding is None
    assert w.type.decoded == rlx.abs(w).type
    assert w.type.decoded.dtype is DTYPES["f32"]


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
@pytest.mark.parametrize("device", ["interp", "cpu"])
def test_blocks_that_a_run_makes_are_those_of_the_encoder(name: str, device: str) -> None:
    """Byte by byte: halves, zeros, blocks of one sign, huge and tiny numbers."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((7, 96)).astype(np.float32)
    x[1], x[2, :32], x[3] = 0, 1.0, np.abs(x[3])
    x[4] *= 1e30
    x[5] *= np.float32(1e-30)
    x[6, :64] = np.arange(64) - 31.5
    g = rlx.Graph("encode")
    held = g.state("held", x.shape, encoding=name)
    g.update(held, rlx.encode(g.input("x", x.shape), encoding=name))
    model = rlx.compile(g, device=device)
    model.run({"x": x})
    encoding = encoding_named(name)
    assert np.array_equal(np.asarray(model.states["held"]._held()), encoding.encode(x))
    with np.errstate(invalid="ignore"):
        want = encoding.decode(encoding.encode(x), x.shape)
    np.testing.assert_array_equal(model.states["held"].read(), want)


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_elements_that_were_encoded_once_are_kept(name: str) -> None:
    encoding = encoding_named(name)
    x = np.random.default_rng(2).standard_normal((500, 64)).astype(np.float32)
    once = encoding.decode(encoding.encode(x), x.shape)
    assert np.array_equal(encoding.decode(encoding.encode(once), x.shape), once)


def test_what_can_not_be_encoded() -> None:
    g = rlx.Graph("bad")
    with pytest.raises(ShapeError, match="multiple of the block of 32"):
        rlx.encode(g.input("x", (2, 33)), encoding="q8_0")
    with pytest.raises(OptionError, match="use q8_0 or q4_0"):
        rlx.encode(g.input("y", (2, 256)), encoding="q4_k")
    with pytest.raises(DTypeError, match="use q8_0 or q4_0"):
        g.state("s", (2, 256), encoding="q4_k")
    held = g.state("held", (4, 32), encoding="q8_0")
    rows = rlx.dynamic_update_slice(held, g.input("rows", (1, 32)), g.input("at", (), "i64"), axis=0)
    with pytest.raises(ShapeError, match="rows that encode has made"):
        g.update(held, rows)


@pytest.mark.parametrize("device", ["reference", "interp", "cpu"])
def test_encoded_states_are_read_by_any_op(device: str) -> None:
    """As elements: outputs, sums, a later version of them; writing, saving and clones keep their bytes."""
    x = np.random.default_rng(5).standard_normal((6, 64)).astype(np.float32)
    g = rlx.Graph("any")
    held = g.state("held", (6, 64), encoding="q8_0")
    rows = rlx.encode(g.input("rows", (2, 64)), encoding="q8_0")
    new = rlx.dynamic_update_slice(held, rows, g.input("at", (), "i64"), axis=0)
    g.update(held, new)
    g.output(held + 1.0, "old")
    g.output(new, "new")
    g.output(rlx.matmul(new, rlx.ops.transpose(rows, perm=(1, 0))), "product")
    model = rlx.compile(g, device=device)
    model.states["held"].write(x)
    encoding = encoding_named("q8_0")
    before = encoding.decode(encoding.encode(x), x.shape)
    old, after, product = (np.asarray(a) for a in model.run({"rows": x[:2] * 3, "at": np.array(3)}))
    made = encoding.decode(encoding.encode(x[:2] * 3), (2, 64))
    expected = before.copy()
    expected[3:5] = made
    np.testing.assert_array_equal(old, before + 1)
    np.testing.assert_array_equal(after, expected)
    np.testing.assert_allclose(product, expected @ made.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(model.states["held"].read()), expected)
    with pytest.raises(ShapeError, match="stored in 408 bytes"):
        model.states["held"].write(np.zeros(3, np.uint8))
