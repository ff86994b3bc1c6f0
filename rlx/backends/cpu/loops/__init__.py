"""Kernels that are plain loops over elements: loop nests, reductions, vectors, and the transposed read."""
