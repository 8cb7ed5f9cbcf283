"""The simulated pipeline: its laws, cases worked out by hand, and the run's rules."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.buffer.select import select
from jaxrl_async.errors import ConfigError
from jaxrl_async.plan import simulate as module
from jaxrl_async.plan.pipeline import Histogram, Pipeline, Samplers
from jaxrl_async.plan.simulate import (
    SimulationResult,
    simulate,
)
from jaxrl_async.plan.simulated_sampler import block_of

STEP_S = 0.01
"""A decode step of ONE, seconds: 64 tokens take 0.64."""
ONE = Pipeline(
    samplers=Samplers(slots=64, rows=(64,), step_s=(STEP_S,), block=8),
    answer_tokens=Histogram.constant(64),
    group_size=8,
    groups_per_step=8,
)
"""All slots decode one step's answers at once."""


@st.composite
def pipelines(draw, **fixed):
    """Small ones, with long tails and short blocks."""
    seconds = st.sampled_from([0.0, 0.01, 0.3, 2.0])
    group_size, per_step, staleness = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        draw(st.integers(0, 3)),
    )
    samplers = Samplers(
        count=draw(st.integers(1, 3)),
        slots=draw(st.integers(1, 9)),
        reserve=draw(st.integers(0, 4)),
        rows=(1, 8),
        step_s=(0.01, 0.02),
        block=draw(st.integers(1, 9)),
        block_s=draw(seconds),
        context_token_s=draw(st.sampled_from([0.0, 1e-4])),
        prefill_s=draw(seconds),
        prefill_chunk=draw(st.integers(1, 40)),
        swap_s=draw(seconds),
    )
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    return Pipeline(
        samplers=samplers,
        answer_tokens=Histogram.of(lengths),
        prompt_tokens=draw(st.integers(0, 30)),
        group_size=group_size,
        groups_per_step=per_step,
        max_staleness=staleness,
        lookahead=draw(st.integers(0, staleness * per_step)),
        when_too_old=draw(st.sampled_from(["wait", "drop"])),
        score_s=Histogram.of([draw(seconds), draw(seconds)]),
        scorers=draw(st.sampled_from([None, 1, 2])),
        update_s=draw(seconds),
        update_token_s=draw(st.sampled_from([0.0, 1e-3])),
        publish_s=draw(seconds),
        transfer_s=draw(seconds),
        report_s=draw(seconds),
        save_every=draw(st.sampled_from([0, 3])),
        save_s=draw(seconds),
    )


def run(pipeline: Pipeline) -> SimulationResult:
    return simulate(pipeline, updates=12, warm_up=3)


@pytest.mark.full
@given(pipelines())
@settings(max_examples=150, deadline=None)
def test_staleness_tokens_and_shares_keep_their_bounds(pipeline):
    result = simulate(pipeline, updates=12, warm_up=0)
    assert 0 <= result.staleness_mean <= result.staleness_max <= pipeline.max_staleness
    assert result.drawn_tokens == result.trained_tokens + result.dropped_tokens + result.left_tokens
    shares = [f.name for f in fields(SimulationResult) if f.name.endswith(("_share", "occupancy"))]
    assert len(shares) == 7
    assert all(-1e-9 <= getattr(result, name) <= 1 + 1e-9 for name in shares)
    waits = result.wait_data_share + result.wait_publish_share + result.wait_other_share
    assert waits <= 1 + 1e-9
    if pipeline.when_too_old == "wait":
        assert result.dropped_groups == 0


@pytest.mark.full
@given(pipelines())
@settings(max_examples=50, deadline=None)
def test_the_trainer_takes_the_groups_that_the_buffer_would_select(pipeline):
    selected, calls = module._Run.selected, []

    def compared(self):
        ours = [g.number for g in selected(self)]
        ready = {n: g for n, g in self.pending.items() if g.ready}
        theirs = select(
            list(self.pending),
            ready,
            pipeline.groups_per_step,
            pipeline.lookahead,
            rank=lambda group, version: 0.0,
        )
        assert tuple(ours) == theirs
        calls.append(ours)
        return selected(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Run, "selected", compared)
        run(pipeline)
    assert calls


@pytest.mark.full
@given(pipelines())
@settings(max_examples=30, deadline=None)
def test_the_same_pipeline_and_seed_have_the_same_outcome(pipeline):
    assert run(pipeline) == run(pipeline)


@given(st.lists(st.integers(1, 12), max_size=12), st.integers(1, 6), st.integers(1, 8))
def test_a_block_is_that_of_the_engine(left, slots, block):
    """Against the engine's loop, step by step: rows that are free take over before each step."""
    rows: list[int | None] = list(range(min(slots, len(left))))
    reserve, sampled, steps = list(range(len(rows), len(left))), [0] * len(left), 0
    while steps < block and (any(r is not None for r in rows) or (reserve and rows)):
        for i, row in enumerate(rows):
            if row is None and reserve:
                rows[i] = reserve.pop(0)
        for i, row in enumerate(rows):
            if row is not None:
                sampled[row] += 1
                rows[i] = None if sampled[row] == left[row] else row
        steps += 1
    ours, our_steps, our_rows = block_of(np.array(left, np.int64), slots, block)
    assert (ours.tolist(), our_steps, our_rows) == (sampled, steps, len(rows))


def test_a_trainer_that_takes_longer_than_the_sampler_is_always_busy():
    result = simulate(replace(ONE, update_s=3.0))
    assert result.trainer_busy_share == pytest.approx(1.0)
    assert result.updates_per_s == pytest.approx(1 / 3)
    assert result.sampler_busy_share == pytest.approx(0.64 / 3)
    assert result.staleness_max == 1


def test_a_sampler_that_takes_longer_than_the_trainer_is_always_busy():
    result = simulate(replace(ONE, update_s=0.16))
    assert result.sampler_busy_share == pytest.approx(1.0)
    assert result.slot_occupancy == pytest.approx(1.0)
    assert result.trainer_busy_share == pytest.approx(0.16 / 0.64)
    assert result.generated_tokens_per_s == pytest.approx(64 / STEP_S)


def test_without_staleness_the_two_take_turns():
    result = simulate(
        replace(
            ONE,
            max_staleness=0,
            update_s=0.32,
            transfer_s=0.2,
            score_s=Histogram.constant(0.1),
            samplers=replace(ONE.samplers, swap_s=0.05),
        )
    )
    cycle_s = 0.64 + 0.1 + 0.32 + 0.2 + 0.05
    assert result.updates_per_s == pytest.approx(1 / cycle_s)
    assert result.staleness_mean == result.staleness_max == 0
    assert result.trainer_busy_share == pytest.approx(0.32 / cycle_s)
    assert result.sampler_busy_share == pytest.approx((0.64 + 0.05) / cycle_s)


def test_a_slow_transfer_holds_the_next_publish_up():
    result = simulate(replace(ONE, max_staleness=8, update_s=0.7, transfer_s=2.0))
    assert result.updates_per_s == pytest.approx(0.5, rel=0.05)  # a swap waits for a block's end
    assert result.wait_publish_share == pytest.approx(1.3 / 2.0, rel=0.05)


def test_one_scorer_at_a_time_scores_so_many_groups_a_second():
    slow = replace(ONE, score_s=Histogram.constant(0.5), scorers=1, max_staleness=4)
    assert simulate(slow).updates_per_s == pytest.approx(1 / (0.5 * 8))
    assert simulate(replace(slow, scorers=None)).updates_per_s == pytest.approx(1 / 0.64)


def test_context_prefill_and_dispatch_take_their_time():
    samplers = replace(
        ONE.samplers, block_s=0.1, prefill_s=0.3, prefill_token_s=0.001, context_token_s=1e-5
    )
    result = simulate(replace(ONE, samplers=samplers, prompt_tokens=100, max_staleness=0))
    context_s = 64 * 64 * (100 + 32) * 1e-5  # slots x steps x mean context
    prefill_s = 0.3 + 8 * 100 * 0.001  # the members of a group share one
    update_s = 0.64 + 8 * 0.1 + prefill_s + context_s
    assert 1 / result.updates_per_s == pytest.approx(update_s, rel=1e-3)


def test_checkpoints_stop_the_trainer_alone():
    saving = replace(ONE, update_s=3.0, save_every=5, save_s=4.0)
    result = simulate(saving)
    assert result.updates_per_s == pytest.approx(5 / (5 * 3.0 + 4.0))
    assert result.wait_other_share == pytest.approx(4.0 / 19.0)


def test_two_samplers_share_the_groups():
    slots_32 = replace(ONE.samplers, slots=32, rows=(32,), count=2)
    result, whole = simulate(replace(ONE, samplers=slots_32)), simulate(ONE)
    assert result.updates_per_s == pytest.approx(whole.updates_per_s)


@pytest.mark.full
@given(pipelines())
@settings(max_examples=50, deadline=None)
def test_no_side_is_quicker_than_its_own_work_allows(pipeline):
    result, side = simulate(pipeline, updates=15, warm_up=0), pipeline.samplers
    each_s = pipeline.update_s + pipeline.publish_s + pipeline.report_s
    assert result.wall_s >= 15 * each_s * (1 - 1e-9) - pipeline.report_s
    most = side.count * side.slots / min(side.step_s)
    assert result.drawn_tokens <= result.wall_s * most * (1 + 1e-9)


@pytest.mark.full
@given(pipelines(), st.sampled_from(["update_s", "transfer_s", "publish_s", "report_s"]))
@settings(max_examples=50, deadline=None)
def test_in_turns_whatever_takes_longer_makes_the_run_longer(pipeline, name):
    """Not so with staleness: a quicker trainer may meet the samplers at a worse moment."""
    turns = replace(pipeline, max_staleness=0, lookahead=0, when_too_old="wait")
    turns = replace(turns, samplers=replace(turns.samplers, count=1), scorers=None)
    longer = replace(turns, **{name: getattr(turns, name) + 1.0})
    assert run(longer).wall_s >= run(turns).wall_s * (1 - 1e-9)


def test_drop_mode_counts_what_it_drops():
    result = simulate(replace(ONE, when_too_old="drop", overcommit=4.0, update_s=3.0))
    assert result.dropped_groups > 0 and result.dropped_tokens == result.dropped_groups * 8 * 64
    assert result.staleness_max <= 1


def test_chips_are_best_split_where_both_sides_keep_up():
    def at(chips: int) -> Pipeline:  # of 8: both sides scale
        samplers = replace(ONE.samplers, step_s=(0.08 / (8 - chips),))
        return replace(ONE, samplers=samplers, update_s=5.12 / chips)

    result = {chips: simulate(at(chips), updates=60, warm_up=10) for chips in (1, 4, 6)}
    assert sorted(result, key=lambda chips: -result[chips].trained_tokens_per_s) == [4, 6, 1]
    assert result[4].trainer_busy_share == pytest.approx(1.0)


def test_a_histogram_has_the_mean_of_its_samples():
    lengths = Histogram.of([1, 1, 4])
    assert lengths.values == (1.0, 4.0) and lengths.weights == (2.0, 1.0)
    assert lengths.mean == pytest.approx(2.0)
    result = simulate(replace(ONE, answer_tokens=lengths), updates=200, warm_up=0)
    assert result.trained_tokens / (200 * 64) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lookahead": 9}, "staleness.lookahead (9) must be at most"),
        ({"group_size": 0}, "group_size (0) must be at least 1"),
        ({"update_s": float("nan")}, "update_s (nan) must be finite"),
        ({"transfer_s": -1.0}, "transfer_s (-1.0) must be finite"),
        ({"scorers": 0}, "scorers (0)"),
        ({"answer_tokens": Histogram.constant(0)}, "answer_tokens (0) must be at least 1"),
        ({"when_too_old": "drop", "overcommit": 0.5}, "overcommit (0.5) must be at least 1"),
        ({"samplers": replace(ONE.samplers, rows=(8, 4), step_s=(1.0, 1.0))}, "ascending"),
        ({"samplers": replace(ONE.samplers, step_s=())}, "ascending"),
    ],
)
def test_what_cannot_run_is_refused(change, says):
    with pytest.raises(ConfigError) as error:
        simulate(replace(ONE, **change))
    assert says in str(error.value)


def test_a_window_without_updates_and_an_empty_histogram_are_refused():
    with pytest.raises(ConfigError, match="nothing is left to measure"):
        simulate(ONE, updates=5, warm_up=5)
    with pytest.raises(ConfigError, match="needs as many"):
        Histogram(values=(1.0,), weights=())
