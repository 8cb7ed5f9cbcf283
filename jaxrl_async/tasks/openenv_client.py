"""One episode on an OpenEnv environment server: its WebSocket protocol, with checks.

    {"type": "reset", "data": {...}}  ─>  {"type": "observation", "data": {observation, reward..}}
    {"type": "step", "data": ACTION}  ─>  the same, or {"type": "error", "data": {code, message}}
    {"type": "close"}

Each connection has a separate environment in the server, and both end together.
"""

import asyncio
import contextlib
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from jaxrl_async.errors import Away, ConfigError, RolloutError, extra_module

MAX_BYTES = 16 * 2**20
"""Maximum size of a server's message."""
FULL = "CAPACITY_REACHED"
"""Error code of a server that currently has no room for another environment."""
INVALID = "VALIDATION_ERROR"
"""Error code for an action that the environment does not know."""
FIRST_WAIT_S = 0.2
"""First wait before the retry with a full server, seconds; each is twice the last."""
LONGEST_WAIT_S = 5.0
"""Maximum of these waits, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """The address of an environment server, and its timeouts."""

    url: str  # http://HOST:PORT or https://...
    reply_s: float = 60.0  # timeout of one reply, seconds
    patience_s: float = 120.0  # timeout until a full or absent server lets an episode begin

    @property
    def socket_url(self) -> str:
        """Its WebSocket."""
        parts = urlsplit(self.url)
        scheme = {"http": "ws", "https": "wss"}[parts.scheme]
        return urlunsplit((scheme, parts.netloc, f"{parts.path.rstrip('/')}/ws", "", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A server's answer to a reset or a step."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class RefusedAction(RolloutError):
    """The environment does not know the policy's action; the message is the server's."""


class _ServerFull(Away):
    """The server currently has no room for another environment."""


def checked_url(url: str) -> str:
    """Validate and return a server's address. Raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError(
            f"task = 'openenv:{url}': {url!r} is not a server's address. Write it as "
            "openenv:http://HOST:PORT."
        )
    return url.rstrip("/")


def websocket_module() -> ModuleType:
    """Return the WebSocket client. Raises MissingExtraError."""
    client: ModuleType = extra_module(
        "websockets.asyncio.client", "openenv", "task openenv:URL needs websockets"
    )
    return client


def action_schema(server: ServerAddress) -> Mapping[str, Any]:
    """Fetch the JSON schema of an environment's actions from its server. Raises RolloutError."""
    address = f"{server.url}/schema"
    try:
        with urllib.request.urlopen(address, timeout=server.reply_s) as reply:
            schemas = json.loads(reply.read(MAX_BYTES))
        action = schemas["action"]
        if not isinstance(action, dict):
            raise TypeError("no object")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RolloutError(
            f"the environment server does not return its actions at {address} ({error}). "
            "Is it running, and an OpenEnv server?"
        ) from error
    return action


class EnvConnection:
    """One environment in a server. Used on one event loop."""

    def __init__(self, server: ServerAddress, socket: Any) -> None:
        self._server, self._socket = server, socket

    @classmethod
    async def begin(
        cls, server: ServerAddress, data: Mapping[str, object]
    ) -> tuple["EnvConnection", Observed]:
        """Connect, and reset the environment; retry for a limited time if the server is full or
        absent.

        data: arguments of the reset. Raises RolloutError; Away if the server is unavailable.
        """
        loop, wait_s = asyncio.get_running_loop(), FIRST_WAIT_S
        end = loop.time() + server.patience_s
        while True:
            try:
                return await cls._connect(server, data)
            except (_ServerFull, OSError) as error:
                if loop.time() + wait_s > end:
                    raise Away(
                        f"the environment server {server.url} let no episode begin within "
                        f"{server.patience_s:g} s: {error}. Start more servers, or let it hold "
                        "more environments (max_concurrent_envs)."
                    ) from error
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    @classmethod
    async def _connect(
        cls, server: ServerAddress, data: Mapping[str, object]
    ) -> tuple["EnvConnection", Observed]:
        client = websocket_module()
        try:
            url, limit_s = server.socket_url, server.reply_s
            socket = await client.connect(
                url, open_timeout=limit_s, max_size=MAX_BYTES, close_timeout=1.0
            )
        except OSError:
            raise
        except Exception as error:  # from websockets: for example a proxy's answer
            raise _ServerFull(f"{server.url}: {error}") from error
        connection = cls(server, socket)
        try:
            return connection, await connection._request("reset", data)
        except BaseException:
            await connection.close()
            raise

    async def step(self, action: Mapping[str, object]) -> Observed:
        """Take one action. Raises RefusedAction, RolloutError; Away if the server is
        unavailable."""
        return await self._request("step", action)

    async def close(self) -> None:
        """End the environment. Raises only if cancelled."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(2.0):
                await self._socket.send(json.dumps({"type": "close"}))
                await self._socket.close()

    async def _request(self, kind: str, data: Mapping[str, Any]) -> Observed:
        url, limit_s = self._server.url, self._server.reply_s
        sent = json.dumps({"type": kind, "data": dict(data)})
        try:
            async with asyncio.timeout(limit_s):
                with contextlib.suppress(Exception):  # a full server sends why, and closes
                    await self._socket.send(sent)
                text = await self._socket.recv()
        except TimeoutError:
            raise Away(f"{url}: no reply to {kind} within {limit_s:g} s.") from None
        except Exception as error:  # from websockets: the connection has ended
            failed = _ServerFull if kind == "reset" else Away
            raise failed(f"{url}: the connection ended at {kind}: {error}") from error
        return read_observed(text, f"{url}: reply to {kind}")


def read_observed(text: str | bytes, where: str) -> Observed:
    """Parse a server's message. Raises RolloutError, RefusedAction.

    Args:
        text: the message.
        where: for errors.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RolloutError(f"{where}: not JSON: {error}") from None
    data = message.get("data") if isinstance(message, dict) else None
    if not isinstance(data, dict):
        raise RolloutError(f"{where}: not an OpenEnv message: {text[:200]!r}")
    if message.get("type") == "error":
        reason = f"{data.get('code', 'error')}: {data.get('message', '')}"[:500]
        kinds = {FULL: _ServerFull, INVALID: RefusedAction}
        raise kinds.get(str(data.get("code")), RolloutError)(f"{where}: {reason}")
    observation, reward, done = data.get("observation"), data.get("reward"), data.get("done")
    if isinstance(reward, bool):
        reward = float(reward)
    is_number = reward is None or (isinstance(reward, int | float) and math.isfinite(reward))
    if not isinstance(observation, dict) or not is_number or not isinstance(done, bool | None):
        raise RolloutError(
            f"{where}: it must have an observation (an object), a reward (a finite number or null) "
            f"and done: {text[:200]!r}"
        )
    return Observed(
        observation=observation, reward=None if reward is None else float(reward), done=bool(done)
    )
