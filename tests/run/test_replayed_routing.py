"""Routing replay from the sampler to the update: where the trainer's router would choose others."""

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.config.load import load
from jaxrl_async.mesh import make_mesh
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.quantize import quantize
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.ports.rollout import Reply
from jaxrl_async.rollout.episode import SavedEpisode, begin_groups, play_group
from jaxrl_async.run.builders.learning import routing_of
from jaxrl_async.run.loop import train
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.logprob_pass import LogprobPass
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

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
VOCAB, ROW = 44, 64
SHAPE = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 32}
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(**SHAPE, family="qwen3_moe", experts=4, experts_per_token=2), VOCAB
)
SECTION = schema.SamplerSection(
    slots=8, reserve=0.0, max_length=ROW, max_new_tokens=8, block=8, page_tokens=16
)
CUT = SamplingParams(top_k=6)
NOISE = 1e-4
"""By which the experts' rows of the router differ, and the trainer's router from the sampler's."""


def noisy(params: Any, seed: int) -> Any:
    """The same weights, the router's moved a little."""
    router = params["layers"]["router"]
    moved = router + NOISE * jax.random.normal(jax.random.key(seed), router.shape)
    return {**params, "layers": {**params["layers"], "router": moved}}


@functools.cache
def weights() -> tuple[Any, Any]:
    """(the sampler's, the trainer's): experts nearly equally likely, so that a small difference
    turns the choice while the chosen ones' weights stay near a half."""
    params = init_params(SPEC, jax.random.key(0))
    equal_rows = jax.numpy.broadcast_to(
        params["layers"]["router"][..., :1], params["layers"]["router"].shape
    )
    sampler = noisy({**params, "layers": {**params["layers"], "router": equal_rows}}, 1)
    return sampler, noisy(sampler, 2)


class Twice:
    """Answers the first turn with three tokens, and ends with the second."""

    def __init__(self, prompt: Prompt) -> None:
        self.turns = 0

    async def step(self, prompt: Prompt, completion: Completion) -> Reply:
        self.turns += 1
        return Reply(token_ids=np.array([9, 8, 7], np.int32), done=self.turns == 2)


def played(params: Any, **overrides: Any) -> Any:
    """Three groups of four episodes of one or two turns, with masks and experts."""
    section = SECTION.model_copy(update=overrides)
    sampler = Sampler((SPEC, params), section=section, settings=SamplerSettings(keep_routing=True))
    limits = EpisodeLimits(
        sampling=CUT, stop_token_ids=tuple(range(8)), max_new_tokens=8, max_length=ROW,
        keep_mask=True, keep_routing=True,
    )  # fmt: skip

    async def play(number: int) -> EpisodeGroup:
        ids = np.arange(10 + 9 * number, dtype=np.int32)
        prompt = Prompt(prompt_id=number, position=number, token_ids=ids, text="", reference="")
        saved = [(f"g{number}", prompt, [SavedEpisode()] * 4)]
        (members,) = begin_groups(sampler, Twice, saved, limits)
        episodes = await play_group(sampler, prompt, members, label=f"g{number}", limits=limits)
        scores = tuple(Score(reward=float(i)) for i in range(4))
        ticket = Ticket(group=number, version=0)
        return EpisodeGroup(prompt=prompt, episodes=episodes, scores=scores, ticket=ticket)

    async def all_of_them() -> list[EpisodeGroup]:
        return await asyncio.gather(*(play(i) for i in range(3)))

    try:
        return asyncio.run(all_of_them())
    finally:
        sampler.close()


@functools.cache
def groups() -> Sequence[EpisodeGroup]:
    found = played(weights()[0])
    assert {e.num_turns for g in found for e in g.episodes} == {1, 2}
    return found


def packed(groups: Sequence[EpisodeGroup]) -> PackedBatch:
    advantages = [[e.drawn.astype(np.float32) for e in g.episodes] for g in groups]
    columns = SamplerColumns(VOCAB, routing_of(SPEC))
    return pack_groups(groups, advantages, ROW, sampler_columns=columns)


def step_on(**axes: int) -> Update[PolicyObjective]:
    section = schema.AxesSection(**axes)
    settings = LearningSettings(
        mesh=make_mesh(section, jax.devices()[: section.num_devices]),
        trainer=schema.TrainerSection(
            micro_batch_tokens=2 * ROW, logprob_chunk=48, epsilon=1.0, max_grad_norm=1e9,
            beta1=0.0, beta2=0.0,
        ),
        row_length=ROW,
        remat="layer",
    )  # fmt: skip
    algorithm = schema.AlgorithmSection(learning_rate=1e-2, kl_coefficient=0.1)
    return policy_update(SPEC, settings, algorithm, total_steps=10)


def measured(
    step: Update[PolicyObjective], params: Any, batch: PackedBatch, reference: Any = None
) -> dict[str, float]:
    there = jax.device_put(params, step.programs.state_shardings.params)
    return step.measure(there, PolicyData(batch), Frozen(reference))


@pytest.mark.exhaustive
def test_with_replay_the_ratio_is_one_though_the_routers_differ_and_without_it_is_not():
    _, trainer = weights()
    step, batch = step_on(), packed(groups())
    assert batch.expert_ids.dtype == np.int8
    one = measured(step, trainer, batch)
    assert one["policy/ratio_max"] == pytest.approx(1, abs=3e-3)
    assert one["policy/ratio_min"] == pytest.approx(1, abs=3e-3)
    assert one["mismatch/max"] < 3e-3
    assert 0.2 < one["routing/changed_share"] < one["routing/changed_token_share"] < 1
    tokens = sum(len(e.token_ids) for g in groups() for e in g.episodes)
    unknown = (batch.expert_ids[batch.segment_ids > 0] < 0).all(axis=(1, 2)).sum()
    assert unknown == 12 + sum(3 for g in groups() for e in g.episodes if not e.drawn[-1])
    assert one["routing/replayed_share"] == pytest.approx(1 - unknown / tokens)
    free = measured(step, trainer, replace(batch, expert_ids=None))
    assert free["mismatch/max"] > 0.3 and free["mismatch/mean"] > 30 * one["mismatch/mean"]
    assert free["policy/ratio_max"] > 1.3 and free["policy/ratio_min"] < 0.8
    assert not any(key.startswith("routing/") for key in free)


@pytest.mark.exhaustive
def test_the_proximal_pass_replays_and_a_reference_chooses_for_itself():
    """The pass and the update agree on the policy; a reference of the policy's own weights is not
    the policy where its router would choose others."""
    _, trainer = weights()
    step, batch = step_on(), packed(groups())
    own = LogprobPass(SPEC, step.settings)
    replayed = own.logprobs(trainer, batch, replays=True)[batch.mask]
    free = own.logprobs(trainer, batch)[batch.mask]
    np.testing.assert_allclose(replayed, batch.behavior_logprobs[batch.mask], atol=3e-3)
    assert np.abs(free - replayed).max() > 0.3
    without = own.logprobs(trainer, replace(batch, expert_ids=None), replays=True)[batch.mask]
    np.testing.assert_array_equal(free, without)
    there = jax.device_put(trainer, step.programs.state_shardings.params)
    stats = measured(step, trainer, batch, reference=there)
    gap = np.exp(free - replayed) - 1 - (free - replayed)  # k3
    assert stats["policy/kl_reference"] == pytest.approx(gap.mean(), rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", ["bfloat16", "int8"])
def test_a_sampler_of_fewer_bits_agrees_better_where_its_experts_are_replayed(number):
    """What is left is the rounding of all else: at most half, with the same router."""
    sampler, _ = weights()
    drawing: Any = sampler
    if number == "int8":
        drawing = jax.jit(lambda p: quantize(weight_table(SPEC), p, "int8", np.float32))(sampler)
    batch = packed(played(drawing, matmul="bfloat16" if number == "bfloat16" else "full"))
    one = measured(step_on(), sampler, batch)
    free = measured(step_on(), sampler, replace(batch, expert_ids=None))
    assert one["mismatch/mean"] < 0.02 and one["mismatch/mean"] < free["mismatch/mean"] / 2
    assert 0.005 < one["routing/changed_share"] < 0.9, "some choices would be others"


MESHES = (
    {"data": 2, "expert": 2}, {"fsdp": 2, "context": 2}, {"tensor": 2, "expert": 2},
    {"context": 2, "expert": 4}, {"data": 2, "fsdp": 2, "tensor": 2},
)  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_replay_learns_on_every_mesh_what_one_device_does(axes):
    _, trainer = weights()
    batch = packed(groups())
    state, one = step_on().update(step_on().init(trainer), PolicyData(batch))
    step = step_on(**axes)
    sharded, many = step.update(step.init(trainer), PolicyData(batch))
    for key in one.keys() - {"train/rows", "train/micro_batches", "train/packing"}:
        assert many[key] == pytest.approx(one[key], abs=1e-5, rel=1e-4), key
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(sharded.params), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)


REWARD = """
def many_digits(prompt, completion, reference):
    return sum(c.isdigit() for c in completion) / 16
"""
TINY = (
    "model.architecture={family: qwen3_moe, experts: 4, experts_per_token: 2}",
    f"model.architecture={str(SHAPE).replace(chr(39), '')}",
    "data.addition.eval_size=16",
    "warm_start.steps=0",
    "sampler={slots: 16, max_new_tokens: 16, top_k: 8, on_new_weights: drain}",
    "staleness.max_staleness=1",
    "algorithm={group_size: 4, groups_per_step: 4, learning_rate: 1.0e-3}",
    "algorithm={keep_routing: true, keep_sampling_mask: true}",
    "trainer={micro_batch_tokens: 512, warmup_steps: 1}",
    "run.steps=4",
    "eval.every=0",
    "checkpoint.every=0",
    "metrics.peak_flops=1e9",
    "metrics.tensorboard=false",
)  # fmt: skip


def run(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Metrics of a run."""
    (folder / "reward.py").write_text(REWARD)
    own = [f"run.dir={folder}", f"reward.function={folder / 'reward.py'}:many_digits"]
    config = load(ROOT / "configs" / "addition.yaml", [*TINY, *own, *overrides])
    train(config)
    return read_lines(folder / config.run.name / "metrics.jsonl")


def assert_replayed(lines: Sequence[dict[str, Any]], *, one_version: bool = True) -> None:
    """one_version: no answer was drawn by several: of one that was, later tokens look at KV, or the
    trainer at experts, of the weights before."""
    for line in lines:
        assert line["train/skipped"] == 0
        assert 0.9 < line["routing/replayed_share"] < 1, "of each episode all but the last token"
        assert line["routing/changed_share"] < 0.2, "a step or two apart"
    fresh = [line["mismatch/max"] for line in lines if "mismatch/max" in line]
    if one_version:
        assert fresh and max(fresh) < 1e-4, "with the same weights the ratio is 1"


def test_an_asynchronous_run_replays_every_token(tmp_path: Path):
    lines = run(tmp_path)[1:]
    assert_replayed(lines)
    assert len(lines) == 4 and max(line["staleness/max"] for line in lines) == 1


@pytest.mark.exhaustive
def test_a_run_that_is_resumed_replays_what_its_checkpoint_holds(tmp_path: Path):
    overrides = ("algorithm={epochs: 2, kl_coefficient: 0.01}", "checkpoint.every=2")
    first = run(tmp_path, *overrides, "run.steps=2")[1:]
    lines = run(tmp_path, *overrides, "run.resume=true", "run.overwrite=false")[1:]
    assert (len(first), len(lines)) == (2, 4)
    assert_replayed(first)
    assert_replayed(lines, one_version=False)


@pytest.mark.exhaustive
def test_a_run_on_meshes_with_several_samplers_replays(tmp_path: Path):
    lines = run(
        tmp_path,
        "mesh={trainer: {expert: 2, context: 2}, sampler: {expert: 2}, samplers: 2}",
        "staleness.max_staleness=2",
        "sampler.on_new_weights=recompute",
    )[1:]
    assert_replayed(lines, one_version=False)
