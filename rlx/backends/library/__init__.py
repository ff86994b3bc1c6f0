"""What the library backends share: ops as array functions of a NumPy-like library, specialised per extents."""
