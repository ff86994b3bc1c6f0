"""Kernels before a device has code for them: fusion, expressions, programs. Code of the CPU: `backends/cpu/kernels`."""
