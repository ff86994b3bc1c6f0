"""How a kernel's work is cut into chunks for threads, and its argument table. Nothing here makes code."""
