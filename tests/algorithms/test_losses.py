"""Formulas against NumPy float64, written from the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_inputs import token_inputs

from jaxrl_async.algorithms.losses import (
    TokenInputs,
    cross_entropy,
    log_ratio,
    mismatch,
    ppo_clip,
    reinforce,
    token_loss,
)
from jaxrl_async.errors import ConfigError

SHAPE = (4, 33)


@pytest.fixture
def x() -> TokenInputs:
    return token_inputs(np.random.default_rng(0), SHAPE)


def float64(x: TokenInputs) -> TokenInputs:
    return jax.tree.map(
        lambda a: np.asarray(a, np.float64) if a.dtype == jnp.float32 else np.asarray(a), x
    )


def gradient(function, x):
    return jax.grad(lambda p: function(x._replace(policy_logprobs=p)).sum())(x.policy_logprobs)


@pytest.mark.full
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.28)])
def test_ppo_clip_is_the_papers_equation_7(x, low, high):
    n = float64(x)
    r = np.exp(n.policy_logprobs - n.behavior_logprobs)
    unclipped, clipped = r * n.advantages, np.clip(r, 1 - low, 1 + high) * n.advantages
    result = ppo_clip(x, clip_low=low, clip_high=high)
    np.testing.assert_allclose(
        result.loss, np.where(n.mask, -np.minimum(unclipped, clipped), 0), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(result.clipped, n.mask & (clipped < unclipped))
    active = n.mask & ~(clipped < unclipped)
    np.testing.assert_allclose(
        gradient(lambda y: ppo_clip(y, clip_low=low, clip_high=high).loss, x),
        np.where(active, -r * n.advantages, 0),
        rtol=1e-5,
        atol=1e-6,
    )


def test_ppo_clip_cuts_only_the_side_that_the_advantage_pushes_to():
    logs = jnp.log(jnp.array([[2.0, 2.0, 0.5, 0.5]]))
    x = TokenInputs(
        policy_logprobs=logs,
        behavior_logprobs=jnp.zeros((1, 4)),
        advantages=jnp.array([[1.0, -1.0, 1.0, -1.0]]),
        mask=jnp.ones((1, 4), bool),
        versions=jnp.zeros((1, 4), jnp.int32),
        entropy=jnp.zeros((1, 4)),
    )
    assert ppo_clip(x).clipped.tolist() == [[True, False, False, True]]


def test_reinforce_is_the_importance_weighted_score_function(x):
    n = float64(x)
    r = np.exp(n.policy_logprobs - n.behavior_logprobs)
    np.testing.assert_allclose(
        reinforce(x).loss,
        np.where(n.mask, -r * n.advantages * n.policy_logprobs, 0),
        rtol=1e-5,
        atol=1e-6,
    )
    np.testing.assert_allclose(
        gradient(lambda y: reinforce(y).loss, x),
        np.where(n.mask, -r * n.advantages, 0),
        rtol=1e-5,
        atol=1e-6,
    )


def test_cross_entropy_is_the_negative_log_likelihood(x):
    np.testing.assert_array_equal(cross_entropy(x).loss, np.where(x.mask, -x.policy_logprobs, 0))


# --- every loss against NumPy, values and gradients ---------------------------------------------


@pytest.fixture
def packed() -> TokenInputs:
    rng = np.random.default_rng(3)
    shape = (3, 12)
    policy = -rng.exponential(1.0, shape) - 0.05
    rows = [[1] * 12, [1] * 4 + [2] * 8, [1] * 2 + [2] * 5 + [3] * 3 + [0] * 2]
    segments = jnp.asarray(rows)
    return TokenInputs(
        policy_logprobs=jnp.asarray(policy, jnp.float32),
        behavior_logprobs=jnp.asarray(policy + rng.normal(0.05, 0.5, shape), jnp.float32),
        advantages=jnp.asarray(rng.normal(0, 1, shape), jnp.float32),
        mask=jnp.asarray(rng.random(shape) < 0.8) & (segments > 0),
        versions=jnp.zeros(shape, jnp.int32),
        entropy=jnp.zeros(shape),
        segment_ids=segments,
        covariance_rank=jnp.asarray(rng.random(shape), jnp.float32),
    )


def each_sequence(n: TokenInputs, values: np.ndarray, reduction) -> np.ndarray:
    """reduction over each sequence's trained tokens, at all its tokens."""
    found = np.zeros(n.mask.shape)
    for row, ids in enumerate(n.segment_ids):
        for segment in set(ids.tolist()) - {0}:
            chosen = (ids == segment) & n.mask[row]
            found[row, ids == segment] = reduction(values[row, chosen]) if chosen.any() else 0
    return found


# Each: (inputs in float64, policy) -> (loss, clipped). Differentiated in `policy` alone: what the
# paper does not differentiate is taken at n.policy_logprobs.


def ref_ppo(n, policy, low=0.2, high=0.2, dual=None):
    r, a = np.exp(policy - n.behavior_logprobs), n.advantages
    objective = np.minimum(r * a, np.clip(r, 1 - low, 1 + high) * a)
    if dual:
        objective = np.where(a < 0, np.maximum(objective, dual * a), objective)
    return -objective, objective != r * a


def ref_gspo(n, policy):
    s, a = np.exp(each_sequence(n, policy - n.behavior_logprobs, np.mean)), n.advantages
    objective = np.minimum(s * a, np.clip(s, 0.9, 1.2) * a)
    return -objective, objective != s * a


def ref_gspo_token(n, policy):
    s = np.exp(each_sequence(n, n.policy_logprobs - n.behavior_logprobs, np.mean))
    s, a = s * np.exp(policy - n.policy_logprobs), n.advantages
    objective = np.minimum(s * a, np.clip(s, 0.9, 1.2) * a)
    return -objective, objective != s * a


def ref_geo_mean(n, policy):
    """|A| sgn(A) times the geometric mean of |min(r A, clip(r, e^-low, e^high) A)| / |A|."""
    r, sign = np.exp(policy - n.behavior_logprobs), np.sign(n.advantages)
    signed = np.minimum(r * sign, np.clip(r, np.exp(-0.3), np.exp(0.4)) * sign)
    mean = np.exp(each_sequence(n, np.log(np.abs(signed)), np.mean))
    return -n.advantages * mean, signed != r * sign


def ref_sapo(n, policy):
    tau = np.where(n.advantages > 0, 1.0, 1.05)
    gate = 1 / (1 + np.exp(-tau * (np.exp(policy - n.behavior_logprobs) - 1)))
    return -4 / tau * gate * n.advantages, False


def ref_dppo(n, policy, kl, low, high):
    p, q, a = np.exp(n.policy_logprobs), np.exp(n.behavior_logprobs), n.advantages
    q = np.minimum(q, 1.0)
    tv = np.abs(p - q)
    rest = np.log(np.maximum(1 - q, 1e-8)) - np.log(1 - p)
    divergence = q * (n.behavior_logprobs - n.policy_logprobs) + (1 - q) * rest if kl else tv
    outward = ((a > 0) & (p > q)) | ((a < 0) & (p < q))
    cut = outward & (divergence > np.where(a > 0, high, low))
    return np.where(cut, 0, -np.exp(policy - n.behavior_logprobs) * a), cut


def ref_ipo(n, policy):
    loss, cut = ref_dppo(n, policy, False, 0.1, 0.06)
    return loss + 0.3 * (policy - n.behavior_logprobs) ** 2, cut


def ref_clip_cov(n, policy):
    loss, clipped = ref_ppo(n, policy)
    selected = n.covariance_rank < 0.3
    return np.where(selected, 0, loss), clipped | selected


def ref_kl_cov(n, policy):
    d = policy - n.behavior_logprobs
    return -np.exp(d) * n.advantages + 0.7 * np.abs(d) * (n.covariance_rank < 0.3), False


def ref_score(weigh):
    """-w A log policy, w by `weigh(n, r, R)` with r the token's and R the sequence's ratio."""

    def reference(n, policy):
        d = n.policy_logprobs - n.behavior_logprobs
        weights, clipped = weigh(n, np.exp(d), np.exp(each_sequence(n, d, np.sum)))
        return -weights * n.advantages * policy, clipped

    return reference


def ref_flash(n, policy):
    q, p = np.exp(n.behavior_logprobs), np.exp(n.policy_logprobs)
    q = np.minimum(q, 1.0)
    rest = np.log(np.maximum(1 - q, 1e-8)) - np.log(1 - p)
    divergence = q * (n.behavior_logprobs - n.policy_logprobs) + (1 - q) * rest
    cut = each_sequence(n, divergence, np.mean) > 0.03
    weights = np.where(cut, 0, np.exp(n.policy_logprobs - n.behavior_logprobs))
    return -weights * n.advantages * policy, cut


def ref_vespo(n, r, whole):
    k, rate = (np.where(n.advantages >= 0, a, b) for a, b in ((2, 3), (3, 2)))
    return whole**k * np.exp(rate * (1 - whole)), False


REFERENCES = [
    ("ppo_clip", {}, ref_ppo),
    ("ppo_clip", {"dual_clip": 1.5}, lambda n, p: ref_ppo(n, p, dual=1.5)),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.2}, ref_gspo),
    ("gspo_token", {"clip_low": 0.1, "clip_high": 0.2}, ref_gspo_token),
    ("geo_mean", {"clip_low": 0.3, "clip_high": 0.4}, ref_geo_mean),
    ("sapo", {}, ref_sapo),
    ("dppo_tv", {"low": 0.1, "high": 0.06}, lambda n, p: ref_dppo(n, p, False, 0.1, 0.06)),
    ("dppo_kl", {"low": 0.02, "high": 0.05}, lambda n, p: ref_dppo(n, p, True, 0.02, 0.05)),
    ("ipo", {"low": 0.1, "high": 0.06, "penalty": 0.3}, ref_ipo),
    ("clip_cov", {"share": 0.3}, ref_clip_cov),
    ("kl_cov", {"share": 0.3, "penalty": 0.7}, ref_kl_cov),
    ("reinforce", {}, ref_score(lambda n, r, whole: (r, False))),
    ("flash_reinforce", {"delta": 0.03}, ref_flash),
    ("gpg", {}, ref_score(lambda n, r, whole: (1.0, False))),
    (
        "cispo",
        {"clip_low": 0.2, "clip_high": 0.3},
        ref_score(lambda n, r, whole: (np.clip(r, 0.8, 1.3), (r < 0.8) | (r > 1.3))),
    ),
    ("aipo", {"rho": 1.1}, ref_score(lambda n, r, whole: (np.minimum(r, 1.1), r > 1.1))),
    (
        "topr",
        {},
        ref_score(
            lambda n, r, whole: (
                np.where(n.advantages < 0, np.minimum(whole, 1), 1),
                (n.advantages < 0) & (whole > 1),
            )
        ),
    ),
    ("vespo", {}, ref_score(ref_vespo)),
]


def test_every_loss_has_a_reference():
    assert {name for name, _, _ in REFERENCES} == set(token_loss)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "settings", "reference"), REFERENCES, ids=[f"{n}-{len(s)}" for n, s, _ in REFERENCES]
)
def test_a_loss_is_its_papers_formula(packed, name, settings, reference):
    n = float64(packed)
    result = token_loss[name](packed, **settings)
    loss, clipped = reference(n, n.policy_logprobs)
    np.testing.assert_allclose(result.loss, np.where(n.mask, loss, 0), rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(result.clipped, n.mask & clipped)
    assert np.asarray(result.clipped).any() or clipped is False, "the data must reach the bound"

    def total(policy):
        return np.where(n.mask, reference(n, policy)[0], 0).sum()

    slopes = np.zeros(n.mask.shape)
    for index in zip(*np.nonzero(n.mask), strict=True):
        step = np.zeros(n.mask.shape)
        step[index] = 1e-6
        slopes[index] = (total(n.policy_logprobs + step) - total(n.policy_logprobs - step)) / 2e-6
    grads = gradient(lambda y: token_loss[name](y, **settings).loss, packed)
    np.testing.assert_allclose(grads, slopes, rtol=1e-4, atol=1e-5)


def one_token(policy: float, behavior: float) -> TokenInputs:
    """One token of advantage 1."""
    one = jnp.ones((1, 1))
    return TokenInputs(
        policy_logprobs=policy * one,
        behavior_logprobs=behavior * one,
        advantages=one,
        mask=one > 0,
        versions=jnp.zeros((1, 1), jnp.int32),
        entropy=one,
    )


def test_the_divergence_of_a_token_that_became_nearly_certain_is_the_formulas():
    """0.9 log(0.9 / p) + 0.1 log(0.1 / (1 - p)) = 0.826 nats at p = 1 - 1e-5."""
    x = one_token(float(np.log1p(-1e-5)), float(np.log(0.9)))
    assert token_loss["dppo_kl"](x, high=0.82).clipped.item()
    assert not token_loss["dppo_kl"](x, high=0.83).clipped.item()


def test_a_ratio_of_ten_nats_is_what_it_is():
    x = one_token(-0.5, -10.5)
    assert log_ratio(x).item() == pytest.approx(10)
    assert mismatch(x).item() == pytest.approx(10)
    assert reinforce(x).loss.item() == pytest.approx(0.5 * np.exp(10), rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(token_loss))
def test_a_loss_is_against_its_anchor(packed, name):
    """Anchored elsewhere, it is what it would be had that sampled the tokens."""
    other = packed.behavior_logprobs + 0.1
    anchored = packed._replace(anchor_logprobs=other)
    moved = packed._replace(behavior_logprobs=other)
    np.testing.assert_array_equal(token_loss[name](anchored).loss, token_loss[name](moved).loss)


def test_a_dual_clip_that_would_cut_on_policy_tokens_is_refused():
    with pytest.raises(ConfigError, match="dual_clip must be 0 or above 1"):
        token_loss.resolve({"ppo_clip": {"dual_clip": 0.5}})


@pytest.mark.full
def test_ratio_and_mismatch_meet_at_the_proximal_policy(packed):
    proximal = packed.behavior_logprobs * 0.9
    x = packed._replace(proximal_logprobs=proximal, anchor_logprobs=proximal)
    whole = log_ratio(packed)
    np.testing.assert_allclose(log_ratio(x) + mismatch(x), whole, atol=1e-6)
    np.testing.assert_array_equal(mismatch(packed), whole)  # one update a step: proximal is policy
    assert (np.asarray(gradient(mismatch, packed)) == 0).all()
