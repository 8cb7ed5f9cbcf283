"""How long the reader of a sampler's progress pauses."""

import asyncio
import time

import pytest

from jaxrl_async.endpoint import progress_watch
from jaxrl_async.endpoint.progress_watch import LONGEST_PAUSE_S, ProgressWatch


class Sampler:
    """Its first reading waits, as one does while a program is compiled; the others take no time."""

    def __init__(self) -> None:
        self.readings = 0

    def progress(self) -> tuple[()]:
        self.readings += 1
        time.sleep(LONGEST_PAUSE_S if self.readings == 1 else 0)
        return ()


@pytest.mark.full
def test_a_reading_that_waited_does_not_delay_the_next_by_more_than_the_limit(monkeypatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def read() -> None:
        watch = ProgressWatch(Sampler(), every_s=0.02)
        monkeypatch.setattr(progress_watch.asyncio, "sleep", noted)
        watch.add(["one"], asyncio.Event())
        while len(pauses) < 5:
            await sleep(0.01)
        watch.remove(["one"])
        await watch.close()

    asyncio.run(read())
    assert pauses[0] == LONGEST_PAUSE_S
    assert 0.02 <= min(pauses[1:]) < LONGEST_PAUSE_S
