"""What every token loss, correction and KL estimator must do, whoever registers it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.algorithms.aggregate import mean_over_sequence
from jaxrl_async.algorithms.corrections import correction
from jaxrl_async.algorithms.kl import kl
from jaxrl_async.algorithms.losses import NO_RATIO, TokenInputs, supervised_loss, token_loss

POLICY = sorted(token_loss)
ANY_LOSS = [
    *(token_loss[n] for n in POLICY),
    *(supervised_loss[n] for n in sorted(supervised_loss)),
]
SHAPE = (3, 7)
SEGMENTS = jnp.asarray([[1, 1, 1, 1, 1, 1, 1], [1, 1, 2, 2, 2, 3, 0], [1, 2, 2, 2, 2, 0, 0]])


def inputs(seed: int = 0, *, on_policy: bool = False) -> TokenInputs:
    rng = np.random.default_rng(seed)
    policy = -rng.exponential(1.0, SHAPE)
    ages = np.zeros(SHAPE) if on_policy else rng.integers(0, 9, SHAPE)
    noise = 0.0 if on_policy else rng.normal(0, 0.5, SHAPE)
    return TokenInputs(
        policy_logprobs=jnp.asarray(policy, jnp.float32),
        behavior_logprobs=jnp.asarray(policy + noise, jnp.float32),
        advantages=jnp.asarray(rng.normal(0, 1, SHAPE), jnp.float32),
        mask=jnp.asarray(rng.random(SHAPE) < 0.6) & (SEGMENTS > 0),
        versions=jnp.zeros(SHAPE, jnp.int32),
        entropy=jnp.asarray(rng.random(SHAPE), jnp.float32),
        reference_logprobs=jnp.asarray(policy + rng.normal(0, 0.5, SHAPE), jnp.float32),
        segment_ids=SEGMENTS,
        ages=jnp.asarray(ages, jnp.int32),
        reference_divergence=jnp.asarray(rng.exponential(0.1, SHAPE), jnp.float32),
        covariance_rank=jnp.asarray(rng.random(SHAPE), jnp.float32),
    )


def poisoned(x: TokenInputs) -> TokenInputs:
    """NaN in every float outside the mask."""

    def spoil(a):
        return jnp.where(x.mask, a, jnp.nan) if jnp.issubdtype(a.dtype, jnp.floating) else a

    return jax.tree.map(spoil, x)


def gradient(function, x: TokenInputs):
    """d sum(function) / d policy_logprobs."""
    return jax.grad(lambda p: function(x._replace(policy_logprobs=p)).sum())(x.policy_logprobs)


def named(functions):
    return pytest.mark.parametrize("function", functions, ids=lambda f: f.__name__)


each_loss = named(ANY_LOSS)
each_policy_loss = named([token_loss[n] for n in POLICY])
each_correction = named([correction[n] for n in sorted(correction)])
each_kl = named([kl[n] for n in sorted(kl)])


@pytest.mark.full
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


@pytest.mark.full
@each_loss
def test_a_loss_is_float32_and_its_flags_are_bool(function):
    result = function(inputs())
    assert result.loss.dtype == jnp.float32 and result.loss.shape == SHAPE
    assert result.clipped.dtype == jnp.bool_ and result.clipped.shape == SHAPE


@pytest.mark.full
@each_policy_loss
def test_on_policy_gradient_is_the_policy_gradient(function):
    x = inputs(on_policy=True)
    advantages = np.asarray(x.advantages, np.float64)
    if token_loss.facts_of(function).gradient_of == "sequence":
        advantages = np.array(mean_over_sequence(x.advantages, x.mask, x.segment_ids))
    expected = np.where(x.mask, -advantages, 0.0)
    np.testing.assert_allclose(gradient(lambda y: function(y).loss, x), expected, atol=1e-6)
    assert not np.asarray(function(x).clipped).any()


@pytest.mark.full
@each_policy_loss
def test_a_loss_declares_whether_it_has_a_ratio(function):
    """One without it does not look at what drew the tokens, here nearly the policy: a loss may drop
    what drifted."""
    x = inputs()
    near = x.policy_logprobs + 0.1 * (x.behavior_logprobs - x.policy_logprobs)
    x = x._replace(behavior_logprobs=near)
    moved = x._replace(behavior_logprobs=near - 0.02)
    same = bool((function(x).loss == function(moved).loss).all())
    assert same == (token_loss.facts_of(function).correction == NO_RATIO)


@each_policy_loss
def test_a_loss_declares_the_columns_that_it_needs(function):
    needs, x = token_loss.facts_of(function).needs, inputs()
    for column in needs:
        with pytest.raises(AssertionError, match="rank of the covariance"):
            function(x._replace(**{column: None}))
    others = {"reference_logprobs", "covariance_rank", "reference_divergence"} - set(needs)
    bare = function(x._replace(**dict.fromkeys(others)))
    np.testing.assert_array_equal(bare.loss, function(x).loss)


@each_loss
def test_order_of_tokens_does_not_matter(function):
    x = inputs()
    order = np.random.default_rng(1).permutation(SHAPE[1])
    moved = jax.tree.map(lambda a: a[:, order], x)
    sums = token_loss.facts_of(function).ratio_of == "sequence"  # order changes the last bits
    rtol = 1e-5 if sums else 0
    np.testing.assert_allclose(function(moved).loss, function(x).loss[:, order], rtol=rtol)


def one_sequence_a_row(x: TokenInputs) -> list[TokenInputs]:
    """The same sequences at the same places, without their neighbours in the row."""
    return [
        x._replace(mask=x.mask & (x.segment_ids == segment), segment_ids=None)
        for segment in range(1, 4)
    ]


@pytest.mark.full
@each_loss
def test_neighbours_in_a_row_and_micro_batches_do_not_matter(function):
    x = inputs()
    whole = np.asarray(function(x).loss)
    alone = sum(np.asarray(function(y).loss) for y in one_sequence_a_row(x))
    np.testing.assert_array_equal(alone, whole)
    rows = [jax.tree.map(lambda a, i=i: a[i : i + 1], x) for i in range(SHAPE[0])]
    np.testing.assert_array_equal(np.concatenate([function(y).loss for y in rows]), whole)


@pytest.mark.full
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
    result = function(x)
    weights, mask = np.asarray(result.weights), np.asarray(x.mask)
    assert (weights >= 0).all() and weights.dtype == np.float32
    assert (weights <= 1).all() or correction.facts_of(function).may_grow
    assert result.log_ratio.dtype == np.float32 and result.truncated.dtype == np.bool_
    assert (weights[~mask] == 1).all() and (np.asarray(result.log_ratio)[~mask] == 0).all()
    both = lambda y: function(y).weights * jnp.exp(function(y).log_ratio)  # noqa: E731
    assert (np.asarray(gradient(both, x)) == 0).all()


@each_correction
def test_a_correction_does_not_depend_on_neighbours_in_the_row(function):
    x = inputs()
    alone = [np.asarray(function(y).weights) for y in one_sequence_a_row(x)]
    np.testing.assert_array_equal(np.prod(alone, axis=0), function(x).weights)


@each_correction
def test_a_correction_does_not_look_at_masked_tokens(function):
    x = inputs()
    clean, dirty = function(x), function(poisoned(x))
    np.testing.assert_array_equal(clean.weights, dirty.weights)
    np.testing.assert_array_equal(clean.log_ratio, dirty.log_ratio)
    np.testing.assert_array_equal(clean.truncated, dirty.truncated)
    assert not (np.asarray(dirty.truncated) & ~np.asarray(x.mask)).any()


@pytest.fixture(scope="module")
def huge() -> list[tuple[TokenInputs, list[np.ndarray], list[np.ndarray]]]:
    """Broken data, and for each correction the factor on the loss: held by its ratio, decoupled."""
    found = []
    for shift in (1e4, 60.0, -60.0, -1e4):
        x = inputs()
        x = x._replace(behavior_logprobs=x.policy_logprobs - shift)
        done = [correction[n](x) for n in correction]
        decoupled = [np.asarray(c.weights * jnp.exp(c.log_ratio)) for c in done]
        found.append((x, [np.asarray(c.weights) for c in done], decoupled))
    return found


@pytest.mark.full
@each_policy_loss
def test_any_loss_with_any_correction_survives_huge_ratios(function, huge):
    for x, held, decoupled in huge:
        grads = np.asarray(gradient(lambda y: function(y).loss, x))
        assert all(np.isfinite(w * grads).all() for w in held)
        near = x._replace(anchor_logprobs=jax.lax.stop_gradient(x.policy_logprobs))
        grads = np.asarray(gradient(lambda y: function(y).loss, near))
        assert all(np.isfinite(w * grads).all() for w in decoupled)


@each_kl
def test_a_kl_estimate_is_zero_for_equal_policies_and_outside_the_mask(function):
    x = inputs()
    zero = jnp.zeros(SHAPE, jnp.float32)
    same = function(x._replace(reference_logprobs=x.policy_logprobs, reference_divergence=zero))
    np.testing.assert_allclose(same, 0.0, atol=1e-7)
    dirty = np.asarray(function(poisoned(x)))
    assert (dirty[~np.asarray(x.mask)] == 0).all() and dirty.dtype == np.float32
    grads = np.asarray(gradient(function, poisoned(x)))
    assert (grads[~np.asarray(x.mask)] == 0).all() and np.isfinite(grads).all()


@pytest.mark.full
@each_kl
@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_a_kl_estimate_stays_finite(function, shift):
    x = inputs()
    x = x._replace(reference_logprobs=x.policy_logprobs + shift)
    assert np.isfinite(function(x)).all() and np.isfinite(gradient(function, x)).all()
