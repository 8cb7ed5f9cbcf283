"""Wing: C++ kernels for CPUs (sampler.cpu_kernels, trainer.cpu_kernels)."""
