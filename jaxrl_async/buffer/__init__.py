"""The replay buffer, which bounds how stale groups may be. Needs no JAX."""
