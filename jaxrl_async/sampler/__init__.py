"""The sampler: one thread that decodes as long as there is work."""
