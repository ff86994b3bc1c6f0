"""Importers: model files as graphs."""
