"""Pairs of the policy's own answers: which are made, and what each answer weighs."""

import numpy as np
import pytest
from builders import episode_of, group_of
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.algorithms.advantages import step_data
from jaxrl_async.algorithms.answer_pairs import (
    AnswerPair,
    AnswerSums,
    PairWeights,
    choose_pairs,
    has_pair,
    keep_paired,
    pairs_loss,
    pairs_of_groups,
    pairs_of_step,
)
from jaxrl_async.algorithms.shaping import mask_truncated, missing_eos, shape
from jaxrl_async.errors import ConfigError
from jaxrl_async.types import StopReason

HOWS = ("best_worst", "best_random", "all")
RETURNS = st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=6)


@given(RETURNS, st.data(), st.sampled_from(HOWS), st.integers(0, 3))
def test_pairs_are_of_a_better_and_a_worse_answer_and_the_others_are_ties(
    returns, data, how, seed
) -> None:
    learnable = np.array(data.draw(st.lists(st.booleans(), min_size=6, max_size=6)), bool)
    values, learnable = np.array(returns), learnable[: len(returns)]
    pairs, ties = choose_pairs(values, learnable, how, [seed])
    there = np.flatnonzero(learnable)
    possible = [(i, j) for i in there for j in there if i < j]
    differ = {(i, j) for i, j in possible if values[i] != values[j]}
    for better, worse in pairs:
        assert values[better] > values[worse] and learnable[better] and learnable[worse]
    if how == "all":
        assert {tuple(sorted(pair)) for pair in pairs} == differ and len(pairs) == len(differ)
        assert ties == len(possible) - len(differ)
    else:
        assert len(pairs) == bool(differ) and ties == bool(possible and not differ)
    for better, worse in pairs if how != "all" else ():
        assert values[better] == values[there].max()
        assert how == "best_random" or values[worse] == values[there].min()


def test_a_random_opponent_depends_on_the_key_alone_and_all_of_them_come() -> None:
    values, there = np.array([0.0, 1.0, 0.5, 0.25]), np.ones(4, bool)
    chosen = [choose_pairs(values, there, "best_random", [0, k])[0][0].worse for k in range(40)]
    assert set(chosen) == {0, 2, 3}
    again = [choose_pairs(values, there, "best_random", [0, k])[0][0].worse for k in range(40)]
    assert again == chosen


EPISODES = [episode_of([-1, 0, 0]), episode_of([-1, 0], StopReason.LENGTH), episode_of([-1, 0])]


@pytest.mark.parametrize("how", HOWS)
def test_only_answers_in_pairs_are_kept_and_their_pairs_are_the_same_again(how) -> None:
    groups = [group_of(n, EPISODES * 2, [0, 1, 1, n, 0.5, 1]) for n in range(3)]
    groups.append(group_of(9, EPISODES, [1, 1, 1]))
    whole = shape(step_data(groups))
    kept = keep_paired(whole, how=how, seed=5)
    before, ties = pairs_of_groups(whole, how, 5)
    assert kept.counts["preference/ties"] == ties > 0
    left = sum(len(g.episodes) for g in groups) - sum(len(g.episodes) for g in kept.data.groups)
    assert kept.counts["preference/unpaired"] == left
    step_pairs = pairs_of_step(kept.data, kept.masks, how, 5)
    assert step_pairs == pairs_of_step(kept.data, kept.masks, how, 5)
    flat = [(e, r) for g, rs in zip(kept.data.groups, kept.data.rewards, strict=True)
            for e, r in zip(g.episodes, rs, strict=True)]  # fmt: skip
    made = [(flat[b][1], flat[w][1]) for b, w in step_pairs]
    wanted = [
        (rewards[b], rewards[w])
        for rewards, of_group in zip(whole.data.rewards, before, strict=True)
        for b, w in of_group
    ]
    assert made == wanted
    assert {i for pair in step_pairs for i in pair} == set(range(len(flat)))


def test_a_group_has_a_pair_by_what_its_shapings_leave() -> None:
    tied = group_of(0, EPISODES, [1, 1, 1])
    assert not has_pair(tied, (), "best_worst", 0)
    assert has_pair(tied, (missing_eos,), "best_worst", 0)  # the second was cut off
    unequal = group_of(0, EPISODES, [1, 0, 1])
    assert has_pair(unequal, (), "all", 0)
    assert not has_pair(unequal, (mask_truncated,), "all", 0)  # what is masked is not compared
    assert not has_pair(group_of(0, EPISODES[:1]), (), "all", 0)


def dpo_slopes(pairs, logs, reference, beta) -> tuple[float, np.ndarray]:
    """Loss and derivatives of dpo, in float64 and by hand: arXiv:2305.18290, eq. 7."""
    loss, slopes = 0.0, np.zeros(len(logs))
    for w, v in pairs:
        h = beta * ((logs[w] - reference[w]) - (logs[v] - reference[v]))
        loss += np.log1p(np.exp(-h)) / len(pairs)
        slopes[w] -= beta / (1 + np.exp(h)) / len(pairs)
        slopes[v] += beta / (1 + np.exp(h)) / len(pairs)
    return loss, slopes


def ipo_slopes(pairs, logs, reference, beta) -> tuple[float, np.ndarray]:
    """The same of ipo: arXiv:2310.12036, eq. 17."""
    loss, slopes = 0.0, np.zeros(len(logs))
    for w, v in pairs:
        off = (logs[w] - reference[w]) - (logs[v] - reference[v]) - 1 / (2 * beta)
        loss += off**2 / len(pairs)
        slopes[w] += 2 * off / len(pairs)
        slopes[v] -= 2 * off / len(pairs)
    return loss, slopes


@pytest.mark.full
@pytest.mark.parametrize(("name", "by_hand"), [("dpo", dpo_slopes), ("ipo", ipo_slopes)])
@pytest.mark.parametrize("num_pairs", [1, 3, 5])
def test_loss_and_weights_are_those_of_the_formula(name, by_hand, num_pairs) -> None:
    rng = np.random.default_rng(num_pairs)
    logs, reference = -rng.exponential(4, 6), -rng.exponential(4, 6)
    pairs = [AnswerPair(*rng.choice(6, 2, replace=False)) for _ in range(num_pairs)]
    lengths = rng.integers(1, 9, 6).astype(float)
    sums = AnswerSums(logprobs=logs, lengths=lengths, reference=reference)
    slopes, report = PairWeights(pairs_loss({name: {"beta": 0.3}}))(pairs, sums)
    loss, wanted = by_hand(pairs, logs, reference, 0.3)
    np.testing.assert_allclose(slopes, wanted, rtol=1e-5, atol=1e-7)
    assert report["train/policy_loss"] == pytest.approx(loss, rel=1e-5)
    assert report["preference/pairs"] == num_pairs
    right = [(logs - reference)[b] > (logs - reference)[w] for b, w in pairs]
    assert report["preference/accuracy"] == pytest.approx(np.mean(right))


def test_without_pairs_nothing_is_trained() -> None:
    sums = AnswerSums(logprobs=np.zeros(2), lengths=np.ones(2), reference=np.zeros(2))
    slopes, report = PairWeights(pairs_loss("dpo"))([], sums)
    assert not slopes.any() and report["train/policy_loss"] == 0


def test_losses_of_single_answers_and_unknown_ones_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pairs\.loss.*baseline"):
        pairs_loss("kto")
    with pytest.raises(ConfigError, match=r"pairs\.loss.*'dqo'"):
        pairs_loss("dqo")
