"""The ways to compute a matrix product: a file for each, and the list that says which is tried first."""
