"""The thread pool in native code: workers claim chunks of the phases of all running graphs.

A worker is a daemon Python thread inside one native call, without the GIL. A running graph holds a *slot*; it publishes
a phase by writing the fields of its slot and then the *ticket*, one word `generation:32 | end:16 | next:16`. The caller
and the even workers claim chunk `next`, the odd ones chunk `end - 1`, by a compare-and-swap of the whole ticket: so
each of two threads works on its own part of the images of all phases, which stays in its cache. The fields change only
after every chunk of a phase was claimed and done, so a claim that succeeds proves that the fields read between loading
the ticket and swapping it belong to that ticket. The caller waits only for chunks that somebody has already claimed, so
a run always finishes, with no worker at all too (in a forked child, at interpreter exit).

Workers sleep on the epoch word. A publisher that sees sleepers moves the epoch and wakes as many as it lacks; a worker
counts itself a sleeper, reads the epoch, looks at all slots once more and only then sleeps.

Where other processes want the CPUs too, a thread that the system stops inside a chunk keeps all threads of the run
waiting. So each gives way of its own accord, between two chunks, before the system would make it; and a worker that
finds itself on the CPU of the caller moves to another, where it only takes turns with a stranger.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping

__all__ = [
    "CLOSED", "NOT_STARTED", "NO_PAUSE", "PAUSE", "SLOTS", "SLOT_BYTES", "SLOT_TABLE", "SPIN_ACTIVE", "SPIN_ACTIVE_NS",
    "SPIN_IDLE", "SPIN_IDLE_NS", "START", "STARTED", "STATE", "filled", "pool_ir",
]  # fmt: skip

SLOTS = 64  # graphs that run in parallel at a time, bits of one word; further ones run on their caller alone

# Byte offsets in the pool's memory; what different threads write is 64 bytes apart.
EPOCH = 0  # i32, the futex
SLEEPERS = 64
ACTIVE = 128  # bit mask of the slots in use
STOP = 192
WORKERS = 256  # workers that are in the native loop
SPIN_ACTIVE = 264  # pauses without work until a worker sleeps, while some run is active
SPIN_IDLE = 272  # the same while none is
STATE = 280  # one of the three below
START = 288  # the Python callable that starts the workers, a borrowed pointer
SLOT_TABLE = 512

NOT_STARTED, STARTED, CLOSED = 0, 1, 2

# Byte offsets in a slot.
SLOT_BYTES = 256
TICKET = 0
DONE = 64
FIELDS = 128  # function, words, ctx, threads, base: 8 bytes each
TAKEN = 192  # bit mask of the worker ids in use; bit 0, the caller's, is never set
SINCE = 200  # when the caller got its CPU as far as it knows, ns; of the caller alone
CALLER_CPU = 208  # the caller's CPU, below 0 if not known
CALLER_MOVED = 216  # when the caller left a CPU last
ROUND = 0xFFFF  # chunks a ticket can count; phases with more are published in rounds

SPIN_ACTIVE_NS = 200_000
SPIN_IDLE_NS = 50_000
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
define internal i1 @sleep_on(ptr %epoch, i32 %seen) nounwind {
  %r = call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %epoch, i64 128, i32 %seen, ptr null)
  %woken = icmp eq i64 %r, 0
  ret i1 %woken
}
define internal i64 @wake_some(ptr %epoch, i64 %count) nounwind {
  %old = atomicrmw add ptr %epoch, i32 1 seq_cst
  %r = call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %epoch, i64 129, i64 %count)
  %woken = call i64 @llvm.smax.i64(i64 %r, i64 0)
  ret i64 %woken
}
"""

# Without a futex workers look for work every 200 microseconds.
POLL_IR = """
declare i32 @usleep(i32)
define internal i1 @sleep_on(ptr %epoch, i32 %seen) nounwind {
  %r = call i32 @usleep(i32 200)
  ret i1 false
}
define internal i64 @wake_some(ptr %epoch, i64 %count) nounwind {
  ret i64 0
}
define internal i32 @this_cpu() nounwind {
  ret i32 -1
}
define internal void @leave_cpu(i32 %cpu) nounwind {
  ret void
}
"""

POOL_IR = """
declare i32 @sched_yield()
declare i64 @llvm.cttz.i64(i64, i1)
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
declare void @llvm.x86.sse2.pause()

define void @rlx_spin(i64 %count) nounwind noinline {
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  $PAUSE
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %loop, label %done
done:
  ret void
}

; lowest worker id of a slot that nobody has, 64 if none
define internal i64 @free_id(i64 %taken) nounwind alwaysinline {
  %held = or i64 %taken, 1
  %free = xor i64 %held, -1
  %id = call i64 @llvm.cttz.i64(i64 %free, i1 false)
  ret i64 %id
}

; whether a slot has an unclaimed chunk and room for one more thread
define internal i1 @slot_open(ptr %slot) nounwind alwaysinline {
  %ticket = load atomic i64, ptr %slot seq_cst, align 64
  %claimed = and i64 %ticket, 65535
  %shifted = lshr i64 %ticket, 16
  %count = and i64 %shifted, 65535
  %some = icmp ult i64 %claimed, %count
  %taken.p = getelementptr i8, ptr %slot, i64 $TAKEN
  %taken = load atomic i64, ptr %taken.p monotonic, align 8
  %id = call i64 @free_id(i64 %taken)
  %threads.p = getelementptr i8, ptr %slot, i64 $F_THREADS
  %threads = load atomic i64, ptr %threads.p monotonic, align 8
  %room = icmp slt i64 %id, %threads
  %open = and i1 %some, %room
  ret i1 %open
}

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

; claims and runs chunks as worker %id until none is left
define internal void @claim(ptr %slot, i64 %id, ptr %since) nounwind {
entry:
  %fn.p = getelementptr i8, ptr %slot, i64 $F_FN
  %words.p = getelementptr i8, ptr %slot, i64 $F_WORDS
  %ctx.p = getelementptr i8, ptr %slot, i64 $F_CTX
  %threads.p = getelementptr i8, ptr %slot, i64 $F_THREADS
  %base.p = getelementptr i8, ptr %slot, i64 $F_BASE
  %done.p = getelementptr i8, ptr %slot, i64 $DONE
  %odd = and i64 %id, 1
  %back = icmp ne i64 %odd, 0
  %step = select i1 %back, i64 -65536, i64 1
  br label %look
look:
  %ticket = load atomic i64, ptr %slot acquire, align 64
  %claimed = and i64 %ticket, 65535
  %shifted = lshr i64 %ticket, 16
  %count = and i64 %shifted, 65535
  %some = icmp ult i64 %claimed, %count
  br i1 %some, label %read, label %leave
read:
  %fn = load atomic ptr, ptr %fn.p monotonic, align 8
  %words = load atomic ptr, ptr %words.p monotonic, align 8
  %ctx = load atomic ptr, ptr %ctx.p monotonic, align 8
  %threads = load atomic i64, ptr %threads.p monotonic, align 8
  %base = load atomic i64, ptr %base.p monotonic, align 8
  %room = icmp slt i64 %id, %threads
  br i1 %room, label %swap, label %leave
swap:
  %taken = add i64 %ticket, %step
  %pair = cmpxchg ptr %slot, i64 %ticket, i64 %taken acq_rel monotonic
  %mine = extractvalue { i64, i1 } %pair, 1
  br i1 %mine, label %work, label %look
work:
  %last = sub i64 %count, 1
  %place = select i1 %back, i64 %last, i64 %claimed
  %chunk = add i64 %base, %place
  call void %fn(ptr %words, i64 %chunk, ptr %ctx, i64 %id)
  %before = atomicrmw add ptr %done.p, i64 1 release
  %lost = call i1 @give_way(ptr %since)
  %caller = icmp eq i64 %id, 0
  %change = and i1 %lost, %caller
  br i1 %change, label %move, label %look
move:
  call void @change_cpu(ptr %slot)
  br label %look
leave:
  ret void
}

; takes a worker id of a slot, helps, gives the id back; false when there was nothing to do. %times: since, moved
define internal i1 @help(ptr %slot, ptr %times) nounwind {
entry:
  %taken.p = getelementptr i8, ptr %slot, i64 $TAKEN
  br label %try
try:
  %open = call i1 @slot_open(ptr %slot)
  br i1 %open, label %join, label %none
join:
  %taken = load atomic i64, ptr %taken.p monotonic, align 8
  %id = call i64 @free_id(i64 %taken)
  %any = icmp ult i64 %id, 64
  br i1 %any, label %take, label %none
take:
  %bit = shl i64 1, %id
  %with = or i64 %taken, %bit
  %pair = cmpxchg ptr %taken.p, i64 %taken, i64 %with acq_rel monotonic
  %mine = extractvalue { i64, i1 } %pair, 1
  br i1 %mine, label %work, label %try
work:
  %moved = getelementptr i64, ptr %times, i64 1
  call void @keep_apart(ptr %slot, ptr %moved)
  call void @claim(ptr %slot, i64 %id, ptr %times)
  %mask = xor i64 %bit, -1
  %old = atomicrmw and ptr %taken.p, i64 %mask release
  ret i1 true
none:
  ret i1 false
}

; looks at every active slot: helps (%act) or only says whether one is open
define internal i1 @scan(ptr %pool, i64 %mask, i1 %act, ptr %times) nounwind {
entry:
  %slots = getelementptr i8, ptr %pool, i64 $SLOT_TABLE
  br label %next
next:
  %left = phi i64 [ %mask, %entry ], [ %rest, %after ]
  %found = phi i1 [ false, %entry ], [ %now, %after ]
  %end = icmp eq i64 %left, 0
  br i1 %end, label %done, label %look
look:
  %index = call i64 @llvm.cttz.i64(i64 %left, i1 true)
  %offset = mul i64 %index, $SLOT_BYTES
  %slot = getelementptr i8, ptr %slots, i64 %offset
  br i1 %act, label %do, label %ask
do:
  %helped = call i1 @help(ptr %slot, ptr %times)
  br label %after
ask:
  %open = call i1 @slot_open(ptr %slot)
  br label %after
after:
  %one = phi i1 [ %helped, %do ], [ %open, %ask ]
  %now = or i1 %found, %one
  %below = sub i64 %left, 1
  %rest = and i64 %left, %below
  br label %next
done:
  ret i1 %found
}

define void @rlx_worker(ptr %pool) nounwind {
entry:
  %sleepers.p = getelementptr i8, ptr %pool, i64 $SLEEPERS
  %active.p = getelementptr i8, ptr %pool, i64 $ACTIVE
  %stop.p = getelementptr i8, ptr %pool, i64 $STOP
  %workers.p = getelementptr i8, ptr %pool, i64 $WORKERS
  %spin.active.p = getelementptr i8, ptr %pool, i64 $SPIN_ACTIVE
  %spin.idle.p = getelementptr i8, ptr %pool, i64 $SPIN_IDLE
  %times = alloca [2 x i64], align 8
  store [2 x i64] zeroinitializer, ptr %times, align 8
  %w0 = atomicrmw add ptr %workers.p, i64 1 seq_cst
  br label %loop
loop:
  %spun = phi i64 [ 0, %entry ], [ 0, %work ], [ %spun.next, %idle ], [ 0, %awake ]
  %stop = load atomic i64, ptr %stop.p acquire, align 8
  %stopped = icmp ne i64 %stop, 0
  br i1 %stopped, label %exit, label %run
run:
  %active = load atomic i64, ptr %active.p acquire, align 8
  %found = call i1 @scan(ptr %pool, i64 %active, i1 true, ptr %times)
  br i1 %found, label %work, label %idle
work:
  br label %loop
idle:
  $PAUSE
  %spun.next = add i64 %spun, 1
  %none = icmp eq i64 %active, 0
  %limit.a = load i64, ptr %spin.active.p, align 8
  %limit.i = load i64, ptr %spin.idle.p, align 8
  %limit = select i1 %none, i64 %limit.i, i64 %limit.a
  %more = icmp slt i64 %spun.next, %limit
  br i1 %more, label %loop, label %sleep
sleep:
  %s0 = atomicrmw add ptr %sleepers.p, i64 1 seq_cst
  %epoch = load atomic i32, ptr %pool seq_cst, align 64
  %stop2 = load atomic i64, ptr %stop.p seq_cst, align 8
  %active2 = load atomic i64, ptr %active.p seq_cst, align 8
  %open = call i1 @scan(ptr %pool, i64 %active2, i1 false, ptr null)
  %stopped2 = icmp ne i64 %stop2, 0
  %stay = or i1 %open, %stopped2
  br i1 %stay, label %uncount, label %wait
wait:
  %woken = call i1 @sleep_on(ptr %pool, i32 %epoch)
  br i1 %woken, label %awake, label %uncount
uncount:                      ; who was woken has been uncounted by the one who woke it
  %s1 = atomicrmw sub ptr %sleepers.p, i64 1 seq_cst
  br label %awake
awake:
  %t = call i64 @now()
  store i64 %t, ptr %times, align 8
  br label %loop
exit:
  %w1 = atomicrmw sub ptr %workers.p, i64 1 seq_cst
  ret void
}

; sees to it that %need workers are awake
define internal void @pool_wake(ptr %pool, i64 %need) nounwind {
entry:
  %sleepers.p = getelementptr i8, ptr %pool, i64 $SLEEPERS
  %workers.p = getelementptr i8, ptr %pool, i64 $WORKERS
  %asleep = load atomic i64, ptr %sleepers.p seq_cst, align 8
  %some = icmp sgt i64 %asleep, 0
  br i1 %some, label %count, label %done
count:
  %workers = load atomic i64, ptr %workers.p monotonic, align 8
  %awake = sub i64 %workers, %asleep
  %lack = sub i64 %need, %awake
  %wake = icmp sgt i64 %lack, 0
  br i1 %wake, label %call, label %done
call:
  %woken = call i64 @wake_some(ptr %pool, i64 %lack)
  %old = atomicrmw sub ptr %sleepers.p, i64 %woken seq_cst
  br label %done
done:
  ret void
}

; takes a slot and wakes workers; null when all slots are in use
define internal ptr @pool_enter(ptr %pool, i64 %threads) nounwind {
entry:
  %active.p = getelementptr i8, ptr %pool, i64 $ACTIVE
  br label %look
look:
  %active = load atomic i64, ptr %active.p monotonic, align 8
  %full = icmp eq i64 %active, -1
  br i1 %full, label %none, label %take
take:
  %free = xor i64 %active, -1
  %index = call i64 @llvm.cttz.i64(i64 %free, i1 true)
  %bit = shl i64 1, %index
  %with = or i64 %active, %bit
  %pair = cmpxchg ptr %active.p, i64 %active, i64 %with seq_cst monotonic
  %mine = extractvalue { i64, i1 } %pair, 1
  br i1 %mine, label %enter, label %look
enter:
  %offset = mul i64 %index, $SLOT_BYTES
  %from = add i64 %offset, $SLOT_TABLE
  %slot = getelementptr i8, ptr %pool, i64 %from
  %since = getelementptr i8, ptr %slot, i64 $SINCE
  %t = call i64 @now()
  store i64 %t, ptr %since, align 8
  call void @note_cpu(ptr %slot)
  %need = sub i64 %threads, 1
  call void @pool_wake(ptr %pool, i64 %need)
  ret ptr %slot
none:
  ret ptr null
}

define internal void @pool_leave(ptr %pool, ptr %slot) nounwind {
  %active.p = getelementptr i8, ptr %pool, i64 $ACTIVE
  %a = ptrtoint ptr %slot to i64
  %b = ptrtoint ptr %pool to i64
  %ab = sub i64 %a, %b
  %offset = sub i64 %ab, $SLOT_TABLE
  %index = udiv i64 %offset, $SLOT_BYTES
  %bit = shl i64 1, %index
  %mask = xor i64 %bit, -1
  %old = atomicrmw and ptr %active.p, i64 %mask seq_cst
  ret void
}

; runs one phase of %n > 1 chunks on the workers and the caller
define internal void @pool_run(ptr %pool, ptr %slot, ptr %fn, ptr %words, ptr %ctx, i64 %n, i64 %threads) nounwind {
entry:
  %fn.p = getelementptr i8, ptr %slot, i64 $F_FN
  %words.p = getelementptr i8, ptr %slot, i64 $F_WORDS
  %ctx.p = getelementptr i8, ptr %slot, i64 $F_CTX
  %threads.p = getelementptr i8, ptr %slot, i64 $F_THREADS
  %base.p = getelementptr i8, ptr %slot, i64 $F_BASE
  %done.p = getelementptr i8, ptr %slot, i64 $DONE
  %since = getelementptr i8, ptr %slot, i64 $SINCE
  store atomic ptr %fn, ptr %fn.p monotonic, align 8
  store atomic ptr %words, ptr %words.p monotonic, align 8
  store atomic ptr %ctx, ptr %ctx.p monotonic, align 8
  store atomic i64 %threads, ptr %threads.p monotonic, align 8
  br label %round
round:
  %base = phi i64 [ 0, %entry ], [ %base.next, %finished ]
  %left = sub i64 %n, %base
  %count = call i64 @llvm.smin.i64(i64 %left, i64 $ROUND)
  store atomic i64 %base, ptr %base.p monotonic, align 8
  store atomic i64 0, ptr %done.p monotonic, align 8
  %old = load atomic i64, ptr %slot monotonic, align 64
  %generation = lshr i64 %old, 32
  %generation.next = add i64 %generation, 1
  %high = shl i64 %generation.next, 32
  %middle = shl i64 %count, 16
  %ticket = or i64 %high, %middle
  store atomic i64 %ticket, ptr %slot seq_cst, align 64
  %most = call i64 @llvm.smin.i64(i64 %count, i64 %threads)
  %need = sub i64 %most, 1
  call void @pool_wake(ptr %pool, i64 %need)
  call void @claim(ptr %slot, i64 0, ptr %since)
  call void @note_cpu(ptr %slot)
  br label %wait
wait:
  %i = phi i64 [ 0, %round ], [ %i.next, %pause ], [ %i.next, %stayed ]
  %done = load atomic i64, ptr %done.p acquire, align 8
  %all = icmp eq i64 %done, %count
  br i1 %all, label %finished, label %spin
spin:
  %i.next = add i64 %i, 1
  %low = and i64 %i.next, 1023
  %long = icmp eq i64 %low, 0
  br i1 %long, label %yield, label %pause
pause:
  $PAUSE
  br label %wait
yield:
  %t = call i64 @now()
  %lost = call i1 @yield(ptr %since, i64 %t)
  br i1 %lost, label %move, label %stayed
move:
  call void @change_cpu(ptr %slot)
  br label %stayed
stayed:
  call void @note_cpu(ptr %slot)
  br label %wait
finished:
  %base.next = add i64 %base, %count
  %more = icmp slt i64 %base.next, %n
  br i1 %more, label %round, label %end
end:
  ret void
}

define void @rlx_stop(ptr %pool) nounwind {
  %stop.p = getelementptr i8, ptr %pool, i64 $STOP
  store atomic i64 1, ptr %stop.p seq_cst, align 8
  %woken = call i64 @wake_some(ptr %pool, i64 1000000)
  %sleepers.p = getelementptr i8, ptr %pool, i64 $SLEEPERS
  %old = atomicrmw sub ptr %sleepers.p, i64 %woken seq_cst
  ret void
}
"""


def pool_ir(*, futex: bool | None = None) -> str:
    """Returns the pool's functions as IR text, for inclusion in a module that defines `i64 @now()` in nanoseconds.

    `futex=False` gives the portable variant.
    """
    machine = platform.machine()
    if futex is None:
        futex = sys.platform == "linux" and machine in FUTEX_CALL
    text = (FUTEX_IR + LINUX_IR if futex else POLL_IR) + POOL_IR
    pause = PAUSE.get(machine, NO_PAUSE)
    if "llvm.x86" not in pause:
        text = text.replace("declare void @llvm.x86.sse2.pause()\n", "")
    fields = {f"F_{name}": FIELDS + 8 * i for i, name in enumerate(("FN", "WORDS", "CTX", "THREADS", "BASE"))}
    offsets = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, int)}
    return filled(text, {**offsets, **fields, "FUTEX": FUTEX_CALL.get(machine, 0), "PAUSE": pause})


def filled(text: str, values: Mapping[str, object]) -> str:
    """The text with values in the place of each $NAME; `string.Template` takes a millisecond to load."""
    return re.sub(r"\$([A-Z]\w*)", lambda name: str(values[name[1]]), text)
