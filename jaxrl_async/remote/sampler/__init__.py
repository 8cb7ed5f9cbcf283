"""A sampler in another process, on the trainer's side and on its own."""
