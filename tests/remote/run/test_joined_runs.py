"""Whole runs whose samplers are separate processes: joined, killed, removed, rejoined."""

import re
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
from joined_run import TINY, joined_run
from runs import config_of, many_digits, run_job, weights_of

from jaxrl_async.audit import audit_run
from jaxrl_async.metrics.metric import comparable
from jaxrl_async.train_command import RESUME

pytestmark = pytest.mark.full

SHORT = (*TINY, "staleness.max_staleness=0", "checkpoint.every=0", "run.steps=3", "mesh.samplers=2")
LONG = ("staleness.max_staleness=2", "checkpoint={every: 1, keep: 2}")


def test_two_processes_give_the_metrics_and_weights_of_two_threads_bit_by_bit(
    tmp_path: Path,
) -> None:
    rewarded = many_digits(tmp_path)
    threads = (*SHORT, rewarded, "run.name=threads")
    processes = (*SHORT, rewarded, "run.name=processes", "mesh.samplers_in=processes")
    expected = run_job("addition", tmp_path, *threads)
    got = run_job("addition", tmp_path, *processes, "remote.min_samplers=2")
    assert [comparable(x) for x in got] == [comparable(x) for x in expected]
    assert sum(x["faults/samplers_joined"] for x in got) == 2
    assert got[-1]["reward/mean"] > 0
    one, other = (weights_of(config_of("addition", tmp_path, *s)) for s in (threads, processes))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[k], other[k]) for k in one)
    found = audit_run(tmp_path / "processes")
    assert not found.problems and found.steps == 3


@pytest.mark.exhaustive
def test_samplers_come_and_go_and_nothing_is_lost(tmp_path: Path) -> None:
    with joined_run(tmp_path, *LONG, "run.steps=40", "remote.wait_s=60") as run:
        run.train()
        run.until_said("trainer", "waiting for 1 samplers")
        run.sample("first")
        run.until_step(3)
        for name in ("second", "third"):
            run.sample(name)
        run.until(lambda: run.faults().get("samplers_joined") == 3)
        run.signal("first", signal.SIGTERM)
        assert run.code("first") == 75, "as the command's help says"
        run.signal("second", signal.SIGKILL)
        run.until(lambda: run.faults().get("samplers_cut_off") == 1)
        run.signal("third", signal.SIGINT)
        assert run.code("third") == 0
        run.until_said("trainer", "no sampler is available")
        run.sample("fourth")
        run.until_said("trainer", "a sampler is available again")
        assert run.code("trainer") == 0, run.said("trainer")
        assert run.code("fourth") == 0, "the run is finished"
        counted = run.faults()
        assert counted["samplers_joined"] == 4 and counted["samplers_left"] == 2
        assert run.step == 40 and not run.problems()


@pytest.mark.exhaustive
def test_a_killed_trainer_finds_its_samplers_again_and_more_of_them(tmp_path: Path) -> None:
    with joined_run(tmp_path, *LONG, "run.steps=24") as run:
        run.train()
        run.sample("first")
        run.until_step(6)
        run.signal("trainer", signal.SIGKILL)
        assert run.code("trainer") == -signal.SIGKILL
        run.running.pop("trainer")
        run.until_said("first", "waiting 600 s for it to come back")
        run.sample("second")
        run.train(*RESUME, "remote.min_samplers=2")
        run.until_step(12)
        assert run.code("trainer") == 0, run.said("trainer")
        assert run.code("first") == run.code("second") == 0
        assert not run.problems() and run.step == 24


@pytest.mark.exhaustive
def test_a_run_that_is_left_alone_ends_saved_and_continues_with_another_sampler(
    tmp_path: Path,
) -> None:
    with joined_run(tmp_path, *LONG, "run.steps=12", "checkpoint.every=100") as run:
        run.train("remote.wait_s=20")
        run.sample("first")
        run.until_step(4)
        run.signal("first")
        assert run.code("first") == 75 and run.code("trainer") == 1
        output = run.said("trainer")
        assert "no sampler is available, and none joined within 20 s (remote.wait_s)" in output
        assert "resume" in output and list((run.run / "checkpoints").glob("[0-9]*")), "it is saved"
        saved = run.step
        run.train(*RESUME)
        run.sample("second")
        assert run.code("trainer") == 0, run.said("trainer")
        assert run.step == 12 > saved and not run.problems()


@pytest.mark.exhaustive
def test_mistakes_of_a_new_sampler_are_errors_and_harm_no_other(tmp_path: Path) -> None:
    with joined_run(tmp_path, *LONG, "run.steps=1000") as run:
        run.sample("early", "--wait", "0.5")
        assert run.code("early") == 69  # unavailable
        assert re.search(r"no trainer .* within 0.5 s.*Check that it runs", run.said("early"), re.S)
        run.train()
        run.sample("first")
        run.until_step(1)
        run.sample("first-again", "--name", "first")
        run.sample("long", "--mesh", "context=2")
        run.sample("wide", "--mesh", "tensor=2")  # nothing is wrong with it
        run.sample("nowhere", "--wait", "0.5", join="127.0.0.1:9")
        for name, words in (
            ("first-again", "'first' has already joined: give each a different --name"),
            ("long", "context=2: a sampler decodes one token"),
            ("nowhere", "no trainer let this sampler join within 0.5 s at 127.0.0.1:9"),
        ):
            assert run.code(name) in (1, 2, 69), name
            output = run.said(name)
            assert words in output and "Traceback" not in output, output
        run.until_said("wide", "generating for run")
        run.until_step(run.step + 2)
        run.signal("trainer", signal.SIGTERM)
        assert run.code("trainer") == 75 and not run.problems()


@pytest.mark.exhaustive
def test_a_restarted_sampler_replaces_its_unresponsive_predecessor(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ways = ("remote.transfer=tcp", f"remote.data_port={port}", "remote.silence_s=50")
    with joined_run(tmp_path, *LONG, *ways, "run.steps=1000") as run:
        run.train()
        run.sample("first")
        run.until_step(1)
        for there in (port, port + 1):  # of the trainer, and of the sampler
            socket.create_connection(("127.0.0.1", there)).close()
        run.signal("first", signal.SIGSTOP)  # as if its machine were gone
        run.sample("again", "--name", "first", "--data-port", str(port + 40))
        run.until_said("trainer", "another first has joined in its place")
        run.until_step(run.step + 2)
        socket.create_connection(("127.0.0.1", port + 40)).close()
        counted = run.faults()
        assert counted["samplers_cut_off"] == 1 and counted["samplers_joined"] == 2
        run.signal("first", signal.SIGCONT)
        assert run.code("first") == 1, "it does not throw the other out again"
        assert "has already joined: give each a different --name" in run.said("first")
        run.until_step(run.step + 2)
        run.signal("trainer", signal.SIGTERM)
        assert run.code("trainer") == 75 and run.code("again") == 0
        assert run.faults()["samplers_joined"] == 2 and not run.problems()
