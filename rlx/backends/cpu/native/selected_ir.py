"""The code of runs that are asked for some outputs, or write into arrays of the caller: `rlx_selected` of the entry.

It is `run_selected(selected, *inputs)` or, with an array or None for each output, `run_selected(selected, *inputs,
*out)`: it walks another table of phases, and copies results into the arrays, which it checks in every call, or has them
written there. `selected` is an int, the address of the words below.
"""

from __future__ import annotations

# Words of what `rlx_selected` is given: the table that the block must have, the one to walk instead of it, whether a
# phase of that has several chunks, what VALUE is after the run, the object that the call returns, the records of the
# outputs and their number, the (first, past-the-end) addresses that no array of `out` may touch and their number, and
# the patches and their number: a patch is (output, address of a word, byte offset, what the word is in other runs), and
# has the run write the output into its array, from where nothing is copied then. That is for arrays that nobody else
# knows yet: they are apart from the inputs and stay as they are.
SELECTED_OF, SELECTED_PHASES, SELECTED_PARALLEL, SELECTED_VALUE, SELECTED_RESULT = range(5)
SELECTED_OUTPUTS, SELECTED_OUTPUT_COUNT, SELECTED_RANGES, SELECTED_RANGE_COUNT = range(5, 9)
SELECTED_PATCHES, SELECTED_PATCH_COUNT = range(9, 11)
SELECTED_WORDS = 11

WRITEABLE = 0x400  # flags of arrays, by NumPy's ABI
WARNS_OR_WRITES_BACK = 0x80002000 - (1 << 32)  # i32; writing to such an array does more than writing
WRITABLE_MASK = WRITEABLE | WARNS_OR_WRITES_BACK

SELECTED_IR = """
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

; whether arrays of `out` can be written: as recorded, writable, and apart from the ranges and from each other
define internal i1 @writable(ptr %ctx, ptr %selected, ptr %outs) nounwind {
entry:
  %records.p = getelementptr i64, ptr %selected, i64 $SELECTED_OUTPUTS
  %records = load ptr, ptr %records.p, align 8
  %count.p = getelementptr i64, ptr %selected, i64 $SELECTED_OUTPUT_COUNT
  %count = load i64, ptr %count.p, align 8
  %ranges.p = getelementptr i64, ptr %selected, i64 $SELECTED_RANGES
  %ranges = load ptr, ptr %ranges.p, align 8
  %range.count.p = getelementptr i64, ptr %selected, i64 $SELECTED_RANGE_COUNT
  %range.count = load i64, ptr %range.count.p, align 8
  %array.type.p = getelementptr i64, ptr %ctx, i64 $ARRAY_TYPE
  %array.type = load ptr, ptr %array.type.p, align 8
  %known.layout = icmp ne ptr %array.type, null
  %mapped.p = getelementptr i64, ptr %ctx, i64 $MAPPED_CLASS
  %mapped = load ptr, ptr %mapped.p, align 8
  br i1 %known.layout, label %loop, label %no
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %next ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %one, label %yes
one:
  %out.p = getelementptr ptr, ptr %outs, i64 %i
  %out = load ptr, ptr %out.p, align 8
  %none = icmp eq ptr %out, @$NONE
  br i1 %none, label %next, label %given
given:
  %type.p = getelementptr i8, ptr %out, i64 8
  %type = load ptr, ptr %type.p, align 8
  %is.array = icmp eq ptr %type, %array.type
  %is.mapped = icmp eq ptr %type, %mapped
  %plain = or i1 %is.array, %is.mapped
  br i1 %plain, label %array, label %no
array:
  %record = getelementptr [$RECORD_WORDS x i64], ptr %records, i64 %i
  %dtype.p = getelementptr i8, ptr %out, i64 $ARRAY_DTYPE
  %dtype = load ptr, ptr %dtype.p, align 8
  %want.dtype.p = getelementptr i64, ptr %record, i64 $DTYPE
  %want.dtype = load ptr, ptr %want.dtype.p, align 8
  %typed = icmp eq ptr %dtype, %want.dtype
  br i1 %typed, label %kind, label %no
kind:
  %flags.p = getelementptr i8, ptr %out, i64 $ARRAY_FLAGS
  %flags = load i32, ptr %flags.p, align 4
  %kept = and i32 %flags, $WRITABLE_MASK
  %may.write = icmp eq i32 %kept, $WRITEABLE
  br i1 %may.write, label %extents, label %no
extents:
  %rank.p = getelementptr i8, ptr %out, i64 $ARRAY_RANK
  %rank32 = load i32, ptr %rank.p, align 4
  %rank = sext i32 %rank32 to i64
  %shape.p = getelementptr i8, ptr %out, i64 $ARRAY_SHAPE
  %shape = load ptr, ptr %shape.p, align 8
  %strides.p = getelementptr i8, ptr %out, i64 $ARRAY_STRIDES
  %strides = load ptr, ptr %strides.p, align 8
  %ok = call i1 @fits(ptr %record, i64 %rank, ptr %shape, ptr %strides)
  br i1 %ok, label %where, label %no
where:
  %low.p = getelementptr i8, ptr %out, i64 $ARRAY_DATA
  %low = load i64, ptr %low.p, align 8
  %bytes.p = getelementptr i64, ptr %record, i64 $BYTES
  %bytes = load i64, ptr %bytes.p, align 8
  %high = add i64 %low, %bytes
  br label %range
range:
  %r = phi i64 [ 0, %where ], [ %r.next, %range.one ]
  %ranges.left = icmp slt i64 %r, %range.count
  br i1 %ranges.left, label %range.one, label %other
range.one:
  %r.low.p = getelementptr [2 x i64], ptr %ranges, i64 %r
  %r.low = load i64, ptr %r.low.p, align 8
  %r.high.p = getelementptr i64, ptr %r.low.p, i64 1
  %r.high = load i64, ptr %r.high.p, align 8
  %r.below = icmp ult i64 %low, %r.high
  %r.above = icmp ugt i64 %high, %r.low
  %r.inside = and i1 %r.below, %r.above
  %r.next = add i64 %r, 1
  br i1 %r.inside, label %no, label %range
other:
  %j = phi i64 [ 0, %range ], [ %j.next, %other.next ]
  %others.left = icmp slt i64 %j, %i
  br i1 %others.left, label %other.one, label %next
other.one:
  %o.p = getelementptr ptr, ptr %outs, i64 %j
  %o = load ptr, ptr %o.p, align 8
  %o.none = icmp eq ptr %o, @$NONE
  br i1 %o.none, label %other.next, label %other.where
other.where:
  %o.low.p = getelementptr i8, ptr %o, i64 $ARRAY_DATA
  %o.low = load i64, ptr %o.low.p, align 8
  %o.bytes.p = getelementptr [$RECORD_WORDS x i64], ptr %records, i64 %j, i64 $BYTES
  %o.bytes = load i64, ptr %o.bytes.p, align 8
  %o.high = add i64 %o.low, %o.bytes
  %o.below = icmp ult i64 %low, %o.high
  %o.above = icmp ugt i64 %high, %o.low
  %o.inside = and i1 %o.below, %o.above
  br i1 %o.inside, label %no, label %other.next
other.next:
  %j.next = add i64 %j, 1
  br label %other
next:
  %i.next = add i64 %i, 1
  br label %loop
yes:
  ret i1 true
no:
  ret i1 false
}

; makes the words of the patches point into the arrays of `out`, or as in other runs where that is null
define internal void @point_outs(ptr %selected, ptr %outs) nounwind {
entry:
  %patches.p = getelementptr i64, ptr %selected, i64 $SELECTED_PATCHES
  %patches = load ptr, ptr %patches.p, align 8
  %count.p = getelementptr i64, ptr %selected, i64 $SELECTED_PATCH_COUNT
  %count = load i64, ptr %count.p, align 8
  %back = icmp eq ptr %outs, null
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %put ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %one, label %done
one:
  %patch = getelementptr [4 x i64], ptr %patches, i64 %i
  %word.p = getelementptr i64, ptr %patch, i64 1
  %word = load ptr, ptr %word.p, align 8
  br i1 %back, label %own, label %array
own:
  %own.p = getelementptr i64, ptr %patch, i64 3
  %own.value = load i64, ptr %own.p, align 8
  br label %put
array:
  %number = load i64, ptr %patch, align 8
  %out.p = getelementptr ptr, ptr %outs, i64 %number
  %out = load ptr, ptr %out.p, align 8
  %data.p = getelementptr i8, ptr %out, i64 $ARRAY_DATA
  %data = load i64, ptr %data.p, align 8
  %shift.p = getelementptr i64, ptr %patch, i64 2
  %shift = load i64, ptr %shift.p, align 8
  %there = add i64 %data, %shift
  br label %put
put:
  %value = phi i64 [ %own.value, %own ], [ %there, %array ]
  store i64 %value, ptr %word, align 8
  %i.next = add i64 %i, 1
  br label %loop
done:
  ret void
}

; runs an acquired block by another table, and copies results into the arrays of `out`, if there are any
define internal i64 @go_selected(ptr %ctx, ptr %selected, ptr %outs) {
entry:
  %of.p = getelementptr i64, ptr %selected, i64 $SELECTED_OF
  %of = load i64, ptr %of.p, align 8
  %phases.p = getelementptr i64, ptr %ctx, i64 $PHASES
  %phases = load i64, ptr %phases.p, align 8
  %current = icmp eq i64 %of, %phases
  br i1 %current, label %outs.before, label %no
outs.before:
  %writes = icmp ne ptr %outs, null
  br i1 %writes, label %check.before, label %run
check.before:
  %fit.before = call i1 @writable(ptr %ctx, ptr %selected, ptr %outs)
  br i1 %fit.before, label %point, label %no
point:
  call void @point_outs(ptr %selected, ptr %outs)
  br label %run
run:
  %parallel.p = getelementptr i64, ptr %ctx, i64 $PARALLEL
  %parallel = load i64, ptr %parallel.p, align 8
  %own.phases.p = getelementptr i64, ptr %selected, i64 $SELECTED_PHASES
  %own.phases = load i64, ptr %own.phases.p, align 8
  store i64 %own.phases, ptr %phases.p, align 8
  %own.parallel.p = getelementptr i64, ptr %selected, i64 $SELECTED_PARALLEL
  %own.parallel = load i64, ptr %own.parallel.p, align 8
  store i64 %own.parallel, ptr %parallel.p, align 8
  %status = call i64 @rlx_go(ptr %ctx)
  store i64 %phases, ptr %phases.p, align 8
  store i64 %parallel, ptr %parallel.p, align 8
  call void @point_outs(ptr %selected, ptr null)
  %bad = icmp ne i64 %status, 0
  br i1 %bad, label %failed, label %outs.after
failed:
  ret i64 %status
outs.after:
  br i1 %writes, label %check.after, label %done
check.after:                  ; a run that lets other Python threads go on may find an array changed in place
  %fit.after = call i1 @writable(ptr %ctx, ptr %selected, ptr %outs)
  br i1 %fit.after, label %copying, label %no
copying:
  %records.p = getelementptr i64, ptr %selected, i64 $SELECTED_OUTPUTS
  %records = load ptr, ptr %records.p, align 8
  %count.p = getelementptr i64, ptr %selected, i64 $SELECTED_OUTPUT_COUNT
  %count = load i64, ptr %count.p, align 8
  br label %loop
loop:
  %i = phi i64 [ 0, %copying ], [ %i.next, %next ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %one, label %done
one:
  %out.p = getelementptr ptr, ptr %outs, i64 %i
  %out = load ptr, ptr %out.p, align 8
  %none = icmp eq ptr %out, @$NONE
  br i1 %none, label %next, label %source
source:
  %from.p = getelementptr [$RECORD_WORDS x i64], ptr %records, i64 %i, i64 $SOURCE
  %from = load ptr, ptr %from.p, align 8
  %is.there = icmp eq ptr %from, null
  br i1 %is.there, label %next, label %copy
copy:
  %to.p = getelementptr i8, ptr %out, i64 $ARRAY_DATA
  %to = load ptr, ptr %to.p, align 8
  %bytes.p = getelementptr [$RECORD_WORDS x i64], ptr %records, i64 %i, i64 $BYTES
  %bytes = load i64, ptr %bytes.p, align 8
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %bytes, i1 false)
  br label %next
next:
  %i.next = add i64 %i, 1
  br label %loop
done:
  %value.p = getelementptr i64, ptr %ctx, i64 $VALUE
  %value.own.p = getelementptr i64, ptr %selected, i64 $SELECTED_VALUE
  %value = load i64, ptr %value.own.p, align 8
  store i64 %value, ptr %value.p, align 8
  ret i64 0
no:
  ret i64 $MISMATCH
}

define ptr @rlx_selected(ptr %self, ptr %args, i64 %nargs) {
entry:
  %ctx = call ptr @PyLong_AsVoidPtr(ptr %self)
  %first = load ptr, ptr %args, align 8
  %selected = call ptr @PyLong_AsVoidPtr(ptr %first)
  %count.p = getelementptr i64, ptr %ctx, i64 $INPUT_COUNT
  %count = load i64, ptr %count.p, align 8
  %outputs.p = getelementptr i64, ptr %selected, i64 $SELECTED_OUTPUT_COUNT
  %outputs = load i64, ptr %outputs.p, align 8
  %given = sub i64 %nargs, 1
  %inputs = getelementptr ptr, ptr %args, i64 1
  %with.outs = add i64 %count, %outputs
  %some.outputs = icmp ne i64 %outputs, 0
  %all.given = icmp eq i64 %given, %with.outs
  %has.outs = and i1 %some.outputs, %all.given
  %outs.p = getelementptr ptr, ptr %inputs, i64 %count
  %outs = select i1 %has.outs, ptr %outs.p, ptr null
  %input.count = select i1 %has.outs, i64 %count, i64 %given
  %outcome = call i64 @checked_run(ptr %ctx, ptr %inputs, i64 %input.count, ptr %selected, ptr %outs)
  switch i64 %outcome, label %ran [
    i64 $MISMATCH, label %other
    i64 $BUSY_STATUS, label %other
  ]
ran:
  %complete = icmp ne ptr %outs, null
  %count.scan = select i1 %complete, i64 %outputs, i64 0
  br label %scan
scan:
  %i = phi i64 [ 0, %ran ], [ %i.next, %one ]
  %more = icmp slt i64 %i, %count.scan
  br i1 %more, label %one, label %all
one:
  %out.p = getelementptr ptr, ptr %outs, i64 %i
  %out = load ptr, ptr %out.p, align 8
  %i.next = add i64 %i, 1
  %none = icmp eq ptr %out, @$NONE
  br i1 %none, label %some, label %scan
all:
  br i1 %complete, label %reply, label %some
some:
  %result.p = getelementptr i64, ptr %selected, i64 $SELECTED_RESULT
  %result = load ptr, ptr %result.p, align 8
  br label %reply
reply:
  %answer = phi ptr [ @$TRUE, %all ], [ %result, %some ]
  %a = call ptr @answer(ptr %ctx, i64 %outcome, ptr %answer)
  ret ptr %a
other:
  call void @Py_IncRef(ptr @$NONE)
  ret ptr @$NONE
}
"""
