"""Requests and weights to a vLLM server, over real HTTP: a small server with scripted faults, and,
where one is installed, vLLM's own."""

import dataclasses
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from builders import tiny_params, tiny_spec
from fake_vllm import FakeVllm
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.errors import Closed, RolloutError, WeightsError
from jaxrl_async.interop import vllm_client
from jaxrl_async.interop.vllm import EngineSettings, VllmSampler
from jaxrl_async.interop.vllm_client import ServerGone
from jaxrl_async.interop.vllm_messages import BadReply, CheckedReply, checked_reply
from jaxrl_async.interop.weight_folder import WeightFolder
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.ports.generate import Replica
from jaxrl_async.ports.weights import FIXED_WEIGHTS
from jaxrl_async.sampler.probe import Probe
from jaxrl_async.sampler.request_checks import RequestLimits
from jaxrl_async.sampler.router.router import Router
from jaxrl_async.sampler.router.supervise import RestartLimits
from jaxrl_async.types import Partial, Request, SamplingParams, StopReason, VersionedParams
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.delivery import FunctionLink

SPEC = tiny_spec(24, tied=False)
LIMITS = RestartLimits(restarts=4, backoff_s=0.01)


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_client, "BACKOFF_S", 0.01)


@pytest.fixture
def server():
    fake = FakeVllm()
    yield fake
    fake.close()


@pytest.fixture(scope="module")
def params():
    return tiny_params(SPEC)


@pytest.fixture
def folder(tmp_path) -> WeightFolder:
    return WeightFolder(tmp_path / "weights", SPEC)


@pytest.fixture
def make(server, folder, params):
    """Makes samplers at the server, and closes them."""
    made = []

    def make_one(**changes) -> VllmSampler:
        weights = changes.pop("weights", FIXED_WEIGHTS)
        settings = EngineSettings(
            **{
                "run": "run",
                "slots": 8,
                "timeout_s": 20.0,
                "on_new_weights": "continue",
                "room": RequestLimits(max_length=64, max_new_tokens=48, vocab=24),
                "probe": None,
                "count": lambda name: None,
                **changes,
            }
        )
        update = VersionedParams(version=0, params=params)
        sampler = VllmSampler(server.url, settings, folder=folder, weights=weights, update=update)
        made.append(sampler)
        return sampler

    yield make_one
    for sampler in made:
        sampler.close()


def request(number: int = 0, **changes) -> Request:
    base = {"request_id": f"r{number}", "token_ids": np.array([1, 5]), "max_new_tokens": 4}
    return Request(**{**base, **changes})


def results(sampler, requests):
    return [future.result(30) for future in sampler.start_many(requests)]


def until(condition) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, "it never came true"
        time.sleep(0.005)


# ---- requests


@pytest.mark.full
def test_requests_go_side_by_side_and_come_back_as_completions(server, make):
    server.token_s = 0.01
    sampler = make()
    as_replica: Replica = sampler
    assert as_replica.capacity == 8 and as_replica.seed is None
    requests = [request(i) for i in range(20)] + [request(20, stop_token_ids=(4,))]
    done = results(sampler, requests)
    assert [c.request_id for c in done] == [r.request_id for r in requests]
    for completion in done[:20]:
        assert completion.token_ids.tolist() == [3, 4, 5, 6]
        assert completion.logprobs.tolist() == [-0.5] * 4 and completion.stop is StopReason.LENGTH
        assert completion.versions.tolist() == [0] * 4
    assert done[20].token_ids.tolist() == [3, 4] and done[20].stop is StopReason.EOS
    assert 1 < server.most_at_once <= 8
    stats = sampler.stats()
    assert (stats.requests_done, stats.generated_tokens, stats.truncated) == (21, 82, 20)


@pytest.mark.full
def test_sampling_parameters_reach_the_server(server, make):
    sampling = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    results(make(), [request(sampling=sampling, stop_token_ids=(23,), forced_length=3)])
    body = server.bodies[0]
    params = body["sampling_params"]
    assert body["token_ids"] == [1, 5] and body["cache_salt"] == "run-0"
    assert [params[k] for k in ("temperature", "top_k", "top_p", "min_p")] == [0.7, 5, 0.9, 0.1]
    assert (params["min_tokens"], params["max_tokens"], params["stop_token_ids"]) == (3, 3, [])
    assert params["ignore_eos"] is True and params["logprobs"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extras": True}, "returns no extras"),
        ({"adapter": "math"}, "uses a single model"),
        ({"sampling": SamplingParams(temperature=0.001)}, "at least 0.01 for vLLM"),
        ({"token_ids": np.array([24])}, "from 0 to 23"),
        ({"max_new_tokens": 49}, "sampler.max_new_tokens"),
    ],
)
def test_what_a_server_cannot_do_is_refused_at_once(make, changes, message):
    with pytest.raises(RolloutError, match=message):
        make().checked([request(**changes)])


def test_saved_requests_are_refused(make):
    sampler, nothing = make(), np.zeros(0, np.int32)
    saved = Partial(
        request=request(), token_ids=nothing, logprobs=nothing, versions=nothing, seed=0
    )
    with pytest.raises(RolloutError, match="uses its own random numbers"):
        sampler.start_many([saved])
    with pytest.raises(RolloutError, match="cannot be saved"):
        sampler.save("r0")
    assert sampler.progress() == ()


def test_a_cancelled_request_frees_its_slot_and_closing_answers_the_others(server, make):
    server.token_s = 0.2
    sampler = make(slots=1)
    first, second, third = sampler.start_many([request(0), request(1), request(2)])
    until(lambda: server.bodies)
    first.cancel()
    until(lambda: len(server.bodies) == 2)
    sampler.close()
    for future in (second, third):
        assert isinstance(future.exception(5), Closed)
    assert sampler.stats().cancelled == 1 and not sampler.folder.path(0).exists()


# ---- weights


def trained(params, step: int):
    return jax.tree.map(lambda p: p + step, params)


@pytest.fixture
def channel():
    made = WeightChannel([FunctionLink(lambda p: p)])
    yield made
    made.close()


@pytest.mark.full
@pytest.mark.parametrize("mode", ["continue", "recompute", "drain", "restart"])
def test_weights_that_come_in_mid_request(server, make, params, channel, folder, mode):
    """Each token has the version of the weights that sampled it, whatever the request's end."""
    server.token_s = 0.05  # a second in all, so that the weights come in within it
    sampler = make(on_new_weights=mode, weights=channel.subscribe())
    (running,) = sampler.start_many([request(max_new_tokens=20)])
    until(lambda: server.at_once)
    time.sleep(0.1)
    channel.publish(1, trained(params, 1))
    channel.wait_live(1, 20)
    versions = running.result(20).versions.tolist()
    (after,) = results(sampler, [request(1)])
    assert after.versions.tolist() == [1] * 4 and server.bodies[-1]["cache_salt"] == "run-1"
    expected = {"drain": {0}, "restart": {1}}.get(mode, {0, 1})
    assert set(versions) == expected and versions == sorted(versions) and len(versions) == 20
    assert server.loaded == ["0", "1"] and folder.path(1).is_dir()
    until(lambda: not folder.path(0).exists())
    assert sampler.stats().restarted == (mode == "restart") and sampler.stats().swaps == 2
    assert server.pauses[-1] == {"drain": "wait", "restart": "abort"}.get(mode, "keep")


@pytest.mark.full
def test_without_labels_all_tokens_count_as_old_as_the_request(server, make, params, channel):
    server.token_s = 0.02
    sampler = make(weights=channel.subscribe())
    server.faults = ["unlabelled"]
    (running,) = sampler.start_many([request(max_new_tokens=20)])
    until(lambda: server.at_once)
    channel.publish(1, trained(params, 1))
    channel.wait_live(1, 20)
    assert running.result(20).versions.tolist() == [0] * 20


@pytest.mark.full
def test_several_servers_share_what_is_written(server, make, params, folder):
    other = FakeVllm()
    channel = WeightChannel([FunctionLink(lambda p: p)] * 2)
    first = make(weights=channel.subscribe())
    second = VllmSampler(
        other.url,
        first.settings,
        folder=folder,
        weights=channel.subscribe(),
        update=VersionedParams(version=0, params=params),
    )
    with Router([first, second], limits=LIMITS) as router:
        router.generate([request(i) for i in range(4)])
        for version in (1, 2, 3):
            channel.publish(version, trained(params, version))
            channel.wait_live(version, 20)
        completions = router.generate([request(i) for i in range(16)])
        assert {v for c in completions for v in c.versions.tolist()} == {3}
        assert server.loaded == other.loaded == ["0", "1", "2", "3"]
        assert sorted(p.name for p in folder.path(3).parent.iterdir()) == ["3"]
    channel.close()
    other.close()


@pytest.mark.full
def test_log_probs_that_are_not_the_trainers_end_the_run(server, make, params, channel):
    """A server that loads nothing, and says that it has, is found out."""
    ids = np.array([1, 2, 3, 4], np.int32)
    sampler = make(probe=Probe(token_ids=ids, tolerance=1e-3), weights=channel.subscribe())
    server.probe = [-1.0, -2.0, -3.0]
    with Router([sampler], limits=LIMITS) as router:
        channel.publish(1, trained(params, 1), np.array([-1.0, -2.0, -3.0005], np.float32))
        router.generate([request()])
        channel.wait_live(1, 20)
        assert sampler.stats().max_probe_error == pytest.approx(0.0005, rel=1e-2)
        channel.publish(2, trained(params, 2), np.array([-1.5, -2.5, -3.6], np.float32))
        until(lambda: router.error is not None)
        assert isinstance(router.error, WeightsError)
        assert "half of the tokens differ by more than 0.5 nats" in str(router.error)


# ---- faults


BAD_ANSWERS = [
    ("short", "4 tokens, but 3 log-probs"),
    ("garbage", "not JSON"),
    ("early", "ends after 3 of 4 tokens"),
    ("more", "5 tokens, but 4 were requested"),
    ("null", "not a number"),
    ("other token", "of token 4, not of 3"),
    ("foreign", "labelled 'default', which this run did not load"),
    ("huge", "an answer of more than"),
    ("401", "VLLM_API_KEY"),
    ("403", "--enable-scale-out"),
]
OFTEN = ("short", "garbage")


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param(*each, marks=[] if each[0] in OFTEN else pytest.mark.exhaustive)
        for each in BAD_ANSWERS
    ],
)
def test_an_answer_that_is_none_takes_the_server_out_and_the_request_is_sampled_again(
    server, make, caplog, fault, message
):
    repeats = 4 if fault in ("garbage", "huge") else 1  # a broken answer may be a broken connection
    server.faults = [fault] * repeats
    faults = FaultCounts()
    with Router([make()], limits=LIMITS, count=faults.add) as router:
        (completion,) = router.generate([request()])
    assert completion.token_ids.tolist() == [3, 4, 5, 6]
    assert message in caplog.text
    counts = faults.read()
    assert counts["sampler_deaths"] == counts["sampler_restarts"] == counts["redone_requests"] == 1
    assert server.loaded == ["0", "0"], "the successor brings the weights again"


@pytest.mark.full
@pytest.mark.parametrize("faults", [["dies"], ["503"], ["429", "dies", "503"]], ids=str)
def test_what_breaks_on_the_way_is_sent_once_more(server, make, faults):
    server.faults, counts = [*faults], FaultCounts()
    sampler = make(count=counts.add)
    (completion,) = results(sampler, [request()])
    assert completion.token_ids.tolist() == [3, 4, 5, 6] and len(server.bodies) == len(faults) + 1
    assert sampler.error is None and counts.read()["engine_retries"] == len(faults)


@pytest.mark.full
@pytest.mark.parametrize("status", ["400", "422", "500"])
def test_a_request_that_a_healthy_server_refuses_fails_alone(server, make, status):
    server.faults = [status]
    sampler = make(slots=1)
    first, second = sampler.start_many([request(0), request(1)])
    with pytest.raises(RolloutError, match=f"'r0#1'.*answers {status}: as the test says"):
        first.result(20)
    assert len(second.result(20).token_ids) == 4 and sampler.stats().failed == 1


@pytest.mark.full
def test_an_error_of_a_server_that_is_not_well_is_the_servers(server, make):
    server.faults, server.healthy = ["500"], False
    sampler = make()
    with pytest.raises(ServerGone, match=r"answers 500.*restart it"):
        results(sampler, [request()])
    assert sampler.blamed == {"r0"} and isinstance(sampler.error, ServerGone)
    sampler.abandon()
    with pytest.raises(ServerGone, match="/health answers 503"):
        sampler.successor()
    server.healthy = True
    successor = sampler.successor()
    assert len(results(successor, [request()])[0].token_ids) == 4
    successor.close()


def test_a_log_prob_that_is_no_number_is_sampled_again(server, make):
    server.faults, faults = ["nan"], FaultCounts()
    with Router([make()], limits=LIMITS, count=faults.add) as router:
        assert np.isfinite(router.generate([request()])[0].logprobs).all()
    assert faults.read()["nonfinite_completions"] == 1


@pytest.mark.full
def test_a_server_that_does_not_answer_is_given_up_in_time(server, make):
    server.faults = ["slow"]
    sampler = make(timeout_s=0.3)
    with pytest.raises(ServerGone, match=r"no complete answer in 0.3 s.*curl http"):
        results(sampler, [request()])


@pytest.mark.full
def test_a_server_that_died_comes_back_with_the_newest_weights(server, make, params, channel):
    """Requests wait for it, the trainer does not, and nothing is sampled by the weights it began
    with."""
    faults = FaultCounts()
    limits = RestartLimits(restarts=100, backoff_s=0.02)
    with Router([make(weights=channel.subscribe())], limits=limits, count=faults.add) as router:
        router.generate([request()])
        server.close()
        (waiting,) = router.start_many([request(1)])
        until(lambda: not router.living)
        channel.publish(1, trained(params, 1))
        channel.publish(2, trained(params, 2))  # waits for nobody: the only end is away
        again = FakeVllm(port=server.port)
        completion = waiting.result(60)
        assert completion.versions.tolist() == [2] * 4 and again.loaded == ["2"]
        channel.wait_live(2, 20)
        again.close()
    assert faults.read()["sampler_restarts"] == 1


@pytest.mark.full
def test_a_server_that_began_anew_in_secret_samples_nothing_that_counts(server, make, caplog):
    sampler = make()
    with Router([sampler], limits=LIMITS) as router:
        router.generate([request()])
        server.label = "default"  # as after a restart, behind a service's address
        (completion,) = router.generate([request(1)])
        assert completion.versions.tolist() == [0] * 4
    assert "Give each run its own servers" in caplog.text and server.loaded == ["0", "0"]


@pytest.mark.full
def test_a_server_that_aborts_for_ever_is_at_fault(server, make):
    sampler = make()
    server.token_s = 0.02
    stop = threading.Event()

    def abort() -> None:
        while not stop.wait(0.03):
            server._aborted += 1

    threading.Thread(target=abort, daemon=True).start()
    with pytest.raises(RolloutError, match="more than 8 times"):
        results(sampler, [request(max_new_tokens=40)])
    stop.set()
    assert sampler.stats().restarted == 8


def test_weights_that_the_server_cannot_see_say_where_they_are(server, make, folder, caplog):
    sampler = make()
    server.on_load = lambda path: None
    folder.write(0, sampler.loop._next.params, "x")
    (folder.path(0) / "model.safetensors").rename(folder.path(0) / "gone")
    with pytest.raises(ServerGone, match=r"/collective_rpc answers 500.*remote.folder"):
        results(sampler, [request()])
    assert server._running.is_set(), "it is not left paused"


# ---- answers, as they may come


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
KEYS = st.sampled_from(
    ["choices", "token_ids", "logprobs", "content", "weight_versions", "version", "start", "end"]
)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner), max_leaves=12
)


@pytest.mark.full
@given(JSON, JSON, JSON, JSON)
def test_fuzz_whatever_is_answered_is_checked(reply, tokens, content, spans):
    sent = dataclasses.replace(request(), token_ids=np.array([1, 5], np.int32))
    choice = {"token_ids": tokens, "logprobs": {"content": content}, "weight_versions": spans}
    for answer in (reply, {"choices": [reply]}, {"choices": [choice]}):
        try:
            assert isinstance(checked_reply(answer, sent, "run", 0), CheckedReply)
        except BadReply as error:
            assert str(error).endswith(".")


def test_the_folder_is_readable_by_others_and_holds_whole_directories(folder, params, tmp_path):
    path = folder.write(3, params, "a")
    assert {p.name for p in path.iterdir()} == {"config.json", "model.safetensors"}
    assert all(p.stat().st_mode & 0o044 == 0o044 for p in path.iterdir())
    folder.write(4, params, "b")
    folder.settle("b", 4)
    assert sorted(p.name for p in Path(tmp_path / "weights").iterdir()) == ["3", "4"]
    folder.settle("a", None)
    assert sorted(p.name for p in Path(tmp_path / "weights").iterdir()) == ["4"]
    folder.settle("b", None)
    assert not (tmp_path / "weights").exists()
