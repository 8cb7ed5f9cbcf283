"""The programs of a run, lowered for described slices: from shapes alone, by the same code that a
run calls. No weights are loaded or created."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxrl_async.algorithms.columns import COLUMNS, DeviceBatch
from jaxrl_async.algorithms.objective import Coefficients, pass_columns
from jaxrl_async.algorithms.preflight import try_own_loss
from jaxrl_async.config import schema
from jaxrl_async.data.addresses import local_folder
from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import TRAINER_RULES, shapes_on, shardings
from jaxrl_async.model.decoder import TokenRows
from jaxrl_async.model.dropout import Noise
from jaxrl_async.model.frozen_base import base_shapes, base_table, check_groups, form_of
from jaxrl_async.model.kernels import page_head_dim
from jaxrl_async.model.lora import combined, lora_of, trained_table
from jaxrl_async.model.own_spec import own_spec
from jaxrl_async.model.spec import ModelSpec, Weight, weight_table
from jaxrl_async.plan.chip_placement import Placement
from jaxrl_async.plan.chips import Slice
from jaxrl_async.plan.cost import Kernel
from jaxrl_async.run.builders.initial_policy import decoder_of
from jaxrl_async.run.builders.learning import (
    check_routing,
    keeps_masks,
    learning,
    make_step,
    routing_of,
)
from jaxrl_async.run.builders.samplers import arrived, requested_mixes, sent_weights
from jaxrl_async.sampler.batch import shapes
from jaxrl_async.sampler.batch.decoding import context_pages_of, empty_decode_args
from jaxrl_async.sampler.batch.kv_budget import MemoryPlan
from jaxrl_async.sampler.batch.prefill import make_chunk, prefill_sizes
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.program_arguments import DecodeState, PrefillArgs
from jaxrl_async.sampler.device.sampling import union_of
from jaxrl_async.sampler.setup import build_engine, kv_plan
from jaxrl_async.trainer.logprob_pass import LogprobPass
from jaxrl_async.trainer.objectives.policy_objective import PolicyContext, PolicyObjective
from jaxrl_async.trainer.pair_credit import pair_columns
from jaxrl_async.trainer.update import Update
from jaxrl_async.trainer.update_programs import Frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """One lowered program, before compilation."""

    name: str  # gradient, update, logprobs, cast, reshard, prepare, prefill, decode
    side: str  # trainer or sampler
    program: Any  # jax.stages.Lowered
    slice: Slice
    mesh: Mapping[str, int]  # axes and their sizes
    open_turns: tuple[float, ...] = ()  # iterations of data-dependent loops
    options: Mapping[str, str] = field(default_factory=dict)  # for the compiler


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A sampler's arrays, as shapes with shardings, and its prefill's size."""

    weights: Any  # that it generates with: all, and an adapter's
    sent: Any  # sent with each version: all weights, or an adapter
    state: DecodeState
    kv: MemoryPlan
    chunk_tokens: int  # of the prefill program
    prefill_kernel: Kernel | None = None  # the kernels on the pages in a prefill
    pair_kernel: Kernel | None = None  # these kernels for one query and one token: pair_kernel()


def check(config: schema.Config) -> None:
    """Raise ConfigError if a run cannot be planned."""
    if config.run.job != "rl":
        raise ConfigError(
            f"a plan covers a trainer and its samplers, and run.job={config.run.job} has no "
            "samplers. Set run.job=rl."
        )
    if config.teacher is not None and config.teacher.form == "loss":
        raise ConfigError(
            "a plan does not support a teacher in the loss. Set teacher.form=advantage, whose pass "
            "is outside the gradient, or teacher=null."
        )
    try_own_loss(config.algorithm)


def spec_of(config: schema.Config) -> ModelSpec:
    """Return the model that the configuration names. Raises CheckpointError, ConfigError."""
    path = config.model.path
    if path is not None:
        folder = local_folder(path, "model.path", "config")
        return decoder_of(str(folder), config.model.decoder)
    vocab = config.model.architecture.vocab
    if vocab is None:
        raise ConfigError(
            "a plan loads no tokenizer, so it needs model.path or the size of the vocabulary: set "
            "model.architecture.vocab."
        )
    shape, own = config.model.architecture, config.model.decoder
    return own_spec(own, shape, vocab) if own else ModelSpec.from_architecture(shape, vocab)


# ---- both sides


def lowered(
    config: schema.Config, spec: ModelSpec, placement: Placement
) -> tuple[tuple[Lowered, ...], Held]:
    """Lower all programs of a run; return them and the sampler's arrays.

    Raises ConfigError, MeshError.
    """
    check_routing(config.algorithm, config.model, spec)
    pushed = _pushed(config, spec, placement)
    of_trainer = trainer_programs(config, spec, placement, pushed["cast"])
    of_sampler, held = sampler_programs(config, spec, placement, pushed)
    return (*of_trainer, *of_sampler), held


def _pushed(config: schema.Config, spec: ModelSpec, placement: Placement) -> dict[str, Any]:
    """Lower the programs that send the weights to one sampler. Raises MeshError."""
    slices, sent = placement.slices, sent_weights(config.weights, config.model, spec)
    push = sent.push(slices.trainer, slices.sampler)
    return push.lower(trained(config, spec, slices.trainer))


# ---- the trainer


def trainer_programs(
    config: schema.Config, spec: ModelSpec, placement: Placement, cast: object
) -> list[Lowered]:
    """Lower the trainer's programs: gradient, optimizer update, the log-prob pass if a step needs
    one, and the cast of sent weights.

    Raises ConfigError.
    """
    mesh = placement.slices.trainer
    step = make_step(config, spec, placement.slices, config.run.steps)
    params = trained(config, spec, mesh)
    scalar = partial(jax.ShapeDtypeStruct, (), sharding=NamedSharding(mesh, PartitionSpec()))
    losses = tuple(scalar(jnp.float32) for _ in config.algorithm.components)
    context = PolicyContext(
        scalar(jnp.int32), Coefficients(scalar(jnp.float32), scalar(jnp.float32), losses)
    )
    drops = config.model.lora is not None and config.model.lora.dropout > 0
    frozen = Frozen(
        reference=reference(config, spec, mesh) if runs_reference(config) else None,
        base=base_on_trainer(config, spec, mesh),
        noise=Noise(scalar(jnp.int32), scalar(jnp.int32)) if drops else None,
    )
    common: dict[str, Any] = {
        "slice": placement.trainer,
        "mesh": dict(mesh.shape),
        "side": "trainer",
    }
    options = dict(config.trainer.compiler_options)
    micro = micro_batch(config, spec, step)
    programs = step.programs.lower(params, micro, context, frozen)
    if own_passes(config):
        settings = learning(config, placement.slices)
        own = LogprobPass(spec, settings, temperature=config.sampler.temperature)
        tokens = TokenRows(*(getattr(micro, name) for name in TOKENS_OF_A_PASS))
        whole = params if frozen.base is None else combined(frozen.base, params)
        programs["logprobs"] = own.lower(whole, tokens)
    # The head is computed in a loop over chunks of tokens; log-probs of all tokens are needed.
    chunks = -(-step.micro_rows * config.row_length // config.trainer.logprob_chunk)
    return [
        *(
            Lowered(
                name=name,
                program=program,
                options=options,
                open_turns=() if name == "update" else (float(chunks),),
                **common,
            )
            for name, program in programs.items()
        ),
        Lowered(name="cast", program=cast, **common),
    ]


def holds_reference(config: schema.Config) -> bool:
    """Return whether the reference is on the trainer's devices."""
    return config.holds_reference and "reference" not in config.trainer.offload


def pass_columns_of(config: schema.Config) -> frozenset[str]:
    """Return the columns that passes compute before the updates, as in the Learner."""
    columns = pass_columns(
        config.algorithm,
        refers=config.refers,
        offloads="reference" in config.trainer.offload or not config.holds_reference,
    )
    return columns | pair_columns(config.pairs)


TOKENS_OF_A_PASS = ("token_ids", "positions", "segment_ids", "kept", "expert_ids")


def own_passes(config: schema.Config) -> int:
    """Return how often a step computes log-probs of the whole batch before its updates with weights
    of the policy's shapes: its own, and a reference's that are kept in host memory."""
    counted = {"proximal_logprobs", *(["reference_logprobs"] if config.holds_reference else [])}
    return len(pass_columns_of(config) & counted)


def runs_reference(config: schema.Config) -> bool:
    """Return whether the gradient program runs the reference."""
    return config.refers and "reference_logprobs" not in pass_columns_of(config)


def micro_batch(
    config: schema.Config, spec: ModelSpec, step: Update[PolicyObjective]
) -> DeviceBatch:
    """Return the shapes of a micro-batch, with the columns that the Learner gives it."""
    dtypes = {name: jnp.dtype(COLUMNS[name].dtype) for name in DeviceBatch._fields}
    others = {
        "supervised_weights": config.algorithm.supervised_coefficient > 0,
        "component_weights": bool(config.algorithm.components),
        "kept": keeps_masks(config),
        "expert_ids": config.algorithm.keep_routing,
    }
    there = pass_columns_of(config) | {name for name, is_there in others.items() if is_there}
    of_token: dict[str, tuple[int, ...]] = {
        "kept": (-(-spec.vocab // 8),),
        "component_weights": (len(config.algorithm.components),),
    }
    if config.algorithm.keep_routing:
        routing = routing_of(spec)
        of_token["expert_ids"] = (routing.layers, routing.chosen)
        dtypes["expert_ids"] = jnp.dtype(routing.dtype)
    names = [n for n in DeviceBatch._fields if not COLUMNS[n].optional or n in there]
    shape = (step.micro_rows, config.row_length)
    columns: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(
            (*shape, *of_token.get(name, ())),
            dtypes[name],
            sharding=step.programs.batch_sharding,
        )
        for name in names
    }
    return DeviceBatch(**columns)


# ---- the sampler


def sampler_programs(
    config: schema.Config, spec: ModelSpec, placement: Placement, pushed: Mapping[str, object]
) -> tuple[list[Lowered], Held]:
    """Lower the sampler's programs: the unpacking of weights at a swap, a prefill, a decode block.

    The block has all slots busy and contexts up to max_length. Raises ConfigError.
    """
    mesh = placement.slices.sampler
    dtype, keeps = jnp.dtype(config.model.computes_in), config.algorithm.keep_routing
    plan = kv_plan(spec, config.sampler, dtype, mesh=mesh, keep_routing=keeps)
    engine = build_engine(spec, plan, config.sampler, mesh, dtype=dtype, keep_routing=keeps)
    sent, once = arrived(config.weights, config.model, spec, mesh)
    params = sent if once is None else combined(once, sent)
    chunk = prefill_shapes(config, engine.spec)
    context_pages = context_pages_of(engine.spec, config.sampler.max_length)
    mixes = requested_mixes(config)
    programs = engine.lower(
        params,
        chunk,
        empty_decode_args(engine.spec, engine.spec.slots, context_pages),
        context_pages=context_pages,
        mix=union_of(mixes) if engine.spec.ragged else mixes[0],
    )
    if "reshard" in pushed:
        programs["reshard"] = pushed["reshard"]
    lowered = [
        Lowered(
            name=name,
            side="sampler",
            program=program,
            slice=placement.sampler,
            mesh=dict(mesh.shape),
            open_turns=(float(engine.spec.block),) if name == "decode" else (),
        )
        for name, program in programs.items()
    ]
    tokens = chunk.token_ids.size
    state = engine.state_shapes()
    held = Held(
        weights=params,
        sent=sent,
        state=state,
        kv=plan,
        chunk_tokens=tokens,
        prefill_kernel=prefill_kernel(config, engine.spec, tokens),
        pair_kernel=pair_kernel(engine.spec),
    )
    return lowered, held


def prefill_kernel(config: schema.Config, engine: EngineSpec, tokens: int) -> Kernel | None:
    """Return the per-device work of a prefill's kernels on the pages for `tokens` tokens of prompts
    of the maximum length: each query sees its own token and those before. None: prompts are not
    prefilled on the pages."""
    pair = pair_kernel(engine)
    if pair is None or not engine.prefills_in_pages:
        return None
    length = config.prompt_limit
    return replace(pair, flops=tokens * (length + 1) / 2 * pair.flops, length=length)


def pair_kernel(engine: EngineSpec) -> Kernel | None:
    """Return what the kernels on the pages compute on a device for one query and one token that it
    sees, in all layers: two products, in heads as wide as the pages have them (of a TPU's latent
    attention the second in values, a part of the keys). None: no kernel for TPU or GPU reads the
    pages."""
    if not engine.ragged:
        return None
    model, layers = engine.model, len(engine.kv_layout.by_layer)
    tensor = 1 if engine.mesh is None else engine.mesh.shape["tensor"]
    heads = model.heads // (1 if model.kv_heads % tensor else tensor)
    keys = values = model.cached_shape[2]
    if engine.pads_pages:
        keys = page_head_dim(keys)
        values = page_head_dim(model.latent.rank) if model.latent else keys
    flops = 2.0 * heads * (keys + values) * layers
    return Kernel(name="on_pages", times=layers, flops=flops, width=keys)


def prefill_shapes(config: schema.Config, engine: EngineSpec) -> PrefillArgs:
    """Return the arguments of one round of prefill, for prompts of the maximum length."""
    section = config.sampler
    if sizes := prefill_sizes(engine, section.prefill_chunk):
        return make_chunk([], sizes[-1], engine).args
    longest = min(config.prompt_limit, section.prefill_chunk)
    T = shapes.length_bucket(longest)
    B = shapes.rows_bucket(max(1, section.prefill_chunk // T))
    n = shapes.tokens_bucket(min(section.prefill_chunk, B * T), B * T)
    later = config.prompt_limit > section.prefill_chunk  # a prompt takes several rounds
    pages = shapes.steps_of_half(-(-config.prompt_limit // engine.page_tokens))
    ints = np.zeros(n, np.int32)
    rows = np.zeros(B, np.int32)
    return PrefillArgs(
        ints, ints, np.zeros((B, T), np.int32), ints, rows, rows + 1,
        np.zeros((B, len(engine.kv_layout.groups), pages if later else 0), np.int32),
        slots=rows if engine.model.delta else None,
    )  # fmt: skip


# ---- shapes


def trained(
    config: schema.Config, spec: ModelSpec, mesh: Mesh, dtype: DTypeLike | None = None
) -> Any:
    """Return the shapes of the trained weights on the trainer's mesh: all, or an adapter.

    dtype: None: model.param_dtype.
    """
    table = trained_table(spec, lora_of(spec, config.model.lora))
    return _on_trainer(table, mesh, dtype or config.model.param_dtype)


def base_on_trainer(config: schema.Config, spec: ModelSpec, mesh: Mesh) -> Any:
    """Return the shapes of an adapter's base weights on the trainer, possibly quantized; None:
    nothing is frozen."""
    if config.model.lora is None:
        return None
    form = form_of(config.model.lora)
    check_groups(spec, form, mesh, "mesh.trainer")
    shapes = base_shapes(spec, form, jnp.dtype(config.model.param_dtype))
    where = shardings(base_table(weight_table(spec), form), mesh, TRAINER_RULES)
    return shapes_on(shapes, where)


def reference(config: schema.Config, spec: ModelSpec, mesh: Mesh) -> Any:
    """Return the shapes of the reference: an older adapter, or whole weights."""
    if config.reference_settings.path is None:
        return trained(config, spec, mesh)
    return _on_trainer(weight_table(spec), mesh, config.model.param_dtype)


def _on_trainer(table: object, mesh: Mesh, dtype: DTypeLike) -> Any:
    return jax.tree.map(
        lambda w, s: jax.ShapeDtypeStruct(w.shape, jnp.dtype(dtype), sharding=s),
        table,
        shardings(table, mesh, TRAINER_RULES),
        is_leaf=lambda w: isinstance(w, Weight),
    )


def bytes_per_device(tree: object) -> float:
    """Return the bytes of arrays or their shapes on the device with the most."""
    return float(
        sum(
            np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(tree)
        )
    )
