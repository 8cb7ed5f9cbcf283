"""Wing: several adapters that are trained in one run (runs)."""
