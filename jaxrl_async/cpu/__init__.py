"""Wing: kernels in C++ for CPUs (sampler.cpu_kernels, trainer.cpu_kernels)."""
