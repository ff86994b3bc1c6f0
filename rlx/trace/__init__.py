"""Python functions as graphs: `rlx.jit`, and control flow over functions."""
