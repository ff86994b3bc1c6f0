"""The MLX backend: graphs as exported functions of mlx.core."""
