"""Answer a cluster's health checks for this process: GET /healthz at JAXRL_ASYNC_HEALTH.

200 "ok"          the process runs, and no check has found a problem
503 and a reason  a check has found one; the cluster may restart the process
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from jaxrl_async.errors import ConfigError

log = logging.getLogger(__name__)

HEALTH_VARIABLE = "JAXRL_ASYNC_HEALTH"
"""Environment variable: HOST:PORT of a process's health endpoint; without it there is no
endpoint."""
PATH = "/healthz"
READ_S = 10.0
"""Timeout for a request to arrive, seconds."""

Check = Callable[[], str | None]
"""Returns the problem; None: no problem."""
_checks: list[Check] = []


@contextmanager
def checked_health(check: Check) -> Iterator[None]:
    """Include this check in the answers, inside the `with`."""
    _checks.append(check)
    try:
        yield
    finally:
        _checks.remove(check)


@contextmanager
def health_endpoint() -> Iterator[int | None]:
    """Answer inside the `with` if the environment names an address; yield the port. Raises
    ConfigError if listening at that address fails."""
    address = os.environ.get(HEALTH_VARIABLE)
    if not address:
        yield None
        return
    host, _, port = address.rpartition(":")
    try:
        server = ThreadingHTTPServer((host.strip("[]"), int(port)), _Handler)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{HEALTH_VARIABLE}={address}: nothing can listen there ({error}). Give HOST:PORT of "
            "this machine, or unset it."
        ) from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="health", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Progress:
    """A check that a component makes progress while it has work."""

    def __init__(
        self,
        read: Callable[[], tuple[int, bool]],
        limit_s: float,
        clock: Callable[[], float],
        what: str,
    ) -> None:
        """Args:
        read: returns a count that grows with the work, and whether there is work.
        limit_s: maximum time with work in which the count does not grow, seconds.
        clock: monotonic, seconds.
        what: the component's name in messages.
        """
        self._read, self._limit_s, self._clock, self._what = read, limit_s, clock, what
        self._count, self._since = -1, clock()
        self._lock = threading.Lock()

    def __call__(self) -> str | None:
        """Return the problem; None: no problem."""
        count, works = self._read()
        with self._lock:
            now = self._clock()
            if count != self._count or not works:
                self._count, self._since = count, now
            idle_s = now - self._since
        if idle_s <= self._limit_s:
            return None
        return f"{self._what} has work and has done nothing for {idle_s:.0f} s"


class _Handler(BaseHTTPRequestHandler):
    timeout = READ_S

    def do_GET(self) -> None:
        """Answer 200, or 503 with the problem."""
        if self.path.partition("?")[0] != PATH:
            self._reply(404, f"ask for {PATH}")
            return
        wrong: list[str] = []
        for check in tuple(_checks):
            try:
                problem = check()
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            wrong += [problem] if problem else []
        self._reply(503 if wrong else 200, "; ".join(wrong) or "ok")

    def _reply(self, status: int, text: str) -> None:
        data = f"{text}\n".encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log a request at level DEBUG, since one arrives every few seconds."""
        log.debug(format, *args)
