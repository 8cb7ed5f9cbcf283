"""Rewards: built-in graders, user functions, and a reward model."""
