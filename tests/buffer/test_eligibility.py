"""What may be trained on, asked again and again while groups come in, against asking anew."""

import pytest
from builders import episode_of, group_of
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.buffer.select import Eligibility
from jaxrl_async.staleness import drop_reason

VERSIONS = st.lists(st.integers(0, 4), min_size=1, max_size=3)


def group(number: int, versions: list[int]):
    return group_of(number, [episode_of([v]) for v in versions], version=min(versions))


@pytest.mark.full
@given(
    st.lists(st.tuples(VERSIONS, st.integers(0, 4), st.integers(0, 3)), max_size=8),
    st.sets(st.integers(0, 7)),
)
def test_each_question_is_answered_as_if_it_were_the_first(events, gone):
    """Between two questions a group comes in, and some that were there may have left."""
    judge, groups = Eligibility(), {}
    for number, (versions, version, bound) in enumerate(events):
        groups[number] = group(number, versions)
        wanted = {n: r for n, g in groups.items() if (r := drop_reason(g, version, bound))}
        assert judge.unfit(groups, version, bound) == wanted
        for left in (wanted.keys() | gone) & groups.keys():
            del groups[left]


def test_a_group_is_looked_at_once_for_a_version(monkeypatch):
    looked_at = []

    def noted(group, version, bound):
        looked_at.append(group.ticket.group)
        return drop_reason(group, version, bound)

    monkeypatch.setattr("jaxrl_async.buffer.select.drop_reason", noted)
    judge, groups = Eligibility(), {}
    for number in range(5):
        groups[number] = group(number, [0])
        judge.unfit(groups, 1, 1)
    assert looked_at == [0, 1, 2, 3, 4]
    assert len(judge.unfit(groups, 2, 1)) == 5 and len(looked_at) == 10
