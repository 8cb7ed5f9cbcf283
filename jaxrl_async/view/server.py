"""Serve the page and what it asks for: GET alone, bounded answers, nothing outside of the runs."""

import hmac
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.metrics.report import SECTIONS
from jaxrl_async.view.watched import SampleFilter, WatchedRun

log = logging.getLogger(__name__)

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/samples.js": ("samples.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/uplot.js": ("uplot.js", "text/javascript; charset=utf-8"),
    "/uplot.css": ("uplot.css", "text/css; charset=utf-8"),
}
"""Address, file and type of what the page is made of."""
MAX_POINTS = 2000
"""Most points of a curve in one answer."""
MAX_SAMPLES = 100
"""Most samples in one answer."""
LAST_STEP = 2**62
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
"""What the page may load and run: nothing from elsewhere, and no text of a sample as a script."""

Query = Mapping[str, Sequence[str]]


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

    def _answer(self, answer: "Answer", query: Query) -> None:
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


# ---- what is asked

Runs = Mapping[str, WatchedRun]
Answer = Callable[[Runs, Query], Any]


def overview(runs: Runs, query: Query) -> Any:
    """Return each run's state, and a word that changes with its files."""
    return [{"name": name, "seen": run.look(), "state": run.state()} for name, run in runs.items()]


def layout(runs: Runs, query: Query) -> Any:
    """Return the charts, by section, of what at least one run has measured; and all metrics."""
    present = {key for run in runs.values() for key in run.measured()}
    sections: list[dict[str, Any]] = []
    for title, charts in SECTIONS:
        kept: list[dict[str, Any]] = [
            {"title": c.title, "unit": c.unit, "curves": [x for x in c.curves if x[0] in present]}
            for c in charts
        ]
        sections.append({"title": title, "charts": [chart for chart in kept if chart["curves"]]})
    parts = sorted(k for k in present if k.startswith("reward/") and "<" in told(k)["key"])
    if parts:
        curves = [(key, key.partition("/")[2]) for key in parts]
        chart = {"title": "Parts of the reward", "unit": "reward", "curves": curves}
        sections[0]["charts"].append(chart)
    metrics = [{**told(key), "key": key} for key in sorted(present)]
    return {"sections": [s for s in sections if s["charts"]], "metrics": metrics}


def told(key: str) -> dict[str, str]:
    """Return what is declared of a metric; nothing, if another version of the package wrote it."""
    try:
        metric = metric_of(key)
    except AssertionError:
        return {"key": key, "unit": "", "about": ""}
    return {"key": metric.key, "unit": metric.unit, "about": metric.help}


def curves(runs: Runs, query: Query) -> Any:
    """Return the curves of the metrics `key`, of a run, between two steps."""
    run = runs[query["run"][0]]
    first, last = _number(query, "first", 0), _number(query, "last", LAST_STEP)
    most = min(_number(query, "points", 600), MAX_POINTS)
    return run.curves(list(query.get("key", ())), first, last, max(most, 2))


def totals(runs: Runs, query: Query) -> Any:
    """Return the sums of a run's metrics that begin with `prefix`."""
    return runs[query["run"][0]].totals(query["prefix"][0])


def samples(runs: Runs, query: Query) -> Any:
    """Return a run's samples that are wanted: how many there are, and a page of them."""
    wanted = SampleFilter(
        text=(query.get("text") or [""])[0],
        first_step=_number(query, "first", None),
        last_step=_number(query, "last", None),
        least_reward=_fraction(query, "least"),
        most_reward=_fraction(query, "most"),
        stop=(query.get("stop") or [""])[0],
    )
    most = min(_number(query, "count", 20), MAX_SAMPLES)
    found, page = runs[query["run"][0]].samples(wanted, _number(query, "skip", 0), most)
    return {"found": found, "samples": page}


def identity(runs: Runs, query: Query) -> Any:
    """Return what made a run."""
    return runs[query["run"][0]].identity()


ANSWERS: dict[str, Answer] = {
    "/api/runs": overview,
    "/api/layout": layout,
    "/api/curves": curves,
    "/api/totals": totals,
    "/api/samples": samples,
    "/api/identity": identity,
}


def _number(query: Query, name: str, usual: Any) -> Any:
    given = (query.get(name) or [""])[0]
    return max(int(given), 0) if given else usual


def _fraction(query: Query, name: str) -> float | None:
    given = (query.get(name) or [""])[0]
    return float(given) if given else None
