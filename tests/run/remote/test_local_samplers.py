"""Sampler processes that a run starts itself; these end at once, by a wrong command line."""

import time

import pytest

from jaxrl_async.config.schema import FaultsSection
from jaxrl_async.errors import RolloutError
from jaxrl_async.run.remote.local_samplers import LocalSamplers
from jaxrl_async.run.remote.pinning import Place

NO_SUCH_CORE = Place(environment={}, cores=(99999,))


def test_processes_that_end_are_started_again_and_then_given_up_with_their_last_words(tmp_path):
    counted = []
    processes = LocalSamplers(
        address="127.0.0.1:1",
        places=[NO_SUCH_CORE],
        faults=FaultsSection(sampler_restarts=1, backoff_s=0.01),
        secret="a secret",
        logs=tmp_path,
        environment={},
        count=counted.append,
    )
    processes.start()
    until = time.monotonic() + 30
    try:
        with pytest.raises(RolloutError, match="--cores 99999: give numbers of cores"):
            while time.monotonic() < until:
                processes.look_after()
                time.sleep(0.02)
    finally:
        processes.close()
    assert counted == ["sampler_process_ends", "sampler_process_ends", "samplers_lost"]
    assert "a secret" not in (tmp_path / "sampler-0.log").read_text()


def test_what_was_closed_before_it_began_starts_nothing(tmp_path):
    processes = LocalSamplers(
        address="127.0.0.1:1",
        places=[NO_SUCH_CORE],
        faults=FaultsSection(),
        secret="",
        logs=tmp_path,
        environment={},
        count=lambda name: None,
    )
    processes.close()
    processes.start()
    assert [child.process for child in processes.children] == [None]
