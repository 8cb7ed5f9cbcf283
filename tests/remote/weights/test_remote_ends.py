"""Samplers in processes of their own at the weight channel: they join, fetch, lag, fail, leave."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from remote_side import TrainerSide, eventually, weights

from jaxrl_async.errors import Closed, Disconnected, WeightsError
from jaxrl_async.remote.wire.messages import Live, Staged
from jaxrl_async.weights.delivery import FunctionLink


def test_a_sampler_gets_the_first_weights_and_every_version_that_follows():
    with TrainerSide() as side:
        sampler = side.join()
        first = sampler.receiver.first(30)
        assert first.version == 0 and not sampler.entered.is_set()
        sampler.swap(first)
        assert sampler.entered.wait(30)
        for version in (1, 2, 3):
            side.publish(version)
            sampler.draw_from(version)
            side.channel.wait_live(version, 30)
        assert side.live == [1, 2, 3] and sampler.drawn == [0, 1, 2, 3]
        stats = side.channel.stats()
        assert stats.transfer_bytes == 44 and stats.remote.sent_bytes == 4 * 44
        assert (stats.remote.transfers, stats.remote.joins, stats.remote.late) == (4, 1, 0)
        assert stats.transfer_s > 0 and stats.live_s > 0 and side.counted() == {}


def test_the_probe_comes_with_the_weights():
    with TrainerSide() as side:
        sampler = side.join().begin()
        side.publish(1)
        eventually(lambda: sampler.receiver.staged)
        np.testing.assert_array_equal(sampler.receiver.poll().probe_logprobs, [1, 1])


def test_the_trainers_weights_may_be_donated_right_after_publish():
    with TrainerSide() as side:
        params = weights(1)
        side.channel.publish(1, params)
        for leaf in params.values():
            leaf.delete()
        assert side.join().receiver.first(30).params["w"][0, 0] == -1


def test_no_publish_waits_for_a_sampler_and_two_copies_are_the_most():
    with TrainerSide() as side:
        fast, slow = side.join("fast").enter(), side.join("slow").enter()
        slow.fetching.go.clear()
        for version in range(1, 30):
            side.publish(version)
            fast.draw_from(version) if version % 3 == 0 else None
        side.publish(30)
        fast.draw_from(30)
        assert side.channel.live_version == 0, "the slow one generates with it"
        slow.fetching.go.set()
        slow.draw_from(30)
        side.channel.wait_live(30, 30)
        assert len(slow.drawn) <= 4, "it skipped what was old"
        assert side.live == sorted(set(side.live)) and side.offering.most_offered <= 2
        eventually(lambda: list(side.offering.offered) == [30])


def test_without_any_sampler_the_newest_weights_wait_for_one_and_the_live_version_stays():
    with TrainerSide(version=3) as side:
        for version in (4, 5, 6):
            side.publish(version)
        eventually(lambda: list(side.offering.offered) == [6])
        assert side.channel.live_version == 3
        sampler = side.join().begin()
        side.channel.wait_live(6, 30)
        assert sampler.drawn == [6] and side.live == [6]
        sampler.end.leave()
        side.publish(7)
        assert side.channel.live_version == 6
        side.join().begin()
        side.channel.wait_live(7, 30)


def test_one_that_is_too_old_to_join_gets_newer_weights_first_and_is_waited_for():
    with TrainerSide() as side:
        old, late = side.join("old").enter(), side.join("late")
        first = late.receiver.first(30)
        for version in (1, 2):
            side.publish(version)
            old.draw_from(version)
        side.channel.wait_live(2, 30)
        late.fetching.go.clear()
        late.swap(first)
        eventually(lambda: len(late.fetching.sources) == 2)
        assert not late.entered.is_set() and side.channel.stats().remote.late == 1
        side.publish(3)
        old.draw_from(3)
        assert side.channel.live_version == 2, "it waits for the one that comes to join"
        late.fetching.go.set()
        late.draw_from(3)
        assert late.entered.wait(30)
        side.channel.wait_live(3, 30)
        assert late.drawn == [0, 2, 3] and side.channel.stats().remote.joins == 2


@pytest.mark.parametrize("how", ["leaves", "is lost"])
def test_the_slowest_one_going_lets_the_live_version_rise(how):
    with TrainerSide() as side:
        fast, slow = side.join("fast").enter(), side.join("slow").enter()
        slow.fetching.go.clear()
        side.publish(1)
        fast.draw_from(1)
        eventually(lambda: len(slow.fetching.sources) == 2)
        assert side.channel.live_version == 0
        slow.end.leave() if how == "leaves" else slow.pair.line.cut()
        side.channel.wait_live(1, 30)
        assert side.live == [1] and not slow.end.entered
        eventually(lambda: list(side.offering.offered) == [1])


def test_local_and_remote_samplers_share_a_channel():
    with TrainerSide(links=[FunctionLink(lambda p: p)]) as side:
        local, remote = side.channel.subscribe(), side.join().enter()
        side.publish(1)
        remote.draw_from(1)
        assert side.channel.live_version == 0
        assert local.poll(wait=True).version == 1
        local.live(1)
        side.channel.wait_live(1, 30)
        side.publish(2)
        local.poll(wait=True)
        local.live(2)
        assert side.channel.live_version == 1
        side.publish(3)
        remote.pair.line.cut()
        eventually(lambda: side.live == [1, 2])


@pytest.mark.full
def test_a_torn_transfer_is_never_used_and_comes_again():
    with TrainerSide() as side:
        sampler = side.join().begin()
        sampler.fetching.torn = 1
        side.publish(1)
        sampler.draw_from(1)
        assert side.counted() == {"torn_transfers": 1, "transfer_retries": 1}
        assert side.channel.stats().remote.repeats == 1


def test_one_that_never_gets_the_weights_is_given_up_and_the_run_continues(monkeypatch):
    monkeypatch.setattr("jaxrl_async.remote.weights.transfers.RETRY_S", 0.01)
    with TrainerSide() as side:
        good, bad = side.join("good").begin(), side.join("bad").begin()
        bad.fetching.broken = 1000
        side.publish(1)
        good.draw_from(1)
        side.channel.wait_live(1, 30)
        eventually(lambda: bad.pair.sampler.ended)  # it notices that later than the trainer
        assert "did not reach bad in 3 attempts" in bad.pair.sampler.ended
        assert "the line is broken" in bad.pair.sampler.ended
        assert side.counted() == {
            "torn_transfers": 3, "transfer_retries": 3, "transfers_given_up": 1
        }  # fmt: skip
        side.join("anew").begin()
        assert good.end.entered


def test_a_transfer_that_times_out_is_offered_again_and_then_given_up(monkeypatch):
    monkeypatch.setattr("jaxrl_async.remote.weights.transfers.RETRY_S", 0.01)
    with TrainerSide(transfer_timeout_s=0.05) as side:
        good, stalled = side.join("good").begin(), side.join("silent").begin()
        stalled.fetching.go.clear()
        side.publish(1)
        good.draw_from(1)
        side.channel.wait_live(1, 30)
        eventually(lambda: stalled.pair.sampler.ended)
        assert "not done within 0.05 s" in stalled.pair.sampler.ended
        assert len(stalled.fetching.sources) == 1 + 3


def test_samplers_pass_on_what_they_have():
    with TrainerSide(fanout=1) as side:
        first = side.join("a", address="a:1").begin()
        second = side.join("b", address="b:1").begin()
        assert first.fetching.sources == [("trainer:1",)]
        assert second.fetching.sources == [("a:1", "trainer:1")]
        assert second.fetching.fetched == [(0, "a:1")]
        eventually(lambda: side.channel.stats().remote.passed_bytes == 44)
        assert side.channel.stats().remote.sent_bytes == 44
        first.pair.line.cut()
        eventually(lambda: not first.end.entered)
        third = side.join("c", address="c:1").begin()
        assert third.fetching.sources == [("b:1", "trainer:1")], "the dead one is left out"


def test_one_that_claims_what_it_cannot_have_is_cut_off():
    with TrainerSide() as side:
        honest, liar = side.join("honest").begin(), side.join("liar").begin()
        liar.pair.sampler.send(Live(version=999))
        eventually(lambda: liar.pair.trainer.ended)
        assert "generates with version 999" in liar.pair.trainer.ended
        other = side.join("other")
        other.pair.sampler.send(Staged(version=5, num_bytes=1, seconds=0.0, source=""))
        eventually(lambda: other.pair.trainer.ended)
        assert "was offered" in other.pair.trainer.ended
        assert side.channel.live_version == 0 and honest.end.entered


def test_another_models_weights_are_refused_before_any_byte_moves(monkeypatch):
    monkeypatch.setattr("jaxrl_async.remote.weights.transfers.RETRY_S", 0.01)
    with TrainerSide() as side:
        sampler = side.join(layout="of another model")
        with pytest.raises(Disconnected, match="layout"):
            sampler.receiver.first(30)
        assert sampler.fetching.sources == []


def test_what_cannot_be_offered_is_tried_again_and_then_ends_the_run(monkeypatch):
    monkeypatch.setattr("jaxrl_async.remote.weights.outbox.RETRY_S", 0.01)
    with TrainerSide() as side:
        sampler = side.join().begin()
        side.offering.failures = 2
        side.publish(1)
        sampler.draw_from(1)
        assert side.counted() == {"transfer_retries": 2}
        side.offering.failures = 3
        side.publish(2)
        eventually(lambda: side.counted() == {"transfer_retries": 5})
        with pytest.raises(WeightsError, match="could not be offered"):
            eventually(lambda: side.publish(side.channel.published_version + 1))


def test_one_that_has_left_takes_nothing_more_and_has_no_successor():
    with TrainerSide() as side:
        sampler = side.join().begin()
        side.publish(1)
        eventually(lambda: sampler.receiver.staged)
        wake = threading.Event()
        sampler.receiver.attach(wake)
        assert wake.is_set()
        sampler.receiver.leave()
        sampler.receiver.live(1)
        assert sampler.receiver.poll() is None and side.channel.live_version == 0
        side.publish(2)
        time.sleep(0.05)
        assert len(sampler.fetching.fetched) == 2, "nothing is fetched for it"
        with pytest.raises(Closed, match="restart it"):
            sampler.receiver.rejoin()


def test_an_idle_sampler_is_woken_and_holds_no_third_set():
    with TrainerSide() as side:
        sampler, wake = side.join().begin(), threading.Event()
        sampler.receiver.attach(wake)
        side.publish(1)
        assert wake.wait(30)
        update = sampler.receiver.poll(wait=True)
        side.publish(2)
        time.sleep(0.05)
        assert len(sampler.fetching.fetched) == 2, "version 2 waits until version 1 is live"
        sampler.swap(update)
        sampler.draw_from(2)


def test_every_wait_ends_with_the_channel_or_the_session():
    side = TrainerSide()
    with side:
        sampler = side.join()
        sampler.receiver.first(30)
        raised = []

        def wait():
            try:
                side.channel.wait_live(1, 60)
            except Closed as error:
                raised.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        sampler.pair.line.cut()
        eventually(lambda: sampler.receiver.over)
        with pytest.raises(Disconnected, match="the line was cut"):
            sampler.receiver.first(60)
    thread.join(30)
    assert len(raised) == 1 and side.offering.closed
    with pytest.raises(Closed):
        side.join()


def test_waiting_for_live_weights_without_any_sampler_ends_with_a_reason():
    with TrainerSide(wait_s=0.05) as side, pytest.raises(WeightsError, match=r"remote\.wait_s"):
        side.channel.wait_live(1, 60)


@pytest.mark.parametrize("there", [True, False], ids=["one that is late", "none there"])
def test_a_wait_for_live_weights_can_be_given_up(there):
    stop = threading.Event()
    with TrainerSide() as side:
        sampler = side.join().begin()
        side.publish(1)  # which it never swaps to
        if not there:
            sampler.pair.close()
        waiting = threading.Thread(target=side.channel.wait_live, args=(1, 600, stop.is_set))
        waiting.start()
        stop.set()
        waiting.join(30)
        assert not waiting.is_alive() and side.channel.live_version == 0


def test_an_offer_waits_for_room_in_its_own_session_alone(monkeypatch):
    with TrainerSide() as side:
        full, other = side.join("full").enter(), side.join("other").enter()
        room = threading.Event()
        session = full.pair.trainer
        send = session.send
        monkeypatch.setattr(session, "send_now", lambda message: False)
        monkeypatch.setattr(session, "send", lambda message: room.wait(30) and send(message))
        side.publish(1)
        other.draw_from(1)
        assert side.channel.live_version == 0, "the offer to the full one waits"
        room.set()
        full.draw_from(1)
        side.channel.wait_live(1, 30)


def test_a_version_is_offered_with_no_thread_of_its_own(monkeypatch):
    with TrainerSide() as side:
        samplers = [side.join(f"s{n}").enter() for n in range(4)]
        started = []
        start = threading.Thread.start
        monkeypatch.setattr(
            threading.Thread, "start", lambda self: (started.append(self.name), start(self))
        )
        side.publish(1)
        for sampler in samplers:
            sampler.draw_from(1)
        side.channel.wait_live(1, 30)
        assert not [name for name in started if name.startswith("offer to")]


def test_a_way_that_failed_is_counted_where_the_run_is_watched():
    with TrainerSide() as side:
        sampler = side.join().begin()
        fetched = sampler.fetching.fetch
        sampler.fetching.fetch = lambda *of: replace(fetched(*of), fallbacks=2)
        side.publish(1)
        sampler.draw_from(1)
        assert side.counted() == {"transfer_fallbacks": 2}
