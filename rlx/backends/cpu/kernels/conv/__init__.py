"""The ways to compute a convolution."""
