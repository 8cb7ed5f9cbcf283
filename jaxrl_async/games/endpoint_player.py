"""A player behind a third-party OpenAI-compatible endpoint. Needs no JAX.

It works on the loop for user code, so training and evaluation share connections and limits.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from jaxrl_async.config.seats_section import FillingSection
from jaxrl_async.errors import RolloutError
from jaxrl_async.games.seating import chance, name_of_filling
from jaxrl_async.judge.judge_client import JudgeClient, JudgeReply, chat_call, key_in
from jaxrl_async.metrics.fault_counts import backoff_s
from jaxrl_async.outages import Outages
from jaxrl_async.tasks.usercode import TooLate, run_async
from jaxrl_async.types import Message, Prompt

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
        assert filling.endpoint is not None
        self._client = JudgeClient(
            filling.endpoint,
            key=key_in(f"{path}.key_env", filling.key_env),
            max_calls=filling.concurrency,
            timeout_s=filling.timeout_s,
            setting=path,
        )
        self.meter = self._client.meter

    async def reply(self, messages: Sequence[Message], seed: int) -> JudgeReply:
        """Return the endpoint's next message; an outage is waited out. Raises RolloutError."""
        filling = self._filling
        body = chat_call(filling, messages, **({"seed": seed} if filling.send_seed else {}))
        tries = filling.retries + 1
        waits_s = sum(backoff_s(filling.backoff_s, number) for number in range(tries))
        limit_s = tries * filling.timeout_s + waits_s + MARGIN_S
        ask = partial(
            self._client.ask_again,
            retries=filling.retries,
            first_s=filling.backoff_s,
            longest_s=filling.timeout_s,
            count=partial(self._count, "player_busy"),
        )

        async def attempt() -> JudgeReply:
            try:
                outcome = await run_async(lambda: ask(body), limit_s)
            except TooLate:
                raise RolloutError(
                    f"{self._path}: no message within {limit_s:g} s, including all retries. Raise "
                    f"{self._path}.concurrency, or use a faster endpoint."
                ) from None
            reply: JudgeReply = outcome.get()
            return reply

        service = f"{self._path} at {filling.endpoint}"
        return await self._outages.until_answered(service, attempt)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._client.close_from_outside()


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
