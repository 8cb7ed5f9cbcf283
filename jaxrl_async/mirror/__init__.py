"""Wing: a copy of the run's folder at another address (run.copy_to)."""
