"""A tiny decoder and requests for it, for the sampler's tests."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxrl_async.config import schema
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.ports.weights import FixedWeights
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import Request, SamplingParams, VersionedParams

VOCAB = 48
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=64), VOCAB
)
PARAMS = init_params(SPEC, jax.random.key(0))
OTHER = init_params(SPEC, jax.random.key(1))
SECTION = schema.SamplerSection(slots=4, max_length=64, max_new_tokens=32, block=4, page_tokens=16)

KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=8),
    SamplingParams(top_p=0.8, min_p=0.02),
)


def make_sampler(**requests: object) -> Sampler:
    """A sampler with other settings than SECTION's."""
    own = ("weights", "seed", "version", "mesh", "settings")
    kept = {k: requests.pop(k) for k in own if k in requests}
    return Sampler((SPEC, PARAMS), section=SECTION.model_copy(update=requests), **kept)


def request(number: int, **requests: object) -> Request:
    """A request that its number says all about."""
    random = np.random.default_rng(number)
    base: dict = {
        "request_id": f"g{number}/m0/t0",
        "token_ids": random.integers(0, VOCAB, random.integers(3, 40)).astype(np.int32),
        "max_new_tokens": int(random.integers(2, 24)),
        "sampling": KINDS[number % len(KINDS)],
        "stop_token_ids": (1,) if number % 3 == 0 else (),
        "key": (number, 0),
    }
    return Request(**{**base, **requests})


class Script(FixedWeights):
    """A WeightSource that gives prepared weights, one at each poll after `after` polls."""

    def __init__(self, updates: list[VersionedParams], after: int = 2) -> None:
        self.updates, self.wait_polls = updates, after
        self.went_live: list[int] = []
        self.seen = threading.Event()

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        self.wait_polls -= 1
        return self.updates.pop(0) if self.wait_polls < 0 and self.updates else None

    def live(self, version: int) -> None:
        self.went_live.append(version)
        self.seen.set()


class Held:
    """A sampler that stops before the first round that finds a sequence of this many tokens, until
    `meanwhile`: what a test does in mid-answer is done there however fast the sampler is."""

    def __init__(self, sampler: Sampler, tokens: int) -> None:
        self._loop, self._tokens = sampler.loop, tokens
        self._there, self._go_on = threading.Event(), threading.Event()
        self._whole = self._loop.round
        self._loop.round = self._round

    def _round(self, batch: Any) -> bool:
        reached = any(batch.num_sampled(s) >= self._tokens for s in batch.admitted.values())
        if reached and not self._go_on.is_set():
            self._there.set()
            assert self._go_on.wait(60), "no test went on"
        return self._whole(batch)

    def meanwhile(self, *calls: Callable[[], Any]) -> list[Any]:
        """Wait until the sampler stops; make calls that the sampler's thread answers, let it go on
        once all of them have come to it, and return their answers."""
        assert self._there.wait(60), "no sequence came so far"
        try:
            with ThreadPoolExecutor(len(calls) or 1) as pool:
                answers = [pool.submit(call) for call in calls]
                while not self._all_came(answers):
                    time.sleep(0.001)
                self._go_on.set()
                return [answer.result(60) for answer in answers]
        finally:
            self._go_on.set()

    def _all_came(self, answers: list[Future[Any]]) -> bool:
        came = len(self._loop.inbox._commands) + self._loop.changes.waiting
        return came >= sum(not answer.done() for answer in answers)
