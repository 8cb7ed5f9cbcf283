"""Metrics: their declarations, how they are written, and the destinations they are sent to."""
