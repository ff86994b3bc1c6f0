"""Passes that make one op again of many, as exporters write it. `PASSES` of `rlx.passes` has the order."""
