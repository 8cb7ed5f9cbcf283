"""A reward model as the scorer: the same numbers whatever the padding, clear refusals."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of, tiny_params, tiny_spec

from jaxrl_async.config import schema
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.data.tokenizer import character_tokenizer
from jaxrl_async.errors import ConfigError, RefusedScore, RolloutError
from jaxrl_async.mesh import TRAINER_RULES, DeviceLock, shardings
from jaxrl_async.model.decoder import TokenRows
from jaxrl_async.model.heads import HEAD, head_table, save_head, sequence_scores, with_head
from jaxrl_async.model.policy import Policy
from jaxrl_async.scorers.reward_model import (
    RewardModel,
    RewardModelScorer,
    load_reward_model,
    next_power_of_two,
)
from jaxrl_async.types import Episode, Prompt, Score, StopReason

TOKENIZER = addition_tokenizer()
SPEC = tiny_spec(24)
PROMPT = Prompt(
    prompt_id=7,
    position=0,
    token_ids=np.array([4, 5], np.int32),
    text="0+",
    reference="1",
)


@pytest.fixture(scope="module")
def params() -> Any:
    policy = tiny_params(SPEC)
    return with_head(SPEC, policy, "reward", jax.random.key(1))


@pytest.fixture(scope="module")
def model(params) -> RewardModel:
    return RewardModel(SPEC, params, mesh_of())


def sequence(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SPEC.vocab, length).astype(np.int32)


def episode(token_ids: np.ndarray) -> Episode:
    length = len(token_ids)
    return Episode(
        token_ids=token_ids,
        drawn=np.arange(length) >= 2,
        logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        stop=StopReason.EOS,
    )


def alone(params: Any, token_ids: np.ndarray) -> float:
    """The score without any padding."""
    return float(_alone(params, jnp.asarray(token_ids)[None])[0, -1])


@jax.jit
def _alone(params: Any, row: Any) -> Any:
    tokens = TokenRows(row, jnp.arange(row.shape[1])[None], jnp.ones_like(row))
    return sequence_scores(SPEC, params, tokens)


class Fixed:
    """A function's scores, scripted."""

    def __init__(self, *scores: Score) -> None:
        self.scores = scores

    async def __call__(self, episodes: Any, prompt: Prompt) -> tuple[Score, ...]:
        return self.scores


def score(scorer: RewardModelScorer, *sequences: np.ndarray) -> tuple[Score, ...]:
    return asyncio.run(scorer(tuple(map(episode, sequences)), PROMPT))


@pytest.mark.full
def test_a_score_is_that_of_the_sequence_alone_in_any_company(model, params):
    sequences = [sequence(9, 1), sequence(30, 2), sequence(17, 3)]
    together = model(sequences)
    assert together.shape == (3,) and together.std() > 1e-3
    for one, value in zip(sequences, together, strict=True):
        assert value == pytest.approx(alone(params, one), abs=1e-5)


@pytest.mark.full
def test_a_sharded_model_gives_the_same_scores_and_takes_turns(model, params):
    mesh = mesh_of(fsdp=2, tensor=2)
    placed = jax.device_put(params, shardings(head_table(SPEC, "reward"), mesh, TRAINER_RULES))
    turns = DeviceLock()
    sharded = RewardModel(SPEC, placed, mesh, device_lock=turns)
    sequences = [sequence(9, 1), sequence(30, 2), sequence(17, 3)]
    got: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: got.append(sharded(sequences)))
    with turns:
        thread.start()
        thread.join(0.2)
        assert not got  # waits for its turn
    thread.join()
    np.testing.assert_allclose(got[0], model(sequences), atol=1e-5)


def test_lengths_and_rows_are_padded_to_few_shapes():
    assert [next_power_of_two(n) for n in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]
    assert next_power_of_two(5, 32) == 32 and next_power_of_two(33, 32) == 64


@pytest.mark.full
def test_reward_is_the_weighted_sum_and_parts_are_reported_before_weighting(model, params):
    token_rewards = np.array([0, 1, 2], np.float32)
    function = Fixed(Score(reward=2.0, token_rewards=token_rewards), Score(reward=0.0))
    scorer = RewardModelScorer(model, function=function, function_weight=0.5, model_weight=3.0)
    first, second = score(scorer, sequence(9, 1), sequence(30, 2))
    value = alone(params, sequence(9, 1))
    assert first.reward == pytest.approx(1.0 + 3 * value, abs=1e-4)
    assert first.parts == {"function": 2.0, "model": pytest.approx(value, abs=1e-5)}
    np.testing.assert_array_equal(first.token_rewards, token_rewards / 2)
    assert second.token_rewards is None


def test_without_a_function_the_model_alone_rewards(model, params):
    (only,) = score(RewardModelScorer(model, model_weight=2.0), sequence(9, 1))
    assert only.parts.keys() == {"model"}
    assert only.reward == pytest.approx(2 * alone(params, sequence(9, 1)), abs=1e-5)


def test_parts_of_the_function_stay(model):
    fine = Fixed(Score(reward=1.0, parts={"right": 1.0}))
    (scored,) = score(RewardModelScorer(model, function=fine), sequence(9, 1))
    assert scored.parts.keys() == {"right", "model"}
    taken = Fixed(Score(reward=1.0, parts={"model": 1.0}))  # of an environment
    with pytest.raises(RefusedScore, match="part named 'model', which is the reward model's"):
        score(RewardModelScorer(model, function=taken), sequence(9, 1))


def test_a_score_that_is_not_finite_names_the_prompt(params):
    broken = {**params, HEAD: {"kernel": jnp.full_like(params[HEAD]["kernel"], jnp.nan)}}
    scorer = RewardModelScorer(RewardModel(SPEC, broken, mesh_of()))
    with pytest.raises(RolloutError, match=r"prompt 7 with nan"):
        score(scorer, sequence(9, 1))


def test_the_event_loop_continues_while_the_model_computes(model):
    names: list[str] = []
    model([sequence(9)])  # compiled
    inner = model.__call__

    def spy(sequences: Any) -> Any:
        names.append(threading.current_thread().name)
        return inner(sequences)

    score(RewardModelScorer(spy), sequence(9))  # type: ignore[arg-type]
    assert names and names[0].startswith("reward-model")


# ---- folders


def load(folder: Path, tokenizer: Any = TOKENIZER) -> RewardModel:
    section = schema.RewardSection(model=str(folder))
    return load_reward_model(section, schema.ModelSection(), tokenizer, mesh_of())


def test_a_saved_model_gives_the_same_scores(tmp_path, model, params):
    save_head(tmp_path, SPEC, params)
    TOKENIZER.save_pretrained(tmp_path)
    one = [sequence(9, 1)]
    np.testing.assert_array_equal(load(tmp_path)(one), model(one))


def test_another_vocabulary_is_refused_at_the_start(tmp_path, params):
    save_head(tmp_path, SPEC, params)
    with pytest.raises(ConfigError, match=r"vocabulary of 24 tokens.*ids up to 29"):
        load(tmp_path, character_tokenizer("abcdefghijklmnopqrstuvwxyz"))
    character_tokenizer("#=+0123456789 ").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"uses other tokens than the policy: 13 differ.*'#'"):
        load(tmp_path)


@pytest.mark.full
def test_a_folder_without_a_reward_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a reward model.*run.job=reward_model makes one"):
        load(tmp_path / "none")
    policy = Policy(SPEC, tiny_params(SPEC), TOKENIZER)
    policy.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"is not a reward model.*score.weight"):
        load(tmp_path)
