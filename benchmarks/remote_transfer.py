"""Time weights on their way to samplers in processes of their own; see weight_transfer.py --remote.

Run as a program it is one sampler: it reads jobs from stdin, one JSON a line, and answers each.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from common import MODELS, Row, columns, make_params, measure, spread

from jaxrl_async.config import schema
from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.mesh import SAMPLER_RULES, make_slices, shapes_on, shardings
from jaxrl_async.model.spec import weight_table
from jaxrl_async.remote.weights.protocols import Fetched, Fetching
from jaxrl_async.remote.weights.transfers import sources_of_next
from jaxrl_async.remote.weights.transport_choice import make_fetching, make_offering

WARM_UP = 2
"""Versions before the measured ones of a transport: from the third on, memory is used again."""
SAMPLERS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A row of the table for each number of samplers."""

    name: str
    fanout: int = max(SAMPLERS)  # to how many the trainer sends, where samplers pass weights on
    counts: tuple[int, ...] = SAMPLERS


WAYS = {
    "shared_memory": (Way(name="shared memory"),),
    "tcp": (Way(name="tcp, star"), Way(name="tcp, tree of 2", fanout=2, counts=(4, 8))),
    "device": (Way(name="device", counts=(1,)),),
    "folder": (Way(name="folder", counts=(1, 2)),),
}
"""By remote.transfer."""


def remote_rows(args: argparse.Namespace) -> list[Row]:
    """Time every way with every number of samplers."""
    model = "1M" if args.quick else "50M"
    most = 2 if args.quick else max(SAMPLERS)
    params = make_params(MODELS[model])
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    copy_s = _copy_s(num_bytes, args.repeats)
    rows = []
    with tempfile.TemporaryDirectory() as folder, _samplers(most, model) as samplers:
        for transfer, ways in WAYS.items():
            section = RemoteSection(transfer=transfer, folder=folder)
            needed = samplers[: max(count for way in ways for count in way.counts)]
            with _Trainer(section, params, needed) as trainer:
                trainer.publish(needed, len(needed), WARM_UP)
                for way, count in [(w, c) for w in ways for c in w.counts if c <= most]:
                    row = trainer.publish(needed[:count], way.fanout, args.repeats)
                    speed = num_bytes * count / row["median_ms"] / 1e6
                    named = {"model": model, "way": way.name, "samplers": count}
                    ratio = speed * copy_s / num_bytes * 1e9
                    rows.append(named | {"gbytes_per_s": speed, "of_memory_copy": ratio} | row)
    return rows


def _copy_s(num_bytes: int, repeats: int) -> float:
    """Return the time of a copy in memory, seconds."""
    one, other = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    return measure(lambda: np.copyto(other, one), max(repeats, 5)).median


class _Trainer:
    """Offers version after version over one transport; a context."""

    def __init__(
        self, section: RemoteSection, params: Any, samplers: Sequence["SamplerProcess"]
    ) -> None:
        self._params, self._samplers = params, samplers
        self._offering: Any = make_offering(section, run="benchmark")
        for sampler in samplers:
            sampler.send(["start", section.model_dump()])
        self._addresses = {sampler: sampler.hear() for sampler in samplers}
        self._version = 0

    def __enter__(self) -> "_Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        for sampler in self._samplers:
            sampler.ask(["stop"])
        self._offering.close()

    def publish(self, samplers: Sequence["SamplerProcess"], fanout: int, repeats: int) -> Row:
        """Offer a version, wait until all samplers have it, and again."""
        addresses = [self._addresses[sampler] for sampler in samplers]
        trainer = self._offering.address
        orders = [
            sources_of_next(index, addresses.__getitem__, fanout, trainer)
            for index in range(len(addresses))
        ]
        taken_s, offer_s, cpu_s, sent = [], [], [], []
        for _ in range(repeats):
            self._version += 1
            cpu_before, sent_before = time.process_time(), self._sent_bytes()
            began = time.monotonic()
            where = self._offering.offer(self._version, self._params)
            offered = time.monotonic()
            for sampler, order in zip(samplers, orders, strict=True):
                sampler.send(["fetch", self._version, where, order])
            results = [sampler.hear() for sampler in samplers]
            taken_s.append(max(end for end, _ in results) - offered)
            offer_s.append(offered - began)
            cpu_s.append(time.process_time() - cpu_before + sum(cpu for _, cpu in results))
            sent.append(self._sent_bytes() - sent_before)
            self._offering.withdraw(self._version - 1)
        return {
            **columns(spread(taken_s), "ms", 1e3),
            "offer_ms": spread(offer_s).median * 1e3,
            "trainer_sent_mbytes": spread(sent).median / 1e6,
            "cpu_s": spread(cpu_s).median,
        }

    def _sent_bytes(self) -> int:
        return int(self._offering.counts.get("sent_bytes", 0))


class SamplerProcess:
    """One sampler, controlled by lines of JSON."""

    def __init__(self, model: str) -> None:
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        self._process = subprocess.Popen(
            [sys.executable, __file__, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def ask(self, message: Any) -> Any:
        """Send a message and return the answer."""
        self.send(message)
        return self.hear()

    def send(self, message: Any) -> None:
        """Send a message."""
        assert self._process.stdin is not None, "opened with a pipe"
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Return the next answer."""
        assert self._process.stdout is not None, "opened with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a sampler process ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def _samplers(count: int, model: str) -> Iterator[list[SamplerProcess]]:
    """Start sampler processes, which end with the block."""
    started = [SamplerProcess(model) for _ in range(count)]
    try:
        yield started
    finally:
        for sampler in started:
            sampler.close()


def serve(model: str) -> None:
    """Be a sampler: fetch what stdin says, hold the newest weights as a sampler does."""
    table = weight_table(MODELS[model])
    shapes = jax.eval_shape(lambda: make_params(MODELS[model]))
    mesh = make_slices(schema.MeshSection(colocated=True)).sampler
    target = shapes_on(shapes, shardings(table, mesh, SAMPLER_RULES))
    fetching: Fetching | None = None
    live: list[Fetched] = []
    for line in sys.stdin:
        kind, *arguments = json.loads(line)
        answer: Any = None
        if kind == "start":
            fetching = make_fetching(RemoteSection(**arguments[0]), target)
            answer = fetching.address
        elif kind == "fetch" and fetching is not None:
            cpu_before = time.process_time()
            version, where, order = arguments
            live = [fetching.fetch(version, where, order, threading.Event())]
            answer = [time.monotonic(), time.process_time() - cpu_before]
        elif fetching is not None:
            fetching.close()
            fetching = None
            live.clear()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
