"""One sampler over two real processes (gloo on the CPU) samples what one process does."""

import json
import os
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import hosts_worker
import jax
import numpy as np
import pytest
from compile_flags import QUICK_COMPILE
from hosts_worker import LONG, PROBE, SEED, SPEC, WAIT_S, Case, mesh_of, params_of, requests_of

from jaxrl_async.ports.run import Intake, NotYet, Unrecorded
from jaxrl_async.ports.weights import FixedWeights
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.types import VersionedParams

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
ENV = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": QUICK_COMPILE,
}


def start(folder: Path, *cases: dict[str, Any]) -> list[subprocess.Popen]:
    """The two processes of a sampler, which play these cases one after another."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    return [
        subprocess.Popen(
            [sys.executable, hosts_worker.__file__, address, str(i), json.dumps(cases), folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENV,
        )
        for i in range(2)
    ]


def ended(processes: list[subprocess.Popen], timeout_s: float) -> list[tuple[int, str]]:
    """Exit code and output of each; none is left running."""
    try:
        outputs = [p.communicate(timeout=timeout_s)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, out) for p, out in zip(processes, outputs, strict=True)]


class Prescribed(Unrecorded):
    """A Schedule that has what was recorded taken in at the same blocks."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.events = deque(events)

    def due(self, sampler: str, block: int, working: bool) -> Intake | NotYet:
        if not self.events or (working and block < self.events[0]["block"]):
            return Intake() if working else NotYet.NOT_YET
        event = self.events[0]
        assert block == event["block"], f"{block} blocks and nothing to do, before {event}"
        return Intake(
            requests=tuple(event["take"]),
            cancelled=tuple(event["cancel"]),
            version=event["version"],
        )

    def write(self, **event: Any) -> None:
        assert event == self.events.popleft()


class InOrder(FixedWeights):
    """A source that gives these versions, each when it is prescribed."""

    def __init__(self, updates: list[VersionedParams]) -> None:
        self._updates = deque(updates)

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        return self._updates.popleft()


def alone(case: Case, found: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """What one process samples on a mesh of the same shape, taking in the same between the same
    blocks; and the answers to LONG, never stopped."""
    mesh = mesh_of(jax.devices()[: 4 if case.devices == "all" else 2])
    swaps = [e["version"] for e in found["events"] if e["version"] is not None]
    updates = [VersionedParams(version=v, params=params_of(v, mesh)) for v in swaps]
    names = {r.request_id for r in LONG}
    events = [e for e in found["events"] if not names & {*e["take"], *e["cancel"]}]
    settings = SamplerSettings(schedule=Prescribed(events), probe=PROBE)
    sampler = Sampler(
        (SPEC, params_of(0, mesh)),
        section=case.settings,
        mesh=mesh,
        seed=SEED,
        weights=InOrder(updates),
        settings=settings,
    )
    cancelled = {name for event in events for name in event["cancel"]}
    with sampler:
        futures = {}
        requests = [r for group in requests_of(case) for r in group]
        for request, future in zip(requests, sampler.start_many(requests), strict=True):
            futures[request.request_id] = future
            if request.request_id in cancelled:
                future.cancel()
        sampled = {
            name: None if name in cancelled else hosts_worker.shown(future.result(WAIT_S))
            for name, future in futures.items()
        }
    last = params_of(swaps[-1], mesh)
    with Sampler((SPEC, last), section=case.settings, mesh=mesh, seed=SEED) as sampler:
        return sampled, [hosts_worker.shown(c) for c in sampler.generate(LONG)]


def check(folder: Path, number: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Compare what two processes sampled in a case with one process; return it."""
    case, found = Case(**fields), json.loads((folder / f"{number}.json").read_text())
    sampled, long = alone(case, found)
    assert found["live"] == [*range(1 + case.groups // 2)]
    assert 0 < found["probe_error"] < PROBE.tolerance
    for name, expected in sampled.items():
        got = found["drawn"][name]
        assert expected is not None or got is None, f"{name} was cancelled"
        if got is not None:
            assert_same(got, expected, name)
    for request, got, expected in zip(LONG, found["saved"], long, strict=True):
        assert_same([*got[:2], []], [*expected[:2], []], request.request_id)
    return found


def assert_same(got: list[Any], expected: list[Any], name: str) -> None:
    assert got[0] == expected[0], f"tokens of {name}"
    np.testing.assert_allclose(got[1], expected[1], atol=1e-5, err_msg=name)
    assert got[2] == expected[2], f"versions of {name}"


def play(folder: Path, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    for code, output in ended(start(folder, *cases), timeout_s=300):
        assert code == 0, output[-4000:]
    return [check(folder, number, fields) for number, fields in enumerate(cases)]


@pytest.mark.exhaustive
def test_requests_cancellations_and_swaps_give_what_one_process_samples(tmp_path):
    """A device of each process."""
    (found,) = play(tmp_path, {"devices": "one", "plain": True})
    versions = [got[2] for got in found["drawn"].values() if got is not None]
    assert any(len(set(v)) > 1 for v in versions), "swapped in mid-flight"


@pytest.mark.exhaustive
def test_all_that_a_sampler_does_is_the_same_over_two_processes(tmp_path):
    tight = {"slots": 6, "kv_memory_mib": 0.03125}
    cases = [
        {"plain": True, "section": {"on_new_weights": "recompute"}},
        {"plain": True, "section": {"on_new_weights": "restart"}},
        {"section": {"on_new_weights": "drain"} | tight},
    ]
    found = play(tmp_path, *cases)
    assert found[2]["preempted"] > 0, "memory was short"


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed", [0, 1])
def test_when_a_process_is_killed_the_others_end_and_say_why(tmp_path, killed):
    processes = start(tmp_path, {"devices": "one", "plain": True, "endless": True})
    lines: list[str] = []
    while "under way" not in "".join(lines[-1:]):
        lines.append(processes[0].stdout.readline())
        assert lines[-1], "".join(lines)
    processes[killed].kill()
    code, output = ended(processes, timeout_s=20)[1 - killed]
    assert code != 0
    # JAX's own client may notice first that the coordinator, in process 0, is gone
    assert "the sampler ends with all its processes: lost" in output or not killed, output[-4000:]
