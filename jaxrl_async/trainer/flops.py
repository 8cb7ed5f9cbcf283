"""How much an update computes: model FLOPs, and how full its rows are."""

from typing import Any

import jax
import numpy as np

from jaxrl_async.model.lora import Lora, adapter_table
from jaxrl_async.model.spec import ModelSpec, Weight, weight_table
from jaxrl_async.types import PackedBatch


def num_matmul_params(spec: ModelSpec) -> int:
    """Count the weights in each token's matrix products.

    An embedding that is only looked up does not count; of the experts, only those do that a token
    is routed to.
    """
    total = _weights_of_token(weight_table(spec), spec)
    return total if spec.tied else total - spec.vocab * spec.width


def _weights_of_token(table: dict[str, Any], spec: ModelSpec) -> int:
    """Count the weights of a table, of the experts those that one token is routed to."""
    leaves = jax.tree.leaves(table, is_leaf=lambda w: isinstance(w, Weight))
    total = sum(int(np.prod(w.shape)) for w in leaves)
    of_experts = sum(int(np.prod(w.shape)) for w in leaves if "expert" in w.axes)
    if of_experts:
        total -= of_experts - of_experts * spec.experts_per_token // spec.experts
    return total


def train_flops(
    spec: ModelSpec, batch: PackedBatch, *, reference: bool, lora: Lora | None = None
) -> float:
    """Return the model FLOPs of one update (learning_flops), and of a reference's forward pass if
    there is one. Padding, rematerialisation and the head for tokens that are not learnt do not
    count.

    lora: what is trained; None: all weights.
    """
    learnt = np.count_nonzero(batch.mask | batch.supervised)
    unread = np.count_nonzero(batch.segment_ids) - learnt
    head = 2 * spec.vocab * spec.width * float(unread)
    learning = learning_flops(spec, *_lengths(spec, batch), lora) - (2 if lora else 3) * head
    return learning + forward_flops(spec, batch) - head if reference else learning


def learning_flops(
    spec: ModelSpec, tokens: float, squares: float, lora: Lora | None = None
) -> float:
    """Return the FLOPs of a forward and a backward pass, given what flops_of_lengths is given.

    All weights: 3 times the forward pass. An adapter: 3 times for it and for attention, and 2 times
    for the frozen weights, of which no gradient is taken, in 8 or 4 bits, too: for one matrix of N
    x N and rank R, 2 N^2 + 6 N R in place of 3 N^2 (products of numbers). Schulman et al. 2025,
    "LoRA Without Regret", on its compute.
    """
    forward = flops_of_lengths(spec, tokens, squares)
    if lora is None:
        return 3 * forward
    frozen = 2 * num_matmul_params(spec) * tokens
    adapter = 2 * _weights_of_token(adapter_table(spec, lora), spec) * tokens
    return 3 * (forward + adapter) - frozen


def forward_flops(spec: ModelSpec, batch: PackedBatch) -> float:
    """Return the model FLOPs of one forward pass; a backward pass has twice as many.

    What contexts share counts once: a context of n tokens that skips s of them has the weights'
    products of n - s tokens and attention of n^2 - s^2. Layers with a window attend within it.
    """
    return flops_of_lengths(spec, *_lengths(spec, batch))


def _lengths(spec: ModelSpec, batch: PackedBatch) -> tuple[float, float]:
    """Return what flops_of_lengths is given, of a batch."""
    places = batch.positions[batch.segment_ids > 0].astype(np.float64)
    windows = [kind.window or np.inf for kind in spec.kinds if not kind.is_linear]
    squares = {w: float((2 * np.minimum(places, w - 1) + 1).sum()) for w in set(windows)}
    return float(len(places)), sum(squares[w] for w in windows) / spec.layers


def attended_length(spec: ModelSpec, length: float) -> float:
    """Return the length of the context that, without windows, would cost as much attention a token:
    the mean over the layers."""
    attending = (kind for kind in spec.kinds if not kind.is_linear)
    windows = (min(kind.window or length, length) for kind in attending)
    return sum((w * w + (length - w) * (2 * w - 1)) / length for w in windows) / spec.layers


def flops_of_lengths(spec: ModelSpec, tokens: float, squares: float) -> float:
    """Return the FLOPs of a forward pass, given the sum of the segments' lengths and the sum of
    their squares (with windows: the mean over layers of what it would be without them; 0 for a
    layer with a gated delta net).

    2 per weight and token, and the two products of causal attention, length^2 * heads * (width of a
    key + width of a value) per layer and segment. Chowdhery et al. 2022 (PaLM, arXiv:2204.02311),
    appendix B, with attention's causal half. A gated delta net reads its state [K, V] of each head
    twice and writes it once a token: 6 K V.
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
    """Report how full the rows are, with those that only fill the last micro-batch; and, if
    prefixes are shared, how much of the contexts need not be computed for it."""
    laid = np.count_nonzero(batch.segment_ids)
    measures = {
        "train/rows": float(rows),
        "train/micro_batches": float(passes),
        "train/packing": laid / (rows * batch.mask.shape[1]),
    }
    if shares_prefixes:
        ends = np.diff(batch.segment_ids, axis=1, append=0) != 0
        whole = int((batch.positions[ends & (batch.segment_ids > 0)] + 1).sum())
        measures["train/shared_tokens"] = 1 - laid / max(whole, 1)
    return measures
