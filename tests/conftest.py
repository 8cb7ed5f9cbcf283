"""Forced host devices for every test: set before anything imports JAX."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PJRT_NPROC"] = "32"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
