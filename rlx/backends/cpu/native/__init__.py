"""What runs without Python: the thread pool, the runner of phases, and the entry that checks arguments.

Files in `_ir` are the code, those without it what Python sees of it. A run waits for its threads in `pool_run` of
`pool_ir`.
"""
