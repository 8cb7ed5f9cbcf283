"""One episode at an environment server of OpenEnv: its WebSocket protocol, checked.

    {"type": "reset", "data": {...}}  ─>  {"type": "observation", "data": {observation, reward..}}
    {"type": "step", "data": ACTION}  ─>  the same, or {"type": "error", "data": {code, message}}
    {"type": "close"}

A connection has an environment of its own in the server, and both end together.
"""

import asyncio
import contextlib
import importlib
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from jaxrl_async.errors import Away, ConfigError, MissingExtraError, RolloutError

MAX_BYTES = 16 * 2**20
"""Longest message of a server."""
FULL = "CAPACITY_REACHED"
"""Code of a server that can hold no further environment now."""
INVALID = "VALIDATION_ERROR"
"""Code of an action that the environment does not know."""
FIRST_WAIT_S = 0.2
"""First wait before a full server is asked again, seconds; each is twice the last."""
LONGEST_WAIT_S = 5.0
"""Longest of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlace:
    """Where an environment server is, and how long it may take."""

    url: str  # http://HOST:PORT or https://...
    reply_s: float = 60.0  # longest time for one reply, seconds
    patience_s: float = 120.0  # longest time until a full or absent server lets an episode begin

    @property
    def socket_url(self) -> str:
        """Its WebSocket."""
        parts = urlsplit(self.url)
        scheme = {"http": "ws", "https": "wss"}[parts.scheme]
        return urlunsplit((scheme, parts.netloc, f"{parts.path.rstrip('/')}/ws", "", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a server answers to a reset or a step."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class RefusedAction(RolloutError):
    """The environment does not know the policy's action; the message is the server's."""


class _ServerFull(Away):
    """The server can hold no further environment now."""


def checked_url(url: str) -> str:
    """Return a server's address. Raises ConfigError for anything else."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError(
            f"task = 'openenv:{url}': {url!r} is no address of a server. Write it as "
            "openenv:http://HOST:PORT."
        )
    return url.rstrip("/")


def websocket_module() -> ModuleType:
    """Return the WebSocket client. Raises MissingExtraError."""
    try:
        return importlib.import_module("websockets.asyncio.client")
    except ImportError as error:
        raise MissingExtraError(
            f"task openenv:URL needs websockets ({error}): pip install 'jaxrl_async[openenv]'."
        ) from None


def action_schema(place: ServerPlace) -> Mapping[str, Any]:
    """Ask a server which actions its environment knows, as a JSON schema. Raises RolloutError."""
    address = f"{place.url}/schema"
    try:
        with urllib.request.urlopen(address, timeout=place.reply_s) as reply:
            found = json.loads(reply.read(MAX_BYTES))
        action = found["action"]
        if not isinstance(action, dict):
            raise TypeError("no object")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RolloutError(
            f"the environment server does not say at {address} which actions it takes ({error}). "
            "Is it running, and of OpenEnv?"
        ) from error
    return action


class EnvConnection:
    """One environment in a server. Used on one event loop."""

    def __init__(self, place: ServerPlace, socket: Any) -> None:
        self._place, self._socket = place, socket

    @classmethod
    async def begin(
        cls, place: ServerPlace, data: Mapping[str, Any]
    ) -> tuple["EnvConnection", Observed]:
        """Connect, and reset the environment; ask a full or absent server again for a while.

        data: arguments of the reset. Raises RolloutError; Away where the server is.
        """
        loop, wait_s = asyncio.get_running_loop(), FIRST_WAIT_S
        end = loop.time() + place.patience_s
        while True:
            try:
                return await cls._begun(place, data)
            except (_ServerFull, OSError) as error:
                if loop.time() + wait_s > end:
                    raise Away(
                        f"the environment server {place.url} let no episode begin within "
                        f"{place.patience_s:g} s: {error}. Start more servers, or have it hold "
                        "more environments (max_concurrent_envs)."
                    ) from error
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    @classmethod
    async def _begun(
        cls, place: ServerPlace, data: Mapping[str, Any]
    ) -> tuple["EnvConnection", Observed]:
        client = websocket_module()
        try:
            socket = await client.connect(
                place.socket_url, open_timeout=place.reply_s, max_size=MAX_BYTES, close_timeout=1.0
            )
        except OSError:
            raise
        except Exception as error:  # of websockets: a proxy's word, say
            raise _ServerFull(f"{place.url}: {error}") from error
        connection = cls(place, socket)
        try:
            return connection, await connection._ask("reset", data)
        except BaseException:
            await connection.close()
            raise

    async def step(self, action: Mapping[str, Any]) -> Observed:
        """Take one action. Raises RefusedAction, RolloutError; Away where the server is."""
        return await self._ask("step", action)

    async def close(self) -> None:
        """End the environment. Never raises but when cancelled."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(2.0):
                await self._socket.send(json.dumps({"type": "close"}))
                await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Observed:
        url, limit_s = self._place.url, self._place.reply_s
        sent = json.dumps({"type": kind, "data": dict(data)})
        try:
            async with asyncio.timeout(limit_s):
                with contextlib.suppress(Exception):  # a full server closes; why, it says before
                    await self._socket.send(sent)
                text = await self._socket.recv()
        except TimeoutError:
            raise Away(f"{url}: no reply to {kind} within {limit_s:g} s.") from None
        except Exception as error:  # of websockets: the connection has ended
            failed = _ServerFull if kind == "reset" else Away
            raise failed(f"{url}: the connection ended at {kind}: {error}") from error
        return read_observed(text, f"{url}: reply to {kind}")


def read_observed(text: str | bytes, where: str) -> Observed:
    """Return what a server's message says. Raises RolloutError, RefusedAction.

    Args:
        text: the message.
        where: for errors.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RolloutError(f"{where}: it is no JSON: {error}") from None
    data = message.get("data") if isinstance(message, dict) else None
    if not isinstance(data, dict):
        raise RolloutError(f"{where}: it is no message of OpenEnv: {text[:200]!r}")
    if message.get("type") == "error":
        said = f"{data.get('code', 'error')}: {data.get('message', '')}"[:500]
        kinds = {FULL: _ServerFull, INVALID: RefusedAction}
        raise kinds.get(str(data.get("code")), RolloutError)(f"{where}: {said}")
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
