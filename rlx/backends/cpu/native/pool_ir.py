"""The thread pool in native code: workers claim chunks of the phases of all running graphs.

A worker is a daemon Python thread inside one native call, without the GIL. A running graph holds a *slot*. Each thread
of the run, told apart by its worker id (the caller's is 0), has a *share* of the chunks of every phase: as many chunks
as the others, at the same place of the images of all phases, which so stay in its cache. Who is done with its own share
takes chunks from the ends of others. A worker keeps its id as long as its slot is in use, and asks for the same the
next time.

A graph publishes a phase by writing the fields of its slot, then *left*, a bit for each share with chunks, and then a
*ticket* for each share, one word `generation:32 | end:16 | next:16`. The owner of a share claims chunk `next`, others
chunk `end - 1`, by a compare-and-swap of the whole ticket; who claims the last chunk of a share takes its bit from
*left* before it runs it. The bit must be set before the ticket: one that was set after it could stay when all chunks
are done, and after the last phase of a run workers would look for its chunks for ever. The fields change only after
every chunk of a phase was claimed and done, so a claim that succeeds proves that the fields read between loading the
ticket and swapping it belong to that ticket. The caller waits (`pool_run`, label `wait`) only for chunks that somebody
has claimed, so a run always finishes, with no worker at all too (in a forked child, at interpreter exit).

Workers sleep on the epoch word, each with a bit of its own. A publisher that lacks workers moves the epoch and wakes
the first ones that sleep, so that these are always the same; a worker sets its bit among the sleepers, reads the epoch,
looks at all slots once more and only then sleeps. What the system does for that is in `os_ir`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlx.backends.granted import MAX_THREADS

__all__ = [
    "CLOSED", "NOT_STARTED", "SHARES", "SLOTS", "SLOT_BYTES", "SLOT_TABLE", "SPIN_ACTIVE",
    "SPIN_ACTIVE_NS", "SPIN_IDLE", "SPIN_IDLE_NS", "START", "STARTED", "STATE", "filled", "pool_ir",
]  # fmt: skip

SLOTS = 64  # graphs that run in parallel at a time, bits of one word; further ones run on their caller alone

# Byte offsets in the pool's memory; what different threads write is 64 bytes apart.
EPOCH = 0  # i32, the futex
SLEEPERS = 64  # bit mask of the workers that sleep or are about to, by their numbers from 1 on
ACTIVE = 128  # bit mask of the slots in use
STOP = 192
MOVING = 200  # i32, 1 while some worker is moved to another CPU: it has fewer CPUs for a moment
WORKERS = 256  # workers that are in the native loop
SPIN_ACTIVE = 264  # pauses without work until a worker sleeps, while some run is active
SPIN_IDLE = 272  # the same while none is
STATE = 280  # one of the three below
START = 288  # the Python callable that starts the workers, a borrowed pointer
SLOT_TABLE = 512

NOT_STARTED, STARTED, CLOSED = 0, 1, 2

# Byte offsets in a slot.
LEFT = 0  # bit mask of the shares with chunks that nobody has claimed
DONE = 64
FIELDS = 128  # function, words, ctx, threads, base: 8 bytes each
TAKEN = 192  # bit mask of the worker ids in use; bit 0, the caller's, is never set
SINCE = 200  # when the caller got its CPU as far as it knows, ns; of the caller alone
CALLER_CPU = 208  # the caller's CPU, below 0 if not known
CALLER_MOVED = 216  # when the caller left a CPU last
MET = 224  # 1 if a worker has found itself on the caller's CPU since the caller asked last
LOOKED = 232  # when the caller looked after workers that it waits for last
SHARES = 256  # a ticket each
SHARE_BYTES = 64
THREAD = 8  # i32, in a share: the system's number of the worker with this id, below 0 once the caller has fetched it
USED = 16  # time that it had used when the caller looked last, ns
ME = 24  # the own memory of the worker with this id
SLOT_BYTES = SHARES + MAX_THREADS * SHARE_BYTES

# Words of a worker's own memory.
MY_SINCE = 0  # when it got its CPU as far as it knows, ns
MY_MOVED = 1  # when it left the caller's CPU last
MY_SLOT = 2  # where it has an id, else null
MY_SLOT_BIT = 3
MY_ID = 4  # that it has, had last, or asks for first
MY_THREAD = 5  # the system's number of the thread
MY_POOL = 6
MY_WORDS = 7

ROUND = 0xFFFF  # chunks that tickets can count; phases with more are published in rounds

SPIN_ACTIVE_NS = 200_000
SPIN_IDLE_NS = 50_000

POOL_IR = """
declare i64 @llvm.cttz.i64(i64, i1)
declare i64 @llvm.ctpop.i64(i64)
declare i64 @llvm.fshr.i64(i64, i64, i64)
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)

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

; the first free worker id of a slot with unclaimed chunks, 64 if there is none; %wanted if that is free
define internal i64 @id_for(ptr %slot, i64 %wanted) nounwind alwaysinline {
  %left = load atomic i64, ptr %slot seq_cst, align 64
  %taken.p = getelementptr i8, ptr %slot, i64 $TAKEN
  %taken = load atomic i64, ptr %taken.p monotonic, align 8
  %threads.p = getelementptr i8, ptr %slot, i64 $F_THREADS
  %threads = load atomic i64, ptr %threads.p monotonic, align 8
  %shifted = lshr i64 %taken, %wanted
  %bit = and i64 %shifted, 1
  %free = icmp eq i64 %bit, 0
  %inside = icmp slt i64 %wanted, %threads
  %mine = and i1 %free, %inside
  %first = call i64 @free_id(i64 %taken)
  %id = select i1 %mine, i64 %wanted, i64 %first
  %some = icmp ne i64 %left, 0
  %room = icmp slt i64 %id, %threads
  %open = and i1 %some, %room
  %r = select i1 %open, i64 %id, i64 64
  ret i64 %r
}

; claims a chunk of share %victim as worker %id and runs it; false if there is none, or no room for the worker
define internal i1 @claim_one(ptr %slot, i64 %id, i64 %victim, ptr %since) nounwind {
entry:
  %fn.p = getelementptr i8, ptr %slot, i64 $F_FN
  %words.p = getelementptr i8, ptr %slot, i64 $F_WORDS
  %ctx.p = getelementptr i8, ptr %slot, i64 $F_CTX
  %threads.p = getelementptr i8, ptr %slot, i64 $F_THREADS
  %base.p = getelementptr i8, ptr %slot, i64 $F_BASE
  %done.p = getelementptr i8, ptr %slot, i64 $DONE
  %offset = mul i64 %victim, $SHARE_BYTES
  %from = add i64 %offset, $SHARES
  %ticket.p = getelementptr i8, ptr %slot, i64 %from
  %other = icmp ne i64 %victim, %id
  %step = select i1 %other, i64 -65536, i64 1
  br label %look
look:
  %ticket = load atomic i64, ptr %ticket.p acquire, align 64
  %next = and i64 %ticket, 65535
  %shifted = lshr i64 %ticket, 16
  %end = and i64 %shifted, 65535
  %some = icmp ult i64 %next, %end
  br i1 %some, label %read, label %none
read:
  %fn = load atomic ptr, ptr %fn.p monotonic, align 8
  %words = load atomic ptr, ptr %words.p monotonic, align 8
  %ctx = load atomic ptr, ptr %ctx.p monotonic, align 8
  %threads = load atomic i64, ptr %threads.p monotonic, align 8
  %base = load atomic i64, ptr %base.p monotonic, align 8
  %room = icmp slt i64 %id, %threads
  br i1 %room, label %swap, label %none
swap:
  %taken = add i64 %ticket, %step
  %pair = cmpxchg ptr %ticket.p, i64 %ticket, i64 %taken acq_rel monotonic
  %mine = extractvalue { i64, i1 } %pair, 1
  br i1 %mine, label %claimed, label %look
claimed:
  %after = add i64 %next, 1
  %last = icmp eq i64 %after, %end
  br i1 %last, label %strike, label %work
strike:
  %bit = shl i64 1, %victim
  %others = xor i64 %bit, -1
  %old = atomicrmw and ptr %slot, i64 %others release
  br label %work
work:
  %back = sub i64 %end, 1
  %place = select i1 %other, i64 %back, i64 %next
  %chunk = add i64 %base, %place
  %status = load atomic i64, ptr %ctx monotonic, align 8
  %fine = icmp eq i64 %status, 0
  br i1 %fine, label %call, label %called
call:
  call void %fn(ptr %words, i64 %chunk, ptr %ctx, i64 %id)
  br label %called
called:                       ; or dropped: the run has failed
  %before = atomicrmw add ptr %done.p, i64 1 release
  %own.offset = mul i64 %id, $SHARE_BYTES
  %own.from = add i64 %own.offset, $SHARES_THREAD
  %thread.p = getelementptr i8, ptr %slot, i64 %own.from
  %thread = load atomic i32, ptr %thread.p monotonic, align 8
  %fetched = icmp slt i32 %thread, 0
  %t = call i64 @now()
  %long = call i1 @turn_over(ptr %since, i64 %t)
  %over = or i1 %long, %fetched
  br i1 %over, label %turn, label %ran
turn:
  call void @end_turn(ptr %slot, i64 %id, ptr %since, i64 %t)
  %caller = icmp eq i64 %id, 0
  br i1 %caller, label %look.out, label %ran
look.out:                     ; the status tells what comes of it. A worker's run may be over by now
  %stop = call i64 @rlx_look(ptr %ctx, i64 0)
  br label %ran
ran:
  ret i1 true
none:
  ret i1 false
}

; claims and runs chunks as worker %id until none is left: those of its share, then of the next ones that have some
define internal void @claim(ptr %slot, i64 %id, ptr %since) nounwind {
entry:
  br label %own
own:
  %mine = call i1 @claim_one(ptr %slot, i64 %id, i64 %id, ptr %since)
  br i1 %mine, label %own, label %others
others:
  %left = load atomic i64, ptr %slot acquire, align 64
  %turned = call i64 @llvm.fshr.i64(i64 %left, i64 %left, i64 %id)
  br label %next
next:
  %rest = phi i64 [ %turned, %others ], [ %rest.next, %fewer ]
  %some = icmp ne i64 %rest, 0
  br i1 %some, label %try, label %leave
try:
  %far = call i64 @llvm.cttz.i64(i64 %rest, i1 true)
  %sum = add i64 %far, %id
  %victim = and i64 %sum, 63
  %got = call i1 @claim_one(ptr %slot, i64 %id, i64 %victim, ptr %since)
  br i1 %got, label %others, label %fewer
fewer:
  %below = sub i64 %rest, 1
  %rest.next = and i64 %rest, %below
  br label %next
leave:
  ret void
}

; gives a worker its id for a slot with work, and keeps that in %me; false if there is none
define internal i1 @join(ptr %slot, i64 %slot.bit, ptr %me) nounwind {
entry:
  %slot.p = getelementptr i64, ptr %me, i64 $MY_SLOT
  %bit.p = getelementptr i64, ptr %me, i64 $MY_SLOT_BIT
  %id.p = getelementptr i64, ptr %me, i64 $MY_ID
  %taken.p = getelementptr i8, ptr %slot, i64 $TAKEN
  %wanted = load i64, ptr %id.p, align 8
  br label %try
try:
  %id = call i64 @id_for(ptr %slot, i64 %wanted)
  %any = icmp ult i64 %id, 64
  br i1 %any, label %take, label %none
take:
  %bit = shl i64 1, %id
  %before = atomicrmw or ptr %taken.p, i64 %bit acq_rel
  %had = and i64 %before, %bit
  %mine = icmp eq i64 %had, 0
  br i1 %mine, label %joined, label %try
joined:
  %thread.p = getelementptr i64, ptr %me, i64 $MY_THREAD
  %thread = load i64, ptr %thread.p, align 8
  %number = trunc i64 %thread to i32
  %offset = mul i64 %id, $SHARE_BYTES
  %from = add i64 %offset, $SHARES_THREAD
  %share.thread = getelementptr i8, ptr %slot, i64 %from
  store atomic i32 %number, ptr %share.thread release, align 8
  %me.from = add i64 %offset, $SHARES_ME
  %share.me = getelementptr i8, ptr %slot, i64 %me.from
  store ptr %me, ptr %share.me, align 8
  store ptr %slot, ptr %slot.p, align 8
  store i64 %slot.bit, ptr %bit.p, align 8
  store i64 %id, ptr %id.p, align 8
  ret i1 true
none:
  ret i1 false
}

; gives a worker's id back, if it has one
define internal void @leave(ptr %me) nounwind {
entry:
  %slot.p = getelementptr i64, ptr %me, i64 $MY_SLOT
  %slot = load ptr, ptr %slot.p, align 8
  %none = icmp eq ptr %slot, null
  br i1 %none, label %done, label %give
give:
  %id.p = getelementptr i64, ptr %me, i64 $MY_ID
  %id = load i64, ptr %id.p, align 8
  %bit = shl i64 1, %id
  %mask = xor i64 %bit, -1
  %taken.p = getelementptr i8, ptr %slot, i64 $TAKEN
  %old = atomicrmw and ptr %taken.p, i64 %mask release
  store ptr null, ptr %slot.p, align 8
  br label %done
done:
  ret void
}

; whether the worker's slot has work for it
define internal i1 @has_work(ptr %slot, i64 %id) nounwind alwaysinline {
  %offset = mul i64 %id, $SHARE_BYTES
  %from = add i64 %offset, $SHARES
  %ticket.p = getelementptr i8, ptr %slot, i64 %from
  %ticket = load atomic i64, ptr %ticket.p acquire, align 64
  %next = and i64 %ticket, 65535
  %shifted = lshr i64 %ticket, 16
  %end = and i64 %shifted, 65535
  %own = icmp ult i64 %next, %end
  %left = load atomic i64, ptr %slot acquire, align 64
  %any = icmp ne i64 %left, 0
  %some = or i1 %own, %any
  %threads.p = getelementptr i8, ptr %slot, i64 $F_THREADS
  %threads = load atomic i64, ptr %threads.p monotonic, align 8
  %room = icmp slt i64 %id, %threads
  %r = and i1 %some, %room
  ret i1 %r
}

; looks at every active slot: joins the first that has work (%act), or only says whether one has
define internal i1 @scan(ptr %pool, i64 %mask, i1 %act, ptr %me) nounwind {
entry:
  %slots = getelementptr i8, ptr %pool, i64 $SLOT_TABLE
  br label %next
next:
  %left = phi i64 [ %mask, %entry ], [ %rest, %after ]
  %end = icmp eq i64 %left, 0
  br i1 %end, label %none, label %look
look:
  %index = call i64 @llvm.cttz.i64(i64 %left, i1 true)
  %offset = mul i64 %index, $SLOT_BYTES
  %slot = getelementptr i8, ptr %slots, i64 %offset
  br i1 %act, label %do, label %ask
do:
  %bit = shl i64 1, %index
  %joined = call i1 @join(ptr %slot, i64 %bit, ptr %me)
  br i1 %joined, label %found, label %after
ask:
  %id = call i64 @id_for(ptr %slot, i64 1)
  %open = icmp ult i64 %id, 64
  br i1 %open, label %found, label %after
after:
  %below = sub i64 %left, 1
  %rest = and i64 %left, %below
  br label %next
found:
  ret i1 true
none:
  ret i1 false
}

define void @rlx_worker(ptr %pool) nounwind {
entry:
  %sleepers.p = getelementptr i8, ptr %pool, i64 $SLEEPERS
  %active.p = getelementptr i8, ptr %pool, i64 $ACTIVE
  %stop.p = getelementptr i8, ptr %pool, i64 $STOP
  %workers.p = getelementptr i8, ptr %pool, i64 $WORKERS
  %spin.active.p = getelementptr i8, ptr %pool, i64 $SPIN_ACTIVE
  %spin.idle.p = getelementptr i8, ptr %pool, i64 $SPIN_IDLE
  %me = alloca [$MY_WORDS x i64], align 8
  store [$MY_WORDS x i64] zeroinitializer, ptr %me, align 8
  %thread.p = getelementptr i64, ptr %me, i64 $MY_THREAD
  %thread = call i32 @this_thread()
  %thread.wide = zext i32 %thread to i64
  store i64 %thread.wide, ptr %thread.p, align 8
  %pool.p = getelementptr i64, ptr %me, i64 $MY_POOL
  store ptr %pool, ptr %pool.p, align 8
  %slot.p = getelementptr i64, ptr %me, i64 $MY_SLOT
  %slot.bit.p = getelementptr i64, ptr %me, i64 $MY_SLOT_BIT
  %id.p = getelementptr i64, ptr %me, i64 $MY_ID
  %w0 = atomicrmw add ptr %workers.p, i64 1 seq_cst
  %w1 = add i64 %w0, 1
  %number = call i64 @llvm.smin.i64(i64 %w1, i64 63)
  store i64 %number, ptr %id.p, align 8
  call void @set_float_state(i32 $USUAL)  ; a thread begins with that of who started it
  %bit = shl i64 1, %number
  %bit.off = xor i64 %bit, -1
  br label %loop
loop:
  %spun = phi i64 [ 0, %entry ], [ 0, %work ], [ %spun.next, %idle ], [ 0, %awake ]
  %stop = load atomic i64, ptr %stop.p acquire, align 8
  %stopped = icmp ne i64 %stop, 0
  br i1 %stopped, label %exit, label %run
run:
  %active = load atomic i64, ptr %active.p acquire, align 8
  %slot = load ptr, ptr %slot.p, align 8
  %held = icmp ne ptr %slot, null
  br i1 %held, label %own, label %search
own:
  %id = load i64, ptr %id.p, align 8
  %mine = call i1 @has_work(ptr %slot, i64 %id)
  br i1 %mine, label %work, label %next_phase
next_phase:                   ; for the next phase, unless there are other runs or this one has no place for it
  %slot.bit = load i64, ptr %slot.bit.p, align 8
  %alone = icmp eq i64 %active, %slot.bit
  %threads.p = getelementptr i8, ptr %slot, i64 $F_THREADS
  %threads = load atomic i64, ptr %threads.p monotonic, align 8
  %room = icmp slt i64 %id, %threads
  %stays = and i1 %alone, %room
  br i1 %stays, label %idle, label %part
part:
  call void @leave(ptr %me)
  br label %search
search:
  %found = call i1 @scan(ptr %pool, i64 %active, i1 true, ptr %me)
  br i1 %found, label %work, label %idle
work:
  %slot.now = load ptr, ptr %slot.p, align 8
  %id.now = load i64, ptr %id.p, align 8
  %parted = call i1 @keep_apart(ptr %slot.now, ptr %me)
  call void @claim(ptr %slot.now, i64 %id.now, ptr %me)
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
  call void @leave(ptr %me)
  %epoch = load atomic i32, ptr %pool seq_cst, align 64  ; first: who strikes this worker off changes it
  %s0 = atomicrmw or ptr %sleepers.p, i64 %bit seq_cst
  %stop2 = load atomic i64, ptr %stop.p seq_cst, align 8
  %active2 = load atomic i64, ptr %active.p seq_cst, align 8
  %open = call i1 @scan(ptr %pool, i64 %active2, i1 false, ptr null)
  %stopped2 = icmp ne i64 %stop2, 0
  %stay = or i1 %open, %stopped2
  br i1 %stay, label %awake, label %rest
rest:
  call void @sleep_on(ptr %pool, i32 %epoch, i64 %bit)
  br label %awake
awake:                        ; who was woken has been struck off already
  %s1 = atomicrmw and ptr %sleepers.p, i64 %bit.off seq_cst
  %t = call i64 @now()
  store i64 %t, ptr %me, align 8
  br label %loop
exit:
  call void @leave(ptr %me)
  %w2 = atomicrmw sub ptr %workers.p, i64 1 seq_cst
  ret void
}

; the bit of a slot among those in use
define internal i64 @slot_bit(ptr %pool, ptr %slot) nounwind alwaysinline {
  %a = ptrtoint ptr %slot to i64
  %b = ptrtoint ptr %pool to i64
  %ab = sub i64 %a, %b
  %offset = sub i64 %ab, $SLOT_TABLE
  %index = udiv i64 %offset, $SLOT_BYTES
  %bit = shl i64 1, %index
  ret i64 %bit
}

; how many workers are with the runs in slots %others, or are about to be
define internal i64 @engaged(ptr %pool, i64 %others) nounwind noinline {
entry:
  %slots = getelementptr i8, ptr %pool, i64 $SLOT_TABLE
  br label %next
next:
  %rest = phi i64 [ %others, %entry ], [ %rest.next, %add ]
  %sum = phi i64 [ 0, %entry ], [ %sum.next, %add ]
  %any = icmp ne i64 %rest, 0
  br i1 %any, label %add, label %done
add:
  %index = call i64 @llvm.cttz.i64(i64 %rest, i1 true)
  %below = sub i64 %rest, 1
  %rest.next = and i64 %rest, %below
  %offset = mul i64 %index, $SLOT_BYTES
  %slot = getelementptr i8, ptr %slots, i64 %offset
  %taken.p = getelementptr i8, ptr %slot, i64 $TAKEN
  %taken = load atomic i64, ptr %taken.p monotonic, align 8
  %there = call i64 @llvm.ctpop.i64(i64 %taken)
  %left = load atomic i64, ptr %slot monotonic, align 64
  %open = icmp ne i64 %left, 0
  %threads.p = getelementptr i8, ptr %slot, i64 $F_THREADS
  %threads = load atomic i64, ptr %threads.p monotonic, align 8
  %most = sub i64 %threads, 1
  %expected = select i1 %open, i64 %most, i64 0
  %both = call i64 @llvm.smax.i64(i64 %there, i64 %expected)
  %sum.next = add i64 %sum, %both
  br label %next
done:
  ret i64 %sum
}

; sees to it that %need workers are awake for a slot: wakes the first ones that sleep. Those that other runs have don't
; count, unless there would be more threads than CPUs then
define internal void @pool_wake(ptr %pool, ptr %slot, i64 %need) nounwind {
entry:
  %sleepers.p = getelementptr i8, ptr %pool, i64 $SLEEPERS
  %workers.p = getelementptr i8, ptr %pool, i64 $WORKERS
  %active.p = getelementptr i8, ptr %pool, i64 $ACTIVE
  %asleep = load atomic i64, ptr %sleepers.p seq_cst, align 8
  %some = icmp ne i64 %asleep, 0
  br i1 %some, label %look, label %done
look:
  %workers = load atomic i64, ptr %workers.p monotonic, align 8
  %sleeping = call i64 @llvm.ctpop.i64(i64 %asleep)
  %awake = sub i64 %workers, %sleeping
  %lack.alone = sub i64 %need, %awake
  %active = load atomic i64, ptr %active.p monotonic, align 8
  %runs = call i64 @llvm.ctpop.i64(i64 %active)
  %running = add i64 %awake, %runs
  %cpus = add i64 %workers, 1
  %room = sub i64 %cpus, %running
  %several = icmp sgt i64 %runs, 1
  %more = icmp sgt i64 %room, 0
  %ask = and i1 %several, %more
  br i1 %ask, label %ask.others, label %count
ask.others:
  %bit = call i64 @slot_bit(ptr %pool, ptr %slot)
  %mask = xor i64 %bit, -1
  %others = and i64 %active, %mask
  %engaged = call i64 @engaged(ptr %pool, i64 %others)
  %lack.beside = add i64 %lack.alone, %engaged
  %lack.room = call i64 @llvm.smin.i64(i64 %lack.beside, i64 %room)
  %lack.most = call i64 @llvm.smax.i64(i64 %lack.room, i64 %lack.alone)
  br label %count
count:
  %lack = phi i64 [ %lack.alone, %look ], [ %lack.most, %ask.others ]
  br label %choose
choose:
  %i = phi i64 [ 0, %count ], [ %i.next, %pick ]
  %rest = phi i64 [ %asleep, %count ], [ %rest.next, %pick ]
  %wanted = icmp slt i64 %i, %lack
  %any = icmp ne i64 %rest, 0
  %go = and i1 %wanted, %any
  br i1 %go, label %pick, label %chosen
pick:
  %i.next = add i64 %i, 1
  %below = sub i64 %rest, 1
  %rest.next = and i64 %rest, %below
  br label %choose
chosen:
  %woken = xor i64 %asleep, %rest
  %wake = icmp ne i64 %woken, 0
  br i1 %wake, label %call, label %done
call:
  %off = xor i64 %woken, -1
  %old = atomicrmw and ptr %sleepers.p, i64 %off seq_cst
  call void @wake(ptr %pool, i64 %woken)
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
  call void @pool_wake(ptr %pool, ptr %slot, i64 %need)
  ret ptr %slot
none:
  ret ptr null
}

define internal void @pool_leave(ptr %pool, ptr %slot) nounwind {
  %active.p = getelementptr i8, ptr %pool, i64 $ACTIVE
  %bit = call i64 @slot_bit(ptr %pool, ptr %slot)
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
  %slot.p = getelementptr i64, ptr %ctx, i64 $SLOT
  store ptr %slot, ptr %slot.p, align 8
  %midway.p = getelementptr i64, ptr %ctx, i64 $MIDWAY
  store ptr @midway, ptr %midway.p, align 8
  br label %round
round:
  %base = phi i64 [ 0, %entry ], [ %base.next, %finished ]
  %left = sub i64 %n, %base
  %count = call i64 @llvm.smin.i64(i64 %left, i64 $ROUND)
  store atomic i64 %base, ptr %base.p monotonic, align 8
  store atomic i64 0, ptr %done.p monotonic, align 8
  %shares = call i64 @llvm.smin.i64(i64 %threads, i64 $MAX_THREADS)
  %first = getelementptr i8, ptr %slot, i64 $SHARES
  %old = load atomic i64, ptr %first monotonic, align 64
  %generation = lshr i64 %old, 32
  %generation.next = add i64 %generation, 1
  %high = shl i64 %generation.next, 32
  br label %mark
mark:
  %m = phi i64 [ 0, %round ], [ %m.next, %mark ]
  %m.from = phi i64 [ 0, %round ], [ %m.to, %mark ]
  %marked = phi i64 [ 0, %round ], [ %marked.next, %mark ]
  %m.next = add i64 %m, 1
  %m.scaled = mul i64 %m.next, %count
  %m.to = udiv i64 %m.scaled, %shares
  %full = icmp ult i64 %m.from, %m.to
  %bit = shl i64 1, %m
  %bit.or = select i1 %full, i64 %bit, i64 0
  %marked.next = or i64 %marked, %bit.or
  %m.again = icmp slt i64 %m.next, %shares
  br i1 %m.again, label %mark, label %open
open:
  store atomic i64 %marked.next, ptr %slot seq_cst, align 64
  br label %share
share:
  %s = phi i64 [ 0, %open ], [ %s.next, %share ]
  %from = phi i64 [ 0, %open ], [ %to, %share ]
  %s.next = add i64 %s, 1
  %scaled = mul i64 %s.next, %count
  %to = udiv i64 %scaled, %shares
  %ends = shl i64 %to, 16
  %low.half = or i64 %ends, %from
  %ticket = or i64 %high, %low.half
  %at = mul i64 %s, $SHARE_BYTES
  %ticket.p = getelementptr i8, ptr %first, i64 %at
  store atomic i64 %ticket, ptr %ticket.p release, align 64
  %again = icmp slt i64 %s.next, %shares
  br i1 %again, label %share, label %published
published:
  %most = call i64 @llvm.smin.i64(i64 %count, i64 %threads)
  %need = sub i64 %most, 1
  call void @pool_wake(ptr %pool, ptr %slot, i64 %need)
  call void @claim(ptr %slot, i64 0, ptr %since)
  call void @note_cpu(ptr %slot)
  br label %wait
wait:
  %i = phi i64 [ 0, %published ], [ %i.next, %pause ], [ %i.next, %yield ]
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
  call void @wait_on(ptr %pool, ptr %slot, i64 %t)
  %stop = call i64 @rlx_look(ptr %ctx, i64 0)
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
  call void @wake(ptr %pool, i64 -1)
  ret void
}
"""


def pool_ir(block: Mapping[str, object], *, futex: bool | None = None) -> str:
    """Returns the pool's functions as IR text, for inclusion in a module that defines `i64 @now()` in nanoseconds.

    `block` gives the words SLOT, MIDWAY and POOL of a state block. `futex=False` gives the portable variant.
    """
    from rlx.backends.cpu.native.os_ir import system_ir  # here: who finds the code in the cache needs none of it

    system, values = system_ir(futex=futex)
    fields = {f"F_{name}": FIELDS + 8 * i for i, name in enumerate(("FN", "WORDS", "CTX", "THREADS", "BASE"))}
    offsets = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, int)}
    shares = {"SHARES_THREAD": SHARES + THREAD, "SHARES_ME": SHARES + ME}
    return filled(system + POOL_IR, {**offsets, **fields, **shares, **block, **values})


def filled(text: str, values: Mapping[str, object]) -> str:
    """The text with values in the place of each $NAME; `string.Template` takes a millisecond to load."""
    return re.sub(r"\$([A-Z]\w*)", lambda name: str(values[name[1]]), text)
