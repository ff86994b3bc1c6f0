"""The IR builder: what it prints compiles and computes what its calls say, for scalars and vectors alike."""

import ctypes
import math
import struct

import numpy as np
import pytest

from rlx.backends.cpu.jit.compile import compile_object
from rlx.backends.cpu.jit.load import load_object
from rlx.backends.cpu.llvm.builder import Function, Module, constant, suffix, vec, width

keep = []


def run(f, *args, ret=None):
    """Compiles a function and calls it; arrays go as pointers, ints as i64, floats as double."""
    library = load_object(compile_object(Module([f]).text(), optimize=False))
    keep.append(library)
    values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in args]
    types = [ctypes.c_double if isinstance(a, float) else ctypes.c_int64 for a in values]
    return ctypes.CFUNCTYPE(ret, *types)(library.address(f.name))(*values)


def test_types():
    assert vec("float", 1) == "float"
    assert vec("float", 8) == "<8 x float>"
    assert width("<8 x float>") == 8
    assert suffix("<8 x float>") == "v8f32"
    assert suffix("ptr") == "p0"


@pytest.mark.parametrize("value", [0.1, -0.0, 1e-45, 3.4028234663852886e38, math.inf, -math.inf, 1 / 3])
def test_float_constants_are_exact(value):
    f = Function("value", [("ptr", "single"), ("ptr", "double")])
    f.store(value, "%single", ty="float")
    f.store(value, "%double", ty="double")
    f.ret()
    single, double = np.zeros(1, np.float32), np.zeros(1)
    run(f, single, double)
    assert single.tobytes() == struct.pack("<f", value)
    assert double.tobytes() == struct.pack("<d", value)


def test_half_constants_are_rounded_to_even():
    assert constant(1.0, "half") == "0xH3C00"
    assert constant(1.0 + 2.0**-8, "bfloat") == "0xR3F80"
    assert constant(1.0 + 3 * 2.0**-8, "bfloat") == "0xR3F82"
    assert constant(math.inf, "bfloat") == "0xR7F80"


def test_constants_reject_what_does_not_fit():
    with pytest.raises(TypeError, match="expected an int"):
        constant(0.5, "i32")
    with pytest.raises(ValueError, match="expected 4 values"):
        constant([1, 2], "<4 x i32>")


@pytest.mark.parametrize("w", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 37])
def test_same_calls_for_every_width(w, n):
    """A masked axpy: elements beyond n stay as they are."""
    f = Function("axpy", [("ptr", "x"), ("ptr", "y"), ("i64", "n"), ("double", "a")])
    a = f.splat(f.cast("fptrunc", "%a", "float"), w)

    def body(i, _):
        mask = f.mask_below(f.sub("%n", i), w)
        x, y = f.gep("%x", i, "float"), f.gep("%y", i, "float")
        ty = vec("float", w)
        f.masked_store(f.fma(a, f.masked_load(ty, x, mask), f.masked_load(ty, y, mask)), y, mask)

    f.loop(0, "%n", w, [], body)
    f.ret()
    x, y = np.arange(64, dtype=np.float32), np.ones(64, np.float32)
    run(f, x, y, n, 2.0)
    assert (y[:n] == 1 + 2 * x[:n]).all()
    assert (y[n:] == 1).all()


@pytest.mark.parametrize("n", [0, 1, 10])
def test_loop_carries_values_and_may_run_zero_times(n):
    f = Function("total", [("i64", "n")], "i64")
    total, product = f.loop(0, "%n", 1, [7, ("i64", 1)], lambda i, c: [f.add(c[0], i), f.mul(c[1], 2)])
    f.ret(f.add(total, product))
    assert run(f, n, ret=ctypes.c_int64) == 7 + sum(range(n)) + 2**n


def test_nested_control():
    """Counts Collatz steps of 27: while, if with values, and switch inside."""
    f = Function("collatz", [("i64", "n")], "i64")
    out = f.alloca("i64")
    f.store(0, out, ty="i64")

    def step(state):
        n, count = state
        (following,) = f.if_(
            f.cmp("eq", f.and_(n, 1), 0),
            lambda: [f.lshr(n, 1)],
            lambda: [f.add(f.mul(n, 3), 1)],
        )
        f.switch(following, {1: lambda: f.store(1, out, ty="i64"), 2: lambda: f.store(2, out, ty="i64")})
        return [following, f.add(count, 1)]

    _, count = f.while_(["%n", 0], lambda s: f.cmp("ne", s[0], 1), step)
    f.ret(f.add(f.mul(count, 10), f.load("i64", out)))
    assert run(f, 27, ret=ctypes.c_int64) == 1111


def test_min_and_max_keep_the_second_operand_of_a_nan():
    f = Function("bounds", [("ptr", "x"), ("ptr", "y")])
    x = f.load("<4 x float>", "%x")
    f.store(f.max(-1.0, f.min(1.0, x)), "%y")
    f.ret()
    x, y = np.array([math.nan, 5, -5, 0.5], np.float32), np.zeros(4, np.float32)
    run(f, x, y)
    np.testing.assert_array_equal(y, np.array([math.nan, 1, -1, 0.5], np.float32))


def test_gather_reduce_and_arrays():
    f = Function("pick", [("ptr", "at")], "i64")
    table = f.array("squares", "i64", [i * i for i in range(20)])
    values = f.gather("i64", table, f.load("<4 x i64>", "%at"))
    f.ret(f.reduce(values, f.add))
    assert run(f, np.array([1, 19, 4, 0]), ret=ctypes.c_int64) == 1 + 361 + 16


def test_compare_and_swap():
    f = Function("swap", [("ptr", "p"), ("i64", "old"), ("i64", "new")], "i64")
    found, done = f.cmpxchg("%p", "%old", "%new")
    f.ret(f.add(f.mul(found, 10), f.cast("zext", done, "i64")))
    cell = np.array([5])
    assert run(f, cell, 4, 9, ret=ctypes.c_int64) == 50
    assert run(f, cell, 5, 9, ret=ctypes.c_int64) == 51
    assert cell[0] == 9


@pytest.mark.parametrize("kind", ["internal", "shared"])
def test_module_brings_callees_and_declarations(kind):
    helper = Function("root", [("double", "x")], "double", **{kind: True})
    helper.ret(helper.intrinsic("sqrt", "%x"))
    f = Function("entry", [("double", "x")], "double")
    f.ret(f.add(f.call(helper, ["%x"]), f.call(helper, [4.0])))
    text = Module([f]).text()
    assert text.count("declare") == 1
    assert text.count("double @root(double %x) nounwind {") == 1
    assert run(f, 9.0, ret=ctypes.c_double) == 5.0


def test_mistakes_are_reported_where_they_are_made():
    f = Function("wrong", [("i64", "n")])
    with pytest.raises(ValueError, match="returned 0 values, expected 1"):
        f.loop(0, "%n", 1, [0], lambda i, c: None)
    with pytest.raises(TypeError, match="not known"):
        f.fma(1.0, 2.0, 3.0)
    module = Module([Function("same", [])])
    with pytest.raises(ValueError, match="defined twice"):
        module.add(Function("same", []))
