"""Playing one group: turns become one flat sequence, nothing is lost or made up."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.errors import RolloutError
from jaxrl_async.ports.rollout import Reply
from jaxrl_async.rollout.env import SingleTurn
from jaxrl_async.rollout.episode import SavedEpisode, begin_groups, play_group
from jaxrl_async.rollout.episode_assembly import Turn, assemble_episode
from jaxrl_async.types import (
    NOT_DRAWN,
    Completion,
    EpisodeLimits,
    KeptTokens,
    Prompt,
    SamplingParams,
    StopReason,
)

EOS, LENGTH = StopReason.EOS, StopReason.LENGTH


def ints(*values):
    return np.array(values, np.int32)


PROMPT = Prompt(prompt_id=4, position=11, token_ids=ints(1, 2, 3), text="p", reference="r")


def limits(**change):
    settings = {
        "sampling": SamplingParams(),
        "stop_token_ids": (0,),
        "max_new_tokens": 8,
        "max_length": 40,
    }
    return EpisodeLimits(**{**settings, **change})


def completion(*ids, version=0, stop=EOS, request_id="x"):
    return Completion(
        request_id=request_id,
        token_ids=ints(*ids),
        logprobs=np.full(len(ids), -0.5, np.float32),
        versions=np.full(len(ids), version, np.int32),
        stop=stop,
    )


class ScriptedGenerate:
    """Plays back completions by request id; keeps the requests."""

    seed = None

    def __init__(self, script):
        self.script, self.requests = script, []

    def submit_many(self, requests):
        self.requests += requests
        futures = []
        for request in requests:
            future = asyncio.get_running_loop().create_future()
            found = self.script[request.request_id]
            if isinstance(found, Exception):
                future.set_exception(found)
            elif found is not None:
                future.set_result(found)
            futures.append(future)
        return futures


class ScriptedEnv:
    """Gives the replies in order; the last one is done."""

    def __init__(self, *replies, done=True):
        self.replies, self.done = list(replies), done

    async def step(self, prompt, completion):
        reply = self.replies.pop(0)
        return Reply(token_ids=ints(*reply), done=self.done and not self.replies)


def play(script, make_env=SingleTurn, size=1, **change):
    generate = ScriptedGenerate(script)

    async def go():
        groups = [("g5", PROMPT, [SavedEpisode()] * size)]
        (members,) = begin_groups(generate, make_env, groups, limits(**change))
        return await play_group(generate, PROMPT, members, label="g5", limits=limits(**change))

    return asyncio.run(go()), generate


def test_a_single_turn_is_prompt_and_answer():
    (episode,), generate = play({"g5/m0/t0": completion(7, 0, version=3)})
    assert episode.token_ids.tolist() == [1, 2, 3, 7, 0]
    assert episode.drawn.tolist() == [False, False, False, True, True]
    assert episode.logprobs.tolist() == [0, 0, 0, -0.5, -0.5]
    assert episode.versions.tolist() == [NOT_DRAWN] * 3 + [3, 3]
    assert (episode.stop, episode.num_turns) == (EOS, 1)
    (request,) = generate.requests
    assert (request.key, request.max_new_tokens, request.stop_token_ids) == ((11, 0), 8, (0,))


def test_a_later_turn_goes_on_where_the_reply_ended_and_keeps_its_key():
    script = {"g5/m0/t0": completion(7, 0, version=7), "g5/m0/t1": completion(9, version=9)}
    (episode,), generate = play(script, lambda p: ScriptedEnv([5, 5], []))
    assert episode.token_ids.tolist() == [1, 2, 3, 7, 0, 5, 5, 9]
    assert episode.drawn.astype(int).tolist() == [0, 0, 0, 1, 1, 0, 0, 1]
    assert episode.versions.tolist() == [-1, -1, -1, 7, 7, -1, -1, 9]
    assert episode.num_turns == 2
    assert generate.requests[1].token_ids.tolist() == [1, 2, 3, 7, 0, 5, 5]
    assert [r.key for r in generate.requests] == [(11, 0), (11, 0)]


def test_members_come_back_in_order_with_keys_of_their_own():
    script = {f"g5/m{m}/t0": completion(10 + m) for m in range(4)}
    episodes, generate = play(script, size=4)
    assert [e.token_ids[-1] for e in episodes] == [10, 11, 12, 13]
    assert [r.key for r in generate.requests] == [(11, m) for m in range(4)]


def test_a_cut_off_turn_ends_the_episode_without_asking_the_environment():
    (episode,), _ = play({"g5/m0/t0": completion(7, stop=LENGTH)}, lambda p: ScriptedEnv())
    assert (episode.stop, episode.num_turns) == (LENGTH, 1)


@pytest.mark.parametrize("max_length", [5, 6, 7])
def test_a_reply_that_leaves_no_room_is_left_out_and_the_episode_is_cut_off(max_length):
    (episode,), _ = play(
        {"g5/m0/t0": completion(7, 0)}, lambda p: ScriptedEnv([5, 5], []), max_length=max_length
    )
    assert episode.token_ids.tolist() == [1, 2, 3, 7, 0]
    assert episode.stop is LENGTH


def test_a_last_reply_is_kept_where_it_fits_and_left_out_where_not():
    for max_length, expected in ((7, [1, 2, 3, 7, 0, 5, 5]), (6, [1, 2, 3, 7, 0])):
        script = {"g5/m0/t0": completion(7, 0)}
        (episode,), _ = play(script, lambda p: ScriptedEnv([5, 5]), max_length=max_length)
        assert episode.token_ids.tolist() == expected
        assert episode.stop is EOS


def test_a_turn_never_asks_for_more_than_the_sequence_may_hold():
    _, generate = play({"g5/m0/t0": completion(7)}, max_length=5)
    assert generate.requests[0].max_new_tokens == 2


def test_a_prompt_without_room_for_an_answer_is_refused():
    with pytest.raises(RolloutError, match="leaves no room"):
        play({}, max_length=3)


def test_an_environment_that_never_ends_is_an_error_not_a_loop():
    class Stubborn:
        async def step(self, prompt, completion):
            return Reply(token_ids=ints(), done=False)

    with pytest.raises(RolloutError, match="neither the policy nor the environment"):
        play({"g5/m0/t0": completion()}, lambda p: Stubborn())


def test_one_failing_member_cancels_the_others():
    generate = ScriptedGenerate({"g5/m0/t0": None, "g5/m1/t0": ValueError("boom")})

    async def go():
        groups = [("g5", PROMPT, [SavedEpisode()] * 2)]
        (members,) = begin_groups(generate, SingleTurn, groups, limits())
        with pytest.raises(ValueError, match="boom"):
            await play_group(generate, PROMPT, members, label="g5", limits=limits())
        return members[0].waiting.cancelled()

    assert asyncio.run(go())


@pytest.mark.full
@given(st.lists(st.tuples(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)))))
def test_the_drawn_tokens_of_an_episode_are_those_of_its_turns(turns):
    made = [
        Turn(completion=completion(*sampled, version=i), reply=ints(*reply))
        for i, (sampled, reply) in enumerate(turns)
    ]
    episode = assemble_episode(PROMPT.token_ids, made, EOS)
    assert episode.token_ids[episode.drawn].tolist() == [t for sampled, _ in turns for t in sampled]
    assert episode.token_ids[~episode.drawn].tolist() == [
        1,
        2,
        3,
        *(t for _, reply in turns for t in reply),
    ]
    assert episode.versions[episode.drawn].tolist() == [
        i for i, (d, _) in enumerate(turns) for _ in d
    ]
    assert (episode.versions[~episode.drawn] == NOT_DRAWN).all()
    assert (episode.logprobs[~episode.drawn] == 0).all()
    assert len(episode.token_ids) == len(episode.logprobs) == len(episode.versions)
    assert (episode.token_ids.dtype, episode.drawn.dtype) == (np.int32, bool)
    assert (episode.logprobs.dtype, episode.versions.dtype) == (np.float32, np.int32)


def completion_with(*ids, masks, experts, **kw):
    """A completion with the sampling mask of each drawn token, and of every token but the last
    its expert in each of two layers."""
    return replace(
        completion(*ids, **kw),
        kept=KeptTokens(
            ids=ints(*(i for mask in masks for i in mask)),
            starts=ints(0, *np.cumsum([len(mask) for mask in masks])),
        ),
        expert_ids=np.array(experts, np.int8).reshape(-1, 2, 1),
    )


KEEP = {"keep_mask": True, "keep_routing": True}


def test_masks_and_experts_of_all_turns_are_kept_in_order():
    """1 2 3, drawn 7 0, reply 5 5, drawn 9: the second turn tells the experts of all before it
    again, where its KV was made anew; those of the passes that drew the first turn stay."""
    first = [[0, 1], [2, 3], [4, 5], [6, 7]]
    second = [[90 + i, i] for i in range(7)]
    script = {
        "g5/m0/t0": completion_with(7, 0, masks=[[6, 7, 8], [0]], experts=first),
        "g5/m0/t1": completion_with(9, masks=[[2, 9]], experts=second, stop=LENGTH),
    }
    (episode,), generate = play(script, lambda p: ScriptedEnv([5, 5], []), **KEEP)
    assert all(r.extras for r in generate.requests)
    assert [episode.kept.of(t).tolist() for t in range(3)] == [[6, 7, 8], [0], [2, 9]]
    assert len(episode.kept.starts) == episode.num_drawn + 1
    assert episode.expert_ids[..., 0].tolist() == [*first, *second[4:], [-1, -1]]
    assert episode.expert_ids.dtype == np.int8


def test_a_turn_that_drew_nothing_has_nothing_to_tell():
    nothing = completion(stop=StopReason.CANCELLED)
    (episode,), _ = play({"g5/m0/t0": nothing}, **KEEP)
    assert episode.kept is None and episode.num_drawn == 0


@pytest.mark.parametrize(
    ("switch", "name"), [("keep_mask", "kept"), ("keep_routing", "expert_ids")]
)
def test_a_sampler_that_does_not_tell_what_is_to_be_kept_is_an_error(switch, name):
    whole = completion_with(7, 0, masks=[[7], [0]], experts=[[0, 1], [2, 3], [0, 1], [2, 3]])
    for answer in (
        completion(7, 0),
        replace(whole, token_ids=ints(7, 8, 0)),
    ):
        with pytest.raises(
            RolloutError, match=rf"request x: .*Completion\.{name}; set it to false"
        ):
            play({"g5/m0/t0": answer}, **{switch: True})
    (episode,), generate = play({"g5/m0/t0": completion(7, 0)})
    assert not generate.requests[0].extras and episode.kept is episode.expert_ids is None
