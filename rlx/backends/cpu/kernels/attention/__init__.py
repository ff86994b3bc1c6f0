"""The ways to compute attention."""
