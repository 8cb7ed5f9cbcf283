"""Tasks: the user's definitions of what to train on, and the built-in ones."""
