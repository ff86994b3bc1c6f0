"""Passes over programs of CUDA: how what products read lies in memory."""
