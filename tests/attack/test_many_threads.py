"""Code that would start a thread for each call: the process keeps a bounded number."""

import asyncio
import threading
import time

import pytest

from jaxrl_async.rollout.chat_env import TOKENIZER_THREADS, in_thread
from jaxrl_async.tasks import usercode
from jaxrl_async.tasks.usercode import (
    LOOP_THREADS,
    MAX_STUCK,
    DaemonThreads,
    RolloutError,
    run_async,
    run_loop,
)


class AtOnce:
    """Work that counts how much of it runs at once."""

    def __init__(self):
        self.lock, self.now, self.most, self.done = threading.Lock(), 0, 0, 0

    def __call__(self):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.002)
        with self.lock:
            self.now -= 1
            self.done += 1


@pytest.mark.full
@pytest.mark.parametrize("whose", ["the run's loop", "the loop for user code"])
def test_1500_calls_of_to_thread_are_made_by_a_few_threads(whose):
    """Before, by 1,500."""
    work = AtOnce()

    async def call():
        await asyncio.to_thread(work)

    async def all_of_them():
        if whose == "the run's loop":
            await asyncio.gather(*(call() for _ in range(1500)))
        else:
            await asyncio.gather(*(run_async(call, 60) for _ in range(1500)))

    run_loop(all_of_them())
    assert work.done == 1500 and 1 < work.most <= LOOP_THREADS == 32


def test_few_long_texts_are_tokenized_at_once():
    """Before, as many as came; in the asyncio loop of any caller."""
    work = AtOnce()

    async def all_of_them():
        await asyncio.gather(*(in_thread(work) for _ in range(200)))

    asyncio.run(all_of_them())
    assert work.done == 200 and work.most <= 4 and isinstance(TOKENIZER_THREADS, DaemonThreads)


def test_what_to_thread_gives_and_raises_is_as_in_asyncio():
    def gives(first, *, second):
        return first + second

    async def go():
        assert await asyncio.to_thread(gives, 1, second=2) == 3
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)

    run_loop(go())


def test_calls_that_hang_are_replaced_and_those_that_wait_are_not_begun(monkeypatch):
    monkeypatch.setattr(usercode, "MAX_STUCK", 6)
    wake, begun = threading.Event(), []

    def hangs(number):
        begun.append(number)
        wake.wait(60)

    async def go():
        pool, loop = DaemonThreads(2), asyncio.get_running_loop()
        for first in (0, 10, 20):
            calls = [loop.run_in_executor(pool, hangs, first + n) for n in range(4)]
            while len(begun) % 2 or not begun or max(begun) < first:
                await asyncio.sleep(0.001)
            calls[2].cancel()
            calls[3].cancel()  # they wait, and are never begun
            calls[0].cancel()
            calls[1].cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(RolloutError, match="6 earlier calls have not returned"):
            loop.run_in_executor(pool, hangs, 30)
        wake.set()
        while True:
            try:
                return await loop.run_in_executor(pool, lambda: 5)
            except RolloutError:
                await asyncio.sleep(0.001)

    assert asyncio.run(go()) == 5 and MAX_STUCK == 64
    assert sorted(begun) == [0, 1, 10, 11, 20, 21]
