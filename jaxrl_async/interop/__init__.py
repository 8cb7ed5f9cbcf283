"""Other engines as samplers: vLLM servers, JetStream engines, and our sampler behind Tunix's
protocol."""
