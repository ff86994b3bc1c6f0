"""The block of i64 words in which a run keeps where a layer has sent its rows: kernels and the runtime share it.

RING is the address of a ring of calls (0: nothing is kept), SLOTS how many it holds, CAPACITY the numbers that one has
room for, CALLS how many calls there have been. A call in the ring is a count and as many numbers of experts. From STATS
on there are three words for each expert: rows that went there, and calls with its panels there and not there.
"""

__all__ = ["CALLS", "CAPACITY", "RING", "SLOTS", "STATS"]

RING, SLOTS, CAPACITY, CALLS, STATS = range(5)
