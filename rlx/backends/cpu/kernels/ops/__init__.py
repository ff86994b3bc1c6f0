"""Ops that are no loops over elements: a file for each."""
