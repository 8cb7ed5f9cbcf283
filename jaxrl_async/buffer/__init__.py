"""The replay buffer, which bounds the staleness of groups. Needs no JAX."""
