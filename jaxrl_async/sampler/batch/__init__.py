"""The requests on a sampler's device and their KV cache, on the host's side."""
