"""Several adapters that learn in one run: one base, one stream of blocks, the same chips."""
