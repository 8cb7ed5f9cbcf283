"""Send spans to an OpenTelemetry collector as they are written: OTLP over HTTP, as JSON.

The address and the headers are set by OpenTelemetry's own environment variables; without them
nothing is sent. https://opentelemetry.io/docs/specs/otlp/#otlphttp
"""

import hashlib
import json
import logging
import os
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from itertools import islice
from typing import Any
from urllib.parse import unquote

from jaxrl_async import __version__
from jaxrl_async.errors import in_a_line

log = logging.getLogger(__name__)

TRACES, BASE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
"""Variables with the address for traces, or with the address of a collector, to which /v1/traces is
added."""
HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
"""Variables with headers, as name=value,name=value; the first one that is set counts."""
AT_ONCE = 2_000
"""Maximum number of spans in one request."""
TIMEOUT_S = 10.0
"""Timeout of each request to the collector, seconds."""

Tracks = Sequence[tuple[str, Sequence[Any]]]
"""Name and spans (metrics.spans.RecordedSpan) of each track."""


def address() -> str | None:
    """Return the address that spans are sent to; None: spans are not sent."""
    if os.environ.get(TRACES):
        return os.environ[TRACES]
    base = os.environ.get(BASE)
    return f"{base.rstrip('/')}/v1/traces" if base else None


def headers() -> dict[str, str]:
    """Return the headers from the environment."""
    named = next((os.environ[name] for name in HEADERS if os.environ.get(name)), "")
    pairs = [pair.partition("=") for pair in named.split(",") if "=" in pair]
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


def requests(tracks: Tracks, process: str, run: str, since_s: float) -> Iterator[dict[str, Any]]:
    """Yield the bodies of requests (ExportTraceServiceRequest), at most AT_ONCE spans each.

    Args:
        tracks: see Tracks.
        process: name of this process.
        run: name of the trace; the same run and process have the same trace.
        since_s: the wall clock when the spans' clock was 0, seconds.
    """
    trace = hashlib.blake2b(f"{run} {process}".encode(), digest_size=16).hexdigest()
    named = {"service.name": "jaxrl_async", "service.instance.id": process, "jaxrl.run": run}
    spans = (_span(one, name, trace, since_s) for name, track in tracks for one in track)
    while batch := list(islice(spans, AT_ONCE)):
        scope = {"scope": {"name": "jaxrl_async", "version": __version__}, "spans": batch}
        resource = {"attributes": _attributes(named)}
        yield {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def send(tracks: Tracks, process: str, run: str, since_s: float) -> int:
    """Send spans to the address in the environment; return how many were sent. A failure is logged
    and ends the sending."""
    where, sent = address(), 0
    if where is None:
        return 0
    try:
        for body in requests(tracks, process, run, since_s):
            request = urllib.request.Request(
                where,
                data=json.dumps(body).encode(),
                headers={"Content-Type": "application/json", **headers()},
            )
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                sent += len(body["resourceSpans"][0]["scopeSpans"][0]["spans"])
    except (OSError, ValueError, HTTPException) as error:
        log.warning("spans could not be sent to %s after %d: %s", where, sent, in_a_line(error))
    else:
        log.info("%d spans sent to %s", sent, where)
    return sent


def _span(span: Any, track: str, trace: str, since_s: float) -> dict[str, Any]:
    key = f"{trace} {track} {span.name} {span.start_s!r} {span.end_s!r}"
    return {
        "traceId": trace,
        "spanId": hashlib.blake2b(key.encode(), digest_size=8).hexdigest(),
        "name": span.name,
        "kind": 1,  # internal
        "startTimeUnixNano": str(int((since_s + span.start_s) * 1e9)),
        "endTimeUnixNano": str(int((since_s + span.end_s) * 1e9)),
        "attributes": _attributes({"thread.name": track, **span.args}),
    }


def _attributes(values: Mapping[str, object]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: object) -> dict[str, Any]:
    """Return an attribute's value in the form of OTLP."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}
