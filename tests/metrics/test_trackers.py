"""Trackers beside metrics.jsonl: what reaches them, and a tracker that fails."""

import json
import math
import sys
import threading
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
from mlflow_server import mlflow_server

from jaxrl_async import __version__
from jaxrl_async.config.load import load
from jaxrl_async.errors import MissingExtraError
from jaxrl_async.metrics import trackers
from jaxrl_async.metrics.recorder import Recorder, read_lines
from jaxrl_async.metrics.trackers import (
    TrackedRun,
    TrackedWriter,
    TrackerThread,
    check_trackers,
    remembered,
)
from jaxrl_async.run.folder import Paths, check_links
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.reporting import make_recorder


class Service:
    """A tracker that keeps what it is sent, and fails on demand."""

    name = "Service"

    def __init__(self, *, opens=0, logs=0, hangs=None):
        self.opens, self.logs, self.hangs = opens, logs, hangs
        self.got, self.began, self.ended = [], None, []

    def open(self, run):
        if self.opens:
            self.opens -= 1
            raise ConnectionError("not yet")
        self.began = run
        return run.continues or "id-1"

    def log(self, step, values):
        if self.hangs is not None:
            self.hangs.wait()
        if self.logs:
            self.logs -= 1
            raise ConnectionError("gone")
        self.got.append((step, dict(values)))

    def link(self):
        return "http://service/id-1"

    def close(self, failed):
        self.ended.append(failed)


def run_in(folder: Path, continues=None) -> TrackedRun:
    return TrackedRun(name="r", folder=folder, config={}, version="1", continues=continues)


def writer_to(service, folder, backoff_first_s=0.001, continues=None):
    thread = TrackerThread(service, run_in(folder, continues), backoff_first_s)
    return TrackedWriter(Recorder(folder, tensorboard=False), [thread])


def test_a_tracker_gets_what_the_file_gets_and_its_link_is_kept(tmp_path):
    service = Service()
    writer = writer_to(service, tmp_path)
    writer.log(1, {"reward/mean": 0.5})
    writer.log(2, {"reward/mean": 0.75})
    writer.samples(2, [{"prompt": "p"}])
    writer.close()
    writer.close()
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [{"step": step, **values} for step, values in service.got] == lines
    assert [line["reward/mean"] for line in lines] == [0.5, 0.75]
    assert service.ended == [False]
    assert remembered(tmp_path) == {"Service": {"id": "id-1", "link": "http://service/id-1"}}
    assert len(read_lines(tmp_path / "samples.jsonl")) == 1


def test_calls_that_fail_are_logged_once_and_made_again(tmp_path, caplog):
    service, arrived = Service(opens=2, logs=2), threading.Event()
    log = service.log
    service.log = lambda step, values: (log(step, values), arrived.set())
    writer = writer_to(service, tmp_path)
    writer.log(1, {"reward/mean": 0.5})
    assert arrived.wait(30)
    writer.close()
    assert [step for step, _ in service.got] == [1]
    assert caplog.text.count("not yet") == 1 and caplog.text.count("gone") == 1
    assert "lacks" not in caplog.text


def test_a_tracker_that_is_never_there_stops_nothing_and_what_it_lacks_is_logged(tmp_path, caplog):
    service = Service(opens=10**9)
    writer = writer_to(service, tmp_path)
    for step in (1, 2, 3):
        writer.log(step, {"reward/mean": 0.5})
    writer.close()
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 3
    assert "Service lacks 3 steps of this run; metrics.jsonl has all" in caplog.text
    assert remembered(tmp_path) == {} and service.got == []


def test_a_step_that_a_tracker_refuses_is_left_out_and_counted_in_the_metrics(tmp_path, caplog):
    service = Service(logs=trackers.TRIES)
    thread = TrackerThread(service, run_in(tmp_path), 0.001)
    writer = TrackedWriter(Recorder(tmp_path, tensorboard=False), [thread])
    took = threading.Event()
    log = service.log
    service.log = lambda step, values: (log(step, values), took.set())
    writer.log(1, {"reward/mean": 0.5})
    writer.log(2, {"reward/mean": 0.5})
    assert took.wait(30)
    writer.log(3, {"reward/mean": 0.5})
    writer.close()
    assert [step for step, _ in service.got] == [2, 3]
    last = read_lines(tmp_path / "metrics.jsonl")
    assert sum(line["faults/tracker_failures"] for line in last) == trackers.TRIES
    assert sum(line["faults/tracker_lost_steps"] for line in last) == 1
    assert "Service lacks 1 steps" in caplog.text


def test_a_tracker_that_hangs_holds_up_neither_the_run_nor_its_end(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trackers, "CLOSE_S", 0.05)
    monkeypatch.setattr(trackers, "MAX_WAITING", 2)
    hangs = threading.Event()
    writer = writer_to(Service(hangs=hangs), tmp_path)
    for step in range(1, 9):
        writer.log(step, {"reward/mean": 0.5})
    writer.close()
    hangs.set()
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 8
    assert "did not end within" in caplog.text and "lacks" in caplog.text


def test_a_run_that_fails_is_reported_as_failed(tmp_path):
    service = Service()
    with pytest.raises(RuntimeError), ExitStack() as closing:
        closing.callback(writer_to(service, tmp_path).close)
        raise RuntimeError("of the trainer")
    assert service.ended == [True]


def test_a_resumed_run_continues_what_it_began(tmp_path):
    writer_to(Service(), tmp_path).close()
    known = remembered(tmp_path)["Service"]["id"]
    service = Service()
    writer_to(service, tmp_path, continues=known).close()
    assert service.began.continues == "id-1"


@pytest.mark.parametrize("setting", ["wandb.project", "mlflow.experiment", "trackio.project"])
@pytest.mark.parametrize("folder_of_its_name", [False, True])
def test_a_package_that_is_missing_is_named_with_its_extra(
    tmp_path, monkeypatch, setting, folder_of_its_name
):
    """W&B makes a folder `wandb` wherever it runs, which Python could import."""
    name = setting.partition(".")[0]
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    if folder_of_its_name:
        (tmp_path / name).mkdir()
    config = load({}, [f"metrics.{setting}=p"])
    package = setting.partition(".")[0]
    with pytest.raises(MissingExtraError, match=rf"pip install 'jaxrl_async\[{package}\]'"):
        check_trackers(config.metrics)


def tracked(folder, *overrides):
    """Write two steps of a run as `train` does; return its configuration."""
    config = load({"run": {"name": "r", "dir": str(folder)}}, overrides)
    for resumed in (None, 1):
        made = make_recorder(config, Paths(folder / "r"), Lockstep(), resumed)
        made.log(1 if resumed is None else 2, {"reward/mean": 0.5, "train/loss": float("nan")})
        made.close()
    return config


@pytest.mark.full
def test_weights_and_biases_has_the_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracked(tmp_path, "metrics.wandb.project=p", "metrics.tensorboard=false")
    known = remembered(tmp_path / "r")["Weights & Biases"]
    found = [wandb_records(f) for f in sorted((tmp_path / "r").rglob("*.wandb"))]
    assert len(found) == 2, "one file for each start; `wandb sync` joins them by the id"
    assert all(run_id == known["id"] for run_id, _, _ in found)
    assert [history["step"] for _, _, history in found] == [1, 2]
    assert all(history["reward/mean"] == 0.5 for _, _, history in found)
    assert all(math.isnan(float(history["train/loss"])) for _, _, history in found)
    assert all(config["jaxrl_async"] == __version__ for _, config, _ in found)
    assert all(config["run"]["name"] == "r" for _, config, _ in found)
    assert known["link"].startswith("wandb sync ")
    check_links(tmp_path / "r")  # as a start does that continues the run


def wandb_records(path):
    """Return the run's id, its configuration and its only line of history."""
    from wandb.proto import wandb_internal_pb2

    run_id, config, history = "", {}, {}
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            run_id = record.run.run_id
            config |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
        for item in record.history.item:
            history[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return run_id, config, history


def log_records(data, block=32768):
    """Yield the records of LevelDB's log format, in which W&B writes after 7 bytes of its own."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield whole
            whole = b""


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # of MLflow's own
@pytest.mark.parametrize("served", [False, True], ids=["a store of SQLite", "a server"])
def test_mlflow_has_the_run(tmp_path, monkeypatch, served):
    pytest.importorskip("mlflow", reason="the extra [mlflow] is not installed")
    pytest.importorskip("sqlalchemy", reason="the extra [mlflow] is not installed")
    monkeypatch.chdir(tmp_path)
    with mlflow_server(tmp_path) if served else nullcontext("") as address:
        look_into_mlflow(tmp_path, address or f"sqlite:///{tmp_path / 'ml.db'}")


def look_into_mlflow(tmp_path: Path, uri: str) -> None:
    """Train a run that MLflow tracks, and query MLflow."""
    from mlflow import MlflowClient

    words = ("metrics.mlflow.experiment=e", f"metrics.mlflow.tracking_uri={uri}")
    config = tracked(tmp_path, *words, "metrics.tensorboard=false")
    known = remembered(tmp_path / "r")["MLflow"]
    client = MlflowClient(tracking_uri=uri)
    found = client.get_run(known["id"])
    assert found.info.status == "FINISHED" and found.info.run_name == "r"
    history = client.get_metric_history(known["id"], "reward/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 0.5)]
    assert math.isnan(client.get_metric_history(known["id"], "train/loss")[0].value)
    assert found.data.params["staleness.max_staleness"] == str(config.staleness.max_staleness)
    assert found.data.tags["jaxrl_async"] == __version__
    assert known["id"] in known["link"]


@pytest.mark.filterwarnings("ignore")  # of trackio's own
def test_trackio_has_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", minversion="0.5", reason="the extra [trackio] is not installed")
    tracked(tmp_path, "metrics.trackio.project=p", "metrics.tensorboard=false")
    known = remembered(tmp_path / "r")["trackio"]
    from trackio.sqlite_storage import SQLiteStorage

    lines = SQLiteStorage.get_logs("p", known["id"])
    assert [(line["step"], line["reward/mean"]) for line in lines] == [(1, 0.5), (2, 0.5)]
