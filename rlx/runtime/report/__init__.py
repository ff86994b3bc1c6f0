"""The report page of a compiled graph, and the figures on it."""
