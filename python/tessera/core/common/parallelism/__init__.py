"""Who owns which atom, and which rows travel, by fairchem's names."""
