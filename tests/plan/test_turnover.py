"""Simulated samplers that come and go: nothing is lost, and staleness keeps its bound."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.errors import ConfigError
from jaxrl_async.plan import simulate as module
from jaxrl_async.plan.pipeline import (
    FleetChange,
    Histogram,
    Pipeline,
    Samplers,
    TransferTree,
    Turnover,
)
from jaxrl_async.plan.simulate import simulate
from jaxrl_async.plan.simulated_sampler import DRAWN, GROUP, LEFT
from jaxrl_async.plan.weight_tree import TRAINER, WeightTree

TREE = TransferTree(num_bytes=1.0, trainer_bytes_per_s=2.0, sampler_bytes_per_s=2.0)
"""A transfer takes a second if its source sends to two, half of that if to one."""
FLEET = Pipeline(
    samplers=Samplers(count=4, slots=8, rows=(8,), step_s=(0.01,), block=8, swap_s=0.01),
    answer_tokens=Histogram.of([8, 20, 20, 60]),
    prompt_tokens=10,
    group_size=4,
    groups_per_step=6,
    max_staleness=2,
    update_s=0.5,
    tree=replace(TREE, num_bytes=0.1),
)


@st.composite
def fleets(draw):
    """Small fleets, of which samplers leave, are killed, and are replaced all the time."""
    seconds = st.sampled_from([0.0, 0.05, 0.6])
    count, staleness, per_step = (
        draw(st.integers(1, 4)),
        draw(st.integers(0, 3)),
        draw(st.integers(1, 4)),
    )
    change = st.builds(
        FleetChange,
        at_s=st.floats(0.0, 8.0),
        joins=st.integers(0, 2),
        leaves=st.integers(0, 2),
        kills=st.integers(0, 2),
    )
    changes = tuple(draw(st.lists(change, max_size=5)))
    last = FleetChange(at_s=9.0, joins=1)  # so that somebody is there in the end
    side = replace(
        FLEET.samplers,
        count=count,
        slots=draw(st.integers(1, 9)),
        reserve=draw(st.integers(0, 3)),
        prefill_s=draw(seconds),
        prefill_chunk=draw(st.integers(8, 40)),
        swap_s=draw(seconds),
    )
    return replace(
        FLEET,
        samplers=side,
        group_size=draw(st.integers(1, 4)),
        groups_per_step=per_step,
        max_staleness=staleness,
        lookahead=draw(st.integers(0, staleness * per_step)),
        when_too_old=draw(st.sampled_from(["wait", "drop"])),
        update_s=draw(seconds),
        publish_s=draw(seconds),
        tree=TransferTree(
            num_bytes=draw(st.sampled_from([0.0, 0.2, 3.0])),
            trainer_bytes_per_s=2.0,
            sampler_bytes_per_s=1.0,
            fanout=draw(st.integers(1, 3)),
            hop_s=draw(seconds),
        ),
        turnover=Turnover(
            changes=(*changes, last),
            preempted_per_minute=draw(st.sampled_from([0.0, 6.0, 30.0])),
            handed_back_share=draw(st.sampled_from([0.0, 0.5, 1.0])),
            handover_s=draw(seconds),
            noticed_s=draw(seconds),
            replaced_s=Histogram.of([0.0, draw(seconds)]),
            start_s=draw(seconds),
        ),
    )


def unfinished(run):
    """Answers that some sampler, or nobody, has: by group, and their tokens."""
    fleet = run.fleet
    holders = [*fleet.at_work.values(), *fleet.unnoticed.values()]
    parts = [s.seqs[:, : s.held] for s in holders] + [c for s in holders for c in s.queue]
    parts += [*fleet._moving, *fleet._homeless]
    groups = Counter(n for part in parts for n in part[GROUP].tolist())
    return groups, [n for part in parts for n in (part[LEFT] + part[DRAWN]).tolist()]


@given(fleets())
@settings(max_examples=150, deadline=None)
def test_whoever_joins_and_leaves_nothing_is_lost_and_staleness_keeps_its_bound(pipeline):
    run = module._Run(pipeline, seed=0)
    for updates in range(1, 13):
        totals = run.to(updates)
        assert 0 <= totals.oldest <= pipeline.max_staleness
        groups, lengths = unfinished(run)
        assert groups == {n: g.left for n, g in run.pending.items() if g.left}
        assert set(lengths) <= {8, 20, 60}, "a moved answer ends where it would have ended"
    fleet = totals.fleet
    left = run.fleet.left_tokens + sum(g.tokens for g in run.pending.values())
    assert fleet.drawn == totals.trained + run.dropped_tokens + left + fleet.lost
    assert len(run.fleet.at_work) == pipeline.samplers.count + fleet.joins - fleet.leaves - (
        fleet.kills - sum(s.leaves for s in run.fleet.at_work.values())
    )
    assert (fleet.lost == 0) or fleet.kills
    if pipeline.turnover.handed_back_share == 1 and not any(
        c.kills for c in pipeline.turnover.changes
    ):
        assert fleet.lost == fleet.begun_again == 0


@given(fleets())
@settings(max_examples=30, deadline=None)
def test_the_same_turnover_and_seed_have_the_same_outcome(pipeline):
    assert simulate(pipeline, updates=8, warm_up=2) == simulate(pipeline, updates=8, warm_up=2)


GOLDEN = Pipeline(
    samplers=Samplers(
        count=3, slots=6, reserve=2, rows=(1, 8), step_s=(0.01, 0.02), block=4, block_s=0.01,
        context_token_s=1e-4, prefill_s=0.02, prefill_chunk=30, swap_s=0.05,
    ),
    answer_tokens=Histogram.of([3, 9, 9, 20, 60]),
    prompt_tokens=11, group_size=3, groups_per_step=4, max_staleness=2, lookahead=3,
    score_s=Histogram.of([0.0, 0.3]), scorers=2, update_s=0.3, update_token_s=1e-3,
    publish_s=0.02, transfer_s=0.4, report_s=0.03, save_every=3, save_s=0.2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "wall_s", "drawn", "staleness", "occupancy"),
    [
        ({}, 35.96957142857142, 7417, 1.1873649210307564, 0.4239355105415461),
        (
            {"lookahead": 0, "when_too_old": "drop"},
            36.70185714285714, 15988, 1.4868129998298452, 0.7647433669331479,
        ),
        (
            {"max_staleness": 0, "lookahead": 0, "scorers": None},
            71.1609428571428, 7135, 0.0, 0.3269903762029746,
        ),
    ],
)  # fmt: skip
def test_threads_are_simulated_as_before_samplers_came_and_went(
    change, wall_s, drawn, staleness, occupancy
):
    """Numbers of the simulation that knew no turnover, compared with runs in docs/plans.md."""
    told = simulate(replace(GOLDEN, **change), updates=30, warm_up=5, seed=3)
    assert (told.wall_s, told.staleness_mean) == pytest.approx((wall_s, staleness), rel=1e-12)
    assert (told.drawn_tokens, told.slot_occupancy) == pytest.approx((drawn, occupancy), rel=1e-12)


@given(fleets())
@settings(max_examples=30, deadline=None)
def test_in_turns_nobody_who_comes_or_goes_is_the_same_as_threads(pipeline):
    """In turns the trainer has nothing to publish before the samplers have taken the last."""
    tree = replace(pipeline.tree, num_bytes=0.0)
    turns = replace(pipeline, max_staleness=0, lookahead=0, when_too_old="wait", turnover=None)
    flat = replace(tree, fanout=turns.samplers.count)
    remote = replace(turns, tree=flat, turnover=Turnover())
    threads = replace(turns, tree=None, transfer_s=turns.publish_s + tree.hop_s)
    ours, theirs = (simulate(p, updates=12, warm_up=3) for p in (remote, threads))
    assert ours.wall_s == pytest.approx(theirs.wall_s)
    assert ours.sampler_busy_share == pytest.approx(theirs.sampler_busy_share)
    assert (ours.drawn_tokens, ours.staleness_max) == (theirs.drawn_tokens, 0)


def test_the_trainer_waits_for_no_transfer():
    """A transfer of 2 s holds the next publish up where samplers are threads, and not here."""
    slow = replace(FLEET, max_staleness=8, update_s=0.7, tree=replace(TREE, num_bytes=4.0))
    told = simulate(slow, updates=40, warm_up=10)
    assert told.wait_publish_share == 0 and told.staleness_max <= 8
    assert told.aborted_transfers > 0, "a newer version replaced an older offer"
    threads = simulate(replace(slow, tree=None, transfer_s=2.0), updates=40, warm_up=10)
    assert threads.wait_publish_share > 0.5


def test_a_version_goes_down_the_tree_level_by_level():
    """7 samplers, two at a time: 1 s for each level; the last has one child less to serve."""
    tree, now, arrived = WeightTree(TREE), 0.0, {}
    tree.offer(1, range(7), now)
    coming = tree.start(now)
    while coming:
        sending = min(coming, key=lambda s: (s.began_s + s.seconds, s.sampler))
        coming.remove(sending)
        now = sending.began_s + sending.seconds
        assert tree.arrived(sending)
        arrived[sending.sampler] = (sending.source, now)
        coming += tree.start(now)
    sources = {sampler: source for sampler, (source, _) in arrived.items()}
    assert sources == {0: TRAINER, 1: TRAINER, 2: 0, 3: 0, 4: 1, 5: 1, 6: 2}
    assert [arrived[n][1] for n in range(7)] == [1, 1, 2, 2, 2, 2, 2.5]
    assert tree.sent_bytes == 2.0


@given(
    st.integers(1, 3),
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=12),
)
@settings(max_examples=200, deadline=None)
def test_the_tree_reaches_everybody_who_stays_whoever_goes(fanout, count, changes):
    """After every so many transfers somebody goes or comes."""
    tree = WeightTree(replace(TREE, fanout=fanout))
    living, got, now, step = set(range(count)), set(), 0.0, 0
    due = Counter(at for at, _ in changes)
    kinds = {at: [goes for n, goes in changes if n == at] for at in due}
    tree.offer(1, sorted(living), now)
    coming = tree.start(now)
    while coming or any(at >= step for at in due):
        for goes in kinds.get(step, ()):
            if goes and living:
                one = sorted(living)[step % len(living)]
                living.remove(one)
                tree.gone(one, now)
            elif not goes:
                count += 1
                living.add(count)
                tree.want(count)
        step += 1
        coming += tree.start(now)
        if not coming:
            continue
        sending = min(coming, key=lambda s: (s.began_s + s.seconds, s.sampler))
        coming.remove(sending)
        now = max(now, sending.began_s + sending.seconds)
        if tree.arrived(sending):
            assert sending.source == TRAINER or sending.source in got & living
            got.add(sending.sampler)
        coming += tree.start(now)
    assert living <= got


def test_requests_handed_back_are_drawn_once_and_those_of_a_kill_again():
    leaves = Turnover(preempted_per_minute=20, start_s=1.0)
    told = simulate(replace(FLEET, turnover=leaves), updates=60)
    assert told.leaves > 10 and told.moved_answers > 0 and told.prefilled_again_tokens > 0
    assert (told.kills, told.lost_tokens, told.begun_again_answers) == (0, 0, 0)
    killed = simulate(replace(FLEET, turnover=replace(leaves, handed_back_share=0)), updates=60)
    assert killed.kills > 10 and killed.lost_tokens > 0 and killed.moved_answers == 0
    assert killed.wall_s > told.wall_s


def test_a_run_waits_for_a_sampler_and_goes_on_when_one_comes():
    changes = (FleetChange(at_s=1.0, leaves=4), FleetChange(at_s=50.0, joins=4))
    told = simulate(replace(FLEET, turnover=Turnover(changes=changes)), updates=40, warm_up=0)
    assert (told.leaves, told.joins) == (4, 4) and told.wall_s > 50
    assert told.samplers_mean < 2
    with pytest.raises(ConfigError, match=r"without any sampler for 49 s and ended"):
        simulate(replace(FLEET, turnover=Turnover(changes=changes, wait_s=10.0)), updates=40)
    with pytest.raises(ConfigError, match="no sampler is left and none will join"):
        simulate(replace(FLEET, turnover=Turnover(changes=changes[:1])), updates=40)


def test_samplers_that_join_make_a_run_quicker():
    two = replace(FLEET, samplers=replace(FLEET.samplers, count=2), update_s=0.1)
    more = Turnover(changes=(FleetChange(at_s=0.0, joins=2),))
    slow, quick, four = (
        simulate(p, updates=60).wall_s
        for p in (two, replace(two, turnover=more), replace(FLEET, update_s=0.1))
    )
    assert quick < 0.85 * slow and quick == pytest.approx(four, rel=0.1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tree": None, "turnover": Turnover()}, "samplers in threads do not come and go"),
        ({"tree": replace(TREE, fanout=0)}, "fanout .0. must be at least 1"),
        ({"tree": replace(TREE, sampler_bytes_per_s=0.0)}, "must be above 0"),
        ({"turnover": Turnover(handed_back_share=1.5)}, "is a share, from 0 to 1"),
        ({"turnover": Turnover(noticed_s=-1.0)}, r"noticed_s \(-1.0\)"),
        ({"turnover": Turnover(changes=(FleetChange(at_s=-1.0),))}, r"changes \(-1.0\)"),
        (
            {"turnover": Turnover(preempted_per_minute=6e4, handed_back_share=0)},
            "no update within 0 simulated hours: samplers leave before",
        ),
    ],
)
def test_a_turnover_that_cannot_be_is_refused(monkeypatch, change, says):
    monkeypatch.setattr(module, "STUCK_S", 20.0)
    with pytest.raises(ConfigError, match=says):
        simulate(replace(FLEET, **change), updates=20)
