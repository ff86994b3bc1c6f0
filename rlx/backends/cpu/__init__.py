"""The CPU. `backend` says what it takes, `select` which strategy computes a kernel, `build` makes what runs."""
