"""Formulas against NumPy float64, written from the papers."""

import itertools
from dataclasses import replace
from math import exp

import numpy as np
import pytest

from jaxrl_async.algorithms import advantages as adv
from jaxrl_async.algorithms.advantages import StepData, step_data
from jaxrl_async.errors import ConfigError
from jaxrl_async.types import Episode, EpisodeGroup, Prompt, Score, StopReason, Ticket


def episode_of(flags: list[int]) -> Episode:
    mask = np.array(flags, bool)
    return Episode(
        token_ids=np.arange(len(mask), dtype=np.int32),
        drawn=mask,
        logprobs=np.zeros(len(mask), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        stop=StopReason.EOS,
    )


def group_of(
    rewards: list[float], masks: list[list[int]] | None = None, parts=None, token_rewards=None
) -> EpisodeGroup:
    """One episode per reward: a prompt token, then as many sampled tokens as its index plus one."""
    masks = masks or [[0] + [1] * (index + 1) for index in range(len(rewards))]
    scores = tuple(
        Score(
            reward=r,
            parts=parts[i] if parts else {},
            token_rewards=token_rewards[i] if token_rewards else None,
        )
        for i, r in enumerate(rewards)
    )
    prompt = Prompt(prompt_id=0, position=0, token_ids=np.zeros(1, np.int32), text="", reference="")
    return EpisodeGroup(
        prompt=prompt,
        episodes=tuple(episode_of(m) for m in masks),
        scores=scores,
        ticket=Ticket(group=0, version=0),
    )


def step(*rewards: list[float]) -> StepData:
    return step_data([group_of(r) for r in rewards])


def values(result, group: int = 0) -> list[float]:
    """The one value on each episode's sampled tokens."""
    for a in result.advantages[group]:
        assert a[0] == 0 and len(set(a[1:].tolist())) == 1
    return [float(a[1]) for a in result.advantages[group]]


REWARDS = [1.0, 0.0, 0.25, 3.5]
OTHERS = [2.0, -1.0]
BINARY = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_group_normalized_is_grpo():
    r = np.array(REWARDS)
    expected = (r - r.mean()) / (np.sqrt(((r - r.mean()) ** 2).mean()) + 1e-6)
    np.testing.assert_allclose(values(adv.group_normalized(step(REWARDS))), expected, rtol=1e-6)


@pytest.mark.parametrize("function", [adv.group_mean, adv.kimi])
def test_group_mean_is_dr_grpo_and_kimis(function):
    result, r = function(step(REWARDS, OTHERS)), np.array(REWARDS)
    np.testing.assert_allclose(values(result), r - r.mean(), rtol=1e-6)
    np.testing.assert_allclose(values(result, 1), [1.5, -1.5], rtol=1e-6)


def test_reinforce_is_the_reward():
    assert values(adv.reinforce(step(REWARDS))) == REWARDS


def test_rloo_compares_with_the_others():
    expected = [r - np.mean(REWARDS[:i] + REWARDS[i + 1 :]) for i, r in enumerate(REWARDS)]
    np.testing.assert_allclose(values(adv.rloo(step(REWARDS))), expected, rtol=1e-6)


def test_opo_weighs_the_baseline_by_length():
    lengths = [1, 2, 3, 4]
    baseline = sum(n * r for n, r in zip(lengths, REWARDS, strict=True)) / sum(lengths)
    expected = [r - baseline for r in REWARDS]
    np.testing.assert_allclose(values(adv.opo(step(REWARDS))), expected, rtol=1e-6)


def test_maxrl_is_the_mean_gradient_of_the_successes_less_that_of_all():
    """With score functions s_i: sum_i A_i s_i / N = mean over successes of s - mean over all."""
    s = np.random.default_rng(0).normal(size=len(BINARY))
    right = np.array(BINARY) == 1
    got = np.mean(np.array(values(adv.maxrl(step(BINARY)))) * s)
    assert got == pytest.approx(s[right].mean() - s.mean(), rel=1e-5)
    assert values(adv.maxrl(step([0.0, -1.0]))) == [0.0, 0.0]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_what_all_subsets_of_k_answers_get_on_average(k):
    """Each subset's reward is its best; normalised over subsets, a member gets the mean."""
    subsets = list(itertools.combinations(range(len(BINARY)), k))
    best = np.array([max(BINARY[i] for i in s) for s in subsets])
    normal = (best - best.mean()) / best.std()
    expected = [
        np.mean([x for x, s in zip(normal, subsets, strict=True) if i in s])
        for i in range(len(BINARY))
    ]
    np.testing.assert_allclose(values(adv.pass_at_k(step(BINARY), k=k)), expected, rtol=1e-5)


def test_pass_at_k_is_nothing_where_all_subsets_pass_or_none():
    for rewards in ([1.0, 1.0, 1.0, 0.0], [0.0] * 4, [1.0, 0.0]):
        assert not any(values(adv.pass_at_k(step(rewards), k=2)))


def test_grpo_lead_weighs_by_the_pass_rate():
    r, rho = np.array(BINARY), 1 / 3

    def w(rate):
        return 0.4 + (1.5 - 0.4) / (1 + exp(10 * (rate - 0.75)))

    plain = (r - r.mean()) / (r.std() + 1e-6)
    expected = [a * (w(rho) if a > 0 else w(1 - rho)) for a in plain]
    np.testing.assert_allclose(values(adv.grpo_lead(step(BINARY))), expected, rtol=1e-5)


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_epsilon_is_added_to_the_standard_deviation(epsilon):
    (first, _) = values(adv.group_normalized(step([1.0, 0.0]), epsilon=epsilon))
    assert first == pytest.approx(0.5 / (0.5 + epsilon))


def test_batch_mean_compares_all_answers_of_the_step():
    """One answer a prompt is enough; nothing is divided."""
    found = adv.batch_mean(step([1.0], [0.0], [0.25, 3.5]))
    mean = (1.0 + 0.0 + 0.25 + 3.5) / 4
    assert [values(found, group) for group in range(3)] == [
        pytest.approx([1.0 - mean]),
        pytest.approx([-mean]),
        pytest.approx([0.25 - mean, 3.5 - mean]),
    ]
    assert values(adv.batch_mean(step([0.1], [0.1], [0.1])), 1) == [0.0]


def test_reinforce_pp_sums_what_follows_and_normalises_over_all_tokens():
    """A_t = r + sum_{i >= t} of the token rewards (-beta KL): a loop over each token."""
    rng = np.random.default_rng(1)
    kl = [-rng.random(n + 2).astype(np.float32) for n in range(4)]
    groups = [
        group_of(REWARDS, token_rewards=kl),
        group_of(OTHERS, token_rewards=[None, None]),
    ]
    raw = [
        [r + sum(kl[i][t:].tolist()) for t in range(1, len(kl[i]))] for i, r in enumerate(REWARDS)
    ]
    raw += [[r] * (i + 1) for i, r in enumerate(OTHERS)]
    flat = np.concatenate(raw)
    expected = (flat - flat.mean()) / (flat.std() + 1e-8)
    result = adv.reinforce_pp(step_data(groups)).advantages
    got = np.concatenate([a[1:] for of_group in result for a in of_group])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_reinforce_pp_baseline_normalises_group_centred_rewards_over_all_tokens():
    raw = [[r - np.mean(REWARDS)] * (i + 1) for i, r in enumerate(REWARDS)]
    raw += [[r - np.mean(OTHERS)] * (i + 1) for i, r in enumerate(OTHERS)]
    flat = np.concatenate(raw)
    expected = (flat - flat.mean()) / (flat.std() + 1e-8)
    result = adv.reinforce_pp_baseline(step(REWARDS, OTHERS)).advantages
    got = np.concatenate([a[1:] for of_group in result for a in of_group])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_gdpo_normalises_each_part_separately_and_then_the_sum_over_the_step():
    parts = [
        [{"right": 1.0, "short": 0.2}, {"right": 0.0, "short": 0.9}, {"right": 0.0, "short": 0.1}],
        [{"right": 1.0, "short": 0.5}, {"right": 1.0, "short": 0.6}],
    ]
    groups = [group_of([sum(p.values()) for p in of_group], parts=of_group) for of_group in parts]

    def z(x):
        return (x - x.mean()) / (x.std() + 1e-6) if x.std() else x * 0

    sums = np.concatenate(
        [
            z(np.array([p["right"] for p in g])) + 0.5 * z(np.array([p["short"] for p in g]))
            for g in parts
        ]
    )
    result = adv.gdpo(step_data(groups), weights={"short": 0.5})
    np.testing.assert_allclose(values(result) + values(result, 1), z(sums), rtol=1e-5)


def test_gdpo_counts_what_shaping_added():
    data = step_data([group_of([1.0, 1.0], parts=[{"right": 1.0}, {"right": 1.0}])])
    shaped = StepData(groups=data.groups, rewards=(np.array([1.0, 0.5]),))
    assert values(adv.gdpo(data)) == [0.0, 0.0]
    np.testing.assert_allclose(values(adv.gdpo(shaped)), [1.0, -1.0], rtol=1e-4)


def test_gdpo_counts_a_turns_named_reward_once():
    """What an earlier turn earned is a part, and credited to a token as well."""
    parts = [
        {"found": 2.0, "right": 0.0},
        {"found": 0.0, "right": 1.0},
        {"found": 0.0, "right": 1.0},
    ]
    whole = group_of([2.0, 1.0, 1.0], parts=parts)
    of_tokens = [np.array([0, 2], np.float32), None, None]
    early = group_of([0.0, 1.0, 1.0], parts=parts, token_rewards=of_tokens)
    first, *others = early.scores
    early = replace(early, scores=(replace(first, named_of_tokens=2.0), *others))
    result = values(adv.gdpo(step_data([whole]), weights={"found": 0.25}))
    assert result == values(adv.gdpo(step_data([early]), weights={"found": 0.25}))
    assert not np.allclose(result, 0)


@pytest.mark.parametrize("part", ["shaping", "tokens", "tool_errors"])
def test_gdpo_takes_a_weight_for_a_part_that_this_step_has_not(part):
    """Before, the first step without an overlong answer ended the run."""
    data = step_data([group_of([1.0, 0.0], parts=[{"right": 1.0}, {"right": 0.0}])])
    assert values(adv.gdpo(data, weights={part: 0.5})) == values(adv.gdpo(data))


@pytest.mark.parametrize(
    ("parts", "weights"),
    [
        ({"right", "short"}, {"right": 2.0, "shaping": 0.1, "tokens": 0.0}),
        (set(), {"reward": 1.0, "shaping": 0.1}),
        ({"right"}, None),
    ],
)
def test_gdpos_weights_may_name_the_rewards_parts_shaping_and_tokens(parts, weights):
    adv.check_weights({"gdpo": {"weights": weights}}, parts)
    adv.check_weights("gdpo", parts)


def test_gdpos_weight_for_a_part_that_the_reward_has_not_is_refused():
    with pytest.raises(ConfigError, match=r"no part 'rihgt' \(it has: right, shaping, tokens\)"):
        adv.check_weights({"gdpo": {"weights": {"rihgt": 1.0}}}, {"right"})
    with pytest.raises(ConfigError, match="no part 'reward'"):
        adv.check_weights({"gdpo": {"weights": {"reward": 1.0}}}, {"right"})


MULTI_TURN = [[0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0]]
"""Two turns with a tool's reply between, twice; nothing sampled."""
STEP_REWARDS = [
    np.array([5, 0.1, 0.2, 0, 0.7, 0.3, 0.4], np.float32),  # the first is earned by no token
    None,
    np.array([0, 0, 9], np.float32),
]


@pytest.mark.parametrize(("gamma", "turn_gamma"), [(1.0, 1.0), (0.9, 1.0), (0.9, 0.5)])
def test_discounted_is_the_return_to_go_over_sampled_tokens_normalised_in_the_group(
    gamma, turn_gamma
):
    group = group_of([1.0, -1.0, 2.0], MULTI_TURN, token_rewards=STEP_REWARDS)
    first = [0.1, 0.2 + 0.7, 0.3, 0.4 + 1.0]  # the tool's reply goes to the token before it
    far = gamma * turn_gamma
    raw = [
        first[0] + gamma * (first[1] + far * (first[2] + gamma * first[3])),
        first[1] + far * (first[2] + gamma * first[3]),
        first[2] + gamma * first[3],
        first[3],
        -far,
        -1.0,
    ]
    expected = (np.array(raw) - np.mean(raw)) / (np.std(raw) + 1e-6)
    data = step_data([group, group])
    for function in (adv.discounted, adv.discounted_batch):
        result = function(data, gamma=gamma, turn_gamma=turn_gamma).advantages
        for of_group in result:
            pairs = zip(of_group, group.episodes, strict=True)
            got = np.concatenate([a[e.drawn] for a, e in pairs])
            np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_discounted_over_the_batch_is_not_that_over_the_group():
    data = step([1.0, 0.0], [9.0, 9.0])
    assert values(adv.discounted(data), 1) == [0.0, 0.0]
    assert min(values(adv.discounted_batch(data), 1)) > 0


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.9, 0.0)])
def test_gae_is_the_double_sum_of_the_paper_over_sampled_tokens(gamma, lam, whiten):
    group = group_of([1.0, -1.0, 2.0], MULTI_TURN, token_rewards=STEP_REWARDS)
    rng = np.random.default_rng(0)
    critic = [rng.normal(size=len(m)).astype(np.float32) for m in MULTI_TURN]
    raw, returns = [], []
    for r, mask, v in zip([[0.1, 0.9, 0.3, 1.4], [0.0, -1.0], []], MULTI_TURN, critic, strict=True):
        states = [*v[np.array(mask, bool)].astype(np.float64).tolist(), 0.0]
        deltas = [r[t] + gamma * states[t + 1] - states[t] for t in range(len(r))]
        a = [
            sum((gamma * lam) ** i * deltas[t + i] for i in range(len(r) - t))
            for t in range(len(r))
        ]
        raw += a
        returns += [x + s for x, s in zip(a, states[:-1], strict=True)]
    result = adv.gae(step_data([group], [critic]), gamma=gamma, lam=lam, whiten=whiten)
    expected = (np.array(raw) - np.mean(raw)) / (np.std(raw) + 1e-8) if whiten else raw
    for got, wanted in ((result.advantages, expected), (result.returns, returns)):
        pairs = zip(got[0], group.episodes, strict=True)
        flat = np.concatenate([a[e.drawn] for a, e in pairs])
        np.testing.assert_allclose(flat, wanted, rtol=1e-5, atol=1e-6)


def test_gae_without_a_critic_is_refused():
    with pytest.raises(ConfigError, match="critic"):
        adv.gae(step(REWARDS))


def test_step_data_knows_token_rewards_only_where_a_score_has_some():
    assert step(REWARDS).token_rewards is None
    earned = np.ones(2, np.float32)
    data = step_data([group_of([1.0, 2.0], token_rewards=[earned, None])])
    assert data.token_rewards == ((earned, None),)


# --- what tokens earned, and what constants and comparisons decide ------------------------------


EARNED = [
    np.array([7.0, 0.5], np.float32),  # on the prompt: earned by no token
    np.array([0.0, 0.5, 0.25], np.float32),
    None,
    np.array([0.0, 1.0, -0.5, 0.0, 0.25], np.float32),
]
RETURNS = [1.5, 0.75, 0.25, 4.25]
PER_TOKEN = {"reinforce_pp", "discounted", "discounted_batch", "gae"}


@pytest.mark.parametrize("name", sorted(set(adv.advantage) - PER_TOKEN))
def test_a_sequences_return_is_its_reward_and_what_its_tokens_earned(name):
    """As if the scorer had given the sum as one reward."""
    data = step_data([group_of(REWARDS, token_rewards=EARNED), group_of(OTHERS)])
    same = step_data([group_of(RETURNS), group_of(OTHERS)])
    np.testing.assert_array_equal(adv.returns_of(data)[0], RETURNS)
    function = adv.advantage.resolve({name: {"k": 1} if name == "pass_at_k" else {}})
    got, wanted = (function(d).advantages for d in (data, same))
    if name != "gdpo":  # there it is one more part
        for a, b in zip(sum(got, ()), sum(wanted, ()), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    assert max(np.abs(a).max() for a in got[0]) > 0


def test_process_rewards_alone_are_trained_on():
    """Equal rewards of the sequences: before, all advantages were 0."""
    equal = step_data([group_of([1.0] * 4, token_rewards=EARNED)])
    r = np.array([0.5, 0.75, 0.0, 0.75])
    expected = (r - r.mean()) / (r.std() + 1e-6)
    np.testing.assert_allclose(values(adv.group_normalized(equal)), expected, rtol=1e-6)


def test_gdpo_takes_what_tokens_earned_as_a_part_of_its_own():
    data = step_data([group_of([1.0, 0.0, 0.0, 0.0], token_rewards=EARNED)])

    def z(x):
        return (x - np.mean(x)) / (np.std(x) + 1e-6)

    sums = z(np.array([1.0, 0, 0, 0])) + 0.5 * z(np.array([0.5, 0.75, 0.0, 0.75]))
    got = adv.gdpo(data, weights={"tokens": 0.5})
    np.testing.assert_allclose(values(got), z(sums), rtol=1e-5)


def test_the_floor_keeps_small_differences_small():
    """Wrong answers whose rewards differ by 0.001 a token, with a group with a right one."""
    small, large = [-0.001, -0.002, -0.003, -0.004], [1.0, 0.0, 0.0, 0.0]
    for rewards in (small, large):
        r = np.array(rewards)
        for floor in (0.0, 0.1):
            got = values(adv.group_normalized(step(rewards), floor=floor))
            expected = (r - r.mean()) / (max(r.std(), floor) + 1e-6)
            np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert max(values(adv.group_normalized(step(small), floor=0.1))) < 0.02


TINY = [3e-7, 1e-7, 2e-7, 6e-7]
"""Rewards whose standard deviation is as small as epsilon: a default shows in the fourth digit."""


def z(x, epsilon):
    x = np.asarray(x, np.float64)
    return (x - x.mean()) / (x.std() + epsilon)


@pytest.mark.parametrize(
    ("name", "epsilon"),
    [("group_normalized", 1e-6), ("discounted", 1e-6), ("discounted_batch", 1e-6),
     ("reinforce_pp", 1e-8), ("reinforce_pp_baseline", 1e-8)],
)  # fmt: skip
def test_what_is_added_to_a_tiny_standard_deviation(name, epsilon):
    """One token each, so that tokens and sequences are the same."""
    group = group_of(TINY, [[0, 1]] * 4)
    (got,) = adv.advantage[name](step_data([group])).advantages
    np.testing.assert_allclose([a[1] for a in got], z(TINY, epsilon), rtol=1e-5)


def test_what_grpo_lead_gdpo_and_gae_add_to_a_tiny_standard_deviation():
    group = group_of(TINY, [[0, 1]] * 4)
    weight = 0.4 + 1.1 / (1 + exp(10 * (np.where(z(TINY, 1) > 0, 0.0, 1.0)[0] - 0.75)))
    got = values(adv.grpo_lead(step_data([group])))
    assert got[0] == pytest.approx(z(TINY, 1e-6)[0] * weight, rel=1e-5)
    twice = z(z(TINY, 1e-6), 1e-6)
    np.testing.assert_allclose(values(adv.gdpo(step_data([group]))), twice, rtol=1e-5)
    nothing = [[np.zeros(2, np.float32)] * 4]
    got = values(adv.gae(step_data([group], nothing)))
    np.testing.assert_allclose(got, z(TINY, 1e-8), rtol=1e-5)


def test_a_reward_of_exactly_the_threshold_is_not_right():
    rewards = [0.5, 1.0, 0.0, 0.0]
    binary = [0.0, 1.0, 0.0, 0.0]
    for k in (1, 2):
        got, wanted = (values(adv.pass_at_k(step(r), k=k)) for r in (rewards, binary))
        assert got == wanted
    got = values(adv.grpo_lead(step(rewards)))
    plain, rho = z(rewards, 1e-6), 0.25
    rates = np.where(plain > 0, rho, 1 - rho)
    expected = plain * (0.4 + 1.1 / (1 + np.exp(10 * (rates - 0.75))))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_pass_at_k_of_a_group_smaller_than_k_is_that_of_its_own_size():
    rewards = [1.0, 0.0, 0.0]
    assert values(adv.pass_at_k(step(rewards), k=3)) == values(adv.pass_at_k(step(rewards), k=4))


def test_maxrl_of_a_mean_that_is_not_above_0_is_nothing():
    assert values(adv.maxrl(step([1.0, -1.0]))) == [0.0, 0.0]
    np.testing.assert_allclose(values(adv.maxrl(step([0.25, 0.0]))), [1.0, -1.0], rtol=1e-6)


def test_opo_of_answers_without_a_token_is_less_the_plain_mean():
    group = group_of([1.0, 0.0, 0.5], [[0, 0], [0, 0], [0, 0]])
    assert all((a == 0).all() for a in adv.opo(step_data([group])).advantages[0])


def test_a_turn_begins_where_a_token_between_was_not_sampled():
    """Two sampled tokens side by side are one turn; one reply token between makes two."""
    group = group_of([1.0, 1.0], [[0, 1, 1], [0, 1, 0, 1]])
    data = step_data([group])
    ((a, b),) = adv.discounted_batch(data, gamma=0.5, turn_gamma=0.5, epsilon=1e-12).advantages
    raw = np.array([0.5, 1.0, 0.25, 1.0])
    np.testing.assert_allclose([*a[1:], b[1], b[3]], z(raw, 1e-12), rtol=1e-5)


def test_the_returns_of_gae_are_not_whitened():
    group = group_of([1.0, 0.0], [[0, 1], [0, 1]])
    critic = [[np.full(2, 0.25, np.float32)] * 2]
    found = adv.gae(step_data([group], critic), gamma=0.9, lam=0.8)
    assert [float(a[1]) for a in found.returns[0]] == pytest.approx([1.0, 0.0])
