"""The names of the parts of an adapter in a graph, for the pass that makes room for it and the code that fills it."""

__all__ = ["ALL_ADAPTERS", "A_SUFFIX", "B_SUFFIX", "GAIN", "NO_ADAPTER"]

GAIN = "lora.gain"  # the state that holds what each column of a slot is multiplied by: [slots, rank]
NO_ADAPTER, ALL_ADAPTERS = -1, -2  # instead of a slot's number, for a row: none, or as without rows: all
A_SUFFIX, B_SUFFIX = ".lora_a", ".lora_b"  # params beside a param: [inputs, slots * rank], [slots * rank, outputs]
