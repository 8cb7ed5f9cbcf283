"""Time whole updates of the asynchronous run, 8 prompts x 8 samples, without disk or evaluation.

Sampler, rollouts, staleness gate, packing, GRPO update, weight transfer and probe are those of the
main job, on one device for the trainer and one for the sampler. Only the reward is made up, and the
lengths of the answers are forced: all 64 tokens, or a long tail. At max_staleness 0 trainer and
sampler take turns; from 1 on they overlap. The spread is over updates.
"""

import argparse
import asyncio
import itertools
import threading
import time
from asyncio import Future
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from common import (
    MODELS,
    PROMPT_TOKENS,
    Row,
    columns,
    force_cpu_devices,
    long_tail,
    make_params,
    options,
    parser,
    random_prompts,
    report,
    spread,
)

from jaxrl_async.buffer.replay import BufferSettings, ReplayBuffer
from jaxrl_async.config import schema
from jaxrl_async.mesh import SAMPLER_RULES, make_slices, shardings
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.rollout.episode import EpisodeLimits
from jaxrl_async.rollout.rollout_loop import RolloutLoop, RolloutSettings
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.sampler.stats import SamplerStats
from jaxrl_async.sampler.swap import Probe
from jaxrl_async.trainer.learner import Learner, LearnerSettings
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.policy_objective import policy_update
from jaxrl_async.trainer.trainer import Outlets, Trainer, TrainerSettings, probe_tokens
from jaxrl_async.types import Completion, Episode, Partial, Prompt, Request, SamplingParams, Score
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.local import Push

LONGEST = 128
"""Longest answer, tokens."""
WARM_UP = 3
"""Updates before the measurement starts: all programs compile in them."""


class Forced:
    """A ports.Generate with forced lengths: the i-th request gets lengths[i], cyclically."""

    def __init__(self, sampler: Sampler, lengths: Sequence[int]) -> None:
        self._sampler, self._lengths = sampler, itertools.cycle(lengths)
        self.seed = None

    def progress(self) -> tuple[Partial, ...]:
        """Implement ports.Generate: nothing is saved here."""
        return ()

    def submit_many(self, requests: Sequence[Request | Partial]) -> "list[Future[Completion]]":
        """Queue all requests, each with its forced length."""
        return self._sampler.submit_many(
            [
                replace(r, forced_length=next(self._lengths))
                for r in requests
                if isinstance(r, Request)
            ]
        )


async def made_up_reward(episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
    """Return 0 or 1 by the last token drawn: each for about half of a group."""
    return tuple(Score(reward=float(e.token_ids[-1] % 2)) for e in episodes)


class Watch:
    """Records when each update ended, and the sampler's counters at that time."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.at_s: list[float] = []
        self.values: list[Mapping[str, float]] = []
        self.sampler: list[SamplerStats] = []

    def report(self, version: int, values: Mapping[str, float], groups: Sequence[Any]) -> None:
        """Record an update; called after each, and once before the first."""
        self.at_s.append(time.perf_counter())
        self.values.append(values)
        self.sampler.append(self._sampler.stats())


def main() -> None:
    """Measure every row and print them."""
    args = _options()
    force_cpu_devices(2)
    rows = []
    for model in args.models:
        for name, lengths in workloads(args).items():
            for staleness in args.max_staleness:
                row = {"model": model, "answers": name, "max_staleness": staleness}
                rows.append(row | one_row(MODELS[model], lengths, staleness, args))
    report("end_to_end", rows, args)


def workloads(args: argparse.Namespace) -> dict[str, list[int]]:
    """Return answer lengths, tokens, to be dealt out in order, cyclically."""
    if args.quick:
        return {"long tail": long_tail(64, median=4, most=16)}
    return {"64 each": [64], "long tail": long_tail(1024, most=LONGEST)}


def one_row(
    spec: ModelSpec, lengths: Sequence[int], max_staleness: int, args: argparse.Namespace
) -> Row:
    """Run WARM_UP updates and then the measured ones."""
    config = schema.Config(
        sampler=schema.SamplerSection(
            slots=args.prompts * args.samples,
            max_length=PROMPT_TOKENS + LONGEST,
            max_new_tokens=LONGEST,
            block=args.block,
        ),
        staleness=schema.StalenessSection(max_staleness=max_staleness),
        algorithm=schema.AlgorithmSection(group_size=args.samples, groups_per_step=args.prompts),
        trainer=schema.TrainerSection(micro_batch_tokens=args.micro_batch_tokens),
    )
    watch = run(spec, config, lengths, WARM_UP + args.steps)
    taken = spread([b - a for a, b in itertools.pairwise(watch.at_s[WARM_UP:])])
    wall_s = watch.at_s[-1] - watch.at_s[WARM_UP]
    first, last = watch.sampler[WARM_UP], watch.sampler[-1]
    measured = watch.values[WARM_UP + 1 :]
    slot_steps = last.slot_steps - first.slot_steps
    return {
        "updates": len(measured),
        "trained_tokens_per_s": sum(v["train/tokens"] for v in measured) / wall_s,
        "sampler_busy": min((last.busy_s - first.busy_s) / wall_s, 1.0),
        "occupancy": (last.used_slot_steps - first.used_slot_steps) / max(slot_steps, 1),
        "trainer_idle": sum(v["time/wait_data_s"] for v in measured) / wall_s,
        **columns(taken),
    }


def run(spec: ModelSpec, config: schema.Config, lengths: Sequence[int], steps: int) -> Watch:
    """Run the main job's parts, assembled as by run/assemble.py, for `steps` updates."""
    slices = make_slices(config.mesh)
    settings = LearningSettings(
        mesh=slices.trainer, trainer=config.trainer, row_length=config.row_length
    )
    step = policy_update(spec, settings, config.algorithm, total_steps=steps)
    state = step.init(make_params(spec))
    table = weight_table(spec)
    push = Push(step.state_shardings.params, shardings(table, slices.sampler, SAMPLER_RULES))
    buffer = ReplayBuffer(
        BufferSettings(
            groups_per_step=config.algorithm.groups_per_step,
            max_staleness=config.staleness.max_staleness,
        )
    )
    channel = WeightChannel([push], on_live=buffer.set_live)
    probe = probe_tokens(spec.vocab, 16)
    sampler = Sampler(
        (spec, push(state.params)),
        section=config.sampler,
        mesh=slices.sampler,
        weights=channel.subscribe(),
        settings=SamplerSettings(
            probe=Probe(token_ids=probe, tolerance=config.weights.probe_tolerance)
        ),
    )
    rollouts = RolloutLoop(
        endless_prompts(spec.vocab),
        Forced(sampler, lengths),
        made_up_reward,
        buffer,
        settings=RolloutSettings(
            group_size=config.algorithm.group_size,
            limits=EpisodeLimits(
                sampling=SamplingParams(),
                stop_token_ids=(),
                max_new_tokens=config.sampler.max_new_tokens,
                max_length=config.sampler.max_length,
            ),
        ),
    )
    watch = Watch(sampler)
    learner = Learner(
        step, state, LearnerSettings(algorithm=config.algorithm, row_length=config.row_length)
    )
    trainer = Trainer(
        learner=learner,
        source=buffer,
        publisher=channel,
        outlets=Outlets(
            evaluate=dict,
            report=watch.report,
            begin_report=lambda *step: lambda more: watch.report(*step),
            save=lambda learner, version, next_group: None,
            should_stop=lambda: False,
        ),
        settings=TrainerSettings(total_steps=steps, eval_every=0, probe=probe),
    )
    player = threading.Thread(target=lambda: asyncio.run(rollouts.run()), name="rollouts")
    sampler.start()
    player.start()
    try:
        trainer.run()
    finally:
        buffer.close()
        channel.close()
        player.join()
        sampler.close()
    return watch


def endless_prompts(vocab: int) -> Iterator[Prompt]:
    """Yield 1,024 different prompts, again and again."""
    for position, tokens in enumerate(itertools.cycle(random_prompts(vocab, 1024))):
        yield Prompt(
            prompt_id=position % 1024, position=position, token_ids=tokens, text="", reference=""
        )


def _options() -> argparse.Namespace:
    words = parser(__doc__ or "")
    words.add_argument("--prompts", type=int, default=8, help="groups in an update")
    words.add_argument("--samples", type=int, default=8, help="answers to a prompt")
    words.add_argument("--steps", type=int, default=10, help="measured updates of each row")
    words.add_argument("--max-staleness", nargs="+", type=int, default=[0, 1, 2])
    words.add_argument("--block", type=int, default=8, help="decode steps in one dispatch")
    words.add_argument("--micro-batch-tokens", type=int, default=4096)
    args = options(words)
    if args.quick:
        args.prompts, args.samples, args.steps, args.max_staleness = 2, 4, 2, [0, 1]
        args.micro_batch_tokens = 2 * (PROMPT_TOKENS + LONGEST)
    return args


if __name__ == "__main__":
    main()
