"""The arithmetic of a thread while it runs kernels: to nearest, denormal numbers kept, no traps.

Each thread has a control register for that (MXCSR of x86, FPCR of AArch64), which libraries set: with another one the
same kernel gives other bits. A run keeps the caller's in its state block, sets the register only where it differs, and
puts it back. Other machines are left as they are.
"""

from __future__ import annotations

import platform

__all__ = ["float_state_ir"]

CONTROL = 0xFFC0  # of MXCSR: the six bits below are flags, which operations leave behind
USUAL = 0x1F80

X86_IR = f"""
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)

define internal i32 @float_state() nounwind alwaysinline {{
  %cell = alloca i32, align 4
  call void @llvm.x86.sse.stmxcsr(ptr %cell)
  %r = load i32, ptr %cell, align 4
  ret i32 %r
}}
define internal void @set_float_state(i32 %state) nounwind noinline {{
  %cell = alloca i32, align 4
  store i32 %state, ptr %cell, align 4
  call void @llvm.x86.sse.ldmxcsr(ptr %cell)
  ret void
}}
define internal i1 @is_usual(i32 %state) nounwind alwaysinline {{
  %control = and i32 %state, {CONTROL}
  %r = icmp eq i32 %control, {USUAL}
  ret i1 %r
}}
"""

ARM_IR = """
declare i64 @llvm.aarch64.get.fpcr()
declare void @llvm.aarch64.set.fpcr(i64)

define internal i32 @float_state() nounwind alwaysinline {
  %wide = call i64 @llvm.aarch64.get.fpcr()
  %r = trunc i64 %wide to i32
  ret i32 %r
}
define internal void @set_float_state(i32 %state) nounwind noinline {
  %wide = zext i32 %state to i64
  call void @llvm.aarch64.set.fpcr(i64 %wide)
  ret void
}
define internal i1 @is_usual(i32 %state) nounwind alwaysinline {
  %r = icmp eq i32 %state, 0
  ret i1 %r
}
"""

OTHER_IR = """
define internal i32 @float_state() nounwind alwaysinline {
  ret i32 0
}
define internal void @set_float_state(i32 %state) nounwind noinline {
  ret void
}
define internal i1 @is_usual(i32 %state) nounwind alwaysinline {
  ret i1 true
}
"""

# By the register's word in the state block, which is the caller's alone.
RUN_IR = """
define internal void @enter_floats(ptr %ctx) nounwind alwaysinline {
entry:
  %state = call i32 @float_state()
  %cell = getelementptr i64, ptr %ctx, i64 $FLOATS
  store i32 %state, ptr %cell, align 8
  %usual = call i1 @is_usual(i32 %state)
  br i1 %usual, label %done, label %set
set:
  call void @set_float_state(i32 $USUAL)
  br label %done
done:
  ret void
}

define internal void @leave_floats(ptr %ctx) nounwind alwaysinline {
entry:
  %cell = getelementptr i64, ptr %ctx, i64 $FLOATS
  %state = load i32, ptr %cell, align 8
  %usual = call i1 @is_usual(i32 %state)
  br i1 %usual, label %done, label %set
set:
  call void @set_float_state(i32 %state)
  br label %done
done:
  ret void
}
"""


def float_state_ir(machine: str | None = None) -> tuple[str, dict[str, object]]:
    """IR text of these functions, and what the names in it stand for but $FLOATS; by default for this machine."""
    machine = machine or platform.machine()
    if machine in ("x86_64", "AMD64"):
        return X86_IR + RUN_IR, {"USUAL": USUAL}
    if machine in ("aarch64", "arm64"):
        return ARM_IR + RUN_IR, {"USUAL": 0}
    return OTHER_IR + RUN_IR, {"USUAL": 0}
