"""The XLA backend: graphs as jitted functions of jax."""
