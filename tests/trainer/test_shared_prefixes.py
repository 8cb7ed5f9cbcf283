"""Contexts that share prefixes in a row learn what they learn apart: 1e-5 is float32's rounding."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxrl_async.algorithms.advantages import step_data
from jaxrl_async.algorithms.shaping import shape
from jaxrl_async.config import schema
from jaxrl_async.mesh import make_mesh
from jaxrl_async.model.attention import visible_until
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.heads import with_head
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.critic import make_critic
from jaxrl_async.trainer.flops import forward_flops, num_matmul_params
from jaxrl_async.trainer.frozen_models import copied
from jaxrl_async.trainer.learner import Companions, Learner, LearnerSettings
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.logprob_pass import LogprobPass
from jaxrl_async.trainer.objectives.policy_objective import policy_update
from jaxrl_async.trainer.pack import pack_groups
from jaxrl_async.trainer.prefix_plan import (
    common_lengths,
    first_fit_decreasing,
    plan_rows,
    prefix_key,
)
from jaxrl_async.trainer.step_data import deal, pack_step
from jaxrl_async.trainer.token_columns import Routing, SamplerColumns
from jaxrl_async.types import Episode, EpisodeGroup, KeptTokens, Prompt, Score, StopReason, Ticket

pytestmark = pytest.mark.full

VOCAB, ROW = 24, 48
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=2, width=16, heads=4, kv_heads=2, head_dim=8, mlp=16), VOCAB
)
ROUTED = ModelSpec.from_architecture(
    schema.ArchitectureSection(
        family="qwen3_moe", experts=4, experts_per_token=2,
        layers=2, width=16, heads=4, kv_heads=2, head_dim=8, mlp=8,
    ),
    VOCAB,
)  # fmt: skip
LINEAR = {"epsilon": 1.0, "max_grad_norm": 1e9, "beta1": 0.0, "beta2": 0.0}
"""AdamW whose step is nearly proportional to the gradient."""
OF_PACKING = (
    *("train/rows", "train/micro_batches", "train/packing", "train/flops", "routing/", "experts/"),
)
"""What differs in a report: it is of the tokens that are computed."""


def episode(rng: np.random.Generator, prompt: np.ndarray, branches: int, vocab: int) -> Episode:
    """An answer of two turns, and contexts that leave one of those before them somewhere."""

    def turn(most: int) -> np.ndarray:
        return rng.integers(0, vocab, rng.integers(1, most))

    first, tool, second = turn(5), turn(3), turn(5)
    contexts = [np.concatenate([prompt, first, tool, second])]
    sampled = [
        np.repeat([False, True, False, True], [len(prompt), len(first), len(tool), len(second)])
    ]
    for _ in range(branches):
        left = contexts[rng.integers(len(contexts))]
        seen = np.concatenate([left[: rng.integers(1, len(left) + 1)], turn(3)])
        answer = turn(5)
        contexts.append(np.concatenate([seen, answer]))
        sampled.append(np.arange(len(contexts[-1])) >= len(seen))
    token_ids, mask = np.concatenate(contexts).astype(np.int32), np.concatenate(sampled)
    index = np.concatenate([np.arange(len(c)) for c in contexts])
    count = int(mask.sum())
    return Episode(
        token_ids=token_ids,
        drawn=mask,
        logprobs=np.where(mask, -3.1 - rng.random(len(mask)) / 5, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        stop=StopReason.EOS,
        kept=KeptTokens(
            ids=np.stack([token_ids[mask], np.full(count, VOCAB - 1)], 1).ravel().astype(np.int32),
            starts=2 * np.arange(count + 1, dtype=np.int32),
        ),
        expert_ids=(np.stack([[index, index + 1]] * 2).transpose(2, 0, 1) % 4).astype(np.int8),
        starts=tuple(np.cumsum([0, *(len(c) for c in contexts[:-1])]).tolist()),
    )  # fmt: skip


def group(
    seed: int, *, members: int = 4, branches: int = 2, vocab: int = VOCAB - 1
) -> EpisodeGroup:
    """Members of one prompt; with a small vocabulary they draw the same tokens, too."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, vocab, rng.integers(1, 16))
    made = [episode(rng, prompt, int(rng.integers(branches + 1)), vocab) for _ in range(members)]
    return EpisodeGroup(
        prompt=Prompt(prompt_id=seed, position=seed, token_ids=prompt, text="", reference=""),
        episodes=tuple(made),
        scores=tuple(Score(reward=float(m % 2 + m / 9)) for m in range(members)),
        ticket=Ticket(group=seed, version=0),
    )


GROUPS = [group(seed) for seed in range(3)]

# ---- the rows


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from([2, 4, 23]), row=st.sampled_from([40, 64]))
def test_each_token_sees_its_context_and_is_trained_once(seed, vocab, row):
    groups = [group(seed + n, vocab=vocab, branches=4) for n in range(2)]
    shaped = shape(step_data(groups))
    step = pack_step(shaped, row, share_prefixes=True)
    separate = pack_groups(groups, None, row)
    batch, episodes = step.batch, [e for g in groups for e in g.episodes]
    assert len(batch.mask) <= len(separate.mask)
    assert batch.num_tokens == sum(e.num_drawn for e in episodes)
    until = np.asarray(visible_until(batch.positions, batch.segment_ids))
    for number, (e, of_sequence) in enumerate(zip(episodes, step.index.contexts, strict=True)):
        np.testing.assert_array_equal(step.index.to_sequences(batch.token_ids)[number], e.token_ids)
        assert tuple(c.offset for c in of_sequence) == e.starts
        for context, start, end in zip(of_sequence, e.starts, (*e.starts[1:], None), strict=True):
            tokens, sampled = e.token_ids[start:end], e.drawn[start:end]
            rows, columns = np.divmod(context.indices[context.shared :], row)
            assert not sampled[: context.shared].any() and len(set(rows)) == 1
            assert batch.mask[rows, columns].tolist() == sampled[context.shared :].tolist()
            for index, at in enumerate(columns, context.shared):
                seen = np.flatnonzero((np.arange(row) <= at) & (at < until[rows[0]]))
                assert batch.positions[rows[0], seen].tolist() == list(range(index + 1))
                assert batch.token_ids[rows[0], seen].tolist() == tokens[: index + 1].tolist()
            if context.shared:  # so its first own token is predicted by its left neighbour
                assert batch.token_ids[rows[0], columns[0] - 1] == tokens[context.shared - 1]
                assert (
                    batch.segment_ids[rows[0], columns[0] - 1]
                    == batch.segment_ids[rows[0], columns[0]]
                )


@settings(max_examples=40, deadline=None)
@example(seed=8916, parts=2, vocab=3)  # every episode is one context
@given(seed=st.integers(0, 10**6), parts=st.integers(2, 4), vocab=st.sampled_from([3, 23]))
def test_mini_batches_share_anew_and_learn_each_token_once(seed, parts, vocab):
    groups = [group(seed + n, vocab=vocab) for n in range(2)]
    step = pack_step(shape(step_data(groups)), ROW, share_prefixes=True)
    separate = pack_step(shape(step_data(groups)), ROW)
    step.batch.advantages[step.batch.mask] = np.arange(step.batch.num_tokens) + 1
    trained = []
    for part in deal(step.batch, parts, (seed,)):
        rows = step.rows.at(step.index.select(part)).batch
        whole = separate.rows.at(separate.index.select(part)).batch
        assert len(rows.mask) <= len(whole.mask) and rows.num_tokens == whole.num_tokens
        trained += rows.advantages[rows.mask].tolist()
        for number in part:
            for name in ("token_ids", "behavior_logprobs", "versions", "offsets", "group_ids"):
                columns = [getattr(b, name) for b in (rows, whole)]
                if columns[0] is None and columns[1] is None:  # no episode has a second context
                    continue
                own = [
                    column[b.mask & (b.sequence_ids == number)]
                    for column, b in zip(columns, (rows, whole), strict=True)
                ]
                np.testing.assert_array_equal(*map(np.sort, own), name)
    assert sorted(trained) == list(range(1, step.batch.num_tokens + 1))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 2))
def test_what_arrays_have_in_common_is_counted(seed, width):
    rng = np.random.default_rng(seed)
    arrays = [
        rng.integers(0, 300, (rng.integers(0, 6), width)).astype(np.int32) // 100 * 255
        for _ in range(7)
    ]
    table = common_lengths(arrays)
    for i, a in enumerate(arrays):
        for j, b in enumerate(arrays):
            same = [x.tolist() == y.tolist() for x, y in zip(a, b, strict=False)]
            wanted = ([*same, False]).index(False) if i != j else 0
            assert table[i, j] == wanted


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.integers(2, 20),
    answers=st.lists(st.integers(1, 12), min_size=2, max_size=40),
    members=st.integers(2, 8),
)
def test_trees_are_divided_where_a_row_is_full(prompt, answers, members):
    keys = [
        prefix_key(
            np.array([*range(prompt), *(100 + 50 * i + t for t in range(n))]),
            np.arange(prompt + n) >= prompt,
            group=i // members,
        )
        for i, n in enumerate(answers)
    ]
    lengths = [prompt + n for n in answers]
    rows = plan_rows(lengths, ROW, keys)
    laid = [sum(lengths[c.context] - c.skipped for c in row) for row in rows]
    assert sorted(c.context for row in rows for c in row) == list(range(len(answers)))
    assert max(laid) <= ROW
    for row in rows:
        for before, context in pairwise(row):
            same_group = keys[before.context].group == keys[context.context].group
            assert context.skipped == (prompt - 1 if same_group and context.skipped else 0)
    assert len(rows) <= len(first_fit_decreasing(lengths, ROW))


def test_a_row_with_room_takes_a_part_of_a_group():
    """Eight groups of eight answers, of 319 tokens each: whole, they take a row of 512 each."""
    prompt, answer = 47, 34
    keys = [
        prefix_key(
            np.array([*range(prompt), *(100 * i + t for t in range(answer))]),
            np.arange(prompt + answer) >= prompt,
            group=i // 8,
        )
        for i in range(64)
    ]
    assert len(plan_rows([prompt + answer] * 64, 512, keys)) == 6


def test_tokens_of_other_experts_or_groups_are_not_shared():
    one = group(1, branches=0)
    count = sum(len(e.token_ids) for e in one.episodes)
    columns = SamplerColumns(routing=Routing(2, 2, np.int8))

    def laid(*groups: EpisodeGroup, **how: Any) -> int:
        batch = pack_groups(list(groups), None, 24, share_prefixes=True, **how)
        return int(np.count_nonzero(batch.segment_ids))

    assert laid(one, sampler_columns=columns) == laid(one) < count
    others = [
        replace(e, expert_ids=np.full_like(e.expert_ids, m)) for m, e in enumerate(one.episodes)
    ]
    assert laid(replace(one, episodes=tuple(others)), sampler_columns=columns) == count
    alone = [replace(one, episodes=(e,), scores=one.scores[:1]) for e in one.episodes]
    assert laid(*alone) == count


def test_flops_count_what_is_computed():
    one = group(1, branches=0)
    lengths = [len(e.token_ids) for e in one.episodes]
    batch = pack_groups([one], None, 24, share_prefixes=True)
    starts = [
        int(batch.positions[row][batch.segment_ids[row] == s][0])
        for row in range(len(batch.mask))
        for s in range(1, batch.segment_ids[row].max() + 1)
    ]
    assert any(starts)
    laid = sum(lengths) - sum(starts)
    squares = sum(n**2 for n in lengths) - sum(n**2 for n in starts)
    attention = 2 * SPEC.layers * SPEC.heads * SPEC.head_dim * squares
    wanted = 2 * num_matmul_params(SPEC) * laid + attention
    assert forward_flops(SPEC, batch) == pytest.approx(wanted)


# ---- what is trained


def trained(
    shares: bool, algorithm: dict[str, Any], *, spec: ModelSpec = SPEC, axes: Any = None,
    teacher: dict[str, Any] | None = None, critic: bool = False, columns: Any = None,
    steps: int = 1,
) -> tuple[dict[str, float], Any]:  # fmt: skip
    """The report of the last step, and the weights behind it."""
    axes = axes or {}
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    trainer = schema.TrainerSection(
        micro_batch_tokens=8 * ROW if axes else 2 * ROW, logprob_chunk=32, share_prefixes=shares,
        **LINEAR,
    )  # fmt: skip
    mesh = make_mesh(schema.AxesSection(**axes), devices)
    how = LearningSettings(mesh=mesh, trainer=trainer, row_length=ROW, remat="layer")
    section = schema.AlgorithmSection(**{"learning_rate": 1e-2, **algorithm})
    of_teacher = None if teacher is None else schema.TeacherSection(**teacher)
    step = policy_update(spec, how, section, total_steps=20, teacher=of_teacher)
    params, other = (init_params(spec, jax.random.key(n)) for n in (0, 1))
    own = LogprobPass(spec, how, top_k=4)
    parts: dict[str, Any] = {"own_pass": own}
    if algorithm.get("kl_coefficient"):
        parts["reference"] = copied(other)
    if teacher:
        parts |= {"teacher": copied(other), "teacher_pass": own}
    if critic:
        made = make_critic(spec, how, learning_rate=1e-2, total_steps=20)
        parts |= {
            "critic": made,
            "critic_state": made.step.init(value_params(spec, other)),
        }
    settings = LearnerSettings(
        algorithm=section, row_length=ROW, teacher=of_teacher,
        sampler_columns=columns or SamplerColumns(),
    )  # fmt: skip
    learner = Learner(step, step.init(params), settings, Companions(**parts))
    for version in range(steps):
        report = learner.learn(GROUPS, version)
    arrays = {"policy": learner.params}
    if learner.critic_state is not None:
        arrays["critic"] = learner.critic_state.params
    return report, jax.tree.map(np.asarray, arrays)


def value_params(spec: ModelSpec, params: Any) -> Any:
    """A critic whose values are not 0."""
    made = dict(with_head(spec, params, "value", jax.random.key(2)))
    kernel = jax.random.normal(jax.random.key(3), (spec.width,))
    return made | {"value_head": {"kernel": kernel, "bias": np.ones(1, np.float32)}}


def assert_learns_the_same(**how: Any) -> None:
    """Weights within 1e-5 of the largest step of an array and float32's rounding of the sum; every
    number of the report but those of the packing."""
    (separate, wanted), (shared, found) = (trained(s, **how) for s in (False, True))
    assert shared["train/shared_tokens"] > 0.2 and shared["train/rows"] <= separate["train/rows"]
    assert shared["train/flops"] < separate["train/flops"]
    for key, value in separate.items():
        if not key.startswith(OF_PACKING):
            assert shared[key] == pytest.approx(value, rel=2e-5, abs=2e-6), key
    assert separate.keys() == shared.keys() - {"train/shared_tokens"}
    before = {"policy": init_params(how.get("spec", SPEC), jax.random.key(0))}
    if how.get("critic"):
        before["critic"] = value_params(SPEC, init_params(SPEC, jax.random.key(1)))
    for a, b, old in zip(*map(jax.tree.leaves, (found, wanted, before)), strict=True):
        limit = 1e-5 * max(np.abs(b - np.asarray(old)).max(), 1e-3) + 3e-7 * np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=limit)


@pytest.mark.exhaustive
def test_an_update_is_the_one_of_separate_contexts():
    """Groups of one prompt, episodes of several contexts, mini-batches of several micro-batches."""
    assert_learns_the_same(algorithm={"minibatches": 2, "entropy_coefficient": 0.01})


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "how",
    [
        {"algorithm": {"loss": "gspo", "aggregate": "sequence_mean", "kl_coefficient": 0.1}},
        {"algorithm": {"kl_coefficient": 0.1, "kl": "k1", "kl_in": "reward", "minibatches": 2}},
        {"algorithm": {"kl_coefficient": 0.1, "kl": "full"}},
        {"algorithm": {"advantage": "gae", "minibatches": 2}, "critic": True, "steps": 2},
        {"algorithm": {"keep_sampling_mask": True}, "columns": SamplerColumns(mask_vocab=VOCAB)},
        {"algorithm": {}, "teacher": {"source": "path", "form": "advantage"}},
        {"algorithm": {"epochs": 2}, "teacher": {"source": "path", "form": "loss", "top_k": 4}},
        {
            "algorithm": {"keep_routing": True, "minibatches": 2},
            "spec": ROUTED,
            "columns": SamplerColumns(routing=Routing(2, 2, np.int8)),
        },
        {"algorithm": {}, "axes": {"data": 2, "fsdp": 2, "tensor": 2}},
        {"algorithm": {"minibatches": 2}, "axes": {"fsdp": 2, "context": 2, "tensor": 2}},
        {"algorithm": {}, "axes": {"fsdp": 2, "expert": 4}, "spec": ROUTED},
    ],
    ids=lambda how: "-".join(str(v) for k, v in how.items() if k not in ("spec", "columns")),
)  # fmt: skip
def test_every_algorithm_learns_what_it_learns_from_separate_contexts(how):
    assert_learns_the_same(**how)
