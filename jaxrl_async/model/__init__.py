"""The policy: families, layers, attention and its kernels, the KV cache, LoRA, and how weights are
read and written."""
