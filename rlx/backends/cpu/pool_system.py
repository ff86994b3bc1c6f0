"""What the native code of the thread pool asks of the system: to sleep and be woken, to give way, and which CPU it has.

Where other processes want the CPUs too, a thread that the system stops inside a chunk keeps all threads of the run
waiting. So each gives way of its own accord, between two chunks, before the system would make it; and a worker that
finds itself on the CPU of the caller moves to another, where it only takes turns with a stranger.
"""

from __future__ import annotations

import platform
import sys

__all__ = ["NO_PAUSE", "PAUSE", "system_ir"]

TURN_NS = 2_000_000  # systems let a thread run for 3 or 4 ms if another waits
LOST_NS = 500_000  # away from the CPU after giving way, from which on somebody else wants it
STAY_NS = 20_000_000  # that a caller stays where it went

FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98}

PAUSE = {
    "x86_64": "call void @llvm.x86.sse2.pause()",
    "AMD64": "call void @llvm.x86.sse2.pause()",
    "aarch64": 'call void asm sideeffect "isb sy", ""()',
    "arm64": 'call void asm sideeffect "isb sy", ""()',
}
NO_PAUSE = 'call void asm sideeffect "", "~{memory}"()'

LINUX_IR = """
declare i32 @sched_getcpu()
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @sched_setaffinity(i32, i64, ptr)
define internal i32 @this_cpu() nounwind {
  %cpu = call i32 @sched_getcpu()
  ret i32 %cpu
}
; moves this thread off a CPU, if it may use another; the CPUs that it may use stay the same
define internal void @leave_cpu(i32 %cpu) nounwind noinline {
entry:
  %mask = alloca [16 x i64], align 8
  %got = call i32 @sched_getaffinity(i32 0, i64 128, ptr %mask)
  %good = icmp sge i32 %got, 0
  %inside = icmp ult i32 %cpu, 1024
  %fine = and i1 %good, %inside
  br i1 %fine, label %without, label %done
without:
  %wide = zext i32 %cpu to i64
  %at = lshr i64 %wide, 6
  %low = and i64 %wide, 63
  %bit = shl i64 1, %low
  %others = xor i64 %bit, -1
  %p = getelementptr i64, ptr %mask, i64 %at
  %all = load i64, ptr %p, align 8
  %rest = and i64 %all, %others
  store i64 %rest, ptr %p, align 8
  %set = call i32 @sched_setaffinity(i32 0, i64 128, ptr %mask)
  %moved = icmp eq i32 %set, 0
  br i1 %moved, label %restore, label %done
restore:
  store i64 %all, ptr %p, align 8
  %back = call i32 @sched_setaffinity(i32 0, i64 128, ptr %mask)
  br label %done
done:
  ret void
}
"""

FUTEX_IR = """
declare i64 @syscall(i64, ...)
; a futex knows sleepers by 32 bits: two workers may share one, and both are woken
define internal i64 @futex_bits(i64 %workers) nounwind alwaysinline {
  %high = lshr i64 %workers, 32
  %both = or i64 %workers, %high
  %bits = and i64 %both, 4294967295
  ret i64 %bits
}
define internal void @sleep_on(ptr %epoch, i32 %seen, i64 %me) nounwind {
  %bits = call i64 @futex_bits(i64 %me)
  %r = call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %epoch, i64 137, i32 %seen, ptr null, ptr null, i64 %bits)
  ret void
}
define internal void @wake(ptr %epoch, i64 %workers) nounwind {
  %old = atomicrmw add ptr %epoch, i32 1 seq_cst
  %bits = call i64 @futex_bits(i64 %workers)
  %r = call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %epoch, i64 138, i64 64, ptr null, ptr null, i64 %bits)
  ret void
}
"""

# Without a futex workers look for work every 200 microseconds.
POLL_IR = """
declare i32 @usleep(i32)
define internal void @sleep_on(ptr %epoch, i32 %seen, i64 %me) nounwind {
  %r = call i32 @usleep(i32 200)
  ret void
}
define internal void @wake(ptr %epoch, i64 %workers) nounwind {
  ret void
}
define internal i32 @this_cpu() nounwind {
  ret i32 -1
}
define internal void @leave_cpu(i32 %cpu) nounwind {
  ret void
}
"""

GIVE_WAY_IR = """
declare i32 @sched_yield()

; whether more than a turn has passed from the time at %since to %t
define internal i1 @turn_over(ptr %since, i64 %t) nounwind alwaysinline {
  %from = load i64, ptr %since, align 8
  %passed = sub i64 %t, %from
  %over = icmp sgt i64 %passed, $TURN_NS
  ret i1 %over
}

; lets others have the CPU; whether one had it for long. %since is when this thread got it
define internal i1 @yield(ptr %since, i64 %t) nounwind noinline {
  %y = call i32 @sched_yield()
  %t.new = call i64 @now()
  store i64 %t.new, ptr %since, align 8
  %away = sub i64 %t.new, %t
  %lost = icmp sgt i64 %away, $LOST_NS
  ret i1 %lost
}

; the same when this thread has had it for long
define internal i1 @give_way(ptr %since) nounwind alwaysinline {
entry:
  %t = call i64 @now()
  %long = call i1 @turn_over(ptr %since, i64 %t)
  br i1 %long, label %over, label %done
over:
  %away = call i1 @yield(ptr %since, i64 %t)
  br label %done
done:
  %lost = phi i1 [ false, %entry ], [ %away, %over ]
  ret i1 %lost
}

define internal void @note_cpu(ptr %slot) nounwind alwaysinline {
  %cpu = call i32 @this_cpu()
  %caller.p = getelementptr i8, ptr %slot, i64 $CALLER_CPU
  store atomic i32 %cpu, ptr %caller.p monotonic, align 8
  ret void
}

; moves the caller off a CPU that it shares with a stranger, at most once in a while: where it stands still, all do.
; A worker that has the other CPU then leaves it to the caller
define internal void @change_cpu(ptr %slot) nounwind noinline {
entry:
  %moved = getelementptr i8, ptr %slot, i64 $CALLER_MOVED
  %t = call i64 @now()
  %from = load i64, ptr %moved, align 8
  %passed = sub i64 %t, %from
  %again = icmp sgt i64 %passed, $STAY_NS
  br i1 %again, label %leave, label %done
leave:
  store i64 %t, ptr %moved, align 8
  %cpu = call i32 @this_cpu()
  call void @leave_cpu(i32 %cpu)
  call void @note_cpu(ptr %slot)
  br label %done
done:
  ret void
}

; moves a worker off the caller's CPU, at most once a turn: %moved is when it did so last
define internal void @keep_apart(ptr %slot, ptr %moved) nounwind alwaysinline {
entry:
  %cpu = call i32 @this_cpu()
  %caller.p = getelementptr i8, ptr %slot, i64 $CALLER_CPU
  %caller = load atomic i32, ptr %caller.p monotonic, align 8
  %same = icmp eq i32 %cpu, %caller
  %known = icmp sge i32 %cpu, 0
  %both = and i1 %same, %known
  br i1 %both, label %ask, label %done
ask:
  %t = call i64 @now()
  %again = call i1 @turn_over(ptr %moved, i64 %t)
  br i1 %again, label %leave, label %done
leave:
  store i64 %t, ptr %moved, align 8
  call void @leave_cpu(i32 %cpu)
  br label %done
done:
  ret void
}
"""


def system_ir(*, futex: bool | None) -> tuple[str, dict[str, object]]:
    """IR text of these functions, and what the names in it stand for, but for those of places in a slot.

    It takes `i64 @now()`, in nanoseconds. `futex=False` gives the portable variant, None what this system has.
    """
    machine = platform.machine()
    if futex is None:
        futex = sys.platform == "linux" and machine in FUTEX_CALL
    pause = PAUSE.get(machine, NO_PAUSE)
    text = (FUTEX_IR + LINUX_IR if futex else POLL_IR) + GIVE_WAY_IR
    if "llvm.x86" in pause:
        text += "declare void @llvm.x86.sse2.pause()\n"
    times = {"TURN_NS": TURN_NS, "LOST_NS": LOST_NS, "STAY_NS": STAY_NS}
    return text, {**times, "FUTEX": FUTEX_CALL.get(machine, 0), "PAUSE": pause}
