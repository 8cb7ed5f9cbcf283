"""Measure the host's own work for a step of learning: what one thread computes around the devices.

    python benchmarks/host_work.py [--episodes 128 2048 8192]

Groups of 8 made-up answers of one turn, with lengths of a long tail, go through what a step of the
main job calls: the choice of one of two samplers for each request (by a router's dealer that has
dealt so many before that it forgets the oldest; without the router's futures and callbacks), the
buffer (admission, hand-in, draw, ledger on disk), the shaping, the packing into rows, the
advantages, the step's measures. Nothing runs on a device. The columns are CPU milliseconds of the
thread for 1,000 episodes, medians of the repeats; `median_s`, `least_s` and `most_s` the seconds
of all of it.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from common import Row, long_tail, options, parser, report, spread

from jaxrl_async.algorithms.advantages import advantage, step_data
from jaxrl_async.algorithms.kl import kl
from jaxrl_async.algorithms.shaping import shape
from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.buffer.replay import BufferSettings, ReplayBuffer
from jaxrl_async.config import schema
from jaxrl_async.host import only_new_garbage
from jaxrl_async.sampler.batch.admission import WaitingQueue
from jaxrl_async.sampler.router.dealing import CONVERSATIONS, Candidate, Dealer
from jaxrl_async.sampler.router.job import RouterJob
from jaxrl_async.trainer.credit import Credit, PassResults
from jaxrl_async.trainer.data_metrics import drop_measures, group_measures
from jaxrl_async.trainer.step_data import pack_step
from jaxrl_async.types import (
    NOT_DRAWN,
    Draw,
    Episode,
    EpisodeGroup,
    IntArray,
    Prompt,
    Request,
    Score,
    StopReason,
    Ticket,
)

GROUP = 8
SHORT, LONG = (160, 32, 24, 128), (2048, 64, 200, 1984)
"""Tokens of a row, of a prompt; median and most of an answer."""
PARTS = ("deal", "buffer", "shape", "pack", "credit", "measures")


def main() -> None:
    """Measure every row and print them."""
    made = parser(__doc__ or "")
    made.add_argument("--episodes", nargs="+", type=int, default=[128, 2048, 8192])
    args = options(made)
    if args.quick:
        args.episodes = [64]
    router = LongDealing()
    with only_new_garbage():  # as in a run
        rows = [
            measured(router, episodes, sizes, args.repeats)
            for sizes in (SHORT, LONG)
            for episodes in args.episodes
        ]
    report("host_work", rows, args)


def measured(
    router: "LongDealing", episodes: int, sizes: tuple[int, int, int, int], repeats: int
) -> Row:
    """Measure steps of this many episodes of these sizes."""
    groups = made_up(episodes // GROUP, *sizes[1:])
    one_step(groups, sizes[0], router)
    runs = [one_step(groups, sizes[0], router) for _ in range(max(repeats, 1))]
    scale = 1000 / episodes
    total = spread([sum(run.values()) * scale for run in runs])
    return {
        "episodes": episodes,
        "row": sizes[0],
        **{
            f"{part}_ms": statistics.median(run[part] for run in runs) * scale * 1000
            for part in PARTS
        },
        "median_s": total.median,
        "least_s": total.least,
        "most_s": total.most,
    }


def made_up(groups: int, prompt: int, median: int, most: int) -> list[EpisodeGroup]:
    """Make groups of a step; group i has the ticket i."""
    rng = np.random.default_rng(0)
    lengths = iter(long_tail(groups * GROUP, median=median, most=most))
    return [group_of(i, prompt, [next(lengths) for _ in range(GROUP)], rng) for i in range(groups)]


def group_of(index: int, prompt: int, lengths: list[int], rng: np.random.Generator) -> EpisodeGroup:
    """Make one group of answers of these lengths, half of them right."""
    prompt_ids = rng.integers(0, 512, prompt, dtype=np.int32)
    return EpisodeGroup(
        prompt=Prompt(prompt_id=index, position=index, token_ids=prompt_ids, text="", reference=""),
        episodes=tuple(episode_of(prompt_ids, length, rng) for length in lengths),
        scores=tuple(
            Score(reward=float(r), parts={"correct": float(r)})
            for r in rng.permutation(len(lengths)) % 2
        ),
        ticket=Ticket(group=index, version=0),
    )


def episode_of(prompt_ids: Any, length: int, rng: np.random.Generator) -> Episode:
    """Make an answer whose later half was sampled by newer weights."""
    answer = rng.integers(0, 512, length, dtype=np.int32)
    sampled = np.repeat([False, True], [len(prompt_ids), length])
    logprobs = np.zeros(len(sampled), np.float32)
    logprobs[sampled] = -rng.random(length, dtype=np.float32)
    versions = np.full(len(sampled), NOT_DRAWN, np.int32)
    versions[sampled] = np.arange(length) * 2 // length
    return Episode(
        token_ids=np.concatenate([prompt_ids, answer]),
        drawn=sampled,
        logprobs=logprobs,
        versions=versions,
        stop=StopReason.EOS,
    )


class LongDealing:
    """The router's dealing to two samplers, after more conversations than it remembers."""

    def __init__(self) -> None:
        self._dealer, self._numbers = Dealer(), count()
        for number in range(2 * CONVERSATIONS // GROUP):
            self.deal(self.jobs(np.full(32, number, np.int32)))

    def jobs(self, prompt: IntArray) -> list[RouterJob]:
        """Make the requests of a new group of this prompt."""
        group = next(self._numbers)
        return [
            RouterJob(
                request=Request(
                    request_id=f"g{group}/m{member}/t0",
                    token_ids=prompt,
                    max_new_tokens=1,
                    key=(group, member),
                ),
                future=Future(),
            )
            for member in range(GROUP)
        ]

    def deal(self, jobs: Sequence[RouterJob]) -> None:
        """Deal requests to samplers that have room for all."""
        queue: WaitingQueue[RouterJob] = WaitingQueue()
        queue.add(job for job in jobs if self._dealer.may_wait(job, bool))
        samplers = [Candidate(in_flight=0, capacity=len(jobs), slot=slot) for slot in (0, 1)]
        shares = self._dealer.fill(queue, samplers)
        assert sum(map(len, shares.values())) == len(jobs)


def one_step(groups: list[EpisodeGroup], row_length: int, router: LongDealing) -> dict[str, float]:
    """Do a step's host work; return CPU seconds of each part."""
    taken: dict[str, float] = {}

    def timed(part: str, work: Callable[[], Any]) -> Any:
        start = time.thread_time()
        result = work()
        taken[part] = time.thread_time() - start
        return result

    algorithm = schema.AlgorithmSection()
    estimator = advantage.resolve(algorithm.advantage)
    credit = Credit(
        algorithm=algorithm,
        teacher=None,
        advantage=estimator,
        level=advantage.facts_of(estimator).level,
        kl=kl.resolve(algorithm.kl),
        columns=frozenset(),
    )
    jobs = [job for group in groups for job in router.jobs(group.prompt.token_ids)]
    timed("deal", lambda: router.deal(jobs))
    with tempfile.TemporaryDirectory() as folder:
        draw = timed("buffer", lambda: through_buffer(groups, Path(folder)))
    shaped = timed("shape", lambda: shape(step_data(draw.groups), ()))
    step = timed("pack", lambda: pack_step(shaped, row_length))
    timed("credit", lambda: credit(step, PassResults(), 0.0))
    timed("measures", lambda: measures(draw))
    return taken


def through_buffer(groups: list[EpisodeGroup], folder: Path) -> Draw:
    """Admit, hand in and draw the groups of one step."""
    ledger = Ledger(folder / "ledger.jsonl")
    buffer = ReplayBuffer(
        BufferSettings(groups_per_step=len(groups), max_staleness=1), ledger=ledger
    )
    buffer.set_live(0)
    admitted = 0
    while admitted < len(groups):
        admitted += len(buffer.admit(0.0))
    for group in groups:
        buffer.put(group)
    draw = buffer.draw(1, 0.0)
    buffer.close()
    ledger.close()
    return draw


def measures(draw: Draw) -> dict[str, float]:
    """Measure the step's data, as the trainer does."""
    return group_measures(draw.groups, 1) | drop_measures(draw.dropped, trained=len(draw.groups))


if __name__ == "__main__":
    main()
