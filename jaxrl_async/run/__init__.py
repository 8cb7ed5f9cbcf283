"""The run: starts the parts, waits, and stops them in order."""
