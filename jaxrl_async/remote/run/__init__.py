"""Start, admit and end the samplers of a run in other processes."""
