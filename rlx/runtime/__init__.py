"""What users hold: sessions, compiled graphs, weights, caches. How a run executes is in each backend."""
