"""Loops over expressions, whatever the language: what is known of them before code is made, and how it is printed."""
