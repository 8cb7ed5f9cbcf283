"""The sampler's own kernels for CPUs (kernels.cc): built once per machine, called by XLA."""
