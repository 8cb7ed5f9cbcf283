"""Episodes of several contexts, packed: each context a segment, each sampled token trained once."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from call_trees import random_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.algorithms.advantages import step_data
from jaxrl_async.algorithms.aggregate import sequence_mean
from jaxrl_async.algorithms.shaping import shape
from jaxrl_async.config import schema
from jaxrl_async.errors import DataError
from jaxrl_async.mesh import make_slices
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.data_metrics import group_measures
from jaxrl_async.trainer.flops import forward_flops, num_matmul_params
from jaxrl_async.trainer.learner import Learner, LearnerSettings
from jaxrl_async.trainer.learning_settings import LearningSettings, MicroSizes
from jaxrl_async.trainer.logprob_pass import LogprobPass
from jaxrl_async.trainer.objectives.policy_objective import policy_update
from jaxrl_async.trainer.pack import fits, micro_batches, pack_groups
from jaxrl_async.trainer.row_index import repacked
from jaxrl_async.trainer.step_data import deal, pack_step
from jaxrl_async.trainer.token_columns import Routing, SamplerColumns
from jaxrl_async.types import EpisodeGroup, Prompt, Score, StopReason, Ticket

pytestmark = pytest.mark.full

VOCAB, ROW = 24, 32
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp=24), VOCAB
)
MESH = make_slices(schema.MeshSection(), jax.devices()).trainer
TRAINER = schema.TrainerSection(micro_batch_tokens=4 * ROW, logprob_chunk=32)
SETTINGS = LearningSettings(mesh=MESH, trainer=TRAINER, row_length=ROW)
PASS = LogprobPass(SPEC, SETTINGS)
PARAMS = init_params(SPEC, jax.random.key(0))
WITH_ALL = SamplerColumns(mask_vocab=VOCAB, routing=Routing(2, 1, np.int8))
PROMPT = Prompt(prompt_id=0, position=0, token_ids=np.zeros(1, np.int32), text="", reference="")


def group_of(episodes, number=0):
    return EpisodeGroup(
        prompt=PROMPT,
        episodes=tuple(episodes),
        scores=tuple(Score(reward=float(i)) for i in range(len(episodes))),
        ticket=Ticket(group=number, version=0),
    )


def made(seed, members=3, **settings):
    """A group of episodes that are trees, and the calls of each."""
    played = [random_trace(seed * 100 + m, **settings) for m in range(members)]
    return group_of([t.episode(StopReason.EOS) for t, _ in played]), [c for _, c in played]


def numbered(group):
    """Advantages that no two tokens share."""
    counts = np.cumsum([0, *(len(e.token_ids) for e in group.episodes)])
    return [[np.arange(a, b, dtype=np.float32) + 1 for a, b in itertools.pairwise(counts)]]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**4), rows=st.integers(1, 3))
def test_each_sampled_token_is_trained_once_after_what_the_policy_saw(seed, rows):
    group, calls = made(seed)
    advantages = numbered(group)
    batch = pack_groups([group], advantages, ROW, sampler_columns=WITH_ALL)
    assert batch.num_tokens == sum(e.num_drawn for e in group.episodes)
    parts = micro_batches(batch, MicroSizes((rows,)))
    assert sum(p.num_tokens for p in parts) == batch.num_tokens
    for index, (episode, of_episode) in enumerate(zip(group.episodes, calls, strict=True)):
        for call in of_episode.values():
            done, prompt = call.completion, call.prompt
            (at,) = np.flatnonzero(episode.logprobs == done.logprobs[0])
            own = [(p, *np.nonzero(p.advantages == advantages[0][index][at])) for p in parts]
            ((part, (row,), (column,)),) = [o for o in own if len(o[1])]
            there = row, slice(column, column + len(done.token_ids))
            assert part.mask[there].all() and (part.sequence_ids[there] == index).all()
            for name, wanted in (
                ("token_ids", done.token_ids),
                ("behavior_logprobs", done.logprobs),
                ("versions", done.versions),
                ("advantages", advantages[0][index][at : at + len(done.token_ids)]),
            ):
                np.testing.assert_array_equal(getattr(part, name)[there], wanted, name)
            seen = part.segment_ids[row, :column] == part.segment_ids[row, column]
            np.testing.assert_array_equal(part.token_ids[row, :column][seen], prompt)
            np.testing.assert_array_equal(
                part.positions[row, :column][seen], np.arange(len(prompt))
            )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**4))
def test_values_of_rows_come_back_in_the_episodes_own_order(seed):
    group, _ = made(seed)
    step = pack_step(shape(step_data([group])), ROW, sampler_columns=WITH_ALL)
    batch = step.batch
    for column in ("token_ids", "behavior_logprobs", "versions", "expert_ids"):
        of_rows = getattr(batch, column)
        got = step.to_groups(of_rows.reshape(*of_rows.shape[:2], -1)[:, :, 0])
        for values, episode in zip(got[0], group.episodes, strict=True):
            own = {"behavior_logprobs": "logprobs"}.get(column, column)
            wanted = getattr(episode, own)
            np.testing.assert_array_equal(values, wanted.reshape(len(wanted), -1)[:, 0], column)
    sent = numbered(group)
    back = step.to_groups(step.index.to_rows(sent[0]))
    for values, wanted in zip(back[0], sent[0], strict=True):
        np.testing.assert_array_equal(values, wanted)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**4), parts=st.integers(1, 4))
def test_mini_batches_hold_whole_episodes_with_their_contexts_as_they_were(seed, parts):
    group, _ = made(seed, members=4)
    step = pack_step(shape(step_data([group])), ROW)
    dealt = deal(step.batch, parts, (seed,))
    assert sorted(np.concatenate(dealt)) == list(range(4))
    for sequences in dealt:
        small = repacked(step.batch, step.index.select(sequences))
        assert set(small.sequence_ids[small.sequence_ids >= 0]) == set(sequences)
        for s in sequences:
            episode = group.episodes[s]
            pieces = []
            for row, segments in enumerate(small.segment_ids):
                for segment in set(segments[segments > 0].tolist()):
                    here = (segments == segment) & (small.sequence_ids[row] == s)
                    if here.any():
                        assert small.positions[row][here].tolist() == list(range(here.sum()))
                        pieces.append(small.token_ids[row][here].tolist())
            bounds = [*episode.starts, len(episode.token_ids)]
            whole = [episode.token_ids[a:b].tolist() for a, b in itertools.pairwise(bounds)]
            assert sorted(pieces) == sorted(whole)


def test_the_forward_pass_on_packed_contexts_gives_each_calls_own_log_probs():
    """One call at a time, alone in a row, is the reference: 1e-5 is float32's rounding here."""
    groups, calls = zip(*(made(seed, vocab=VOCAB, calls=10) for seed in range(3)), strict=True)
    shaped = shape(step_data(groups))
    step = pack_step(shaped, ROW)
    assert step.batch.offsets is not None and len(step.batch.token_ids) > 8
    packed = step.to_groups(PASS.logprobs(PARAMS, step.batch))
    alone, num_sampled, wanted = [], [], []
    for group, of_group, values in zip(groups, calls, packed, strict=True):
        for episode, of_episode, own in zip(group.episodes, of_group, values, strict=True):
            for call in of_episode.values():
                done = call.completion
                (at,) = np.flatnonzero(episode.logprobs == done.logprobs[0])
                wanted.append(own[at : at + len(done.token_ids)])
                alone.append(np.concatenate([call.prompt, done.token_ids]))
                num_sampled.append(len(done.token_ids))
    rows = [
        replace(groups[0].episodes[0], **one_context(tokens, n))
        for tokens, n in zip(alone, num_sampled, strict=True)
    ]
    by_call = pack_groups([group_of(rows)], None, ROW)
    assert by_call.offsets is None
    reference = PASS.logprobs(PARAMS, by_call)
    for index, (n, values) in enumerate(zip(num_sampled, wanted, strict=True)):
        own = reference[by_call.sequence_ids == index]
        np.testing.assert_allclose(values, own[-n:], atol=1e-5)
    assert len(wanted) >= 90


def one_context(tokens, num_sampled):
    mask = np.arange(len(tokens)) >= len(tokens) - num_sampled
    zeros = np.zeros(len(tokens))
    return {
        "token_ids": tokens.astype(np.int32),
        "drawn": mask,
        "logprobs": zeros.astype(np.float32),
        "versions": np.where(mask, 0, -1).astype(np.int32),
        "kept": None,
        "expert_ids": None,
        "starts": (0,),
    }


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_a_context_is_the_sequence_of_a_loss_and_the_episode_that_of_an_aggregate(loss):
    """An update with an episode of two contexts is one with the contexts as two episodes of the
    same advantage, if each weighs what it did in the episode."""
    group, _ = made(7, members=4, vocab=VOCAB)
    episodes = [
        replace(
            e,
            logprobs=np.where(e.drawn, -3.1, 0).astype(np.float32),
            versions=np.where(e.drawn, 0, -1).astype(np.int32),
        )
        for e in group.episodes
    ]
    whole = group_of(episodes)
    pieces = [
        replace(
            e,
            **{
                name: getattr(e, name)[a:b]
                for name in ("token_ids", "drawn", "logprobs", "versions")
            },
            kept=None,
            expert_ids=None,
            starts=(0,),
        )
        for e in episodes
        for a, b in zip(e.starts, (*e.starts[1:], len(e.token_ids)), strict=True)
    ]
    rewards = [float(i) for i, e in enumerate(episodes) for _ in e.starts]
    cut = replace(group_of(pieces), scores=tuple(Score(reward=r) for r in rewards))

    def report_of(group):
        section = schema.AlgorithmSection(
            learning_rate=1e-3, loss=loss, advantage="reinforce", aggregate="token_mean"
        )
        step = policy_update(SPEC, SETTINGS, section, total_steps=9)
        learner = Learner(
            step, step.init(PARAMS), LearnerSettings(algorithm=section, row_length=ROW)
        )
        return learner.learn([group], 0)

    first, second = report_of(whole), report_of(cut)
    for key in ("train/loss", "train/grad_norm", "train/sequences", "train/tokens"):
        assert first[key] == pytest.approx(second[key], rel=1e-5), key
    assert first["train/sequences"] > 4
    weights = sequence_mean(pack_groups([whole], None, ROW))
    assert weights.sum() == pytest.approx(1) and len(set(weights[weights > 0].tolist())) <= 4


def test_what_cannot_be_packed_is_refused_and_what_fits_does():
    group, _ = made(3, members=1)
    (episode,) = group.episodes
    longest = int(max(np.diff([*episode.starts, len(episode.token_ids)])))
    assert len(episode.starts) > 1 and longest < len(episode.token_ids)
    assert fits(group, longest) and not fits(group, longest - 1)
    assert pack_groups([group], None, longest).num_tokens == episode.num_drawn
    with pytest.raises(DataError, match="more than a row"):
        pack_groups([group], None, longest - 1)
    learns = episode.drawn.copy()
    learns[episode.starts[1]] = True
    with pytest.raises(DataError, match="first token of a context"):
        pack_groups([group], None, ROW, masks=[[learns]])
    for starts in ((1, 2), (0, 3, 3), (0, len(learns))):
        with pytest.raises(DataError, match="ascend"):
            pack_groups([group_of([replace(episode, starts=starts)])], None, ROW)


def test_flops_and_metrics_know_contexts():
    group, _ = made(5)
    batch = pack_groups([group], None, ROW)
    pieces = [n for e in group.episodes for n in np.diff([*e.starts, len(e.token_ids)])]
    per_layer = 2 * SPEC.heads * SPEC.head_dim * sum(int(n) ** 2 for n in pieces)
    whole = forward_flops(SPEC, batch)
    assert whole - per_layer * SPEC.layers == pytest.approx(
        2 * num_matmul_params(SPEC) * sum(pieces)
    )
    contexts = group_measures([group], 0)["rollout/contexts_mean"]
    assert contexts == pytest.approx(len(pieces) / 3)
