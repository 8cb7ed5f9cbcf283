"""Along the tree everybody gets everything, whoever dies; the trainer sends little."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from relay_tree import sources

from jaxrl_async.remote.weights.transfers import MOST_SOURCES

TRAINER = "trainer"


def named(count):
    return [f"m{n}" for n in range(count)]


def transfer(members, fanout, num_pieces, deaths, seed):
    """Pieces go along the tree in random order of turns; return who has what, and who sent it.

    deaths: {member: after how many of its pieces it dies}.
    """
    random_turns = random.Random(seed)
    left = dict(zip(members, map(list, sources(members, fanout, TRAINER)), strict=True))
    has = dict.fromkeys(members, 0) | {TRAINER: num_pieces}
    sent = dict.fromkeys(has, 0)
    dead = set()
    for _ in range(100 * len(members) * num_pieces):
        waiting = [m for m in members if m not in dead and has[m] < num_pieces]
        if not waiting:
            break
        member = random_turns.choice(waiting)
        source = left[member][0]
        if source in dead:
            left[member].pop(0)
        elif has[source] > has[member]:
            has[member] += 1
            sent[source] += 1
        if has[member] >= deaths.get(member, num_pieces + 1):
            dead.add(member)
    return has, sent, dead


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 24),
    st.integers(1, 4),
    st.dictionaries(st.integers(0, 23), st.integers(0, 8)),
    st.integers(),
)
def test_everybody_alive_gets_everything_whoever_dies(count, fanout, deaths, seed):
    members = named(count)
    dying = {f"m{n}": after for n, after in deaths.items() if n < count}
    has, sent, dead = transfer(members, fanout, 8, dying, seed)
    assert all(has[m] == 8 for m in members if m not in dead)
    if not dead:
        assert sent[TRAINER] == 8 * min(fanout, count)
        assert all(n <= 8 * fanout for n in sent.values())


def test_one_death_moves_only_the_dead_ones_children_and_not_to_the_trainer():
    members = named(14)
    for victim in members[2:]:
        has, sent, dead = transfer(members, 2, 8, {victim: 3}, seed=1)
        assert dead == {victim} and sent[TRAINER] == 16
        assert all(has[m] == 8 for m in members if m != victim)


@given(
    st.lists(st.booleans(), max_size=40),
    st.integers(1, 5),
    st.booleans(),
)
def test_sources_joined_before_and_appending_a_member_changes_nothing(passing, fanout, trainer):
    members = [f"m{n}" if passes else "" for n, passes in enumerate(passing)]
    last = TRAINER if trainer else ""
    found = sources(members, fanout, last)
    assert sources([*members, "new"], fanout, last)[:-1] == found
    for number, chain in enumerate(found):
        assert len(set(chain)) == len(chain) <= MOST_SOURCES
        assert (chain[-1:] == (TRAINER,)) == trainer
        before = [m for m in members[:number] if m]
        assert set(chain) - {TRAINER} <= set(before)
    children = [chain[0] for chain, m in zip(found, members, strict=True) if m and chain]
    assert all(children.count(m) <= fanout for m in set(children) - {TRAINER})


def test_the_drawing_in_the_docstring():
    assert sources(named(6), 2, TRAINER) == (
        ("trainer",),
        ("trainer",),
        ("m0", "m1", "trainer"),
        ("m0", "m1", "trainer"),
        ("m1", "m0", "trainer"),
        ("m1", "m0", "trainer"),
    )
