"""From the sampler to the update: the trainer's ratio is of the distribution drawn from."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.config.load import load
from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import make_slices
from jaxrl_async.model.decoder import DecoderSettings, TokenRows, init_params
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.ports.rollout import Reply
from jaxrl_async.rollout.episode import SavedEpisode, begin_groups, play_group
from jaxrl_async.run.builders.learning import keeps_masks
from jaxrl_async.run.loop import train
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.policy_objective import (
    PolicyData,
    PolicyObjective,
    policy_update,
)
from jaxrl_async.trainer.pack import pack_groups
from jaxrl_async.trainer.token_columns import SamplerColumns
from jaxrl_async.trainer.update import Update
from jaxrl_async.trainer.update_programs import Frozen
from jaxrl_async.types import (
    Completion,
    EpisodeGroup,
    EpisodeLimits,
    PackedBatch,
    Prompt,
    SamplingParams,
    Score,
    Ticket,
)

ROOT = Path(__file__).parents[2]
VOCAB, ROW, TEMPERATURE = 43, 64, 0.7  # no multiple of 8
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=64),
    VOCAB + 1,
)
SECTION = schema.SamplerSection(
    slots=16, reserve=0.0, max_length=ROW, max_new_tokens=8, block=8, page_tokens=ROW,
    prefix_cache=False,
)  # fmt: skip
KINDS = {
    "top_k": SamplingParams(temperature=TEMPERATURE, top_k=5),
    "top_p": SamplingParams(temperature=TEMPERATURE, top_p=0.8),
    "min_p": SamplingParams(temperature=TEMPERATURE, min_p=0.3),
    "all": SamplingParams(temperature=TEMPERATURE, top_k=20, top_p=0.9, min_p=0.05),
}


class Twice:
    """Answers the first turn with three tokens, and ends with the second."""

    def __init__(self, prompt: Prompt) -> None:
        self.turns = 0

    async def step(self, prompt: Prompt, completion: Completion) -> Reply:
        self.turns += 1
        return Reply(token_ids=np.array([9, 8, 7], np.int32), done=self.turns == 2)


@pytest.fixture(scope="module")
def params() -> Any:
    return init_params(SPEC, jax.random.key(0))


@pytest.fixture(scope="module")
def played(params) -> dict[str, EpisodeGroup]:
    """Groups of four episodes of one or two turns for each kind, all decoding together."""
    sampler = Sampler((SPEC, params), section=SECTION)

    async def play(number: int, sampling: SamplingParams) -> EpisodeGroup:
        ids = np.arange(3 + number, dtype=np.int32)
        prompt = Prompt(prompt_id=number, position=number, token_ids=ids, text="", reference="")
        limits = EpisodeLimits(
            sampling=sampling, stop_token_ids=tuple(range(8)), max_new_tokens=8,
            max_length=ROW, keep_mask=True,
        )  # fmt: skip
        saved = [(f"g{number}", prompt, [SavedEpisode()] * 4)]
        (members,) = begin_groups(sampler, Twice, saved, limits)
        episodes = await play_group(sampler, prompt, members, label=f"g{number}", limits=limits)
        scores = tuple(Score(reward=float(i)) for i in range(4))
        ticket = Ticket(group=number, version=0)
        return EpisodeGroup(prompt=prompt, episodes=episodes, scores=scores, ticket=ticket)

    async def all_of_them() -> list[EpisodeGroup]:
        return await asyncio.gather(*(play(i, s) for i, s in enumerate(KINDS.values())))

    groups = asyncio.run(all_of_them())
    sampler.close()
    assert {e.num_turns for g in groups for e in g.episodes} == {1, 2}
    return dict(zip(KINDS, groups, strict=True))


def packed(groups: Sequence[EpisodeGroup]) -> PackedBatch:
    advantages = [[e.drawn.astype(np.float32) for e in g.episodes] for g in groups]
    return pack_groups(groups, advantages, ROW, sampler_columns=SamplerColumns(SPEC.vocab))


def unmasked(batch: PackedBatch) -> PackedBatch:
    """Whatever it was drawn from, the trainer takes the whole vocabulary."""
    return replace(batch, kept=np.full_like(batch.kept, 0xFF))


@pytest.mark.full
def test_with_its_masks_the_trainers_log_probs_are_the_samplers(params, played):
    batch = packed(list(played.values()))
    settings = DecoderSettings(chunk=40, temperature=TEMPERATURE)
    compute = jax.jit(partial(token_logprobs, SPEC, settings=settings))
    logprobs, errors, entropies = {}, {}, {}
    for keep, b in ((True, batch), (False, unmasked(batch))):
        tokens = TokenRows(b.token_ids, b.positions, b.segment_ids, np.asarray(b.kept))
        logprobs[keep], entropies[keep] = map(np.asarray, compute(params, tokens)[:2])
        errors[keep] = np.abs(logprobs[keep] - b.behavior_logprobs)
    for index, kind in enumerate(played):
        here = batch.mask & (batch.group_ids == index)
        assert here.sum() > 20, kind
        assert errors[True][here].max() < 1e-5, kind
        assert errors[False][here].mean() > 0.05 and errors[False][here].max() > 0.1, kind
        assert (entropies[True] < entropies[False])[here].mean() > 0.9, kind


def step_on(**axes: int) -> Update[PolicyObjective]:
    section = schema.MeshSection(trainer=schema.AxesSection(**axes))
    settings = LearningSettings(
        mesh=make_slices(section, jax.devices()).trainer,
        trainer=schema.TrainerSection(
            micro_batch_tokens=2 * ROW, logprob_chunk=48, epsilon=1.0, max_grad_norm=1e9,
            beta1=0.0, beta2=0.0,
        ),
        row_length=ROW,
    )  # fmt: skip
    algorithm = schema.AlgorithmSection(learning_rate=1e-2, kl_coefficient=0.1)
    return policy_update(SPEC, settings, algorithm, total_steps=10, temperature=TEMPERATURE)


def update(
    step: Update[PolicyObjective], params: Any, batch: PackedBatch
) -> tuple[dict[str, float], Any]:
    """Report and new weights of one update, with a KL to the weights that it starts from."""
    reference = jax.device_put(params, step.programs.state_shardings.params)
    state, stats = step.update(step.init(params), PolicyData(batch), Frozen(reference))
    return stats, jax.tree.map(np.array, state.params)


@pytest.mark.full
def test_an_update_on_fresh_tokens_has_ratio_one_on_any_mesh_in_any_order(params, played):
    groups = list(played.values())
    step = step_on()
    one, weights = update(step, params, packed(groups))
    many, sharded = update(step_on(fsdp=2, tensor=2), params, packed(groups[::-1]))
    for stats in (one, many):
        assert stats["train/skipped"] == 0
        assert stats["mismatch/max"] < 1e-5
        assert stats["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
        assert stats["policy/ratio_min"] == pytest.approx(1, abs=1e-5)
        assert stats["policy/kl_reference"] == pytest.approx(0, abs=1e-6)
    for key in ("train/loss", "train/grad_norm", "policy/entropy"):
        assert many[key] == pytest.approx(one[key], abs=1e-5, rel=1e-5), key
    for a, b in zip(jax.tree.leaves(weights), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    biased, _ = update(step, params, unmasked(packed(groups)))
    assert biased["mismatch/mean"] > 0.05 and biased["policy/ratio_mean"] < 0.95


@pytest.mark.parametrize(
    ("sampler", "keep", "expected", "message"),
    [
        ({"top_k": 5}, True, True, None),
        ({"top_k": 5}, None, True, None),
        ({"top_p": 0.9}, None, True, None),
        ({"min_p": 0.1}, None, True, None),
        ({"temperature": 0.7}, None, False, None),
        ({"top_k": 5}, False, False, "the ratio is biased"),
        ({"top_p": 0.9}, False, False, "Set algorithm.keep_sampling_mask=null"),
        ({}, True, False, "algorithm.keep_sampling_mask has no effect"),
        ({}, False, False, None),
    ],
)
def test_masks_are_asked_for_where_they_say_something(caplog, sampler, keep, expected, message):
    config = schema.Config(
        sampler=schema.SamplerSection(**sampler),
        algorithm=schema.AlgorithmSection(keep_sampling_mask=keep),
    )
    with caplog.at_level(logging.INFO):
        assert keeps_masks(config) is expected
    assert len(caplog.messages) == (message is not None)
    assert message is None or message in caplog.text


@pytest.mark.parametrize(("keep", "expected"), [(None, False), (True, True), (False, False)])
def test_pairs_have_no_ratio_and_are_compared_over_the_whole_vocabulary(caplog, keep, expected):
    config = schema.Config(
        sampler=schema.SamplerSection(top_p=0.9),
        algorithm=schema.AlgorithmSection(keep_sampling_mask=keep),
        pairs=schema.PairsSection(loss="dpo"),
    )
    assert keeps_masks(config) is expected and not caplog.messages


def test_a_dense_model_has_no_routing_to_keep(tmp_path: Path):
    overrides = [f"run.dir={tmp_path}", "algorithm.keep_routing=true"]
    with pytest.raises(ConfigError, match=r"the qwen3 model .* is dense.*keep_routing=false"):
        train(load(ROOT / "configs" / "addition.yaml", overrides))
