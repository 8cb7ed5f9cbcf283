"""The policy: families, layers, attention and its kernels, the KV cache, LoRA, and reading and
writing of weights."""
