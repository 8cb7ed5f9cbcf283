"""Pairs of the policy's own answers: their choice within a group, and the weight of each answer.

    rewards after shaping ──choose──> (better, worse) per group ──keep_paired──> episodes to pack
    log-probs of policy and reference ──PairWeights──> d loss / d log policy(answer)

The gradient of a pair loss is the sum over answers of that derivative times the gradient of the
answer's log-prob. Given the log-probs beforehand, answers are trained on like other sequences, in
any row or micro-batch, and an answer in several pairs is computed once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxrl_async.algorithms.advantages import Doubles, StepData, returns_of, step_data
from jaxrl_async.algorithms.objective import Totals, summarize
from jaxrl_async.algorithms.preference_losses import (
    PairInputs,
    PreferenceLossFn,
    needs_baseline,
    preference_loss,
    summed_pairs,
)
from jaxrl_async.algorithms.shaping import Shaped, ShapingFn, counted, shape, with_episodes
from jaxrl_async.config.schema import Choice
from jaxrl_async.errors import ConfigError
from jaxrl_async.types import EpisodeGroup

How = Literal["best_worst", "best_random", "all"]


class AnswerPair(NamedTuple):
    """Two answers to one prompt, by index among the answers of their group or of their step."""

    better: int
    worse: int


# ---- choice of pairs


def choose_pairs(
    returns: Doubles, learnable: NDArray[np.bool_], how: How, seed: Sequence[int]
) -> tuple[list[AnswerPair], int]:
    """Pair the answers of a group; also return the number of pairs skipped as ties.

    The first of equally good answers is taken. Applied again to the chosen answers alone, the
    choice is the same.

    Args:
        returns: [answers] return of each answer.
        learnable: [answers] whether an answer has tokens to train on; others are in no pair.
        how: as pairs.choose. If only the best is paired, a group whose answers are all equally
            good counts as one tie.
        seed: key of the random choice of best_random.
    """
    candidates = [int(i) for i in np.flatnonzero(learnable)]
    if len(candidates) < 2:
        return [], 0
    if how == "all":
        both = [(i, j) for at, i in enumerate(candidates) for j in candidates[at + 1 :]]
        unequal = [(i, j) for i, j in both if returns[i] != returns[j]]
        ordered = [(i, j) if returns[i] > returns[j] else (j, i) for i, j in unequal]
        return [AnswerPair(*pair) for pair in ordered], len(both) - len(unequal)
    best = max(candidates, key=lambda i: returns[i])
    worse = [i for i in candidates if returns[i] < returns[best]]
    if not worse:
        return [], 1
    if how == "best_worst":
        return [AnswerPair(best, min(worse, key=lambda i: returns[i]))], 0
    return [AnswerPair(best, worse[np.random.default_rng(list(seed)).integers(len(worse))])], 0


def pairs_of_groups(shaped: Shaped, how: How, seed: int) -> tuple[list[list[AnswerPair]], int]:
    """Return the pairs of each group, by episode index, and the number of ties."""
    pairs, ties = [], 0
    everything = zip(shaped.data.groups, returns_of(shaped.data), shaped.masks, strict=True)
    for group, returns, masks in everything:
        learnable = np.array([bool(mask.any()) for mask in masks], bool)
        key = (seed, group.prompt.prompt_id, group.ticket.group)
        of_group, of_ties = choose_pairs(returns, learnable, how, key)
        pairs.append(of_group)
        ties += of_ties
    return pairs, ties


def keep_paired(shaped: Shaped, *, how: How, seed: int) -> Shaped:
    """Drop the answers that are in no pair, and count the ties; a ShapingFn, applied last."""
    pairs, ties = pairs_of_groups(shaped, how, seed)
    kept = [sorted({i for pair in of_group for i in pair}) for of_group in pairs]
    left = sum(len(g.episodes) - len(k) for g, k in zip(shaped.data.groups, kept, strict=True))
    paired = counted(with_episodes(shaped, kept), "preference/ties", ties)
    return counted(paired, "preference/unpaired", left)


def has_pair(group: EpisodeGroup, shapings: Sequence[ShapingFn], how: How, seed: int) -> bool:
    """Return whether a group, shaped alone, has two answers with different returns."""
    pairs, _ = pairs_of_groups(shape(step_data([group]), shapings), how, seed)
    return bool(pairs[0])


def pairs_of_step(data: StepData, masks: Any, how: How, seed: int) -> list[AnswerPair]:
    """Return the pairs of a step; episodes are numbered over the step, group after group."""
    of_groups, _ = pairs_of_groups(Shaped(data=data, masks=masks), how, seed)
    starts = np.cumsum([0, *(len(g.episodes) for g in data.groups)])
    return [
        AnswerPair(int(start) + pair.better, int(start) + pair.worse)
        for start, of_group in zip(starts, of_groups, strict=False)
        for pair in of_group
    ]


# ---- weights of the answers


def pairs_loss(choice: Choice) -> PreferenceLossFn:
    """Return the chosen pair loss. Raise ConfigError, also for a loss on single answers."""
    try:
        loss = preference_loss.resolve(choice)
        single = needs_baseline(loss)
    except ConfigError as error:
        text = str(error).replace(preference_loss.setting, "pairs.loss")
        raise ConfigError(text if "pairs.loss" in text else f"pairs.loss: {text}") from error
    if single:
        raise ConfigError(
            f"pairs.loss = {choice!r} needs a baseline of mismatched answers, which does not exist "
            "for the policy's own answers. Use dpo, ipo, simpo or orpo, or do not declare this "
            "need."
        )
    return loss


class AnswerSums(NamedTuple):
    """The input of a pair loss for each answer of a step: sums over its trained tokens."""

    logprobs: Doubles  # [answers] of the weights being trained
    lengths: Doubles  # [answers] trained tokens
    reference: Doubles | None = None  # [answers] log-probs of the reference


class PairWeights:
    """The mean loss of a step's pairs, and its derivative with respect to the log-probs."""

    def __init__(self, loss: PreferenceLossFn) -> None:
        """Compile nothing yet; one program is compiled per power of two of pairs."""
        self._derive = jax.jit(jax.value_and_grad(partial(_loss_of_pairs, loss), has_aux=True))

    def __call__(
        self, pairs: Sequence[AnswerPair], sums: AnswerSums
    ) -> tuple[Doubles, dict[str, float]]:
        """Return d loss / d log policy of each answer, and metrics of the loss and the pairs.

        The loss is the mean over the step's pairs; 0 without pairs.
        """
        weights = np.zeros(len(sums.logprobs))
        better, worse = (np.array([p[side] for p in pairs], np.int64) for side in (0, 1))
        room = 1 << max(len(pairs) - 1, 0).bit_length()
        of = partial(_in_pairs, better=better, worse=worse, room=room)
        reference = None if sums.reference is None else of(sums.reference)
        (loss, totals), slopes = self._derive(
            of(sums.logprobs), of(sums.lengths), reference, np.float32(1 / max(len(pairs), 1))
        )
        slope = np.asarray(slopes, np.float64)[:, : len(pairs)]
        np.add.at(weights, better, slope[0])
        np.add.at(weights, worse, slope[1])
        report = summarize([totals])
        return weights, {
            **{key: value for key, value in report.items() if key.startswith("preference/")},
            "preference/pairs": float(len(pairs)),
            "train/policy_loss": float(loss),
        }


def _in_pairs(
    values: Doubles, *, better: NDArray[np.int64], worse: NDArray[np.int64], room: int
) -> NDArray[np.float32]:
    """Return the values of both sides of each pair, [2, room] float32, padded with 0."""
    sides = np.zeros((2, room), np.float32)
    sides[0, : len(better)], sides[1, : len(worse)] = values[better], values[worse]
    return sides


def _loss_of_pairs(
    loss: Callable[..., Any],
    logprobs: Array,
    lengths: Array,
    reference: Array | None,
    weight: Array,
) -> tuple[Array, Totals]:
    """Return weight * sum of the pairs' losses, and the totals to report. Inputs: [2, pairs]."""
    x = PairInputs(logprobs[0], logprobs[1], lengths[0], lengths[1])
    if reference is not None:
        x = x._replace(reference_chosen=reference[0], reference_rejected=reference[1])
    return summed_pairs(loss(x), lengths[0], lengths[1], jnp.asarray(weight))
