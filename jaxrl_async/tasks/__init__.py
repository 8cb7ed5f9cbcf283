"""Tasks: what a user brings to be learned, and the built-in ones."""
