"""Samplers that are other engines: vLLM servers, JetStream engines, and our sampler behind Tunix's
protocol."""
