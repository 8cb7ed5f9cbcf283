"""HTTP client of one OpenAI-compatible endpoint: sends a chat, returns the reply's text and token
counts. Needs no JAX.

Used on one event loop. Honours the environment's proxies (HTTPS_PROXY).
"""

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from jaxrl_async.away import retry_after_s
from jaxrl_async.errors import Away, ConfigError, EndpointMisset, RolloutError

MAX_REPLY_BYTES = 2**20
"""Maximum size of one reply of the endpoint, bytes."""
CONNECT_S = 10.0
"""Connection timeout, seconds."""
BUSY = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""Statuses after which the same call may succeed."""
WRONG_FOR_ALL = (401, 403, 404, 405)
"""Statuses that apply to every call."""
OF_THE_QUESTION = (400, 413, 422)
"""Statuses that may be caused by one question, such as one that is too long."""


class JudgeBusy(Away):
    """The endpoint did not answer or is overloaded: the same call may succeed later."""


class JudgeRefusal(RolloutError):
    """The endpoint works but rejects this question."""


class JudgeMisset(EndpointMisset):
    """The endpoint cannot serve any question: its address, key or model is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReply:
    """A reply of the endpoint."""

    text: str
    cut: bool  # at its token limit
    prompt_tokens: int  # 0: not reported
    completion_tokens: int


class JsonClient:
    """Sends JSON to the routes of one server, and sorts its errors."""

    def __init__(
        self,
        *,
        key: str | None,
        places: int,
        timeout_s: float,
        setting: str,
        max_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        """Connect to nothing yet.

        Args:
            key: API key; None: not sent.
            places: maximum number of concurrent calls.
            timeout_s: timeout of one call, seconds.
            setting: name of the setting that configures it, for error messages.
            max_bytes: maximum size of one reply.
        """
        self._setting, self._timeout_s, self._max_bytes = setting, timeout_s, max_bytes
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=httpx2.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
            limits=httpx2.Limits(max_connections=places, max_keepalive_connections=places),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def post(self, url: str, body: Mapping[str, object], advice: str) -> bytes:
        """Send a body; return the reply. Raises JudgeBusy, JudgeRefusal and JudgeMisset.

        advice: what to do if the server refuses this body.
        """
        status, headers, content = await self._sent(url, body)
        said = content[:300].decode(errors="replace")
        if status in BUSY or (status >= 500 and status not in WRONG_FOR_ALL):
            raise JudgeBusy(f"{url} answers {status}: {said}", retry_after_s(headers))
        if status in WRONG_FOR_ALL:
            raise JudgeMisset(
                f"{url} answers {status}: {said}. Correct {self._setting}: its address, "
                "model or key."
            )
        if status != 200:
            raise JudgeRefusal(f"{url} answers {status}: {said}. {advice}")
        return content

    async def _sent(
        self, url: str, body: Mapping[str, object]
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Return the status, headers and full body of the response. Raises JudgeBusy."""
        content = bytearray()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream("POST", url, json=body) as reply,
            ):
                async for chunk in reply.aiter_bytes():
                    content += chunk
                    if len(content) > self._max_bytes:
                        raise JudgeBusy(f"{url} sent more than {self._max_bytes:,} bytes")
        except TimeoutError:
            raise JudgeBusy(
                f"no complete answer from {url} in {self._timeout_s:g} s "
                f"({self._setting}.timeout_s)"
            ) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise JudgeBusy(
                f"no answer from {url} ({type(error).__name__}: {error}); check that it can "
                "be reached from this machine"
            ) from error
        return reply.status_code, reply.headers, bytes(content)


class JudgeClient(JsonClient):
    """A client of one endpoint's chat completions."""

    def __init__(
        self,
        base_url: str,
        *,
        key: str | None,
        places: int,
        timeout_s: float,
        setting: str = "reward.judge",
    ) -> None:
        """base_url: up to /v1; the others as JsonClient's."""
        super().__init__(key=key, places=places, timeout_s=timeout_s, setting=setting)
        self._url = base_url.rstrip("/") + "/chat/completions"

    async def ask(self, body: Mapping[str, object]) -> JudgeReply:
        """Send a chat completion call. Raises JudgeBusy, JudgeRefusal and JudgeMisset."""
        content = await self.post(
            self._url,
            body,
            f"If it refuses a field of the call, set {self._setting}.temperature or max_tokens to "
            "null, or correct extra there; if the question is too long for it, lower "
            "sampler.max_new_tokens.",
        )
        return reply_of(content, self._url)


def key_in(
    setting: str, variable: str | None, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Return the API key in an environment variable that a setting names; None: it names none.
    Raises ConfigError if the environment has no key there."""
    if variable is None:
        return None
    if key := environ.get(variable):
        return key
    raise ConfigError(
        f"{setting} = {variable}: the environment has no such variable, or it is empty. Export it "
        "in the shell that starts the run."
    )


def reply_of(content: bytes, url: str) -> JudgeReply:
    """Return the reply in a chat completion's JSON. Raises JudgeBusy if there is no text."""
    try:
        given = json.loads(content)
        choice = given["choices"][0]
        text = choice["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        said = content[:300].decode(errors="replace")
        raise JudgeBusy(f"{url} did not return a chat completion with text: {said}")
    usage = given.get("usage")
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
