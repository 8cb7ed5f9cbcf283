"""Settings of the trainer. Needs no JAX."""

from typing import Literal

from pydantic import Field

from jaxrl_async.config.choice import Choice
from jaxrl_async.config.section import NonNegative, Positive, Section


class TrainerSection(Section):
    optimizer: Choice = "adamw"
    """Optimizer of all weights: adamw, muon (beta, steps, rms), or your own (FILE.py:FUNCTION)."""
    warmup_steps: NonNegative = 0
    """Optimizer updates over which the learning rate rises to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or decayed (linear, cosine)."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum global norm of the gradients; larger ones are scaled down."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices, not of norms and biases."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay rate of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay rate of the second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    rounding: Literal["masters", "stochastic", "nearest"] = "masters"
    """Addition of updates to bfloat16 weights: to float32 masters (4 more bytes per weight), with
    stochastic rounding, or rounded to the nearest (loses updates below about 1/500 of a weight)."""
    row_length: Positive | None = None
    """Length of a packed row, tokens; null: sampler.max_length, or with share_prefixes longer, to
    hold a group's answers."""
    share_prefixes: bool | None = None
    """Store a shared beginning of a group's contexts once per row; the update is the same up to
    rounding. null: true in an rl run on one CPU device with cpu_kernels, without model.balance."""
    micro_batch_tokens: Positive = 4096
    """Maximum tokens, padding included, per forward and backward pass; at least a row per
    device."""
    logprob_chunk: Positive = 1024
    """Tokens per device whose logits are in memory at the same time."""
    cpu_kernels: bool = True
    """On a CPU in float32, use our C++ kernels, which the machine's g++ or clang++ compiles once;
    without a compiler, XLA."""
    offload: tuple[Literal["optimizer", "reference"], ...] = ()
    """State offloaded to host memory between uses: optimizer (AdamW's moments and master weights),
    reference (the reference policy)."""
    compiler_options: dict[str, str] = Field({})
    """XLA compiler options for the update, by name."""
    max_skipped_steps: Positive = 3
    """Consecutive non-finite steps that stop the run."""
