"""Seats of a game beside groups of their own: every advantage, every shaping, dynamic sampling."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async import codec
from jaxrl_async.algorithms.advantages import StepData, advantage, step_data
from jaxrl_async.algorithms.peers import by_peers, compared_with_peers, of_groups, split_group
from jaxrl_async.algorithms.shaping import Shaped, has_signal, shape, shaping
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
    for place, seat in enumerate(seats):
        length = 4 + int(rng.integers(0, 4))
        drawn = rng.random(length) < 0.7
        drawn[0], drawn[-1] = False, True
        episodes.append(
            Episode(
                token_ids=rng.integers(0, 9, length).astype(np.int32),
                drawn=drawn,
                logprobs=np.where(drawn, -1.0, 0.0).astype(np.float32),
                versions=np.where(drawn, 3, -1).astype(np.int32),
                stop=StopReason.LENGTH if place % 3 == 1 else StopReason.EOS,
                seat=seat,
                peers=seat,
            )
        )
        reward, earned = float(rng.integers(0, 2)), rng.random(length).astype(np.float32)
        parts = {"a": reward, "b": -2 * reward}
        scores.append(Score(reward=reward, parts=parts, token_rewards=earned * drawn))
    prompt = Prompt(prompt_id=0, position=0, token_ids=np.zeros(1, np.int32), text="", reference="")
    return EpisodeGroup(
        prompt=prompt,
        episodes=tuple(episodes),
        scores=tuple(scores),
        ticket=Ticket(group=number, version=3),
    )


def apart(group: EpisodeGroup) -> list[tuple[list[int], EpisodeGroup]]:
    """The group of each seat alone, written out, and where its episodes were."""
    found = []
    for seat in dict.fromkeys(e.seat for e in group.episodes):
        places = [i for i, e in enumerate(group.episodes) if e.seat == seat]
        alone = [replace(group.episodes[i], seat="", peers="") for i in places]
        scores = tuple(group.scores[i] for i in places)
        found.append((places, replace(group, episodes=tuple(alone), scores=scores)))
    return found


def valued(groups: list[EpisodeGroup]) -> StepData:
    """A step with a critic, whose values depend on the tokens alone."""
    values = [[e.token_ids.astype(np.float32) / 9 for e in g.episodes] for g in groups]
    last = tuple(np.array([v[-1] for v in of], np.float64) for of in values)
    return replace(step_data(groups, values), last_values=last)


orders = st.lists(st.sampled_from(SEATS), min_size=1, max_size=7).map(tuple)


@settings(max_examples=6, deadline=None)
@given(st.lists(orders, min_size=1, max_size=3), st.integers(0, 99))
@pytest.mark.parametrize("name", sorted(advantage))
def test_each_seat_is_compared_as_a_group_of_its_own(
    name: str, seats: list[tuple[str, ...]], seed: int
) -> None:
    groups = [group_of(seed + n, of, n) for n, of in enumerate(seats)]
    found = compared_with_peers(valued(groups), advantage[name], trunk="group")
    parts = [(n, *part) for n, group in enumerate(groups) for part in apart(group)]
    wanted = advantage[name](valued([alone for _, _, alone in parts]))
    assert (found.returns is None) == (wanted.returns is None)
    for column, expected in (
        (found.advantages, wanted.advantages),
        (found.returns, wanted.returns),
    ):
        if column is None or expected is None:
            continue
        assert [len(of) for of in column] == [len(of) for of in seats]
        for (n, places, _), values in zip(parts, expected, strict=True):
            for place, of_episode in zip(places, values, strict=True):
                np.testing.assert_array_equal(column[n][place], of_episode)


@pytest.mark.parametrize("name", sorted(shaping))
def test_each_seat_is_shaped_as_a_group_of_its_own(name: str) -> None:
    def function(shaped: Shaped) -> Shaped:
        return shaping[name](shaped, **SHAPINGS[name])

    groups = [group_of(7 * n, SEATS * 3, n) for n in range(4)]
    found = shape(step_data(groups), [function])
    parts = [part for group in groups for _, part in apart(group)]
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
    order = [place for group in groups for places, _ in apart(group) for place in places]
    if len(flat) == sum(len(g.episodes) for g in groups):  # in each group, in its own order
        for n, group in enumerate(groups):
            size = len(group.episodes)
            placed = dict(zip(order[n * size :][:size], flat[n * size :][:size], strict=True))
            for place, mask in enumerate(found.masks[n]):
                np.testing.assert_array_equal(mask, placed[place])
    for group, masks in zip(found.data.groups, found.masks, strict=True):
        assert [len(e.token_ids) for e in group.episodes] == [len(m) for m in masks]


def test_a_game_has_something_to_learn_if_one_seat_has() -> None:
    group = group_of(0, SEATS * 2)
    always = replace(group, scores=tuple(Score(reward=r) for r in (1.0, 0.0, 1.0, 0.0)))
    once = replace(group, scores=tuple(Score(reward=r) for r in (1.0, 0.0, 1.0, 0.5)))
    assert not has_signal(always), "the first seat always wins: nobody was better than its peers"
    assert has_signal(once) and not has_signal(once, least_std=0.3)
    plain = tuple(replace(e, seat="", peers="") for e in group.episodes)
    assert has_signal(replace(always, episodes=plain))


def test_seats_survive_bytes_and_come_back_in_their_order() -> None:
    group = group_of(1, ("second", "first", "second"))
    back = codec.loads(codec.dumps(group))
    assert [(e.seat, e.peers) for e in back.episodes] == [(e.seat, e.peers) for e in group.episodes]
    assert [len(one.episodes) for one in split_group(back)] == [2, 1]
    data = valued([group])
    learnt = advantage["reinforce"](by_peers(data))
    assert [len(a) for a in of_groups(learnt, data.groups).advantages[0]] == [
        len(e.token_ids) for e in group.episodes
    ]
