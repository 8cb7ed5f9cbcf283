"""The recorded order of a run's events, and a run that repeats it."""
