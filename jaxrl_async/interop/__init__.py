"""Wing: samplers that are other engines (vLLM, JetStream), and our sampler behind Tunix's
protocol (sampler.engine)."""
