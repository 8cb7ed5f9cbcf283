"""How much an update computes: model FLOPs, and how full its rows are."""

import jax
import numpy as np

from jaxrl_async.model.spec import ModelSpec, Weight, weight_table
from jaxrl_async.types import PackedBatch


def num_matmul_params(spec: ModelSpec) -> int:
    """Count the weights in each token's matrix products.

    An embedding that is only looked up does not count; of the experts, only those do that a token
    is routed to.
    """
    leaves = jax.tree.leaves(weight_table(spec), is_leaf=lambda w: isinstance(w, Weight))
    total = sum(int(np.prod(w.shape)) for w in leaves)
    of_experts = sum(int(np.prod(w.shape)) for w in leaves if "expert" in w.axes)
    if of_experts:
        total -= of_experts - of_experts * spec.experts_per_token // spec.experts
    return total if spec.tied else total - spec.vocab * spec.width


def train_flops(spec: ModelSpec, batch: PackedBatch, *, reference: bool) -> float:
    """Return the model FLOPs of one update: 3 forward passes, and one more with a reference.

    Padding and rematerialisation do not count.
    """
    return forward_flops(spec, batch) * (4 if reference else 3)


def forward_flops(spec: ModelSpec, batch: PackedBatch) -> float:
    """Return the model FLOPs of one forward pass; a backward pass has twice as many."""
    lengths = np.bincount(batch.sequence_ids[batch.sequence_ids >= 0]).astype(np.float64)
    return flops_of_lengths(spec, float(lengths.sum()), float((lengths**2).sum()))


def flops_of_lengths(spec: ModelSpec, tokens: float, squares: float) -> float:
    """Return the FLOPs of a forward pass, given the sum of the sequences' lengths and the sum of
    their squares.

    2 per weight and token, and the two products of causal attention, 2 * length^2 * heads *
    head_dim per layer and sequence. Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), appendix B,
    with attention's causal half.
    """
    attention = 2 * spec.layers * spec.heads * spec.head_dim * squares
    return 2 * num_matmul_params(spec) * tokens + attention


def packing_measures(batch: PackedBatch, rows: int, passes: int) -> dict[str, float]:
    """Report how full the rows are, with those that only fill the last micro-batch."""
    return {
        "train/rows": float(rows),
        "train/micro_batches": float(passes),
        "train/packing": np.count_nonzero(batch.segment_ids) / (rows * batch.mask.shape[1]),
    }
