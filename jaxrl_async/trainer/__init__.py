"""The trainer: from groups of episodes to an update of the weights."""
