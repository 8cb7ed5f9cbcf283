"""python -m jaxrl_async.sample --join HOST:PORT: a sampler that joins a run."""
