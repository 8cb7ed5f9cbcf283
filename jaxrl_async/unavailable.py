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

from jaxrl_async.errors import BadEndpoint, JaxrlError, RetriesExhausted, Unavailable

RETRYABLE_STATUSES = (408, 425, 429, *range(500, 600))
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
TEXT_NAMES = frozenset(
    (
        *("ConnectError", "ConnectTimeout", "ReadError", "ReadTimeout", "WriteError"),
        *("ConnectionRefusedError", "ConnectionResetError", "ConnectionAbortedError"),
        *("BrokenPipeError", "RemoteDisconnected", "ServerDisconnectedError", "gaierror"),
        *("ClientConnectorError", "ConnectionTimeoutError", "TunnelError"),
    )
)
"""Names of classes that mean "unavailable" where only an exception's text is known."""
CALL_ERRORS = frozenset(
    ("UnsupportedProtocol", "LocalProtocolError", "InvalidURL", "SSLCertVerificationError")
)
"""Subclasses of the classes above that mean that the call itself is wrong."""
UNRESOLVED_HOST = frozenset(("gaierror", "NameResolutionError", "ClientConnectorDNSError"))
"""Names of classes that mean that the host name does not resolve."""
TIMEOUTS = frozenset(("TimeoutError", "Timeout", "TimeoutException", "TimeoutExpired"))
"""Names of classes, or of their base classes, after which the call may have taken effect anyway."""
NOT_SENT = frozenset(
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
NETWORK_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        *("ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "EPIPE", "ETIMEDOUT", "ENETDOWN"),
        *("ENETUNREACH", "ENETRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENOTCONN", "ESHUTDOWN"),
        *("EADDRNOTAVAIL", "ECOMM", "EREMOTEIO"),
    )
    if hasattr(errno, name)
)
"""Error numbers of the network; errors of files and of memory have others."""
MAX_CAUSES = 8
"""Maximum number of chained causes that are inspected."""
MAX_RETRY_AFTER_S = 3600.0
"""Maximum wait from a Retry-After header that is honored, seconds."""


def unavailable_cause(error: BaseException | None) -> BaseException | None:
    """Return the exception that means that a service is unavailable: this one, or one of its
    causes. None if the error means something else."""
    for _ in range(MAX_CAUSES):
        if error is None:
            return None
        if isinstance(error, BaseExceptionGroup):
            causes = [unavailable_cause(inner) for inner in error.exceptions]
            return causes[0] if all(causes) else None
        unavailable = _is_unavailable(error)
        if unavailable is not None:
            return error if unavailable else None
        error = error.__cause__
    return None


def not_begun_cause(error: BaseException | None) -> BaseException | None:
    """Return the exception that means that a service is unavailable and did not begin this call.

    Retrying is then safe for any call: after a refused connection, 429, 503, or a `ConnectionError`
    or `Unavailable` that a function raises itself. Returns None otherwise, for example after a
    timeout or if the host name does not resolve."""
    cause = unavailable_cause(error)
    chain = list(_error_chain(error))
    names = {kind.__name__ for link in chain for kind in type(link).__mro__}
    if cause is None or names & UNRESOLVED_HOST or names & TIMEOUTS:
        return None
    statuses = [status for link in chain if (status := _status_of(link)) is not None]
    if statuses:
        return cause if statuses[0] in (429, 503) else None
    explicit = type(cause) in (ConnectionError, Unavailable)
    return cause if explicit or names & NOT_SENT else None


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and what led to it: its causes, contexts, and the exceptions that HTTP
    clients keep in `reason` and in their arguments."""
    todo, seen = [error], set[int]()
    while todo and len(seen) < 4 * MAX_CAUSES:
        err = todo.pop(0)
        if not isinstance(err, BaseException) or id(err) in seen:
            continue
        seen.add(id(err))
        yield err
        todo += [err.__cause__, None if err.__suppress_context__ else err.__context__]
        todo += [
            err.__dict__.get("reason"),
            *(a for a in err.args if isinstance(a, BaseException)),
        ]
        todo += err.exceptions if isinstance(err, BaseExceptionGroup) else ()


def names_unavailable(text: str) -> bool:
    """Return whether a text names an exception that means that a service is unavailable."""
    return not (NAMES | TEXT_NAMES).isdisjoint(re.findall(r"[A-Za-z]+", text))


def retry_wait_s(error: BaseException) -> float | None:
    """Return the wait that the service asks for with Retry-After, seconds, at most an hour. None
    if it asks for none."""
    waits = [getattr(error, "wait_s", None)]
    for holder in (error, getattr(error, "response", None)):
        with suppress(Exception):  # an attribute of an unknown library may raise
            waits.append(retry_after_s(getattr(holder, "headers", None) or {}))
    requested = [float(s) for s in waits if isinstance(s, int | float) and s >= 0]
    return min(requested[0], MAX_RETRY_AFTER_S) if requested else None


def retry_after_s(headers: Mapping[str, Any]) -> float | None:
    """Return the wait that a Retry-After header asks for, seconds; None if there is no valid
    one."""
    value = headers.get("retry-after") or headers.get("Retry-After")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _is_unavailable(error: BaseException) -> bool | None:
    """Return whether an exception itself means "unavailable"; None: inspect its cause."""
    if isinstance(error, Unavailable):
        return True
    if isinstance(error, BadEndpoint | RetriesExhausted):
        return False
    if isinstance(error, JaxrlError):  # raised by one of our time limits: no cause
        return False if isinstance(error, OSError) else None
    if not isinstance(error, Exception):
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & CALL_ERRORS:
        return False
    status = _status_of(error)
    if status is not None:
        return status in RETRYABLE_STATUSES
    if names & set(MCP_NAMES):
        return getattr(error.__dict__.get("error"), "code", None) == MCP_CLOSED
    if isinstance(error, OSError):
        return _is_network_error(error)
    return True if names & NAMES else None


def _is_network_error(error: OSError) -> bool | None:
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
        return _is_unavailable(reason)
    from_client = type(error) is OSError or type(error).__module__.startswith("requests.")
    return error.errno in NETWORK_ERRNOS if error.errno is not None else from_client


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
