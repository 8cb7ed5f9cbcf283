"""Wing: the policy over HTTP, and agent programs that use it (endpoint, a task's program). Needs no
JAX."""
