"""Several samplers behind one interface. Needs no JAX."""
