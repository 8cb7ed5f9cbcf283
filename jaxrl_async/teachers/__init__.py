"""Wing: teachers by name, asked while groups wait (teachers). Needs no JAX."""
