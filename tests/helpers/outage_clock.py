"""Outages whose waits pass at once on a clock of their own."""

import asyncio
from collections import Counter

from jaxrl_async.outages import Outages
from jaxrl_async.testing.clock import VirtualClock


class QuickOutages(Outages):
    """Outages without chance in their waits, on `clock`; `waits` has each wait, seconds."""

    def __init__(self, **how):
        self.clock, self.waits, self.counted = VirtualClock(), [], Counter()

        async def sleep(seconds):
            self.waits.append(seconds)
            woken = asyncio.ensure_future(self.clock.sleep(seconds))
            while not woken.done():
                await asyncio.sleep(0.001)  # what else can run does
                if not woken.done():
                    self.clock.advance(1.0)

        super().__init__(
            clock=self.clock,
            sleep=sleep,
            chance=lambda: 0.5,
            count=lambda name: self.counted.update([name]),
            **how,
        )
