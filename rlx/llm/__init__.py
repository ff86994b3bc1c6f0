"""Language models that run: `rlx.load_llm`."""
