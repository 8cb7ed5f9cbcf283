"""Wing: scores by a language model over HTTP, and process rewards (reward.judge, reward.process).
Needs no JAX."""
