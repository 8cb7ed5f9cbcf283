"""The task of benchmarks/sleeping_tools.py: a chain of places to look at, with a tool that sleeps.

    user       start at c
    assistant  01234567890123456789 look(place="c")
    tool       q                             after a sleep, log-normal with a median of one second
    assistant  01234567890123456789 look(place="q")
    tool       m
    assistant  m

The same chains and sleeps are played by an environment, by an agent program, and by an environment
whose sessions take their turns together: no session samples its next turn before the tools of all
sessions of the batch have answered.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from jaxrl_async import Environment, Step, Task

CALLS = 2
"""Calls of the tool in a session; it has one turn more."""
LETTERS = "abcdefghijklmnop"
THOUGHT = "0123456789" * 2
"""What the policy writes before each call."""
WORDS = ('{"name": "look", "arguments": {"place": "', '"}}', "look(place)", "start at ", *LETTERS)
"""Tokens of the task, beside the digits."""
RECORDS = 4096
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
            },
        },
    }
]


class TurnBarrier:
    """Where the sessions of a batch wait until all of them have had their turn. One event loop."""

    def __init__(self, size: int) -> None:
        self._playing, self._waiting, self._next = size, 0, asyncio.Event()

    async def wait(self) -> None:
        """Wait until all sessions that still play wait here."""
        self._waiting += 1
        following = self._next
        self._open_if_all()
        await following.wait()

    def leave(self) -> None:
        """Take a session out that has ended."""
        self._playing -= 1
        self._open_if_all()

    def _open_if_all(self) -> None:
        if self._waiting >= self._playing:
            self._next.set()
            self._waiting, self._next = 0, asyncio.Event()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long tools sleep."""

    hurried: int  # sessions at the start whose tools sleep a tenth: programs compile meanwhile
    median_s: float
    sigma: float  # of the logarithm


@dataclass(frozen=True, slots=True)
class TimedSession:
    """One session of a record: its tools' sleeps depend on it."""

    number: int  # of the session in the run; -1: held out
    record: int
    nth: int  # session of this record

    def sleep_s(self, call: int, pace: Pace) -> float:
        """Return the sleep of a call, seconds; the same in every run."""
        factor = random.Random(f"{self.record} {self.nth} {call}").lognormvariate(0.0, pace.sigma)
        return pace.median_s * factor * (0.1 if self.number < pace.hurried else 1.0)


class TimedSessions:
    """Numbers the sessions of a run."""

    def __init__(self) -> None:
        self._number, self._of_record = 0, Counter[int]()

    def begin(self, record: Mapping[str, Any]) -> TimedSession:
        """Begin a session of a record."""
        index = int(record["index"])
        if record["held_out"]:
            return TimedSession(-1, index, 0)
        timed = TimedSession(self._number, index, self._of_record[index])
        self._number += 1
        self._of_record[index] += 1
        return timed


class Chain(Environment):
    """One session, played by an environment."""

    tools = ("look",)

    def __init__(self, sessions: TimedSessions, pace: Pace, barriers: "Barriers | None") -> None:
        self._sessions, self._pace, self._barriers = sessions, pace, barriers
        self._barrier: TurnBarrier | None = None
        self._calls = 0

    async def reset(self, record: Mapping[str, Any]) -> str:
        """Return where the chain begins."""
        self._record, self._session = record, self._sessions.begin(record)
        if self._barriers is not None and self._session.number >= 0:
            self._barrier = self._barriers.of(self._session.number)
        return str(record["question"])

    async def look(self, place: str) -> str:
        """Look at a place.

        Args:
            place: its letter.
        """
        self._calls += 1
        await asyncio.sleep(self._session.sleep_s(self._calls, self._pace))
        if self._barrier is not None:
            await self._barrier.wait()
        return next_place(self._record, place)

    async def step(self, message: Any) -> Any:
        """Run the call; judge an answer without one."""
        if message.get("tool_calls") and self._calls < CALLS:
            return await self.run_tools({**message, "tool_calls": message["tool_calls"][:1]})
        return Step(parts={"correct": is_right(self._record, message["content"])})

    async def close(self) -> None:
        """Let the batch continue without it."""
        if self._barrier is not None:
            self._barrier.leave()


class Barriers:
    """The barrier of each batch."""

    def __init__(self, size: int) -> None:
        self._size, self._made = size, dict[int, TurnBarrier]()

    def of(self, number: int) -> TurnBarrier:
        """Return the barrier of a session's batch."""
        return self._made.setdefault(number // self._size, TurnBarrier(self._size))


class Agent:
    """The same session, played by a program that knows an OpenAI endpoint."""

    def __init__(self, pace: Pace) -> None:
        self._pace, self._sessions = pace, TimedSessions()
        self._client: AsyncOpenAI | None = None  # of all sessions: each has a key of its own

    async def play(self, session: Any) -> float:
        """Play it; return 1 for the right answer."""
        self._client = self._client or AsyncOpenAI(base_url=session.base_url, api_key="none")
        create = self._client.with_options(api_key=session.api_key).chat.completions.create
        record, timed = session.record, self._sessions.begin(session.record)
        messages: list[Any] = [{"role": "user", "content": record["question"]}]
        for call in range(1, CALLS + 2):
            answer = await create(model=session.model, messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            if not message.tool_calls or call > CALLS:
                return is_right(record, message.content or "")
            await asyncio.sleep(timed.sleep_s(call, self._pace))
            tool_call = message.tool_calls[0]
            place = str(json.loads(tool_call.function.arguments).get("place", ""))  # type: ignore[union-attr]
            messages.append(message.model_dump(exclude_none=True))
            reply = {"tool_call_id": tool_call.id, "content": next_place(record, place)}
            messages.append({"role": "tool", **reply})
        return 0.0


def next_place(record: Mapping[str, Any], place: str) -> str:
    """Return the place after this one in the record's chain."""
    chain = str(record["chain"])
    return chain[(chain.find(place[:1]) + 1) % len(chain)]


def is_right(record: Mapping[str, Any], answer: str) -> float:
    """Return 1 for the end of the chain, else 0."""
    return float(answer.strip() == record["chain"][-1])


def record_of(index: int, *, held_out: bool = False) -> dict[str, Any]:
    """Make a record with its worked conversation."""
    chain = "".join(random.Random(f"{index} {held_out}").sample(LETTERS, CALLS + 1))
    worked: list[Any] = [{"role": "user", "content": f"start at {chain[0]}"}]
    for n in range(CALLS):
        function = {"name": "look", "arguments": json.dumps({"place": chain[n]})}
        call = {"id": f"call_{n}", "type": "function", "function": function}
        worked += [
            {"role": "assistant", "content": THOUGHT, "tool_calls": [call]},
            {"role": "tool", "name": "look", "tool_call_id": f"call_{n}", "content": chain[n + 1]},
        ]
    worked.append({"role": "assistant", "content": chain[-1]})
    question = worked[0]["content"]
    about = {"index": index, "held_out": held_out}
    return {"question": question, "chain": chain, "worked": worked, **about}


def sleepy(
    played_by: str = "environment",
    hurried: int = 10**9,
    together: int = 0,
    median_s: float = 1.0,
    sigma: float = 1.0,
) -> Task:
    """Return the task.

    Args:
        played_by: environment or program.
        hurried: sessions at the start whose tools sleep a tenth.
        together: sessions that take their turns together; 0: each continues when its tool answers.
        median_s: of the sleeps, seconds.
        sigma: standard deviation of their logarithm.
    """
    pace = Pace(hurried=hurried, median_s=median_s, sigma=sigma)
    records = [record_of(index) for index in range(RECORDS)]
    held_out = [record_of(index, held_out=True) for index in range(8)]
    words = (*WORDS, *"0123456789")
    if played_by == "program":
        return Task(records=records, held_out=held_out, words=words, program=Agent(pace).play)
    sessions, barriers = TimedSessions(), Barriers(together) if together else None

    def make() -> Chain:
        return Chain(sessions, pace, barriers)

    return Task(records=records, held_out=held_out, words=words, environment=make)
