"""HTTP client of one OpenAI-compatible endpoint: sends a chat, returns the reply's text and token
counts. Needs no JAX.

Used on one event loop. Honours the environment's proxies (HTTPS_PROXY).
"""

import asyncio
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx2

from jaxrl_async.config.judge_section import JudgeSection
from jaxrl_async.config.seats_section import FillingSection
from jaxrl_async.errors import BadEndpoint, ConfigError, RolloutError, Unavailable
from jaxrl_async.metrics.fault_counts import backoff_s
from jaxrl_async.tasks.usercode import start_async
from jaxrl_async.unavailable import retry_after_s

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 2**20
"""Maximum size of one reply of the endpoint, bytes."""
CONNECT_S = 10.0
"""Connection timeout, seconds."""
CLOSE_S = 10.0
"""Maximum wait for the end of the connections, seconds."""
BUSY = (408, 409, 425, 429)
"""Statuses after which the same call may succeed, as after all from 500 on."""
WRONG_FOR_ALL = (401, 403, 404, 405)
"""Statuses that apply to every call."""


class JudgeBusy(Unavailable):
    """The endpoint did not answer or is overloaded: the same call may succeed later."""


class JudgeRefusal(RolloutError):
    """The endpoint works but rejects this question."""


class BadJudgeEndpoint(BadEndpoint):
    """The endpoint cannot serve any question: its address, key or model is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReply:
    """A reply of the endpoint."""

    text: str
    cut: bool  # at its token limit
    prompt_tokens: int  # 0: not reported
    completion_tokens: int


class JudgeMeter:
    """Total cost of an endpoint since the start. Thread safe."""

    NAMES = ("calls", "cached", "prompt_tokens", "completion_tokens", "call_s")

    def __init__(self) -> None:
        self._totals, self._lock = Counter[str](), threading.Lock()

    def add(self, **amounts: float) -> None:
        """Add to totals by their NAMES."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] += amount  # type: ignore[assignment]

    def read(self) -> dict[str, float]:
        """Return the total of every name."""
        with self._lock:
            return {name: float(self._totals[name]) for name in self.NAMES}


class JsonClient:
    """Sends JSON to the routes of one server, and sorts its errors."""

    def __init__(
        self,
        *,
        key: str | None,
        max_calls: int,
        timeout_s: float,
        setting: str,
        max_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        """Connect to nothing yet.

        Args:
            key: API key; None: not sent.
            max_calls: maximum number of concurrent calls.
            timeout_s: timeout of one call, seconds.
            setting: name of the setting that configures it, for error messages.
            max_bytes: maximum size of one reply.
        """
        self._setting, self._timeout_s, self._max_bytes = setting, timeout_s, max_bytes
        self._client: httpx2.AsyncClient | None = None  # made on the loop that uses it
        self._make = partial(
            httpx2.AsyncClient,
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=httpx2.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
            limits=httpx2.Limits(max_connections=max_calls, max_keepalive_connections=max_calls),
        )

    async def close(self) -> None:
        """Close all connections. Idempotent; they are made again when they are needed."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def close_from_outside(self) -> None:
        """Close the connections of the loop for user code; for other threads."""
        if self._client is not None:
            with suppress(Exception):  # closing a connection may raise anything
                start_async(self.close).result(CLOSE_S)

    async def post(self, url: str, body: Mapping[str, object], advice: str) -> bytes:
        """Send a body; return the reply. Raises JudgeBusy, JudgeRefusal and BadJudgeEndpoint.

        advice: what to do if the server refuses this body.
        """
        self._client = client = self._client or self._make()
        try:
            reply, content = await whole_answer(
                client, "POST", url, body, timeout_s=self._timeout_s, max_bytes=self._max_bytes
            )
        except httpx2.DecodingError as error:
            raise JudgeBusy(f"{url} sent what cannot be used: {error}") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise JudgeBusy(
                f"no answer from {url} ({type(error).__name__}: {error}); check that it can be "
                f"reached from this machine, and {self._setting}.timeout_s"
            ) from error
        status, text = reply.status_code, content[:300].decode(errors="replace")
        if status in BUSY or status >= 500:
            raise JudgeBusy(f"{url} answers {status}: {text}", retry_after_s(reply.headers))
        if status in WRONG_FOR_ALL:
            raise BadJudgeEndpoint(
                f"{url} answers {status}: {text}. Correct {self._setting}: its address, "
                "model or key."
            )
        if status != 200:
            raise JudgeRefusal(f"{url} answers {status}: {text}. {advice}")
        return content


async def whole_answer(
    client: httpx2.AsyncClient,
    method: str,
    url: str,
    body: object,
    *,
    timeout_s: float,
    max_bytes: int,
) -> tuple[httpx2.Response, bytes]:
    """Send JSON and read the whole answer. Raises httpx2.HTTPError, also if that takes too long or
    the answer has more bytes."""
    content = bytearray()
    try:
        async with asyncio.timeout(timeout_s), client.stream(method, url, json=body) as reply:
            async for chunk in reply.aiter_bytes():
                content += chunk
                if len(content) > max_bytes:
                    raise httpx2.DecodingError(f"an answer of more than {max_bytes:,} bytes")
    except TimeoutError:
        raise httpx2.ReadTimeout(f"no complete answer in {timeout_s:g} s") from None
    return reply, bytes(content)


class JudgeClient(JsonClient):
    """A client of one endpoint's chat completions; at most `max_calls` calls are made at a time."""

    def __init__(
        self,
        base_url: str,
        *,
        key: str | None,
        max_calls: int,
        timeout_s: float,
        setting: str = "reward.judge",
    ) -> None:
        """base_url: up to /v1; the others as JsonClient's."""
        super().__init__(key=key, max_calls=max_calls, timeout_s=timeout_s, setting=setting)
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._slots = asyncio.Semaphore(max_calls)
        self._quiet_until_s = 0.0  # time.monotonic(): the endpoint asked for a pause
        self.meter = JudgeMeter()

    async def ask(self, body: Mapping[str, object]) -> JudgeReply:
        """Send a chat completion call, once a slot is free and the endpoint asks for no pause.
        Raises JudgeBusy, JudgeRefusal and BadJudgeEndpoint."""
        async with self._slots:
            while (pause_s := self._quiet_until_s - time.monotonic()) > 0:
                await asyncio.sleep(pause_s)
            began_s = time.monotonic()
            try:
                content = await self.post(
                    self._url,
                    body,
                    f"If it refuses a field of the call, set {self._setting}.temperature or "
                    "max_tokens to null, or correct extra there; if the question is too long for "
                    "it, lower sampler.max_new_tokens.",
                )
            finally:
                self.meter.add(calls=1, call_s=time.monotonic() - began_s)
        reply = reply_of(content, self._url)
        self.meter.add(prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens)
        return reply

    async def ask_again(
        self,
        body: Mapping[str, object],
        *,
        retries: int,
        first_s: float,
        longest_s: float,
        count: Callable[[], object] = lambda: None,
    ) -> JudgeReply:
        """As `ask`, again after JudgeBusy.

        Args:
            body: of the call.
            retries: maximum number of further calls.
            first_s: wait before the first one, seconds; each is twice the last.
            longest_s: maximum wait that the endpoint may ask for, seconds.
            count: called for each JudgeBusy.
        """
        for number in range(retries + 1):
            try:
                return await self.ask(body)
            except JudgeBusy as error:
                count()
                if number == retries:
                    raise
                wait_s = self.pause_s(error, backoff_s(first_s, number), longest_s)
                log.info("asking again in %.1f s: %s", wait_s, error)
            await asyncio.sleep(wait_s)
        raise AssertionError("the last call returns or raises")

    def pause_s(self, error: JudgeBusy, usual_s: float, longest_s: float) -> float:
        """Return the wait before the next call, seconds: as the endpoint asks for, which then holds
        for every call, or the usual one."""
        if error.wait_s is None:
            return usual_s
        wait_s = min(error.wait_s, longest_s)
        self._quiet_until_s = max(self._quiet_until_s, time.monotonic() + wait_s)
        return wait_s


def chat_call(
    section: JudgeSection | FillingSection, messages: Sequence[Mapping[str, Any]], **more: object
) -> dict[str, Any]:
    """Return the JSON body of a call. more: fields in addition to the section's."""
    limits = {"temperature": section.temperature, "max_tokens": section.max_tokens}
    return {
        "model": section.model,
        "messages": [dict(message) for message in messages],
        **{name: value for name, value in limits.items() if value is not None},
        **more,
        **section.extra,
    }


def key_in(
    setting: str, variable: str | None, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Return the API key in an environment variable that a setting names; None: it names none.
    Raises ConfigError if the environment has no key there."""
    if variable is None:
        return None
    if key := environ.get(variable, "").strip():  # a file's last line ends in a newline
        return key
    raise ConfigError(
        f"{setting} = {variable}: the environment has no such variable, or it is empty. Export it "
        "in the shell that starts the run."
    )


def reply_of(content: bytes, url: str) -> JudgeReply:
    """Return the reply in a chat completion's JSON. Raises JudgeBusy if there is no text."""
    try:
        body = json.loads(content)
        choice = body["choices"][0]
        text = choice["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        start = content[:300].decode(errors="replace")
        raise JudgeBusy(f"{url} did not return a chat completion with text: {start}")
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return JudgeReply(
        text=text,
        cut=choice.get("finish_reason") == "length",
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
    )


def _count(value: Any) -> int:
    """Return a number of tokens; 0 for anything else."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40
    return value if is_count else 0
