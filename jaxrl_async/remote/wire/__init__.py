"""Messages between a trainer and its samplers over gRPC. Needs no JAX."""
