"""JetStream's own test engine, which we did not write, behind our rollouts' interface."""

import asyncio
import importlib
import importlib.util
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.errors import Closed, RolloutError
from jaxrl_async.interop.foreign import ForeignSampler
from jaxrl_async.interop.jetstream import engine_api
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.ports.generate import Replica
from jaxrl_async.ports.weights import FixedWeights
from jaxrl_async.sampler.router.router import Router
from jaxrl_async.sampler.router.supervise import RestartLimits
from jaxrl_async.types import Partial, Request, StopReason, VersionedParams
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.delivery import FunctionLink

INSTALLED = importlib.util.find_spec("jetstream") is not None
pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="needs google-jetstream, slim (docs/engines.md)"),
]


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch):
    """JetStream's TestEngine: the next token is the sum of all before it, times the weight."""
    engine_api()
    mock = importlib.import_module("jetstream.engine.mock_engine")
    mesh_utils = importlib.import_module("jax.experimental.mesh_utils")
    # Its constructor lays a mesh of one over all devices, and these tests have eight.
    real = mesh_utils.create_device_mesh
    monkeypatch.setattr(
        mesh_utils, "create_device_mesh", lambda shape, devices: real(shape, devices[:1])
    )
    # Each of its steps multiplies matrices of 4096 to seem busy, adds the result and takes it off.
    small = {"ones": lambda shape: jnp.ones([min(n, 8) for n in shape])}
    monkeypatch.setattr(mock, "jnp", SimpleNamespace(**vars(jnp) | small))
    return lambda slots: mock.TestEngine(batch_size=slots, cache_length=64, weight=1.0)


def request(number: int, **changes: object) -> Request:
    base: dict = {
        "request_id": f"r{number}",
        "token_ids": np.array([number + 1, 1], np.int32),
        "max_new_tokens": 3,
    }
    return Request(**{**base, **changes})


def sums(first: int, count: int) -> list[int]:
    """What TestEngine samples: each token is the sum of the prompt and of all sampled before."""
    sampled: list[int] = []
    for _ in range(count):
        sampled.append(first + sum(sampled))
    return sampled


@pytest.fixture
def sampler(make_engine):
    sampler = ForeignSampler(make_engine(2))
    yield sampler
    sampler.close()


def test_more_requests_than_slots_with_stops_and_cancellation(sampler) -> None:
    async def some() -> list:
        requests = [request(i, max_new_tokens=2 + i % 2) for i in range(3)]
        requests.append(request(9, max_new_tokens=8, stop_token_ids=(22,)))
        futures = sampler.submit_many([*requests, request(1)])
        futures[-1].cancel()
        return await asyncio.gather(*futures[:-1])

    done = asyncio.run(some())
    for i, c in enumerate(done[:3]):
        assert c.token_ids.tolist() == sums(i + 2, 2 + i % 2)
        assert c.stop is StopReason.LENGTH and np.isnan(c.logprobs).all()
        assert c.queued_s < c.first_token_s < c.latency_s
    assert done[3].token_ids.tolist() == [11, 22] and done[3].stop is StopReason.EOS


def test_weights_are_swapped_between_two_steps_and_versions_say_which(make_engine) -> None:
    live: list[int] = []

    class Source(FixedWeights):
        polls = 0

        def poll(self, *, wait: bool = False):
            self.polls += 1
            if self.polls == 4:
                return VersionedParams(version=5, params=np.ones(1, np.float32))
            return None

        def live(self, version: int) -> None:
            live.append(version)

    sampler = ForeignSampler(make_engine(1), weights=Source())

    async def one():
        return await sampler.submit(request(0, max_new_tokens=8))

    done = asyncio.run(one())
    sampler.close()
    assert live == [5]
    versions = done.versions.tolist()
    assert sorted(versions) == versions and set(versions) == {0, 5}


def test_a_prompt_that_does_not_fit_and_a_closed_sampler_are_refused(sampler) -> None:
    async def submit(given: Request):
        return await sampler.submit(given)

    with pytest.raises(RolloutError, match="prompt has 65 tokens"):
        asyncio.run(submit(request(0, token_ids=np.zeros(65, np.int32))))
    sampler.close()
    with pytest.raises(Closed):
        asyncio.run(submit(request(0)))


def test_what_is_wrong_with_a_request_is_reported_at_submit(sampler) -> None:
    for name, value in (("key", (1,)), ("stop_token_ids", "x"), ("token_ids", "text")):
        with pytest.raises(RolloutError, match=name):
            asyncio.run(sampler.submit(request(0, **{name: value})))


def test_a_prompt_that_the_engine_does_not_prefill_fails_alone(sampler) -> None:
    prefill = sampler.engine.prefill

    def picky(*, true_length: int, **arguments: object):
        if true_length == 3:
            raise ValueError("injected")
        return prefill(true_length=true_length, **arguments)

    sampler.engine.prefill = picky
    odd = request(1, token_ids=np.array([1, 1, 1], np.int32))

    async def some() -> list:
        return await asyncio.gather(
            *sampler.submit_many([request(0), odd, request(2)]), return_exceptions=True
        )

    fine, error, also = asyncio.run(some())
    assert fine.token_ids.tolist() == sums(2, 3) and also.token_ids.tolist() == sums(4, 3)
    assert isinstance(error, ValueError) and sampler.error is None


@dataclass
class SummingEngine:
    """The contract's methods that a ForeignSampler uses, sampling as TestEngine does, at once."""

    max_concurrent_decodes: int = 2
    max_prefill_length: int = 64

    def load_params(self):
        return np.ones(1, np.float32)

    def init_decode_state(self):
        return {}

    def prefill(self, *, params, padded_tokens, true_length):
        return int(padded_tokens[:true_length].sum())

    def insert(self, prefix, state, *, slot):
        return {**state, slot: prefix}

    def generate(self, params, state):
        return {slot: 2 * total for slot, total in state.items()}, SampledTokens(state)


@dataclass
class SampledTokens:
    """One token of each slot: what its tokens sum up to."""

    totals: dict

    def convert_to_numpy(self):
        return self

    def get_result_at_slot(self, slot):
        return SimpleNamespace(tokens=[[self.totals[slot]]], valid=[[True]])


@dataclass
class Scripted(SummingEngine):
    """Gives what a script says in each step of each request, which its first token names."""

    script: dict = field(default_factory=dict)  # first token: steps of (token, valid)

    def prefill(self, *, params, padded_tokens, true_length):
        return (int(padded_tokens[0]), 0)

    def generate(self, params, state):
        now = {slot: self.script[name][step] for slot, (name, step) in state.items() if step < 9}
        return {slot: (name, step + 1) for slot, (name, step) in state.items()}, Steps(now)


@dataclass
class Steps:
    """Several positions for tokens of each slot, some of them not valid."""

    of_slot: dict

    def convert_to_numpy(self):
        return self

    def get_result_at_slot(self, slot):
        tokens, valid = zip(*self.of_slot[slot], strict=True)
        return SimpleNamespace(tokens=[tokens], valid=[valid])


def test_the_first_token_that_is_not_valid_ends_an_answer_as_jetstream_reads_it(caplog) -> None:
    """Each step as JetStream's own orchestrator reads it, too: no token behind one that is not
    valid, and an answer of which there is none fails, alone."""
    yes, no = 1, 0
    script = {
        1: [[(5, yes), (6, yes)], [(7, yes), (0, no)], [(8, yes), (9, yes)]],
        2: [[(5, yes), (6, yes)], [(0, no), (9, yes)]],
        3: [[(0, no), (9, yes)]],
        4: [[(5, yes), (22, yes)]],
    }
    expected = {1: [5, 6, 7], 2: [5, 6], 4: [5, 22]}
    utils = importlib.import_module("jetstream.engine.token_utils")
    for name, steps in script.items():
        theirs, complete = [], np.zeros(1, bool)
        for step in steps:
            data = SimpleNamespace(
                tokens=np.array([[t for t, _ in step]]),
                valid=np.array([[v for _, v in step]]),
                lengths=np.array([0]),
            )
            (sample,), complete = utils.process_result_tokens(
                SimpleNamespace(stop_tokens=set(), decode=lambda ids: ""), 0, 99,
                SimpleNamespace(get_result_at_slot=lambda _, data=data: data), complete,
            )  # fmt: skip
            theirs += sample.token_ids
        assert theirs == expected.get(name, [])
    sampler = ForeignSampler(Scripted(script=script))
    requests = [
        request(i, token_ids=np.array([i], np.int32), max_new_tokens=8, stop_token_ids=(22,))
        for i in script
    ]
    found = [f.exception(60) or f.result() for f in sampler.start_many(requests)]
    stats = sampler.stats()
    sampler.close()
    sampled = {i: f.token_ids.tolist() for i, f in zip(script, found, strict=True) if i in expected}
    assert sampled == expected
    assert [found[i].stop for i in (0, 1, 3)] == [StopReason.LENGTH] * 2 + [StopReason.EOS]
    assert isinstance(found[2], RolloutError) and "sampled no token" in str(found[2])
    assert (stats.requests_done, stats.failed, stats.truncated) == (3, 1, 2)
    assert caplog.text.count("the engine ended the answer after 3 of 8 tokens") == 1
    assert caplog.text.count("ended the answer after") == 1


def breaks_once(engine) -> None:
    """The engine's next step raises."""
    generate = engine.generate

    def broken(*args: object, **kwargs: object):
        engine.generate = generate
        raise ValueError("engine broke")

    engine.generate = broken


def test_an_engine_that_breaks_fails_its_requests(sampler) -> None:
    breaks_once(sampler.engine)

    async def submit():
        return await sampler.submit(request(0))

    with pytest.raises(ValueError, match="engine broke"):
        asyncio.run(submit())
    assert isinstance(sampler.error, ValueError) and sampler.blamed == {"r0"}
    assert sampler.stats().requests_done == 0


def test_what_was_saved_is_neither_continued_nor_saved_again(sampler) -> None:
    none = np.zeros(0, np.int32)
    saved = Partial(
        request=request(0), token_ids=none, logprobs=none.astype(np.float32), versions=none, seed=0
    )
    with pytest.raises(RolloutError, match=r"'r0' cannot be continued"):
        sampler.start_many([saved])
    with pytest.raises(RolloutError, match=r"'r0' cannot be saved"):
        sampler.save("r0")
    assert sampler.progress() == () and sampler.seed is None


def test_two_engines_behind_a_router_one_of_which_dies_answer_all_requests() -> None:
    channel = WeightChannel([FunctionLink(lambda params: params)] * 2)
    engines = [SummingEngine(), SummingEngine()]
    replicas: list[Replica] = [ForeignSampler(e, weights=channel.subscribe()) for e in engines]
    faults = FaultCounts()
    limits = RestartLimits(backoff_s=0.0)
    with Router(replicas, limits=limits, count=faults.add) as router:
        breaks_once(engines[0])
        futures = router.start_many([request(i) for i in range(8)])
        for i, future in enumerate(futures):
            done = future.result(60)
            assert done.request_id == f"r{i}" and done.token_ids.tolist() == sums(i + 2, 3)
            assert np.isnan(done.logprobs).all(), "no fault: such an engine gives none"
        while faults.read()["sampler_restarts"] < 1:
            time.sleep(0.01)
        assert replicas[0].error is not None and router.samplers[0] is not replicas[0]
        assert router.samplers[1] is replicas[1] and router.living == 2
        assert router.stats().requests_done == 8
        channel.publish(1, np.ones(1, np.float32))
        channel.wait_live(1, 60)
        for future in router.start_many([request(i) for i in range(4)]):
            assert set(future.result(60).versions.tolist()) == {1}, "the successor swaps, too"
    assert {k: n for k, n in faults.read().items() if n} == {
        "sampler_deaths": 1, "sampler_restarts": 1, "redone_requests": 4
    }  # fmt: skip
