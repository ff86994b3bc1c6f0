"""Buffers lie in the memory of a device, kernels run on one: what a program may do, and how it is printed."""

from __future__ import annotations

import pytest

from rlx.errors import CompileError
from rlx.ir.dtype import DTYPES
from rlx.kernels.expr import Load
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.kernels.text import print_program
from rlx.kernels.verify import verify_program
from rlx.plan.plan import make_plan

F32 = DTYPES["f32"]
(I,) = out_vars(1)


def store(target: Buffer, source: Buffer, doubled: bool = False) -> Store:
    element = Load(source, (I,), F32)
    return Store(target, (4,), (I,), element + element if doubled else element)


def program(*, doubled: bool = False, device: str = "", queue: int = 0) -> Program:
    """Brings x from the host and adds 1 on the device of the program."""
    x = Buffer("x", "input", (4,), F32, space="host")
    here = Buffer("here", "arena", (4,), F32)
    y = Buffer("y", "arena", (4,), F32)
    view = Buffer("view", "arena", (4,), F32, root=here)
    kernels = [
        Kernel("bring", (store(here, x, doubled),), device=device, queue=queue),
        Kernel("double", (store(y, view, True),)),
    ]
    return Program("p", inputs=[x], run=kernels, outputs=[("y", y)])


@pytest.mark.parametrize("device", ["", "host"])
def test_a_copy_may_cross(device: str) -> None:
    """A plain copy reads one memory and writes another, on either device; a view is where its root is."""
    verify_program(program(device=device))


def test_nothing_else_may_cross() -> None:
    """Anything but a copy, and a copy on a third device, names kernel and buffer."""
    with pytest.raises(CompileError, match=r"kernel 'bring' .* reads or writes 'x' in the memory of host: copy it"):
        verify_program(program(doubled=True))
    with pytest.raises(CompileError, match="'here' in the memory of the device of the program"):
        verify_program(program(doubled=True, device="host"))
    with pytest.raises(CompileError, match=r"kernel 'bring' .* on third copies 'x'"):
        verify_program(program(device="third"))


def test_what_is_not_default_is_printed() -> None:
    """Spaces, devices and queues show where they differ from those of the program."""
    text = print_program(program(device="host", queue=1))
    assert "input    x: f32[4] in host" in text
    assert "0 copy bring (x f32[4] in host) -> here f32[4]  on host  queue 1" in text
    assert "1 map double (view f32[4]) -> y f32[4]\n" in text


def test_memory_is_not_taken_over_across_spaces() -> None:
    """A result is never written over an operand of another memory, and a plan is for one memory."""
    far = Buffer("far", "arena", (4,), F32, space="host")
    here, y = Buffer("here", "arena", (4,), F32), Buffer("y", "arena", (4,), F32)
    assert Kernel("k", (store(y, here, True),)).in_place_operands() == (here,)
    assert Kernel("k", (store(y, far),)).in_place_operands() == ()
    near = program()
    assert {interval.space for interval in make_plan(near, {}).intervals} == {""}
