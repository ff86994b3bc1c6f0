"""The commands of language models."""
