"""The critic: its loss against NumPy, and what may change an update's numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.algorithms.value_loss import explained_variance, value_loss
from jaxrl_async.config import schema
from jaxrl_async.mesh import make_slices
from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.heads import HEAD, with_head
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.critic import Critic, make_critic
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.critic_objective import CriticData
from jaxrl_async.trainer.pack import pack_pairs

pytestmark = pytest.mark.full

VOCAB, ROW = 12, 16
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=1, width=32, heads=4, kv_heads=2, head_dim=8, mlp=48), VOCAB
)
LINEAR = {"epsilon": 1.0, "max_grad_norm": 1e9, "beta1": 0.0, "beta2": 0.0}
"""AdamW whose step is nearly proportional to the gradient, so that gradients can be compared."""
_CRITICS: dict[str, Critic] = {}


def critic_of(axes: dict | None = None, rows: int = 4, *, clip: float | None = 0.2, **trainer: Any):
    key = repr((axes, rows, clip, trainer))
    if key not in _CRITICS:
        section = {"micro_batch_tokens": rows * ROW, **trainer}
        mesh = make_slices(schema.MeshSection(trainer=schema.AxesSection(**(axes or {})))).trainer
        settings = LearningSettings(
            mesh=mesh,
            trainer=schema.TrainerSection(**section),
            row_length=ROW,
        )
        _CRITICS[key] = make_critic(SPEC, settings, learning_rate=1e-2, total_steps=100, clip=clip)
    return _CRITICS[key]


@pytest.fixture(scope="module")
def params() -> Any:
    made = with_head(SPEC, init_params(SPEC, jax.random.key(0)), "value", jax.random.key(1))
    kernel = jax.random.normal(jax.random.key(2), (SPEC.width,)) / 6
    return {**made, HEAD: {**made[HEAD], "kernel": kernel}}


def batch_of(num: int = 12, seed: int = 0, order: int = 1):
    rng = np.random.default_rng(seed)
    pairs = []
    for length in rng.integers(4, ROW + 1, num):
        mask = np.arange(length) >= 2
        pairs.append((rng.integers(0, VOCAB, length).astype(np.int32), mask))
    return pack_pairs(pairs[::order], ROW)


BATCH = batch_of()


def returns_of(batch) -> np.ndarray:
    """A function of the state: 1 where the token before is in the vocabulary's upper half."""
    before = np.pad(batch.token_ids[:, :-1], ((0, 0), (1, 0)))
    return np.where(batch.mask, before >= VOCAB // 2, np.nan).astype(np.float32)


def copied(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)


def assert_close(a: Any, b: Any, tolerance: float) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=tolerance, rtol=tolerance)


# ---- formulas


def naive_loss(v, old, r, clip):
    if clip is None:
        return 0.5 * (v - r) ** 2
    bounded = old + np.clip(v - old, -clip, clip)
    return 0.5 * np.maximum((v - r) ** 2, (bounded - r) ** 2)


@pytest.mark.parametrize("clip", [None, 0.2, 1e9])
def test_the_loss_and_its_gradient_are_those_of_the_equation(clip):
    v, old, r = np.random.default_rng(0).normal(size=(3, 4, 6))
    mask = np.random.default_rng(1).random((4, 6)) < 0.7

    def total(values):
        return value_loss(values, jnp.asarray(old), jnp.asarray(r), mask, clip=clip).loss.sum()

    got = value_loss(jnp.asarray(v), jnp.asarray(old), jnp.asarray(r), mask, clip=clip)
    np.testing.assert_allclose(got.loss, np.where(mask, naive_loss(v, old, r, clip), 0), rtol=1e-5)
    step = 1e-5
    numeric = (naive_loss(v + step, old, r, clip) - naive_loss(v - step, old, r, clip)) / (2 * step)
    np.testing.assert_allclose(jax.grad(total)(jnp.asarray(v)), mask * numeric, atol=1e-4)
    if clip == 0.2:
        cut = mask & (naive_loss(v, old, r, clip) > naive_loss(v, old, r, None))
        np.testing.assert_array_equal(got.clipped, cut)
        assert cut.any()
    else:
        assert not got.clipped.any()


def test_what_is_not_trained_may_be_nan():
    mask = jnp.array([[True, False]])
    arrays = [jnp.array([[x, jnp.nan]]) for x in (0.5, 0.4, 1.0)]

    def total(values):
        return value_loss(values, *arrays[1:], mask).loss.sum()

    value, grads = jax.value_and_grad(total)(arrays[0])
    assert np.isfinite(value) and np.isfinite(grads).all() and grads[0, 1] == 0


def test_explained_variance_is_one_for_the_truth_and_zero_for_a_constant():
    returns = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    mask = np.ones((3, 5), bool)
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(returns + 7, returns, mask) == pytest.approx(1)
    assert explained_variance(np.full_like(returns, 3), returns, mask) == pytest.approx(0)
    assert explained_variance(2 * returns, returns, mask) == pytest.approx(0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3)
    assert np.isnan(explained_variance(returns, np.ones_like(returns), mask))
    assert np.isnan(explained_variance(returns, returns, ~mask))
    assert np.isnan(explained_variance(returns, np.where(mask, np.inf, returns), mask))


# ---- updates


def test_a_simple_value_function_is_learned(params):
    (step, values_of), returns = critic_of(), returns_of(BATCH)
    state = step.init(params)
    losses = []
    for _ in range(60):
        values, _ = values_of(state.params, BATCH)
        state, stats = step.update(state, CriticData(BATCH, values, returns))
        losses.append(stats["critic/loss"])
    assert losses[-1] < 0.05 * losses[0]
    assert stats["critic/explained_variance"] > 0.9
    assert stats["critic/return_mean"] == pytest.approx(np.nanmean(returns), rel=1e-5)
    assert all(metric_of(key) for key in stats)
    assert int(state.step) == 60 and stats["critic/skipped"] == 0


def test_values_come_in_the_batchs_order_and_do_not_depend_on_micro_batches(params):
    whole, split = (critic_of(rows=r).values(params, BATCH)[0] for r in (64, 1))
    assert whole.shape == BATCH.mask.shape and whole.dtype == np.float32
    np.testing.assert_allclose(whole, split, atol=1e-5, rtol=1e-5)
    assert not whole[BATCH.positions == 0].any() and (whole[BATCH.mask] != 0).all()


@pytest.mark.parametrize(
    "axes", [None, {"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2}], ids=["one", "ft", "df"]
)
def test_micro_batches_and_sharding_do_not_change_loss_or_gradient(params, axes):
    values = np.zeros(BATCH.mask.shape, np.float32)
    results = []
    for shape, rows in ((None, 64), (axes, 1)):
        step = critic_of(shape, rows, **LINEAR).step
        data = CriticData(BATCH, values, returns_of(BATCH))
        state, stats = step.update(step.init(params), data)
        results.append((copied(state.params), stats))
    assert_close(results[0][0], results[1][0], 1e-6)
    for key in ("critic/loss", "critic/grad_norm", "critic/clip_share", "critic/value_mean"):
        assert results[1][1][key] == pytest.approx(results[0][1][key], rel=1e-5, abs=1e-6), key


def test_packing_does_not_change_the_update(params):
    ends = []
    for batch in (BATCH, batch_of(order=-1)):
        step = critic_of(clip=None, **LINEAR).step
        zeros = np.zeros(batch.mask.shape, np.float32)
        state, _ = step.update(step.init(params), CriticData(batch, zeros, returns_of(batch)))
        ends.append(copied(state.params))
    assert_close(*ends, 1e-6)


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(params):
    (step, values_of), returns = critic_of(), returns_of(BATCH)
    state = step.init(params)
    before = copied(state)
    broken = returns.copy()
    broken[BATCH.mask.nonzero()[0][0], BATCH.mask.nonzero()[1][0]] = np.inf
    values, _ = values_of(state.params, BATCH)
    state, stats = step.update(state, CriticData(BATCH, values, broken))
    assert stats["critic/skipped"] == 1
    assert_close(before, copied(state), 0)
    state, stats = step.update(state, CriticData(BATCH, values, returns))
    assert stats["critic/skipped"] == 0 and int(state.step) == 1


def test_the_state_is_donated_and_the_callers_weights_are_not(params):
    step = critic_of().step
    state = step.init(params)
    zeros = np.zeros(BATCH.mask.shape, np.float32)
    moved, _ = step.update(state, CriticData(BATCH, zeros, returns_of(BATCH)))
    assert all(p.is_deleted() for p in jax.tree.leaves(state.params))
    assert not any(p.is_deleted() for p in jax.tree.leaves((params, moved)))
