"""Model files with narrower weights: which tensor becomes what, how ranges are found, and what it costs in accuracy.

`api.quantize` is the way in. `rules` chooses a type for each tensor, `rows` makes the bytes, one module for each
container writes files, `ranges` and `calibration` find what activations need, `accuracy` compares two models.
"""
