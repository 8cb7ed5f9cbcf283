"""Decide whether an exception means that a service is temporarily unavailable: a broken or refused
connection, a timeout, 429, or 5xx. Retrying such a call may succeed; a bug persists.

Exceptions of HTTP clients are recognized by their class names and by the status that they carry;
none of these libraries is imported. Explicit causes (`raise ... from error`) count as well.
"""

import errno
import math
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

from jaxrl_async.errors import Away, EndpointMisset, GivenUp, JaxrlError

STATUSES = (408, 425, 429, *range(500, 600))
"""HTTP statuses after which the same call may succeed."""
NAMES = frozenset(
    (
        *("TransportError", "TimeoutException", "NetworkError", "RemoteProtocolError"),  # httpx
        *("ConnectionError", "Timeout", "ChunkedEncodingError"),  # requests
        *("MaxRetryError", "NewConnectionError", "ReadTimeoutError", "ProtocolError"),  # urllib3
        *("APIConnectionError", "APITimeoutError", "InternalServerError"),  # openai, anthropic
        *("ServiceUnavailableError", "RateLimitError"),  # litellm
        *("ClientConnectionError", "ClientPayloadError"),  # aiohttp
        *("ConnectionClosed", "ConnectionClosedError"),  # websockets, botocore
        *("IncompleteRead", "BadStatusLine"),  # http.client
        *("BrokenResourceError", "ClosedResourceError", "EndOfStream"),  # anyio
        *("HTTPClientError", "EndpointConnectionError", "AutoReconnect"),  # botocore, pymongo
    )
)
"""Names of classes, or of their base classes, that mean "unavailable" in any library."""
LEAVES = frozenset(
    (
        *("ConnectError", "ConnectTimeout", "ReadError", "ReadTimeout", "WriteError"),
        *("ConnectionRefusedError", "ConnectionResetError", "ConnectionAbortedError"),
        *("BrokenPipeError", "RemoteDisconnected", "ServerDisconnectedError", "gaierror"),
        *("ClientConnectorError", "ConnectionTimeoutError", "TunnelError"),
    )
)
"""Names of classes that mean "unavailable" where only an exception's text is known."""
NEVER = frozenset(
    ("UnsupportedProtocol", "LocalProtocolError", "InvalidURL", "SSLCertVerificationError")
)
"""Subclasses of the classes above that mean that the call itself is wrong."""
UNKNOWN_HOST = frozenset(("gaierror", "NameResolutionError", "ClientConnectorDNSError"))
"""Names of classes that mean that the host name does not resolve."""
IN_VAIN = frozenset(("TimeoutError", "Timeout", "TimeoutException", "TimeoutExpired"))
"""Names of classes, or of their base classes, after which the call may have taken effect anyway."""
REFUSED = frozenset(
    (
        *("ConnectionRefusedError", "ConnectError", "NewConnectionError"),
        *("ClientConnectorError", "EndpointConnectionError", "RateLimitError"),
    )
)
"""Names of classes that mean that nothing was sent, or that the call was refused."""
GRPC_CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED")
MCP_NAMES = ("MCPError", "McpError")
MCP_CLOSED = -32000
"""Code of an MCP session whose connection was closed."""
NETWORK = frozenset(
    getattr(errno, name)
    for name in (
        *("ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "EPIPE", "ETIMEDOUT", "ENETDOWN"),
        *("ENETUNREACH", "ENETRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENOTCONN", "ESHUTDOWN"),
        *("EADDRNOTAVAIL", "ECOMM", "EREMOTEIO"),
    )
    if hasattr(errno, name)
)
"""Error numbers of the network; errors of files and of memory have others."""
CAUSES = 8
"""Maximum number of chained causes that are inspected."""
LONGEST_ASKED_S = 3600.0
"""Maximum wait from a Retry-After header that is honored, seconds."""


def away_in(error: BaseException | None) -> BaseException | None:
    """Return the exception that means that a service is unavailable: this one, or one of its
    causes. None if the error means something else."""
    for _ in range(CAUSES):
        if error is None:
            return None
        if isinstance(error, BaseExceptionGroup):
            found = [away_in(one) for one in error.exceptions]
            return found[0] if all(found) else None
        says = _says_away(error)
        if says is not None:
            return error if says else None
        error = error.__cause__
    return None


def not_begun_in(error: BaseException | None) -> BaseException | None:
    """Return the exception that means that a service is unavailable and did not begin this call.

    Retrying is then safe for any call: after a refused connection, 429, 503, or a `ConnectionError`
    or `Away` that a function raises itself. Returns None otherwise, for example after a timeout or
    if the host name does not resolve."""
    away = away_in(error)
    chain = list(_led_to(error))
    names = {kind.__name__ for one in chain for kind in type(one).__mro__}
    if away is None or names & UNKNOWN_HOST or names & IN_VAIN:
        return None
    statuses = [status for one in chain if (status := _status_of(one)) is not None]
    if statuses:
        return away if statuses[0] in (429, 503) else None
    said = type(away) in (ConnectionError, Away)
    return away if said or names & REFUSED else None


def _led_to(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and what led to it: its causes, contexts, and the exceptions that HTTP
    clients keep in `reason` and in their arguments."""
    left, seen = [error], set[int]()
    while left and len(seen) < 4 * CAUSES:
        one = left.pop(0)
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        left += [one.__cause__, None if one.__suppress_context__ else one.__context__]
        left += [one.__dict__.get("reason"), *(a for a in one.args if isinstance(a, BaseException))]
        left += one.exceptions if isinstance(one, BaseExceptionGroup) else ()


def says_away(text: str) -> bool:
    """Return whether a text names an exception that means that a service is unavailable."""
    return not (NAMES | LEAVES).isdisjoint(re.findall(r"[A-Za-z]+", text))


def asked_wait_s(error: BaseException) -> float | None:
    """Return the wait that the service asks for with Retry-After, seconds, at most an hour. None
    if it asks for none."""
    waits = [getattr(error, "wait_s", None)]
    for holder in (error, getattr(error, "response", None)):
        with suppress(Exception):  # an attribute of an unknown library may raise
            waits.append(retry_after_s(getattr(holder, "headers", None) or {}))
    asked = [float(s) for s in waits if isinstance(s, int | float) and s >= 0]
    return min(asked[0], LONGEST_ASKED_S) if asked else None


def retry_after_s(headers: Mapping[str, Any]) -> float | None:
    """Return the wait that a Retry-After header asks for, seconds; None if there is no valid
    one."""
    given = headers.get("retry-after") or headers.get("Retry-After")
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(given).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _says_away(error: BaseException) -> bool | None:
    """Return whether an exception itself means "unavailable"; None: inspect its cause."""
    if isinstance(error, Away):
        return True
    if isinstance(error, EndpointMisset | GivenUp):
        return False
    if isinstance(error, JaxrlError):  # raised by one of our time limits: no cause
        return False if isinstance(error, OSError) else None
    if not isinstance(error, Exception):
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & NEVER:
        return False
    status = _status_of(error)
    if status is not None:
        return status in STATUSES
    if names & set(MCP_NAMES):
        return getattr(error.__dict__.get("error"), "code", None) == MCP_CLOSED
    if isinstance(error, OSError):
        return _is_of_network(error)
    return True if names & NAMES else None


def _is_of_network(error: OSError) -> bool | None:
    """Return whether an OSError comes from the network, not a file; None: it has no error
    number."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, ValueError):  # from requests: an address without a scheme
        return False
    if isinstance(error, ssl.SSLError) or type(error).__name__ == "gaierror":
        return True
    reason = getattr(error, "reason", None)  # from urllib.error.URLError
    if isinstance(reason, BaseException):
        return _says_away(reason)
    of_a_client = type(error) is OSError or type(error).__module__.startswith("requests.")
    return error.errno in NETWORK if error.errno is not None else of_a_client


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an exception carries, or None. gRPC codes become 503 or 400."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # from botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    for holder in (error, response, error.__dict__.get("error")):
        for name in ("status_code", "status", "code", "http_status"):
            value: Any = None
            with suppress(Exception):
                value = getattr(holder, name, None)
                if callable(value):
                    value = value()
            if type(value).__name__ == "StatusCode" and hasattr(value, "name"):
                return 503 if value.name in GRPC_CODES else 400
            if isinstance(value, int) and not isinstance(value, bool) and 400 <= value < 600:
                return int(value)
    return None
