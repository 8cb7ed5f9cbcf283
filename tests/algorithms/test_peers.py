"""Seats of a game against separate groups: every advantage, every shaping, dynamic sampling."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async import codec
from jaxrl_async.algorithms.advantages import StepAdvantages, StepData, advantage, step_data
from jaxrl_async.algorithms.peers import (
    by_peers,
    compared_with_peers,
    num_too_few,
    of_groups,
    split_group,
)
from jaxrl_async.algorithms.shaping import Shaped, compare_unmasked, has_signal, shape, shaping
from jaxrl_async.types import Episode, EpisodeGroup, Prompt, Score, StopReason, Ticket

SEATS = ("first", "second")
SHAPINGS = {
    "soft_overlong": {"max_tokens": 4, "cache_tokens": 2},
    "cap": {"low": -0.5, "high": 0.5},
    "missing_eos": {},
    "concise": {},
    "length_reward": {},
    "mask_truncated": {},
    "overlong_filter": {"max_tokens": 3},
    "downsample": {"keep": 2},
}


def group_of(seed: int, seats: tuple[str, ...], number: int = 0) -> EpisodeGroup:
    """Episodes of different lengths and rewards, one for each of these seats, in this order."""
    rng = np.random.default_rng(seed)
    episodes, scores = [], []
    for index, seat in enumerate(seats):
        length = 4 + int(rng.integers(0, 4))
        sampled = rng.random(length) < 0.7
        sampled[0], sampled[-1] = False, True
        episodes.append(
            Episode(
                token_ids=rng.integers(0, 9, length).astype(np.int32),
                drawn=sampled,
                logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
                versions=np.where(sampled, 3, -1).astype(np.int32),
                stop=StopReason.LENGTH if index % 3 == 1 else StopReason.EOS,
                seat=seat,
                peers=seat,
            )
        )
        reward, earned = float(rng.integers(0, 2)), rng.random(length).astype(np.float32)
        parts = {"a": reward, "b": -2 * reward}
        scores.append(Score(reward=reward, parts=parts, token_rewards=earned * sampled))
    prompt = Prompt(prompt_id=0, position=0, token_ids=np.zeros(1, np.int32), text="", reference="")
    return EpisodeGroup(
        prompt=prompt,
        episodes=tuple(episodes),
        scores=tuple(scores),
        ticket=Ticket(group=number, version=3),
    )


def split(group: EpisodeGroup) -> list[tuple[list[int], EpisodeGroup]]:
    """The group of each seat alone, written out, and where its episodes were."""
    found = []
    for seat in dict.fromkeys(e.seat for e in group.episodes):
        indices = [i for i, e in enumerate(group.episodes) if e.seat == seat]
        alone = [replace(group.episodes[i], seat="", peers="") for i in indices]
        scores = tuple(group.scores[i] for i in indices)
        found.append((indices, replace(group, episodes=tuple(alone), scores=scores)))
    return found


def valued(groups: list[EpisodeGroup]) -> StepData:
    """A step with a critic, whose values depend on the tokens alone."""
    values = [[e.token_ids.astype(np.float32) / 9 for e in g.episodes] for g in groups]
    last = tuple(np.array([v[-1] for v in of], np.float64) for of in values)
    return replace(step_data(groups, values), last_values=last)


orders = st.lists(st.sampled_from(SEATS), min_size=1, max_size=7).map(tuple)


@pytest.mark.full
@settings(max_examples=6, deadline=None)
@given(st.lists(orders, min_size=1, max_size=3), st.integers(0, 99))
@pytest.mark.parametrize("name", sorted(advantage))
def test_each_seat_is_compared_as_a_group_of_its_own(
    name: str, seats: list[tuple[str, ...]], seed: int
) -> None:
    groups = [group_of(seed + n, of, n) for n, of in enumerate(seats)]
    found = compared_with_peers(valued(groups), advantage[name], trunk="group")
    parts = [(n, *part) for n, group in enumerate(groups) for part in split(group)]
    wanted = advantage[name](valued([alone for _, _, alone in parts]))
    assert (found.returns is None) == (wanted.returns is None)
    for column, expected in (
        (found.advantages, wanted.advantages),
        (found.returns, wanted.returns),
    ):
        if column is None or expected is None:
            continue
        assert [len(of) for of in column] == [len(of) for of in seats]
        for (n, indices, _), values in zip(parts, expected, strict=True):
            for index, of_episode in zip(indices, values, strict=True):
                np.testing.assert_array_equal(column[n][index], of_episode)


@pytest.mark.parametrize("name", sorted(shaping))
def test_each_seat_is_shaped_as_a_group_of_its_own(name: str) -> None:
    def function(shaped: Shaped) -> Shaped:
        return shaping[name](shaped, **SHAPINGS[name])

    groups = [group_of(7 * n, SEATS * 3, n) for n in range(4)]
    found = shape(step_data(groups), [function])
    parts = [part for group in groups for _, part in split(group)]
    wanted = shape(step_data(parts), [function])
    assert found.counts == wanted.counts
    again = by_peers(found.data)
    assert len(again.groups) == len(wanted.data.groups) and len(found.data.groups) == 4
    for mine, other in zip(again.groups, wanted.data.groups, strict=True):
        assert [codec.dumps(e.token_ids).tobytes() for e in mine.episodes] == [
            codec.dumps(e.token_ids).tobytes() for e in other.episodes
        ]
    for mine, other in zip(again.rewards, wanted.data.rewards, strict=True):
        np.testing.assert_array_equal(mine, other)
    flat = [mask for of in wanted.masks for mask in of]
    order = [index for group in groups for indices, _ in split(group) for index in indices]
    if len(flat) == sum(len(g.episodes) for g in groups):  # in each group, in its own order
        for n, group in enumerate(groups):
            size = len(group.episodes)
            by_index = dict(zip(order[n * size :][:size], flat[n * size :][:size], strict=True))
            for index, mask in enumerate(found.masks[n]):
                np.testing.assert_array_equal(mask, by_index[index])
    for group, masks in zip(found.data.groups, found.masks, strict=True):
        assert [len(e.token_ids) for e in group.episodes] == [len(m) for m in masks]


def test_a_game_has_something_to_learn_if_one_seat_has() -> None:
    group = group_of(0, SEATS * 2)
    always = replace(group, scores=tuple(Score(reward=r) for r in (1.0, 0.0, 1.0, 0.0)))
    once = replace(group, scores=tuple(Score(reward=r) for r in (1.0, 0.0, 1.0, 0.5)))
    assert not has_signal(always), "the first seat always wins: no seat was better than its peers"
    assert has_signal(once) and not has_signal(once, least_std=0.3)
    plain = tuple(replace(e, seat="", peers="") for e in group.episodes)
    assert has_signal(replace(always, episodes=plain))


def test_seats_survive_bytes_and_come_back_in_their_order() -> None:
    group = group_of(1, ("second", "first", "second"))
    back = codec.loads(codec.dumps(group))
    assert [(e.seat, e.peers) for e in back.episodes] == [(e.seat, e.peers) for e in group.episodes]
    assert [len(one.episodes) for one in split_group(back)] == [2, 1]
    data = valued([group])
    estimates = advantage["reinforce"](by_peers(data))
    assert [len(a) for a in of_groups(estimates, data.groups).advantages[0]] == [
        len(e.token_ids) for e in group.episodes
    ]


# ---- who is in the baseline


def masked(rewards: list[list[float]], cut: list[tuple[int, ...]], peers: str = "") -> StepData:
    """Groups of these rewards, of which the answers `cut` are masked as too long."""
    groups = []
    for number, (of, out) in enumerate(zip(rewards, cut, strict=True)):
        whole = group_of(number, ("",) * len(of), number)
        stops = [StopReason.LENGTH if i in out else StopReason.EOS for i in range(len(of))]
        episodes = tuple(
            replace(e, stop=stop, peers=peers and peers[i])
            for i, (e, stop) in enumerate(zip(whole.episodes, stops, strict=True))
        )
        scores = tuple(Score(reward=r, parts={"a": r, "b": -2 * r}) for r in of)
        groups.append(replace(whole, episodes=episodes, scores=scores))
    return compare_unmasked(shape(step_data(groups), [shaping.resolve("mask_truncated")])).data


def numbers(data: StepData, name: str, least: int = 2) -> list[list[float]]:
    """One number for each answer: that of its last token, which the policy sampled."""
    found = compared_with_peers(data, advantage[name], trunk="group", least=least)
    return [[float(a[-1]) for a in of] for of in found.advantages]


@pytest.mark.parametrize(
    ("name", "rewards", "cut", "wanted"),
    [
        ("rloo", [1, 1, 0], (2,), [0, 0, 0]),
        ("rloo", [1, 1, 0], (), [0.5, 0.5, -1]),
        ("rloo", [1, 0, 9, 1, -9], (2, 4), [0.5, -1, 0, 0.5, 0]),
        ("rloo", [3, 0, 9], (2,), [3, -3, 0]),
        ("group_mean", [1, 0, 9, 1, -9], (2, 4), [1 / 3, -2 / 3, 0, 1 / 3, 0]),
        ("group_normalized", [1, 0, 9], (2,), [1, -1, 0]),
        ("maxrl", [1, 0, 9], (2,), [1, -1, 0]),
        ("rloo", [1, 0, 9], (1, 2), [0, 0, 0]),
        ("rloo", [1, 0, 9], (0, 1, 2), [0, 0, 0]),
    ],
)
def test_masked_answers_are_in_no_baseline(name, rewards, cut, wanted) -> None:
    found = numbers(masked([rewards, [1, 0]], [cut, ()]), name)
    np.testing.assert_allclose(found[0], wanted, atol=1e-5)
    np.testing.assert_array_equal(found[1], numbers(masked([[1, 0]], [()]), name)[0])


@pytest.mark.parametrize("name", sorted(n for n in advantage if n not in ("gae", "reinforce")))
def test_every_advantage_is_that_of_a_step_without_the_masked_answers(name) -> None:
    rewards = [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    data = masked(rewards, [(1,), (0, 4), ()])
    kept = [np.flatnonzero(c) for c in data.compared]
    small = step_data(
        [
            replace(
                g,
                episodes=tuple(g.episodes[i] for i in of),
                scores=tuple(g.scores[i] for i in of),
            )
            for g, of in zip(data.groups, kept, strict=True)
        ]
    )
    whole = compared_with_peers(data, advantage[name], trunk="group").advantages
    alone = compared_with_peers(small, advantage[name], trunk="group").advantages
    for of, values, wanted in zip(kept, whole, alone, strict=True):
        for index, value in enumerate(values):
            at = of.tolist().index(index) if index in of else None
            np.testing.assert_array_equal(value, 0 * value if at is None else wanted[at])


def test_a_group_of_which_too_few_are_left_learns_nothing_and_is_counted() -> None:
    data = masked([[1, 0, 1, 9], [1, 0, 1, 0], [1, 0, 9, 9]], [(3,), (), (1, 2, 3)])
    assert numbers(data, "rloo", 3)[0] == [0.5, -1, 0.5, 0] and num_too_few(data, 3) == 1
    assert numbers(data, "rloo", 4)[0] == [0, 0, 0, 0] and num_too_few(data, 4) == 4
    assert any(numbers(data, "rloo", 4)[1]) and num_too_few(data, 2) == 1
    assert num_too_few(replace(data, compared=None), 9) == 0


def test_returns_of_an_estimator_without_a_critic_are_left_out() -> None:
    """A user's own may give them, and no critic learns them."""
    data = masked([[1.0, 0.0, 1.0]], [(2,)])

    def mine(data: StepData) -> StepAdvantages:
        found = advantage["group_mean"](data)
        return replace(found, returns=found.advantages)

    found = compared_with_peers(data, mine, trunk="group")
    assert found.returns is None
    assert [float(a.max() + a.min()) for a in found.advantages[0]] == [0.5, -0.5, 0.0]


def test_seats_are_compared_without_their_masked_answers() -> None:
    data = masked([[1, 5, 0, 3, 9, 9]], [(4, 5)], peers="ababab")
    assert numbers(data, "rloo")[0] == [1, 2, -1, -2, 0, 0]
    assert num_too_few(masked([[1, 5, 0, 3]], [(2,)], peers="abab"), 2) == 1


def test_an_answer_without_sampled_tokens_is_not_masked_and_counts() -> None:
    group = group_of(0, ("", "", ""))
    none = replace(group.episodes[0], drawn=np.zeros_like(group.episodes[0].drawn))
    step = step_data([replace(group, episodes=(none, *group.episodes[1:]))])
    compared = compare_unmasked(shape(step, [shaping.resolve("mask_truncated")])).data.compared
    assert compared[0].tolist() == [True, False, True], "the second one ran into the limit"
