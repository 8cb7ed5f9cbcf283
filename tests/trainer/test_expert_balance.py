"""The load of a mixture's experts: what is measured, the loss that evens it, and the correction."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of, tiny_params, tiny_spec

from jaxrl_async.algorithms.expert_load import (
    ExpertLoad,
    correction_step,
    load_balance_loss,
    load_measures,
)
from jaxrl_async.config import schema
from jaxrl_async.config.model_section import BalanceSection
from jaxrl_async.data.preferences import PreferencePair
from jaxrl_async.errors import ConfigError
from jaxrl_async.model.decoder import DecoderSettings, TokenRows, token_states
from jaxrl_async.model.families.parts import USUAL_ROUTER
from jaxrl_async.model.heads import with_head
from jaxrl_async.model.moe import all_odds, counting, route
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.policy_objective import PolicyData, policy_update
from jaxrl_async.trainer.objectives.preference_objective import PreferenceData, preference_update
from jaxrl_async.trainer.objectives.reward_objective import reward_update
from jaxrl_async.trainer.objectives.supervised_objective import supervised_update
from jaxrl_async.trainer.pack import TrainSequence, pack, pack_pairs
from jaxrl_async.trainer.pack_pairs import pack_preference
from jaxrl_async.trainer.update import Update

VOCAB, ROW, ROWS, EXPERTS, CHOSEN = 16, 32, 8, 8, 2
SIZES: dict[str, Any] = {
    "layers": 3, "width": 16, "head_dim": 8, "mlp": 8, "experts": EXPERTS,
    "experts_per_token": CHOSEN,
}  # fmt: skip
ROUTED = tiny_spec(VOCAB, family="qwen3_moe", **SIZES)
CORRECTED = tiny_spec(VOCAB, family="glm4_moe", **SIZES)
LOSS = BalanceSection(loss=0.5)
SMALL_STEPS = {"epsilon": 1.0, "max_grad_norm": 1e9, "beta1": 0.0, "beta2": 0.0}
"""AdamW whose step is nearly proportional to the gradient."""


def sequences() -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    return [
        TrainSequence(
            token_ids=rng.integers(0, VOCAB, n).astype(np.int32),
            mask=np.arange(n) > 2,
            behavior_logprobs=-3 - rng.random(n).astype(np.float32) / 5,
            versions=np.full(n, 3, np.int32),
            advantages=np.full(n, rng.normal(), np.float32),
        )
        for _ in range(ROWS)
        for n in (17, 12)
    ]


def packed(row: int = ROW) -> Any:
    return pack(sequences(), row)


def step_of(
    spec: ModelSpec,
    balance: BalanceSection,
    *,
    rows: int = ROWS,
    row: int = ROW,
    axes: dict[str, int] | None = None,
    make: Any = None,
    remat: str = "none",
    **trainer: Any,
) -> Update[Any]:
    given = {"micro_batch_tokens": rows * row, "logprob_chunk": 16, **SMALL_STEPS, **trainer}
    settings = LearningSettings(
        mesh=mesh_of(**(axes or {})),
        trainer=schema.TrainerSection(**given),
        row_length=row,
        balance=balance,
        remat=remat,
    )
    if make is not None:
        return make(spec, settings, learning_rate=1e-2, total_steps=10)
    algorithm = schema.AlgorithmSection(learning_rate=1e-2)
    return policy_update(spec, settings, algorithm, total_steps=10)


def updated(step: Update[Any], params: Any, data: Any = None) -> tuple[Any, dict[str, float]]:
    data = PolicyData(packed(), version=3) if data is None else data
    state, report = step.update(step.init(params), data)
    return jax.tree.map(np.asarray, state.params), report


def uneven(spec: ModelSpec) -> Any:
    """Weights whose routers prefer some experts: their first column is what tokens share."""
    params = tiny_params(spec)
    layers = params["layers"]
    skew = jnp.linspace(-1.0, 1.0, EXPERTS) * jnp.sign(layers["router"].sum(-1, keepdims=True))
    return {**params, "layers": {**layers, "router": layers["router"] + 0.3 * skew}}


def load_of(spec: ModelSpec, params: Any, batch: Any, **settings: Any) -> ExpertLoad:
    rows = TokenRows(batch.token_ids, batch.positions, batch.segment_ids)
    load = token_states(spec, params, rows, DecoderSettings(**settings)).load
    assert load is not None
    return load


# ---- the loss


def load_from(logits: Any, real: Any, learns: bool = True) -> ExpertLoad:
    """The load of layers whose routers give these logits."""
    loads = []
    for layer in logits:
        choose, seen = counting(route, jnp.asarray(real), learns=learns)
        choose(jnp.asarray(layer, jnp.float32), CHOSEN)
        loads += seen
    chosen, odds, tokens = (jnp.stack(a) for a in zip(*loads, strict=True))
    return ExpertLoad(chosen, odds, tokens[0])


@pytest.mark.full
def test_value_and_gradient_of_the_loss_are_transformers():
    torch = pytest.importorskip("torch")
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    rng = np.random.default_rng(1)
    logits, real = 2 * rng.normal(size=(3, 40, EXPERTS)), rng.random(40) < 0.7
    gates = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in logits]
    mask = torch.tensor(real[None], dtype=torch.float64)
    wanted = mixtral.load_balancing_loss_func(tuple(gates), EXPERTS, CHOSEN, mask)
    wanted.backward()

    def loss(logits: Any, each_layer: bool = False) -> Any:
        found = load_from(logits, real)
        return load_balance_loss(found.odds, found.chosen, found.tokens, each_layer=each_layer)

    got, gradient = jax.value_and_grad(loss)(jnp.float32(logits))
    np.testing.assert_allclose(got, wanted.item(), rtol=1e-6)
    for found, gate in zip(gradient, gates, strict=True):
        np.testing.assert_allclose(found, gate.grad.numpy(), atol=1e-8)
    assert np.abs(gradient[:, real]).max() > 1e-4 and not gradient[:, ~real].any()
    by_layer = [mixtral.load_balancing_loss_func((g,), EXPERTS, CHOSEN, mask).item() for g in gates]
    np.testing.assert_allclose(loss(logits, True), np.mean(by_layer), rtol=1e-6)
    measured = load_measures(load_from(logits, real))["experts/balance_loss"]
    np.testing.assert_allclose(measured, wanted.item(), rtol=1e-6)


def test_odds_sum_to_one_for_both_kinds_of_router():
    logits = jnp.float32(np.random.default_rng(0).normal(size=(5, EXPERTS)))
    for router in (USUAL_ROUTER, CORRECTED.router):
        np.testing.assert_allclose(all_odds(logits, router).sum(-1), 1, rtol=1e-6)
    assert not np.allclose(all_odds(logits, USUAL_ROUTER), all_odds(logits, CORRECTED.router))


def test_measures_of_an_even_and_of_a_one_sided_load():
    odds = np.full((2, 4), 3.0)
    even = load_measures(ExpertLoad(np.full((2, 4), 6), odds, np.int32(12)))
    assert even["experts/load_max"] == even["experts/load_worst"] == 1
    assert even["experts/load_entropy"] == pytest.approx(1) and even["experts/idle_share"] == 0
    assert even["experts/balance_loss"] == pytest.approx(2), "experts per token"
    one = load_measures(ExpertLoad(np.array([[6, 6, 6, 6], [24, 0, 0, 0]]), odds, np.int32(24)))
    assert one["experts/load_max"] == 2.5 and one["experts/load_worst"] == 4
    assert one["experts/load_entropy"] == pytest.approx(0.5) and one["experts/idle_share"] == 3 / 8
    assert load_measures(ExpertLoad(np.zeros((2, 4)), odds, np.int32(0))) == {}


# ---- in the decoder


@pytest.mark.full
def test_layers_are_counted_in_their_order_and_padding_is_not():
    spec = tiny_spec(VOCAB, family="glm4_moe", **{**SIZES, "layers": 4})
    assert spec.routed_layers == (1, 2, 3), "the first is dense"
    params, batch = uneven(spec), packed()
    load = load_of(spec, params, batch)
    real = int((batch.segment_ids > 0).sum())
    assert load.tokens == real < batch.segment_ids.size
    np.testing.assert_array_equal(load.chosen.sum(1), CHOSEN * real)
    np.testing.assert_allclose(load.odds.sum(1), real, rtol=1e-5)
    moved = jax.tree.map(jnp.copy, params)
    moved["layers"]["correction"] = moved["layers"]["correction"].at[2, 5].set(-9.0)
    other = load_of(spec, moved, batch)
    assert other.chosen[2, 5] == 0 and load.chosen[2, 5] > 0, "the last layer's expert is last"
    np.testing.assert_array_equal(other.chosen[:2], load.chosen[:2])


# ---- in updates


def assert_close(found: Any, wanted: Any) -> None:
    for (path, b), a in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True
    ):
        limit = 1e-5 * max(np.abs(b).max(), 1e-3)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=limit, err_msg=str(path))


@pytest.mark.full
@pytest.mark.exhaustive
def test_neither_micro_batches_nor_rows_change_a_balanced_update():
    params = uneven(ROUTED)
    wanted, report = updated(step_of(ROUTED, LOSS), params)
    plain, of_plain = updated(step_of(ROUTED, BalanceSection()), params)
    added = LOSS.loss * report["experts/balance_loss"]
    assert report["train/loss"] - of_plain["train/loss"] == pytest.approx(added, rel=1e-5)
    assert report["experts/balance_loss"] == pytest.approx(of_plain["experts/balance_loss"])
    moved = np.abs(wanted["layers"]["router"] - plain["layers"]["router"]).max()
    assert moved > 1e-5, "the routers learn from it"
    weights, result = updated(step_of(ROUTED, LOSS, rows=2), params)
    assert result["train/micro_batches"] > 1
    assert_close(weights, wanted)
    assert result["train/loss"] == pytest.approx(report["train/loss"], rel=1e-5)
    longer = PolicyData(packed(2 * ROW), version=3)
    step = step_of(ROUTED, LOSS, rows=3, row=2 * ROW, remat="layer")
    weights, result = updated(step, params, longer)
    assert_close(weights, wanted)
    assert result["experts/balance_loss"] == pytest.approx(report["experts/balance_loss"])


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"fsdp": 2, "expert": 2, "context": 2},
        {"expert": 4, "tensor": 2},
    ],
    ids=str,
)
def test_a_mesh_of_eight_balances_as_one_device_does(axes):
    both = BalanceSection(loss=0.5, bias_rate=0.01, each_layer=True)
    params = uneven(CORRECTED)
    wanted, report = updated(step_of(CORRECTED, both, rows=4), params)
    weights, result = updated(step_of(CORRECTED, both, rows=4, axes=axes, remat="dots"), params)
    assert_close(weights, wanted)
    for name in ("experts/balance_loss", "experts/load_max", "train/loss"):
        assert result[name] == pytest.approx(report[name], rel=1e-5), name


def pairs() -> list[PreferencePair]:
    rng = np.random.default_rng(3)
    ids = (rng.integers(1, VOCAB, n).astype(np.int32) for n in (4, 7, 5) * 6)
    return [
        PreferencePair(prompt_ids=prompt, chosen_ids=chosen, rejected_ids=rejected)
        for prompt, chosen, rejected in zip(ids, ids, ids, strict=True)
    ]


def worked(pair: PreferencePair) -> tuple[np.ndarray, np.ndarray]:
    """Return an answer after its prompt, and which of its tokens are trained."""
    token_ids = np.concatenate([pair.prompt_ids, pair.chosen_ids])
    return token_ids, np.arange(len(token_ids)) >= len(pair.prompt_ids)


@pytest.mark.full
@pytest.mark.parametrize(
    "job",
    [
        "sft",
        pytest.param("preference", marks=pytest.mark.exhaustive),
        pytest.param("reward_model", marks=pytest.mark.exhaustive),
    ],
)
def test_other_jobs_balance_over_all_of_their_micro_batches(job):
    makes = {"sft": supervised_update, "preference": preference_update}
    update_for = makes.get(job, reward_update)
    params, reports = uneven(ROUTED), []
    if job == "reward_model":
        params = with_head(ROUTED, params, "reward", jax.random.key(0))

    def make(*args: Any, **course: Any) -> Any:
        return update_for(*args, *(["orpo"] if job == "preference" else []), **course)

    for section, rows in ((LOSS, 8), (LOSS, 2), (BalanceSection(), 2)):
        step = step_of(ROUTED, section, rows=rows, make=make)
        if job == "sft":
            data: Any = pack_pairs([worked(p) for p in pairs()], ROW)
        else:
            data = pack_preference(pairs(), ROW, step.micro_rows)
            data = PreferenceData(data) if job == "preference" else data
        assert len(step.objective.micro_batches(data, step.sizes)) > 1 or rows == 8
        reports.append((*updated(step, params, data), step.measure(params, data)))
    (one, result, _), (several, again, measured), (_, plain, wanted) = reports
    assert_close(several, one)
    assert result["train/loss"] == pytest.approx(again["train/loss"], rel=1e-5)
    assert again["train/loss"] - plain["train/loss"] == pytest.approx(
        LOSS.loss * again["experts/balance_loss"], rel=1e-4
    )
    assert measured["train/loss"] == pytest.approx(wanted["train/loss"]), "held out: not added"


@pytest.mark.full
@pytest.mark.exhaustive
def test_balance_improves_and_without_it_does_not():
    maxima = {}
    for section in (LOSS, BalanceSection()):
        spec, params = ROUTED, uneven(ROUTED)
        step = step_of(spec, section, epsilon=1e-8, beta1=0.9, beta2=0.95, max_grad_norm=1.0)
        state, data = step.init(params), PolicyData(packed(), version=3)
        seen = []
        for _ in range(12):
            state, report = step.update(state, data)
            seen.append(report["experts/load_max"])
        maxima[section.loss] = (seen[0], seen[-1])
    assert maxima[LOSS.loss][0] == maxima[0.0][0]
    assert maxima[LOSS.loss][1] < maxima[LOSS.loss][0], maxima
    assert maxima[LOSS.loss][1] < maxima[0.0][1] - 0.2, maxima


# ---- the correction


@pytest.mark.full
def test_an_update_moves_each_correction_by_the_rate_towards_an_even_load():
    rate, params, batch = 0.01, uneven(CORRECTED), packed()
    load = load_of(CORRECTED, params, batch)
    section = BalanceSection(bias_rate=rate)
    decays = {"weight_decay": 0.5, "epsilon": 1e-8}
    for rows in (8, 2):
        weights, report = updated(step_of(CORRECTED, section, rows=rows, **decays), params)
        mean = CHOSEN * int(load.tokens) / EXPERTS
        wanted = params["layers"]["correction"] + rate * np.sign(mean - np.asarray(load.chosen))
        np.testing.assert_allclose(weights["layers"]["correction"], wanted, atol=1e-8)
    np.testing.assert_array_equal(
        correction_step(jnp.array([[3, 1, 2], [4, 4, 4]])), [[-1, 1, 0], [0, 0, 0]]
    )
    plain, _ = updated(step_of(CORRECTED, BalanceSection(), **decays), params)
    np.testing.assert_array_equal(plain["layers"]["correction"], params["layers"]["correction"])
    np.testing.assert_allclose(weights["layers"]["router"], plain["layers"]["router"], atol=1e-6)
    assert report["experts/load_max"] > 1


@pytest.mark.full
def test_a_skipped_update_moves_no_correction():
    params = uneven(CORRECTED)
    step = step_of(CORRECTED, BalanceSection(bias_rate=0.01))
    batch = packed()
    batch.advantages[:] = np.nan
    weights, report = updated(step, params, PolicyData(batch, version=3))
    assert report["train/skipped"] == 1
    np.testing.assert_array_equal(weights["layers"]["correction"], params["layers"]["correction"])


@pytest.mark.exhaustive
def test_the_correction_alone_evens_the_load():
    params, section = uneven(CORRECTED), BalanceSection(bias_rate=0.02)
    step = step_of(CORRECTED, section, epsilon=1e6)
    state, data, seen = step.init(params), PolicyData(packed(), version=3), []
    for _ in range(40):
        state, report = step.update(state, data)
        seen.append(report["experts/load_max"])
    assert seen[-1] < 1.25 < seen[0], seen


@pytest.mark.exhaustive
def test_masters_keep_steps_that_bfloat16_would_lose():
    params = uneven(CORRECTED)
    params["layers"]["correction"] = jnp.ones_like(params["layers"]["correction"])
    settings = LearningSettings(
        mesh=mesh_of(),
        trainer=schema.TrainerSection(micro_batch_tokens=ROWS * ROW),
        row_length=ROW,
        param_dtype=jnp.bfloat16,
        balance=BalanceSection(bias_rate=0.0005),
    )
    step = policy_update(CORRECTED, settings, schema.AlgorithmSection(), total_steps=10)
    state, data = step.init(params), PolicyData(packed(), version=3)
    for _ in range(3):
        state, _ = step.update(state, data)
    moved = np.abs(np.asarray(state.opt_state.masters["layers"]["correction"]) - 1)
    np.testing.assert_allclose(moved.max(), 3 * 0.0005, rtol=1e-3)
    assert state.params["layers"]["correction"].dtype == jnp.bfloat16


# ---- what is refused


@pytest.mark.full
@pytest.mark.parametrize(
    ("spec", "section", "refusal"),
    [
        (tiny_spec(VOCAB), LOSS, "is dense"),
        (ROUTED, BalanceSection(bias_rate=0.001), "routers lack"),
    ],
)
def test_a_model_that_cannot_be_balanced_is_refused(spec, section, refusal):
    with pytest.raises(ConfigError, match=refusal):
        step_of(spec, section)
