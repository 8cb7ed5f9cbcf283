"""How samplers end: with the program, forgotten, forked, interrupted, called back."""

import asyncio
import gc
import multiprocessing
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from tiny import make_sampler, request

from jaxrl_async.errors import Closed, RolloutError
from jaxrl_async.sampler.router.router import Router

pytestmark = pytest.mark.full

HERE = Path(__file__).parent
LONG = {"max_new_tokens": 24, "stop_token_ids": ()}


@pytest.fixture
def ctrl_c_raises():
    """Python's own answer to SIGINT, whatever was imported before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def within(seconds: float, done) -> bool:
    """Whether this becomes true in time."""
    until = time.monotonic() + seconds
    while not (found := done()) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.02)
    return bool(found)


@pytest.mark.parametrize(
    "part",
    [
        "make_sampler()",
        pytest.param("Router([make_sampler(), make_sampler()])", marks=pytest.mark.exhaustive),
    ],
)
def test_a_program_that_ends_while_its_sampler_decodes_ends_well(part) -> None:
    code = f"""
        import sys; sys.path.insert(0, {str(HERE)!r})
        from tiny import make_sampler, request
        from jaxrl_async.sampler.router.router import Router
        sampler = {part}
        sampler.generate([request(0)])
        wishes = [request(i, max_new_tokens=24, stop_token_ids=()) for i in range(400)]
        for one in getattr(sampler, "samplers", [sampler]):
            futures = one.start_many(wishes)
        print("left", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout == "left\n"
    assert "FATAL" not in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_forgotten_sampler_goes_with_its_thread_and_its_arrays() -> None:
    threads = threading.active_count()
    make_sampler().generate([request(0)])  # what is compiled stays
    assert within(5, lambda: threading.active_count() <= threads)
    arrays = len(jax.live_arrays())
    held = []
    for number in range(3):
        sampler = make_sampler()
        sampler.generate([request(number)])
        held.append(weakref.ref(sampler))
    del sampler
    router = Router([make_sampler()])
    router.generate([request(1)])
    held += [weakref.ref(router), weakref.ref(router.samplers[0])]
    del router
    assert within(10, lambda: all(ref() is None for ref in held)), "somebody holds a sampler"
    assert within(5, lambda: threading.active_count() <= threads)
    assert within(5, lambda: len(jax.live_arrays()) <= arrays + 8)


def test_who_waits_for_a_sampler_that_nobody_else_holds_gets_the_answer() -> None:
    futures = make_sampler().start_many([request(i, **LONG) for i in range(6)])
    gc.collect()
    assert all(len(f.result(60).token_ids) == 24 for f in futures)


def test_nor_does_it_go_between_the_request_and_the_thread_that_takes_it_in(monkeypatch) -> None:
    slow, found = threading.Event(), threading.Event.wait

    def wait(event, timeout=None):  # the thread looks for its part late
        ended = found(event, timeout)
        if threading.current_thread().name == "sampler":
            slow.wait(0.3)
        return ended

    sampler = make_sampler()
    sampler.generate([request(0)])
    monkeypatch.setattr(threading.Event, "wait", wait)
    (future,) = sampler.start_many([request(1)])
    del sampler
    gc.collect()
    assert future.result(60).token_ids.size


def child(sampler, answers) -> None:
    for ask in (
        lambda: sampler.generate([request(0)]),
        lambda: sampler.start_many([request(0)]),
        lambda: sampler.progress(),
    ):
        try:
            ask()
            answers.put("served")
        except RolloutError as error:
            answers.put(str(error))
    sampler.close()
    answers.put("closed")


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_so_and_the_parent_goes_on() -> None:
    fork = multiprocessing.get_context("fork")
    with make_sampler() as sampler:
        wanted = sampler.generate([request(0)])[0].token_ids.tolist()
        answers = fork.Queue()
        process = fork.Process(target=child, args=(sampler, answers))
        process.start()
        messages = [answers.get(timeout=60) for _ in range(4)]
        process.join(60)
        assert all("a fork of it" in text and "spawn" in text for text in messages[:3])
        assert messages[3] == "closed" and process.exitcode == 0
        assert sampler.generate([request(0)])[0].token_ids.tolist() == wanted


@pytest.mark.parametrize(
    "wrap",
    [lambda s: s, pytest.param(lambda s: Router([s]), marks=pytest.mark.exhaustive)],
    ids=["sampler", "router"],
)
def test_an_interrupted_generate_cancels_what_it_waited_for(wrap, ctrl_c_raises) -> None:
    sampler = make_sampler()
    sampler.generate([request(0)])
    with wrap(sampler) as part:
        blocks = sampler.stats().blocks

        main = threading.main_thread().ident

        def interrupt() -> None:
            within(30, lambda: sampler.stats().blocks > blocks + 2)
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            part.generate([request(i, **LONG) for i in range(300)])
        thread.join()
        assert within(10, lambda: not (sampler.loop.batch.admitted or sampler.loop.batch.queue))
        assert sampler.stats().requests_done < 250
        assert len(part.generate([request(3)])) == 1


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: Router([s])], ids=["sampler", "router"])
def test_a_callback_that_waits_is_told_and_one_that_raises_or_closes_hurts_nobody(wrap) -> None:
    sampler = make_sampler()
    with wrap(sampler) as part:
        messages: list[object] = []

        def calls_back(future) -> None:
            for ask in (
                lambda: part.generate([request(1)]),
                lambda: part.resume([]),
                lambda: sampler.progress(),
                lambda: sampler.has("x"),
            ):
                try:
                    ask()
                    messages.append("served")
                except RolloutError as error:
                    messages.append(str(error))
            raise SystemExit(3)

        (future,) = sampler.start_many([request(0)])
        future.add_done_callback(calls_back)
        future.result(60)
        assert within(10, lambda: len(messages) == 4)
        assert all("on whose own thread" in str(text) for text in messages), messages
        assert len(part.generate([request(2)])) == 1
        first, *others = sampler.start_many([request(i, **LONG) for i in range(9)])
        first.add_done_callback(lambda f: sampler.close())
        first.result(60)
        for other in others:
            assert other.exception(60) is None or isinstance(other.exception(), Closed)


def test_an_event_loop_that_was_closed_hurts_no_one_else() -> None:
    with make_sampler() as sampler:
        loop = asyncio.new_event_loop()

        async def ask():
            return sampler.submit_many([request(i, **LONG) for i in range(3)])

        futures = loop.run_until_complete(ask())
        loop.is_closed = lambda: False  # it closes between this look and the next call
        loop.close()
        assert len(sampler.generate([request(7)])) == 1
        assert within(10, lambda: not sampler.loop.busy) and sampler.error is None
        assert not any(f.done() for f in futures)
        del loop.is_closed


def test_cancelled_requests_far_back_in_the_queue_go_as_soon_as_they_matter() -> None:
    with make_sampler() as sampler:
        first = sampler.start_many([request(i, **LONG) for i in range(4)])
        rest = sampler.start_many([request(i, **LONG) for i in range(300)])
        for future in rest:
            future.cancel()
        last = sampler.start_many([request(5)])
        assert len(last[0].result(30).token_ids)
        assert all(f.result(30) for f in first)
        assert within(10, lambda: not sampler.loop.busy)
        assert sampler.stats().requests_done == 5


def test_no_successor_gives_a_key_that_was_given_before():
    """Else samples of one prompt would be the same before and after a restart."""
    old = make_sampler()
    wanted = [replace(request(n), key=None) for n in range(3)]
    keys = [r.key for r in old.checked(wanted)]
    old.abandon()
    successor = old.successor()
    keys += [r.key for r in successor.checked(wanted)]
    assert len(set(keys)) == 6
    successor.close()
