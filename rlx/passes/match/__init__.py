"""How passes find what they look for in a graph: patterns of nodes, and formulas in a normal form."""
