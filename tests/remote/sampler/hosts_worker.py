"""A process of a sampler over two processes: hosts_worker.py COORDINATOR INDEX CASES FOLDER.

Plays each case (JSON: a list of Case fields); the first process writes what was sampled, and the
schedule, to FOLDER/NUMBER.json. What it samples is compared in test_hosts.py with one process.
"""

import contextlib
import itertools
import json
import logging
import random
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_async.config import schema
from jaxrl_async.errors import Disconnected
from jaxrl_async.mesh import AXES, SAMPLER_RULES, put, shardings
from jaxrl_async.model.decoder import DecoderSettings, TokenRows, init_params
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.ports.run import Unrecorded
from jaxrl_async.ports.weights import FixedWeights
from jaxrl_async.remote.sampler.follower import follow
from jaxrl_async.remote.sampler.joint_weights import JointWeights, OfferRelay
from jaxrl_async.remote.sampler.leader import FollowerGroup, leading_sampler
from jaxrl_async.remote.sampler.rendezvous import FollowerHub, LeaderAddress, dial_leader
from jaxrl_async.remote.wire.messages import Live, Offer, Staged, Welcome
from jaxrl_async.remote.wire.session import WireLimits
from jaxrl_async.remote.wire.session_port import Session
from jaxrl_async.sampler.probe import Probe
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings, SamplerSetup, build_setup
from jaxrl_async.testing.session_pair import session_pair
from jaxrl_async.types import Completion, Request, SamplingParams, VersionedParams

VOCAB = 48
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=1, width=32, heads=4, kv_heads=4, head_dim=8, mlp=64), VOCAB
)
SEED = 5
LIMITS = WireLimits(silence_s=10.0)
WAIT_S = 120.0
PROBE = Probe(token_ids=np.arange(12, dtype=np.int32), tolerance=1e-3)
KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=8),
    SamplingParams(top_p=0.8, min_p=0.02),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a sampler is made with, and how it ends."""

    devices: str = "all"  # or one: of each process
    section: dict[str, Any] = field(default_factory=dict)  # settings
    groups: int = 4
    plain: bool = False  # few lengths and one kind of sampling: few programs to compile
    endless: bool = False  # requests without end, until a process is killed

    @property
    def settings(self) -> schema.SamplerSection:
        usual: dict[str, Any] = {
            "slots": 4,
            "max_length": 64,
            "max_new_tokens": 32,
            "block": 4,
            "page_tokens": 64 if self.plain else 16,
            "reserve": 0.5,
        }
        return schema.SamplerSection(**(usual | self.section))


def mesh_of(devices: Sequence[jax.Device]) -> Mesh:
    """All of them along `tensor`."""
    return Mesh(np.array(devices).reshape(1, 1, 1, 1, len(devices)), AXES)


def params_of(version: int, mesh: Mesh) -> Any:
    """The weights of a version, the part of this process."""
    made = jax.tree.map(np.asarray, init_params(SPEC, jax.random.key(version)))
    return jax.tree.map(put, made, shardings(weight_table(SPEC), mesh, SAMPLER_RULES))


def requests_of(case: Case) -> list[list[Request]]:
    """Groups of three with one prompt."""
    made = []
    for number in range(case.groups):
        rng = np.random.default_rng(number)
        first = Request(
            request_id="",
            token_ids=rng.integers(0, VOCAB, rng.integers(3, 8 if case.plain else 30)).astype(
                np.int32
            ),
            max_new_tokens=int(rng.integers(8, 30)),
            sampling=KINDS[0 if case.plain else number % len(KINDS)],
            stop_token_ids=(1,) if number % 3 == 0 else (),
        )
        made.append(
            [replace(first, request_id=f"g{number}/m{m}/t0", key=(number, m)) for m in range(3)]
        )
    return made


LONG = [
    Request(
        request_id=f"long{n}",
        token_ids=np.arange(3 + n, dtype=np.int32),
        max_new_tokens=30,
        sampling=KINDS[0],
        stop_token_ids=(),
        key=(1000 + n, 0),
        forced_length=30,
    )
    for n in range(3)
]
"""Requests that are saved while they run, and continued."""


def setup_of(case: Case, mesh: Mesh, settings: SamplerSettings) -> SamplerSetup:
    return build_setup(SPEC, case.settings, mesh, SEED, settings)


class OfferedWeights(FixedWeights):
    """A source that needs a while to have what is offered on a session."""

    def __init__(self, session: Session, mesh: Mesh) -> None:
        self._session, self._mesh = session, mesh
        self._staged: VersionedParams | None = None
        session.on(Offer, lambda o: threading.Thread(target=self._fetch, args=(o,)).start())

    def _fetch(self, offer: Offer) -> None:
        time.sleep(random.uniform(0, 0.2))
        params = params_of(offer.version, self._mesh)
        self._staged = VersionedParams(
            version=offer.version, params=params, probe_logprobs=offer.probe_logprobs
        )
        with contextlib.suppress(Disconnected):
            staged = Staged(version=offer.version, num_bytes=1, seconds=0.1, source="test")
            self._session.send(staged)

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        staged, self._staged = self._staged, None
        return staged

    def live(self, version: int) -> None:
        with contextlib.suppress(Disconnected):
            self._session.send(Live(version=version))


class Record(Unrecorded):
    """A Schedule that keeps what was taken in."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, **event: Any) -> None:
        self.events.append(event)


# ---- the first process


def lead(case: Case, host: str, mesh: Mesh) -> dict[str, Any]:
    """Lead the sampler through the case; return what was sampled."""
    hub = FollowerHub(jax.process_count(), WELCOME, limits=LIMITS, listen="127.0.0.1:0")
    LeaderAddress.broadcast(hub, host, leads=True)
    followers = FollowerGroup(hub.wait_for_all(WAIT_S))
    pair, record = session_pair(limits=LIMITS), Record()
    settings = SamplerSettings(followers=followers, schedule=record, probe=PROBE)
    setup = setup_of(case, mesh, settings)
    followers.wait_ready(setup, WAIT_S)
    relay = OfferRelay(pair.sampler, followers.sessions)
    joint = JointWeights(relay, OfferedWeights(relay, mesh))
    live = Lives(pair.trainer)
    live.offer(0)
    sampler = leading_sampler(setup, followers, joint.first(WAIT_S), joint)
    if case.endless:
        generate_without_end(sampler)
    with sampler:
        sampled = sampled_in_traffic(sampler, case, live)
        saved = [shown(c) for c in continued(sampler)]
        sampler.between_blocks(sampler.loop.batch.check_integrity)
        stats = sampler.stats()
    hub.close()
    pair.close()
    return {
        "drawn": sampled,
        "saved": saved,
        "events": record.events,
        "live": live.versions,
        "preempted": stats.preempted,
        "probe_error": stats.max_probe_error,
    }


@jax.jit
def logprobs_of(params: Any, token_ids: Any) -> Any:
    """The trainer's log-probs on the probe."""
    ids = token_ids[None]
    tokens = TokenRows(ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids))
    settings = DecoderSettings(dtype=jnp.float32, chunk=ids.shape[1])
    return token_logprobs(SPEC, params, tokens, settings).logprobs[0, 1:]


WELCOME = Welcome(config={}, spec={}, mesh={}, seed=SEED, run="test")


class Lives:
    """The trainer's end: offers versions and gets reports of the live ones."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.versions: list[int] = []
        self._changed = threading.Condition()
        session.on(Staged, lambda staged: None)
        session.on(Live, self._note)

    def offer(self, version: int) -> None:
        params = init_params(SPEC, jax.random.key(version))
        probe = np.asarray(logprobs_of(params, PROBE.token_ids))
        self._session.send(Offer(version=version, where={}, probe_logprobs=probe))

    def wait(self, version: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: version in self.versions, WAIT_S)

    def _note(self, live: Live) -> None:
        with self._changed:
            self.versions.append(live.version)
            self._changed.notify_all()


def sampled_in_traffic(sampler: Sampler, case: Case, live: Lives) -> dict[str, Any]:
    """Groups come at random moments, some requests are cancelled, and the weights change twice."""
    rng, groups = random.Random(7), requests_of(case)
    futures: dict[str, Future[Completion]] = {}
    for number, group in enumerate(groups):
        futures |= zip([r.request_id for r in group], sampler.start_many(group), strict=True)
        if number % 2:
            live.wait(number // 2)
            live.offer(number // 2 + 1)
            futures[rng.choice(list(futures))].cancel()
        blocks = sampler.stats().blocks + rng.randrange(3)
        while sampler.stats().blocks < blocks and not all(f.done() for f in futures.values()):
            time.sleep(0.001)
    live.wait(case.groups // 2)
    results = {}
    for name, future in futures.items():
        try:
            results[name] = shown(future.result(WAIT_S))
        except CancelledError:
            results[name] = None
    return results


def generate_without_end(sampler: Sampler) -> None:
    for number in itertools.count():
        sampler.generate(LONG)
        if number == 1:
            print("under way", flush=True)


def continued(sampler: Sampler) -> list[Completion]:
    """Requests saved in mid-flight, and continued."""
    futures = sampler.start_many(LONG)
    partials = []
    for request in LONG:
        while not any(p.request.request_id == request.request_id for p in sampler.progress()):
            time.sleep(0.002)
        partials.append(sampler.save(request.request_id, stop=True, with_kv=True))
    assert all(p.kv is None for p in partials), "each process has a part of it"
    assert all(len(f.result(WAIT_S).token_ids) < 30 for f in futures)
    return sampler.resume(partials)


def shown(done: Completion) -> list[list[float]]:
    return [done.token_ids.tolist(), done.logprobs.tolist(), done.versions.tolist()]


# ---- the others


def follow_case(case: Case, process: int, mesh: Mesh) -> None:
    """Follow the first process through the case."""
    leader = LeaderAddress.broadcast(None, leads=False)
    assert leader is not None
    session, _ = dial_leader(leader, process, limits=LIMITS, timeout_s=WAIT_S)
    setup = setup_of(case, mesh, SamplerSettings(probe=PROBE))
    follow(session, setup, OfferedWeights(session, mesh), process=process)


def main(coordinator: str, index: int, cases: list[dict[str, Any]], folder: Path) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, index)
    for number, fields in enumerate(cases):
        case = Case(**fields)
        devices = jax.devices() if case.devices == "all" else jax.devices()[::2]
        mesh = mesh_of(devices)
        if index:
            follow_case(case, index, mesh)
        else:
            found = lead(case, "127.0.0.1", mesh)
            (folder / f"{number}.json").write_text(json.dumps(found))
    assert LeaderAddress.broadcast(None, leads=not index) is None, "no further case"
    print("done", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4]))
