"""What each anchor becomes: matrix products, convolutions, attention, recurrences, and ops with own kernels."""
