"""Builders: from the configuration to each part of a run."""
