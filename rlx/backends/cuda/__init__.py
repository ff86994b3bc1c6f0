"""CUDA: kernels printed as C++, compiled by NVRTC and launched through the driver."""
