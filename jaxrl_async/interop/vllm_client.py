"""HTTP client of one vLLM server: requests, new weights, and server information.

A call that did not reach the server, or whose connection broke, is retried a few times: none of its
output was used. Used on one event loop. The environment variable VLLM_API_KEY holds the server's
key, if it has one; the environment's proxies are not used.
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from jaxrl_async.errors import RolloutError
from jaxrl_async.interop.vllm_messages import (
    PAUSES,
    ServerFacts,
    facts_of,
    probe_body,
    prompt_logprobs_of,
    refusal_text,
    reply_limit,
    vocabulary_body,
)
from jaxrl_async.judge.judge_client import whole_answer
from jaxrl_async.types import FloatArray, IntArray

log = logging.getLogger(__name__)

KEY = "VLLM_API_KEY"
"""Environment variable with the server's API key, as named by vLLM."""
RETRIES = 3
"""Retries of a call that broke, or that the server could not serve temporarily."""
BACKOFF_S = 0.2
"""Wait before the first retry, seconds; doubles."""
CONNECT_S = 5.0
"""Timeout of a connection, and of a health check, seconds."""
FACTS_S = 60.0
"""Timeout of requests for server information, seconds: the first one is slow."""
MAX_FACTS_BYTES = 2**22
"""Maximum size of the server information, bytes."""
FLAGS = "--enable-scale-out, and VLLM_SERVER_DEV_MODE=1 in its environment"
"""Required options to start a server with."""


class ServerGone(RolloutError):
    """The server cannot be reached, does not answer in time, or has failed."""


class RefusedRequest(RolloutError):
    """The server works, but rejects or fails this one request."""


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    content: Any  # the JSON; text if it is not JSON


class VllmServer:
    """A client of one server."""

    def __init__(
        self,
        url: str,
        *,
        slots: int = 1,
        timeout_s: float = FACTS_S,
        count: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            url: such as http://HOST:8000.
            slots: maximum number of concurrent requests.
            timeout_s: timeout of one answer, seconds.
            count: called with the name of each fault (metrics.fault_counts).
        """
        self._count = count
        key = os.environ.get(KEY)
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=httpx2.Timeout(timeout_s, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=slots + 4, max_keepalive_connections=slots + 4),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections; the server ends the running requests."""
        await self._client.aclose()

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """Send a generate call; return the answer's JSON, unchecked.

        Raises ServerGone, and RefusedRequest if the server works but does not serve this request.
        """
        tokens = int(body["sampling_params"]["max_tokens"]) + len(body["token_ids"])
        path = "/inference/v1/generate"
        reply = await self._request("POST", path, body=body, limit=reply_limit(tokens))
        if reply.status == 200:
            return reply.content
        what = f"{self.url} answers {reply.status}: {refusal_text(reply.content)}"
        if reply.status in (401, 403, 404):
            raise ServerGone(
                f"{what}. Start it with {FLAGS}; if it has an API key, set {KEY} to that key here."
            )
        if reply.status < 500 or await self._is_healthy():
            raise RefusedRequest(f"request {body.get('request_id', '')!r}: {what}")
        raise ServerGone(f"{what}. Check its log and restart it.")

    async def load(self, folder: Path, label: str, mode: str, paused: asyncio.Event) -> None:
        """Load weights from a folder into the server, and set the label of its samples.

        Args:
            folder: a Hugging Face directory, at a path that is valid for the server, too.
            label: label of the tokens that are sampled with these weights.
            mode: sampler.on_new_weights.
            paused: set while the server is paused: requests already sent may still be sampled
                with the previous weights.

        The server is resumed in any case. Raises ServerGone.
        """
        pause, clear = PAUSES[mode]
        paused.set()
        try:
            await self._command("POST", f"/pause?mode={pause}&clear_cache={str(clear).lower()}")
            loading = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await self._command("POST", "/collective_rpc", body=loading)
            await self._command("POST", "/update_weight_version", body={"new_version": label})
        finally:
            await asyncio.shield(self._resume())
            paused.clear()

    async def logprobs_of(self, token_ids: IntArray) -> FloatArray:
        """Return the server's log-probs [n - 1] of a sequence. Raises ServerGone, BadReply."""
        return prompt_logprobs_of(await self.generate(probe_body(token_ids)), token_ids)

    async def facts(self) -> ServerFacts:
        """Fetch information about the server. Raises ServerGone, and BadReply."""
        path = "/inference/v1/generate"
        version = await self._answer("/version")
        info = await self._answer("/server_info?config_format=json")
        await self._answer("/weight_info")
        refused = await self._request("POST", path, body=vocabulary_body(), limit=reply_limit(1))
        if refused.status in (401, 403, 404):
            raise ServerGone(
                f"{self.url}{path} answers {refused.status}: {refusal_text(refused.content)}. "
                f"Start the server with {FLAGS}; if it has an API key, set {KEY} to that key here."
            )
        return facts_of(info, version, refusal_text(refused.content))

    async def check_health(self) -> None:
        """Raise ServerGone unless the server answers and its engine is alive."""
        try:
            reply = await self._send("GET", "/health", limit=reply_limit(0), timeout_s=CONNECT_S)
        except (httpx2.HTTPError, OSError) as error:
            raise ServerGone(self._unreachable(error)) from error
        if reply.status != 200:
            raise ServerGone(
                f"{self.url}/health answers {reply.status}: its engine has failed. Check its log "
                "and restart it."
            )

    # ---- parts

    async def _resume(self) -> None:
        """Let the server sample again; errors are only logged."""
        try:
            async with asyncio.timeout(2 * CONNECT_S):
                await self._command("POST", "/resume")
        except (RolloutError, TimeoutError) as error:
            log.error("%s remains paused: %s", self.url, error)

    async def _is_healthy(self) -> bool:
        try:
            await self.check_health()
        except ServerGone:
            return False
        return True

    async def _answer(self, path: str) -> Any:
        """Return the JSON of one information endpoint."""
        try:
            reply = await self._send("GET", path, limit=MAX_FACTS_BYTES, timeout_s=FACTS_S)
        except (httpx2.HTTPError, OSError) as error:
            raise ServerGone(self._unreachable(error)) from error
        if reply.status != 200:
            raise ServerGone(
                f"{self.url}{path} answers {reply.status}: {refusal_text(reply.content)}. It is "
                f"not a vLLM server of version 0.32 or later that was started with {FLAGS}."
            )
        return reply.content

    async def _command(self, method: str, path: str, *, body: object = None) -> None:
        """Send a command. Raises ServerGone unless the server reports success."""
        reply = await self._request(method, path, body=body, limit=reply_limit(0))
        if reply.status != 200:
            raise ServerGone(
                f"{self.url}{path} answers {reply.status}: {refusal_text(reply.content)}. The "
                "server must be able to read the folder of the weights (remote.folder, or the "
                "run's), and have the policy's architecture."
            )

    async def _request(self, method: str, path: str, *, body: object, limit: int) -> _Reply:
        """Send a call; retry if it broke or the server is overloaded. Raises ServerGone."""
        for number in range(RETRIES + 1):
            try:
                reply = await self._send(method, path, body=body, limit=limit)
                if reply.status not in (429, 502, 503, 504) or number == RETRIES:
                    return reply
                reason = f"answers {reply.status}"
            except httpx2.TimeoutException as error:
                raise ServerGone(self._unreachable(error)) from error
            except (httpx2.HTTPError, OSError) as error:
                if number == RETRIES:
                    raise ServerGone(self._unreachable(error)) from error
                reason = f"{type(error).__name__}: {error}"
            log.warning("%s%s: %s; retrying", self.url, path, reason)
            self._count("engine_retries")
            await asyncio.sleep(BACKOFF_S * 2**number)
        raise AssertionError("the loop returns or raises")

    async def _send(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        limit: int,
        timeout_s: float | None = None,
    ) -> _Reply:
        """Send one call and read the whole answer. Raises httpx2.HTTPError, also if the answer
        takes too long or has more than `limit` bytes."""
        seconds = self._timeout_s if timeout_s is None else timeout_s
        reply, content = await whole_answer(
            self._client, method, self.url + path, body, timeout_s=seconds, max_bytes=limit
        )
        try:
            return _Reply(reply.status_code, json.loads(content))
        except (ValueError, RecursionError):
            if reply.status_code == 200 and content:
                raise httpx2.DecodingError("an answer that is not JSON") from None
            return _Reply(reply.status_code, content.decode(errors="replace"))

    def _unreachable(self, error: Exception) -> str:
        return (
            f"no answer from {self.url} ({type(error).__name__}: {error}). Check that the server "
            f"runs and can be reached from this machine: curl {self.url}/health. The timeout of an "
            "answer is faults.sampler_hang_s."
        )
