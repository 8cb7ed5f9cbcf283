"""The page of runs under attack: strangers' connections, odd calls, damaged and foreign lines."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrl_async.view import page_server as served
from jaxrl_async.view.__main__ import made_server
from jaxrl_async.view.page_server import MOST_CONNECTIONS
from jaxrl_async.view.report import embedded, plain_json, write_report
from jaxrl_async.view.watched import WatchedRun, sort_values

WITHIN_S = 20.0


def write_run(root, name, metrics=b"", samples=b""):
    folder = root / name
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(metrics)
    (folder / "samples.jsonl").write_bytes(samples)
    return folder


GOOD = b'{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/mean": 0.75}\n'
SAMPLE = json.dumps(
    {"step": 1, "prompt": "p", "completion": "c", "reward": 1.0, "reference": "x", "stop": "eos"}
).encode()
DAMAGED = [
    b"[]",
    b"{}",
    b"null",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"step": 1, "deep": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"step": "x"}',
    b'{"step": 99999999999999999999999, "reward/mean": 1}',
    b'{"step": ' + b"9" * 5000 + b', "reward": 1.0, "stop": "eos"}',
    b'{"step": 3, "prompt": "", "reward": 1.2.3, "stop": "eos"}',
    b'{"step": 3, "prompt": "", "reward": 1e9999, "stop": "eos"}',
    b'{"step": 3, "reward/mean": ' + b"9" * 400 + b', "reward": ' + b"9" * 400 + b"}",
    b'{"step": 1e400}',
    b'{"step": -5, "reward/mean": true}',
    b'{"step": true, "reward/mean": 7}',
    b'{"step": 3, "reward/mean": NaN, "reward": -Infinity, "prompt": NaN, "stop": "eos"}',
    b'{"step": 3, "prompt": "\\ud83d half", "completion": "\\udc00", "stop": "\\ud800"}',
    b'{"step": 3, "\\ud83d": 1, "staleness/tokens_lag_x": 4, "rollout/lengths_to_": 2}',
    b'{"step": 3, "staleness/tokens_lag_\xc2\xb2": 4, "staleness/tokens_lag_3": 5}',
    b'{"step": {}, "reward": [], "stop": {}, "tokens": 3}',
]
"""Lines of a damaged disk, of another program or of an attacker."""


@contextmanager
def page(*folders):
    """Serve the page of some runs; give a function that asks it."""
    server = made_server(folders, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()

    def ask(path, host="localhost"):
        line = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=WITHIN_S)
        try:
            line.putrequest("GET", path, skip_host=True)
            line.putheader("Host", host)
            line.endheaders()
            answer = line.getresponse()
            return answer.status, answer.read()
        finally:
            line.close()

    ask.port = server.server_address[1]
    ask.server = server
    try:
        yield ask
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def as_a_browser_reads(data):
    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    return json.loads(data.decode("utf-8"), parse_constant=refuse)


APIS = (
    *("runs", "layout", "curves", "axes", "settings", "rows", "summary", "extents", "samples"),
    *("log", "spans", "identity"),
)


def test_damaged_lines_take_nothing_from_the_lines_around_them(tmp_path):
    hostile = b"\n".join(DAMAGED) + b"\n"
    run = write_run(
        tmp_path, "r", hostile + GOOD + hostile, SAMPLE + b"\n" + hostile + SAMPLE + b"\n"
    )
    with page(run) as ask:
        answers = {}
        for api in APIS:
            status, data = ask(f"/api/{api}?run=r&key={quote('reward/mean')}&count=100&x=time")
            assert status == 200, (api, data)
            answers[api] = as_a_browser_reads(data)
        assert answers["curves"] == {"r": {"reward/mean": [[1, 2], [0.5, 0.75]]}}
        assert answers["samples"]["found"] == 2 + len(DAMAGED)
        texts = [sample.get("prompt") for sample in answers["samples"]["samples"]]
        assert texts.count("p") == 2 and "? half" in texts
        assert answers["summary"]["ages"] == [
            {"age": 3, "tokens": 5.0, "reward": None, "length": None, "kl": None}
        ]
    report = write_report(run).read_text("utf-8")
    assert "? half" in report


@pytest.mark.full
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.one_of(
            st.sampled_from([*DAMAGED, SAMPLE, *GOOD.splitlines()]),
            st.binary(max_size=30),
            st.dictionaries(
                st.sampled_from(["step", "reward", "stop", "prompt", "tokens", "eval/accuracy"]),
                st.one_of(
                    st.none(),
                    st.booleans(),
                    st.integers(),
                    st.floats(),
                    st.text(max_size=4),
                    st.lists(st.integers(), max_size=2),
                ),
            ).map(lambda line: json.dumps(line).encode()),
        ),
        max_size=12,
    )
)
def test_any_lines_make_a_report_that_a_browser_reads(tmp_path, lines):
    content = b"\n".join(lines) + b"\n"
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_bytes(content)
    as_a_browser_reads(plain_json(embedded(WatchedRun(tmp_path, "r"))).encode())


def test_a_line_without_an_end_in_sight_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl_async.view.watched_files.MAX_LINE", 1000)
    run = write_run(tmp_path, "r", GOOD + b"x" * 5000)
    watched = WatchedRun(run, "r")
    watched.stamp()
    assert watched.points("reward/mean") == [(1, 0.5), (2, 0.75)]
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"x" * 700 + b'\n{"step": 3, "reward/mean": 0.875}\n')
    watched.stamp()
    assert watched.points("reward/mean") == [(1, 0.5), (2, 0.75), (3, 0.875)]


def test_a_sample_is_chosen_by_numbers_alone():
    assert sort_values(SAMPLE) == (1, 1.0, "eos")
    assert sort_values(b'{"step": 7, "a": 1, "reward": -2.5e-3, "b": 1, "stop": "length"}') == (
        7,
        -0.0025,
        "length",
    )
    for line in DAMAGED:
        step, reward, stop = sort_values(line)
        assert 0 <= step < 2**62 and reward * 0 == 0 and isinstance(stop, str)


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/api/runs", "localhost", 200),
        ("/api/runs", "[::1", 403),
        ("/api/runs", "a" * 60_000, 403),
        ("/api/runs", "", 403),
        ("http://[", "localhost", 400),
        ("/api/samples?run=r&first=" + "9" * 5000, "localhost", 400),
        ("/api/samples?run=r&skip=" + "9" * 4000, "localhost", 200),
        ("/api/curves?run=%ed%a0%80", "localhost", 400),
        ("/api/spans?run=r&from=inf&to=-inf", "localhost", 200),
        ("/api/runs?%00&&&=&", "localhost", 200),
        ("/api/curves?" + "run=r&" * 51, "localhost", 400),
        ("/api/axes?run=r&x=weight", "localhost", 400),
        ("/api/samples?run=r&order=price", "localhost", 400),
        ("/api/samples?run=r&order=advantage_up&sample=0", "localhost", 200),
        ("/api/log?run=r&before=" + "9" * 4000, "localhost", 200),
        ("/api/rows?run=none", "localhost", 400),
        ("/metrics.csv?run=r", "localhost", 400),
        ("/metrics.csv?run=r&key=%0d%0a,%22", "localhost", 200),
    ],
)
def test_odd_calls_are_answered(tmp_path, path, host, status):
    with page(write_run(tmp_path, "r", GOOD, SAMPLE + b"\n")) as ask:
        assert ask(path, host)[0] == status


def test_an_answer_that_fails_is_an_error_of_the_server(tmp_path, monkeypatch, caplog):
    def fails(runs, query):
        raise RecursionError("too deep")

    monkeypatch.setitem(served.ANSWERS, "/api/runs", fails)
    with page(write_run(tmp_path, "r", GOOD)) as ask:
        assert ask("/api/runs") == (500, b"the answer failed: RecursionError")
        assert ask("/api/layout")[0] == 200
    assert "a call of the page failed" in caplog.text


def until(condition):
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def threads_of(server):
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


@pytest.mark.full
def test_silent_connections_are_bounded_and_end(tmp_path, monkeypatch):
    with page(write_run(tmp_path, "r", GOOD)) as ask:
        lines = []
        for _ in range(3 * MOST_CONNECTIONS):
            line = socket.create_connection(("127.0.0.1", ask.port), timeout=WITHIN_S)
            line.sendall(b"GET /api/runs HTTP/1.1\r\nHo")
            lines.append(line)
        assert ask("/api/runs")[0] == 200  # the oldest silent one has gone for it
        until(lambda: threads_of(ask.server) <= MOST_CONNECTIONS)
        monkeypatch.setattr(served, "ARRIVES_S", 0.1)
        until(lambda: threads_of(ask.server) == 0)
        assert ask("/api/runs")[0] == 200
        for line in lines:
            line.close()


def test_a_client_that_drips_its_call_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(served, "ARRIVES_S", 0.3)
    with page(write_run(tmp_path, "r", GOOD)) as ask:
        line = socket.create_connection(("127.0.0.1", ask.port), timeout=WITHIN_S)
        with line, pytest.raises(OSError):
            end = time.monotonic() + WITHIN_S
            while time.monotonic() < end:
                line.sendall(b"x")
                time.sleep(0.05)


def test_a_server_without_descriptors_waits_for_some(tmp_path, monkeypatch):
    accept, tries = socket.socket.accept, []

    def no_room(self):
        tries.append(time.monotonic())
        if len(tries) < 4:
            raise OSError(24, "Too many open files")
        return accept(self)

    with page(write_run(tmp_path, "r", GOOD)) as ask:
        monkeypatch.setattr(socket.socket, "accept", no_room)
        assert ask("/api/runs")[0] == 200
        assert len(tries) >= 4
