"""The graph that everything works on: element types, sizes, encodings, values, nodes, and their text form."""
