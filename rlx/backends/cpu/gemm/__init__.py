"""The matrix product of a tile, for each panel format and instruction set."""
