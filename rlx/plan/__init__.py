"""Where every buffer of a program lies in memory: liveness, packing, and the proof that a plan is right."""
