"""Model FLOPs of an update, and the padding in its rows."""

from collections.abc import Mapping

import jax
import numpy as np

from jaxrl_async.model.lora import Lora, adapter_table
from jaxrl_async.model.spec import ModelSpec, Weight, weight_table
from jaxrl_async.types import PackedBatch


def num_matmul_params(spec: ModelSpec) -> int:
    """Count the weights in each token's matrix products.

    An embedding that is only looked up does not count. Only the experts that a token is routed to
    count.
    """
    total = _weights_of_token(weight_table(spec), spec)
    return total if spec.tied else total - spec.vocab * spec.width


def _weights_of_token(table: Mapping[str, object], spec: ModelSpec) -> int:
    """Count the weights of a table; among experts only the chosen ones of one token."""
    leaves = jax.tree.leaves(table, is_leaf=lambda w: isinstance(w, Weight))
    total = sum(int(np.prod(w.shape)) for w in leaves)
    of_experts = sum(int(np.prod(w.shape)) for w in leaves if "expert" in w.axes)
    if of_experts:
        total -= of_experts - of_experts * spec.experts_per_token // spec.experts
    return total


def train_flops(
    spec: ModelSpec, batch: PackedBatch, *, reference: bool, lora: Lora | None = None
) -> float:
    """Return the model FLOPs of one update (learning_flops).

    Padding, rematerialisation and the head for tokens outside the loss do not count.

    Args:
        reference: add a forward pass of the reference.
        lora: the trained adapter; None: all weights are trained.
    """
    trained = np.count_nonzero(batch.mask | batch.supervised)
    unread = np.count_nonzero(batch.segment_ids) - trained
    head = 2 * spec.vocab * spec.width * float(unread)
    learning = learning_flops(spec, *_lengths(spec, batch), lora) - (2 if lora else 3) * head
    return learning + forward_flops(spec, batch) - head if reference else learning


def learning_flops(
    spec: ModelSpec, tokens: float, squares: float, lora: Lora | None = None
) -> float:
    """Return the FLOPs of a forward and a backward pass; arguments as flops_of_lengths.

    All weights: 3 times the forward pass. An adapter: 3 times for the adapter and attention, 2
    times for the frozen weights (in 8 or 4 bits, too), since they need no gradient. One matrix of
    N x N with rank R takes 2 N^2 + 6 N R products in place of 3 N^2. Schulman et al. 2025, "LoRA
    Without Regret", on its compute.
    """
    forward = flops_of_lengths(spec, tokens, squares)
    if lora is None:
        return 3 * forward
    frozen = 2 * num_matmul_params(spec) * tokens
    adapter = 2 * _weights_of_token(adapter_table(spec, lora), spec) * tokens
    return 3 * (forward + adapter) - frozen


def forward_flops(spec: ModelSpec, batch: PackedBatch) -> float:
    """Return the model FLOPs of one forward pass; a backward pass has twice as many.

    Shared prefixes count once: a context of n tokens that skips s of them has the weights' products
    of n - s tokens and attention of n^2 - s^2. Layers with a window attend within it.
    """
    return flops_of_lengths(spec, *_lengths(spec, batch))


def _lengths(spec: ModelSpec, batch: PackedBatch) -> tuple[float, float]:
    """Return the arguments of flops_of_lengths for a batch: tokens, squares."""
    positions = batch.positions[batch.segment_ids > 0].astype(np.float64)
    windows = [kind.window or np.inf for kind in spec.kinds if not kind.is_linear]
    squares = {w: float((2 * np.minimum(positions, w - 1) + 1).sum()) for w in set(windows)}
    return float(len(positions)), sum(squares[w] for w in windows) / spec.layers


def attended_length(spec: ModelSpec, length: float) -> float:
    """Return the context length with the same attention FLOPs per token if no layer had a window:
    the mean over the layers."""
    attending = (kind for kind in spec.kinds if not kind.is_linear)
    windows = (min(kind.window or length, length) for kind in attending)
    return sum((w * w + (length - w) * (2 * w - 1)) / length for w in windows) / spec.layers


def flops_of_lengths(spec: ModelSpec, tokens: float, squares: float) -> float:
    """Return the FLOPs of a forward pass.

    2 per weight and token, and the two products of causal attention, length^2 * heads * (width of a
    key + width of a value) per layer and segment. Chowdhery et al. 2022 (PaLM, arXiv:2204.02311),
    appendix B, with attention's causal half. A gated delta net reads its state [K, V] of each head
    twice and writes it once a token: 6 K V.

    Args:
        tokens: sum of the segments' lengths.
        squares: sum of the segments' squared lengths, as a mean over layers. A layer with a window
            counts only the pairs within it, a layer with a gated delta net none.
    """
    attention = spec.layers * spec.heads * (spec.head_dim + spec.value_dim) * squares
    return (2 * num_matmul_params(spec) + _delta_flops(spec)) * tokens + attention


def _delta_flops(spec: ModelSpec) -> float:
    """Return the FLOPs of all gated delta nets for one token, without their weights' products."""
    layers, sizes = sum(kind.is_linear for kind in spec.kinds), spec.delta
    if sizes is None:
        return 0.0
    return 6.0 * layers * sizes.value_heads * sizes.key_width * sizes.value_width


def packing_measures(
    batch: PackedBatch, rows: int, passes: int, *, shares_prefixes: bool = False
) -> dict[str, float]:
    """Report rows, micro-batches and the share of tokens in the rows that are not padding.

    With shared prefixes also the share of the contexts' tokens that need no computation. `rows`
    includes the padding rows of the last micro-batch.
    """
    packed = np.count_nonzero(batch.segment_ids)
    measures = {
        "train/rows": float(rows),
        "train/micro_batches": float(passes),
        "train/packing": packed / (rows * batch.mask.shape[1]),
    }
    if shares_prefixes:
        ends = np.diff(batch.segment_ids, axis=1, append=0) != 0
        whole = int((batch.positions[ends & (batch.segment_ids > 0)] + 1).sum())
        measures["train/shared_tokens"] = 1 - packed / max(whole, 1)
    return measures
