"""Rollouts: episodes, environments, and the loop that makes groups. Needs no JAX."""
