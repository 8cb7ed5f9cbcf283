"""One HTTP call over ASGI: a body within limits, and an answer as JSON or as a stream of events.

The body has a timeout. A stream waits while the client does not read, for at most the connection's
stall_s (connection.py), and holds no more than the connection's buffer.
"""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from jaxrl_async.endpoint.http_errors import CallRefused

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientGone(Exception):
    """The client has closed the connection."""


class HttpExchange:
    """One call and its answer."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, cors_origins: Sequence[str] = ()
    ) -> None:
        """Wrap an ASGI call. cors_origins: pages whose scripts may read the answer; *: all."""
        self.method, self.path = str(scope["method"]), str(scope["path"])
        self._scheme, self._server = str(scope.get("scheme", "http")), scope.get("server")
        self._headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        self._receive, self._send = receive, send
        self._cors: dict[str, str] = {}
        origin = self.header("origin")
        if origin is not None and not {"*", origin}.isdisjoint(cors_origins):
            self._cors = {"access-control-allow-origin": origin, "vary": "origin"}
        self.begun = False  # whether the answer's head was sent
        self.is_long = False  # whether the body is long

    def header(self, name: str) -> str | None:
        """Return a header; None: absent."""
        return self._headers.get(name)

    @property
    def address(self) -> str:
        """The address that the client used: "http://HOST:PORT"."""
        server = ":".join(map(str, self._server or ("127.0.0.1",)))
        return f"{self._scheme}://{self.header('host') or server}"

    @property
    def key(self) -> str | None:
        """The client's key; the session header takes precedence. A client that sends no header of
        its own takes it from the address, http://any:KEY@HOST:PORT."""
        if session := self.header("x-session-key"):
            return session
        kind, _, token = (self.header("authorization") or "").partition(" ")
        sent = None
        if kind.lower() == "bearer":
            sent = token.strip()
        elif kind.lower() == "basic":
            sent = _password(token)
        return sent or self.header("x-api-key")

    async def body(self, most: int, within_s: float, hold: Callable[[int], None]) -> bytes:
        """Return the body; hold: called with the number of bytes of each part. Raises CallRefused
        if it is too long or too slow, and ClientGone."""
        length = self.header("content-length") or "0"
        too_long = CallRefused(
            f"the body is longer than {most} bytes", status=413, code="request_too_large"
        )
        if not length.isdecimal() or int(length) > most:
            raise too_long
        parts, size = [], 0
        try:
            async with asyncio.timeout(within_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    hold(len(parts[-1]))
                    if size > most:
                        raise too_long
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise CallRefused(
                f"the body did not arrive within {within_s:g} s", status=408
            ) from None

    async def disconnected(self) -> None:
        """Wait until the client has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(
        self, status: int, record: Mapping[str, object], *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a JSON object."""
        await self.reply_bytes(status, compact_json(record), "application/json", headers=headers)

    async def reply_bytes(
        self,
        status: int,
        body: bytes,
        content_type: str,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a body of any type; the answer to HEAD has only its head."""
        named = {"content-type": content_type, "content-length": str(len(body))}
        await self._head(status, {**named, **(headers or {})})
        await self._part(b"" if self.method == "HEAD" else body, more=False)

    async def reply_preflight(self) -> bool:
        """Answer a browser that asks whether a page's script may call; return whether it may."""
        if not self._cors:
            return False
        allowed = {
            "access-control-allow-methods": "GET, HEAD, POST",
            "access-control-allow-headers": self.header("access-control-request-headers") or "*",
            "access-control-max-age": "600",
        }
        await self._head(204, allowed)
        await self._part(b"", more=False)
        return True

    async def open_stream(self) -> None:
        """Start a stream of events."""
        await self._head(
            200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        )

    async def write(self, part: bytes) -> None:
        """Send a part of a stream."""
        await self._part(part, more=True)

    async def close_stream(self) -> None:
        """End a stream."""
        await self._part(b"", more=False)

    async def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.begun = True
        pairs = [(k.encode(), v.encode()) for k, v in {**headers, **self._cors}.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _part(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def compact_json(record: object) -> bytes:
    """Return a value as JSON without spaces."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def openai_event(record: object) -> bytes:
    """Format a chunk for an OpenAI stream."""
    return b"data: " + compact_json(record) + b"\n\n"


def anthropic_event(record: Mapping[str, object]) -> bytes:
    """Format an event for an Anthropic stream."""
    return b"event: " + str(record["type"]).encode() + b"\ndata: " + compact_json(record) + b"\n\n"


def _password(token: str) -> str | None:
    """Return the password of basic authentication; None: it cannot be read."""
    try:
        return base64.b64decode(token, validate=True).decode().partition(":")[2]
    except ValueError:
        return None
