"""Estimate the time of a compiled program. Pure functions.

    compute       instructions, timed by pace.py: the TPU compiler's own cycles; for NVIDIA cards
                  computed
    kernels       attention's, which the compiler does not time: their FLOPs at the published share
                  of the peak (attention_rates.py; a prefill's kernel on the pages is assumed to
                  reach the share of training's forward pass); on the pages, in decode, FLOPs at
                  half the peak or the bytes of the KV cache at four fifths of the bandwidth,
                  whichever takes longer
    experts       their products, which it does not time either, count with compute: FLOPs at half
                  the peak, or bytes at four fifths of the bandwidth, whichever takes longer
    hidden        gathers, scatters and permutes of weights, overlapped with the products
    exposed       all-reduces and all-to-alls, which the program waits for, and all traffic
                  between slices, at a chip's share of its host's network cards: an upper bound of
                  the rate

    estimate = max(compute + kernels, hidden) + exposed

The roofline needs no compiler: max(FLOPs / peak, bytes / bandwidth, bytes sent / ICI).
"""

from dataclasses import dataclass

from jaxrl_async.plan.attention_rates import card_share, splash_share
from jaxrl_async.plan.chips import Slice
from jaxrl_async.plan.compiled import Compiled
from jaxrl_async.plan.cost import BETWEEN_SLICES, Collective, Kernel

RAGGED_SHARE = 0.8
"""Assumed share of HBM's bandwidth that ragged paged attention reaches.

Published: up to 0.86 in decode, Llama 3 8B on tpu7x, with the third version of the kernel
(arxiv.org/abs/2604.15464). The second, which JAX has, took as long in decode where a user timed
both, 0.323 and 0.333 ms (github.com/sgl-project/sglang-jax/issues/967, chip not named). No share
was found for v5e, v5p or v6e.
"""
DECODE_SHARE = 0.5
"""Assumed share of a TPU's peak that decode reaches on the pages, where computing takes longer than
reading: latent attention of many heads. Nothing is published for TPUs; an H800 reaches 0.67
(github.com/deepseek-ai/FlashMLA: 660 TFLOP/s)."""
GROUPED_SHARE = 0.5
"""Assumed share of the peak that the experts' products reach.

Published for the shapes of Qwen3-30B-A3B, 128 experts of 2,048 x 768 and 1,024 rows each: 0.74 and
0.61 with tokamax' kernel on v5e, 0.35 to 0.38 on v5p, 0.34 to 0.38 with XLA's own on v5e
(github.com/openxla/tokamax, data/autotuning, pallas_mosaic_tpu_ragged_dot.json, ragged_dot.json).
"""
HOP_S = 1e-6
"""Latency from one chip to the next, seconds; a collective goes half around the ring."""
CARD_HOP_S = 3e-6
"""The same from card to card, for NCCL: an all-reduce among eight takes at least 12 us."""
BACKWARD = (
    "splash_mha_dkv", "splash_mha_dq", "flash_keys", "flash_queries", "cudnn_attention_backward",
)  # fmt: skip
ON_PAGES = ("ragged_paged", "decode_on_pages", "latent_on_pages", "attend_pages")
"""Prefixes of the names of kernels that attend on the pages of the KV cache: JAX's for TPUs, this
package's for TPUs, and for cards. Their text gives neither their FLOPs nor their bytes."""
EXPOSED = ("all-reduce", "all-to-all")
RINGS = ("all-gather", "all-reduce", "reduce-scatter")
"""Collectives that NCCL runs as rings through all network cards of a host's members: two hosts with
eight pairs of card and 400 Gb/s reach 366 to 470 GB/s, not 50 (github.com/NVIDIA/nccl-tests, issue
309; four cards of 200 Gb/s 96 GB/s, issue 119)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of one run of a program, seconds."""

    compute_s: float
    products_s: float  # the part of compute_s in instructions with a matrix product
    peak_s: float  # the products, including kernels', at the chip's peak
    kernels_s: float
    hidden_s: float
    exposed_s: float
    roofline_s: float

    @property
    def estimate_s(self) -> float:
        """max(compute + kernels, hidden) + exposed."""
        return max(self.compute_s + self.kernels_s, self.hidden_s) + self.exposed_s

    @property
    def largest(self) -> str:
        """The part that takes the most time."""
        return max(self._terms, key=lambda name: self._terms[name])

    @property
    def largest_share(self) -> float:
        """The largest part's share of the estimate."""
        return self._terms[self.largest] / self.estimate_s if self.estimate_s else 0.0

    @property
    def _terms(self) -> dict[str, float]:
        return {
            "products": self.compute_s,  # and what is fused with them
            "attention": self.kernels_s,
            "communication": self.hidden_s + self.exposed_s,
        }


def gradient_account(time: Timing, model_s: float) -> dict[str, float]:
    """Divide a gradient's time into shares that sum to 1.

    model_s: time of the model's own FLOPs at the chip's peak, so the first share is the MFU.
    """
    parts = {
        "model": model_s,
        "computed again": time.peak_s - model_s,
        "below the peak": time.products_s + time.kernels_s - time.peak_s,
        "between products": time.compute_s - time.products_s,
        "communication": time.estimate_s - time.compute_s - time.kernels_s,
    }
    return {name: part / time.estimate_s for name, part in parts.items()}


def decode_account(
    block: Timing, steps: int, *, weights_s: float, cache_s: float, host_s: float
) -> dict[str, float]:
    """Divide a decode block's time into shares that sum to 1.

    Args:
        block: the block's program.
        steps: decode steps in the block.
        weights_s: time per step to read the weights once at HBM's bandwidth.
        cache_s: the same for the KV cache.
        host_s: the host's time per block.
    """
    compute_s, products_s, kernels_s = block.compute_s, block.products_s, block.kernels_s
    parts = {
        "weights": weights_s * steps,
        "KV cache": cache_s * steps,
        "products beyond": products_s - weights_s * steps,
        "attention beyond": kernels_s - cache_s * steps,
        "between products": compute_s - products_s,
        "communication": block.estimate_s - compute_s - kernels_s,
        "host": host_s,
    }
    return {name: part / (block.estimate_s + host_s) for name, part in parts.items()}


def timing(
    done: Compiled, where: Slice, cache_bytes: float = 0.0, ragged: Kernel | None = None
) -> Timing:
    """Estimate a program on its slice.

    Args:
        done: the program.
        where: its slice.
        cache_bytes: total KV bytes that its kernels on the pages read, if it has any.
        ragged: the work of these kernels, which their text does not give; None: only reads count.
            Reading and computing overlap: the longer time counts.
    """
    chip, cost = where.chip, done.cost
    kernels = [*cost.kernels, *(() if ragged is None else (ragged,))]
    grouped_s = sum(
        max(
            k.flops / chip.peak_flops / GROUPED_SHARE,
            k.num_bytes / chip.hbm_bytes_per_s / RAGGED_SHARE,
        )
        for k in kernels
        if k.num_bytes
    )
    num_bytes = cost.num_bytes + sum(k.num_bytes for k in kernels)
    flops = cost.flops + sum(k.flops for k in kernels)
    seconds = {c: collective_s(c, where) for c in cost.collectives}
    exposed = sum(s for c, s in seconds.items() if c.kind in EXPOSED or c.axes == BETWEEN_SLICES)
    communication_s = sum(seconds.values())
    on_pages = any(k.name.startswith(ON_PAGES) for k in cost.kernels)  # otherwise they are gathered
    read_bytes = cache_bytes if on_pages else 0.0
    return Timing(
        compute_s=cost.compute_s + grouped_s,
        products_s=cost.products_s + grouped_s,
        peak_s=flops / chip.peak_flops,
        kernels_s=sum(_attention_s(k, where) for k in cost.kernels if not k.num_bytes)
        + on_pages_s(read_bytes, ragged, where),
        hidden_s=communication_s - exposed,
        exposed_s=exposed,
        roofline_s=max(
            flops / chip.peak_flops,
            (num_bytes + read_bytes) / chip.hbm_bytes_per_s,
            communication_s,
        ),
    )


def on_pages_s(num_bytes: float, computed: Kernel | None, where: Slice) -> float:
    """Return the seconds of kernels on the pages: to read `num_bytes` of them, or to compute,
    whichever takes longer; None: only reads count."""
    read_s = num_bytes / where.chip.hbm_bytes_per_s / RAGGED_SHARE
    return read_s if computed is None else max(read_s, _attention_s(computed, where))


def _attention_s(kernel: Kernel, where: Slice) -> float:
    """Return the seconds of an attention kernel, by its share of the peak; 0 if it has no FLOPs."""
    if not kernel.flops:
        return 0.0
    chip, backward = where.chip, kernel.name.startswith(BACKWARD)
    if chip.is_card:
        share = card_share(kernel.name, backward=backward)
    elif kernel.length:
        share = splash_share(chip.generation, kernel.length, kernel.width, backward=backward)
    else:
        share = DECODE_SHARE
    return kernel.flops / chip.peak_flops / share


def collective_s(one: Collective, where: Slice) -> float:
    """Return the seconds of a collective: bytes over the group's links, plus its ring's latency."""
    if one.axes == BETWEEN_SLICES:
        return one.num_bytes / where.chip.dcn_bytes_per_s
    hop_s = CARD_HOP_S if where.chip.is_card else HOP_S
    rate = where.sent_bytes_per_s(one.group, one.near, in_a_ring=one.kind in RINGS)
    return one.num_bytes / rate + one.times * hop_s * one.group / 2
