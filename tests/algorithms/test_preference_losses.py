"""Preference losses against NumPy float64 written from the papers' equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.algorithms.preference_losses import (
    PairInputs,
    bradley_terry,
    kl_baseline,
    preference_loss,
    summed_pairs,
)
from jaxrl_async.errors import ConfigError

RNG = np.random.default_rng(0)
PAIRS = 6
LOGPROBS = -20 * RNG.random((2, PAIRS)) - 1
REFERENCE = LOGPROBS + RNG.normal(size=(2, PAIRS))
LENGTHS = RNG.integers(3, 12, (2, PAIRS))
Z0 = 0.3


def inputs(logprobs=LOGPROBS, dtype=jnp.float32) -> PairInputs:
    return PairInputs(
        *(jnp.asarray(x, dtype) for x in (*logprobs, *LENGTHS, *REFERENCE)), jnp.asarray(Z0, dtype)
    )


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def log_odds(logprobs, lengths):
    p = np.exp(logprobs / lengths)
    return np.log(p / (1 - p))


def dpo(w, l, rw, rl, nw, nl, beta=0.1, e=0.0):  # noqa: E741
    h = beta * (np.log(np.exp(w - rw)) - np.log(np.exp(l - rl)))
    return -(1 - e) * np.log(sigmoid(h)) - e * np.log(sigmoid(-h))


def kto(w, l, rw, rl, nw, nl, beta=0.1, d=1.0, u=1.0):  # noqa: E741
    value_w, value_l = d * sigmoid(beta * ((w - rw) - Z0)), u * sigmoid(beta * (Z0 - (l - rl)))
    return ((d - value_w) + (u - value_l)) / 2


def simpo(w, l, rw, rl, nw, nl, beta=2.0, gamma=1.0):  # noqa: E741
    return -np.log(sigmoid(beta / nw * w - beta / nl * l - gamma))


def orpo(w, l, rw, rl, nw, nl, lam=0.1):  # noqa: E741
    odds = np.log(sigmoid(log_odds(w, nw) - log_odds(l, nl)))
    return -w / nw - lam * odds


def ipo(w, l, rw, rl, nw, nl, tau=0.1):  # noqa: E741
    return ((w - l) - (rw - rl) - 1 / (2 * tau)) ** 2


def ipo_average(w, l, rw, rl, nw, nl, tau=0.1):  # noqa: E741
    return ((w - rw) / nw - (l - rl) / nl - 1 / (2 * tau)) ** 2


CASES = [
    ("dpo", dpo),
    ({"dpo": {"beta": 0.4, "label_smoothing": 0.1}}, lambda *a: dpo(*a, 0.4, 0.1)),
    ("ipo", ipo),
    ({"ipo": {"beta": 0.3}}, lambda *a: ipo(*a, 0.3)),
    ("ipo_average", ipo_average),
    ("kto", kto),
    (
        {"kto": {"beta": 0.5, "desirable_weight": 1.2, "undesirable_weight": 0.7}},
        lambda *a: kto(*a, 0.5, 1.2, 0.7),
    ),
    ("simpo", simpo),
    ({"simpo": {"beta": 2.5, "gamma": 0.5}}, lambda *a: simpo(*a, 2.5, 0.5)),
    ("orpo", orpo),
    ({"orpo": {"beta": 0.25}}, lambda *a: orpo(*a, 0.25)),
]


def test_every_loss_has_a_case():
    named = {choice if isinstance(choice, str) else next(iter(choice)) for choice, _ in CASES}
    assert named == set(preference_loss)


@pytest.mark.parametrize(("choice", "expected"), CASES, ids=[str(c) for c, _ in CASES])
def test_a_loss_is_the_papers_equation(choice, expected):
    got = preference_loss.resolve(choice)(inputs())
    np.testing.assert_allclose(got.loss, expected(*LOGPROBS, *REFERENCE, *LENGTHS), rtol=2e-5)
    assert got.loss.dtype == jnp.float32 and got.loss.shape == (PAIRS,)


@pytest.mark.full
@pytest.mark.parametrize(("choice", "expected"), CASES, ids=[str(c) for c, _ in CASES])
def test_the_gradient_is_that_of_finite_differences(choice, expected):
    """Of the NumPy equation, in float64; relative to the largest."""
    loss, step = preference_loss.resolve(choice), 1e-5
    got = jax.grad(lambda lp: jnp.sum(loss(inputs(lp)).loss))(jnp.asarray(LOGPROBS, jnp.float32))
    for member in range(2):
        moved = [LOGPROBS.copy(), LOGPROBS.copy()]
        moved[0][member] += step
        moved[1][member] -= step
        up, down = (expected(*m, *REFERENCE, *LENGTHS) for m in moved)
        wanted = (up - down) / (2 * step)
        np.testing.assert_allclose(got[member], wanted, atol=1e-4 * np.abs(wanted).max(), rtol=1e-4)


@pytest.mark.parametrize("name", sorted(preference_loss))
def test_learning_raises_the_chosen_answer_above_the_rejected_one(name):
    """Away from the optimum of ipo, whose margin is 1 / (2 beta)."""
    grads = jax.grad(lambda lp: jnp.sum(preference_loss[name](inputs(lp)).loss))(
        jnp.asarray(LOGPROBS, jnp.float32)
    )
    assert (grads[0] < 0).all() and (grads[1] > 0).all()


@pytest.mark.parametrize("name", sorted(preference_loss))
def test_no_gradient_goes_through_the_reference_or_the_baseline(name):
    x = inputs()

    def total(reference, baseline):
        frozen = {"reference_chosen": reference, "reference_rejected": reference}
        return jnp.sum(preference_loss[name](x._replace(**frozen, baseline=baseline)).loss)

    grads = jax.grad(total, argnums=(0, 1))(x.reference_chosen, x.baseline)
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(grads))


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(preference_loss))
def test_a_slot_without_a_pair_gives_neither_loss_nor_gradient(name):
    x = jax.tree.map(lambda a: jnp.zeros(2), inputs())
    x = x._replace(baseline=jnp.float32(Z0))

    def total(logprobs):
        got = preference_loss[name](x._replace(chosen_logprobs=logprobs))
        return summed_pairs(got, x.chosen_lengths, x.rejected_lengths, jnp.float32(1))

    (loss, report), grads = jax.value_and_grad(total, has_aux=True)(x.chosen_logprobs)
    assert loss == 0 and not grads.any()
    assert all(count == 0 for _, count in report.means.values())


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_some_losses_need_no_reference(name):
    x = inputs()._replace(reference_chosen=None, reference_rejected=None, baseline=None)
    np.testing.assert_array_equal(
        preference_loss[name](x).loss, preference_loss[name](inputs()).loss
    )


@pytest.mark.parametrize("name", ["dpo", "ipo", "ipo_average", "kto"])
def test_a_missing_reference_is_named(name):
    with pytest.raises(ConfigError, match="needs a reference"):
        preference_loss[name](inputs()._replace(reference_chosen=None))


def test_kto_without_its_baseline_is_refused():
    with pytest.raises(ConfigError, match="baseline"):
        preference_loss["kto"](inputs()._replace(baseline=None))


def test_kto_learns_from_one_answer_alone():
    both = inputs()
    good = both._replace(rejected_lengths=jnp.zeros(PAIRS))
    bad = both._replace(chosen_lengths=jnp.zeros(PAIRS))
    loss = preference_loss["kto"]
    np.testing.assert_allclose(loss(good).loss + loss(bad).loss, loss(both).loss, rtol=1e-6)


def test_dpo_at_the_reference_is_log_two_and_knows_nothing():
    x = inputs(REFERENCE)
    got = preference_loss["dpo"](x)
    np.testing.assert_allclose(got.loss, np.log(2), rtol=1e-6)
    np.testing.assert_array_equal(got.chosen_rewards, 0)


@pytest.mark.parametrize("name", sorted(preference_loss))
def test_extreme_logprobs_stay_finite(name):
    far = np.stack([np.full(PAIRS, -1e-9), np.full(PAIRS, -1e4)])
    for logprobs in (far, far[::-1]):
        value, grads = jax.value_and_grad(
            lambda lp: jnp.sum(preference_loss[name](inputs(lp)).loss)
        )(jnp.asarray(logprobs, jnp.float32))
        assert np.isfinite(value) and np.isfinite(grads).all()


def test_bradley_terry_is_the_negative_log_of_the_chance_to_win():
    chosen, rejected = RNG.normal(size=(2, 5))
    got = bradley_terry(jnp.asarray(chosen), jnp.asarray(rejected))
    won = np.exp(chosen) / (np.exp(chosen) + np.exp(rejected))
    np.testing.assert_allclose(got.loss, -np.log(won), rtol=1e-5)
    with_margin = bradley_terry(jnp.asarray(chosen), jnp.asarray(rejected), margin=0.5)
    np.testing.assert_allclose(
        with_margin.loss, -np.log(sigmoid(chosen - rejected - 0.5)), rtol=1e-5
    )


def test_the_baseline_is_a_mean_and_never_negative():
    assert kl_baseline(jnp.float32(3), 4) == 0.75
    assert kl_baseline(jnp.float32(-3), 4) == 0


@pytest.mark.full
def test_the_report_counts_wins_margins_and_rewards_over_what_is_there():
    got = bradley_terry(jnp.array([1.0, 0.0, 5.0, 9.0]), jnp.array([0.0, 2.0, 1.0, 9.0]))
    chosen_lengths, rejected_lengths = jnp.array([2, 3, 4, 0]), jnp.array([1, 1, 0, 0])
    loss, report = summed_pairs(got, chosen_lengths, rejected_lengths, jnp.float32(0.5))
    means = {k: float(total) / float(count) for k, (total, count) in report.means.items()}
    assert means["preference/accuracy"] == 0.5 and means["preference/margin"] == -0.5
    assert means["preference/chosen_reward"] == 2 and means["preference/rejected_reward"] == 1
    assert means["preference/chosen_length"] == 3
    assert float(loss) == pytest.approx(0.5 * float(got.loss[:3].sum()))
    assert report.sums["train/tokens"] == 11
