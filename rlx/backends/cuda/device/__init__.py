"""The device: its driver, its compiler and its memory."""
