"""A compiled graph at run time: buffers, weights, states, results, and saving it as an artifact."""
