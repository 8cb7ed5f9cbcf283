"""Credit by pairs: a prompt's better and worse answers give advantages.

    log-probs of policy and reference ──sum──> answers ──PairWeights──> d loss / d log policy
                                                                           │
    advantage of each trained token = - slope of its answer / its weight <─┘

With these advantages the loss gpg, -advantage * log policy without a ratio, has the gradient of the
pairs' loss.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.algorithms.answer_pairs import (
    AnswerSums,
    How,
    PairWeights,
    pairs_loss,
    pairs_of_step,
)
from jaxrl_async.algorithms.columns import Columns
from jaxrl_async.algorithms.preference_losses import needs_reference
from jaxrl_async.config.algorithm_section import PairsSection
from jaxrl_async.config.schema import AlgorithmSection
from jaxrl_async.trainer.credit import PassResults
from jaxrl_async.trainer.step_data import PackedStep
from jaxrl_async.types import FloatArray, PackedBatch

TOKEN_LOSS = "gpg"
"""The token loss with the same gradient as the pairs' loss."""


def pair_algorithm(algorithm: AlgorithmSection) -> AlgorithmSection:
    """Return the algorithm with the token loss of an update on pairs."""
    return algorithm.model_copy(
        update={"loss": TOKEN_LOSS, "correction": None, "anchor": "behavior"}
    )


def pair_columns(pairs: PairsSection | None) -> frozenset[str]:
    """Return the columns of passes that pairs need before the update; empty without pairs."""
    if pairs is None:
        return frozenset()
    return frozenset({"proximal_logprobs", *(["reference_logprobs"] if pairs.refers else [])})


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCredit:
    """Turns a step's pairs into advantages of its tokens. Replaces credit.Credit."""

    pair_weights: PairWeights
    refers: bool  # whether the loss compares with the reference
    how: How
    seed: int
    columns: frozenset[str]  # made by passes
    token_weights: Callable[[PackedBatch], Columns]  # of the other terms of the loss

    @classmethod
    def of(
        cls,
        pairs: PairsSection,
        columns: frozenset[str],
        seed: int,
        token_weights: Callable[[PackedBatch], Columns],
    ) -> "PairCredit":
        """Return the credit of the configured pairs. Raises ConfigError.

        Args:
            pairs: the choice of pairs, and their loss.
            columns: made by passes for the other terms of the loss.
            seed: of choose=best_random.
            token_weights: as PolicyObjective.weights.
        """
        assert pairs.loss is not None, "pairs are trained"
        loss = pairs_loss(pairs.loss)
        return cls(
            pair_weights=PairWeights(loss),
            refers=needs_reference(loss),
            how=pairs.choose,
            seed=seed,
            columns=columns | pair_columns(pairs),
            token_weights=token_weights,
        )

    def __call__(
        self, step: PackedStep, results: PassResults, kl_coefficient: float
    ) -> tuple[PackedStep, dict[str, float]]:
        """Return the step with advantages and the losses' columns; and a report.

        The report has the pairs' loss as train/policy_loss.

        Args:
            step: packed, only with answers in pairs (answer_pairs.keep_paired).
            results: of the passes over it.
            kl_coefficient: not read: the KL is a term of the loss.
        """
        batch = step.batch
        assert results.proximal is not None, "pairs need the policy's log-probs"
        num_answers = sum(len(g.episodes) for g in step.data.groups)
        masks = step.to_groups(batch.mask)
        pairs = pairs_of_step(step.data, masks, self.how, self.seed)
        reference = None
        if self.refers:
            assert results.reference is not None, "the loss compares with a reference"
            reference = sums_of_answers(results.reference, batch, num_answers)
        sums = AnswerSums(
            logprobs=sums_of_answers(results.proximal, batch, num_answers),
            lengths=sums_of_answers(np.ones(batch.mask.shape), batch, num_answers),
            reference=reference,
        )
        slopes, report = self.pair_weights(pairs, sums)
        columns = dict(self.token_weights(batch))
        columns["proximal_logprobs"] = results.proximal
        if results.reference is not None:
            columns["reference_logprobs"] = results.reference
        if results.top_k is not None:
            columns |= results.top_k
        return step.with_rows(_advantages(batch, slopes, columns["weights"]), columns, {}), report


def sums_of_answers(
    values: NDArray[np.floating], batch: PackedBatch, num_answers: int
) -> NDArray[np.float64]:
    """Sum values [rows, length] over the trained tokens of each answer, in all its contexts."""
    mask = batch.mask
    sums = np.bincount(batch.sequence_ids[mask], values[mask], minlength=num_answers)
    return sums.astype(np.float64)  # bincount of an empty array returns integers


def _advantages(
    batch: PackedBatch, slopes: NDArray[np.float64], weights: NDArray[np.float32]
) -> FloatArray:
    """Return -slope of a token's answer / its weight, [rows, length]; 0 for untrained tokens."""
    trained = batch.mask & (weights != 0)
    advantages = np.zeros(batch.mask.shape, np.float32)
    advantages[trained] = -slopes[batch.sequence_ids[trained]] / weights[trained]
    return advantages
