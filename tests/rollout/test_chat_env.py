"""Conversations played in tokens: what is drawn stays, rewards and limits, saved and restored."""

import asyncio
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from word_chat import Speaks, WordChat

from jaxrl_async.errors import RolloutError, RolloutTimeout
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.ports.rollout import Concludes, Opens
from jaxrl_async.ports.run import SavesState
from jaxrl_async.rollout.call_log import Trace
from jaxrl_async.rollout.chat_env import ChatEnvs, ChatLimits
from jaxrl_async.rollout.env import GuardedEnvs
from jaxrl_async.rollout.episode import SavedEpisode, begin_groups, play_group, saved_episode
from jaxrl_async.tasks.task import Environment, Step, Task
from jaxrl_async.tasks.toolbox import ToolLimits
from jaxrl_async.testing.fakes import make_completion
from jaxrl_async.trainer.pack import pack_groups
from jaxrl_async.types import (
    EpisodeGroup,
    EpisodeLimits,
    Prompt,
    SamplingParams,
    StopReason,
    Ticket,
)

WORDS = (
    "one",
    "two",
    "three",
    "ask",
    "more",
    "sys",
    " ",
    "error",
    ":",
    *"()0123456789{}\"'abcdefghijklmnopqrstuvwxyz.,_",
)
PROMPT = Prompt(
    prompt_id=4,
    position=11,
    token_ids=np.zeros(0, np.int32),
    text="ask",
    reference="",
    columns={"question": "ask"},
)


def limits(**change):
    settings = {
        "sampling": SamplingParams(),
        "stop_token_ids": (0,),
        "max_new_tokens": 80,
        "max_length": 2000,
    }
    return EpisodeLimits(**{**settings, **change})


def guarded(task, chat, faults=None, **change):
    faults = faults or FaultCounts()
    limits = ChatLimits(backoff_s=0.0, **change)
    envs = ChatEnvs(task, chat, limits, faults.add)
    vocab = chat.tokenizer.vocab_size
    return GuardedEnvs(envs, timeout_s=5.0, vocab_size=vocab, count=faults.add)


async def played(generate, envs, saved=None, *, size=1, bounds=None):
    bounds = bounds or limits()
    (members,) = begin_groups(
        generate, envs, [("g5", PROMPT, saved or [SavedEpisode()] * size)], bounds
    )
    return await play_group(generate, PROMPT, members, label="g5", limits=bounds)


def play(task, *texts, rewrites=False, stop=StopReason.EOS, bounds=None, **change):
    """Play one episode of a task with a policy that says these texts."""
    chat, faults = WordChat(WORDS, rewrites=rewrites), FaultCounts()
    generate = Speaks(chat, *texts, stop=stop)
    envs = guarded(task, chat, faults, **change)
    (episode,) = asyncio.run(played(generate, envs, bounds=bounds))
    counted = {name: n for name, n in faults.read().items() if n}
    return episode, chat, generate, counted


class Counts(Environment):
    """Says "more" after each turn, with a reward of the turn's number, until it has said `most`."""

    closed = 0

    def __init__(self, most=2):
        self.said, self.most = 0, most

    def step(self, message):
        self.said += 1
        done = self.said > self.most
        return Step(messages=None if done else "more", reward=float(self.said), parts={"part": 0.5})

    def score(self):
        return {"end": 10.0}

    def close(self):
        Counts.closed += 1

    def state(self):
        return {"said": self.said}

    def restore(self, state):
        self.said = state["said"]


def test_what_was_drawn_is_kept_token_for_token_and_replies_lie_between():
    Counts.closed = 0
    task = Task(environment=Counts, system_prompt="sys")
    episode, chat, generate, counted = play(task, "one", "two", "three")
    text = chat.tokenizer.decode_all(episode.token_ids)
    assert text == (
        "<system>sys<eos><user>ask<eos><assistant>one<eos><user>more<eos><assistant>two<eos>"
        "<user>more<eos><assistant>three<eos>"
    )
    assert chat.tokenizer.decode(episode.token_ids[episode.drawn]) == "onetwothree"
    assert episode.versions[episode.drawn].tolist() == [0, 0, 1, 1, 2, 2]
    for earlier, later in zip(generate.requests, generate.requests[1:], strict=False):
        sampled = chat.say(("one", "two")[int(earlier.request_id[-1])])
        before = np.concatenate([earlier.token_ids, sampled])
        np.testing.assert_array_equal(later.token_ids[: len(before)], before)
    assert episode.num_turns == 3 and episode.starts == (0,) and not counted
    assert Counts.closed == 1


def test_rewards_go_to_the_turns_that_earned_them_and_add_up():
    episode, *_ = play(Task(environment=Counts), "one", "two", "three")
    score = episode.score
    ends = np.flatnonzero(episode.drawn)[[1, 3]]
    assert score.token_rewards[ends].tolist() == [1.0, 2.0]
    assert score.token_rewards.sum() == 3 and score.reward == 3 + 10 and score.total == 16
    assert score.parts == {"part": 1.5, "end": 10.0}
    assert score.named_of_tokens == 3.0  # gdpo counts it once


class Names(Environment):
    def step(self, message):
        return Step(parts={"a b": 1.0, "c": 2.0})


def test_names_of_parts_are_those_of_metrics_as_in_reward_functions():
    episode, *_ = play(Task(environment=Names), "one")
    assert episode.score.parts == {"a_b": 1.0, "c": 2.0} and episode.score.reward == 3.0


class Sells(Environment):
    def reset(self, record):
        self.stock = record["stock"]
        return "ask"

    def step(self, message):
        self.stock["milk"] -= 1

    def score(self):
        return self.stock["milk"]


def test_an_episode_that_changes_its_record_changes_no_other():
    chat, columns = WordChat(WORDS), {"stock": {"milk": 3}}
    generate, prompt = Speaks(chat, "one", "two"), replace(PROMPT, columns=columns)
    envs = guarded(Task(environment=Sells), chat)

    async def both():
        (members,) = begin_groups(generate, envs, [("g5", prompt, [SavedEpisode()] * 2)], limits())
        return await play_group(generate, prompt, members, label="g5", limits=limits())

    assert [e.score.total for e in asyncio.run(both())] == [2.0, 2.0]
    assert columns == {"stock": {"milk": 3}}


def test_where_there_are_no_tools_a_text_like_a_call_ends_the_episode_as_any_answer():
    for task, turns in ((Task(), 1), (Task(tools=(shout,)), 2)):
        episode, _, _, counted = play(task, call("nothing"), "one")
        assert episode.num_turns == turns and counted.get("tool_errors", 0) == turns - 1


def test_where_the_format_rewrites_history_each_turn_is_a_context_of_its_own():
    episode, chat, generate, _ = play(
        Task(environment=Counts), "one", "two", "three", rewrites=True
    )
    assert len(episode.starts) == 3
    first, second, third = np.split(episode.token_ids, episode.starts[1:])
    assert chat.tokenizer.decode_all(first) == "<user>ask<eos><assistant>one<eos>"
    assert chat.tokenizer.decode_all(second).endswith("one<eos><user>more<eos><assistant>two<eos>")
    for request, context, text in zip(
        generate.requests, (first, second, third), ("one", "two", "three"), strict=True
    ):
        np.testing.assert_array_equal(context, np.concatenate([request.token_ids, chat.say(text)]))
    assert episode.num_drawn == 6 and episode.num_turns == 3
    assert episode.score.token_rewards.sum() == 3 and episode.score.total == 16


def test_a_context_that_comes_again_draws_other_random_numbers():
    class Forgets(WordChat):
        def opening(self, messages, tools):
            return super().opening(messages[:1], tools)

    chat = Forgets(WORDS, rewrites=True)
    generate = Speaks(chat, "one", "two", "three")
    asyncio.run(played(generate, guarded(Task(environment=Counts), chat)))
    assert generate.requests[0].branch == 0 and len({r.branch for r in generate.requests}) == 3
    assert len({r.token_ids.tobytes() for r in generate.requests}) == 1


@pytest.mark.parametrize("kept", ["all", "the first", "the last two"])
def test_an_environments_contexts_draw_as_those_of_a_session_with_the_same_calls(kept):
    kept_slices = {"all": slice(None), "the first": slice(1), "the last two": slice(-2, None)}

    class Forgets(WordChat):
        def opening(self, messages, tools):
            return super().opening(messages[kept_slices[kept]], tools)

    chat = Forgets(WORDS, rewrites=True)
    generate, trace = Speaks(chat, "one", "two", "three"), Trace()
    asyncio.run(played(generate, guarded(Task(environment=Counts), chat)))
    for request, text in zip(generate.requests, ("one", "two", "three"), strict=True):
        begun = trace.begin(request.token_ids)
        assert begun.branch == request.branch
        trace.end(begun.number, make_completion(request, chat.say(text)))
    assert len({r.branch for r in generate.requests}) == (1 if kept == "all" else 3)


def test_an_opening_without_room_is_an_episode_that_is_cut_off_and_judged():
    bounds = limits(max_length=4)
    chat, faults = WordChat(WORDS), FaultCounts()
    envs = GuardedEnvs(
        ChatEnvs(Task(environment=Counts), chat, ChatLimits(), faults.add),
        timeout_s=5.0,
        vocab_size=chat.tokenizer.vocab_size,
        max_length=4,
        count=faults.add,
    )
    generate = Speaks(chat, "one")
    episodes = asyncio.run(played(generate, envs, size=2, bounds=bounds))
    for episode in episodes:
        assert len(episode.token_ids) == 4 and not episode.num_drawn and not generate.requests
        assert episode.stop is StopReason.LENGTH and episode.score.total == 10
    assert faults.read()["long_openings"] == 2
    group = EpisodeGroup(
        prompt=PROMPT,
        episodes=episodes,
        scores=tuple(e.score for e in episodes),
        ticket=Ticket(group=0, version=3),
    )
    assert group.oldest_version == 3 and not pack_groups([group], None, 8).mask.any()


def test_a_run_is_resumed_where_an_opening_had_no_room():
    chat, bounds = WordChat(WORDS), limits(max_length=4)
    envs = guarded(Task(environment=Counts), chat)

    async def begun(saved):
        (members,) = begin_groups(Speaks(chat), envs, [("g5", PROMPT, saved)], bounds)
        episodes = await play_group(Speaks(chat), PROMPT, members, label="g5", limits=bounds)
        return episodes, [saved_episode(member, None) for member in members]

    first, saved = asyncio.run(begun([SavedEpisode()]))
    again, _ = asyncio.run(begun(saved))
    np.testing.assert_array_equal(first[0].token_ids, again[0].token_ids)
    assert again[0].score == first[0].score and again[0].stop is StopReason.LENGTH


def test_a_turn_that_is_cut_off_is_scored_without_a_step():
    episode, *_ = play(Task(environment=Counts), "one", "two", stop=StopReason.LENGTH)
    assert episode.stop is StopReason.LENGTH and episode.num_turns == 2
    assert episode.score.total == 1 + 10
    assert conversation(episode) == [("assistant", "one"), ("user", "more"), ("assistant", None)]


def conversation(episode):
    return [(m["role"], m.get("content")) for m in episode.messages]


def test_the_turns_of_an_episode_are_limited_and_the_last_one_is_answered():
    episode, *_, counted = play(Task(environment=Counts), "one", "two", "three", max_turns=2)
    assert episode.num_turns == 2 and episode.score.total == 1 + 2 + 10
    assert counted == {"turn_limits": 1} and episode.stop is StopReason.LENGTH


class Async(Environment):
    async def reset(self, record):
        return [{"role": "user", "content": record["question"]}]

    async def step(self, message):
        await asyncio.sleep(0)
        return None

    async def score(self):
        return 0.25


def test_methods_may_be_async_and_nothing_to_say_ends_the_episode():
    episode, *_ = play(Task(environment=Async), "one")
    assert episode.score.total == 0.25 and episode.num_turns == 1


def find(word: str, times: int = 1) -> str:
    """Find a word."""
    if word == "two":
        raise KeyError("gone")
    if word == "three":
        time.sleep(5)
    return word * times


async def shout(word: str) -> dict[str, str]:
    """Shout."""
    return {"a": word}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_tools_answer_and_their_errors_are_told_to_the_policy_and_counted():
    calls = [
        call("find", word="one", times=2) + call("shout", word="one"),
        call("find", word="two"),
        call("find", word="three"),
        call("find", wrd="one"),
        call("nothing"),
        call("find", word="abcdefghij"),
        "one",
    ]
    task = Task(records=[{"question": "ask"}] * 2, tools=(find, shout))
    tools = ToolLimits(timeout_s=0.1, result_chars=9)
    episode, chat, _, counted = play(task, *calls, tools=tools)
    text = chat.tokenizer.decode_all(episode.token_ids)
    replies = [part.split("<eos>")[0] for part in text.split("<tool_response>")[1:]]
    assert replies[:2] == ["oneone", '{"a": "on... (3 more characters are cut)']
    assert "gone" in replies[2] and "took more than 0.1 s" in replies[3]
    assert "word" in replies[4] and "nothing" in replies[5] and replies[6].startswith("abcdefghi.")
    assert episode.num_turns == 7
    assert [m["content"] for m in episode.opened] == ["ask"]
    roles = ["assistant", "tool", "tool", *["assistant", "tool"] * 5, "assistant"]
    assert [m["role"] for m in episode.messages] == roles
    first, found = episode.messages[0]["tool_calls"], episode.messages[1]
    assert [c["function"]["name"] for c in first] == ["find", "shout"]
    assert found["content"] == "oneone" and found["tool_call_id"] == first[0]["id"]
    assert counted == {"tool_errors": 3, "tool_timeouts": 1, "cut_tool_results": 2}


class Flaky(Environment):
    made = 0
    repeatable = True

    def __init__(self):
        Flaky.made += 1
        self.steps = 0

    def reset(self, record):
        if Flaky.made < 3:
            raise ValueError("not yet")
        return record["question"]

    def step(self, message):
        self.steps += 1
        if self.steps < 2:
            raise ValueError("again")
        return Step(reward=1.0)


def test_a_reset_is_tried_again_with_a_new_environment_and_a_repeatable_step_too():
    Flaky.made = 0
    episode, *_, counted = play(Task(environment=Flaky), "one")
    assert episode.score.total == 1 and Flaky.made == 3 and counted == {"env_retries": 3}
    Flaky.made = 0
    with pytest.raises(RolloutError, match="the environment's reset raised ValueError: not yet"):
        play(Task(environment=Flaky), "one", retries=1)


def broken(method, given):
    def answer(self, *_):
        if isinstance(given, Exception):
            raise given
        return given

    return type("Broken", (Environment,), {method: answer})


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("reset", None, "reset gave no message"),
        ("reset", 5, "reset gave 5. It must return a text"),
        ("step", [{"content": "x"}], "step gave .* a message with a role"),
        ("step", KeyError("x"), "the environment's step raised KeyError: 'x'"),
        ("step", Step(reward=float("nan")), "step gave nan. It must be a finite number"),
        ("step", Step(parts={"a": "b"}), "finite number, or a mapping"),
        ("step", Step(parts={"a b": 1.0, "a_b": 1.0}), "two of which have the same name"),
        ("score", "much", "score gave 'much'"),
    ],
)
def test_what_an_environment_does_wrong_is_told(method, given, words):
    with pytest.raises(RolloutError, match=words):
        play(Task(environment=broken(method, given)), "one")


def test_a_method_that_takes_too_long_is_told_with_its_setting():
    class Sleeps(Environment):
        def step(self, message):
            time.sleep(2)

    with pytest.raises(RolloutTimeout, match=r"step took more than 0.05 s.*faults.env_timeout_s"):
        play(Task(environment=Sleeps), "one", timeout_s=0.05)


def test_a_close_that_fails_is_counted_and_costs_nothing():
    episode, *_, counted = play(Task(environment=broken("close", OSError("x"))), "one")
    assert episode.num_turns == 1 and counted == {"failed_closes": 1}


def test_a_tool_without_type_hints_is_refused():
    def untyped(x):
        return x

    with pytest.raises(RolloutError, match="parameter x needs a type hint"):
        play(Task(tools=(untyped,)), "one")


@pytest.mark.parametrize("rewrites", [False, True])
@pytest.mark.parametrize("at", range(1, 4))
def test_an_episode_saved_between_turns_goes_on_as_if_nothing_had_been(rewrites, at):
    texts, task = ("one", "two", "three"), Task(environment=Counts)
    whole, chat, *_ = play(task, *texts, rewrites=rewrites)
    saved = []

    class Stops(Speaks):
        def submit_many(self, requests):
            if requests and requests[0].request_id.endswith(f"/t{at}"):
                raise RolloutError("killed")
            return super().submit_many(requests)

    async def killed():
        generate, envs = Stops(chat, *texts), guarded(task, chat)
        (members,) = begin_groups(generate, envs, [("g5", PROMPT, [SavedEpisode()])], limits())
        if at < 3:
            with pytest.raises(RolloutError, match="killed"):
                await play_group(generate, PROMPT, members, label="g5", limits=limits())
        else:
            await play_group(generate, PROMPT, members, label="g5", limits=limits())
        saved.append(saved_episode(members[0], None))

    asyncio.run(killed())
    generate = Speaks(chat, *texts)
    (episode,) = asyncio.run(played(generate, guarded(task, chat), saved=saved))
    np.testing.assert_array_equal(episode.token_ids, whole.token_ids)
    np.testing.assert_array_equal(episode.drawn, whole.drawn)
    assert episode.starts == whole.starts and episode.num_turns == whole.num_turns
    assert episode.score.parts == whole.score.parts and episode.score.total == whole.score.total
    assert len(generate.requests) == 3 - at
    assert (episode.opened, episode.messages) == (whole.opened, whole.messages)
    end = [("assistant", "two"), ("user", "more"), ("assistant", "three")]
    assert conversation(whole)[-3:] == end


def test_an_environment_without_state_starts_over():
    class Forgetful(Counts):
        state = None

    chat = WordChat(WORDS)
    env = guarded(Task(environment=Forgetful), chat)(PROMPT)
    assert isinstance(env, SavesState) and isinstance(env, Opens) and isinstance(env, Concludes)

    async def stateless():
        await env.open(PROMPT)
        return env.state()

    assert asyncio.run(stateless()) is None


def test_many_episodes_wait_side_by_side():
    class Waits(Environment):
        def step(self, message):
            time.sleep(0.2)
            return Step(reward=1.0)

    chat = WordChat(WORDS)
    generate = Speaks(chat, "one")
    episodes = asyncio.run(played(generate, guarded(Task(environment=Waits), chat), size=32))
    assert [e.score.total for e in episodes] == [1.0] * 32


def test_the_environment_in_docs_plays():
    page = (Path(__file__).parents[2] / "docs/environments.md").read_text("utf-8")
    example = next(
        b for b in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "Shop" in b
    )
    names: dict = {}
    exec(example, names)
    task = names["shop"]
    prompt = replace(PROMPT, columns=task.records[0])
    chat = WordChat([*WORDS, *"WME?"])
    generate = Speaks(chat, call("price", item="milk"), "3.50")
    envs = guarded(task, chat)

    async def shop():
        (members,) = begin_groups(generate, envs, [("g5", prompt, [SavedEpisode()])], limits())
        return await play_group(generate, prompt, members, label="g5", limits=limits())

    (episode,) = asyncio.run(shop())
    assert episode.score.parts == {"correct": 1.0} and episode.num_turns == 2
    assert "<tool_response>3.5<eos>" in chat.tokenizer.decode_all(episode.token_ids)
