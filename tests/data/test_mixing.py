"""The mix of several tasks: shares within their bound, and a stream that continues as it was."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxrl_async.data.curriculum import Curriculum, combined_measures, hard_first
from jaxrl_async.data.mixed_prompts import MixedPrompts, TaskMix, catch_up
from jaxrl_async.data.mixing import accrued, due, given_back, shares, spent
from jaxrl_async.data.prompts import PromptStream
from jaxrl_async.data.records import Record
from jaxrl_async.errors import DataError, RolloutError
from jaxrl_async.testing.fakes import make_group
from jaxrl_async.types import Drop, Score, Ticket

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=8)
NAMES = "abcdefgh"


def named(values):
    return dict(zip(NAMES, values, strict=False))


def stream(count=40, seed=0):
    ids = np.zeros(1, np.int32)
    records = [
        Record(token_ids=ids, text=str(i), reference=str(i), answer="") for i in range(count)
    ]
    return PromptStream(records, seed)


def mix(weights, limits=None, per_step=8, curricula=(), **how):
    most = catch_up(weights, per_step)
    limits = limits or {}
    return MixedPrompts(
        {
            name: Curriculum(stream(seed=i), hard_first, pool=6, seed=i)
            if name in curricula
            else stream(seed=i)
            for i, name in enumerate(weights)
        },
        {
            name: TaskMix(weight=weight, most=most[name], max_in_flight=limits.get(name))
            for name, weight in weights.items()
        },
        **how,
    )


def scored(prompt, number, reward=1.0):
    made = make_group(Ticket(group=number, version=0), [0], [0])
    return replace(made, prompt=prompt, scores=(Score(reward=reward), Score(reward=0.0)))


def numbers(source):
    """Return what decides the future of a mix."""
    return json.loads(json.dumps(source.state()))


# ---- the schedule


@pytest.mark.full
@given(WEIGHTS, st.integers(1, 200))
def test_each_task_has_its_share_of_any_number_of_draws_within_one_group(weights, draws):
    weights = named(weights)
    credits, most = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 1e9)
    counts, exact = Counter(), shares(weights)
    for number in range(1, draws + 1):
        credits = accrued(credits, weights, most)
        name = due(credits, weights, tuple(weights))
        credits = spent(credits, name)
        counts[name] += 1
        for one, share in exact.items():
            assert abs(counts[one] - share * number) < 1 + 1e-6
            assert credits[one] == pytest.approx(share * number - counts[one], abs=1e-6)


def test_the_schedule_is_that_of_the_earliest_deadline():
    """In integers: of the tasks whose next window has begun, the one whose window ends first."""
    weights, counts, taken = {"a": 3.0, "b": 2.0, "c": 2.0}, dict.fromkeys("abc", 0), []
    credits, most = dict.fromkeys("abc", 0.0), dict.fromkeys("abc", 9.0)
    for slot in range(21):
        credits = accrued(credits, weights, most)
        taken.append(due(credits, weights, "abc"))
        credits = spent(credits, taken[-1])
        released = [n for n in "abc" if 7 * counts[n] < int(weights[n]) * (slot + 1)]
        ends = {n: -(-7 * (counts[n] + 1) // int(weights[n])) for n in released}
        assert ends[taken[-1]] == min(ends.values()), "rounded up to slots"
        counts[taken[-1]] += 1
    assert counts == {"a": 9, "b": 6, "c": 6}


@pytest.mark.full
def test_the_largest_credit_is_not_the_earliest_deadline():
    """Each task's next draw is due when its credit reaches 1; a large weight fills it sooner."""
    assert due({"a": 0.2, "b": 0.5}, {"a": 8.0, "b": 1.0}, "ab") == "a"


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 10), min_size=2, max_size=8),
    st.lists(st.tuples(st.sets(st.sampled_from(NAMES)), st.booleans()), max_size=80),
    st.integers(1, 32),
)
def test_a_task_that_could_not_start_catches_up_by_a_bounded_number(weights, events, per_step):
    """Random tasks are away, and random groups are dropped; then all may start again."""
    weights = named(map(float, weights))
    most = catch_up(weights, per_step)
    credits = dict.fromkeys(weights, 0.0)
    for unable, is_dropped in events:
        able = [name for name in weights if name not in unable] or [*weights]
        credits = accrued(credits, weights, most)
        name = due(credits, weights, able)
        credits = spent(credits, name)
        if is_dropped:
            credits = given_back(credits, weights, most, name)
        assert sum(credits.values()) == pytest.approx(0.0, abs=1e-6)
        assert all(credits[one] < most[one] + 1 + 1e-6 for one in weights)
    for _ in range(3000):
        credits = accrued(credits, weights, most)
        credits = spent(credits, due(credits, weights, tuple(weights)))
    assert all(abs(credit) < 1 + 1e-6 for credit in credits.values()), "all have caught up"


def test_a_dropped_group_gives_its_draw_back():
    weights = {"a": 1.0, "b": 3.0}
    most = {"a": 9.0, "b": 9.0}
    before = {"a": 0.5, "b": -0.5}
    after = spent(accrued(before, weights, most), "a")
    assert after == {"a": -0.25, "b": 0.25}
    assert given_back(after, weights, most, "a") == before


def test_what_exceeds_the_bound_goes_to_the_others():
    weights = {"a": 1.0, "b": 1.0, "c": 3.0}
    back = given_back({"a": 1.9, "b": -1.0, "c": -0.9}, weights, {"a": 2, "b": 2, "c": 2}, "a")
    assert back["a"] == 2.0  # not 2.7
    assert back["b"] == pytest.approx(-1.0 - 0.2 + 0.7 / 4)
    assert back["c"] == pytest.approx(-0.9 - 0.6 + 0.7 * 3 / 4)


def test_a_task_at_its_bound_gains_nothing():
    gained = accrued({"a": 2.0, "b": -2.0}, {"a": 1.0, "b": 1.0}, {"a": 2.0, "b": 2.0})
    assert gained == {"a": 2.0, "b": -1.0}


def test_a_task_catches_up_by_at_most_a_step_of_its_own_groups():
    assert catch_up({"a": 1.0, "b": 3.0}, 16) == {"a": 4.0, "b": 12.0}
    assert catch_up({"a": 1.0, "b": 30.0}, 4)["a"] == 1.0


# ---- the stream


def test_prompts_name_their_task_and_have_positions_of_their_own():
    source = mix({"a": 1.0, "b": 1.0})
    taken = [next(source) for _ in range(8)]
    assert Counter(p.task for p in taken) == {"a": 4, "b": 4}
    assert [p.position for p in taken] == list(range(8))
    for name, seed in (("a", 0), ("b", 1)):
        own = [p.text for p in taken if p.task == name]
        assert own == [stream(seed=seed).at(i).text for i in range(4)]


def test_one_task_draws_as_its_stream_does():
    source, alone = mix({"a": 2.0}), stream()
    for _ in range(100):
        assert replace(next(source), task="") == next(alone)


def test_processes_draw_different_positions():
    two = [mix({"a": 1.0, "b": 2.0}, process_index=i, process_count=2) for i in range(2)]
    positions = [next(one).position for one in two for _ in range(6)]
    assert sorted(positions) == list(range(12))


def test_a_task_at_its_limit_is_passed_over_until_a_group_ends():
    source = mix({"a": 1.0, "b": 1.0}, {"a": 1})
    first = [next(source) for _ in range(6)]
    assert [p.task for p in first].count("a") == 1
    number = next(i for i, p in enumerate(first) if p.task == "a")
    source.observe(scored(first[number], number))
    assert next(source).task == "a", "it is behind its share"


def test_no_group_begins_while_every_task_is_at_its_limit():
    source = mix({"a": 1.0, "b": 1.0}, {"a": 1, "b": 1})
    taken = [next(source), next(source)]
    assert not source.may_begin()
    source.dropped(taken[0].task, 0, Drop.FAILED)
    assert source.may_begin() and next(source).task == taken[0].task


@pytest.mark.full
def test_a_resting_task_leaves_its_share_to_the_others():
    resting = {"a"}
    source = mix({"a": 1.0, "b": 1.0, "c": 2.0}, rests=resting.__contains__)
    taken = Counter(next(source).task for _ in range(30))
    assert taken == {"b": 10, "c": 20}
    resting.clear()
    assert Counter(next(source).task for _ in range(400))["a"] <= 100 + 2 + 1


def test_a_task_of_weight_0_starts_nothing():
    source = mix({"a": 1.0, "b": 0.0})
    assert {next(source).task for _ in range(20)} == {"a"}


EVENT = st.sampled_from(["draw", "draw", "draw", "score", "drop"])


@pytest.mark.full
@settings(max_examples=60)
@given(
    WEIGHTS.filter(lambda w: len(w) > 1),
    st.lists(EVENT, min_size=1, max_size=60),
    st.integers(0, 60),
    st.booleans(),
)
def test_a_mix_that_is_restored_anywhere_draws_as_one_that_was_never_stopped(
    weights, events, at, learns
):
    weights = named(weights)
    curricula = ("a",) if learns else ()
    source, running, taken = mix(weights, curricula=curricula), {}, 0
    saved = None
    for index, event in enumerate(events):
        if index == at:
            saved = numbers(source), dict(running), taken
        if event == "draw" or not running:
            running[taken] = next(source)
            taken += 1
        else:
            number = min(running)
            prompt = running.pop(number)
            if event == "score":
                source.observe(scored(prompt, number, reward=number % 3))
            else:
                source.dropped(prompt.task, number, Drop.NO_SIGNAL)
    if saved is None:
        return
    state, running, taken = saved
    again = mix(weights, curricula=curricula)
    again.restore(state)
    again.restore_running({number: prompt.task for number, prompt in running.items()})
    assert numbers(again) == state
    for event in events[at:]:
        if event == "draw" or not running:
            running[taken] = next(again)
            taken += 1
        else:
            number = min(running)
            prompt = running.pop(number)
            if event == "score":
                again.observe(scored(prompt, number, reward=number % 3))
            else:
                again.dropped(prompt.task, number, Drop.NO_SIGNAL)
    assert numbers(again) == numbers(source)
    assert [next(again) for _ in range(20)] == [next(source) for _ in range(20)]


def played(source, events, running, taken):
    """Let these events happen; return the number of draws. running: prompts by number."""
    for event in events:
        if event == "draw" or not running:
            running[taken] = next(source)
            taken += 1
            continue
        number = max(running) if event == "score" else min(running)
        prompt = running.pop(number)
        if event == "score":
            source.observe(scored(prompt, number, reward=number % 3))
        else:
            source.dropped(prompt.task, number, Drop.NO_SIGNAL)
    return taken


@pytest.mark.full
@settings(max_examples=100)
@given(
    WEIGHTS.filter(lambda w: len(w) > 1),
    st.lists(EVENT, max_size=30),
    st.lists(EVENT, max_size=30),
    st.booleans(),
)
@example(weights=[1.0, 1.0], before=["draw"], after=["score"], learns=True)
@example(weights=[1.0, 1.0], before=["draw"] * 3, after=["drop", "draw", "score"], learns=False)
def test_a_checkpoint_has_what_had_happened_when_the_buffer_was_read(
    weights, before, after, learns
):
    """Groups are drawn, scored and dropped before the mix is read, too: it has nothing of that, and
    the next checkpoint has all of it."""
    weights = named(weights)
    curricula = ("a",) if learns else ()
    source, stopped, whole = (mix(weights, curricula=curricula) for _ in range(3))
    running = {}
    taken = played(source, before, running, 0)
    played(stopped, before, {}, 0)
    then, held = taken, set(running)
    taken = played(source, after, running, taken)
    played(whole, before + after, {}, 0)
    state = source.state(then, lambda number: number < then and number not in held)
    assert json.loads(json.dumps(state)) == numbers(stopped)
    later = source.state(taken, lambda number: number < taken and number not in running)
    assert json.loads(json.dumps(later)) == numbers(whole)


def test_a_burst_that_is_left_out_of_a_checkpoint_takes_what_became_of_it_along():
    source = mix({"a": 1.0, "b": 1.0})
    taken = [next(source) for _ in range(4)]
    source.dropped(taken[1].task, 1, Drop.FAILED)
    taken += [next(source) for _ in range(2)]  # the burst
    source.dropped(taken[5].task, 5, Drop.FAILED)
    source.dropped(taken[3].task, 3, Drop.FAILED)
    source.observe(scored(taken[0], 0))
    own = source.state(4, lambda number: number in (0, 1, 3))["tasks"]
    assert {name: own[name]["drawn"] for name in "ab"} == {"a": 2, "b": 2}
    assert [p.task for p in taken[:4]] == ["a", "b", "a", "b"]
    assert own["b"]["dropped"] == 2 and own["a"]["dropped"] == 0
    assert own["a"]["rewards"] == [0.5]
    whole = numbers(source)["tasks"]
    assert sum(whole[name]["dropped"] for name in "ab") == 3


def test_the_state_before_an_earlier_draw_repeats_the_later_ones():
    source = mix({"a": 2.0, "b": 1.0, "c": 1.0})
    taken = [next(source) for _ in range(40)]
    again = mix({"a": 2.0, "b": 1.0, "c": 1.0})
    again.restore(json.loads(json.dumps(source.state(13))))
    assert [next(again) for _ in range(27)] == taken[13:]


def test_a_state_has_what_has_arrived_since_the_last_draw():
    source = mix({"a": 1.0, "b": 1.0})
    taken = [next(source) for _ in range(4)]
    for number in (0, 2):
        source.observe(scored(taken[number], number, reward=number))
    source.dropped("b", 1, Drop.FAILED)
    own = numbers(source)["tasks"]
    assert [p.task for p in taken] == ["a", "b", "a", "b"]
    assert own["a"]["rewards"] == [0.0, 1.0] and own["b"]["dropped"] == 1
    assert own["b"]["credit"] == 0.5 and own["a"]["credit"] == -0.5


def test_a_new_task_begins_at_a_resume_and_a_missing_one_is_refused():
    source = mix({"a": 1.0, "b": 1.0})
    for _ in range(10):
        next(source)
    state = numbers(source)
    more = mix({"a": 1.0, "b": 1.0, "c": 2.0})
    more.restore(state)
    taken = [next(more) for _ in range(40)]
    assert [p.position for p in taken] == list(range(10, 50))
    assert abs(Counter(p.task for p in taken)["c"] - 20) <= 1
    assert next(p for p in taken if p.task == "c").text == stream(seed=2).at(0).text
    with pytest.raises(DataError, match=r"task 'b'.*weight: 0"):
        mix({"a": 1.0}).restore(state)
    with pytest.raises(DataError, match="one task"):
        mix({"a": 1.0}).restore(stream().state())
    with pytest.raises(DataError, match="several tasks"):
        stream().restore(state)


def test_other_records_at_a_resume_are_refused_with_the_tasks_name():
    saved = mix({"a": 1.0, "b": 1.0}).state()
    saved["tasks"]["b"]["stream"]["seed"] = 9
    with pytest.raises(DataError, match=r"^tasks\.b: the saved position is of another stream"):
        mix({"a": 1.0, "b": 1.0}).restore(saved)


def test_choices_of_a_recording_are_repeated():
    source = mix({"a": 1.0, "b": 1.0}, {"b": 1})
    source.prescribed = ["b", "b", "a"]
    assert [next(source).task for _ in range(3)] == ["b", "b", "a"]


# ---- a user's function


def test_a_users_function_names_the_next_task():
    seen = []

    def choose(view):
        seen.append(view)
        return "b" if view.draw % 3 else "a"

    source = mix({"a": 1.0, "b": 1.0}, choose=choose)
    taken = [next(source) for _ in range(9)]
    assert [p.task for p in taken] == ["a", "b", "b"] * 3
    source.observe(scored(taken[1], 1, reward=3.0))
    source.dropped("a", 0, Drop.FAILED)
    next(source)
    view = seen[-1]
    assert view.draw == 9 and view.available == ("a", "b") and view.weights == {"a": 1.0, "b": 1.0}
    assert view.counts == {"a": 2, "b": 6} and view.rewards == {"a": (), "b": (1.5,)}


def test_weights_of_a_users_function_are_shares():
    source = mix({"a": 1.0, "b": 1.0}, choose=lambda view: {"a": 3.0, "b": 1.0})
    assert Counter(next(source).task for _ in range(40)) == {"a": 30, "b": 10}


@pytest.mark.parametrize("choice", ["a", {"a": 1.0}])
def test_a_task_of_weight_0_is_no_substitute_for_one_that_a_users_function_asks_for(choice):
    source = mix({"a": 1.0, "old": 0.0}, {"a": 2}, choose=lambda view: choice)
    first, second = next(source), next(source)
    assert first.task == second.task == "a" and not source.may_begin()
    source.observe(scored(first, 0))
    assert source.may_begin() and next(source).task == "a"


def test_a_users_function_may_start_a_task_of_weight_0():
    source = mix({"a": 1.0, "old": 0.0}, choose=lambda view: "old" if view.draw % 2 else "a")
    assert [next(source).task for _ in range(4)] == ["a", "old", "a", "old"]


def test_a_name_that_cannot_start_is_overruled_and_counted():
    source = mix({"a": 1.0, "b": 1.0}, {"a": 1}, choose=lambda view: "a")
    assert [next(source).task for _ in range(4)] == ["a", "b", "b", "b"]
    assert source.measures(4)["task/overruled"] == 3.0
    assert source.measures(4)["task/overruled"] == 0.0


@pytest.mark.parametrize(
    "given", ["c", None, {}, {"a": -1.0}, {"c": 1.0}, {"a": float("nan")}, {"a": 0}, 3, ["a"]]
)
def test_anything_else_that_a_users_function_returns_is_refused(given):
    source = mix({"a": 1.0, "b": 1.0}, choose=lambda view: given)
    with pytest.raises(RolloutError, match="name of a task"):
        next(source)


def test_an_exception_of_a_users_function_names_it():
    source = mix({"a": 1.0, "b": 1.0}, choose=lambda view: view.nothing)
    with pytest.raises(RolloutError, match="`mixing` raised AttributeError"):
        next(source)


# ---- metrics


def test_each_task_reports_its_share_its_drops_and_its_groups_in_flight():
    source = mix({"a": 3.0, "b": 1.0}, curricula=("b",))
    taken = [next(source) for _ in range(8)]
    b = [n for n, p in enumerate(taken) if p.task == "b"]
    source.observe(scored(taken[b[0]], b[0], reward=0.0))
    source.dropped("b", b[1], Drop.FAILED)
    next(source)
    found = source.measures(9)
    assert found["task/b/dropped_failed"] == 1.0 and "task/a/dropped_failed" not in found
    assert (found["task/a/share"], found["task/b/share"]) == (6 / 8, 2 / 8)
    assert found["task/b/behind"] == pytest.approx(0.0)
    assert found["task/b/in_flight"] == 1.0  # one scored, one dropped, one more drawn
    assert found["task/b/measured_prompts"] == 1.0 and found["task/b/difficulty_mean"] == 1.0
    assert found["task/a/resting"] == 0.0


def test_measures_of_processes_are_combined_by_kind():
    both = combined_measures(
        [
            {"task/a/share": 0.5, "task/a/in_flight": 2.0, "task/a/dropped_failed": 1.0},
            {"task/a/share": 0.7, "task/a/in_flight": 3.0},
        ]
    )
    assert both == pytest.approx(
        {"task/a/share": 0.6, "task/a/in_flight": 5.0, "task/a/dropped_failed": 1.0}
    )
