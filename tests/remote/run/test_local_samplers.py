"""The processes that a run starts itself: started again with a pause, given up, ended."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxrl_async.config.schema import FaultsSection
from jaxrl_async.errors import RolloutError
from jaxrl_async.metrics.health import HEALTH_VARIABLE
from jaxrl_async.remote.run import local_samplers
from jaxrl_async.remote.run.local_samplers import LocalSamplers
from jaxrl_async.run.pinning import ProcessPlacement

pytestmark = pytest.mark.full

PLACEMENTS = (
    ProcessPlacement(environment={"CHIP": "0"}, cores=(0,)),
    ProcessPlacement(environment={"CHIP": "1"}),
)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not holds():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


class Made:
    """Processes of a shell script in place of the sampler."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, script: str, restarts: int) -> None:
        program = folder / "program"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        patch.setattr(local_samplers.sys, "executable", str(program))
        patch.setattr(local_samplers, "POLL_S", 0.01)
        self.counted: Counter[str] = Counter()
        self.samplers = LocalSamplers(
            address="127.0.0.1:7",
            placements=PLACEMENTS,
            faults=FaultsSection(sampler_restarts=restarts, backoff_s=0.01),
            secret="word",
            logs=folder / "samplers",
            environment={"CACHE": "here"},
            count=lambda name: self.counted.update([name]),
        )
        self.error: RolloutError | None = None
        self.samplers.start()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        try:
            self.samplers.run()
        except RolloutError as error:
            self.error = error

    def output(self, number: int) -> str:
        return (self.samplers.logs / f"sampler-{number}.log").read_text()


Make = Callable[..., Made]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Made] = []

    def one(script: str, restarts: int = 2) -> Made:
        made.append(Made(tmp_path, monkeypatch, script, restarts))
        return made[-1]

    monkeypatch.setattr(local_samplers, "CLOSE_S", 1.0)
    yield one
    for each in made:
        each.samplers.close()
        each.thread.join()


def test_each_gets_a_placement_a_name_and_the_secret_not_on_the_command_line(
    make: Make,
) -> None:
    made = make('echo "$@"; echo "$CHIP $CACHE $JAXRL_ASYNC_SECRET"; exec sleep 60')
    until(lambda: all(made.output(i).count("\n") == 2 for i in range(2)))
    first, second = made.output(0).splitlines(), made.output(1).splitlines()
    assert first[1] == "0 here word" and second[1] == "1 here word"
    assert "--join 127.0.0.1:7 --once" in first[0] and "word" not in first[0]
    assert "--name sampler-0 --cores 0" in first[0]
    assert "--name sampler-1" in second[0] and "--cores" not in second[0]


def test_the_trainers_own_address_for_questions_of_health_is_not_theirs(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEALTH_VARIABLE, "127.0.0.1:8486")
    made = make(f'echo "health ${HEALTH_VARIABLE}"; exec sleep 60')
    until(lambda: made.output(0).endswith("\n"))
    assert made.output(0) == "health \n"


def test_what_is_killed_is_started_again_and_close_ends_all(make: Make) -> None:
    made = make("exec sleep 60")
    first, second = made.samplers.children
    assert first.process is not None and second.process is not None
    old = first.process.pid
    os.kill(old, signal.SIGKILL)
    until(lambda: first.restarts == 1 and first.process.pid != old)
    assert made.counted == {"sampler_process_ends": 1} and second.restarts == 0
    made.samplers.close()
    made.thread.join(10)
    assert not made.thread.is_alive() and made.error is None
    ended = {first.process.returncode, second.process.returncode}
    assert ended <= {-signal.SIGTERM, -signal.SIGKILL}
    until(lambda: made.counted["sampler_process_ends"] == 1)


def test_those_that_always_fail_are_given_up_with_their_last_words(make: Make) -> None:
    made = make("echo no such model >&2; exit 3", restarts=2)
    made.thread.join(30)
    assert made.error is not None
    assert "ended 3 times in a row" in str(made.error) and "no such model" in str(made.error)
    assert "sampler-1.log" in str(made.error) and "faults.sampler_restarts" in str(made.error)
    assert made.counted == {"sampler_process_ends": 6, "samplers_lost": 2}
    assert made.output(0).count("no such model") == 3


def test_one_that_ends_while_the_run_closes_is_not_started_again(make: Make) -> None:
    made = make("exec sleep 60")
    made.samplers.stop()
    made.thread.join(10)
    first = made.samplers.children[0]
    assert first.process is not None
    first.process.terminate()
    made.samplers.close()
    assert first.process.returncode == -signal.SIGTERM and not made.counted
