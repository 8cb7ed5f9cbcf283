"""Serve the page and what it asks for: GET alone, bounded answers, nothing outside of the runs."""

import hmac
import json
import logging
import secrets
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jaxrl_async.view.answers import ANSWERS, Answer, Query
from jaxrl_async.view.watched import WatchedRun

log = logging.getLogger(__name__)

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/source.js": ("source.js", "text/javascript; charset=utf-8"),
    "/elements.js": ("elements.js", "text/javascript; charset=utf-8"),
    "/conversation.js": ("conversation.js", "text/javascript; charset=utf-8"),
    "/samples.js": ("samples.js", "text/javascript; charset=utf-8"),
    "/spans.js": ("spans.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/uplot.js": ("uplot.js", "text/javascript; charset=utf-8"),
    "/uplot.css": ("uplot.css", "text/css; charset=utf-8"),
}
"""Address, file and type of what the page is made of."""
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
"""What the page may load and run: nothing from elsewhere, and no text of a sample as a script."""


class ViewServer(ThreadingHTTPServer):
    """Serves the page of some runs; `serve_forever` until `shutdown`."""

    daemon_threads = True

    def __init__(self, runs: Sequence[WatchedRun], host: str, port: int) -> None:
        """Listen. Raises OSError if nothing can listen there.

        Args:
            runs: with different names.
            host: other than this machine's own loopback: every call needs `token`.
            port: 0: any free one.
        """
        self.runs = {run.name: run for run in runs}
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(16)
        super().__init__((host, port), ViewHandler)

    @property
    def address(self) -> str:
        """The page's address, with the token if it takes one."""
        host, port = self.server_address[:2]
        query = f"?token={self.token}" if self.token else ""
        return f"http://{host!s}:{port}/{query}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host's address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class ViewHandler(BaseHTTPRequestHandler):
    """Answers one call."""

    server: ViewServer

    def do_GET(self) -> None:
        """Answer with a file of the page, or with JSON."""
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if not self._is_asked_rightly():
            self._reply(403, b"this address is not served here", "text/plain; charset=utf-8")
        elif url.path in FILES:
            name, kind = FILES[url.path]
            data = files("jaxrl_async.view").joinpath("page", name).read_bytes()
            self._reply(200, data, kind)
        elif url.path not in ANSWERS:
            self._reply(404, b"there is no such page", "text/plain; charset=utf-8")
        elif not self._has_token(query):
            self._reply(401, b"the address lacks its token", "text/plain; charset=utf-8")
        else:
            self._answer(ANSWERS[url.path], query)

    def _answer(self, answer: Answer, query: Query) -> None:
        try:
            found = answer(self.server.runs, query)
        except (KeyError, ValueError) as error:
            text = f"not understood: {error}".encode()
            self._reply(400, text, "text/plain; charset=utf-8")
            return
        data = json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()
        self._reply(200, data, "application/json")

    def _is_asked_rightly(self) -> bool:
        """Return whether the call names this server as browsers on this machine do: a page from
        elsewhere whose name was pointed here would read the runs."""
        if self.server.token:
            return True
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        return is_loopback(host)

    def _has_token(self, query: Query) -> bool:
        given, token = (query.get("token") or [""])[0].encode(), self.server.token.encode()
        return not token or hmac.compare_digest(given, token)

    def _reply(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(data)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log a call at the level of debugging."""
        log.debug(format, *args)
