"""The sampler's programs on its devices."""
