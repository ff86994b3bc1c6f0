"""Language models: families as graphs, tokenisers, chat templates, sampling."""
