"""Training, asking and planning from Python."""
