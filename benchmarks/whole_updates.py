"""Make whole updates of the asynchronous run without end, for end_to_end.py.

Sampler, rollouts, staleness gate, packing, GRPO update, weight transfer with its checksum and probe
are those of the main job, put together as by run/assemble.py; only the reward is made up, and the
lengths of the answers are forced. argv[1]: `Work` as JSON.
"""

from jaxrl_async.huge_pages import start_with_huge_pages

if __name__ == "__main__":
    start_with_huge_pages()  # as the commands do

import asyncio
import itertools
import json
import sys
import threading
from asyncio import Future
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from common import MODELS, PROMPT_TOKENS, force_cpu_devices, make_params, random_prompts
from jax.sharding import Mesh
from peers.update_lines import UpdateLines

from jaxrl_async.algorithms.preflight import with_correction
from jaxrl_async.buffer.replay import BufferSettings, ReplayBuffer
from jaxrl_async.config import schema
from jaxrl_async.mesh import make_slices
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.rollout.rollout_loop import RolloutLoop, RolloutSettings
from jaxrl_async.run.builders.learning import make_step
from jaxrl_async.run.builders.samplers import (
    make_router,
    sampler_settings,
    sent_weights,
    uses_one_thread,
)
from jaxrl_async.sampler.router.router import Router
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.trainer.evaluation import Outlets
from jaxrl_async.trainer.learner import Learner, LearnerSettings
from jaxrl_async.trainer.trainer import Trainer, TrainerSettings
from jaxrl_async.types import (
    Completion,
    Episode,
    EpisodeLimits,
    Partial,
    Prompt,
    Request,
    SamplingParams,
    Score,
)
from jaxrl_async.weights.channel import WeightChannel

NEVER = 10**9
"""Updates after which the run would end by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the run is to do."""

    model: str  # of common.MODELS
    lengths: list[int]  # of answers, tokens, dealt out in order, cyclically
    prompts: int  # groups in an update
    samples: int  # answers to a prompt
    max_staleness: int
    samplers: int
    block: int  # decode steps in one dispatch
    micro_batch_tokens: int
    shares: bool = False  # trainer.share_prefixes, whose rows hold a group

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    def config(self) -> schema.Config:
        """Return the run's configuration: the defaults, where `Work` says nothing else."""
        longest = max(self.lengths)
        length = PROMPT_TOKENS + longest
        return with_correction(
            schema.Config(
                mesh=schema.MeshSection(samplers=self.samplers),
                sampler=schema.SamplerSection(
                    slots=-(-self.prompts * self.samples // self.samplers),
                    max_length=length,
                    max_new_tokens=longest,
                    block=self.block,
                ),
                staleness=schema.StalenessSection(max_staleness=self.max_staleness),
                algorithm=schema.AlgorithmSection(
                    group_size=self.samples, groups_per_step=self.prompts
                ),
                trainer=schema.TrainerSection(
                    micro_batch_tokens=max(length, self.micro_batch_tokens),
                    share_prefixes=self.shares,
                ),
            )
        )


class Forced:
    """A ports.Generate with forced lengths: the i-th request gets lengths[i], cyclically."""

    def __init__(self, samplers: Router, lengths: Sequence[int]) -> None:
        self._samplers, self._lengths = samplers, itertools.cycle(lengths)
        self.seed = None

    def progress(self) -> tuple[Partial, ...]:
        """Implement ports.Generate: nothing is saved here."""
        return ()

    def submit_many(self, requests: Sequence[Request | Partial]) -> "list[Future[Completion]]":
        """Queue all requests, each with its forced length."""
        return self._samplers.submit_many(
            [
                replace(r, forced_length=next(self._lengths))
                for r in requests
                if isinstance(r, Request)
            ]
        )


async def made_up_reward(episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
    """Return 0 or 1 by the last token sampled: each for about half of a group."""
    return tuple(Score(reward=float(e.token_ids[-1] % 2)) for e in episodes)


class Watch:
    """Writes a line for each update when it has ended."""

    def __init__(self, samplers: Router) -> None:
        self._samplers, self._before = samplers, samplers.stats()
        self._lines = UpdateLines()

    def report(self, version: int, values: Mapping[str, float], groups: Sequence[Any]) -> None:
        """Write a line of an update; called after each, and once before the first."""
        now, before = self._samplers.stats(), self._before
        self._before = now
        if not version:
            self._lines.ended()
            return
        slot_steps = now.slot_steps - before.slot_steps
        self._lines.ended(
            tokens=values["train/tokens"],
            draw_s=now.busy_s - before.busy_s,
            update_s=values["time/train_s"] + values["time/publish_s"],
            occupancy=(now.used_slot_steps - before.used_slot_steps) / max(slot_steps, 1),
        )


def run(work: Work) -> None:
    """Make updates until killed."""
    config, spec = work.config(), MODELS[work.model]
    slices = make_slices(config.mesh)
    step = make_step(config, spec, slices, NEVER)
    state = step.init(make_params(spec))
    buffer = ReplayBuffer(
        BufferSettings(groups_per_step=work.prompts, max_staleness=work.max_staleness)
    )
    pushes = sent_weights(config.weights, config.model, spec).pushes(slices)
    channel = WeightChannel(pushes, on_live=buffer.set_live, checksum=config.weights.checksum)
    samplers = make_router(
        config.faults,
        [
            make_sampler(config, spec, mesh, push(state.params), channel)
            for mesh, push in zip(slices.samplers, pushes, strict=True)
        ],
        lambda fault, count: print(f"{count} x {fault}", file=sys.stderr),
    )
    rollouts = RolloutLoop(
        endless_prompts(spec.vocab),
        Forced(samplers, work.lengths),
        made_up_reward,
        buffer,
        settings=RolloutSettings(
            group_size=work.samples,
            limits=EpisodeLimits(
                sampling=SamplingParams(),
                stop_token_ids=(),
                max_new_tokens=config.sampler.max_new_tokens,
                max_length=config.sampler.max_length,
            ),
        ),
    )
    settings = LearnerSettings(algorithm=config.algorithm, row_length=config.row_length)
    watch = Watch(samplers)
    trainer = Trainer(
        learner=Learner(step, state, settings),
        source=buffer,
        publisher=channel,
        outlets=Outlets(
            evaluate=lambda version, last: {},
            report=lambda *step: lambda more: watch.report(*step),
            save=lambda learner, version, next_group: None,
            should_stop=lambda: False,
        ),
        settings=TrainerSettings(
            total_steps=NEVER, eval_every=(0,), probe=sampler_settings(config, spec).probe_tokens
        ),
    )
    player = threading.Thread(target=lambda: asyncio.run(rollouts.run()), name="rollouts")
    samplers.start()
    player.start()
    try:
        trainer.run()
    finally:
        buffer.close()
        channel.close()
        player.join()
        samplers.close()


def make_sampler(
    config: schema.Config, spec: ModelSpec, mesh: Mesh, params: Any, channel: WeightChannel
) -> Sampler:
    """Make a sampler beside the trainer."""
    return Sampler(
        (spec, params),
        section=config.sampler,
        mesh=mesh,
        weights=channel.subscribe(),
        settings=replace(
            sampler_settings(config, spec), one_thread=uses_one_thread(mesh, colocated=False)
        ),
    )


def endless_prompts(vocab: int) -> Iterator[Prompt]:
    """Yield 1,024 different prompts, again and again."""
    for position, tokens in enumerate(itertools.cycle(random_prompts(vocab, 1024))):
        yield Prompt(
            prompt_id=position % 1024, position=position, token_ids=tokens, text="", reference=""
        )


if __name__ == "__main__":
    work = Work(**json.loads(sys.argv[1]))
    force_cpu_devices(1 + work.samplers)
    run(work)
