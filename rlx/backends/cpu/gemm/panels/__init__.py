"""How the second operand of a product is packed: a file for each panel format. `format` says how to add one."""
