"""The ways to compute a convolution: `strategies` is their list.

`product` has those by a matrix product of windows, which `im2col` gathers; `implicit_gemm` reads them where they lie.
"""
