"""Curricula: weights against their formulas, and the stream that is drawn from by them."""

import dataclasses
import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.config.schema import AdditionSection, DataSection
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.data.curriculum import (
    MAX_PASSED_OVER,
    WEIGHTS,
    Curriculum,
    chosen,
    combined_measures,
    frontier_first,
    hard_first,
    make_stream,
    observed,
    pass_share,
)
from jaxrl_async.data.prompts import PromptStream
from jaxrl_async.data.records import Record
from jaxrl_async.errors import DataError
from jaxrl_async.testing.fakes import make_group
from jaxrl_async.types import Score, Ticket


def stream(count=20, seed=0):
    ids = np.zeros(1, np.int32)
    records = [Record(token_ids=ids, text=str(i), reference="", answer="") for i in range(count)]
    return PromptStream(records, seed)


def curriculum(weigh=hard_first, pool=6, count=20, seed=0):
    return Curriculum(stream(count, seed), weigh, pool=pool, seed=seed)


def group(number, prompt, rewards):
    made = make_group(Ticket(group=number, version=0), *[[0]] * len(rewards))
    scores = tuple(Score(reward=r) for r in rewards)
    return dataclasses.replace(made, prompt=prompt, scores=scores)


def difficulty(prompt):
    """Rewards of a group that depend on the prompt alone: records 0, 4, 8, ... are never solved."""
    return [1.0] * (prompt.prompt_id % 4) + [0.0] * (3 - prompt.prompt_id % 4)


# ---- rates and weights


def test_a_share_is_of_rewards_above_the_threshold():
    scored = group(0, stream().at(0), [1.0, 0.5, 0.51, 0.0])
    assert pass_share(scored) == 0.5 and pass_share(scored, 0.0) == 0.75


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_a_rate_is_an_average_that_forgets(history):
    rate = None
    for right in history:
        rate = observed(rate, right / 4)
    ages = np.arange(len(history))[::-1]
    weights = 0.5 ** (ages + 1.0)
    weights[0] *= 2  # the first group counts in full
    assert rate == pytest.approx(float(weights @ np.array(history)) / 4)


def test_hard_prompts_or_those_at_the_frontier_come_first():
    rates = {0: 1.0, 1: 0.5, 2: 0.1}
    assert np.argsort(hard_first(rates, [0, 1, 2])).tolist() == [0, 1, 2]
    assert np.argsort(frontier_first(rates, [0, 1, 2])).tolist() == [0, 2, 1]
    np.testing.assert_allclose(hard_first(rates, [1, 2]), [0.5 / 1.4, 0.9 / 1.4])
    np.testing.assert_allclose(frontier_first(rates, [1, 2]), [1 / 1.36, 0.36 / 1.36])


@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_weights_are_shares_none_vanishes_and_without_history_all_are_equal(name):
    np.testing.assert_allclose(WEIGHTS[name]({}, range(5)), [0.2] * 5)
    some = WEIGHTS[name]({0: 0.0, 1: 1.0, 2: 0.3}, range(5))
    assert some.sum() == pytest.approx(1) and some.min() > 0.01


def test_draws_follow_the_weights_and_are_keyed_by_seed_and_number():
    weights = np.array([0.1, 0.6, 0.3])
    counts = Counter(chosen(weights, 7, draw) for draw in range(4000))
    for index, weight in enumerate(weights):
        deviation = np.sqrt(4000 * weight * (1 - weight))
        assert abs(counts[index] - 4000 * weight) < 4 * deviation
    first, again, other = ([chosen(weights, s, d) for d in range(50)] for s in (7, 7, 8))
    assert first == again != other


# ---- the stream


@pytest.mark.full
@settings(deadline=None, max_examples=12)
@given(st.integers(1, 6), st.integers(0, 40), st.integers(0, 3), st.sampled_from(sorted(WEIGHTS)))
def test_every_position_is_used_once_and_none_is_passed_over_for_longer_than_the_bound(
    pool, draws, seed, name
):
    prompts = curriculum(WEIGHTS[name], pool, count=7, seed=seed)
    positions = []
    for number in range(draws):
        prompt = next(prompts)
        assert number - prompt.position <= MAX_PASSED_OVER * pool
        assert prompt.position < number + pool
        assert prompt == dataclasses.replace(stream(7, seed).at(prompt.position))
        positions.append(prompt.position)
        prompts.observe(group(number, prompt, difficulty(prompt)))
    left = prompts.state()["passed_over"]
    assert sorted([*positions, *left]) == list(range(draws + len(left)))
    assert len(set(positions)) == draws


def test_a_prompt_that_has_nearly_no_weight_is_taken_when_its_time_is_over():
    def never_0(rates, ids):
        weights = np.array([1e-12 if i == ids[0] else 1.0 for i in ids])
        return weights / weights.sum()

    first_only = curriculum(never_0, pool=3, count=1000)
    positions = [p.position for p in islice(first_only, 200)]
    assert positions.index(0) == MAX_PASSED_OVER * 3


def test_a_pool_of_one_is_the_stream_in_its_order():
    assert [p.position for p in islice(curriculum(pool=1), 30)] == list(range(30))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "ahead", "behind"),
    [("hard_first", [0], [3]), ("frontier_first", [1, 2], [0, 3])],  # right answers of three
)
def test_prompts_that_are_worth_more_wait_less_once_they_are_known(name, ahead, behind):
    prompts = curriculum(WEIGHTS[name], pool=20, count=20)
    waits = {kind: [] for kind in range(4)}
    for number in range(300):
        prompt = next(prompts)
        prompts.observe(group(number, prompt, difficulty(prompt)))
        if number >= 100:
            waits[prompt.prompt_id % 4].append(number - prompt.position)
    means = {kind: float(np.mean(waited)) for kind, waited in waits.items()}
    assert max(means[k] for k in ahead) + 10 < min(means[k] for k in behind)


def run(prompts, steps, per_step, first=0, late=False):
    """Whole steps of groups, drawn in a burst, then scored; the prompts of each."""
    taken = []
    for step in range(steps):
        numbers = range(first + step * per_step, first + (step + 1) * per_step)
        burst = [next(prompts) for _ in numbers]
        scored = [group(n, p, difficulty(p)) for n, p in zip(numbers, burst, strict=True)]
        for one in reversed(scored) if late else scored:
            prompts.observe(one)
        taken += [(p.prompt_id, p.position) for p in burst]
    return taken


@pytest.mark.full
@settings(deadline=None, max_examples=10)
@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 8), st.integers(0, 3))
def test_a_restored_curriculum_continues_exactly_though_more_was_taken_since(
    steps, per_step, pool, more
):
    whole = curriculum(pool=pool, count=5)
    expected = run(whole, steps + 4, per_step)
    prompts = curriculum(pool=pool, count=5)
    run(prompts, steps, per_step)
    ahead = [next(prompts) for _ in range(more)]  # admitted, and lost with the run
    for number, prompt in enumerate(ahead, steps * per_step):
        prompts.observe(group(number, prompt, [1.0]))
    prompts.measures(max(0, steps * per_step - 1))
    state = json.loads(json.dumps(prompts.state(steps * per_step)))
    again = curriculum(pool=pool, count=5)
    again.restore(state)
    assert json.loads(json.dumps(again.state())) == state
    assert run(again, 4, per_step, first=steps * per_step) == expected[steps * per_step :]


@pytest.mark.full
def test_groups_are_taken_in_by_number_not_by_who_was_scored_first():
    orders = [run(curriculum(pool=8, count=3), 6, 5, late=late) for late in (False, True)]
    assert orders[0] == orders[1]


@pytest.mark.parametrize("arrival", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_groups_of_one_prompt_count_in_the_order_of_their_numbers(arrival):
    """Solved, then twice not: 1, 1 / 2, 1 / 4, whichever was scored first."""
    prompts = curriculum(pool=1, count=1)
    rewards = [[1.0], [0.0], [0.0]]
    made = [group(number, next(prompts), r) for number, r in enumerate(rewards)]
    for number in arrival:
        prompts.observe(made[number])
    assert prompts.state()["rates"] == [[0, 0.25]]


def test_a_checkpoint_has_the_scores_of_groups_that_had_ended_when_the_buffer_was_read():
    prompts = curriculum(pool=1, count=9)
    made = [group(number, next(prompts), [1.0]) for number in range(4)]
    prompts.observe(made[0])
    burst = next(prompts)  # admitted while the rollouts were read, and left out
    prompts.observe(made[2])
    next(prompts)
    prompts.observe(made[1])  # after the buffer was read: it is played again
    prompts.observe(group(4, burst, [1.0]))
    state = prompts.state(4, lambda number: number in (0, 2))
    assert state["next"] == 4
    assert [i for i, _ in state["rates"]] == [made[n].prompt.prompt_id for n in (0, 2)]
    assert len(prompts.state()["rates"]) == 4, "and the next one has all"


def test_a_score_between_the_reads_is_left_out_though_a_later_draw_has_seen_it():
    prompts = curriculum(pool=1, count=9)
    made = [group(number, next(prompts), [1.0]) for number in range(3)]
    prompts.observe(made[0])
    prompts.observe(made[1])  # after the buffer was read
    next(prompts)
    rates = prompts.state(3, lambda number: number == 0)["rates"]
    assert [i for i, _ in rates] == [made[0].prompt.prompt_id]


def test_the_report_shows_how_hard_the_prompts_are_as_known_at_the_draw():
    prompts = curriculum(pool=1, count=4)
    assert prompts.measures(0) == {"data/measured_prompts": 0.0, "data/longest_passed_over": 0.0}
    run(prompts, 1, 4)  # records with rates 0, 1/3, 2/3, 1
    assert "data/drawn_difficulty_mean" not in prompts.measures(4), "none was known then"
    assert prompts.measures(4)["data/difficulty_mean"] == pytest.approx(0.5)
    later = [next(prompts) for _ in range(2)]
    values = prompts.measures(6)
    hardness = [1 - (p.prompt_id % 4) / 3 for p in later]
    assert values["data/drawn_difficulty_mean"] == pytest.approx(np.mean(hardness))
    assert values["data/measured_prompts"] == 4


def test_the_journal_holds_only_what_is_not_reported_yet():
    prompts = curriculum()
    for step in range(20):
        run(prompts, 1, 5, first=5 * step)
        prompts.measures(5 * step + 5)
        assert len(prompts._journal.events) == 0


def test_a_stream_in_fixed_order_becomes_a_curriculum_but_not_back_with_prompts_passed_over():
    plain = stream()
    list(islice(plain, 5))
    prompts = curriculum()
    prompts.restore(plain.state())
    assert min(p.position for p in islice(prompts, 40)) >= 5
    with pytest.raises(DataError, match=r"5 prompts.*curriculum_pool=1"):
        stream().restore(prompts.state())
    one_by_one = curriculum(pool=1)
    one_by_one.restore(prompts.state())
    left = prompts.state()["passed_over"]
    assert [p.position for p in islice(one_by_one, 6)] == [*left, 50]


def test_the_state_of_another_stream_or_a_damaged_one_is_refused():
    prompts = curriculum()
    with pytest.raises(DataError, match="another stream"):
        prompts.restore({**prompts.state(), "seed": 3})
    with pytest.raises(DataError, match="damaged"):
        prompts.restore({**prompts.state(), "passed_over": [3, 1]})


def test_the_configuration_chooses_the_stream():
    tokenizer = addition_tokenizer()
    addition = AdditionSection(digits=3, eval_size=10)
    assert isinstance(make_stream(DataSection(addition=addition), tokenizer, 0), PromptStream)
    data = DataSection(addition=addition, curriculum="hard_first", curriculum_pool=2)
    made = make_stream(data, tokenizer, 0)
    assert isinstance(made, Curriculum)
    assert {p.position for p in islice(made, 3)} < set(range(4))


def test_the_measures_of_several_processes_count_each_prompt_alike():
    first = {
        "data/measured_prompts": 3.0,
        "data/longest_passed_over": 5.0,
        "data/difficulty_mean": 0.2,
        "data/drawn_difficulty_mean": 0.4,
    }
    second = {
        "data/measured_prompts": 1.0,
        "data/longest_passed_over": 7.0,
        "data/difficulty_mean": 0.6,
    }
    new = {"data/measured_prompts": 0.0, "data/longest_passed_over": 0.0}
    assert combined_measures([first, second, new]) == pytest.approx(
        {
            "data/measured_prompts": 4.0,
            "data/longest_passed_over": 7.0,
            "data/difficulty_mean": 0.3,
            "data/drawn_difficulty_mean": 0.4,
        }
    )
    assert combined_measures([new, new]) == new
