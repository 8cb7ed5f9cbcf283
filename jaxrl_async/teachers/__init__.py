"""Wing: teachers by name, asked over HTTP while groups wait (teachers). Needs no JAX."""
