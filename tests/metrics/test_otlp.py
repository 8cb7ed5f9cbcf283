"""Spans sent to a collector over HTTP, read by OpenTelemetry's own messages."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from jaxrl_async.metrics import otlp, spans


class Collector(BaseHTTPRequestHandler):
    got: list[tuple[str, str, bytes]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Collector.got.append((self.path, self.headers.get("x-key", ""), body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def collector(monkeypatch):
    Collector.got = []
    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv(otlp.BASE, f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20b")
    yield Collector.got
    server.shutdown()
    thread.join()
    server.server_close()


def messages(got: list[tuple[str, str, bytes]]) -> list[Any]:
    """Parse the bodies as OpenTelemetry does, ids apart, which OTLP writes as hex, not base64."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    from google.protobuf.json_format import Parse

    return [Parse(body, service.ExportTraceServiceRequest()) for _, _, body in got]


@pytest.mark.full
def test_a_collector_gets_what_the_file_has(tmp_path: Path, collector) -> None:
    with spans.recorded_spans(tmp_path / "trace.json", "trainer 0"):
        with spans.span("learn", step=3, share=0.5, last=True):
            pass
        spans.add_span("judge", 1.0, 2.5, lanes="scorer")
    (message,) = messages(collector)
    path, key, body = collector[0]
    assert path == "/v1/traces" and key == "a b"
    (resource,) = message.resource_spans
    assert {a.key: a.value.string_value for a in resource.resource.attributes} == {
        "service.name": "jaxrl_async",
        "service.instance.id": "trainer 0",
        "jaxrl.run": tmp_path.name,
    }
    learn, judge = resource.scope_spans[0].spans
    assert learn.name == "learn" and judge.name == "judge"
    attributes = {a.key: a.value for a in learn.attributes}
    assert attributes["step"].int_value == 3 and attributes["share"].double_value == 0.5
    assert attributes["last"].bool_value and attributes["thread.name"].string_value == "MainThread"
    took_ns = judge.end_time_unix_nano - judge.start_time_unix_nano
    assert abs(took_ns - 1_500_000_000) < 1_000
    ids = [s["spanId"] for s in json.loads(body)["resourceSpans"][0]["scopeSpans"][0]["spans"]]
    assert len(set(ids)) == 2 and all(len(i) == 16 for i in ids)
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) >= 4


@pytest.mark.full
def test_many_spans_come_in_several_requests(collector, monkeypatch) -> None:
    monkeypatch.setattr(otlp, "AT_ONCE", 4)
    many = [spans.RecordedSpan(f"s{i}", float(i), i + 0.5, "", {}) for i in range(10)]
    assert otlp.send([("a", many[:7]), ("b", many[7:])], "p", "r", 0.0) == 10
    names = [s.name for m in messages(collector) for s in m.resource_spans[0].scope_spans[0].spans]
    assert names == [f"s{i}" for i in range(10)] and len(collector) == 3


def test_without_a_collector_nothing_is_sent_and_one_that_is_gone_is_logged(
    monkeypatch, caplog
) -> None:
    one = spans.RecordedSpan("s", 0.0, 1.0, "", {})
    for name in (otlp.BASE, otlp.TRACES):
        monkeypatch.delenv(name, raising=False)
    assert otlp.send([("a", [one])], "p", "r", 0.0) == 0 and not caplog.records
    monkeypatch.setenv(otlp.TRACES, "http://127.0.0.1:9/x")
    assert otlp.send([("a", [one])], "p", "r", 0.0) == 0
    assert "could not be sent to http://127.0.0.1:9/x after 0" in caplog.text


def test_what_is_no_collector_of_http_is_logged_and_never_fails_a_run(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    """Such as the port of gRPC, 4317, which many environments name."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            line, _ = server.accept()
            with line:
                line.recv(65536)
                line.sendall(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00 settings\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        for where in (f"http://127.0.0.1:{server.getsockname()[1]}", "http://127.0.0.1:port"):
            monkeypatch.setenv(otlp.TRACES, where)
            with spans.recorded_spans(tmp_path / "trace.json", "trainer 0"):
                spans.add_span("s", 0.0, 1.0)
            assert f"could not be sent to {where} after 0" in caplog.text
        thread.join()
