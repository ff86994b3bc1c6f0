"""The walker's code: one native call runs a table of phases and stops at the first error.

A kernel is a native function `void kernel(ptr words, i64 chunk, ptr ctx, i64 worker)`: `words` is its own array of
64-bit operand words, `chunk` in [0, nchunks) the part of the work, `ctx` the state block, and `worker` in [0, threads)
tells apart the threads that run chunks of one phase at the same time (the caller is 0), for per-worker scratch.

The state block is an array of 64-bit words. Kernels know the first ones, the rest belongs to the walker and the entry:

    0 STATUS   0, or the first error: kind | site << 8, set by compare-and-swap from 0
    1 VALUE    what the kernel stores with the error, such as the bad index
    2 PHASE    the phase that failed, set by the walker
    3 NEXT     the phase that comes next; a control kernel (If, While) may set it while it runs, alone in its phase
    4 SLOT     the slot of the pool that the run has
    5 MIDWAY   0, or once it has one, what long chunks call in their midst: `i64 (ptr ctx, i64 worker, i64 do)`
    6 FLOATS   the control register of the caller's arithmetic, see `float_state`
    7 LOOK     what long chunks call some times a millisecond: `i64 (ptr ctx, i64 worker)`, not 0 if they are to end
    8 BUSY     1 while somebody runs or changes the block
    9 ...      see the table below
    USER_WORDS and on: what the compiled graph wants for itself (extents, strides)

A phase may begin a job of several that run side by side: a list of the chunks of all of them, which threads claim as
they do those of one phase. Its words are the number of phases, that of chunks, and (function, words, chunk) for each.
No phase of a job is a control kernel or can fail. Where a run has one thread, finds no slot or is profiled, its phases
run one by one.

Ctrl-C is seen by the caller, which asks Python every 50 ms: between phases, between chunks, while it waits for workers,
and in the midst of long chunks. An error or an interrupt sets STATUS; chunks that nobody has begun by then are dropped.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any

from rlx.backends.cpu.jit import load as loader
from rlx.backends.cpu.native.pool_ir import START, STATE, filled, pool_ir
from rlx.backends.cpu.native.profile_ir import PROFILE_IR

__all__ = [
    "BUSY_STATUS",
    "CELLS",
    "CELL_WORDS",
    "CPYTHON",
    "ERROR_KINDS",
    "INTERRUPTED_STATUS",
    "MIDWAY",
    "PROFILE_WORDS",
    "RUNTIME",
    "USER_WORDS",
    "Native",
    "runtime_ir",
    "symbol_address",
]

# Argument offsets in the state block.
STATUS, VALUE, PHASE, NEXT, SLOT, MIDWAY, FLOATS, LOOK, BUSY = range(9)
PHASES = 9  # address of the phase table
PHASE_COUNT = 10
THREADS = 11
POOL = 12  # address of the pool's memory
PROFILE = 13  # address of a row for each phase, see below, or 0
PARALLEL = 14  # whether a phase has more than one chunk: take a pool slot at once
RELEASE_GIL = 15
THREAD_STATE = 16  # CPython's, while the GIL is released, else 0
LAST_CHECK = 17  # time of the last look for signals, ns
CHECK_NS = 18
HOLDS = 19  # how often the block was taken: who looks before and after sees whether others had it meanwhile
INPUT_COUNT = 20  # from here on: the entry
INPUTS = 21
PATCH_COUNT = 22
PATCHES = 23
RESULT = 24
FALLBACK = 25
ON_ERROR = 26
GUARD_LOW, GUARD_HIGH = 27, 28
ARRAY_TYPE = 29  # as NumPy lays it out, else 0
ARRAY_CLASS, MAPPED_CLASS = 30, 31
USER_WORDS = 32

KNOWN, EXTENT, ASK = range(3)  # words of `rlx_extent`: where the number is, what the size is, and the host call

PHASE_WORDS = 4  # function, words, nchunks, job
JOB = 3  # 0, or the address of a job: this phase and some after it, which run side by side

# Words of a phase's row in a profile.
TOOK, USED, VISITS, BEGAN = range(4)  # ns of it; processor time of the caller; how often it ran; when first
TIMED_FN, TIMED_WORDS = 4, 5  # of a phase with several chunks: what `timed` calls
CELLS = 6  # the address of a cell for each worker: first start, last end, ns in chunks, chunks, and the processor time
#            that the worker's thread had used at the first two
PROFILE_WORDS, CELL_WORDS = 8, 8

INDEX_OUT_OF_RANGE, DIVISION_BY_ZERO, GUARD_FAILED, EXTENT_BEYOND_BOUND, HOST_CALL_RAISED, NAN_TRAPPED = range(1, 7)
ERROR_KINDS = {
    INDEX_OUT_OF_RANGE: "index out of range",
    DIVISION_BY_ZERO: "integer division by zero",
    GUARD_FAILED: "guard failed",
    EXTENT_BEYOND_BOUND: "extent beyond its bound",
    HOST_CALL_RAISED: "host call raised",
    NAN_TRAPPED: "NaN trapped",
}
BUSY_STATUS = -1  # nothing was run: another thread runs the block
INTERRUPTED_STATUS = -2  # a signal handler raised; in native code the exception is pending, `run` lets it through

CHECK_EVERY_NS = 50_000_000
CHECK_EVERY_CHUNKS = 16  # reading the clock costs more than walking a phase

RUNTIME = "pool and walker"  # the name of this code
LINUX_NAMES = ("sched_getcpu", "sched_getaffinity", "sched_setaffinity")  # of the C library
PYTHON_NAMES = (
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
    "PyErr_CheckSignals",
    "PyObject_CallNoArgs",
    "Py_DecRef",
)
PYTHON_IR = """
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare i32 @PyErr_CheckSignals()
declare ptr @PyObject_CallNoArgs(ptr)
declare void @Py_DecRef(ptr)
"""
# Without CPython nothing is looked for between phases; ctypes releases the lock around the call, if there is one.
NO_PYTHON_IR = """
define internal ptr @PyEval_SaveThread() { ret ptr null }
define internal void @PyEval_RestoreThread(ptr %s) { ret void }
define internal i32 @PyErr_CheckSignals() { ret i32 0 }
define internal ptr @PyObject_CallNoArgs(ptr %f) { ret ptr %f }
define internal void @Py_DecRef(ptr %o) { ret void }
"""
CPYTHON = sys.implementation.name == "cpython"

RUNNER_IR = """
declare i32 @clock_gettime(i32, ptr)

define internal i64 @now() nounwind {
  %t = call i64 @time_of(i32 $CLOCK)
  ret i64 %t
}

define internal i64 @time_of(i32 %clock) nounwind {
  %spec = alloca [2 x i64], align 8
  store [2 x i64] zeroinitializer, ptr %spec, align 8
  %r = call i32 @clock_gettime(i32 %clock, ptr %spec)
  %s = load i64, ptr %spec, align 8
  %ns.p = getelementptr i64, ptr %spec, i64 1
  %ns = load i64, ptr %ns.p, align 8
  %whole = mul i64 %s, 1000000000
  %t = add i64 %whole, %ns
  ret i64 %t
}

; takes the GIL to let signal handlers run when it is time, with the caller's arithmetic; true, with the GIL held and
; the status set, if one raised
define internal i1 @interrupted(ptr %ctx) noinline {
entry:
  %state.p = getelementptr i64, ptr %ctx, i64 $THREAD_STATE
  %last.p = getelementptr i64, ptr %ctx, i64 $LAST_CHECK
  %every.p = getelementptr i64, ptr %ctx, i64 $CHECK_NS
  %t = call i64 @now()
  %last = load i64, ptr %last.p, align 8
  %every = load i64, ptr %every.p, align 8
  %past = sub i64 %t, %last
  %due = icmp sge i64 %past, %every
  br i1 %due, label %check, label %no
check:
  %state = load ptr, ptr %state.p, align 8
  call void @PyEval_RestoreThread(ptr %state)
  call void @leave_floats(ptr %ctx)
  %r = call i32 @PyErr_CheckSignals()
  call void @enter_floats(ptr %ctx)
  %raised = icmp ne i32 %r, 0
  br i1 %raised, label %yes, label %resume
yes:
  store ptr null, ptr %state.p, align 8
  store atomic i64 $INTERRUPTED_STATUS, ptr %ctx release, align 8
  ret i1 true
resume:
  %again = call ptr @PyEval_SaveThread()
  store ptr %again, ptr %state.p, align 8
  %t2 = call i64 @now()
  store i64 %t2, ptr %last.p, align 8
  br label %no
no:
  ret i1 false
}

; whether a chunk, or what is left of a phase, is to end: after an error, or when a signal handler has raised
define i64 @rlx_look(ptr %ctx, i64 %worker) {
entry:
  %status = load atomic i64, ptr %ctx acquire, align 8
  %bad = icmp ne i64 %status, 0
  br i1 %bad, label %yes, label %who
who:
  %caller = icmp eq i64 %worker, 0
  br i1 %caller, label %able, label %no
able:                         ; the caller keeps the GIL in short runs, which are over before it matters
  %state.p = getelementptr i64, ptr %ctx, i64 $THREAD_STATE
  %state = load ptr, ptr %state.p, align 8
  %free = icmp ne ptr %state, null
  br i1 %free, label %ask, label %no
ask:
  %stop = call i1 @interrupted(ptr %ctx)
  br i1 %stop, label %yes, label %no
yes:
  ret i64 1
no:
  ret i64 0
}

; a number of the data that becomes a size: the host is asked only where it is not what the size is already
define void @rlx_extent(ptr %words, i64 %chunk, ptr %ctx, i64 %worker) {
entry:
  %known.p = load ptr, ptr %words, align 8
  %known = load i64, ptr %known.p, align 8
  %extent.p = getelementptr i64, ptr %words, i64 $EXTENT
  %extent = load i64, ptr %extent.p, align 8
  %same = icmp eq i64 %known, %extent
  br i1 %same, label %out, label %ask
ask:
  %ask.p = getelementptr i64, ptr %words, i64 $ASK
  %host = load ptr, ptr %ask.p, align 8
  tail call void %host(ptr %words, i64 %chunk, ptr %ctx, i64 %worker)
  br label %out
out:
  ret void
}

; one chunk of a job
define internal void @beside(ptr %chunks, i64 %chunk, ptr %ctx, i64 %worker) {
  %offset = mul i64 %chunk, 24
  %fn.p = getelementptr i8, ptr %chunks, i64 %offset
  %words.p = getelementptr i8, ptr %fn.p, i64 8
  %own.p = getelementptr i8, ptr %fn.p, i64 16
  %fn = load ptr, ptr %fn.p, align 8
  %words = load ptr, ptr %words.p, align 8
  %own = load i64, ptr %own.p, align 8
  tail call void %fn(ptr %words, i64 %own, ptr %ctx, i64 %worker)
  ret void
}

define internal i64 @walk(ptr %ctx) {
entry:
  %next.p = getelementptr i64, ptr %ctx, i64 $NEXT
  %phases.p = getelementptr i64, ptr %ctx, i64 $PHASES
  %count.p = getelementptr i64, ptr %ctx, i64 $PHASE_COUNT
  %threads.p = getelementptr i64, ptr %ctx, i64 $THREADS
  %pool.p = getelementptr i64, ptr %ctx, i64 $POOL
  %profile.p = getelementptr i64, ptr %ctx, i64 $PROFILE
  %parallel.p = getelementptr i64, ptr %ctx, i64 $PARALLEL
  %state.p = getelementptr i64, ptr %ctx, i64 $THREAD_STATE
  %phases = load ptr, ptr %phases.p, align 8
  %count = load i64, ptr %count.p, align 8
  %threads = load i64, ptr %threads.p, align 8
  %pool = load ptr, ptr %pool.p, align 8
  %profile = load ptr, ptr %profile.p, align 8
  %parallel = load i64, ptr %parallel.p, align 8
  %state = load i64, ptr %state.p, align 8
  %checks = icmp ne i64 %state, 0
  %profiled = icmp ne ptr %profile, null
  %many = icmp sgt i64 %threads, 1
  %wanted = icmp ne i64 %parallel, 0
  %now.wanted = and i1 %many, %wanted
  %unprofiled = xor i1 %profiled, true
  %shares = and i1 %many, %unprofiled
  br i1 %now.wanted, label %early, label %begin
early:
  %slot.early = call ptr @pool_enter(ptr %pool, i64 %threads)
  br label %begin
begin:
  %slot0 = phi ptr [ null, %entry ], [ %slot.early, %early ]
  br i1 %profiled, label %stamp, label %loop
stamp:
  %c0 = call i64 @time_of(i32 $THREAD_CLOCK)
  %t0 = call i64 @now()
  br label %loop

loop:
  %index = phi i64 [ 0, %begin ], [ 0, %stamp ], [ %index.next, %again ]
  %slot = phi ptr [ %slot0, %begin ], [ %slot0, %stamp ], [ %slot.next, %again ]
  %chunks = phi i64 [ 0, %begin ], [ 0, %stamp ], [ %chunks.next, %again ]
  %time = phi i64 [ 0, %begin ], [ %t0, %stamp ], [ %time.next, %again ]
  %cpu = phi i64 [ 0, %begin ], [ %c0, %stamp ], [ %cpu.next, %again ]
  %inside = icmp ult i64 %index, %count
  br i1 %inside, label %phase, label %end

phase:
  %follow = add i64 %index, 1
  store i64 %follow, ptr %next.p, align 8
  %entry.offset = shl i64 %index, 5
  %fn.p = getelementptr i8, ptr %phases, i64 %entry.offset
  %words.p = getelementptr i8, ptr %fn.p, i64 8
  %n.p = getelementptr i8, ptr %fn.p, i64 16
  %job.p = getelementptr i8, ptr %fn.p, i64 24
  %job = load ptr, ptr %job.p, align 8
  %first = icmp ne ptr %job, null
  br i1 %first, label %may.share, label %alone
may.share:
  br i1 %shares, label %job.slot, label %alone
job.slot:
  %job.has = icmp ne ptr %slot, null
  br i1 %job.has, label %side.by.side, label %job.get
job.get:
  %slot.job = call ptr @pool_enter(ptr %pool, i64 %threads)
  %job.got = icmp ne ptr %slot.job, null
  br i1 %job.got, label %side.by.side, label %alone
side.by.side:
  %slot.jobs = phi ptr [ %slot, %job.slot ], [ %slot.job, %job.get ]
  %phases.here = load i64, ptr %job, align 8
  %beyond = add i64 %index, %phases.here
  store i64 %beyond, ptr %next.p, align 8
  %n.job.p = getelementptr i8, ptr %job, i64 8
  %n.job = load i64, ptr %n.job.p, align 8
  %chunks.p = getelementptr i8, ptr %job, i64 16
  call void @pool_run(ptr %pool, ptr %slot.jobs, ptr @beside, ptr %chunks.p, ptr %ctx, i64 %n.job, i64 %threads)
  br label %after
alone:
  %fn.own = load ptr, ptr %fn.p, align 8
  %words.own = load ptr, ptr %words.p, align 8
  %n = load i64, ptr %n.p, align 8
  %row.number = mul i64 %index, $PROFILE_WORDS
  %row = getelementptr i64, ptr %profile, i64 %row.number
  %shared = icmp sgt i64 %n, 1
  %apart = and i1 %profiled, %shared
  br i1 %apart, label %wrap, label %go
wrap:
  %timed.fn.p = getelementptr i64, ptr %row, i64 $TIMED_FN
  %timed.words.p = getelementptr i64, ptr %row, i64 $TIMED_WORDS
  store ptr %fn.own, ptr %timed.fn.p, align 8
  store ptr %words.own, ptr %timed.words.p, align 8
  br label %go
go:
  %fn = phi ptr [ %fn.own, %alone ], [ @timed, %wrap ]
  %words = phi ptr [ %words.own, %alone ], [ %row, %wrap ]
  %one = icmp eq i64 %n, 1
  br i1 %one, label %direct, label %not.one
direct:
  call void %fn(ptr %words, i64 0, ptr %ctx, i64 0)
  br label %after
not.one:
  %skip = icmp slt i64 %n, 1
  br i1 %skip, label %after, label %several
several:
  %has = icmp ne ptr %slot, null
  br i1 %has, label %publish, label %maybe
maybe:
  br i1 %many, label %get, label %serial
get:
  %slot.new = call ptr @pool_enter(ptr %pool, i64 %threads)
  %got = icmp ne ptr %slot.new, null
  br i1 %got, label %publish, label %serial
publish:
  %slot.use = phi ptr [ %slot, %several ], [ %slot.new, %get ]
  call void @pool_run(ptr %pool, ptr %slot.use, ptr %fn, ptr %words, ptr %ctx, i64 %n, i64 %threads)
  br label %after
serial:
  %chunk = phi i64 [ 0, %maybe ], [ 0, %get ], [ %chunk.next, %further ]
  call void %fn(ptr %words, i64 %chunk, ptr %ctx, i64 0)
  %chunk.next = add i64 %chunk, 1
  %chunk.more = icmp slt i64 %chunk.next, %n
  br i1 %chunk.more, label %serial.look, label %after
serial.look:
  br i1 %checks, label %serial.ask, label %further
serial.ask:
  %serial.stop = call i64 @rlx_look(ptr %ctx, i64 0)
  %serial.on = icmp eq i64 %serial.stop, 0
  br i1 %serial.on, label %further, label %after
further:
  br label %serial

after:
  %slot.next = phi ptr [ %slot, %direct ], [ %slot, %not.one ], [ %slot.use, %publish ], [ %slot, %serial ],
    [ %slot, %serial.ask ], [ %slot.jobs, %side.by.side ]
  %n.ran = phi i64 [ %n, %direct ], [ %n, %not.one ], [ %n, %publish ], [ %n, %serial ], [ %n, %serial.ask ],
    [ %n.job, %side.by.side ]
  %status = load atomic i64, ptr %ctx acquire, align 8
  %bad = icmp ne i64 %status, 0
  br i1 %bad, label %failed, label %fine
fine:
  %index.next = load i64, ptr %next.p, align 8
  br i1 %profiled, label %measure, label %tick
measure:
  %t1 = call i64 @now()
  %took = sub i64 %t1, %time
  %c1 = call i64 @time_of(i32 $THREAD_CLOCK)
  %used = sub i64 %c1, %cpu
  call void @note_phase(ptr %profile, i64 %index, i64 %time, i64 %took, i64 %used)
  %t2 = call i64 @now()
  br label %tick
tick:
  %time.next = phi i64 [ %time, %fine ], [ %t2, %measure ]
  %cpu.next = phi i64 [ %cpu, %fine ], [ %c1, %measure ]
  %ran = call i64 @llvm.smax.i64(i64 %n.ran, i64 1)
  %chunks.sum = add i64 %chunks, %ran
  %enough = icmp sge i64 %chunks.sum, $CHECK_EVERY_CHUNKS
  %ask = and i1 %enough, %checks
  br i1 %ask, label %signals, label %again
signals:
  %stop = call i1 @interrupted(ptr %ctx)
  br i1 %stop, label %end, label %again
again:
  %chunks.next = phi i64 [ %chunks.sum, %tick ], [ 0, %signals ]
  br label %loop

failed:
  %phase.p = getelementptr i64, ptr %ctx, i64 $PHASE
  store i64 %index, ptr %phase.p, align 8
  br label %end
end:
  %slot.end = phi ptr [ %slot, %loop ], [ %slot.next, %signals ], [ %slot.next, %failed ]
  %result = phi i64 [ 0, %loop ], [ $INTERRUPTED_STATUS, %signals ], [ %status, %failed ]
  %held = icmp ne ptr %slot.end, null
  br i1 %held, label %leave, label %out
leave:
  call void @pool_leave(ptr %pool, ptr %slot.end)
  br label %out
out:
  ret i64 %result
}

; 1 if the caller has the block now, 0 if somebody else has
define i64 @rlx_acquire(ptr %ctx) nounwind {
  %busy.p = getelementptr i64, ptr %ctx, i64 $BUSY
  %pair = cmpxchg ptr %busy.p, i64 0, i64 1 acq_rel monotonic
  %mine = extractvalue { i64, i1 } %pair, 1
  %r = zext i1 %mine to i64
  %holds.p = getelementptr i64, ptr %ctx, i64 $HOLDS
  %holds = atomicrmw add ptr %holds.p, i64 %r monotonic
  ret i64 %r
}

define void @rlx_release(ptr %ctx) nounwind {
  %busy.p = getelementptr i64, ptr %ctx, i64 $BUSY
  store atomic i64 0, ptr %busy.p release, align 8
  ret void
}

; runs an acquired block; called and returns with the GIL held
define i64 @rlx_go(ptr %ctx) {
entry:
  %threads.p = getelementptr i64, ptr %ctx, i64 $THREADS
  %pool.p = getelementptr i64, ptr %ctx, i64 $POOL
  %release.p = getelementptr i64, ptr %ctx, i64 $RELEASE_GIL
  %state.p = getelementptr i64, ptr %ctx, i64 $THREAD_STATE
  %last.p = getelementptr i64, ptr %ctx, i64 $LAST_CHECK
  %value.p = getelementptr i64, ptr %ctx, i64 $VALUE
  store atomic i64 0, ptr %ctx monotonic, align 8
  store i64 0, ptr %value.p, align 8
  %midway.p = getelementptr i64, ptr %ctx, i64 $MIDWAY
  store ptr null, ptr %midway.p, align 8
  store ptr null, ptr %state.p, align 8
  %threads = load i64, ptr %threads.p, align 8
  %many = icmp sgt i64 %threads, 1
  br i1 %many, label %workers, label %ready
workers:
  %pool = load ptr, ptr %pool.p, align 8
  %started.p = getelementptr i8, ptr %pool, i64 $POOL_STATE
  %started = load i64, ptr %started.p, align 8
  %missing = icmp eq i64 %started, 0
  br i1 %missing, label %start, label %ready
start:
  %starter.p = getelementptr i8, ptr %pool, i64 $POOL_START
  %starter = load ptr, ptr %starter.p, align 8
  %none = call ptr @PyObject_CallNoArgs(ptr %starter)
  %raised = icmp eq ptr %none, null
  br i1 %raised, label %stop, label %drop
drop:
  call void @Py_DecRef(ptr %none)
  br label %ready
ready:
  %release = load i64, ptr %release.p, align 8
  %long = icmp ne i64 %release, 0
  br i1 %long, label %without, label %with
with:
  call void @enter_floats(ptr %ctx)
  %r0 = call i64 @walk(ptr %ctx)
  call void @leave_floats(ptr %ctx)
  ret i64 %r0
without:
  %t = call i64 @now()
  store i64 %t, ptr %last.p, align 8
  %state = call ptr @PyEval_SaveThread()
  store ptr %state, ptr %state.p, align 8
  call void @enter_floats(ptr %ctx)
  %r1 = call i64 @walk(ptr %ctx)
  call void @leave_floats(ptr %ctx)
  %saved = load ptr, ptr %state.p, align 8
  %away = icmp ne ptr %saved, null
  br i1 %away, label %restore, label %out
restore:
  call void @PyEval_RestoreThread(ptr %saved)
  store ptr null, ptr %state.p, align 8
  br label %out
out:
  ret i64 %r1
stop:
  ret i64 $INTERRUPTED_STATUS
}

define i64 @rlx_run(ptr %ctx) {
entry:
  %mine = call i64 @rlx_acquire(ptr %ctx)
  %ok = icmp ne i64 %mine, 0
  br i1 %ok, label %go, label %busy
go:
  %r = call i64 @rlx_go(ptr %ctx)
  call void @rlx_release(ptr %ctx)
  ret i64 %r
busy:
  ret i64 $BUSY_STATUS
}
"""


def runtime_ir(*, futex: bool | None = None, cpython: bool = CPYTHON) -> str:
    """Returns the module of the pool and the walker as IR text."""
    offsets = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, int)}
    from rlx.backends.cpu.native.float_state import (
        float_state_ir,  # here: who finds the code in the cache needs none of it
    )

    floats, usual = float_state_ir()
    used = getattr(time, "CLOCK_THREAD_CPUTIME_ID", time.CLOCK_MONOTONIC)  # without it nothing seems to have waited
    own = {"CLOCK": time.CLOCK_MONOTONIC, "THREAD_CLOCK": used, "POOL_STATE": STATE, "POOL_START": START}
    text = filled(floats + PROFILE_IR + RUNNER_IR, {**offsets, **own, **usual})
    pool_words = {"SLOT": SLOT, "MIDWAY": MIDWAY, "POOL": POOL, **usual}
    return pool_ir(pool_words, futex=futex) + (PYTHON_IR if cpython else NO_PYTHON_IR) + text


def symbol_address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def runtime_symbols() -> dict[str, int]:
    """What the runtime module imports, by name; an object is cached without any address in it."""
    libc = ctypes.CDLL(None)
    names = ("syscall", "usleep", "sched_yield", "clock_gettime", *LINUX_NAMES)
    found = {name: getattr(libc, name) for name in names if hasattr(libc, name)}
    if CPYTHON:
        found |= {name: getattr(ctypes.pythonapi, name) for name in PYTHON_NAMES}
    return {name: symbol_address(function) for name, function in found.items()}


class Native:
    """The runtime's native functions; all of them are called with the GIL held and give it back held."""

    def __init__(self, *, futex: bool | None = None) -> None:
        name = RUNTIME if futex is None else f"{RUNTIME}, futex={futex}"
        self.library = loader.build(name, lambda: runtime_ir(futex=futex), symbols=runtime_symbols())
        convention = ctypes.PYFUNCTYPE if CPYTHON else ctypes.CFUNCTYPE
        function = convention(ctypes.c_int64, ctypes.c_size_t)
        self.acquire: Callable[[int], int] = function(self.library.address("rlx_acquire"))
        self.go: Callable[[int], int] = function(self.library.address("rlx_go"))
        self.run: Callable[[int], int] = function(self.library.address("rlx_run"))
        self.look = self.library.address("rlx_look")
        self.extent = self.library.address("rlx_extent")
