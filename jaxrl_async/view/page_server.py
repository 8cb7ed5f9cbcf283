"""Serve the page and its data: GET only, bounded answers, nothing outside of the runs."""

import contextlib
import errno
import hmac
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jaxrl_async.view.queries import ANSWERS, Answer, Query, csv_of, file_of
from jaxrl_async.view.report import plain_json
from jaxrl_async.view.run_list import RunList
from jaxrl_async.view.watched import RunsByName

log = logging.getLogger(__name__)

MODULES = (
    *("page", "address", "charts", "colors", "conversation", "curves", "elements", "numbers"),
    *("plot", "run_model", "run_table", "samples", "source", "spans", "tabs"),
)
"""Names of the page's scripts."""
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in MODULES},
}
"""Address, file and type of the page's parts."""
FILE, CSV = "/file", "/metrics.csv"
"""Addresses of run files that the page links to, and of all values of some metrics."""
PLAIN = "text/plain; charset=utf-8"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
"""The page's content policy: nothing from other hosts, and no scripts in the text of samples."""


MOST_CONNECTIONS = 64
"""Maximum number of connections, each with a thread. A further one ends the oldest idle one."""
ARRIVES_S, ANSWERED_S = 20.0, 120.0
"""Timeouts for a call to arrive, and for its answer to be read, seconds."""
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors when the system has no resources for a waiting connection."""
ROOM_S = 0.1
"""Pause after such an error, seconds."""


class ViewServer(ThreadingHTTPServer):
    """Serves the page of some runs; `serve_forever` until `shutdown`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, runs: RunList, host: str, port: int) -> None:
        """Listen. Raises OSError if that is not possible.

        Args:
            runs: shown on the page; more may be added.
            host: if it is not a loopback address, every call needs `token`.
            port: 0: any free port.
        """
        self._runs = runs
        self._open: dict[socket.socket, tuple[float, bool]] = {}  # since; call arrived
        self._lock = threading.Lock()
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(16)
        super().__init__((host, port), ViewHandler)

    @property
    def runs(self) -> RunsByName:
        """The runs as of now, by name."""
        return self._runs.now()

    @property
    def address(self) -> str:
        """The page's address, with the token if one is needed."""
        host, port = self.server_address[:2]
        query = f"?token={self.token}" if self.token else ""
        return f"http://{host!s}:{port}/{query}"

    # ---- bounds: called by socketserver

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises OSError, which the caller ignores."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in NO_ROOM:
                self._end_oldest_idle()
                time.sleep(ROOM_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a connection's thread; with too many connections, end another one, or this one."""
        with self._lock:
            is_full = len(self._open) >= MOST_CONNECTIONS
        if is_full and not self._end_oldest_idle():
            self.shutdown_request(request)
            return
        with self._lock:
            self._open[request] = (time.monotonic(), False)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system provides no more threads
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def mark_received(self, request: socket.socket) -> None:
        """Record that a connection's call has arrived."""
        with self._lock:
            if request in self._open:
                self._open[request] = (time.monotonic(), True)

    def service_actions(self) -> None:
        """End timed-out connections; `serve_forever` calls this regularly."""
        now = time.monotonic()
        with self._lock:
            late = [
                request
                for request, (since, received) in self._open.items()
                if now - since > (ANSWERED_S if received else ARRIVES_S)
            ]
        for request in late:
            self._end(request)

    def _end_oldest_idle(self) -> bool:
        """End the oldest connection whose call has not arrived; return whether one existed."""
        with self._lock:
            idle = [request for request, (_, received) in self._open.items() if not received]
        if idle:
            self._end(idle[0])
        return bool(idle)

    def _end(self, request: socket.socket) -> None:
        """Make a connection's thread end, by stopping its reads and writes."""
        with self._lock:
            self._open.pop(request, None)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log the error that ended a connection's thread, usually a disconnected client."""
        log.debug("the call of %s failed", client_address, exc_info=True)


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class ViewHandler(BaseHTTPRequestHandler):
    """Answers one call."""

    server: ViewServer
    timeout = ARRIVES_S  # of each read or write

    def do_GET(self) -> None:
        """Answer with a file of the page, or with JSON; with 500 after an error."""
        self.server.mark_received(self.connection)
        try:
            self._get()
        except OSError:  # the client has disconnected, or does not read
            self.close_connection = True
        except ValueError as error:
            self._reply(400, _plain(f"not understood: {error}"), PLAIN)
        except Exception as error:
            log.exception("a call of the page failed")
            self._reply(500, _plain(f"the answer failed: {type(error).__name__}"), PLAIN)

    def _get(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if not self._names_this_server():
            self._reply(403, b"this address is not served here", PLAIN)
        elif url.path in FILES:
            name, kind = FILES[url.path]
            data = files("jaxrl_async.view").joinpath("page", name).read_bytes()
            self._reply(200, data, kind)
        elif url.path not in (*ANSWERS, FILE, CSV):
            self._reply(404, b"there is no such page", PLAIN)
        elif not self._has_token(query):
            self._reply(401, b"the address lacks its token", PLAIN)
        elif url.path == FILE:
            self._send_file(query)
        elif url.path == CSV:
            self._send_csv(query)
        else:
            self._answer(ANSWERS[url.path], query)

    def _send_file(self, query: Query) -> None:
        try:
            file = file_of(self.server.runs, query).open("rb")
        except (KeyError, FileNotFoundError) as error:
            self._reply(404, _plain(f"there is no such file: {error}"), PLAIN)
            return
        with file:
            self._begin(200, "application/octet-stream", os.fstat(file.fileno()).st_size)
            shutil.copyfileobj(file, self.wfile)

    def _send_csv(self, query: Query) -> None:
        try:
            lines = csv_of(self.server.runs, query)
        except KeyError as error:
            self._reply(400, _plain(f"not understood: {error}"), PLAIN)
            return
        self._begin(200, "text/csv; charset=utf-8", None)  # the connection's end is its end
        for line in lines:
            self.wfile.write(_plain(line))

    def _answer(self, answer: Answer, query: Query) -> None:
        try:
            result = answer(self.server.runs, query)
        except KeyError as error:
            self._reply(400, _plain(f"not understood: {error}"), PLAIN)
            return
        self._reply(200, plain_json(result).encode(), "application/json")

    def _names_this_server(self) -> bool:
        """Return whether the call names this server in the way that browsers on this machine do. A
        page from elsewhere, whose host name was redirected here, could otherwise read the runs."""
        if self.server.token:
            return True
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            return False
        return is_loopback(host)

    def _has_token(self, query: Query) -> bool:
        sent, token = (query.get("token") or [""])[0].encode(), self.server.token.encode()
        return not token or hmac.compare_digest(sent, token)

    def _reply(self, status: int, data: bytes, kind: str) -> None:
        self._begin(status, kind, len(data))
        self.wfile.write(data)

    def _begin(self, status: int, kind: str, size: int | None) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            **({} if size is None else {"Content-Length": str(size)}),
            "Cache-Control": "no-store",
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log a call at debug level."""
        log.debug(format, *args)


def _plain(text: str) -> bytes:
    return text.encode("utf-8", "replace")
