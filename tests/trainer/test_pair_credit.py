"""A step of learning from pairs equals the preference job's on the same pairs."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.algorithms.advantages import step_data
from jaxrl_async.algorithms.answer_pairs import keep_paired, pairs_of_step
from jaxrl_async.algorithms.shaping import shape
from jaxrl_async.config import schema
from jaxrl_async.config.algorithm_section import PairsSection
from jaxrl_async.data.preferences import PreferencePair
from jaxrl_async.mesh import make_slices
from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.frozen_models import copied
from jaxrl_async.trainer.learner import Companions, Learner, LearnerSettings
from jaxrl_async.trainer.learning_settings import LearningSettings, MicroSizes
from jaxrl_async.trainer.logprob_pass import LogprobPass
from jaxrl_async.trainer.objectives.policy_objective import policy_update
from jaxrl_async.trainer.objectives.preference_objective import PreferenceData, preference_update
from jaxrl_async.trainer.pack_pairs import pack_preference
from jaxrl_async.trainer.pair_credit import pair_algorithm
from jaxrl_async.trainer.update_programs import Frozen
from jaxrl_async.types import Episode, EpisodeGroup, Prompt, Score, StopReason, Ticket

pytestmark = pytest.mark.full

VOCAB, ROW, PROMPT = 24, 16, 2
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp=24), VOCAB
)
LINEAR = {"epsilon": 1.0, "max_grad_norm": 1e9, "beta1": 0.0, "beta2": 0.0}
"""AdamW whose step is nearly proportional to the gradient, so that gradients can be compared."""
PARAMS = init_params(SPEC, jax.random.key(0), jnp.float32)
REFERENCE = init_params(SPEC, jax.random.key(1), jnp.float32)
RATE = 1e-1


def settings_of(rows: int = 4, **axes: int) -> LearningSettings:
    trainer = schema.TrainerSection(micro_batch_tokens=rows * ROW, logprob_chunk=32, **LINEAR)
    mesh = make_slices(schema.MeshSection(trainer=schema.AxesSection(**axes))).trainer
    return LearningSettings(mesh=mesh, trainer=trainer, row_length=ROW)


def group(number: int, rewards: list[float]) -> EpisodeGroup:
    rng = np.random.default_rng(number)
    prompt = rng.integers(0, VOCAB, PROMPT)
    episodes = []
    for _ in rewards:
        token_ids = np.concatenate([prompt, rng.integers(0, VOCAB, rng.integers(3, 8))])
        sampled = np.arange(len(token_ids)) >= PROMPT
        episodes.append(
            Episode(
                token_ids=token_ids.astype(np.int32),
                drawn=sampled,
                logprobs=np.where(sampled, -3.0, 0).astype(np.float32),
                versions=np.where(sampled, 0, -1).astype(np.int32),
                stop=StopReason.EOS,
            )
        )
    return EpisodeGroup(
        prompt=Prompt(prompt_id=number, position=0, token_ids=prompt, text="", reference=""),
        episodes=tuple(episodes),
        scores=tuple(Score(reward=r) for r in rewards),
        ticket=Ticket(group=number, version=0),
    )


GROUPS = [
    group(0, [0.0, 1.0, 0.5, 1.0]),
    group(1, [1.0, 0.0]),
    group(2, [1.0, 1.0]),
    group(3, [0.2, 0.1, 0.3]),
]


def learner_of(pairs: dict, settings: LearningSettings, algorithm: dict | None = None) -> Learner:
    section = PairsSection(**pairs)
    given = schema.AlgorithmSection(**{"learning_rate": RATE, **(algorithm or {})})
    step = policy_update(SPEC, settings, pair_algorithm(given), total_steps=20)
    how = LearnerSettings(algorithm=given, row_length=ROW, pairs=section)
    parts = Companions(
        own_pass=LogprobPass(SPEC, settings),
        reference=copied(REFERENCE) if section.refers else None,
    )
    return Learner(step, step.init(PARAMS), how, parts)


def given_pairs(how: str) -> list[PreferencePair]:
    """The pairs of GROUPS as the preference job reads them."""
    kept = keep_paired(shape(step_data(GROUPS)), how=how, seed=0)
    episodes = [e for g in kept.data.groups for e in g.episodes]
    return [
        PreferencePair(
            prompt_ids=episodes[b].token_ids[:PROMPT],
            chosen_ids=episodes[b].token_ids[PROMPT:],
            rejected_ids=episodes[w].token_ids[PROMPT:],
        )
        for b, w in pairs_of_step(kept.data, kept.masks, how, 0)
    ]


def offline(loss: Any, how: str, settings: LearningSettings) -> tuple[Any, dict[str, float]]:
    step = preference_update(SPEC, settings, loss, learning_rate=RATE, total_steps=20)
    batch = pack_preference(given_pairs(how), ROW, step.micro_rows)
    refers = PairsSection(loss=loss).refers
    frozen = Frozen(reference=REFERENCE if refers else None)
    state, report = step.update(step.init(PARAMS), PreferenceData(batch), frozen)
    return state.params, report


def distance(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.abs(x - y).max()) for x, y in pairs)


CASES = [
    ({"dpo": {"beta": 0.5}}, "best_worst"),
    pytest.param("ipo", "all", marks=pytest.mark.exhaustive),
    pytest.param("ipo_average", "best_random", marks=pytest.mark.exhaustive),
    pytest.param("simpo", "all", marks=pytest.mark.exhaustive),
    pytest.param({"orpo": {"beta": 0.7}}, "best_worst", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("loss", "how"), CASES)
def test_a_step_is_that_of_the_preference_job_on_the_same_pairs(loss, how) -> None:
    wanted, of_job = offline(loss, how, settings_of())
    learner = learner_of({"loss": loss, "choose": how}, settings_of())
    report = learner.learn(GROUPS, 0)
    assert all(np.isfinite(v) and metric_of(k) for k, v in report.items()), report
    assert distance(wanted, PARAMS) > 1e-3
    assert distance(learner.params, wanted) < 1e-5
    assert report["train/grad_norm"] == pytest.approx(of_job["train/grad_norm"], rel=1e-5)
    for key in ("train/loss", "train/policy_loss"):
        assert report[key] == pytest.approx(of_job["train/loss"], rel=1e-5), key
    for key in of_job:
        if key.startswith("preference/"):
            assert report[key] == pytest.approx(of_job[key], rel=1e-5, abs=1e-6), key
    assert report["preference/ties"] == {"best_worst": 1, "best_random": 1, "all": 2}[how]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("rows", "axes"), [(1, {}), (4, {"fsdp": 2, "tensor": 2}), (2, {"data": 2, "context": 2})]
)
def test_a_step_is_the_same_on_any_mesh_and_in_any_micro_batches(rows, axes) -> None:
    pairs = {"loss": "dpo", "choose": "all"}
    one = learner_of(pairs, settings_of())
    other = learner_of(pairs, settings_of(rows, **axes))
    reports = [learner.learn(GROUPS, 0) for learner in (one, other)]
    assert distance(jax.device_get(one.params), jax.device_get(other.params)) < 1e-5
    assert reports[0]["train/loss"] == pytest.approx(reports[1]["train/loss"], rel=1e-5)


@pytest.mark.exhaustive
def test_other_terms_of_the_loss_are_averaged_as_ever() -> None:
    """With pairs that weigh nothing the entropy bonus alone is left, a mean over the tokens."""
    bonus = {"entropy_coefficient": 0.3}
    plain = learner_of({"loss": "dpo"}, settings_of())
    mixed = learner_of({"loss": "dpo"}, settings_of(), bonus)
    alone, both = plain.learn(GROUPS, 0), mixed.learn(GROUPS, 0)
    assert both["train/policy_loss"] == pytest.approx(alone["train/policy_loss"], rel=1e-6)
    expected = both["train/policy_loss"] - 0.3 * both["policy/entropy"]
    assert both["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert distance(plain.params, mixed.params) > 1e-5


@pytest.mark.exhaustive
def test_answers_of_several_contexts_count_with_all_their_tokens() -> None:
    """Cut in two contexts whose second begins anew, an answer's log-prob is that of both."""
    cut = GROUPS[1].episodes[0]
    length = len(cut.token_ids)
    twice = replace(
        cut,
        **{
            name: np.concatenate([getattr(cut, name)] * 2)
            for name in ("token_ids", "drawn", "logprobs", "versions")
        },
        starts=(0, length),
    )
    groups = [replace(GROUPS[1], episodes=(twice, GROUPS[1].episodes[1]))]
    settings = settings_of()
    learner = learner_of({"loss": {"dpo": {"beta": 0.5}}}, settings)
    report = learner.learn(groups, 0)

    def logprob(params: Any, episode: Episode) -> float:
        batch = pack_preference(
            [
                PreferencePair(
                    prompt_ids=episode.token_ids[:PROMPT],
                    chosen_ids=episode.token_ids[PROMPT:],
                    rejected_ids=episode.token_ids[:0],
                )
            ],
            ROW,
            1,
        )
        objective = preference_update(
            SPEC, settings, "simpo", learning_rate=0.0, total_steps=1
        ).objective
        micro = objective.micro_batches(PreferenceData(batch), MicroSizes((1,)))[0]
        logprobs = objective.logprobs(params, Frozen(), micro)
        return float(jnp.where(micro["mask"], logprobs, 0.0).sum())

    first, second = GROUPS[1].episodes
    margin = 2 * (logprob(PARAMS, first) - logprob(REFERENCE, first))
    margin -= logprob(PARAMS, second) - logprob(REFERENCE, second)
    assert report["train/loss"] == pytest.approx(np.log1p(np.exp(-0.5 * margin)), rel=1e-5)
    assert report["preference/chosen_length"] == 2 * first.num_drawn


@pytest.mark.exhaustive
def test_a_resumed_learner_continues_with_the_same_numbers() -> None:
    pairs = {"loss": "dpo", "choose": "best_random"}
    whole = learner_of(pairs, settings_of())
    whole.learn(GROUPS, 0)
    kept, numbers = jax.tree.map(jnp.copy, whole.tree()), whole.numbers()
    after = whole.learn(GROUPS, 1)
    resumed = learner_of(pairs, settings_of())
    resumed.restore(kept, numbers)
    assert resumed.learn(GROUPS, 1) == after
    assert distance(resumed.params, whole.params) == 0
