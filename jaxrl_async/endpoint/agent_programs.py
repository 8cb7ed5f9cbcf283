"""Agent programs as members of groups. A program only knows the endpoint's address and a key.

    AgentPrograms(prompt) ─> ProgramMember.play ── opens ──> PolicySession <──key── endpoint
                             │                                                    ^
                             └── an async function, or a command ──completions────┘

The tokens that a program samples through its session become the episode. The score is the program's
return value, or is sent through the endpoint. A program fails its member, and so its group, if it
raises, exits with a nonzero code, samples nothing or exceeds its time limit; in an outage (a broken
connection, exit code 75) it is run again. If it reaches a limit of calls, tokens or length, its
episode ends there (StopReason.LENGTH), regardless of how the program reacts. If its first call
leaves no room for an answer, the episode is that call, without sampled tokens.
"""

import asyncio
import copy
import inspect
import json
import logging
import os
import shlex
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl_async.data.chat_formats.chat_messages import with_system_prompt
from jaxrl_async.endpoint.sessions import (
    FINISHED,
    GAVE_UP,
    PolicySession,
    SessionLimits,
    SessionMember,
    Sessions,
    call_in,
)
from jaxrl_async.errors import Closed, RolloutError, RolloutTimeout, Unavailable, is_run_ending
from jaxrl_async.metrics.fault_counts import UnderWay
from jaxrl_async.ports.generate import Generate
from jaxrl_async.ports.rollout import Reply
from jaxrl_async.ports.run import Clock
from jaxrl_async.rollout.call_log import SavedAnswers
from jaxrl_async.rollout.command_groups import COMMANDS
from jaxrl_async.rollout.episode import SavedCalls
from jaxrl_async.rollout.episode_assembly import NOTHING
from jaxrl_async.shown_environment import is_private, unseen, without_secrets
from jaxrl_async.tasks.game import SeatScore
from jaxrl_async.tasks.usercode import run_async
from jaxrl_async.types import Completion, Episode, EpisodeLimits, IntArray, Message, Prompt, Score

log = logging.getLogger(__name__)

TAIL_BYTES = 4096
"""Number of bytes kept from the end of a command's output."""
REAP_S = 5.0
"""Maximum wait for a cancelled program to end, seconds; then it is abandoned."""
DRAIN_S = 1.0
"""Maximum wait for the rest of a command's output once it has ended, seconds."""
MAX_VARIABLE_BYTES = 2**17 - 2**8
"""Maximum size of a command's environment variable; Linux allows 128 KiB, including its name."""
SHOWN = 400
"""Number of output characters in the error message of a failed command."""
MAX_NAMED = 20
"""Maximum number of hidden variables listed in the error message of a failed command."""

Program = Callable[["AgentSession"], Awaitable[Any] | Any]
"""Plays one episode. A function that is not async runs in a separate thread."""
Judge = Callable[[Any, Episode], Score]
"""Converts a program's return value and its episode to a Score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """The arguments of an agent program: its endpoint and its task."""

    base_url: str  # for an OpenAI client: ends in /v1
    api_key: str  # identifies this episode; every call with it becomes a part of it
    reward_key: str = field(default="", repr=False)  # sets its reward; keep it from untrusted code
    model: str  # the policy's name
    record: Mapping[str, Any]  # the whole record, by column
    prompt: str  # the record's text
    # its conversation, including a system prompt of the task or of data.system_prompt; empty: plain
    # text without a system prompt
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEndpoint:
    """The endpoint's address and model name, for programs."""

    address: Callable[[], str]  # "http://127.0.0.1:8000", called when a program starts
    model: str = "policy"


class AgentPrograms:
    """A MakeEnv of members that a program plays. `oldest_s` is thread safe."""

    def __init__(
        self,
        program: Program | Sequence[str] | str,
        sessions: Sessions,
        endpoint: ProgramEndpoint,
        bounds: SessionLimits,
        *,
        judge: Judge,
        system_prompt: str | None = None,
        secrets: Collection[str] = (),
        shown: Collection[str] = (),
        count: Callable[[str, int], None] = lambda name, number: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Check the program.

        Args:
            program: a function of an AgentSession, or a command: its words, or one text.
            sessions: the sessions that the endpoint serves.
            endpoint: the endpoint that the program uses.
            bounds: limits of one episode.
            judge: converts a function's return value to a Score; not called for None.
            system_prompt: prepended to messages that have none; None: no system prompt.
            secrets: environment variables that commands never see.
            shown: variables that they see in addition to the usual ones; NAME* matches a prefix.
            count: called with the name and number of faults (metrics/fault_counts.py).
            clock: for `oldest_s`.

        Raises RolloutError if it is neither a function nor a command.
        """
        self._run = program if callable(program) else ProgramCommand(program, secrets, shown)
        self.sessions, self.endpoint, self.bounds = sessions, endpoint, bounds
        self.judge, self.count, self.calls = judge, count, UnderWay(clock)
        self.system_prompt = system_prompt

    def __call__(self, prompt: Prompt) -> "ProgramMember":
        """Make the member that plays this prompt."""
        return ProgramMember(self)

    def oldest_s(self) -> float:
        """Return the running time of the oldest program, seconds; 0 if none runs."""
        return self.calls.oldest_s()


class ProgramMember:
    """One member of a group, played by a program (ports.Plays)."""

    def __init__(self, programs: AgentPrograms) -> None:
        self._programs, self._run = programs, programs._run
        self._session: PolicySession | None = None  # set while it plays
        self._kept: Sequence[SavedCalls] = ()  # calls before a resume, until it plays

    def sampled_versions(self) -> IntArray:
        """See ports.Plays."""
        sampled = NOTHING if self._session is None else self._session.sampled_versions()
        unrepeated = self._kept if self._session is None else self._session.not_repeated()
        kept = (completion.versions for calls in unrepeated for completion in calls.completions)
        return np.concatenate([sampled, *kept]).astype(np.int32)

    def calls(self) -> tuple[SavedCalls, ...]:
        """See ports.KeepsCalls."""
        return tuple(self._kept) if self._session is None else self._session.saved_calls()

    def keep(self, calls: Sequence[SavedCalls]) -> None:
        """See ports.KeepsCalls."""
        self._kept = calls

    async def step(self, prompt: Prompt, completion: Completion) -> Reply:
        """Raise RolloutError: a program plays its turns itself."""
        raise RolloutError(f"prompt {prompt.prompt_id}: a program plays its whole episode itself.")

    async def play(
        self,
        generate: Generate,
        prompt: Prompt,
        *,
        label: str,
        member: int,
        limits: EpisodeLimits,
        spent_s: Callable[[float], None],
    ) -> Episode | tuple[Episode, ...]:
        """Run the program once; return its samples as an episode, or one episode for each player
        that it distinguishes (ports.Plays).

        Raises RolloutTimeout if a time limit ended its session, RolloutError if it fails or samples
        nothing, Closed if the run is stopping.
        """
        programs, clock = self._programs, asyncio.get_running_loop().time
        played = SessionMember(prompt=prompt, label=label, index=member)
        kept, self._kept = SavedAnswers(self._kept), ()
        session = programs.sessions.open(generate, played, limits, programs.bounds, kept=kept)
        self._session = session
        started = clock()
        try:
            with programs.calls.one():
                returned = await self._outcome(session)
            session.finish()
            if isinstance(returned, tuple) and all(isinstance(r, SeatScore) for r in returned):
                return _player_episodes(session, returned, member)
            return self._scored(session, returned)
        finally:
            session.end("its program has ended")
            spent_s(max(clock() - started - session.sampling_s(), 0.0))
            self._count(session)

    async def _outcome(self, session: PolicySession) -> Any:
        """Return the program's result; None if a limit ended its episode."""
        work = asyncio.ensure_future(self._run_program(session))
        try:
            await _wait_for(work, session)
            if work.done():
                return work.result()
            if session.ended == FINISHED:
                log.warning("session %s: its program continues after it finished", session.label)
                return None
            raise self._end_error(session)
        except RolloutError as error:
            if session.exhausted is None or not (session.has_sampled or session.too_long):
                raise
            log.info("session %s: %s; then: %s", session.label, session.exhausted, error)
            return None
        finally:
            work.cancel()
            await asyncio.wait({work}, timeout=REAP_S)

    async def _run_program(self, session: PolicySession) -> Any:
        """Run the program. Raises RolloutError for any error of it, Closed if the run stops."""
        programs, prompt = self._programs, session.prompt
        agent = AgentSession(
            base_url=f"{programs.endpoint.address()}/v1",
            api_key=session.key,
            reward_key=session.reward_key,
            model=programs.endpoint.model,
            record=copy.deepcopy(dict(prompt.columns)),  # the program may modify it
            prompt=prompt.text,
            messages=messages_for(prompt, programs.system_prompt),
        )
        try:
            if isinstance(self._run, ProgramCommand):
                return await self._run(agent)
            if inspect.iscoroutinefunction(self._run):
                return await _await_on_user_loop(lambda: self._run(agent), session.label)
            returned = await _call_in_thread(self._run, agent, f"program-{session.label}")
            if inspect.isawaitable(returned):
                return await _await_on_user_loop(lambda: returned, session.label)
            return returned
        except BaseException as error:
            if is_run_ending(error) or isinstance(error, Closed):
                raise
            programs.count("failed_programs", 1)
            kind = "" if isinstance(error, RolloutError) else f"{type(error).__name__}: "
            cause = None if isinstance(error, TimeoutError) else error  # its own timeout, no outage
            raise RolloutError(
                f"prompt {prompt.prompt_id}: the program of {session.label} failed: {kind}{error}"
            ) from cause

    def _end_error(self, session: PolicySession) -> Exception:
        """Return the error of a session that was ended by its time limit or by the run."""
        if self._programs.sessions.closed:
            return Closed("the run is stopping")
        if (session.ended or "").startswith(GAVE_UP):
            self._programs.count("failed_programs", 1)
            return RolloutError(
                f"prompt {session.prompt.prompt_id}: the program of {session.label} failed: "
                f"{session.ended}"
            )
        self._programs.count("session_timeouts", 1)
        return RolloutTimeout(
            f"prompt {session.prompt.prompt_id}: the session {session.label} of a program was "
            f"ended: {session.ended}. Make the program faster or raise the limit."
        )

    def _scored(self, session: PolicySession, returned: object) -> Episode:
        """Return the session's episode with its score. The program's return value replaces rewards
        of the whole session; rewards of calls are kept."""
        episode = session.episode()
        if returned is None:
            return episode
        score = self._programs.judge(returned, episode)
        theirs = None if episode.score is None else episode.score.token_rewards
        if theirs is not None:
            own = score.token_rewards
            score = replace(
                score, token_rewards=theirs if own is None else (own + theirs).astype(np.float32)
            )
        return replace(episode, score=score)

    def _count(self, session: PolicySession) -> None:
        counts = session.counts()
        numbers = {
            "exhausted_sessions": int(session.exhausted is not None),
            "long_openings": int(session.too_long),
            "cancelled_calls": counts.cancelled_calls,
            "overridden_calls": counts.overridden_calls,
            "late_calls": counts.late_calls,
            "unrepeated_calls": len(session.not_repeated()),
        }
        for name, number in numbers.items():
            if number:
                self._programs.count(name, number)


def _player_episodes(
    session: PolicySession, scores: Sequence[SeatScore], member: int
) -> tuple[Episode, ...]:
    """Return an episode with its own score for each player that sampled tokens. If the first call
    left no room for an answer, return that call. Raises RolloutError if there is neither."""
    pairs = [(score, session.episode_of(score.player)) for score in scores]
    played = [(of, episode) for of, episode in pairs if episode is not None]
    return tuple(
        replace(episode, score=of.score, seat=of.seat, peers=of.peers(member))
        for of, episode in played or [(scores[0], session.episode())]
    )


def messages_for(prompt: Prompt, system_prompt: str | None) -> tuple[Message, ...]:
    """Return a copy of a prompt's messages for its program, after the system prompt if there is
    one. A plain text then becomes a user message."""
    messages = copy.deepcopy(prompt.messages)
    if system_prompt is None:
        return messages
    return with_system_prompt(
        messages or ({"role": "user", "content": prompt.text},), system_prompt
    )


async def _wait_for(work: "asyncio.Future[Any]", session: PolicySession) -> None:
    """Wait until the program is done, its session has ended for a reason other than FINISHED, or
    its time is over."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    deadline = loop.time() + session.bounds.total_s

    def end() -> None:
        if not over.done():
            over.set_result(None)

    def notify(reason: str) -> None:
        if reason != FINISHED:
            call_in(loop, end)

    session.on_end(notify)
    while not (work.done() or over.done()):
        left_s = min(deadline - loop.time(), session.remaining_s())
        await asyncio.wait({work, over}, timeout=max(left_s, 0.0), return_when="FIRST_COMPLETED")
        session.expire()
        if loop.time() >= deadline:
            session.end(f"it took more than {session.bounds.total_s:g} s")
            break


async def _call_in_thread(function: Program, agent: AgentSession, name: str) -> Any:
    """Call a function in a separate thread, which is not joined at the end."""
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()  # a caller that stops waiting does not end it

    def call() -> None:
        try:
            done.set_result(function(agent))
        except BaseException as error:
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            done.set_exception(error if is_plain else RolloutError(repr(error)))

    threading.Thread(target=call, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)


async def _await_on_user_loop(work: Callable[[], Awaitable[object]], label: str) -> Any:
    """Await a program's awaitable on the loop for user code. If it is cancelled and does not end
    within REAP_S seconds, it is abandoned."""
    outcome = await run_async(work, None, reap_s=REAP_S, name=f"the program of {label}")
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


class ProgramCommand:
    """A program that is a command, run as a separate process. All processes that it started end
    with it, and it ends with this process, however that ends."""

    def __init__(
        self,
        command: Sequence[str] | str,
        secrets: Collection[str] = (),
        shown: Collection[str] = (),
    ) -> None:
        """Check it.

        Args:
            command: its words, or one text that is split as by a shell.
            secrets: environment variables that it never sees.
            shown: variables that it sees in addition to the usual ones; NAME* matches a prefix.

        Raises RolloutError.
        """
        words = shlex.split(command) if isinstance(command, str) else list(command)
        if not words or not all(isinstance(word, str) for word in words):
            raise RolloutError(
                f"a program must be a function or a command of at least one word, not {command!r}."
            )
        if shutil.which(words[0]) is None:
            raise RolloutError(
                f"the program's command {words[0]!r} is not found or not executable. Give its path."
            )
        if own := [name for name in shown if is_private(name, secrets)]:
            raise RolloutError(
                f"env.program_variables names {', '.join(own)}, which are reserved for the run. "
                "Use a different variable for the program."
            )
        self._words = words
        self._environ = without_secrets(os.environ, secrets, shown)
        variables = {*self._environ, *command_environment(EXAMPLE)}
        self._unseen = unseen(os.environ, variables, secrets)
        if self._unseen:
            log.warning(
                "the program's command does not see these environment variables: %s. If it needs "
                "one, add it to env.program_variables",
                ", ".join(self._unseen),
            )

    async def __call__(self, agent: AgentSession) -> None:
        """Run it to its end. Raises RolloutError, with the end of its output, for a nonzero exit
        code. No process that it started is left running in any case."""
        variables = command_environment(agent)
        for name, text in variables.items():
            if len(text.encode("utf-8", "replace")) > MAX_VARIABLE_BYTES or "\0" in text:
                raise RolloutError(
                    f"the variable {name} would have {len(text)} characters or a null byte, but a "
                    f"command's variables are limited to {MAX_VARIABLE_BYTES} bytes each. Use a "
                    f"function as the program, or shorten the record."
                )
        command = await COMMANDS.start(self._words, {**self._environ, **variables})
        tail = bytearray()
        reading = asyncio.ensure_future(_keep_tail(command.stdout, tail))
        try:
            code = await command.wait()
            await asyncio.wait({reading}, timeout=DRAIN_S)
        finally:
            reading.cancel()
            await COMMANDS.end(command)
        text = tail.decode(errors="replace").strip()
        if code:
            raise (Unavailable if code == os.EX_TEMPFAIL else RolloutError)(
                f"{shlex.join(self._words)[:SHOWN]} ended with exit code {code}; the end of its "
                f"output: {text[-SHOWN:] or 'nothing'}{self._hint()}"
            )
        log.debug("%s has ended; the end of its output: %s", self._words[0], text[-SHOWN:])

    def _hint(self) -> str:
        """Return a hint that lists hidden environment variables."""
        if not self._unseen:
            return ""
        more = len(self._unseen) - MAX_NAMED
        names = ", ".join(self._unseen[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
        return f"\nIt did not see {names} (env.program_variables shows variables)."


EXAMPLE = AgentSession(base_url="", api_key="", model="", record={}, prompt="")
"""An empty session, for the names of the variables."""


def command_environment(agent: AgentSession) -> dict[str, str]:
    """Return the environment variables that describe the endpoint and the task to a command."""
    return {
        "OPENAI_BASE_URL": agent.base_url,
        "OPENAI_API_KEY": agent.api_key,
        "ANTHROPIC_BASE_URL": agent.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": agent.api_key,
        "JAXRL_MODEL": agent.model,
        "JAXRL_PROMPT": agent.prompt,
        "JAXRL_MESSAGES": json.dumps(list(agent.messages), default=str),
        "JAXRL_RECORD": json.dumps(dict(agent.record), default=str),
    }


async def _keep_tail(stream: asyncio.StreamReader, tail: bytearray) -> None:
    """Read a stream to its end; keep the last bytes."""
    while chunk := await stream.read(1 << 16):
        tail += chunk
        del tail[:-TAIL_BYTES]
