"""Language models: families as graphs, tokenisers, chat templates, sampling. `decoder` makes the graph of a file."""
