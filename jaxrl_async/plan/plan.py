"""The plan of a run: both sides' programs, memory and times, and the whole run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jaxrl_async.algorithms.advantages import needs_critic
from jaxrl_async.config import schema
from jaxrl_async.config.seats_section import frozen_models, resident_snapshots
from jaxrl_async.host import USUAL_GPU_SHARE, gpu_memory
from jaxrl_async.mesh import TRAINER_RULES, num_shards
from jaxrl_async.model.lora import lora_of, trained_table
from jaxrl_async.model.spec import ModelSpec, num_in
from jaxrl_async.plan.chip_placement import Placement, place_on_chips
from jaxrl_async.plan.chips import GIB, Chip, Slice, is_slice
from jaxrl_async.plan.compiled import Compiled, compiled
from jaxrl_async.plan.cost import BETWEEN_SLICES, Kernel
from jaxrl_async.plan.hbm import Memory, sampler_memory, together_on_a_chip, trainer_memory
from jaxrl_async.plan.lengths import mean_context
from jaxrl_async.plan.pipeline import Histogram, Pipeline, Samplers
from jaxrl_async.plan.programs import (
    Held,
    base_on_trainer,
    bytes_per_device,
    check,
    holds_reference,
    lowered,
    own_passes,
    reference,
    runs_reference,
    spec_of,
    trained,
)
from jaxrl_async.plan.simulate import SimulationResult, simulate
from jaxrl_async.plan.timing import (
    Timing,
    decode_account,
    gradient_account,
    on_pages_s,
    timing,
)
from jaxrl_async.plan.transport_rates import Transport, transfer_of, transport_of
from jaxrl_async.sampler.batch.kv_budget import MemoryPlan
from jaxrl_async.trainer.flops import attended_length, flops_of_lengths, learning_flops
from jaxrl_async.trainer.learning_settings import rows_per_micro_batch
from jaxrl_async.trainer.optimizer import optimizer_bytes

PACKING = 0.95
"""Assumed share of a packed row that is tokens."""
PROMPT_SHARE = 0.5
"""Assumed length of a prompt, as a share of data.max_prompt_tokens."""
BLOCK_S = 0.5e-3
"""Assumed host time for a decode block, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The trainer, or one of the samplers."""

    where: Slice
    programs: tuple[Compiled, ...]
    timings: Mapping[str, Timing]  # by program, without rejected ones
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """The work of a sampler in a decode step at the mean context."""

    rows: int  # sequences that decode at the same time
    context: float  # tokens of each
    read_bytes: float  # KV that a device reads in a step
    kernel: Kernel | None = None  # what it computes on the pages in a step; None: gathers them

    def of_block(self, steps: int) -> tuple[float, Kernel | None]:
        """Return the KV that a device reads in so many steps, bytes, and what it computes there."""
        kernel = self.kernel and replace(self.kernel, flops=self.kernel.flops * steps)
        return self.read_bytes * steps, kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """A sampler's decode step under that load."""

    load: DecodeLoad
    step_s: float
    account: Mapping[str, float]  # shares of step_s
    prefill_token_s: float
    tokens_per_s: float  # generated; time includes the prompts' prefill

    @property
    def bandwidth_share(self) -> float:
        """Share of HBM's bandwidth for reading weights and KV cache once per step."""
        return self.account["weights"] + self.account["KV cache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """The trainer's step at the mean lengths."""

    tokens: float  # trained on in a step, prompts included
    micro_batches: float
    step_s: float
    account: Mapping[str, float]  # shares of the gradient's time, rows full of one sequence each
    tokens_per_s: float  # answer tokens

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of the gradient program."""
        return self.account["model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenSlices:
    """Traffic between the trainer's slices over the data center network in a step."""

    slices: int
    bytes_of_device: float  # sent by each device
    seconds: float  # per step, at the device's share of its host's network cards


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipSplit:
    """A way to divide the same chips."""

    trainer_chips: int
    samplers: int
    sampler_chips: int  # all together
    answer_tokens_per_s: float  # of the slower side


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Trainer and samplers together, if the compiler accepted all programs."""

    learning: Learning
    decode: Decode
    transfer_s: float  # at the transport's measured rates
    bound_s: float  # the same at the network cards' line rate, an upper bound
    transport: Transport | None  # carries the weights; None: the slice's own links
    between_slices: BetweenSlices | None  # None: the trainer has one slice
    splits: tuple[ChipSplit, ...]  # best first
    pipeline: Pipeline
    outcome: SimulationResult | None  # simulated; None: both sides alternate on the same chips
    in_turns_tokens_per_s: float  # answer tokens, if they alternated


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole plan."""

    name: str
    spec: ModelSpec
    num_samplers: int
    trainer: Side
    sampler: Side
    together: Together | None  # None: the compiler rejected a program
    lengths: Histogram
    checkpoint_bytes: float
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the compiler accepts every program and both sides fit their memory."""
        return bool(self.together and self.trainer.memory.fits and self.sampler.memory.fits)


def plan_run(
    config: schema.Config,
    trainer: Slice,
    samplers: tuple[Chip, int] | None,
    lengths: Histogram,
) -> Plan:
    """Lower and compile a run's programs (or look them up in the cache), and make its plan.

    Args:
        config: the run.
        trainer, samplers: the slices, see place_on_chips.
        lengths: of answers, tokens.

    Raises:
        ConfigError, CheckpointError, MeshError: the run cannot be planned.
    """
    check(config)
    spec = spec_of(config)
    placement = place_on_chips(config, trainer, samplers)
    programs, held = lowered(config, spec, placement)
    return make_plan(config, spec, placement, [compiled(one) for one in programs], held, lengths)


def make_plan(
    config: schema.Config,
    spec: ModelSpec,
    placement: Placement,
    programs: Sequence[Compiled],
    held: Held,
    lengths: Histogram,
) -> Plan:
    """Make the plan from the compiled programs."""
    load = load_of(config, spec, held, lengths)
    trainer = trainer_side(config, spec, placement, programs, held)
    sampler = sampler_side(config, placement, programs, held, load)
    if placement.slices.colocated:
        trainer, sampler = (
            replace(trainer, memory=together_on_a_chip(trainer.memory, sampler.memory, "sampler")),
            replace(sampler, memory=together_on_a_chip(sampler.memory, trainer.memory, "trainer")),
        )
    accepted = all(p.fits for p in programs)
    return Plan(
        name=config.run.name,
        spec=spec,
        num_samplers=placement.num_samplers,
        trainer=trainer,
        sampler=sampler,
        together=(
            together(config, spec, placement, trainer, sampler, held, load, lengths)
            if accepted
            else None
        ),
        lengths=lengths,
        checkpoint_bytes=_checkpoint_bytes(config, spec),
        notes=(
            *_notes(config),
            *_card_notes(placement.trainer.chip, trainer.memory, sampler.memory),
        ),
    )


def together(
    config: schema.Config,
    spec: ModelSpec,
    placement: Placement,
    trainer: Side,
    sampler: Side,
    held: Held,
    load: DecodeLoad,
    lengths: Histogram,
) -> Together:
    """Estimate both sides at the mean lengths, and simulate the run."""
    colocated = placement.slices.colocated
    decode = decode_of(config, spec, sampler, held, load, lengths)
    learning = learning_of(config, spec, placement, trainer, lengths)
    copy_bytes = bytes_per_device(held.sent) * placement.slices.sampler.size
    transfer_s, tree = transfer_of(config, placement, copy_bytes)
    bound_s, _ = transfer_of(config, placement, copy_bytes, measured=False)
    pipeline = pipeline_of(config, placement, learning, decode, transfer_s, lengths)
    pipeline = replace(pipeline, tree=tree)
    return Together(
        learning=learning,
        decode=decode,
        transfer_s=transfer_s,
        bound_s=bound_s,
        transport=None if tree is None else transport_of(config),
        between_slices=between_slices(config, trainer, learning),
        splits=()
        if colocated or placement.trainer.count > 1
        else best_splits(placement, trainer.memory, learning, decode),
        pipeline=pipeline,
        outcome=None
        if colocated
        else simulate(pipeline, updates=40, warm_up=10, seed=config.run.seed),
        in_turns_tokens_per_s=1
        / (1 / learning.tokens_per_s + 1 / (decode.tokens_per_s * placement.num_samplers)),
    )


def trainer_side(
    config: schema.Config,
    spec: ModelSpec,
    placement: Placement,
    programs: Sequence[Compiled],
    held: Held,
) -> Side:
    """Return the trainer's programs with their times, and its memory."""
    own = tuple(p for p in programs if p.side == "trainer")
    mesh, where = placement.slices.trainer, placement.trainer
    params = bytes_per_device(trained(config, spec, mesh))
    wide = bytes_per_device(trained(config, spec, mesh, jnp.float32))
    older = bytes_per_device(reference(config, spec, mesh))
    per_weight = optimizer_bytes(config.trainer, config.model.param_dtype) / 4
    memory = trainer_memory(
        own,
        params=params,
        gradients=wide,
        optimizer=0.0 if "optimizer" in config.trainer.offload else per_weight * wide,
        reference=older if runs_reference(config) else 0.0,
        resting=older if holds_reference(config) and not runs_reference(config) else 0.0,
        base=bytes_per_device(base_on_trainer(config, spec, mesh)),
        transfer=bytes_per_device(held.sent),
        usable=where.chip.usable_bytes,
    )
    timings = {p.name: timing(p, where) for p in own if p.fits}
    return Side(where=where, programs=own, timings=timings, memory=memory)


def load_of(config: schema.Config, spec: ModelSpec, held: Held, lengths: Histogram) -> DecodeLoad:
    """Return the load at the mean context, with as many rows as slots and pages allow."""
    kv = held.kv
    context = min(mean_context(lengths, prompt_tokens(config)), config.sampler.max_length)
    layer_bytes = bytes_per_device(held.state.kv) / (
        kv.pages * kv.page_tokens * kv.layout.arrays
    )  # of a token
    rows = max(1, min(kv.slots, int(kv.pages / pages_at(kv, context))))
    read, pair = rows * read_tokens(spec, kv.page_tokens, context), held.pair_kernel
    return DecodeLoad(
        rows=rows,
        context=context,
        read_bytes=read * len(kv.layout.by_layer) * layer_bytes,
        kernel=pair and replace(pair, flops=read * pair.flops),
    )


def pages_at(kv: MemoryPlan, context: float) -> float:
    """Return the pages of a sequence of this length, on average over its end position in a page;
    for layers with a window at most the pages that it keeps."""
    whole = context / kv.page_tokens + 1
    held = (g.pages_behind(kv.page_tokens) + 2 if g.window else whole for g in kv.layout.groups)
    return sum(min(whole, pages) for pages in held)


def read_tokens(spec: ModelSpec, page_tokens: int, context: float) -> float:
    """Return how many tokens' KV a row reads in a step, the mean over the layers with KV. Layers
    with a window read the pages that hold it."""
    windows = [kind.window for kind in spec.kinds if not kind.is_linear]
    held = {w: (-(-(w - 1) // page_tokens) + 1) * page_tokens if w else context for w in windows}
    return sum(min(context, held[w]) for w in windows) / len(windows)


def sampler_side(
    config: schema.Config,
    placement: Placement,
    programs: Sequence[Compiled],
    held: Held,
    load: DecodeLoad,
) -> Side:
    """Return a sampler's programs with their times, and its memory."""
    own = tuple(p for p in programs if p.side == "sampler")
    where = placement.sampler
    # Frozen models are assumed to be as large as the policy: they are not read here.
    count = resident_snapshots(config.players) + len(frozen_models(config.players))
    each = bytes_per_device((held.weights, held.state.kv, held.state.logits))
    on_pages = {
        "prefill": (0.0, held.prefill_kernel),
        "decode": load.of_block(config.sampler.block),
    }
    return Side(
        where=where,
        programs=own,
        timings={
            p.name: timing(p, where, *on_pages.get(p.name, (0.0, None))) for p in own if p.fits
        },
        memory=sampler_memory(
            own,
            weights=bytes_per_device(held.weights),
            sent=bytes_per_device(held.sent),
            pages=bytes_per_device(held.state.kv),
            state=bytes_per_device((held.state.logits, held.state.slot_params)),
            opponents=count * each,
            usable=where.chip.usable_bytes,
        ),
    )


def decode_of(
    config: schema.Config,
    spec: ModelSpec,
    sampler: Side,
    held: Held,
    load: DecodeLoad,
    lengths: Histogram,
) -> Decode:
    """Estimate the time of a decode step and a sampler's rate of tokens."""
    weights = bytes_per_device(held.weights) - embedding_bytes(spec, held.weights)
    block, bandwidth = sampler.timings["decode"], sampler.where.chip.hbm_bytes_per_s
    step_s = (block.estimate_s + BLOCK_S) / config.sampler.block
    prefill_token_s = sampler.timings["prefill"].estimate_s / held.chunk_tokens
    prompt_s = prefill_token_s * prompt_tokens(config) / config.algorithm.group_size
    return Decode(
        load=load,
        step_s=step_s,
        account=decode_account(
            block,
            config.sampler.block,
            weights_s=weights / bandwidth,
            cache_s=load.read_bytes / bandwidth,
            host_s=BLOCK_S,
        ),
        prefill_token_s=prefill_token_s,
        tokens_per_s=1 / (step_s / load.rows + prompt_s / lengths.mean),
    )


def embedding_bytes(spec: ModelSpec, sent: Any) -> float:
    """Return the bytes of the embedding if it is only looked up, so no step reads all of it."""
    return 0.0 if spec.tied else bytes_per_device(sent["embed"])


def prompt_tokens(config: schema.Config) -> int:
    """Return the assumed length of a prompt, tokens."""
    return max(1, round(PROMPT_SHARE * config.prompt_limit))


def learning_of(
    config: schema.Config, spec: ModelSpec, placement: Placement, side: Side, lengths: Histogram
) -> Learning:
    """Estimate the trainer's step: micro-batches, updates and a cast."""
    chip, devices = placement.trainer.chip, placement.slices.trainer.size
    sequences = config.algorithm.groups_per_step * config.algorithm.group_size
    tokens = sequences * (prompt_tokens(config) + lengths.mean)
    full = rows_of(config, placement) * config.row_length
    parts = config.algorithm.minibatches  # each is packed and padded separately
    micro_batches = parts * -(-tokens // (parts * full * PACKING))
    gradient = side.timings["gradient"]
    step_s = (
        micro_batches * gradient.estimate_s * config.algorithm.epochs
        + side.timings["update"].estimate_s * config.algorithm.epochs * config.algorithm.minibatches
        + side.timings["cast"].estimate_s
    )
    if passes := own_passes(config):
        step_s += passes * micro_batches * side.timings["logprobs"].estimate_s
    squares = full * attended_length(spec, config.longest_example)
    flops = learning_flops(spec, full, squares, lora_of(spec, config.model.lora))
    flops += flops_of_lengths(spec, full, squares) if runs_reference(config) else 0
    return Learning(
        tokens=tokens,
        micro_batches=micro_batches,
        step_s=step_s,
        account=gradient_account(gradient, flops / (devices * chip.peak_flops)),
        tokens_per_s=sequences * lengths.mean / step_s,
    )


def rows_of(config: schema.Config, placement: Placement) -> int:
    """Return the rows of a micro-batch, as the trainer rounds them."""
    shards = num_shards(placement.slices.trainer, TRAINER_RULES, "batch")
    return rows_per_micro_batch(config.trainer.micro_batch_tokens, config.row_length, shards)


def pipeline_of(
    config: schema.Config,
    placement: Placement,
    learning: Learning,
    decode: Decode,
    transfer_s: float,
    lengths: Histogram,
) -> Pipeline:
    """Return the pipeline for simulate()."""
    section, load = config.sampler, decode.load
    read_s = on_pages_s(load.read_bytes, load.kernel, placement.sampler)  # as in timing
    return Pipeline(
        samplers=Samplers(
            slots=load.rows,
            rows=(load.rows,),
            step_s=(max(decode.step_s - read_s, 1e-6),),
            count=placement.num_samplers,
            reserve=int(load.rows * section.reserve),
            block=section.block,
            context_token_s=read_s / (load.rows * load.context),
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


SHARED = ("parameters", "optimiser", "gradients", "reference", "frozen base")
"""Kinds of memory that are sharded over the trainer's chips."""


def best_splits(
    placement: Placement, memory: Memory, learning: Learning, decode: Decode
) -> tuple[ChipSplit, ...]:
    """Return splits of the same chips, fastest first.

    The trainer's slice is a power of two whose chips hold their share of its state; the rest are
    samplers of their present size. Each side's speed per chip is assumed to be constant. With two
    generations there is only the configured split.
    """
    now, own = placement.trainer.num_chips, placement.sampler.num_chips
    total = now + placement.num_samplers * own
    mixed = placement.trainer.chip.generation != placement.sampler.chip.generation
    state = sum(memory.kinds.get(kind, 0.0) for kind in SHARED)
    splits = []
    for chips in (2**n for n in range(total.bit_length())):
        samplers = (total - chips) // own
        needed = memory.total_bytes + state * (now / chips - 1)
        possible = not mixed and is_slice(placement.trainer.chip, chips)
        if samplers < 1 or (chips != now and not (possible and needed <= memory.usable_bytes)):
            continue
        of_trainer = learning.tokens_per_s / now * chips
        splits.append(
            ChipSplit(
                trainer_chips=chips,
                samplers=samplers,
                sampler_chips=samplers * own,
                answer_tokens_per_s=min(of_trainer, decode.tokens_per_s * samplers),
            )
        )
    return tuple(sorted(splits, key=lambda s: (-s.answer_tokens_per_s, s.trainer_chips)))


def at_split(now: Pipeline, trainer_chips: int, split: ChipSplit) -> SimulationResult:
    """Simulate a pipeline planned for `trainer_chips` with another split of the chips."""
    share = trainer_chips / split.trainer_chips
    tree = now.tree and replace(
        now.tree,
        trainer_bytes_per_s=now.tree.trainer_bytes_per_s / share,
        offer_s=now.tree.offer_s * share,
    )
    other = replace(
        now,
        samplers=replace(now.samplers, count=split.samplers),
        update_token_s=now.update_token_s * share,
        tree=tree,
    )
    return simulate(other, updates=40, warm_up=10)


def between_slices(
    config: schema.Config, trainer: Side, learning: Learning
) -> BetweenSlices | None:
    """Compute the traffic between the trainer's slices in a step: each micro-batch's gradient
    program and each update's, as compiled."""
    if trainer.where.count == 1:
        return None
    epochs = config.algorithm.epochs
    runs = {
        "gradient": learning.micro_batches * epochs,
        "update": epochs * config.algorithm.minibatches,
    }
    sent = sum(
        runs.get(program.name, 0.0) * collective.num_bytes
        for program in trainer.programs
        for collective in program.cost.collectives
        if collective.axes == BETWEEN_SLICES
    )
    return BetweenSlices(
        slices=trainer.where.count,
        bytes_of_device=sent,
        seconds=sent / trainer.where.chip.dcn_bytes_per_s,
    )


def _checkpoint_bytes(config: schema.Config, spec: ModelSpec) -> float:
    """Return the bytes of the trained weights and the optimizer's state. Prompts and groups in
    progress are small in comparison."""
    dtype = jnp.dtype(config.model.param_dtype)
    table = trained_table(spec, lora_of(spec, config.model.lora))
    return float(num_in(table) * (dtype.itemsize + optimizer_bytes(config.trainer, dtype)))


def _card_notes(card: Chip, *sides: Memory) -> tuple[str, ...]:
    """Return notes on a plan for NVIDIA cards: the origin of its numbers, and what to set for the
    run."""
    if not card.is_card:
        return ()
    share = card.usable_bytes / card.memory_bytes
    if max(m.total_bytes for m in sides) <= USUAL_GPU_SHARE * card.memory_bytes:
        needed = f"JAX takes {USUAL_GPU_SHARE:g} of a card, which is enough here"
    else:
        needed = (
            f"set {gpu_memory().variable}={share:g} for trainer and samplers: JAX takes "
            f"{USUAL_GPU_SHARE:g} of a card otherwise, which is not enough here"
        )
    return (
        f"memory: the compiler's own figures for this card, at most {share:g} of its "
        f"{card.memory_bytes / GIB:.1f} GiB; {needed}. Workspaces of cuBLAS and cuDNN are not "
        "counted.",
        "times: computed from FLOPs and bytes of the compiled programs "
        "(jaxrl_async/plan/pace.py); the compiler gives none, and no card was measured.",
    )


def _notes(config: schema.Config) -> tuple[str, ...]:
    """Return notes on the run's dtypes, and on the parts of it that the plan leaves out."""
    model = config.model
    types = (
        f"computes in {model.computes_in} (model.dtype), weights in {model.param_dtype} "
        "(model.param_dtype)."
    )
    left_out = {
        "the critic's update": needs_critic(config.algorithm.advantage),
        "the teacher's pass": config.teacher is not None
        and (
            config.teacher.source != "teachers"
            or not all(one.is_queried for one in config.named_teachers.values())
        ),
        "teachers on the sampler's chips": any(
            one.chips == "sampler" for one in config.named_teachers.values()
        ),
        "the reward model's pass": any(
            one.reward.model is not None for one in config.by_task.values()
        ),
    }
    missing = [name for name, there in left_out.items() if there]
    return (types, f"not planned: {', '.join(missing)}.") if missing else (types,)
