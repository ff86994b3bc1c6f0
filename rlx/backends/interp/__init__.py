"""A device that executes kernels in NumPy, in a memory of its own: the smallest code generator."""
