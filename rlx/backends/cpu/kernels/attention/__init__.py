"""The ways to compute attention: `strategies` is their list."""
