"""Wing: evaluations by name during a run, and of any policy by a command (docs/evaluation.md)."""
