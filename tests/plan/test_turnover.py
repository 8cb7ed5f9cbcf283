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
from jaxrl_async.plan.simulated_sampler import BEGUN, GROUP, REMAINING, SAMPLED
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
            offer_s=draw(seconds),
            hop_s=draw(seconds),
            stage_s=draw(seconds),
        ),
        turnover=Turnover(
            changes=(*changes, last),
            preempted_per_minute=draw(st.sampled_from([0.0, 6.0, 30.0])),
            handed_back_share=draw(st.sampled_from([0.0, 0.5, 1.0])),
            again_first=draw(st.booleans()),
            handover_s=draw(seconds),
            noticed_s=draw(seconds),
            replaced_s=Histogram.of([0.0, draw(seconds)]),
            start_s=draw(seconds),
        ),
    )


def unfinished(run):
    """Answers that some sampler, or nobody, has: by group, and their tokens."""
    fleet = run.fleet
    holders = [*fleet.running.values(), *fleet.unnoticed.values()]
    parts = [s.seqs[:, : s.held] for s in holders] + [c for s in holders for c in s.queue]
    parts += [*fleet._moving, *fleet._queue]
    groups = Counter(n for part in parts for n in part[GROUP].tolist())
    return groups, [n for part in parts for n in (part[REMAINING] + part[SAMPLED]).tolist()]


@pytest.mark.full
@given(fleets())
@settings(max_examples=150, deadline=None)
def test_whoever_joins_and_leaves_nothing_is_lost_and_staleness_keeps_its_bound(pipeline):
    run = module._Run(pipeline, seed=0)
    for updates in range(1, 13):
        totals = run.to(updates)
        assert 0 <= totals.oldest <= pipeline.max_staleness
        groups, lengths = unfinished(run)
        assert groups == {n: g.unfinished for n, g in run.pending.items() if g.unfinished}
        assert set(lengths) <= {8, 20, 60}, "a moved answer ends where it would have ended"
    fleet = totals.fleet
    left = run.fleet.left_tokens + sum(g.tokens for g in run.pending.values())
    assert fleet.sampled == totals.trained + run.dropped_tokens + left + fleet.lost
    assert len(run.fleet.running) == pipeline.samplers.count + fleet.joins - fleet.leaves - (
        fleet.kills - sum(s.leaves for s in run.fleet.running.values())
    )
    assert (fleet.lost == 0) or fleet.kills
    if pipeline.turnover.handed_back_share == 1 and not any(
        c.kills for c in pipeline.turnover.changes
    ):
        assert fleet.lost == fleet.restarted == 0


@pytest.mark.full
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
            38.197428571428524, 16124, 1.5178875638841567, 0.723377748889611,
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
    """Numbers of the simulation without turnover (benchmarks/history/plans_2026_11.md); in the
    second row some requests wait until a sampler has room, which that one did not know either."""
    result = simulate(replace(GOLDEN, **change), updates=30, warm_up=5, seed=3)
    assert (result.wall_s, result.staleness_mean) == pytest.approx((wall_s, staleness), rel=1e-12)
    counted = result.drawn_tokens, result.slot_occupancy
    assert counted == pytest.approx((drawn, occupancy), rel=1e-12)


@pytest.mark.full
@given(fleets())
@settings(max_examples=30, deadline=None)
def test_in_turns_nobody_who_comes_or_goes_is_the_same_as_threads(pipeline):
    """In turns the trainer has nothing to publish before the samplers have taken the last."""
    tree = replace(pipeline.tree, num_bytes=0.0, stage_s=0.0, offer_s=pipeline.tree.hop_s)
    turns = replace(pipeline, max_staleness=0, lookahead=0, when_too_old="wait", turnover=None)
    flat = replace(tree, fanout=turns.samplers.count)
    remote = replace(turns, tree=flat, turnover=Turnover())
    threads = replace(turns, tree=None, transfer_s=turns.publish_s + 2 * tree.hop_s)
    ours, theirs = (simulate(p, updates=12, warm_up=3) for p in (remote, threads))
    assert ours.wall_s == pytest.approx(theirs.wall_s)
    assert ours.sampler_busy_share == pytest.approx(theirs.sampler_busy_share)
    assert (ours.drawn_tokens, ours.staleness_max) == (theirs.drawn_tokens, 0)


def test_the_trainer_waits_for_no_transfer():
    """A transfer of 2 s holds the next publish up where samplers are threads, and not here."""
    slow = replace(FLEET, max_staleness=8, update_s=0.7, tree=replace(TREE, num_bytes=4.0))
    result = simulate(slow, updates=40, warm_up=10)
    assert result.wait_publish_share == 0 and result.staleness_max <= 8
    assert result.replaced_versions > 0, "a newer version replaced one that waited"
    threads = simulate(replace(slow, tree=None, transfer_s=2.0), updates=40, warm_up=10)
    assert threads.wait_publish_share > 0.5


def spread(tree, now, change=lambda step, now: []):
    """Play all transfers; return from whom, and when, each sampler got its version."""
    coming = [(now, n, s) for n, s in enumerate(tree.start(now))]
    found, step = {}, 0
    while coming:
        at = min(coming)
        coming.remove(at)
        now, step = at[0], step + 1
        left_s = tree.poll(at[2], now)
        if left_s == 0.0:
            found[at[2].sampler] = (at[2].source, now)
        elif left_s is not None:
            coming.append((now + left_s, -step, at[2]))
        more = [*change(step, now), *tree.start(now)]
        coming += [(now, 100 * step + n, s) for n, s in enumerate(more)]
    return found


def test_a_version_goes_down_the_tree_piece_by_piece():
    """Two at a time, 1 s for each pair; the last is its source's only child."""
    tree = WeightTree(replace(TREE, hop_s=0.25))
    for number in range(7):
        tree.ready(number, 0)
    assert tree.start(0.0) == [], "nothing is newer"
    tree.publish(1)
    found = spread(tree, 0.0)
    sources = {sampler: source for sampler, (source, _) in found.items()}
    assert sources == {0: TRAINER, 1: TRAINER, 2: 0, 3: 0, 4: 1, 5: 1, 6: 2}
    assert [found[n][1] for n in range(7)] == [1.25, 1.25, 1.5, 1.5, 1.5, 1.5, 1.75]
    assert tree.sent_bytes == 2.0


def test_whoever_loses_its_source_goes_on_with_the_one_above():
    """0 goes after half of its transfer: 1 has the trainer's half rate, 2 gets its rest from it."""
    tree = WeightTree(replace(TREE, fanout=1))
    for number in range(3):
        tree.ready(number, 0)
    tree.publish(1)
    first = tree.start(0.0)
    assert [(s.sampler, s.source) for s in first] == [(0, TRAINER), (1, 0), (2, 1)]
    (moved,) = tree.remove(0, 0.25)
    assert (moved.sampler, moved.source, moved.part) == (1, TRAINER, 0.5)
    assert tree.poll(moved, 0.25) == 0.25 and tree.poll(first[2], 0.25) == 0.25
    assert tree.poll(first[0], 0.5) is None and tree.poll(moved, 0.5) == 0.0
    assert tree.poll(first[2], 0.5) == 0.0
    assert tree.sent_bytes == pytest.approx(1.0), "of half a copy to 0, and of half to 1"


def test_a_slow_sampler_skips_versions_and_is_offered_the_newest():
    tree = WeightTree(TREE)
    tree.ready(0, 0)
    tree.publish(1)
    (one,) = tree.start(0.0)
    tree.publish(2)
    assert tree.start(0.1) == []
    tree.publish(3)
    tree.publish(4)
    assert tree.start(0.2) == [] and tree.replaced == 1, "2 and 3 are offered to nobody else"
    assert tree.poll(one, 0.5) == 0.0
    tree.ready(0, 1)
    (four,) = tree.start(0.6)
    assert four.version == 4


@given(
    st.integers(1, 3),
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=12),
)
@settings(max_examples=200, deadline=None)
def test_the_tree_reaches_everybody_who_stays_whoever_goes(fanout, count, changes):
    """After every so many looks somebody goes or comes."""
    tree, living, numbers = WeightTree(replace(TREE, fanout=fanout)), set(range(count)), [count]

    def change(step, now):
        moved = []
        for goes in [goes for at, goes in changes if at == step]:
            if goes and living:
                one = sorted(living)[step % len(living)]
                living.remove(one)
                moved += tree.remove(one, now)
            elif not goes:
                numbers.append(numbers[-1] + 1)
                living.add(numbers[-1])
                tree.ready(numbers[-1], -1)
        return moved

    for number in sorted(living):
        tree.ready(number, 0)
    tree.publish(1)
    found = spread(tree, 0.0, change)
    assert living <= found.keys() and not tree.under_way
    copies = sum(source == TRAINER for source, _ in found.values())
    gone = sum(goes for _, goes in changes)
    # The trainer sends the rest of what each of `fanout` others was getting from one that goes.
    assert copies <= tree.sent_bytes + gone * fanout and tree.sent_bytes <= copies + gone


def test_a_sampler_whose_first_weights_are_too_old_gets_newer_ones_before_it_counts():
    run = module._Run(replace(FLEET, turnover=Turnover()), seed=0)
    run.to(3)
    fleet = run.fleet
    number = len(fleet.loads)
    fleet._request_weights()
    sending = fleet.tree.under_way[number]
    assert fleet.tree.poll(sending, run.time.now + 60) == 0.0
    fleet.live = sending.version + 1
    fleet._staged(sending)
    assert number not in fleet.running and number in fleet._joining
    fleet._offer(fleet.live)
    assert fleet.tree.under_way[number].version == fleet.live
    run.to(12)
    assert fleet.running[number].version >= sending.version + 1


def test_requests_handed_back_are_sampled_once_and_those_of_a_kill_again():
    leaves = Turnover(preempted_per_minute=20, start_s=1.0)
    result = simulate(replace(FLEET, turnover=leaves), updates=60)
    assert result.leaves > 10 and result.moved_answers > 0 and result.prefilled_again_tokens > 0
    assert (result.kills, result.lost_tokens, result.begun_again_answers) == (0, 0, 0)
    killed = simulate(replace(FLEET, turnover=replace(leaves, handed_back_share=0)), updates=60)
    assert killed.kills > 10 and killed.lost_tokens > 0 and killed.moved_answers == 0
    assert killed.wall_s > result.wall_s


def test_a_sampler_that_joins_takes_what_no_other_had_room_for():
    """Of 60 answers 2 samplers of one place have 2 each; the third gets the next 2."""
    side = replace(FLEET.samplers, count=2, slots=1, rows=(1,))
    join = Turnover(changes=(FleetChange(at_s=0.05, joins=1),))
    pipeline = replace(FLEET, samplers=side, group_size=1, groups_per_step=20, turnover=join)
    run = module._Run(pipeline, seed=0)
    while not run.fleet.totals.joins:
        run.time.now, act, given = run.time.next()
        act(*given)
    assert run.fleet.loads.tolist() == [2, 2, 2]
    has = [int(c[GROUP, 0]) for c in run.fleet.running[2].queue]
    assert has == [4, 5] and [int(c[GROUP, 0]) for c in run.fleet._queue] == [*range(6, 60)]


@pytest.mark.parametrize("first", [False, True])
def test_requests_of_a_sampler_that_has_left_may_overtake(first):
    side = replace(FLEET.samplers, count=2, slots=2, rows=(2,))
    gone = Turnover(changes=(FleetChange(at_s=0.1, leaves=1),), again_first=first)
    many = replace(FLEET, samplers=side, group_size=1, groups_per_step=20, turnover=gone)
    run = module._Run(many, seed=0)
    while not run.fleet.totals.leaves or len(run.fleet.running) > 1 or run.fleet._moving:
        run.time.now, act, given = run.time.next()
        act(*given)
    (stays,) = run.fleet.running.values()
    begun = [n for n, columns in enumerate(stays.queue) if columns[BEGUN].any()]
    assert begun == ([0, 1] if first else [2, 3]), "at once, whatever else waits"
    numbers = [int(columns[GROUP, 0]) for columns in run.fleet._queue]
    assert (numbers[0] < 8) is first, "those that had not begun, before or behind the others"


def test_a_run_waits_for_a_sampler_and_goes_on_when_one_comes():
    changes = (FleetChange(at_s=1.0, leaves=4), FleetChange(at_s=50.0, joins=4))
    result = simulate(replace(FLEET, turnover=Turnover(changes=changes)), updates=40, warm_up=0)
    assert (result.leaves, result.joins) == (4, 4) and result.wall_s > 50
    assert result.samplers_mean < 2
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


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tree": None, "turnover": Turnover()}, "samplers in threads do not join or leave"),
        ({"tree": replace(TREE, fanout=0)}, "fanout .0. at least 1"),
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
