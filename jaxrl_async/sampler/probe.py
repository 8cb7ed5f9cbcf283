"""A probe: tokens on which a sampler's log-probs are compared with the trainer's. Pure host code.

Both compute the same function by different programs, so their numbers differ by rounding even with
equal weights. Unequal weights show in the number of tokens that differ, and in the size of the
differences. Measured with SmolLM2-135M-Instruct (30 layers) on 16 to 64 tokens of a prompt, as
shares of 1 + |log-prob|, largest and median:

    float32, two programs                       0.00002     0.000002
    bfloat16, the same attention                0.008       0.001
    bfloat16, a splash trainer                  0.10        0.01
    int8 in the sampler                         0.10        0.02
    float8 in the sampler                       0.43        0.06
    one kind of matrix, of all layers, flipped  4 to 30     0.25 to 6
    two neighbouring layers swapped             0.6         0.1

A fault is a difference beyond all rounding: with 30 layers, a median share above 0.01 in float32
(0.033 on NVIDIA), 0.164 in bfloat16 and in float32 on TPUs, 0.41 with int8, 0.82 with float8. A
flipped kind of matrix is therefore always found down to bfloat16, and in 8 bits only if it changes
much; swapped neighbours are found in float32 only. Checksums find the rest.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_async.errors import WeightsError
from jaxrl_async.types import FloatArray, IntArray

LENGTH = 32
"""Length of a probe, tokens."""
LEAST_NATS = 5e-3
"""Differences below this are never reported, nats. In some models the first tokens of a text have
hidden states in the thousands: SmolLM2's second token differs by 0.0015 nats in float32, where the
median is 0.00001."""
FLOAT32 = 1e-5
"""Rounding of a log-prob, as a share of 1 + |log-prob|, times the square root of the layers."""
TENSOR_FLOAT32 = 4e-3
"""The same for float32 products that are rounded to 10 bits (NVIDIA, by default)."""
BFLOAT16 = 2e-2
"""The same in bfloat16, in which TPUs also multiply float32 by default."""
ROUNDED_TO = {"int8": 5e-2, "float8_e4m3fn": 1e-1}
"""The same for matrices in 8 bits."""
FAULT = 1.5
"""Multiple of the maximum rounding that more than half of the tokens exceed in a fault."""
LEAST_FAULT = 0.01
"""Minimum of that bound, as a share of 1 + |log-prob|."""

log = logging.getLogger(__name__)


def probe_tokens(prompts: Sequence[IntArray], vocab: int) -> IntArray:
    """Return the sequence on which trainer and samplers compare log-probs, [LENGTH] int32.

    It is the beginning of the first text prompts, repeated if they are shorter. Without prompts of
    pure text (ids of images are beyond the vocabulary), tokens from the whole vocabulary. Text is
    preferred because log-probs of unordered tokens are so low (-20 to -60 nats) that rounding alone
    changes them by thousandths.
    """
    texts = [ids for ids in prompts if len(ids) and ids.min() >= 0 and ids.max() < vocab]
    if not texts:
        return ((np.arange(LENGTH, dtype=np.int64) * 7919 + 1) % vocab).astype(np.int32)
    return np.resize(np.concatenate(texts), LENGTH).astype(np.int32)


def rounding_share(*, dtype: str, rounded_to: str | None, platform: str, layers: int) -> float:
    """Return the share of 1 + |log-prob| by which rounding may change a token's log-prob.

    Roundings of layers add up like independent errors, with the square root of their number.

    Args:
        dtype: the narrower type that a side computes in.
        rounded_to: the 8-bit type of the sampler's matrices or products; None: no 8-bit type.
        platform: of the devices, as JAX calls it.
        layers: of the model.
    """
    of_float32 = {"cpu": FLOAT32, "gpu": TENSOR_FLOAT32, "cuda": TENSOR_FLOAT32}
    each = BFLOAT16 if dtype == "bfloat16" else of_float32.get(platform, BFLOAT16)
    if rounded_to is not None:
        each = max(each, ROUNDED_TO[rounded_to])
    return float(each * np.sqrt(layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A fixed sequence on which the sampler's log-probs are compared with the trainer's."""

    token_ids: IntArray  # [probe] int32
    rounding: float = FLOAT32  # of a log-prob, as a share of 1 + |log-prob|: rounding_share
    tolerance: float | None = None  # maximum unreported difference, nats; None: `rounding`
    as_trained: bool = False  # the sampler receives the trainer's weights unchanged: then
    # checksums prove what a probe only makes likely


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of two sides' log-probs on a probe."""

    largest: float  # nats
    median: float  # nats
    limit: float  # limit of the token that exceeds its limit the most, nats
    is_more: bool  # whether any token differs by more than its limit
    is_fault: bool  # whether rounding cannot explain it: weights or programs differ


def difference(probe: Probe, sampler: FloatArray, trainer: FloatArray) -> Difference:
    """Compare the log-probs of a probe's tokens but the first, [probe - 1] each, in nats.

    Each token has a separate limit: a log-prob of -60 nats is rounded by more than one of -1. A
    fault is a difference beyond all rounding of more than half of the tokens, or a number that is
    not finite on one side.
    """
    if not (np.isfinite(sampler).all() and np.isfinite(trainer).all()):
        nan = float("nan")
        return Difference(largest=nan, median=nan, limit=0.0, is_more=True, is_fault=True)
    differences, size = np.abs(sampler - trainer), 1 + np.abs(trainer)
    limits = np.maximum(probe.rounding * size, LEAST_NATS)
    if probe.tolerance is not None:
        limits = np.full_like(size, probe.tolerance)
    farthest = int(np.argmax(differences / limits))
    beyond = np.maximum(max(FAULT * probe.rounding, LEAST_FAULT) * size, probe.tolerance or 0.0)
    return Difference(
        largest=float(differences.max()),
        median=float(np.median(differences)),
        limit=float(limits[farthest]),
        is_more=bool(differences[farthest] > limits[farthest]),
        is_fault=bool(np.median(differences / beyond) > 1),
    )


class ProbeJudge:
    """Accepts or refuses new weights of one sampler by their probe; logs accepted weights that
    differ by more than rounding explains. Used by one thread."""

    def __init__(self, probe: Probe, side: str, advice: str) -> None:
        """Start without a judgement.

        Args:
            probe: the tokens, and the expected rounding.
            side: owner of the compared log-probs, for messages.
            advice: what to check if they differ, for messages.
        """
        self.probe = probe
        self._side, self._advice, self._num_reports = side, advice, 0

    def judge(
        self, version: int, sampler: FloatArray, trainer: FloatArray, *, compared: bool
    ) -> float:
        """Return the largest difference, nats. Raises WeightsError for numbers that are not finite,
        and for a fault, unless checksums have proved that the weights are the trainer's own.

        compared: whether every array has the checksum of the array that was sent.
        """
        found = difference(self.probe, sampler, trainer)
        if not np.isfinite(trainer).all():
            raise WeightsError(
                f"weights of version {version}: the trainer's own log-probs on the probe are not "
                "finite. These weights give NaN on every device: neither the transfer nor the "
                "sampler is the cause. The run started with them (model.path), or resumed from a "
                "checkpoint that has them: take another one, and lower "
                "algorithm.learning_rate."
            )
        if not np.isfinite(found.largest):
            raise WeightsError(
                f"weights of version {version}: the sampler's log-probs on the probe are not "
                f"finite. {self._advice}"
            )
        if found.is_fault and not (compared and self.probe.as_trained):
            raise WeightsError(
                f"weights of version {version}: {self._side} log-probs on the probe are not the "
                f"trainer's: half of the tokens differ by more than {found.median:.3g} nats, one "
                f"by {found.largest:.3g}, which no rounding explains. {self._advice}"
            )
        if found.is_more:
            self._log(version, found)
        return found.largest

    def _log(self, version: int, found: Difference) -> None:
        """Log a difference: the 1st, 2nd, 4th, 8th, and so on."""
        self._num_reports += 1
        if self._num_reports & (self._num_reports - 1):
            return
        conclusion = (
            "the weights arrived unchanged (checksums): the two programs compute different "
            "functions"
            if found.is_fault
            else "the run continues, and mismatch/* shows what the difference does to its tokens"
        )
        log.warning(
            "weights of version %d: %s log-probs on the probe differ from the trainer's by %.3g "
            "nats, more than rounding explains (%.3g; weights.probe_tolerance), half of the tokens "
            "by at most %.3g: %s. %s",
            version,
            self._side,
            found.largest,
            found.limit,
            found.median,
            conclusion,
            self._advice,
        )
