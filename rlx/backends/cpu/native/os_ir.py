"""What the native code of the thread pool asks of the system: to sleep and be woken, to give way, and which CPU it has.

Where other processes want the CPUs too, a thread that the system stops inside a chunk keeps all threads of the run
waiting. So each gives way of its own accord, between two chunks, before the system would make it; and a worker that
finds itself on the CPU of the caller moves to another, where it only takes turns with a stranger. Who is stopped all
the same, goes on on the CPU of the caller once that waits: what is left of a chunk is less than a stranger's turn.
"""

from __future__ import annotations

import platform
import sys

__all__ = ["NO_PAUSE", "PAUSE", "system_ir"]

TURN_NS = 2_000_000  # systems let a thread run for 3 or 4 ms if another waits
LOST_NS = 500_000  # away from the CPU after giving way, from which on somebody else wants it
STAY_NS = 20_000_000  # that a caller stays where it went
LOOK_NS = 50_000  # for each worker, between two looks of a waiting caller at them

FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
GETTID_CALL = {"x86_64": 186, "aarch64": 178, "riscv64": 178}

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
; moves a thread (0: this one) to a CPU or off it, if it may run there; the CPUs that it may use stay the same
define internal void @move(i32 %thread, i32 %cpu, i1 %to) nounwind noinline {
entry:
  %all = alloca [16 x i64], align 8
  %some = alloca [16 x i64], align 8
  %got = call i32 @sched_getaffinity(i32 %thread, i64 128, ptr %all)
  %good = icmp sge i32 %got, 0
  %inside = icmp ult i32 %cpu, 1024
  %fine = and i1 %good, %inside
  br i1 %fine, label %choose, label %done
choose:
  %wide = zext i32 %cpu to i64
  %at = lshr i64 %wide, 6
  %low = and i64 %wide, 63
  %bit = shl i64 1, %low
  %others = xor i64 %bit, -1
  %keep = select i1 %to, i64 %bit, i64 %others
  %from = getelementptr i64, ptr %all, i64 %at
  %word = load i64, ptr %from, align 8
  %left = and i64 %word, %keep
  %copy = load [16 x i64], ptr %all, align 8
  %start = select i1 %to, [16 x i64] zeroinitializer, [16 x i64] %copy
  store [16 x i64] %start, ptr %some, align 8
  %into = getelementptr i64, ptr %some, i64 %at
  store i64 %left, ptr %into, align 8
  %set = call i32 @sched_setaffinity(i32 %thread, i64 128, ptr %some)  ; fails where none is left
  %moved = icmp eq i32 %set, 0
  br i1 %moved, label %restore, label %done
restore:
  %back = call i32 @sched_setaffinity(i32 %thread, i64 128, ptr %all)
  br label %done
done:
  ret void
}
define internal i32 @this_thread() nounwind {
  %long = call i64 (i64, ...) @syscall(i64 $GETTID)
  %thread = trunc i64 %long to i32
  ret i32 %thread
}
; nanoseconds that a thread has used CPUs, 0 if that is not known
define internal i64 @used_by(i32 %thread) nounwind {
  %not = xor i32 %thread, -1
  %high = shl i32 %not, 3
  %clock = or i32 %high, 6
  %used = call i64 @time_of(i32 %clock)
  ret i64 %used
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
define internal void @move(i32 %thread, i32 %cpu, i1 %to) nounwind {
  ret void
}
define internal i32 @this_thread() nounwind {
  ret i32 0
}
define internal i64 @used_by(i32 %thread) nounwind {
  ret i64 0
}
"""

GIVE_WAY_IR = """
declare i32 @llvm.abs.i32(i32, i1)
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

define internal void @note_cpu(ptr %slot) nounwind alwaysinline {
entry:
  %cpu = call i32 @this_cpu()
  %caller.p = getelementptr i8, ptr %slot, i64 $CALLER_CPU
  %last = load atomic i32, ptr %caller.p monotonic, align 8
  %new = icmp ne i32 %cpu, %last
  br i1 %new, label %note, label %done
note:
  store atomic i32 %cpu, ptr %caller.p monotonic, align 8
  br label %done
done:
  ret void
}

; moves the caller off a CPU that it shares with a stranger, at most once in a while: where it stands still, all do.
; A worker that has the other CPU then leaves it to the caller
define internal void @change_cpu(ptr %slot) nounwind noinline {
entry:
  %met.p = getelementptr i8, ptr %slot, i64 $MET
  %met = atomicrmw xchg ptr %met.p, i64 0 monotonic
  %stranger = icmp eq i64 %met, 0
  br i1 %stranger, label %ask, label %done
ask:
  %moved = getelementptr i8, ptr %slot, i64 $CALLER_MOVED
  %t = call i64 @now()
  %from = load i64, ptr %moved, align 8
  %passed = sub i64 %t, %from
  %again = icmp sgt i64 %passed, $STAY_NS
  br i1 %again, label %leave, label %done
leave:
  store i64 %t, ptr %moved, align 8
  %cpu = call i32 @this_cpu()
  call void @move(i32 0, i32 %cpu, i1 false)
  call void @note_cpu(ptr %slot)
  br label %done
done:
  ret void
}

; whether a worker is on the caller's CPU
define internal i1 @beside_caller(ptr %slot) nounwind alwaysinline {
  %cpu = call i32 @this_cpu()
  %caller.p = getelementptr i8, ptr %slot, i64 $CALLER_CPU
  %caller = load atomic i32, ptr %caller.p monotonic, align 8
  %same = icmp eq i32 %cpu, %caller
  %known = icmp sge i32 %cpu, 0
  %both = and i1 %same, %known
  ret i1 %both
}

; moves a worker off the caller's CPU; whether it did
define internal i1 @keep_apart(ptr %slot, ptr %me) nounwind alwaysinline {
entry:
  %beside = call i1 @beside_caller(ptr %slot)
  br i1 %beside, label %part, label %done
part:
  %left = call i1 @part(ptr %slot, ptr %me)
  br label %done
done:
  %moved = phi i1 [ false, %entry ], [ %left, %part ]
  ret i1 %moved
}

; the same once it is known to be there; at most once a turn, and it begins a turn where it goes
define internal i1 @part(ptr %slot, ptr %me) nounwind noinline {
entry:
  %cpu = call i32 @this_cpu()
  %met.p = getelementptr i8, ptr %slot, i64 $MET
  store atomic i64 1, ptr %met.p monotonic, align 8
  %moved.p = getelementptr i64, ptr %me, i64 $MY_MOVED
  %pool.p = getelementptr i64, ptr %me, i64 $MY_POOL
  %pool = load ptr, ptr %pool.p, align 8
  %moving.p = getelementptr i8, ptr %pool, i64 $MOVING
  %t = call i64 @now()
  %again = call i1 @turn_over(ptr %moved.p, i64 %t)
  br i1 %again, label %take, label %done
take:
  %others = atomicrmw xchg ptr %moving.p, i32 1 acquire
  %free = icmp eq i32 %others, 0
  br i1 %free, label %leave, label %done
leave:
  store i64 %t, ptr %moved.p, align 8
  call void @move(i32 0, i32 %cpu, i1 false)
  store atomic i32 0, ptr %moving.p release, align 8
  %t.new = call i64 @now()
  store i64 %t.new, ptr %me, align 8
  ret i1 true
done:
  ret i1 false
}

; between two chunks, when a thread has had its CPU for long, or is a worker that the caller has fetched: %t is now
define internal void @end_turn(ptr %slot, i64 %id, ptr %since, i64 %t) nounwind noinline {
entry:
  %caller = icmp eq i64 %id, 0
  br i1 %caller, label %give, label %worker
give:
  %lost = call i1 @yield(ptr %since, i64 %t)
  br i1 %lost, label %change, label %done
change:
  call void @change_cpu(ptr %slot)
  br label %done
worker:
  %number.p = getelementptr i64, ptr %since, i64 $MY_THREAD
  %number = load i32, ptr %number.p, align 8
  %offset = mul i64 %id, $SHARE_BYTES
  %from = add i64 %offset, $SHARES_THREAD
  %thread.p = getelementptr i8, ptr %slot, i64 %from
  store atomic i32 %number, ptr %thread.p monotonic, align 8
  %parted = call i1 @keep_apart(ptr %slot, ptr %since)
  br i1 %parted, label %done, label %stay
stay:
  %y = call i1 @yield(ptr %since, i64 %t)
  br label %done
done:
  ret void
}

; Has workers that the system stopped inside a chunk go on here, on the CPU of a caller that waits for them: those that
; used none since it looked last. A look takes some 0.3 us a worker, so that more of them are looked at less often
define internal void @look_after(ptr %pool, ptr %slot, i64 %t) nounwind noinline {
entry:
  %moving.p = getelementptr i8, ptr %pool, i64 $MOVING
  %looked.p = getelementptr i8, ptr %slot, i64 $LOOKED
  %taken.p = getelementptr i8, ptr %slot, i64 $TAKEN
  %looked = load i64, ptr %looked.p, align 8
  %passed = sub i64 %t, %looked
  %taken = load atomic i64, ptr %taken.p monotonic, align 8
  %workers = call i64 @llvm.ctpop.i64(i64 %taken)
  %pause = mul i64 %workers, $LOOK_NS
  %due = icmp sgt i64 %passed, %pause
  br i1 %due, label %begin, label %done
begin:
  store i64 %t, ptr %looked.p, align 8
  %cpu = call i32 @this_cpu()
  br label %next
next:
  %rest = phi i64 [ %taken, %begin ], [ %rest.next, %after ]
  %some = icmp ne i64 %rest, 0
  br i1 %some, label %look, label %done
look:
  %id = call i64 @llvm.cttz.i64(i64 %rest, i1 true)
  %below = sub i64 %rest, 1
  %rest.next = and i64 %rest, %below
  %offset = mul i64 %id, $SHARE_BYTES
  %from = add i64 %offset, $SHARES
  %share = getelementptr i8, ptr %slot, i64 %from
  %thread.p = getelementptr i8, ptr %share, i64 $THREAD
  %used.p = getelementptr i8, ptr %share, i64 $USED
  %known = load atomic i32, ptr %thread.p monotonic, align 8
  %thread = call i32 @llvm.abs.i32(i32 %known, i1 false)
  %used = call i64 @used_by(i32 %thread)
  %used.then = load i64, ptr %used.p, align 8
  store i64 %used, ptr %used.p, align 8
  %same = icmp eq i64 %used, %used.then
  %counted = icmp ne i64 %used, 0
  %stopped = and i1 %same, %counted
  br i1 %stopped, label %take, label %after
take:
  %others = atomicrmw xchg ptr %moving.p, i32 1 acquire
  %free = icmp eq i32 %others, 0
  br i1 %free, label %move, label %after
move:
  call void @move(i32 %thread, i32 %cpu, i1 true)
  store atomic i32 0, ptr %moving.p release, align 8
  %mark = sub i32 0, %thread
  %pair = cmpxchg ptr %thread.p, i32 %known, i32 %mark monotonic monotonic
  br label %after
after:
  br label %next
done:
  ret void
}
"""


MIDWAY_IR = """
; what the caller does from time to time while it waits for workers: %t is now
define internal void @wait_on(ptr %pool, ptr %slot, i64 %t) nounwind noinline {
entry:
  %since = getelementptr i8, ptr %slot, i64 $SINCE
  call void @look_after(ptr %pool, ptr %slot, i64 %t)
  %lost = call i1 @yield(ptr %since, i64 %t)
  br i1 %lost, label %move, label %stayed
move:
  call void @change_cpu(ptr %slot)
  br label %stayed
stayed:
  call void @note_cpu(ptr %slot)
  ret void
}

; For chunks that take long, in their midst. %do = 0 asks a worker whether it should end its chunk, if it can, as its
; turn is over, or it is on the caller's CPU or fetched there; a caller gives way at once. %do = 1 gives way, as who
; waits for another thread should from time to time
define internal i64 @midway(ptr %ctx, i64 %id, i64 %do) nounwind noinline {
entry:
  %slot.p = getelementptr i64, ptr %ctx, i64 $SLOT
  %slot = load ptr, ptr %slot.p, align 8
  %t = call i64 @now()
  %asked = icmp eq i64 %do, 0
  %caller = icmp eq i64 %id, 0
  br i1 %caller, label %first, label %worker
first:
  br i1 %asked, label %first.ask, label %first.wait
first.ask:
  %since = getelementptr i8, ptr %slot, i64 $SINCE
  call void @note_cpu(ptr %slot)
  %over = call i1 @turn_over(ptr %since, i64 %t)
  br i1 %over, label %first.over, label %no
first.over:
  call void @end_turn(ptr %slot, i64 0, ptr %since, i64 %t)
  br label %no
first.wait:
  %pool.p = getelementptr i64, ptr %ctx, i64 $POOL
  %pool = load ptr, ptr %pool.p, align 8
  call void @wait_on(ptr %pool, ptr %slot, i64 %t)
  br label %no
worker:
  %offset = mul i64 %id, $SHARE_BYTES
  %from = add i64 %offset, $SHARES
  %share = getelementptr i8, ptr %slot, i64 %from
  %me.p = getelementptr i8, ptr %share, i64 $ME
  %me = load ptr, ptr %me.p, align 8
  br i1 %asked, label %worker.ask, label %worker.do
worker.ask:
  %beside = call i1 @beside_caller(ptr %slot)
  br i1 %beside, label %worker.beside, label %worker.turn
worker.beside:
  store i64 0, ptr %me, align 8
  br label %yes
worker.turn:
  %thread.p = getelementptr i8, ptr %share, i64 $THREAD
  %thread = load atomic i32, ptr %thread.p monotonic, align 8
  %fetched = icmp slt i32 %thread, 0
  %long = call i1 @turn_over(ptr %me, i64 %t)
  %ends = or i1 %long, %fetched
  br i1 %ends, label %yes, label %no
worker.do:
  call void @end_turn(ptr %slot, i64 %id, ptr %me, i64 %t)
  br label %no
yes:
  ret i64 1
no:
  ret i64 0
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
    text = (FUTEX_IR + LINUX_IR if futex else POLL_IR) + GIVE_WAY_IR + MIDWAY_IR
    if "llvm.x86" in pause:
        text += "declare void @llvm.x86.sse2.pause()\n"
    times = {"TURN_NS": TURN_NS, "LOST_NS": LOST_NS, "STAY_NS": STAY_NS, "LOOK_NS": LOOK_NS}
    return text, {**times, "FUTEX": FUTEX_CALL.get(machine, 0), "GETTID": GETTID_CALL.get(machine, 0), "PAUSE": pause}
