"""A game of several seats as one member of a group. Each seat of the policy becomes an episode.

    Game.reset/step ──seats that move, their messages──> seats of the policy ──Request──> sampler
          ^                                      seats of others     ──Player.answer
          └─────────────── messages ───────────────────┘
    at the end: an Episode for each seat of the policy, with the peers that it is compared with

Seats that move in the same round are sampled at the same time. Generated tokens are never tokenised
again; a seat whose history the chat format rewrites gets a new context. A turn that is cut off by a
limit ends the game.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl_async.data.chat_formats.chat_messages import with_system_prompt
from jaxrl_async.errors import (
    RolloutError,
    RolloutTimeout,
    TextTooLong,
    is_run_ending,
)
from jaxrl_async.outages import ENVIRONMENT, time_limit
from jaxrl_async.ports.generate import Generate
from jaxrl_async.ports.rollout import Player, Reply
from jaxrl_async.rollout.chat_env import (
    ChatEnvs,
    record_of,
    score_given,
    value_of,
)
from jaxrl_async.rollout.env import CLOSE_S
from jaxrl_async.rollout.episode import check_kept, make_request
from jaxrl_async.rollout.episode_assembly import (
    NOTHING,
    Turn,
    assemble_contexts,
    branch_after,
    unplayed_episode,
)
from jaxrl_async.rollout.quorum import all_or_none
from jaxrl_async.tasks.game import Asked, Game, Round, peers_of, seat_of
from jaxrl_async.tasks.usercode import CallOutcome
from jaxrl_async.types import (
    Completion,
    Episode,
    EpisodeLimits,
    IntArray,
    Message,
    Prompt,
    Request,
    Score,
    StopReason,
)
from jaxrl_async.user_arguments import as_json

log = logging.getLogger(__name__)

SEAT_BRANCH = 2**16
"""Multiplied by a seat's number, Request.branch of the seat's first request. Seats that hold the
same tokens thus sample with different random numbers."""
SeatsOf = Callable[[Prompt], Mapping[str, Player]]
"""Returns the players of the seats that the policy does not fill, by seat."""


@dataclass(slots=True, kw_only=True)
class _Seat:
    """One seat's conversation; for the policy's seats also the tokens."""

    name: str
    number: int
    player: Player | None  # None: the policy
    messages: list[Message] = field(default_factory=list)
    first: IntArray | None = None  # the tokens of its first turn's context
    tokens: IntArray = field(default_factory=lambda: NOTHING)  # of the current context
    turns: list[Turn] = field(default_factory=list)
    calls: list[tuple[IntArray, IntArray]] = field(default_factory=list)  # for branch_after
    num_turns: int = 0  # turns so far, by any player
    num_opening: int = 0  # messages before its own first one
    stop: StopReason = StopReason.EOS
    early: Score = field(default_factory=lambda: Score(reward=0.0))  # before its first turn

    def add_message(self, message: Message) -> None:
        """Add the seat's own message to its conversation."""
        if not self.num_turns:
            self.num_opening = len(self.messages)
        self.messages.append(message)
        self.num_turns += 1

    def credit(self, reward: float, parts: Mapping[str, float]) -> None:
        """Credit a reward to the seat's last turn; before its first turn, to the whole episode."""
        if not self.turns:
            self.early = sum_of(self.early, reward, parts)
            return
        last = self.turns[-1]
        more = sum_of(Score(reward=last.reward, parts=last.parts), reward, parts)
        self.turns[-1] = replace(last, reward=more.reward, parts=more.parts)


def sum_of(score: Score, reward: float, parts: Mapping[str, float]) -> Score:
    """Return a score with a reward and its parts added."""
    both = Counter(score.parts)
    both.update(parts)
    return replace(score, reward=score.reward + reward, parts=dict(both))


class GameEnvs:
    """A MakeEnv of one game."""

    def __init__(self, chat: ChatEnvs, make: Callable[[], Game], seats_of: SeatsOf) -> None:
        """Make it.

        Args:
            chat: the policy's format, the limits, and the way to call a user's functions.
            make: makes a game.
            seats_of: returns the players of seats that the policy does not fill.
        """
        self.chat, self.make, self.seats_of = chat, make, seats_of

    def __call__(self, prompt: Prompt) -> "GameMember":
        """Make the member that plays this prompt."""
        return GameMember(self)

    async def begin(self, prompt: Prompt) -> tuple[Game, Round]:
        """Make a game and reset it, with at most env.retries retries. Raises RolloutError."""

        async def attempt() -> CallOutcome:
            game = value_of(await self.chat.call(self.make), "constructor")
            outcome = await self.chat.call(game.reset, record_of(prompt))
            if outcome.error is not None:
                await self.chat.call(game.close)
            return CallOutcome((game, outcome.value), outcome.error)

        outcome = await self.chat.retry("the game (reset)", attempt, prompt)
        game, asked = value_of(outcome, "reset")
        return game, round_of(asked, game, "reset")


class GameMember:
    """One member of a group: a whole game (ports.Plays)."""

    def __init__(self, envs: GameEnvs) -> None:
        self._envs, self._chat = envs, envs.chat
        self._seats: dict[str, _Seat] = {}

    def sampled_versions(self) -> IntArray:
        """See ports.Plays."""
        turns = (turn for seat in self._seats.values() for turn in seat.turns)
        return np.concatenate([NOTHING, *(t.completion.versions for t in turns)]).astype(np.int32)

    async def step(self, prompt: Prompt, completion: Completion) -> Reply:
        """Raise RolloutError: a game plays its turns itself."""
        raise RolloutError(f"prompt {prompt.prompt_id}: a game plays its whole episode itself.")

    async def play(
        self,
        generate: Generate,
        prompt: Prompt,
        *,
        label: str,
        member: int,
        limits: EpisodeLimits,
        spent_s: Callable[[float], None],
    ) -> tuple[Episode, ...]:
        """Play the game; return an episode for each policy seat that moved, in the order of the
        seats (ports.Plays).

        Raises RolloutError if the game or a player fails, or if the policy never moves.
        """
        clock = asyncio.get_running_loop().time
        started, sampling_s = clock(), 0.0
        game, moves = await self._envs.begin(prompt)
        try:
            players = known_seats(self._envs.seats_of(prompt), game, "the setting seats")
            self._seats = {
                name: _Seat(name=name, number=number, player=players.get(name))
                for number, name in enumerate(game.seats)
            }
            while moves.ask:
                await self._show(moves)
                asked_at = clock()
                names = list(moves.ask)
                messages = await self._play_round(generate, prompt, names, label, member, limits)
                sampling_s += clock() - asked_at
                if messages is None:
                    break
                outcome = await self._chat.call(game.step, messages)
                moves = round_of(value_of(outcome, "step"), game, "step")
                self._chat.outages.knows(ENVIRONMENT)
                self._credit(moves)
                moves = self._within_turns(moves)
            scores = await self._chat.call(game.score)
            verdicts = verdicts_of(value_of(scores, "score"), game)
            episodes = self._episodes(game, member, verdicts)
            return episodes or self._unplayed(game, member, limits, verdicts)
        finally:
            await self._close(game, prompt)
            spent_s(max(clock() - started - sampling_s, 0.0))

    # ---- a round

    async def _show(self, moves: Round) -> None:
        """Append new messages to the seats' conversations, and to the policy seats' tokens."""
        for name, shown in moves.ask.items():
            seat = self._seats[name]
            messages = await self._chat.reply_messages(shown, "step")
            if not seat.messages and messages:
                messages = list(with_system_prompt(messages, self._chat.task.system_prompt))
            seat.messages += messages
            if seat.player is None:
                await self._append(seat, messages)

    async def _append(self, seat: _Seat, new: Sequence[Message]) -> None:
        chat = self._chat
        if not seat.turns:
            try:
                seat.tokens = await chat.tokens(lambda: chat.opening(seat.messages, ()), new)
            except TextTooLong as error:
                seat.tokens = error.token_ids
            seat.first = seat.tokens
            return
        more, opening = await chat.following(seat.tokens, new, seat.messages, ())
        if opening is None:
            seat.turns[-1] = replace(seat.turns[-1], reply=more)
            seat.tokens = np.concatenate([seat.tokens, more]).astype(np.int32)
        else:
            seat.tokens = opening
            seat.turns[-1] = replace(seat.turns[-1], opening=opening)

    async def _play_round(
        self,
        generate: Generate,
        prompt: Prompt,
        names: Sequence[str],
        label: str,
        member: int,
        limits: EpisodeLimits,
    ) -> dict[str, Message] | None:
        """Let seats move; return their messages, or None: a limit ended the game."""
        moving = [self._seats[name] for name in names]
        own = [seat for seat in moving if seat.player is None]
        if any(len(seat.tokens) >= limits.max_length for seat in own):
            for seat in own:
                self._cut(seat)
            return None
        requests = [self._request(seat, prompt, label, member, limits) for seat in own]
        futures = generate.submit_many(requests) if requests else []
        by_policy = zip(own, futures, strict=True)
        others = [(seat, seat.player) for seat in moving if seat.player is not None]
        try:
            await all_or_none(
                [
                    *(self._policy_turn(seat, future, limits) for seat, future in by_policy),
                    *(self._player_turn(seat, player, prompt, member) for seat, player in others),
                ]
            )
        finally:
            for future in futures:
                future.cancel()
        if any(seat.stop is not StopReason.EOS for seat in own):
            return None
        return {seat.name: seat.messages[-1] for seat in moving}

    async def _policy_turn(
        self, seat: _Seat, waiting: "asyncio.Future[Completion]", limits: EpisodeLimits
    ) -> None:
        """Append a completion of the policy to a seat."""
        completion = await waiting
        check_kept(completion, limits, len(seat.tokens))
        seat.turns.append(Turn(completion=completion, reply=NOTHING))
        seat.calls.append((seat.tokens, completion.token_ids))
        seat.tokens = np.concatenate([seat.tokens, completion.token_ids]).astype(np.int32)
        seat.add_message(self._chat.chat.message(completion.token_ids, ()))
        seat.stop = completion.stop

    def _request(
        self, seat: _Seat, prompt: Prompt, label: str, member: int, limits: EpisodeLimits
    ) -> Request:
        branch = seat.number * SEAT_BRANCH + branch_after(seat.calls, seat.tokens)
        turn = len(seat.turns)
        request = make_request(label, prompt, member, turn, seat.tokens, limits, branch)
        return replace(request, request_id=f"{label}/m{member}/{seat.name}.t{turn}")

    async def _player_turn(self, seat: _Seat, player: Player, prompt: Prompt, member: int) -> None:
        """Append a player's message to a seat. Raises RolloutError, RolloutTimeout."""
        limit_s = self._chat.limits.timeout_s
        try:
            async with time_limit(limit_s) as limit:
                answer = await player.answer(
                    tuple(seat.messages), (), prompt=prompt, member=member, turn=seat.num_turns
                )
        except TimeoutError:
            if not limit.expired():
                raise
            self._chat.count("env_timeouts")
            raise RolloutTimeout(
                f"the seat {seat.name} ({player.name}) took more than {limit_s:g} s for a message. "
                "Make it faster or raise faults.env_timeout_s."
            ) from None
        if not isinstance(answer, Mapping) or answer.get("role") != "assistant":
            raise RolloutError(
                f"the seat {seat.name} ({player.name}) answered {answer!r:.100}. A player must "
                "return a message with the role assistant."
            )
        seat.add_message(answer)

    def _credit(self, moves: Round) -> None:
        for name in self._seats:
            parts = moves.parts.get(name, {})
            reward = moves.rewards.get(name, sum(parts.values()))
            if reward or parts:
                self._seats[name].credit(float(reward), parts)

    def _within_turns(self, moves: Round) -> Round:
        """End a game in which a seat would have more turns than env.max_turns."""
        most = self._chat.limits.max_turns
        if any(self._seats[name].num_turns >= most for name in moves.ask):
            self._chat.count("turn_limits")
            for seat in self._seats.values():
                self._cut(seat)
            return Round()
        return moves

    @staticmethod
    def _cut(seat: _Seat) -> None:
        """Record that a limit ended the game, and drop the seat's next input."""
        seat.stop = StopReason.LENGTH
        if seat.turns:
            seat.turns[-1] = replace(seat.turns[-1], reply=NOTHING, opening=None)

    # ---- the end

    def _episodes(
        self, game: Game, member: int, verdicts: Mapping[str, Score]
    ) -> tuple[Episode, ...]:
        episodes = []
        for seat in self._seats.values():
            verdict = verdicts.get(seat.name, Score(reward=0.0))
            if seat.player is not None or not seat.turns or seat.first is None:
                continue
            verdict = sum_of(verdict, seat.early.reward, seat.early.parts)
            episode = assemble_contexts(seat.first, seat.turns, seat.stop, verdict)
            peers = peers_of(game, seat.name, member)
            messages, begin = as_json(seat.messages), seat.num_opening
            episode = replace(episode, opened=messages[:begin], messages=messages[begin:])
            episodes.append(replace(episode, seat=seat_of(peers), peers=peers))
        return tuple(episodes)

    def _unplayed(
        self, game: Game, member: int, limits: EpisodeLimits, verdicts: Mapping[str, Score]
    ) -> tuple[Episode, ...]:
        """Return an episode for each policy seat whose opening leaves no room for a move."""
        episodes = []
        for seat in self._seats.values():
            if seat.player is None and seat.first is not None and seat.stop is StopReason.LENGTH:
                self._chat.count("long_openings")
                verdict = verdicts.get(seat.name, Score(reward=0.0))
                verdict = sum_of(verdict, seat.early.reward, seat.early.parts)
                peers = peers_of(game, seat.name, member)
                episode = unplayed_episode(seat.first, limits, verdict)
                episodes.append(replace(episode, seat=seat_of(peers), peers=peers))
        if not episodes:
            raise RolloutError(
                "no seat of the policy has moved in the game. Let the game ask one, or let the "
                "policy fill one of its seats."
            )
        log.warning("the game's opening leaves no room for a move in %d tokens", limits.max_length)
        return tuple(episodes)

    async def _close(self, game: Game, prompt: Prompt) -> None:
        """Let the game release its resources; errors are counted and logged."""
        try:
            async with asyncio.timeout(CLOSE_S):
                value_of(await self._chat.call(game.close), "close")
        except BaseException as error:
            if is_run_ending(error) or isinstance(error, asyncio.CancelledError):
                raise
            self._chat.count("failed_closes")
            text = f"it took more than {CLOSE_S:g} s" if isinstance(error, TimeoutError) else error
            log.warning("prompt %d: the game's close() failed: %s", prompt.prompt_id, text)


def round_of(asked: Asked, game: Game, method: str) -> Round:
    """Convert the result of a game's method to a Round. Raises RolloutError."""
    given = asked if isinstance(asked, Round) else Round(ask=asked or {})
    for by_seat in (given.ask, given.rewards, given.parts):
        known_seats(by_seat, game, f"the game's {method}")
    rewards = {seat: score_given(value, method).reward for seat, value in given.rewards.items()}
    parts = {seat: dict(score_given(named, method).parts) for seat, named in given.parts.items()}
    return Round(ask=given.ask, rewards=rewards, parts=parts)


def verdicts_of(given: object, game: Game) -> dict[str, Score]:
    """Convert the result of a game's score to a Score for each seat. Raises RolloutError."""
    known = known_seats(given, game, "the game's score")
    return {seat: score_given(value, "score") for seat, value in known.items()}


def known_seats(given: object, game: Game, source: str) -> Mapping[str, Any]:
    """Return a mapping by seat unchanged. Raises RolloutError, which names `source`, for others."""
    if not isinstance(given, Mapping) or any(name not in game.seats for name in given):
        raise RolloutError(
            f"{source} gave {given!r:.100}. It must be a mapping of seats, which are "
            f"{', '.join(game.seats)}."
        )
    return given


def check_seats(game: Game) -> None:
    """Raise RolloutError if the seats' names are invalid or not distinct."""
    seats = list(game.seats)
    named = [seat for team in game.alike for seat in team]
    simple = all(isinstance(s, str) and s.isidentifier() for s in seats)
    if not seats or not simple or len(set(seats)) < len(seats):
        raise RolloutError(
            f"the game's seats are {seats!r:.100}. They must be distinct names of letters, digits "
            "and _, at least one."
        )
    if len(set(named)) < len(named) or not set(named) <= set(seats):
        raise RolloutError(
            f"the game's interchangeable seats are {game.alike!r:.100}. Each must be one of its "
            "seats, in one team at most."
        )
