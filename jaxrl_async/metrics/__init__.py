"""Metrics: their declarations, how they are written, and where they are sent."""
