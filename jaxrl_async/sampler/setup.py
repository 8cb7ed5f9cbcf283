"""The setup of a sampler: from a policy and its settings to an engine with limits."""

import itertools
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxrl_async.config import schema
from jaxrl_async.config.model_section import AMPERE
from jaxrl_async.cpu.kernel_library import SAMPLING, kernels_are_there
from jaxrl_async.data.images import ImageStore
from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import (
    NO_DEVICE_LOCK,
    SAMPLER_RULES,
    DeviceGuard,
    put,
    shardings,
    spans_processes,
)
from jaxrl_async.model.adapter_stack import AdapterRoom, stack_of, stack_table
from jaxrl_async.model.attention import has_triton
from jaxrl_async.model.delta_layer import empty_states
from jaxrl_async.model.kernels import has_spare, page_head_dim
from jaxrl_async.model.kv_layout import KvLayout, layout_of
from jaxrl_async.model.lora import adapted_names, with_adapter
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.quantize import table_of
from jaxrl_async.model.spec import (
    ModelSpec,
    Params,
    Weight,
    check_positions,
    stacks_in,
    weight_table,
)
from jaxrl_async.ports.run import UNRECORDED, Clock, Schedule
from jaxrl_async.sampler.batch.adapter_slots import AdapterSlots
from jaxrl_async.sampler.batch.kv_budget import MemoryPlan, plan_memory
from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.sampling import Mix
from jaxrl_async.sampler.grammar import Grammars
from jaxrl_async.sampler.intake import NO_FOLLOWERS, Followers
from jaxrl_async.sampler.probe import Probe
from jaxrl_async.sampler.request_checks import INT32_END, RequestLimits
from jaxrl_async.types import IntArray

log = logging.getLogger(__name__)

TILE_TOKENS = 8
"""Tokens that fill a tile of a TPU's memory, in pages of latent attention: XLA would copy pages of
other sizes at each step (of 20 tokens: all of them, compiled for v5e and v6e)."""
LARGEST_PAGE = 1024
"""Maximum tokens of such a page: the kernel holds two pages in addition to its queries. With pages
of 4,096 tokens it does not compile for v5e, and in float32 not for v6e either."""

LONGEST = 2048
"""Maximum sequence length of a sampler without a section, tokens, if the model supports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """Less common settings of a Sampler."""

    dtype: DTypeLike = jnp.float32  # of its computation and its KV
    keep_routing: bool = False  # completions have each token's experts; mixture of experts only
    one_thread: bool = False  # on a CPU, use one core: for several samplers on one host
    adapters: AdapterRoom | None = None  # that requests may name; None: no adapters
    images: ImageStore | None = None  # that token ids of prompts name; None: no images
    tokenizer: Any = None  # a Tokenizer, for constraints; None: the policy's, if it has one
    probe: Probe | None = None  # to check new weights on; None: no check
    schedule: Schedule = UNRECORDED  # records or prescribes the intake between blocks
    followers: Followers = NO_FOLLOWERS  # the sampler's other processes
    device_lock: DeviceGuard = NO_DEVICE_LOCK  # held while its devices compute
    clock: Clock = time.perf_counter
    name: str = "sampler"  # of its thread, and in the schedule
    mixes: tuple[Mix, ...] = ()  # that requests will ask for: compiled ahead
    # that requests may ask for: compiled from the thread's start on, after `mixes`, each alone
    possible: tuple[Mix, ...] = ()

    @property
    def probe_tokens(self) -> IntArray | None:
        """Tokens on which new weights are checked; None: no check."""
        return None if self.probe is None else self.probe.token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSetup:
    """The setup that a sampler and its successors share. Only fresh_keys, which keep counting, and
    the adapters in their slots change."""

    spec: ModelSpec
    section: schema.SamplerSection
    plan: MemoryPlan
    engine: Engine
    limits: RequestLimits
    seed: int
    settings: SamplerSettings
    adapter_slots: AdapterSlots = field(default_factory=AdapterSlots)
    fresh_keys: Iterator[int] = field(default_factory=itertools.count)  # successors continue them


def set_up(
    policy: Policy | tuple[ModelSpec, Params],
    section: schema.SamplerSection | None,
    mesh: Mesh | None,
    seed: int,
    settings: SamplerSettings,
) -> tuple[SamplerSetup, Params]:
    """Return the setup of a Sampler and its parameters on the mesh; arguments as Sampler's. Raises
    ConfigError."""
    spec, params = policy if isinstance(policy, tuple) else (policy.spec, policy.whole)
    if isinstance(policy, Policy) and settings.tokenizer is None:
        settings = replace(settings, tokenizer=policy.tokenizer)
    setup = build_setup(spec, section, mesh, seed, settings)
    has_adapter = any(adapted_names(params[stack]) for stack in stacks_in(params))
    if settings.adapters is not None and has_adapter:
        raise ConfigError(
            "a sampler with places for adapters (SamplerSettings.adapters) takes a policy without "
            "an adapter: give the base, and load the adapter by name (Sampler.adapters.load)."
        )
    if mesh is not None:
        table = with_adapter(spec, table_of(weight_table(spec), params), params)
        params = _on_mesh(params, mesh, shardings(table, mesh, SAMPLER_RULES))
    return setup, params


def build_setup(
    spec: ModelSpec,
    section: schema.SamplerSection | None,
    mesh: Mesh | None,
    seed: int,
    settings: SamplerSettings,
) -> SamplerSetup:
    """Return the setup of a Sampler before its parameters are known; arguments as Sampler's. Raises
    ConfigError."""
    if not isinstance(seed, int | np.integer) or not -INT32_END <= seed < INT32_END:
        raise ConfigError(f"Sampler: seed must be a whole number of 32 bits, not {seed!r}.")
    room = settings.adapters
    section = section or roomy_section(spec, settings.dtype, room, mesh)
    check_positions(spec, section.max_length, "sampler.max_length", "the policy")
    keep_routing = settings.keep_routing
    plan = kv_plan(spec, section, settings.dtype, room, mesh, keep_routing=keep_routing)
    if room is not None:
        log.info(
            "%s: %.1f MiB of KV cache, and %.1f MiB of places for %d adapters up to rank %d",
            settings.name,
            plan.kv_bytes / 2**20,
            plan.places_bytes / 2**20,
            room.places,
            room.rank,
        )
    engine = build_engine(
        spec,
        plan,
        section,
        mesh,
        dtype=settings.dtype,
        one_thread=settings.one_thread,
        keep_routing=keep_routing,
        room=room,
    )
    return SamplerSetup(
        spec=spec,
        section=section,
        plan=plan,
        engine=engine,
        limits=limits_of(spec, section, seed, settings, Grammars(settings.tokenizer, spec.vocab)),
        seed=seed,
        settings=settings,
        adapter_slots=AdapterSlots(0 if room is None else room.places),
    )


def limits_of(
    spec: ModelSpec,
    section: schema.SamplerSection,
    seed: int,
    settings: SamplerSettings,
    grammars: Grammars | None = None,
) -> RequestLimits:
    """Return the limits that requests to samplers of these settings are checked against.

    grammars: which constraints are checked with; None: the sampler itself checks them.
    """
    experts = (spec.layers, spec.experts_per_token, spec.experts)
    return RequestLimits(
        max_length=section.max_length,
        max_new_tokens=section.max_new_tokens,
        vocab=spec.vocab,
        seed=seed,
        kv_shape=(spec.layers, *spec.cached_shape),
        kv_dtype=jnp.dtype(settings.dtype).name,
        experts=experts if settings.keep_routing else None,
        images=settings.images,
        grammars=grammars,
    )


def _on_mesh(params: Params, mesh: Mesh, shardings: object) -> Params:
    """Put parameters on the mesh. If several processes own its devices, arrays that they made
    together are moved between devices, and host arrays must be equal in all of them."""
    if not spans_processes(mesh):
        return jax.device_put(params, shardings)

    def put_one(x: jax.Array, sharding: NamedSharding) -> Any:
        is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
        return jax.device_put(x, sharding) if is_global else put(np.asarray(x), sharding)

    return jax.tree.map(put_one, params, shardings)


def roomy_section(
    spec: ModelSpec, dtype: DTypeLike, room: AdapterRoom | None = None, mesh: Mesh | None = None
) -> schema.SamplerSection:
    """Return the section of a sampler without one: sequences of the model's maximum length, at most
    LONGEST, in the KV memory of schema.SamplerSection's defaults plus the slots of adapters.
    Arguments as kv_plan's."""
    defaults = schema.SamplerSection()
    plan = kv_plan(spec, defaults, dtype, room, mesh)
    longest = min(spec.max_positions, LONGEST)
    pages = plan.layout.most_pages_of(longest, plan.page_tokens, plan.block)
    needed = pages * plan.page_bytes
    return defaults.model_copy(
        update={
            "max_length": longest,
            "max_new_tokens": longest - 1,
            "kv_memory_mib": (max(plan.kv_bytes, needed) + plan.places_bytes) / 2**20,
        }
    )


def kv_plan(
    spec: ModelSpec,
    section: schema.SamplerSection,
    dtype: DTypeLike,
    room: AdapterRoom | None = None,
    mesh: Mesh | None = None,
    *,
    keep_routing: bool = False,
) -> MemoryPlan:
    """Return the slots and pages that fit the memory of this section. Raises ConfigError.

    Args:
        spec: of the model.
        section: the sampler's.
        dtype: of its computation and its KV.
        room: for adapters, whose slots use a part of sampler.kv_memory_mib; None: no adapters.
        mesh: of the sampler. Slots are replicated on some of its devices, and pages of the TPU's
            kernel hold heads as wide as a register. None: one device.
        keep_routing: whether it reports each token's experts.
    """
    sides, heads, width = spec.cached_shape
    ragged, platform = uses_ragged(section, mesh, spec), device_of(mesh).platform
    if ragged and platform != "gpu":
        width = page_head_dim(width)
    token_bytes = sides * heads * width * jnp.dtype(dtype).itemsize
    mib = section.kv_memory_mib
    adapter_dtype = jnp.bfloat16 if section.matmul == "bfloat16" else dtype
    return plan_memory(
        token_bytes=token_bytes,
        layout=kept_layout(spec, keep_routing),
        max_length=section.max_length,
        page_tokens=section.page_tokens,
        block=section.block,
        slots=section.slots,
        reserve_share=section.reserve,
        budget_bytes=None if mib is None else int(mib * 2**20),
        state_bytes=_state_bytes(spec),
        places_bytes=0 if room is None else _adapter_bytes(spec, room, adapter_dtype, mesh),
        copies=not ragged and platform != "cpu",  # the CPU kernel copies none
    )


def kept_layout(spec: ModelSpec, keep_routing: bool) -> KvLayout:
    """Return the groups of layers that share pages, and the tokens that each keeps. The experts of
    a token (batch/expert_routing.py) are stored in pages of layers that keep all tokens."""
    layout = layout_of(spec.kinds)
    return layout.keeping_all if keep_routing and layout.groups[0].window else layout


def _state_bytes(spec: ModelSpec) -> int:
    """Return the bytes of one sequence's states in gated delta nets."""
    states = jax.eval_shape(lambda: empty_states(spec, 1))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(states))


def _adapter_bytes(spec: ModelSpec, room: AdapterRoom, dtype: DTypeLike, mesh: Mesh | None) -> int:
    """Return the bytes of a sampler's slots for adapters, on all devices together."""
    table = stack_table(spec, room)
    weights = jax.tree.leaves(table, is_leaf=lambda w: isinstance(w, Weight))
    if mesh is None:
        numbers = sum(math.prod(w.shape) for w in weights)
    else:
        divided = jax.tree.leaves(shardings(table, mesh, SAMPLER_RULES))
        parts = (s.shard_shape(w.shape) for s, w in zip(divided, weights, strict=True))
        numbers = mesh.size * sum(math.prod(shape) for shape in parts)
    return numbers * int(jnp.dtype(dtype).itemsize)


def build_engine(
    spec: ModelSpec,
    plan: MemoryPlan,
    section: schema.SamplerSection,
    mesh: Mesh | None,
    *,
    dtype: DTypeLike,
    one_thread: bool = False,
    keep_routing: bool = False,
    room: AdapterRoom | None = None,
) -> Engine:
    """Return the engine of a sampler on this mesh. Raises ConfigError for keep_routing with a dense
    model, for adapters of missing matrices, and for adapters on a mesh of several processes."""
    if keep_routing and not spec.experts:
        raise ConfigError(
            f"keep_routing needs a mixture of experts, but the {spec.family} model is dense: its "
            "tokens are not routed. Leave it out."
        )
    if room is not None:
        stack_of(spec, room)  # raises for targets that match nothing
        if mesh is not None and spans_processes(mesh):
            raise ConfigError(
                "SamplerSettings.adapters: a sampler whose mesh spans several processes serves no "
                "adapters by name. Take a mesh of one process, or merge the adapter."
            )
    ragged, mixed = uses_ragged(section, mesh, spec), section.matmul == "bfloat16"
    cpu_kernels = (
        section.cpu_kernels and takes_cpu_kernels(mesh, dtype) and kernels_are_there(SAMPLING)
    )
    plain = not spec.latent and not spec.delta
    eight_bits = section.matmul == "int8"
    engine_spec = EngineSpec(
        model=spec,
        slots=plan.slots,
        reserve=plan.reserve,
        max_length=section.max_length,
        pages=plan.pages,
        page_tokens=plan.page_tokens,
        block=section.block,
        mesh=mesh,
        dtype=dtype,
        ragged=ragged,
        cpu_products=cpu_kernels and spec.own is None,
        cpu_attention=cpu_kernels and not ragged and section.attention == "auto" and plain,
        one_thread=one_thread,
        mixed=mixed,
        eight_bits=eight_bits,
        keeps_routes=keep_routing,
        room=room,
        layout=kept_layout(spec, keep_routing),
    )
    if eight_bits and not (engine_spec.cpu_products and engine_spec.fused):
        raise ConfigError(
            "sampler.matmul=int8 multiplies by kernels for CPUs (sampler.cpu_kernels), which need "
            "one CPU device a sampler, model.dtype=float32, g++ or clang++, and layers without a "
            f"gate on attention or custom code; the model is {spec.family}. Set "
            "sampler.matmul=bfloat16 or full."
        )
    return Engine(engine_spec)


def device_of(mesh: Mesh | None) -> Any:
    """Return the first device of a sampler's mesh; for None, of all devices."""
    return jax.devices()[0] if mesh is None else mesh.devices.flat[0]


def takes_cpu_kernels(mesh: Mesh | None, dtype: DTypeLike) -> bool:
    """Return whether a sampler on this mesh could use our CPU kernels: on one CPU device, in
    float32."""
    device = device_of(mesh)
    alone = mesh is None or mesh.size == 1
    return bool(device.platform == "cpu" and alone and jnp.dtype(dtype) == jnp.float32)


def uses_ragged(section: schema.SamplerSection, mesh: Mesh | None, spec: ModelSpec) -> bool:
    """Return whether decoding reads the pages through a kernel, given sampler.attention. The kernel
    for GPUs since Ampere supports all models. On a TPU, sinks need heads with spare columns, and
    latent attention needs pages of whole tiles that its kernel can hold. Raises ConfigError."""
    device, attention = device_of(mesh), section.attention
    if device.platform == "gpu":
        if attention == "ragged" and not has_triton(device):
            raise ConfigError(
                f"sampler.attention=ragged needs an NVIDIA GPU of compute capability {AMPERE}.0 "
                f"or newer, and the sampler's is a {device.device_kind}. Set "
                "sampler.attention=gathered."
            )
        return attention != "gathered" and has_triton(device)
    on_tpu = bool(device.platform == "tpu")
    tokens = section.page_tokens
    supported = not spec.latent or (tokens % TILE_TOKENS == 0 and tokens <= LARGEST_PAGE)
    if on_tpu and not supported and attention != "gathered":
        raise ConfigError(
            f"sampler.page_tokens={tokens}: on a TPU pages of latent attention, which this "
            f"{spec.family} model has, fill tiles of {TILE_TOKENS} tokens, and the kernel holds at "
            f"most {LARGEST_PAGE}. Set a multiple of {TILE_TOKENS} up to {LARGEST_PAGE}, or "
            "sampler.attention=gathered."
        )
    if attention != "auto":
        return attention == "ragged"
    return on_tpu and (not spec.sinks or has_spare(spec.head_dim))
