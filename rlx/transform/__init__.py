"""Transformations of functions over graph values, and of graphs: gradients, vectorisation and their kin."""
