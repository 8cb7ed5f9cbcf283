"""Who stands still, and that only a run in which nothing gets on is stopped."""

import threading
from dataclasses import replace

import pytest

from jaxrl_async.errors import StalledError
from jaxrl_async.run.watchdog import Reading, Watchdog, stuck_part
from jaxrl_async.testing.clock import VirtualClock

WAITING = Reading(trainer="waiting for groups", version=3, slots_free=2, published=3, live=3)


@pytest.mark.parametrize(
    ("change", "part", "words"),
    [
        ({"trainer": "learning", "trainer_s": 900.0}, "trainer", "learning for 900 s"),
        ({"trainer": "saving"}, "trainer", "saving"),
        ({"trainer": "waiting for its turn", "trainer_s": 9.0}, "run that has", "for 9 s"),
        ({"trainer": "publishing"}, "sampler", "weights of version 3"),
        ({"trainer": "waiting for live weights"}, "sampler", "take no weights"),
        ({"score_s": 70.0, "requests": 4}, "scorer", "for 70 s"),
        ({"env_s": 70.0}, "environment", "for 70 s"),
        ({"requests": 4}, "sampler", "4 requests <- 1 samplers"),
        ({"requests": 4, "living": 0}, "sampler", "no sampler is at work"),
        ({"trainer": "evaluating", "requests": 4}, "sampler", "evaluating"),
        ({"playing": 2}, "rollouts", "2 groups without a request"),
        ({"slots_free": 0, "live": 2}, "sampler", "the gate <- version 3, live is 2"),
        ({"slots_free": 0, "ready": 1}, "gate", "shut, with 1 groups ready"),
        ({}, "rollouts", "no group begins"),
    ],
)
def test_the_part_that_others_wait_for_is_named(change, part, words):
    found, why = stuck_part(replace(WAITING, **change))
    assert found.startswith(part) and words in why


def test_it_barks_only_where_nothing_has_moved_for_the_limit(tmp_path):
    clock, readings = VirtualClock(), [WAITING]
    dog = Watchdog(lambda: readings[-1], limit_s=100, stacks=tmp_path / "stacks.txt", clock=clock)
    for version in range(5):
        dog.look()
        clock.advance(90)
        readings.append(replace(WAITING, blocks=version + 1))
    dog.look()
    clock.advance(99)
    dog.look()
    clock.advance(1)
    with pytest.raises(StalledError, match=r"100 s; stuck part: rollouts.*stacks\.txt"):
        dog.look()


def test_the_stacks_of_all_threads_are_written(tmp_path):
    clock, stop = VirtualClock(), threading.Event()

    def hangs_in_a_function_of_this_name():
        stop.wait(60)

    thread = threading.Thread(target=hangs_in_a_function_of_this_name)
    thread.start()
    stacks = tmp_path / "stacks.txt"
    dog = Watchdog(lambda: replace(WAITING, score_s=5.0), limit_s=1, stacks=stacks, clock=clock)
    dog.look()
    clock.advance(1)
    with pytest.raises(StalledError):
        dog.look()
    stop.set()
    thread.join()
    text = stacks.read_text()
    assert text.startswith("scorer: ") and "hangs_in_a_function_of_this_name" in text


def test_the_stacks_of_an_earlier_stall_are_kept(tmp_path):
    """Before, the resume after a stall deleted what said why it had stalled."""
    clock, stacks = VirtualClock(), tmp_path / "stacks.txt"

    def ran(*words):
        dog = Watchdog(lambda: WAITING, limit_s=100, stacks=stacks, clock=clock)
        thread = threading.Thread(target=dog.run)
        thread.start()
        dog.stop()
        thread.join(30)
        assert stacks.exists() == bool(words)
        assert not words or stacks.read_text().startswith(words)

    ran()
    stacks.write_text("an earlier one\n")
    ran("an earlier one\n")
    dog = Watchdog(lambda: WAITING, limit_s=1, stacks=stacks, clock=clock)
    dog.look()
    clock.advance(1)
    with pytest.raises(StalledError):
        dog.look()
    assert stacks.read_text().startswith("an earlier one\nrollouts: ")
    ran("an earlier one\nrollouts: ")


def test_stopping_it_ends_its_thread_and_0_never_barks(tmp_path):
    dog = Watchdog(lambda: WAITING, limit_s=3600, stacks=tmp_path / "stacks.txt")
    thread = threading.Thread(target=dog.run)
    thread.start()
    dog.stop()
    thread.join(30)
    assert not thread.is_alive()
    Watchdog(lambda: WAITING, limit_s=0, stacks=tmp_path / "stacks.txt").run()
