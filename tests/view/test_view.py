"""The page of runs: what its server tells of folders that grow, are cut, and hold anything."""

import http.client
import json
import threading
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxrl_async.errors import ConfigError
from jaxrl_async.metrics.recorder import Recorder, encode
from jaxrl_async.view.__main__ import made_server
from jaxrl_async.view.page_server import FILES, ViewServer, is_loopback
from jaxrl_async.view.report import MODULES
from jaxrl_async.view.watched import SampleFilter, WatchedRun, sort_values
from jaxrl_async.view.watched_files import MetricColumn


def recorded(root: Path, steps: int, *, resume: int | None = None) -> Recorder:
    recorder = Recorder(root, tensorboard=False, resume_step=resume)
    for step in range(0 if resume is None else resume + 1, steps):
        values = {"reward/mean": step / 10, "staleness/tokens_lag_1": 8.0}
        values |= {"rollout/lengths_to_1": 1.0, "rollout/lengths_to_8": 3.0}
        recorder.log(step, values)
        record = {"prompt": f"p{step}", "completion": "<script>x</script>", "reward": step % 2}
        recorder.samples(step, [{**record, "stop": "length" if step % 3 else "eos", "group": step}])
    return recorder


@contextmanager
def served(folders: list[Path], host: str = "127.0.0.1"):
    with made_server(folders, host, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server: ViewServer, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def ask(server: ViewServer, path: str, **query: object):
    status, data = get(server, f"{path}?{urlencode(query, doseq=True)}")
    assert status == 200, data
    return json.loads(data)


def test_a_run_is_followed_while_it_goes_on(tmp_path):
    run = WatchedRun(tmp_path, "run")
    assert run.measured() == [] and run.stamp() == run.stamp()
    recorder = recorded(tmp_path, 3)
    before = run.stamp()
    assert run.curves(["reward/mean"], 0, 99, 100) == {"reward/mean": ([0, 1, 2], [0, 0.1, 0.2])}
    recorder.log(2, {"eval/reward": 0.5})  # an evaluation adds to the last line
    recorder.log(3, {"reward/mean": 7.0})
    assert run.stamp() != before
    assert run.curves(["eval/reward"], 0, 99, 100) == {"eval/reward": ([2], [0.5])}
    assert run.curves(["reward/mean"], 2, 3, 100)["reward/mean"] == ([2, 3], [0.2, 7.0])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "reward/mean": ')  # half a line
        file.flush()
        run.stamp()
        assert run.curves(["reward/mean"], 4, 4, 9)["reward/mean"] == ([], [])
        file.write(b"8.0}\n")
    run.stamp()
    assert run.curves(["reward/mean"], 4, 4, 9)["reward/mean"] == ([4], [8.0])
    recorder.close()


def test_what_a_resumed_run_takes_back_is_taken_off_the_page(tmp_path):
    recorded(tmp_path, 6).close()
    run = WatchedRun(tmp_path, "run")
    run.stamp()
    with recorded_again(tmp_path):
        run.stamp()
        assert run.curves(["reward/mean"], 0, 99, 100)["reward/mean"][0] == [0, 1, 2, 3]
        assert run.samples(SampleFilter(), 0, 99)[0] == 4


@contextmanager
def recorded_again(root: Path):
    recorder = recorded(root, 4, resume=2)
    yield
    recorder.close()


def test_a_long_curve_keeps_its_spikes_and_is_whole_close_up(tmp_path):
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(10_000):
            value = 99.0 if step == 7_777 else -99.0 if step == 5 else 0.5
            file.write(json.dumps({"step": step, "reward/mean": value}) + "\n")
    run = WatchedRun(tmp_path, "run")
    run.stamp()
    steps, values = run.curves(["reward/mean"], 0, 10**9, 600)["reward/mean"]
    assert len(steps) <= 600 and steps == sorted(set(steps))
    assert values[steps.index(7_777)] == 99 and values[steps.index(5)] == -99
    close = run.curves(["reward/mean"], 7_700, 7_800, 600)["reward/mean"]
    assert close[0] == list(range(7_700, 7_801))


def test_samples_are_found_by_text_step_reward_and_end(tmp_path):
    recorded(tmp_path, 12).close()
    run = WatchedRun(tmp_path, "run")
    run.stamp()
    found, page = run.samples(SampleFilter(), 0, 5)
    assert found == 12 and [s["step"] for _, s in page] == [11, 10, 9, 8, 7], "the newest first"
    assert [s["step"] for _, s in run.samples(SampleFilter(), 10, 5)[1]] == [1, 0]
    assert run.samples(SampleFilter(text="P1"), 0, 9)[0] == 3  # p1, p10, p11
    wanted = SampleFilter(first_step=3, last_step=8, least_reward=0.5, stop="length")
    assert [s["step"] for _, s in run.samples(wanted, 0, 9)[1]] == [7, 5]
    assert run.samples(SampleFilter(most_reward=0.0), 0, 0)[0] == 6


def test_samples_are_sorted_by_reward_and_advantage_and_found_by_their_number(tmp_path):
    """The advantage is the mean over the recorded tokens; a sample without any comes last."""
    recorder = Recorder(tmp_path, tensorboard=False)
    advantages = [[-4.0, None, 2.0], [2.0, 4.0], None, [0.5]]
    for step, listed in enumerate(advantages):
        tokens = {} if listed is None else {"tokens": {"advantage": listed}}
        reward = [0.5, 0.0, 1.0, 0.5][step]
        recorder.samples(step, [{"prompt": "p", "completion": "c", "reward": reward, **tokens}])
    recorder.close()
    run = WatchedRun(tmp_path, "run")

    def steps(order):
        return [sample["step"] for _, sample in run.samples(SampleFilter(), 0, 9, order)[1]]

    assert steps("newest") == [3, 2, 1, 0] and steps("oldest") == [0, 1, 2, 3]
    assert steps("reward") == [2, 3, 0, 1] and steps("reward_up") == [1, 3, 0, 2]
    assert steps("advantage") == [1, 3, 0, 2] and steps("advantage_up") == [0, 3, 1, 2]
    found, ((number, sample),) = run.samples(SampleFilter(number=2), 0, 9)
    assert (found, number, sample["step"]) == (1, 2, 2)


TEXTS = st.text(st.sampled_from('a"\\:,{} 1é\n'), max_size=12) | st.just('"reward": 9, "stop": "b"')
NUMBERS = st.floats() | st.sampled_from([0, 1, -1.5, 1e-9, 2.5e30])


@pytest.mark.full
@given(TEXTS, TEXTS, NUMBERS, st.dictionaries(TEXTS | st.just("stop"), NUMBERS, max_size=2))
def test_a_line_of_samples_is_chosen_by_what_its_json_says(prompt, completion, reward, parts):
    record = {"step": 7, "prompt": prompt, "completion": completion, "reference": prompt}
    record |= {"reward": reward, "parts": parts, "length": 3, "stop": "eos", "tokens": {"a": 1}}
    raw = encode(record).encode()
    said = json.loads(raw)["reward"]
    number = said if isinstance(said, int | float) else 0.0
    assert sort_values(raw) == (7, number, "eos")


def test_samples_of_other_writers_are_read_too():
    assert sort_values(b'{"reward": 2, "step": 5}') == (5, 2.0, "")
    assert sort_values(b'{"step": 5, "reward": "nan", "stop": "eos"}') == (5, 0.0, "eos")
    assert sort_values(b"no JSON") == (0, 0.0, "")


def test_texts_are_found_whatever_they_hold(tmp_path):
    texts = ["plain", 'a "quote"', "back\\slash", "éCLAIR über", "two\nlines"]
    recorder = Recorder(tmp_path, tensorboard=False)
    recorder.samples(0, [{"prompt": text, "completion": "", "reward": 1.0} for text in texts])
    recorder.close()
    run = WatchedRun(tmp_path, "run")
    run.stamp()
    for text in texts:
        found, ((_, sample),) = run.samples(SampleFilter(text=text[1:].upper()), 0, 9)
        assert found == 1 and sample["prompt"] == text


def test_the_server_tells_what_the_page_asks(tmp_path):
    for name in ("a", "b"):
        recorded(tmp_path / name, 4).close()
    (tmp_path / "a" / "policy").mkdir()
    with served([tmp_path]) as server:
        runs = ask(server, "/api/runs")["runs"]
        assert [(r["name"], r["state"]) for r in runs] == [("a", "finished"), ("b", "stopped")]
        assert [(r["step"], r["number"], r["tags"]) for r in runs] == [(3, 0, []), (3, 1, [])]
        (learning, *_) = ask(server, "/api/layout")["sections"]
        assert learning["charts"][0]["curves"] == [["reward/mean", "mean"]]
        curves = ask(server, "/api/curves", run="b", key=["reward/mean", "no/such"], last=1)
        assert curves == {"b": {"reward/mean": [[0, 1], [0.0, 0.1]]}}
        both = ask(server, "/api/curves", run=["a", "b"], key="reward/mean", points=2)
        assert {name: one["reward/mean"] for name, one in both.items()} == {
            name: [[0, 3], [0.0, 0.3]] for name in ("a", "b")
        }
        told = ask(server, "/api/summary", run="a")
        assert told["lengths"] == {"1": 4.0, "5 to 8": 12.0}
        (age,) = told["ages"]
        assert (age["age"], age["tokens"]) == (1, 32.0)
        keys = [row["key"] for row in ask(server, "/api/extents", run="a")]
        counts = ["rollout/lengths_to_1", "rollout/lengths_to_8"]
        assert keys == ["reward/mean", *counts, "staleness/tokens_lag_1"]
        answer = ask(server, "/api/samples", run="a", count=1, text="script")
        assert answer["found"] == 4 and answer["samples"][0]["prompt"] == "p3"
        assert answer["numbers"] == [3]
        status, table = get(server, "/metrics.csv?run=a&run=b&key=reward/mean")
        lines = table.decode().splitlines()
        assert status == 200 and lines[0] == "run,step,tokens,time,reward/mean"
        assert lines[1] == "a,0,,,0.0" and lines[-1] == "b,3,,,0.3" and len(lines) == 9
        for path in FILES:
            assert get(server, path)[0] == 200
        assert {f"/{name}" for name in MODULES} == {path for path in FILES if path.endswith(".js")}


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/../../etc/passwd", 404),
        ("/page/%2e%2e/server.py", 404),
        ("/api/curves", 400),
        ("/api/curves?run=none", 400),
        ("/api/samples?run=a&first=x", 400),
        (f"/api/curves?run={quote('../a')}", 400),
    ],
)
def test_what_is_not_served_is_refused(tmp_path, path, status):
    recorded(tmp_path / "a", 1).close()
    with served([tmp_path / "a"]) as server:
        assert get(server, path)[0] == status


def test_no_other_name_of_this_machine_is_answered(tmp_path):
    recorded(tmp_path, 1).close()
    with served([tmp_path]) as server:
        assert get(server, "/api/runs", Host="evil.example")[0] == 403
        assert get(server, "/api/runs", Host=f"localhost:{server.server_port}")[0] == 200


def test_on_other_addresses_a_token_is_needed(tmp_path):
    recorded(tmp_path, 1).close()
    with served([tmp_path], host="0.0.0.0") as server:
        assert f"?token={server.token}" in server.address and len(server.token) > 16
        assert get(server, "/api/runs")[0] == 401
        assert get(server, "/api/runs?token=wrong")[0] == 401
        assert get(server, f"/api/runs?token={server.token}")[0] == 200
        assert get(server, "/")[0] == 200, "the page itself holds nothing of the runs"
    assert is_loopback("::1") and is_loopback("localhost") and not is_loopback("0.0.0.0")


def test_a_folder_that_is_not_there_and_an_address_that_is_not_free_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        made_server([tmp_path / "gone"], "127.0.0.1", 0)
    with pytest.raises(ConfigError, match="nothing can listen there"):
        made_server([tmp_path], "127.0.0.1", 99999)


def test_a_run_that_is_not_compared_is_not_read_whole(tmp_path):
    """Its newest step and its metrics come from the ends of the file, also of a long one."""
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(5000):
            rare = {"eval/accuracy": 1.0} if step == 0 else {}
            line = {"step": step, "reward/mean": step / 2, "filler": "x" * 40, **rare}
            file.write(json.dumps(line) + "\n")
    run = WatchedRun(tmp_path, "run")
    assert run.newest() == (4999, 0) and run.known() == ["eval/accuracy", "reward/mean"]
    assert run._metrics.columns == {}
    assert run.points("reward/mean")[-1] == (4999, 2499.5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5000, "loss": 1}\n{"step": 5001, "loss"')
    assert run.newest() == (5000, 0) and run.known() == ["eval/accuracy", "loss", "reward/mean"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(2, 60))
@example([0.0, 0.0, 5.0, 9.0, 1.0], 4)  # a shorter part before a higher one
def test_a_thinned_curve_has_the_extremes_of_each_part(values, most):
    """The reference: plain Python over the same parts."""
    column = MetricColumn()
    for step, value in enumerate(values):
        column.put(step, value)
    steps, kept = column.between(0, 10**9, most)
    assert kept == [values[step] for step in steps] and len(steps) <= max(most, len(values))
    if len(values) <= most:
        assert steps == list(range(len(values)))
        return
    parts, wanted = most // 2, set()
    for part in range(parts):
        own = range(part * len(values) // parts, (part + 1) * len(values) // parts)
        wanted |= {min(own, key=values.__getitem__), max(own, key=values.__getitem__)}
    assert steps == sorted(wanted)


def test_the_log_is_read_in_whole_lines_from_its_end(tmp_path):
    lines = [f"2026-01-01 00:00:00Z INFO    line {number}" for number in range(100)]
    run = WatchedRun(tmp_path, "run")
    assert run.log_text(None, 100) == ("", 0, 0)
    (tmp_path / "run.log").write_text("\n".join(lines) + "\n")
    end, begin, size = run.log_text(None, 500)
    assert end.splitlines() == lines[-len(end.splitlines()) :] and 400 < len(end) <= 500
    assert size == (tmp_path / "run.log").stat().st_size == begin + len(end)
    before, first, _ = run.log_text(begin, 10**6)
    assert first == 0 and before + end == (tmp_path / "run.log").read_text()


def test_an_adapter_has_the_common_log_and_starts(tmp_path):
    folder = tmp_path / "both" / "few"
    folder.mkdir(parents=True)
    (tmp_path / "both" / "config.yaml").write_text("")
    (tmp_path / "both" / "run.log").write_text("common\n")
    (tmp_path / "both" / "starts.jsonl").write_text('{"started": 5.0, "host": "h"}\nno JSON\n{}\n')
    run = WatchedRun(folder, "few")
    assert run.log_text(None, 100)[0] == "common\n"
    assert run.starts() == [{"started": 5.0, "host": "h"}]


def test_a_running_run_is_recognized_by_its_lock_without_taking_it(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    if not Path("/proc/locks").exists():
        pytest.skip("no /proc/locks on this system")
    run = WatchedRun(tmp_path, "run")
    with (tmp_path / "lock").open("a") as file:
        assert run.state() == "stopped"
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run.state() == "running"
    assert run.state() == "stopped"
