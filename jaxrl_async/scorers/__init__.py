"""Rewards: built-in graders, the user's functions, and a reward model."""
