"""Text of LLVM's IR: functions, types, conversions, mathematical functions, and the instructions of AMX."""
