"""Settings of the trainer. Needs no JAX."""

from typing import Literal

from pydantic import Field

from jaxrl_async.config.choice import Choice
from jaxrl_async.config.section import NonNegative, Positive, Section


class TrainerSection(Section):
    optimizer: Choice = "adamw"
    """Optimizer of all trained weights: adamw, muon (settings: beta, steps, rms), or your own
    (FILE.py:FUNCTION)."""
    warmup_steps: NonNegative = 0
    """Optimizer updates over which the learning rate rises to its peak; a step makes
    algorithm.epochs * minibatches of them."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum global norm of the gradients; larger gradients are scaled down."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay, of matrices (adapters' and value heads', too), not of norms
    and biases."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay rate of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay rate of the second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    rounding: Literal["masters", "stochastic", "nearest"] = "masters"
    """Addition of updates to bfloat16 weights: to float32 master weights (4 more bytes per
    weight), rounded stochastically (unbiased), or rounded to the nearest (loses updates below
    about 1/500 of a weight)."""
    row_length: Positive | None = None
    """Length of a packed row, tokens; null: sampler.max_length, or with share_prefixes enough for a
    group's longest answers, up to a device's share of micro_batch_tokens, the larger of 2048 and
    twice sampler.max_length, and 8192."""
    share_prefixes: bool | None = None
    """Store a shared beginning of a group's contexts (prompt, history of branches) once per row,
    if this makes fewer rows. The update is the same up to rounding, but model.balance counts
    shared tokens once. A row_length that you set needs room for a prompt and several answers.
    null: true in an rl run on one CPU device with cpu_kernels, without model.balance."""
    micro_batch_tokens: Positive = 4096
    """Maximum tokens, padding included, per forward and backward pass; at least a row per device.
    An update also uses micro-batches of about a quarter and a sixteenth of this size, and smaller
    ones if a CPU's memory would not suffice."""
    logprob_chunk: Positive = 1024
    """Tokens per device whose logits are in memory at the same time."""
    cpu_kernels: bool = True
    """On a CPU in float32, compute attention, log-probs and, with a matrix unit (AMX), products by
    our C++ kernels, compiled once by the machine's g++ or clang++; if that fails, the log says so,
    and XLA's programs are used."""
    offload: tuple[Literal["optimizer", "reference"], ...] = ()
    """State offloaded to host memory between uses: AdamW's moments and master weights (optimizer),
    loaded for each update; the reference policy, loaded for its pass."""
    compiler_options: dict[str, str] = Field({})
    """XLA compiler options for the update, by name; TPU options are refused on other platforms."""
    max_skipped_steps: Positive = 3
    """Consecutive non-finite steps that stop the run."""
