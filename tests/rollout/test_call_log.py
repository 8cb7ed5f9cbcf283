import itertools

import numpy as np
import pytest
from call_trees import completion_of, random_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.codec import dumps, loads
from jaxrl_async.rollout.call_log import SavedAnswers, Trace, cut_completion
from jaxrl_async.rollout.episode import SavedCalls
from jaxrl_async.rollout.episode_assembly import context_branch
from jaxrl_async.types import NOT_DRAWN, StopReason


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def play(trace: Trace, prompt: np.ndarray, *sampled: int, first: int = 1) -> int:
    number = trace.begin(prompt).number
    trace.end(number, completion_of(f"t{number}", len(prompt), ids(*sampled), first))
    return number


def contexts_of(episode):
    bounds = [*episode.starts, len(episode.token_ids)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_drawn_token_is_drawn_once_after_exactly_what_the_policy_saw(seed):
    trace, calls = random_trace(seed)
    episode = trace.episode(StopReason.EOS)
    assert episode.num_turns == trace.num_turns == len(calls)
    assert episode.num_drawn == sum(len(c.completion.token_ids) for c in calls.values())
    assert episode.starts[0] == 0 and (np.diff(episode.starts) > 0).all()
    assert not episode.drawn[list(episode.starts)].any(), "nothing predicts a first token"
    undrawn = ~episode.drawn
    assert (episode.logprobs[undrawn] == 0).all() and (episode.versions[undrawn] == NOT_DRAWN).all()
    experts, kept = episode.expert_ids, episode.kept
    indices = np.cumsum(episode.drawn) - 1
    for call in calls.values():
        done = call.completion
        (first,) = np.flatnonzero(episode.logprobs == done.logprobs[0])
        there = slice(first, first + len(done.token_ids))
        for column in ("token_ids", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(episode, column)[there], getattr(done, column))
        assert episode.drawn[there].all()
        start = max(s for s in episode.starts if s <= first)
        np.testing.assert_array_equal(episode.token_ids[start:first], call.prompt)
        for index in range(there.start, there.stop):
            np.testing.assert_array_equal(
                kept.of(indices[index]), episode.token_ids[index : index + 1]
            )
        known = experts[start : there.stop - 1, 0, 0]
        np.testing.assert_array_equal(known, np.arange(len(known)))
    for context in contexts_of(episode):
        assert experts[context][-1].max() == -1, "what made no logits has no experts"


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_call_that_goes_on_where_another_ended_begins_no_sequence(seed):
    trace, _ = random_trace(seed, one_at_a_time=True)
    episode = trace.episode(StopReason.EOS)
    whole = [episode.token_ids[c] for c in contexts_of(episode)]
    for later, tokens in enumerate(whole):
        for earlier in whole[:later]:
            begins = len(earlier) <= len(tokens) and (tokens[: len(earlier)] == earlier).all()
            if begins:  # it began before the earlier one was as long
                start = episode.starts[later]
                first = int(np.flatnonzero(episode.drawn[start:])[0])
                assert first < len(earlier)


def test_a_linear_conversation_is_one_context_and_branches_are_counted_by_their_tokens():
    trace = Trace()
    assert trace.begin(ids(1, 2)).branch == 0
    trace.end(0, completion_of("t0", 2, ids(3, 4), 1))
    play(trace, ids(1, 2, 3, 4, 9), 5)
    one = trace.episode(StopReason.LENGTH)
    assert one.starts == (0,) and one.num_turns == 2 and one.stop is StopReason.LENGTH
    assert one.token_ids.tolist() == [1, 2, 3, 4, 9, 5]
    assert one.drawn.tolist() == [False, False, True, True, False, True]
    again = [trace.begin(ids(1, 2)) for _ in range(2)]
    assert [a.branch for a in again] == [context_branch(ids(1, 2), n) + n for n in (1, 2)]
    assert [a.number for a in again] == [2, 3]


def test_contexts_draw_by_numbers_of_their_own_which_do_not_depend_on_who_comes_first():
    """Before, two sub-agents with prompts of one length drew by the same random numbers."""

    def branches(order):
        trace = Trace()
        play(trace, ids(1), 9)
        found = {n: trace.begin(ids(7, n)) for n in order}
        for n in order:
            trace.end(found[n].number, completion_of("x", 2, ids(8), 40 + n))
        return {n: (found[n].branch, trace.begin(ids(7, n, 8, 3)).branch) for n in order}

    one, other = branches([1, 2, 3]), branches([3, 1, 2])
    assert one == other and all(first == later for first, later in one.values())
    assert len({0, *(first for first, _ in one.values())}) == 4


def test_continuations_of_several_answers_to_one_prompt_draw_by_numbers_of_their_own():
    trace = Trace()
    calls = [trace.begin(ids(1)) for _ in range(3)]
    for n, call in enumerate(calls):
        trace.end(call.number, completion_of(f"t{n}", 1, ids(5 + n), 10 * n))
    later = [trace.begin(ids(1, 5 + n, 2)).branch for n in range(3)]
    assert len(set(later)) == 3 and calls[0].branch == later[0] == 0


def test_parallel_answers_and_their_continuations_lie_where_they_were_drawn_whoever_ends_first():
    def played(order):
        trace = Trace()
        calls = [trace.begin(ids(1)).number for _ in range(3)]
        for n in order:
            trace.end(calls[n], completion_of(f"t{n}", 1, ids(5 + n), 10 * (n + 1)))
        play(trace, ids(1, 6, 2), 8, first=50)
        return trace.episode(StopReason.EOS)

    first, other = played([0, 1, 2]), played([2, 1, 0])
    assert first.token_ids.tolist() == [1, 5, 1, 6, 2, 8, 1, 7] and first.starts == (0, 2, 6)
    for column in ("token_ids", "drawn", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(first, column), getattr(other, column))


def test_rewritten_history_is_context_in_the_new_sequence():
    trace = Trace()
    play(trace, ids(1, 2), 3, 4)
    play(trace, ids(1, 2, 3, 7), 5, first=20)  # the end of what was drawn is gone
    episode = trace.episode(StopReason.EOS)
    assert episode.token_ids.tolist() == [1, 2, 3, 4, 1, 2, 3, 7, 5]
    assert episode.starts == (0, 4)
    assert np.flatnonzero(episode.drawn).tolist() == [2, 3, 8]


def test_a_cancelled_call_leaves_nothing_and_what_it_went_on_goes_on():
    trace = Trace()
    play(trace, ids(1), 2)
    trace.cancel(trace.begin(ids(1, 2, 3)).number)
    trace.cancel(trace.begin(ids(9)).number)
    nothing = trace.begin(ids(1, 2, 3)).number
    trace.end(nothing, completion_of("none", 3, ids(), 1))
    play(trace, ids(1, 2, 3), 4, first=9)
    episode = trace.episode(trace.stop)
    assert episode.token_ids.tolist() == [1, 2, 3, 4] and episode.starts == (0,)
    assert trace.num_calls == 5 and trace.num_turns == 2


def test_rewards_of_calls_are_at_the_last_token_that_each_drew():
    trace = Trace()
    a = play(trace, ids(1), 2, 3)
    b = play(trace, ids(7), 8, first=10)
    c = play(trace, ids(1, 2, 3, 4), 5, first=20)
    gone = trace.begin(ids(6)).number
    trace.cancel(gone)
    rewards = trace.token_rewards({a: 1.0, b: 2.0, c: 4.0, gone: 8.0})
    assert trace.episode(StopReason.EOS).token_ids.tolist() == [1, 2, 3, 4, 5, 7, 8]
    assert rewards.tolist() == [0, 0, 1, 0, 4, 0, 2]
    assert trace.token_rewards({gone: 8.0}) is None


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_cut_completion_is_as_if_no_more_had_been_drawn(count):
    whole = completion_of("t0", 2, ids(5, 6, 7), 1)
    cut = cut_completion(whole, count, 2)
    assert cut.token_ids.tolist() == [5, 6, 7][:count] and cut.stop is StopReason.EOS
    assert len(cut.logprobs) == len(cut.versions) == count and len(cut.kept.starts) == count + 1
    assert len(cut.expert_ids) == 2 + count - 1


# ---- calls that a checkpoint keeps


@pytest.mark.full
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_repeated_calls_get_the_same_answers_after_a_resume(seed):
    """A program that repeats its calls in the order of their start has the same episode."""
    trace, calls = random_trace(seed, one_at_a_time=True)
    kept = SavedAnswers(loads(dumps(trace.saved_calls()), (SavedCalls,)))
    again = Trace()
    for index, number in enumerate(sorted(calls)):
        call = calls[number]
        assert sum(len(c.numbers) for c in kept.left) == len(calls) - index
        assert kept.take(np.append(call.prompt, 99), "") is None, "another call"
        answer = kept.take(call.prompt, "")
        assert answer is not None
        # of several calls with the same tokens each gets its own answer, the earlier one first
        assert answer.request_id == call.completion.request_id
        np.testing.assert_array_equal(answer.logprobs, call.completion.logprobs)
        again.end(again.begin(call.prompt).number, answer)
    assert kept.left == () and kept.take(calls[min(calls)].prompt, "") is None
    ours, theirs = again.episode(StopReason.EOS), trace.episode(StopReason.EOS)
    for name in ("token_ids", "drawn", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), repeated=st.integers(0, 7))
def test_calls_that_are_not_repeated_yet_are_kept_again(seed, repeated):
    trace, calls = random_trace(seed, one_at_a_time=True)
    kept, again = SavedAnswers(trace.saved_calls()), Trace()
    for number in sorted(calls)[:repeated]:
        prompt = calls[number].prompt
        again.end(again.begin(prompt).number, kept.take(prompt, ""))
    for one in kept.left:  # each alone, as it was
        assert one.token_ids[one.begins[0] :].tolist() == one.completions[0].token_ids.tolist()
    second = SavedAnswers((*again.saved_calls(), *kept.left))
    for number in sorted(calls):
        answer = second.take(calls[number].prompt, "")
        assert answer is not None and len(answer.token_ids)
    assert second.left == ()


def test_a_player_may_have_another_name_after_a_resume():
    """verifiers names its players anew each time; two with the same question are not mixed."""
    trace = Trace()
    for player, first in (("north", 7), ("south", 8)):
        number = trace.begin(ids(1, 2), player).number
        trace.end(number, completion_of(player, 2, ids(first), 1))
    for player, first in (("north", 7), ("south", 8)):
        number = trace.begin(ids(1, 2, first, 5), player).number
        trace.end(number, completion_of(f"{player} again", 4, ids(first), 2))
    kept = SavedAnswers(trace.saved_calls())
    assert kept.take(ids(1, 2), "a").request_id == "north"
    assert kept.take(ids(1, 2), "a") is None, "north has said it once"
    assert kept.take(ids(1, 2, 8, 5), "a") is None, "south's"
    assert kept.take(ids(1, 2), "b").request_id == "south"
    assert kept.take(ids(1, 2, 8, 5), "b").request_id == "south again"
    assert kept.take(ids(1, 2, 7, 5), "c") is None
    assert kept.take(ids(1, 2, 7, 5), "a").request_id == "north again"
