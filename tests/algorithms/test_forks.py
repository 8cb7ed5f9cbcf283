"""Advantages among peers and in forks against sums written out; none is lost or trained twice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.algorithms.advantages import advantage, step_data
from jaxrl_async.algorithms.forks import (
    ForkPoint,
    fork_point,
    with_references,
    without_forks,
)
from jaxrl_async.algorithms.peers import by_peers, classes_of, compared_with_peers
from jaxrl_async.algorithms.shaping import has_signal, shape, shaping
from jaxrl_async.types import Episode, EpisodeGroup, Prompt, Score, StopReason, Ticket

PROMPT = Prompt(prompt_id=0, position=0, token_ids=np.zeros(2, np.int32), text="", reference="")


def episode(length: int, begin: int, peers: str = "") -> Episode:
    sampled = np.arange(length) >= begin
    return Episode(
        token_ids=np.arange(length, dtype=np.int32),
        drawn=sampled,
        logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        stop=StopReason.EOS,
        peers=peers,
    )


def group(*members: tuple[Episode, Score | float]) -> EpisodeGroup:
    scores = [s if isinstance(s, Score) else Score(reward=s) for _, s in members]
    return EpisodeGroup(
        prompt=PROMPT,
        episodes=tuple(e for e, _ in members),
        scores=tuple(scores),
        ticket=Ticket(group=0, version=0),
    )


def normalized(values: list[float]) -> np.ndarray:
    x = np.array(values)
    return (x - x.mean()) / (x.std() + 1e-6) if x.std() else x * 0


trees = st.lists(
    st.tuples(
        st.integers(1, 6),  # sampled tokens of a member
        st.floats(-2, 2, width=16),  # its reward
        st.lists(  # its pivots: start, and lengths and rewards of continuations
            st.tuples(
                st.integers(1, 5),
                st.lists(
                    st.tuples(st.integers(1, 4), st.floats(-2, 2, width=16)), min_size=1, max_size=3
                ),
            ),
            max_size=2,
            unique_by=lambda pivot: pivot[0],
        ),
    ),
    min_size=1,
    max_size=4,
)


def planted(tree: list) -> tuple[EpisodeGroup, dict[ForkPoint, list[int]]]:
    """A group, and the indices of each fork's continuations."""
    members = [(episode(2 + length, 2), reward) for length, reward, _ in tree]
    forks: dict[ForkPoint, list[int]] = {}
    for trunk, (length, _, pivots) in enumerate(tree):
        for at, continuations in pivots:
            if at >= length:
                continue
            point = ForkPoint(trunk, 2 + at)
            for count, reward in continuations:
                forks.setdefault(point, []).append(len(members))
                members.append((episode(2 + at + count, 2 + at, point.name), reward))
    return group(*members), forks


@pytest.mark.full
@given(several=st.lists(trees, min_size=1, max_size=3), trunk=st.sampled_from(["group", "fork"]))
def test_each_sampled_token_has_the_advantage_of_one_comparison(several, trunk) -> None:
    planted_groups = [planted(tree) for tree in several]
    groups = [g for g, _ in planted_groups]
    data = step_data(groups)
    result = compared_with_peers(data, advantage.resolve("group_normalized"), trunk=trunk)
    assert len(result.advantages) == len(groups)
    for (whole, forks), found, tree in zip(planted_groups, result.advantages, several, strict=True):
        rewards = [s.reward for s in whole.scores]
        wanted = [np.zeros(len(e.token_ids)) for e in whole.episodes]
        for i, value in enumerate(normalized(rewards[: len(tree)])):
            wanted[i][2:] = value
        for point, indices in sorted(forks.items()):
            values = normalized([*(rewards[i] for i in indices), rewards[point.trunk]])
            for i, value in zip(indices, values, strict=False):
                wanted[i][point.start :] = value
            if trunk == "fork":
                wanted[point.trunk][point.start :] = values[-1]
        assert len(found) == len(whole.episodes)
        for one, values, right in zip(whole.episodes, found, wanted, strict=True):
            np.testing.assert_allclose(values, right, atol=2e-6)
            assert not values[~one.drawn].any()


@given(tree=trees)
def test_references_come_and_go_without_a_trace(tree) -> None:
    whole, forks = planted(tree)
    referred = with_references(whole)
    assert len(referred.episodes) == len(whole.episodes) + len(forks)
    classes = classes_of(referred)
    assert sorted(i for indices in classes for i in indices) == list(range(len(referred.episodes)))
    for reference in referred.episodes[len(whole.episodes) :]:
        point = fork_point(reference)
        shared = whole.episodes[point.trunk]
        assert reference.num_drawn == len(shared.token_ids) - point.start
    assert without_forks(whole).episodes == whole.episodes[: len(tree)]


def test_a_seats_word_is_no_fork_and_splits_all_the_same() -> None:
    words = ["white", "black", "white", "black"]
    whole = group(*((episode(4, 2, w), r) for w, r in zip(words, [1, 0, 3, 10], strict=True)))
    assert all(fork_point(e) is None for e in whole.episodes)
    assert [len(g.episodes) for g in by_peers(step_data([whole])).groups] == [2, 2]
    result = compared_with_peers(step_data([whole]), advantage.resolve("group_mean"), trunk="group")
    assert [a[-1] for a in result.advantages[0]] == [-1, -5, 1, 5]


def test_what_the_trunk_earned_before_the_pivot_does_not_count_in_the_fork() -> None:
    earned = Score(reward=1.0, token_rewards=np.array([0, 0, 7, 0, 0.5, 0], np.float32))
    point = ForkPoint(0, 4)
    whole = group((episode(6, 2), earned), (episode(6, 2), 1.0), (episode(7, 4, point.name), 0.5))
    mean = advantage.resolve("group_mean")
    found = compared_with_peers(step_data([whole]), mean, trunk="fork").advantages[0]
    assert found[2].tolist() == [0, 0, 0, 0, -0.5, -0.5, -0.5], "0.5 against 1 + 0.5"
    assert found[0].tolist() == [0, 0, 3.75, 3.75, 0.5, 0.5], "8.5 against 1, then the fork's"


@pytest.mark.full
@given(tree=trees)
def test_shapings_compare_among_peers_and_leave_the_order_as_it_was(tree) -> None:
    whole, forks = planted(tree)
    plain = group(*((episode(5, 2), 0.0), (episode(3, 2), 1.0)))
    shaped = shape(
        step_data([whole, plain]), [shaping.resolve("concise"), shaping.resolve("mask_truncated")]
    )
    assert [g.episodes for g in shaped.data.groups] == [whole.episodes, plain.episodes]
    assert [g.scores for g in shaped.data.groups] == [whole.scores, plain.scores]
    alone = [list(range(len(tree))), *forks.values()]
    wanted = np.zeros(len(whole.episodes))
    for indices in alone:
        part = group(*((whole.episodes[i], whole.scores[i]) for i in indices))
        wanted[indices] = shape(step_data([part]), [shaping.resolve("concise")]).data.rewards[0]
    np.testing.assert_array_equal(shaped.data.rewards[0], wanted)
    for masks, one in zip(shaped.masks, shaped.data.groups, strict=True):
        assert all((m == e.drawn).all() for m, e in zip(masks, one.episodes, strict=True))


def test_a_downsample_keeps_so_many_of_each_seat() -> None:
    words = ["white", "black"] * 3
    whole = group(*((episode(4, 2, w), float(i % 3)) for i, w in enumerate(words)))
    shaped = shape(step_data([whole]), [shaping.resolve({"downsample": {"keep": 2}})])
    assert [e.peers for e in shaped.data.groups[0].episodes] == ["white"] * 2 + ["black"] * 2
    assert len(shaped.data.rewards[0]) == len(shaped.masks[0]) == 4


@pytest.mark.parametrize("reward, learns", [(1.0, False), (0.0, True)])
def test_a_fork_that_differs_from_its_trunk_is_a_signal(reward: float, learns: bool) -> None:
    name = ForkPoint(0, 3).name
    whole = group((episode(5, 2), 1.0), (episode(5, 2), 1.0), (episode(5, 3, name), reward))
    assert has_signal(whole) is learns
