"""The spans of real runs: well formed, and in agreement with the run's metrics."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from jaxrl_async.config.load import load
from jaxrl_async.errors import JaxrlError, StopTraining
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.run.loop import train

pytestmark = pytest.mark.full

TINY = [
    "model.architecture={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 16}",
    "sampler={slots: 8, max_new_tokens: 8}",
    "algorithm={group_size: 4, groups_per_step: 2}",
    "trainer={micro_batch_tokens: 512, warmup_steps: 1}",
    "eval.every=2",
    "metrics={peak_flops: 1.0e+9, tensorboard: false, spans: true}",
]
RL = [*TINY, "task=guess_number", "warm_start={steps: 2, batch_size: 4}", "run.steps=4"]


def tracks_of(path: Path) -> dict[str, list[dict]]:
    """Return the spans of each track; fail unless they are nested or apart."""
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["tid"]}
    assert len(set(names.values())) == len(names)
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[names[event["tid"]]].append(event)
    for name, spans in tracks.items():
        open_until: list[float] = []
        for one in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
            end = one["ts"] + one["dur"]
            while open_until and open_until[-1] <= one["ts"] + 0.01:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.01, (name, one)
            open_until.append(end)
    return dict(tracks)


def seconds(spans: list[dict], name: str) -> float:
    return sum(e["dur"] for e in spans if e["name"] == name) / 1e6


def test_the_spans_of_a_run_agree_with_its_metrics(tmp_path: Path) -> None:
    folder = train(load({"run": {"dir": str(tmp_path)}}, RL))
    tracks = tracks_of(folder / "trace.json")
    lines = read_lines(folder / "metrics.jsonl")[1:]
    trainer = tracks["trainer"]
    for name, key in (("step", "time/step_s"), ("publish", "time/publish_s")):
        assert seconds(trainer, name) == pytest.approx(sum(line[key] for line in lines), abs=1e-4)
    trained = sum(line["time/train_s"] for line in lines)  # with what drawing took but for waiting
    assert seconds(trainer, "learn") == pytest.approx(trained, rel=0.05, abs=0.05)
    assert {e["args"]["version"] for e in trainer if e["name"] == "learn"} == {1, 2, 3, 4}
    assert seconds(trainer, "evaluate") >= sum(x.get("time/eval_s", 0) for x in lines)
    (sampler,) = (spans for name, spans in tracks.items() if name.startswith("sampler"))
    begun = min(e["ts"] for e in trainer if e["name"] == "step")
    ended = max(e["ts"] + e["dur"] for e in trainer if e["name"] == "step")
    blocks = [e for e in sampler if e["name"] == "block" and begun <= e["ts"] < ended]
    busy, since = 0.0, read_lines(folder / "metrics.jsonl")[0]["time/elapsed_s"]
    for line in lines:
        busy += line["sampler/busy_share"] * (line["time/elapsed_s"] - since)
        since = line["time/elapsed_s"]
    longest = max(e["dur"] for e in blocks) / 1e6
    assert seconds(blocks, "block") == pytest.approx(busy, abs=2 * longest + 0.05)
    assert {e["name"] for e in sampler} >= {"block", "prefill", "wait for the block", "swap"}
    lanes = {name.rstrip("0123456789 ") for name in tracks}
    assert lanes >= {"gate", "scorer", "environment", "weights: transfer", "weights: live"}
    live = [e["args"]["version"] for n, s in tracks.items() if n.startswith("weights: live")
            for e in s]  # fmt: skip
    assert sorted(live) == [1, 2, 3, 4]
    assert "MainThread" in tracks, "the warm start's updates"
    assert [e["args"]["number"] for e in tracks["MainThread"] if e["name"] == "update"] == [1, 2]


@pytest.mark.exhaustive
def test_a_run_that_fails_leaves_its_spans(tmp_path: Path) -> None:
    def fails(step, values):
        if step == 2:
            raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        train(load({"run": {"dir": str(tmp_path)}}, RL), fails)
    tracks = tracks_of(tmp_path / "run" / "trace.json")
    assert [e["args"]["version"] for e in tracks["trainer"] if e["name"] == "learn"] == [1, 2]


@pytest.mark.exhaustive
def test_a_run_that_is_refused_leaves_the_spans_of_the_one_that_is_there(tmp_path: Path) -> None:
    given = {"run": {"dir": str(tmp_path)}}
    words = [*TINY, "warm_start.steps=0", "run.steps=1", "eval.every=0"]
    trace = train(load(given, words)) / "trace.json"
    before = trace.read_bytes()
    for more in ("run.resume=true", "run.overwrite=true"):
        with pytest.raises(JaxrlError, match="bad reward"):
            reward = f"reward.function={tmp_path / 'reward.py'}:refused"
            (tmp_path / "reward.py").write_text("raise ValueError('bad reward')")
            train(load(given, [*words, "run.steps=2", more, reward]))
        assert trace.read_bytes() == before


@pytest.mark.exhaustive
def test_sampler_processes_write_their_spans_beside_their_output(tmp_path: Path) -> None:
    """On the same clock as the trainer's."""
    words = [*RL, "mesh.samplers_in=processes", f"run.dir={tmp_path}", "run.steps=2"]
    (tmp_path / "c.yaml").write_text("", encoding="utf-8")
    command = [sys.executable, "-m", "jaxrl_async.train", str(tmp_path / "c.yaml"), *words]
    subprocess.run(command, check=True, timeout=500)
    trainer = tracks_of(tmp_path / "run" / "trace.json")["trainer"]
    tracks = tracks_of(tmp_path / "run" / "samplers" / "sampler-0.trace.json")
    (blocks,) = ([e for e in t if e["name"] == "block"] for t in tracks.values() if len(t) > 1)
    first, last = min(e["ts"] for e in trainer), max(e["ts"] + e["dur"] for e in trainer)
    assert any(first < e["ts"] < last for e in blocks)


@pytest.mark.exhaustive
def test_supervised_updates_have_spans(tmp_path: Path) -> None:
    def leaves(step, values):
        if step == 2:
            raise StopTraining

    words = [*TINY, "run.job=sft", "sft.batch_size=4", "run.steps=3", "data.addition.eval_size=4"]
    folder = train(load({"run": {"dir": str(tmp_path)}}, words), leaves)
    (spans,) = tracks_of(folder / "trace.json").values()
    assert [e["args"]["number"] for e in spans if e["name"] == "update"] == [1, 2]
    assert {e["name"] for e in spans} >= {"update", "evaluate", "save"}
