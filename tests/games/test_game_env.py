"""Games of several seats in tokens: what each seat sees, draws and earns; who is compared."""

import asyncio
from collections import Counter

import numpy as np
import pytest
from word_chat import WordChat

from jaxrl_async.algorithms.advantages import advantage, step_data
from jaxrl_async.algorithms.peers import compared_with_peers
from jaxrl_async.errors import RolloutError, RolloutTimeout
from jaxrl_async.games.game_env import GameEnvs
from jaxrl_async.games.nim import Nim
from jaxrl_async.games.proposer_solver import ProposerSolver
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.rollout.chat_env import ChatEnvs, ChatLimits
from jaxrl_async.rollout.env import GuardedEnvs
from jaxrl_async.rollout.episode import SavedEpisode, begin_groups, play_group
from jaxrl_async.rollout.evaluate import evaluate
from jaxrl_async.rollout.quorum import Quota
from jaxrl_async.tasks.game import Game, Round
from jaxrl_async.tasks.task import Task
from jaxrl_async.trainer.data_metrics import group_measures
from jaxrl_async.types import (
    Completion,
    EpisodeGroup,
    EpisodeLimits,
    Prompt,
    SamplingParams,
    Score,
    StopReason,
    Ticket,
)

WORDS = (*(str(n) for n in range(20)), "+", "sum", "sys", "ping", "pong", "over")
LIMITS = EpisodeLimits(
    sampling=SamplingParams(), stop_token_ids=(0,), max_new_tokens=8, max_length=60
)


def prompt(**columns) -> Prompt:
    none = np.zeros(0, np.int32)
    return Prompt(prompt_id=3, position=11, token_ids=none, text="", reference="", columns=columns)


class Says:
    """A ports.Generate that says what a function of member, seat and turn gives."""

    seed = None

    def __init__(self, chat, says, stop=StopReason.EOS):
        self.chat, self.says, self.stop, self.requests, self.calls = chat, says, stop, [], []

    def progress(self):
        return ()

    def submit_many(self, requests):
        self.requests += requests
        self.calls += [[r.request_id for r in requests]] if requests else []
        return [self._future(request) for request in requests]

    def _future(self, request):
        _, member, part = request.request_id.rsplit("/", 2)
        seat, _, turn = part.rpartition(".t")
        ids = self.chat.say(self.says(int(member[1:]), seat, int(turn)))
        ids = ids if self.stop is StopReason.EOS else ids[:-1]
        future = asyncio.get_running_loop().create_future()
        future.set_result(
            Completion(
                request_id=request.request_id,
                token_ids=ids,
                logprobs=np.full(len(ids), -0.5, np.float32),
                versions=np.full(len(ids), int(turn), np.int32),
                stop=self.stop,
            )
        )
        return future


def envs_of(make, chat, faults, seats_of=lambda prompt: {}, **change):
    limits = ChatLimits(backoff_s=0.0, **change)
    task = Task(game=make, system_prompt="sys")
    games = GameEnvs(ChatEnvs(task, chat, limits, faults.add), make, seats_of)
    return GuardedEnvs(games, timeout_s=5.0, vocab_size=chat.tokenizer.vocab_size)


def play(
    make, says, given=None, *, size=1, stop=StopReason.EOS, rewrites=False, quota=None, **change
):
    """Play a group of games; return its episodes, the chat, the policy and what was counted."""
    chat, faults = WordChat(WORDS, rewrites=rewrites), FaultCounts()
    generate, given = Says(chat, says, stop), given or prompt()
    envs = envs_of(make, chat, faults, **change)

    async def played():
        (members,) = begin_groups(generate, envs, [("g5", given, [SavedEpisode()] * size)], LIMITS)
        return await play_group(generate, given, members, label="g5", limits=LIMITS, quota=quota)

    episodes = asyncio.run(played())
    return episodes, chat, generate, {n: c for n, c in faults.read().items() if c}


def test_each_seat_has_a_conversation_of_its_own_and_the_winner_is_paid() -> None:
    moves = {"first": ["2", "2"], "second": ["1", "2"]}
    episodes, chat, generate, counted = play(
        lambda: Nim(3), lambda m, seat, turn: moves[seat][turn], prompt(stones=7)
    )
    first, second = (chat.tokenizer.decode_all(e.token_ids) for e in episodes)
    assert first == ("<system>sys<eos><user>7<eos><assistant>2<eos><user>4<eos><assistant>2<eos>")
    assert second == ("<system>sys<eos><user>5<eos><assistant>1<eos><user>2<eos><assistant>2<eos>")
    assert [chat.tokenizer.decode(e.token_ids[e.drawn]) for e in episodes] == ["22", "12"]
    assert [e.seat for e in episodes] == [e.peers for e in episodes] == ["first", "second"]
    talks = [[m["content"] for m in (*e.opened, *e.messages)] for e in episodes]
    assert talks == [["sys", "7", "2", "4", "2"], ["sys", "5", "1", "2", "2"]]
    assert [len(e.opened) for e in episodes] == [2, 2]
    assert [e.score.parts for e in episodes] == [{"correct": 0.0}, {"correct": 1.0}]
    assert [e.score.total for e in episodes] == [0.0, 1.0] and not counted
    assert generate.calls == [[f"g5/m0/{seat}.t{t}"] for t in (0, 1) for seat in moves]
    assert {r.key for r in generate.requests} == {(11, 0)}
    assert len({r.branch for r in generate.requests}) == 2, "a seat draws by numbers of its own"


def test_an_illegal_move_loses_at_once() -> None:
    for text in ("4", "0", "sum", "8"):
        episodes, *_ = play(lambda: Nim(3), lambda m, seat, turn, text=text: text, prompt(stones=7))
        assert [(e.seat, e.score.total) for e in episodes] == [("first", 0.0)]


def test_a_rival_of_the_games_own_never_errs() -> None:
    perfect = [str(7 % 4), str(4 % 4 or 1)]
    for moves, won in (([*perfect[:1], "1"], None), (["1", "1", "1", "1"], 0.0)):
        episodes, chat, *_ = play(
            lambda: Nim(3), lambda m, seat, turn, s=moves: s[turn], prompt(stones=7, rival=True)
        )
        assert [e.seat for e in episodes] == ["first"]
        if won is not None:
            assert episodes[0].score.total == won
    text = chat.tokenizer.decode_all(episodes[0].token_ids)
    assert "<user>7<eos><assistant>1<eos><user>4<eos>" in text, "it leaves a multiple of four"


def test_solvers_are_asked_at_once_and_compared_within_their_game() -> None:
    results = {"solver_1": "8", "solver_2": "8", "solver_3": "7", "solver_4": "9"}

    def says(member, seat, turn):
        return results[seat] if seat in results else f"3+{5 + member}"

    episodes, _, generate, _ = play(lambda: ProposerSolver(9, 4), says, size=2)
    asked = [ids for ids in generate.calls if len(ids) > 1]
    assert sorted(map(len, asked)) == [4, 4]
    solving = [r for r in generate.requests if "solver" in r.request_id]
    assert len({(r.key, r.branch) for r in solving}) == 8, "each draws by numbers of its own"
    words = Counter(e.peers for e in episodes)
    assert words == {"proposer": 2, "solver_1/0": 4, "solver_1/1": 4}
    totals = [[e.score.total for e in episodes if e.peers == word] for word in words]
    assert totals == [[1.0, 0.5], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    group = EpisodeGroup(
        prompt=prompt(),
        episodes=episodes,
        scores=tuple(e.score for e in episodes),
        ticket=Ticket(group=0, version=0),
    )
    measured = group_measures([group], 1)
    assert measured["reward/seat_proposer"] == 0.75 and measured["reward/seat_solver_1"] == 0.375
    found = compared_with_peers(
        step_data([group]), advantage.resolve("group_mean"), trunk="group"
    ).advantages[0]
    for episode, values in zip(episodes, found, strict=True):
        own = np.mean([e.score.total for e in episodes if e.peers == episode.peers])
        wanted = np.where(episode.drawn, episode.score.total - own, 0)
        np.testing.assert_allclose(values, wanted, atol=1e-6)


class Talk(Game):
    """Two seats speak at the same time, three rounds; each round pays the second seat 1."""

    seats = ("left", "right")
    closed = 0

    def __init__(self, fails=False):
        self.rounds, self.fails = 0, fails

    async def reset(self, record):
        return {"left": "ping", "right": [{"role": "user", "content": "pong"}]}

    def step(self, said):
        self.rounds += 1
        if self.fails:
            raise ValueError("no more")
        ask = {"left": said["right"]["content"], "right": said["left"]["content"]}
        return Round(ask=ask if self.rounds < 3 else {}, rewards={"right": float(self.rounds)})

    async def score(self):
        return {"left": {"end": 5.0}}

    def close(self):
        Talk.closed += 1


def test_rewards_at_any_turn_and_at_the_end_reach_the_seat_that_earned_them() -> None:
    Talk.closed = 0
    (left, right), chat, generate, _ = play(Talk, lambda m, seat, turn: str(turn))
    assert [len(call) for call in generate.calls] == [2, 2, 2]
    assert left.score.total == 5.0 and left.score.parts == {"end": 5.0}
    ends = np.flatnonzero(right.drawn)[[1, 3]]
    assert right.score.token_rewards[ends].tolist() == [1.0, 2.0]
    assert right.score.reward == 3.0 and right.score.total == 6.0
    assert "<user>0<eos><assistant>1<eos>" in chat.tokenizer.decode_all(left.token_ids)
    assert Talk.closed == 1


def test_where_the_format_rewrites_history_a_seat_gets_a_context_of_its_own() -> None:
    episodes, chat, *_ = play(Talk, lambda m, seat, turn: str(turn), rewrites=True)
    for episode in episodes:
        assert len(episode.starts) == 3 and episode.num_turns == 3
        assert chat.tokenizer.decode(episode.token_ids[episode.drawn]) == "012"


def test_a_context_that_forgets_draws_by_numbers_of_its_own(monkeypatch) -> None:
    forgetful = WordChat.opening
    monkeypatch.setattr(WordChat, "opening", lambda s, messages, t: forgetful(s, messages[-1:], t))
    *_, generate, _ = play(Talk, lambda m, seat, turn: str(turn), rewrites=True)
    assert len({r.branch for r in generate.requests}) == 6, "the same positions, other numbers"


def test_what_a_seat_earns_before_its_first_turn_is_of_its_whole_episode() -> None:
    class Late(Talk):
        async def reset(self, record):
            return {"left": "ping"}

        def step(self, said):
            if "right" in said:
                return Round(ask={})
            return Round(
                ask={"right": "1"}, rewards={"right": 2.0}, parts={"right": {"early": 2.0}}
            )

        async def score(self):
            return {"right": {"early": 1.0}}

    _, right = play(Late, lambda m, seat, turn: str(turn))[0]
    assert right.score.parts["early"] == 3.0
    assert right.score.reward == 3.0


@pytest.mark.parametrize("reason", ["cut off", "turns", "length"])
def test_a_limit_ends_the_game_for_all_seats_and_is_told(reason: str) -> None:
    cut = StopReason.LENGTH if reason == "cut off" else StopReason.EOS
    limit = {"max_turns": 2} if reason == "turns" else {}
    text = " ".join(["1"] * 12) if reason == "length" else "1"
    chat = WordChat((*WORDS, " "))
    assert len(chat.say(text)) < 60
    long = "+".join(["1"] * 11) if reason == "length" else "1"
    episodes, _, _, counted = play(Talk, lambda m, seat, turn: long, stop=cut, **limit)
    assert {e.stop for e in episodes} == {StopReason.LENGTH}
    assert all(e.drawn[-1] for e in episodes), "nothing is read that is not answered"
    assert [e.score.parts.get("end") for e in episodes] == [5.0, None], "the end is judged"
    assert counted == ({"turn_limits": 1} if reason == "turns" else {})


def test_a_game_whose_opening_leaves_no_room_is_cut_off_before_the_first_move() -> None:
    class Long(Talk):
        async def reset(self, record):
            return {"left": " ".join(["1"] * 80)}

    episodes, _, generate, counted = play(Long, lambda m, seat, turn: "1")
    (left,) = episodes
    assert left.seat == left.peers == "left" and not generate.requests
    assert len(left.token_ids) == LIMITS.max_length and not left.num_drawn
    assert left.stop is StopReason.LENGTH and left.score.total == 5.0
    assert counted == {"long_openings": 1}


class Other:
    """A ports.Player that repeats what it hears."""

    name = "other"

    def __init__(self, late=False):
        self.late, self.asked = late, []

    async def answer(self, messages, tools, *, prompt, member, turn):
        self.asked.append((member, turn, len(messages)))
        if self.late:
            await asyncio.sleep(60)
        return {"role": "assistant", "content": "over"}


def test_another_player_is_heard_and_not_trained_on() -> None:
    other = Other()
    (left,), chat, *_ = play(
        Talk, lambda m, seat, turn: str(turn), seats_of=lambda prompt: {"right": other}
    )
    assert left.seat == "left" and left.num_turns == 3
    assert chat.tokenizer.decode_all(left.token_ids).count("<user>over<eos>") == 2
    assert other.asked == [(0, 0, 2), (0, 1, 4), (0, 2, 6)]


def test_a_player_or_a_game_that_fails_fails_its_member_and_no_other() -> None:
    with pytest.raises(RolloutTimeout, match=r"right \(other\) took more than 0.05 s"):
        play(
            Talk,
            lambda m, seat, turn: "1",
            seats_of=lambda prompt: {"right": Other(late=True)},
            timeout_s=0.05,
        )
    Talk.closed, made = 0, []

    def second_fails():
        made.append(Talk(fails=len(made) == 1))
        return made[-1]

    with pytest.raises(RolloutError, match=r"step .*no more"):
        play(second_fails, lambda m, seat, turn: "1", size=3)
    made.clear()
    episodes, *_ = play(
        second_fails, lambda m, seat, turn: "1", size=3, quota=Quota(wanted=3, least=2)
    )
    assert len(episodes) == 4 and Talk.closed == 6


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("reset", {"middle": "ping"}, "reset gave .*middle.*left, right"),
        ("step", Round(rewards={"nobody": 1.0}), "step gave .*nobody"),
        ("step", Round(rewards={"left": float("nan")}), "step gave nan"),
        ("score", {"nobody": 1.0}, "score gave .*nobody"),
        ("score", 3.0, "score gave 3.0"),
        ("reset", {}, "no seat of the policy has moved"),
    ],
)
def test_what_a_game_must_not_give_is_refused(method: str, given: object, words: str) -> None:
    wrong = type("Wrong", (Talk,), {method: lambda self, *heard: given})
    with pytest.raises(RolloutError, match=words):
        play(wrong, lambda m, seat, turn: "1")


def test_an_evaluation_reports_each_seat() -> None:
    chat, faults = WordChat(WORDS), FaultCounts()

    async def judge(episodes, prompt):
        return tuple(e.score or Score(reward=0.0) for e in episodes)

    given = [prompt(stones=4), prompt(stones=5)]
    result = asyncio.run(
        evaluate(
            Says(chat, lambda m, seat, turn: "1"),
            given,
            judge,
            stop_token_ids=(0,),
            max_new_tokens=8,
            max_length=60,
            make_env=envs_of(lambda: Nim(3), chat, faults),
        )
    )
    assert result.num_prompts == 2 and result.mean_reward == result.accuracy == 0.5
    assert result.seats == {"first": 0.5, "second": 0.5}


def test_a_player_that_fails_or_speaks_for_nobody_ends_what_the_policy_draws() -> None:
    class Never(Says):
        def _future(self, request):
            self.futures = [*getattr(self, "futures", []), asyncio.get_event_loop().create_future()]
            return self.futures[-1]

    class Wrong(Other):
        async def answer(self, messages, tools, *, prompt, member, turn):
            return {"role": "user", "content": "over"}

    async def played(seats):
        chat = WordChat(WORDS)
        generate = Never(chat, lambda m, seat, turn: "1")
        envs = envs_of(Talk, chat, FaultCounts(), lambda prompt: seats)
        given = [("g5", prompt(), [SavedEpisode()])]
        (members,) = begin_groups(generate, envs, given, LIMITS)
        try:
            await play_group(generate, prompt(), members, label="g5", limits=LIMITS)
        finally:
            assert all(future.cancelled() for future in getattr(generate, "futures", []))

    with pytest.raises(RolloutError, match=r"right \(other\) answered .*role assistant"):
        asyncio.run(played({"right": Wrong()}))
    with pytest.raises(RolloutError, match=r"the setting seats gave .*middle.*left, right"):
        asyncio.run(played({"middle": Other()}))
