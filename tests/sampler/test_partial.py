"""A running request as data: saved, resumed elsewhere, forked, cancelled."""

import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import PARAMS, SECTION, SPEC, make_sampler, request

from jaxrl_async.errors import Closed, RolloutError
from jaxrl_async.sampler.batch.admission import Admission
from jaxrl_async.sampler.batch.sequence import LiveRequest
from jaxrl_async.sampler.partial import branches, load_partial, save_partial
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.types import Partial, Request, SamplingParams, StopReason

HERE = Path(__file__).parent
ONE = np.ones(1, np.int32)
NOTHING = Partial(
    request=request(0), token_ids=ONE[:0], logprobs=np.ones(0, np.float32), versions=ONE[:0], seed=0
)
REQUEST = request(20, max_new_tokens=30, stop_token_ids=(), token_ids=np.arange(20, dtype=np.int32))


def caught_in_flight(sampler, req: Request, *, with_kv: bool = True) -> Partial:
    """Start a request and save it as soon as it has drawn something."""
    future = sampler.start_many([req])[0]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        partial = sampler.save(req.request_id, stop=False, with_kv=with_kv)
        if len(partial.token_ids):
            sampler.save(req.request_id, stop=True)
            assert future.result().stop is StopReason.CANCELLED
            return partial
    raise AssertionError("nothing was drawn in a minute")


@pytest.fixture(scope="module")
def whole():
    sampler = make_sampler()
    done = sampler.generate([REQUEST])[0]
    sampler.close()
    return done


@pytest.mark.full
@pytest.mark.parametrize("with_kv", [True, False])
def test_a_saved_request_goes_on_in_another_sampler(whole, with_kv, tmp_path) -> None:
    first = make_sampler(block=2)
    partial = caught_in_flight(first, REQUEST, with_kv=with_kv)
    first.between_blocks(first.loop.batch.check_integrity)
    first.close()
    assert (partial.kv is not None) == with_kv
    assert 0 < len(partial.token_ids) < 30
    save_partial(partial, tmp_path / "one.npz")
    second = make_sampler(slots=2, block=8)
    before = second.stats().prefill_tokens
    done = second.resume([load_partial(tmp_path / "one.npz")])[0]
    computed = second.stats().prefill_tokens - before
    second.close()
    assert done.token_ids.tolist() == whole.token_ids.tolist()
    np.testing.assert_allclose(done.logprobs, whole.logprobs, atol=1e-5)
    assert computed == (1 if with_kv else 20 + len(partial.token_ids)), "KV is a short cut"


@pytest.mark.full
def test_what_has_drawn_elsewhere_overtakes_those_that_wait_and_have_not(whole) -> None:
    first = make_sampler(block=2)
    partial = caught_in_flight(first, REQUEST)
    first.close()
    order: list[str] = []
    with make_sampler(slots=1, reserve=0.0) as second:
        fresh = [request(i, request_id=f"fresh{i}") for i in range(2)]
        futures = second.start_many([*fresh, partial])
        for future in futures:
            future.add_done_callback(lambda done: order.append(done.result().request_id))
        tokens = [future.result(60).token_ids.tolist() for future in futures]
    assert order == [REQUEST.request_id, "fresh0", "fresh1"]
    assert tokens[2] == whole.token_ids.tolist()


def test_the_queue_keeps_the_order_among_those_that_have_drawn_and_among_the_others() -> None:
    admission = Admission(None, 2)
    fresh = [LiveRequest(request=request(i), max_new=1) for i in range(4)]
    begun = [
        LiveRequest(request=request(i), max_new=1, partial=replace(NOTHING, token_ids=ONE))
        for i in range(4, 8)
    ]
    unbegun = LiveRequest(request=request(8), max_new=1, partial=NOTHING)
    admission.enqueue([fresh[0], begun[0], fresh[1], begun[1]])
    admission.enqueue([unbegun, begun[2], fresh[2]])
    admission.enqueue([fresh[3], begun[3]])
    assert list(admission.queue) == [*begun, fresh[0], fresh[1], unbegun, *fresh[2:]]


@pytest.mark.full
def test_kv_of_other_weights_is_not_used(whole) -> None:
    first = make_sampler(block=2)
    partial = caught_in_flight(first, REQUEST)
    first.close()
    second = make_sampler(version=7)
    before = second.stats().prefill_tokens
    done = second.resume([partial])[0]
    assert second.stats().prefill_tokens - before == 20 + len(partial.token_ids)
    assert set(done.versions[len(partial.token_ids) :].tolist()) == {7}
    second.close()


def held(batch, name: str, when=lambda: True) -> tuple[threading.Event, threading.Event]:
    """A method of a batch waits in its first such call; when it does, and when it may go on."""
    entered, go_on, real = threading.Event(), threading.Event(), getattr(batch, name)

    def waits(*args, **how):
        if not entered.is_set() and when():
            entered.set()
            go_on.wait(60)
        return real(*args, **how)

    setattr(batch, name, waits)
    return entered, go_on


@pytest.mark.full
def test_progress_is_that_of_the_last_block_while_the_next_one_runs(whole) -> None:
    sampler = make_sampler(slots=1, block=4)
    sampler.generate([request(0)])
    sampled = sampler.loop.batch.slots.num_sampled
    entered, go_on = held(sampler.loop.batch, "wait_for_block", lambda: sampled.max() == 8)
    running, waiting = sampler.start_many([REQUEST, replace(REQUEST, request_id="waits")])
    assert entered.wait(60)
    (partial,) = sampler.progress()
    assert partial.token_ids.tolist() == whole.token_ids[:8].tolist()
    late = replace(partial, request=replace(REQUEST, request_id="late"))
    sampler.start_many([late])
    progress = {p.request.request_id: len(p.token_ids) for p in sampler.progress()}
    assert progress == {REQUEST.request_id: 8, "late": 8}, "also what was not taken in yet"
    assert not running.done() and not waiting.done()
    go_on.set()
    assert running.result(60).token_ids.tolist() == whole.token_ids.tolist()
    sampler.close()


@pytest.mark.full
def test_progress_of_a_sampler_that_is_given_up_is_refused() -> None:
    sampler = make_sampler()
    sampler.generate([request(0)])
    entered, go_on = held(sampler.loop.batch, "admit")
    sampler.start_many([REQUEST])
    assert entered.wait(60)
    threading.Timer(0.3, sampler.abandon).start()
    with pytest.raises(Closed):
        sampler.progress()
    go_on.set()
    sampler.close()


def test_progress_of_a_sampler_that_dies_meanwhile_is_its_error() -> None:
    sampler = make_sampler(block=4)
    sampler.generate([request(0)])
    batch, started = sampler.loop.batch, threading.Event()
    start_block = batch.start_block

    def dies(weights):
        if batch.slots.num_sampled.max() < 8:
            return start_block(weights)
        started.set()
        time.sleep(0.3)  # progress waits by then
        raise RuntimeError("injected")

    batch.start_block = dies
    (lost,) = sampler.start_many([REQUEST])
    assert started.wait(60)
    with pytest.raises(RuntimeError, match="injected"):
        sampler.progress()
    with pytest.raises(RuntimeError, match="injected"):
        lost.result(60)
    sampler.close()


def test_progress_leaves_it_to_the_sampler_to_hand_out() -> None:
    """At the moment that is recorded, before which nothing can follow from what was drawn."""
    sampler = make_sampler(block=4)
    sampler.generate([request(0)])
    entered, go_on = held(sampler.loop.batch, "admit", lambda: bool(sampler.loop.finished))
    short = replace(REQUEST, request_id="short", max_new_tokens=4)
    ends, goes_on = sampler.start_many([short, REQUEST])
    assert entered.wait(60)
    found: list[tuple[Partial, ...]] = []
    asks = threading.Thread(target=lambda: found.append(sampler.progress()))
    asks.start()
    asks.join(0.3)
    assert asks.is_alive() and not ends.done()
    go_on.set()
    asks.join(60)
    assert ends.done() and [p.request.request_id for p in found[0]] == [REQUEST.request_id]
    assert len(goes_on.result(60).token_ids) == 30
    sampler.close()


@pytest.mark.full
def test_save_kill_the_process_resume_in_a_new_one(whole, tmp_path) -> None:
    code = """
        import sys, time
        sys.path.insert(0, {here!r})
        from pathlib import Path
        from tiny import make_sampler, request
        from test_partial import REQUEST, caught_in_flight
        from jaxrl_async.sampler.partial import save_partial
        sampler = make_sampler(block=2)
        save_partial(caught_in_flight(sampler, REQUEST), {path!r})
        print("saved", flush=True)
        time.sleep(600)
    """
    path = str(tmp_path / "one.npz")
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code).format(here=str(HERE), path=path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "saved"
    process.kill()
    process.wait()
    process.stdout.close()
    sampler = make_sampler()
    done = sampler.resume([load_partial(path)])[0]
    sampler.close()
    assert done.token_ids.tolist() == whole.token_ids.tolist()


@pytest.mark.full
def test_a_fork_goes_on_in_different_ways_from_one_prefix(whole) -> None:
    sampler = make_sampler(block=2)
    partial = caught_in_flight(sampler, REQUEST)
    before = sampler.stats().prefill_tokens
    done = sampler.fork(partial, 3)
    n = len(partial.token_ids)
    assert sampler.stats().prefill_tokens - before <= 32, "the prefix was not computed three times"
    assert [c.request_id for c in done] == [f"{REQUEST.request_id}/b{i}" for i in (1, 2, 3)]
    assert len({tuple(c.token_ids) for c in done}) == 3
    for c in done:
        assert c.token_ids[:n].tolist() == whole.token_ids[:n].tolist()
    again = sampler.fork(partial, 3)
    assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in done]
    sampler.between_blocks(sampler.loop.batch.check_integrity)
    sampler.close()


@pytest.mark.full
def test_extras_survive_a_save(tmp_path) -> None:
    req = request(
        22, request_id="x", max_new_tokens=20, stop_token_ids=(), extras=True,
        sampling=SamplingParams(top_k=5),
    )  # fmt: skip
    sampler = make_sampler(block=2)
    wanted = sampler.generate([req])[0]
    partial = caught_in_flight(sampler, req)
    save_partial(partial, tmp_path / "x.npz")
    done = sampler.resume([load_partial(tmp_path / "x.npz")])[0]
    sampler.close()
    assert done.kept.ids.tolist() == wanted.kept.ids.tolist()
    assert done.kept.starts.tolist() == wanted.kept.starts.tolist()
    np.testing.assert_allclose(done.full_logprobs, wanted.full_logprobs, atol=1e-5)


def test_what_is_wrong_is_said(tmp_path) -> None:
    sampler = make_sampler(seed=1)
    with pytest.raises(RolloutError, match="'nobody' is not running"):
        sampler.save("nobody")
    empty = np.zeros(0, np.int32)
    partial = Partial(
        request=REQUEST, token_ids=empty, logprobs=empty.astype(np.float32), versions=empty, seed=2
    )
    with pytest.raises(RolloutError, match="of seed 2, this one has 1"):
        sampler.resume([partial])
    full = Partial(
        request=REQUEST,
        token_ids=np.zeros(30, np.int32),
        logprobs=np.zeros(30, np.float32),
        versions=np.zeros(30, np.int32),
        seed=1,
    )
    with pytest.raises(RolloutError, match="nothing is left to do"):
        sampler.resume([full])
    (tmp_path / "bad.npz").write_bytes(b"no")
    with pytest.raises(RolloutError, match="is not a saved request"):
        load_partial(tmp_path / "bad.npz")
    sampler.close()


@pytest.mark.full
def test_a_request_that_still_waits_can_be_saved_and_stopped() -> None:
    sampler = make_sampler(slots=1, reserve=0.0)
    futures = sampler.start_many(
        [request(i, request_id=f"w{i}", max_new_tokens=30, stop_token_ids=()) for i in range(4)]
    )
    partial = sampler.save("w3", stop=True)
    assert len(partial.token_ids) == 0 and futures[3].result().stop is StopReason.CANCELLED
    assert all(len(f.result().token_ids) for f in futures[:3])
    threads = threading.active_count()
    sampler.close()
    assert threading.active_count() < threads


def test_forks_of_forks_are_all_different() -> None:
    empty = np.zeros(0, np.int32)
    root = Partial(
        request=REQUEST, token_ids=empty, logprobs=empty.astype(np.float32), versions=empty, seed=0
    )
    children = branches(root, 3)
    everybody = [root, *children]
    for child in children:
        for count in (1, 2, 5):
            assert branches(child, 5)[:count] == branches(child, count)
        everybody += branches(child, 5)
        everybody += branches(branches(child, 1)[0], 5)
    assert len({p.request.branch for p in everybody}) == len(everybody)
    later = replace(root, token_ids=np.zeros(3, np.int32))
    assert branches(later, 1)[0].request.branch != children[0].request.branch


@pytest.mark.full
def test_a_request_saved_in_bfloat16_goes_on_and_kv_of_another_cache_is_refused(tmp_path) -> None:
    def sampler():
        settings = SamplerSettings(dtype=jnp.bfloat16)
        return Sampler((SPEC, PARAMS), section=SECTION, settings=settings)

    with sampler() as first:
        wanted = first.generate([REQUEST])[0]
        save_partial(caught_in_flight(first, REQUEST), tmp_path / "one")
    saved = load_partial(tmp_path / "one")
    assert saved.kv.dtype == jnp.bfloat16
    with sampler() as second:
        assert second.resume([saved])[0].token_ids.tolist() == wanted.token_ids.tolist()
        for kv, message in (
            (saved.kv[1:], "shape"),
            (saved.kv[..., :4], "shape"),
            (saved.kv.astype(np.float32), "float32"),
            (saved.kv.view(np.uint16), "uint16"),
            (np.concatenate([saved.kv] * 3, axis=2), "shape"),
            ("text", "not an array"),
        ):
            with pytest.raises(RolloutError, match=message):
                second.resume([replace(saved, kv=kv)])
        for field, value in (
            ("versions", saved.versions[1:]),
            ("logprobs", saved.logprobs[None]),
            ("token_ids", saved.token_ids + 48),
            ("kept", "text"),
        ):
            with pytest.raises(RolloutError, match=field):
                second.resume([replace(saved, **{field: value})])
        assert second.error is None
