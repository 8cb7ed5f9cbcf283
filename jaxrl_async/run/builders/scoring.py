"""What scores the episodes: guarded scorers for training and for the evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxrl_async.algorithms.advantages import check_weights
from jaxrl_async.config.schema import AlgorithmSection, Config, FaultsSection, RewardSection
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import Slices, local_part
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.model.hf import load_spec
from jaxrl_async.ports import Scorer
from jaxrl_async.run.builders.devices import Lock
from jaxrl_async.run.builders.initial_policy import check_lengths
from jaxrl_async.scorers.guard import GuardedScorer, try_once
from jaxrl_async.scorers.reward_model import (
    FUNCTION,
    MODEL,
    RewardModelScorer,
    load_reward_model,
)
from jaxrl_async.scorers.rewards import make_scorer
from jaxrl_async.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorers:
    """What scores the training, and the evaluation: there the functions alone, if there are any."""

    training: GuardedScorer
    evaluation: GuardedScorer

    def oldest_s(self) -> float:
        """Return how long the longest call under way has taken, seconds; 0: none."""
        return max(self.training.oldest_s(), self.evaluation.oldest_s())


def make_scorers(
    config: Config,
    tokenizer: Tokenizer,
    held_out: Sequence[Prompt],
    slices: Slices,
    lock: Lock,
    faults: FaultCounts,
) -> Scorers:
    """Make the configured scorers, each with a timeout, retries and a check of its scores.

    Args:
        config: reward, its model, and what bounds the sequences.
        tokenizer: decodes what the functions judge.
        held_out: records whose columns the functions may ask for.
        slices: the reward model runs on the trainer's, on this process's part of it.
        lock: shared with others on these devices.
        faults: counts what is survived.
    """
    section = config.reward
    function = make_scorer(section, tokenizer.decode, held_out) if section.weights else None
    if section.model is None:
        assert function is not None, "the schema refuses a run without any reward"
        training: Scorer = function
    else:
        model = load_reward_model(
            section, config.model, tokenizer, local_part(slices.trainer), lock
        )
        check_lengths(config, load_spec(Path(section.model)), f"reward.model={section.model}")
        training = RewardModelScorer(
            model,
            function=function,
            function_weight=section.function_weight,
            model_weight=section.model_weight,
        )
    return Scorers(
        training=_guarded(config.faults, training, faults),
        evaluation=_guarded(config.faults, function or training, faults),
    )


def _guarded(section: FaultsSection, scorer: Scorer, faults: FaultCounts) -> GuardedScorer:
    return GuardedScorer(
        scorer,
        timeout_s=section.scorer_timeout_s,
        retries=section.scorer_retries,
        backoff_s=section.backoff_s,
        count=faults.add,
    )


def check_reward_parts(
    reward: RewardSection,
    algorithm: AlgorithmSection,
    scorers: Scorers,
    example: Prompt,
    tokenizer: Tokenizer,
) -> None:
    """Raise ConfigError if the algorithm asks for a part that the reward does not have.

    The functions are tried once, on a made-up answer to the example.
    """
    parts = {MODEL} if reward.model is not None else set[str]()
    if reward.weights:
        where = f"reward.function = {reward.function!r}"
        of_function = try_once(scorers.evaluation, example, tokenizer.encode, where).parts
        parts |= of_function.keys() or ({FUNCTION} if parts else set())
    if algorithm.signal_part and algorithm.signal_part not in parts:
        raise ConfigError(
            f"algorithm.signal_part = {algorithm.signal_part!r}: the reward has no such "
            f"part (it has: {', '.join(sorted(parts)) or 'none'}). Correct it."
        )
    check_weights(algorithm.advantage, parts)
