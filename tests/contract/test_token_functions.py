"""What every token loss, correction and KL estimator must do, whoever registers it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.trainer.corrections import correction
from jaxrl_async.trainer.kl import kl
from jaxrl_async.trainer.losses import TokenInputs, supervised_loss, token_loss

POLICY = sorted(token_loss)
ANY_LOSS = [
    *(token_loss[n] for n in POLICY),
    *(supervised_loss[n] for n in sorted(supervised_loss)),
]
SHAPE = (3, 7)


def inputs(seed: int = 0, *, on_policy: bool = False) -> TokenInputs:
    rng = np.random.default_rng(seed)
    policy = -rng.exponential(1.0, SHAPE)
    noise = 0.0 if on_policy else rng.normal(0, 0.5, SHAPE)
    return TokenInputs(
        policy_logprobs=jnp.asarray(policy, jnp.float32),
        behavior_logprobs=jnp.asarray(policy + noise, jnp.float32),
        advantages=jnp.asarray(rng.normal(0, 1, SHAPE), jnp.float32),
        mask=jnp.asarray(rng.random(SHAPE) < 0.6),
        versions=jnp.zeros(SHAPE, jnp.int32),
        entropy=jnp.asarray(rng.random(SHAPE), jnp.float32),
        reference_logprobs=jnp.asarray(policy + rng.normal(0, 0.5, SHAPE), jnp.float32),
    )


def poisoned(x: TokenInputs) -> TokenInputs:
    """NaN in every float outside the mask."""

    def spoil(a):
        return jnp.where(x.mask, a, jnp.nan) if jnp.issubdtype(a.dtype, jnp.floating) else a

    return TokenInputs(*(spoil(a) for a in x))


def gradient(function, x: TokenInputs):
    """d sum(function) / d policy_logprobs."""
    return jax.grad(lambda p: function(x._replace(policy_logprobs=p)).sum())(x.policy_logprobs)


def named(functions):
    return pytest.mark.parametrize("function", functions, ids=lambda f: f.__name__)


each_loss = named(ANY_LOSS)
each_policy_loss = named([token_loss[n] for n in POLICY])
each_correction = named([correction[n] for n in sorted(correction)])
each_kl = named([kl[n] for n in sorted(kl)])


@each_loss
def test_masked_tokens_give_no_loss_and_no_gradient_even_when_they_are_nan(function):
    x = inputs()
    clean, dirty = function(x), function(poisoned(x))
    np.testing.assert_array_equal(clean.loss, dirty.loss)
    np.testing.assert_array_equal(clean.clipped, dirty.clipped)
    assert (np.asarray(dirty.loss)[~np.asarray(x.mask)] == 0).all()
    assert not (np.asarray(dirty.clipped) & ~np.asarray(x.mask)).any()
    grads = np.asarray(gradient(lambda y: function(y).loss, poisoned(x)))
    np.testing.assert_array_equal(grads, gradient(lambda y: function(y).loss, x))
    assert (grads[~np.asarray(x.mask)] == 0).all()


@each_loss
def test_a_loss_is_float32_and_its_flags_are_bool(function):
    result = function(inputs())
    assert result.loss.dtype == jnp.float32 and result.loss.shape == SHAPE
    assert result.clipped.dtype == jnp.bool_ and result.clipped.shape == SHAPE


@each_policy_loss
def test_on_policy_gradient_is_the_policy_gradient(function):
    x = inputs(on_policy=True)
    expected = np.where(x.mask, -np.asarray(x.advantages), 0.0)
    np.testing.assert_allclose(gradient(lambda y: function(y).loss, x), expected, atol=1e-6)
    assert not np.asarray(function(x).clipped).any()


@each_loss
def test_order_of_tokens_does_not_matter(function):
    x = inputs()
    order = np.random.default_rng(1).permutation(SHAPE[1])
    moved = TokenInputs(*(a[:, order] for a in x))
    np.testing.assert_array_equal(function(moved).loss, function(x).loss[:, order])


@each_policy_loss
@pytest.mark.parametrize("shift", [1e4, -1e4, 60.0])
def test_huge_ratios_stay_finite(function, shift):
    x = inputs()
    x = x._replace(behavior_logprobs=x.policy_logprobs - shift)
    assert np.isfinite(function(x).loss).all()
    assert np.isfinite(gradient(lambda y: function(y).loss, x)).all()


@each_loss
def test_a_batch_with_nothing_to_learn_gives_zero(function):
    x = poisoned(inputs()._replace(mask=jnp.zeros(SHAPE, bool)))
    assert (np.asarray(function(x).loss) == 0).all()


@each_correction
def test_a_correction_is_one_on_policy(function):
    result = function(inputs(on_policy=True))
    assert (np.asarray(result.weights) == 1).all() and not np.asarray(result.truncated).any()


@each_correction
def test_a_correction_only_shrinks_and_has_no_gradient(function):
    x = inputs()
    x = x._replace(behavior_logprobs=x.behavior_logprobs - 1.0)
    weights = np.asarray(function(x).weights)
    assert ((weights >= 0) & (weights <= 1)).all() and weights.dtype == np.float32
    assert (np.asarray(gradient(lambda y: function(y).weights, x)) == 0).all()


@each_correction
def test_a_correction_does_not_look_at_masked_tokens(function):
    x = inputs()
    clean, dirty = function(x), function(poisoned(x))
    np.testing.assert_array_equal(clean.weights, dirty.weights)
    np.testing.assert_array_equal(clean.truncated, dirty.truncated)
    assert not (np.asarray(dirty.truncated) & ~np.asarray(x.mask)).any()


@pytest.mark.parametrize("shift", [1e4, 60.0])
@pytest.mark.parametrize(
    "correct", [correction[n] for n in sorted(correction)], ids=sorted(correction)
)
@each_policy_loss
def test_any_loss_with_any_correction_survives_huge_ratios(function, correct, shift):
    x = inputs()
    x = x._replace(behavior_logprobs=x.policy_logprobs - shift)
    grads = gradient(lambda y: correct(y).weights * function(y).loss, x)
    assert np.isfinite(grads).all()


@each_kl
def test_a_kl_estimate_is_zero_for_equal_policies_and_outside_the_mask(function):
    x = inputs()
    same = function(x._replace(reference_logprobs=x.policy_logprobs))
    np.testing.assert_allclose(same, 0.0, atol=1e-7)
    dirty = np.asarray(function(poisoned(x)))
    assert (dirty[~np.asarray(x.mask)] == 0).all() and dirty.dtype == np.float32
    grads = np.asarray(gradient(function, poisoned(x)))
    assert (grads[~np.asarray(x.mask)] == 0).all() and np.isfinite(grads).all()


@each_kl
@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_a_kl_estimate_stays_finite(function, shift):
    x = inputs()
    x = x._replace(reference_logprobs=x.policy_logprobs + shift)
    assert np.isfinite(function(x)).all() and np.isfinite(gradient(function, x)).all()
