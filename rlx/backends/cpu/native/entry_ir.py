"""The entry's code: the native functions that check arrays, run a state block and return.

`rlx_entry` is `run_slots(*inputs)`; `rlx_selected`, for some outputs and arrays of the caller, is in `selected_ir`.
"""

from __future__ import annotations

import sys

from rlx.backends.cpu.native import runner_ir
from rlx.backends.cpu.native.pool_ir import filled

__all__ = ["ENTRY_NAMES", "NAME", "entry_ir"]

MAX_RANK = 16
KINDS = "fiubc"
FORMAT_CHARS = {"f": "efdg", "i": "bhilqn", "u": "BHILQN", "b": "?", "c": ""}  # complex: Z and a char of f

# Words of the record of an input, or of an output (SOURCE: where it lies; RANK is -1 if it can't be copied from there).
ITEMSIZE, KIND, RANK, DTYPE, ALIGN_MASK, BYTES, SOURCE = range(7)
SHAPE = 8
RECORD_WORDS = SHAPE + MAX_RANK

# Offsets in Py_buffer (part of the stable ABI since 3.11) and in NumPy's PyArrayObject_fields (part of its ABI).
VIEW_BYTES, VIEW_ITEMSIZE, VIEW_RANK, VIEW_FORMAT, VIEW_SHAPE, VIEW_STRIDES = 80, 24, 36, 40, 48, 56
ARRAY_DATA, ARRAY_RANK, ARRAY_SHAPE, ARRAY_STRIDES, ARRAY_DTYPE, ARRAY_FLAGS = 16, 24, 32, 40, 56, 64
STRIDED_WITH_FORMAT = 0x1C  # PyBUF_STRIDES | PyBUF_FORMAT
METH_FASTCALL = 0x80

NAME = "entry"  # of this code
ENTRY_NAMES = (
    "PyLong_AsVoidPtr",
    "PyObject_GetBuffer",
    "PyBuffer_Release",
    "PyErr_Clear",
    "PyType_IsSubtype",
    "Py_IncRef",
    "Py_DecRef",
    "PyTuple_New",
    "PyTuple_SetItem",
    "PyObject_CallObject",
    "PyLong_FromLongLong",
)
NONE, TRUE = "_Py_NoneStruct", "_Py_TrueStruct"

ENTRY_IR = """
declare ptr @PyLong_AsVoidPtr(ptr)
declare i32 @PyObject_GetBuffer(ptr, ptr, i32)
declare void @PyBuffer_Release(ptr)
declare void @PyErr_Clear()
declare i32 @PyType_IsSubtype(ptr, ptr)
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
declare ptr @PyTuple_New(i64)
declare i32 @PyTuple_SetItem(ptr, i64, ptr)
declare ptr @PyObject_CallObject(ptr, ptr)
declare ptr @PyLong_FromLongLong(i64)
declare i64 @rlx_acquire(ptr)
declare i64 @rlx_go(ptr)
declare void @rlx_release(ptr)

@$NONE = external global i8
@$TRUE = external global i8
@kinds = internal constant [256 x i8] c"$KIND_TABLE"

; element kind that a buffer format stands for, 0 for none of ours; a missing format means unsigned bytes
define internal i64 @format_kind(ptr %format) nounwind {
entry:
  %none = icmp eq ptr %format, null
  br i1 %none, label %bytes, label %order
bytes:
  ret i64 $KIND_U
order:
  %c0 = load i8, ptr %format, align 1
  %at = icmp eq i8 %c0, 64
  %equal = icmp eq i8 %c0, 61
  %little = icmp eq i8 %c0, 60
  %l = and i1 %little, $LITTLE
  %native = or i1 %at, %equal
  %prefixed = or i1 %native, %l
  %skip = zext i1 %prefixed to i64
  %f1 = getelementptr i8, ptr %format, i64 %skip
  %c1 = load i8, ptr %f1, align 1
  %complex = icmp eq i8 %c1, 90
  %skip2 = zext i1 %complex to i64
  %f2 = getelementptr i8, ptr %f1, i64 %skip2
  %c2 = load i8, ptr %f2, align 1
  %index = zext i8 %c2 to i64
  %cell = getelementptr i8, ptr @kinds, i64 %index
  %kind8 = load i8, ptr %cell, align 1
  %kind = zext i8 %kind8 to i64
  %empty = icmp eq i8 %c2, 0
  br i1 %empty, label %bad, label %last
last:
  %f3 = getelementptr i8, ptr %f2, i64 1
  %c3 = load i8, ptr %f3, align 1
  %ended = icmp eq i8 %c3, 0
  br i1 %ended, label %good, label %bad
good:
  %float = icmp eq i64 %kind, $KIND_F
  %of.complex = select i1 %float, i64 $KIND_C, i64 0
  %result = select i1 %complex, i64 %of.complex, i64 %kind
  ret i64 %result
bad:
  ret i64 0
}

; whether rank, extents and C-contiguous strides are as recorded
define internal i1 @fits(ptr %record, i64 %rank, ptr %shape, ptr %strides) nounwind {
entry:
  %rank.p = getelementptr i64, ptr %record, i64 $RANK
  %wanted = load i64, ptr %rank.p, align 8
  %same = icmp eq i64 %rank, %wanted
  br i1 %same, label %begin, label %no
begin:
  %size.p = getelementptr i64, ptr %record, i64 $ITEMSIZE
  %size = load i64, ptr %size.p, align 8
  %want.shape = getelementptr i64, ptr %record, i64 $SHAPE
  %bytes.p = getelementptr i64, ptr %record, i64 $BYTES
  %bytes = load i64, ptr %bytes.p, align 8
  %no.strides = icmp eq ptr %strides, null
  %no.bytes = icmp eq i64 %bytes, 0
  %unstrided = or i1 %no.strides, %no.bytes
  br label %loop
loop:
  %left = phi i64 [ %rank, %begin ], [ %d, %next ]
  %step = phi i64 [ %size, %begin ], [ %step.next, %next ]
  %end = icmp eq i64 %left, 0
  br i1 %end, label %yes, label %dim
dim:
  %d = sub i64 %left, 1
  %n.p = getelementptr i64, ptr %shape, i64 %d
  %n = load i64, ptr %n.p, align 8
  %m.p = getelementptr i64, ptr %want.shape, i64 %d
  %m = load i64, ptr %m.p, align 8
  %equal = icmp eq i64 %n, %m
  br i1 %equal, label %stride, label %no
stride:
  %one = icmp eq i64 %n, 1
  %free = or i1 %one, %unstrided
  br i1 %free, label %next, label %compare
compare:
  %s.p = getelementptr i64, ptr %strides, i64 %d
  %s = load i64, ptr %s.p, align 8
  %dense = icmp eq i64 %s, %step
  br i1 %dense, label %next, label %no
next:
  %step.next = mul i64 %step, %n
  br label %loop
yes:
  ret i1 true
no:
  ret i1 false
}

; callable(argument); takes over the reference to the argument, which may be null with an exception set
define internal ptr @call_one(ptr %callable, ptr %argument) {
entry:
  %none = icmp eq ptr %argument, null
  br i1 %none, label %fail, label %pack
pack:
  %tuple = call ptr @PyTuple_New(i64 1)
  %no.tuple = icmp eq ptr %tuple, null
  br i1 %no.tuple, label %drop, label %call
drop:
  call void @Py_DecRef(ptr %argument)
  br label %fail
call:
  %r = call i32 @PyTuple_SetItem(ptr %tuple, i64 0, ptr %argument)
  %result = call ptr @PyObject_CallObject(ptr %callable, ptr %tuple)
  call void @Py_DecRef(ptr %tuple)
  ret ptr %result
fail:
  ret ptr null
}

define internal ptr @pack_args(ptr %args, i64 %count) {
entry:
  %tuple = call ptr @PyTuple_New(i64 %count)
  %none = icmp eq ptr %tuple, null
  br i1 %none, label %out, label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %item ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %item, label %out
item:
  %arg.p = getelementptr ptr, ptr %args, i64 %i
  %arg = load ptr, ptr %arg.p, align 8
  call void @Py_IncRef(ptr %arg)
  %r = call i32 @PyTuple_SetItem(ptr %tuple, i64 %i, ptr %arg)
  %i.next = add i64 %i, 1
  br label %loop
out:
  ret ptr %tuple
}

; checks the inputs and runs; %selected may be null, and %outs too. 0: done; INTERRUPTED: an exception is pending;
; BUSY; MISMATCH, if something is not as recorded; else the status of an error
; (a copy in each caller: calls of both functions took 7 % of the shortest run)
define internal i64 @checked_run(ptr %ctx, ptr %args, i64 %nargs, ptr %selected, ptr %outs) alwaysinline {
entry:
  %wanted.p = getelementptr i64, ptr %ctx, i64 $INPUT_COUNT
  %wanted = load i64, ptr %wanted.p, align 8
  %data = alloca ptr, i64 %wanted, align 16
  %views = alloca [$VIEW_BYTES x i8], i64 %wanted, align 16
  %records.p = getelementptr i64, ptr %ctx, i64 $INPUTS
  %records = load ptr, ptr %records.p, align 8
  %array.type.p = getelementptr i64, ptr %ctx, i64 $ARRAY_TYPE
  %array.type = load ptr, ptr %array.type.p, align 8
  %low.p = getelementptr i64, ptr %ctx, i64 $GUARD_LOW
  %low = load i64, ptr %low.p, align 8
  %high.p = getelementptr i64, ptr %ctx, i64 $GUARD_HIGH
  %high = load i64, ptr %high.p, align 8
  %counted = icmp eq i64 %nargs, %wanted
  br i1 %counted, label %loop, label %release

loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %accept ]
  %held = phi i64 [ 0, %entry ], [ %held.now, %accept ]
  %more = icmp slt i64 %i, %wanted
  br i1 %more, label %input, label %run
input:
  %record = getelementptr [$RECORD_WORDS x i64], ptr %records, i64 %i
  %arg.p = getelementptr ptr, ptr %args, i64 %i
  %arg = load ptr, ptr %arg.p, align 8
  %type.p = getelementptr i8, ptr %arg, i64 8
  %type = load ptr, ptr %type.p, align 8
  %is.array = icmp eq ptr %type, %array.type
  br i1 %is.array, label %array, label %foreign

; subclasses of NumPy's array may be more than their memory, as masked arrays are: Python looks at all but mapped files
foreign:
  %base.p = getelementptr i64, ptr %ctx, i64 $ARRAY_CLASS
  %base = load ptr, ptr %base.p, align 8
  %mapped.p = getelementptr i64, ptr %ctx, i64 $MAPPED_CLASS
  %mapped = load ptr, ptr %mapped.p, align 8
  %is.base = icmp eq ptr %type, %base
  %is.mapped = icmp eq ptr %type, %mapped
  %known = or i1 %is.base, %is.mapped
  br i1 %known, label %buffer, label %derived
derived:
  %is.derived = call i32 @PyType_IsSubtype(ptr %type, ptr %base)
  %more.than.memory = icmp ne i32 %is.derived, 0
  br i1 %more.than.memory, label %release, label %buffer

array:
  %dtype.p = getelementptr i8, ptr %arg, i64 $ARRAY_DTYPE
  %dtype = load ptr, ptr %dtype.p, align 8
  %want.dtype.p = getelementptr i64, ptr %record, i64 $DTYPE
  %want.dtype = load ptr, ptr %want.dtype.p, align 8
  %typed = icmp eq ptr %dtype, %want.dtype
  br i1 %typed, label %fields, label %buffer
fields:
  %a.data.p = getelementptr i8, ptr %arg, i64 $ARRAY_DATA
  %a.data = load i64, ptr %a.data.p, align 8
  %a.rank.p = getelementptr i8, ptr %arg, i64 $ARRAY_RANK
  %a.rank32 = load i32, ptr %a.rank.p, align 4
  %a.rank = sext i32 %a.rank32 to i64
  %a.shape.p = getelementptr i8, ptr %arg, i64 $ARRAY_SHAPE
  %a.shape = load ptr, ptr %a.shape.p, align 8
  %a.strides.p = getelementptr i8, ptr %arg, i64 $ARRAY_STRIDES
  %a.strides = load ptr, ptr %a.strides.p, align 8
  br label %check

buffer:
  %view = getelementptr [$VIEW_BYTES x i8], ptr %views, i64 %held
  %failed = call i32 @PyObject_GetBuffer(ptr %arg, ptr %view, i32 $STRIDED_WITH_FORMAT)
  %refused = icmp ne i32 %failed, 0
  br i1 %refused, label %clear, label %viewed
clear:
  call void @PyErr_Clear()
  br label %release
viewed:
  %held.more = add i64 %held, 1
  %v.size.p = getelementptr i8, ptr %view, i64 $VIEW_ITEMSIZE
  %v.size = load i64, ptr %v.size.p, align 8
  %size.p = getelementptr i64, ptr %record, i64 $ITEMSIZE
  %size = load i64, ptr %size.p, align 8
  %sized = icmp eq i64 %v.size, %size
  br i1 %sized, label %format, label %release
format:
  %v.format.p = getelementptr i8, ptr %view, i64 $VIEW_FORMAT
  %v.format = load ptr, ptr %v.format.p, align 8
  %v.kind = call i64 @format_kind(ptr %v.format)
  %kind.p = getelementptr i64, ptr %record, i64 $KIND
  %kind = load i64, ptr %kind.p, align 8
  %kinds.same = icmp eq i64 %v.kind, %kind
  br i1 %kinds.same, label %read, label %release
read:
  %v.data = load i64, ptr %view, align 8
  %v.rank.p = getelementptr i8, ptr %view, i64 $VIEW_RANK
  %v.rank32 = load i32, ptr %v.rank.p, align 4
  %v.rank = sext i32 %v.rank32 to i64
  %v.shape.p = getelementptr i8, ptr %view, i64 $VIEW_SHAPE
  %v.shape = load ptr, ptr %v.shape.p, align 8
  %v.strides.p = getelementptr i8, ptr %view, i64 $VIEW_STRIDES
  %v.strides = load ptr, ptr %v.strides.p, align 8
  br label %check

check:
  %held.now = phi i64 [ %held, %fields ], [ %held.more, %read ]
  %address = phi i64 [ %a.data, %fields ], [ %v.data, %read ]
  %rank = phi i64 [ %a.rank, %fields ], [ %v.rank, %read ]
  %shape = phi ptr [ %a.shape, %fields ], [ %v.shape, %read ]
  %strides = phi ptr [ %a.strides, %fields ], [ %v.strides, %read ]
  %ok = call i1 @fits(ptr %record, i64 %rank, ptr %shape, ptr %strides)
  br i1 %ok, label %where, label %release
where:
  %mask.p = getelementptr i64, ptr %record, i64 $ALIGN_MASK
  %mask = load i64, ptr %mask.p, align 8
  %bytes.p = getelementptr i64, ptr %record, i64 $BYTES
  %bytes = load i64, ptr %bytes.p, align 8
  %off = and i64 %address, %mask
  %crooked = icmp ne i64 %off, 0
  %end = add i64 %address, %bytes
  %below = icmp ult i64 %address, %high
  %above = icmp ugt i64 %end, %low
  %inside = and i1 %below, %above
  %wrong = or i1 %crooked, %inside
  br i1 %wrong, label %release, label %accept
accept:
  %cell = getelementptr ptr, ptr %data, i64 %i
  store i64 %address, ptr %cell, align 8
  %i.next = add i64 %i, 1
  br label %loop

run:
  %mine = call i64 @rlx_acquire(ptr %ctx)
  %free = icmp ne i64 %mine, 0
  br i1 %free, label %prepare, label %release
prepare:
  %patch.count.p = getelementptr i64, ptr %ctx, i64 $PATCH_COUNT
  %patch.count = load i64, ptr %patch.count.p, align 8
  %patches.p = getelementptr i64, ptr %ctx, i64 $PATCHES
  %patches = load ptr, ptr %patches.p, align 8
  br label %patch
patch:
  %j = phi i64 [ 0, %prepare ], [ %j.next, %apply ]
  %patching = icmp slt i64 %j, %patch.count
  br i1 %patching, label %apply, label %go
apply:
  %p = getelementptr [3 x i64], ptr %patches, i64 %j
  %input.index = load i64, ptr %p, align 8
  %target.p = getelementptr i64, ptr %p, i64 1
  %target = load ptr, ptr %target.p, align 8
  %offset.p = getelementptr i64, ptr %p, i64 2
  %offset = load i64, ptr %offset.p, align 8
  %from = getelementptr ptr, ptr %data, i64 %input.index
  %from.address = load i64, ptr %from, align 8
  %pointer = add i64 %from.address, %offset
  store i64 %pointer, ptr %target, align 8
  %j.next = add i64 %j, 1
  br label %patch
go:
  %every = icmp eq ptr %selected, null
  br i1 %every, label %go.every, label %go.selected
go.every:
  %status.every = call i64 @rlx_go(ptr %ctx)
  br label %ran
go.selected:
  %status.selected = call i64 @go_selected(ptr %ctx, ptr %selected, ptr %outs)
  br label %ran
ran:
  %status = phi i64 [ %status.every, %go.every ], [ %status.selected, %go.selected ]
  call void @rlx_release(ptr %ctx)
  br label %release

release:
  %outcome = phi i64 [ $MISMATCH, %entry ], [ $MISMATCH, %derived ], [ $MISMATCH, %clear ], [ $MISMATCH, %viewed ],
                     [ $MISMATCH, %format ], [ $MISMATCH, %check ], [ $MISMATCH, %where ], [ $BUSY_STATUS, %run ],
                     [ %status, %ran ]
  %count = phi i64 [ 0, %entry ], [ %held, %derived ], [ %held, %clear ], [ %held.more, %viewed ],
                   [ %held.more, %format ], [ %held.now, %check ], [ %held.now, %where ], [ %held, %run ],
                   [ %held, %ran ]
  br label %unview
unview:
  %k = phi i64 [ 0, %release ], [ %k.next, %drop ]
  %dropping = icmp slt i64 %k, %count
  br i1 %dropping, label %drop, label %finish
drop:
  %old = getelementptr [$VIEW_BYTES x i8], ptr %views, i64 %k
  call void @PyBuffer_Release(ptr %old)
  %k.next = add i64 %k, 1
  br label %unview
finish:
  ret i64 %outcome
}

; what a call gives that has run
define internal ptr @answer(ptr %ctx, i64 %outcome, ptr %result) alwaysinline {
entry:
  switch i64 %outcome, label %error [
    i64 0, label %done
    i64 $INTERRUPTED_STATUS, label %raise
  ]
done:
  call void @Py_IncRef(ptr %result)
  ret ptr %result
raise:
  ret ptr null
error:
  %on.error.p = getelementptr i64, ptr %ctx, i64 $ON_ERROR
  %on.error = load ptr, ptr %on.error.p, align 8
  %number = call ptr @PyLong_FromLongLong(i64 %outcome)
  %e = call ptr @call_one(ptr %on.error, ptr %number)
  ret ptr %e
}

define ptr @rlx_entry(ptr %self, ptr %args, i64 %nargs) {
entry:
  %ctx = call ptr @PyLong_AsVoidPtr(ptr %self)
  %outcome = call i64 @checked_run(ptr %ctx, ptr %args, i64 %nargs, ptr null, ptr null)
  switch i64 %outcome, label %ran [
    i64 $MISMATCH, label %other
    i64 $BUSY_STATUS, label %other
  ]
ran:
  %result.p = getelementptr i64, ptr %ctx, i64 $RESULT
  %result = load ptr, ptr %result.p, align 8
  %a = call ptr @answer(ptr %ctx, i64 %outcome, ptr %result)
  %again = icmp eq ptr %a, %self
  br i1 %again, label %drop, label %give
give:
  ret ptr %a
drop:
  call void @Py_DecRef(ptr %a)
  br label %other
other:
  %fallback.p = getelementptr i64, ptr %ctx, i64 $FALLBACK
  %fallback = load ptr, ptr %fallback.p, align 8
  %tuple = call ptr @pack_args(ptr %args, i64 %nargs)
  %f = call ptr @call_one(ptr %fallback, ptr %tuple)
  ret ptr %f
}
"""

MISMATCH = 1 << 62


def entry_ir() -> str:
    """Returns the module of the entry as IR text."""
    table = bytearray(256)
    for kind, chars in FORMAT_CHARS.items():
        for char in chars:
            table[ord(char)] = 1 + KINDS.index(kind)
    from rlx.backends.cpu.native import selected_ir  # here: who finds the code in the cache needs none of it

    names = {**vars(runner_ir), **globals(), **vars(selected_ir)}
    numbers = {name: value for name, value in names.items() if name.isupper() and isinstance(value, int)}
    own: dict[str, object] = {f"KIND_{kind.upper()}": 1 + KINDS.index(kind) for kind in "ufc"}
    own["NONE"], own["TRUE"] = NONE, TRUE
    own["KIND_TABLE"] = "".join(f"\\{code:02X}" for code in table)
    own["LITTLE"] = "true" if sys.byteorder == "little" else "false"
    return filled(ENTRY_IR + selected_ir.SELECTED_IR, {**numbers, **own})
