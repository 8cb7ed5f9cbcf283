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
from typing import Any

import jax
import numpy as np
from common import MODELS, Row, columns, make_params, measure, spread

from jaxrl_async.config import schema
from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.mesh import SAMPLER_RULES, make_slices, shapes_on, shardings
from jaxrl_async.model.spec import weight_table
from jaxrl_async.weights.remote.seams import Fetched, Fetching
from jaxrl_async.weights.remote.transports import make_fetching, make_offering
from jaxrl_async.weights.remote.tree import sources

WARM_UP = 3
"""Versions before the measured ones: each side's memory is used again from the third on."""
SAMPLERS = (1, 2, 4, 8)
WAYS = {
    "shared memory": ("shared_memory", None, SAMPLERS),
    "tcp, star": ("tcp", 8, SAMPLERS),
    "tcp, tree of 2": ("tcp", 2, (4, 8)),
    "device": ("device", 8, (1,)),
    "folder": ("folder", None, (1, 4)),
}
"""(remote.transfer, fanout, numbers of samplers); without a fanout nobody passes anything on."""


def remote_rows(args: argparse.Namespace) -> list[Row]:
    """Time every way with every number of samplers."""
    model = "1M" if args.quick else "50M"
    params = make_params(MODELS[model])
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    copy_s = _copy_s(num_bytes, args.repeats)
    numbers = (1, 2) if args.quick else SAMPLERS
    rows = []
    with tempfile.TemporaryDirectory() as folder, _samplers(max(numbers), model) as samplers:
        for way, (transfer, fanout, counts) in WAYS.items():
            section = RemoteSection(transfer=transfer, folder=folder)
            for count in [n for n in counts if n in numbers]:
                row = _time_way(section, fanout, params, samplers[:count], args.repeats)
                speed = num_bytes * count / row["median_ms"] / 1e6
                named = {"model": model, "way": way, "samplers": count, "gbytes_per_s": speed}
                rows.append(named | row | {"of_memory_copy": speed * copy_s / num_bytes * 1e9})
    return rows


def _copy_s(num_bytes: int, repeats: int) -> float:
    """Return the time of a copy in memory, seconds."""
    one, other = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    return measure(lambda: np.copyto(other, one), max(repeats, 5)).median


def _time_way(
    section: RemoteSection,
    fanout: int | None,
    params: Any,
    samplers: Sequence["SamplerProcess"],
    repeats: int,
) -> Row:
    """Offer version after version and wait until all samplers have each."""
    offering = make_offering(section, run="benchmark")
    addresses = [sampler.ask(["start", section.model_dump()]) for sampler in samplers]
    orders = sources(addresses, fanout or len(samplers), offering.address)
    taken_s, offer_s, cpu_s, sent = [], [], [], []
    for version in range(WARM_UP + repeats):
        cpu_before, sent_before = time.process_time(), _sent_bytes(offering)
        began = time.monotonic()
        where = offering.offer(version, params)
        offered = time.monotonic()
        for sampler, order in zip(samplers, orders, strict=True):
            sampler.tell(["fetch", version, where, order])
        results = [sampler.hear() for sampler in samplers]
        taken_s.append(max(end for end, _ in results) - offered)
        offer_s.append(offered - began)
        cpu_s.append(time.process_time() - cpu_before + sum(cpu for _, cpu in results))
        sent.append(_sent_bytes(offering) - sent_before)
        if version:
            offering.withdraw(version - 1)
    for sampler in samplers:
        sampler.ask(["stop"])
    offering.close()
    return {
        **columns(spread(taken_s[WARM_UP:]), "ms", 1e3),
        "offer_ms": spread(offer_s[WARM_UP:]).median * 1e3,
        "trainer_sent_mbytes": spread(sent[WARM_UP:]).median / 1e6,
        "cpu_s": spread(cpu_s[WARM_UP:]).median,
    }


def _sent_bytes(offering: Any) -> int:
    return int(offering.counts.get("sent_bytes", 0))


class SamplerProcess:
    """One sampler, spoken to by lines of JSON."""

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
        self.tell(message)
        return self.hear()

    def tell(self, message: Any) -> None:
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
