"""The trainer: groups of episodes become an update of the weights."""
