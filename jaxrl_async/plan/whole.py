"""The plan of a run: both sides' programs, memory and times, and what they come to together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jaxrl_async.config import schema
from jaxrl_async.mesh import TRAINER_RULES, num_shards
from jaxrl_async.model.spec import ModelSpec, num_weights
from jaxrl_async.plan.chips import Slice
from jaxrl_async.plan.compiled import Compiled
from jaxrl_async.plan.lengths import mean_context
from jaxrl_async.plan.memory import Memory, sampler_memory, trainer_memory
from jaxrl_async.plan.programs import Places, bytes_per_device, parameters
from jaxrl_async.plan.simulate import Histogram, Outcome, Pipeline, Samplers, simulate
from jaxrl_async.plan.timing import Timing, account, timing
from jaxrl_async.sampler.memory import MemoryPlan
from jaxrl_async.trainer.step import num_matmul_params
from jaxrl_async.trainer.update import rows_per_micro_batch

PACKING = 0.95
"""Share of a packed row that is tokens."""
PROMPT_SHARE = 0.5
"""Of data.max_prompt_tokens, that a prompt is taken to have."""
BLOCK_S = 0.5e-3
"""The host's work on a decode block, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The trainer, or one of the samplers."""

    where: Slice
    programs: tuple[Compiled, ...]
    timings: Mapping[str, Timing]  # by program
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """A sampler's decode step at the mean context."""

    rows: int  # sequences that decode at once
    context: float  # tokens that each has
    step_s: float
    bound_s: float  # weights and KV cache, read once at HBM's bandwidth
    read_bytes: float  # of KV, a device's in a step
    prefill_token_s: float
    tokens_per_s: float  # drawn, prompts' prefill included

    @property
    def bandwidth_share(self) -> float:
        """bound_s / step_s."""
        return self.bound_s / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """The trainer's step at the mean lengths."""

    tokens: float  # trained on in a step, prompts included
    micro_batches: float
    step_s: float
    account: Mapping[str, float]  # shares of the gradient's time, rows full of one sequence each
    tokens_per_s: float  # answers' tokens

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation of the gradient's program."""
        return self.account["model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A way to divide the same chips."""

    trainer_chips: int
    samplers: int
    sampler_chips: int  # all together
    answer_tokens_per_s: float  # of the slower side


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All of it."""

    name: str
    spec: ModelSpec
    num_samplers: int
    trainer: Side
    sampler: Side
    learning: Learning
    decode: Decode
    transfer_s: float
    splits: tuple[Split, ...]  # best first
    pipeline: Pipeline
    outcome: Outcome
    lengths: Histogram
    checkpoint_bytes: float
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Both sides."""
        return self.trainer.memory.fits and self.sampler.memory.fits


def make_plan(
    config: schema.Config,
    spec: ModelSpec,
    places: Places,
    programs: Sequence[Compiled],
    kv: MemoryPlan,
    lengths: Histogram,
    sent: Any,
    state: Any,
) -> Plan:
    """Put it together. sent: shapes of the weights in a sampler; state: of its decode state."""
    trainer = trainer_side(config, spec, places, programs, sent)
    decode, sampler = sampler_side(config, spec, places, programs, kv, lengths, sent, state)
    learning = learn(config, spec, places, trainer, lengths)
    transfer_s = _transfer_s(places, sampler.memory.kinds["weights"])
    pipeline = pipeline_of(config, places, learning, decode, transfer_s, lengths)
    splits = best_splits(places, trainer.memory, learning, decode)
    return Plan(
        name=config.run.name,
        spec=spec,
        num_samplers=places.num_samplers,
        trainer=trainer,
        sampler=sampler,
        learning=learning,
        decode=decode,
        transfer_s=transfer_s,
        splits=splits,
        pipeline=pipeline,
        outcome=simulate(pipeline, updates=40, warm_up=10, seed=config.run.seed),
        lengths=lengths,
        checkpoint_bytes=_checkpoint_bytes(config, spec),
        notes=_notes(config),
    )


def trainer_side(
    config: schema.Config, spec: ModelSpec, places: Places, programs: Sequence[Compiled], sent: Any
) -> Side:
    """Its programs with their times, and its memory."""
    own = tuple(p for p in programs if p.side == "trainer")
    mesh, where = places.slices.trainer, places.trainer
    params = bytes_per_device(parameters(spec, mesh, TRAINER_RULES, config.model.param_dtype))
    wide = bytes_per_device(parameters(spec, mesh, TRAINER_RULES, jnp.float32))
    offloaded = config.trainer.offload
    refers = config.algorithm.kl_coefficient > 0 and "reference" not in offloaded
    memory = trainer_memory(
        own,
        params=params,
        gradients=wide,
        optimizer=0.0 if "optimizer" in offloaded else 2 * wide,
        reference=params if refers else 0.0,
        transfer=bytes_per_device(sent),
        usable=where.chip.usable_bytes,
    )
    return Side(
        where=where, programs=own, timings={p.name: timing(p, where) for p in own}, memory=memory
    )


def sampler_side(
    config: schema.Config,
    spec: ModelSpec,
    places: Places,
    programs: Sequence[Compiled],
    kv: MemoryPlan,
    lengths: Histogram,
    sent: Any,
    state: Any,
) -> tuple[Decode, Side]:
    """What a decode step takes, and the sampler's programs, times and memory."""
    own = tuple(p for p in programs if p.side == "sampler")
    where, chip = places.sampler, places.sampler.chip
    weights = bytes_per_device(sent)
    pages = bytes_per_device(state.kv)
    rest = bytes_per_device((state.logits, state.slot))
    prompt = prompt_tokens(config)
    context = min(mean_context(lengths, prompt), config.sampler.max_length)
    token_bytes = pages / (kv.pages * kv.page_tokens)
    held = int(kv.pages * kv.page_tokens / (context + kv.page_tokens))
    rows = max(1, min(kv.slots, held))
    read = rows * context * token_bytes
    block = config.sampler.block
    timings = {
        p.name: timing(p, where, cache_bytes=read * block if p.name == "decode" else 0.0)
        for p in own
    }
    step_s = (timings["decode"].estimate_s + BLOCK_S) / block
    prefill_s = timings["prefill"].estimate_s / config.sampler.prefill_chunk
    each = prefill_s * prompt / config.algorithm.group_size / lengths.mean
    decode = Decode(
        rows=rows,
        context=context,
        step_s=step_s,
        bound_s=(weights - embedding_bytes(spec, sent) + read) / chip.hbm_bytes_per_s,
        read_bytes=read,
        prefill_token_s=prefill_s,
        tokens_per_s=1 / (step_s / rows + each) if step_s else 0.0,
    )
    memory = sampler_memory(own, weights=weights, pages=pages, state=rest, usable=chip.usable_bytes)
    return decode, Side(where=where, programs=own, timings=timings, memory=memory)


def embedding_bytes(spec: ModelSpec, sent: Any) -> float:
    """Of the table that tokens are only looked up in: no step reads it whole."""
    return 0.0 if spec.tied else bytes_per_device(sent["embed"])


def prompt_tokens(config: schema.Config) -> int:
    """That a prompt is taken to have."""
    return max(1, round(PROMPT_SHARE * config.data.max_prompt_tokens))


def learn(
    config: schema.Config, spec: ModelSpec, places: Places, side: Side, lengths: Histogram
) -> Learning:
    """The trainer's step: so many micro-batches, an update and a cast."""
    chip, devices = places.trainer.chip, places.slices.trainer.size
    sequences = config.algorithm.groups_per_step * config.algorithm.group_size
    tokens = sequences * (prompt_tokens(config) + lengths.mean)
    full = rows_of(config, places) * config.row_length
    micro_batches = -(-tokens // (full * PACKING))
    gradient_s = side.timings["gradient"].estimate_s
    step_s = (
        micro_batches * gradient_s * config.algorithm.epochs
        + side.timings["update"].estimate_s * config.algorithm.epochs * config.algorithm.minibatches
        + side.timings["cast"].estimate_s
    )
    flops = model_flops(spec, full, config.row_length)
    flops *= 4 / 3 if config.algorithm.kl_coefficient else 1
    return Learning(
        tokens=tokens,
        micro_batches=micro_batches,
        step_s=step_s,
        account=account(side.timings["gradient"], flops / (devices * chip.peak_flops))
        if gradient_s
        else {"model": 0.0},
        tokens_per_s=sequences * lengths.mean / step_s if step_s else 0.0,
    )


def rows_of(config: schema.Config, places: Places) -> int:
    """Rows of a micro-batch, as the trainer rounds them."""
    shards = num_shards(places.slices.trainer, TRAINER_RULES, "batch")
    return rows_per_micro_batch(config.trainer.micro_batch_tokens, config.row_length, shards)


def model_flops(spec: ModelSpec, tokens: float, length: float) -> float:
    """Of learning from so many tokens in sequences of that length: three forward passes, as
    trainer.step.forward_flops counts them (rematerialisation does not count)."""
    attention = 2 * spec.layers * spec.heads * spec.head_dim * length * tokens
    return 3 * (2 * num_matmul_params(spec) * tokens + attention)


def pipeline_of(
    config: schema.Config,
    places: Places,
    learning: Learning,
    decode: Decode,
    transfer_s: float,
    lengths: Histogram,
) -> Pipeline:
    """What simulate() is given."""
    section = config.sampler
    one = decode.read_bytes / (decode.rows * decode.context) / places.sampler.chip.hbm_bytes_per_s
    base = decode.step_s - decode.rows * decode.context * one
    return Pipeline(
        samplers=Samplers(
            slots=decode.rows,
            rows=(decode.rows,),
            step_s=(max(base, 1e-6),),
            count=places.num_samplers,
            reserve=int(decode.rows * section.reserve),
            block=section.block,
            context_token_s=one,
            prefill_token_s=decode.prefill_token_s,
            prefill_chunk=section.prefill_chunk,
        ),
        answer_tokens=lengths,
        prompt_tokens=prompt_tokens(config),
        group_size=config.algorithm.group_size,
        groups_per_step=config.algorithm.groups_per_step,
        max_staleness=config.staleness.max_staleness,
        lookahead=config.staleness.lookahead,
        when_too_old=config.staleness.when_too_old,
        overcommit=config.staleness.overcommit,
        update_token_s=learning.step_s / learning.tokens,
        transfer_s=transfer_s,
    )


SHARED = ("parameters", "optimiser", "gradients", "reference")
"""Kinds of memory that more trainer chips share."""


def best_splits(
    places: Places, memory: Memory, learning: Learning, decode: Decode
) -> tuple[Split, ...]:
    """Divisions of the same chips, fastest first: the trainer's slice a power of two whose chips
    hold their share of its state, the rest samplers of the size they have. Each side's speed per
    chip is taken to stay as it is."""
    now, own = places.trainer.num_chips, places.sampler.num_chips
    total = now + places.num_samplers * own
    state = sum(memory.kinds.get(kind, 0.0) for kind in SHARED)
    found = []
    for chips in (2**n for n in range(total.bit_length())):
        samplers = (total - chips) // own
        needed = memory.total_bytes + state * (now / chips - 1)
        if samplers < 1 or (chips != now and needed > memory.usable_bytes):
            continue
        of_trainer = learning.tokens_per_s / now * chips
        found.append(
            Split(
                trainer_chips=chips,
                samplers=samplers,
                sampler_chips=samplers * own,
                answer_tokens_per_s=min(of_trainer, decode.tokens_per_s * samplers),
            )
        )
    return tuple(sorted(found, key=lambda s: (-s.answer_tokens_per_s, s.trainer_chips)))


def at_split(plan: Plan, split: Split) -> Outcome:
    """The pipeline simulated with the chips divided so."""
    ratio = plan.trainer.where.num_chips / split.trainer_chips
    other = replace(
        plan.pipeline,
        samplers=replace(plan.pipeline.samplers, count=split.samplers),
        update_token_s=plan.pipeline.update_token_s * ratio,
    )
    return simulate(other, updates=40, warm_up=10)


def _transfer_s(places: Places, weights: float) -> float:
    """From the trainer's slice to the samplers', through the network between slices, every sampler
    its own copy: as fast as the trainer's hosts send, or a sampler's receive."""
    each = weights * places.slices.sampler.size
    chip = places.trainer.chip
    sent = each * places.num_samplers / (places.slices.trainer.size * chip.dcn_bytes_per_s)
    received = weights / places.sampler.chip.dcn_bytes_per_s
    return max(sent, received)


def _checkpoint_bytes(config: schema.Config, spec: ModelSpec) -> float:
    """Parameters and AdamW's two moments; prompts and groups under way are little beside them."""
    return num_weights(spec) * (jnp.dtype(config.model.param_dtype).itemsize + 8.0)


def _notes(config: schema.Config) -> tuple[str, ...]:
    """Parts of the run that the plan leaves out."""
    left_out = {
        "the critic's update": isinstance(config.algorithm.advantage, str)
        and config.algorithm.advantage == "gae",
        "the teacher's pass": config.teacher.source != "none",
        "the pass for proximal log-probs": config.algorithm.anchor == "proximal",
        "the reward model's pass": config.reward.model is not None,
        "the reference's own pass": "reference" in config.trainer.offload,
    }
    missing = [name for name, there in left_out.items() if there]
    return (f"not planned: {', '.join(missing)}.",) if missing else ()
