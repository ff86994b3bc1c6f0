"""Fourier transforms beside the op itself (`rlx.ops.signal.Dft`): their passes and tables; what is read off spectra."""
