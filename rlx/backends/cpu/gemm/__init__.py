"""The matrix product of a tile, for each panel format and instruction set.

`kernel` makes the function of a kernel and that of a block, `chunk` the loop over a chunk's rows, `accumulators` the
sums of a tile (here is the multiply-add), `epilogue` what is done to them, `amx_...` products by tile registers.
"""
