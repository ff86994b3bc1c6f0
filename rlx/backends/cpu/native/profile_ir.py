"""The walker's code for profiles: a row for each phase, a cell for each thread; see `runner_ir` for their words."""

__all__ = ["PROFILE_IR"]

PROFILE_IR = """
; one of several chunks of a phase that is profiled
define internal void @timed(ptr %row, i64 %chunk, ptr %ctx, i64 %worker) {
  %fn.p = getelementptr i64, ptr %row, i64 $TIMED_FN
  %words.p = getelementptr i64, ptr %row, i64 $TIMED_WORDS
  %cells.p = getelementptr i64, ptr %row, i64 $CELLS
  %fn = load ptr, ptr %fn.p, align 8
  %words = load ptr, ptr %words.p, align 8
  %cells = load ptr, ptr %cells.p, align 8
  %number = mul i64 %worker, $CELL_WORDS
  %start.p = getelementptr i64, ptr %cells, i64 %number
  %stop.p = getelementptr i64, ptr %start.p, i64 1
  %start = load i64, ptr %start.p, align 8
  %none = icmp eq i64 %start, 0
  br i1 %none, label %first, label %work
first:
  %c0 = call i64 @time_of(i32 $THREAD_CLOCK)
  %used.p = getelementptr i64, ptr %start.p, i64 4
  store i64 %c0, ptr %used.p, align 8
  %began = call i64 @now()
  store i64 %began, ptr %start.p, align 8
  br label %work
work:
  %t0 = call i64 @now()
  call void %fn(ptr %words, i64 %chunk, ptr %ctx, i64 %worker)
  %t1 = call i64 @now()
  store i64 %t1, ptr %stop.p, align 8
  %c1 = call i64 @time_of(i32 $THREAD_CLOCK)
  %used.end.p = getelementptr i64, ptr %start.p, i64 5
  store i64 %c1, ptr %used.end.p, align 8
  %took = sub i64 %t1, %t0
  call void @add_to(ptr %start.p, i64 2, i64 %took)
  call void @add_to(ptr %start.p, i64 3, i64 1)
  ret void
}

define internal void @add_to(ptr %row, i64 %word, i64 %what) nounwind {
  %p = getelementptr i64, ptr %row, i64 %word
  %old = load i64, ptr %p, align 8
  %sum = add i64 %old, %what
  store i64 %sum, ptr %p, align 8
  ret void
}

; adds a visit of a phase to its row of a profile
define internal void @note_phase(ptr %profile, i64 %index, i64 %start, i64 %took, i64 %used) nounwind {
  %number = mul i64 %index, $PROFILE_WORDS
  %row = getelementptr i64, ptr %profile, i64 %number
  call void @add_to(ptr %row, i64 $TOOK, i64 %took)
  call void @add_to(ptr %row, i64 $USED, i64 %used)
  call void @add_to(ptr %row, i64 $VISITS, i64 1)
  %began.p = getelementptr i64, ptr %row, i64 $BEGAN
  %began = load i64, ptr %began.p, align 8
  %none = icmp eq i64 %began, 0
  %first = select i1 %none, i64 %start, i64 %began
  store i64 %first, ptr %began.p, align 8
  ret void
}
"""
