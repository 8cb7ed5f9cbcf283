"""A sampler in another process: the trainer's side and the sampler's side."""
