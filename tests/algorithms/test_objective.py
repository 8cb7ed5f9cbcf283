import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_inputs import token_inputs

from jaxrl_async.algorithms.losses import TokenInputs
from jaxrl_async.algorithms.objective import (
    make_recipe,
    mean_report,
    policy_loss,
    summarize,
    supervised_loss,
)
from jaxrl_async.config import schema
from jaxrl_async.errors import ConfigError

SHAPE = (4, 6)


@pytest.fixture
def x() -> TokenInputs:
    rng = np.random.default_rng(0)
    return token_inputs(rng, SHAPE, from_reference=0.3)._replace(
        versions=jnp.asarray(rng.integers(3, 6, SHAPE), jnp.int32),
        entropy=jnp.asarray(rng.random(SHAPE), jnp.float32),
    )


@pytest.fixture
def weights(x):
    return jnp.where(x.mask, 1 / x.mask.sum(), 0.0)


def recipe(**settings):
    return make_recipe(schema.AlgorithmSection(**settings))


def report(x, weights, version=5, **settings) -> dict[str, float]:
    return summarize([policy_loss(recipe(**settings), x, weights, jnp.int32(version))[1]])


@pytest.mark.full
def test_the_report_is_the_masked_means_and_extremes(x, weights):
    stats = report(x, weights)
    m = np.asarray(x.mask)
    d = (
        np.asarray(x.policy_logprobs, np.float64)[m]
        - np.asarray(x.behavior_logprobs, np.float64)[m]
    )
    fresh = np.asarray(x.versions)[m] == 5
    reference = np.asarray(x.policy_logprobs - x.reference_logprobs, np.float64)[m]
    expected = {
        "train/tokens": m.sum(),
        "policy/entropy": np.asarray(x.entropy)[m].mean(),
        "policy/ratio_mean": np.exp(d).mean(),
        "policy/ratio_max": np.exp(d).max(),
        "policy/ratio_min": np.exp(d).min(),
        "policy/k1_behavior": -d.mean(),
        "policy/k3_behavior": (np.exp(d) - 1 - d).mean(),
        "policy/kl_reference": (np.exp(-reference) - 1 + reference).mean(),
        "mismatch/mean": np.abs(d[fresh]).mean(),
        "mismatch/max": np.abs(d[fresh]).max(),
        "mismatch/all_mean": np.abs(d).mean(),
        "mismatch/all_max": np.abs(d).max(),
        "policy/truncated_share": (np.exp(d) > 2).mean(),
        "policy/weight_mean": np.minimum(np.exp(d), 2).mean(),
    }
    for key, value in expected.items():
        assert stats[key] == pytest.approx(value, rel=1e-4), key
    assert 0 < stats["policy/clip_share"] < 1


@pytest.mark.full
def test_the_loss_is_policy_loss_plus_kl_less_entropy(x, weights):
    plain = report(x, weights)
    stats = report(x, weights, kl_coefficient=0.5, entropy_coefficient=0.25, kl="k3")
    assert plain["train/loss"] == plain["train/policy_loss"] == stats["train/policy_loss"]
    expected = (
        stats["train/policy_loss"]
        + 0.5 * stats["policy/kl_reference"]
        - 0.25 * stats["policy/entropy"]
    )
    assert stats["train/loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_no_token_of_the_current_version_makes_no_mismatch_up(x, weights):
    stats = report(x, weights, version=9)
    assert "mismatch/mean" not in stats and "mismatch/max" not in stats
    assert stats["mismatch/all_mean"] > 0


@pytest.mark.full
def test_micro_batches_report_the_same_as_the_whole(x, weights):
    whole = report(x, weights)
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        part = jax.tree.map(lambda a, rows=rows: a[rows], x)
        parts.append(policy_loss(recipe(), part, weights[rows], jnp.int32(5))[1])
    split = summarize(parts)
    assert split.keys() == whole.keys()
    for key, value in whole.items():
        assert split[key] == pytest.approx(value, rel=1e-5, abs=1e-7), key


def test_nothing_to_learn_is_reported_as_nothing(x, weights):
    stats = report(x._replace(mask=jnp.zeros(SHAPE, bool)), weights)
    keys = ("train/loss", "train/policy_loss", "train/tokens", "train/sequences")
    assert stats == dict.fromkeys(keys, 0.0)


def test_a_supervised_report_is_the_mean_log_likelihood(x, weights):
    loss, totals = supervised_loss(x, weights)
    expected = -np.asarray(x.policy_logprobs)[np.asarray(x.mask)].mean()
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert summarize([totals])["train/loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("field", "kind"),
    [("loss", "token loss"), ("correction", "correction"), ("kl", "kl estimator")],
)
def test_an_unknown_function_in_the_recipe_is_a_config_error(field, kind):
    with pytest.raises(ConfigError, match=f"unknown {kind} 'nonsense'"):
        make_recipe(schema.AlgorithmSection(**{field: "nonsense"}))


@pytest.mark.full
def test_the_learning_weights_replace_missing_log_probs_of_the_sampler(x, weights):
    gaps = jnp.asarray(np.random.default_rng(1).random(SHAPE) < 0.4)
    unreported = x._replace(behavior_logprobs=jnp.where(gaps, jnp.nan, x.behavior_logprobs))
    own = x._replace(behavior_logprobs=jnp.where(gaps, x.policy_logprobs, x.behavior_logprobs))

    def loss(logprobs, inputs):
        filled = inputs._replace(policy_logprobs=logprobs)
        return policy_loss(recipe(), filled, weights, jnp.int32(5))[0]

    fixed = own._replace(behavior_logprobs=jax.lax.stop_gradient(own.behavior_logprobs))
    value, slope = jax.value_and_grad(loss)(x.policy_logprobs, unreported)
    wanted, wanted_slope = jax.value_and_grad(loss)(x.policy_logprobs, fixed)
    assert np.isfinite(value) and np.isfinite(slope).all()
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(slope, wanted_slope, rtol=1e-6)
    stats = report(unreported, weights)
    m, g = np.asarray(x.mask), np.asarray(gaps)
    assert stats["policy/recomputed_logprob_share"] == pytest.approx(g[m].mean())
    reported = np.abs(np.asarray(x.policy_logprobs - x.behavior_logprobs))[m & ~g]
    assert stats["mismatch/all_mean"] == pytest.approx(reported.mean(), rel=1e-5)


@pytest.mark.full
def test_a_steps_loss_is_the_plain_mean_of_its_parts_and_an_entropy_that_of_its_tokens():
    parts = [
        {"train/loss": 1.0, "policy/entropy": 1.0, "train/tokens": 1.0},
        {"train/loss": 3.0, "policy/entropy": 3.0, "train/tokens": 3.0},
    ]
    got = mean_report(parts)
    assert got["train/loss"] == 2.0 and got["policy/entropy"] == 2.5


def test_a_mean_over_the_tokens_of_a_component_or_of_demonstrations_is_weighted_by_these():
    names = ("loss/right", "loss/right/unsure", "loss_tokens/right")
    supervised = ("supervised/loss", "supervised/tokens")
    values = [(1.0, 1.0, 10.0, 2.0, 30.0), (2.0, 0.0, 90.0, 4.0, 10.0)]
    got = mean_report(
        [
            dict(zip((*names, *supervised), of, strict=True)) | {"train/tokens": 50.0}
            for of in values
        ]
    )
    assert got["loss/right/unsure"] == pytest.approx(0.1)
    assert got["supervised/loss"] == pytest.approx(2.5)
    assert got["loss/right"] == 1.5 and got["loss_tokens/right"] == 100.0
