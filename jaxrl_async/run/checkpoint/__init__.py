"""Checkpoints: written, sealed, read."""
