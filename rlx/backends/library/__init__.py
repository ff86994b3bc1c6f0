"""What the library backends share: ops as array functions of a NumPy-like library, specialised per extents.

`trace` makes a function of a graph, `executable` keeps one for each set of extents, `arrays` says what a library has to
give. `rlx/backends/mlx` is the smallest such backend, and the one to copy.
"""
