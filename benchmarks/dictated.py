"""Run the main job with device times that a formula dictates: the device is slept, not computed.

A decode block and an update end when the formula says so, and the thread sleeps until then. So
trainer and samplers do not compete for this machine's cores, as on slices of their own, and all
else (rollouts, gate, buffer, transfer, swaps) is the real run.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from jaxrl_async.sampler.batch.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Dictated:
    """Device times, seconds."""

    step_s: float = 0.006  # of a decode step, and
    row_s: float = 0.0003  # for each of its rows
    update_s: float = 0.3  # of an update, and
    token_s: float = 0.0  # for each token of its batch


@contextlib.contextmanager
def timed_blocks(device: Dictated | None) -> Iterator[dict[int, float]]:
    """Time each decode block. With a device, a block takes the device's forced time from its
    dispatch on, while the host works, as beside a real device."""
    start_block, wait_for_block = Batch.start_block, Batch.wait_for_block
    began: dict[int, float] = {}
    took: dict[int, float] = {}

    def start(batch: Any, weights: Any) -> None:
        began[id(batch)] = time.perf_counter()
        start_block(batch, weights)

    def wait(batch: Any) -> Any:
        block = wait_for_block(batch)
        if block is not None and (steps := int(block.steps)):
            if device is not None:
                row_s = block.tokens.shape[0] * device.row_s
                sleep_until(began[id(batch)] + steps * (device.step_s + row_s))
            took[id(batch)] = time.perf_counter() - began[id(batch)]
        return block

    with patch.object(Batch, "start_block", start), patch.object(Batch, "wait_for_block", wait):
        yield took


def sleep_until(at_s: float) -> None:
    """Sleep until time.perf_counter() has this value."""
    left_s = at_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
