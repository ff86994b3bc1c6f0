"""The block formats of tensors, one file a family, registered by name.

A new one is a class in the file of its family (or in a new file, named in the import below) under `register_encoding`.
"""

from rlx.ir.encodings import iq, legacy, mx, superblocks, ternary
from rlx.ir.encodings.registry import ENCODINGS, register_encoding

__all__ = ["ENCODINGS", "iq", "legacy", "mx", "register_encoding", "superblocks", "ternary"]
