"""Preference and reward updates on a tiny decoder: what may change their numbers, what must not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.data.preferences import PreferencePair, mismatched
from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.mesh import make_slices
from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.model.decoder import hidden_states, init_params, output_head
from jaxrl_async.model.heads import HEAD, with_head
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.kl_baseline import BaselinePass
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.preference_objective import (
    PreferenceData,
    PreferenceObjective,
    preference_update,
)
from jaxrl_async.trainer.objectives.reward_objective import reward_update
from jaxrl_async.trainer.pack_pairs import PreferenceBatch, pack_preference
from jaxrl_async.trainer.update import Update
from jaxrl_async.trainer.update_programs import NOTHING_FROZEN, Frozen

pytestmark = pytest.mark.full

VOCAB, ROW = 14, 16
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=1, width=32, heads=4, kv_heads=2, head_dim=8, mlp=48), VOCAB
)
LINEAR = {"epsilon": 1.0, "max_grad_norm": 1e9, "beta1": 0.0, "beta2": 0.0}
"""AdamW whose step is nearly proportional to the gradient, so that gradients can be compared."""
TWO_MESHES = [
    {"fsdp": 2, "tensor": 2},
    pytest.param({"data": 2, "fsdp": 2}, marks=pytest.mark.exhaustive),
]
_STEPS: dict[str, Any] = {}


def step_of(
    loss: Any = None, axes: dict | None = None, rows: int = 4, **trainer: Any
) -> Update[Any]:
    """A step of these settings, the same one each time; no loss: of a reward model."""
    key = repr((loss, axes, rows, trainer))
    if key not in _STEPS:
        section = {"micro_batch_tokens": rows * ROW, "logprob_chunk": 32, **trainer}
        mesh = make_slices(schema.MeshSection(trainer=schema.AxesSection(**(axes or {})))).trainer
        settings = LearningSettings(
            mesh=mesh, trainer=schema.TrainerSection(**section), row_length=ROW
        )
        course = {"learning_rate": 1e-2, "total_steps": 100}
        _STEPS[key] = (
            reward_update(SPEC, settings, **course)
            if loss is None
            else preference_update(SPEC, settings, loss, **course)
        )
    return _STEPS[key]


def packed(step: Update[Any], pairs: list[PreferencePair]) -> PreferenceBatch:
    return pack_preference(pairs, ROW, step.micro_rows)


def data_of(step, params, pairs, frozen=NOTHING_FROZEN, wrong=None) -> Any:
    """What the step learns of the pairs; a baseline is estimated on the wrong ones."""
    if not isinstance(step.objective, PreferenceObjective):
        return packed(step, pairs)
    others = packed(step, wrong or mismatched(pairs)) if frozen.reference is not None else None
    return BaselinePass(step)(params, frozen, PreferenceData(packed(step, pairs), others))


@pytest.fixture(scope="module")
def params() -> Any:
    return init_params(SPEC, jax.random.key(0))


@pytest.fixture(scope="module")
def frozen() -> Any:
    return init_params(SPEC, jax.random.key(7))


@pytest.fixture(scope="module")
def reward_params(params) -> Any:
    return with_head(SPEC, params, "reward", jax.random.key(1))


def pairs_of(num: int = 9, seed: int = 0) -> list[PreferencePair]:
    """Chosen answers have tokens below 7, rejected ones from 7; an end token 0 each."""
    rng = np.random.default_rng(seed)

    def answer(low: int) -> np.ndarray:
        ids = rng.integers(low, low + 6, rng.integers(1, 7))
        return np.append(ids, 0).astype(np.int32)

    return [
        PreferencePair(
            prompt_ids=rng.integers(1, VOCAB, rng.integers(2, 9)).astype(np.int32),
            chosen_ids=answer(1),
            rejected_ids=answer(7),
        )
        for _ in range(num)
    ]


PAIRS = pairs_of()


def update(step, params, pairs, frozen=None, wrong=None):
    """(weights, report) after one update."""
    where = step.programs.state_shardings.params
    read = Frozen(None if frozen is None else jax.device_put(frozen, where))
    state = step.init(params)
    state, stats = step.update(state, data_of(step, state.params, pairs, read, wrong), read)
    return jax.tree.map(np.array, state.params), stats


def assert_close(a: Any, b: Any, tolerance: float) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=tolerance, rtol=tolerance)


KEYS = ("train/loss", "train/grad_norm", "preference/accuracy", "preference/margin", "train/tokens")


def same_report(a: dict[str, float], b: dict[str, float]) -> None:
    for key in KEYS:
        assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-6), key


# ---- policies


def answer_logprob(params, prompt, answer) -> float:
    """Through the whole vocabulary, one sequence alone."""
    ids = np.concatenate([prompt, answer])
    padded = jnp.asarray(np.pad(ids, (0, ROW - len(ids)))[None])
    hidden = _hidden(params, padded)
    logprobs = np.asarray(jax.nn.log_softmax(hidden[0] @ output_head(SPEC, params)), np.float64)
    at = np.arange(len(prompt) - 1, len(ids) - 1)
    return float(logprobs[at, answer].sum())


@jax.jit
def _hidden(params, tokens):
    positions = jnp.arange(tokens.shape[1])[None]
    return hidden_states(SPEC, params, tokens, positions, jnp.ones_like(tokens))


def log_ratio(params, frozen, prompt, answer) -> float:
    return answer_logprob(params, prompt, answer) - answer_logprob(frozen, prompt, answer)


def test_the_loss_of_dpo_is_that_of_each_sequence_alone(params, frozen):
    _, stats = update(step_of("dpo"), params, PAIRS, frozen)
    margins = np.array(
        [
            log_ratio(params, frozen, p.prompt_ids, p.chosen_ids)
            - log_ratio(params, frozen, p.prompt_ids, p.rejected_ids)
            for p in PAIRS
        ]
    )
    assert stats["train/loss"] == pytest.approx(np.log1p(np.exp(-0.1 * margins)).mean(), rel=1e-5)
    assert stats["preference/margin"] == pytest.approx(0.1 * margins.mean(), rel=1e-4)
    assert stats["preference/accuracy"] == pytest.approx((margins > 0).mean())
    assert stats["preference/pairs"] == len(PAIRS)
    assert all(metric_of(key) for key in stats)
    assert stats["train/tokens"] == sum(len(a) for p in PAIRS for a in p.answers)


def test_the_loss_of_kto_has_the_baseline_of_mismatched_answers(params, frozen):
    wrong = mismatched(PAIRS)[::2]
    for policy, other in ((params, frozen), (frozen, params)):
        _, stats = update(step_of({"kto": {"beta": 0.3}}), policy, PAIRS, other, wrong)
        ratios = [log_ratio(policy, other, p.prompt_ids, a) for p in wrong for a in p.answers]
        z0 = max(0.0, np.mean(ratios))
        assert stats["preference/kl_baseline"] == pytest.approx(z0, abs=1e-5)
        good = [log_ratio(policy, other, p.prompt_ids, p.chosen_ids) for p in PAIRS]
        bad = [log_ratio(policy, other, p.prompt_ids, p.rejected_ids) for p in PAIRS]
        terms = [*(0.3 * (np.array(good) - z0)), *(0.3 * (z0 - np.array(bad)))]
        wanted = np.mean(1 - 1 / (1 + np.exp(-np.array(terms))))
        assert stats["train/loss"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("loss", ["dpo", "kto", "orpo"])
def test_micro_batches_and_order_change_neither_loss_nor_gradient(params, frozen, loss):
    whole = update(step_of(loss, rows=32, **LINEAR), params, PAIRS, frozen)
    split = update(step_of(loss, rows=2, **LINEAR), params, PAIRS[::-1], frozen, mismatched(PAIRS))
    assert_close(whole[0], split[0], 2e-6)
    same_report(whole[1], split[1])


@pytest.mark.parametrize("axes", TWO_MESHES)
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_sharding_changes_neither_loss_nor_gradient(params, frozen, loss, axes):
    one = update(step_of(loss, rows=32, **LINEAR), params, PAIRS, frozen)
    many = update(step_of(loss, axes, rows=2, **LINEAR), params, PAIRS, frozen)
    assert_close(one[0], many[0], 2e-6)
    same_report(one[1], many[1])


@pytest.mark.parametrize(
    "loss",
    [
        "dpo",
        "kto",
        *(
            pytest.param(x, marks=pytest.mark.exhaustive)
            for x in ("simpo", {"orpo": {"beta": 2.0}})
        ),
    ],
    ids=str,
)
def test_a_preference_is_learned_and_held_out_pairs_show_it(params, loss):
    step, frozen = step_of(loss), Frozen(params)
    held_out, wrong = pairs_of(seed=5), mismatched(PAIRS)
    state = step.init(params)
    data = data_of(step, state.params, held_out, frozen, wrong)
    before = step.measure(state.params, data, frozen)
    for _ in range(12):
        data = data_of(step, state.params, PAIRS, frozen, wrong)
        state, stats = step.update(state, data, frozen)
    data = data_of(step, state.params, held_out, frozen, wrong)
    after = step.measure(state.params, data, frozen)
    assert stats["preference/accuracy"] == 1
    assert after["preference/accuracy"] > max(before["preference/accuracy"], 0.7)
    assert after["preference/margin"] > before["preference/margin"] + 0.1
    assert int(state.step) == 12


def test_kto_learns_from_answers_that_were_judged_alone(params, reward_params, frozen):
    """Half the pairs give half the terms; together they are the whole loss."""
    empty = np.zeros(0, np.int32)
    alone = [
        PreferencePair(
            prompt_ids=p.prompt_ids,
            chosen_ids=p.chosen_ids if good else empty,
            rejected_ids=empty if good else p.rejected_ids,
        )
        for p in PAIRS
        for good in (True, False)
    ]
    step = step_of("kto", **LINEAR)
    whole = update(step, params, PAIRS, frozen, mismatched(PAIRS))
    halves = update(step, params, alone, frozen, mismatched(PAIRS))
    assert_close(whole[0], halves[0], 2e-6)
    assert whole[1]["train/loss"] == pytest.approx(halves[1]["train/loss"], rel=1e-5)
    assert "preference/accuracy" not in halves[1]
    assert halves[1]["preference/chosen_reward"] == pytest.approx(
        whole[1]["preference/chosen_reward"], rel=1e-4
    )
    for other, weights in (("dpo", params), (None, reward_params)):
        refusing = step_of(other)
        with pytest.raises(DataError, match="18 of 18 preference pairs have one answer only"):
            refusing.update(refusing.init(weights), data_of(refusing, weights, alone))


def test_what_a_loss_needs_is_named(params):
    step = step_of("dpo")
    with pytest.raises(ConfigError, match="needs a reference"):
        step.update(step.init(params), data_of(step, params, PAIRS))
    with pytest.raises(ConfigError, match="did you mean 'simpo'"):
        step_of("smpo")


def test_at_the_reference_nothing_is_known_and_no_step_is_skipped(params):
    _, stats = update(step_of("dpo"), params, PAIRS, params)
    assert stats["train/loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert stats["preference/margin"] == 0 and stats["train/skipped"] == 0


def test_a_step_that_is_not_finite_changes_nothing(params):
    broken = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)
    after, stats = update(step_of("dpo"), params, PAIRS, broken)
    assert stats["train/skipped"] == 1
    assert_close(after, params, 0)


# ---- reward models


def test_a_reward_model_learns_which_answers_are_better(reward_params):
    step = step_of()
    state = step.init(reward_params)
    for _ in range(12):
        state, stats = step.update(state, packed(step, PAIRS))
    held_out = step.measure(state.params, packed(step, pairs_of(seed=5)))
    assert stats["preference/accuracy"] == 1 and stats["preference/margin"] > 1
    assert held_out["preference/accuracy"] > 0.85


def test_the_loss_of_a_reward_model_is_that_of_each_sequence_alone(reward_params):
    _, stats = update(step_of(), reward_params, PAIRS)

    def score(prompt, answer):
        ids = np.concatenate([prompt, answer])
        padded = jnp.asarray(np.pad(ids, (0, ROW - len(ids)))[None])
        hidden = np.asarray(_hidden(reward_params, padded))[0, len(ids) - 1]
        return float(hidden @ np.asarray(reward_params[HEAD]["kernel"]))

    margins = np.array(
        [score(p.prompt_ids, p.chosen_ids) - score(p.prompt_ids, p.rejected_ids) for p in PAIRS]
    )
    assert stats["train/loss"] == pytest.approx(np.log1p(np.exp(-margins)).mean(), rel=1e-5)
    assert stats["preference/margin"] == pytest.approx(margins.mean(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("axes", [None, *TWO_MESHES])
def test_neither_packing_nor_sharding_changes_a_reward_update(reward_params, axes):
    one = update(step_of(rows=32, **LINEAR), reward_params, PAIRS)
    many = update(step_of(None, axes, rows=2, **LINEAR), reward_params, PAIRS[::-1])
    assert_close(one[0], many[0], 2e-6)
    same_report(one[1], many[1])


def test_a_micro_batch_has_room_for_both_answers_of_any_pair():
    assert step_of("dpo", rows=1).micro_rows == 2
    assert step_of("dpo", {"data": 2, "fsdp": 2}, rows=1).micro_rows == 4
    longest = np.ones(ROW - 1, np.int32)
    pair = PreferencePair(prompt_ids=longest[:1], chosen_ids=longest, rejected_ids=longest)
    packed(step_of("dpo", rows=1), [pair])
