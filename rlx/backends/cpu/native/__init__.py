"""What runs without Python: the thread pool, the runner of phases, and the entry that checks arguments."""
