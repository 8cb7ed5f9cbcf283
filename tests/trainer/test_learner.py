"""One step of learning: what each companion does to the numbers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.algorithms.advantages import StepAdvantages, StepData, gae, step_data
from jaxrl_async.config import schema
from jaxrl_async.mesh import make_slices
from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.model.decoder import TokenRows, init_params
from jaxrl_async.model.heads import token_scores, with_head
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.credit import Credit, covariance_rank, less_penalty
from jaxrl_async.trainer.critic import make_critic
from jaxrl_async.trainer.frozen_models import copied
from jaxrl_async.trainer.learner import Companions, Learner, LearnerSettings
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.logprob_pass import LogprobPass
from jaxrl_async.trainer.objectives.policy_objective import PolicyObjective, policy_update
from jaxrl_async.trainer.pack import pack_groups
from jaxrl_async.trainer.token_columns import SamplerColumns
from jaxrl_async.trainer.update import Update
from jaxrl_async.types import (
    Episode,
    EpisodeGroup,
    KeptTokens,
    Prompt,
    Score,
    StopReason,
    Ticket,
)

pytestmark = pytest.mark.full

VOCAB, ROW = 24, 16
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp=24), VOCAB
)
MESH = make_slices(schema.MeshSection(), jax.devices()).trainer
TRAINER = schema.TrainerSection(micro_batch_tokens=4 * ROW, logprob_chunk=32)
SETTINGS = LearningSettings(mesh=MESH, trainer=TRAINER, row_length=ROW)
PASS = LogprobPass(SPEC, SETTINGS)
PARAMS = init_params(SPEC, jax.random.key(0), jnp.float32)
OTHER = init_params(SPEC, jax.random.key(1), jnp.float32)


def group(number: int, *, members: int = 3, version: int = 0) -> EpisodeGroup:
    rng = np.random.default_rng(number)
    episodes = []
    for _ in range(members):
        length = int(rng.integers(5, ROW - 2))
        sampled = np.arange(length) >= 2
        episodes.append(
            Episode(
                token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                drawn=sampled,
                logprobs=np.where(sampled, -3.2 - rng.random(length) / 5, 0).astype(np.float32),
                versions=np.where(sampled, version, -1).astype(np.int32),
                stop=StopReason.EOS,
            )
        )
    prompt = Prompt(
        prompt_id=number, position=number, token_ids=np.zeros(2, np.int32), text="", reference=""
    )
    return EpisodeGroup(
        prompt=prompt,
        episodes=tuple(episodes),
        scores=tuple(Score(reward=float(r)) for r in rng.integers(0, 2, members)),
        ticket=Ticket(group=number, version=version),
    )


GROUPS = [group(n) for n in range(4)]


def sampled_by(params: Any, groups: list[EpisodeGroup]) -> list[EpisodeGroup]:
    """The same groups as if `params` had sampled them."""
    batch = pack_groups(groups, None, ROW)
    values = PASS.logprobs(params, batch)
    made = []
    flat = iter(range(100))
    for g in groups:
        episodes = []
        for e in g.episodes:
            tokens = batch.sequence_ids == next(flat)
            episodes.append(replace(e, logprobs=np.where(e.drawn, values[tokens], 0)))
        made.append(replace(g, episodes=tuple(episodes)))
    return made


Step = Update[PolicyObjective]
_STEPS: dict[str, Step] = {}


def step_of(section: schema.AlgorithmSection, teacher: schema.TeacherSection) -> Step:
    """The same one for the same settings, so that it compiles once."""
    compiled = section.model_copy(update={"advantage": "", "epochs": 1, "minibatches": 1})
    key = repr((compiled, teacher))
    if key not in _STEPS:
        _STEPS[key] = policy_update(SPEC, SETTINGS, section, total_steps=20, teacher=teacher)
    return _STEPS[key]


def learner_of(
    *,
    algorithm: dict | None = None,
    teacher: dict | None = None,
    reference: dict | None = None,
    companions: dict | None = None,
    **how: Any,
) -> Learner:
    section = schema.AlgorithmSection(**{"learning_rate": 1e-2, **(algorithm or {})})
    of_teacher = None if teacher is None else schema.TeacherSection(**teacher)
    step = step_of(section, of_teacher)
    settings = LearnerSettings(
        algorithm=section,
        row_length=ROW,
        teacher=of_teacher,
        reference=schema.ReferenceSection(**(reference or {})),
        **how,
    )
    parts = {"own_pass": PASS, **(companions or {})}
    return Learner(step, step.init(PARAMS), settings, Companions(**parts))


def moved(learner: Learner, groups: list[EpisodeGroup] = GROUPS, version: int = 0) -> dict:
    stats = learner.learn(groups, version)
    assert all(np.isfinite(v) for v in stats.values()), stats
    assert all(metric_of(key) for key in stats)
    return stats


def distance(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.abs(x - y).max()) for x, y in pairs)


def test_shapings_come_before_the_advantage_and_are_counted() -> None:
    capped = {"cap": {"low": 0.0, "high": 0.5}}
    plain, shaped = learner_of(), learner_of(algorithm={"shaping": (capped,)})
    assert "shaping/capped" not in moved(plain)
    ones = sum(s.reward == 1 for g in GROUPS for s in g.scores)
    assert moved(shaped)["shaping/capped"] == ones


@pytest.mark.parametrize("baseline", ["all", "unmasked"])
def test_two_right_answers_with_a_masked_one_learn_only_from_it_if_it_is_compared(
    baseline: str,
) -> None:
    """RLOO: +0.5 for each right answer with the masked one of reward 0 in the baseline, else 0."""
    whole = group(0)
    cut = (StopReason.EOS, StopReason.EOS, StopReason.LENGTH)
    one = replace(
        whole,
        episodes=tuple(replace(e, stop=s) for e, s in zip(whole.episodes, cut, strict=True)),
        scores=tuple(Score(reward=r) for r in (1.0, 1.0, 0.0)),
    )
    settings = {"advantage": "rloo", "shaping": ("mask_truncated",), "baseline": baseline}
    stats = moved(learner_of(algorithm={**settings, "least_compared": 3}), [one])
    assert (stats["train/grad_norm"] > 0) == (baseline == "all")
    assert stats.get("shaping/too_few_compared") == (None if baseline == "all" else 2)


def test_mini_batches_and_epochs_make_as_many_updates_on_other_sequences() -> None:
    learner = learner_of(algorithm={"epochs": 2, "minibatches": 3})
    stats = moved(learner)
    assert stats["train/updates"] == 6 and int(learner.state.step) == 6
    assert stats["train/tokens"] == sum(e.num_drawn for g in GROUPS for e in g.episodes)
    again = learner_of(algorithm={"epochs": 2, "minibatches": 3})
    moved(again)
    assert distance(learner.params, again.params) == 0  # the shuffle is keyed
    other = learner_of(algorithm={"epochs": 2, "minibatches": 3}, seed=1)
    moved(other)
    assert distance(learner.params, other.params) > 0


def test_each_epoch_deals_the_sequences_anew() -> None:
    learner = learner_of(algorithm={"epochs": 2, "minibatches": 3})
    dealt, made = list[list[tuple[int, ...]]](), learner.mini_batches

    def noted(step: Any, seed: Any) -> Any:
        number, parts = made(step, seed)
        whole = list(parts)
        dealt.append([tuple(np.unique(p.batch.sequence_ids[p.batch.mask])) for p in whole])
        return number, iter(whole)

    learner.mini_batches = noted  # type: ignore[method-assign]
    moved(learner)
    assert len(dealt) == 2 and dealt[0] != dealt[1]
    assert all(sorted(sum(epoch, ())) == list(range(12)) for epoch in dealt)


@pytest.mark.parametrize("minibatches", [2, 5, 12])
def test_measures_of_a_step_are_the_same_however_many_updates_it_is_trained_in(
    minibatches: int,
) -> None:
    """The mean of the parts' effective sample sizes was far above that of the step: parts of one
    sequence have one of 1 each."""
    settings = {"learning_rate": 0.0, "advantage": "group_mean"}
    whole = moved(learner_of(algorithm=settings))
    parts = moved(learner_of(algorithm={**settings, "minibatches": minibatches}))
    assert parts["train/updates"] == minibatches
    assert whole["train/sequences"] == parts["train/sequences"] == 12
    assert whole["offpolicy/sequence_ess_share"] < 0.9
    for key in whole:
        if key.startswith("offpolicy/") or key == "train/loss":
            assert parts[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-6), key


def test_with_several_updates_the_proximal_policy_is_the_one_at_the_start() -> None:
    """With learning rate 0 the policy stays the proximal one, so the loss's ratio is 1."""
    settings = {"anchor": "proximal", "epochs": 2, "correction": "tis"}
    still = moved(learner_of(algorithm={**settings, "learning_rate": 0.0}))
    assert still["policy/ratio_max"] == pytest.approx(1, abs=1e-5) or still["policy/k3_behavior"]
    moving = learner_of(algorithm=settings)
    first = moved(moving)
    assert first["offpolicy/weight_mean"] == pytest.approx(still["offpolicy/weight_mean"], rel=1e-5)
    assert first["train/loss"] != pytest.approx(still["train/loss"], rel=1e-6)


def test_a_divergence_in_the_reward_is_taken_off_where_the_estimator_looks() -> None:
    sampled = sampled_by(PARAMS, GROUPS)
    settings = {"kl_in": "reward", "kl": "k1", "kl_coefficient": 0.5}
    for estimator in ("group_mean", "reinforce_pp"):
        algorithm = {**settings, "advantage": estimator}
        same = learner_of(algorithm=algorithm, companions={"reference": copied(PARAMS)})
        stats = moved(same, sampled)
        assert stats["reward/kl"] == pytest.approx(0, abs=1e-5)
        far = learner_of(algorithm=algorithm, companions={"reference": copied(OTHER)})
        stats = moved(far, sampled)
        batch = pack_groups(sampled, None, ROW)
        gap = PASS.logprobs(PARAMS, batch) - PASS.logprobs(OTHER, batch)
        wanted = 0.5 * gap[batch.mask].sum() / sum(len(g.episodes) for g in sampled)
        assert stats["reward/kl"] == pytest.approx(wanted, rel=1e-4)
        assert distance(same.params, far.params) > 1e-4
        assert stats["train/loss"] == pytest.approx(stats["train/policy_loss"])


def standardized(values: list[np.ndarray]) -> list[np.ndarray]:
    flat = np.concatenate(values)
    return [(v - flat.mean()) / (flat.std() + 1e-8) for v in values]


def over_groups(
    values: list[np.ndarray], of_group: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> list[np.ndarray]:
    """One number per sequence, from the returns and lengths of its group of three."""
    returns = np.array([v.sum() for v in values]).reshape(-1, 3)
    lengths = np.array([len(v) for v in values]).reshape(-1, 3)
    found = np.concatenate([of_group(r, n) for r, n in zip(returns, lengths, strict=True)])
    return [np.full(len(v), one) for v, one in zip(values, found, strict=True)]


FROM_EARNED: dict[str, Callable[[list[np.ndarray]], list[np.ndarray]]] = {
    # of each sequence what its sampled tokens earned, float64 -> its advantages
    "reinforce": lambda e: over_groups(e, lambda r, n: r),
    "rloo": lambda e: over_groups(e, lambda r, n: (r - r.mean()) * 3 / 2),
    "opo": lambda e: over_groups(e, lambda r, n: r - (r * n).sum() / n.sum()),
    "reinforce_pp_baseline": lambda e: standardized(over_groups(e, lambda r, n: r - r.mean())),
    "reinforce_pp": lambda e: standardized([np.cumsum(v[::-1])[::-1] for v in e]),
    "discounted_batch": lambda e: standardized([np.cumsum(v[::-1])[::-1] for v in e]),
}


def test_a_penalty_is_taken_off_what_tokens_earn_or_else_off_the_sequences() -> None:
    data = step_data([group(0, members=2)])
    lengths = [len(e.token_ids) for e in data.groups[0].episodes]
    penalties = ((np.full(lengths[0], 0.5, np.float32), np.zeros(lengths[1], np.float32)),)
    less, report = less_penalty(data, penalties, "token")
    assert less.token_rewards is not None and report["reward/kl"] == lengths[0] / 4
    np.testing.assert_array_equal(less.token_rewards[0][0], np.full(lengths[0], -0.5))
    earned = replace(data, token_rewards=((np.ones(lengths[0], np.float32), None),))
    reduced, _ = less_penalty(earned, penalties, "sequence")
    assert reduced.token_rewards is not None
    np.testing.assert_array_equal(reduced.token_rewards[0][0], np.full(lengths[0], 0.5))
    of_sequences, _ = less_penalty(data, penalties, None)
    np.testing.assert_allclose(of_sequences.rewards[0], data.rewards[0] - [lengths[0] / 2, 0])


def test_a_token_that_the_teacher_finds_likelier_gets_a_larger_advantage() -> None:
    batch = pack_groups([group(0)], None, ROW)
    credit = learner_of(teacher={"source": "self", "coefficient": 0.5, "rewards": 2.0}).credit
    assert isinstance(credit, Credit)
    rewarded = np.ones(batch.mask.shape, np.float32)
    teacher = np.where(batch.mask, batch.behavior_logprobs + 0.2, 0).astype(np.float32)
    found, gap = credit.advised(batch, rewarded, teacher)
    np.testing.assert_allclose(found[batch.mask], 2 * 1 + 0.5 * 0.2, rtol=1e-5)
    assert gap == pytest.approx(-0.2, rel=1e-4)


@pytest.mark.parametrize("name", [*FROM_EARNED, "by_sequence", "by_token"])
def test_a_divergence_in_the_reward_is_counted_once_with_token_rewards(
    name: str, tmp_path: Path
) -> None:
    """Against float64, from the log-probs on: what a token earned is its reward less 0.3 times
    log policy - log reference, and the last one's the sequence's reward, too."""
    groups = [
        replace(
            g,
            scores=tuple(
                replace(s, token_rewards=np.linspace(-1, 1, len(e.token_ids), dtype=np.float32))
                for e, s in zip(g.episodes, g.scores, strict=True)
            ),
        )
        for g in GROUPS
    ]
    own = tmp_path / "own.py"
    own.write_text(OWN_ADVANTAGE)
    learner = learner_of(
        algorithm={
            **{"kl_in": "reward", "kl": "k1", "kl_coefficient": 0.3, "loss": "gpg"},
            "advantage": f"{own}:{name}" if name.startswith("by_") else name,
        },
        companions={"reference": copied(OTHER)},
    )
    found: list[StepAdvantages] = []
    inner = learner.credit.advantage

    def noted(data: StepData) -> StepAdvantages:
        found.append(inner(data))
        return found[0]

    learner.credit = replace(learner.credit, advantage=noted)
    moved(learner, groups)
    batch = pack_groups(groups, None, ROW)
    gap = PASS.logprobs(PARAMS, batch).astype(np.float64) - PASS.logprobs(OTHER, batch)
    earned = []
    for e, s in ((e, s) for g in groups for e, s in zip(g.episodes, g.scores, strict=True)):
        tokens = batch.sequence_ids == len(earned)
        values = (
            np.asarray(s.token_rewards, np.float64) * (name != "by_sequence") - 0.3 * gap[tokens]
        )
        earned.append(values[e.drawn])
        earned[-1][-1] += s.reward
    same_as = {"by_sequence": "reinforce", "by_token": "reinforce_pp"}
    wanted = FROM_EARNED[same_as.get(name, name)](earned)
    sampled = [e.drawn for g in groups for e in g.episodes]
    flat = [a for of_group in found[0].advantages for a in of_group]
    for a, mask, values in zip(flat, sampled, wanted, strict=True):
        np.testing.assert_allclose(a[mask], values, rtol=1e-4, atol=2e-5)


OWN_ADVANTAGE = """
import numpy as np
from jaxrl_async.algorithms.advantages import StepAdvantages, reinforce_pp
from jaxrl_async.algorithms.registry import declare

@declare(level="token")
def by_token(data):
    return reinforce_pp(data)

def by_sequence(data):
    # looks at the sequences' rewards alone
    return StepAdvantages(advantages=tuple(
        tuple(np.where(e.drawn, r, 0).astype(np.float32) for e, r in zip(g.episodes, rewards))
        for g, rewards in zip(data.groups, data.rewards)
    ))
"""


def test_the_coefficient_of_the_divergence_follows_its_target() -> None:
    algorithm = {"kl_coefficient": 0.1, "kl_target": 1e-3, "kl_horizon": 2.0}
    learner = learner_of(algorithm=algorithm, companions={"reference": copied(OTHER)})
    first = moved(learner)
    second = moved(learner, version=1)
    assert first["policy/kl_coefficient"] == pytest.approx(0.1)
    assert second["policy/kl_coefficient"] == pytest.approx(0.1 * 1.1)  # far above: + 0.2 / 2
    loss = second["train/policy_loss"] + 0.11 * second["policy/kl_reference"]
    assert second["train/loss"] == pytest.approx(loss, rel=1e-5)


def test_the_whole_divergence_is_what_a_million_samples_would_say() -> None:
    algorithm = {"kl_coefficient": 0.1, "kl": "full"}
    learner = learner_of(algorithm=algorithm, companions={"reference": copied(PARAMS)})
    assert moved(learner)["policy/kl_reference"] == pytest.approx(0, abs=1e-6)
    far = learner_of(algorithm=algorithm, companions={"reference": copied(OTHER)})
    assert moved(far)["policy/kl_reference"] > 1e-3


def test_the_reference_follows_as_configured() -> None:
    algorithm = {"kl_coefficient": 0.1}
    for moves, where in (({}, False), ({"refresh_every": 2}, True), ({"ema": 0.75}, None)):
        learner = learner_of(
            algorithm=algorithm, reference=moves, companions={"reference": copied(PARAMS)}
        )
        moved(learner)
        after_one = copied(learner.params)
        if where is None:
            mixed = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, PARAMS, after_one)
            assert distance(learner.frozen.reference, mixed) < 1e-6
            continue
        assert distance(learner.frozen.reference, PARAMS) == 0
        moved(learner, version=1)
        assert (distance(learner.frozen.reference, learner.params) == 0) == where


def test_the_entropy_bonus_is_on_only_below_its_target() -> None:
    low = learner_of(algorithm={"entropy_target": 9.0, "entropy_step": 0.01})
    moved(low)
    assert moved(low, version=1)["policy/entropy_coefficient"] == pytest.approx(0.01)
    high = learner_of(algorithm={"entropy_target": 0.1, "entropy_coefficient": 0.02})
    moved(high)
    assert moved(high, version=1)["policy/entropy_coefficient"] == 0


@pytest.mark.parametrize(
    "form",
    [{"form": "advantage"}, {"form": "loss"}, {"form": "loss", "top_k": 5, "kind": "forward"}],
    ids=str,
)
def test_a_teacher_pulls_the_policy_towards_it(form: dict) -> None:
    section = {"source": "path", "path": "x", "rewards": 0.0, **form}
    teacher_pass = LogprobPass(SPEC, SETTINGS, top_k=5)
    learner = learner_of(
        algorithm={"loss": "reinforce", "correction": "none", "learning_rate": 2e-2},
        teacher=section,
        companions={"teacher": copied(OTHER), "teacher_pass": teacher_pass},
    )
    key = "policy/teacher_gap" if form["form"] == "advantage" else "policy/teacher_divergence"
    gaps = [moved(learner, sampled_by(learner.params, GROUPS), version=v)[key] for v in range(8)]
    assert gaps[-1] < 0.7 * gaps[0]


def test_an_older_copy_of_itself_teaches_and_is_refreshed() -> None:
    learner = learner_of(
        teacher={"source": "self", "refresh_every": 2},
        companions={"teacher": copied(PARAMS), "teacher_pass": PASS},
    )
    assert moved(learner, sampled_by(PARAMS, GROUPS))["policy/teacher_gap"] == pytest.approx(
        0, abs=1e-5
    )
    assert distance(learner.frozen.teacher, PARAMS) == 0
    moved(learner, version=1)
    assert distance(learner.frozen.teacher, learner.params) == 0
    moved(learner, version=2)
    assert distance(learner.frozen.teacher, learner.params) > 0


CRITIC = make_critic(SPEC, SETTINGS, learning_rate=1e-2, total_steps=20)


def critic_parts() -> dict[str, Any]:
    state = CRITIC.step.init(with_head(SPEC, PARAMS, "value", jax.random.key(2)))
    return {"critic": CRITIC, "critic_state": state}


def test_a_critic_learns_the_returns_and_the_policy_waits_for_its_warm_up() -> None:
    learner = learner_of(
        algorithm={"advantage": "gae", "minibatches": 2},
        companions=critic_parts(),
        critic_warmup=2,
    )
    losses = []
    for version in range(2):
        stats = moved(learner, version=version)
        assert stats["critic/warming"] == 1 and stats["train/updates"] == 0
        losses.append(stats["critic/loss"])
    assert distance(learner.params, PARAMS) == 0 and int(learner.state.step) == 0
    for version in range(2, 8):
        stats = moved(learner, version=version)
        losses.append(stats["critic/loss"])
    assert stats["critic/warming"] == 0 and distance(learner.params, PARAMS) > 0
    assert losses[-1] < 0.7 * losses[0]
    assert learner.critic_state is not None and int(learner.critic_state.step) == 2 * 8


def test_tokens_are_counted_once_however_many_epochs_and_while_the_critic_warms_up() -> None:
    """Warming up, the policy is measured once while the critic learns every epoch."""
    sampled = sum(e.num_drawn for g in GROUPS for e in g.episodes)
    learner = learner_of(
        algorithm={"advantage": "gae", "epochs": 3}, companions=critic_parts(), critic_warmup=1
    )
    for version in range(2):
        stats = moved(learner, version=version)
        assert stats["critic/warming"] == (version == 0)
        assert stats["train/tokens"] == stats["critic/tokens"] == sampled
        assert stats["train/sequences"] == sum(len(g.episodes) for g in GROUPS)


def test_worked_answers_are_counted_once_in_several_epochs() -> None:
    pair = (np.arange(3, 11, dtype=np.int32), np.arange(8) >= 3)
    learner = learner_of(
        algorithm={"supervised_coefficient": 1.0, "supervised_batch": 2, "epochs": 3},
        companions={"pairs": iter(lambda: pair, None)},
    )
    assert moved(learner)["supervised/tokens"] == 2 * 5


def test_worked_answers_mixed_in_are_trained_on_with_the_policys_own() -> None:
    answer = np.arange(3, 11, dtype=np.int32)
    pair = (answer, np.arange(8) >= 3)
    learner = learner_of(
        algorithm={"supervised_coefficient": 1.0, "supervised_batch": 2},
        companions={"pairs": iter(lambda: pair, None)},
    )
    reports = [moved(learner, version=v) for v in range(6)]
    assert reports[0]["supervised/tokens"] == 10
    assert reports[0]["train/tokens"] == sum(e.num_drawn for g in GROUPS for e in g.episodes)
    assert reports[-1]["supervised/loss"] < 0.8 * reports[0]["supervised/loss"]
    loss = reports[0]["train/policy_loss"] + reports[0]["supervised/loss"]
    assert reports[0]["train/loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_losses_by_covariance_find_the_tokens_of_the_step(loss: str) -> None:
    learner = learner_of(algorithm={"loss": {loss: {"share": 0.2}}})
    stats = moved(learner)
    if loss == "clip_cov":
        assert stats["policy/clip_share"] >= 0.2 - 0.02


def test_the_rank_of_the_covariance_is_by_size_over_the_trained_tokens() -> None:
    rng = np.random.default_rng(0)
    logs, values = rng.normal(size=(2, 3, 5)).astype(np.float32)
    mask = rng.random((3, 5)) < 0.6
    rank = covariance_rank(logs, values, mask)
    covariance = (logs - logs[mask].mean()) * (values - values[mask].mean())
    for index in zip(*np.nonzero(mask), strict=True):
        larger = np.count_nonzero(covariance[mask] > covariance[index])
        assert rank[index] == pytest.approx(larger / mask.sum())
    assert (rank[~mask] == 1).all()
    assert (covariance_rank(logs, values, np.zeros_like(mask)) == 1).all()


def test_another_one_continues_from_what_it_saves_with_the_same_numbers() -> None:
    how: dict[str, Any] = {
        "algorithm": {"advantage": "gae", "kl_coefficient": 0.1, "kl_target": 0.01},
        "reference": {"refresh_every": 2},
    }

    def fresh() -> Learner:
        return learner_of(companions={"reference": copied(PARAMS), **critic_parts()}, **how)

    one, two = fresh(), fresh()
    for version in range(3):
        moved(one, version=version)
    two.restore(jax.tree.map(jnp.copy, one.tree()), one.numbers())
    assert moved(one, version=3) == moved(two, version=3)
    assert distance(one.tree()["train"].params, two.tree()["train"].params) == 0
    assert distance(one.tree()["critic"].params, two.tree()["critic"].params) == 0


def test_a_step_with_nothing_to_learn_leaves_what_is_steered() -> None:
    algorithm = {
        **{"kl_coefficient": 0.1, "kl_target": 0.01, "entropy_target": 1.0},
        "shaping": ({"overlong_filter": {"max_tokens": 1}},),
    }
    learner = learner_of(algorithm=algorithm, companions={"reference": copied(OTHER)})
    before = learner.numbers()
    stats = moved(learner)
    assert stats["train/tokens"] == 0 and learner.numbers() == before


def test_a_resumed_learner_continues_with_the_next_worked_answers() -> None:
    def answers() -> Any:
        for n in range(100):
            yield np.full(6, n % VOCAB, np.int32), np.arange(6) >= 3

    settings: dict[str, Any] = {"algorithm": {"supervised_coefficient": 1.0, "supervised_batch": 2}}
    one = learner_of(companions={"pairs": answers()}, **settings)
    for version in range(2):
        moved(one, version=version)
    two = learner_of(companions={"pairs": answers()}, **settings)
    two.restore(jax.tree.map(jnp.copy, one.tree()), one.numbers())
    assert moved(one, version=2) == moved(two, version=2)


def test_worked_answers_and_sampling_masks_go_together() -> None:
    groups = [
        replace(
            g,
            episodes=tuple(
                replace(
                    e,
                    kept=KeptTokens(
                        ids=np.tile(np.arange(VOCAB, dtype=np.int32), e.num_drawn),
                        starts=np.arange(e.num_drawn + 1, dtype=np.int32) * VOCAB,
                    ),
                )
                for e in g.episodes
            ),
        )
        for g in GROUPS
    ]
    pair = (np.arange(3, 11, dtype=np.int32), np.arange(8) >= 3)
    settings = {"supervised_coefficient": 1.0, "supervised_batch": 2}
    both = [
        moved(
            learner_of(
                algorithm=settings,
                companions={"pairs": iter(lambda: pair, None)},
                sampler_columns=SamplerColumns(mask_vocab=size),
            ),
            groups,
        )["train/loss"]
        for size in (None, VOCAB)
    ]
    assert both[0] == pytest.approx(both[1], rel=1e-6)


@pytest.mark.parametrize("kl_in", [pytest.param("loss", marks=pytest.mark.exhaustive), "reward"])
def test_a_reference_in_the_hosts_memory_has_the_same_log_probs(kl_in: str) -> None:
    algorithm = {"kl_coefficient": 0.5, "kl_in": kl_in, "kl": "k1" if kl_in == "reward" else "k3"}
    reports, weights = [], []
    for offload in (False, True):
        learner = learner_of(
            algorithm=algorithm,
            reference={"ema": 0.5},
            companions={"reference": copied(PARAMS)},
            offload_reference=offload,
        )
        reports.append([moved(learner), moved(learner, version=1)])
        weights.append(learner.params)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(learner.frozen.reference)}
        assert kinds == {"pinned_host" if offload else "device"}
    assert distance(*weights) < 1e-6
    for before, after in zip(*reports, strict=True):
        for key in ("train/loss", "policy/kl_reference", "train/grad_norm"):
            assert after[key] == pytest.approx(before[key], rel=1e-4, abs=1e-6)
    assert reports[1][1]["policy/kl_reference"] > 0


def test_a_critics_value_after_the_last_token_reaches_an_episode_that_was_cut() -> None:
    """Against the double sum in float64 with the critic's own scores of each episode alone."""
    cut = [
        replace(g, episodes=tuple(replace(e, stop=StopReason.LENGTH) for e in g.episodes[:2]))
        for g in GROUPS
    ]
    cut = [replace(g, scores=g.scores[:2]) for g in cut]
    seen = []

    def looking(data: StepData) -> StepAdvantages:
        seen.append(data)
        return gae(data, bootstrap=True)

    learner = learner_of(algorithm={"advantage": "gae"}, companions=critic_parts())
    assert learner.critic_state is not None
    of_critic = with_head(SPEC, PARAMS, "value", jax.random.key(2))
    scores_of = dict(of_critic)
    scores_of["value_head"] = {
        "kernel": jax.random.normal(jax.random.key(3), (16,)),
        "bias": jnp.ones(1),
    }
    learner.critic_state = CRITIC.step.init(scores_of)
    learner.credit = replace(learner.credit, advantage=looking)
    moved(learner, cut)
    (data,) = seen
    for g, values, last in zip(data.groups, data.values, data.last_values, strict=True):
        for e, v, end in zip(g.episodes, values, last, strict=True):
            ids = jnp.asarray(e.token_ids)[None]
            positions = jnp.arange(ids.shape[1])[None]
            tokens = TokenRows(ids, positions, jnp.ones_like(ids))
            alone = token_scores(SPEC, scores_of, tokens)[0]
            np.testing.assert_allclose(v[1:], alone[:-1], atol=1e-5)
            assert end == pytest.approx(float(alone[-1]), abs=1e-5) and abs(end) > 1e-3


@pytest.mark.parametrize("warming", [0, 1])
def test_the_learning_rate_ends_with_the_run_where_fewer_updates_are_made(warming: int) -> None:
    """8 mini-batches are asked for, and 6 sequences there: 6 updates a step, in 3 steps."""
    trainer = schema.TrainerSection(micro_batch_tokens=4 * ROW, logprob_chunk=32, schedule="linear")
    section = schema.AlgorithmSection(learning_rate=1e-2, minibatches=8, advantage="gae")
    settings = replace(SETTINGS, trainer=trainer)
    step = policy_update(SPEC, settings, section, total_steps=8 * (3 - warming))
    critic = make_critic(SPEC, settings, learning_rate=1e-2, total_steps=8 * 3)
    state = critic.step.init(critic_parts()["critic_state"].params)
    parts = {"critic": critic, "critic_state": state}
    settings = LearnerSettings(algorithm=section, row_length=ROW, critic_warmup=warming)
    companions = Companions(own_pass=PASS, **parts)
    learner = Learner(step, step.init(PARAMS), settings, companions)
    rates: dict[str, list[float]] = {"train": [], "critic": []}
    both: tuple[tuple[str, Update[Any]], ...] = (("train", step), ("critic", critic.step))
    for name, of in both:
        real = of.update

        def recorded(*args: Any, real: Any = real, name: str = name, **how: Any) -> Any:
            state, stats = real(*args, **how)
            rates[name].append(stats[f"{name}/learning_rate"])
            return state, stats

        of.update = recorded  # type: ignore[method-assign]
    reports = [moved(learner, GROUPS[:2], version=v) for v in range(3)]
    assert [r["train/missing_updates"] for r in reports] == [2, 2, 2]
    assert step.programs.accumulate._cache_size() <= 1, "one program for all mini-batches"
    assert [r["train/updates"] for r in reports] == [0] * warming + [6] * (3 - warming)
    for name, steps in (("train", 3 - warming), ("critic", 3)):
        made = 6 * steps
        wanted = [1e-2 * (1 - n / made) for n in range(made)]
        np.testing.assert_allclose(rates[name], wanted, rtol=1e-5)


class CountedPass:
    """The real pass; how often each kind of weights went through it."""

    def __init__(self, reference: Any) -> None:
        self.reference, self.passes = reference, {"reference": 0, "policy": 0}

    def logprobs(self, params: Any, *args: Any, **how: Any) -> Any:
        same = jax.tree.leaves(params)[0] is jax.tree.leaves(self.reference)[0]
        self.passes["reference" if same else "policy"] += 1
        return PASS.logprobs(params, *args, **how)


@pytest.mark.parametrize(
    ("settings", "before", "inside"),
    [
        ({"kl_in": "reward", "kl": "k1", "epochs": 1}, 1, 0),
        ({"kl_in": "reward", "kl": "k1", "epochs": 3}, 1, 0),
        ({"kl_in": "loss", "epochs": 1}, 0, 1),
        ({"kl_in": "loss", "epochs": 3, "minibatches": 2}, 1, 0),
    ],
    ids=str,
)
def test_the_reference_looks_at_a_step_once(
    settings: dict[str, Any], before: int, inside: int
) -> None:
    reference = copied(OTHER)
    counted = CountedPass(reference)
    learner = learner_of(
        algorithm={"kl_coefficient": 0.1, **settings},
        companions={"reference": reference, "own_pass": counted},
    )
    real, given = learner._step.update, []

    def update(*args: Any, **how: Any) -> Any:
        given.append(args[2].reference is not None)
        return real(*args, **how)

    learner._step.update = update  # type: ignore[method-assign]
    try:
        stats = moved(learner)
    finally:
        del learner._step.update  # the class's again, which other tests share
    assert counted.passes["reference"] == before
    assert sum(given) == inside and len(given) == stats["train/updates"]
    assert stats["policy/kl_reference"] > 0


def test_a_reference_looked_up_once_has_the_log_probs_of_every_update() -> None:
    """The same two epochs, and the reference in each of them."""
    settings = {"kl_coefficient": 0.5, "epochs": 2}
    results = []
    for inside in (False, True):
        learner = learner_of(algorithm=settings, companions={"reference": copied(OTHER)})
        if inside:
            others = learner.credit.columns - {"reference_logprobs"}
            learner.credit = replace(learner.credit, columns=others)
        results.append((moved(learner), learner.params))
    assert distance(results[0][1], results[1][1]) < 1e-5
    for key in ("policy/kl_reference", "train/loss"):
        assert results[0][0][key] == pytest.approx(results[1][0][key], rel=1e-4)


def test_process_rewards_of_groups_that_are_too_old_are_not_trained_on() -> None:
    def with_process(g: EpisodeGroup) -> EpisodeGroup:
        steps = [np.where(e.drawn, 0.3 * i, 0).astype(np.float32) for i, e in enumerate(g.episodes)]
        scores = [replace(s, process_rewards=r) for s, r in zip(g.scores, steps, strict=True)]
        return replace(g, scores=tuple(scores))

    judged = [with_process(g) for g in GROUPS]  # sampled by version 0
    young, old, bare = (learner_of(process_max_age=2) for _ in range(3))
    assert moved(young, judged, version=2)["process/too_old"] == 0
    assert moved(old, judged, version=3)["process/too_old"] == len(GROUPS)
    moved(bare, GROUPS, version=3)
    assert distance(old.params, bare.params) == 0
    assert distance(young.params, bare.params) > 0


@pytest.mark.parametrize("anchor", ["behavior", "proximal"])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_the_first_episodes_of_a_step_are_kept_as_the_trainer_saw_them(
    anchor: str, minibatches: int
) -> None:
    shaping = ({"cap": {"low": 0.0, "high": 0.5}},)
    settings = {"anchor": anchor, "shaping": shaping, "advantage": "group_mean"}
    learner = learner_of(algorithm={**settings, "minibatches": minibatches}, views_every=2)
    moved(learner)  # version 1 is not shown
    assert learner.views == []
    before = [np.asarray(learner.probe(e.token_ids)) for g in GROUPS[:2] for e in g.episodes[:2]]
    moved(learner, version=1)
    shown = [e for g in GROUPS[:2] for e in g.episodes[:2]]
    assert [s.episode for s in learner.views] == shown
    for view, logprobs in zip(learner.views, before, strict=True):
        np.testing.assert_allclose(view.logprobs[1:], logprobs, rtol=1e-5, atol=1e-5)
        (of,) = [g for g in GROUPS if any(e is view.episode for e in g.episodes)]
        rewards = np.minimum([s.reward for s in of.scores], 0.5)
        index = [e is view.episode for e in of.episodes].index(True)
        advantage = np.where(view.episode.drawn, rewards[index] - rewards.mean(), 0)
        np.testing.assert_allclose(view.advantages, advantage, atol=1e-6)
    moved(learner, version=2)
    assert learner.views == [], "what is old is not shown with newer samples"


def test_to_keep_what_the_trainer_saw_changes_nothing_of_what_is_trained() -> None:
    plain, watched = learner_of(), learner_of(views_every=1)
    assert moved(plain) == moved(watched)
    assert distance(plain.params, watched.params) == 0


# ---- loss components


COMPONENTS = {
    "near": {"loss": "squared_log_ratio", "coefficient": 0.5},
    "right": {"loss": "nll", "tokens": "right", "coefficient": 0.25},
    "bonus": {"loss": "entropy", "coefficient": 0.1},
}


def test_components_are_of_the_tokens_that_they_cover_and_in_the_loss() -> None:
    """Against NumPy, from the trainer's log-probs on."""
    stats = moved(learner_of(algorithm={"losses": COMPONENTS}))
    batch = pack_groups(GROUPS, None, ROW)
    policy = PASS.logprobs(PARAMS, batch).astype(np.float64)
    earned = [s.total for g in GROUPS for s in g.scores]
    right = batch.mask & (np.array([*earned, 0.0])[batch.sequence_ids] > 0.5)
    far = (policy - batch.behavior_logprobs)[batch.mask]
    wanted = {
        "loss/near": (far**2 / 2).mean(),
        "loss/right": -policy[right].mean(),
        "loss/bonus": -stats["policy/entropy"],
        "loss_tokens/near": batch.mask.sum(),
        "loss_tokens/right": right.sum(),
    }
    for key, value in wanted.items():
        assert stats[key] == pytest.approx(value, rel=1e-4), key
    terms = sum(one["coefficient"] * stats[f"loss/{name}"] for name, one in COMPONENTS.items())
    assert stats["train/loss"] == pytest.approx(stats["train/policy_loss"] + terms, rel=1e-4)
    assert stats["loss_coefficient/right"] == 0.25


@pytest.mark.parametrize("minibatches", [2, 5])
def test_components_are_the_same_however_many_updates_a_step_is_trained_in(
    minibatches: int,
) -> None:
    settings = {"learning_rate": 0.0, "losses": COMPONENTS}
    whole = moved(learner_of(algorithm=settings))
    parts = moved(learner_of(algorithm={**settings, "minibatches": minibatches, "epochs": 2}))
    for key in whole:
        if key.startswith(("loss/", "loss_tokens/")) or key == "train/loss":
            assert parts[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-6), key


def test_the_gradient_of_a_component_is_measured_when_due_over_the_whole_step() -> None:
    losses = {**COMPONENTS, "near": {**COMPONENTS["near"], "gradient_every": 2}}
    settings = {"learning_rate": 0.0, "losses": losses}
    learner = learner_of(algorithm=settings)
    stats = [moved(learner, version=v) for v in range(4)]
    assert ["loss_grad_norm/near" in one for one in stats] == [False, True, False, True]
    assert stats[1]["loss_grad_norm/near"] > 0
    assert not any("loss_grad_norm/right" in one for one in stats)
    parts = moved(learner_of(algorithm={**settings, "minibatches": 3, "epochs": 2}), version=1)
    whole = stats[1]["loss_grad_norm/near"]
    assert parts["loss_grad_norm/near"] == pytest.approx(whole, rel=1e-4)


def test_a_component_follows_its_ramp_from_step_to_step_also_when_restored() -> None:
    ramp = {"loss": "nll", "coefficient": 1.0, "coefficient_end": 0.0, "ramp_steps": 2}
    learner = learner_of(algorithm={"losses": {"nll": ramp}, "loss": "gpg"})
    weights = [moved(learner, version=v)["loss_coefficient/nll"] for v in range(3)]
    assert weights == [1.0, 0.5, 0.0]
    again = learner_of(algorithm={"losses": {"nll": ramp}, "loss": "gpg"})
    again.restore(learner_of().tree(), again.numbers())
    stats = moved(again, version=1)
    assert stats["loss_coefficient/nll"] == 0.5
    terms = 0.5 * stats["loss/nll"]
    assert stats["train/loss"] == pytest.approx(stats["train/policy_loss"] + terms, rel=1e-4)


def test_demonstrations_of_a_component_are_trained_on_as_those_with_a_coefficient() -> None:
    pair = (np.arange(3, 11, dtype=np.int32), np.arange(8) >= 3)
    given: dict[str, Any] = {"pairs": iter(lambda: pair, None)}
    named = {"sft": {"loss": "nll", "tokens": "demonstrations", "coefficient": 0.5}}
    new = learner_of(algorithm={"losses": named, "supervised_batch": 2}, companions=given)
    old = learner_of(
        algorithm={"supervised_coefficient": 0.5, "supervised_batch": 2}, companions=given
    )
    reports = [moved(one) for one in (new, old)]
    assert reports[0]["loss_tokens/sft"] == reports[1]["supervised/tokens"] == 10
    assert reports[0]["loss/sft"] == pytest.approx(reports[1]["supervised/loss"], rel=1e-5)
    assert reports[0]["train/loss"] == pytest.approx(reports[1]["train/loss"], rel=1e-5)
    assert distance(new.params, old.params) < 1e-5 < distance(new.params, learner_of().params)


def test_a_component_of_the_kl_is_the_kl_of_the_loss() -> None:
    reference = {"reference": copied(OTHER)}
    named = {"near": {"loss": "kl", "coefficient": 0.5}}
    new = learner_of(algorithm={"losses": named}, companions=reference)
    old = learner_of(algorithm={"kl_coefficient": 0.5}, companions=reference)
    reports = [moved(one) for one in (new, old)]
    assert reports[0]["loss/near"] == pytest.approx(reports[1]["policy/kl_reference"], rel=1e-5)
    assert distance(new.params, old.params) < 1e-6
