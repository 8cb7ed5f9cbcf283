"""FlashREINFORCE as a whole: the recipe's settings against NumPy float64, from the paper."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.algorithms.advantages import advantage, step_data
from jaxrl_async.algorithms.aggregate import aggregate
from jaxrl_async.algorithms.losses import token_inputs
from jaxrl_async.algorithms.objective import make_recipe, policy_loss
from jaxrl_async.config.load import load
from jaxrl_async.errors import ConfigError
from jaxrl_async.trainer.pack import pack_groups
from jaxrl_async.types import Episode, EpisodeGroup, Prompt, Score, StopReason, Ticket

CONFIG = Path(__file__).parents[2] / "configs/flash_reinforce.yaml"
ROW, COUNT, DELTA = 16, 6, 3e-3


def groups(rng: np.random.Generator) -> list[EpisodeGroup]:
    """One answer to each prompt, of different lengths; the last ones drifted."""
    made = []
    for number in range(COUNT):
        length = int(rng.integers(5, ROW))
        sampled = np.arange(length) >= 2
        episode = Episode(
            token_ids=np.arange(length, dtype=np.int32),
            drawn=sampled,
            logprobs=np.where(sampled, -rng.exponential(1.0, length) - 0.05, 0).astype(np.float32),
            versions=np.where(sampled, 0, -1).astype(np.int32),
            stop=StopReason.EOS,
        )
        prompt = Prompt(
            prompt_id=number, position=number, token_ids=np.zeros(2, np.int32), text="",
            reference="",
        )  # fmt: skip
        made.append(
            EpisodeGroup(
                prompt=prompt,
                episodes=(episode,),
                scores=(Score(reward=float(rng.integers(0, 2) + number / 10)),),
                ticket=Ticket(group=number, version=0),
            )
        )
    return made


def reference(
    logps: list[np.ndarray], behavior: list[np.ndarray], rewards: np.ndarray
) -> tuple[list[np.ndarray], list[bool]]:
    """The gradient at each token, and which answers pass the gate: batch centring, detached token
    importance weights, a gate on the mean Bernoulli KL, the mean of samples of means of tokens."""
    slopes, admitted = [], []
    advantages = rewards - rewards.mean()
    for log_p, log_q, a in zip(logps, behavior, advantages, strict=True):
        p, q = (np.clip(np.exp(x), 1e-6, 1 - 1e-6) for x in (log_p, log_q))
        kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
        admitted.append(bool(kl.mean() <= DELTA))
        weights = np.exp(log_p - log_q) * a * admitted[-1]
        slopes.append(-weights / len(log_p) / len(rewards))
    return slopes, admitted


@pytest.mark.full
def test_the_recipe_has_the_papers_gradient():
    rng = np.random.default_rng(2)
    config = load(CONFIG)
    algorithm = config.algorithm
    assert algorithm.group_size == 1 and algorithm.epochs * algorithm.minibatches == 1
    data = step_data(groups(rng))
    given = advantage.resolve(algorithm.advantage)(data)
    batch = pack_groups(data.groups, given.advantages, ROW)
    far = np.array([0.0, 0.01, 0.02, 0.05, 0.6, 0.8, 0.0])[batch.sequence_ids]
    policy = np.where(batch.mask, batch.behavior_logprobs + far * rng.normal(0, 1, far.shape), 0)
    policy = np.minimum(policy, -0.01)
    weights = aggregate.resolve(algorithm.aggregate)(batch)
    x = token_inputs(
        {
            "policy_logprobs": policy,
            "behavior_logprobs": batch.behavior_logprobs,
            "advantages": batch.advantages,
            "mask": batch.mask,
            "versions": batch.versions,
            "entropy": np.zeros(batch.mask.shape),
            "segment_ids": batch.segment_ids,
        }
    )
    recipe = make_recipe(algorithm)

    def loss(logprobs):
        moved = x._replace(policy_logprobs=logprobs)
        return policy_loss(recipe, moved, jnp.asarray(weights), jnp.int32(1))[0]

    slopes = np.asarray(jax.grad(loss)(x.policy_logprobs))
    masks = [batch.mask & (batch.sequence_ids == number) for number in range(COUNT)]
    rewards = np.array([g.scores[0].reward for g in data.groups])
    wanted, admitted = reference(
        [policy[at] for at in masks],
        [batch.behavior_logprobs[at].astype(np.float64) for at in masks],
        rewards,
    )
    assert {*admitted} == {True, False}, "the data must reach the gate"
    for at, one in zip(masks, wanted, strict=True):
        np.testing.assert_allclose(slopes[at], one, rtol=2e-4, atol=1e-8)


def test_its_gate_has_no_other_anchor():
    with pytest.raises(ConfigError, match=r"algorithm\.loss=flash_reinforce"):
        load(CONFIG, ["algorithm.anchor=proximal"])
