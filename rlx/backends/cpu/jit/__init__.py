"""From IR text to code in memory: the processor's features, LLVM in worker processes, object files, their cache."""
