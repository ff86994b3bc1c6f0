"""Which layout tensors have on the CPU where the program may choose it."""
