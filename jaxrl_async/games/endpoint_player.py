"""A player behind a third-party OpenAI-compatible endpoint. Needs no JAX.

It works on the loop for user code, so training and evaluation share connections and limits.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from jaxrl_async.config.seats_section import FillingSection
from jaxrl_async.errors import RolloutError
from jaxrl_async.games.seating import chance, name_of_filling
from jaxrl_async.judge.judge import JudgeMeter
from jaxrl_async.judge.judge_client import JudgeBusy, JudgeClient, JudgeReply, key_in
from jaxrl_async.metrics.fault_counts import backoff_s
from jaxrl_async.outages import Outages
from jaxrl_async.tasks.usercode import TooLate, run_async, start_async
from jaxrl_async.types import Message, Prompt

log = logging.getLogger(__name__)

MARGIN_S = 10.0
"""Time in addition to all calls and waits, for the loop's own work, seconds."""
SEEDS = 2**31
"""Upper bound of the seeds sent to an endpoint."""


class PlayerEndpoint:
    """Sends all messages of one filling to one endpoint. Thread safe."""

    def __init__(
        self,
        filling: FillingSection,
        path: str,
        *,
        count: Callable[[str], None],
        outages: Outages | None = None,
    ) -> None:
        """Connect to nothing yet. Raises ConfigError if the API key is not in the environment.

        Args:
            filling: the endpoint, its limits and retries.
            path: name of the setting, for error messages.
            count: called with the name of each fault (metrics/fault_counts.py).
            outages: Outages of the run; None: a new object.
        """
        self._filling, self._path, self._count = filling, path, count
        self._outages = outages or Outages(count=count)
        self._key = key_in(f"{path}.key_env", filling.key_env, os.environ)
        self.meter = JudgeMeter()
        self._client: JudgeClient | None = None  # made on the loop that uses it
        self._slots = asyncio.Semaphore(filling.concurrency)
        self._quiet_until_s = 0.0  # time.monotonic(): the endpoint asked for a pause

    async def reply(self, messages: Sequence[Message], seed: int) -> JudgeReply:
        """Return the endpoint's next message; an outage is waited out. Raises RolloutError."""
        filling = self._filling
        limits = {"temperature": filling.temperature, "max_tokens": filling.max_tokens}
        body = {
            "model": filling.model,
            "messages": [dict(message) for message in messages],
            **{name: value for name, value in limits.items() if value is not None},
            **({"seed": seed} if filling.send_seed else {}),
            **filling.extra,
        }
        tries = filling.retries + 1
        waits_s = sum(backoff_s(filling.backoff_s, number) for number in range(tries))
        limit_s = tries * filling.timeout_s + waits_s + MARGIN_S

        async def unless_away() -> JudgeReply:
            try:
                outcome = await run_async(lambda: self._tried(body), limit_s)
            except TooLate:
                raise RolloutError(
                    f"{self._path}: no message within {limit_s:g} s, including all retries. Raise "
                    f"{self._path}.concurrency, or use a faster endpoint."
                ) from None
            reply: JudgeReply = outcome.get()
            return reply

        who = f"{self._path} at {filling.endpoint}"
        return await self._outages.until_answered(who, unless_away)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):  # closing a connection may raise anything
                start_async(client.close).result(MARGIN_S)

    async def _tried(self, body: Mapping[str, object]) -> JudgeReply:
        for number in range(self._filling.retries + 1):
            try:
                return await self._asked(body)
            except JudgeBusy as error:
                self._count("player_busy")
                if number == self._filling.retries:
                    raise
                wait_s = backoff_s(self._filling.backoff_s, number)
                if error.wait_s is not None:
                    wait_s = min(error.wait_s, self._filling.timeout_s)
                    self._quiet_until_s = max(self._quiet_until_s, time.monotonic() + wait_s)
                log.info("retrying %s in %.1f s: %s", self._path, wait_s, error)
            await asyncio.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    async def _asked(self, body: Mapping[str, object]) -> JudgeReply:
        """Make one call, once a slot is free and the endpoint asks for no pause."""
        async with self._slots:
            while (pause_s := self._quiet_until_s - time.monotonic()) > 0:
                await asyncio.sleep(pause_s)
            filling = self._filling
            if self._client is None:
                assert filling.endpoint is not None
                self._client = JudgeClient(
                    filling.endpoint,
                    key=self._key,
                    places=filling.concurrency,
                    timeout_s=filling.timeout_s,
                    setting=self._path,
                )
            began = time.monotonic()
            try:
                reply = await self._client.ask(body)
            finally:
                self.meter.add(calls=1, call_s=time.monotonic() - began)
        self.meter.add(prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens)
        return reply


class EndpointPlayer:
    """A ports.Player played by another server's model."""

    def __init__(
        self, endpoint: PlayerEndpoint, filling: FillingSection, seat: str, seed: int
    ) -> None:
        """Play a seat through `endpoint`. seed: the run's seed."""
        self.name = name_of_filling(filling)
        self._endpoint, self._seat, self._seed = endpoint, seat, seed

    async def answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]],
        *,
        prompt: Prompt,
        member: int,
        turn: int,
    ) -> Message:
        """See ports.Player. Raises RolloutError, also if there are tools: only text is
        requested."""
        if tools:
            raise RolloutError(
                f"seat {self._seat} has tools, which an endpoint player does not call. Fill it "
                "with weights ({model: DIR})."
            )
        words = ("endpoint", self._seat, prompt.position, member, turn)
        reply = await self._endpoint.reply(messages, int(chance(self._seed, *words) * SEEDS))
        return {"role": "assistant", "content": reply.text}
