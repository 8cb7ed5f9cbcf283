"""Traces of JAX's profiler of chosen steps (run.profile), as XProf and Perfetto read them."""

import gzip
import json
import threading
import time
import urllib.request
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxrl_async import profiling
from jaxrl_async.config.load import load
from jaxrl_async.errors import ConfigError
from jaxrl_async.metrics.trace_file import SUFFIXES, sampler_process, traces_of, write_trace
from jaxrl_async.profiling import ProcessTrace, ProfileError, StepTraces
from jaxrl_async.run.loop import train
from jaxrl_async.view.page_server import ViewServer
from jaxrl_async.view.run_list import RunList

TINY = [
    "model.architecture={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 16}",
    "sampler={slots: 8, max_new_tokens: 8}",
    "algorithm={group_size: 4, groups_per_step: 2}",
    "trainer={micro_batch_tokens: 512, warmup_steps: 1}",
    "eval.every=0",
    "metrics={peak_flops: 1.0e+9, tensorboard: false}",
]
SYNCHRONOUS = "staleness.max_staleness=0"  # the answers of a step are drawn within it
RL = [
    *TINY,
    SYNCHRONOUS,
    "task=guess_number",
    "warm_start={steps: 1, batch_size: 4}",
    "run.steps=3",
]


def events_of(path: Path) -> list[dict]:
    """Return the complete events of a trace that Perfetto opens."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def names(path: Path) -> str:
    return "\n".join(event["name"] for event in events_of(path))


def work() -> None:
    jax.jit(lambda x: x @ x)(jnp.ones((8, 8))).block_until_ready()


@pytest.mark.full
def test_a_run_takes_the_traces_of_its_steps_and_its_report_links_them(tmp_path: Path) -> None:
    folder = train(load({"run": {"dir": str(tmp_path), "profile": [2, 3]}}, RL))
    session = folder / "profile" / "plugins" / "profile"
    assert sorted(p.name for p in session.iterdir()) == ["step_2", "step_3"]
    for step in (2, 3):
        traces = session / f"step_{step}"
        assert sorted(p.name for p in traces.iterdir()) == [
            "trainer.trace.json.gz", "trainer.xplane.pb",
        ]  # fmt: skip
        events = events_of(traces / "trainer.trace.json.gz")
        marks = [e["args"]["step_num"] for e in events if e["name"] == "step"]
        assert marks == [str(step)], "the step is marked once, with its number"
        seen = names(traces / "trainer.trace.json.gz")
        assert "_apply_sum" in seen, "the trainer's update"
        assert "wait for the block" in seen, "the sampler's blocks, of a thread of this process"
        assert b"step" in (traces / "trainer.xplane.pb").read_bytes()
    text = (folder / "report.html").read_text("utf-8")
    assert "profile/plugins/profile/step_2/trainer.trace.json.gz" in text


@pytest.mark.full
def test_sampler_processes_send_theirs(tmp_path: Path) -> None:
    given = {"run": {"dir": str(tmp_path), "profile": [2]}, "mesh": {"samplers_in": "processes"}}
    folder = train(load(given, [*RL, "run.steps=4"]))
    traces = folder / "profile" / "plugins" / "profile" / "step_2"
    assert sorted(p.name for p in traces.glob("*.pb")) == [
        "sampler-0.xplane.pb",
        "trainer.xplane.pb",
    ]
    assert "wait for the block" in names(traces / "sampler-0.trace.json.gz")
    assert "wait for the block" not in names(traces / "trainer.trace.json.gz"), "another process"


@pytest.mark.full
def test_a_job_without_rollouts_takes_them_too(tmp_path: Path) -> None:
    sft = ["run.job=sft", *(x for x in TINY if not x.startswith("algorithm")), "run.steps=2"]
    folder = train(load({"run": {"dir": str(tmp_path), "profile": [2]}}, sft))
    ((step, file, size),) = traces_of(folder)
    assert (step, Path(file).name) == (2, "trainer.trace.json.gz") and size > 0


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        ([0], "a whole number >= 1"),
        ([2, 2], "different steps up to run.steps"),
        ([4], "different steps up to run.steps (3)"),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], "names 9 steps, and at most 8 are allowed"),
        (["two"], "a whole number >= 1"),
    ],
)
def test_steps_that_are_never_made_are_refused(profile: list, says: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.profile") as found:
        load({"run": {"profile": profile}}, [*RL, "run.steps=9"] if len(profile) == 9 else RL)
    assert says in str(found.value)


@pytest.mark.full
def test_a_process_has_one_trace_at_a_time_and_the_run_continues(tmp_path: Path, caplog) -> None:
    first = ProcessTrace(60.0)
    with pytest.raises(ProfileError, match="another trace of this process"):
        ProcessTrace(60.0)
    with StepTraces(tmp_path, [1]).of(1):
        work()
    assert "step 1 of trainer is not traced: another trace" in caplog.text
    first.drop()
    with StepTraces(tmp_path, [1]).of(1):
        work()
    assert [step for step, *_ in traces_of(tmp_path)] == [1]


@pytest.mark.full
def test_a_step_that_fails_leaves_its_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="torn"), StepTraces(tmp_path, [7]).of(7):
        work()
        raise ValueError("torn")
    assert [step for step, *_ in traces_of(tmp_path)] == [7]
    ProcessTrace(60.0).drop()  # nothing is held


@pytest.mark.full
def test_a_long_wait_for_groups_gives_the_update_a_trace_of_its_own(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(profiling, "MOST_S", 0.05)
    traces = StepTraces(tmp_path, [1])
    with traces.of(1):
        trace = traces._trace
        while not trace.timed_out:
            time.sleep(0.01)
        monkeypatch.setattr(profiling, "MOST_S", 60.0)
        traces.before_update()
        with jax.profiler.TraceAnnotation("the update itself"):
            work()
    found = {Path(file).name: tmp_path / file for _, file, _ in traces_of(tmp_path)}
    assert set(found) == {"trainer.trace.json.gz", "trainer-update.trace.json.gz"}
    assert "the update itself" in names(found["trainer-update.trace.json.gz"])
    assert "the update itself" not in names(found["trainer.trace.json.gz"])


@pytest.mark.parametrize("name", ["trainer", "trainer-update", "trainer-1", ".trainer"])
def test_a_sampler_that_is_called_as_the_trainer_leaves_its_trace_alone(
    tmp_path: Path, name: str
) -> None:
    ours, theirs = dict.fromkeys(SUFFIXES, b"ours"), dict.fromkeys(SUFFIXES, b"theirs")
    trainer = name.lstrip(".")
    write_trace(tmp_path, 1, trainer, ours)
    write_trace(tmp_path, 1, sampler_process(name), theirs)
    write_trace(tmp_path, 1, sampler_process(f"sampler-{trainer}"), theirs)
    found = {Path(file).name: (tmp_path / file).read_bytes() for _, file, _ in traces_of(tmp_path)}
    assert found == {
        f"{trainer}.trace.json.gz": b"ours",
        f"sampler-{trainer}.trace.json.gz": b"theirs",
        f"sampler-sampler-{trainer}.trace.json.gz": b"theirs",
    }
    assert sampler_process("sampler-0") == "sampler-0"


@pytest.mark.full
def test_the_page_serves_traces_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_trace(root, 3, "../evil name", {SUFFIXES[0]: b"x", SUFFIXES[1]: b"whole"})
    ((step, file, size),) = traces_of(root)
    assert (step, size) == (3, 5) and (root / file).resolve().is_relative_to(root)
    (root / "secret").write_text("secret")
    (root / "config.yaml").write_text("")
    server = ViewServer(RunList([root]), "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        identity = json.loads(urllib.request.urlopen(f"{address}/api/identity?run=run").read())
        assert identity["traces"] == [{"step": 3, "file": file, "bytes": 5}]
        assert urllib.request.urlopen(f"{address}/file?run=run&file={file}").read() == b"whole"
        for other in ("secret", "../run/secret", "profile", f"{file}/../x"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{address}/file?run=run&file={other}")
    finally:
        server.shutdown()
        server.server_close()
